"""CPU attention for PyTorch tensors: the buffers and the parameter block of one model around `attention.kernels`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv_kernels.cpu import parameters as P
from forkkv_kernels.cpu.attention import kernels
from forkkv_kernels.cpu.plan import CHUNK, KNOWN, TILE, Rows, WorkPlan, make_plan
from forkkv_kernels.cpu.team import LiveBlock

_OF_A_PLAN = (
    slice(P.NUM_BLOCKS, P.V_WIDTH + 1),
    slice(P.V_RANK, P.NUM_TOKENS + 1),
    slice(P.ROPE, P.NEXT_TOKEN + 1),
)
"""Where the parameter block holds what changes from step to step and not from layer to layer."""
_LINE = 64
"""Floats to which the threads' buffers are rounded up, so that no two threads write to one cache line."""


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads, query heads per KV head, head_dim."""

    num_kv: int
    per_kv: int
    dim: int


class LayerTensors:
    """One layer as `residual_attention` takes it, float32 and contiguous: k, v [num_blocks, block_size, Hkv, D],
    residual [num_units, block_size, 16], rms tensors with QK-norm; b_k in `pack_b_k`'s layout, b_v [slots, R, Hkv * D],
    None where no row reads residuals. Addresses are taken now: the tensors may be written to, not moved."""

    __slots__ = ("addresses", "b_rank", "block_size", "tensors")

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        residual: Tensor,
        k_rms: Tensor | None = None,
        residual_rms: Tensor | None = None,
        b_k: Tensor | None = None,
        b_v: Tensor | None = None,
    ) -> None:
        self.tensors = (k, v, residual, k_rms, residual_rms, b_k, b_v)
        # In the order of the block from K_CACHE on. Between two calls little of Python is still in the processor's
        # caches, so every line that runs once a layer costs.
        self.addresses = array("q", [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors])
        self.block_size = k.shape[1]
        self.b_rank = 0 if b_v is None else b_v.shape[1]


@dataclass(frozen=True, slots=True)
class StepWork:
    """A plan and the tables it refers to, which live as long as it does."""

    plan: WorkPlan
    tables: tuple[np.ndarray, ...]


def unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why heads of this size and dtype cannot be computed here, or None."""
    if dtype != torch.float32:
        return f"reads float32 caches, not {dtype}"
    if head_dim % 16:
        return f"head_dim {head_dim} is not a multiple of 16"
    return None


