"""How many KV pages one work item of FlashInfer's FA2 kernel should read.

The kernel takes any chunk size. FlashInfer's own search (`flashinfer_chunk_pages`) stops splitting
as soon as requests x KV heads fill the card, so one long request among many short ones is read by
a handful of thread blocks while the rest of the card idles: up to 6 x slower than need be.
`best_chunk` instead estimates the time of a few chunk sizes and takes the best that fits.

The estimate is that of a list schedule. A card runs a fixed number of thread blocks at a time, its
slots, and starts the next block when one ends. Until the last block starts all slots are busy;
after that the card waits for the longest block still running. When blocks of sizes ``s`` end at
random moments, a slot has ``sum(s^2) / (2 sum(s))`` left on average (renewal theory), and only what
the longest block has left beyond that average is lost.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import LengthError, PlanError, ShapeError
from .fa2_shape import BLOCKS_PER_SM, FA2Shape
from .host import INT32_MAX, ONE, host_ints

__all__ = ["ChunkChoice", "choose_chunk", "flashinfer_chunk_pages", "reading_time"]

IntArray = npt.NDArray[np.int32]

# Candidates divide the longest request into this many equal chunks, or not at all. The optimum is
# flat, so coarse steps are enough; the finer ones at the start are for batches of a single wave.
PARTS = np.array([2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024], np.float64)
MIN_CHUNK_TOKENS = 256

# Microseconds, fitted to 50 measured times of one-token decode on an H200 (132 multiprocessors,
# 4.48 TB/s; bf16, 32 query heads, 8 KV heads, head_dim 128), 46 of them met within 5 %. A token
# is one key and one value of one KV head.
TOKEN_BUSY = 30.2e-3  # one slot's time per token while all read: 264 slots share the bandwidth
TOKEN_ALONE = 14.0e-3  # the same while few slots read and latency binds
ROW_TOKEN = 0.42e-3  # per query row of a tile where arithmetic binds: prefill at 319 TFLOP/s
SECOND_WAVE = 2.0  # refilling the slots, once there are more blocks than slots
BLOCK = 6.0e-3  # start and end of a block beyond one for each query tile
MERGE = 1.5  # writing partial results and merging them, even where each row has only one
MERGE_ROW = 3.2e-3  # merging one row of one query head that has several parts
MERGE_PART = 0.1  # each further part of the row that has most
LEFT = 0.8  # blocks of equal size end together rather than at random moments
SATURATION = 4.0  # exponent of the norm that joins latency and bandwidth within one wave


class ChunkChoice(NamedTuple):
    """What `best_chunk` chose.

    Parameters
    ----------
    pages
        Pages of one chunk, for the bucket's schedule that may split.
    split
        Whether that schedule is estimated to be faster than the one that never splits.
    """

    pages: int
    split: bool


class Tiling(NamedTuple):
    """A batch's queries as the planner sees them.

    Parameters
    ----------
    query_lens, tiles
        ``[n]`` int32: query rows and query tiles.
    weight
        `tiles` as float64.
    num_rows, num_tiles
        Sums of the two.
    one_tile
        Whether no request has more than one tile.
    """

    query_lens: IntArray
    tiles: IntArray
    weight: npt.NDArray[np.float64]
    num_rows: int
    num_tiles: int
    one_tile: bool


@lru_cache(maxsize=256)
def tiling_of(shape: FA2Shape, query_lens: bytes) -> Tiling:
    """Check queries (int32 lengths) against their bucket; the same in all steps of a decode."""
    query = np.frombuffer(query_lens, np.int32)
    if not 0 < query.size <= shape.num_requests:
        raise PlanError(
            "query_lens",
            given=f"{query.size} requests",
            wanted=f"1 to {shape.num_requests}, the bucket's num_requests",
            remedy="Plan for a larger bucket.",
        )
    if query.min() < 0:
        raise LengthError("query_lens", given=f"a length of {query.min()}", wanted="0 or more")
    rows = int(query.sum())
    if rows > shape.num_rows:
        raise PlanError(
            "query_lens",
            given=f"{rows} query rows in all",
            wanted=f"at most {shape.num_rows}, the bucket's num_rows",
            remedy="Plan for a larger bucket.",
        )
    tiles = (query * shape.group_size + (shape.cta_tile_q - 1)) // shape.cta_tile_q
    num_tiles = int(tiles.sum())
    check_items(shape, num_tiles)
    return Tiling(query, tiles, tiles.astype(np.float64), rows, num_tiles, bool(tiles.max() <= 1))


class Work(NamedTuple):
    """A batch as the planner sees it.

    Parameters
    ----------
    queries
        See `Tiling`.
    pages
        ``[n]`` int32: pages that a tile reads, at least 1.
    most_pages
        Largest of them.
    """

    queries: Tiling
    pages: IntArray
    most_pages: int


def work_of(shape: FA2Shape, query_lens: object, kv_pages: object) -> Work:
    """Check a batch against its bucket; pages become those that a tile reads, at least 1."""
    query = host_ints("query_lens", query_lens, 1)
    pages = host_ints("kv_pages", kv_pages, 1)
    if pages.shape != query.shape:
        raise ShapeError("kv_pages", given=f"{pages.size} numbers", wanted=f"{query.size}")
    queries = tiling_of(shape, query.tobytes())
    if (least := pages[pages.argmin()]) < 0:
        raise LengthError("kv_pages", given=f"a length of {least}", wanted="0 or more")
    pages = np.maximum(pages, ONE)
    if shape.window_left >= 0:
        # FlashInfer's bound on what a tile can see, a little generous on purpose.
        seen = -(-(shape.window_left + shape.cta_tile_q) // shape.page_size)
        pages = np.minimum(pages, np.int32(min(seen, INT32_MAX)))
    return Work(queries, pages, int(pages[pages.argmax()]))


def check_items(shape: FA2Shape, items: int) -> None:
    """Raise `PlanError` if so many work items exceed the bucket's capacity."""
    if items > shape.capacity:
        raise PlanError(
            "query_lens",
            given=f"{items} work items of up to {shape.cta_tile_q} query rows and one KV chunk",
            wanted=f"at most {shape.capacity}, the bucket's capacity",
            remedy="Use larger KV chunks, or plan for a larger bucket.",
        )


