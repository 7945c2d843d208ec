"""Guards of the package layout: the `kernels/` trap, what the wheel holds, and who may import what.

transformers probes for the Hugging Face package `kernels` by name. The folder of that name in this repository must
therefore never become a package, and no distribution of ours may ship a top-level `kernels`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA_FOLDERS = ("kernels", "configs", "tests", "benchmarks", "docker", "docs")
WHEEL_PACKAGES = {"forkkv", "forkkv_kernels"}
TORCH_FREE = (
    "forkkv.types",
    "forkkv.config",
    "forkkv.errors",
    "forkkv.log",
    "forkkv.scheduler",
    "forkkv.kvcache",
    "forkkv.lora.registry",
    "forkkv.metrics",
    "forkkv.frontend",
    "forkkv.engine.wire",
    "forkkv.engine.client",
    "forkkv.entrypoints.args",
)


def run_python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with `args` in `cwd`, without the test run's own search path."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=120, check=False
    )


def modules_of(name: str) -> list[str]:
    """`name` and, if it is a package, all modules under it, by their files."""
    folder = ROOT.joinpath(*name.split("."))
    if not folder.is_dir():
        return [name] if folder.with_suffix(".py").is_file() else []
    files = (path.relative_to(ROOT).with_suffix("") for path in sorted(folder.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in files]


def imported_modules(source: Path) -> set[str]:
    """Top-level names of everything that `source` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("folder", DATA_FOLDERS)
def test_data_folder_is_no_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_kernels_is_a_namespace_inside_the_repository_and_nothing_outside(tmp_path: Path) -> None:
    """A namespace folder loses against any installed package of that name, which is what makes it harmless."""
    probe = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec.origin if spec else 'absent')"
    inside = run_python("-c", probe, cwd=ROOT)
    outside = run_python("-c", probe, cwd=tmp_path)
    assert inside.returncode == outside.returncode == 0, inside.stderr + outside.stderr
    installed = outside.stdout.strip()
    assert installed == "absent" or ROOT not in Path(installed).parents or ".venv" in installed
    assert inside.stdout.strip() == ("None" if installed == "absent" else installed)


def test_transformers_is_not_confused_by_the_kernels_folder() -> None:
    probe = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    result = run_python("-c", probe, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    if importlib.util.find_spec("kernels.layer") is None:
        assert result.stdout.strip() == "False"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names in a wheel built from a copy of the sources, so that nothing is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    keep_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.gguf", "*.safetensors")
    for name in ("forkkv", *DATA_FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=keep_out)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    build = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    result = run_python("-c", build, cwd=source)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(source / "dist" / result.stdout.split()[-1]) as wheel:
        return wheel.namelist()


def test_wheel_holds_exactly_two_packages(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == WHEEL_PACKAGES
    assert {f"{package}/py.typed" for package in WHEEL_PACKAGES} <= set(wheel_names)


def test_wheel_holds_every_module(wheel_names: list[str]) -> None:
    sources = [path.relative_to(ROOT) for path in (ROOT / "forkkv").rglob("*.py")]
    sources += [path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.py")]
    assert {path.as_posix() for path in sources} == {name for name in wheel_names if name.endswith(".py")}


def test_help_works_from_another_directory(tmp_path: Path) -> None:
    result = run_python("-m", "forkkv.entrypoints.openai.api_server", "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "--enable-forkkv" in result.stdout


@pytest.mark.parametrize("name", TORCH_FREE)
def test_importing_does_not_load_torch(name: str, tmp_path: Path) -> None:
    modules = modules_of(name)
    assert modules
    imports = "; ".join(f"import {module}" for module in modules)
    result = run_python("-c", f"import sys; {imports}; print('torch' in sys.modules)", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"


def test_oracle_is_independent_of_the_code_it_judges() -> None:
    allowed = {"torch", "transformers", "safetensors"} | sys.stdlib_module_names
    assert imported_modules(ROOT / "tests" / "oracle.py") <= allowed


def test_constraints_leave_torch_and_triton_to_the_installation() -> None:
    """A CUDA build of torch pins one exact triton; a second pin here makes the two commands fail on a GPU machine."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if line and not line.startswith("#")}
    assert not [name for name in pinned if name.startswith(("torch", "triton", "nvidia", "cuda"))]
    assert "transformers" in pinned


def test_project_excludes_transformers_that_take_the_folder_for_a_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "transformers>=5.16,<6" in project["dependencies"]
