"""Triton kernels that plan: `interop.device_metadata` for PyTorch on a GPU, in four launches.

Import this module only where Triton is installed: it comes with the ``cuda`` extra. All sizes are
arguments, not constants, so that the kernels are compiled once for all buckets.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from interop.chunking import MIN_CHUNK_TOKENS
from interop.device_metadata import DeviceShape
from interop.device_schedule import CUTS, Estimate
from interop.device_status import PlanStatus
from interop.fa2_shape import BLOCKS_PER_SM, FA2Shape
from interop.host import INT32_MAX

from .triton_chunking import cut, seen_pages

__all__ = ["scratch_words", "warm", "write_metadata"]

# Elements that a program works on at a time: entries of a page table, words of metadata, requests,
# and requests for each way of cutting them.
ENTRIES, WORDS, REQUESTS, CUT_REQUESTS = 1024, 256, 256, 32

# `interop.device_status.PlanStatus`, as kernels take numbers of a module.
OK = tl.constexpr(int(PlanStatus.OK))
QUERY_ORDER = tl.constexpr(int(PlanStatus.QUERY_ORDER))
TOO_MANY_TOKENS = tl.constexpr(int(PlanStatus.TOO_MANY_TOKENS))
QUERY_TOO_LONG = tl.constexpr(int(PlanStatus.QUERY_TOO_LONG))
KV_TOO_SHORT = tl.constexpr(int(PlanStatus.KV_TOO_SHORT))
TABLE_TOO_NARROW = tl.constexpr(int(PlanStatus.TABLE_TOO_NARROW))
TOO_MANY_PAGES = tl.constexpr(int(PlanStatus.TOO_MANY_PAGES))
PAGE_OUTSIDE_POOL = tl.constexpr(int(PlanStatus.PAGE_OUTSIDE_POOL))


@triton.jit
def _alone(kv_len, begin, end, num_tokens, max_query_len, num_pages, page_size, width):
    """Status of requests by their own numbers, and pages that their tokens fill."""
    length = tl.maximum(kv_len, 0)
    pages = length // page_size
    pages += (length > pages * page_size).to(tl.int32)
    query_len = end - begin
    # The last one that holds counts.
    code = tl.where(pages > num_pages, TOO_MANY_PAGES, OK)
    code = tl.where(pages > width, TABLE_TOO_NARROW, code)
    code = tl.where((kv_len < query_len) | (kv_len < 0), KV_TOO_SHORT, code)
    code = tl.where(query_len > max_query_len, QUERY_TOO_LONG, code)
    code = tl.where(end > num_tokens, TOO_MANY_TOKENS, code)
    code = tl.where((begin < 0) | (end < begin), QUERY_ORDER, code)
    return code, pages


@triton.jit(
    do_not_specialize=(
        "count", "width", "stride", "rows", "num_tokens", "max_query_len", "num_pages",
        "page_size", "pool_pages",
    ),
    do_not_specialize_on_alignment=(
        "kv_lens", "cu_q_lens", "page_table", "qo_indptr", "status",
    ),
)  # fmt: skip
def _judge(
    kv_lens, cu_q_lens, page_table, qo_indptr, status,
    count, width, stride, rows, num_tokens, max_query_len, num_pages, page_size, pool_pages,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``i`` writes where rows of request ``i`` end, and what is known of its status."""
    i = tl.program_id(0)
    # The largest offset before this request and after it.
    before, after = 0, 0
    for start in range(0, tl.minimum(i + 2, count + 1), BLOCK):
        j = start + tl.arange(0, BLOCK)
        offset = tl.load(cu_q_lens + j, mask=(j <= i + 1) & (j <= count), other=0)
        after = tl.maximum(after, tl.max(offset, axis=0))
        before = tl.maximum(before, tl.max(tl.where(j <= i, offset, 0), axis=0))
    if i == 0:
        before = 0
        tl.store(qo_indptr, 0)
    end = tl.where(i == rows - 1, num_tokens, tl.minimum(after, num_tokens))
    tl.store(qo_indptr + i + 1, end)
    if i < count:
        begin, end = tl.load(cu_q_lens + i), tl.load(cu_q_lens + i + 1)
        code, pages = _alone(
            tl.load(kv_lens + i), begin, end, num_tokens, max_query_len, num_pages, page_size, width
        )
        row = page_table + i.to(tl.int64) * stride
        largest = tl.zeros([BLOCK], tl.uint32)
        for start in range(0, tl.where(code == OK, pages, 0), BLOCK):
            j = start + tl.arange(0, BLOCK)
            page = tl.load(row + j, mask=j < pages, other=0)
            # Read without a sign, negative numbers of pages are beyond any pool.
            largest = tl.maximum(largest, page.to(tl.uint32, bitcast=True))
        lost = tl.max(largest, axis=0) >= pool_pages.to(tl.uint32)
        code = tl.where((code == OK) & lost, PAGE_OUTSIDE_POOL, code)
        code = tl.where((begin != before) | (end != after), QUERY_ORDER, code)
        tl.store(status + i, code)


