"""Every kernel of a decoder layer as a call of its own, through the functions that the model calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.problem import Problem
from benchmarks.lib.roofline import FUSED, Work, count_layer
from benchmarks.lib.steps import Step
from benchmarks.lib.timing import Times, take_turns
from forkkv.lora.layers import plan_lora
from forkkv.models.layers import FusedLinear
from forkkv.models.llama import StepContext, token_kv_slots
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import module_shape
from forkkv_kernels.ops import rope_cache_write

PROJECTIONS = tuple(module for modules in FUSED.values() for module in modules)


class LayerOps:
    """One step on `layers` layers with random weights; adapters of `rank` on all projections."""

    def __init__(
        self,
        spec: ModelSpec,
        step: Step,
        *,
        layers: int,
        rank: int,
        num_adapters: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, torch.device(device)
        self.ranks = {slot: dict.fromkeys(PROJECTIONS, rank) for slot in range(num_adapters)}
        self.problem = Problem(
            spec,
            step,
            layers=layers,
            backend=backend,
            rank=rank,
            num_adapters=num_adapters,
            modules=PROJECTIONS,
            dtype=dtype,
            device=device,
        )
        self.batch = self.problem.batch
        tokens = self.batch.num_tokens
        self.linears = [{name: self._linear(modules) for name, modules in FUSED.items()} for _ in range(layers)]
        self.inputs = {name: self._random(tokens, module_shape(spec, part[0])[1]) for name, part in FUSED.items()}
        self.outputs = {name: self.linears[0][name](self.inputs[name]) for name in FUSED}
        self.qkv = self._random(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self.metadata = self.problem.plan()
        self.step = None if self.problem.lora is None else plan_lora(self.problem.lora, self.batch)
        self.context = self._context()

    def _context(self) -> StepContext:
        """As the model makes it."""
        cos, sin = self.problem.rotary(self.batch.positions, self.dtype)
        lora: Any = self.step  # not used by what is called here
        return StepContext(self.batch, self.problem.backend, self.metadata, lora, cos, sin, token_kv_slots(self.batch))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _linear(self, modules: tuple[str, ...]) -> FusedLinear:
        shapes = [module_shape(self.spec, module) for module in modules]
        return FusedLinear([self._random(*shape).mul_(shape[1] ** -0.5) for shape in shapes])

    def _dense(self, layer: int) -> None:
        for name, linear in self.linears[layer].items():
            linear(self.inputs[name])

    def _adapters(self, layer: int) -> None:
        assert self.step is not None
        for name, x in self.inputs.items():
            self.step.apply(layer, name, x, self.outputs[name])

    def _residuals(self, layer: int) -> None:
        assert self.step is not None
        keys = self.qkv[:, self.spec.num_heads : self.spec.num_heads + self.spec.num_kv_heads].reshape(
            self.batch.num_tokens, -1
        )
        self.step.write_residuals(layer, self.inputs["qkv"], keys, self.problem.cache.layers[layer], 1e-5)

    def _rope(self, layer: int) -> None:
        q, k, v = self.qkv.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1)
        context, cache = self.context, self.problem.cache.layers[layer]
        rope_cache_write(q, k, v, context.cos, context.sin, context.kv_slots, cache.k, cache.v)

    def works(self) -> dict[str, Work]:
        """Work of each call, in one layer."""
        works = count_layer(self.batch, self.spec, self.ranks, self.dtype.itemsize)
        lora = [works.pop(name) for name in ("shrink", "expand") if name in works]
        if lora:
            works["shrink, expand"] = lora[0] + lora[1]
        return works

    def calls(self) -> dict[str, Callable[[int], object]]:
        """Call by name of `works`; takes the layer."""
        known: dict[str, Callable[[int], object]] = {
            "dense layers": self._dense,
            "shrink, expand": self._adapters,
            "residual write": self._residuals,
            "rope, cache write": self._rope,
            "attention, prefill": lambda layer: self.problem.run_layer(layer, self.metadata),
            "attention, decode": lambda layer: self.problem.run_layer(layer, self.metadata),
        }
        return {name: known[name] for name in self.works()}

    def measure(self, rounds: int, warm_up: int = 1) -> Times:
        """Seconds per layer of each call, all layers in rotation."""

        def all_layers(call: Callable[[int], object]) -> Callable[[], object]:
            def run() -> None:
                for layer in range(self.layers):
                    call(layer)

            return run

        contenders = {name: (all_layers(call), self.layers) for name, call in self.calls().items()}
        return take_turns(contenders, rounds, self.device, warm_up)
