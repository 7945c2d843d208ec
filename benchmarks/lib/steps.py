"""Steps to count and to measure: rows written down as a scheduler would plan them, built into batches by the
executor's own batch builder. No engine, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forkkv.attention.batch import ForwardBatch
from forkkv.executor.batch_builder import build_batch
from forkkv.executor.table import RequestTable
from forkkv.models.spec import ModelSpec
from forkkv.types import (
    RESIDUAL_TILE,
    NewSequence,
    ResidualWrite,
    SamplingParams,
    Segment,
    SharedPrefix,
    TableUpdate,
)

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


def llama_spec(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, positions: int
) -> ModelSpec:
    """A Llama of these sizes with a head of its own."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )


SHAPES: dict[str, ModelSpec] = {
    "8b": llama_spec(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "smollm2-135m": llama_spec(30, 576, 9, 3, 64, 1536, 49152, 8192),
    "tiny": llama_spec(2, 128, 4, 2, 64, 256, 512, 4096),
}
"""Named shapes: that of Llama-3-8B, that of the small model, and one to try things with."""


def tiles_of(rank: int) -> int:
    """Residual units of 16 columns that a rank takes."""
    return -(-rank // RESIDUAL_TILE)


@dataclass
class Step:
    """Segments of one step with the tables that they read. Ids are handed out upwards, each once."""

    block_size: int
    segments: list[Segment] = field(default_factory=list)
    groups: list[SharedPrefix] = field(default_factory=list)
    table: RequestTable = field(init=False)
    next_block: int = 1
    next_unit: int = 1
    max_blocks: int = 1

    def __post_init__(self) -> None:
        self.table = RequestTable(64, self.max_blocks)

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        """New K/V blocks for `num_tokens` tokens, consecutive in memory."""
        first, self.next_block = self.next_block, self.next_block - (-num_tokens // self.block_size)
        return tuple(range(first, self.next_block))

    def units(self, num_tokens: int, rank: int) -> tuple[int, ...]:
        """New residual units for one half of a residual of `rank` over `num_tokens` tokens."""
        first = self.next_unit
        self.next_unit += -(-num_tokens // self.block_size) * tiles_of(rank)
        return tuple(range(first, self.next_unit))

    def add(
        self,
        segment: Segment,
        kv_blocks: Sequence[int],
        k_units: Sequence[int] = (),
        v_units: Sequence[int] = (),
        k_rank: int = 0,
        v_rank: int = 0,
    ) -> int:
        """Append a row with its tables; returns its index."""
        name, length = segment.request_id, segment.end
        tiles = (tiles_of(k_rank), tiles_of(v_rank))
        self.table.add(NewSequence(name, (1,) * length, length, _SAMPLING, 0, *tiles))
        self.table.extend(TableUpdate(name, tuple(kv_blocks), tuple(k_units), tuple(v_units)))
        self.segments.append(segment)
        return len(self.segments) - 1

    def batch(self, device: torch.device | str = "cpu") -> ForwardBatch:
        """The step as the model and the attention backend see it."""
        return build_batch(self.segments, tuple(self.groups), self.table, self.block_size, torch.device(device))


def decode_step(
    agents: int,
    shared: int,
    private: int,
    *,
    rank: int = 16,
    k: bool = True,
    v: bool = True,
    grouped: bool = True,
    block_size: int = 16,
    shuffled: bool = False,
) -> Step:
    """One token each of `agents` sequences: `shared` tokens (whole blocks) of one bCache that their residuals of
    `rank` complete (0: base rows), then `private` tokens of their own, the new one among them.

    Agent i reads and runs adapter slot i. Without `grouped` the plan names no group: every row reads for itself.
    `shuffled`: the shared blocks lie in memory in a random order.
    """
    if shared % block_size or private < 1:
        raise ValueError("the shared part is whole blocks, and the new token is private")
    step = Step(block_size, max_blocks=(shared + private) // block_size + 2)
    prefix = step.blocks(shared)
    if shuffled:
        prefix = tuple(int(block) for block in np.random.default_rng(0).permutation(prefix))
    k_rank, v_rank = (rank if k else 0), (rank if v else 0)
    reads = (k_rank + v_rank > 0) and shared > 0
    for agent in range(agents):
        segment = Segment(
            request_id=f"agent{agent}",
            start=shared + private - 1,
            num_tokens=1,
            weights_slot=agent if rank else -1,
            write="merged",
            kv_write_from=0,
            read_slot=agent if reads else -1,
            residual_len=shared if reads else 0,
            sample=True,
        )
        units = (step.units(shared, k_rank), step.units(shared, v_rank))
        step.add(segment, prefix + step.blocks(private), *units, k_rank, v_rank)
    if grouped and agents > 1 and shared:
        step.groups.append(SharedPrefix(shared // block_size, tuple(range(agents))))
    return step


def private_step(agents: int, length: int, block_size: int = 16) -> Step:
    """One token each of `agents` sequences that keep all `length` tokens in private caches."""
    return decode_step(agents, 0, length, rank=0, block_size=block_size)


def prefill_step(
    queries: int, context: int, *, rank: int = 16, fanout: int = 0, suffix: bool = False, block_size: int = 16
) -> Step:
    """`queries` tokens behind `context` cached ones of one sequence.

    A base chunk that writes the residuals of `fanout` adapters; or, with `suffix`, an adapter's own tokens that read
    the context completed by its residual.
    """
    step = Step(block_size, max_blocks=(context + queries) // block_size + 2)
    blocks = step.blocks(context + queries)
    writes: tuple[ResidualWrite, ...] = ()
    if not suffix:
        writes = tuple(
            ResidualWrite(adapter, context, step.units(queries, rank), step.units(queries, rank))
            for adapter in range(1, fanout + 1)
        )
    length = context if suffix and rank else 0
    segment = Segment(
        request_id="prefill",
        start=context,
        num_tokens=queries,
        weights_slot=0 if suffix else -1,
        write="merged" if suffix else "base",
        kv_write_from=0,
        residual_writes=writes,
        read_slot=0 if length else -1,
        residual_len=length,
        sample=True,
    )
    rank = rank if length else 0
    step.add(segment, blocks, step.units(length, rank), step.units(length, rank), rank, rank)
    return step
