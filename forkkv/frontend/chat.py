"""Chat messages to prompt tokens: checks, the template, and the `cache_control` mark."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from jinja2 import TemplateError

from forkkv.errors import RequestError, UnsupportedParameterError
from forkkv.frontend.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
PART_SEPARATOR = "\n"

Mark = tuple[int, int]
"""(message index, number of its parts that lie before the mark)."""


def encode_chat(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], int | None]:
    """Prompt tokens of a chat, and the token position of its last `cache_control` mark.

    That position is the longest common token prefix of the whole prompt and the template rendered up to and including
    the marked part. Raises `RequestError` (400) naming the message.
    """
    if tokenizer.chat_template is None:
        raise RequestError("The model has no chat template; use /v1/completions.", code="no_chat_template")
    parts = [_text_parts(message, index) for index, message in enumerate(messages)]
    marks = [mark for index, message in enumerate(messages) for mark in _marks(message, index)]
    whole = [_normalise(message, parts[index], tokenizer.chat_template) for index, message in enumerate(messages)]
    tokens = _encode(whole, tokenizer, add_generation_prompt=True)
    if not marks:
        return tokens, None
    index, count = marks[-1]
    marked = {**whole[index], "content": PART_SEPARATOR.join(parts[index][:count])}
    try:
        prefix = _encode([*whole[:index], marked], tokenizer, add_generation_prompt=False)
    except RequestError:
        # A template may insist on whole turns; then the mark cannot be placed and the default fork point holds.
        return tokens, None
    return tokens, common_prefix(tokens, prefix)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that two sequences share."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _encode(messages: list[dict[str, Any]], tokenizer: Tokenizer, *, add_generation_prompt: bool) -> list[int]:
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise RequestError(
            f"The chat template refused the messages: {error}", code="invalid_messages", param="messages"
        ) from None
    # The template writes the special tokens itself; adding them again would double the first one.
    return tokenizer.encode(text, add_special_tokens=False)


def _invalid(index: int, reason: str, field: str = "") -> RequestError:
    return RequestError(f"messages[{index}]{field} {reason}.", code="invalid_value", param=f"messages[{index}]{field}")


def _text_parts(message: dict[str, Any], index: int) -> list[str]:
    """Texts of one message in order. null is no text; unsupported part types are refused, never dropped."""
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(index, f"must be one of {', '.join(ROLES)}, got {role!r}", ".role")
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _invalid(index, "must be a string, null or a list of parts", ".content")
    return [_part_text(part, index, number) for number, part in enumerate(content)]


def _part_text(part: Any, index: int, number: int) -> str:
    field = f".content[{number}]"
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _invalid(index, "must be an object with a type", field)
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise UnsupportedParameterError(f"messages[{index}]{field}", f"of type {kind!r} is not supported")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _invalid(index, "must hold a string", f"{field}.text")
    return text


def _marks(message: dict[str, Any], index: int) -> list[Mark]:
    """Marks of one message: on parts, or on the message itself (then after its last part)."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    marks = [
        (index, number + 1)
        for number, part in enumerate(parts)
        if isinstance(part, dict) and part.get("cache_control") is not None
    ]
    if message.get("cache_control") is not None:
        marks.append((index, len(parts)))
    return marks


def _normalise(message: dict[str, Any], parts: list[str], template: str) -> dict[str, Any]:
    """The message as templates expect it: string content, known role, tool calls as objects."""
    role = message["role"]
    if role == "developer" and "developer" not in template:
        role = "system"
    normal: dict[str, Any] = {"role": role, "content": PART_SEPARATOR.join(parts)}
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            normal[field] = message[field]
    if calls := message.get("tool_calls"):
        _add_tool_calls(normal, calls, template)
    return normal


def _add_tool_calls(normal: dict[str, Any], calls: Any, template: str) -> None:
    """Earlier tool calls are part of the prompt: through the template if it knows them, else written out."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError("tool_calls must be a list of objects.", code="invalid_value", param="messages")
    parsed = [_parse_call(call) for call in calls]
    if "tool_calls" in template:
        normal["tool_calls"] = parsed
        return
    lines = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in parsed]
    normal["content"] = PART_SEPARATOR.join(filter(None, [normal["content"], *lines]))


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError("A tool call must hold a function object.", code="invalid_value", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates want an object; what is no JSON goes into the prompt as it came.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if arguments else {}
    return {**call, "function": {**function, "arguments": arguments}}
