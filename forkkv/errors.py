"""The exception tree; every refusal that reaches a client is one of these.

ForkKVError
├── RequestError            the request is wrong or cannot be served; carries OpenAI's error fields
│   ├── ModelNotFoundError  404
│   ├── UnsupportedParameterError 400
│   └── EngineDeadError     503
├── ConfigError             flags or configuration file; the process exits with status 2
├── AdapterLoadError        a LoRA folder that cannot be served exactly
└── ModelLoadError          a model folder or file that cannot be read
"""

from __future__ import annotations


class ForkKVError(Exception):
    """Base of all errors raised on purpose."""


class RequestError(ForkKVError):
    """A request that is answered with an OpenAI error body. `param` names the offending field."""

    status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, status: int | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        if status is not None:
            self.status = status

    def body(self) -> dict[str, object]:
        """The JSON body in OpenAI's error shape."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": error}


class ModelNotFoundError(RequestError):
    """`model` or `lora_name` names nothing that this server serves."""

    status = 404

    def __init__(self, name: str, known: list[str], *, param: str = "model"):
        super().__init__(
            f"The model {name!r} does not exist. Served: {', '.join(known)}.", code="model_not_found", param=param
        )


class UnsupportedParameterError(RequestError):
    """A field that would change the meaning of the answer and is not implemented; refused, never ignored."""

    def __init__(self, param: str, reason: str = "is not supported by this server"):
        super().__init__(f"The parameter {param!r} {reason}.", code="unsupported_parameter", param=param)


class EngineDeadError(RequestError):
    """The engine process is gone or failed; the request was not (or not completely) answered."""

    status = 503
    error_type = "server_error"

    def __init__(self, message: str = "The engine is not running."):
        super().__init__(message, code="engine_dead")


class ConfigError(ForkKVError):
    """Contradictory or impossible settings."""


class AdapterLoadError(ForkKVError):
    """An adapter folder that is refused; the message names tensors and the reason."""


class ModelLoadError(ForkKVError):
    """A model that cannot be read; the message names the file and the reason."""
