"""`python -m forkkv.entrypoints.openai.api_server`: the HTTP server and its engine process.

The engine process is started before anything heavy is imported here, so that both load side by side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from forkkv.entrypoints.args import ServerArgs, parse_args
from forkkv.log import get_logger, setup_logging
from forkkv.sharing import is_shared

if TYPE_CHECKING:
    from forkkv.engine.client import ProcClient
    from forkkv.entrypoints.openai.state import ServerState

logger = get_logger("forkkv.server")

BACKLOG = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0, or 1 if the engine could not load or died, or the
    port is taken; 2 (raised) for wrong settings."""
    args, config = parse_args(argv)
    setup_logging(args.log_level)
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        logger.error("cannot listen on %s port %d: %s", args.host, args.port, error.strerror or error)
        return 1
    from forkkv.engine.client import ProcClient

    client = ProcClient.launch(config, args.log_level)
    try:
        return serve(args, client, listener)
    finally:
        client.discard()
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; bound before the engine starts, so that a taken port costs nothing. Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def serve(args: ServerArgs, client: ProcClient, listener: socket.socket) -> int:
    """Run the application on `listener` until it is told to stop; returns the exit status."""
    # One torch thread here: the cores belong to the engine. Its environment was copied before this.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import uvicorn
    from sse_starlette.sse import AppStatus

    from forkkv.entrypoints.openai.app import create_app
    from forkkv.entrypoints.openai.state import ServerState
    from forkkv.frontend.tokenizer import Tokenizer

    # Streams end by themselves while the server drains, instead of being cut at SIGTERM.
    AppStatus.disable_automatic_graceful_drain()
    failed = False

    class Server(uvicorn.Server):
        """uvicorn's server with exit status 0 after a signal, where uvicorn would raise the signal again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            previous = {sig: signal.signal(sig, self.on_signal) for sig in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for sig, handler in previous.items():
                    signal.signal(sig, handler)

        def on_signal(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                self.force_exit = True
            else:
                logger.info("%s: finishing running requests", signal.Signals(sig).name)
                self.should_exit = True

    def on_failure() -> None:
        nonlocal failed
        failed = True
        server.should_exit = True

    state = ServerState(args, client)
    app = create_app(
        state,
        lambda: Tokenizer.load(args.model, args.load_format),
        on_ready=lambda ready: announce(ready, listener),
        on_failure=on_failure,
    )
    server = Server(
        uvicorn.Config(
            app,
            log_level="info" if args.log_level == "debug" else "warning",
            access_log=args.log_level == "debug",
            timeout_graceful_shutdown=args.shutdown_timeout,
            backlog=BACKLOG,
            server_header=False,
        )
    )
    server.run(sockets=[listener])
    return 1 if failed else 0


def announce(state: ServerState, listener: socket.socket) -> None:
    """Log what was loaded, what fits, and where to reach it."""
    info = state.client.info
    logger.info(
        "model %s on %s in %s%s, context %d tokens",
        state.args.base_name,
        info.device,
        info.dtype,
        "" if info.quantization == "none" else f" with {info.quantization} weights",
        info.max_model_len,
    )
    logger.info(
        "kv sharing %s; bCache and private blocks hold %d tokens, rCache holds %d tokens of the widest adapter",
        info.kv_sharing,
        info.kv_capacity_tokens,
        info.residual_capacity_tokens,
    )
    for report in info.reports:
        ranks = sorted({rank for _, rank, _ in report.modules})
        logger.info(
            "adapter %s: kind %s, %d tensors matched, rank %s, %.1f MB, digest %s, %s",
            report.name,
            report.kind,
            report.matched,
            ranks[0] if len(ranks) == 1 else ranks,
            report.num_bytes / 1e6,
            report.digest[:12],
            report.path,
        )
    for adapter, report in zip(info.adapters, info.reports, strict=True):
        if (probe := report.probe) is not None:
            logger.info(
                "adapter %s: probed in %.1f s on %d tokens: KL %.4f, top-1 agreement %.1f %%; its cache is %s",
                adapter.name,
                probe.seconds,
                probe.num_tokens,
                probe.kl,
                100 * probe.top1_agreement,
                "shared" if is_shared(adapter, info.kv_sharing) else "private",
            )
    host, port = listener.getsockname()[:2]
    logger.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)


if __name__ == "__main__":
    sys.exit(main())
