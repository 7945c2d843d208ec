"""What the executor remembers of running sequences between steps: tokens, block tables, units, sampling state."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from forkkv.types import BlockId, NewSequence, SamplingParams, TableUpdate

_NO_UNITS = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class SequenceState:
    """One running sequence; `row` is its row in `RequestTable.block_tables`."""

    row: int
    tokens: np.ndarray
    """int64, valid up to `num_tokens`, longer than that."""
    num_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    k_tiles: int
    v_tiles: int
    num_blocks: int = 0
    k_units: np.ndarray = field(default_factory=lambda: _NO_UNITS)
    """int32, block major: unit of (block b, tile t) is `k_units[b * k_tiles + t]`; likewise `v_units`."""
    v_units: np.ndarray = field(default_factory=lambda: _NO_UNITS)

    def append_token(self, position: int, token: int) -> None:
        """Append the token sampled for `position`. One that is known already (teacher forcing) stays as it is.
        Raises `ValueError` if that would leave a gap."""
        if position > self.num_tokens:
            raise ValueError(f"token {position} sampled behind {self.num_tokens} known ones")
        if position < self.num_tokens:
            return
        if position == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.tokens[position] = token
        self.num_tokens += 1


class RequestTable:
    """States by request id. Block tables lie in one array, so that a step picks its rows with one index operation."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._states: dict[str, SequenceState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: str) -> SequenceState:
        """Raises `KeyError` for a sequence that is not running."""
        return self._states[request_id]

    def add(self, new: NewSequence) -> None:
        """Take a sequence, replacing what was known under its id; its tables are empty."""
        self.drop(new.request_id)
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.block_tables[row] = 0
        count = len(new.token_ids)
        tokens = np.zeros(max(count, new.num_prompt_tokens + new.sampling.max_tokens) + 1, dtype=np.int64)
        tokens[:count] = new.token_ids
        self._states[new.request_id] = SequenceState(
            row, tokens, count, new.num_prompt_tokens, new.sampling, new.seed, new.k_tiles, new.v_tiles
        )

    def drop(self, request_id: str) -> None:
        """Forget a sequence; one that is not known is no error, since it may never have entered."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free_rows.append(state.row)

    def extend(self, update: TableUpdate) -> None:
        """Append ids to the tables of a sequence. Raises `KeyError` if it is unknown."""
        state = self._states[update.request_id]
        if update.kv_blocks:
            self._append_blocks(state, update.kv_blocks)
        if update.k_units:
            state.k_units = np.concatenate((state.k_units, np.asarray(update.k_units, dtype=np.int32)))
        if update.v_units:
            state.v_units = np.concatenate((state.v_units, np.asarray(update.v_units, dtype=np.int32)))

    def _append_blocks(self, state: SequenceState, blocks: tuple[BlockId, ...]) -> None:
        end = state.num_blocks + len(blocks)
        if end > self.block_tables.shape[1]:
            raise ValueError(f"{end} blocks exceed the {self.block_tables.shape[1]} that a sequence may have")
        self.block_tables[state.row, state.num_blocks : end] = blocks
        state.num_blocks = end

    def _grow(self) -> None:
        count, width = self.block_tables.shape
        self.block_tables = np.concatenate((self.block_tables, np.zeros((count, width), dtype=np.int32)))
        self._free_rows.extend(range(2 * count - 1, count - 1, -1))
