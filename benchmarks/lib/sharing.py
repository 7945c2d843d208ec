"""Section "sharing": three agents on one document, together and one after another."""

from __future__ import annotations

from benchmarks.lib.common import AGENTS, Engines, Line, Workspace, median, time_to_first_token
from tests.e2e.harness import Ask, LayerTokens, run_all

SECTION = "sharing"
DOCUMENT_TOKENS = 4000
LATER_SHARE = 0.07


def run(work: Workspace) -> list[Line]:
    """Both lines of the section, on one engine."""
    length = work.size(DOCUMENT_TOKENS)
    document = work.document(length, 2)
    asks = [
        Ask(name, (*document, *work.question(index)), name, fork_at=length, max_tokens=8)
        for index, name in enumerate(AGENTS)
    ]
    core = Engines(work.team()).core("auto")
    counter = LayerTokens(core)
    run_all(core, asks)
    duplicates = core.stats().duplicate_blocks_total
    together = Line(
        SECTION,
        f"three agents together on {length:,} tokens: base tokens in layer 0",
        f"{counter.base:,}, {duplicates} duplicate blocks",
        f"{length:,}, 0",
        counter.base == length and duplicates == 0,
        counter.base,
        {"adapter_tokens": counter.adapter},
    )
    counter.close()
    shares: list[float] = []
    seconds: list[list[float]] = []
    for _ in range(3):
        core.flush_cache()
        seconds.append([time_to_first_token(core, ask) for ask in asks])
        shares.append(max(seconds[-1][1:]) / seconds[-1][0])
    first, second, third = (median([row[i] for row in seconds]) for i in range(3))
    share = median(shares)
    later = Line(
        SECTION,
        "one after another: TTFT of agents 2 and 3 over agent 1's",
        f"{share:.1%} ({first:.2f} s, {second:.3f} s, {third:.3f} s)",
        f"<= {LATER_SHARE:.0%}",
        share <= LATER_SHARE,
        share,
        {"seconds": seconds},
    )
    return [together, later]
