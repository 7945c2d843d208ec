"""`residual_attention` for rows with several queries: launcher of the kernel in `prefill_kernel.py`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from forkkv_kernels.triton.aot import HEAD_DIMS, RANKS, CompileSpec, Target, allowed_spill
from forkkv_kernels.triton.common import LOG2_E
from forkkv_kernels.triton.configs import PrefillConfig, device_arch, prefill_config
from forkkv_kernels.triton.prefill_kernel import residual_prefill_kernel
from forkkv_kernels.triton.prefill_plan import PrefillPlan, PrefillShape, plan_prefill, plan_prefill_on_device


def residual_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    residual_cache: Tensor | None = None,
    residual_k_table: Tensor | None = None,
    residual_v_table: Tensor | None = None,
    residual_len: Tensor | None = None,
    read_slot: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_rms: Tensor | None = None,
    residual_rms: Tensor | None = None,
    return_lse: bool = False,
    plan: PrefillPlan | None = None,
    max_query_len: int | None = None,
    config: PrefillConfig | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`forkkv_kernels.residual_attention`, whose arguments these are, for rows of any query length.

    plan: the step's work from `plan_prefill`, made once for all layers; rows that are not in it are not computed.
    max_query_len: without a plan, an upper bound of the query lengths. With either of them nothing waits for the
    device; with neither the row lengths are copied to the host. config: for the plan made here, instead of the default.
    out [T, H, D], lse [T, H] float32: contiguous, written to and returned instead of new tensors.

    Raises `ValueError` for an odd head_dim, a block size that is no power of two, a scale that is not positive, and
    heads or columns that do not lie side by side."""
    _check(q, k_cache, v_cache, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    has_residual = residual_cache is not None and read_slot is not None and residual_len is not None
    num_blocks = kv_block_table.shape[1]
    table_tiles = [
        table.shape[1] // num_blocks if has_residual and table is not None and b is not None else 0
        for table, b in ((residual_k_table, b_k), (residual_v_table, b_v))
    ]
    head_dim, num_kv_heads = q.shape[2], k_cache.shape[2]
    if plan is None:
        shape = PrefillShape(
            group=q.shape[1] // num_kv_heads,
            head_dim=head_dim,
            itemsize=k_cache.element_size(),
            arch=device_arch(q.device),
            qk_norm=k_rms is not None,
            config=config,
        )
        rows = (cu_seqlens_q, seq_lens, *((read_slot, residual_len) if sum(table_tiles) else (None, None)))
        plan = _own_plan(rows, table_tiles, max_query_len, shape, q.device)
    width = max(16, triton.next_power_of_2(head_dim))
    for launch in plan.launches:
        v_width = min(width, launch.config.v_width)
        residual = launch.k_tiles + launch.v_tiles > 0
        with_k, with_v = launch.k_tiles > 0, launch.v_tiles > 0
        select = residual or (launch.mixed and sum(table_tiles) > 0)
        residual_prefill_kernel[(len(launch.work), num_kv_heads, -(-head_dim // v_width))](
            q,
            k_cache,
            v_cache,
            kv_block_table,
            cu_seqlens_q,
            seq_lens,
            residual_cache if residual else None,
            residual_k_table if with_k else None,
            residual_v_table if with_v else None,
            residual_len if select else None,
            read_slot if select else None,
            b_k if with_k else None,
            b_v if with_v else None,
            cos if with_k else None,
            sin if with_k else None,
            k_rms if with_k and residual_rms is not None else None,
            residual_rms if with_k and k_rms is not None else None,
            out,
            lse if return_lse else None,
            launch.work,
            scale * LOG2_E,
            q.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            kv_block_table.stride(0),
            _stride(residual_cache, 0),
            _stride(residual_k_table, 0),
            _stride(residual_v_table, 0),
            table_tiles[0],
            table_tiles[1],
            _stride(b_k, 0),
            _stride(b_k, 1),
            _stride(b_v, 0),
            _stride(b_v, 1),
            _stride(k_rms, 0),
            _stride(residual_rms, 0),
            GROUP=q.shape[1] // num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1],
            K_TILES=launch.k_tiles,
            V_TILES=launch.v_tiles,
            BLOCK_M=launch.config.block_m,
            BLOCK_N=launch.config.block_n,
            WIDTH=width,
            CHUNK=launch.config.chunk,
            V_WIDTH=v_width,
            V_CHUNK=min(v_width, launch.config.v_chunk),
            RELOAD=launch.config.reload,
            ROLLED=launch.config.rolled,
            num_warps=launch.config.num_warps,
            num_stages=launch.config.num_stages,
        )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _own_plan(
    rows: tuple[Tensor | None, ...],
    table_tiles: list[int],
    max_query_len: int | None,
    shape: PrefillShape,
    device: torch.device,
) -> PrefillPlan:
    """Plan of a caller who made none. `rows`: cu_seqlens_q, seq_lens, read_slot, residual_len."""
    bounds, seq_lens, read_slot, residual_len = rows
    assert bounds is not None and seq_lens is not None
    count = len(seq_lens)
    if max_query_len is not None:
        return plan_prefill_on_device(count, max_query_len, *table_tiles, shape=shape, device=device)
    slots = [-1] * count if read_slot is None else read_slot.tolist()
    lengths = [0] * count if residual_len is None else residual_len.tolist()
    k_tiles, v_tiles = ([tiles] * count for tiles in table_tiles)
    return plan_prefill(
        bounds.tolist(), seq_lens.tolist(), slots, lengths, k_tiles, v_tiles, shape=shape, device=device
    )


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> None:
    """Raise `ValueError` for what the kernel cannot do."""
    head_dim, block_size = k_cache.shape[3], k_cache.shape[1]
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd")
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size} is not a power of two")
    if not scale > 0:
        raise ValueError(f"scale {scale} is not positive")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(-1) != 1 or tensor.stride(-2) != head_dim:
            raise ValueError(f"heads of {name} do not lie side by side: strides {tensor.stride()}")


def _stride(tensor: Tensor | None, dim: int) -> int:
    return 0 if tensor is None else tensor.stride(dim)


TABLE = "*fp32"


def compile_specs(target: Target) -> list[CompileSpec]:
    """The default configurations for head dims and ranks in bfloat16, as the launcher starts them for 4 heads per KV
    head, blocks of 16 tokens and equal ranks of K and V; rank 0 is the launch of rows without residual.

    float16 for one head dim: a configuration knows the size of the type only, layouts and matrix instructions have the
    same shapes for both types, and just the conversions differ. float32, which tests use, for the smallest."""
    return [
        *(_spec(target, head_dim, rank, "bf16", 2, norm=False) for head_dim in HEAD_DIMS for rank in RANKS),
        *(_spec(target, 128, rank, "bf16", 2, norm=True) for rank in (16, 64)),
        *(_spec(target, 128, rank, "fp16", 2, norm=False) for rank in RANKS),
        *(_spec(target, 64, rank, "fp32", 4, norm=False) for rank in (0, 16, 64)),
    ]


def _spec(target: Target, head_dim: int, rank: int, dtype: str, itemsize: int, norm: bool) -> CompileSpec:
    tiles = -(-rank // 16)
    config = prefill_config(target.name, head_dim, tiles, tiles, itemsize, norm)
    cache, ids = f"*{dtype}", "*i32"
    signature: dict[str, str] = dict.fromkeys(("q", "k_cache", "v_cache", "out"), cache)
    signature |= dict.fromkeys(("kv_table", "cu_seqlens_q", "seq_lens", "work"), ids)
    signature |= {"lse": "*fp32", "scale_log2": "fp32"}
    strides = [name for name in residual_prefill_kernel.arg_names if name.endswith("_stride")]
    signature |= dict.fromkeys(strides, "i32:16")
    signature |= dict.fromkeys(("kv_table_stride", "k_table_stride", "v_table_stride"), "i32")
    signature |= dict.fromkeys(("k_table_tiles", "v_table_tiles"), "i32")
    optional = dict.fromkeys(("residual", "b_k", "b_v"), cache)
    optional |= dict.fromkeys(("k_table", "v_table", "residual_len", "read_slot"), ids)
    optional |= dict.fromkeys(("cos", "sin"), TABLE)
    norms = dict.fromkeys(("k_rms", "residual_rms"), "*fp32")
    absent = ({} if rank else optional) | ({} if norm else norms)
    signature |= {name: kind for name, kind in (optional | norms).items() if name not in absent}
    constexprs: dict[str, object] = dict.fromkeys(absent)
    constexprs |= {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
    constexprs |= {"K_TILES": tiles, "V_TILES": tiles}
    constexprs |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    width = triton.next_power_of_2(head_dim)
    constexprs |= {"WIDTH": width, "CHUNK": config.chunk, "V_WIDTH": min(width, config.v_width)}
    constexprs |= {"V_CHUNK": min(width, config.v_chunk), "RELOAD": config.reload, "ROLLED": config.rolled}
    return CompileSpec(
        name=f"prefill D{head_dim} R{rank} {dtype}{' qk-norm' if norm else ''} {config.block_m}x{config.block_n}",
        fn=residual_prefill_kernel,
        signature=signature,
        constexprs=constexprs,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        max_spill_bytes=allowed_spill(head_dim, rank),
        matrix=itemsize == 2,
        quick=target.name == "sm_90" and head_dim == 128 and dtype == "bf16" and rank in (16, 64) and not norm,
    )
