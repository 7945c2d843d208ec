"""transformers + PEFT behind `/v1/completions`, the way PEFT users serve adapters: one request at a time, its adapter
made active, greedy, fp32.

Kept simple and fair: every adapter keeps the KV cache of its latest request, and a new request of the same adapter
computes only what lies behind the longest common prefix (`DynamicCache.crop`). Caches of the adapters used longest ago
are dropped beyond `--kv-gib`. The loop is written out instead of `generate`, which costs some milliseconds a token.

    python -m benchmarks.peers.peft_app --model FOLDER --port PORT [--kv-gib 4] [name=FOLDER ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BASE = "base"


@dataclass
class Cached:
    """The KV cache of one adapter's latest request, and the tokens that it holds."""

    tokens: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)

    def num_bytes(self) -> int:
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        return sum(2 * layer.keys.nbytes for layer in layers)

    def crop(self, prompt: list[int]) -> int:
        """Drop all but the longest common prefix with `prompt`, whose last token stays to be computed; its length."""
        limit = min(len(self.tokens), len(prompt) - 1)
        same = next((i for i in range(limit) if self.tokens[i] != prompt[i]), limit)
        if same == 0:
            self.cache = DynamicCache()
        elif same < len(self.tokens):
            self.cache.crop(same - len(self.tokens))
        del self.tokens[same:]
        return same


class Generator:
    """The model with all adapters, and the caches by adapter."""

    def __init__(self, model_folder: str, adapters: dict[str, str], kv_bytes: int):
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        for name, folder in adapters.items():
            if isinstance(model, PeftModel):
                model.load_adapter(folder, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, folder, adapter_name=name)
        self.model = model.eval().requires_grad_(False)
        self.adapters = set(adapters)
        self.limit = kv_bytes
        self.cached: OrderedDict[str, Cached] = OrderedDict()

    def kv_bytes(self) -> int:
        return sum(entry.num_bytes() for entry in self.cached.values())

    def activate(self, name: str) -> None:
        if name in self.adapters:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(name)
        elif self.adapters:
            self.model.base_model.disable_adapter_layers()

    def answer(self, name: str, prompt: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
        """(token, prompt tokens found in the cache), greedily; what ends a text does not end it."""
        self.activate(name)
        entry = self.cached.setdefault(name, Cached())
        self.cached.move_to_end(name)
        found = entry.crop(prompt)
        new = prompt[found:]
        for _ in range(max_tokens):
            token = self.forward(entry, new)
            yield token, found
            new = [token]
        while self.kv_bytes() > self.limit and len(self.cached) > 1:
            self.cached.popitem(last=False)

    @torch.inference_mode()
    def forward(self, entry: Cached, new: list[int]) -> int:
        ids = torch.tensor([new])
        logits = self.model(input_ids=ids, past_key_values=entry.cache, use_cache=True, logits_to_keep=1).logits
        entry.tokens += new
        return int(logits[0, -1].argmax())


def make_app(generator: Generator, tokenizer: Any) -> FastAPI:
    app = FastAPI()
    turn = asyncio.Lock()

    @app.get("/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.get("/kv_bytes")
    def kv_bytes() -> int:
        return generator.kv_bytes()

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(stream(body), media_type="text/event-stream")

    async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
        count = found = 0
        async with turn:
            answer = generator.answer(body["model"], body["prompt"], body["max_tokens"])
            while (step := await asyncio.to_thread(next, answer, None)) is not None:
                token, found = step
                count += 1
                yield _event([{"index": 0, "text": tokenizer.decode([token]), "token_ids": [token]}])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        yield _event([], {**usage, "prompt_tokens_details": {"cached_tokens": found}})
        yield "data: [DONE]\n\n"

    return app


def _event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
    return f"data: {json.dumps({'object': 'text_completion', 'choices': choices, 'usage': usage})}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("adapters", nargs="*", metavar="name=FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    adapters = dict(item.split("=", 1) for item in args.adapters)
    generator = Generator(args.model, adapters, int(args.kv_gib * 2**30))
    app = make_app(generator, AutoTokenizer.from_pretrained(args.model))
    uvicorn.run(app, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
