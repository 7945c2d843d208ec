"""The Markdown table of `gpu_check.py`. Standard library only: the parent process writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.lib.text import markdown, mega, tokens


def markdown_report(report: dict[str, Any]) -> str:
    """Headline facts first, then one table per section; sections that failed say so."""
    environment, sections = report["environment"], report["sections"]
    versions = ", ".join(f"{key} {environment[key]}" for key in ("torch", "triton", "python") if key in environment)
    parts = [f"# {environment.get('card', 'unknown card')}, {report['date']}", f"{versions}; {report['seconds']} s"]
    if report["arguments"].get("tiny") == "True":
        parts.append("Tiny sizes, to try the program: the times mean nothing.")
    for name, section in sections.items():
        parts.append(f"## {name}: {'ok' if section['ok'] else 'FAILED'} ({section.get('seconds', 0)} s)")
        if "error" in section:
            parts.append(f"`{section['error']}`")
        elif name in _TABLES:
            parts.append(_TABLES[name](section))
    return "\n\n".join(parts)


def _rates(section: dict[str, Any]) -> str:
    return f"copies {section['bytes_per_s'] / 1e9:,.0f} GB/s, products {section['flop_per_s'] / 1e12:,.2f} TFLOP/s"


def _correctness(section: dict[str, Any]) -> str:
    checks = section["checks"]
    bad = [check for check in checks if not check["ok"]]
    numbers = [check["error"] / check["tolerance"] for check in checks if isinstance(check["error"], float)]
    text = f"{len(checks) - len(bad)} of {len(checks)} agree with the reference"
    if numbers:
        text += f"; the largest error is {max(numbers):.0%} of its tolerance"
    if not bad:
        return text
    return text + "\n\n" + markdown(("failed", "error"), [(check["name"], check["error"]) for check in bad])


def _engine(section: dict[str, Any]) -> str:
    sizes = section["sizes"]
    rows = []
    for mode in ("none", "fork"):
        found = section[mode]
        if "skipped" in found:
            rows.append((mode, found["skipped"], "", "", "", "", ""))
            continue
        ttft = found["ttft_s"]
        rate = found["decode_tokens_per_s"]
        rows.append(
            (
                mode,
                f"{ttft['first']:.3f}",
                f"{ttft['median']:.3f}",
                f"{ttft['last']:.3f}",
                f"{rate:,.0f}" if rate else "-",
                mega(found["pool_bytes"]),
                f"{found['base_tokens']:,}",
            )
        )
    head = ("kv_sharing", "TTFT first s", "median", "last", "decode tokens/s", "pools MB", "base tokens")
    title = f"{sizes['adapters']} adapters of rank 16 on {tokens(sizes['document'])} tokens, by {section['backend']}"
    return f"{title}\n\n{markdown(head, rows)}"


def _decode(section: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for cell in section["cells"]:
        name = f"{cell['agents']} x {tokens(cell['prefix'])}"
        if "skipped" in cell:
            rows.append((name, cell["skipped"], "", "", "", "", "", ""))
            continue
        ours, alone, private = (cell[key] for key in ("grouped", "ungrouped", "private SDPA"))
        rows.append(
            (
                name,
                *_time(ours),
                *_time(alone),
                *_time(private),
                f"{private['seconds'] / ours['seconds']:.2f}x",
            )
        )
    head = ("agents x prefix", "grouped us", "/floor", "ungrouped us", "/floor", "private SDPA us", "/floor", "speedup")
    title = f"One layer, rank {section['rank']} K and V, {section['private']} private tokens each"
    return f"{title}\n\n{markdown(head, rows)}"


def _time(entry: dict[str, Any]) -> tuple[str, str]:
    return f"{1e6 * entry['seconds']:,.1f}", f"{entry['seconds'] / entry['floor_s']:.2f}x"


def _prefill(section: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for row in section["rows"]:
        name = f"{row['case']}: {row['queries']} behind {tokens(row['context'])}"
        if "skipped" in row:
            rows.append((name, row["skipped"], "", "", "", ""))
            continue
        ours, sdpa = row["forkkv"], row["SDPA"]
        rows.append(
            (
                name,
                f"{1e6 * ours['seconds']:,.1f}",
                f"{ours['seconds'] / row['floor_s']:.2f}x",
                f"{ours['flop_per_s'] / 1e12:,.2f}",
                f"{1e6 * sdpa['seconds']:,.1f}",
                f"{sdpa['seconds'] / ours['seconds']:.2f}x",
            )
        )
    return markdown(("prefill, one layer", "us", "/floor", "TFLOP/s", "SDPA us", "speedup"), rows)


def _layer(section: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for row in section["rows"]:
        if "skipped" in row:
            rows.append((row["case"], row["skipped"], "", ""))
            continue
        us, floor = 1e6 * row["seconds"], 1e6 * row["floor_s"]
        rows.append((f"{row['case']}: {row['kernel']}", f"{us:,.1f}", f"{floor:,.1f}", f"{us / floor:.2f}x"))
    return markdown(("step: kernel, one layer", "us", "floor us", "/floor"), rows)


def _graphs(section: dict[str, Any]) -> str:
    rows = [
        (
            row["rows"],
            *(f"{1e3 * row[key]:.3f}" if row.get(key) else "-" for key in ("eager_s", "graph_s")),
            row["note"],
        )
        for row in section["steps"]
    ]
    return markdown(("decode rows", "eager ms", "graph ms", ""), rows)


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "rates": _rates,
    "correctness": _correctness,
    "engine": _engine,
    "decode": _decode,
    "prefill": _prefill,
    "layer": _layer,
    "graphs": _graphs,
}
