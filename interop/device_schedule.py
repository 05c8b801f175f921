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

__all__ = ["CUTS", "Estimate", "ScheduleWork", "schedule_of"]

# Not cut, then the candidates of `interop.chunking`, the last one again up to a power of two.
CUTS = np.array([1, *PARTS, PARTS[-1], PARTS[-1]], np.int32)


class Estimate(NamedTuple):
    """What is static of a chunk's estimated time: microseconds and factors.

    Parameters
    ----------
    full, alone
        One slot's time for a page, while all slots read and while few do.
    slots
        Thread blocks of one KV head that run at a time.
    block
        Time of a further block.
    cut_rows
        Time of merging each row of every request, times the query tiles.
    left
        Factor on the sum of squares of blocks, over twice that of blocks, for what is left of one.
    wave, part
        Time of a second wave, and of one more part of the row that has most.
    """

    full: float
    alone: float
    slots: float
    block: float
    cut_rows: float
    left: float
    wave: float
    part: float

    @classmethod
    def of(cls, shape: FA2Shape) -> Estimate:
        """Numbers of a bucket, as `interop.chunking.best_chunk` has them."""
        page = shape.page_size * shape.head_dim_v / 128
        full = max(TOKEN_BUSY, ROW_TOKEN * shape.cta_tile_q) * page
        return cls(
            full=full,
            alone=max(TOKEN_ALONE, ROW_TOKEN * shape.cta_tile_q) * page,
            slots=BLOCKS_PER_SM * shape.num_sms / shape.num_kv_heads,
            block=BLOCK * shape.num_kv_heads,
            cut_rows=MERGE_ROW * shape.num_qo_heads * shape.num_rows,
            left=LEFT * full,
            wave=SECOND_WAVE,
            part=MERGE_PART,
        )


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
        Most pages of a request.
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
    chunk = xp.arange(least, max(width, least + 1), dtype=np.int32)
    each = ops.quotient(pages + (chunk[:, None] - 1), chunk[:, None])
    with ops.wide():
        many = (ops.float64(each) * ops.float64(tiles)).sum(axis=1) > budget
    return least + (many & (chunk < pages.max())).sum(dtype=np.int32)


def _best_chunk(ops: Arithmetic, shape: FA2Shape, tiles: Array, pages: Array, width: int) -> Array:
    """Pages of a chunk by `interop.chunking.best_chunk`, a scalar.

    What is summed are integers, which 64 bits hold, so that sums are the same in any order. Times
    are then estimated for all candidates at once. Where the host stops looking early, it is because
    nothing better can follow.
    """
    del width
    xp, time, longest = ops.xp, Estimate.of(shape), pages.max()
    chunks = ops.quotient(longest + (CUTS - 1), CUTS)
    before = ops.quotient(pages - 1, chunks[:, None])  # chunks before the last one
    with ops.wide():
        weight, length, most = ops.float64(tiles), ops.float64(pages), ops.float64(longest)
        chunk, cut_off = ops.float64(chunks), ops.float64(before)
        num_tiles, total = weight.sum(), xp.maximum((weight * length).sum(), 1.0)
        extra = (cut_off * weight).sum(axis=1)
        cut = (xp.minimum(cut_off, 1.0) * weight).sum(axis=1)
        whole = cut_off * chunk[:, None]
        square = whole * chunk[:, None] + (length - whole) * (length - whole)
        squares = (square * weight).sum(axis=1)
        busy = time.full * total / time.slots

        def attend(chunk: Array, items: Array, squares: Array) -> Array:
            path = time.alone * chunk
            within = xp.sqrt(xp.sqrt(_fourth(path) + _fourth(busy)))
            left = time.left * squares / (2 * total)
            waves = xp.maximum(busy + time.wave + xp.maximum(path - left, 0.0), path)
            return xp.where(items <= time.slots, within, waves)

        unsplit = attend(most, num_tiles, squares[0])
        cut_time = time.cut_rows / xp.maximum(num_tiles, 1.0)
        merge = time.block * extra + cut_time * cut + time.part * (most / chunk)
        # What the host does not try. The candidate of two parts is the one that cuts least.
        by_size = most * shape.page_size / MIN_CHUNK_TOKENS
        finest = xp.minimum(by_size, most * shape.capacity / total)
        pays = (num_tiles > 0) & (busy + (time.block + cut_time) * cut[1] < unsplit)
        gain = unsplit - busy - cut_time * cut[1] + time.block * num_tiles
        x = gain / (time.block * total / most + time.part)
        bound = x * most / xp.where(x < most, most - x, 1.0)
        bound = xp.where(x < most, xp.minimum(finest, bound), finest)
        bound = xp.where(pays & (finest >= 2.0), bound, 0.0)
        items = num_tiles + extra
        tried = (ops.float64(CUTS) <= bound) & (items <= shape.capacity)
        times = xp.where(tried, attend(chunk, items, squares) + merge, np.inf)
        times = xp.where(CUTS == 1, unsplit, times)
        while times.shape[0] > 1:  # the better one of each two, of equal ones the first
            second = times[1::2] < times[::2]
            chunks = xp.where(second, chunks[1::2], chunks[::2])
            times = xp.where(second, times[1::2], times[::2])
    return chunks[0]


def _fourth(x: Array) -> Array:
    """`x` to the power of `SATURATION`, which two roots take back."""
    assert SATURATION == 4.0
    square = x * x
    return square * square
