"""Runs the cells of one team: documents in batches, every mode on a batch before the next, the reference first.

The reference's log-probs live only as long as their batch. Its run is a cell as well, so private prefills are made once
and serve all modes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.lib.fidelity_data import MAX_ANSWER_TOKENS, Item, Team
from benchmarks.lib.fidelity_stats import Record
from benchmarks.lib.forcing import ForcingExecutor, Track
from forkkv.config import EngineConfig, LoRAConfig, LoRAModule
from forkkv.engine.core import EngineCore
from forkkv.sharing import CONTROLS, residual_digest
from forkkv.types import AdapterKind, EngineRequest, KVSharing, SamplingParams, StepStats

REFERENCE: dict[AdapterKind, KVSharing] = {"plain": "none", "fork": "fork", "alora": "none"}
"""The mode in which the server computes exactly what an adapter of this kind is defined as."""
MAX_NUM_SEQS = 32
REFERENCE_BYTES = 512 << 20
"""Log-probs that are kept at a time."""
_serial = itertools.count()


def team_config(base: EngineConfig, team: Team) -> EngineConfig:
    """`base` with the team's adapters, which fan out to each other, and with as many seats as a batch may need."""
    modules = tuple(LoRAModule(name, str(path)) for name, path in team.adapters.items())
    lora = LoRAConfig(modules=modules, max_loras=max(8, len(modules)), teams=((team.label, tuple(team.adapters)),))
    scheduler = replace(base.scheduler, max_num_seqs=MAX_NUM_SEQS, chunked_prefill_size=2048)
    return replace(base, lora=lora, scheduler=scheduler)


