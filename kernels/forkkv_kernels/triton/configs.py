"""Default launch configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile of the prefill kernel, (query, head) pairs x context tokens; warps of a program; stages of the loads.

    chunk: pairs of columns of K that are completed at a time. v_width: columns of V that a program does, the others of
    a head are other programs'; v_chunk of them at a time. reload: read B_k for every tile instead of keeping it.
    rolled: go through the rank in a loop that reads B and the residual anew for every chunk."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 32
    v_width: int = 128
    v_chunk: int = 128
    reload: bool = False
    rolled: bool = False


def device_arch(device: torch.device) -> str:
    """Key of the configuration tables: "sm_80", "sm_90", "gfx942", or "interpreter" for tensors on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(device)[0] >= 9 else "sm_80"


def columns_of(tiles: int) -> int:
    """Columns a kernel computes for a residual half of `tiles` units: 16 times a power of two, 0 for none."""
    return 16 << (tiles - 1).bit_length() if tiles else 0


def prefill_config(
    arch: str, head_dim: int, k_tiles: int, v_tiles: int, itemsize: int, qk_norm: bool = False
) -> PrefillConfig:
    """Registers decide. Numbers per thread for head_dim 128 on sm_90, M = 128, N = 64, 8 warps (256 threads):

    * the output M x 128 float32 takes 64 registers, the scores M x N 32, their float16 copy 16, q none (shared memory);
    * completing K: N = 64 rows fill a wgmma, so both groups of four warps expand the same rows. Both halves of a chunk
      of 32 pairs take 2 * 64 * 32 / 128 = 32 in float32, base K 16, cos and sin 32, finished chunks up to 32. All 64
      pairs at once would take twice that and spill (460 bytes at rank 16);
    * addresses, offsets and the state of the softmax take 60 to 90: rank 0 compiles to 195 with two stages;
    * the rank-r accumulator takes 8 per tile.

    Rank 16 so comes to 249. Wider residuals (more tiles to address) and the factors of QK-norm leave no room for 64
    registers of output (128 and 76 bytes spilled): a program then does 64 columns of V, and the scores are made
    head_dim / 64 times. head_dim 256 always divides V, for the same reason. M = 128 rather than two programs of 64
    because K, V and the residual then come from L2 once instead of twice; M = 64 with 4 warps needs the same registers
    per thread.

    From five tiles on what is kept per tile (addresses, operands of residual and B) is too much whatever the other
    sizes: head_dim 128 and rank 128 spill 630 bytes even with half the accumulators. The rank then goes through a loop
    that keeps nothing, with 243 registers and no spill. It reads a tile of the residual and of B again for each chunk,
    from L1, and its loop inside the loop over tokens leaves only itself to be pipelined; so not for narrow ranks. With
    head_dim 256, QK-norm or float32 the same holds from two tiles on (rank 64 spills 444, 52, 44 bytes otherwise).

    Shared memory, bfloat16, sm_90: q 32 KiB; per stage K 16, V 16, cos and sin 16 (float32: 32), residual tiles 2 each;
    finished K 16; B_k and B_v 4 each per 16 of rank: 93 KiB at rank 16, of 227.

    sm_80 has no operands in shared memory: q takes 32 registers and B_k, kept, up to 64, so it is read again for every
    tile, N = 32, and 16 pairs are completed at a time. gfx942: the same, and 4 warps of 64 lanes, one per SIMD, may use
    512 registers; one stage, since 64 KiB of shared memory are all there is. float32 is there for tests: small tiles,
    right rather than fast. The interpreter pays per operation, not per element: large tiles.
    """
    if arch == "interpreter":
        return PrefillConfig(128, 64, 4, 1, chunk=64, rolled=max(k_tiles, v_tiles) > 4)
    tiles = max(k_tiles, v_tiles)
    rolled = tiles > 4 or (tiles > 1 and (head_dim > 128 or qk_norm or itemsize == 4))
    if itemsize == 4:
        return PrefillConfig(32, 32, 4 if arch == "gfx942" else 8, 1, v_width=64, v_chunk=64, rolled=rolled)
    width = 64 if tiles > 1 or qk_norm else 128
    if arch == "gfx942":
        return PrefillConfig(64, 32, 4, 1, 16, v_width=64, v_chunk=64, reload=tiles > 0, rolled=rolled)
    if arch == "sm_90":
        return PrefillConfig(128, 64, 8, 2 if tiles else 3, v_width=width, v_chunk=width, rolled=rolled)
    if tiles == 0:
        return PrefillConfig(128, 64, 8, 2)
    return PrefillConfig(128, 32, 8, 2, 16, v_width=width, v_chunk=width, reload=True, rolled=rolled)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of the decode kernel, query heads x context tokens; warps of a program; stages of the loads; registers that
    a thread may use if the compiler is not to decide it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Triton's options for a launch."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


def decode_config(arch: str, head_dim: int, k_tiles: int, v_tiles: int, itemsize: int, block_m: int) -> DecodeConfig:
    """Decode has no reuse to gain from larger tiles: M is given by the rows of a group (16 for a row alone), and what
    counts is bytes in flight, that is programs per core times their tile, without spilling.

    * N = 64 where registers allow: each residual entry loads its B_k anew for every N tokens (2 * head_dim * rank bytes
      against 2 * N * rank of the residual itself, mostly from L1), and as M of the expansion 64 rows fill a wgmma.
      Chips without wgmma hold the operands of their products in registers too, and take 32.
    * An entry needs both halves of its expanded K in float32, 2 * N * head_dim / 2 numbers, and as much again while it
      rotates them; the tile itself needs M * (head_dim + rank + N). Over 4 warps that is the whole register file at
      M = 16, so larger tiles take 8 warps, and the largest of them, like head_dim 256, N = 32. Four of gfx942's warps
      are 256 threads already, with 512 registers each; eight would have half as many.
    * Two stages: only the loops without residual are pipelined, those with one hide latency by programs per core.
    * On sm_80 ptxas would rather spill 40 bytes (head_dim 96) than let fewer than three programs share a core. It is
      told that two may have all registers.
    """
    residual = k_tiles + v_tiles > 0
    small = head_dim > 128 or block_m > 64 or itemsize == 4 or (residual and arch in ("sm_80", "gfx942"))
    block_n = 32 if small else 64
    if residual and arch == "sm_80" and block_m > 64:
        block_n = 16  # the accumulators of the tile fill half of the registers and more
    num_warps = 4 if arch == "gfx942" or (block_m == 16 and head_dim <= 128 and itemsize < 4) else 8
    return DecodeConfig(block_m, block_n, num_warps, 2, 255 if residual and arch == "sm_80" else None)
