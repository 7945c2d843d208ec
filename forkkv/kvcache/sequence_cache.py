"""What one sequence holds of the two pools: tables, leases, and the blocks that are its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from forkkv.kvcache.radix_tree import Lease
from forkkv.types import AdapterId, AdapterMeta, BlockId, WriterClass

UNBOUNDED = 1 << 62
"""Private boundary of a sequence all of whose blocks are shared: a base request, or an agent in a mixed tree."""


@dataclass(slots=True, eq=False)
class SequenceCache:
    """Cache state of one sequence; only `KVCacheManager` changes it.

    `private_from` is f in tokens, or UNBOUNDED; `weights_from` is f_w. `adapter` is None for a base request.
    `residual_digest`: K, V below f are completed by the residual that is kept under this digest; None: by nothing.
    `writer`: whose blocks it reads and writes below f.
    """

    block_size: int
    scope: Hashable
    adapter: AdapterMeta | None
    private_from: int
    weights_from: int
    residual_digest: str | None
    writer: WriterClass = "base"
    kv_blocks: list[BlockId] = field(default_factory=list)
    k_units: list[BlockId] = field(default_factory=list)
    v_units: list[BlockId] = field(default_factory=list)
    owned: set[BlockId] = field(default_factory=set)
    base_lease: Lease | None = None
    residual_lease: Lease | None = None
    private_lease: Lease | None = None
    fanout_leases: dict[AdapterId, Lease] = field(default_factory=dict)
    owned_units: set[BlockId] = field(default_factory=set)
    """Residual units that no tree took: of a block that is not full or not published, or of a dropped namespace."""
    stored: int = 0
    """Tokens from 0 on whose K, V were found stored (hits, copies): they are never written by this sequence."""
    residual_tokens: int = 0
    """Tokens from 0 on whose residual stands in the tables."""
    diverged: bool = False
    """Mixed tree: another sequence published this one's next block first, so what follows is not published."""

    @property
    def uses_residual(self) -> bool:
        return self.residual_digest is not None

    @property
    def tiles(self) -> int:
        """Residual units of one block."""
        if self.adapter is None or not self.uses_residual:
            return 0
        return self.adapter.k_tiles + self.adapter.v_tiles

    @property
    def base_depth(self) -> int:
        """Tokens of the base tier that this sequence leases."""
        return self.base_lease.num_tokens if self.base_lease else 0

    @property
    def residual_depth(self) -> int:
        """Tokens whose residual stands in its tables; all below the fork where it needs none."""
        return self.residual_tokens if self.uses_residual else self.private_from

    @property
    def private_depth(self) -> int:
        return self.private_lease.num_tokens if self.private_lease else 0

    def leases(self) -> list[Lease]:
        own = (self.base_lease, self.residual_lease, self.private_lease)
        return [lease for lease in own if lease] + list(self.fanout_leases.values())

    def units_from(self, block: int) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        """K and V units of the blocks from number `block` on."""
        if self.adapter is None:
            return (), ()
        return tuple(self.k_units[block * self.adapter.k_tiles :]), tuple(self.v_units[block * self.adapter.v_tiles :])

    def tree_units(self, first: int, end: int) -> list[BlockId]:
        """Units of blocks [first, end) as trees keep them: of each block its K units, then its V units."""
        assert self.adapter is not None
        k, v = self.adapter.k_tiles, self.adapter.v_tiles
        blocks = range(first, end)
        return [unit for b in blocks for unit in (*self.k_units[b * k : b * k + k], *self.v_units[b * v : b * v + v])]


@dataclass(frozen=True, slots=True)
class Growth:
    """Ids appended to a sequence's tables, and how many of its full blocks a tree held already (kept private)."""

    kv_blocks: tuple[BlockId, ...] = ()
    k_units: tuple[BlockId, ...] = ()
    v_units: tuple[BlockId, ...] = ()
    duplicates: int = 0


def split_units(units: list[BlockId], k_tiles: int, v_tiles: int) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
    """Residual ids of consecutive blocks (each k_tiles K units, then v_tiles V units) as two tables; see
    `SequenceCache.tree_units` for the way back."""
    step = k_tiles + v_tiles
    k_units = [u for i in range(0, len(units), step) for u in units[i : i + k_tiles]]
    v_units = [u for i in range(0, len(units), step) for u in units[i + k_tiles : i + step]]
    return tuple(k_units), tuple(v_units)
