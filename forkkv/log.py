"""Logging set-up: one formatter, one logger tree, no handlers touched that are not ours."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(level: str = "INFO") -> None:
    """Send the `forkkv` logger tree to stderr at `level`. Idempotent."""
    root = logging.getLogger("forkkv")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(level.upper())


def get_logger(name: str) -> logging.Logger:
    """The logger for one module; `name` is its `__name__`."""
    return logging.getLogger(name)
