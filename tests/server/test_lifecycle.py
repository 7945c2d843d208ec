"""Disconnects, the engine's death, health, metrics and models over the echo engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import httpx
import pytest

from forkkv.engine.client import ProcClient
from forkkv.errors import EngineDeadError
from forkkv.types import EngineRequest, SamplingParams
from tests.server.conftest import FakeServer, wait_for
from tests.server.fake_engine import FORK, EchoCore, EngineThread

ENDLESS = {"model": "smollm2", "prompt": "a b c", "max_tokens": 2000, "ignore_eos": True}


def idle(server: FakeServer) -> bool:
    return (
        not server.core.requests
        and server.metric("forkkv_num_requests_running") == 0
        and server.metric("forkkv_num_requests_waiting") == 0
    )


@pytest.mark.parametrize("chunks", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 4])
def test_a11_a_dropped_stream_frees_everything(slow: FakeServer, chunks: int, n: int) -> None:
    with slow.http.stream("POST", "/v1/completions", json={**ENDLESS, "n": n, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(chunks):
            next(lines)
    wait_for(lambda: idle(slow), message="the engine to be idle")
    assert slow.metric('forkkv_request_success_total{finished_reason="abort"}') == n


def test_a11_a_dropped_whole_answer_and_a_queued_one(slow: FakeServer) -> None:
    def drop() -> None:
        with httpx.Client(base_url=slow.url, trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=ENDLESS, timeout=0.3)

    threads = [threading.Thread(target=drop) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: slow.metric("forkkv_num_requests_waiting") > 0, message="a queue")
    for thread in threads:
        thread.join()
    wait_for(lambda: idle(slow), message="the engine to be idle")


def test_a19_gauges_are_right_after_a_mass_abort(slow: FakeServer) -> None:
    body = httpx.Request("POST", slow.url, json={**ENDLESS, "stream": True}).content
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = slow.url.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(50)]
    for connection in sockets:
        connection.sendall(head + body)
    wait_for(lambda: len(slow.core.requests) == 50, message="50 streams")
    wait_for(lambda: slow.metric("forkkv_num_requests_running") > 0, message="running streams")
    for connection in sockets:
        connection.close()
    wait_for(lambda: idle(slow), message="the engine to be idle")
    assert slow.metric("forkkv_aborts_total") == 50
    assert slow.metric('forkkv_request_success_total{finished_reason="abort"}') == 50
    assert slow.metric('forkkv_kv_cache_usage_perc{pool="base"}') == 0


def test_keep_alive_comments(slow: FakeServer) -> None:
    slow.core.step_seconds = 0.2
    response = slow.http.post("/v1/completions", json={"model": "smollm2", "prompt": "a", "stream": True})
    assert ": keep-alive\n\n" in response.text and response.text.endswith("data: [DONE]\n\n")


def test_engine_failure_ends_streams_and_health(slow: FakeServer) -> None:
    with slow.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        slow.core.crash = True
        text = "\n".join(lines)
    assert '"code":"engine_dead"' in text and "the device is gone" in text and "[DONE]" not in text
    assert slow.http.get("/live").json() == {"status": "dead"}
    assert slow.http.post("/v1/completions", json=ENDLESS).status_code == 503


def test_health_models_and_version(fake: FakeServer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/live", "/ready"):
        assert fake.http.get(path).json() == {"status": "ok"}
    assert "version" in fake.http.get("/version").json()
    cards = {card["id"]: card for card in fake.http.get("/v1/models").json()["data"]}
    assert cards["smollm2"]["parent"] is None and cards["smollm2"]["max_model_len"] == 2048
    fork = fake.http.get(f"/v1/models/{FORK.name}").json()
    assert fork == cards[FORK.name]
    assert (fork["parent"], fork["root"]) == ("smollm2", f"/adapters/{FORK.name}")
    assert fork["forkkv"]["kind"] == "fork" and fork["forkkv"]["shares_base_kv"]
    assert fork["forkkv"]["digest"] == FORK.digest and fork["forkkv"]["team"] == "orders"
    assert not cards["plain-a"]["forkkv"]["shares_base_kv"]


def test_reset_prefix_cache(fake: FakeServer) -> None:
    assert fake.http.post("/reset_prefix_cache").json() == {"success": True}


def test_metrics_follow_requests(slow: FakeServer) -> None:
    slow.core.step_seconds = 0.01  # without a pause all tokens of an answer may arrive together, in every request
    text = slow.http.get("/metrics").text
    assert "forkkv_bcache_hit_ratio" not in text and "forkkv_ttft_acceleration_factor" not in text
    body = {"model": FORK.name, "prompt": [7, 8, 9] * 10, "max_tokens": 3}
    for _ in range(25):
        assert slow.http.post("/v1/completions", json=body).status_code == 200
    assert slow.metric("forkkv_bcache_query_tokens_total") == 25 * 16
    assert slow.metric("forkkv_bcache_hit_ratio") == 1.0
    assert slow.metric('forkkv_prompt_tokens_total{source="base"}') == 25 * 16
    assert slow.metric('forkkv_prompt_tokens_total{source="computed"}') == 25 * 14
    assert slow.metric("forkkv_generation_tokens_total") == 75
    assert slow.metric("forkkv_time_to_first_token_seconds_count") == 25
    # Tokens that arrive together with a sequence's first one have no interval of their own.
    assert 0 < slow.metric("forkkv_inter_token_latency_seconds_count") <= 50
    assert slow.metric('forkkv_request_success_total{finished_reason="length"}') == 25
    assert slow.metric("forkkv_ttft_acceleration_factor") > 1
    assert slow.metric('forkkv_pool_blocks{pool="base",state="free"}') == 99


def test_loading_server_is_live_and_not_ready(tmp_path: Path, tokenizer) -> None:
    from forkkv.entrypoints.args import parse_args
    from forkkv.entrypoints.openai.app import create_app
    from forkkv.entrypoints.openai.state import ServerState

    async def check() -> None:
        args, _ = parse_args([])
        client = ProcClient(f"ipc://{tmp_path}/loading.sock")
        failures: list[bool] = []
        app = create_app(ServerState(args, client), lambda: tokenizer, on_failure=lambda: failures.append(True))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        ):
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/ready")).json() == {"status": "loading"}
            body = {"model": "smollm2", "prompt": "x"}
            assert (await http.post("/v1/completions", json=body)).status_code == 503
            client._die(EngineDeadError("The engine failed: no weights"))
            assert failures
            assert (await http.get("/live")).status_code == 503
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")

    asyncio.run(check())


def request(request_id: str, **sampling: object) -> EngineRequest:
    return EngineRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True, **sampling))  # type: ignore[arg-type]


def run_client(tmp_path: Path, core: EchoCore, check) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/client.sock"
        client = ProcClient(address)
        await client.start()
        engine = EngineThread(core, address)
        await asyncio.wait_for(client.wait_ready(), 10)
        await asyncio.wait_for(check(client), 20)
        await client.close()
        await asyncio.to_thread(engine.thread.join, 10)

    asyncio.run(main())


def test_client_merges_for_a_slow_consumer(tmp_path: Path) -> None:
    core = EchoCore()

    async def check(client: ProcClient) -> None:
        async with client.generate(request("a")) as stream:
            await stream.accepted()
            while client.num_open:
                await asyncio.sleep(0.005)
            (batch,) = [outputs async for outputs in stream]
        (output,) = batch
        assert output.new_token_ids == tuple([5, 6, 7] * 17)[:50]
        assert output.finish_reason == "length" and output.usage is not None

    run_client(tmp_path, core, check)


def test_client_closing_early_aborts(tmp_path: Path) -> None:
    core = EchoCore(0.005)

    async def check(client: ProcClient) -> None:
        async with client.generate(request("a"), request("b")) as stream:
            await stream.accepted()
            stream.abort("a")
            async for outputs in stream:
                assert {output.request_id for output in outputs} == {"b"}
                break
        while core.requests:
            await asyncio.sleep(0.005)
        assert client.num_open == 0
        with pytest.raises(ValueError, match="in use"):
            client.generate(request("c"), request("c"))

    run_client(tmp_path, core, check)


def test_client_death_reaches_every_stream(tmp_path: Path) -> None:
    core = EchoCore(0.005)

    async def check(client: ProcClient) -> None:
        streams = [client.generate(request(name)) for name in "ab"]
        client._die(EngineDeadError("gone"))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="gone"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError):
            await client.generate(request("c")).accepted()
        with pytest.raises(EngineDeadError):
            await client.flush_cache()
        core.abort(list(core.requests))

    run_client(tmp_path, core, check)
