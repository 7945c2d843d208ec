"""Synthetic order logs, and questions to three agents who read the same log.

A document is a table of orders, one a line, with the columns `order,customer,item,price,ordered,shipped,status`.
Three tasks ask about one to four orders by name, so an answer stays under 150 tokens at any document length:

* `extract`: the orders as JSON, one object a line,
* `sql`: one SQL INSERT statement an order,
* `audit`: the record of each order with a verdict on its payment: `ok`, `unpaid` or `overdue`.

Everything is a function of a seed. Order names, customers and items are words that are one token each in the
SmolLM2 vocabulary, both behind a line break, a comma or a quote: a 135M model copies such words reliably, and the
length of a document in tokens is known without a tokenizer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal, get_args

Task = Literal["extract", "sql", "audit"]
TASKS: tuple[Task, ...] = get_args(Task)

MAX_NAMED_ORDERS = 4
TRAIN_SEEDS = range(1_000_000)
HELD_OUT_SEEDS = range(1_000_000, 2_000_000)
"""Seeds of documents that no training run draws."""

_TOKENS_PER_ORDER = 15
_TOKENS_OF_HEADER = 24
_TOKENS_OF_TEMPLATE = 24
"""System message and user header of the SmolLM2 chat template in front of the document."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ORDERS = _words("""
    iron river storm castle planet ocean forest wolf lion horse bear snake bird bull fish apple berry rose flower
    tree leaf grass pine bush thorn seed root branch wheat corn rice bean sugar salt amber gold metal carbon coal clay
    sand dust mud rock hill mount ridge shore coast lake stream wave rain snow cloud wind light fire ember ash sun moon
    star orbit space night summer winter north south east west polar arctic bridge tower church road path track rail
    train alpha beta gamma delta sigma omega theta lambda zero quest king hero angel spirit dream echo music song horn
    tune magic secret legend story purple blue green yellow orange brown black white gray wild quiet happy bright clear
    smooth sharp bold fox crow owl ant bee worm pig harvest field farm ranch vine wine bread milk vector matrix atom
    helium oxygen anchor arrow shield lance sphere cube oval square circle market museum library college school court
    forum camp earth mars fusion energy force gravity motion power signal pixel token""")
_CUSTOMERS = _words("""
    James John Robert Michael David William Richard Joseph Thomas Charles Daniel Matthew Mark Paul Andrew George
    Edward Jeff Jacob Stephen Scott Frank Samuel Alexander Jack Henry Adam Peter Christian Arthur Mary Elizabeth Sarah
    Emily Anna Virginia Maria Jane Ann Alice Jean Rose Marie Lily Jackson Johnson Wilson Taylor Anderson Miller Davis
    Clark Lewis Adams Williams Smith Jones Simon Victor Luke Max Ali Kim Lee Ken Ben Sam Tom Tim Jim Dan Ray Carl Fred
    Anne Chris Alex Josh Matt Greg Nick Phil Bob Bill""")
_ITEMS = _words("""
    table chair bed clock watch phone camera radio screen monitor printer mouse motor engine pipe tube wire chain
    lock key door window panel board plate cup glass jar can box bag bucket rack cart wheel gear bolt nail brush sheet
    paper book pen marker stamp card folder file clip map flag coat shirt hat cap boot sock belt ring boat car tank
    filter sensor fan oven pan pot button switch plug socket torch bench hose gate tile stone beam pole post sign hook
    spring disk disc drive router server lens bell ball net bat""")
_VERDICTS = {"paid": "ok", "open": "unpaid", "late": "overdue"}
_STATUSES = tuple(_VERDICTS)
_PLACES = ("North", "South", "East", "West")
_MONTHS = ("January", "February", "March", "April", "June", "July", "August", "September", "October", "November")
_COLUMNS = "order,customer,item,price,ordered,shipped,status"

_INSTRUCTIONS: dict[Task, str] = {
    "extract": "Extract these orders as JSON:",
    "sql": "Write SQL inserts for these orders:",
    "audit": "Audit these orders:",
}


@dataclass(frozen=True, slots=True)
class Order:
    """One line of the log. `price` is 10 to 99, the counts have one digit."""

    name: str
    customer: str
    item: str
    price: int
    ordered: int
    shipped: int
    status: str

    @property
    def line(self) -> str:
        fields = (self.name, self.customer, self.item, self.price, self.ordered, self.shipped, self.status)
        return ",".join(str(field) for field in fields)

    @property
    def verdict(self) -> str:
        """What an audit says of the order's payment."""
        return _VERDICTS[self.status]


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    orders: tuple[Order, ...]

    @property
    def text(self) -> str:
        return "\n".join((self.title, _COLUMNS, *(order.line for order in self.orders)))


