"""`benchmarks/gpu_check.py` where only torch, triton, numpy, safetensors and tqdm are installed, and when things break.

The program runs in processes of its own, in which importing anything else fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "fastapi",
    "gguf",
    "httpx",
    "hypothesis",
    "msgspec",
    "numba",
    "peft",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic_settings",
    "pytest",
    "sse_starlette",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
    "zmq",
)
HOOK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment in which every Python process starts by hiding the packages."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(HOOK)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "bare"), "OMP_NUM_THREADS": "1"}


def gpu_check(environment: dict[str, str], out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON report and the Markdown of a tiny run."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    files = sorted(out.glob("*-tiny.json"))
    assert len(files) == 1, done.stdout + done.stderr
    return done.returncode, json.loads(files[0].read_text()), files[0].with_suffix(".md").read_text()


def test_the_hook_hides_packages(bare: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", "import pydantic"], env=bare, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'pydantic'" in done.stderr


def test_engine_in_a_bare_environment(bare: dict[str, str], tmp_path: Path) -> None:
    """All adapters answer under both modes; sharing computes the document once and holds fewer bytes."""
    status, report, text = gpu_check(bare, tmp_path / "out", "--sections", "engine,decode", "--backend", "torch")
    assert status == 0, json.dumps(report, indent=1)
    engine = report["sections"]["engine"]
    assert engine["fork"]["finished"] == engine["none"]["finished"] == engine["sizes"]["adapters"]
    assert engine["fork"]["base_tokens"] == engine["sizes"]["document"]
    assert engine["none"]["base_tokens"] == 0
    assert engine["fork"]["pool_bytes"] < engine["none"]["pool_bytes"]
    assert all(cell["error"] < 1e-4 for cell in report["sections"]["decode"]["cells"])
    assert "## engine: ok" in text and "| fork |" in text


def test_a_section_that_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    """An unknown backend fails where a backend is needed; its traceback is kept, the rest still runs."""
    status, report, text = gpu_check(
        dict(os.environ, OMP_NUM_THREADS="1"), tmp_path, "--sections", "rates,decode,prefill", "--backend", "nonsense"
    )
    assert status == 1
    sections = report["sections"]
    assert sections["rates"]["ok"] and not sections["decode"]["ok"] and not sections["prefill"]["ok"]
    assert "unknown attention backend 'nonsense'" in sections["decode"]["error"]
    assert "measure" in sections["decode"]["traceback"]
    assert "## decode: FAILED" in text


def test_a_process_that_dies_is_reported_and_replaced(tmp_path: Path) -> None:
    """A section that takes the process down, as a broken kernel may, costs that section alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Fatal:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'benchmarks.lib.gpu_decode':\n"
        "            os._exit(41)\n"
        "sys.meta_path.insert(0, Fatal())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    status, report, _ = gpu_check(
        environment, tmp_path / "out", "--sections", "rates,decode,layer", "--backend", "torch"
    )
    assert status == 1
    assert report["sections"]["rates"]["ok"] and report["sections"]["layer"]["ok"]
    assert "status 41 in this section" in report["sections"]["decode"]["error"]
