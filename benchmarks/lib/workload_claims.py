"""What is required of the workloads, judged where the servers that a line compares were measured in this run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.lib.common import Line
from benchmarks.lib.workload_report import Report, Row
from benchmarks.workloads.summary import Summary
from benchmarks.workloads.trace import prefill_tokens

OURS = "forkkv"
_LRAGENT_REPORTED = {"5.0k": (2.27, 1.16), "9.1k": (2.79, 1.33), "17.3k": (3.86, 1.85)}
"""LRAgent's own ratios of time to first token and of throughput: Non-Shared over BaseLRShared, Llama-3.1-8B on an
A6000, against an eager baseline."""


def lines(report: Report) -> list[Line]:
    """Lines of the report's workload; none for quick sizes, and for the workloads about which nothing is required."""
    judged: dict[str, Callable[[Report], Iterator[Line]]] = {"fanout": _fanout, "lragent": _lragent, "plain": _plain}
    name = report.options.workload
    return list(judged[name](report)) if name in judged and not report.options.quick else []


def _summary(row: Row) -> Summary:
    assert row.summary is not None
    return row.summary


def _at_most(name: str, value: float, limit: float, told: str) -> Line:
    return Line("workload", name, f"{value:.2f}x ({told})", f"<= {limit:.2f}x", value <= limit, value)


def _at_least(name: str, value: float, limit: float, told: str) -> Line:
    return Line("workload", name, f"{value:.2f}x ({told})", f">= {limit:.2f}x", value >= limit, value)


def _later(row: Row) -> float:
    """Median TTFT of all requests but the first one sent."""
    return statistics.median(outcome.ttft_s for outcome in row.outcomes[1:])


def _best(report: Report, part: str, measure: Callable[[Row], float]) -> tuple[float, str] | None:
    """Smallest `measure` of all other servers, and its name."""
    rows = {row.peer: report.find(row.peer, part) for row in report.rows if row.peer not in (OURS, "forkkv-int8")}
    return min(((measure(row), peer) for peer, row in rows.items() if row is not None), default=None)


def _fanout(report: Report) -> Iterator[Line]:
    apart, together = (report.find(OURS, trace.part) for trace in report.traces)
    for row in (apart, together):
        if row is not None and (best := _best(report, row.part, lambda other: _summary(other).seconds)):
            seconds = _summary(row).seconds
            told = f"{seconds:.1f} s; {best[1]} {best[0]:.1f} s"
            yield _at_most(f"{row.part}: total time over the best peer's", seconds / best[0], 0.5, told)
    if apart is None or len(apart.outcomes) < 2:
        return
    later, first = _later(apart), apart.outcomes[0].ttft_s
    if report.tail_forward_s is not None:
        told = f"{later:.3f} s; {report.tail_forward_s:.3f} s"
        name = "one after another: TTFT of later agents over transformers' forward of such a tail"
        yield _at_most(name, later / report.tail_forward_s, 1.5, told)
    if best := _best(report, apart.part, _later):
        told = f"{later:.3f} s; {best[1]} {best[0]:.3f} s"
        yield _at_most("one after another: TTFT of later agents over the best peer's", later / best[0], 1 / 6, told)
    if together is not None:
        last = max(outcome.ttft_s for outcome in together.outcomes)
        predicted = first + later * (len(together.outcomes) - 1)
        told = f"{last:.2f} s; {predicted:.2f} s"
        yield _at_most(
            "together: the last agent's TTFT over one base prefill and N tails", last / predicted, 1.25, told
        )


def _lragent(report: Report) -> Iterator[Line]:
    (trace,) = report.traces
    shared, private = report.find(OURS, trace.part), report.find("forkkv-none", trace.part)
    if shared is None or private is None:
        return
    fork, none = _summary(shared), _summary(private)
    tokens = {mode: prefill_tokens(trace, shared=mode == "fork") for mode in ("fork", "none")}
    counted = tokens["none"] / tokens["fork"]
    reported = _LRAGENT_REPORTED.get(trace.part)
    ratio = none.ttft_sum_s / fork.ttft_sum_s
    told = f"{none.ttft_sum_s:.2f} s; {fork.ttft_sum_s:.2f} s; counted {counted:.2f}"
    told += f"; LRAgent reports {reported[0]}" if reported else ""
    yield _at_least("sum of TTFT, none over fork", ratio, 0.9 * counted, told)
    # Rates of the `none` run, with which the `fork` run's time is predicted from its tokens.
    prefill = tokens["none"] / none.ttft_sum_s
    decode = none.seconds - none.ttft_sum_s
    predicted = none.seconds / (tokens["fork"] / prefill + decode)
    ratio = none.seconds / fork.seconds
    told = f"{none.seconds:.2f} s; {fork.seconds:.2f} s; predicted {predicted:.2f}"
    told += f"; LRAgent reports {reported[1]}" if reported else ""
    yield _at_least("throughput of the whole trace, fork over none", ratio, 0.85 * predicted, told)


def _plain(report: Report) -> Iterator[Line]:
    part = report.traces[0].part
    for ours, theirs, limit in ((OURS, "llama-server", 0.8), ("forkkv-int8", "llama-server-q8", 0.6)):
        pair = report.find(ours, part), report.find(theirs, part)
        if pair[0] is None or pair[1] is None:
            continue
        for what, rate in (("prefill", _prefill_rate), ("decode", lambda row: 1 / _summary(row).itl_p50_s)):
            mine, other = rate(pair[0]), rate(pair[1])
            told = f"{mine:.0f} of {other:.0f} tokens/s"
            yield _at_least(f"{what}, {ours} over {theirs}", mine / other, limit, told)


def _prefill_rate(row: Row) -> float:
    """Prompt tokens a second of the first request, which finds nothing cached."""
    return row.outcomes[0].prompt_tokens / row.outcomes[0].ttft_s
