"""int8 weights: the gates that they have to pass before they may be the default on a CPU, and their speed.

* KL to fp32, mean over the tokens of two texts: an order log, and this project's English documentation.
* A row's logits beside a neighbour whose inputs of every matrix are 30 times as large, against alone.
* Logits of one text in one step, against the same text in unequal chunks and single tokens.
* Time of a forward pass and of one layer's matrices with 1, 8 and 512 tokens, against fp32 in turns; the layers take
  turns as in the model, so that no matrix is in a cache when it is needed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from benchmarks.lib.common import BLOCK, ROOT, Line, Workspace
from forkkv.attention.backend import AttentionBackend
from forkkv.attention.batch import ForwardBatch
from forkkv.attention.registry import select_backend
from forkkv.executor.batch_builder import build_batch
from forkkv.executor.cache import PagedCache
from forkkv.executor.compare import kl_divergence
from forkkv.executor.table import RequestTable
from forkkv.kvcache.spec import CacheSpec
from forkkv.lora.weights import AdapterWeights
from forkkv.models.layers import FusedLinear
from forkkv.models.llama import LlamaModel, attention_shape
from forkkv.models.loader import load_weights
from forkkv.models.quantization import Int8Linear, quantize_linears
from forkkv.types import NewSequence, SamplingParams, Segment, TableUpdate

MAX_KL = 0.01
TOLERANCE = 1e-3
"""Largest difference of a logit. Products with int8 weights have none; attention rounds differently with the shape of
a batch, by as much as in fp32."""
LOUD = 30.0
TOKENS = (1, 8, 512)
_CPU = torch.device("cpu")
_DOCUMENTS = ("README.md", "docs/modes.md", "docs/architecture.md", "docs/operations.md")


@dataclass
class Model:
    """A model with a cache and a table of requests, driven one forward pass at a time."""

    model: LlamaModel
    max_tokens: int
    names: int = 0
    table: RequestTable = field(init=False)
    cache: PagedCache = field(init=False)
    backend: AttentionBackend = field(init=False)
    lora: AdapterWeights = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.spec
        cache_spec = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK, 4, 4, spec.qk_norm)
        self.blocks = -(-self.max_tokens // BLOCK)
        self.cache = PagedCache(cache_spec, 16 * self.blocks + 1, 2, torch.float32, _CPU)
        self.table = RequestTable(16, self.blocks + 1)
        self.backend = self.model.make_backend(select_backend(_CPU, torch.float32, attention_shape(spec)))
        self.lora = AdapterWeights(spec, [], 1, _CPU, torch.float32, self.model.k_gains, None)

    def start(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Forget all sequences and take up these, each with blocks of its own."""
        for name in [f"s{i}" for i in range(self.names)]:
            self.table.drop(name)
        self.names = len(prompts)
        for i, prompt in enumerate(prompts):
            new = NewSequence(f"s{i}", tuple(prompt), len(prompt), SamplingParams(), seed=0, k_tiles=0, v_tiles=0)
            self.table.add(new)
            ids = range(1 + i * self.blocks, 1 + (i + 1) * self.blocks)
            self.table.extend(TableUpdate(f"s{i}", kv_blocks=tuple(ids)))
        return [f"s{i}" for i in range(len(prompts))]

    def batch(self, parts: Sequence[tuple[str, int, int]]) -> ForwardBatch:
        """One step of (sequence, first token, end)."""
        segments = [
            Segment(name, start, end - start, -1, "base", start, (), -1, 0, sample=True) for name, start, end in parts
        ]
        return build_batch(segments, (), self.table, BLOCK, _CPU)

    def run(self, batch: ForwardBatch) -> Tensor:
        with torch.inference_mode():
            return self.model(batch, self.cache, self.backend, self.lora)

    def all_logits(self, parts: Sequence[tuple[str, int, int]]) -> Tensor:
        """Logits after every token of the step, [T, vocab]."""
        batch = self.batch(parts)
        return self.run(replace(batch, sample_tokens=torch.arange(batch.num_tokens)))


def make_models(work: Workspace, max_tokens: int) -> tuple[Model, Model]:
    """(fp32, int8) over the same checkpoint."""
    models = []
    for quantized in (False, True):
        weights = load_weights(work.resolved, work.spec, torch.float32, progress=False)
        model = LlamaModel(work.spec, weights, _CPU, torch.float32, max_tokens)
        if quantized:
            quantize_linears(model)
        models.append(Model(model, max_tokens))
    return models[0], models[1]


def run(work: Workspace) -> list[Line]:
    """All lines of the section."""
    size = work.size(512)
    texts = {"order log": list(work.document(size, 3)), "English": english(work, size)}
    exact, quantized = make_models(work, max_tokens=2 * size)
    lines = kl_lines(exact, quantized, texts)
    lines += [neighbour_line(quantized, texts), chunk_line(quantized, texts["English"])]
    lines += speed_lines(exact, quantized, texts["English"], repeats=5 if work.quick else 21)
    return lines


