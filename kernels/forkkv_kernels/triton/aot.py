"""Ahead-of-time compilation of the Triton kernels, without a GPU: registers, spills, shared memory, matrix
instructions. What a module compiles here is what its launcher would launch, through the same configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HEAD_DIMS = (64, 96, 128, 256)
RANKS = (0, 16, 64, 128)


@dataclass(frozen=True, slots=True)
class Target:
    """A chip to compile for: `name` as people say it, `arch` as Triton's `GPUTarget` wants it, `shared_limit` in bytes
    that one program may use (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 163 KiB on
    8.0, 227 KiB on 9.0; CDNA 3 ISA: 64 KiB of LDS)."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 << 10),
        Target("sm_90", "cuda", 90, 32, 227 << 10),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10),
    )
}


@dataclass(frozen=True)
class CompileSpec:
    """One kernel in one configuration, for one target.

    `name` is unique in its module and says the configuration, e.g. "prefill D128 R16 bf16". `signature` gives the
    type of every argument that is no constexpr: "*bf16", "*i32", "fp32", "i32"; as at launch, pointers are taken to be
    multiples of 16 bytes, and "i32:16" is an integer that is a multiple of 16. `options`: num_warps, num_stages, ...
    """

    name: str
    fn: JITFunction
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    options: Mapping[str, object]
    max_spill_bytes: int = 0
    """Allowed spill stores and loads per thread; see `allowed_spill`."""
    matrix: bool = False
    """Whether the compiled code has to contain matrix instructions (mma, wgmma, mfma)."""
    quick: bool = False
    """Whether the configuration belongs to the representative subset of this target."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What came out of one compilation. `violations` is empty if every requirement is met."""

    module: str
    kernel: str
    name: str
    target: str
    registers: int
    """Per thread; VGPRs (accumulation registers included) on AMD."""
    spill_bytes: int
    """Per thread, to memory: the larger of spill stores and loads."""
    scalar_spills: int
    """AMD: scalar registers kept in lanes of vector registers, which costs no memory access."""
    shared_bytes: int
    matrix: str
    """"wgmma", "mma", "mfma", or "" if the code has no matrix instruction."""
    seconds: float
    fingerprint: str
    """Of what was compiled, see `fingerprint`."""
    violations: tuple[str, ...] = field(default=())


def allowed_spill(head_dim: int, rank: int) -> int:
    """Bytes a thread may spill: none up to head_dim 128 and rank 64, 256 beyond."""
    return 0 if head_dim <= 128 and rank <= 64 else 256


def kernel_modules() -> tuple[str, ...]:
    """Names of the modules of this package that declare `compile_specs`, sorted."""
    package = __name__.rpartition(".")[0]
    folder = str(Path(__file__).parent)
    names = sorted(module.name for module in pkgutil.iter_modules([folder]) if module.name != "aot")
    return tuple(name for name in names if hasattr(importlib.import_module(f"{package}.{name}"), "compile_specs"))


