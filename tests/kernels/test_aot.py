"""Compilation without a GPU: the command on a representative subset, and the checker's own judgement.

This process runs kernels in the interpreter, whose kernels cannot be compiled: compilations run in processes of their
own, with the interpreter off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkkv_kernels.triton import aot

ROOT = Path(__file__).resolve().parents[2]
PTXAS_LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    16 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size
"""
AMD_METADATA = """
	v_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
    .agpr_count:     0
    .sgpr_count:     40
    .sgpr_spill_count: 2
    .vgpr_count:     256
    .vgpr_spill_count: 3
"""
SPILLING = """
import dataclasses, json
from forkkv_kernels.triton import aot
target = aot.TARGETS["sm_80"]
spec = next(s for s in aot.module_specs("lora", target) if s.name == "residual_write rows64 tiles8 bf16")
starved = dataclasses.replace(spec, options={**spec.options, "maxnreg": 32})
reports = [aot.check("lora", s, t) for s, t in ((starved, target), (spec, dataclasses.replace(target, shared_limit=1)))]
print(json.dumps([dataclasses.asdict(report) for report in reports]))
"""
FINGERPRINTS = """
import dataclasses, json
from forkkv_kernels.triton import aot
target = aot.TARGETS["sm_80"]
spec = aot.module_specs("rope", target)[0]
changes = [{}, {"fn": aot.module_specs("decode", target)[0].fn}, {"matrix": True}]
changes += [{field: {**getattr(spec, field), "x": 8}} for field in ("signature", "constexprs", "options")]
specs = [spec, *(dataclasses.replace(spec, **change) for change in changes)]
print(json.dumps([*(aot.fingerprint(s, target) for s in specs), aot.fingerprint(spec, aot.TARGETS["sm_90"])]))
"""


def compile_in_process(arguments: list[str], cache: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the interpreter off and an empty cache of Triton."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_CACHE_DIR": str(cache), **extra}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.timeout(600)
def test_representative_subset_meets_the_requirements(tmp_path: Path) -> None:
    """Every kernel compiles for every target: allowed spills, shared memory within the chip, matrix instructions."""
    figures = tmp_path / "figures.json"
    command = ["benchmarks/compile_kernels.py", "--quick", "--json", str(figures)]
    done = compile_in_process(command, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(figures.read_text())["reports"]
    assert {r["target"] for r in reports} == set(aot.TARGETS)
    assert {r["module"] for r in reports} == set(aot.kernel_modules())
    for report in reports:
        assert 0 < report["registers"] <= 512, report
        assert report["shared_bytes"] <= aot.TARGETS[report["target"]].shared_limit, report


def test_resuming_compiles_only_what_is_new(tmp_path: Path) -> None:
    """The figures of an unchanged configuration come from the file; those of another source or configuration do not."""
    figures = tmp_path / "figures.json"
    command = ["benchmarks/compile_kernels.py", "--target", "sm_80", "--kernel", "merge D64", "--json", str(figures)]
    assert compile_in_process(command, tmp_path / "cache").returncode == 0
    (first,) = json.loads(figures.read_text())["reports"]
    for change, registers in (({"registers": 7}, 7), ({"registers": 7, "fingerprint": "old"}, first["registers"])):
        figures.write_text(json.dumps({"reports": [{**first, **change}], "errors": []}))
        done = compile_in_process([*command, "--resume"], tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        (again,) = json.loads(figures.read_text())["reports"]
        assert (again["registers"], again["fingerprint"]) == (registers, first["fingerprint"])


def test_fingerprint_changes_with_whatever_is_compiled(tmp_path: Path) -> None:
    done = compile_in_process(["-c", FINGERPRINTS], tmp_path)
    assert done.returncode == 0, done.stderr
    same, again, *others = json.loads(done.stdout)
    assert same == again
    assert len({same, *others}) == 1 + len(others) == 7


def test_checker_sees_spills_and_too_much_shared_memory(tmp_path: Path) -> None:
    done = compile_in_process(["-c", SPILLING], tmp_path)
    assert done.returncode == 0, done.stderr
    starved, cramped = json.loads(done.stdout)
    assert starved["registers"] <= 32
    assert starved["spill_bytes"] > 0
    assert starved["violations"] == [f"spills {starved['spill_bytes']} bytes, 0 allowed"]
    assert cramped["violations"] == [f"{cramped['shared_bytes']} bytes of shared memory, 1 there"]
    assert cramped["matrix"] == "mma"


def test_command_refuses_the_interpreter(tmp_path: Path) -> None:
    done = compile_in_process(["benchmarks/compile_kernels.py", "--quick"], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


def test_checker_refuses_interpreted_kernels() -> None:
    target = aot.TARGETS["sm_90"]
    with pytest.raises(RuntimeError, match="interpreted"):
        aot.check("rope", aot.module_specs("rope", target)[0], target)


def test_unknown_and_missing_arguments_are_named(tmp_path: Path) -> None:
    code = (
        "import dataclasses\nfrom forkkv_kernels.triton import aot\nt = aot.TARGETS['sm_80']\n"
        "s = aot.module_specs('rope', t)[0]\n"
        "s = dataclasses.replace(s, signature={**{k: v for k, v in s.signature.items() if k != 'q'}, 'z': 'i32'})\n"
        "aot.check('rope', s, t)"
    )
    done = compile_in_process(["-c", code], tmp_path)
    assert "unknown arguments ['z'], missing arguments ['q']" in done.stderr


def test_configurations_have_names_of_their_own() -> None:
    for target in aot.TARGETS.values():
        for module in aot.kernel_modules():
            assert aot.module_specs(module, target)


def test_prefill_tiles_fill_the_matrix_units_of_sm_90() -> None:
    for spec in aot.module_specs("prefill", aot.TARGETS["sm_90"]):
        if "fp32" not in spec.name:
            assert min(int(str(spec.constexprs[name])) for name in ("BLOCK_M", "BLOCK_N")) >= 64, spec.name
            assert spec.matrix, spec.name


@pytest.mark.parametrize(
    ("head_dim", "rank", "allowed"), [(64, 0, 0), (128, 64, 0), (128, 128, 256), (256, 16, 256), (96, 16, 0)]
)
def test_allowed_spill(head_dim: int, rank: int, allowed: int) -> None:
    assert aot.allowed_spill(head_dim, rank) == allowed


def test_ptxas_output() -> None:
    assert aot.parse_ptxas(PTXAS_LOG) == (168, 28)
    with pytest.raises(ValueError, match="not the output"):
        aot.parse_ptxas("ptxas fatal: no input")


def test_amd_metadata() -> None:
    usage = aot.amd_usage(AMD_METADATA)
    assert (usage.registers, usage.spill_bytes, usage.scalar_spills, usage.matrix) == (256, 12, 2, "mfma")
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        aot.amd_usage("s_endpgm")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8]", "wgmma"),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "mma"),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "wgmma"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma"),
        ("FFMA R0, R1, R2, R3 // HMMAX", ""),
    ],
)
def test_matrix_instructions(code: str, kind: str) -> None:
    assert aot.cuda_matrix(code) == kind
