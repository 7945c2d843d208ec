"""Which adapters are served, and which of them sit in the weight slots of the executor. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forkkv.errors import ConfigError
from forkkv.types import BASE_ADAPTER, AdapterId, AdapterMeta


class AdapterRegistry:
    """Adapters by name and id, in the order they were added. Names are compared exactly: case and blanks count."""

    def __init__(self, adapters: Iterable[AdapterMeta] = ()):
        self._by_id: dict[AdapterId, AdapterMeta] = {}
        self._by_name: dict[str, AdapterMeta] = {}
        for meta in adapters:
            self.add(meta)

    def add(self, meta: AdapterMeta) -> None:
        """Register an adapter. Raises `ConfigError` if its name or id is taken or the id is the base model's."""
        if meta.adapter_id == BASE_ADAPTER:
            raise ConfigError(f"adapter {meta.name!r} has id {BASE_ADAPTER}, which is the base model")
        if meta.name in self._by_name or meta.adapter_id in self._by_id:
            raise ConfigError(f"an adapter named {meta.name!r} or with id {meta.adapter_id} is already registered")
        self._by_id[meta.adapter_id] = meta
        self._by_name[meta.name] = meta

    def remove(self, adapter_id: AdapterId) -> AdapterMeta:
        """Forget an adapter and return it; its id is never given to another. Raises `KeyError` if unknown."""
        meta = self._by_id.pop(adapter_id)
        del self._by_name[meta.name]
        return meta

    def by_name(self, name: str) -> AdapterMeta | None:
        return self._by_name.get(name)

    def by_id(self, adapter_id: AdapterId) -> AdapterMeta:
        """Raises `KeyError` if unknown; the base model is not in the registry."""
        return self._by_id[adapter_id]

    def list(self) -> tuple[AdapterMeta, ...]:
        return tuple(self._by_id.values())

    def names_of_digest(self, digest: str) -> tuple[str, ...]:
        """Names of all adapters of these weights; a cache keyed by the digest lives until the last one goes."""
        return tuple(meta.name for meta in self._by_id.values() if meta.digest == digest)

    def team_of(self, adapter_id: AdapterId) -> tuple[AdapterMeta, ...]:
        """All members of the adapter's team, itself included; empty if it has no team. Raises `KeyError`."""
        team = self._by_id[adapter_id].team
        if team is None:
            return ()
        return tuple(meta for meta in self._by_id.values() if meta.team == team)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[AdapterMeta]:
        return iter(self.list())

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._by_id


@dataclass(slots=True)
class _Slot:
    index: int
    holders: int
    last_used: int


class AdapterSlots:
    """Assigns adapters to `max_loras` weight slots: reference counted, the least recently used free one is replaced.

    A slot that anyone holds is never given away, so the slot numbers in a running batch stay true.
    """

    def __init__(self, max_loras: int):
        self.max_loras = max_loras
        self._slots: dict[AdapterId, _Slot] = {}
        self._empty = list(range(max_loras - 1, -1, -1))
        self._clock = 0

    def acquire(self, adapter_id: AdapterId) -> tuple[int, bool] | None:
        """Hold a slot for the adapter: (slot, whether its weights must be loaded first), or None while all slots are
        held for others. Each success needs one `release`."""
        self._clock += 1
        if slot := self._slots.get(adapter_id):
            slot.holders += 1
            slot.last_used = self._clock
            return slot.index, False
        index = self._take_slot()
        if index is None:
            return None
        self._slots[adapter_id] = _Slot(index, holders=1, last_used=self._clock)
        return index, True

    def release(self, adapter_id: AdapterId) -> None:
        """Give back one hold; the weights stay until the slot is needed. Raises `ValueError` if nothing is held."""
        slot = self._slots.get(adapter_id)
        if slot is None or slot.holders == 0:
            raise ValueError(f"adapter {adapter_id} holds no slot")
        slot.holders -= 1

    def discard(self, adapter_id: AdapterId) -> None:
        """Forget the weights of an adapter that nobody holds (unloaded, or its load failed), so that the next
        `acquire` asks for a load. No effect if it has no slot. Raises `ValueError` while it is held."""
        slot = self._slots.get(adapter_id)
        if slot is None:
            return
        if slot.holders:
            raise ValueError(f"adapter {adapter_id} is in use by {slot.holders}")
        self._empty.append(slot.index)
        del self._slots[adapter_id]

    def slot_of(self, adapter_id: AdapterId) -> int | None:
        slot = self._slots.get(adapter_id)
        return slot.index if slot else None

    def holders(self, adapter_id: AdapterId) -> int:
        slot = self._slots.get(adapter_id)
        return slot.holders if slot else 0

    @property
    def num_users(self) -> int:
        """Holds of all adapters together."""
        return sum(slot.holders for slot in self._slots.values())

    def _take_slot(self) -> int | None:
        if self._empty:
            return self._empty.pop()
        idle = [adapter_id for adapter_id, slot in self._slots.items() if slot.holders == 0]
        if not idle:
            return None
        oldest = min(idle, key=lambda adapter_id: self._slots[adapter_id].last_used)
        return self._slots.pop(oldest).index

    def check(self) -> None:
        """Assert that every slot is empty or has exactly one adapter, and that no count is negative."""
        used = [slot.index for slot in self._slots.values()]
        assert sorted(used + self._empty) == list(range(self.max_loras)), (used, self._empty)
        assert all(slot.holders >= 0 for slot in self._slots.values())
