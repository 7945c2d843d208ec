"""A step with caches to run it on: pools of several layers with random contents, adapters, queries, a real backend.

Needs torch and numpy alone, so that it also runs where the server's other packages are absent.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.steps import Step
from benchmarks.lib.timing import take_turns
from forkkv.attention.backend import AttentionBackend, LayerCache
from forkkv.attention.registry import select_backend
from forkkv.executor.cache import PagedCache
from forkkv.kvcache.spec import CacheSpec
from forkkv.lora.adapter import LoadedAdapter
from forkkv.lora.weights import AdapterWeights
from forkkv.models.layers import RotaryTable
from forkkv.models.llama import attention_shape
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import module_shape
from forkkv.types import AdapterMeta, AdapterReport

_MAX_ROTATED_OFFSETS = 32
"""As in the executor: on CPUs B_k is kept rotated to every offset inside blocks up to this size."""


def random_adapters(spec: ModelSpec, count: int, rank: int, modules: tuple[str, ...], seed: int = 1) -> Any:
    """`count` adapters of `rank` on `modules` in every layer, as the checkpoint reader would return them; ids 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    adapters = []
    for adapter_id in range(1, count + 1):
        weights = {}
        for layer in range(spec.num_layers):
            for module in modules:
                out, inputs = module_shape(spec, module)
                a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                weights[layer, module] = (a, torch.randn(out, rank, generator=generator) * 0.1)
        ranks = {module: rank if module in modules else 0 for module in ("k_proj", "v_proj")}
        name = f"agent{adapter_id - 1}"
        meta = AdapterMeta(adapter_id, name, f"digest-{adapter_id}", "fork", ranks["k_proj"], ranks["v_proj"])
        report = AdapterReport(name, "", adapter_id, meta.digest, "fork", len(weights), (), 0)
        adapters.append(LoadedAdapter(meta, report, weights, dict.fromkeys(weights, 1.0)))
    return adapters


class Problem:
    """One step on caches of `layers` layers. `run_layer` is what the model calls in each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        step: Step,
        *,
        layers: int,
        backend: str | None = None,
        rank: int = 0,
        num_adapters: int = 0,
        modules: tuple[str, ...] = ("k_proj", "v_proj"),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """`rank` and `num_adapters`: of the adapters (on `modules`) that the step reads, runs or writes residuals of;
        0: a step of base rows."""
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        block_size = step.block_size
        positions = max(segment.end for segment in step.segments) + 1
        rotary = RotaryTable(spec, positions, self.device)
        self.rotary = rotary
        self.backend = self._make_backend(backend)
        self.batch = step.batch(self.device)
        sizes = CacheSpec(layers, spec.num_kv_heads, spec.head_dim, block_size, dtype.itemsize, dtype.itemsize)
        self.cache = PagedCache(sizes, max(2, step.next_block), max(2, step.next_unit), dtype, self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        for pool in (self.cache.k, self.cache.v, self.cache.residual):
            for layer in pool:
                layer[1:].normal_(generator=generator)
        self.cache.residual.mul_(0.1)
        self._adapters = (num_adapters if rank else 0, rank, modules)
        self.lora = self._load_adapters()
        shape_q = (layers, self.batch.num_tokens, spec.num_heads, spec.head_dim)
        self.queries = torch.empty(shape_q, dtype=dtype, device=self.device).normal_(generator=generator)

    def _make_backend(self, name: str | None) -> AttentionBackend:
        shape = attention_shape(self.spec)
        chosen = select_backend(self.device, self.dtype, shape, name)
        return chosen(shape, self.rotary.cos.to(self.dtype), self.rotary.sin.to(self.dtype))

    def _load_adapters(self) -> AdapterWeights | None:
        """Random adapters 1, 2, ... in slots 0, 1, ..., with what the executor prepares for the backend."""
        count, rank, modules = self._adapters
        if not count:
            return None
        spec, block_size, backend = replace(self.spec, num_layers=self.num_layers), self.batch.block_size, self.backend
        offsets, packed = None, backend.reads_packed_b_k
        if self.device.type == "cpu" and not packed and block_size <= _MAX_ROTATED_OFFSETS:
            offsets = (self.rotary.cos[:block_size], self.rotary.sin[:block_size])
        pack = backend.pack_b_k if packed else None
        adapters = random_adapters(spec, count, rank, modules)
        weights = AdapterWeights(spec, adapters, count, self.device, self.dtype, None, offsets, pack)
        for slot in range(count):
            weights.load(slot, slot + 1)
        return weights

    def with_backend(self, name: str | None) -> Problem:
        """The same batch and caches, and equal adapters, run by another backend."""
        twin = copy.copy(self)
        twin.backend = self._make_backend(name)
        twin.lora = twin._load_adapters()
        return twin

    def with_step(self, step: Step) -> Problem:
        """Another plan of the same rows on the same caches, by a backend of its own."""
        twin = copy.copy(self)
        twin.batch = step.batch(self.device)
        twin.backend = type(self.backend)(self.backend.shape, self.backend.cos, self.backend.sin)
        return twin

    @property
    def num_layers(self) -> int:
        return len(self.cache.layers)

    @property
    def bytes_per_layer(self) -> int:
        return self.cache.num_bytes // self.num_layers

    def plan(self) -> Any:
        """What the model does once a step."""
        return self.backend.plan(self.batch)

    def run_layer(self, layer: int, metadata: Any) -> Tensor:
        """Attention of one layer, [T, H, D]."""
        cache: LayerCache = self.cache.layers[layer]
        expansion = None if self.lora is None else self.lora.expansions[layer]
        return self.backend.run(self.queries[layer], cache, expansion, metadata)

    def run_step(self) -> Tensor:
        """Plan and all layers; the last layer's output."""
        metadata = self.plan()
        out = self.run_layer(0, metadata)
        for layer in range(1, self.num_layers):
            out = self.run_layer(layer, metadata)
        return out