def pack_b_k(b_k: Tensor, num_kv_heads: int) -> Tensor:
    """B_k [slots, R, Hkv * D] -> [slots, Hkv, D / 8, R, 8], a copy: the weights that one residual column has for 4
    dimensions and their rotation partners lie together."""
    slots, rank, width = b_k.shape
    half = width // num_kv_heads // 2
    halves = b_k.view(slots, rank, num_kv_heads, 2, half // 4, 4)
    return halves.permute(0, 2, 4, 1, 3, 5).reshape(slots, num_kv_heads, half // 4, rank, 8)


def _in_tiles(table: Tensor) -> Tensor:
    """[positions, D] -> [positions / TILE, D, TILE]: what one tile of keys is turned by lies together."""
    positions, width = table.shape
    whole = torch.nn.functional.pad(table, (0, 0, 0, -positions % TILE))
    return whole.view(-1, TILE, width).transpose(1, 2).contiguous()


class CpuAttention:
    """Attention of one model. Its buffers are reused by every call, so one thread at a time may use it."""

    def __init__(self, heads: Heads, cos: Tensor, sin: Tensor, threads: int | None = None) -> None:
        """cos, sin [positions, D / 2]: the model's rotation table. `threads`: PyTorch's by default. Compiles the kernel
        or loads it from disk."""
        self.heads = heads
        self.threads = threads or torch.get_num_threads()
        self._rope = _in_tiles(torch.cat((cos, sin), dim=1).float())
        self._block = array("q", bytes(8 * P.COUNT))
        self._buffers: tuple[np.ndarray, ...] = ()
        self._fits = (0, 0, 0, 0)
        self._scale = array("f", [1.0])
        self._set(THREADS=self.threads, KV_HEADS=heads.num_kv, PER_KV=heads.per_kv, DIM=heads.dim)
        self._set(ROPE=self._rope)
        self._set(SCALE=self._scale.buffer_info()[0])
        self._attend, self._finish = kernels()

    def plan(self, rows: Rows, groups: Sequence[tuple[int, Sequence[int]]], kv_table: np.ndarray) -> StepWork:
        """Plan one step; `groups` as in `make_plan`, `kv_table` [B, NB] int32."""
        plan = make_plan(rows, groups, self.heads.per_kv, self.threads)
        tables = [np.ascontiguousarray(t, dtype=np.int32) for t in (kv_table, rows.k_units, rows.v_units)]
        return StepWork(plan, tuple(tables))

    def begin(self, work: StepWork) -> None:
        """Make `work` the plan of the following calls of `run`. Grows the buffers if needed."""
        kv_table, k_units, v_units = work.tables
        blocks = kv_table.shape[1]
        self._set(NUM_BLOCKS=blocks, K_WIDTH=k_units.shape[1] // blocks, V_WIDTH=v_units.shape[1] // blocks)
        self._set(KV_TABLE=kv_table, K_UNITS=k_units, V_UNITS=v_units, V_RANK=work.plan.max_v_rank)
        tables = work.plan.tables
        self._set(ITEMS=tables.items, RUNS=tables.runs, ENTRIES=tables.entries, TOKENS=tables.tokens)
        self._set(PART_BEGIN=tables.part_begin, PARTS=tables.parts)
        self._set(NUM_ITEMS=len(tables.items), NUM_TOKENS=len(tables.tokens))
        self._set(NEXT_THREAD=0, NEXT_ITEM=0, NEXT_TOKEN=0)
        self._reserve(work.plan)

    def own_block(self) -> LiveBlock:
        """A block for the calls of one layer in a `Program`; `refresh` makes it follow the plan."""
        return LiveBlock("q", self._block)

    def refresh(self, blocks: Iterable[LiveBlock]) -> None:
        """Put the plan of the latest `begin` into blocks. Mutates them."""
        for block in blocks:
            for part in _OF_A_PLAN:
                block[part] = self._block[part]

    def run(
        self,
        q: Tensor,
        scale: float,
        layer: LayerTensors,
        out: Tensor,
        lse: Tensor | None = None,
        own: LiveBlock | None = None,
    ) -> None:
        """Write attention of the planned query tokens to out (and lse [T, H]) for q; q, out [T, H, D] float32, out
        contiguous, q within a token. `own`: a block of `own_block`, where the calls will be made again."""
        block = self._block if own is None else own
        block[P.K_CACHE : P.B_V + 1] = layer.addresses
        block[P.BLOCK_SIZE], block[P.B_RANK] = layer.block_size, layer.b_rank
        block[P.Q], block[P.Q_STRIDE], block[P.OUT] = q.data_ptr(), q.stride(0), out.data_ptr()
        block[P.LSE] = 0 if lse is None else lse.data_ptr()
        self._scale[0] = scale
        block[P.NEXT_THREAD] = block[P.NEXT_ITEM] = block[P.NEXT_TOKEN] = 0
        self._attend(block, self.threads)
        self._finish(block, min(self.threads, block[P.NUM_TOKENS]))
        if own is not None:
            own[P.NEXT_THREAD] = own[P.NEXT_ITEM] = own[P.NEXT_TOKEN] = 0

    def _set(self, **values: int | Tensor | np.ndarray) -> None:
        """Write sizes and addresses into the parameter block."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.data_ptr()
            elif isinstance(value, np.ndarray):
                value = value.ctypes.data
            self._block[getattr(P, name)] = value

    def _reserve(self, plan: WorkPlan) -> None:
        need = (plan.num_partials, plan.max_entries, plan.max_k_rank, plan.max_v_rank)
        if self._buffers and all(n <= have for n, have in zip(need, self._fits, strict=True)):
            return
        self._fits = tuple(max(n, have) for n, have in zip(need, self._fits, strict=True))  # type: ignore[assignment]
        partials, entries, k_rank, v_rank = self._fits
        heads, dim = self.heads.num_kv * self.heads.per_kv, self.heads.dim
        sizes = {
            P.QUERIES_AT: entries * heads * dim,
            P.BASE_AT: self.heads.num_kv * dim * TILE,
            P.KEYS_AT: dim * TILE,
            P.TURNED_AT: k_rank * TILE,
            P.FACTORS_AT: max(entries * heads, 2 * TILE),
            P.SCORES_AT: entries * heads * CHUNK,
            P.MIXED_AT: entries * heads * v_rank,
        }
        at = 0
        for place, size in sizes.items():
            self._block[place] = at
            at += -(-size // _LINE) * _LINE
        results = [np.zeros(partials * heads * n, dtype=np.float32) for n in (dim, 2)]
        scratch = np.zeros((self.threads, at), dtype=np.float32)
        index = np.zeros((self.threads, KNOWN + max(KNOWN, v_rank)), dtype=np.int64)
        self._buffers = (*results, scratch, index)
        self._set(PARTIALS=results[0], STATES=results[1], SCRATCH=scratch, SCRATCH_SIZE=at)
        self._set(INDEX=index, INDEX_SIZE=index.shape[1])
