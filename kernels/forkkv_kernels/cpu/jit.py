"""Where Numba keeps what it compiles. Importing this module configures Numba, so it precedes other imports of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba


def _cache_dir() -> Path:
    """`FORKKV_CACHE_DIR` or the user's cache folder, one folder per version of the sources: Numba itself notices only
    changes of the file that holds a compiled function, not of what that calls."""
    root = os.environ.get("FORKKV_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "forkkv"
    )
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(root) / "kernels" / digest.hexdigest()[:16]


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(_cache_dir())
