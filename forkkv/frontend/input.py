"""From a checked request body to engine requests: names, defaults, limits, tokens."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from forkkv.errors import ModelNotFoundError, RequestError, UnsupportedParameterError
from forkkv.frontend.chat import encode_chat
from forkkv.frontend.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.sharing import check_requested
from forkkv.types import BASE_ADAPTER, AdapterMeta, EngineInfo, EngineRequest, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat answers may use all the room that is left."""
GREEDY_BELOW = 1e-5
MAX_STOP_STRINGS = 16
MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What one request runs on. `adapter` None is the base model."""

    name: str
    adapter: AdapterMeta | None = None

    @property
    def adapter_id(self) -> int:
        return BASE_ADAPTER if self.adapter is None else self.adapter.adapter_id

    @property
    def fingerprint(self) -> str:
        """Changes with the adapter's weights, not with its name."""
        return "forkkv-base" if self.adapter is None else f"forkkv-{self.adapter.digest[:12]}"


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready to run. `prompts[i]` has the completions [i * n, (i + 1) * n); `requests` cover them in
    order: one per prompt, or one per completion where each must be able to end alone."""

    job_id: str
    created: int
    arrival: float
    model: ServedModel
    prompts: tuple[list[int], ...]
    requests: tuple[EngineRequest, ...]
    n: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    logprobs: int | None
    return_token_ids: bool
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...] = ()


class InputProcessor:
    """Knows the served names and the engine's limits; turns bodies into jobs. Stateless and thread-safe."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, served_name: str):
        self.info = info
        self.tokenizer = tokenizer
        self.base = ServedModel(served_name)
        self._models = {served_name: self.base}
        self._models.update((meta.name, ServedModel(meta.name, meta)) for meta in info.adapters)

    @property
    def models(self) -> list[ServedModel]:
        """The base model, then the adapters."""
        return list(self._models.values())

    def find(self, name: str, *, param: str = "model") -> ServedModel:
        """The model served under exactly this name. Raises `ModelNotFoundError`."""
        if (model := self._models.get(name)) is None:
            raise ModelNotFoundError(name, list(self._models), param=param)
        return model

    def choose(self, model: str | None, lora_name: str | None) -> ServedModel:
        """What `model` and `lora_name` together mean. An adapter may stand in either; in both only the same one.
        There is no fall-back to the base model. Raises `RequestError`."""
        if not model and not lora_name:
            raise RequestError("The field 'model' is required.", code="missing_required_parameter", param="model")
        named = self.find(model) if model else self.base
        if lora_name is None:
            return named
        adapter = self.find(lora_name, param="lora_name")
        if adapter.adapter is None:
            raise RequestError(f"{lora_name!r} is not an adapter.", code="invalid_value", param="lora_name")
        if named.adapter is not None and named is not adapter:
            raise RequestError(
                f"'model' names the adapter {model!r} and 'lora_name' names {lora_name!r}.",
                code="invalid_value",
                param="lora_name",
            )
        return adapter

    def chat(self, body: ChatCompletionRequest) -> Job:
        """Job of a chat request. Raises `RequestError`."""
        self._check_common(body)
        model = self.choose(body.model, body.lora_name)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': true.", code="invalid_value", param="top_logprobs")
        prompt, mark = encode_chat(body.messages, self.tokenizer)
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        room = self.room([prompt], max_tokens)
        sampling = self._sampling(body, min(max_tokens or room, room), logprobs)
        return self._job("chatcmpl", body, model, [prompt], sampling, mark)

    def completion(self, body: CompletionRequest) -> Job:
        """Job of a completion request with one or several prompts. Raises `RequestError`."""
        self._check_common(body)
        model = self.choose(body.model, body.lora_name)
        prompts = self._prompts(body.prompt)
        room = self.room(prompts, body.max_tokens)
        sampling = self._sampling(body, body.max_tokens or min(DEFAULT_COMPLETION_TOKENS, room), body.logprobs)
        return self._job("cmpl", body, model, prompts, sampling, None)

    def _check_common(self, body: GenerationRequest) -> None:
        body.ignored_fields()
        check_requested(body.kv_sharing)
        if body.stream_options is not None and not body.stream:
            raise RequestError("'stream_options' needs 'stream': true.", code="invalid_value", param="stream_options")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise UnsupportedParameterError("best_of", "must equal 'n' on this server")
        stops = body.stop if isinstance(body.stop, list) else []
        if body.stop == "" or "" in stops or len(stops) > MAX_STOP_STRINGS:
            raise RequestError(
                f"'stop' takes up to {MAX_STOP_STRINGS} strings, none of them empty.",
                code="invalid_value",
                param="stop",
            )
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")

    def _check_ids(self, token_ids: list[int], param: str) -> None:
        vocab = self.info.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab):
            raise RequestError(f"Token ids must be in [0, {vocab}).", code="invalid_value", param=param)

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Token lists of a string, a list of strings, token ids, or a list of lists of token ids."""
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        if isinstance(prompt, list) and prompt:
            if all(type(item) is int for item in prompt):
                return [self._token_ids(prompt)]
            if len(prompt) > MAX_PROMPTS:
                raise RequestError(f"At most {MAX_PROMPTS} prompts.", code="invalid_value", param="prompt")
            if all(isinstance(item, str) for item in prompt):
                return [self._encode(item) for item in prompt]
            if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
                return [self._token_ids(item) for item in prompt]
        raise RequestError(
            "'prompt' must be a string, a list of strings, token ids or a list of lists of token ids, and not empty.",
            code="invalid_value",
            param="prompt",
        )

    def _encode(self, text: str) -> list[int]:
        return self._token_ids(self.tokenizer.encode(text, add_special_tokens=True))

    def _token_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise RequestError("A prompt must hold at least one token.", code="invalid_value", param="prompt")
        self._check_ids(token_ids, "prompt")
        return token_ids

    def room(self, prompts: list[list[int]], max_tokens: int | None) -> int:
        """Tokens left for the answer to the longest prompt. Raises `context_length_exceeded`."""
        longest, limit = max(map(len, prompts)), self.info.max_model_len
        room = limit - longest
        if room < 1 or (max_tokens is not None and max_tokens > room):
            asked = f" and {max_tokens} tokens were asked for" if max_tokens is not None else ""
            raise RequestError(
                f"The context of this model is {limit} tokens; the prompt has {longest}{asked}.",
                code="context_length_exceeded",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return room

    def _sampling(self, body: GenerationRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
        temperature = 1.0 if body.temperature is None else body.temperature
        top_k = max(0, min(body.top_k or 0, self.info.vocab_size))
        top_p = 1.0 if body.top_p is None else body.top_p
        if top_p == 0.0:
            # An empty nucleus still holds the most likely token.
            top_p, top_k = 1.0, 1
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=top_p,
            top_k=top_k,
            seed=body.seed,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
        )

    def _job(
        self,
        prefix: str,
        body: GenerationRequest,
        model: ServedModel,
        prompts: list[list[int]],
        sampling: SamplingParams,
        mark: int | None,
    ) -> Job:
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        n, stop = body.n or 1, (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        requests: list[EngineRequest] = []
        for index, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=f"{job_id}-{index}",
                prompt_token_ids=prompt,
                sampling=sampling,
                adapter_id=model.adapter_id,
                n=n,
                cache_salt=body.cache_salt or "",
                kv_sharing="none" if body.kv_sharing == "none" else None,
                fork_at=body.fork_at,
                fork_mark=mark,
                arrival_time=time.time(),
            )
            requests += split_completions(request) if stop else [request]
        return Job(
            job_id=job_id,
            created=int(time.time()),
            arrival=time.monotonic(),
            model=model,
            prompts=tuple(prompts),
            requests=tuple(requests),
            n=n,
            stop=stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            logprobs=sampling.logprobs,
            return_token_ids=bool(body.return_token_ids),
            stream=bool(body.stream),
            include_usage=body.include_usage,
            ignored=tuple(body.ignored_fields()),
        )


def split_completions(request: EngineRequest) -> list[EngineRequest]:
    """`n` requests of one completion each. The engine aborts whole requests, but a stop string (which only the text
    side can see) ends one completion; each draws with the seed that it would have had as a child."""
    if request.n == 1:
        return [request]
    seed = request.sampling.seed
    if seed is None:
        seed = uuid.uuid4().int >> 66
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{child}",
            n=1,
            sampling=replace(request.sampling, seed=seed + child),
        )
        for child in range(request.n)
    ]
