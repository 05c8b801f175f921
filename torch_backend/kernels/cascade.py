"""Cascade: the pages that all requests begin with are read once, and not once for each request.

All query rows together attend to the shared prefix, without a mask, since none of this step's
tokens is in it; each request's rows attend to the rest of its pages; and the two states are merged
by their LSE ("cascade inference" in FlashInfer's documentation, two levels). On a GPU both are
launches of FA2 and a Triton kernel merges; on the CPU the reference family does both.

How long the prefix is, is data: one compiled program serves all lengths of it, 0 among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.chunking import reading_time
from interop.host import round_up
from interop.plan import Launch
from interop.schedule import FA2Shape, choose_chunk, fa2_shape, plan_fa2
from interop.spec import AttentionSpec

from ..merging import merge_states
from .flashinfer_fa import LN2, Call, load_early, ready
from .flashinfer_fa2 import (
    ALIGN_BYTES,
    MAX_SCRATCH_BYTES,
    NEVER_SPLIT,
    PDL_LEAST_CAPABILITY,
    SPLIT,
    FA2Family,
    balanced_shape,
)
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view
from .reference import ReferenceFamily

__all__ = ["MOST_PACKED_ROWS", "CascadeFamily", "cascade_pays"]

# Query rows of a request times heads of a group, up to which a tile waits for memory and not for
# arithmetic, so that reading less is faster.
MOST_PACKED_ROWS = 64

# Microseconds of a second and a third launch.
EXTRA_LAUNCHES = 12.0

# All query rows are one request to the prefix, and the rows that pad a bucket another.
PREFIX_REQUESTS = 2

FIELDS = (
    "qo_indptr",
    "page_indices",
    "kv_last_page_len",
    "cascade_qo_indptr",
    "cascade_prefix_indptr",
    "cascade_prefix_lens",
    "cascade_prefix_last_page_len",
    "cascade_kv_indptr",
    "cascade_kv_lens",
    "cascade_page_indices",
)
SCHEDULES = ("cascade_prefix_schedule", "cascade_schedule")

_FA2, _REFERENCE = FA2Family(), ReferenceFamily()


class CascadeFamily:
    """Two levels: the prefix that all requests share, and what each has for itself."""

    name = "cascade"
    recordable = True

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        return (*FIELDS, *SCHEDULES) if launch.constants else FIELDS

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("page_indices", "cascade_page_indices")

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if work.source != "pages" or work.role != "all":
            return "it reads the pages of all requests of a batch at once"
        if work.spec.sliding_window is not None:
            return "a sliding window leaves the shared prefix behind"
        if work.device.kind == "cpu":
            return None
        if (reason := _FA2.refuse(work)) is not None:
            return reason
        size = max(shape.scratch_bytes for shape in _shapes(work, SPLIT))
        if size >= MAX_SCRATCH_BYTES:
            return f"partial results take {size} bytes, not fewer than {MAX_SCRATCH_BYTES}"
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: whether and how finely the rest is split, as of FA2."""
        if work.device.kind == "cpu":
            return Decision()
        _, rest = _shapes(work, SPLIT)
        choice = choose_chunk(rest, lengths.query_lens, _rest_of(lengths))
        return Decision(SPLIT if choice.split else NEVER_SPLIT, choice.pages)

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        sizes = {
            "cascade_qo_indptr": PREFIX_REQUESTS + 1,
            "cascade_prefix_indptr": PREFIX_REQUESTS + 1,
            "cascade_prefix_lens": PREFIX_REQUESTS,
            "cascade_prefix_last_page_len": PREFIX_REQUESTS,
            "cascade_kv_indptr": work.num_requests + 1,
            "cascade_kv_lens": work.num_requests,
            "cascade_page_indices": max(work.bucket.num_pages, 1),
        }
        launch = Launch(self.name, work.source, work.spec, work.cache)
        if work.device.kind == "cpu":
            return launch, sizes
        prefix, rest = _shapes(work, variant)
        launch = replace(
            launch,
            constants=(
                work.num_requests,
                work.bucket.num_tokens,
                work.device.num_sms,
                prefix.cta_tile_q,
                prefix.capacity,
                rest.cta_tile_q,
                rest.capacity,
                int(rest.split),
                int(work.device.capability >= PDL_LEAST_CAPABILITY),
            ),
        )
        launch = replace(launch, scratch_bytes=_places(launch, work.query_dtype).total)
        load_early("fa2", launch, pages=True)
        _load_rest_early(work.spec, work.query_dtype, bool(work.cache and work.cache.quantized))
        schedules = zip(SCHEDULES, (prefix, rest), strict=True)
        return launch, sizes | {name: shape.schedule_words for name, shape in schedules}

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; reads the field ``page_indices``, which is written before."""
        assert work.cache is not None
        shared, page_size = lengths.shared_units, work.cache.page_size
        own_rows = _own_rows(work, lengths)
        tokens, rows = int(own_rows.sum()), work.bucket.num_tokens
        fields["cascade_qo_indptr"][:] = 0, tokens, rows
        # The first pages of the first request that has query rows are those of all.
        first = int(lengths.kv_indptr[(own_rows > 0).argmax()])
        fields["cascade_prefix_indptr"][:] = first, first + shared, first + shared
        fields["cascade_prefix_lens"][:] = shared * page_size, 0
        fields["cascade_prefix_last_page_len"][:] = page_size if shared else 0, 0
        rest = _rest_of(lengths)
        indptr = fields["cascade_kv_indptr"]
        indptr[0] = 0
        np.add.accumulate(rest, out=indptr[1:])
        kept = lengths.kv_lens - np.int32(shared * page_size)
        fields["cascade_kv_lens"][:] = np.where(rest > 0, kept, 0)
        # Each entry's place in the table of whole requests is so much further on.
        ahead = lengths.kv_indptr[1:] - rest - indptr[:-1]
        count = int(indptr[-1])
        places = np.arange(count, dtype=np.int32) + ahead.repeat(rest)
        indices = fields["cascade_page_indices"]
        indices[:count] = fields["page_indices"][places]
        indices[count:] = 0
        if launch.constants:
            prefix, own = _shapes(work, decision.variant)
            plan_fa2(
                prefix,
                [tokens, rows - tokens],
                [shared, 0],
                out=fields["cascade_prefix_schedule"],
            )
            plan_fa2(
                own,
                lengths.query_lens,
                rest,
                kv_chunk_pages=decision.detail,
                out=fields["cascade_schedule"],
            )

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        if not launch.constants:
            _run_by_reference(launch, operands)
            return
        from ..triton_merging import merge_into

        query, out = operands.query, torch_view(operands.out)
        prefix, rest = _ready_cascade(launch)
        dtype = str(out.dtype).removeprefix("torch.")
        places, scratch = _places(launch, dtype), torch_view(operands.scratch)
        if launch.cache is not None and launch.cache.quantized:
            query = _scaled_query(operands, scratch[places.query :])
        shared_out = scratch[places.out :][: out.nbytes].view(out.dtype).view(out.shape)
        lses = scratch[places.lse : places.total].view(torch.float32).view(3, *out.shape[:2])
        metadata = operands.metadata
        prefix.function(
            scratch,
            metadata["cascade_prefix_schedule"],
            prefix.plan_info,
            query,
            operands.key,
            operands.value,
            metadata["cascade_qo_indptr"],
            metadata["cascade_prefix_indptr"],
            metadata["page_indices"],
            metadata["cascade_prefix_last_page_len"],
            shared_out,
            lses[0],
            *prefix.options,
        )
        rest.function(
            scratch,
            metadata["cascade_schedule"],
            rest.plan_info,
            query,
            operands.key,
            operands.value,
            metadata["qo_indptr"],
            metadata["cascade_kv_indptr"],
            metadata["cascade_page_indices"],
            metadata["kv_last_page_len"],
            operands.out,
            lses[1],
            *rest.options,
        )
        lse = lses[2] if operands.lse is None else torch_view(operands.lse)
        merge_into(shared_out, lses[0], out, lses[1], out, lse, LN2)
        if launch.cache is not None and launch.cache.quantized:
            from ..triton_ops import scale_output

            scale_output(out, *_scales_of(operands))


def cascade_pays(work: Work, query_lens: IntArray, shared_pages: int) -> bool:
    """Whether reading shared pages once saves more time than the extra launches take.

    Parameters
    ----------
    work
        What a bucket asks for.
    query_lens
        ``[num_requests]``, without padding.
    shared_pages
        Pages that all requests with query rows begin with, see `RaggedBatch.shared_pages`.

    Times are those of `interop.chunking.reading_time`.
    """
    if not shared_pages:
        return False
    prefix, rest = _shapes(work, SPLIT)
    alone = int((-(-query_lens * rest.group_size // rest.cta_tile_q)).sum())
    together = -(-int(query_lens.sum()) * prefix.group_size // prefix.cta_tile_q)
    saved = reading_time(rest, alone * shared_pages)
    return saved - reading_time(prefix, together * shared_pages) > EXTRA_LAUNCHES


class _Places(NamedTuple):
    """Byte offsets in scratch, after the partial results of whichever launch is running."""

    query: int
    out: int
    lse: int
    total: int


@lru_cache(maxsize=4096)
def _places(launch: Launch, dtype: str) -> _Places:
    spec, rows = launch.spec, launch.constants[1]
    item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    partials = max(shape.scratch_bytes for shape in _shapes_of(launch))
    query = out = round_up(partials, ALIGN_BYTES)
    if launch.cache is not None and launch.cache.quantized:
        out += round_up(item * rows * spec.num_qo_heads * spec.head_dim, ALIGN_BYTES)
    lse = out + round_up(item * rows * spec.num_qo_heads * spec.head_dim_v, ALIGN_BYTES)
    return _Places(query, out, lse, lse + 3 * 4 * rows * spec.num_qo_heads)


@lru_cache(maxsize=4096)
def _shapes(work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
    """Shapes of the schedules over the prefix, and over the rest."""
    spec, bucket = work.spec, work.bucket
    assert work.cache is not None
    prefix = fa2_shape(
        num_requests=PREFIX_REQUESTS,
        num_rows=bucket.num_tokens,
        max_query_len=bucket.num_tokens,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=work.cache.page_size,
        num_sms=work.device.num_sms,
        split=True,
    )
    return prefix, balanced_shape(work, variant == SPLIT)


@lru_cache(maxsize=4096)
def _shapes_of(launch: Launch) -> tuple[FA2Shape, FA2Shape]:
    """Shapes as `_shapes` has them, from what the launch says."""
    requests, rows, num_sms, prefix_tile, prefix_capacity, tile, capacity, split, _ = (
        launch.constants
    )
    assert launch.cache is not None
    spec = launch.spec
    prefix = FA2Shape(
        num_requests=PREFIX_REQUESTS,
        num_rows=rows,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=launch.cache.page_size,
        num_sms=num_sms,
        cta_tile_q=prefix_tile,
        capacity=prefix_capacity,
    )
    rest = replace(
        prefix, num_requests=requests, cta_tile_q=tile, capacity=capacity, split=bool(split)
    )
    return prefix, rest


@lru_cache(maxsize=4096)
def _ready_cascade(launch: Launch) -> tuple[Call, Call]:
    """Both launches of FA2; no token of this step is in the prefix, so it needs no mask."""
    pdl = bool(launch.constants[-1])
    unmasked = replace(launch, spec=replace(launch.spec, causal=False))
    prefix, rest = (
        ready("fa2", each, shape.plan_info, pages=True, pdl=pdl)
        for each, shape in zip((unmasked, launch), _shapes_of(launch), strict=True)
    )
    return prefix, rest


def _own_rows(work: Work, lengths: Lengths) -> IntArray:
    """Query rows of each request, without the one that is padding."""
    padded = work.num_requests > work.bucket.num_requests
    return lengths.query_lens[:-1] if padded else lengths.query_lens


def _rest_of(lengths: Lengths) -> IntArray:
    """Pages of each request after the shared ones; 0 for those without query rows."""
    rest = lengths.kv_units - np.int32(lengths.shared_units)
    return np.where((lengths.query_lens > 0) & (lengths.kv_units > 0), rest, 0).astype(np.int32)


def _scales_of(operands: Operands) -> tuple[Tensor, Tensor]:
    return torch_view(operands.scale_table), torch_view(operands.scale_layer)


def _scaled_query(operands: Operands, scratch: Tensor) -> Tensor:
    """Multiply the query by the keys' scale, in scratch."""
    from ..triton_ops import scale_query

    query = torch_view(operands.query)
    scaled = scratch[: query.nbytes].view(query.dtype).view(query.shape)
    scale_query(query, scaled, *_scales_of(operands))
    return scaled


