"""Refusals: every one is an OpenAI error body with the right status, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import FakeServer
from tests.server.fake_engine import FAILING_SALT, FORK, REFUSED_SALT
from tests.server.test_generate import complete, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refused(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    return error


def post(fake: FakeServer, path: str, **body: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return fake.http.post(path, json={"model": "smollm2", **prompt, **body})


@pytest.fixture(autouse=True)
def alive(fake: FakeServer):
    """After every hostile request the next one is answered as ever."""
    yield
    assert fake.http.get("/health").status_code == 200
    assert complete(fake, prompt="Hello", max_tokens=4)["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_a04_unknown_names_are_404(fake: FakeServer, path: str, stream: bool) -> None:
    for name in ("no-such-adapter", "PLAIN-A", "plain-a "):
        refused(post(fake, path, model=name, stream=stream), 404, "model_not_found", "model")
        refused(post(fake, path, lora_name=name, stream=stream), 404, "model_not_found", "lora_name")
    for name in ("", None):
        refused(post(fake, path, model=name, stream=stream), 400, "missing_required_parameter", "model")
    refused(post(fake, path, model="plain-a", lora_name=FORK.name), 400, param="lora_name")
    refused(post(fake, path, lora_name="smollm2"), 400, param="lora_name")


UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "logit_bias": {"5": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "min_p": 0.1,
    "min_tokens": 3,
    "echo": True,
    "suffix": "s",
    "best_of": 3,
    "prompt_logprobs": 1,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "lora_path": "x",
    "allowed_token_ids": [5],
    "use_beam_search": True,
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", UNSUPPORTED)
def test_fields_that_change_the_meaning_are_refused(fake: FakeServer, path: str, field: str) -> None:
    refused(post(fake, path, **{field: UNSUPPORTED[field]}), 400, "unsupported_parameter", field)


def test_neutral_values_pass(fake: FakeServer) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "echo": False,
        "suffix": None,
        "n": 1,
        "best_of": 1,
        "modalities": ["text"],
        "stop": None,
        "top_k": None,
        "kv_sharing": None,
    }
    for path in (CHAT, COMPLETIONS):
        assert post(fake, path, **neutral).status_code == 200


BAD_VALUES = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 1.5),
    ("top_k", -2),
    ("n", 0),
    ("n", 1000),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("seed", 1 << 70),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**6]),
    ("kv_sharing", "fork"),
    ("fork_at", -1),
    ("cache_salt", "x" * 2000),
    ("stream_options", {"include_usage": True}),
    ("stream", "yes"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_bad_values_are_400_and_name_the_field(fake: FakeServer, path: str, field: str, value: Any) -> None:
    refused(post(fake, path, **{field: value}), 400, "invalid_value", field)


@pytest.mark.parametrize("mode", ["auto", "fork", "first-writer", "shared-a", "full"])
def test_a_mode_of_the_server_is_refused_in_a_request(fake: FakeServer, mode: str) -> None:
    error = refused(post(fake, CHAT, kv_sharing=mode), 400, "invalid_value", "kv_sharing")
    assert f"--kv-sharing {mode}" in error["message"]


@pytest.mark.parametrize("prompt", [None, [], "", [[]], [-1], [10**6], [1.5], [True], ["a", 1], {"a": 1}, [[1], "a"]])
def test_bad_prompts(fake: FakeServer, prompt: Any) -> None:
    refused(post(fake, COMPLETIONS, prompt=prompt), 400, param="prompt")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_bad_messages(fake: FakeServer, messages: Any, param: str) -> None:
    refused(post(fake, CHAT, messages=messages), 400, param=param)


def test_missing_fields(fake: FakeServer) -> None:
    refused(fake.http.post(CHAT, json={"model": "smollm2"}), 400, "missing_required_parameter", "messages")
    refused(fake.http.post(COMPLETIONS, json={"model": "smollm2"}), 400, "missing_required_parameter", "prompt")


def test_context_length_names_the_true_numbers(fake: FakeServer) -> None:
    error = refused(post(fake, COMPLETIONS, prompt=[5] * 3000), 400, "context_length_exceeded")
    assert "2048" in error["message"] and "3000" in error["message"]
    error = refused(post(fake, COMPLETIONS, prompt=[5] * 2000, max_tokens=100), 400, "context_length_exceeded")
    assert "100" in error["message"]
    assert post(fake, COMPLETIONS, prompt=[5] * 2040).json()["usage"]["completion_tokens"] == 8


def test_refused_by_the_engine_before_the_first_byte(fake: FakeServer) -> None:
    for stream in (False, True):
        response = post(fake, COMPLETIONS, prompt=["a", "b"], cache_salt=REFUSED_SALT, stream=stream)
        refused(response, 400, "pool_exceeded", "prompt")
    assert not fake.core.requests


def test_error_in_a_stream_ends_it_without_done(fake: FakeServer) -> None:
    response = post(fake, COMPLETIONS, prompt="a b c d e", cache_salt=FAILING_SALT, stream=True)
    chunks = events(response)
    assert response.status_code == 200
    assert chunks[-1]["error"]["code"] == "engine_error" and "[DONE]" not in response.text
    refused(post(fake, COMPLETIONS, prompt="a b c d", cache_salt=FAILING_SALT), 500, "engine_error")


RAW_BODIES = [
    b'{"model":"smollm2","prompt":"x","messages":[{"role":"user","content":"emoji \\ud83d"}]}',
    b'{"model":"smollm2","prompt":"\\ude00","messages":[{"role":"user","content":"\\ude00"}]}',
    b'{"model":"\\ud83d","prompt":"x","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"smollm2","prompt":"x","messages":[],"stop":"\\ud83d"}',
    b'{"model":"smollm2","prompt":"x","messages":[],"cache_salt":"\\ud83d"}',
    b'{"model":"smollm2","prompt":"x","messages":[],"user":"\\ud83d"}',
    b'\xef\xbb\xbf{"model":"smollm2","prompt":"x","messages":[]}',
    b'{"model":"smollm2","prompt":"\xff","messages":[]}',
    b'{"model":',
    b"",
    b"[]",
    b"null",
    b'{"model":"smollm2","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model":"smollm2","prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", RAW_BODIES, ids=range(len(RAW_BODIES)))
def test_a18_hostile_bodies_are_400(fake: FakeServer, path: str, body: bytes) -> None:
    refused(fake.http.post(path, content=body), 400)


def test_a18_what_is_valid_still_works(fake: FakeServer) -> None:
    body = b'{"model":"smollm2","prompt":"paired \\ud83d\\ude00 and \\u0000 nul","max_tokens":50}'
    assert fake.http.post(COMPLETIONS, content=body).json()["choices"][0]["text"] == "paired 😀 and \0 nul"


def test_a18_odd_names_in_the_ignored_header(fake: FakeServer) -> None:
    response = post(fake, COMPLETIONS, **{"fiéld\r\n\x00😀": 1})
    assert response.status_code == 200
    assert response.headers["x-forkkv-ignored"].isascii()


def test_framework_errors_have_the_same_shape(fake: FakeServer) -> None:
    refused(fake.http.get("/nope"), 404, "not_found")
    response = fake.http.get(CHAT)
    refused(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    refused(fake.http.get("/v1/models/nope"), 404, "model_not_found")
    refused(fake.http.post("/v1/embeddings", json={"model": "plain-a", "input": "x"}), 404)


def test_body_limit(slow: FakeServer) -> None:
    big = json.dumps({"model": "smollm2", "prompt": "x" * 20000}).encode()
    refused(slow.http.post(COMPLETIONS, content=big), 413, "request_too_large")
    refused(slow.http.post(COMPLETIONS, content=iter([big[:9000], big[9000:]])), 413, "request_too_large")


def test_request_id_is_a_label(fake: FakeServer) -> None:
    for _ in range(2):
        response = fake.http.post(
            COMPLETIONS, json={"model": "smollm2", "prompt": "x"}, headers={"X-Request-Id": "mine-1"}
        )
        assert response.headers["x-request-id"] == "mine-1"
        assert "mine-1" not in response.json()["id"]
    assert len(fake.http.get("/nope").headers["x-request-id"]) == 32
    assert fake.http.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500
