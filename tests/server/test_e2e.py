"""The real server: two processes and real sockets, on a tiny random model with random adapters."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from forkkv.engine.client import ProcClient
from tests.server.conftest import RealServer, start_real, tiny_flags, wait_for
from tests.server.test_generate import events

pytestmark = pytest.mark.e2e

DOCUMENT = " ".join(f"Order {number}: {number * 7 % 90} units of item {number * 13 % 50}." for number in range(24))


def chat(real: RealServer, model: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{DOCUMENT}\n\nWhich order is the largest? Answer as {model} would."}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, **body}
    response = real.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def flush(real: RealServer) -> None:
    wait_for(lambda: real.metric("forkkv_num_requests_running") == 0, message="an idle engine")
    assert real.http.post("/reset_prefix_cache").json() == {"success": True}


def test_ready_and_announced(real: RealServer) -> None:
    log = real.log.read_text()
    assert "tokens of the widest adapter" in log and "adapter fork1: kind fork" in log
    assert "ready on http://127.0.0.1:" in log
    kinds = {card["id"]: card["forkkv"]["kind"] for card in real.http.get("/v1/models").json()["data"]}
    forks = dict.fromkeys(("fork1", "fork2", "fork3"), "fork")
    assert kinds == {"tiny": "base", "plain": "plain", "zero": "plain", **forks}


def test_adapters_answer_differently_and_again_the_same(real: RealServer) -> None:
    flush(real)
    texts = {}
    for model in ("tiny", "plain", "fork1", "fork2"):
        body = {"model": model, "prompt": DOCUMENT, "temperature": 0, "max_tokens": 12, "logprobs": 1}
        first = real.http.post("/v1/completions", json=body).json()["choices"][0]
        again = real.http.post("/v1/completions", json=body).json()["choices"][0]
        assert first["text"] == again["text"]
        assert first["logprobs"]["token_logprobs"] == pytest.approx(again["logprobs"]["token_logprobs"], abs=1e-3)
        texts[model] = tuple(first["logprobs"]["token_logprobs"])
    assert len(set(texts.values())) == 4


def test_three_agents_share_one_document(real: RealServer) -> None:
    flush(real)
    duplicates = real.metric("forkkv_duplicate_blocks_total")
    usages = [chat(real, model)["usage"] for model in ("fork1", "fork2", "fork3")]
    first = usages[0]["forkkv"]
    assert first["kind"] == "fork" and first["base"] == 0 and first["computed"] == usages[0]["prompt_tokens"]
    assert first["fork_point"] == (usages[0]["prompt_tokens"] - 64) // 16 * 16
    for usage in usages[1:]:
        assert usage["forkkv"]["base"] == usage["forkkv"]["residual"] == usage["forkkv"]["fork_point"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["forkkv"]["fork_point"]
    # The first prefill fans out to every adapter that shares, "zero" among them.
    assert real.metric("forkkv_active_adapter_rcache_count") == 4
    assert real.metric("forkkv_duplicate_blocks_total") == duplicates


def test_the_probe_decides_for_plain_adapters_under_auto(real: RealServer) -> None:
    cards = {name: real.http.get(f"/v1/models/{name}").json()["forkkv"] for name in ("plain", "zero", "fork1")}
    assert [card["shares_base_kv"] for card in cards.values()] == [False, True, True]
    strong, zero = cards["plain"]["probe"], cards["zero"]["probe"]
    assert strong["kl"] > 0.1 and zero["kl"] < 1e-6 and zero["top1_agreement"] == 1.0
    assert (zero["fork_point"], zero["num_tokens"]) == (384, 128) and zero["seconds"] > 0
    assert cards["fork1"]["probe"] is None
    assert real.metric('forkkv_adapter_probe_kl{lora_name="plain"}') == strong["kl"]
    assert real.metric('forkkv_adapter_shares_base_kv{lora_name="zero"}') == 1
    log = real.log.read_text()
    assert f"KL {strong['kl']:.4f}" in log and "its cache is private" in log and "its cache is shared" in log

    answer = chat(real, "zero")["usage"]
    assert answer["forkkv"]["fork_point"] == (answer["prompt_tokens"] - 64) // 16 * 16
    usage = chat(real, "plain")["usage"]["forkkv"]
    assert (usage["kind"], usage["fork_point"], usage["base"]) == ("plain", 0, 0)
    usage = chat(real, "fork1", kv_sharing="none", cache_salt="alone")["usage"]["forkkv"]
    assert usage["fork_point"] == 0


def test_a09_fully_cached_prompts(real: RealServer) -> None:
    for model in ("tiny", "fork1"):
        for length in (15, 16, 17, 32, 33):
            body = {"model": model, "prompt": list(range(100, 100 + length)), "temperature": 0, "max_tokens": 4}
            answers = [real.http.post("/v1/completions", json=body).json() for _ in range(3)]
            assert len({answer["choices"][0]["text"] for answer in answers}) == 1
            assert all(a["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1 for a in answers)


def test_seeds_and_n(real: RealServer) -> None:
    body = {"model": "fork1", "prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 8, "seed": 11, "n": 3}
    first, again = (real.http.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) > 1
    stopped = real.http.post("/v1/completions", json={**body, "stop": ["\0never"]}).json()["choices"]
    assert [choice["text"] for choice in stopped] == [choice["text"] for choice in first]


def test_stream_equals_whole(real: RealServer) -> None:
    body = {"model": "fork2", "prompt": DOCUMENT, "temperature": 0, "max_tokens": 16}
    whole = real.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    chunks = events(real.http.post("/v1/completions", json={**body, "stream": True}))
    assert chunks[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole


@contextlib.contextmanager
def dropped_stream(real: RealServer, index: int) -> Iterator[None]:
    body = {
        "model": ("tiny", "fork1", "plain")[index % 3],
        "prompt": f"{index} {DOCUMENT}",
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
        "n": 1 + index % 4,
    }
    with real.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range((0, 1, 5)[index % 3]):
            next(lines)
        yield


def test_a11_disconnects_free_everything(real: RealServer) -> None:
    def drop(index: int) -> None:
        with dropped_stream(real, index):
            pass

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(drop, range(18)))
    wait_for(lambda: real.metric("forkkv_num_requests_running") == 0, message="no running sequence")
    assert real.metric("forkkv_num_requests_waiting") == 0 and real.metric("forkkv_leases") == 0
    flush(real)
    for pool_name in ("base", "residual"):
        free, total = (
            real.metric(f'forkkv_pool_blocks{{pool="{pool_name}",state="{state}"}}') for state in ("free", "total")
        )
        assert free == total


def test_impossible_requests_are_refused_and_others_go_on(real: RealServer) -> None:
    body = {"model": "tiny", "prompt": [5] * 9000, "max_tokens": 1}
    assert real.http.post("/v1/completions", json=body).json()["error"]["code"] == "context_length_exceeded"
    assert chat(real, "tiny")["choices"][0]["finish_reason"]


def test_an_idle_server_uses_no_cpu(real: RealServer) -> None:
    flush(real)
    parent = psutil.Process(real.process.pid)
    (engine,) = [child for child in parent.children() if "forkkv.engine.proc" in child.cmdline()]
    before = engine.cpu_times()
    time.sleep(2.0)
    after = engine.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.05


def test_sigterm_drains_and_engine_goes_too(tmp_path: Path, tiny_model: Path) -> None:
    server = start_real(tmp_path / "log", *tiny_flags(tiny_model))
    (engine,) = psutil.Process(server.process.pid).children()
    body = {"model": "tiny", "prompt": "Count: one", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)
    assert server.process.wait(30) == 0
    server.http.close()
    wait_for(lambda: not engine.is_running(), message="the engine's exit")


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_one_process_does_not_outlive_the_other(tmp_path: Path, victim: str, tiny_model: Path) -> None:
    server = start_real(tmp_path / "log", *tiny_flags(tiny_model))
    (engine,) = psutil.Process(server.process.pid).children()
    if victim == "server":
        server.process.kill()
        server.process.wait(10)
        wait_for(lambda: not engine.is_running(), message="the engine's exit")
    else:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine.pid, signal.SIGKILL)
            text = "\n".join(lines)
        assert '"code":"engine_dead"' in text and "[DONE]" not in text
        assert server.process.wait(30) == 1
    server.http.close()


def test_a_model_that_does_not_load_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such file or folder"):
        start_real(tmp_path / "log", "--model", str(tmp_path / "missing"))


def test_a_probe_file_that_cannot_be_read_ends_the_server(
    tmp_path: Path, tiny_model: Path, adapter_folders: dict[str, Path]
) -> None:
    flags = ["--enable-forkkv", "--lora-modules", f"plain={adapter_folders['plain']}", "--probe-file", "/missing.txt"]
    with pytest.raises(AssertionError, match=r"--probe-file /missing\.txt"):
        start_real(tmp_path / "log", *tiny_flags(tiny_model), *flags)


def test_offline_llm_on_the_small_default_model(tokenizer_cache: None) -> None:
    from forkkv.entrypoints.llm import LLM
    from forkkv.types import SamplingParams

    llm = LLM(cpu_memory_gib=0.25)
    greedy = SamplingParams(max_tokens=6, temperature=0, logprobs=1)
    base, other = llm.generate(["One, two, three,", "The capital of France is"], greedy)
    assert len(base.outputs[0].token_ids) == 6 and base.usage is not None and base.usage.kind == "base"
    assert "Paris" in other.outputs[0].text
    assert base.outputs[0].logprobs is not None and len(base.outputs[0].logprobs) == 6
    (stopped,) = llm.generate("One, two, three,", SamplingParams(max_tokens=30, temperature=0), stop=" five", n=2)
    assert [output.text for output in stopped.outputs] == [" four,"] * 2
    assert all(output.stop_reason == " five" for output in stopped.outputs)
    assert llm.client.flush_cache()


def test_offline_llm_with_an_adapter(tiny_model: Path, adapter_folders: dict[str, Path]) -> None:
    from forkkv.entrypoints.llm import LLM
    from forkkv.types import SamplingParams

    modules = {"fork1": str(adapter_folders["fork1"])}
    llm = LLM(str(tiny_model), modules, enable_forkkv=True, cpu_memory_gib=0.25)
    greedy = SamplingParams(max_tokens=6, temperature=0)
    marked = [{"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "?"}]
    (forked,) = llm.chat([{"role": "user", "content": marked}], greedy, lora_name="fork1")
    assert forked.usage is not None and forked.usage.kind == "fork"
    assert len(forked.prompt_token_ids) - 32 <= forked.usage.fork_point < len(forked.prompt_token_ids)
    (private,) = llm.chat([{"role": "user", "content": DOCUMENT}], greedy, lora_name="fork1", kv_sharing="none")
    assert private.usage is not None and private.usage.fork_point == 0


def test_offline_llm_probes_with_a_file(tmp_path: Path, tiny_model: Path, adapter_folders: dict[str, Path]) -> None:
    from forkkv.entrypoints.llm import LLM

    (tmp_path / "text.txt").write_text(DOCUMENT)
    modules = {name: str(adapter_folders[name]) for name in ("plain", "zero")}
    settings = {"kv_sharing": "auto", "cpu_memory_gib": 0.25, "probe_file": str(tmp_path / "text.txt")}
    llm = LLM(str(tiny_model), modules, **settings)
    probes = [report.probe for report in llm.client.info.reports]
    assert all(probe is not None and probe.fork_point == 256 for probe in probes), probes
    assert [meta.passed_probe for meta in llm.client.info.adapters] == [False, True]


def test_unstarted_client_leaves_nothing_behind() -> None:
    client = ProcClient("ipc:///tmp/never.sock")
    client.discard()
    assert not client.is_ready and not client.is_dead