def best_chunk(shape: FA2Shape, work: Work) -> ChunkChoice:
    """Choose the chunk with the least estimated time among those whose work items fit `shape`.

    One chunk for each query tile is always among them.
    """
    queries, longest = work.queries, work.most_pages
    num_tiles, weight = queries.num_tiles, queries.weight
    if num_tiles == 0 or longest == 1:
        return ChunkChoice(longest, split=False)
    length = work.pages.astype(np.float64)
    total = float(weight.dot(length))
    # Cutting the longest request cuts every request of more than half its length, too.
    if total == num_tiles * longest:  # all have the same length
        length_square, cut_at_least = total * longest, float(num_tiles)
    else:
        length_square = float((weight * length).dot(length))
        cut_at_least = float((length > (longest + 1) // 2).dot(weight))

    slots = _slots(shape)
    page_time = _page_time(shape)
    full = max(TOKEN_BUSY, ROW_TOKEN * shape.cta_tile_q) * page_time
    alone = max(TOKEN_ALONE, ROW_TOKEN * shape.cta_tile_q) * page_time
    busy = full * total / slots
    extra_time = BLOCK * shape.num_kv_heads
    cut_time = MERGE_ROW * shape.num_qo_heads * queries.num_rows / num_tiles

    def attend(chunk: float, items: float, squares: float) -> float:
        path = alone * chunk
        if items <= slots:
            return float((path**SATURATION + busy**SATURATION) ** (1 / SATURATION))
        left = LEFT * full * squares / (2 * total)
        return max(busy + SECOND_WAVE + max(path - left, 0.0), path)

    best, least = longest, attend(longest, num_tiles, length_square)
    unsplit = least
    most = longest * shape.page_size / MIN_CHUNK_TOKENS
    # Below the average of a full capacity nothing fits.
    most = min(most, longest * shape.capacity / total)
    if most < 2 or busy + (extra_time + cut_time) * cut_at_least >= unsplit:
        return ChunkChoice(longest, split=False)
    # Chunks of ``longest / x`` add at least ``total * x / longest - num_tiles`` blocks. From some x
    # on these alone, with the merges above, cost more than splitting can gain.
    gain = unsplit - busy - cut_time * cut_at_least + extra_time * num_tiles
    x = gain / (extra_time * total / longest + MERGE_PART)
    if x < longest:
        # A chunk of whole pages is less than one page longer.
        most = min(most, x * longest / (longest - x))
        if most < 2:
            return ChunkChoice(longest, split=False)

    # Chunks before each request's last one, [candidates, requests]. The half page keeps quotients
    # clear of whole numbers, so that rounding cannot move one across.
    chunks = np.ceil(longest / PARTS[: PARTS.searchsorted(most, "right")])
    before = np.floor((length - 0.5) * (1 / chunks)[:, None])
    extra = before.dot(weight).tolist()
    pages_extra = before.dot(weight * length).tolist()
    extra_square = np.square(before).dot(weight).tolist()
    cut = np.sign(before).dot(weight).tolist()
    # A handful of candidates: plain numbers cost less here than arrays.
    for i, chunk in enumerate(chunks.tolist()):
        merge = extra_time * extra[i] + cut_time * cut[i] + MERGE_PART * (longest / chunk)
        if busy + merge >= least:
            break  # the merge only grows from here on
        items = num_tiles + extra[i]
        if items <= shape.capacity:
            # The chunks before the last, each chunk squared, and what is then left, squared.
            squares = chunk * chunk * (extra[i] + extra_square[i])
            squares += length_square - 2 * chunk * pages_extra[i]
            time = attend(chunk, items, squares) + merge
            if time < least:
                best, least = int(chunk), time
    return ChunkChoice(best, least + MERGE < unsplit)


def _slots(shape: FA2Shape) -> float:
    """Thread blocks of one KV head that run at a time."""
    return BLOCKS_PER_SM * shape.num_sms / shape.num_kv_heads


def _page_time(shape: FA2Shape) -> float:
    """How many tokens of 128 elements a page is worth."""
    return shape.page_size * shape.head_dim_v / 128


def reading_time(shape: FA2Shape, tile_pages: int) -> float:
    """Estimate the microseconds that a full card takes for query tiles to go over their pages.

    Parameters
    ----------
    shape
        The schedule's shape.
    tile_pages
        Pages of each query tile, summed over the tiles.
    """
    full = max(TOKEN_BUSY, ROW_TOKEN * shape.cta_tile_q) * _page_time(shape)
    return full * tile_pages / _slots(shape)


def choose_chunk(shape: FA2Shape, query_lens: object, kv_pages: object) -> ChunkChoice:
    """Choose how to cut a batch's keys, and whether cutting them pays at all.

    Parameters
    ----------
    shape
        The bucket's shape that may split.
    query_lens, kv_pages
        ``[n]`` integers, see `plan_fa2`.

    A bucket has two static variants, `fa2_shape` with and without ``split``. Where ``split`` of the
    result is false, the variant without is faster, and its schedule serves all KV lengths; else
    hand ``pages`` to `plan_fa2` as `kv_chunk_pages`.

    Raises
    ------
    PlanError, LengthError, ShapeError
        As `plan_fa2`.
    """
    work = work_of(shape, query_lens, kv_pages)
    return best_chunk(shape, work)


def flashinfer_chunk_pages(shape: FA2Shape, query_lens: object, kv_pages: object) -> int:
    """Pages per chunk as FlashInfer's planner chooses them, to compare with.

    That is the smallest chunk of at least 128 tokens whose work items number no more than
    ``2 * num_sms // num_kv_heads``, and the longest request where no chunk has so few.

    Parameters
    ----------
    shape, query_lens, kv_pages
        As for `choose_chunk`.

    Raises
    ------
    PlanError, LengthError, ShapeError
        As `plan_fa2`.
    """
    work = work_of(shape, query_lens, kv_pages)
    budget = BLOCKS_PER_SM * shape.num_sms // shape.num_kv_heads
    low, high = max(128 // shape.page_size, 1), int(work.pages.max())
    while low < high:
        middle = (low + high) // 2
        if int(work.queries.tiles @ (-(-work.pages // middle))) > budget:
            low = middle + 1
        else:
            high = middle
    return low
