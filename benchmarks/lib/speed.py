"""Section "speed": prefill against transformers' own forward, decode against transformers + PEFT.

Both sides run in this process, with the same fp32 tensors and the same threads, in turns; the last two lines with the
weights that the server chooses by default.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.common import Engines, Line, Workspace, median, step_until, time_to_first_token
from forkkv.engine.core import EngineCore
from tests.e2e.harness import Ask, engine_request

SECTION = "speed"
PREFILL_TOKENS = (2000, 4000)
PREFILL_RATIO = 0.9
REPEATS = 3
CONTEXT = 100
DECODE_TOKENS = 32
STREAMS = (1, 8)
DECODE_RATIO = 1.0
DEFAULT_RATIO = 2.0
DOCUMENT = 4000
FAN_OUT_RATIO = 5.0
TIMED_AGENTS = 1
"""Agents of which PEFT's time is taken in each round: it serves one after another, all with the same work."""


def run(work: Workspace) -> list[Line]:
    """Prefill of each length, decode of each number of streams."""
    adapters = {f"speed{i}": work.adapter(f"speed{i}", rank=8, seed=60 + i) for i in range(max(STREAMS))}
    engines = Engines(adapters)
    core = engines.core("none")
    model = work.transformers_model()
    lines = [_prefill(work, core, model, work.size(length)) for length in work.sizes(*PREFILL_TOKENS)]
    peft_model = _with_adapters(model, adapters)
    names = list(adapters)
    lines += [_decode(work, core, peft_model, names, streams, DECODE_RATIO) for streams in STREAMS]
    # What the server does when it is not told otherwise, against PEFT in fp32.
    default = Engines(adapters, quantization="auto")
    lines.append(_decode(work, default.core("none"), peft_model, names, 1, DEFAULT_RATIO))
    return [*lines, _fan_out(work, default.core("fork"), peft_model, names)]


def _prefill(work: Workspace, core: EngineCore, model: Any, length: int) -> Line:
    """Base model, empty cache, one token out on both sides."""
    prompt = work.document(length, 4)
    ids = torch.tensor([prompt])

    def theirs() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=ids, logits_to_keep=1)
        return time.perf_counter() - began

    def ours() -> float:
        core.flush_cache()
        return time_to_first_token(core, Ask("prefill", prompt, max_tokens=1))

    theirs(), ours()
    pairs = [(theirs(), ours()) for _ in range(REPEATS)]
    their_rate, our_rate = (length / median([pair[i] for pair in pairs]) for i in range(2))
    ratio = our_rate / their_rate
    return Line(
        SECTION,
        f"prefill of {length:,} tokens over transformers' forward",
        f"{ratio:.2f} ({our_rate:.0f} of {their_rate:.0f} tokens/s)",
        f">= {PREFILL_RATIO}",
        ratio >= PREFILL_RATIO,
        ratio,
        {"seconds": pairs},
    )


def _with_adapters(model: Any, adapters: dict[str, Path]) -> Any:
    """`model` with all adapters loaded by PEFT, the first one active."""
    from peft import PeftModel

    first, *others = adapters
    peft_model = PeftModel.from_pretrained(model, adapters[first], adapter_name=first)
    for name in others:
        peft_model.load_adapter(adapters[name], adapter_name=name)
    peft_model.set_adapter(first)
    return peft_model.eval().requires_grad_(False)


def _decode(
    work: Workspace, core: EngineCore, peft_model: Any, names: list[str], streams: int, required: float
) -> Line:
    """Plain adapters in private caches: the same function on both sides, no prompt shares anything.

    Ours runs a different adapter in every stream. PEFT runs the way that is faster in a short trial: one adapter for
    the whole batch, or (`adapter_names`) one for each row.
    """
    prompts = [work.document(work.size(CONTEXT), 10 + i) for i in range(streams)]
    tokens = 16 if work.quick else DECODE_TOKENS
    mixed = [names[:streams]] if streams > 1 else []
    ways: list[list[str] | None] = [None, *mixed]
    _ours(core, prompts, names, 4)
    for way in ways:
        _theirs(peft_model, prompts, way, 4)
    way = max(ways, key=lambda way: _theirs(peft_model, prompts, way, 4))
    pairs = [(_ours(core, prompts, names, tokens), _theirs(peft_model, prompts, way, tokens)) for _ in range(REPEATS)]
    ours, theirs = (median([pair[side] for pair in pairs]) for side in range(2))
    label = "one adapter" if way is None else "mixed"
    return Line(
        SECTION,
        f"decode of {streams} stream{'s' if streams > 1 else ''}{_weights(core)} over transformers + PEFT",
        f"{ours / theirs:.2f} ({ours:.1f} of {theirs:.1f} tokens/s, {label})",
        f"> {required:g}",
        ours / theirs > required,
        ours / theirs,
        {"tokens_per_s": pairs},
    )