@dataclass(slots=True)
class Pace:
    """Tokens and seconds of the steps so far: those with prompt tokens, and those that only decode."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def count(self, stats: StepStats) -> None:
        """Add a step. Mutates."""
        if stats.prefill_tokens:
            self.prefill_tokens += stats.prefill_tokens
            self.prefill_seconds += stats.step_seconds
        else:
            self.decode_tokens += stats.decode_tokens
            self.decode_seconds += stats.step_seconds


@dataclass
class TeamRunner:
    """One loaded team. Only the latest core may be used, since a new one replaces the executor's cache."""

    team: Team
    config: EngineConfig
    executor: ForcingExecutor = field(init=False)
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        """Load model and adapters. Raises `ModelLoadError`, `AdapterLoadError` or `ConfigError`."""
        self.config = team_config(self.config, self.team)
        self.executor = ForcingExecutor(self.config)
        self.ids = {meta.name: meta.adapter_id for meta in self.executor.adapters}

    @property
    def reference(self) -> KVSharing:
        """The reference's mode. Raises `ValueError` for a team of several kinds."""
        kinds = {meta.kind for meta in self.executor.adapters}
        if len(kinds) > 1:
            raise ValueError(f"team {self.team.label} mixes kinds of adapters: {', '.join(sorted(kinds))}")
        return REFERENCE[kinds.pop()]

    def core(self, mode: KVSharing) -> EngineCore:
        """A new engine with empty caches."""
        scheduler = replace(self.config.scheduler, kv_sharing=mode)
        return EngineCore(replace(self.config, scheduler=scheduler), self.executor)

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Documents together, as many as have room in the caches as private prompts, and whose log-probs fit."""
        spec, batch = self.executor.cache_spec, list[Item]()
        room = 0.8 * (self.config.cache.memory_bytes or self.executor.cache_memory_bytes())
        answers = REFERENCE_BYTES // (4 * self.executor.vocab_size)
        for _, group in itertools.groupby(items, key=lambda item: item.document):
            grown = [*batch, *group]
            blocks = sum((len(item.prompt) + _answer_room(item)) // spec.block_size + 2 for item in grown)
            full = blocks * spec.kv_block_bytes > room or sum(map(_answer_room, grown)) > answers
            if batch and (full or len(grown) > MAX_NUM_SEQS):
                yield batch
                grown = grown[len(batch) :]
            batch = grown
        if batch:
            yield batch

    def score(self, items: Sequence[Item], modes: Sequence[KVSharing], length: str) -> list[Record]:
        """Records of one batch in `modes`; the reference runs first whether it is asked for or not. Raises
        `RuntimeError` if a request fails."""
        own = [Track(len(item.prompt), self._whole_answer(item)) for item in items]
        self._run(self.reference, items, own)
        for track in own:
            track.answer = track.answer or list(track.best)
        records = []
        for mode in modes:
            tracks = own
            if mode != self.reference:
                tracks = [Track(track.num_prompt_tokens, track.answer, track.logprobs) for track in own]
                self._run(mode, items, tracks)
            for item, reference, track in zip(items, own, tracks, strict=True):
                records.append(self._record(mode, length, item, reference, track))
        return records

    def _whole_answer(self, item: Item) -> list[int]:
        return [] if item.answer is None else [*item.answer, self.executor.eos_token_ids[0]]

    def refusal(self, mode: KVSharing) -> str | None:
        """Why the team is not run in `mode`; None if it is."""
        if mode in CONTROLS:
            if len(self.team.adapters) < 2:
                return "nobody else in the team writes the prefix"
            if any(meta.kind == "alora" for meta in self.executor.adapters):
                return "aLoRA reads base-written blocks alone, so this is its fork"
            keys = {residual_digest(meta, mode) for meta in self.executor.adapters}
            if mode == "shared-a" and len(keys) == len(self.team.adapters):
                return "no two agents share A, so this is its first-writer"
        return None

    def _run(self, mode: KVSharing, items: Sequence[Item], tracks: Sequence[Track]) -> None:
        """Answer all items in an empty cache, together; where writers count, behind the agents whose states they read.
        Mutates the tracks."""
        core = self.core(mode)
        salts = [""] * len(items)
        if mode in CONTROLS:
            salts = [self.writer_of(item.agent) for item in items]
            pairs = list(zip(items, salts, strict=True))
            written = {(item.document, salt): writing(items, item, salt) for item, salt in pairs}
            self.answer(core, list(written.values()), [salt for _, salt in written])
        self.answer(core, items, salts, tracks)

    def writer_of(self, agent: str) -> str:
        """Whose states `agent` reads in a mode with writers: the team's first agent's, and the first the second's."""
        first, second, *_ = self.team.adapters
        return second if agent == first else first

    def answer(
        self, core: EngineCore, items: Sequence[Item], salts: Sequence[str], tracks: Sequence[Track] | None = None
    ) -> None:
        """Run all items together to the end of their tracks; without tracks to their first token. Items of different
        salts share nothing. Mutates the tracks. Raises `RuntimeError` if a request fails."""
        followed = self.executor.tracks = {}
        for index, (item, salt) in enumerate(zip(items, salts, strict=True)):
            track = None if tracks is None else tracks[index]
            request = self._request(item, salt, track)
            if track is not None:
                followed[request.request_id] = track
            core.add_request(request)
        while core.has_work():
            outputs, stats = core.step()
            self.pace.count(stats)
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"{output.request_id}: {output.error}")
                if output.usage is not None and output.request_id in followed:
                    followed[output.request_id].fork_point = output.usage.fork_point

    def _request(self, item: Item, salt: str, track: Track | None) -> EngineRequest:
        length = 1 if track is None else len(track.answer) or MAX_ANSWER_TOKENS
        forced = track is not None and bool(track.answer)
        return EngineRequest(
            request_id=f"{item.question}/{item.agent}/{next(_serial)}",
            prompt_token_ids=list(item.prompt),
            sampling=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=forced),
            adapter_id=self.ids[item.agent],
            cache_salt=salt,
            fork_mark=item.mark,
        )

    def _record(self, mode: KVSharing, length: str, item: Item, reference: Track, track: Track) -> Record:
        ends = self.executor.eos_token_ids
        pairs = zip(track.best, track.answer, strict=True)
        right = [best == token or (best in ends and token in ends) for best, token in pairs]
        return Record(
            team=self.team.label,
            mode=mode,
            reference=self.reference,
            length=length,
            document=item.document,
            question=item.question,
            agent=item.agent,
            exact=all(right),
            tokens=len(track.answer),
            kl=sum(track.kl),
            agreed=sum(a == b for a, b in zip(track.best, reference.best, strict=True)),
            prompt_tokens=len(item.prompt),
            fork_point=track.fork_point,
        )


def writing(items: Sequence[Item], reader: Item, writer: str) -> Item:
    """What `writer` asks on the reader's document: its own question if it has one, else the reader's."""
    own = (item for item in items if item.agent == writer and item.document == reader.document)
    return next(own, replace(reader, agent=writer))


def _answer_room(item: Item) -> int:
    return MAX_ANSWER_TOKENS if item.answer is None else len(item.answer) + 1
