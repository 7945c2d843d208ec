"""How Numba is used here: eager compilation by signature, kept on disk, on the OpenMP threads that PyTorch has.

Importing this module configures Numba, so it has to come before any other import of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

# PyTorch's libgomp is loaded first: a library of the same name asked for later is the same one, so that both have one
# pool of threads. Two pools on the same cores wait for each other.
import torch  # noqa: F401  isort: skip
import numba

logger = logging.getLogger(__name__)


def _cache_dir() -> Path:
    """Where compiled code lies: `FORKKV_CACHE_DIR` or the user's cache folder, one folder per version of the sources.

    Numba itself notices only changes of the file that holds the compiled function, not of what it calls.
    """
    root = (
        os.environ.get("FORKKV_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkkv"
    )
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(root) / "kernels" / digest.hexdigest()[:16]


def configure() -> None:
    """Set Numba's cache folder and threading layer, unless the user's environment names others."""
    if "NUMBA_CACHE_DIR" not in os.environ:
        numba.config.CACHE_DIR = str(_cache_dir())
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = "omp"


configure()


def compile_for(function: Any, signature: Any, what: str) -> None:
    """Compile `function` (an `njit(cache=True)` one) for a signature, or load it from disk; says so in the log, since
    compiling takes seconds."""
    if signature.args in function.overloads:
        return
    begin = time.perf_counter()
    function.compile(signature.args)
    hits = sum(function.stats.cache_hits.values())
    seconds = time.perf_counter() - begin
    logger.info("CPU kernel ready: %s (%s, %.1f s)", what, "from disk" if hits else "compiled", seconds)