def _fan_out(work: Workspace, core: EngineCore, peft_model: Any, names: list[str]) -> Line:
    """All agents ask about one document: ours together, sharing it; PEFT's one after another, as its cache demands.

    Throughput is generated tokens over time, from the requests' arrival and from the first tokens on; the smaller of
    both ratios counts.
    """
    length = work.size(DOCUMENT)
    document, tokens = work.document(length, 6), 16 if work.quick else DECODE_TOKENS
    prompts = [(*document, *work.question(index)) for index in range(len(names))]
    _ours_in_time(core, prompts, names, 4, fork_at=length)
    _one_after_another(peft_model, prompts[:1], names, 4)
    pairs = [
        (
            _ours_in_time(core, prompts, names, tokens, fork_at=length),
            _one_after_another(peft_model, prompts[:TIMED_AGENTS], names, tokens),
        )
        for _ in range(REPEATS)
    ]
    whole, decode = (median([ours[i] / theirs[i] for ours, theirs in pairs]) for i in range(2))
    rates = [[median([side[i] for side in sides]) for i in range(2)] for sides in zip(*pairs, strict=True)]
    ratio = min(whole, decode)
    return Line(
        SECTION,
        f"{len(names)} agents on one {length:,}-token document{_weights(core)} over PEFT's throughput",
        f"{decode:.1f} in decode, {whole:.1f} with prefill ({rates[0][0]:.1f} of {rates[1][0]:.1f} tokens/s)",
        f">= {FAN_OUT_RATIO:g}",
        ratio >= FAN_OUT_RATIO,
        ratio,
        {"ours": [ours for ours, _ in pairs], "theirs": [theirs for _, theirs in pairs]},
    )


def _weights(core: EngineCore) -> str:
    return "" if core.info.quantization == "none" else f" with {core.info.quantization} weights"


def _ours(core: EngineCore, prompts: list[tuple[int, ...]], names: list[str], tokens: int) -> float:
    """Tokens a second of all streams together in decode, see `_ours_in_time`."""
    return _ours_in_time(core, prompts, names, tokens)[1]


def _ours_in_time(
    core: EngineCore, prompts: list[tuple[int, ...]], names: list[str], tokens: int, **options: Any
) -> tuple[float, float]:
    """Tokens a second of all streams together: from their arrival on, and from the step in which the last stream got
    its first token; both until `tokens` steps after that one. Nobody ends in between."""
    core.flush_cache()
    limit = tokens + len(prompts) * 4 + 8
    arrived = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=False):
        ask = Ask(name, prompt, name, max_tokens=limit, top_logprobs=None, **options)
        core.add_request(engine_request(core, ask, name))
    waiting, before = set(names[: len(prompts)]), 0

    def all_started(outputs: Any) -> bool:
        nonlocal before
        before += sum(len(output.new_token_ids) for output in outputs)
        waiting.difference_update(output.request_id for output in outputs)
        return not waiting

    step_until(core, all_started)
    began, count = time.perf_counter(), 0
    for _ in range(tokens):
        outputs, _ = core.step()
        count += sum(len(output.new_token_ids) for output in outputs)
    ended = time.perf_counter()
    assert count == tokens * len(prompts), "a stream ended or waited while it was measured"
    core.abort(names)
    step_until(core, lambda outputs: False)
    return (before + count) / (ended - arrived), count / (ended - began)


def _one_after_another(
    model: Any, prompts: list[tuple[int, ...]], names: list[str], tokens: int
) -> tuple[float, float]:
    """The same of PEFT: every agent's adapter in turn, alone."""
    whole = decode = 0.0
    for name, prompt in zip(names, prompts, strict=False):
        model.set_adapter(name)
        began = time.perf_counter()
        times = _token_times(model, [prompt], None, tokens)
        whole, decode = whole + times[-1] - began, decode + times[-1] - times[0]
    return len(prompts) * (tokens + 1) / whole, len(prompts) * tokens / decode


def _theirs(model: Any, prompts: list[tuple[int, ...]], adapter_names: list[str] | None, tokens: int) -> float:
    """Tokens a second of `generate` between its first and its last token."""
    times = _token_times(model, prompts, adapter_names, tokens)
    return len(prompts) * (len(times) - 1) / (times[-1] - times[0])


def _token_times(
    model: Any, prompts: list[tuple[int, ...]], adapter_names: list[str] | None, tokens: int
) -> list[float]:
    """When each of the first `tokens` + 1 tokens of `generate` was there."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = torch.tensor(prompts)
    options: dict[str, Any] = {} if adapter_names is None else {"adapter_names": adapter_names}
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Clock()]),
            **options,
        )
    assert len(times) == tokens + 1, (len(times), tokens)
    return times
