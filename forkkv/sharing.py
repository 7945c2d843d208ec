"""Who shares: the rule that turns an adapter's kind and the server's mode into private or shared caches."""

from __future__ import annotations

from forkkv.types import AdapterKind, AdapterMeta, KVSharing


def is_shared(kind: AdapterKind, mode: KVSharing, requested: str | None = None) -> bool:
    """Whether a request for an adapter of `kind` reads shared base blocks under the server's `mode`.

    `auto` shares the kinds whose definition is the shared computation (fork-LoRA and aLoRA) and keeps plain adapters
    private until their loss under sharing is known.
    """
    if mode == "none" or requested == "none":
        return False
    return kind != "plain" or mode == "fork"


def reads_residual(adapter: AdapterMeta, mode: KVSharing) -> bool:
    """Whether shared requests for `adapter` complete base K, V by a residual: it has k_proj or v_proj weights, and
    is no aLoRA, whose prefix is the base model's by definition."""
    has_residual = bool(adapter.rank_k or adapter.rank_v) and adapter.kind != "alora"
    return has_residual and is_shared(adapter.kind, mode)
