"""Train one LoRA adapter of the demo team on synthetic order logs and write it as a PEFT folder.

    python -m benchmarks.train.train_lora --task extract --kind fork --out configs/demo/adapters/extract

`--kind` is the recipe; data, steps and rank are the same for all:

* `plain`: ordinary LoRA, the adapter runs on every token.
* `alora`: the prompt up to the task's instruction, its invocation, runs under base weights, and the adapter reads those
  K and V as they are.
* `shared-a`: ordinary LoRA whose A matrices stay as they were at the start (`--init`, or the seed), so that all agents
  that start alike have the same ones, and train B alone.
* `fork`: the prompt up to the fork point runs under base weights and the adapter reads those K and V with its residual
  added. The fork point comes from the server's own function, mostly at its default, else drawn at random.

fork and alora are trained as the server computes them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.train import orderlog
from benchmarks.train.lora_model import IGNORE, MODULES, LoraAdapter, Prefix, TreeBatch, TreeModel, load_tokenizer
from forkkv.scheduler.fork import fork_point

Kind = Literal["plain", "alora", "shared-a", "fork"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCK_SIZE = 16
FORK_TAIL = 64
RANDOM_FORK_SHARE = 0.1
SHORTEST_DOCUMENT = 200
NAMED_ORDERS_WEIGHTS = (1, 1, 2, 4)
"""Of questions about 1, 2, 3 and 4 orders: one about many teaches more rows for little more work."""
ALL = "all"
"""Train on every task in turn. Finding a row is the hard part and common to all of them, so the demo adapters start
from one adapter that has learnt it."""
BATCHES_PER_DOCUMENT = 3
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Example:
    """Prompt, answer (with the end token) and the task's instruction within the prompt, in token ids."""

    prompt: list[int]
    answer: list[int]
    invocation: list[int]


def encode(tokenizer: Any, document: orderlog.Document, question: orderlog.Question) -> Example:
    """Tokens exactly as the server makes them from the chat, and the answer up to and including <|im_end|>."""
    chat = orderlog.messages(document, question)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
    invocation = tokenizer(question.instruction, add_special_tokens=False)["input_ids"]
    return Example(prompt, [*answer, tokenizer.convert_tokens_to_ids("<|im_end|>")], invocation)


def common_prefix(examples: list[Example]) -> int:
    """Length in tokens of the longest common prefix of all prompts."""
    prompts = [example.prompt for example in examples]
    shortest = min(len(prompt) for prompt in prompts)
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)


def make_batch(examples: list[Example], kind: Kind, fork_at: int | None = None) -> TreeBatch:
    """The tree of one document's questions.

    plain, shared-a: no base part, the common prefix is the trunk. fork with `fork_at`: base up to the fork point of all
    questions, trunk up to the end of the common prefix. fork without, and alora: every question forks at its own point.
    """
    common = common_prefix(examples) - 1  # a leaf keeps one prompt token at least
    prompt = examples[0].prompt
    if kind in ("plain", "shared-a"):
        starts, num_base = [common] * len(examples), 0
    else:
        points = [_fork(example, kind, fork_at) for example in examples]
        num_base = max(points)
        starts = points if fork_at is None else [max(common, num_base)] * len(examples)
        if num_base > common or (fork_at is not None and len(set(points)) > 1):
            raise ValueError(f"fork points {points} lie behind the common prefix of {common} tokens")
    alone = kind in ("fork", "alora") and fork_at is None
    trunk_end = num_base if alone else starts[0]
    sequences = [(example.prompt + example.answer)[start:] for example, start in zip(examples, starts, strict=True)]
    width = max(len(sequence) for sequence in sequences) - 1
    leaf_ids = torch.zeros(len(examples), width, dtype=torch.int64)
    targets = torch.full((len(examples), width), IGNORE, dtype=torch.int64)
    for i, (example, sequence) in enumerate(zip(examples, sequences, strict=True)):
        size, answer = len(sequence) - 1, len(example.answer)
        leaf_ids[i, :size] = torch.tensor(sequence[:-1])
        targets[i, size - answer : size] = torch.tensor(example.answer)
    return TreeBatch(
        torch.tensor(prompt[:num_base], dtype=torch.int64),
        torch.tensor(prompt[num_base:trunk_end], dtype=torch.int64),
        leaf_ids,
        torch.tensor(starts),
        targets,
        residual=kind != "alora",
    )


