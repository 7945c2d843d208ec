"""The probe: what sharing would cost each plain adapter, measured on a short text before the server is ready.

Every adapter reads the text twice, teacher-forced, in one pass of the real model: privately (f_w = 0, its own
reference) and as `fork` reads it (base K, V completed by its residual below the fork point). All adapters of a batch
read the same base prefix, which runs once. The plans are those of any step; they run on a small cache of their own,
so pools, trees and counters of the server never see them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from forkkv.config import EngineConfig
from forkkv.executor.executor import Executor
from forkkv.log import get_logger
from forkkv.scheduler.fork import fork_point
from forkkv.sharing import needs_probe
from forkkv.types import (
    AdapterId,
    AdapterLoad,
    AdapterMeta,
    AdapterProbe,
    AdapterReport,
    BlockId,
    NewSequence,
    ResidualWrite,
    SamplingParams,
    Segment,
    StepPlan,
    TableUpdate,
)

logger = get_logger(__name__)

COMPARED_SHARE = 4
"""One of this many tokens of the text stands behind the fork point and is compared."""
PREFIX = "prefix"


def probe_at_load(
    executor: Executor, config: EngineConfig, probe_tokens: Callable[[], Sequence[int]] | None
) -> tuple[tuple[AdapterMeta, ...], tuple[AdapterReport, ...]]:
    """The executor's adapters and reports with the probe's decisions and figures. `probe_tokens` gives the text's
    tokens and is called if an adapter needs them; None: nothing is probed. Under `fork` each plain adapter is warned
    of. Raises what the executor raises."""
    lora, mode = config.lora, config.scheduler.kv_sharing
    unsure = [meta for meta in executor.adapters if needs_probe(meta, mode)]
    probes: dict[AdapterId, AdapterProbe] = {}
    if unsure and lora.probe and probe_tokens is not None:
        probes = probe_adapters(executor, unsure, probe_tokens(), config)
    if mode == "fork":
        for meta in unsure:
            _warn(meta.name, probes.get(meta.adapter_id))
    passed = {adapter_id for adapter_id, probe in probes.items() if probe.kl <= lora.max_probe_kl}
    adapters = tuple(replace(meta, passed_probe=meta.adapter_id in passed) for meta in executor.adapters)
    reports = tuple(replace(report, probe=probes.get(report.adapter_id)) for report in executor.reports)
    return adapters, reports


def probe_adapters(
    executor: Executor, adapters: Sequence[AdapterMeta], token_ids: Sequence[int], config: EngineConfig
) -> dict[AdapterId, AdapterProbe]:
    """Figures of `adapters` by id; none, and a warning, if the text has too few tokens for a shared block.

    At most `max_model_len` tokens are read. Batches keep to `--max-num-batched-tokens` and `--max-loras` as far as one
    adapter does. Equal adapters under several names are measured once. Raises what the executor raises.
    """
    tokens = tuple(token_ids[: executor.max_model_len])
    block_size = config.cache.block_size
    fork = _fork_point(tokens, block_size)
    if fork == 0:
        logger.warning(
            "%d tokens of the probe's text fit the model's context, too few for blocks of %d: no adapter is measured",
            len(tokens),
            block_size,
        )
        return {}
    by_digest = {adapter.digest: adapter for adapter in adapters}
    room = (config.scheduler.max_num_batched_tokens - fork) // (2 * len(tokens) - fork)
    measured: dict[str, AdapterProbe] = {}
    for batch in _batches(by_digest.values(), max(1, min(room, config.lora.max_loras))):
        measured |= _measure(executor, batch, tokens, fork, block_size)
    return {adapter.adapter_id: measured[adapter.digest] for adapter in adapters}


def _warn(name: str, probe: AdapterProbe | None) -> None:
    figure = "its loss was not measured"
    if probe is not None:
        figure = f"KL {probe.kl:.4f} to its own distributions, top-1 agreement {probe.top1_agreement:.1%}"
    logger.warning("adapter %s is plain, and --kv-sharing fork lets it read a shared prefix: %s", name, figure)


def _fork_point(tokens: tuple[int, ...], block_size: int) -> int:
    tail = max(1, len(tokens) // COMPARED_SHARE)
    return fork_point(tokens, block_size, kind="plain", shared=True, fork_tail=tail).weights_from or 0


def _batches(adapters: Iterable[AdapterMeta], size: int) -> Iterator[list[AdapterMeta]]:
    rest = iter(adapters)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _measure(
    executor: Executor, batch: list[AdapterMeta], tokens: tuple[int, ...], fork: int, block_size: int
) -> dict[str, AdapterProbe]:
    """Figures of one batch by digest."""
    builder = ProbePlan(tokens, fork, block_size)
    pairs = [builder.add(adapter) for adapter in batch]
    began = time.perf_counter()
    found = executor.compare(builder.build(), pairs, builder.num_kv_blocks, max(2, builder.num_residual_units))
    seconds = (time.perf_counter() - began) / len(batch)
    return {
        adapter.digest: AdapterProbe(pair.kl, pair.top1_agreement, len(tokens) - fork, fork, seconds)
        for adapter, pair in zip(batch, found, strict=True)
    }


class ProbePlan:
    """One step in which a base sequence writes K, V and every adapter's residual of [0, fork), and each adapter runs
    two sequences over the same tokens. Ids of blocks and units count upwards from 1, behind the null ids."""

    def __init__(self, tokens: tuple[int, ...], fork: int, block_size: int):
        self.tokens, self.fork, self.block_size = tokens, fork, block_size
        self.num_kv_blocks = self.num_residual_units = 1
        self._new: list[NewSequence] = []
        self._tables: list[TableUpdate] = []
        self._segments: list[Segment] = []
        self._loads: list[AdapterLoad] = []
        self._writes: list[ResidualWrite] = []
        self._prefix = self._blocks(fork)
        self._enter(PREFIX, TableUpdate(PREFIX, self._prefix))

    def add(self, adapter: AdapterMeta) -> tuple[str, str]:
        """Put `adapter` into the next slot; names of its private and its forked sequence. Mutates."""
        slot, n, fork = len(self._loads), len(self.tokens), self.fork
        self._loads.append(AdapterLoad(slot, adapter.adapter_id))
        private, forked = f"private-{slot}", f"fork-{slot}"
        self._enter(private, TableUpdate(private, self._blocks(n)))
        k_units, v_units = self._units(adapter.k_tiles), self._units(adapter.v_tiles)
        if k_units or v_units:
            self._writes.append(ResidualWrite(adapter.adapter_id, 0, k_units, v_units))
        table = TableUpdate(forked, self._prefix + self._blocks(n - fork), k_units, v_units)
        self._enter(forked, table, adapter)
        self._segments += [
            Segment(private, 0, fork, slot, "merged", 0),
            Segment(private, fork, n - fork, slot, "merged", fork, sample=True),
            Segment(forked, fork, n - fork, slot, "merged", fork, (), *self._reads(table, slot), sample=True),
        ]
        return private, forked

    def build(self) -> StepPlan:
        """The plan of all adapters added so far."""
        prefix = Segment(PREFIX, 0, self.fork, -1, "base", 0, tuple(self._writes))
        return StepPlan(
            step_id=0,
            new=tuple(self._new),
            tables=tuple(self._tables),
            segments=(prefix, *self._segments),
            adapter_loads=tuple(self._loads),
        )

    def _reads(self, table: TableUpdate, slot: int) -> tuple[int, int]:
        """(read_slot, residual_len) of a segment behind the fork."""
        return (slot, self.fork) if table.k_units or table.v_units else (-1, 0)

    def _enter(self, name: str, table: TableUpdate, reader: AdapterMeta | None = None) -> None:
        k_tiles, v_tiles = (reader.k_tiles, reader.v_tiles) if reader else (0, 0)
        sampling = SamplingParams(max_tokens=1)
        self._new.append(NewSequence(name, self.tokens, len(self.tokens), sampling, 0, k_tiles, v_tiles))
        self._tables.append(table)

    def _blocks(self, num_tokens: int) -> tuple[BlockId, ...]:
        first = self.num_kv_blocks
        self.num_kv_blocks += -(-num_tokens // self.block_size)
        return tuple(range(first, self.num_kv_blocks))

    def _units(self, tiles: int) -> tuple[BlockId, ...]:
        first = self.num_residual_units
        self.num_residual_units += self.fork // self.block_size * tiles
        return tuple(range(first, self.num_residual_units))
