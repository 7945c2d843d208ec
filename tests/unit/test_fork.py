"""The fork point: every row of the precedence, as a table."""

from __future__ import annotations

import pytest

from forkkv.scheduler.fork import fork_point, last_occurrence
from forkkv.sharing import is_shared, needs_probe, residual_digest
from forkkv.types import AdapterMeta

BLOCK = 16
TAIL = 64


def point(n=1000, *, kind="fork", shared=True, prompt=None, **fields):
    tokens = list(range(n)) if prompt is None else prompt
    found = fork_point(tokens, BLOCK, kind=kind, shared=shared, fork_tail=TAIL, **fields)
    return found.weights_from, found.private_from


@pytest.mark.parametrize(
    ("wanted", "case"),
    [
        # the base model has no fork
        ((None, None), {"kind": None}),
        ((None, None), {"kind": None, "fork_at": 64}),
        # mode or request says none: 0, whatever else is asked for
        ((0, 0), {"shared": False}),
        ((0, 0), {"shared": False, "kind": "plain", "fork_at": 64}),
        ((0, 0), {"shared": False, "mark": 64}),
        # fork_at: rounded down to a block, at most the last block that leaves a token
        ((128, 128), {"fork_at": 128}),
        ((128, 128), {"fork_at": 143}),
        ((992, 992), {"fork_at": 5000}),
        ((0, 0), {"fork_at": 15}),
        ((0, 0), {"fork_at": 0}),
        ((0, 0), {"fork_at": -7}),
        ((128, 128), {"fork_at": 128, "mark": 512}),
        ((128, 128), {"fork_at": 128, "kind": "plain"}),
        # the last cache_control mark
        ((512, 512), {"mark": 527}),
        ((992, 992), {"mark": 1000}),
        # where agents share all that they write, the whole prompt and nothing private
        ((1000, None), {"everything": True}),
        ((1000, None), {"everything": True, "fork_at": 64, "mark": 128}),
        ((0, 0), {"everything": True, "shared": False}),
        # else fork_tail tokens before the end
        ((928, 928), {}),
        ((928, 928), {"n": 992}),
        ((912, 912), {"n": 991}),
        # never negative, never the whole prompt
        ((0, 0), {"n": 64}),
        ((0, 0), {"n": 79}),
        ((16, 16), {"n": 80}),
        ((0, 0), {"n": 16, "fork_at": 16}),
        ((16, 16), {"n": 17, "fork_at": 17}),
        ((0, 0), {"n": 1, "fork_at": 1}),
    ],
)
def test_precedence(wanted, case):
    assert point(**case) == wanted


@pytest.mark.parametrize(
    ("wanted", "prompt", "fields"),
    [
        # start of the last occurrence, token-exact, not rounded; private storage begins at its block
        ((40, 32), [1] * 40 + [7, 8] + [1] * 20, {}),
        ((60, 48), [1] * 40 + [7, 8] + [1] * 18 + [7, 8], {}),
        ((0, 0), [7, 8, 1], {}),
        # it ignores fork_at and marks: an aLoRA's fork is part of its definition
        ((40, 32), [1] * 40 + [7, 8] + [1] * 20, {"fork_at": 16, "mark": 16}),
        # not found: a base request
        ((None, None), [1] * 40 + [7] * 20, {}),
        ((None, None), [1] * 40, {"shared": False}),
        # without sharing the same weights run, and all of it is stored privately
        ((40, 0), [1] * 40 + [7, 8] + [1] * 20, {"shared": False}),
    ],
)
def test_alora(wanted, prompt, fields):
    assert point(kind="alora", prompt=prompt, invocation_tokens=(7, 8), **fields) == wanted


def test_last_occurrence_compares_tokens():
    assert last_occurrence([1, 2, 1, 2, 3], [1, 2]) == 2
    assert last_occurrence([1, 1, 1], [1, 1]) == 1
    assert last_occurrence([1], [1, 2]) is None
    assert last_occurrence([1], []) is None


@pytest.mark.parametrize(
    ("kind", "mode", "requested", "wanted"),
    [
        ("plain", "none", None, False),
        ("plain", "auto", None, False),
        ("plain", "fork", None, True),
        ("plain", "fork", "none", False),
        ("fork", "none", None, False),
        ("fork", "auto", None, True),
        ("fork", "auto", "none", False),
        ("alora", "none", None, False),
        ("alora", "auto", None, True),
        ("alora", "fork", None, True),
    ],
)
def test_who_shares(kind, mode, requested, wanted):
    assert is_shared(AdapterMeta(1, "a", "d", kind, 8, 8), mode, requested) is wanted


def test_a_plain_adapter_that_passed_its_probe_is_shared_under_auto():
    adapter = AdapterMeta(1, "a", "d", "plain", 8, 8, passed_probe=True)
    assert is_shared(adapter, "auto") and residual_digest(adapter, "auto")
    assert not is_shared(adapter, "auto", "none") and not is_shared(adapter, "none")


@pytest.mark.parametrize("kind", ["plain", "fork", "alora"])
@pytest.mark.parametrize("mode", ["none", "auto", "fork", "first-writer", "shared-a", "full"])
def test_plain_adapters_are_probed_where_they_may_share(kind, mode):
    assert needs_probe(AdapterMeta(1, "a", "d", kind, 8, 8), mode) is (kind == "plain" and mode in ("auto", "fork"))


def test_only_k_and_v_weights_leave_a_residual():
    assert residual_digest(AdapterMeta(1, "a", "d", "fork", 8, 0), "auto")
    assert not residual_digest(AdapterMeta(1, "a", "d", "fork", 0, 0), "auto")
    assert not residual_digest(AdapterMeta(1, "a", "d", "alora", 8, 8), "auto")
    assert not residual_digest(AdapterMeta(1, "a", "d", "plain", 8, 8), "auto")
