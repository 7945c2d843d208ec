"""Names of attention backends; a backend's module is imported only when it is chosen."""

from __future__ import annotations

from importlib import import_module

import torch

from forkkv.attention.backend import AttentionBackend, AttentionShape
from forkkv.errors import ConfigError

_BACKENDS = {
    "cpu": "forkkv.attention.cpu_backend:CpuBackend",
    "torch": "forkkv.attention.torch_backend:TorchBackend",
    "triton": "forkkv.attention.triton_backend:TritonBackend",
    "reference": "forkkv.attention.reference_backend:ReferenceBackend",
}
_PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch"), "cuda": ("triton", "torch")}


def register_backend(name: str, target: str, device_type: str | None = None) -> None:
    """Make `target` ("package.module:Class") known as `name`; with `device_type` it becomes that device's first
    choice."""
    _BACKENDS[name] = target
    if device_type is not None:
        _PREFERENCE[device_type] = (name, *_PREFERENCE.get(device_type, ("torch",)))


def select_backend(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, name: str | None = None
) -> type[AttentionBackend]:
    """The backend called `name`, or the first of the device's preferences that supports the model.

    Raises `ConfigError` with every reason when none does.
    """
    if name is not None and name not in _BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(sorted(_BACKENDS))}")
    reasons = []
    for candidate in (name,) if name else _PREFERENCE.get(device.type, ("torch",)):
        module, _, attribute = _BACKENDS[candidate].partition(":")
        backend: type[AttentionBackend] = getattr(import_module(module), attribute)
        reason = backend.supports(device, dtype, shape)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"no attention backend for {device.type} {dtype}: {'; '.join(reasons)}")
