"""Kernel tests run Triton kernels in Triton's interpreter, on CPU tensors.

Triton reads `TRITON_INTERPRET` when a kernel is decorated, its own library functions included, so the variable has to
be set before the first import of triton anywhere in the process. `TRITON_INTERPRET=0 pytest -m gpu tests/kernels`
compiles the kernels instead and runs them on a card.
"""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpreted() -> bool:
    """Whether triton's own library functions were decorated for the interpreter."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return not isinstance(tl.zeros, JITFunction)


if "triton" in sys.modules and os.environ["TRITON_INTERPRET"] == "1" and not _interpreted():
    raise pytest.UsageError(
        "triton was imported before tests/kernels could choose its interpreter: start pytest with TRITON_INTERPRET=1"
    )