@cache
def _load_rest_early(spec: AttentionSpec, dtype: str, quantized: bool) -> None:
    """Compile what Triton runs while a plan is made, not inside a graph's recording."""
    if not torch.cuda.is_available():
        return
    from ..triton_merging import merge_into
    from ..triton_ops import warm_scale

    kind = getattr(torch, dtype)
    out = torch.zeros((1, spec.num_qo_heads, spec.head_dim_v), dtype=kind, device="cuda")
    lses = torch.zeros((3, 1, spec.num_qo_heads), device="cuda")
    merge_into(out, lses[0], out, lses[1], out, lses[2], LN2)
    if quantized:
        rows = torch.empty((1, spec.num_qo_heads, spec.head_dim), dtype=kind, device="cuda")
        warm_scale(rows, rows, spec.num_kv_heads)


def _run_by_reference(launch: Launch, operands: Operands) -> None:
    operands, fields = operands.as_torch(), operands.metadata
    shared = operands._replace(
        out=torch.empty_like(operands.out),
        lse=torch.empty(operands.out.shape[:2], device=operands.out.device),
        metadata={
            "qo_indptr": fields["cascade_qo_indptr"],
            "kv_indptr": fields["cascade_prefix_indptr"],
            "kv_lens": fields["cascade_prefix_lens"],
            "page_indices": fields["page_indices"],
        },
    )
    own = shared._replace(
        out=torch.empty_like(operands.out),
        lse=torch.empty_like(shared.lse),
        metadata={
            "qo_indptr": fields["qo_indptr"],
            "kv_indptr": fields["cascade_kv_indptr"],
            "kv_lens": fields["cascade_kv_lens"],
            "page_indices": fields["cascade_page_indices"],
        },
    )
    reference = replace(launch, family=_REFERENCE.name)
    _REFERENCE.run(replace(reference, spec=replace(launch.spec, causal=False)), shared)
    _REFERENCE.run(reference, own)
    out, lse = merge_states(shared.out, shared.lse, own.out, own.lse)
    operands.out.copy_(out)
    if operands.lse is not None:
        operands.lse.copy_(lse)