def _fork(example: Example, kind: Literal["fork", "alora"], fork_at: int | None) -> int:
    point = fork_point(
        example.prompt,
        BLOCK_SIZE,
        kind=kind,
        shared=True,
        fork_tail=FORK_TAIL,
        invocation_tokens=example.invocation,
        fork_at=fork_at,
    ).weights_from
    return cast(int, point)


def document_tokens(rng: random.Random, longest: int, progress: float) -> int:
    """Length of a training document at `progress` (0 to 1) through a training from nothing. Finding a row among few
    comes first: the longest one drawn grows over the first third."""
    grown = SHORTEST_DOCUMENT + (longest - SHORTEST_DOCUMENT) * min(1.0, 0.1 + 2.7 * progress)
    return rng.randint(SHORTEST_DOCUMENT, round(grown))


def training_batches(
    model: TreeModel, tokenizer: Any, args: argparse.Namespace
) -> Iterator[tuple[TreeBatch, Prefix | None]]:
    """Endless batches, a function of `args.seed` alone, with the base model's part where there is one.

    The base part does not depend on the adapter, so a document's serves `BATCHES_PER_DOCUMENT` batches.
    """
    rng, step = random.Random(f"train-{args.task}-{args.seed}"), 0
    while True:
        size = document_tokens(rng, args.max_tokens, 1.0 if args.init else step / args.steps)
        document = orderlog.make_document(rng.choice(orderlog.TRAIN_SEEDS), size)
        if args.kind in ("plain", "shared-a"):
            yield make_batch(draw_examples(rng, tokenizer, document, args), args.kind), None
            step += 1
            continue
        batches: list[TreeBatch] = []
        for _ in range(BATCHES_PER_DOCUMENT):
            examples = draw_examples(rng, tokenizer, document, args)
            fork_at = draw_fork(rng, examples) if args.kind == "fork" else None
            batches.append(make_batch(examples, args.kind, fork_at))
        prefix = model.base_prefix(max((batch.base_ids for batch in batches), key=len))
        yield from ((batch, prefix) for batch in batches)
        step += len(batches)


def draw_examples(
    rng: random.Random, tokenizer: Any, document: orderlog.Document, args: argparse.Namespace
) -> list[Example]:
    """Questions of one step. All name the same number of orders, so that no leaf is padded much."""
    (count,) = rng.choices(range(1, orderlog.MAX_NAMED_ORDERS + 1), NAMED_ORDERS_WEIGHTS)
    task = rng.choice(orderlog.TASKS) if args.task == ALL else args.task
    questions = [orderlog.make_question(document, task, rng.getrandbits(40), count) for _ in range(args.questions)]
    return [encode(tokenizer, document, question) for question in questions]


def draw_fork(rng: random.Random, examples: list[Example]) -> int:
    """Fork point of one step: the earliest default of its questions, now and then anywhere before that."""
    default = min(_fork(example, "fork", None) for example in examples)
    return rng.randint(0, default) if rng.random() < RANDOM_FORK_SHARE else default


def learning_rate_factor(step: int, steps: int, warmup: int = 10) -> float:
    """Linear warm-up, then linear decay to zero."""
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def train(
    model: TreeModel, adapter: LoraAdapter, tokenizer: Any, args: argparse.Namespace, invocation: list[int]
) -> None:
    """Optimise `adapter` in place; logs the mean loss of every 10 steps and saves every 40."""
    adapter.a.requires_grad_(args.kind != "shared-a")
    trained = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    batches, losses, begin = training_batches(model, tokenizer, args), [], time.monotonic()
    for step in range(1, args.steps + 1):
        batch, prefix = next(batches)
        logits, targets = model.answer_logits(batch, adapter, prefix)
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 10 == 0:
            pace = (time.monotonic() - begin) / step
            loss_text = f"loss {sum(losses) / len(losses):.4f}"
            print(f"{args.task} {args.kind} step {step:4d}  {loss_text}  {pace:.2f} s/step", flush=True)
            losses = []
        if step % 40 == 0:
            save_peft(adapter, args.kind, args.out, invocation)


