"""The schedule of FlashInfer's FA2 kernel, computed from lengths.

FlashInfer's kernel reads its work from an integer workspace: one work item for each query tile of
each request and each chunk of that request's keys, and running counts that tell where partial
results go. What fixes the places in that workspace (`FA2Shape`) is constant for a bucket of
batches; what is written there (`plan_fa2`) is one int32 array. At FlashInfer's own chunk size and
capacity the two equal its planner's result bit for bit (checked against version 0.7.2.post1).
NumPy only, no loop over requests, tiles or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .batch import INT32, INT32_MAX, host_ints
from .chunking import (
    BLOCKS_PER_SM,
    ChunkChoice,
    Tiling,
    best_chunk,
    check_items,
    choose_chunk,
    flashinfer_chunk_pages,
    tiling_of,
    work_of,
)
from .errors import ArgumentError, ShapeError

__all__ = [
    "ChunkChoice",
    "FA2Shape",
    "choose_chunk",
    "cta_tile_q",
    "fa2_shape",
    "flashinfer_chunk_pages",
    "plan_fa2",
]

IntArray = npt.NDArray[np.int32]

# Work items beyond one for each query tile, counted in fillings of the whole card. Two let a long
# request among short ones be cut finely enough; blocks without work cost time to start and stop.
SPLIT_WAVES = 2
ALIGN = 16


class _Places(NamedTuple):
    """Byte offsets of the schedule's arrays in the integer workspace."""

    request_indices: int
    qo_tile_indices: int
    kv_tile_indices: int
    o_indptr: int
    kv_chunk_size: int
    total_num_rows: int
    merge_indptr: int
    block_valid_mask: int
    end: int


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def cta_tile_q(packed_len: int, head_dim_v: int) -> int:
    """Rows of FlashInfer's query tile for queries of `packed_len` rows times heads of a group.

    Holds for query heads narrower than 512 on cards of compute capability 8.0 and later whose
    shared memory takes the smallest tile (all of 9.0).
    """
    if head_dim_v >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim_v < 256:
        return 128
    return 64 if packed_len > 16 else 16


