"""Messages between the API process and the engine process, and their msgpack encoding.

The payloads are the dataclasses of `forkkv.types` as they are; a small tagged envelope around them says what each
message means. Nothing is pickled: a peer can only make us build the types named here.
"""

from __future__ import annotations

import msgspec

from forkkv.config import EngineConfig
from forkkv.errors import RequestError
from forkkv.types import EngineInfo, EngineOutput, EngineRequest, StepStats


class Add(msgspec.Struct, tag="add", frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: tuple[str, ...]


class Flush(msgspec.Struct, tag="flush", frozen=True):
    """Drop every unleased block; answered by one `Flushed`."""


class ProbeTokens(msgspec.Struct, tag="probe_tokens", frozen=True):
    """Answer to `ProbeWanted`: the tokens of the probe's text."""

    token_ids: tuple[int, ...]


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave the loop and exit with status 0."""


class ProbeWanted(msgspec.Struct, tag="probe_wanted", frozen=True):
    """The engine loads an adapter that must be probed and waits for the tokens of the text."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo
    stats: StepStats


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot start or cannot go on; it exits after this message."""

    message: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    request_id: str


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    request_id: str
    message: str
    code: str | None
    param: str | None
    status: int

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> Rejected:
        return cls(request_id, error.message, error.code, error.param, error.status)

    def error(self) -> RequestError:
        return RequestError(self.message, code=self.code, param=self.param, status=self.status)


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """Result of one step, or (no outputs) a change of state without one, e.g. after aborts."""

    outputs: tuple[EngineOutput, ...]
    stats: StepStats


class Flushed(msgspec.Struct, tag="flushed", frozen=True):
    ok: bool


ToCore = Add | Abort | Flush | ProbeTokens | Shutdown
FromCore = ProbeWanted | Ready | Failed | Accepted | Rejected | Outputs | Flushed

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """msgpack bytes of one message."""
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """Inverse of `encode` for messages to the engine. Raises `msgspec.DecodeError`."""
    return _to_core.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    """Inverse of `encode` for messages from the engine. Raises `msgspec.DecodeError`."""
    return _from_core.decode(data)


def encode_config(config: EngineConfig) -> bytes:
    """JSON of the configuration, as the engine process reads it from its standard input."""
    return msgspec.json.encode(config)


def decode_config(data: bytes) -> EngineConfig:
    """Inverse of `encode_config`; runs the configuration's own checks. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=EngineConfig)
