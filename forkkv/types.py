"""Plain data that crosses a boundary: HTTP process <-> engine, scheduler <-> executor.

Everything here is a standard-library dataclass of ints, strings and tuples. Nothing imports torch, so the scheduler
and its tests start in milliseconds, and nothing imports a serialiser: `forkkv.engine.wire` encodes these as they are.

Units: `*_tokens`, `start`, `*_from`, `*_len` count tokens; `*_blocks` and `*_units` hold ids of the paged pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AdapterId = int
"""Identity of one loaded adapter; allocated once, never reused. 0 is the base model."""
BlockId = int
"""Logical id of a K/V block (block 0 is the null block) or of a residual unit (unit 0 is the null unit)."""

BASE_ADAPTER: AdapterId = 0
NULL_BLOCK: BlockId = 0
RESIDUAL_TILE = 16
"""Columns of one residual unit: the rank granularity of the rCache."""

AdapterKind = Literal["plain", "fork", "alora"]
KVSharing = Literal["none", "auto", "fork", "first-writer", "shared-a", "full"]
WriterClass = Literal["base", "mixed"]
"""Who wrote a shared block: the base weights, or the adapter of whichever request came first."""
FinishReason = Literal["stop", "length", "abort", "error"]


# ---- adapters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdapterMeta:
    """What the scheduler needs to know of a loaded adapter.

    `digest` identifies the weights (and scaling, kind, invocation tokens), so two names of the same bytes share
    caches and a reload under the same name cannot read stale ones. `rank_k` and `rank_v` are the largest rank of any
    layer's k_proj and v_proj; 0 where the adapter has none and therefore stores no residual for that half. `a_digest`
    identifies what a residual depends on besides the hidden states: adapters that share A have it in common; without
    one, an adapter shares A with nobody.
    """

    adapter_id: AdapterId
    name: str
    digest: str
    kind: AdapterKind
    rank_k: int
    rank_v: int
    invocation_tokens: tuple[int, ...] = ()
    team: str | None = None
    passed_probe: bool = False
    """Plain adapters: measured under `fork` and within `--max-probe-kl`, so that `auto` shares."""
    a_digest: str = ""

    @property
    def k_tiles(self) -> int:
        return -(-self.rank_k // RESIDUAL_TILE)

    @property
    def v_tiles(self) -> int:
        return -(-self.rank_v // RESIDUAL_TILE)


@dataclass(frozen=True, slots=True)
class AdapterProbe:
    """What sharing costs one plain adapter on the probe's text: its distributions under `fork` against its own, private
    ones, at the tokens from `fork_point` on."""

    kl: float
    """Mean KL(private || fork) per token in nats; inf if a logit was not finite."""
    top1_agreement: float
    """Share of the tokens at which both have the same most likely token."""
    num_tokens: int
    """Tokens that were compared."""
    fork_point: int
    seconds: float
    """Wall time of the batch that it was measured in, divided by that batch's adapters."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Outcome of loading one adapter folder, shown in the log and in `/v1/models`."""

    name: str
    path: str
    adapter_id: AdapterId
    digest: str
    kind: AdapterKind
    matched: int
    """Tensors of the file that were used."""
    modules: tuple[tuple[str, int, float], ...]
    """(module name, rank, effective scaling) for every adapted module."""
    num_bytes: int
    unmatched: tuple[str, ...] = ()
    """Names of ignored tensors; always empty, since a tensor that does not match is refused."""
    probe: AdapterProbe | None = None
    """None if it was not measured: no plain adapter, a mode that needs no figure, or `--no-probe`."""


