"""Command line, environment and YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forkkv.entrypoints import cli
from forkkv.entrypoints.args import ServerArgs, parse_args


def lora(argv: list[str]) -> list[tuple[str, str]]:
    _, config = parse_args(argv)
    return [(module.name, module.path) for module in config.lora.modules]


def test_defaults() -> None:
    args, config = parse_args([])
    assert (args.host, args.port, args.base_name) == ("127.0.0.1", 8000, "smollm2")
    assert config.scheduler.kv_sharing == "none" and config.cache.enable_dual_radix_tree
    assert config.cache.memory_bytes is None and config.model.max_model_len is None


def test_every_flag_reaches_the_engine() -> None:
    flags = (
        "--model m --max-model-len 99 --dtype bfloat16 --load-format dummy --quantization int8 --device cpu --seed 5 "
        "--attention-backend torch --enforce-eager "
        "--block-size 32 --cpu-memory-gib 0.5 --gpu-memory-utilization 0.5 --residual-share 0.25 "
        "--no-enable-dual-radix-tree "
        "--max-num-seqs 4 --max-num-batched-tokens 128 --kv-sharing fork --fork-tail 8 --residual-fanout 2 "
        "--max-loras 3 --max-lora-rank 16 --no-probe --max-probe-kl 0.5"
    )
    _, config = parse_args(flags.split())
    model, cache, sched = config.model, config.cache, config.scheduler
    assert (model.path, model.max_model_len, model.dtype) == ("m", 99, "bfloat16")
    assert (model.load_format, model.quantization, model.device, model.seed) == ("dummy", "int8", "cpu", 5)
    assert (model.attention_backend, model.enforce_eager) == ("torch", True)
    assert (cache.block_size, cache.memory_bytes, cache.gpu_memory_utilization) == (32, 1 << 29, 0.5)
    assert (cache.residual_share, cache.enable_dual_radix_tree) == (0.25, False)
    assert (sched.max_num_seqs, sched.max_num_batched_tokens, sched.kv_sharing) == (4, 128, "fork")
    assert (sched.fork_tail, sched.residual_fanout) == (8, 2)
    assert (config.lora.max_loras, config.lora.max_lora_rank) == (3, 16)
    assert (config.lora.probe, config.lora.max_probe_kl) == (False, 0.5)


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        ([], "none"),
        (["--enable-forkkv"], "auto"),
        (["--enable-forkkv", "--kv-sharing", "none"], "none"),
        (["--kv-sharing", "fork"], "fork"),
        (["--enable-forkkv", "--kv-sharing", "first-writer"], "first-writer"),
        (["--kv-sharing", "shared-a"], "shared-a"),
        (["--kv-sharing", "full"], "full"),
        (["--enable-forkkv", "--no-enable-forkkv"], "none"),
    ],
)
def test_sharing_mode(argv: list[str], mode: str) -> None:
    assert parse_args(argv)[1].scheduler.kv_sharing == mode


def test_lora_modules_in_every_form() -> None:
    assert lora(["--lora-modules", "a=/x,y", "b=z=1", "--port", "1"]) == [("a", "/x,y"), ("b", "z=1")]
    assert lora(["--lora-modules", "a=x", "--lora-modules=b=y"]) == [("a", "x"), ("b", "y")]
    assert lora(["--lora-modules", '{"name": "a", "path": "x"}', "b=y"]) == [("a", "x"), ("b", "y")]
    assert lora(["--lora-modules", '[{"name": "a", "path": "x"}]']) == [("a", "x")]


def test_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(
        "enable-forkkv: true\nkv_sharing: none\nmax_loras: 3\nport: 7\n"
        "lora_modules:\n  - {name: a, path: sub/a}\n  - b=/abs/b\nteams: {orders: [a, b]}\nprobe_file: doc.txt\n"
    )
    args, config = parse_args(["--config", str(file)])
    assert [module.path for module in config.lora.modules] == [str(tmp_path / "sub/a"), "/abs/b"]
    assert args.probe_file == str(tmp_path / "doc.txt")
    assert config.lora.teams == (("orders", ("a", "b")),) and config.lora.team_of("b") == "orders"
    assert (config.scheduler.kv_sharing, args.port) == ("none", 7)
    monkeypatch.setenv("FORKKV_MAX_LORAS", "4")
    monkeypatch.setenv("FORKKV_PORT", "8")
    args, config = parse_args([f"--config={file}", "--port", "9", "--lora-modules", "a=q", "b=r"])
    assert (config.lora.max_loras, args.port) == (4, 9)
    assert [module.path for module in config.lora.modules] == ["q", "r"]
    monkeypatch.setenv("FORKKV_CONFIG", str(file))
    assert parse_args([])[0].enable_forkkv


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bogus", "1"], ["--bogus"]),
        (["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "one device"]),
        (["--max-loras", "0"], ["--max-loras"]),
        (["--max-probe-kl", "-1"], ["--max-probe-kl"]),
        (["--max-loras", "many"], ["--max-loras", "integer"]),
        (["--kv-sharing", "some"], ["--kv-sharing", "'auto'"]),
        (["--block-size", "3"], ["--block-size", "power of two"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization"]),
        (["--port", "70000"], ["--port"]),
        (["--lora-modules"], ["--lora-modules"]),
        (["--lora-modules", "nopath"], ["--lora-modules", "name=path"]),
        (["--lora-modules", "{"], ["--lora-modules", "JSON"]),
        (["--lora-modules", "a=x", "a=y"], ["--lora-modules", "a"]),
        (["--lora-modules", "smollm2=x"], ["--lora-modules", "smollm2"]),
        (["--teams", '{"t": ["ghost"]}'], ["'t'", "ghost"]),
        (["--config", "/no/such/file.yaml"], ["--config", "/no/such/file.yaml"]),
    ],
)
def test_bad_settings_exit_2_and_name_the_flag(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_args(argv)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["modl: x", "- a", "lora_modules: 5", "a: [", "config: x"])
def test_bad_files_exit_2(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        parse_args(["--config", str(file)])
    assert exit_info.value.code == 2 and str(file) in capsys.readouterr().err


def test_every_flag_has_a_help_text() -> None:
    assert all(field.description for field in ServerArgs.model_fields.values())


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from forkkv.entrypoints.openai.api_server import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'transformers', 'fastapi', 'zmq'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--kv-sharing" in run.stdout and "--lora-modules" in run.stdout


def test_cli_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main(["dance"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "--enable-forkkv" in capsys.readouterr().out