@triton.jit(
    do_not_specialize=(
        "count", "width", "rows", "num_tokens", "max_query_len", "num_pages", "page_size",
    ),
    do_not_specialize_on_alignment=(
        "kv_lens", "cu_q_lens", "status", "kv_indptr", "kept_lens", "last_page_len",
    ),
)  # fmt: skip
def _count(
    kv_lens, cu_q_lens, status, kv_indptr, kept_lens, last_page_len,
    count, width, rows, num_tokens, max_query_len, num_pages, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Hand out pages in order, and write lengths of the requests that are kept; one program."""
    wanted_before, kept_before = 0, 0
    tl.store(kv_indptr, 0)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        kv_len = tl.load(kv_lens + i, mask=inside, other=0)
        begin = tl.load(cu_q_lens + i, mask=inside, other=0)
        end = tl.load(cu_q_lens + 1 + i, mask=inside, other=0)
        code, pages = _alone(
            kv_len, begin, end, num_tokens, max_query_len, num_pages, page_size, width
        )
        wanted = tl.where(code == OK, pages, 0)
        late = (wanted > 0) & (wanted_before + tl.cumsum(wanted, axis=0) > num_pages)
        code = tl.load(status + i, mask=inside, other=OK)
        code = tl.where(late & (code != QUERY_ORDER), TOO_MANY_PAGES, code)
        tl.store(status + i, code, mask=inside)
        kept = tl.where(code == OK, pages, 0)
        length = tl.where(code == OK, kv_len, 0)
        tl.store(kv_indptr + 1 + i, kept_before + tl.cumsum(kept, axis=0), mask=i < rows)
        tl.store(kept_lens + i, length, mask=i < rows)
        last = tl.where(kept > 0, length - (kept - 1) * page_size, 0)
        tl.store(last_page_len + i, last, mask=i < rows)
        wanted_before += tl.sum(wanted, axis=0)
        kept_before += tl.sum(kept, axis=0)


@triton.jit
def _owners(ends, count, position, STEPS: tl.constexpr):
    """How many of the rising `ends` are at or before each position, bit after bit."""
    found = tl.zeros_like(position)
    for step in tl.static_range(STEPS):
        last = found + ((1 << (STEPS - 1 - step)) - 1)
        end = tl.load(ends + last, mask=last < count, other=2147483647)
        found = tl.where(end <= position, last + 1, found)
    return found


@triton.jit(
    do_not_specialize=(
        "stride", "rows", "num_tokens", "num_pages", "page_size", "seen", "capacity",
        "qo_tile_at", "kv_tile_at", "o_indptr_at", "chunk_at", "merge_at", "mask_at",
    ),
    do_not_specialize_on_alignment=(
        "page_table", "qo_indptr", "kv_indptr", "kept_lens", "slot_mapping", "page_indices",
        "schedule", "item_ends",
    ),
)  # fmt: skip
def _fill(
    page_table, qo_indptr, kv_indptr, kept_lens, slot_mapping, page_indices, schedule, item_ends,
    stride, rows, num_tokens, num_pages, page_size, seen, capacity,
    qo_tile_at, kv_tile_at, o_indptr_at, chunk_at, merge_at, mask_at,
    SPLIT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``b`` writes words ``b * BLOCK`` on of every field that has so many."""
    start = tl.program_id(0) * BLOCK
    x = start + tl.arange(0, BLOCK)
    # A field without an entry or a row has one word nonetheless.
    entries = tl.maximum(num_pages, 1)
    if start < entries:
        row = tl.minimum(_owners(kv_indptr + 1, rows, x, STEPS), rows - 1)
        used = x < tl.load(kv_indptr + rows)
        entry = x - tl.load(kv_indptr + row)
        page = tl.load(page_table + row.to(tl.int64) * stride + entry, mask=used, other=0)
        tl.store(page_indices + x, page, mask=x < entries)
    if start <= num_tokens:
        row = tl.minimum(_owners(qo_indptr + 1, rows, x, STEPS), rows - 1)
        # Before the start where nothing is written: a request that is left out has no keys.
        position = x - tl.load(qo_indptr + 1 + row) + tl.load(kept_lens + row)
        written = (position >= 0) & (x < num_tokens)
        position = tl.where(written, position, 0)
        column = position // page_size
        page = tl.load(page_table + row.to(tl.int64) * stride + column, mask=written, other=0)
        slot = page * page_size + position - column * page_size
        slot = tl.where(written, slot, -1)
        tl.store(slot_mapping + x, slot, mask=x < tl.maximum(num_tokens, 1))
        if SPLIT:
            chunk = tl.load(schedule + chunk_at) // page_size
            chunks = (seen_pages(kv_indptr, row, row < rows, seen) + (chunk - 1)) // chunk
            parts = schedule + o_indptr_at + row
            before = tl.load(parts) + (x - tl.load(qo_indptr + row)) * chunks
            # Rows past those that get tiles have no parts.
            before = tl.minimum(before, tl.load(parts + 1))
            tl.store(schedule + merge_at + x, before, mask=x <= num_tokens)
    if start < capacity:
        num_items = tl.load(item_ends + rows - 1)
        row = tl.minimum(_owners(item_ends, rows, x, STEPS), rows - 1)
        local = x - tl.load(item_ends + row - 1, mask=row > 0, other=0)
        used, inside = x < num_items, x < capacity
        tl.store(schedule + x, tl.where(used, row, 0), mask=inside)
        if SPLIT:
            chunk = tl.load(schedule + chunk_at) // page_size
            chunks = (seen_pages(kv_indptr, row, row < rows, seen) + (chunk - 1)) // chunk
            qo_tile = local // chunks
            kv_tile = local - qo_tile * chunks
        else:
            qo_tile, kv_tile = local, tl.zeros_like(local)
        tl.store(schedule + qo_tile_at + x, tl.where(used, qo_tile, 0), mask=inside)
        tl.store(schedule + kv_tile_at + x, tl.where(used, kv_tile, 0), mask=inside)
        # Four flags a word, the first in the lowest byte.
        set_flags = tl.minimum(tl.maximum(num_items - 4 * x, 0), 4)
        flags = tl.where(set_flags > 0, 1, 0) + tl.where(set_flags > 1, 1 << 8, 0)
        flags += tl.where(set_flags > 2, 1 << 16, 0) + tl.where(set_flags > 3, 1 << 24, 0)
        tl.store(schedule + mask_at + x, flags, mask=4 * x < capacity)


@lru_cache(maxsize=1024)
def _constants(shape: FA2Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Candidates, and estimates in 64 bits, which arguments of a kernel do not have."""
    cuts = torch.from_numpy(CUTS).to(device)
    return cuts, torch.tensor(Estimate.of(shape), dtype=torch.float64, device=device)


def scratch_words(shape: DeviceShape) -> int:
    """Words of memory that `write_metadata` needs while it works."""
    return shape.bucket.num_requests + 1


@lru_cache(maxsize=1024)
def warm(shape: DeviceShape, device: torch.device) -> None:
    """Compile and load for these sizes, so that a recorded call does not have to."""

    def words(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    metadata, scratch = words(shape.layout.words), words(scratch_words(shape))
    write_metadata(shape, words(1), words(2), words(1, 1), metadata, words(1), scratch)


def write_metadata(
    shape: DeviceShape,
    kv_lens: Tensor,
    cu_q_lens: Tensor,
    page_table: Tensor,
    metadata: Tensor,
    status: Tensor,
    scratch: Tensor,
) -> None:
    """Write the metadata of a plan, and the status of each request.

    Parameters
    ----------
    shape
        Static part.
    kv_lens, cu_q_lens, page_table
        ``[n]``, ``[n + 1]`` and ``[n, width]`` int32, the last one with any stride between rows.
    metadata
        ``[shape.layout.words]`` int32. Words between fields are left as they are.
    status
        ``[n]`` int32.
    scratch
        ``[scratch_words(shape)]`` int32; what it holds afterwards means nothing.
    """
    kv_lens, cu_q_lens = kv_lens.contiguous(), cu_q_lens.contiguous()
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    bucket, page_size = shape.bucket, shape.page_size
    count, width = page_table.shape
    rows, width = bucket.num_requests + 1, min(width, INT32_MAX // page_size)
    fields = shape.layout.views(metadata)
    qo_indptr, kv_indptr, kept_lens = (
        fields[name] for name in ("qo_indptr", "kv_indptr", "kv_lens")
    )
    limits = (bucket.num_tokens, bucket.max_query_len, bucket.num_pages, page_size)
    _judge[(rows,)](
        kv_lens, cu_q_lens, page_table, qo_indptr, status,
        count, width, page_table.stride(0), rows, *limits, shape.pool_pages, BLOCK=ENTRIES,
    )  # fmt: skip
    _count[(1,)](
        kv_lens, cu_q_lens, status, kv_indptr, kept_lens, fields["kv_last_page_len"],
        count, width, rows, *limits, BLOCK=REQUESTS,
    )  # fmt: skip
    size = max(bucket.num_pages, bucket.num_tokens + 1)
    schedule = fields.get("fa2_schedule", metadata)
    item_ends, seen, capacity, split = qo_indptr, INT32_MAX, 0, False
    places = (0,) * 6
    if (own := shape.schedule) is not None:
        item_ends = scratch
        if own.window_left >= 0:
            seen = min(-(-(own.window_left + own.cta_tile_q) // page_size), INT32_MAX)
        capacity, split = own.capacity, own.split
        at = own.places
        o_indptr_at, chunk_at = at.o_indptr // 4, at.kv_chunk_size // 4
        places = (
            at.qo_tile_indices // 4, at.kv_tile_indices // 4, o_indptr_at, chunk_at,
            at.merge_indptr // 4, at.block_valid_mask // 4,
        )  # fmt: skip
        cuts, estimate = _constants(own, metadata.device)
        cut[(1,)](
            qo_indptr, kv_indptr, schedule, item_ends, cuts, estimate,
            count, rows, bucket.max_query_len, own.group_size, own.cta_tile_q, page_size, seen,
            capacity, own.num_rows, MIN_CHUNK_TOKENS,
            max(128 // page_size, 1), BLOCKS_PER_SM * own.num_sms // own.num_kv_heads,
            o_indptr_at, chunk_at, at.total_num_rows // 4,
            SPLIT=split, FLASHINFER=shape.flashinfer_chunks, CANDIDATES=len(CUTS),
            BLOCK=CUT_REQUESTS,
            # NumPy rounds products before it adds them, and two candidates may be nearly equal.
            enable_fp_fusion=False,
        )  # fmt: skip
        size = max(size, capacity)
    _fill[(triton.cdiv(size, WORDS),)](
        page_table, qo_indptr, kv_indptr, kept_lens, fields["slot_mapping"],
        fields["page_indices"], schedule, item_ends,
        page_table.stride(0), rows, bucket.num_tokens, bucket.num_pages, page_size, seen, capacity,
        *places,
        SPLIT=split, STEPS=rows.bit_length(), BLOCK=WORDS,
    )  # fmt: skip
