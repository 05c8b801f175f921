"""The schedule of FlashInfer's FA2 kernel, computed from lengths.

FlashInfer's kernel reads its work from an integer workspace: one work item for each query tile of
each request and each chunk of that request's keys, and running counts that tell where partial
results go. What fixes the places in that workspace (`fa2_shape`) is constant for a bucket of
batches; what is written there (`plan_fa2`) is one int32 array. At FlashInfer's own chunk size and
capacity the two equal its planner's result bit for bit (checked against version 0.7.2.post1).
NumPy only, no loop over requests, tiles or tokens.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .chunking import (
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
from .fa2_shape import FA2Shape, cta_tile_q, fa2_shape
from .host import INT32, INT32_MAX, host_ints

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