@dataclass(frozen=True, slots=True)
class Question:
    """A question on one document and its only right answer."""

    task: Task
    text: str
    answer: str

    @property
    def instruction(self) -> str:
        """The text's first line, the same in all questions of a task: an aLoRA's invocation."""
        return _INSTRUCTIONS[self.task]


def make_document(seed: int, target_tokens: int) -> Document:
    """The order log of `seed`, about `target_tokens` SmolLM2 tokens long with the chat template in front of it.

    The length is within 5 % or 20 tokens of the target, for targets from 100 on. Order names are unique within a
    document; the prefix of a longer document of the same seed is not a shorter one.
    """
    rng = random.Random(f"orderlog-{seed}")
    title = f"Order log of warehouse {rng.choice(_PLACES)}, {rng.choice(_MONTHS)} {rng.randint(1, 28)}"
    count = max(MAX_NAMED_ORDERS, (target_tokens - _TOKENS_OF_HEADER - _TOKENS_OF_TEMPLATE) // _TOKENS_PER_ORDER)
    if count > len(_ORDERS):  # names with a digit take one token more
        rest = target_tokens - _TOKENS_OF_HEADER - _TOKENS_OF_TEMPLATE - len(_ORDERS) * _TOKENS_PER_ORDER
        count = len(_ORDERS) + rest // (_TOKENS_PER_ORDER + 1)
    names = _order_names(rng, count)
    customers = _shuffled_cycle(rng, _CUSTOMERS, count)
    items = _shuffled_cycle(rng, _ITEMS, count)
    orders = tuple(_make_order(rng, *texts) for texts in zip(names, customers, items, strict=True))
    return Document(title, orders)


def make_question(document: Document, task: Task, seed: int, num_orders: int | None = None) -> Question:
    """A question to the `task` agent that names `num_orders` orders (1 to 4; None: drawn) of `document`."""
    rng = random.Random(f"question-{task}-{seed}")
    count = num_orders if num_orders is not None else rng.randint(1, MAX_NAMED_ORDERS)
    if not 1 <= count <= MAX_NAMED_ORDERS:
        raise ValueError(f"a question names 1 to {MAX_NAMED_ORDERS} orders, got {count}")
    orders = rng.sample(document.orders, count)
    text = f"{_INSTRUCTIONS[task]}\n{','.join(order.name for order in orders)}"
    return Question(task, text, _ANSWERS[task](orders))


def messages(document: Document | str, question: Question | str) -> list[dict[str, str]]:
    """The chat of one request: one user message, the shared document first, then the agent's own question.

    This order is what lets agents share: everything up to the question is the same for all of them.
    """
    text = document if isinstance(document, str) else document.text
    asked = question if isinstance(question, str) else question.text
    return [{"role": "user", "content": f"{text}\n\n{asked}"}]


def _order_names(rng: random.Random, count: int) -> list[str]:
    names = list(_ORDERS)
    if count > len(names):
        pairs = [f"{name}{digit}" for name in _ORDERS for digit in range(10)]
        if count > len(names) + len(pairs):
            raise ValueError(f"at most {len(names) + len(pairs)} orders in a document, asked for {count}")
        names += rng.sample(pairs, count - len(names))
        rng.shuffle(names)
        return names
    return rng.sample(names, count)


def _shuffled_cycle(rng: random.Random, words: tuple[str, ...], count: int) -> list[str]:
    """`count` words, none a second time before all were used."""
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += rng.sample(words, len(words))
    return chosen[:count]


def _make_order(rng: random.Random, name: str, customer: str, item: str) -> Order:
    ordered = rng.randint(1, 9)
    shipped = ordered if rng.random() < 0.6 else rng.randint(0, ordered - 1)
    return Order(name, customer, item, rng.randint(10, 99), ordered, shipped, rng.choice(_STATUSES))


def _extract(orders: list[Order]) -> str:
    rows = [
        {"order": o.name, "customer": o.customer, "item": o.item, "price": o.price, "ordered": o.ordered}
        for o in orders
    ]
    return "\n".join(json.dumps(row, separators=(",", ":")) for row in rows)


def _sql(orders: list[Order]) -> str:
    return "\n".join(
        f"INSERT INTO orders VALUES ('{o.name}','{o.customer}','{o.item}',{o.price},{o.ordered});" for o in orders
    )


def _audit(orders: list[Order]) -> str:
    return "\n".join(f"{order.line}: {order.verdict}" for order in orders)


_ANSWERS = {"extract": _extract, "sql": _sql, "audit": _audit}
