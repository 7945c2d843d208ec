"""The state machine catches each planted fault within 200 examples, at the invariants or at a wrong read."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.mutants import MIXED_TREE_MUTANTS, MUTANTS, planted
from tests.unit.test_scheduler_machine import MixedTreeMachine, SchedulerMachine

EXAMPLES = 200


class CountingMachine(SchedulerMachine):
    """The same machine, counting how many examples were started."""

    examples = 0

    def __init__(self):
        super().__init__()
        type(self).examples += 1


class CountingMixedTreeMachine(CountingMachine, MixedTreeMachine):
    """That of the modes in which agents read what agents wrote."""


@pytest.mark.parametrize("mutant", [*MUTANTS, *MIXED_TREE_MUTANTS], ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant, record_property):
    machine = CountingMixedTreeMachine if mutant in MIXED_TREE_MUTANTS else CountingMachine
    machine.examples = 0
    once = settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with planted(mutant), pytest.raises(BaseException) as caught:
        run_state_machine_as_test(machine, settings=once)
    errors = caught.value.exceptions if isinstance(caught.value, BaseExceptionGroup) else [caught.value]
    assert isinstance(errors[0], AssertionError), f"caught by accident: {errors[0]!r}"
    # tests/conftest.py prints these as a table at the end of the run
    record_property("mutant", mutant.__name__)
    record_property("examples", machine.examples)
    record_property("caught_by", str(errors[0]).splitlines()[0])
