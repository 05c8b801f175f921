"""FA2 schedules under which a request's bits depend on nothing but the request.

What FlashInfer's FA2 kernel computes for a query row depends on the rows of a tile (they decide how
its warps share the work), on where the keys are cut, and on the order in which the parts are
merged. Here none of the three depends on other requests or on the bucket:

* requests of one token, decodes, have the smallest tile that holds the query heads of a KV head,
  and their keys are cut every `CHUNK_TOKENS`, always by the schedule that may split;
* all other requests have the largest tile, and their keys are not cut.

A plan for both is two launches, which share one array: decodes first, the others behind them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError
from .fa2_shape import FA2Shape, cta_tile_q
from .host import INT32_MAX
from .schedule import plan_fa2

__all__ = ["CHUNK_TOKENS", "chunk_pages", "decode_shape", "plan_decodes", "prefill_shape"]

IntArray = npt.NDArray[np.int32]

# Short enough that a few long requests fill a card, long enough that the merges cost little.
CHUNK_TOKENS = 2048


def chunk_pages(page_size: int) -> int:
    """Pages of one chunk of a decode: `CHUNK_TOKENS`, rounded down to pages, at least one."""
    return max(CHUNK_TOKENS // page_size, 1)


def decode_shape(shape: FA2Shape, num_pages: int, *, padding: bool) -> FA2Shape:
    """Make the shape for requests of one token out of any shape of their bucket.

    Parameters
    ----------
    shape
        Gives sizes, heads and device; tile, capacity and `split` are replaced.
    num_pages
        Pages of all requests together, at most.
    padding
        Whether the last request owns the bucket's padding rows, and is scheduled with the others.

    Raises
    ------
    ArgumentError
        If the schedule's integers would not fit int32.
    """
    tile = cta_tile_q(shape.group_size, shape.head_dim_v)
    tiles_of_row = -(-shape.group_size // tile)
    # A request has one chunk more than full ones, at most. Padding rows share tiles.
    some = shape.num_rows if padding else min(shape.num_requests, shape.num_rows)
    capacity = tiles_of_row * (some + num_pages // chunk_pages(shape.page_size))
    return _checked(replace(shape, cta_tile_q=tile, capacity=capacity, split=True))


def prefill_shape(shape: FA2Shape) -> FA2Shape:
    """Make the shape for all other requests out of any shape of their bucket, as `decode_shape`."""
    # No query is longer than this: heads as wide as 256 have a largest tile of their own.
    tile = cta_tile_q(INT32_MAX, shape.head_dim_v)
    some = min(shape.num_requests, shape.num_rows)
    # See `interop.fa2_shape.fa2_shape`.
    capacity = some + (shape.num_rows * shape.group_size - some) // tile
    return _checked(replace(shape, cta_tile_q=tile, capacity=capacity, split=False))


def _checked(shape: FA2Shape) -> FA2Shape:
    largest = max(shape.num_rows * shape.group_size, shape.capacity * shape.cta_tile_q)
    if largest > INT32_MAX:
        raise ArgumentError(
            "bucket",
            given=f"{shape.num_rows} rows for groups of {shape.group_size} query heads, and "
            f"{shape.capacity} work items of {shape.cta_tile_q}",
            wanted="sizes whose products stay below 2**31",
        )
    return shape


def plan_decodes(
    shape: FA2Shape,
    query_lens: IntArray,
    kv_pages: IntArray,
    qo_indptr: IntArray,
    out: IntArray,
) -> None:
    """Write the schedule of a batch's decodes, wherever among the other requests they stand.

    Parameters
    ----------
    shape
        From `decode_shape`.
    query_lens
        ``[n]`` int32: 1 for a decode, 0 for a request that another launch serves. Padding has its
        rows where the shape was made with it; no request has rows elsewhere then.
    kv_pages
        ``[n]`` int32 pages of each request.
    qo_indptr
        ``[n + 1]`` int32: where each request's rows begin, those of other launches counted.
    out
        ``[shape.schedule_words]`` int32, written in full.

    Raises
    ------
    PlanError
        For a batch that exceeds the bucket.
    """
    chunk = chunk_pages(shape.page_size)
    plan_fa2(shape, query_lens, kv_pages, kv_chunk_pages=chunk, out=out)
    num_rows, served = int(qo_indptr[-1]), int(query_lens.sum())
    if served == num_rows:
        return
    # The schedule counts its own rows only; the kernel merges row after row of the output. Rows of
    # others have no parts: it writes 0 and -inf there, which the launch after it writes over.
    merge = out[shape.places.merge_indptr // 4 :][: shape.num_rows + 1]
    parts = np.zeros(num_rows, np.int32)
    parts[qo_indptr[:-1][query_lens > 0]] = np.diff(merge[: served + 1])
    merge[num_rows + 1 :] = 0
    np.add.accumulate(parts, out=merge[1 : num_rows + 1])
    out[shape.places.total_num_rows // 4] = num_rows
