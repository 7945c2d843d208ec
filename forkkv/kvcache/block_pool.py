"""Free list of one paged pool. Knows ids only; bytes live in the executor, ownership in `KVCacheManager`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from forkkv.types import BlockId


class BlockPool:
    """Ids 1 .. num_blocks - 1; id 0 is the null block and never handed out.

    A plan that was launched may still read a block that the scheduler has given up meanwhile. Such a block is freed
    *after* a step: it becomes allocatable only when every plan launched up to that step was applied.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._deferred: deque[tuple[int, list[BlockId]]] = deque()
        self._num_deferred = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_deferred(self) -> int:
        """Blocks that nobody owns and that wait for a launched step to be applied."""
        return self._num_deferred

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks. Mutates; raises `IndexError` when fewer are free (callers check `num_free`)."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def free(self, blocks: Iterable[BlockId], after_step: int | None = None) -> None:
        """Give blocks back, at once or when `after_step` was applied. Mutates."""
        if after_step is None:
            self._free.extend(blocks)
            return
        waiting = list(blocks)
        self._deferred.append((after_step, waiting))
        self._num_deferred += len(waiting)

    def on_applied(self, step_id: int) -> None:
        """Every plan up to `step_id` was applied: what waited for it becomes free. Mutates."""
        while self._deferred and self._deferred[0][0] <= step_id:
            _, blocks = self._deferred.popleft()
            self._num_deferred -= len(blocks)
            self._free.extend(blocks)

    def unowned(self) -> list[BlockId]:
        """All free and deferred ids, for `check()`."""
        return self._free + [block for _, blocks in self._deferred for block in blocks]
