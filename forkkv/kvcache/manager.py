"""KVCacheManager: the one owner of blocks.

Every K/V block and residual unit is free, owned by a tree, or owned by one sequence. The scheduler asks for room and
hits in tokens and gets ids; the rules that keep a shared block immutable and alive are here and nowhere else:

* a block is published into a tree when the plan that writes it is made, so agents that arrive together share at once;
* a sequence leases every tree block in its tables, and every path it is writing, until the plan is applied;
* tables only grow while a sequence runs. A block that turns out to be in a tree already stays the sequence's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable

from forkkv.kvcache.block_pool import BlockPool
from forkkv.kvcache.dual_tree import DualRadixTree
from forkkv.kvcache.radix_tree import TOKEN_BYTES, Lease, RadixTree
from forkkv.kvcache.sequence_cache import Growth, SequenceCache, split_units
from forkkv.types import NULL_BLOCK, AdapterMeta, BlockId, PoolStats, ResidualWrite


class KVCacheManager:
    """See the module docstring. `num_kv_blocks` and `num_residual_units` include the null id 0."""

    def __init__(self, block_size: int, num_kv_blocks: int, num_residual_units: int):
        self.block_size = block_size
        self.kv_pool = BlockPool(num_kv_blocks)
        self.residual_pool = BlockPool(num_residual_units)
        self.tree = DualRadixTree(block_size)
        self.evicted_kv_blocks = 0
        self.evicted_residual_units = 0
        self._launched = -1
        self._applied = -1
        self._publications = array("I", bytes(4 * num_kv_blocks))
        """Number of the publication of each block that a mixed tree owns: who wrote it, in one word."""
        self._num_publications = 0

    # ---- steps

    def on_launched(self, step_id: int) -> None:
        """A plan leaves for the executor; what is freed from now on waits until it was applied."""
        self._launched = step_id

    def on_applied(self, step_id: int) -> None:
        """The plan was applied: what it published stays, what waited for it is free. Mutates."""
        self._applied = step_id
        self.tree.settle(step_id)
        self.kv_pool.on_applied(step_id)
        self.residual_pool.on_applied(step_id)

    def depends_on(self, cache: SequenceCache, step_id: int) -> bool:
        """Whether `cache` leases something that plan `step_id` published."""
        for lease in cache.leases():
            node = lease.node
            while node.parent is not None:
                if node.step == step_id:
                    return True
                node = node.parent
        return False

    def withdraw(self, step_id: int) -> None:
        """The plan failed: free all it published. Every sequence that depends on it was released before. Mutates."""
        self._free_kv(self.tree.base.withdraw(step_id) + self.tree.private.withdraw(step_id))
        self._free_residual(self.tree.residual.withdraw(step_id))

    def _after_step(self) -> int | None:
        return self._launched if self._launched > self._applied else None

    def _free_kv(self, blocks: Iterable[BlockId]) -> None:
        self.kv_pool.free(blocks, self._after_step())

    def _free_residual(self, units: Iterable[BlockId]) -> None:
        self.residual_pool.free(units, self._after_step())

    # ---- room

    def room_for_kv(self, count: int) -> bool:
        """Make `count` K/V blocks allocatable, evicting unleased ones. False, and nothing evicted, if impossible."""
        missing = count - self.kv_pool.num_free
        if missing <= 0:
            return True
        if self._after_step() is not None or missing > self.tree.kv_unleased:
            return False
        evicted = self.tree.evict_kv(missing)
        self.evicted_kv_blocks += len(evicted)
        self._free_kv(evicted)
        return True

    def room_for_residual(self, count: int, *, unread_only: bool = False) -> bool:
        """The same for residual units; with `unread_only` every residual that a request ever read is spared (and
        never-read ones may go although they do not suffice)."""
        missing = count - self.residual_pool.num_free
        if missing <= 0:
            return True
        if self._after_step() is not None or missing > self.tree.residual.num_unleased:
            return False
        evicted = self.tree.evict_residual(missing, unread_only=unread_only)
        self.evicted_residual_units += len(evicted)
        self._free_residual(evicted)
        return len(evicted) >= missing

    # ---- the base tier of a sequence

    def admit(self, cache: SequenceCache, key: bytes) -> Growth:
        """Lease what the base tier and this adapter's residual hold of `key` below the fork. Mutates `cache`.

        `key` is the int32 bytes of all tokens of the sequence.
        """
        below = key[: self._aligned(min(cache.private_from, len(key) // TOKEN_BYTES)) * TOKEN_BYTES]
        namespace = self.tree.base_namespace(cache.scope, cache.writer)
        cache.base_lease, blocks = self.tree.base.acquire(namespace, below)
        cache.kv_blocks.extend(blocks)
        cache.stored = cache.base_depth
        units: list[BlockId] = []
        if cache.residual_digest is not None:
            namespace = self.tree.residual_namespace(cache.residual_digest, cache.scope)
            residual_key = self._residual_key(cache, below)
            cache.residual_lease, units = self.tree.residual.acquire(namespace, residual_key, ids_per_block=cache.tiles)
            cache.residual_tokens = cache.residual_lease.num_tokens
        k_units, v_units = self._append_units(cache, units)
        return Growth(tuple(blocks), k_units, v_units)

    def _residual_key(self, cache: SequenceCache, tokens: bytes) -> bytes:
        """Key of the residuals of `tokens` [whole blocks].

        Over base-written blocks the tokens themselves: they say all. In a mixed tree a residual belongs to the blocks
        that were read when it was made, so their publications stand in place of their tokens, as far as the sequence
        leases them. When such a block is evicted and written again, by whomever, older residuals fit no more.
        """
        if cache.writer == "base":
            return tokens
        blocks = cache.kv_blocks[: min(cache.base_depth // self.block_size, len(tokens) // self._block_bytes)]
        words = array("I", bytes(len(blocks) * self._block_bytes))
        words[:: self.block_size] = array("I", [self._publications[block] for block in blocks])
        return words.tobytes()

    def adopt(self, cache: SequenceCache, key: bytes) -> Growth:
        """Append what others published beyond this sequence's base tables since. Mandatory before `grow_base`.

        Only where every block of the table is leased: behind a block of its own that is not full yet, adopting would
        skip that block's tail. Mutates `cache`.
        """
        below = key[: self._aligned(min(cache.private_from, len(key) // TOKEN_BYTES)) * TOKEN_BYTES]
        blocks: list[BlockId] = []
        if cache.base_lease and len(cache.kv_blocks) * self.block_size == cache.base_depth:
            blocks = self.tree.base.deepen(cache.base_lease, below, read=True)
            cache.kv_blocks.extend(blocks)
            if blocks:
                cache.stored = cache.base_depth
        units: list[BlockId] = []
        if cache.residual_lease and cache.residual_depth == cache.residual_lease.num_tokens:
            units = self.tree.residual.deepen(cache.residual_lease, self._residual_key(cache, below), read=True)
            cache.residual_tokens = cache.residual_lease.num_tokens
        k_units, v_units = self._append_units(cache, units)
        return Growth(tuple(blocks), k_units, v_units)

    def grow_base(self, cache: SequenceCache, key: bytes, end: int, step_id: int) -> Growth | None:
        """Room for shared K, V and this adapter's residual of tokens up to `end`; publishes the full blocks.

        None, and nothing changed, if either pool cannot give it. Mutates `cache`.
        """
        blocks_wanted = max(0, self._blocks(end) - len(cache.kv_blocks))
        units_wanted = max(0, self._blocks(end) * cache.tiles - len(cache.k_units) - len(cache.v_units))
        if not (self.room_for_kv(blocks_wanted) and self.room_for_residual(units_wanted)):
            return None
        blocks = self.kv_pool.allocate(blocks_wanted)
        cache.kv_blocks.extend(blocks)
        cache.owned.update(blocks)
        duplicates = self._publish_base(cache, key, end, step_id)
        units = self.residual_pool.allocate(units_wanted)
        cache.owned_units.update(units)
        k_units, v_units = self._append_units(cache, units)
        if cache.residual_lease is not None:
            cache.residual_tokens = max(cache.residual_tokens, end)
            self._publish_own_residual(cache, cache.residual_lease, key, end, step_id)
        return Growth(tuple(blocks), k_units, v_units, duplicates)

    def _publish_base(self, cache: SequenceCache, key: bytes, end: int, step_id: int) -> int:
        """Publish the full blocks up to `end`; returns how many the tree had already.

        A mixed tree takes a block only from a sequence that read all blocks above it in that tree: where another one
        came first, this one goes on with blocks of its own.
        """
        full = self._aligned(end)
        lease = cache.base_lease
        if lease is None or full <= lease.num_tokens or cache.diverged:
            return 0
        tree, before, prefix = self.tree.base, lease.num_tokens, key[: full * TOKEN_BYTES]
        if cache.writer == "mixed":
            present = tree.peek(lease.node.root.namespace, prefix)
            if present > before:
                cache.diverged = True
                return (present - before) // self.block_size
        blocks = cache.kv_blocks[: full // self.block_size]
        duplicates = self._publish(tree, lease, prefix, blocks, cache, step_id)
        if cache.writer == "mixed":
            self._number(blocks[before // self.block_size :])
        return duplicates

    def _number(self, blocks: list[BlockId]) -> None:
        """Give each block the number of this publication of it; numbers repeat after 2^32 publications."""
        for block in blocks:
            self._num_publications = (self._num_publications + 1) % (1 << 32)
            self._publications[block] = self._num_publications

    def _publish(
        self, tree: RadixTree, lease: Lease, prefix: bytes, ids: list[BlockId], cache: SequenceCache, step_id: int
    ) -> int:
        """Insert `ids`; those the tree took are no longer the sequence's own. Returns how many it already had."""
        if lease.node.root.detached:
            return 0
        before = lease.num_tokens
        present = tree.insert(lease, prefix, ids, step_id)
        cache.owned.difference_update(ids[present // self.block_size :])
        tree.deepen(lease, prefix, read=False)
        return max(0, present - before) // self.block_size

    def _publish_own_residual(self, cache: SequenceCache, lease: Lease, key: bytes, end: int, step_id: int) -> None:
        """Publish the sequence's own units of the full blocks up to `end`."""
        full = self._aligned(end)
        if full <= lease.num_tokens:
            return
        prefix = self._residual_key(cache, key[: full * TOKEN_BYTES])
        units = cache.tree_units(lease.num_tokens // self.block_size, len(prefix) // self._block_bytes)
        if units:
            cache.owned_units.difference_update(self._publish_residual(lease, prefix, units, step_id))

    def _publish_residual(self, lease: Lease, prefix: bytes, units: list[BlockId], step_id: int) -> list[BlockId]:
        """Publish `units` for the blocks of `prefix` behind the lease; returns those that the tree took: none if its
        namespace was dropped."""
        if lease.node.root.detached:
            return []
        tree, before = self.tree.residual, lease.num_tokens
        present = tree.insert(lease, prefix, tree.covers(lease) + units, step_id)
        tree.deepen(lease, prefix, read=False)
        return units[(present - before) // self.block_size * lease.node.root.ids_per_block :]

    def _append_units(
        self, cache: SequenceCache, units: list[BlockId]
    ) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        if not units:
            return (), ()
        assert cache.adapter is not None
        k_units, v_units = split_units(units, cache.adapter.k_tiles, cache.adapter.v_tiles)
        cache.k_units.extend(k_units)
        cache.v_units.extend(v_units)
        return k_units, v_units

    def fan_out(
        self,
        cache: SequenceCache,
        key: bytes,
        start: int,
        end: int,
        adapters: Iterable[AdapterMeta],
        limit: int,
        step_id: int,
    ) -> list[ResidualWrite]:
        """Room for the residuals of the first `limit` of other adapters that lack them over the base segment
        [start, end), best effort.

        An adapter takes part if its own residual reaches at least to `start` and free or never-read units suffice:
        nothing that was ever read is evicted for it and nobody is preempted. The writer leases the path until its
        base part ends, so an adapter whose path vanished simply drops out. Mutates `cache.fanout_leases`.
        """
        prefix = key[: self._aligned(end) * TOKEN_BYTES]
        writes: list[ResidualWrite] = []
        for adapter in adapters:
            if len(writes) == limit:
                break
            write = self._fan_out_one(cache, prefix, start, adapter, step_id)
            if write is not None:
                writes.append(write)
        return writes

    def _fan_out_one(
        self, cache: SequenceCache, prefix: bytes, start: int, adapter: AdapterMeta, step_id: int
    ) -> ResidualWrite | None:
        tree = self.tree.residual
        namespace = self.tree.residual_namespace(adapter.digest, cache.scope)
        tiles = adapter.k_tiles + adapter.v_tiles
        end = len(prefix) // TOKEN_BYTES
        depth = tree.peek(namespace, prefix)
        if depth < start or depth >= end or not tiles:
            return None
        # Lease first: making room must not evict the very path that is about to be extended.
        lease = cache.fanout_leases.get(adapter.adapter_id)
        if lease is None:
            lease, _ = tree.acquire(namespace, prefix, ids_per_block=tiles, read=False)
            cache.fanout_leases[adapter.adapter_id] = lease
        else:
            tree.deepen(lease, prefix, read=False)
        if lease.num_tokens != depth or lease.node.root.detached:
            return None
        wanted = (end - depth) // self.block_size * tiles
        if not self.room_for_residual(wanted, unread_only=True):
            return None
        units = self.residual_pool.allocate(wanted)
        self._publish_residual(lease, prefix, units, step_id)
        k_units, v_units = split_units(units, adapter.k_tiles, adapter.v_tiles)
        return ResidualWrite(adapter.adapter_id, depth, k_units, v_units)

    def end_base_part(self, cache: SequenceCache) -> None:
        """The base part was applied: give the fan-out's leases back. Mutates `cache`."""
        for lease in cache.fanout_leases.values():
            self._free_residual(self.tree.residual.release(lease))
        cache.fanout_leases.clear()

    # ---- the private tier of a sequence

    def enter_private(self, cache: SequenceCache, key: bytes) -> Growth:
        """Lease this adapter's private blocks behind the fork that match `key`. Called once, when the base part is
        complete, or later to pick up what an equal sequence published meanwhile. Mutates `cache`."""
        whole = key[: self._aligned(len(key) // TOKEN_BYTES) * TOKEN_BYTES]
        first = len(cache.kv_blocks)
        if cache.private_lease is None:
            assert cache.adapter is not None
            namespace = self.tree.private_namespace(
                cache.adapter.digest, cache.scope, cache.weights_from, cache.private_from
            )
            cache.private_lease, ids = self.tree.private.acquire(namespace, whole)
            gained = ids[first:]
        elif first * self.block_size == max(cache.private_depth, cache.private_from):
            ids = self.tree.private.deepen(cache.private_lease, whole, read=True)
            gained = [block for block in ids if block != NULL_BLOCK]
        else:
            gained = []
        cache.kv_blocks.extend(gained)
        if gained:
            cache.stored = cache.private_depth
        return Growth(tuple(gained))

    def grow_private(self, cache: SequenceCache, key: bytes, end: int, step_id: int) -> Growth | None:
        """Room for merged K, V of tokens up to `end`; publishes the full blocks. None if the pool cannot give it."""
        wanted = max(0, self._blocks(end) - len(cache.kv_blocks))
        if not self.room_for_kv(wanted):
            return None
        blocks = self.kv_pool.allocate(wanted)
        cache.kv_blocks.extend(blocks)
        cache.owned.update(blocks)
        duplicates = 0
        full = self._aligned(end)
        lease = cache.private_lease
        if lease is not None and full > max(lease.num_tokens, cache.private_from):
            shared = cache.private_from // self.block_size
            ids = [NULL_BLOCK] * shared + cache.kv_blocks[shared : full // self.block_size]
            duplicates = self._publish(self.tree.private, lease, key[: full * TOKEN_BYTES], ids, cache, step_id)
        return Growth(tuple(blocks), duplicates=duplicates)

    def take_copy_target(self, cache: SequenceCache, num_tokens: int) -> BlockId | None:
        """A block of its own for the eager copy of the partial block that ends at `num_tokens` (n > 1); None if the
        pool cannot give it. Mutates `cache`."""
        if not self.room_for_kv(1):
            return None
        block = self.kv_pool.allocate(1)[0]
        cache.kv_blocks.append(block)
        cache.owned.add(block)
        cache.stored = num_tokens
        return block

    # ---- the end

    def release(self, cache: SequenceCache) -> None:
        """Free what the sequence owns and end its leases; its tables are empty afterwards. Mutates `cache`."""
        for lease, tree in ((cache.base_lease, self.tree.base), (cache.private_lease, self.tree.private)):
            if lease:
                self._free_kv(tree.release(lease))
        if cache.residual_lease:
            self._free_residual(self.tree.residual.release(cache.residual_lease))
        self.end_base_part(cache)
        self._free_kv(sorted(cache.owned))
        self._free_residual(sorted(cache.owned_units))
        cache.owned_units.clear()
        cache.stored = cache.residual_tokens = 0
        cache.diverged = False
        cache.base_lease = cache.residual_lease = cache.private_lease = None
        cache.owned.clear()
        for table in (cache.kv_blocks, cache.k_units, cache.v_units):
            table.clear()

    def drop_scope(self, scope: Hashable) -> None:
        """Forget everything cached under one salt (or one request, where reuse is off). Mutates."""
        kv, residual = self.tree.drop_scope(scope)
        self._free_kv(kv)
        self._free_residual(residual)

    def drop_digest(self, digest: str) -> None:
        """Forget the residuals and private blocks of one adapter; running sequences keep theirs. Mutates."""
        kv, residual = self.tree.drop_digest(digest)
        self._free_kv(kv)
        self._free_residual(residual)

    def flush(self) -> bool:
        """Free every unleased block; True if both pools are entirely free. Mutates."""
        self._free_kv(self.tree.evict_kv(self.kv_pool.total))
        self._free_residual(self.tree.evict_residual(self.residual_pool.total))
        return self.kv_pool.num_free == self.kv_pool.total and self.residual_pool.num_free == self.residual_pool.total

    # ---- inspection

    def kv_stats(self, block_bytes: int) -> PoolStats:
        free = self.kv_pool.num_free + self.kv_pool.num_deferred
        return PoolStats(self.kv_pool.total, free, self.tree.kv_unleased, block_bytes)

    def residual_stats(self, unit_bytes: int) -> PoolStats:
        free = self.residual_pool.num_free + self.residual_pool.num_deferred
        return PoolStats(self.residual_pool.total, free, self.tree.residual.num_unleased, unit_bytes)

    def check(self, caches: Iterable[SequenceCache]) -> None:
        """Assert the invariants of ownership over all live sequences. Pure; for tests and debugging."""
        live = list(caches)
        tree = self.tree
        base = tree.base.check([c.base_lease for c in live if c.base_lease])
        private = tree.private.check([c.private_lease for c in live if c.private_lease])
        residual_leases = [c.residual_lease for c in live if c.residual_lease]
        residual = tree.residual.check(residual_leases + [x for c in live for x in c.fanout_leases.values()])
        owned = [block for cache in live for block in cache.owned]
        _assert_partition(self.kv_pool, base + private + owned)
        _assert_partition(self.residual_pool, residual + [unit for cache in live for unit in cache.owned_units])
        for cache in live:
            assert cache.base_lease is None or cache.base_lease.node.root.namespace[0] == cache.writer
            covered = set(tree.base.covers(cache.base_lease)) if cache.base_lease else set()
            covered |= set(tree.private.covers(cache.private_lease)) if cache.private_lease else set()
            loose = [block for block in cache.kv_blocks if block not in covered and block not in cache.owned]
            assert not loose, f"blocks {loose} stand in a table without lease or owner"
            units = set(tree.residual.covers(cache.residual_lease)) if cache.residual_lease else set()
            units |= cache.owned_units
            assert set(cache.k_units) | set(cache.v_units) <= units, "residual units without a lease"

    @property
    def _block_bytes(self) -> int:
        return self.block_size * TOKEN_BYTES

    def _aligned(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _assert_partition(pool: BlockPool, taken: list[BlockId]) -> None:
    everything = pool.unowned() + taken
    assert len(everything) == pool.total, f"{len(everything)} blocks accounted for, the pool has {pool.total}"
    assert set(everything) == set(range(1, pool.total + 1)), "a block has two owners or none"
