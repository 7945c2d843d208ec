"""The served model's tokenizer and chat template.

The only module of the front end that imports transformers, and only when a tokenizer is loaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkkv.errors import ModelLoadError
from forkkv.log import get_logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

logger = get_logger(__name__)


class Tokenizer:
    """Text to token ids and back. Encoding and rendering are thread-safe."""

    def __init__(self, hf_tokenizer: Any):
        self._hf = hf_tokenizer
        self.backend: BackendTokenizer = hf_tokenizer.backend_tokenizer
        self.chat_template: str | None = _template_text(hf_tokenizer.chat_template)
        self._special = frozenset(hf_tokenizer.all_special_ids)
        self._byte_level = "ByteLevel" in repr(self.backend.decoder)
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    @classmethod
    def load(cls, model: str, load_format: str = "auto") -> Tokenizer:
        """Tokenizer of a model given as for `--model` and `--load-format`. Raises `ModelLoadError`."""
        from forkkv.models.resolve import resolve_model

        resolved = resolve_model(model, load_format)
        try:
            if resolved.format == "gguf":
                return cls(_load_gguf(Path(resolved.path)))
            from transformers import AutoTokenizer

            return cls(AutoTokenizer.from_pretrained(str(resolved.path)))
        except (OSError, ValueError, AttributeError, KeyError) as error:
            raise ModelLoadError(f"The tokenizer of {resolved.path} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in the text are recognised."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """The chat template applied to normalised messages. Raises whatever the template raises."""
        text = self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert isinstance(text, str)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files in Hugging Face format, chat template included."""
        self._hf.save_pretrained(folder)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that one token stands for, also where they are a part of a character."""
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return piece.encode()
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Inverse of GPT-2's printable alphabet for bytes: printable Latin-1 bytes stand for themselves, the other 68
    are numbered upwards from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


def _template_text(template: str | dict[str, str] | list[dict[str, str]] | None) -> str | None:
    """The default one where a tokenizer carries several templates by name."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        return template.get("default")
    return template


def _load_gguf(path: Path) -> Any:
    """Convert a GGUF vocabulary, which takes seconds, once per file and transformers version."""
    import transformers
    from transformers import AutoTokenizer

    stat = path.stat()
    key = f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}-{transformers.__version__}"
    folder = _cache_folder() / key
    if (folder / "tokenizer.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            logger.warning("cached tokenizer %s is unusable (%s), converting again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    _save(tokenizer, folder)
    return tokenizer


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forkkv" / "tokenizers"


def _save(tokenizer: Any, folder: Path) -> None:
    """Write a folder that appears whole or not at all; a cache that cannot be written is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            staged = Path(scratch) / "tokenizer"
            tokenizer.save_pretrained(staged)
            staged.rename(folder)
    except OSError as error:
        logger.info("tokenizer is not cached: %s", error)
