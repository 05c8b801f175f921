"""Attention in two launches of FA2: over the first pages of requests, and over the rest of each.

The two states are merged by their LSE (Ye et al., "FlashInfer", 2025). On the CPU the reference
family computes both, and `merging.merge_states` merges.

A request's pages are one run of ``page_indices``. The kernels take requests, so each is two of them
here, one after the other in the same run: number ``2 i`` has the first pages of request ``i`` and
number ``2 i + 1`` the rest. A launch that is for one kind leaves the other without query rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.host import round_up
from interop.plan import Launch
from interop.schedule import FA2Shape, plan_fa2
from interop.spec import AttentionSpec

from ..merging import merge_states
from ..sinks import scale_rows
from .flashinfer_fa import LN2, Call, load_early, ready
from .flashinfer_fa2 import (
    ALIGN_BYTES,
    MASK_FIELDS,
    PDL_LEAST_CAPABILITY,
    with_masks,
)
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view
from .reference import ReferenceFamily

__all__ = ["Level", "TwoLevelFamily", "interleaved"]

FIRST, SECOND = "first", "second"
# What each level's launch reads of its own: on a GPU, and on the CPU.
ON_GPU = ("qo_indptr", "kv_indptr", "last_page_len", "schedule")
ON_CPU = ("qo_indptr", "kv_indptr", "kv_lens")

_REFERENCE = ReferenceFamily()


class Level(NamedTuple):
    """What one launch is for; all arrays int32, its requests being those of the module's text.

    Parameters
    ----------
    query_lens
        ``[requests]`` query rows.
    pages, kv_lens
        ``[requests]`` pages and tokens of each.
    first_page
        Where in ``page_indices`` the first request's pages begin.
    """

    query_lens: IntArray
    pages: IntArray
    kv_lens: IntArray
    first_page: int = 0

    @property
    def pages_seen(self) -> IntArray:
        """Pages of the requests that have query rows, 0 for the others: what is scheduled."""
        return np.where(self.query_lens > 0, self.pages, np.int32(0))


def interleaved(even: IntArray, odd: IntArray) -> IntArray:
    """Return ``[2 n]``: one entry of each in turn."""
    both = np.empty((even.size, 2), np.int32)
    both[:, 0], both[:, 1] = even, odd
    return both.reshape(-1)


class TwoLevelFamily(ABC):
    """What families of two levels share; see the module's text."""

    name: str
    recordable = True

    @abstractmethod
    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""

    @abstractmethod
    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`."""

    @abstractmethod
    def requests(self, work: Work) -> tuple[int, int]:
        """How many requests the first and the second launch have."""

    @abstractmethod
    def shapes(self, work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
        """Schedules of both launches, with as many requests as `requests` says."""

    @abstractmethod
    def levels(self, work: Work, lengths: Lengths) -> tuple[Level, Level]:
        """Lengths for both launches."""

    @abstractmethod
    def chunks(self, decision: Decision) -> tuple[int | None, int | None]:
        """Pages of a chunk in each launch; `None` for the best by estimate."""

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        kinds = ON_GPU if launch.constants else ON_CPU
        levels = tuple(f"{level}_{kind}" for level in (FIRST, SECOND) for kind in kinds)
        masks: tuple[str, ...] = ()
        if launch.draft_masks:
            masks = MASK_FIELDS if launch.constants else ("draft_masks",)
        return ("page_indices", *levels, *masks)

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("page_indices",)

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        sizes: dict[str, int] = {}
        for level, count in zip((FIRST, SECOND), self.requests(work), strict=True):
            sizes |= {f"{level}_qo_indptr": count + 1, f"{level}_kv_indptr": count + 1}
            sizes |= {f"{level}_last_page_len": count, f"{level}_kv_lens": count}
        launch = Launch(
            self.name, work.source, work.spec, work.cache, draft_masks=work.bucket.draft_masks
        )
        if work.device.kind == "cpu":
            return launch, sizes
        shapes = self.shapes(work, variant)
        numbers = [
            (shape.num_requests, shape.cta_tile_q, shape.capacity, int(shape.split))
            for shape in shapes
        ]
        pdl = int(work.device.capability >= PDL_LEAST_CAPABILITY)
        rows, num_sms = work.bucket.num_tokens, work.device.num_sms
        launch = replace(launch, constants=(rows, num_sms, pdl, *numbers[0], *numbers[1]))
        launch = replace(launch, scratch_bytes=_places(launch, work.query_dtype).total)
        load_early("fa2", launch, pages=True)
        _load_merging_early(
            work.spec, work.query_dtype, work.cache is not None and work.cache.quantized
        )
        for level, shape in zip((FIRST, SECOND), shapes, strict=True):
            sizes[f"{level}_schedule"] = shape.schedule_words
        return launch, sizes

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`."""
        assert work.cache is not None
        page_size = np.int32(work.cache.page_size)
        chunks = (None, None) if not launch.constants else self.chunks(decision)
        shapes = self.shapes(work, decision.variant) if launch.constants else (None, None)
        both = zip((FIRST, SECOND), self.levels(work, lengths), shapes, chunks, strict=True)
        for name, level, shape, chunk in both:
            _running_sum(level.query_lens, fields[f"{name}_qo_indptr"])
            _running_sum(level.pages, fields[f"{name}_kv_indptr"], level.first_page)
            fields[f"{name}_kv_lens"][:] = level.kv_lens
            last = level.kv_lens - (level.pages - 1) * page_size
            fields[f"{name}_last_page_len"][:] = np.where(level.pages > 0, last, 0)
            if shape is not None:
                plan_fa2(
                    shape,
                    level.query_lens,
                    level.pages_seen,
                    kv_chunk_pages=chunk,
                    out=fields[f"{name}_schedule"],
                )

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        if not launch.constants:
            _run_by_reference(launch, operands)
            return
        from ..triton_merging import merge_into

        query, out, metadata = operands.query, torch_view(operands.out), operands.metadata
        dtype = str(out.dtype).removeprefix("torch.")
        places, scratch = _places(launch, dtype), torch_view(operands.scratch)
        if _is_scaled(launch):
            query = _scaled_query(operands, scratch[places.query :])
        first_out = scratch[places.out :][: out.nbytes].view(out.dtype).view(out.shape)
        lses = scratch[places.lse : places.total].view(torch.float32).view(3, *out.shape[:2])
        calls = _ready_levels(launch)
        results = ((first_out, lses[0]), (operands.out, lses[1]))
        for name, call, (result, lse) in zip((FIRST, SECOND), calls, results, strict=True):
            options = call.options
            if name == SECOND and launch.draft_masks:
                options = with_masks(options, metadata)
            call.function(
                scratch,
                metadata[f"{name}_schedule"],
                call.plan_info,
                query,
                operands.key,
                operands.value,
                metadata[f"{name}_qo_indptr"],
                metadata[f"{name}_kv_indptr"],
                metadata["page_indices"],
                metadata[f"{name}_last_page_len"],
                result,
                lse,
                *options,
            )
        lse = lses[2] if operands.lse is None else torch_view(operands.lse)
        merge_into(first_out, lses[0], out, lses[1], out, lse, LN2)
        if _is_scaled(launch):
            from ..triton_ops import scale_output

            scale_output(out, *_scales_of(operands))
        if operands.sinks is not None:
            scale_rows(out, lse, torch_view(operands.sinks), 1.0)


class _Places(NamedTuple):
    """Byte offsets in scratch, after the partial results of whichever launch is running."""

    query: int
    out: int
    lse: int
    total: int


@lru_cache(maxsize=4096)
def _places(launch: Launch, dtype: str) -> _Places:
    spec, rows = launch.spec, launch.constants[0]
    item = getattr(torch, dtype).itemsize
    partials = max(shape.scratch_bytes for shape in _shapes_of(launch))
    query = out = round_up(partials, ALIGN_BYTES)
    if _is_scaled(launch):
        out += round_up(item * rows * spec.num_qo_heads * spec.head_dim, ALIGN_BYTES)
    lse = out + round_up(item * rows * spec.num_qo_heads * spec.head_dim_v, ALIGN_BYTES)
    return _Places(query, out, lse, lse + 3 * 4 * rows * spec.num_qo_heads)


@lru_cache(maxsize=4096)
def _shapes_of(launch: Launch) -> tuple[FA2Shape, FA2Shape]:
    """Shapes of both schedules, from what the launch says of them."""
    rows, num_sms, _, *numbers = launch.constants
    spec, cache = launch.spec, launch.cache
    assert cache is not None
    first, second = (
        FA2Shape(
            num_requests=requests,
            num_rows=rows,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_v=spec.head_dim_v,
            page_size=cache.page_size,
            num_sms=num_sms,
            cta_tile_q=tile,
            capacity=capacity,
            split=bool(split),
        )
        for requests, tile, capacity, split in (numbers[:4], numbers[4:])
    )
    return first, second


@lru_cache(maxsize=4096)
def _ready_levels(launch: Launch) -> tuple[Call, Call]:
    """Both calls; no token of this step is in the first pages, so these need no mask."""
    first = replace(launch, spec=replace(launch.spec, causal=False), draft_masks=False)
    pdl = bool(launch.constants[2])
    shapes = _shapes_of(launch)
    return (
        ready("fa2", first, shapes[0].plan_info, pages=True, pdl=pdl),
        ready("fa2", launch, shapes[1].plan_info, pages=True, pdl=pdl),
    )


def _is_scaled(launch: Launch) -> bool:
    return launch.cache is not None and launch.cache.quantized


def _running_sum(lengths: IntArray, out: IntArray, start: int = 0) -> None:
    out[0] = start
    np.add.accumulate(lengths, out=out[1:])
    out[1:] += np.int32(start)


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
def _load_merging_early(spec: AttentionSpec, dtype: str, quantized: bool) -> None:
    """Compile what Triton runs while a plan is made, not inside a graph's recording."""
    if not torch.cuda.is_available():
        return
    from ..triton_merging import merge_into
    from ..triton_ops import warm_scale

    kind = getattr(torch, dtype)
    out = torch.zeros((1, spec.num_qo_heads, spec.head_dim_v), dtype=kind, device="cuda")
    lses = torch.zeros((3, 1, spec.num_qo_heads), device="cuda")
    merge_into(out, lses[0], out, lses[1], out, lses[2], LN2)
    if spec.sinks:
        scale_rows(out, lses[2], lses[0, 0], 1.0)
    if quantized:
        rows = torch.empty((1, spec.num_qo_heads, spec.head_dim), dtype=kind, device="cuda")
        warm_scale(rows, rows, spec.num_kv_heads)


def _run_by_reference(launch: Launch, operands: Operands) -> None:
    operands = operands.as_torch()
    whole = replace(launch, family=_REFERENCE.name, spec=replace(launch.spec, sinks=False))
    first = replace(whole, spec=replace(whole.spec, causal=False), draft_masks=False)
    states = []
    for name, each in ((FIRST, first), (SECOND, whole)):
        metadata = {kind: operands.metadata[f"{name}_{kind}"] for kind in ON_CPU}
        metadata["page_indices"] = operands.metadata["page_indices"]
        if each.draft_masks:
            metadata["draft_masks"] = operands.metadata["draft_masks"]
        out = torch.empty_like(operands.out)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        _REFERENCE.run(each, operands._replace(metadata=metadata, out=out, lse=lse, sinks=None))
        states += [out, lse]
    out, lse = merge_states(*states)
    if operands.lse is not None:
        operands.lse.copy_(lse)
    if operands.sinks is not None:
        scale_rows(out, lse, operands.sinks, 1.0)
    operands.out.copy_(out)