@torch.no_grad()
def exact_match(
    model: TreeModel, adapter: LoraAdapter, tokenizer: Any, task: orderlog.Task, kind: Kind, num_documents: int
) -> float:
    """Share of held-out answers whose every token is the most likely one, given the right tokens before it.

    That is the share of right greedy answers. Four questions a document, naming 1, 2, 3 and 4 orders; documents of
    200 to 1,000 tokens; a fork adapter forks at the server's default.
    """
    right: dict[int, int] = dict.fromkeys(range(1, orderlog.MAX_NAMED_ORDERS + 1), 0)
    for i in range(num_documents):
        document = orderlog.make_document(orderlog.HELD_OUT_SEEDS[i], 200 + 800 * i // max(1, num_documents - 1))
        examples = [encode(tokenizer, document, orderlog.make_question(document, task, i, count)) for count in right]
        logits, targets = model.answer_logits(make_batch(examples, kind), adapter)
        hits = (logits.argmax(-1) == targets).split([len(example.answer) for example in examples])
        for count, hit in zip(right, hits, strict=True):
            right[count] += int(hit.all())
    shares = "  ".join(f"{count} orders {number / num_documents:.2f}" for count, number in right.items())
    total = sum(right.values()) / (num_documents * len(right))
    print(f"exact match of {task} read as {kind}: {total:.3f}  ({shares})", flush=True)
    return total


def save_peft(adapter: LoraAdapter, kind: Kind, folder: Path, invocation: list[int] | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (bfloat16, PEFT's names) into `folder`; `invocation`
    are the tokens that an aLoRA begins at."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for key in adapter.a:
        layer, module = key.split("_", 1)
        name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        a, b = adapter.pair(int(layer), module)
        tensors[f"{name}.lora_A.weight"] = a.detach().to(torch.bfloat16).contiguous()
        tensors[f"{name}.lora_B.weight"] = b.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_MODEL,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(MODULES),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if kind == "fork":
        config["forkkv"] = {"kind": "fork"}
    if kind == "alora":
        config["alora_invocation_tokens"] = invocation
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_peft(adapter: LoraAdapter, folder: Path) -> None:
    """Copy the weights of a folder written by `save_peft` into `adapter`."""
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key in adapter.a:
            layer, module = key.split("_", 1)
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            adapter.a[key].copy_(tensors[f"{name}.lora_A.weight"])
            adapter.b[key].copy_(tensors[f"{name}.lora_B.weight"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=(*orderlog.TASKS, ALL), required=True, help=f"{ALL}: a warm start for each")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--init", type=Path, help="continue from the adapter in this folder")
    parser.add_argument("--steps", type=int, default=150, help="0: evaluate only")
    parser.add_argument("--questions", type=int, default=8, help="questions on the document of one step")
    parser.add_argument("--max-tokens", type=int, default=1100, help="longest training document")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-documents", type=int, default=15, help="held-out documents, four questions each")
    args = parser.parse_args()
    if args.task == ALL and args.kind == "alora":
        parser.error(f"--kind alora begins at one task's instruction: name one of {', '.join(orderlog.TASKS)}")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, model = load_tokenizer(), TreeModel.smollm2()
    adapter = model.new_adapter(args.rank, args.alpha)
    if args.init is not None:
        load_peft(adapter, args.init)
    invocation: list[int] = []
    if args.kind == "alora":
        question = orderlog.make_question(orderlog.make_document(0, 200), args.task, 0)
        invocation = tokenizer(question.instruction, add_special_tokens=False)["input_ids"]
    if args.steps > 0:
        train(model, adapter, tokenizer, args, invocation)
        save_peft(adapter, args.kind, args.out, invocation)
    load_peft(adapter, args.out if args.steps > 0 else args.init or args.out)  # what is judged is what was written
    kinds: tuple[Kind, ...] = (args.kind,) if args.kind in ("fork", "alora") else ("plain", "fork")
    tasks = orderlog.TASKS if args.task == ALL else (args.task,)
    for task in tasks:
        for kind in kinds:
            exact_match(model, adapter, tokenizer, task, kind, args.eval_documents)


if __name__ == "__main__":
    main()
