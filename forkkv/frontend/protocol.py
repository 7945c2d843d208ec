"""Request bodies of the OpenAI routes.

Fields that this server implements are declared. Of all others, those that would change the meaning of the answer are
in `NEUTRAL_VALUES` with the values that mean "off": anything else is refused. What remains has no influence on the
answer; it is ignored and named in the `x-forkkv-ignored` response header.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forkkv.errors import RequestError, UnsupportedParameterError

INT64_MAX = (1 << 63) - 1
MAX_N = 128
MAX_LOGPROBS = 20

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # tools and structured output
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    # sampling
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "use_beam_search": (False,),
    "stop_regex": ([],),
    "include_stop_str_in_output": (False,),
    "thinking_token_budget": (),
    # prompts
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_special_tokens": (),
    # media and search
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    # other ways of naming or scaling an adapter: answering with the base model would be wrong
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "adapter_id": (),
    "adapter_source": (),
    "adapter_parameters": (),
    # scheduling
    "priority": (0,),
    "kv_transfer_params": ({},),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and completions have in common. None always means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    lora_name: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    fork_at: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    kv_sharing: str | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored_fields(self) -> list[str]:
        """Names of fields without influence. Raises `UnsupportedParameterError` for one that would have some."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in NEUTRAL_VALUES and value is not None and value not in NEUTRAL_VALUES[name]:
                raise UnsupportedParameterError(name)
        return [name for name in extra if name not in NEUTRAL_VALUES]


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`. `messages` are checked by `forkkv.frontend.chat`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


Body = TypeVar("Body", bound=GenerationRequest)


def parse_body(model: type[Body], data: bytes) -> Body:
    """Body of a request from raw JSON. Raises `RequestError` (400) naming the field; the parser refuses invalid UTF-8
    and unpaired surrogates, so no later text can fail to encode."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(error) from None


def validation_error(error: ValidationError) -> RequestError:
    """The first complaint of pydantic as an OpenAI error."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    names = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(str(name) for name in names[:1])
    where = f"Invalid value for {param!r}: " if param else "Invalid request body: "
    if first["type"] == "missing":
        return RequestError(f"The field {param!r} is required.", code="missing_required_parameter", param=param)
    return RequestError(where + first["msg"] + ".", code="invalid_value", param=param or None)
