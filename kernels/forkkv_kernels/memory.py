"""Large pages for large tensors on CPUs."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty_in_huge_pages(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """`torch.empty`, in pages of 2 MiB where Linux gives them on request (transparent huge pages, "madvise" or more).

    Weights and caches are streamed through once per step: with pages of 4 KiB the processor's prefetcher stops at every
    page's end, and looking up the next page's address costs as much as reading the page.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return tensor
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - begin
    if length > 0:
        # Only advice: where it is refused, pages stay small.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(begin, length, _MADV_HUGEPAGE)
    return tensor
