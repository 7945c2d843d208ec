"""A server that runs already, wherever it is: nothing is started, and its memory is not seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.peers.site import Running, Site
from benchmarks.workloads.client import Target, by_lora_name, by_model


@dataclass(frozen=True, slots=True)
class GivenServer:
    """`names`: what it calls its base model and then its adapters. Any model will do whose vocabulary has the ids of
    the prompts, which are the small model's (below 49,152)."""

    url: str
    names: tuple[str, ...]
    choose_by: Literal["model", "lora_name"]

    @property
    def description(self) -> str:
        return f"the server at {self.url}, adapters chosen by {self.choose_by}"

    def missing(self) -> str | None:
        return None

    @contextlib.contextmanager
    def start(self, site: Site, log: Path) -> Iterator[Running]:
        base, *adapters = self.names
        choose = (by_model if self.choose_by == "model" else by_lora_name)(base, adapters)
        target = Target(self.url, choose, site.encode, {"return_token_ids": True})
        yield Running(None, target, lambda: None)
