"""FlashInfer's FA2 kernels on this library's schedules.

They pack the query heads that share a key head into one tile and split long requests among thread
blocks: they serve decode and short queries, and all else on cards that FA3 does not run on. A
plan's integers are static for a bucket, so they travel as constants of the launch.

Over 8-bit pages the kernels multiply what is stored. Its scales are applied outside of them: the
query is multiplied by the keys' scale before, in scratch, and the output by the values' after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from interop.draft_masks import largest_spread, spread_rows
from interop.host import INT32_MAX
from interop.plan import Launch
from interop.schedule import (
    FA2Shape,
    choose_chunk,
    cta_tile_q,
    fa2_shape,
    flashinfer_chunk_pages,
    plan_fa2,
)
from interop.spec import AttentionSpec

from . import flashinfer_abi as abi
from .flashinfer_fa import (
    MAX_ELEMENTS,
    Call,
    finish,
    load_early,
    ready,
    refuse_any,
)
from .flashinfer_refusals import needs_capability
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view

__all__ = [
    "FA2Family",
    "FlashInferPlannedFamily",
    "balanced_shape",
    "place_rows",
    "schedule_shape",
    "with_masks",
]

FA2_LEAST_CAPABILITY = (8, 0)

# The card can launch the next kernel while this one ends (programmatic dependent launch).
PDL_LEAST_CAPABILITY = (9, 0)

# Partial results are counted in 31 bits, four bytes each.
MAX_SCRATCH_BYTES = 4 * 2**31

NEVER_SPLIT, SPLIT = 0, 1

# Bits of all keys for each query row, and where each request's begin; their place among `options`.
MASK_FIELDS = ("fa2_masks", "fa2_mask_indptr")
_RUN = abi.SIGNATURES["fa2"]["paged_run"]
MASK_AT = _RUN.index("maybe_custom_mask") - _RUN.index("maybe_lse") - 1

# Where rows begin in scratch, after the partial results.
ALIGN_BYTES = 16


class FA2Family:
    """FlashInfer's FA2 kernels on the balanced schedule of `interop.schedule`."""

    name = "fa2"
    recordable = True

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        masks = MASK_FIELDS if launch.draft_masks else ()
        if launch.source == "pages":
            own: tuple[str, ...] = ("kv_indptr", "page_indices", "kv_last_page_len", "fa2_schedule")
        else:
            own = ("fa2_own_kv_indptr", "fa2_own_schedule")
        return ("qo_indptr", *own, *masks)

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("page_indices",) if launch.source == "pages" else ()

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_any(work)) is not None:
            return reason
        if work.device.capability < FA2_LEAST_CAPABILITY:
            return needs_capability(work, "8.0 or later")
        if work.bucket.draft_masks and (size := _mask_bytes(work)) > INT32_MAX:
            return f"masks over all keys take up to {size} bytes, more than it can count"
        if work.source == "pages":
            assert work.cache is not None
            stride = work.cache.page_size * work.cache.num_kv_heads * work.cache.head_dim
            if stride >= MAX_ELEMENTS:
                return f"a page of {stride} elements is 2**32 or more, which it cannot count"
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: the variant says whether to split, the detail how finely."""
        shape = self._shape(work, SPLIT)
        choice = choose_chunk(shape, lengths.query_lens, lengths.kv_units)
        # Merged rows are counted from the first request, so what comes after another launch's
        # requests is not split.
        split = choice.split and shape.scratch_bytes < MAX_SCRATCH_BYTES and not lengths.first
        if work.spec.sliding_window is not None:
            # Chunks of a window end where a causal tile does.
            split = split and work.spec.causal and not work.bucket.draft_masks
        return Decision(SPLIT if split else NEVER_SPLIT, choice.pages)

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        shape = self._shape(work, variant)
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=(
                *shape.plan_info,
                int(work.device.capability >= PDL_LEAST_CAPABILITY),
                # Of a mixed batch the launch after this one finishes all rows, these among them.
                int(work.role != "decodes"),
            ),
            scratch_bytes=_query_at(work, shape) + _query_bytes(work),
            draft_masks=work.bucket.draft_masks,
        )
        load_early("fa2", launch, pages=work.source == "pages")
        if _query_bytes(work):
            _load_scaling_early(work.spec, work.query_dtype)
        if work.source == "pages":
            sizes = {"fa2_schedule": shape.schedule_words}
        else:
            sizes = {
                "fa2_own_kv_indptr": work.num_requests + 1,
                "fa2_own_schedule": shape.schedule_words,
            }
        if launch.draft_masks:
            sizes |= {"fa2_masks": max(1, -(-_mask_bytes(work) // 4))}
            sizes |= {"fa2_mask_indptr": work.num_requests + 1}
        return launch, sizes

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; masks are read from ``draft_masks``, written before."""
        self._write_schedule(work, lengths, decision, fields)
        if launch.draft_masks:
            spread_rows(
                fields["draft_masks"].reshape(work.bucket.num_tokens, -1),
                lengths.qo_indptr,
                lengths.query_lens,
                lengths.kv_lens,
                fields["fa2_masks"],
                fields["fa2_mask_indptr"],
            )

    def _write_schedule(
        self,
        work: Work,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        schedule = "fa2_schedule"
        if work.source == "tokens":
            # Where each request's keys are among the rows; the kernel reads their number from it.
            fields["fa2_own_kv_indptr"][:] = lengths.kv_indptr
            schedule = "fa2_own_schedule"
        shape = self._shape(work, decision.variant)
        plan_fa2(
            shape,
            lengths.query_lens,
            lengths.kv_units,
            kv_chunk_pages=decision.detail,
            out=fields[schedule],
        )
        if lengths.first:
            place_rows(shape, lengths.qo_indptr, fields[schedule])

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        call = _ready_fa2(launch)
        metadata, query, lse = operands.metadata, operands.query, operands.lse
        options = with_masks(call.options, metadata) if launch.draft_masks else call.options
        scaled = launch.source == "pages" and launch.cache is not None and launch.cache.quantized
        if scaled:
            query = _scaled_query(launch, operands)
            # The kernel insists that the two have as many rows.
            lse = None if lse is None else _rows_of(launch, lse)
        # Without splitting nothing is written there, but the kernel asks it for the device.
        scratch = operands.out if operands.scratch is None else operands.scratch
        if launch.source == "pages":
            call.function(
                scratch,
                metadata["fa2_schedule"],
                call.plan_info,
                query,
                operands.key,
                operands.value,
                metadata["qo_indptr"],
                metadata["kv_indptr"],
                metadata["page_indices"],
                metadata["kv_last_page_len"],
                operands.out,
                lse,
                *options,
            )
        else:
            call.function(
                scratch,
                metadata["fa2_own_schedule"],
                call.plan_info,
                query,
                operands.key,
                operands.value,
                metadata["qo_indptr"],
                metadata["fa2_own_kv_indptr"],
                operands.out,
                lse,
                *options,
            )
        if scaled and self._scales_output(launch):
            _scale_output(launch, operands)
        if launch.constants[-1]:
            finish(operands)

    def _shape(self, work: Work, variant: int) -> FA2Shape:
        return balanced_shape(work, variant == SPLIT)

    def _scales_output(self, launch: Launch) -> bool:
        # A launch that comes after this one scales its own rows only.
        return True


def with_masks(options: tuple[Any, ...], metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a call's options with the masks that `MASK_FIELDS` name."""
    masks = (metadata[name] for name in MASK_FIELDS)
    return (*options[:MASK_AT], *masks, *options[MASK_AT + len(MASK_FIELDS) :])


def place_rows(shape: FA2Shape, qo_indptr: IntArray, schedule: IntArray) -> None:
    """Say in a schedule that does not split where the requests' rows of the output begin.

    The kernel writes them where the schedule says, which counts only rows that it was made for:
    where another launch has some of the requests, these are not all.
    """
    assert not shape.split
    schedule[shape.places.o_indptr // 4 :][: qo_indptr.size] = qo_indptr


class FlashInferPlannedFamily(FA2Family):
    """FA2 on the schedule that FlashInfer's planner would make, to compare with.

    Chunk size and capacity follow its rules, and so do plan integers and schedule, bit for bit.
    """

    name = "fa2_flashinfer"

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: in graph mode it always splits."""
        shape = self._shape(work, SPLIT)
        pages = flashinfer_chunk_pages(shape, lengths.query_lens, lengths.kv_units)
        return Decision(SPLIT, pages)

    def _shape(self, work: Work, variant: int) -> FA2Shape:
        return _flashinfer_shape(work)


@lru_cache(maxsize=4096)
def _ready_fa2(launch: Launch) -> Call:
    *plan_info, pdl, _ = launch.constants
    pages = launch.source == "pages"
    return ready("fa2", launch, tuple(plan_info), pages=pages, pdl=bool(pdl))


def _mask_bytes(work: Work) -> int:
    """Most bytes of masks over all keys."""
    bucket = work.bucket
    keys = bucket.num_pages * _page_size(work)
    return largest_spread(bucket.max_query_len, work.num_requests, keys)


def _query_bytes(work: Work) -> int:
    """Bytes of the query that is multiplied by the keys' scale; 0 where there is none."""
    if work.source == "tokens" or work.cache is None or not work.cache.quantized:
        return 0
    return 2 * work.bucket.num_tokens * work.spec.num_qo_heads * work.spec.head_dim


def _query_at(work: Work, shape: FA2Shape) -> int:
    """Where that query stands in scratch: after the partial results."""
    if not _query_bytes(work):
        return shape.scratch_bytes
    return -(-shape.scratch_bytes // ALIGN_BYTES) * ALIGN_BYTES


@cache
def _load_scaling_early(spec: AttentionSpec, dtype: str) -> None:
    if not torch.cuda.is_available():
        return
    from ..triton_ops import warm_scale

    shape = (1, spec.num_qo_heads, spec.head_dim)
    rows = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    warm_scale(rows, rows, spec.num_kv_heads)


def _rows_of(launch: Launch, rows: Any) -> Tensor:
    """Rows of the launch's own requests, which of a mixed batch are the first ones."""
    return torch_view(rows)[: launch.constants[1]]


def _scaled_query(launch: Launch, operands: Operands) -> Tensor:
    """Multiply the query by the keys' scale, in scratch."""
    from ..triton_ops import scale_query

    query = _rows_of(launch, operands.query)
    scratch = torch_view(operands.scratch)[: launch.scratch_bytes]
    scaled = scratch[-query.nbytes :].view(query.dtype).view(query.shape)
    scale_query(query, scaled, *_scales_of(operands))
    return scaled


def _scale_output(launch: Launch, operands: Operands) -> None:
    """Multiply the output by the values' scale."""
    from ..triton_ops import scale_output

    scale_output(_rows_of(launch, operands.out), *_scales_of(operands))


def _scales_of(operands: Operands) -> tuple[Tensor, Tensor]:
    return torch_view(operands.scale_table), torch_view(operands.scale_layer)


def _page_size(work: Work) -> int:
    """Tokens in a page; a row of the call is a page of its own."""
    if work.source == "tokens":
        return 1
    assert work.cache is not None
    return work.cache.page_size


def schedule_shape(work: Work, *, cta_tile_q: int, capacity: int) -> FA2Shape:
    """Shape of a schedule that may split, with the sizes of `work`."""
    spec = work.spec
    return FA2Shape(
        num_requests=work.num_requests,
        num_rows=work.bucket.num_tokens,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=_page_size(work),
        num_sms=work.device.num_sms,
        cta_tile_q=cta_tile_q,
        capacity=capacity,
        window_left=spec.window_left,
    )


@lru_cache(maxsize=4096)
def balanced_shape(work: Work, split: bool) -> FA2Shape:
    """Shape for `interop.schedule`'s own chunks, with room for the request that is padding."""
    spec, bucket = work.spec, work.bucket
    shape = fa2_shape(
        num_requests=work.num_requests,
        num_rows=bucket.num_tokens,
        max_query_len=bucket.max_query_len,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=_page_size(work),
        num_sms=work.device.num_sms,
        split=split,
        window_left=spec.window_left,
    )
    if work.num_requests == bucket.num_requests:
        return shape
    # The padding request may be longer than max_query_len: it can have all rows that the others
    # need not have, or fewer and then the others have more tiles.
    tile, group, rows = shape.cta_tile_q, shape.group_size, bucket.num_tokens
    tiles_of_one = -(-bucket.max_query_len * group // tile)
    requests = min(bucket.num_requests, rows)
    padding = -(-(rows - requests) * group // tile)
    extra = max(requests * tiles_of_one + padding - min(work.num_requests, rows) * tiles_of_one, 0)
    return replace(shape, capacity=shape.capacity + extra)


@lru_cache(maxsize=4096)
def _flashinfer_shape(work: Work) -> FA2Shape:
    """Shape by the rules of FlashInfer's planner in graph mode."""
    spec, rows, requests = work.spec, work.bucket.num_tokens, work.num_requests
    longest = rows - requests + 1
    if longest < 0:
        # It subtracts unsigned numbers, and takes the largest tile for what comes of it.
        longest = 2**31
    tile = cta_tile_q(longest * spec.group_size, spec.head_dim_v)
    tiles = -(-rows * spec.group_size // tile) + requests - 1
    capacity = max(2 * work.device.num_sms // spec.num_kv_heads, tiles)
    return schedule_shape(work, cta_tile_q=tile, capacity=capacity)
