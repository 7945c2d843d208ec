"""The parameter block of `attention.kernels`: one int64 array of sizes and addresses, written by `runtime`.

Buffers are C-contiguous, of float32 where nothing else is said. Sizes:

    THREADS, KV_HEADS (Hkv), PER_KV (query heads per KV head), DIM (head_dim D, a multiple of 16), BLOCK_SIZE
    NUM_BLOCKS              columns of KV_TABLE
    K_WIDTH, V_WIDTH        tiles per block in K_UNITS and V_UNITS
    B_RANK                  columns R that B_K and B_V have room for
    V_RANK                  columns of the widest V residual of the step
    NUM_ITEMS, NUM_TOKENS   rows of ITEMS, elements of TOKENS

Inputs and results of one layer:

    Q, OUT                  [T, H, D], tokens of Q Q_STRIDE apart; LSE [T, H] or address 0: not wanted
    SCALE                   one number that scores are multiplied with
    K_CACHE, V_CACHE        [num_blocks, block_size, Hkv, D]; RESIDUAL [num_units, block_size, 16]
    K_RMS, RESIDUAL_RMS     [num_blocks or num_units, block_size, Hkv], or 0: no QK-norm
    B_K                     `pack_b_k`'s layout; B_V [slots, R, Hkv * D]
    ROPE                    [tiles of positions, D, 32]: cos of D / 2 angles, then sin, of each tile's positions

Tables of one step:

    KV_TABLE                int32 [B, NUM_BLOCKS]; K_UNITS, V_UNITS int32 [B, NUM_BLOCKS * width]
    ITEMS to PARTS          int64, `plan.WorkTables`
    NEXT_THREAD, NEXT_ITEM, NEXT_TOKEN      counters that threads take their work from; zero before a call

Memory:

    PARTIALS, STATES        [partials, H, D] sums of the items before normalisation; [partials, H, 2] maximum and sum
    SCRATCH                 [THREADS, SCRATCH_SIZE], cut up by the offsets QUERIES_AT to MIXED_AT
    INDEX                   int64 [THREADS, INDEX_SIZE]: slots of a chunk's tokens, then rows of residual units
"""

from __future__ import annotations

# Plain module constants: Numba takes them as literals.
THREADS, KV_HEADS, PER_KV, DIM, BLOCK_SIZE, NUM_BLOCKS, K_WIDTH, V_WIDTH = range(8)
B_RANK, V_RANK, NUM_ITEMS, NUM_TOKENS = range(8, 12)
Q, OUT, LSE, K_CACHE, V_CACHE, RESIDUAL, K_RMS, RESIDUAL_RMS, B_K, B_V, ROPE = range(12, 23)
KV_TABLE, K_UNITS, V_UNITS, ITEMS, RUNS, ENTRIES, TOKENS, PART_BEGIN, PARTS = range(23, 32)
PARTIALS, STATES, SCRATCH, SCRATCH_SIZE, INDEX, INDEX_SIZE = range(32, 38)
QUERIES_AT, BASE_AT, KEYS_AT, TURNED_AT, FACTORS_AT, SCORES_AT, MIXED_AT = range(38, 45)
NEXT_THREAD, NEXT_ITEM, NEXT_TOKEN, SCALE, Q_STRIDE = range(45, 50)
COUNT = 50
