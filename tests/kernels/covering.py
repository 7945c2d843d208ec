"""Pairwise covering arrays: few test cases in which any two parameters take every combination of their values."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

MAX_CASES = 150
_CANDIDATES = 12
"""Cases drawn for every place in the array; the one that covers most is kept."""

Pair = tuple[str, int, str, int]


def covering_array(parameters: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases {name: value} such that every pair of values of two parameters stands in at least one of them.

    Greedy and the same for the same arguments. A single parameter gives one case per value. Raises `ValueError` for
    a parameter without values and if more than `MAX_CASES` cases would be needed.
    """
    if empty := [name for name, values in parameters.items() if not values]:
        raise ValueError(f"parameter {empty[0]!r} has no values")
    sizes = {name: len(values) for name, values in parameters.items()}
    if len(sizes) == 1:
        chosen = [{name: i} for name, size in sizes.items() for i in range(size)]
    else:
        chosen = _cover(sizes, random.Random(seed))
    if len(chosen) > MAX_CASES:
        raise ValueError(f"{len(chosen)} cases are more than {MAX_CASES}: give the parameters fewer values")
    return [{name: parameters[name][i] for name, i in case.items()} for case in chosen]


def case_id(case: Mapping[str, Any]) -> str:
    """A short pytest id: the values, in the order of the parameters."""
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def _cover(sizes: dict[str, int], rng: random.Random) -> list[dict[str, int]]:
    """Value indices of the cases."""
    # A dictionary, not a set: iteration must not depend on the hash seed of the process.
    open_pairs = dict.fromkeys(
        (a, i, b, j) for a, b in combinations(sizes, 2) for i in range(sizes[a]) for j in range(sizes[b])
    )
    cases: list[dict[str, int]] = []
    while open_pairs:
        first = next(iter(open_pairs))
        drawn = [_draw(first, sizes, open_pairs, rng) for _ in range(_CANDIDATES)]
        best = max(drawn, key=lambda case: sum(pair in open_pairs for pair in _pairs(case)))
        for pair in _pairs(best):
            open_pairs.pop(pair, None)
        cases.append(best)
    return cases


def _draw(pair: Pair, sizes: dict[str, int], open_pairs: dict[Pair, None], rng: random.Random) -> dict[str, int]:
    """A case with `pair`; the other parameters follow in random order, each with the value that closes most pairs."""
    a, i, b, j = pair
    case = {a: i, b: j}
    others = [name for name in sizes if name not in case]
    rng.shuffle(others)
    order = {name: position for position, name in enumerate(sizes)}
    for name in others:
        gains = []
        for value in range(sizes[name]):
            new = (_pair(name, value, other, index, order) for other, index in case.items())
            gains.append((sum(p in open_pairs for p in new), rng.random(), value))
        case[name] = max(gains)[2]
    return {name: case[name] for name in sizes}


def _pair(a: str, i: int, b: str, j: int, order: dict[str, int]) -> Pair:
    return (a, i, b, j) if order[a] < order[b] else (b, j, a, i)


def _pairs(case: dict[str, int]) -> list[Pair]:
    return [(a, i, b, j) for (a, i), (b, j) in combinations(case.items(), 2)]
