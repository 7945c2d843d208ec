"""`residual_attention`: one signature, implementations chosen by the device of the tensors (`implementations`)."""

from __future__ import annotations

from torch import Tensor

from forkkv_kernels.implementations import implementation


def residual_attention(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of flattened rows over paged K/V, completed by an adapter's residual where a row has one.

    Row i holds queries `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`; the last of them sits at position `seq_lens[i] - 1`.
    For context position t of a row with `read_slot` s >= 0 and t < `residual_len`:

        score = scale * (q . K[t] + q . RoPE_t(rK[t] @ B_k[s]))        output = P @ V + (P[:residual_len] @ rV) @ B_v[s]

    With `k_rms` and `residual_rms` (models that normalise K per head) K is
    `(k_rms[t] * K[t] + RoPE_t(rK[t] @ B_k[s])) / residual_rms[t]`, where `B_k` carries the norm's gain.

    Shapes, one layer: q [T, H, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D]; kv_block_table [B, NB] int;
    cu_seqlens_q [B + 1] int; seq_lens [B] int; residual_cache [num_units, block_size, 16]; residual_k_table and
    residual_v_table [B, NB * tiles] int, block major (tiles = width / NB; 0 wide: no such half; null unit 0 holds
    zeros); residual_len, read_slot [B] int; b_k, b_v [slots, R, Hkv * D] with R >= tiles * 16, scaling folded in;
    cos, sin [positions, D / 2]; k_rms [num_blocks, block_size, Hkv]; residual_rms [num_units, block_size, Hkv],
    found under the unit of tile 0.

    Returns out [T, H, D] in q's dtype, and with `return_lse` the natural log-sum-exp of the scores [T, H] float32.
    Mutates nothing. Entries of the caches outside [0, seq_len) of a row are never read into a result.
    """
    result: Tensor | tuple[Tensor, Tensor] = implementation("residual_attention", q)(
        q,
        k_cache,
        v_cache,
        kv_block_table,
        cu_seqlens_q,
        seq_lens,
        scale=scale,
        residual_cache=residual_cache,
        residual_k_table=residual_k_table,
        residual_v_table=residual_v_table,
        residual_len=residual_len,
        read_slot=read_slot,
        b_k=b_k,
        b_v=b_v,
        cos=cos,
        sin=sin,
        k_rms=k_rms,
        residual_rms=residual_rms,
        return_lse=return_lse,
    )
    return result
