"""Which rows of a step are read together: those whose block tables begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from forkkv.attention.batch import HostRows
from forkkv.types import SharedPrefix

LONG_CONTEXT = 1024
"""Context behind a common beginning from which rows are worth being split by where they part."""


def shared_groups(
    host: HostRows, shared: Sequence[SharedPrefix], block_size: int, rows: Sequence[int]
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Partition `rows` into ([(leading blocks in common that hold no query, members)], rows that share with nobody);
    `shared` are the step's groups."""
    left = dict.fromkeys(rows)
    groups: list[tuple[int, list[int]]] = []
    for group in shared:
        members = [row for row in group.rows if row in left]
        if len(members) < 2:
            continue  # its partners are computed elsewhere
        groups += _refine(host, members, block_size)
        for row in members:
            del left[row]
    return groups, list(left)


def _refine(host: HostRows, members: list[int], block_size: int) -> list[tuple[int, list[int]]]:
    """(leading blocks in common, rows) of the members of one group.

    What these rows share may be more than what the whole group shares. Where long contexts remain behind the common
    part (two documents behind one system prompt), rows are split by the block in which they part.
    """
    starts = host.seq_lens[members] - (host.cu_seqlens_q[[row + 1 for row in members]] - host.cu_seqlens_q[members])
    deepest = int(starts.min()) // block_size
    tables = host.kv_block_table[members, :deepest]
    differs = (tables != tables[0]).any(axis=0)
    shared = int(differs.argmax()) if differs.any() else deepest
    left_over = int(host.seq_lens[members].max()) - shared * block_size
    if len(members) == 1 or left_over <= LONG_CONTEXT:
        return [(shared, members)]
    by_next: dict[int, list[int]] = {}
    for row in members:
        by_next.setdefault(int(host.kv_block_table[row, shared]), []).append(row)
    if len(by_next) == 1:
        return [(shared, members)]
    return [part for rows in by_next.values() for part in _refine(host, rows, block_size)]
