"""Task accuracy of the demo team over HTTP, at the server's default fork point, on documents no training run saw.

    python -m benchmarks.accuracy --documents 60 --out docs/accuracy.md

Starts one server with private caches and one that shares, asks both with temperature 0, and counts answers that are
right to the last character: ordinary LoRA in private caches, ordinary LoRA in shared ones, fork-LoRA in shared ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run as a file: `python benchmarks/accuracy.py`

from benchmarks.lib.server import running_server  # noqa: E402
from benchmarks.train import orderlog  # noqa: E402

MAX_TOKENS = 160
SHORTEST, LONGEST = 200, 1000
HELD_OUT_OFFSET = 1000
"""First held-out seed used here; the training script's own evaluation uses those before it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One column of the table: which adapters are asked, and the server's `--kv-sharing`."""

    title: str
    adapter_suffix: str
    sharing: str


CASES = (
    Case("plain LoRA, `none`", "-plain", "none"),
    Case("plain LoRA, `fork`", "-plain", "fork"),
    Case("fork-LoRA, `fork`", "", "fork"),
)


@dataclass(frozen=True, slots=True)
class Item:
    """One question on one held-out document."""

    task: orderlog.Task
    num_orders: int
    document: orderlog.Document
    question: orderlog.Question


@dataclass(frozen=True, slots=True)
class Outcome:
    item: Item
    answer: str
    prompt_tokens: int
    fork_point: int

    @property
    def right(self) -> bool:
        return self.answer == self.item.question.answer


def held_out_items(num_documents: int) -> list[Item]:
    """`num_documents` questions for each agent: lengths spread evenly over 200 to 1,000 tokens, 1 to 4 orders in turn.

    All agents are asked about the same documents, each in its own words.
    """
    items = []
    for i in range(num_documents):
        length = SHORTEST + (LONGEST - SHORTEST) * i // max(1, num_documents - 1)
        document = orderlog.make_document(orderlog.HELD_OUT_SEEDS[HELD_OUT_OFFSET + i], length)
        count = 1 + i % orderlog.MAX_NAMED_ORDERS
        items += [
            Item(task, count, document, orderlog.make_question(document, task, i, count)) for task in orderlog.TASKS
        ]
    return items


@contextlib.contextmanager
def team_server(sharing: str, adapters: Path, model: str, ready_seconds: float) -> Iterator[str]:
    """A server process with all six adapters: yields its URL, then ends it. `RuntimeError` if it never starts."""
    names = [f"{task}{suffix}" for suffix in ("", "-plain") for task in orderlog.TASKS]
    flags = ["--model", model, "--enable-forkkv", "--kv-sharing", sharing, "--host", "127.0.0.1"]
    flags += ["--lora-modules", *(f"{name}={adapters / name}" for name in names)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "log", *flags, ready_within=ready_seconds) as server,
    ):
        yield server.url


async def ask_all(url: str, items: list[Item], suffix: str, concurrency: int) -> list[Outcome]:
    """Answers to `items` of the adapters named task + `suffix`, `concurrency` requests at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(900.0, connect=30.0)) as client:

        async def ask(item: Item) -> Outcome:
            body = {
                "model": f"{item.task}{suffix}",
                "messages": orderlog.messages(item.document, item.question),
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            async with gate:
                response = await client.post("/v1/chat/completions", json=body)
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} for {body['model']}: {response.text[:500]}")
            return _outcome(item, response.json())

        return await asyncio.gather(*(ask(item) for item in items))


