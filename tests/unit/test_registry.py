"""AdapterRegistry and AdapterSlots: names, digests, teams, and who may sit in which weight slot."""

from __future__ import annotations

import random

import pytest

from forkkv.errors import ConfigError
from forkkv.lora.registry import AdapterRegistry, AdapterSlots
from forkkv.types import AdapterMeta


def meta(adapter_id: int, name: str, digest: str = "", team: str | None = None) -> AdapterMeta:
    return AdapterMeta(adapter_id, name, digest or name, "plain", rank_k=8, rank_v=8, team=team)


def test_finds_by_name_and_id():
    registry = AdapterRegistry([meta(1, "ad1"), meta(2, "ad2")])
    found = registry.by_name("ad2")
    assert found is not None and found.adapter_id == 2
    assert registry.by_id(1).name == "ad1"
    assert [entry.name for entry in registry] == ["ad1", "ad2"] and len(registry) == 2 and 2 in registry


@pytest.mark.parametrize("name", ["AD1", "ad1 ", " ad1", "", "no-such-adapter"])
def test_a04_only_the_exact_name_is_found(name: str):
    assert AdapterRegistry([meta(1, "ad1")]).by_name(name) is None


@pytest.mark.parametrize("second", [meta(1, "other"), meta(2, "ad1"), meta(0, "base")])
def test_refuses_a_taken_name_or_id_and_the_base_id(second: AdapterMeta):
    registry = AdapterRegistry([meta(1, "ad1")])
    with pytest.raises(ConfigError):
        registry.add(second)
    assert registry.list() == (meta(1, "ad1"),)


def test_names_that_share_a_digest():
    registry = AdapterRegistry([meta(1, "a", "d"), meta(2, "b", "d"), meta(3, "c", "e")])
    assert registry.names_of_digest("d") == ("a", "b")
    assert registry.remove(1).name == "a"
    assert registry.names_of_digest("d") == ("b",)
    with pytest.raises(KeyError):
        registry.by_id(1)


def test_team_members_include_the_adapter_itself():
    registry = AdapterRegistry([meta(1, "a", team="t"), meta(2, "b"), meta(3, "c", team="t"), meta(4, "d", team="u")])
    assert [entry.name for entry in registry.team_of(3)] == ["a", "c"]
    assert registry.team_of(2) == ()


def test_a_held_slot_is_shared_and_loaded_once():
    slots = AdapterSlots(2)
    assert slots.acquire(1) == (0, True)
    assert slots.acquire(1) == (0, False)
    assert slots.acquire(2) == (1, True)
    assert slots.acquire(3) is None
    slots.release(1)
    assert slots.acquire(3) is None, "adapter 1 is still held once"
    slots.release(1)
    assert slots.acquire(3) == (0, True)
    assert slots.slot_of(1) is None and slots.slot_of(3) == 0 and slots.holders(3) == 1
    slots.check()


def test_the_least_recently_used_idle_adapter_gives_way():
    slots = AdapterSlots(2)
    for adapter_id in (1, 2, 1):
        slots.acquire(adapter_id)
        slots.release(adapter_id)
    assert slots.acquire(3) == (1, True)
    assert slots.acquire(1) == (0, False), "weights of an idle adapter stay"


def test_discard_asks_for_a_new_load_and_refuses_what_is_held():
    slots = AdapterSlots(1)
    slots.acquire(1)
    with pytest.raises(ValueError):
        slots.discard(1)
    slots.release(1)
    slots.discard(1)
    slots.discard(1)
    assert slots.acquire(1) == (0, True)


def test_release_without_a_hold_is_an_error():
    slots = AdapterSlots(1)
    with pytest.raises(ValueError):
        slots.release(1)
    slots.acquire(1)
    slots.release(1)
    with pytest.raises(ValueError):
        slots.release(1)


def test_held_slots_never_move_under_random_use():
    random_source = random.Random(0)
    slots, held = AdapterSlots(3), {}
    for _ in range(2000):
        adapter_id = random_source.randint(1, 6)
        if random_source.random() < 0.5:
            if got := slots.acquire(adapter_id):
                held.setdefault(adapter_id, []).append(got[0])
            else:
                assert len(held) == 3 and adapter_id not in held
        elif held.get(adapter_id):
            held[adapter_id].pop()
            slots.release(adapter_id)
        held = {key: value for key, value in held.items() if value}
        slots.check()
        for key, indices in held.items():
            assert {slots.slot_of(key)} == set(indices) and slots.holders(key) == len(indices)
