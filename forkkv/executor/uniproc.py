"""The executor of one process and one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forkkv.attention.registry import select_backend
from forkkv.config import EngineConfig
from forkkv.errors import ConfigError
from forkkv.executor.cache import PagedCache
from forkkv.executor.compare import divergence
from forkkv.executor.device import available_cache_bytes, choose_device, choose_dtype, use_physical_cores
from forkkv.executor.graphs import DecodeGraphs, choose_strategy
from forkkv.executor.runner import ModelRunner
from forkkv.kvcache.spec import CacheSpec
from forkkv.log import get_logger
from forkkv.lora.adapter import LoadedAdapter
from forkkv.lora.checkpoint import load_adapter
from forkkv.lora.weights import AdapterWeights
from forkkv.models.config_reader import read_spec
from forkkv.models.llama import LlamaModel, attention_shape
from forkkv.models.loader import load_weights
from forkkv.models.quantization import choose_quantization, quantize_linears
from forkkv.models.resolve import resolve_model
from forkkv.models.spec import ModelSpec
from forkkv.types import Divergence, StepPlan, StepResult

logger = get_logger(__name__)

_MAX_ROTATED_OFFSETS = 32
"""Largest block for which B_k is kept rotated to every offset: the memory grows with the block, the gain shrinks."""


class UniprocExecutor:
    """Implements `forkkv.executor.executor.Executor`. `model` and, after `allocate_cache`, `runner` are there for
    hooks and measurements."""

    runner: ModelRunner

    def __init__(self, config: EngineConfig, *, progress: bool = True, poison: bool = False) -> None:
        """Load model and adapters. `poison` fills the cache with NaN, for tests.

        Raises `ModelLoadError`, `AdapterLoadError`, or `ConfigError` for settings that the model cannot meet.
        """
        self._device = choose_device(config.model.device)
        if self._device.type == "cpu":
            use_physical_cores()
        resolved = resolve_model(config.model.path, config.model.load_format)
        spec = read_spec(resolved)
        self.max_model_len = _max_model_len(config, spec)
        self._dtype = choose_dtype(config.model.dtype, self._device, spec.torch_dtype)
        self._config, self._poison, self.spec = config, poison, spec
        shape = attention_shape(spec)
        chosen = config.model.attention_backend
        backend = select_backend(self._device, self._dtype, shape, None if chosen == "auto" else chosen)
        weights = load_weights(resolved, spec, self._dtype, config.model.load_format, progress, config.model.seed)
        self.model = LlamaModel(spec, weights, self._device, self._dtype, self.max_model_len)
        self.quantization = choose_quantization(config.model.quantization, self._device, self._dtype)
        if self.quantization == "int8":
            num_bytes = quantize_linears(self.model)
            logger.info("matrices of the base model in int8: %.0f MB", num_bytes / 1e6)
        self.backend = self.model.make_backend(backend)
        loaded = _load_adapters(config, spec)
        offsets = None
        packed = backend.reads_packed_b_k
        if self._device.type == "cpu" and not packed and config.cache.block_size <= _MAX_ROTATED_OFFSETS:
            offsets = self.model.offset_rotation(config.cache.block_size)
        self.lora = AdapterWeights(
            spec,
            loaded,
            config.lora.max_loras,
            self._device,
            self._dtype,
            self.model.k_gains,
            offsets,
            backend.pack_b_k if packed else None,
        )
        self.model_name = resolved.name
        self.vocab_size = spec.vocab_size
        self.eos_token_ids = spec.eos_token_ids
        self.device = self._device.type
        self.dtype = str(self._dtype).removeprefix("torch.")
        self.adapters = tuple(adapter.meta for adapter in loaded)
        self.reports = tuple(adapter.report for adapter in loaded)
        self.cache_spec = CacheSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=config.cache.block_size,
            kv_itemsize=self._dtype.itemsize,
            residual_itemsize=self._dtype.itemsize,
            qk_norm=spec.qk_norm,
        )
        logger.info("%s on %s in %s, attention by %s", resolved.name, self.device, self.dtype, backend.name)

    def cache_memory_bytes(self) -> int:
        """See `Executor`; the configured bytes if there are any."""
        cache = self._config.cache
        return cache.memory_bytes or available_cache_bytes(self._device, cache.gpu_memory_utilization)

    def compare(
        self, plan: StepPlan, pairs: Sequence[tuple[str, str]], num_kv_blocks: int, num_residual_units: int
    ) -> list[Divergence]:
        """See `Executor`."""
        cache = PagedCache(self.cache_spec, num_kv_blocks, num_residual_units, self._dtype, self._device, self._poison)
        runner = ModelRunner(
            self.model,
            cache,
            self.backend,
            self.lora,
            max_num_seqs=len(plan.new),
            max_model_len=self.max_model_len,
        )
        logits = runner.score(plan)
        found = [divergence(logits[reference], logits[other]) for reference, other in pairs]
        if self._device.type == "cuda":
            # What is left for the cache is read from the driver, which counts what PyTorch keeps for later.
            del logits, runner, cache
            torch.cuda.empty_cache()
        return found

    def allocate_cache(self, num_kv_blocks: int, num_residual_units: int) -> None:
        """See `Executor`."""
        cache = PagedCache(self.cache_spec, num_kv_blocks, num_residual_units, self._dtype, self._device, self._poison)
        self.runner = ModelRunner(
            self.model,
            cache,
            self.backend,
            self.lora,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            graphs=self._capture_graphs(cache),
        )

    def _capture_graphs(self, cache: PagedCache) -> DecodeGraphs | None:
        """Graphs of decode steps, or None where there are none or they are not wanted."""
        strategy = choose_strategy(self.backend, self._device)
        if self._config.model.enforce_eager or strategy is None:
            return None
        graphs = DecodeGraphs(
            self.model,
            cache,
            self.backend,
            self.lora,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            strategy=strategy,
        )
        if self._device.type == "cuda":  # elsewhere a capture costs as much as a step
            self.lora.reserve()
            graphs.capture_all()
            logger.info("captured %d CUDA graphs of decode steps", graphs.captures)
        return graphs

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor` and `ModelRunner.execute`."""
        return self.runner.execute(plan)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The configured context, or the model's. Raises `ConfigError` if more is asked for than the model has."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > spec.max_position_embeddings:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's {spec.max_position_embeddings} positions")
    return wanted or spec.max_position_embeddings


def _load_adapters(config: EngineConfig, spec: ModelSpec) -> list[LoadedAdapter]:
    """All adapters of the configuration, ids 1, 2, ... in their order. Raises `AdapterLoadError`."""
    return [
        load_adapter(
            module.path,
            name=module.name,
            adapter_id=adapter_id,
            spec=spec,
            max_lora_rank=config.lora.max_lora_rank,
            team=config.lora.team_of(module.name),
        )
        for adapter_id, module in enumerate(config.lora.modules, start=1)
    ]