def english(work: Workspace, size: int) -> list[int]:
    """The first `size` tokens of the documentation's prose."""
    text = "\n".join((ROOT / name).read_text("utf-8") for name in _DOCUMENTS)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ", "```")))
    return list(work.tokenizer.encode(prose, add_special_tokens=False)[:size])


# ---- gates ------------------------------------------------------------------------------------------------------


def kl_lines(exact: Model, quantized: Model, texts: dict[str, list[int]]) -> list[Line]:
    lines = []
    for name, text in texts.items():
        both = []
        for model in (exact, quantized):
            (sequence,) = model.start([text])
            both.append(model.all_logits([(sequence, 0, len(text))]).double().log_softmax(-1))
        true, mine = both
        kl = kl_divergence(true, mine)
        same = (true.argmax(-1) == mine.argmax(-1)).float().mean().item()
        mean = kl.mean().item()
        shown = f"{mean:.4f} (99 %: {kl.quantile(0.99):.3f}; best token the same {same:.1%}, {len(text)} tokens)"
        lines.append(Line("int8", f"KL to fp32, {name}", shown, f"<= {MAX_KL}", mean <= MAX_KL, mean))
    return lines


def neighbour_line(quantized: Model, texts: dict[str, list[int]]) -> Line:
    """A text as a prefill row and as a decode row, beside and without another whose activations are `LOUD` times."""
    own, other = (text[: len(text) // 2] for text in texts.values())
    names = quantized.start([own, other])
    worst = 0.0
    for begin, end in ((0, len(own) - 1), (len(own) - 1, len(own))):
        alone = quantized.all_logits([(names[0], begin, end)])
        with loud_rows(quantized.model, end - begin):
            beside = quantized.all_logits([(names[0], begin, end), (names[1], begin, end)])
        worst = max(worst, (beside[: end - begin] - alone).abs().max().item())
    return _difference_line(f"logits beside a {LOUD:.0f}x neighbour", worst)


def _difference_line(name: str, worst: float) -> Line:
    return Line("int8", name, f"largest difference {worst:.2g}", f"<= {TOLERANCE}", worst <= TOLERANCE, worst)


@contextmanager
def loud_rows(model: nn.Module, first: int) -> Iterator[None]:
    """Multiply the inputs of every matrix by `LOUD` from row `first` on."""

    def louder(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        x[first:] *= LOUD
        return (x,)

    hooks = [m.register_forward_pre_hook(louder) for m in model.modules() if isinstance(m, Int8Linear)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def chunk_line(quantized: Model, text: list[int]) -> Line:
    (name,) = quantized.start([text])
    whole = quantized.all_logits([(name, 0, len(text))])
    (name,) = quantized.start([text])
    ends = [len(text) // 2, len(text) // 2 + 5, len(text) - 9, *range(len(text) - 8, len(text) + 1)]
    parts = [quantized.all_logits([(name, a, b)]) for a, b in zip([0, *ends], ends, strict=False)]
    worst = (torch.cat(parts) - whole).abs().max().item()
    return _difference_line("logits chunked against whole", worst)


# ---- speed ------------------------------------------------------------------------------------------------------


def speed_lines(exact: Model, quantized: Model, text: list[int], repeats: int) -> list[Line]:
    lines = []
    for tokens in TOKENS:
        tokens = min(tokens, len(text))
        steps = [forward_of(model, text, tokens) for model in (exact, quantized)]
        slow, fast, ratio = in_turns(*steps, repeats)
        lines.append(_speed_line(f"forward of {tokens} tokens", slow, fast, ratio))
    layers = len(exact.model.layers)
    for tokens in TOKENS:
        steps = [matrices_of(model.model, tokens) for model in (exact, quantized)]
        slow, fast, ratio = in_turns(*steps, repeats)
        lines.append(_speed_line(f"matrices of a layer, {tokens} tokens", slow / layers, fast / layers, ratio))
        if tokens == 1:
            rate = matrix_bytes(quantized.model) / fast / 1e9
            shown = f"{rate:.1f} GB/s, {matrix_bytes(quantized.model) / 1e6:.0f} MB without the head"
            lines.append(Line("int8", "weights read, 1 token", shown, "-", True, rate))
    return lines


def _speed_line(name: str, slow: float, fast: float, ratio: float) -> Line:
    shown = f"fp32 {slow * 1e3:.2f} ms, int8 {fast * 1e3:.2f} ms: {ratio:.2f}x"
    return Line("int8", name, shown, "> 1x", ratio > 1, ratio)


def forward_of(model: Model, text: list[int], tokens: int) -> Callable[[], object]:
    """One step: `tokens` sequences with a token each for few, else one prompt; logits of one token a sequence."""
    if tokens <= 16:
        names = model.start([text[:32]] * tokens)
        for name in names:
            model.run(model.batch([(name, 0, 31)]))
        batch = model.batch([(name, 31, 32) for name in names])
    else:
        (name,) = model.start([text[:tokens]])
        batch = model.batch([(name, 0, tokens)])
    return lambda: model.run(batch)


def in_turns(slow: Callable[[], object], fast: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, run alternately after a warm-up, and the median of the pairs' ratios."""
    slow(), fast()
    pairs = [(seconds(slow), seconds(fast)) for _ in range(repeats)]
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(a / b for a, b in pairs)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def matrices_of(model: LlamaModel, tokens: int) -> Callable[[], object]:
    """All products of all layers, and nothing else."""
    linears = [m for layer in model.layers for m in layer.modules() if isinstance(m, FusedLinear | Int8Linear)]
    widths = [m.weight.shape[0] if isinstance(m, FusedLinear) else m.packed.in_features for m in linears]
    generator = torch.Generator().manual_seed(0)
    inputs = {width: torch.randn(tokens, width, generator=generator) for width in widths}

    def step() -> None:
        with torch.inference_mode():
            for linear, width in zip(linears, widths, strict=True):
                linear(inputs[width])

    return step


def matrix_bytes(model: LlamaModel) -> int:
    return sum(m.packed.nbytes for layer in model.layers for m in layer.modules() if isinstance(m, Int8Linear))