# ---- requests ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `top_k` 0 and `top_p` 1.0 are off; `temperature` 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """Child i of `n` > 1 samples with seed + i; None draws one seed per request at admission."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probs. k >= 0: the chosen token's and those of the k most likely tokens."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt as the engine sees it: tokens only, text stays in the API process."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter_id: AdapterId = BASE_ADAPTER
    n: int = 1
    cache_salt: str = ""
    kv_sharing: Literal["none"] | None = None
    """"none" forces f_w = 0 for this request; None follows the server's mode."""
    fork_at: int | None = None
    fork_mark: int | None = None
    """Token position of the last `cache_control` mark of a chat prompt."""
    arrival_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-prob) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Where the prompt tokens of one sequence came from; the `usage.forkkv` object of a response."""

    kind: Literal["base", "plain", "fork", "alora"]
    fork_point: int
    """f_w: first token that runs with adapter weights; the prompt length for a base request and in the modes in which
    agents share all that they write."""
    base: int
    """Prompt tokens below the fork whose base K/V was found in the bCache."""
    residual: int
    """Prompt tokens below the fork whose residual of this adapter was found in the rCache."""
    private: int
    """Prompt tokens above the fork found in the adapter's private blocks."""
    computed: int
    """Prompt tokens that ran through the model for this sequence."""
    computed_pairs: int = 0
    """Query-key pairs of those tokens: sum over computed tokens of their context length."""
    base_queries: int = 0
    """Prompt tokens below the fork point: the denominator of the bCache hit ratio."""

    def cached_tokens(self, num_prompt_tokens: int) -> int:
        """Prompt tokens that did not run through the model; at most `num_prompt_tokens` - 1."""
        return max(0, num_prompt_tokens - self.computed)


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens of one sequence of a request (`index` counts the `n` completions)."""

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: CacheUsage | None = None
    """Set on the first output of each sequence."""
    error: str | None = None


# ---- one step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResidualWrite:
    """Write h·A of `adapter_id` for tokens [write_from, end of the segment) of a segment.

    `k_units` and `v_units` are the units of the blocks from that of `write_from` on, block major: unit of (block b,
    tile t) is `units[b * tiles + t]`; empty where the adapter has no such projection. Tokens behind the blocks covered
    by the units are not written. A token is written whole: columns beyond the rank and layers without weights are
    zeros. Only where an adapter processes its own residual may `write_from` lie, or the segment end, inside a block.
    """

    adapter_id: AdapterId
    write_from: int
    k_units: tuple[BlockId, ...]
    v_units: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence that run in one step with one set of weights: one attention row."""

    request_id: str
    start: int
    num_tokens: int
    weights_slot: int
    """Adapter slot whose weights run, -1 for the base model."""
    write: Literal["base", "merged"]
    """Whether K and V are stored without or with the contribution of the adapter whose weights run."""
    kv_write_from: int
    """K, V of tokens below this position are computed and not stored (they are shared and already there)."""
    residual_writes: tuple[ResidualWrite, ...] = ()
    read_slot: int = -1
    """Adapter slot whose residual completes K, V of tokens [0, residual_len); -1: read the base part alone."""
    residual_len: int = 0
    sample: bool = False
    """Sample one token from the last position of the segment."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters the running batch, for the first time or again after preemption; replaces any state
    that the executor holds under the same id."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Resolved seed; the generator of output token i is a function of (seed, i) alone, so preemption and
    neighbours do not change what is drawn."""
    k_tiles: int = 0
    v_tiles: int = 0


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Ids appended to the tables of a running sequence before the step runs."""

    request_id: str
    kv_blocks: tuple[BlockId, ...] = ()
    k_units: tuple[BlockId, ...] = ()
    v_units: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one K/V block of all layers, before any write of the step."""

    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Put the weights of `adapter_id` into `slot` before the step runs."""

    slot: int
    adapter_id: AdapterId


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows (indices into `StepPlan.segments`) whose first `num_blocks` table entries are the same blocks."""

    num_blocks: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one forward pass needs, as data: the only thing the scheduler says to the executor."""

    step_id: int
    new: tuple[NewSequence, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    segments: tuple[Segment, ...] = ()
    groups: tuple[SharedPrefix, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    dropped: tuple[str, ...] = ()
    """Sequences that were preempted or finished since the last plan: forget their tables and tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the distributions of one teacher-forced sequence are from those of another; see `AdapterProbe`."""

    kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor answers. `error` set: nothing of the step may be trusted, all it published is withdrawn."""

    step_id: int
    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    error: str | None = None


# ---- reports ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Use of one paged pool, in blocks (K/V) or units (residual). total = free + cached + in_use."""

    total: int
    free: int
    cached: int
    """Owned by a tree and leased by nobody: evictable."""
    block_bytes: int

    @property
    def in_use(self) -> int:
        return self.total - self.free - self.cached


@dataclass(frozen=True, slots=True)
class StepStats:
    """State of the engine after a step. Counters are cumulative since start."""

    step_id: int
    timestamp: float
    """Wall clock seconds at the end of the step."""
    step_seconds: float
    prefill_tokens: int
    """Tokens of this step that are not single-token decode rows."""
    decode_tokens: int
    attention_pairs: int
    """Query-key pairs of this step's prefill rows."""
    running: int
    waiting: int
    kv_pool: PoolStats
    residual_pool: PoolStats
    active_residual_adapters: int
    """Adapters with at least one live block in the rCache."""
    base_weight_tokens_total: int = 0
    """Tokens that ran with base weights in prefill segments."""
    adapter_weight_tokens_total: int = 0
    decode_tokens_total: int = 0
    backfill_tokens_total: int = 0
    """Prompt tokens whose base weights ran again only to write a residual."""
    fanout_tokens_total: int = 0
    """Tokens for which a residual of an adapter other than the requester's was written."""
    duplicate_blocks_total: int = 0
    preemptions_total: int = 0
    aborts_total: int = 0
    failed_steps_total: int = 0
    evicted_kv_blocks_total: int = 0
    evicted_residual_units_total: int = 0
    adapter_loads_total: int = 0
    leases: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the API process learns from the engine when it is ready."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_sharing: KVSharing
    block_size: int
    kv_capacity_tokens: int
    residual_capacity_tokens: int
    """Tokens of the widest adapter's residual that the rCache holds."""
    adapters: tuple[AdapterMeta, ...] = ()
    reports: tuple[AdapterReport, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    quantization: str = "none"
