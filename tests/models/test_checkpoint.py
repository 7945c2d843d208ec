"""PEFT folders: what is read, what it means, and everything that must be refused with names and reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkkv.errors import AdapterLoadError
from forkkv.lora.adapter import LoadedAdapter
from forkkv.lora.checkpoint import load_adapter
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import MODULE_PARENT
from tests.models.factory import ALL_MODULES, PEFT_PREFIX, load_model, make_adapter, make_model
from tests.oracle import oracle_logprobs, read_adapter

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
)
TOKENS = list(range(10, 42))


def load(folder: Path, max_lora_rank: int = 64, **options: Any) -> LoadedAdapter:
    options = {"name": "ad1", "adapter_id": 1} | options
    return load_adapter(folder, spec=SPEC, max_lora_rank=max_lora_rank, **options)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(AdapterLoadError) as error:
        load(folder, **options)
    return str(error.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def rename(folder: Path, old: str, new: str, every: int = 1) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace(old, new) if i % every == 0 else name: t for i, (name, t) in enumerate(tensors.items())}
    save_file(renamed, folder / "adapter_model.safetensors")
    return folder


def oracle_form(loaded: LoadedAdapter) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, float]]:
    return {key: (a, b, loaded.scaling[key]) for key, (a, b) in loaded.weights.items()}


# ---- what is read -----------------------------------------------------------------------------------------------


def test_every_tensor_is_read_and_reported(tmp_path: Path):
    folder = make_adapter(tmp_path, SPEC, targets=ALL_MODULES, rank=8, alpha=16)
    loaded = load(folder, team="demo")
    expected = read_adapter(folder)
    assert loaded.weights.keys() == expected.keys() == loaded.scaling.keys()
    for key, (a, b, scaling) in expected.items():
        assert torch.equal(loaded.weights[key][0], a) and torch.equal(loaded.weights[key][1], b)
        assert loaded.scaling[key] == scaling == 2.0
    assert list(loaded.weights) == [(layer, module) for layer in range(2) for module in MODULE_PARENT]
    meta, report = loaded.meta, loaded.report
    assert (meta.name, meta.adapter_id, meta.kind, meta.team) == ("ad1", 1, "plain", "demo")
    assert (meta.rank_k, meta.rank_v, meta.k_tiles) == (8, 8, 1)
    assert report.matched == 28 and report.unmatched == () and report.digest == meta.digest
    assert report.modules[0] == ("model.layers.0.self_attn.q_proj", 8, 2.0) and len(report.modules) == 14
    assert report.num_bytes == sum(4 * (a.numel() + b.numel()) for a, b, _ in expected.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_of_the_file_is_kept(tmp_path: Path, dtype: torch.dtype):
    loaded = load(make_adapter(tmp_path, SPEC, dtype=dtype))
    assert {tensor.dtype for pair in loaded.weights.values() for tensor in pair} == {dtype}


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.", "model."])
def test_known_prefixes_are_the_same_adapter(tmp_path: Path, prefix: str):
    digest = load(make_adapter(tmp_path / "usual", SPEC)).meta.digest
    assert load(make_adapter(tmp_path / "other", SPEC, prefix=prefix)).meta.digest == digest


def test_adapter_name_in_the_key_is_dropped(tmp_path: Path):
    folder = rename(make_adapter(tmp_path, SPEC), ".weight", ".default.weight")
    assert load(folder).report.matched == 16


def test_rank_of_k_and_v_over_layers(tmp_path: Path):
    folder = make_adapter(
        tmp_path, SPEC, targets=("k_proj", "v_proj"), rank_pattern={"layers.1.self_attn.k_proj": 24, "v_proj": 3}
    )
    meta = load(folder).meta
    assert (meta.rank_k, meta.rank_v, meta.k_tiles, meta.v_tiles) == (24, 3, 2, 1)
    meta = load(make_adapter(tmp_path / "q", SPEC, targets=("q_proj", "up_proj"))).meta
    assert (meta.rank_k, meta.rank_v, meta.k_tiles) == (0, 0, 0)


def test_kinds(tmp_path: Path):
    assert load(make_adapter(tmp_path / "fork", SPEC, kind="fork")).meta.kind == "fork"
    meta = load(make_adapter(tmp_path / "alora", SPEC, kind="alora", invocation_tokens=[5, 511])).meta
    assert (meta.kind, meta.invocation_tokens) == ("alora", (5, 511))
    extra = {"forkkv": {"kind": "plain", "trained_at": "any"}, "unknown_key": 1, "alora_invocation_tokens": None}
    assert load(make_adapter(tmp_path / "plain", SPEC, config_extra=extra)).meta.kind == "plain"


def test_digest_depends_on_all_that_changes_the_function_and_on_nothing_else(tmp_path: Path):
    variants: dict[str, dict[str, Any]] = {
        "base": {},
        "seed": {"seed": 2},
        "alpha": {"alpha": 17},
        "rslora": {"rslora": True},
        "alpha of one": {"alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
        "dtype": {"dtype": torch.bfloat16},
        "kind": {"kind": "fork"},
        "alora": {"kind": "alora", "invocation_tokens": [5]},
        "alora tokens": {"kind": "alora", "invocation_tokens": [6]},
        "modules": {"targets": ("q_proj",)},
        "layers": {"layers": [0]},
    }
    digests = {
        key: load(make_adapter(tmp_path / key, SPEC, **options)).meta.digest for key, options in variants.items()
    }
    assert len(set(digests.values())) == len(variants)
    copy = shutil.copytree(tmp_path / "base", tmp_path / "copy")
    assert load(copy, name="other", adapter_id=9, team="t").meta.digest == digests["base"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_adapters_that_share_a_have_one_digest_of_a(tmp_path: Path, qk_norm: bool):
    spec = replace(SPEC, qk_norm=qk_norm)

    def digest(name: str, **options: Any) -> str:
        fields: dict[str, Any] = {"targets": ("q_proj", "v_proj"), "a_seed": 5, **options}
        return load_adapter(
            make_adapter(tmp_path / name, SPEC, **fields), name=name, adapter_id=1, spec=spec, max_lora_rank=64
        ).meta.a_digest

    first = digest("first")
    assert first == digest("other B", seed=2, alpha=3) == digest("fork", kind="fork")
    assert len({first, digest("other A", a_seed=6), digest("v only", targets=("v_proj",), a_seed=7)}) == 3
    # With QK-norm a residual also holds the rms of the adapted K, so B of k_proj counts.
    keys = {"targets": ("k_proj",)}
    assert (digest("k", **keys) == digest("k, other B", seed=2, **keys)) is not qk_norm
    assert (digest("k, same", **keys) == digest("k, other scaling", alpha=3, **keys)) is not qk_norm


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"q_proj": 4}, "rank_pattern": {"self_attn.v_proj": 16}},
        {"alpha_pattern": {r".*\.1\.self_attn\.k_proj": 4, "k_proj": 32}},
        {"alpha_pattern": {"^model.layers.0.self_attn.o_proj": 1, "proj": 99}},
        {"rank_pattern": {"k_proj|v_proj": 4}, "rslora": True},
    ],
    ids=["suffix", "regex-first-wins", "anchored-and-partial-names", "alternatives-rslora"],
)
@pytest.mark.filterwarnings(
    "ignore:.*rank_pattern.*:UserWarning", "ignore:.*alpha_pattern keys did not match:RuntimeWarning"
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_rank_and_scaling_patterns_equal_peft(tmp_path: Path, options: dict[str, Any]):
    from peft import PeftModel

    model_folder = make_model(tmp_path / "model")
    folder = make_adapter(tmp_path / "adapter", SPEC, **options)
    loaded = load(folder)
    peft_model = PeftModel.from_pretrained(load_model(model_folder), folder)
    layers = peft_model.base_model.model.model.layers
    for (layer, module), scaling in loaded.scaling.items():
        theirs = getattr(getattr(layers[layer], MODULE_PARENT[module]), module)
        assert theirs.scaling["default"] == pytest.approx(scaling), (layer, module)
        assert theirs.r["default"] == loaded.weights[layer, module][0].shape[0]


# ---- public bug reports of other servers ------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["base_model.model.model.language_model.", "base_model.model.transformer.h."])
def test_a01_unknown_prefix_is_refused_with_names_and_count(tmp_path: Path, wrapper: str):
    message = refusal(rename(make_adapter(tmp_path, SPEC), PEFT_PREFIX, wrapper))
    assert "0 of 16 matched" in message and f"{wrapper}layers.0.self_attn.k_proj.lora_A.weight" in message


def test_a01_partly_matched_is_refused(tmp_path: Path):
    folder = rename(make_adapter(tmp_path, SPEC, targets=ALL_MODULES), "model.layers", "model.decoder.layers", every=2)
    message = refusal(folder)
    assert "14 of 28 matched" in message and "model.decoder.layers" in message


def test_a01_long_lists_of_names_are_cut_at_twenty(tmp_path: Path):
    folder = rename(make_adapter(tmp_path, SPEC, targets=ALL_MODULES), PEFT_PREFIX, "other.")
    message = refusal(folder)
    assert message.count("lora_A") + message.count("lora_B") == 20 and message.endswith("and 8 more")


def test_a02_rslora_scales_by_the_root_of_the_rank(tmp_path: Path):
    plain = load(make_adapter(tmp_path / "a", SPEC, rank=64, alpha=16))
    rslora = load(make_adapter(tmp_path / "b", SPEC, rank=64, alpha=16, rslora=True))
    null = load(make_adapter(tmp_path / "c", SPEC, rank=64, alpha=16, config_extra={"use_rslora": None}))
    assert set(plain.scaling.values()) == set(null.scaling.values()) == {0.25}
    assert set(rslora.scaling.values()) == {16 / math.sqrt(64)}
    assert plain.meta.digest == null.meta.digest != rslora.meta.digest


def test_a03_modules_to_save_is_refused(tmp_path: Path):
    extra = {"modules_to_save": ["embed_tokens", "lm_head"]}
    folder = make_adapter(tmp_path, SPEC, config_extra=extra)
    assert "modules_to_save = ['embed_tokens', 'lm_head']" in refusal(folder)
    make_adapter(tmp_path, SPEC)
    rewrite(folder, lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(512, 64)}))
    message = refusal(folder)
    assert "base_model.model.lm_head.weight" in message and "modules_to_save" in message


def test_a03_trained_token_rows_are_refused(tmp_path: Path):
    folder = make_adapter(tmp_path, SPEC, config_extra={"trainable_token_indices": {"embed_tokens": [5, 6, 7]}})
    assert "trainable_token_indices" in refusal(folder)
    make_adapter(tmp_path, SPEC)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3, 64)}))
    message = refusal(folder)
    assert name in message and "trainable_token_indices" in message


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (("q_proj",), None),
        (("v_proj",), None),
        (("q_proj", "v_proj"), None),
        (("gate_proj",), None),
        (("up_proj",), None),
        (("k_proj", "up_proj"), [1]),
    ],
)
def test_a05_part_of_a_fused_group_equals_the_oracle(
    tmp_path: Path, targets: tuple[str, ...], layers: list[int] | None
):
    folder = make_adapter(tmp_path / "adapter", SPEC, targets=targets, layers=layers)
    loaded = load(folder)
    assert set(loaded.weights) == {(layer, module) for layer in layers or (0, 1) for module in targets}
    model = load_model(make_model(tmp_path / "model"))
    ours = oracle_logprobs(model, TOKENS, oracle_form(loaded), "plain")
    torch.testing.assert_close(ours, oracle_logprobs(model, TOKENS, read_adapter(folder), "plain"))
    assert (ours - oracle_logprobs(model, TOKENS)).abs().max() > 0.02


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "use_dora = True"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": float("nan")}, "not a finite number"),
        ({"rank_pattern": {"(": 4}}, "unusable value"),
        ({"r": 4}, "rank 8, config 4"),
        ({"target_modules": ["q_proj", "v_proj"]}, "model.layers.0.self_attn.k_proj"),
        ({"target_modules": r".*\.q_proj"}, "model.layers.0.self_attn.k_proj"),
        ({"layers_to_transform": [1]}, "model.layers.0.self_attn.q_proj"),
        ({"exclude_modules": ["o_proj"]}, "model.layers.0.self_attn.o_proj"),
        ({"forkkv": {"kind": "spoon"}}, "forkkv kind 'spoon' is unknown"),
        ({"forkkv": "fork"}, "must be an object"),
        ({"forkkv": {"kind": "alora"}}, "needs alora_invocation_tokens"),
        ({"forkkv": {"kind": "fork"}, "alora_invocation_tokens": [5]}, "contradicts"),
        ({"alora_invocation_tokens": [512]}, "outside the vocabulary"),
        ({"alora_invocation_tokens": [-1]}, "outside the vocabulary"),
        ({"alora_invocation_tokens": []}, "non-empty list"),
        ({"alora_invocation_tokens": "<invoke>"}, "non-empty list"),
        ({"alora_invocation_tokens": [5, True]}, "non-empty list"),
    ],
)
def test_config_settings_that_are_not_served(tmp_path: Path, extra: dict[str, Any], reason: str):
    message = refusal(make_adapter(tmp_path, SPEC, config_extra=extra))
    assert reason in message and str(tmp_path) in message


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (PEFT_PREFIX + "layers.0.self_attn.q_proj.lora_magnitude_vector", (64,), "DoRA"),
        (PEFT_PREFIX + "embed_tokens.lora_embedding_A", (8, 512), "embedding"),
        ("base_model.model.lm_head.lora_A.weight", (8, 64), "lm_head"),
        (PEFT_PREFIX + "layers.0.self_attn.q_proj.lora_B.bias", (64,), "bias"),
        (PEFT_PREFIX + "layers.0.mlp.q_proj.lora_A.weight", (8, 64), "does not have"),
        (PEFT_PREFIX + "layers.0.self_attn.qkv_proj.lora_A.weight", (8, 64), "does not have"),
        (PEFT_PREFIX + "layers.2.self_attn.q_proj.lora_A.weight", (8, 64), "out of range, the model has 2 layers"),
        (PEFT_PREFIX + "layers.0.mlp.up_proj.lora_A.weight", (8, 64), "A without B"),
        (PEFT_PREFIX + "layers.0.mlp.up_proj.lora_B.weight", (128, 8), "A without B"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (8, 64), "two names"),
    ],
)
def test_tensors_that_cannot_be_served(tmp_path: Path, name: str, shape: tuple[int, ...], reason: str):
    folder = make_adapter(tmp_path, SPEC, config_extra={"target_modules": "all-linear"})
    message = refusal(rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)})))
    assert reason in message and ".".join(name.split(".")[-3:]) in message


@pytest.mark.parametrize(
    ("half", "shape"), [("A", (8, 63)), ("B", (60, 8)), ("B", (64, 7)), ("A", (8,)), ("A", (0, 64))]
)
def test_misshapen_tensors_are_refused(tmp_path: Path, half: str, shape: tuple[int, ...]):
    name = f"{PEFT_PREFIX}layers.1.self_attn.q_proj.lora_{half}.weight"
    folder = make_adapter(tmp_path, SPEC)
    message = refusal(rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)})))
    assert "layers.1.self_attn.q_proj" in message and str(list(shape)) in message


def test_rank_above_the_limit_names_both_numbers(tmp_path: Path):
    folder = make_adapter(tmp_path, SPEC, rank=16, rank_pattern={"v_proj": 32})
    assert "rank 32 is above --max-lora-rank 16" in refusal(folder, max_lora_rank=16)
    assert load(folder, max_lora_rank=32).meta.rank_v == 32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_values_are_refused(tmp_path: Path, value: float):
    name = f"{PEFT_PREFIX}layers.1.self_attn.v_proj.lora_B.weight"
    folder = rewrite(make_adapter(tmp_path, SPEC), lambda tensors: tensors[name].view(-1)[3].fill_(value))
    message = refusal(folder)
    assert "NaN or infinite" in message and "layers.1.self_attn.v_proj.lora_B" in message


def test_integer_tensors_are_refused(tmp_path: Path):
    name = f"{PEFT_PREFIX}layers.1.self_attn.v_proj.lora_B.weight"
    folder = make_adapter(tmp_path, SPEC)
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(32, 8, dtype=torch.int8)}))
    assert f"{name} torch.int8" in refusal(folder)


def test_incomplete_folders_are_refused(tmp_path: Path):
    assert "no such folder" in refusal(tmp_path / "absent")
    folder = make_adapter(tmp_path / "ad", SPEC)
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert "unreadable safetensors" in refusal(folder)
    save_file({}, file)
    assert "holds no tensor" in refusal(folder)
    file.rename(folder / "adapter_model.bin")
    assert "unpickling runs code" in refusal(folder)
    (folder / "adapter_model.bin").unlink()
    assert "no adapter_model.safetensors" in refusal(folder)
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    assert "not a JSON object" in refusal(folder)
    (folder / "adapter_config.json").write_text("{")
    assert "unreadable" in refusal(folder)


def test_targeted_modules_without_tensors_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = make_adapter(tmp_path, SPEC, layers=[0], config_extra={"layers_to_transform": None})
    with caplog.at_level("WARNING", "forkkv"):
        loaded = load(folder)
    assert len(loaded.weights) == 4 and "4 targeted modules have no tensors" in caplog.text
