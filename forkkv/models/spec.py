"""Shape of a decoder-only model, independent of the file format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-family decoder (Llama, SmolLM2, Qwen2, Qwen3). Sizes are counts of elements."""

    architecture: str
    """Hugging Face class name, e.g. `LlamaForCausalLM`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or Llama-3's: rope_type "llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings; or rope_type "linear" with factor."""
    tie_word_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"
    """dtype that the checkpoint declares; what `--dtype auto` follows on a GPU."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
