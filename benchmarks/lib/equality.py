"""Section "equality": log-probs of what the engine generates against the oracle, teacher-forcing the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.common import DEMO_ADAPTERS, Engines, Line, Mode, Workspace
from tests.e2e.harness import Ask, Completions, KnownAdapter, Reference, run_all

SECTION = "equality"
TOLERANCE = 1e-3
TOKENS = 64
INVOCATION_TEXT = "\nInvoke the auditor:"


class EqualitySetup:
    """Adapters of every kind, one request for each kind and fork point, and the oracle's model."""

    def __init__(self, work: Workspace) -> None:
        invocation = tuple(work.tokenizer.encode(INVOCATION_TEXT, add_special_tokens=False))
        self.folders: dict[str, Path] = {
            "plain": work.adapter("eq-plain", rank=8, seed=21),
            "fork": work.adapter("eq-fork", rank=16, seed=22, kind="fork"),
            "alora": work.adapter("eq-alora", rank=24, seed=23, kind="alora", invocation_tokens=invocation),
        }
        self.known = {
            "plain": KnownAdapter.read(self.folders["plain"], "plain"),
            "fork": KnownAdapter.read(self.folders["fork"], "fork"),
            "alora": KnownAdapter.read(self.folders["alora"], "alora", invocation),
        }
        trained: tuple[tuple[str, Any], ...] = (("extract", "fork"), ("extract-plain", "plain"))
        for name, kind in trained:
            if (DEMO_ADAPTERS / name / "adapter_model.safetensors").exists():
                self.folders[name] = DEMO_ADAPTERS / name
                self.known[name] = KnownAdapter.read(DEMO_ADAPTERS / name, kind)
        self.engines = Engines(self.folders)
        self.model = work.transformers_model("eager")
        self.rows: dict[tuple[Any, ...], torch.Tensor] = {}
        self.asks = self._asks(work, invocation)

    def _asks(self, work: Workspace, invocation: tuple[int, ...]) -> tuple[Ask, ...]:
        tokens = 16 if work.quick else TOKENS
        document = work.document(work.size(250), 1)
        half = len(document) // 2

        def ask(name: str, adapter: str | None = None, **options: Any) -> Ask:
            # All asks of one adapter have one prompt, so that only the fork point differs.
            index = 0 if adapter is None else 1 + list(self.folders).index(adapter)
            prompt = (*document, *work.question(index, 50))
            if adapter == "alora":
                prompt = (*document, *invocation, *work.question(index, 45))
            return Ask(name, prompt, adapter, max_tokens=tokens, **options)

        asks = [
            ask("base"),
            ask("plain", "plain"),
            ask("plain, none", "plain", kv_sharing="none"),
            ask("fork", "fork"),
            ask("fork at 0", "fork", fork_at=0),
            ask(f"fork at {half}", "fork", fork_at=half),
            ask("fork at the end", "fork", fork_at=1 << 20),
            ask("fork, none", "fork", kv_sharing="none"),
            ask("alora", "alora"),
        ]
        asks += [ask(name, name) for name in ("extract", "extract-plain") if name in self.folders]
        return tuple(asks)

    def reference(self, mode: Mode) -> Reference:
        return Reference(self.model, self.known, mode=mode, rows=self.rows)

    def line(self, name: str, mode: Mode, completions: Completions, note: str = "", failed: bool = False) -> Line:
        """Worst difference over all requests; `failed` adds another reason to fail, told by `note`."""
        reference = self.reference(mode)
        worst, request = reference.worst(self.asks, completions)
        measured = f"{worst:.1e} ({request.split('#')[0]}){note}"
        # What a failure is to be traced by: every request's answer and how far each of its tokens is off.
        details = {}
        for ask in self.asks if worst >= TOLERANCE else ():
            done = completions[ask.name, 0]
            differences = done.differences(reference.logprobs(ask, done.token_ids))
            details[ask.name] = {"tokens": done.token_ids, "differences": differences}
        return Line(SECTION, name, measured, f"< {TOLERANCE:g}", worst < TOLERANCE and not failed, worst, details)


def run(work: Workspace) -> list[Line]:
    """All settings of the section."""
    setup = EqualitySetup(work)
    lines: list[Line] = []
    core = setup.engines.core("fork", budget=4096)
    lines.append(setup.line("fork mode, mixed batch, unchunked", "fork", run_all(core, setup.asks)))
    lines.append(setup.line("the same again, cached", "fork", run_all(core, setup.asks)))
    core = setup.engines.core("fork", budget=80)
    lines.append(setup.line("chunked by 80 tokens", "fork", run_all(core, setup.asks)))
    core = setup.engines.core("fork")
    alone: Completions = {}
    for ask in setup.asks:
        alone |= run_all(core, [ask])
        core.flush_cache()
    lines.append(setup.line("each request alone", "fork", alone))
    lines.append(_preempted(setup))
    for mode in ("auto", "none"):
        completions = run_all(setup.engines.core(mode), setup.asks)
        lines.append(setup.line(f"{mode} mode, mixed batch", mode, completions))
        if mode == "none":
            lines.append(_against_peft(work, setup, completions))
    return lines


def _preempted(setup: EqualitySetup) -> Line:
    """A pool in which one sequence and a half fit, so that those which share a prefix outgrow it together."""
    longest = max(-(-(len(ask.prompt) + ask.max_tokens) // 16) for ask in setup.asks)
    core = setup.engines.core("fork", num_kv_blocks=longest * 3 // 2, num_residual_units=20 * longest)
    completions = run_all(core, setup.asks)
    count = core.stats().preemptions_total
    return setup.line("tiny pool, preempted", "fork", completions, f", {count} preemptions", failed=count == 0)


def _against_peft(work: Workspace, setup: EqualitySetup, completions: Completions) -> Line:
    """Private caches against transformers + PEFT itself, every plain and fork adapter."""
    from peft import PeftModel

    worst, where = 0.0, ""
    for name, adapter in setup.known.items():
        if adapter.kind == "alora":
            continue
        model = PeftModel.from_pretrained(work.transformers_model(), setup.folders[name]).eval()
        for ask in (ask for ask in setup.asks if ask.adapter == name):
            done = completions[ask.name, 0]
            tokens = torch.tensor([[*ask.prompt, *done.token_ids[:-1]]])
            with torch.inference_mode():
                logits = model(input_ids=tokens, logits_to_keep=len(done.token_ids)).logits[0]
            chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            reported = torch.tensor([entry.logprob for entry in done.logprobs])
            worst, where = max((worst, where), (float((chosen - reported).abs().max()), ask.name))
    measured = f"{worst:.1e} ({where})"
    return Line(SECTION, "none mode against PEFT itself", measured, f"< {TOLERANCE:g}", worst < TOLERANCE, worst)
