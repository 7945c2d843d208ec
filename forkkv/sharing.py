"""Who shares: the rule that turns an adapter and the server's mode into private or shared caches."""

from __future__ import annotations

from forkkv.types import AdapterMeta, KVSharing


def is_shared(adapter: AdapterMeta, mode: KVSharing, requested: str | None = None) -> bool:
    """Whether a request for `adapter` reads shared base blocks under the server's `mode`.

    `auto` shares the kinds whose definition is the shared computation (fork-LoRA and aLoRA), and the plain adapters
    whose measured loss under sharing is small enough.
    """
    if mode == "none" or requested == "none":
        return False
    return adapter.kind != "plain" or mode == "fork" or adapter.passed_probe


def needs_probe(adapter: AdapterMeta, mode: KVSharing) -> bool:
    """Whether the loss of `adapter` under sharing is measured at load: `auto` decides by it, `fork` warns with it."""
    return adapter.kind == "plain" and mode in ("auto", "fork")


def reads_residual(adapter: AdapterMeta, mode: KVSharing) -> bool:
    """Whether shared requests for `adapter` complete base K, V by a residual: it has k_proj or v_proj weights, and
    is no aLoRA, whose prefix is the base model's by definition."""
    has_residual = bool(adapter.rank_k or adapter.rank_v) and adapter.kind != "alora"
    return has_residual and is_shared(adapter, mode)
