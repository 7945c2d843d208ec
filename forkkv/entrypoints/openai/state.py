"""What the routes share: settings, the engine's client, and what exists once the engine is ready."""

from __future__ import annotations

import time

from forkkv.engine.client import ProcClient
from forkkv.entrypoints.args import ServerArgs
from forkkv.errors import EngineDeadError
from forkkv.frontend.input import InputProcessor
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.metrics.prometheus import ServerMetrics

STALL_SECONDS = 300.0
"""Silence of an engine with open requests after which it no longer counts as alive."""


class ServerState:
    """One per application; built before the engine is ready and completed by `finish_loading`."""

    def __init__(self, args: ServerArgs, client: ProcClient):
        self.args = args
        self.client = client
        self.metrics = ServerMetrics()
        self.created = int(time.time())
        self._processor: InputProcessor | None = None
        client.on_stats = self.metrics.on_stats

    def finish_loading(self, tokenizer: Tokenizer) -> None:
        """Called once, when both the engine and the tokenizer are there."""
        info = self.client.info
        self.metrics.info = info
        self._processor = InputProcessor(info, tokenizer, self.args.base_name)

    @property
    def processor(self) -> InputProcessor:
        """Raises `EngineDeadError` (503) while loading and after the engine's death."""
        if self.client.error is not None:
            raise self.client.error
        if self._processor is None:
            raise EngineDeadError("The server is still loading.")
        return self._processor

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer

    @property
    def body_limit(self) -> int:
        """Bytes."""
        return int(self.args.max_body_mib * (1 << 20))

    @property
    def is_ready(self) -> bool:
        return self._processor is not None and self.is_alive

    @property
    def is_alive(self) -> bool:
        """False for a dead engine, and for one that has been silent for minutes although it has work."""
        if self.client.is_dead:
            return False
        silent = time.monotonic() - self.client.last_message
        return not (self.client.num_open and silent > STALL_SECONDS)