@dataclass(frozen=True)
class FA2Shape:
    """What is the same for all FA2 schedules of a bucket; hashable and equal by value.

    Parameters
    ----------
    num_requests, num_rows
        Most requests and query rows (summed over requests) of a batch. The output has `num_rows`.
    num_qo_heads, num_kv_heads, head_dim_v
        Heads of query and of key and value, and the width of a value.
    page_size
        Tokens in a page.
    num_sms
        Multiprocessors of the card.
    cta_tile_q
        Rows of a query tile, each of them one query head of one query token.
    capacity
        Most work items; the kernel is launched with this many thread blocks for each KV head.
    split
        Whether a request's keys may be split. Without, the schedule depends on query lengths only.
    window_left
        Keys that a query sees to the left of itself; -1 for all. A window together with `split` is
        for causal attention only: the kernel's chunks end where a causal tile ends.
    """

    num_requests: int
    num_rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_v: int
    page_size: int
    num_sms: int
    cta_tile_q: int
    capacity: int
    split: bool = True
    window_left: int = -1

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @cached_property
    def places(self) -> _Places:
        """Byte offsets in the integer workspace, as FlashInfer's allocator would hand them out."""
        items = _aligned(4 * self.capacity)
        o_indptr = 3 * items
        chunk_size = o_indptr + 4 * (self.num_requests + 1)
        rows = _aligned(chunk_size + 4)
        merge = mask = _aligned(rows + 4)
        if self.split:
            mask = _aligned(merge + 4 * (self.num_rows + 1))
        end = mask + self.capacity
        return _Places(0, items, 2 * items, o_indptr, chunk_size, rows, merge, mask, end)

    @property
    def _scratch(self) -> tuple[int, int]:
        """Bytes of partial outputs (float32, aligned) and of their LSE (float32)."""
        if not self.split:
            return 0, 0
        rows = -(-self.capacity * self.cta_tile_q // self.group_size)
        lse = 4 * self.num_qo_heads * rows
        return _aligned(lse * self.head_dim_v), lse

    @cached_property
    def plan_info(self) -> tuple[int, ...]:
        """The 15 integers that FlashInfer's ``paged_run`` and ``ragged_run`` take as a plan."""
        places = self.places
        return (
            self.capacity,
            self.num_rows,
            places.total_num_rows,
            self.cta_tile_q,
            places.request_indices,
            places.qo_tile_indices,
            places.kv_tile_indices,
            places.merge_indptr if self.split else 0,
            places.o_indptr,
            places.kv_chunk_size,
            0,
            self._scratch[0],
            places.block_valid_mask,
            1,
            int(self.split),
        )

    @property
    def schedule_words(self) -> int:
        """Length of the schedule in int32 words."""
        return -(-self.places.end // 4)

    @property
    def scratch_bytes(self) -> int:
        """Size of the float workspace in bytes; 0 where nothing is split."""
        return sum(self._scratch)


def fa2_shape(
    *,
    num_requests: int,
    num_rows: int,
    max_query_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_v: int,
    page_size: int,
    num_sms: int,
    split: bool,
    window_left: int = -1,
) -> FA2Shape:
    """Choose tile and capacity for a bucket, from its limits alone.

    Any batch within `num_requests`, `num_rows` and `max_query_len` fits at one chunk for each query
    tile, so `plan_fa2` always finds a chunk size that fits. For the other parameters see
    `FA2Shape`.

    Raises
    ------
    ArgumentError
        If the schedule's integers would not fit int32.
    """
    group = num_qo_heads // num_kv_heads
    tile = cta_tile_q(max_query_len * group, head_dim_v)
    # Each request with a query adds less than a tile of padding, so n of them fill no more than
    # floor((rows + n * (tile - 1)) / tile) tiles; nor more than n times the longest query.
    some = min(num_requests, num_rows)
    capacity = min(
        some + (num_rows * group - some) // tile,
        some * -(-max_query_len * group // tile),
    )
    if split:
        capacity += SPLIT_WAVES * BLOCKS_PER_SM * num_sms // num_kv_heads
        capacity = -(-capacity // 32) * 32
    if num_rows * group > INT32_MAX or capacity * tile > INT32_MAX:
        raise ArgumentError(
            "num_rows",
            given=f"{num_rows} rows for groups of {group} query heads",
            wanted="rows times group below 2**31",
        )
    return FA2Shape(
        num_requests=num_requests,
        num_rows=num_rows,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_v=head_dim_v,
        page_size=page_size,
        num_sms=num_sms,
        cta_tile_q=tile,
        capacity=capacity,
        split=split,
        window_left=window_left,
    )


def plan_fa2(
    shape: FA2Shape,
    query_lens: object,
    kv_pages: object = None,
    *,
    kv_chunk_pages: int | None = None,
    out: IntArray | None = None,
) -> IntArray:
    """Write the schedule of one batch.

    Parameters
    ----------
    shape
        Static part of the bucket.
    query_lens
        ``[n]`` integers, ``n <= num_requests``: query rows of each request, 0 allowed. Requests
        beyond n count as empty.
    kv_pages
        ``[n]`` integers: pages of each request, 0 allowed. Not looked at where nothing is split;
        else the lengths that the kernel reads on the device must fill just as many pages.
    kv_chunk_pages
        Pages of one chunk; chosen by estimated time when left out. Not looked at where nothing is
        split.
    out
        ``[shape.schedule_words]`` int32, contiguous, written in full; a new array when left out.

    Returns
    -------
    IntArray
        `out`: request, query tile and KV chunk of each work item, running counts of partial
        results by request, chunk size in tokens, row count, running counts of partial results by
        row (where split), flags of the items in use. Words in between are 0.

    Raises
    ------
    PlanError
        For a batch that exceeds the bucket.
    LengthError, ShapeError, ArgumentError
        For negative lengths, arrays of another shape or type, a chunk that is not positive.
    """
    if not shape.split:
        query = host_ints("query_lens", query_lens, 1)
        words = _unsplit_schedule(shape, query.tobytes())
        if out is None:
            return words.copy()
        _check_out(shape, out)
        out[:] = words
        return out
    if kv_pages is None:
        raise ShapeError("kv_pages", given="none", wanted="pages of each request, to split them")
    work = work_of(shape, query_lens, kv_pages)
    chunk = best_chunk(shape, work).pages if kv_chunk_pages is None else kv_chunk_pages
    if not 0 < chunk <= INT32_MAX // shape.page_size:
        raise ArgumentError("kv_chunk_pages", given=chunk, wanted="1 or more, in int32 tokens")
    chunks = -(-work.pages // np.array(chunk, np.int32))
    items = np.multiply(work.queries.tiles, chunks, dtype=np.int64)
    ends = np.add.accumulate(items)
    check_items(shape, int(ends[-1]))
    if out is None:
        out = np.empty(shape.schedule_words, np.int32)
    else:
        _check_out(shape, out)
    _write_counts(shape, work.queries, chunk, chunks, out)
    _write_items(shape, work.queries, chunks, items, ends, out)
    return out


def _check_out(shape: FA2Shape, out: IntArray) -> None:
    wanted = (shape.schedule_words,)
    if out.shape != wanted or out.dtype != INT32 or not out.flags.c_contiguous:
        raise ShapeError(
            "out",
            given=f"{out.dtype} {out.shape}",
            wanted=f"contiguous int32 {wanted}, shape.schedule_words",
        )


@lru_cache(maxsize=256)
def _unsplit_schedule(shape: FA2Shape, query_lens: bytes) -> IntArray:
    """Schedule of int32 lengths without splitting: the same in all steps of a decode."""
    queries = tiling_of(shape, query_lens)
    out = np.empty(shape.schedule_words, np.int32)
    ones, items = np.ones_like(queries.tiles), queries.tiles.astype(np.int64)
    # FlashInfer leaves its largest 64-bit integer as chunk, and the kernel reads the lower half.
    _write_counts(shape, queries, -1, ones, out)
    _write_items(shape, queries, ones, items, np.add.accumulate(items), out)
    out.flags.writeable = False
    return out


def _write_counts(
    shape: FA2Shape, queries: Tiling, chunk: int, chunks: IntArray, out: IntArray
) -> None:
    """Write chunk size, number of rows, and where partial results go; 0 everywhere else."""
    places, n = shape.places, chunks.size
    out.fill(0)
    out[places.kv_chunk_size // 4] = chunk * shape.page_size
    out[places.total_num_rows // 4] = queries.num_rows
    o_indptr = out[places.o_indptr // 4 :][: shape.num_requests + 1]
    np.add.accumulate(queries.query_lens * chunks, out=o_indptr[1 : n + 1])
    o_indptr[n + 1 :] = o_indptr[n]
    if shape.split:
        merge = out[places.merge_indptr // 4 :][1 : queries.num_rows + 1]
        np.add.accumulate(chunks.repeat(queries.query_lens), out=merge)


def _write_items(
    shape: FA2Shape,
    queries: Tiling,
    chunks: IntArray,
    items: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    out: IntArray,
) -> None:
    """Write request, query tile and KV chunk of each item, and its flag, into zeroed `out`.

    `items` and `ends` are the number of each request's items and their running sum.
    """
    places, num_items = shape.places, int(ends[-1])
    out[:num_items] = np.arange(items.size, dtype=np.int32).repeat(items)
    out.view(np.uint8)[places.block_valid_mask :][:num_items] = 1
    if queries.one_tile and num_items == queries.num_tiles:
        return  # tile 0 and chunk 0 everywhere
    # Position of each item within its request, whose tiles come one after another, each with its
    # chunks in order.
    local = np.arange(num_items, dtype=np.int32)
    local -= (ends - items).astype(np.int32).repeat(items)
    qo_tile = out[places.qo_tile_indices // 4 :][:num_items]
    kv_tile = out[places.kv_tile_indices // 4 :][:num_items]
    if queries.one_tile:
        kv_tile[:] = local
    elif num_items == queries.num_tiles:
        qo_tile[:] = local
    else:
        np.divmod(local, chunks.repeat(items), out=(qo_tile, kv_tile))
