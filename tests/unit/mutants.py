"""Eight faults, each planted into the real code for as long as a `with` block lasts.

They are the mistakes that engines of this kind have made in public, or that this design invites. The state machine
must catch every one of them; a check that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from forkkv.kvcache.dual_tree import DualRadixTree
from forkkv.kvcache.manager import KVCacheManager
from forkkv.kvcache.radix_tree import TOKEN_BYTES, Lease
from forkkv.scheduler.segments import SegmentPlanner
from forkkv.types import Segment


def duplicates_freed_but_kept_in_the_table(self, tree, lease, prefix, ids, cache, step_id):
    """Blocks that a tree held already go back to the pool while the sequence still reads them."""
    before = lease.num_tokens
    present = tree.insert(lease, prefix, ids, step_id)
    cache.owned.difference_update(ids[present // self.block_size :])
    duplicates = [
        block for block in ids[before // self.block_size : present // self.block_size] if block in cache.owned
    ]
    cache.owned.difference_update(duplicates)
    self.kv_pool.free(duplicates)
    tree.deepen(lease, prefix, read=False)
    return len(duplicates)


def published_without_pin(self, tree, lease, prefix, ids, cache, step_id):
    """Blocks are given to the tree, and the writer does not lease them."""
    if lease.node.root.detached:
        return 0
    before = lease.num_tokens
    present = tree.insert(lease, prefix, ids, step_id)
    cache.owned.difference_update(ids[present // self.block_size :])
    return max(0, present - before) // self.block_size


def private_key_without_fork_point(digest, scope, weights_from, private_from):
    """Private blocks of one adapter are shared between fork points."""
    return (digest, scope)


def lease_moves_shallower(self, tree, lease, prefix, ids, cache, step_id):
    """Publishing anchors the lease at the last block but one."""
    duplicates = _publish(self, tree, lease, prefix, ids, cache, step_id)
    shorter = prefix[: max(0, lease.num_tokens - self.block_size) * 4]
    moved, _ = tree.acquire(lease.node.root.namespace, shorter, ids_per_block=lease.node.root.ids_per_block, read=False)
    old = Lease(lease.node, lease.num_tokens)
    lease.node, lease.num_tokens = moved.node, moved.num_tokens
    tree.release(old)
    return duplicates


def residual_read_above_the_fork(self, sequence, segment, plan):
    """Attention adds the residual to the adapter's own merged K, V too."""
    if segment.residual_len:
        fields = {name: getattr(segment, name) for name in Segment.__slots__}
        segment = Segment(**{**fields, "residual_len": segment.residual_len + sequence.cache.block_size})
    _emit(self, sequence, segment, plan)


def salt_dropped(scope, writer):
    """Shared blocks of one tenant answer another."""
    return (writer, "")


def residual_key_without_the_writer(self, cache, tokens):
    """Residuals over blocks that agents wrote are found by their tokens alone."""
    return tokens


def published_behind_anothers_block(self, cache, key, end, step_id):
    """A sequence that came second with a block offers what it computed behind its own copy of it."""
    lease, full = cache.base_lease, self._aligned(end)
    if lease is None or full <= lease.num_tokens:
        return 0
    blocks, new = cache.kv_blocks[: full // self.block_size], lease.num_tokens // self.block_size
    duplicates = self._publish(self.tree.base, lease, key[: full * TOKEN_BYTES], blocks, cache, step_id)
    self._number(blocks[new:])
    return duplicates


_publish = KVCacheManager._publish
_emit = SegmentPlanner._emit
_TARGETS: dict[Callable, tuple[type, str, bool]] = {
    duplicates_freed_but_kept_in_the_table: (KVCacheManager, "_publish", False),
    published_without_pin: (KVCacheManager, "_publish", False),
    private_key_without_fork_point: (DualRadixTree, "private_namespace", True),
    lease_moves_shallower: (KVCacheManager, "_publish", False),
    residual_read_above_the_fork: (SegmentPlanner, "_emit", False),
    salt_dropped: (DualRadixTree, "base_namespace", True),
    residual_key_without_the_writer: (KVCacheManager, "_residual_key", False),
    published_behind_anothers_block: (KVCacheManager, "_publish_base", False),
}
MIXED_TREE_MUTANTS = (residual_key_without_the_writer, published_behind_anothers_block)
"""Faults that only show where agents read what agents wrote."""
MUTANTS = tuple(mutant for mutant in _TARGETS if mutant not in MIXED_TREE_MUTANTS)


@contextmanager
def planted(mutant: Callable) -> Iterator[None]:
    """Run with `mutant` in place of the code that it spoils."""
    owner, name, is_static = _TARGETS[mutant]
    with patch.object(owner, name, staticmethod(mutant) if is_static else mutant):
        yield
