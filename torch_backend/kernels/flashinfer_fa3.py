"""FlashInfer's FA3 kernels on this library's schedules: prefill on compute capability 9.0.

Their tiles are 128 rows of one query head, of which a short query would waste most. A plan's
integers are static for a bucket, so they travel as constants of the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.plan import ALIGN_WORDS, Launch
from interop.schedule_fa3 import FA3Shape, plan_fa3
from interop.spec import CacheSpec

from ..writing import token_major
from .flashinfer_fa import (
    Call,
    finish,
    load_early,
    ready,
    refuse_any,
)
from .flashinfer_refusals import needs_capability
from .page_copies import write_valid_tokens
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view

__all__ = ["FA3Family"]

FA3_CAPABILITY = (9, 0)

# Below so many query rows for each request on average FA3's tiles of 128 rows of one head stay so
# empty that FA2 is faster: it packs a group of heads into a tile, and FA3 has about 1.5 times its
# speed on full tiles only (542 against 354 TFLOP/s).
FA3_LEAST_MEAN_QUERY_LEN = 128


# The kernel reads rows that follow one another faster than pages (653 against 540 TFLOP/s at
# 1 x 16384), so pages are first copied into rows where a request has so many query rows that this
# pays for the copy, and where the copy is not too large to be scratch. Pages of 8 bits, which it
# does not read at all, are always copied.
COPY_LEAST_QUERY_LEN = 1024
COPY_MOST_BYTES = 256 << 20

# No tile of keys is larger, at any width of a head.
MOST_TILE_KEYS = 256


class FA3Family:
    """FlashInfer's FA3 kernels on the schedule of `interop.schedule_fa3`."""

    name = "fa3"
    recordable = True

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        if launch.source == "pages":
            return ("page_indices", "fa3_schedule")
        return ("fa3_own_schedule",)

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("page_indices",) if launch.source == "pages" else ()

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_any(work)) is not None:
            return reason
        if work.device.capability != FA3_CAPABILITY:
            return needs_capability(work, "9.0")
        if work.source == "tokens" and _value_rows(work) == 0:
            return "there are no rows of key and value for its copy engine to point at"
        if _is_quantized(work) and not _copy_fits(work):
            return (
                "it reads 8-bit pages as copies in 16 bits, and those of the bucket's pages have "
                f"{_bytes_of_pages(work)} bytes, not 1 to {COPY_MOST_BYTES}"
            )
        mean = _query_rows(work)
        if mean < FA3_LEAST_MEAN_QUERY_LEN and not work.any_speed:
            return (
                f"the bucket has {mean:.3g} query rows a request, and below "
                f"{FA3_LEAST_MEAN_QUERY_LEN} its tiles of 128 rows stay too empty to be fast"
            )
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: there is one way."""
        return Decision()

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        shape = _fa3_shape(work)
        words, extra, scratch = _schedule_words(shape), 0, 0
        if work.source == "tokens" and work.num_requests > work.bucket.num_requests:
            extra = 4 * words
            words += -(-_value_rows(work) // 4)
            element = torch.finfo(getattr(torch, work.query_dtype)).bits // 8
            scratch = _value_rows(work) * work.spec.num_kv_heads * work.spec.head_dim_v * element
        elif _copies_pages(work):
            extra = 4 * words
            words += work.bucket.num_pages
            scratch = _bytes_of_pages(work)
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=(*shape.plan_info, extra),
            scratch_bytes=scratch,
        )
        copies = work.source == "pages" and scratch > 0
        load_early("fa3", launch, pages=work.source == "pages" and not copies)
        if copies:
            assert work.cache is not None
            _load_copy_early(work.cache, work.query_dtype)
        field = "fa3_schedule" if work.source == "pages" else "fa3_own_schedule"
        return launch, {field: words}

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`."""
        shape = _fa3_shape(work)
        field = fields["fa3_schedule" if work.source == "pages" else "fa3_own_schedule"]
        schedule, rest = field[: shape.schedule_words], field[_schedule_words(shape) :]
        starts = lengths.kv_indptr[lengths.first : -1]
        if rest.size and work.source == "pages":
            assert work.cache is not None
            # The kernel reads the copied rows, where a page is as many as it has tokens.
            starts = starts * work.cache.page_size
            _write_valid_tokens(rest, lengths, work.cache.page_size)
        elif rest.size:
            padding = rest.view(np.uint8)
            padding[: lengths.kv_indptr[-1]] = 0
            padding[lengths.kv_indptr[-1] :] = 1
        plan_fa3(
            shape,
            lengths.qo_indptr[lengths.first :],
            starts,
            lengths.kv_lens[lengths.first :],
            out=schedule,
        )

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        call, extra = _ready_fa3(launch), launch.constants[-1]
        key, value = operands.key, operands.value
        if launch.source == "pages":
            schedule = operands.metadata["fa3_schedule"]
            if not extra:
                _attend_pages(call, operands, schedule)
                return
            key, value = _copied_pages(launch, operands, schedule, extra)
        else:
            schedule = operands.metadata["fa3_own_schedule"]
            if extra:
                value = _without_padding(value, operands.scratch, schedule, extra)
        # All offsets and lengths are in the schedule; the kernel looks at no other array for them,
        # so the schedule stands in where the signature has one.
        call.function(
            operands.out,  # no scratch; the kernel asks it for the device
            schedule,
            call.plan_info,
            operands.query,
            key,
            value,
            schedule,
            schedule,
            operands.out,
            operands.lse,
            *call.options,
        )
        finish(operands)


