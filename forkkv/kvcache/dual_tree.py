"""DualRadixTree: the facade over the base tier and the adapter tier.

Base tier: one tree of shared K/V blocks, per writer class (base weights, or agents) and salt. Adapter tier: a tree of
residual units per (adapter digest, salt), and a tree of private K/V blocks per (digest, salt, fork point), whose key is
all tokens from 0 with null blocks where the base tier holds the bytes. Base and private blocks compete for the K/V
pool, residual units have a pool of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

from forkkv.kvcache.radix_tree import Namespace, RadixTree
from forkkv.types import BlockId, WriterClass


class DualRadixTree:
    """Three trees, one clock, and the rules between them. The only owner of namespaces.

    There is no rule that ties a residual to the base blocks under it: a residual whose base part was evicted is
    harmless, a later request recomputes the base part alone, and it ages out by itself otherwise.
    """

    def __init__(self, block_size: int):
        tick = itertools.count(1).__next__
        self.base = RadixTree(block_size, tick)
        self.residual = RadixTree(block_size, tick, prefer_unread=True)
        self.private = RadixTree(block_size, tick, prefer_unread=True)

    @staticmethod
    def base_namespace(scope: Hashable, writer: WriterClass) -> Namespace:
        """Base-written blocks are the same whoever comes first, so the scope (salt) is all there is to tell apart;
        what agents wrote depends on who came first, and is read by none but agents."""
        return (writer, scope)

    @staticmethod
    def residual_namespace(digest: str, scope: Hashable) -> Namespace:
        return (digest, scope)

    @staticmethod
    def private_namespace(digest: str, scope: Hashable, weights_from: int, private_from: int) -> Namespace:
        """K, V behind the fork depend on where it lies, so the fork point is part of their identity."""
        return (digest, scope, weights_from, private_from)

    @property
    def kv_unleased(self) -> int:
        return self.base.num_unleased + self.private.num_unleased

    @property
    def kv_ids(self) -> int:
        return self.base.num_ids + self.private.num_ids

    @property
    def num_leases(self) -> int:
        return self.base.num_leases + self.private.num_leases + self.residual.num_leases

    def evict_kv(self, count: int) -> list[BlockId]:
        """Take `count` K/V blocks (or what there is): private leaves never read first, then base and private leaves
        by LRU. Mutates."""
        freed: list[BlockId] = []
        while len(freed) < count:
            victims = [(victim, tree) for tree in (self.private, self.base) if (victim := tree.next_victim())]
            if not victims:
                break
            tree = min(victims, key=lambda entry: entry[0])[1]
            freed.extend(tree.evict(count - len(freed)))
        return freed

    def evict_residual(self, count: int, *, unread_only: bool = False) -> list[BlockId]:
        """Take at least `count` residual units (or what there is): never-read ones first, read ones last, since
        losing a residual that is in use costs its owner a whole base prefill. Mutates."""
        freed: list[BlockId] = []
        while len(freed) < count and self.residual.next_victim(unread_only=unread_only):
            freed.extend(self.residual.evict(1, unread_only=unread_only))
        return freed

    def drop_scope(self, scope: Hashable) -> tuple[list[BlockId], list[BlockId]]:
        """Drop every namespace of a scope; (K/V ids, residual ids) freed at once. Mutates."""
        return self._drop(lambda namespace: namespace[1] == scope)

    def drop_digest(self, digest: str) -> tuple[list[BlockId], list[BlockId]]:
        """Drop the adapter tier of one set of weights; (K/V ids, residual ids) freed at once. Mutates."""
        return self._drop(lambda namespace: namespace[0] == digest)

    def _drop(self, matches: Callable[[Namespace], bool]) -> tuple[list[BlockId], list[BlockId]]:
        kv: list[BlockId] = []
        for tree in (self.base, self.private):
            for namespace in [name for name, _ in tree.namespaces() if matches(name)]:
                kv.extend(tree.drop(namespace))
        residual: list[BlockId] = []
        for namespace in [name for name, _ in self.residual.namespaces() if matches(name)]:
            residual.extend(self.residual.drop(namespace))
        return kv, residual

    @property
    def num_residual_digests(self) -> int:
        """Adapters (by digest) with at least one unit in the rCache."""
        return len(self.residual.ids_by_owner)

    def settle(self, step: int) -> None:
        for tree in (self.base, self.private, self.residual):
            tree.settle(step)