def _outcome(item: Item, reply: dict[str, Any]) -> Outcome:
    usage = reply["usage"]
    return Outcome(
        item,
        reply["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["forkkv"]["fork_point"],
    )


def share(outcomes: list[Outcome]) -> str:
    """Right answers as "0.93 ± 0.03": share and its binomial standard error."""
    n = len(outcomes)
    p = sum(outcome.right for outcome in outcomes) / n
    return f"{p:.2f} ± {math.sqrt(p * (1 - p) / n):.2f}"


def table(results: dict[str, list[Outcome]]) -> str:
    """Two Markdown tables: by agent, and by the number of orders that a question names."""
    titles = list(results)
    rows = {str(task): [[o for o in results[t] if o.item.task == task] for t in titles] for task in orderlog.TASKS}
    counts = range(1, orderlog.MAX_NAMED_ORDERS + 1)
    by_count = {str(c): [[o for o in results[t] if o.item.num_orders == c] for t in titles] for c in counts}
    return "\n".join(
        [
            *_markdown("agent", titles, {**rows, "all": [results[title] for title in titles]}),
            "",
            *_markdown("orders named", titles, by_count),
        ]
    )


def _markdown(first: str, titles: list[str], rows: dict[str, list[list[Outcome]]]) -> list[str]:
    lines = [f"| {first} | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, cells in rows.items():
        if all(cells):
            lines.append(f"| {name} | " + " | ".join(share(cell) for cell in cells) + " |")
    return lines


def report(results: dict[str, list[Outcome]], num_documents: int) -> str:
    """The page `docs/accuracy.md`."""
    forked = [o for title, outcomes in results.items() if "`fork`" in title for o in outcomes]
    shared = sum(o.fork_point for o in forked) / sum(o.prompt_tokens for o in forked)
    return f"""# Task accuracy under sharing

Whole answers that are right to the last character, ± standard error: three agents on synthetic order logs
(SmolLM2-135M, rank 8), {num_documents} held-out documents an agent of {SHORTEST} to {LONGEST:,} tokens, each question
naming one to four orders, temperature 0, over HTTP, at the server's default fork point. Under `fork` it lies at
{shared:.0%} of the prompt's tokens on average: that part is read from the shared cache.

{table(results)}

* plain LoRA, `none`: ordinary adapters, each with its own cache: what any other server computes.
* plain LoRA, `fork`: the same adapters read the base model's K and V with their residual: an approximation of what they
  were trained as.
* fork-LoRA, `fork`: adapters trained with just these K and V; the server computes the function they were trained as.

Made by `python -m benchmarks.accuracy --documents {num_documents} --out docs/accuracy.md`; the adapters are made by
`make train-demo`.
"""


def measure(args: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Outcomes by case title; one server per `--kv-sharing` mode."""
    items = held_out_items(args.documents)
    results: dict[str, list[Outcome]] = {}
    for sharing in dict.fromkeys(case.sharing for case in CASES):
        with team_server(sharing, args.adapters, args.model, args.ready_seconds) as url:
            for case in (case for case in CASES if case.sharing == sharing):
                begin = time.monotonic()
                results[case.title] = asyncio.run(ask_all(url, items, case.adapter_suffix, args.concurrency))
                seconds = time.monotonic() - begin
                print(f"{case.title}: {share(results[case.title])}  ({seconds:.0f} s)", flush=True)
    return results


def show_mistakes(results: dict[str, list[Outcome]], limit: int) -> None:
    """Print the first `limit` wrong answers of each case beside the right ones."""
    for title, outcomes in results.items():
        for outcome in [outcome for outcome in outcomes if not outcome.right][:limit]:
            print(f"--- {title}, {outcome.item.task}\nwanted: {outcome.item.question.answer}\ngot:    {outcome.answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60, help="held-out documents an agent, one question each")
    parser.add_argument("--adapters", type=Path, default=ROOT / "configs/demo/adapters", help="folder of the six")
    parser.add_argument("--model", default="smollm2", help="the server's --model")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--ready-seconds", type=float, default=180, help="time a server may take to start")
    parser.add_argument("--out", type=Path, help="write the page here, e.g. docs/accuracy.md")
    parser.add_argument("--show-mistakes", type=int, default=0, metavar="N", help="print N wrong answers of each case")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running server is ended too
    results = measure(args)
    show_mistakes(results, args.show_mistakes)
    page = report(results, args.documents)
    print(page)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page)


if __name__ == "__main__":
    main()
