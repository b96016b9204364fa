"""How many tokens, pages and requests fit in a GPU, and what the guard takes there and on the host.

Everything is arithmetic on a `ModelShape`: nothing is measured, no engine and no torch is imported. Sizes are bytes, of
one GPU (one tensor-parallel rank) unless they say otherwise. What engines take besides weights and KV (activations,
graphs, communication buffers) is not known here: it comes in as `reserve_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvguard.kernels.verify_pages.layout import RECORD_WORDS
from kvguard.model_shape import KvGroup, ModelShape, WeightPart
from kvguard.verifier import BLANK_WORDS_MAX, BLANKS_MAX, EVIDENCE_COLUMNS, EVIDENCE_ROWS

__all__ = ["GuardMemory", "Plan", "PlanInputs", "PoolPlan", "guard_memory", "make_plan", "weight_bytes"]

KV_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Of one number. FP8 with scales per layer, as vLLM and SGLang keep it; formats with scales in the page take more."""
WeightFormat = Literal["bf16", "fp8", "int4"]
FP8_BLOCK: Final = 128
"""FP8 weights share a float32 scale in blocks of 128 x 128 (`weight_block_size` of DeepSeek-V3's config.json)."""

WORD: Final = 8
AMOUNT_MAX: Final = 10**18
HOST_PAGE_BYTES: Final = 600
"""A page in use, once: its record, the set of its holders, its tag, its entry in the ledger of one request. Measured
with tracemalloc in CPython 3.11 (tests/core/test_plan.py measures again)."""
HOST_EVENT_BYTES: Final = 120
"""One event of the flight recorder: a tuple of four, its step and its place in a list; measured likewise."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What is planned for.

    weights         bf16; fp8: matrices of the layers; int4: routed experts, or of a model without experts all matrices
                    of the layers, with a 2-byte scale for each `int4_group` weights
    rest            format of the layers' other matrices (attention, dense and shared MLPs) in a mixture of experts;
                    embedding, head, norms and routers are bf16 always
    draft           whether the layers are loaded that only predict further tokens
    gpu_bytes       memory of one GPU; utilization: the part of it that the engine may use
    reserve_bytes   of that, for activations, graphs and buffers
    kv_bytes        KV memory of one GPU, in place of what is left over; None: what is left over
    context_tokens  prompt and answer of a request
    requests_max    requests that an engine lets run at once (max_num_seqs)
    step_tokens     tokens that an engine computes in a step at most (max_num_batched_tokens)
    """

    kv_dtype: str = "bf16"
    weights: WeightFormat = "bf16"
    rest: Literal["bf16", "fp8"] | None = None
    int4_group: int = 32
    draft: bool = False
    gpus: int = 1
    gpu_bytes: int = 80 * 10**9
    utilization: float = 0.9
    reserve_bytes: int = 0
    kv_bytes: int | None = None
    page_size: int = 16
    context_tokens: int = 8192
    requests_max: int = 256
    step_tokens: int = 8192
    recorder_events: int = 8

    def __post_init__(self) -> None:
        """Refuse what cannot be. ValueError."""
        if self.kv_dtype not in KV_BYTES:
            raise ValueError(f"unknown KV dtype {self.kv_dtype!r}: choose from {', '.join(KV_BYTES)}")
        if self.weights not in ("bf16", "fp8", "int4") or self.rest not in (None, "bf16", "fp8"):
            raise ValueError("weights are bf16, fp8 or int4, and the rest of a mixture of experts bf16 or fp8")
        counts = (self.gpus, self.gpu_bytes, self.page_size, self.context_tokens, self.requests_max, self.step_tokens)
        if min(counts) < 1 or self.int4_group < 1:
            raise ValueError("GPUs, memory, page size, context, requests, step tokens and INT4 group must be above 0")
        if max(*counts, self.int4_group, self.reserve_bytes, self.kv_bytes or 0, self.recorder_events) > AMOUNT_MAX:
            raise ValueError("GPUs, amounts of memory, tokens, requests and events are at most 10^18")
        if not 0 < self.utilization <= 1 or self.reserve_bytes < 0 or self.recorder_events < 0:
            raise ValueError("utilization lies between 0 and 1; reserve and recorder events are not below 0")
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ValueError("KV memory must be above 0")


