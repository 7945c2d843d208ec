"""A block-aligned radix tree over token ids, one root per namespace.

Edges are compressed and keyed by the raw int32 bytes of their tokens, so comparing a long shared context is one
memcmp per edge, and tokens are compared as tokens, never as hashes. Each block of an edge carries `ids_per_block` ids
of a paged pool (one K/V block; or the K and V units of a residual; or `NULL_BLOCK` where the path only positions a
private chain). The tree never touches a pool: whoever removes nodes receives the ids.

Verbs tell the truth: `peek` is pure, `acquire` locks, `insert` publishes, `evict` and `drop` give ids back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from forkkv.types import NULL_BLOCK, BlockId

TOKEN_BYTES = 4
Namespace = tuple[Hashable, ...]


class Node:
    """One edge and its lower end. `locks` counts the leases at or below; `step` is the plan that published it."""

    __slots__ = ("children", "ids", "key", "last_access", "locks", "parent", "root", "step", "was_read")

    root: Root

    def __init__(self, parent: Node | None, key: bytes, ids: list[BlockId], step: int):
        if parent is not None:
            self.root = parent.root
        self.parent = parent
        self.key = key
        self.ids = ids
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.was_read = False
        self.step = step


class Root(Node):
    """The empty path of one namespace."""

    __slots__ = ("detached", "ids_per_block", "namespace", "num_ids")

    def __init__(self, namespace: Namespace, ids_per_block: int):
        super().__init__(None, b"", [], -1)
        self.root = self
        self.namespace = namespace
        self.ids_per_block = ids_per_block
        self.num_ids = 0
        self.detached = False


@dataclass(slots=True, eq=False)
class Lease:
    """A lock on the path of `num_tokens` tokens. Held by exactly one owner and released exactly once."""

    node: Node
    num_tokens: int
    live: bool = True


class RadixTree:
    """See the module docstring. `tick` is the logical clock shared by the trees that compete for one pool;
    `prefer_unread` makes leaves that no later request ever hit the first to be evicted."""

    def __init__(self, block_size: int, tick: Callable[[], int], *, prefer_unread: bool = False):
        self.block_size = block_size
        self.num_ids = 0
        """Ids (null ids not counted) owned by the tree, leased or not."""
        self.num_unleased = 0
        """Those of them that no lease covers: all can be had by `evict`."""
        self.num_leases = 0
        self.ids_by_owner: dict[Hashable, int] = {}
        """Ids owned by the first component of their namespace (an adapter's digest); owners without any are absent."""
        self._block_bytes = block_size * TOKEN_BYTES
        self._tick = tick
        self._prefer_unread = prefer_unread
        self._roots: dict[Namespace, Root] = {}
        self._detached: set[Root] = set()
        self._heap: list[tuple[int, int, int, Node]] = []
        self._pushes = 0
        self._unsettled: dict[int, list[Node]] = {}
        self._released: list[BlockId] = []

    # ---- reading

    def peek(self, namespace: Namespace, key: bytes) -> int:
        """Tokens of the longest stored prefix of `key`, a multiple of the block size. Pure."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        matched = 0
        for _, common in self._walk(root, key):
            matched += common
        return matched // TOKEN_BYTES

    def _walk(self, root: Root, key: bytes) -> Iterator[tuple[Node, int]]:
        """Yield (node, matching bytes of its edge), block aligned, along `key`. Pure."""
        node: Node = root
        position, step = 0, self._block_bytes
        while position + step <= len(key):
            child = node.children.get(key[position : position + step])
            if child is None:
                return
            common = self._common(child.key, key, position)
            yield child, common
            if common < len(child.key):
                return
            position += common
            node = child

    def _common(self, edge: bytes, key: bytes, position: int) -> int:
        """Bytes of `edge` equal to `key[position:]`, rounded down to blocks; the usual case is one comparison."""
        step = self._block_bytes
        limit = min(len(edge), len(key) - position) // step * step
        if edge[:limit] == key[position : position + limit]:
            return limit
        low, high = 0, limit // step
        while high - low > 1:
            middle = (low + high) // 2
            if edge[: middle * step] == key[position : position + middle * step]:
                low = middle
            else:
                high = middle
        return low * step

    # ---- leases

    def acquire(
        self, namespace: Namespace, key: bytes, *, ids_per_block: int = 1, read: bool = True
    ) -> tuple[Lease, list[BlockId]]:
        """Lock the longest stored prefix of `key`; return the lease and the ids of its blocks, in order.

        Mutates: splits the last edge at the boundary, touches the path; `read` marks it as hit by a reader.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace, ids_per_block)
        node: Node = root
        ids: list[BlockId] = []
        depth = 0
        for child, common in list(self._walk(root, key)):
            node = child if common == len(child.key) else self._split(child, common)
            ids.extend(node.ids)
            depth += common
        self._lock(node)
        now = self._tick()
        walk: Node | None = node
        while walk is not None and walk is not root:
            walk.last_access = now
            walk.was_read = walk.was_read or read
            walk = walk.parent
        self.num_leases += 1
        return Lease(node, depth // TOKEN_BYTES), ids

    def deepen(self, lease: Lease, key: bytes, *, read: bool) -> list[BlockId]:
        """Move `lease` down along `key` as far as the tree reaches; return the ids of the blocks gained.

        Mutates the lease. Never moves it shallower: `key` starts with the leased tokens.
        """
        root = lease.node.root
        if root.detached:
            return []
        deeper, ids = self.acquire(root.namespace, key, read=read)
        assert deeper.num_tokens >= lease.num_tokens, "a lease never moves shallower"
        gained = ids[lease.num_tokens // self.block_size * root.ids_per_block :]
        old = Lease(lease.node, lease.num_tokens)
        lease.node, lease.num_tokens = deeper.node, deeper.num_tokens
        self.release(old)
        return gained

    def release(self, lease: Lease) -> list[BlockId]:
        """End a lease. Returns ids to free: those of a detached namespace whose last lease this was. Mutates."""
        assert lease.live, "a lease is released once"
        lease.live = False
        self.num_leases -= 1
        self._unlock(lease.node)
        return self._take_released()

    def _lock(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.num_unleased -= _count(walk.ids)
            walk.locks += 1
            walk = walk.parent

    def _unlock(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            walk.locks -= 1
            parent = walk.parent
            if walk.locks == 0:
                self.num_unleased += _count(walk.ids)
                self._offer(walk)
            walk = parent

    # ---- publishing

    def insert(self, lease: Lease, key: bytes, ids: list[BlockId], step: int) -> int:
        """Publish `ids` for the blocks of `key` in the namespace of `lease`; return how many leading tokens were
        present already (all of them if the namespace was dropped: nothing is published there any more).

        The ids of those leading blocks are not taken: they stay the caller's. Mutates. `step` is the plan that
        writes the new blocks; `withdraw(step)` takes them back if it fails, `settle(step)` forgets that.
        """
        root = lease.node.root
        assert len(key) % self._block_bytes == 0
        assert len(ids) * self._block_bytes == len(key) * root.ids_per_block
        if root.detached:
            return len(key) // TOKEN_BYTES
        node: Node = root
        depth = 0
        for child, common in list(self._walk(root, key)):
            node = child if common == len(child.key) else self._split(child, common)
            depth += common
        if depth < len(key):
            self._append(root, node, key[depth:], ids[depth // self._block_bytes * root.ids_per_block :], step)
        return depth // TOKEN_BYTES

    def _append(self, root: Root, parent: Node, key: bytes, ids: list[BlockId], step: int) -> None:
        node = Node(parent, key, ids, step)
        node.last_access = self._tick()
        parent.children[key[: self._block_bytes]] = node
        self._count_ids(root, _count(ids))
        self._unsettled.setdefault(step, []).append(node)
        self._offer(node)

    def _split(self, node: Node, size: int) -> Node:
        """Cut the edge of `node` after `size` bytes; return the new upper node. Leases keep pointing at the lower."""
        root, parent = node.root, node.parent
        assert parent is not None
        cut = size // self._block_bytes * root.ids_per_block
        upper = Node(parent, node.key[:size], node.ids[:cut], node.step)
        upper.locks, upper.last_access, upper.was_read = node.locks, node.last_access, node.was_read
        upper.children[node.key[size : size + self._block_bytes]] = node
        parent.children[upper.key[: self._block_bytes]] = upper
        node.key, node.ids, node.parent = node.key[size:], node.ids[cut:], upper
        if node.step in self._unsettled:
            self._unsettled[node.step].append(upper)
        return upper

    def settle(self, step: int) -> None:
        """The plan `step` was applied: what it published stays. Mutates."""
        self._unsettled.pop(step, None)

    def withdraw(self, step: int) -> list[BlockId]:
        """The plan `step` failed: remove what it published and return the ids. Every lease on it is gone by now."""
        ids: list[BlockId] = []
        for node in self._unsettled.pop(step, []):
            if node.parent is not None and node.parent.children.get(node.key[: self._block_bytes]) is node:
                ids.extend(self._remove(node))
        return ids + self._take_released()

    # ---- giving back

    def next_victim(self, *, unread_only: bool = False) -> tuple[int, int] | None:
        """(class, last access) of the leaf that `evict` would take, smaller goes first; None if there is none.

        Drops stale heap entries on the way, which changes nothing that can be seen.
        """
        while self._heap:
            rank, access, _, node = self._heap[0]
            if node.parent is not None and not node.children and node.locks == 0 and node.last_access == access:
                return None if unread_only and rank > 0 else (rank, access)
            heapq.heappop(self._heap)
        return None

    def evict(self, max_blocks: int, *, unread_only: bool = False) -> list[BlockId]:
        """Take up to `max_blocks` blocks off the tail of the next leaf; return their ids. Mutates."""
        if self.next_victim(unread_only=unread_only) is None:
            return []
        node = self._heap[0][3]
        root = node.root
        take = max_blocks * root.ids_per_block
        keep = len(node.ids) - take
        if keep <= 0 or not any(node.ids[:keep]):
            return self._remove(node)
        ids = [block for block in node.ids[keep:] if block != NULL_BLOCK]
        node.key = node.key[: keep // root.ids_per_block * self._block_bytes]
        del node.ids[keep:]
        self._count_ids(root, -len(ids))
        return ids

    def drop(self, namespace: Namespace) -> list[BlockId]:
        """Detach a root: no new hits. Returns the unleased ids at once; the rest comes from `release`. Mutates."""
        root = self._roots.pop(namespace, None)
        if root is None:
            return []
        root.detached = True
        self._detached.add(root)
        ids = self._prune(root)
        self._forget_if_empty(root)
        return ids + self._take_released()

    def _prune(self, node: Node) -> list[BlockId]:
        """Remove every unleased subtree below `node`."""
        ids: list[BlockId] = []
        for child in list(node.children.values()):
            ids.extend(self._remove(child) if child.locks == 0 else self._prune(child))
        return ids

    def _remove(self, node: Node) -> list[BlockId]:
        """Take the unleased subtree at `node` out of the tree; return its ids."""
        root, parent = node.root, node.parent
        assert parent is not None
        ids: list[BlockId] = []
        stack = [node]
        del parent.children[node.key[: self._block_bytes]]
        while stack:
            gone = stack.pop()
            assert gone.locks == 0, "a leased block is never removed"
            gone.parent = None
            ids.extend(block for block in gone.ids if block != NULL_BLOCK)
            stack.extend(gone.children.values())
        self._count_ids(root, -len(ids))
        self._offer(parent)
        return ids

    def _count_ids(self, root: Root, change: int) -> None:
        """Unleased ids come (change > 0) or go."""
        self.num_ids += change
        self.num_unleased += change
        root.num_ids += change
        owner = root.namespace[0]
        left = self.ids_by_owner.get(owner, 0) + change
        if left:
            self.ids_by_owner[owner] = left
        else:
            self.ids_by_owner.pop(owner, None)

    def _offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unleased leaf; free it at once if its namespace is detached."""
        if node.locks or node.children:
            return
        if isinstance(node, Root):
            self._forget_if_empty(node)
            return
        root = node.root
        if root.detached:
            self._released.extend(self._remove(node))
            return
        rank = 0 if self._prefer_unread and not node.was_read else 1
        self._pushes += 1
        heapq.heappush(self._heap, (rank, node.last_access, self._pushes, node))

    def _forget_if_empty(self, root: Root) -> None:
        if root.locks == 0 and not root.children:
            self._detached.discard(root)
            if self._roots.get(root.namespace) is root:
                del self._roots[root.namespace]

    def _take_released(self) -> list[BlockId]:
        released, self._released = self._released, []
        return released

    # ---- inspection

    def namespaces(self) -> Iterator[tuple[Namespace, int]]:
        """(namespace, ids owned) of every attached root."""
        for namespace, root in self._roots.items():
            yield namespace, root.num_ids

    def covers(self, lease: Lease) -> list[BlockId]:
        """Ids on the leased path, in order. Pure."""
        path: list[Node] = []
        walk: Node | None = lease.node
        while walk is not None:
            path.append(walk)
            walk = walk.parent
        return [block for node in reversed(path) for block in node.ids]

    def check(self, leases: list[Lease]) -> list[BlockId]:
        """Assert the tree's own invariants against its live `leases`; return every id it owns. Pure."""
        held: dict[int, int] = {}
        for lease in leases:
            assert lease.live
            walk: Node | None = lease.node
            while walk is not None:
                held[id(walk)] = held.get(id(walk), 0) + 1
                walk = walk.parent
        assert self.num_leases == len(leases), f"{self.num_leases} leases counted, {len(leases)} live"
        owned: list[BlockId] = []
        unleased = 0
        for root in [*self._roots.values(), *self._detached]:
            in_root = 0
            stack: list[Node] = [root]
            while stack:
                node = stack.pop()
                assert node.locks == held.get(id(node), 0), "lock count differs from live leases"
                assert len(node.ids) * self._block_bytes == len(node.key) * root.ids_per_block
                count = _count(node.ids)
                in_root += count
                unleased += count if node.locks == 0 else 0
                owned.extend(block for block in node.ids if block != NULL_BLOCK)
                for first, child in node.children.items():
                    assert child.parent is node and child.key.startswith(first) and child.locks <= node.locks
                    stack.append(child)
            assert in_root == root.num_ids
        assert len(owned) == self.num_ids == sum(self.ids_by_owner.values()) and unleased == self.num_unleased
        return owned


def _count(ids: list[BlockId]) -> int:
    """Real ids in a list that may hold null blocks."""
    return len(ids) - ids.count(NULL_BLOCK)
