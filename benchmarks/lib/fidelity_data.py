"""What is asked: teams of adapters, and prompts with their right answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train import orderlog
from forkkv.errors import RequestError
from forkkv.frontend.chat import encode_chat
from forkkv.frontend.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 150
HELD_OUT_OFFSET = 10_000
"""First held-out document used here; the training script and `accuracy.py` use some before it."""
DEMO_KINDS = ("plain", "alora", "shared-a", "fork")


@dataclass(frozen=True, slots=True)
class Team:
    """Agents on one base model by name; `label` names them in the table and is the recipe they were trained with."""

    label: str
    adapters: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt to one agent. `answer` has no end token; None: the reference's own greedy answer is taken."""

    document: str
    question: str
    """Unique together with the agent; several questions may be on one document."""
    agent: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    mark: int | None = None
    """Token position of the last `cache_control` mark."""


def demo_folder(task: str, kind: str) -> str:
    """Name of a demo adapter's folder: fork-LoRA bears the task's name, the others add their recipe."""
    return task if kind == "fork" else f"{task}-{kind}"


def demo_teams(folder: Path) -> list[Team]:
    """The teams in `folder` that are complete, in the order of `DEMO_KINDS`."""
    teams = [Team(kind, {task: folder / demo_folder(task, kind) for task in orderlog.TASKS}) for kind in DEMO_KINDS]
    return [
        team for team in teams if all((path / "adapter_model.safetensors").is_file() for path in team.adapters.values())
    ]


def demo_items(tokenizer: Tokenizer, num_documents: int, length: int) -> list[Item]:
    """`num_documents` held-out order logs of about `length` tokens; every agent is asked about each, in turn about one
    to four orders."""
    items = []
    for i in range(num_documents):
        document = orderlog.make_document(orderlog.HELD_OUT_SEEDS[HELD_OUT_OFFSET + i], length)
        for task in orderlog.TASKS:
            question = orderlog.make_question(document, task, i, 1 + i % orderlog.MAX_NAMED_ORDERS)
            prompt, mark = encode_chat(orderlog.messages(document, question), tokenizer)
            answer = tokenizer.encode(question.answer, add_special_tokens=False)
            items.append(Item(f"{i:04d}", f"{i:04d}", task, tuple(prompt), tuple(answer), mark))
    return items


def read_items(file: Path, tokenizer: Tokenizer, agents: Sequence[str]) -> list[Item]:
    """Items of a JSON Lines file, see `docs/fidelity.md`, those on one document together. Raises `ValueError` with the
    line that is not right."""
    items: list[Item] = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            items += _read_line(json.loads(line), number, tokenizer, agents)
        except (RequestError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    if not items:
        raise ValueError(f"{file} holds no prompts")
    order = {document: at for at, document in enumerate(dict.fromkeys(item.document for item in items))}
    return sorted(items, key=lambda item: order[item.document])


def _read_line(entry: dict[str, object], number: int, tokenizer: Tokenizer, agents: Sequence[str]) -> list[Item]:
    if unknown := sorted(set(entry) - {"document", "agent", "messages", "prompt", "answer"}):
        raise ValueError(f"unknown field {', '.join(unknown)}")
    messages, text, answer = entry.get("messages"), entry.get("prompt"), entry.get("answer")
    if isinstance(messages, list):
        prompt, mark = encode_chat(messages, tokenizer)
    elif isinstance(text, str):
        prompt, mark = tokenizer.encode(text, add_special_tokens=True), None
    else:
        raise ValueError("one of messages (a list) and prompt (a text) is needed")
    asked = [entry["agent"]] if "agent" in entry else agents
    if strangers := sorted(str(agent) for agent in asked if agent not in agents):
        raise ValueError(f"no agent {', '.join(strangers)}; there are {', '.join(agents)}")
    tokens = None if answer is None else tuple(tokenizer.encode(str(answer), add_special_tokens=False))
    if tokens is not None and len(tokens) > MAX_ANSWER_TOKENS:
        raise ValueError(f"the answer has {len(tokens)} tokens, at most {MAX_ANSWER_TOKENS} are scored")
    document = str(entry.get("document", number))
    return [Item(document, str(number), str(agent), tuple(prompt), tokens, mark) for agent in asked]