@dataclass(frozen=True, kw_only=True)
class GuardMemory:
    """What the guard takes, in bytes; see `guard_memory`."""

    page_tag: int
    page_writer: int
    record: int
    delta: int
    evidence: int
    host: int

    @property
    def device(self) -> int:
        """On one GPU, all together."""
        return self.page_tag + self.page_writer + self.record + self.delta + self.evidence


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """One group of layers: bytes of a page, and pages that a request of the planned context holds."""

    layers: int
    window: int | None
    bytes_per_token: int
    page_bytes: int
    pages_per_request: int
    pages: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. Bytes of one GPU, except weights_all_bytes (all GPUs) and guard.host.

    tokens         that fit at once, in requests of the planned context; None where a window makes it depend on them
    requests       of the planned context that fit at once, whatever `requests_max` is
    """

    weights_bytes: int
    weights_all_bytes: int
    kv_bytes: int
    tokens: int | None
    requests: int
    pools: tuple[PoolPlan, ...]
    guard: GuardMemory
    notes: tuple[str, ...]


def weight_bytes(parts: Sequence[WeightPart], inputs: PlanInputs, *, has_experts: bool, ranks: int) -> float:
    """Bytes of these weights on one of `ranks` ranks.

    A part takes parameters x bytes of its format: bf16 2; fp8 1 + 4 / 128^2 (one float32 scale a block); int4
    0.5 + 2 / group. Which parts have which format: `PlanInputs`.
    """
    size = {"bf16": 2.0, "fp8": 1 + 4 / FP8_BLOCK**2, "int4": 0.5 + 2 / inputs.int4_group}
    rest: str = inputs.rest or ("fp8" if inputs.weights == "fp8" else "bf16")
    if not has_experts:
        rest = inputs.weights
    formats = {"experts": inputs.weights, "linear": rest, "other": "bf16"}
    return sum(part.per_rank(ranks) * size[formats[part.role]] for part in parts)


def pages_per_request(group: KvGroup, *, page_size: int, context_tokens: int) -> int:
    """Pages that a request of `context_tokens` holds: all of its tokens', or those that its window touches.

    A window of w tokens touches ceil((w - 1) / page) + 1 pages at most.
    """
    whole = -(-context_tokens // page_size)
    if group.window is None:
        return whole
    return min(whole, -(-(group.window - 1) // page_size) + 1)


def guard_memory(
    pages: Sequence[int], *, rows: int, columns: int, step_tokens: int, page_size: int, recorder_events: int
) -> GuardMemory:
    """What the guard takes for pools of `pages` pages, `rows` requests a step and `columns` pages a request.

    On each GPU (kvguard/verifier.py):
      page_tag  8 bytes a page: the mirror of the tags; page_writer 8 bytes a page: that of the designated writers
      record    64 bytes per row and 32 more per pool and step; made in blocks of n = min(64, 65536 / words) arrays, at
                least one
      delta     16 bytes writer and floor a row; per pool: 8 table row + 8 digest + 8 extent offset + 16 extent a row, 8
                for the last offset, and 24 a page that changes, of which a step is taken to have one per row and one
                per page of new tokens, for pages taken and as many freed; twice, as the last delta is kept
      evidence  4 rows of up to 4096 entries of 8 bytes per pool, in blocks likewise, and which rows they are
    On the host, once, whatever the number of GPUs: HOST_PAGE_BYTES a page, and HOST_EVENT_BYTES for each event that the
    recorder keeps of it, if every page is in use.
    What PyTorch's check takes while it runs is not counted: rows x columns words, several times, for a moment.
    """
    pools = len(pages)
    record = _blanks(pools * (2 * rows + 1) * RECORD_WORDS)
    width = min(max(1, columns), EVIDENCE_COLUMNS)
    evidence = pools * _blanks(EVIDENCE_ROWS * width) + _blanks(EVIDENCE_ROWS)
    changes = 2 * (rows + step_tokens // page_size)
    delta = 2 * WORD * (2 * rows + pools * (rows * 5 + 1 + 3 * changes))
    total = sum(pages)
    return GuardMemory(
        page_tag=WORD * total,
        page_writer=WORD * total,
        record=record,
        delta=delta,
        evidence=evidence,
        host=total * (HOST_PAGE_BYTES + recorder_events * HOST_EVENT_BYTES),
    )


def _blanks(words: int) -> int:
    """Bytes of the largest block of arrays of `words` words that a Verifier makes at a time."""
    return WORD * words * max(1, min(BLANKS_MAX, BLANK_WORDS_MAX // max(1, words)))


def make_plan(shape: ModelShape, inputs: PlanInputs) -> Plan:
    """Weights, then KV in what they leave, then the guard for the pages that there are.

    KV bytes per token and rank: layers x KV heads / ranks (at least one) x (key + value) x bytes of the dtype. Latent
    attention keeps the whole latent on every rank: layers x (latent + rotary) x bytes, so that more GPUs make room for
    KV only by dividing the weights.

    Raises ValueError if the weights alone do not fit.
    """
    ranks = inputs.gpus
    parts = [*shape.weights, *(shape.draft if inputs.draft else ())]
    weights = weight_bytes(parts, inputs, has_experts=shape.has_experts, ranks=ranks)
    notes = list(shape.notes)
    if shape.draft and not inputs.draft:
        notes.append("draft layers (multi-token prediction) are left out; --draft counts their weights, not their KV")
    if inputs.kv_bytes is None:
        room = int(inputs.gpu_bytes * inputs.utilization) - inputs.reserve_bytes - int(weights)
        if room <= 0:
            raise ValueError(
                f"weights take {weights / 1e9:.1f} GB a GPU and leave nothing of {inputs.gpu_bytes / 1e9:.1f} GB x "
                f"{inputs.utilization} less {inputs.reserve_bytes / 1e9:.1f} GB: more GPUs, or smaller weights"
            )
        if not inputs.reserve_bytes:
            notes.append("nothing is reserved for activations, graphs and buffers, which are not known here: --reserve")
    else:
        room = inputs.kv_bytes
    if shape.max_positions is not None and inputs.context_tokens > shape.max_positions:
        notes.append(f"the model has {shape.max_positions} positions, fewer than the planned context")
    size = KV_BYTES[inputs.kv_dtype]
    per_token = [group.elements_per_rank(ranks) * size for group in shape.kv]
    held = [
        pages_per_request(group, page_size=inputs.page_size, context_tokens=inputs.context_tokens) for group in shape.kv
    ]
    page_bytes = [tokens * inputs.page_size for tokens in per_token]
    request_bytes = sum(count * size for count, size in zip(held, page_bytes, strict=True))
    requests = room // request_bytes
    windowed = any(group.window is not None for group in shape.kv)
    # A pool gets the share of the memory that the requests of this context use of it.
    pages = [room * count // request_bytes for count in held]
    pools = tuple(
        PoolPlan(
            layers=group.layers,
            window=group.window,
            bytes_per_token=per_token[place],
            page_bytes=page_bytes[place],
            pages_per_request=held[place],
            pages=pages[place],
        )
        for place, group in enumerate(shape.kv)
    )
    guard = guard_memory(
        pages,
        rows=inputs.requests_max,
        columns=max(held),
        step_tokens=inputs.step_tokens,
        page_size=inputs.page_size,
        recorder_events=inputs.recorder_events,
    )
    return Plan(
        weights_bytes=round(weights),
        weights_all_bytes=round(weights * ranks),
        kv_bytes=room,
        tokens=None if windowed else pages[0] * inputs.page_size,
        requests=requests,
        pools=pools,
        guard=guard,
        notes=tuple(notes),
    )
