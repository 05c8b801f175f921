"""The FA2 schedule from lengths that are arrays: the counterpart of `interop.schedule.plan_fa2`.

See `interop.device_metadata` for how it is written, and `interop.chunking` for what the estimate
of a chunk's time is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .chunking import (
    BLOCK,
    LEFT,
    MERGE_PART,
    MERGE_ROW,
    MIN_CHUNK_TOKENS,
    PARTS,
    ROW_TOKEN,
    SATURATION,
    SECOND_WAVE,
    TOKEN_ALONE,
    TOKEN_BUSY,
)
from .device_arithmetic import Arithmetic, Array, laid_out
from .fa2_shape import BLOCKS_PER_SM, FA2Shape
from .host import INT32_MAX

__all__ = ["ScheduleWork", "counts_fit", "schedule_of"]

# Not cut at all, and the candidates of `interop.chunking`.
CUTS = np.array([1, *PARTS], np.int32)


class ScheduleWork(NamedTuple):
    """What a schedule is of.

    Parameters
    ----------
    tiled
        ``[rows]`` int32: query rows of each request that get query tiles.
    starts, ends
        ``[rows]`` int32: its rows of the query.
    owner
        ``[tokens + 1]`` int32: request of each row of the query, and after the last row any number
        from ``rows - 1``.
    pages
        ``[rows]`` int32: pages of each request.
    """

    tiled: Array
    starts: Array
    ends: Array
    owner: Array
    pages: Array


def _limb_bits(width: int) -> int:
    """Bits of the halves into which numbers of pages up to `width` are cut to be squared."""
    return (width.bit_length() + 1) // 2


def counts_fit(shape: FA2Shape, width: int) -> bool:
    """Whether int32 holds all that is counted to choose a chunk size.

    Parameters
    ----------
    shape
        The schedule.
    width
        Most pages of a request.
    """
    return shape.capacity * max(int(CUTS[-1]), width, 4 ** _limb_bits(width)) <= INT32_MAX


def schedule_of(
    ops: Arithmetic, shape: FA2Shape, work: ScheduleWork, *, width: int, flashinfer_chunks: bool
) -> Array:
    """Return the schedule, ``[shape.schedule_words]`` int32.

    Parameters
    ----------
    ops
        Arithmetic of the arrays.
    shape
        Static part.
    work
        The batch; its work items fit ``shape.capacity`` at one chunk for each query tile.
    width
        Most pages of a request, for which `counts_fit` where the schedule may split.
    flashinfer_chunks
        Whether to cut as `interop.chunking.flashinfer_chunk_pages` says, not as `choose_chunk`
        does.
    """
    xp, places = ops.xp, shape.places
    filled = work.tiled * shape.group_size + (shape.cta_tile_q - 1)
    tiles = ops.quotient(filled, shape.cta_tile_q)
    zero, position = xp.zeros(1, np.int32), xp.arange(shape.capacity, dtype=np.int32)
    counts = [(places.total_num_rows // 4, xp.full(1, shape.num_rows, np.int32))]
    if shape.split:
        pages = xp.maximum(work.pages, 1)
        seen = -(-(shape.window_left + shape.cta_tile_q) // shape.page_size)
        if shape.window_left >= 0 and seen < width:
            pages, width = xp.minimum(pages, seen), seen
        choose = _flashinfer_chunk if flashinfer_chunks else _best_chunk
        chunk = choose(ops, shape, tiles, pages, width)
        chunks = ops.quotient(pages + (chunk - 1), chunk)
        items, parts = tiles * chunks, work.tiled * chunks
        ends, part_ends = ops.running_sum(items), ops.running_sum(parts)
        chunk_size = (chunk * shape.page_size).reshape(1)
        # Rows past those that get tiles have no parts.
        row = xp.minimum(work.owner, shape.num_requests - 1)
        before = ops.take(part_ends - parts - work.starts * chunks, row)
        before += xp.arange(row.size, dtype=np.int32) * ops.take(chunks, row)
        merge = xp.minimum(before, ops.take(part_ends, row))
        counts.append((places.merge_indptr // 4, merge))
    else:
        items, part_ends = tiles, work.ends
        ends = ops.running_sum(items)
        chunk_size = xp.full(1, -shape.page_size, np.int32)

    # Items of a request lie together: its tiles one after another, each with its chunks in order.
    used = position < ends[-1]
    request = xp.minimum(ops.owners(ends, shape.capacity), shape.num_requests - 1)
    local = position - ops.take(ends - items, request)
    qo_tile, kv_tile = local, xp.zeros_like(local)
    if shape.split:
        each = ops.take(chunks, request)
        qo_tile = ops.quotient(xp.maximum(local, 0), each)
        kv_tile = local - qo_tile * each
    # Four flags a word, the first in the lowest byte.
    words = xp.arange(-(-shape.capacity // 4), dtype=np.int32)
    flags = sum((4 * words + byte < ends[-1]).astype(np.int32) << 8 * byte for byte in range(4))
    return laid_out(
        ops,
        [
            (places.request_indices // 4, xp.where(used, request, 0)),
            (places.qo_tile_indices // 4, xp.where(used, qo_tile, 0)),
            (places.kv_tile_indices // 4, xp.where(used, kv_tile, 0)),
            (places.o_indptr // 4, xp.concatenate([zero, part_ends])),
            (places.kv_chunk_size // 4, chunk_size),
            *counts,
            (places.block_valid_mask // 4, flags),
        ],
        shape.schedule_words,
    )


def _flashinfer_chunk(
    ops: Arithmetic, shape: FA2Shape, tiles: Array, pages: Array, width: int
) -> Array:
    """Pages of a chunk by `interop.chunking.flashinfer_chunk_pages`, a scalar.

    Longer chunks make no more items, so the first one that is good comes after all that are not.
    """
    xp, budget = ops.xp, BLOCKS_PER_SM * shape.num_sms // shape.num_kv_heads
    least = max(128 // shape.page_size, 1)
    longest = pages.max()
    if width <= least:
        return xp.full_like(longest, least)
    chunk = xp.arange(least, width, dtype=np.int32)
    items = (ops.quotient(pages + (chunk[:, None] - 1), chunk[:, None]) * tiles).sum(
        axis=1, dtype=np.int32
    )
    return least + ((items > budget) & (chunk < longest)).sum(dtype=np.int32)


def _best_chunk(ops: Arithmetic, shape: FA2Shape, tiles: Array, pages: Array, width: int) -> Array:
    """Pages of a chunk by `interop.chunking.best_chunk`, a scalar.

    What is summed over requests are integers, which int32 holds (`counts_fit`), so that sums are
    the same in any order. Times are then estimated for all candidates at once, in 64 bits as on the
    host. Where the host stops looking early, it is because nothing better can follow.
    """
    xp = ops.xp

    def summed(x: Array) -> Array:
        return (x * tiles).sum(axis=-1, dtype=np.int32)

    num_tiles, total, longest = tiles.sum(dtype=np.int32), summed(pages), pages.max()
    chunk = ops.quotient(longest + (CUTS - 1), CUTS)  # [candidates]
    before = ops.quotient(pages - 1, chunk[:, None])  # chunks before the last one
    whole = before * chunk[:, None]
    rest = pages - whole
    bits = _limb_bits(width)
    high, low = rest >> bits, rest & (2**bits - 1)
    extra, cut, covered = summed(before), summed(xp.minimum(before, 1)), summed(whole)
    high_high, high_low, low_low = summed(high * high), summed(high * low), summed(low * low)

    slots = BLOCKS_PER_SM * shape.num_sms / shape.num_kv_heads
    page_time = shape.page_size * shape.head_dim_v / 128
    full = max(TOKEN_BUSY, ROW_TOKEN * shape.cta_tile_q) * page_time
    alone = max(TOKEN_ALONE, ROW_TOKEN * shape.cta_tile_q) * page_time
    extra_time = BLOCK * shape.num_kv_heads
    cut_row = MERGE_ROW * shape.num_qo_heads * shape.num_rows
    items = num_tiles + extra
    with ops.wide():
        most, all_pages = ops.float64(longest), ops.float64(xp.maximum(total, 1))
        all_tiles, pages_of = ops.float64(xp.maximum(num_tiles, 1)), ops.float64(chunk)
        extras, cuts = ops.float64(extra), ops.float64(cut)
        squares = ops.float64(high_high) * 4.0**bits + ops.float64(high_low) * 2.0 ** (bits + 1)
        squares = squares + ops.float64(low_low) + ops.float64(covered) * pages_of
        busy, path = full * all_pages / slots, alone * pages_of
        cut_time = cut_row / all_tiles
        left = LEFT * full * squares / (2 * all_pages)
        waves = xp.maximum(busy + SECOND_WAVE + xp.maximum(path - left, 0.0), path)
        within = ops.xp.sqrt(xp.sqrt(_fourth(path) + _fourth(busy)))
        attend = xp.where(ops.float64(items) <= slots, within, waves)
        unsplit = attend[0]
        merge = extra_time * extras + cut_time * cuts + MERGE_PART * (most / pages_of)
        # What the host does not try: the candidate of two parts is the least that can be cut.
        finest = xp.minimum(
            most * shape.page_size / MIN_CHUNK_TOKENS, most * shape.capacity / all_pages
        )
        pays = busy + (extra_time + cut_time) * cuts[1] < unsplit
        gain = unsplit - busy - cut_time * cuts[1] + extra_time * all_tiles
        x = gain / (extra_time * all_pages / most + MERGE_PART)
        bound = x * most / xp.where(x < most, most - x, 1.0)
        tried = (ops.float64(CUTS) <= xp.where(x < most, xp.minimum(finest, bound), finest)) & (
            finest >= 2.0
        )
        tried = tried & pays & (longest > 1) & (num_tiles > 0) & (items <= shape.capacity)
        whole_one = CUTS == 1
        time = xp.where(whole_one, unsplit, xp.where(tried, attend + merge, np.inf))
        # The first one of those that nothing is faster than.
        earlier = np.tri(CUTS.size, k=-1, dtype=np.bool_)
        beaten = (time < time[:, None]) | ((time == time[:, None]) & earlier)
    return xp.where(xp.any(beaten, axis=1), 0, chunk).sum(dtype=np.int32)


def _fourth(x: Array) -> Array:
    """`x` to the power of `SATURATION`, which two roots take back."""
    assert SATURATION == 4.0
    square = x * x
    return square * square
