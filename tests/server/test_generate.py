"""Answers of the two generation routes, whole and streamed, over the echo engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import FakeServer
from tests.server.fake_engine import EOS, FORK

EMOJI = "👩‍👩‍👧‍👦 你好 ñ ✂️ 🏳️‍🌈 end"


def events(response: httpx.Response) -> list[Any]:
    """Data of every event, parsed; the last one is "[DONE]" if the stream ended well."""
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def complete(fake: FakeServer, **body: Any) -> dict[str, Any]:
    response = fake.http.post("/v1/completions", json={"model": "smollm2", "max_tokens": 200, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(fake: FakeServer, path: str = "/v1/completions", **body: Any) -> list[Any]:
    body = {"model": "smollm2", "max_tokens": 200, "stream": True, **body}
    response = fake.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response)


def chat(fake: FakeServer, content: Any = "Hi", **body: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": content}], **body}
    response = fake.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_completion_prompt_forms(fake: FakeServer, tokenizer) -> None:
    ids = tokenizer.encode("One two three", add_special_tokens=True)
    for prompt in ("One two three", ids, ["One two three"], [ids]):
        answer = complete(fake, prompt=prompt)
        assert answer["object"] == "text_completion"
        (choice,) = answer["choices"]
        assert choice["text"] == "One two three"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", EOS)
        assert answer["usage"]["completion_tokens"] == len(ids) + 1


def test_completion_lists_and_n_are_numbered_prompt_major(fake: FakeServer) -> None:
    answer = complete(fake, prompt=["first one", "the second one"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["first one"] * 2 + ["the second one"] * 2


def test_default_max_tokens(fake: FakeServer, tokenizer) -> None:
    fake.core.seen.clear()
    fake.http.post("/v1/completions", json={"model": "smollm2", "prompt": "x"})
    answer = chat(fake)
    assert fake.core.seen[0].sampling.max_tokens == 16
    assert fake.core.seen[1].sampling.max_tokens == 2048 - answer["usage"]["prompt_tokens"]


def test_chat_renders_the_template_and_answers(fake: FakeServer, tokenizer) -> None:
    answer = chat(fake, "Hello there", temperature=0)
    message = answer["choices"][0]["message"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert message["role"] == "assistant"
    assert message["content"].endswith("user\nHello there\nassistant\n")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a12_every_text_part_reaches_the_prompt_in_order(fake: FakeServer, role: str) -> None:
    parts = [{"type": "text", "text": "The code word is PELICAN."}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": role, "content": parts}, {"role": "user", "content": "go"}]
    text = fake.http.post("/v1/chat/completions", json={"model": "smollm2", "messages": messages}).json()
    content = text["choices"][0]["message"]["content"]
    assert content.index("PELICAN.") < content.index("What is it?")
    assert "'type'" not in content


def test_a12_null_content_and_tool_calls(fake: FakeServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": "ü"}'}}
    messages = [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [], "tool_call_id": "c1"},
        {"role": "user", "content": "so?"},
    ]
    body = {"model": "smollm2", "messages": messages}
    content = fake.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert '{"name": "look", "arguments": {"x": "ü"}}' in content
    assert "None" not in content


def test_stream_equals_whole_answer(fake: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": EMOJI}], "logprobs": True, "top_logprobs": 2}
    whole = chat(fake, EMOJI, logprobs=True, top_logprobs=2)
    chunks = stream(fake, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    finish = chunks[-3]["choices"][0]
    assert (finish["finish_reason"], finish["delta"]) == ("stop", {})
    deltas = [chunk["choices"][0] for chunk in chunks[1:-3]]
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == whole["choices"][0]["message"]["content"]
    logprobs = [entry for choice in deltas if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_a10_no_broken_characters_in_a_stream(fake: FakeServer, n: int) -> None:
    texts = dict.fromkeys(range(n), "")
    for chunk in stream(fake, prompt=EMOJI, n=n, logprobs=1)[:-1]:
        for choice in chunk["choices"]:
            assert "\ufffd" not in choice["text"]
            assert choice["text"] or choice["finish_reason"] or choice["logprobs"]["tokens"]
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {EMOJI}


def test_a10_a_character_cut_by_the_limit(fake: FakeServer) -> None:
    whole = complete(fake, prompt="👩 x", max_tokens=1)["choices"][0]
    streamed = stream(fake, prompt="👩 x", max_tokens=1)
    assert whole["text"] == "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1])
    assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_string_over_token_borders(fake: FakeServer, streaming: bool, tokenizer) -> None:
    prompt, stop = "alpha beta gamma STOPPED delta", ["a STO", "never"]
    if streaming:
        chunks = stream(fake, prompt=prompt, stop=stop, logprobs=0, stream_options={"include_usage": True})
        choices = [chunk["choices"][0] for chunk in chunks[:-2]]
        text = "".join(choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        last, usage = choices[-1], chunks[-2]["usage"]
    else:
        answer = complete(fake, prompt=prompt, stop=stop, logprobs=0)
        (last,), usage = answer["choices"], answer["usage"]
        text, tokens = last["text"], last["logprobs"]["tokens"]
    assert text == "alpha beta gamm"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "a STO")
    assert len(tokens) == usage["completion_tokens"] < len(tokenizer.encode(prompt, add_special_tokens=False))
    assert "".join(tokens).startswith("alpha beta gamma STO")


def test_stop_string_ends_one_completion_of_n(fake: FakeServer) -> None:
    fake.core.seen.clear()
    answer = complete(fake, prompt="one two three", n=3, stop="two", seed=7)
    assert [choice["text"] for choice in answer["choices"]] == ["one "] * 3
    assert [request.sampling.seed for request in fake.core.seen] == [7, 8, 9]
    assert answer["usage"]["prompt_tokens"] == 3
    assert not fake.core.requests


def test_stop_token_ids_and_ignore_eos(fake: FakeServer, tokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    stopped = complete(fake, prompt=ids, stop_token_ids=[ids[1]])
    assert stopped["choices"][0]["text"] == "one" and stopped["choices"][0]["stop_reason"] == ids[1]
    assert stopped["usage"]["completion_tokens"] == 2
    endless = complete(fake, prompt=ids, ignore_eos=True, max_tokens=9)
    assert endless["choices"][0]["finish_reason"] == "length"
    assert endless["usage"]["completion_tokens"] == 9


def test_a15_logprobs_are_finite(fake: FakeServer) -> None:
    raw = fake.http.post(
        "/v1/completions", json={"model": "smollm2", "prompt": "a b", "logprobs": 3, "max_tokens": 2}
    ).text
    assert "Infinity" not in raw and "NaN" not in raw
    logprobs = json.loads(raw)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", " b"]
    assert logprobs["text_offset"] == [0, 1]
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0
    entry = chat(fake, logprobs=True, top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"][0]
    assert [candidate["logprob"] for candidate in entry["top_logprobs"]] == [-0.25, -9999.0]
    assert bytes(entry["bytes"]).decode() == entry["token"]


def test_return_token_ids(fake: FakeServer, tokenizer) -> None:
    ids = tokenizer.encode("one two", add_special_tokens=False)
    choice = complete(fake, prompt="one two", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids and choice["token_ids"] == [*ids, EOS]
    chunks = stream(fake, prompt="one two", return_token_ids=True)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [*ids, EOS]
    answer = chat(fake, "x", return_token_ids=True)
    assert answer["prompt_token_ids"] == answer["choices"][0]["token_ids"][:-1]
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
    first = stream(fake, "/v1/chat/completions", **body)[0]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]


def test_usage_says_where_tokens_came_from(fake: FakeServer) -> None:
    answer = chat(fake, "x " * 40, model="smollm2", lora_name=FORK.name)
    usage = answer["usage"]
    n = usage["prompt_tokens"]
    assert usage["total_tokens"] == n + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["forkkv"] == {
        "fork_point": 16,
        "base": 16,
        "residual": 16,
        "private": 0,
        "computed": n - 16,
        "kind": "fork",
    }


def test_a04_the_answer_names_what_was_used(fake: FakeServer) -> None:
    for body in ({"model": FORK.name}, {"lora_name": FORK.name}, {"model": FORK.name, "lora_name": FORK.name}):
        fake.core.seen.clear()
        answer = chat(fake, **{"model": "smollm2", **body})
        assert answer["model"] == FORK.name
        assert FORK.digest[:12] in answer["system_fingerprint"]
        assert fake.core.seen[0].adapter_id == FORK.adapter_id
    assert chat(fake)["model"] == "smollm2"


def test_fields_reach_the_engine(fake: FakeServer) -> None:
    fake.core.seen.clear()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 10**9, "seed": -5, "fork_at": 48, "cache_salt": "s"}
    complete(fake, prompt="a", model="plain-a", kv_sharing="none", n=2, **fields)
    complete(fake, prompt="a", top_k=-1, temperature=0, top_p=0)
    first, second = fake.core.seen
    assert (first.fork_at, first.cache_salt, first.kv_sharing, first.n) == (48, "s", "none", 2)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.seed) == (0.5, 0.9, -5)
    assert first.sampling.top_k == fake.core.info.vocab_size
    assert (second.sampling.top_k, second.sampling.top_p, second.sampling.temperature) == (1, 1.0, 0.0)


def test_cache_control_sets_the_fork_mark(fake: FakeServer, tokenizer) -> None:
    document, question = "A long document. " * 20, "What does it say?"
    parts = [
        {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": question},
    ]
    fake.core.seen.clear()
    chat(fake, parts)
    (request,) = fake.core.seen
    text = tokenizer.decode(request.prompt_token_ids[: request.fork_mark], skip_special_tokens=False)
    assert text.rstrip().endswith("A long document.")
    chat(fake, [{**parts[0], "cache_control": None}, parts[1]])
    assert fake.core.seen[1].fork_mark is None


def test_ignored_fields_are_named(fake: FakeServer) -> None:
    body = {"model": "smollm2", "prompt": "x", "user": "u", "metadata": {}, "brand_new": 1, "logit_bias": {}}
    response = fake.http.post("/v1/completions", json=body)
    assert response.headers["x-forkkv-ignored"].split(",") == ["user", "metadata", "brand_new"]
    assert "x-forkkv-ignored" not in fake.http.post("/v1/completions", json={"model": "smollm2", "prompt": "x"}).headers


def test_openai_client(fake: FakeServer) -> None:
    import openai

    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hey"}]
        answer = client.chat.completions.create(model="smollm2", messages=messages, extra_body={"lora_name": "plain-a"})
        assert answer.model == "plain-a" and "hey" in (answer.choices[0].message.content or "")
        with client.chat.completions.create(
            model="smollm2", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as chunks:
            texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "hey" in "".join(texts)
        assert {model.id for model in client.models.list()} == {"smollm2", "plain-a", FORK.name}
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nope", messages=messages)