def _attend_pages(call: Call, operands: Operands, schedule: Any) -> None:
    """Let the kernel read the pages where they lie."""
    call.function(
        operands.out,
        schedule,
        call.plan_info,
        operands.query,
        operands.key,
        operands.value,
        schedule,
        schedule,
        operands.metadata["page_indices"],
        schedule,
        operands.out,
        operands.lse,
        *call.options,
    )
    finish(operands)


@lru_cache(maxsize=4096)
def _ready_fa3(launch: Launch) -> Call:
    *plan_info, extra = launch.constants
    pages = launch.source == "pages" and not extra
    return ready("fa3", launch, tuple(plan_info), pages=pages, pdl=False)


@lru_cache(maxsize=4096)
def _fa3_shape(work: Work) -> FA3Shape:
    return FA3Shape(
        num_requests=work.num_requests,
        num_rows=work.bucket.num_tokens,
        num_qo_heads=work.spec.num_qo_heads,
        head_dim_v=work.spec.head_dim_v,
        num_sms=work.device.num_sms,
        causal=work.spec.causal,
        window_left=work.spec.window_left,
    )


def _schedule_words(shape: FA3Shape) -> int:
    """Words of a schedule, up to where what follows it is aligned as other fields are."""
    return -(-shape.schedule_words // ALIGN_WORDS) * ALIGN_WORDS


def _query_rows(work: Work) -> float:
    """Query rows that a request of the bucket has, as far as that is known."""
    if work.role == "prefills":
        # How many of the requests are prefills is not known; how long one may be is.
        return work.bucket.max_query_len
    return work.bucket.num_tokens / max(work.bucket.num_requests, 1)


def _is_quantized(work: Work) -> bool:
    return work.source == "pages" and work.cache is not None and work.cache.quantized


def _bytes_of_pages(work: Work) -> int:
    """Bytes of the keys and values of all pages in use, as rows of the query's type."""
    assert work.cache is not None
    element = torch.finfo(getattr(torch, work.query_dtype)).bits // 8
    width = work.cache.num_kv_heads * (work.cache.head_dim + work.cache.head_dim_v)
    return work.bucket.num_pages * work.cache.page_size * width * element


def _copy_fits(work: Work) -> bool:
    return 0 < _bytes_of_pages(work) <= COPY_MOST_BYTES


def _copies_pages(work: Work) -> bool:
    """Whether pages are copied into rows first: 8-bit ones, and where rows are read faster."""
    if work.source != "pages":
        return False
    return _is_quantized(work) or (_query_rows(work) >= COPY_LEAST_QUERY_LEN and _copy_fits(work))


@cache
def _load_copy_early(spec: CacheSpec, row_dtype: str) -> None:
    if not torch.cuda.is_available():
        return
    from ..triton_ops import warm_gather

    dtype = getattr(torch, spec.dtype)
    shapes = spec.key_shape, spec.value_shape
    pools = [torch.empty((1, *shape[1:]), dtype=dtype, device="cuda") for shape in shapes]
    key_pool, value_pool = (token_major(pool, spec.layout) for pool in pools)
    warm_gather(key_pool, value_pool, getattr(torch, row_dtype))


def _write_valid_tokens(valid: IntArray, lengths: Lengths, page_size: int) -> None:
    """As `page_copies.write_valid_tokens`, for the requests that are this launch's.

    The kernel reads keys in whole tiles, so it reads some rows past the last request: these become
    0, as what is not finite would not be masked.
    """
    write_valid_tokens(valid, lengths, page_size)
    used = int(lengths.kv_indptr[-1])
    valid[used : used - (-MOST_TILE_KEYS // page_size)] = 0
    valid[: lengths.kv_indptr[lengths.first]] = -1


def _copied_pages(
    launch: Launch, operands: Operands, schedule: Any, extra: int
) -> tuple[Tensor, Tensor]:
    """Copy the pages in use into rows that follow one another, in scratch."""
    from ..triton_ops import gather

    cache = launch.cache
    assert cache is not None
    indices = torch_view(operands.metadata["page_indices"])
    valid = torch_view(schedule)[extra // 4 :]
    key_pool = token_major(torch_view(operands.key), cache.layout)
    value_pool = token_major(torch_view(operands.value), cache.layout)
    tokens = indices.shape[0] * cache.page_size
    scratch = torch_view(operands.scratch).view(torch_view(operands.query).dtype)
    split = tokens * cache.num_kv_heads * cache.head_dim
    key = scratch[:split].view(tokens, cache.num_kv_heads, cache.head_dim)
    value = scratch[split : 2 * split].view(tokens, cache.num_kv_heads, cache.head_dim_v)
    scales = {}
    if cache.quantized:
        scales = {
            "scale_table": torch_view(operands.scale_table),
            "scale_layer": torch_view(operands.scale_layer),
        }
    gather(key_pool, value_pool, indices, valid, key, value, **scales)
    return key, value


def _value_rows(work: Work) -> int:
    """Rows of key and value in the call, for attention over these."""
    return work.bucket.num_tokens if work.cache is not None else work.bucket.num_pages


def _without_padding(value: Any, scratch: Any, schedule: Any, padding: int) -> Tensor:
    """Copy `value` with zeros in its padding rows.

    FA3 reads values in whole tiles and multiplies those past a request's end by 0, which makes NaN
    of what is not finite. Between requests the rows are another's values; past the last one they
    may hold anything. The copy takes about 1 % of the time of the attention that it is for.
    """
    rows = torch_view(value)
    copy = torch_view(scratch).view(rows.dtype)[: rows.numel()].view(rows.shape)
    copy.copy_(rows)
    is_padding = torch_view(schedule).view(torch.bool)[padding : padding + rows.shape[0]]
    return copy.masked_fill_(is_padding[:, None, None], 0.0)
