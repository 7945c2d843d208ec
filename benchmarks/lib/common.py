"""What the sections share: lines of the table, the model and its adapters, engines and their requests."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.train import orderlog
from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.models.config_reader import read_spec
from forkkv.models.loader import load_weights
from forkkv.models.resolve import resolve_model
from forkkv.types import EngineOutput
from tests.e2e.harness import Ask, engine_request
from tests.models.factory import ATTENTION, make_adapter

ROOT = Path(__file__).resolve().parents[2]
DEMO_ADAPTERS = ROOT / "configs/demo/adapters"
MODEL = "smollm2"
BLOCK = 16
AGENTS = ("extract", "sql", "audit")
Mode = Literal["none", "auto", "fork"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `value` is the measured number behind the text `measured`."""

    section: str
    name: str
    measured: str
    required: str
    passed: bool
    value: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Workspace:
    """The model, adapters made for this run, and sizes. `quick` shrinks sizes, to try the benchmark itself; `short`:
    sections that measure two sizes measure the smaller one."""

    folder: Path
    quick: bool = False
    short: bool = False

    @functools.cached_property
    def resolved(self) -> Any:
        return resolve_model(MODEL)

    @functools.cached_property
    def spec(self) -> Any:
        return read_spec(self.resolved)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(MODEL)

    @functools.cached_property
    def _weights(self) -> dict[str, Tensor]:
        return load_weights(self.resolved, self.spec, torch.float32, progress=False)

    def size(self, tokens: int) -> int:
        """A number of tokens; a sixteenth of it, in whole blocks and at least four of them, with `quick`."""
        return max(4, tokens // 16 // BLOCK) * BLOCK if self.quick else tokens

    def sizes(self, *all_of_them: int) -> tuple[int, ...]:
        """The sizes to measure: all of them, or the smallest with `short`."""
        return (min(all_of_them),) if self.short else all_of_them

    def document(self, num_tokens: int, seed: int) -> tuple[int, ...]:
        """The first `num_tokens` tokens of an order log; another seed gives one without a common prefix."""
        document = orderlog.make_document(orderlog.HELD_OUT_SEEDS[seed], int(num_tokens * 1.2) + 200)
        tokens = self.tokenizer.encode(f"{seed}. {document.text}", add_special_tokens=False)
        assert len(tokens) >= num_tokens, (len(tokens), num_tokens)
        return tuple(tokens[:num_tokens])

    def question(self, index: int, num_tokens: int = 40) -> tuple[int, ...]:
        """A short question of exactly `num_tokens` tokens, different from its first tokens on for each index."""
        text = (
            f"\n\nQuestion {index}: which of these orders were shipped short, which came late, and what did each " * 8
        )
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)[:num_tokens])

    def adapter(self, name: str, **options: Any) -> Path:
        """A random adapter for the model, made once: rank 16 on q, k, v, o unless `options` say otherwise."""
        folder = self.folder / "adapters" / name
        if not folder.exists():
            make_adapter(folder, self.spec, **{"rank": 16, "targets": ATTENTION, "b_std": 0.02, **options})
        return folder

    def team(self) -> dict[str, Path]:
        """The three fork-LoRA agents: the trained ones where they are there, else random ones."""
        trained = {name: DEMO_ADAPTERS / name for name in AGENTS}
        if all((folder / "adapter_model.safetensors").exists() for folder in trained.values()):
            return trained
        return {name: self.adapter(name, rank=8, seed=seed, kind="fork") for seed, name in enumerate(AGENTS, 1)}

    def transformers_model(self, attention: str = "sdpa") -> Any:
        """A new `LlamaForCausalLM` over the same fp32 tensors that the server's own loader read."""
        from transformers import LlamaConfig, LlamaForCausalLM

        spec = self.spec
        config = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_position_embeddings,
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            tie_word_embeddings=spec.tie_word_embeddings,
            attn_implementation=attention,
        )
        model = LlamaForCausalLM(config)
        missing, unexpected = model.model.load_state_dict(self._weights, strict=False, assign=True)
        assert not missing and not unexpected, (missing, unexpected)
        model.tie_weights()
        return model.eval().requires_grad_(False)


@dataclass
class Engines:
    """Engine cores over one executor: model and adapters are loaded once, each core has new pools and trees.

    Only the latest core may be used, since a new one replaces the executor's cache.
    """

    adapters: dict[str, Path]
    max_num_seqs: int = 16
    quantization: Literal["none", "auto"] = "none"

    def _config(self, mode: Mode, budget: int, fork_tail: int, **cache: Any) -> EngineConfig:
        modules = tuple(LoRAModule(name, str(folder)) for name, folder in self.adapters.items())
        return EngineConfig(
            model=ModelConfig(MODEL, dtype="float32", device="cpu", quantization=self.quantization),
            cache=CacheConfig(block_size=BLOCK, **cache),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=budget, kv_sharing=mode, fork_tail=fork_tail
            ),
            lora=LoRAConfig(modules=modules, max_loras=max(8, len(modules))),
        )

    @functools.cached_property
    def _executor(self) -> UniprocExecutor:
        return UniprocExecutor(self._config("fork", 2048, 64, memory_bytes=1 << 28), progress=False)

    def core(self, mode: Mode, *, budget: int = 2048, fork_tail: int = 64, **cache: Any) -> EngineCore:
        """A new engine; `cache` are fields of `CacheConfig`, 1 GiB for both pools by default."""
        config = self._config(mode, budget, fork_tail, **{"memory_bytes": 1 << 30, **cache})
        return EngineCore(config, self._executor)


def step_until(core: EngineCore, done: Callable[[list[EngineOutput]], bool]) -> None:
    """Run steps until `done` (called with each step's outputs) or nothing is left."""
    while core.has_work():
        outputs, _ = core.step()
        if done(outputs):
            return


def time_to_first_token(core: EngineCore, ask: Ask) -> float:
    """Seconds from adding the request to its first token; the request is finished before this returns."""
    began = time.perf_counter()
    core.add_request(engine_request(core, ask, f"{ask.name}/{began}"))
    step_until(core, bool)
    seconds = time.perf_counter() - began
    step_until(core, lambda outputs: False)
    return seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