class PrivateCaches:
    """The same rows with everything in caches of their own, contiguous, through torch's fused attention: what a
    server without sharing would at best run. k, v [layers, agents, Hkv, length, D]."""

    def __init__(
        self,
        spec: ModelSpec,
        agents: int,
        length: int,
        *,
        layers: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (layers, agents, spec.num_kv_heads, length, spec.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        for layer in range(layers):
            self.k[layer].normal_(generator=generator)
            self.v[layer].normal_(generator=generator)
        per_kv = spec.num_heads // spec.num_kv_heads
        self.q = torch.empty((layers, agents, spec.num_kv_heads, per_kv, spec.head_dim), dtype=dtype, device=device)
        self.q.normal_(generator=generator)
        self._run = self._heads_as_queries

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    def _heads_as_queries(self, layer: int) -> Tensor:
        """Query heads of one KV head stand where queries stand, which without a mask is the same function."""
        return torch.nn.functional.scaled_dot_product_attention(self.q[layer], self.k[layer], self.v[layer])

    def _grouped_heads(self, layer: int) -> Tensor:
        q = self.q[layer].flatten(1, 2)[:, :, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, self.k[layer], self.v[layer], enable_gqa=True)
        return out.view(self.q[layer].shape)

    def choose_faster(self) -> None:
        """Measure both ways to have query heads share their K and V, and keep the faster one."""
        ways = {way.__name__: way for way in (self._heads_as_queries, self._grouped_heads)}
        steps = {name: (lambda way=way: [way(i) for i in range(self.num_layers)], 1) for name, way in ways.items()}
        times = take_turns(steps, 3, self.k.device)
        self._run = ways[min(ways, key=times.median)]

    def run_layer(self, layer: int) -> Tensor:
        """[agents, Hkv, H / Hkv, D]."""
        return self._run(layer)

    def run_step(self) -> Tensor:
        """All layers; the last one's output."""
        out = self.run_layer(0)
        for layer in range(1, self.num_layers):
            out = self.run_layer(layer)
        return out