def module_specs(module: str, target: Target, quick: bool = False) -> list[CompileSpec]:
    """The configurations of a module for a target; with `quick` those marked so. Raises `ValueError` if two have one
    name."""
    package = __name__.rpartition(".")[0]
    specs: list[CompileSpec] = importlib.import_module(f"{package}.{module}").compile_specs(target)
    names = [spec.name for spec in specs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{module}: two configurations are called {repeated[0]!r}")
    return [spec for spec in specs if spec.quick] if quick else specs


def fingerprint(spec: CompileSpec, target: Target) -> str:
    """Hash of all that decides what a spec compiles to and what is required of it: the source of the kernel and of the
    functions it calls, signature, constants, options, requirements, target and version of Triton."""
    parts = (sorted(spec.signature.items()), sorted(spec.constexprs.items()), sorted(spec.options.items()))
    needs = (spec.max_spill_bytes, spec.matrix, target)
    text = repr((spec.fn.cache_key, *parts, *needs, triton.__version__))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(module: str, spec: CompileSpec, target: Target) -> CompileReport:
    """Compile a spec and hold it against the requirements. Raises `RuntimeError` under Triton's interpreter and
    whatever Triton raises for code that does not compile."""
    if not isinstance(spec.fn, JITFunction):
        raise RuntimeError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    began = time.perf_counter()
    compiled, log = _compile(spec, target)
    usage = cuda_usage(log, compiled.asm) if target.backend == "cuda" else amd_usage(compiled.asm["amdgcn"])
    shared = int(compiled.metadata.shared)
    violations = []
    if usage.spill_bytes > spec.max_spill_bytes:
        violations.append(f"spills {usage.spill_bytes} bytes, {spec.max_spill_bytes} allowed")
    if shared > target.shared_limit:
        violations.append(f"{shared} bytes of shared memory, {target.shared_limit} there")
    if spec.matrix and not usage.matrix:
        violations.append("no matrix instructions")
    return CompileReport(
        module,
        spec.fn.__name__,
        spec.name,
        target.name,
        usage.registers,
        usage.spill_bytes,
        usage.scalar_spills,
        shared,
        usage.matrix,
        round(time.perf_counter() - began, 2),
        fingerprint(spec, target),
        tuple(violations),
    )


def _compile(spec: CompileSpec, target: Target) -> tuple[Any, str]:
    """The compiled kernel and what was printed meanwhile: Triton runs `ptxas -v` on the PTX and shows its output on
    demand. Nothing comes from Triton's cache, since a cached kernel has no such output."""
    gpu, printed = GPUTarget(target.backend, target.arch, target.warp_size), io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        # Multiply-add fusion is what launches use; Triton 3.9 warns where it is left open.
        compiled = triton.compile(_source(spec), target=gpu, options={"enable_fp_fusion": True, **spec.options})
    return compiled, printed.getvalue()


def _source(spec: CompileSpec) -> ASTSource:
    """The spec as Triton's launcher would specialise it."""
    names = list(spec.fn.arg_names)
    unknown = (spec.signature.keys() | spec.constexprs.keys()) - set(names)
    missing = set(names) - spec.signature.keys() - spec.constexprs.keys()
    if unknown or missing:
        raise ValueError(f"{spec.name}: unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}")
    types = {name: spec.signature.get(name, "constexpr") for name in names}
    aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind.endswith(":16")]
    return ASTSource(
        fn=spec.fn,
        signature={name: kind.removesuffix(":16") for name, kind in types.items()},
        constexprs=dict(spec.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a compiled kernel, see `CompileReport`."""

    registers: int
    spill_bytes: int
    scalar_spills: int
    matrix: str


def cuda_usage(log: str, asm: Mapping[str, Any]) -> Usage:
    """Figures of a kernel from the output of `ptxas -v` and from its disassembly (its PTX where no disassembler is)."""
    registers, spill = parse_ptxas(log)
    return Usage(registers, spill, 0, cuda_matrix(_disassembly(asm["cubin"]) or asm["ptx"]))


def parse_ptxas(log: str) -> tuple[int, int]:
    """(registers, spill bytes) of the only kernel in the output of `ptxas -v`. Raises `ValueError` for other text."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or not spills:
        raise ValueError(f"not the output of ptxas -v: {log[:200]!r}")
    return int(registers[1]), max(int(number) for pair in spills for number in pair)


def cuda_matrix(code: str) -> str:
    """Kind of matrix instructions in SASS or PTX: "wgmma", "mma" or ""."""
    if re.search(r"\b[HIQ]GMMA\b|\bwgmma\.mma_async\b", code):
        return "wgmma"
    return "mma" if re.search(r"\b[HIDQ]MMA\b|\bmma\.sync\b", code) else ""


def amd_usage(amdgcn: str) -> Usage:
    """Registers and spills as the metadata of the AMD assembly states them. Raises `ValueError` for other text."""
    counts = {key: int(value) for key, value in re.findall(r"\.(\w+_count):\s+(\d+)", amdgcn)}
    if "vgpr_spill_count" not in counts:
        raise ValueError("no .vgpr_spill_count in the assembly")
    # vgpr_count covers the accumulation registers on CDNA 3; a spilled VGPR is 4 bytes per lane.
    matrix = "mfma" if re.search(r"\bv_mfma_", amdgcn) else ""
    return Usage(counts["vgpr_count"], 4 * counts["vgpr_spill_count"], counts.get("sgpr_spill_count", 0), matrix)


def _disassembly(cubin: bytes) -> str:
    """SASS of a compiled kernel, by the disassembler that comes with Triton; empty where there is none."""
    with tempfile.TemporaryDirectory(prefix="forkkv-sass-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True)
        except (OSError, RuntimeError):
            return ""
    return done.stdout if done.returncode == 0 else ""
