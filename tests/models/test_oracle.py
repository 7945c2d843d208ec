"""The oracle against transformers and PEFT, wherever these define the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.factory import ALL_MODULES, ATTENTION, load_model, make_adapter, make_model
from tests.oracle import oracle_logprobs, read_adapter

TOKENS = [int(x) for x in torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(5))]
INVOCATION = [501, 502]
ARCHS = ("llama", "qwen2", "qwen3")
CLOSE = {"atol": 1e-4, "rtol": 0}

# PEFT still asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: make_model(root / arch, arch, head_dim=32 if arch == "qwen3" else None) for arch in ARCHS}


def hf_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].float(), dim=-1)


def peft_logprobs(folder: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(folder), adapter).eval()
    return hf_logprobs(model, tokens)


@pytest.mark.parametrize("arch", ARCHS)
def test_base_equals_transformers(folders: dict[str, Path], arch: str):
    model = load_model(folders[arch])
    logprobs = oracle_logprobs(model, TOKENS)
    torch.testing.assert_close(logprobs, hf_logprobs(model, TOKENS), **CLOSE)
    assert logprobs.std() > 1, "logits of the test model must not be flat"


def test_untied_head_and_llama3_rope_equal_transformers(tmp_path: Path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = load_model(make_model(tmp_path, tied=False, rope_parameters=rope, max_position=512))
    tokens = TOKENS * 4
    torch.testing.assert_close(oracle_logprobs(model, tokens), hf_logprobs(model, tokens), **CLOSE)


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"targets": ALL_MODULES}),
        ("llama", {"rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}}),
        ("qwen2", {"targets": ATTENTION}),
        ("qwen3", {"targets": ("k_proj",)}),
        ("qwen3", {"targets": ALL_MODULES, "layers": [1]}),
    ],
    ids=["llama-all", "llama-rslora-patterns", "qwen2-bias", "qwen3-k", "qwen3-layer1"],
)
@pytest.mark.filterwarnings("ignore:.*rank_pattern.*:UserWarning")
def test_plain_equals_peft(folders: dict[str, Path], tmp_path: Path, arch: str, options: dict[str, Any]):
    folder = make_adapter(tmp_path, folders[arch], **options)
    model, adapter = load_model(folders[arch]), read_adapter(folder)
    logprobs = oracle_logprobs(model, TOKENS, adapter, "plain")
    torch.testing.assert_close(logprobs, peft_logprobs(folders[arch], folder, TOKENS), **CLOSE)
    assert (logprobs - oracle_logprobs(model, TOKENS)).abs().max() > 0.1, "the adapter must be visible"


@pytest.mark.parametrize("arch", ARCHS)
def test_alora_equals_peft(folders: dict[str, Path], tmp_path: Path, arch: str):
    folder = make_adapter(tmp_path, folders[arch], targets=ALL_MODULES, kind="alora", invocation_tokens=INVOCATION)
    model = load_model(folders[arch])
    start = 24
    tokens = INVOCATION + TOKENS[:start] + INVOCATION + TOKENS[start:]
    logprobs = oracle_logprobs(model, tokens, read_adapter(folder), "alora", start + len(INVOCATION))
    torch.testing.assert_close(logprobs, peft_logprobs(folders[arch], folder, tokens), **CLOSE)
    base = oracle_logprobs(model, tokens)
    torch.testing.assert_close(logprobs[: start + 2], base[: start + 2], **CLOSE)
    assert (logprobs - base)[start + 2 :].abs().max() > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_fork_at_zero_is_plain_and_at_the_end_is_base(folders: dict[str, Path], tmp_path: Path, arch: str):
    adapter = read_adapter(make_adapter(tmp_path, folders[arch], kind="fork"))
    model, n = load_model(folders[arch]), len(TOKENS)
    plain, base = oracle_logprobs(model, TOKENS, adapter, "plain"), oracle_logprobs(model, TOKENS)
    torch.testing.assert_close(oracle_logprobs(model, TOKENS, adapter, "fork", 0), plain, **CLOSE)
    torch.testing.assert_close(oracle_logprobs(model, TOKENS, adapter, "fork", n), base, **CLOSE)


@pytest.mark.parametrize("arch", ARCHS)
def test_fork_in_one_layer_is_plain_behind_the_fork_point(tmp_path: Path, arch: str):
    """With a single layer every h is the embedding, whichever weights ran, so the split of K and V is exact: tokens
    behind f_w must see just what plain LoRA sees. The base's K and V alone (aLoRA) must not give the same."""
    model_folder = make_model(tmp_path / "model", arch, layers=1)
    adapter = read_adapter(make_adapter(tmp_path / "adapter", model_folder, targets=ALL_MODULES, kind="fork"))
    model, f_w = load_model(model_folder), 16
    fork = oracle_logprobs(model, TOKENS, adapter, "fork", f_w)
    plain = oracle_logprobs(model, TOKENS, adapter, "plain")
    torch.testing.assert_close(fork[f_w:], plain[f_w:], **CLOSE)
    torch.testing.assert_close(fork[:f_w], oracle_logprobs(model, TOKENS)[:f_w], **CLOSE)
    alora = oracle_logprobs(model, TOKENS, adapter, "alora", f_w)
    assert (alora - fork)[f_w:].abs().max() > 0.05


def test_contradictory_arguments_are_refused(folders: dict[str, Path], tmp_path: Path):
    model = load_model(folders["llama"])
    adapter = read_adapter(make_adapter(tmp_path, folders["llama"]))
    for arguments in [(None, "plain"), (adapter, "base"), (adapter, "fork", None), (adapter, "alora", 41)]:
        with pytest.raises(ValueError):
            oracle_logprobs(model, TOKENS, *arguments)
