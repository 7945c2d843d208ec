"""`python -m forkkv_kernels.cpu`: compile the CPU kernels ahead of the first start and keep them on disk."""

from __future__ import annotations

import logging

from forkkv_kernels.cpu.attention import SIGNATURE, attend
from forkkv_kernels.cpu.jit import compile_for


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    compile_for(attend, SIGNATURE, "attention")


if __name__ == "__main__":
    main()
