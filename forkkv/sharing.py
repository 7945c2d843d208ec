"""Who shares what: the rules that turn an adapter's kind and the server's mode into caches."""

from __future__ import annotations

from typing import get_args

from forkkv.errors import RequestError
from forkkv.types import AdapterKind, AdapterMeta, KVSharing, WriterClass

CONTROLS: tuple[KVSharing, ...] = ("first-writer", "shared-a", "full")
"""Modes of the published systems, for measurements: agents read what other agents wrote."""


def check_requested(requested: str | None) -> None:
    """Raises `RequestError` for a request's `kv_sharing` that is not "none": all else is chosen at the start."""
    if requested in (None, "none"):
        return
    reason = "other modes are chosen at the server's start"
    if requested in get_args(KVSharing):
        reason = f'"{requested}" is a mode of the server (--kv-sharing {requested})'
    raise RequestError(
        f"'kv_sharing' in a request can only be \"none\"; {reason}.", code="invalid_value", param="kv_sharing"
    )


def is_shared(adapter: AdapterMeta, mode: KVSharing, requested: str | None = None) -> bool:
    """Whether a request for `adapter` reads shared blocks under the server's `mode`.

    `auto` shares the kinds whose definition is the shared computation (fork-LoRA and aLoRA), and the plain adapters
    whose measured loss under sharing is small enough.
    """
    if mode == "none" or requested == "none":
        return False
    return adapter.kind != "plain" or mode != "auto" or adapter.passed_probe


def needs_probe(adapter: AdapterMeta, mode: KVSharing) -> bool:
    """Whether the loss of `adapter` under sharing is measured at load: `auto` decides by it, `fork` warns with it."""
    return adapter.kind == "plain" and mode in ("auto", "fork")


def writer_class(kind: AdapterKind | None, mode: KVSharing, requested: str | None = None) -> WriterClass:
    """Whose blocks a request of `kind` (None: the base model) reads and writes in the base tree. The base model and
    aLoRA, whose prefix is the base model's by definition, never read what an agent wrote."""
    mixed = mode in CONTROLS and kind not in (None, "alora") and requested != "none"
    return "mixed" if mixed else "base"


def residual_digest(adapter: AdapterMeta, mode: KVSharing, requested: str | None = None) -> str | None:
    """Key of the residual that completes the shared K, V for `adapter`; None where nothing is shared or nothing
    completed: without k_proj and v_proj weights, for aLoRA, and where merged K, V are shared (`full`)."""
    has_residual = bool(adapter.rank_k or adapter.rank_v) and adapter.kind != "alora"
    if not has_residual or mode == "full" or not is_shared(adapter, mode, requested):
        return None
    return (adapter.a_digest or adapter.digest) if mode == "shared-a" else adapter.digest


def takes_fanout(adapter: AdapterMeta, mode: KVSharing) -> bool:
    """Whether a base prefill may write the residual of `adapter`. A residual over agent-written blocks needs the
    adapter's own pass."""
    return residual_digest(adapter, mode) is not None and writer_class(adapter.kind, mode) == "base"
