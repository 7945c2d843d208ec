"""Offline generation: the engine, the tokenizer and the text side in this process, without HTTP."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkkv.config import EngineConfig
from forkkv.engine.client import InprocClient
from forkkv.engine.proc import THREAD_ENVIRONMENT
from forkkv.entrypoints.args import LoRAModuleArg, ServerArgs, resolve
from forkkv.frontend.chat import encode_chat
from forkkv.frontend.input import InputProcessor, Job, split_completions
from forkkv.frontend.output import Delta, Generation, Token
from forkkv.frontend.probe_text import probe_tokens
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.sharing import check_requested
from forkkv.types import CacheUsage, EngineOutput, EngineRequest, SamplingParams, TokenLogprob

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """One completion. `token_ids` include the stop token, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """All completions of one prompt. `usage` is the first completion's."""

    prompt_token_ids: list[int]
    outputs: list[CompletionResult]
    usage: CacheUsage | None


class LLM:
    """A model with its adapters, for scripts and notebooks.

    Keyword arguments are the server's settings under their names with underscores (`enable_forkkv=True`,
    `cpu_memory_gib=2`). `lora_modules`: name to folder. Raises `ConfigError`, `ModelLoadError`, `AdapterLoadError`.
    """

    def __init__(self, model: str = "smollm2", lora_modules: Mapping[str, str] | None = None, **settings: Any):
        modules = [LoRAModuleArg(name=name, path=str(path)) for name, path in (lora_modules or {}).items()]
        args = ServerArgs(model=model, lora_modules=modules, **settings)
        config: EngineConfig = resolve(args)
        for name, value in THREAD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.tokenizer = Tokenizer.load(args.model, args.load_format)
        self.client = InprocClient(config, probe_tokens=lambda: probe_tokens(self.tokenizer, args.probe_file))
        self.processor = InputProcessor(self.client.info, self.tokenizer, args.base_name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        lora_name: str | None = None,
        **options: Any,
    ) -> list[RequestResult]:
        """Complete one or several prompts (texts or token ids) together; results in their order.

        `options`: `n`, `stop` (strings), `fork_at`, `kv_sharing="none"`, `cache_salt`. Raises `RequestError`.
        """
        several = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
        items: Sequence[Any] = prompts if several else [prompts]
        tokens = [
            self.tokenizer.encode(item, add_special_tokens=True) if isinstance(item, str) else list(item)
            for item in items
        ]
        return self._run([(prompt, None) for prompt in tokens], sampling_params, lora_name, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        lora_name: str | None = None,
        **options: Any,
    ) -> list[RequestResult]:
        """Answer one or several chats together, through the model's chat template; `cache_control` marks count.
        Options as for `generate`."""
        chats = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [encode_chat(list(chat), self.tokenizer) for chat in chats]  # type: ignore[arg-type]
        return self._run(prompts, sampling_params, lora_name, options)

    def _run(
        self,
        prompts: list[tuple[list[int], int | None]],
        sampling: SamplingParams | None,
        lora_name: str | None,
        options: dict[str, Any],
    ) -> list[RequestResult]:
        sampling = sampling or SamplingParams()
        generations = [self._generation(prompt, mark, sampling, lora_name, **options) for prompt, mark in prompts]
        deltas: list[list[Delta]] = [[] for _ in generations]
        owner = {request.request_id: i for i, gen in enumerate(generations) for request in gen.job.requests}
        requests = [request for generation in generations for request in generation.job.requests]
        for outputs in self.client.stream(requests):
            grouped: dict[int, list[EngineOutput]] = {}
            for output in outputs:
                grouped.setdefault(owner[output.request_id], []).append(output)
            for index, part in grouped.items():
                new, ended = generations[index].feed(part)
                deltas[index] += new
                self.client.abort(ended)
        return [_result(generation, parts) for generation, parts in zip(generations, deltas, strict=True)]

    def _generation(
        self,
        prompt: list[int],
        mark: int | None,
        sampling: SamplingParams,
        lora_name: str | None,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        fork_at: int | None = None,
        kv_sharing: str | None = None,
        cache_salt: str = "",
    ) -> Generation:
        check_requested(kv_sharing)
        model = self.processor.choose(self.processor.base.name, lora_name)
        room = self.processor.room([prompt], None)
        job_id = f"llm-{uuid.uuid4().hex}"
        request = EngineRequest(
            request_id=job_id,
            prompt_token_ids=prompt,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            adapter_id=model.adapter_id,
            n=n,
            cache_salt=cache_salt,
            kv_sharing="none" if kv_sharing else None,
            fork_at=fork_at,
            fork_mark=mark,
            arrival_time=time.time(),
        )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        job = Job(
            job_id=job_id,
            created=int(time.time()),
            arrival=time.monotonic(),
            model=model,
            prompts=(prompt,),
            requests=tuple(split_completions(request)) if stops else (request,),
            n=n,
            stop=stops,
            skip_special_tokens=True,
            logprobs=sampling.logprobs,
            return_token_ids=True,
            stream=False,
            include_usage=True,
        )
        return Generation(job, self.tokenizer)


def _result(generation: Generation, deltas: Sequence[Delta]) -> RequestResult:
    outputs: list[CompletionResult] = []
    for completion in generation.completions:
        tokens: list[Token] = [token for delta in deltas if delta.index == completion.index for token in delta.tokens]
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        outputs.append(
            CompletionResult(
                index=completion.index,
                text=completion.text,
                token_ids=[token.token_id for token in tokens],
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                logprobs=None if generation.job.logprobs is None else logprobs,
            )
        )
    return RequestResult(list(generation.job.prompts[0]), outputs, generation.usage_of.get(0))
