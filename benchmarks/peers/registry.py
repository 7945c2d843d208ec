"""The servers of a comparison by the names that `--peers` takes."""

from __future__ import annotations

from benchmarks.peers.forkkv_server import ForkKVServer
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.peft_server import PeftServer
from benchmarks.peers.site import Peer
from benchmarks.peers.vllm_server import VllmServer

PEERS: dict[str, Peer] = {
    "forkkv": ForkKVServer("fork"),
    "forkkv-none": ForkKVServer("none"),
    "forkkv-int8": ForkKVServer("fork", "int8"),
    "peft": PeftServer(),
    "llama-server": LlamaServer("f32"),
    "llama-server-q8": LlamaServer("q8_0"),
    "vllm": VllmServer(),
}
_WITH_ADAPTERS = ("forkkv", "forkkv-none", "peft", "llama-server", "vllm")
_WITHOUT = ("forkkv", "forkkv-int8", "peft", "llama-server", "llama-server-q8", "vllm")


def chosen(names: str, *, adapters: bool) -> dict[str, Peer]:
    """The peers of `--peers` by name, our own first. "all": every server in fp32, and without adapters, where fork and
    none are the same, those with 8-bit weights; "ours": our own of these. Raises `ValueError`."""
    everyone = _WITH_ADAPTERS if adapters else _WITHOUT
    if names in ("all", "ours"):
        return {name: PEERS[name] for name in everyone if names == "all" or name.startswith("forkkv")}
    wanted = [name.strip() for name in names.split(",")]
    if unknown := sorted(set(wanted) - set(PEERS)):
        raise ValueError(f"no peer {', '.join(unknown)}; there are all, ours, {', '.join(PEERS)}")
    return {name: peer for name, peer in PEERS.items() if name in wanted}
