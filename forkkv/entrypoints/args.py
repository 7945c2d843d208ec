"""Command line, environment (`FORKKV_*`) and YAML file to one `ServerArgs`, and that to an `EngineConfig`.

Precedence: command line, environment, file, default. Nothing heavy is imported, so `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from forkkv.config import (
    GIB,
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
)
from forkkv.errors import ConfigError
from forkkv.frontend.probe_text import PROBE_TOKENS
from forkkv.types import KVSharing

PROG = "forkkv serve"
LORA_FLAG = "--lora-modules"
CONFIG_FLAG = "--config"


class LoRAModuleArg(BaseModel):
    """`name=path`, or an object with both."""

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, found, path = value.partition("=")
        if not found:
            raise ValueError(f"expected name=path, got {value!r}")
        return {"name": name, "path": path}


class ServerArgs(BaseSettings):
    """Serve a base model and its LoRA adapters over an OpenAI-compatible HTTP API."""

    model_config = SettingsConfigDict(
        env_prefix="FORKKV_",
        cli_prog_name=PROG,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="forbid",
        protected_namespaces=(),
    )
    file_values: ClassVar[dict[str, Any]] = {}

    # model
    model: str = Field("smollm2", description="Model: 'smollm2', a folder, a .gguf file, or a hub id.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name of the base model in the API; default: --model as given."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and cache; auto is float32 on a CPU and the checkpoint's own on a GPU."
    )
    quantization: Literal["auto", "none", "int8"] = Field(
        "auto",
        description="int8: the base model's matrices in 8 bits, on a CPU; adapters and caches stay as --dtype. "
        "auto: int8 where that is faster, which is float32 on a CPU with VNNI.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="File format of the weights; dummy makes random ones."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs to split the model over; only 1 for now.")
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus answer in tokens; default: model's.")
    attention_backend: Literal["auto", "cpu", "triton", "torch", "reference"] = Field(
        "auto",
        description="Attention kernels; auto: compiled for the device, PyTorch where those do not fit the model.",
    )
    enforce_eager: bool = Field(False, description="Do not capture decode steps (CUDA graphs, programs on CPUs).")
    seed: int = Field(0, description="Seed of dummy weights and of requests without a seed.")

    # sharing
    enable_forkkv: bool = Field(False, description="Share the base model's K/V cache between adapters.")
    enable_dual_radix_tree: bool = Field(True, description="Reuse cached blocks between requests.")
    kv_sharing: KVSharing | None = Field(
        None,
        description="none: private caches; auto: share where the adapter's own definition is sharing (fork-LoRA, "
        "aLoRA) and plain adapters that pass the probe; fork: share all plain adapters too; first-writer, shared-a, "
        "full: the published systems' modes, for measurements: agents read what other agents wrote. Default: auto "
        "with --enable-forkkv, else none.",
    )
    probe: bool = Field(
        True, description="Measure at start what sharing costs each plain adapter; without, auto keeps them private."
    )
    probe_file: str | None = Field(
        None, description=f"Text to measure with, its first {PROBE_TOKENS} tokens; default: a built-in document."
    )
    max_probe_kl: float = Field(
        0.02, ge=0, description="Mean KL per token, in nats, up to which auto shares a plain adapter."
    )
    fork_tail: int = Field(64, ge=1, description="Prompt tokens before the end that an adapter runs itself by default.")
    residual_fanout: int = Field(8, ge=0, description="Adapters whose residual one base prefill may write besides.")

    # adapters
    lora_modules: list[LoRAModuleArg] = Field(
        default_factory=list, description="Adapters as name=path [name=path ...], or JSON objects with name and path."
    )
    max_loras: int = Field(8, ge=1, description="Adapters whose weights may be in one batch.")
    max_lora_rank: int = Field(64, ge=1, description="Largest rank that is accepted.")
    teams: dict[str, list[str]] = Field(
        default_factory=dict, description="JSON: team to adapter names; a base prefill fans out within a team."
    )

    # memory and batching
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory to use.")
    cpu_memory_gib: float | None = Field(None, gt=0, description="GiB for both caches on a CPU; default: by free RAM.")
    residual_share: float | None = Field(
        None, gt=0, lt=1, description="Share of cache memory for residuals; default: by fan-out and rank."
    )
    block_size: int = Field(16, ge=1, description="Tokens in a cache block; a power of two.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences in one batch.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens in one step.")
    chunked_prefill_size: int = Field(
        512, ge=1, description="Prefill tokens in one step while other sequences decode; alone prefill may fill a step."
    )

    # server
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_mib: float = Field(32.0, gt=0, description="Largest request body in MiB.")
    sse_keep_alive: float = Field(15.0, ge=0, description="Seconds between keep-alive comments of a stream; 0: none.")
    shutdown_timeout: int = Field(30, ge=0, description="Seconds that running requests get after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")
    config: str | None = Field(None, description="YAML file with any of these settings, without the dashes.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.file_values)

    @property
    def base_name(self) -> str:
        """Name of the base model in requests and answers."""
        return self.served_model_name or self.model

    @property
    def sharing(self) -> KVSharing:
        """The mode that holds: as asked for, else by --enable-forkkv."""
        if self.kv_sharing is not None:
            return self.kv_sharing
        return "auto" if self.enable_forkkv else "none"


def resolve(args: ServerArgs) -> EngineConfig:
    """Engine configuration of `args`; pure. Raises `ConfigError` for contradictions."""
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {args.tensor_parallel_size}: this version runs a model on one device; "
            "only 1 is possible"
        )
    if any(module.name == args.base_name for module in args.lora_modules):
        raise ConfigError(f"{LORA_FLAG}: an adapter is named like the base model, {args.base_name!r}")
    return EngineConfig(
        model=ModelConfig(
            path=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            load_format=args.load_format,
            max_model_len=args.max_model_len,
            device=args.device,
            attention_backend=args.attention_backend,
            enforce_eager=args.enforce_eager,
            seed=args.seed,
        ),
        cache=CacheConfig(
            block_size=args.block_size,
            memory_bytes=None if args.cpu_memory_gib is None else int(args.cpu_memory_gib * GIB),
            gpu_memory_utilization=args.gpu_memory_utilization,
            residual_share=args.residual_share,
            enable_dual_radix_tree=args.enable_dual_radix_tree,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_sharing=args.sharing,
            fork_tail=args.fork_tail,
            residual_fanout=args.residual_fanout,
            chunked_prefill_size=args.chunked_prefill_size,
        ),
        lora=LoRAConfig(
            modules=tuple(LoRAModule(module.name, module.path) for module in args.lora_modules),
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            probe=args.probe,
            max_probe_kl=args.max_probe_kl,
            teams=tuple((team, tuple(members)) for team, members in args.teams.items()),
        ),
    )


def parse_args(argv: Sequence[str] | None = None) -> tuple[ServerArgs, EngineConfig]:
    """Settings from `argv` (default: the command line), environment and file. Exits with status 2 and a message that
    names the flag if anything is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(argv)
        return args, resolve(args)
    except ValidationError as error:
        _fail("; ".join(_complaints(error)))
    except (ConfigError, SettingsError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"{PROG}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _complaints(error: ValidationError) -> Iterator[str]:
    for entry in error.errors(include_url=False, include_context=False):
        if not entry["loc"]:
            yield entry["msg"]
            continue
        flag = "--" + str(entry["loc"][0]).replace("_", "-")
        known = str(entry["loc"][0]) in ServerArgs.model_fields
        yield (
            f"{flag}: {entry['msg'].removeprefix('Value error, ')}" if known else f"unknown setting {entry['loc'][0]!r}"
        )


def _parse(argv: list[str]) -> ServerArgs:
    file = _config_path(argv) or os.environ.get("FORKKV_CONFIG")
    values = load_config_file(Path(file)) if file else {}
    # The sources of a settings class are fixed per class, and the file is known only now.
    parsed = type(
        "ServerArgs", (ServerArgs,), {"file_values": values, "__doc__": ServerArgs.__doc__, "__module__": __name__}
    )
    args: ServerArgs = CliApp.run(parsed, cli_args=_join_lora_modules(argv))
    return args


def _config_path(argv: list[str]) -> str | None:
    for index, word in enumerate(argv):
        if word.startswith(f"{CONFIG_FLAG}="):
            return word.partition("=")[2]
        if word == CONFIG_FLAG and index + 1 < len(argv):
            return argv[index + 1]
    return None


def _join_lora_modules(argv: list[str]) -> list[str]:
    """Collect the values of every `--lora-modules` (several words after one flag, repeated flags, JSON) into one JSON
    list, the only form of a list that the settings parser takes without splitting paths at commas."""
    rest: list[str] = []
    modules: list[Any] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if word.startswith(f"{LORA_FLAG}="):
            modules += _module_values(word.partition("=")[2])
        elif word == LORA_FLAG:
            start = index
            while index < len(argv) and not argv[index].startswith("--"):
                modules += _module_values(argv[index])
                index += 1
            if index == start:
                raise ConfigError(f"{LORA_FLAG}: expected at least one name=path")
        else:
            rest.append(word)
    if modules:
        rest += [LORA_FLAG, json.dumps(modules)]
    return rest


def _module_values(text: str) -> list[Any]:
    """One word after the flag as JSON-able objects. Raises `ConfigError`."""
    if text.startswith(("{", "[")):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{LORA_FLAG}: {text!r} is not valid JSON: {error}") from None
        return value if isinstance(value, list) else [value]
    name, found, path = text.partition("=")
    if not (found and name and path):
        raise ConfigError(f"{LORA_FLAG}: expected name=path, got {text!r}")
    return [{"name": name, "path": path}]


def load_config_file(path: Path) -> dict[str, Any]:
    """Settings of a YAML file, keys with `_` or `-`. Relative paths of adapters and of the probe's text, and a model
    path that exists there, are resolved against the file's folder. Raises `ConfigError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_FLAG} {path}: expected a mapping of settings")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    if unknown := sorted(set(values) - set(ServerArgs.model_fields) | set(values) & {"config"}):
        raise ConfigError(f"{CONFIG_FLAG} {path}: unknown settings: {', '.join(unknown)}")
    folder = path.resolve().parent
    model = values.get("model")
    if isinstance(model, str) and (folder / model).exists():
        values["model"] = str(folder / model)
    if isinstance(probe_file := values.get("probe_file"), str):
        values["probe_file"] = str(folder / Path(probe_file).expanduser())
    modules = values.get("lora_modules") or []
    if not isinstance(modules, list):
        raise ConfigError(f"{CONFIG_FLAG} {path}: lora_modules must be a list")
    values["lora_modules"] = [_resolved_module(module, folder) for module in modules]
    return values


def _resolved_module(module: Any, folder: Path) -> Any:
    if isinstance(module, str):
        module = _module_values(module)[0]
    if isinstance(module, dict) and isinstance(module.get("path"), str):
        return {**module, "path": str(folder / Path(module["path"]).expanduser())}
    return module
