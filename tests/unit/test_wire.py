"""The wire format carries every message unchanged, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig
from forkkv.engine import wire
from forkkv.engine.client import merge_outputs
from forkkv.errors import ConfigError, RequestError
from forkkv.types import (
    AdapterMeta,
    AdapterProbe,
    AdapterReport,
    CacheUsage,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PoolStats,
    SamplingParams,
    StepStats,
    TokenLogprob,
)

STATS = StepStats(3, 1.5, 0.25, 7, 2, 40, 1, 0, PoolStats(10, 4, 2, 64), PoolStats(5, 5, 0, 32), 1, leases=2)
USAGE = CacheUsage("fork", 32, 32, 16, 0, 8, 100, 32)
OUTPUT = EngineOutput("r", 1, (5, 6), "stop", 6, (TokenLogprob(5, -0.5, ((5, -0.5), (9, float("-inf")))),), USAGE)
REQUEST = EngineRequest("r", [1, 2, 3], SamplingParams(seed=-4, stop_token_ids=(7,)), 2, n=3, fork_at=16)
INFO = EngineInfo(
    "m",
    100,
    512,
    (2,),
    "auto",
    16,
    1000,
    500,
    (AdapterMeta(1, "a", "ff", "alora", 8, 0, (4, 5), "team"),),
    (AdapterReport("a", "/a", 1, "ff", "plain", 4, (("q", 8, 2.0),), 99, (), AdapterProbe(0.5, 0.75, 128, 384, 1.5)),),
)


@pytest.mark.parametrize(
    "message", [wire.Add(REQUEST), wire.Abort(("a", "b")), wire.Flush(), wire.ProbeTokens((5, 6)), wire.Shutdown()]
)
def test_to_core_round_trip(message: wire.ToCore) -> None:
    assert wire.decode_to_core(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.ProbeWanted(),
        wire.Ready(INFO, STATS),
        wire.Failed("no weights"),
        wire.Accepted("r"),
        wire.Rejected("r", "too long", "pool_exceeded", "prompt", 400),
        wire.Outputs((OUTPUT, OUTPUT), STATS),
        wire.Flushed(True),
    ],
)
def test_from_core_round_trip(message: wire.FromCore) -> None:
    assert wire.decode_from_core(wire.encode(message)) == message


def test_rejection_is_the_same_error_on_both_sides() -> None:
    error = RequestError("no", code="c", param="p", status=409)
    copy = wire.Rejected.of("r", error).error()
    assert (copy.body(), copy.status) == (error.body(), error.status)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "exec", "code": "x"})])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_core(data)


def test_config_round_trip_keeps_its_checks() -> None:
    config = EngineConfig(
        ModelConfig("m", max_model_len=64),
        CacheConfig(memory_bytes=1 << 40),
        lora=LoRAConfig((LoRAModule("a", "/a"),), teams=(("t", ("a",)),)),
    )
    data = wire.encode_config(config)
    assert wire.decode_config(data) == config
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        wire.decode_config(data.replace(b'"block_size":16', b'"block_size":3'))


def test_merge_outputs_keeps_order_and_loses_nothing() -> None:
    first = EngineOutput("r", 0, (1,), usage=USAGE, logprobs=(TokenLogprob(1, -1.0),))
    other = EngineOutput("r", 1, (9,))
    last = EngineOutput("r", 0, (2, 3), "length", logprobs=(TokenLogprob(2, -1.0), TokenLogprob(3, -1.0)))
    merged = merge_outputs([first, other, last])
    assert [(output.index, output.new_token_ids) for output in merged] == [(0, (1, 2, 3)), (1, (9,))]
    assert merged[0].usage == USAGE and merged[0].finish_reason == "length" and len(merged[0].logprobs) == 3
