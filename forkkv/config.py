"""Engine configuration: composed, frozen sections of plain values. No torch, no I/O.

`forkkv.entrypoints.args` turns command line, environment and YAML into an `EngineConfig`; everything below the entry
points sees only these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forkkv.errors import ConfigError
from forkkv.types import KVSharing

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`path`: a folder in Hugging Face format (safetensors), a folder or file in GGUF format, or a hub id."""

    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    quantization: Literal["auto", "none", "int8"] = "none"
    """Type of the base model's matrices; int8 is for CPUs, "auto" int8 where it is faster: float32 on a CPU with 8-bit
    dot products. LoRA, residuals and the caches keep `dtype`."""
    max_model_len: int | None = None
    attention_backend: Literal["auto", "cpu", "triton", "torch", "reference"] = "auto"
    enforce_eager: bool = False
    """Run every step as it is called: no CUDA graphs of decode steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    """Seed of random weights (`load_format="dummy"`) and of requests without a seed."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the two paged pools. `memory_bytes` covers both; None lets the executor decide for its device."""

    block_size: int = 16
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    residual_share: float | None = None
    """Share of `memory_bytes` for the rCache; None: F*2r / (2*d_kv + F*2r) with F = fan-out and r = max rank."""
    enable_dual_radix_tree: bool = True
    num_kv_blocks: int | None = None
    """Override of the computed pool size, used by tests; likewise `num_residual_units`."""
    num_residual_units: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_sharing: KVSharing = "none"
    fork_tail: int = 64
    """Default fork point: prompt length minus this many tokens."""
    residual_fanout: int = 8
    """Adapters whose residual one base prefill may write beside the requester's."""
    chunked_prefill_size: int = 512
    """Prefill tokens of a step while other sequences decode; with none, `max_num_batched_tokens` is the only limit."""


@dataclass(frozen=True, slots=True)
class LoRAModule:
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    modules: tuple[LoRAModule, ...] = ()
    max_loras: int = 8
    """Adapters whose full weights are resident, i.e. may run in one batch."""
    max_lora_rank: int = 64
    probe: bool = True
    """Measure plain adapters at load in the modes `auto` and `fork`; without, `auto` keeps them private."""
    max_probe_kl: float = 0.02
    """Largest mean KL per token (nats) at which `auto` lets a plain adapter share."""
    teams: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(team name, adapter names); a base prefill of one member fans out to its team."""

    def team_of(self, adapter_name: str) -> str | None:
        return next((team for team, members in self.teams if adapter_name in members), None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions with the flag names a user knows. Raises `ConfigError`."""
        cache, sched, lora = self.cache, self.scheduler, self.lora
        if cache.block_size < 1 or cache.block_size & (cache.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {cache.block_size}")
        if sched.max_num_seqs < 1:
            raise ConfigError("--max-num-seqs must be at least 1")
        if sched.max_num_batched_tokens < sched.max_num_seqs + cache.block_size:
            # A base chunk ends on a block boundary: with less, decode of a full batch would starve every prompt.
            raise ConfigError("--max-num-batched-tokens must be at least --max-num-seqs plus --block-size")
        if sched.chunked_prefill_size < cache.block_size:
            raise ConfigError("--chunked-prefill-size must be at least --block-size")
        if sched.fork_tail < 1:
            raise ConfigError("--fork-tail must be at least 1")
        if sched.residual_fanout < 0:
            raise ConfigError("--residual-fanout must not be negative")
        if lora.max_loras < 1 or lora.max_lora_rank < 1:
            raise ConfigError("--max-loras and --max-lora-rank must be at least 1")
        if not lora.max_probe_kl >= 0:
            raise ConfigError("--max-probe-kl must not be negative")
        names = [module.name for module in lora.modules]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"--lora-modules names an adapter twice: {', '.join(duplicates)}")
        for team, members in lora.teams:
            if unknown := sorted(set(members) - set(names)):
                raise ConfigError(f"team {team!r} names adapters that are not loaded: {', '.join(unknown)}")
