"""`python -m forkkv_kernels.cpu`: compile the CPU kernels ahead of the first start and keep them on disk."""

from __future__ import annotations

import logging

from forkkv_kernels.cpu import attention, elementwise, int8, lora


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    attention.kernels()
    elementwise.kernels()
    int8.kernels()
    lora.kernel()


if __name__ == "__main__":
    main()
