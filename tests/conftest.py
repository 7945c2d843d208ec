"""Marks that depend on the machine. The markers themselves are declared in pyproject.toml."""

from __future__ import annotations

import os

import pytest

# Triton decides when its functions are decorated whether they are interpreted, and transformers imports triton: before
# any test module does. See tests/kernels/conftest.py.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device. torch is imported only if such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which example of the state machine caught each planted fault of tests/unit/test_mutants.py."""
    properties = [dict(report.user_properties) for report in terminalreporter.getreports("passed")]
    caught = [found for found in properties if "mutant" in found]
    if caught:
        terminalreporter.section("mutants caught by the state machine")
        for found in caught:
            terminalreporter.write_line(f"{found['mutant']:<42} example {found['examples']:>3}  {found['caught_by']}")
