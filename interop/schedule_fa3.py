"""The schedule of FlashInfer's FA3 kernel (compute capability 9.0), computed from lengths.

The kernel runs one thread block on each multiprocessor. A schedule lists for each block its works:
one tile of queries of one query head, against all keys that the tile sees. What fixes the places in
the integer workspace (`FA3Shape`) is constant for a bucket of batches and equals the planner of
FlashInfer 0.7.2.post1 in graph mode; what is written there (`plan_fa3`) is one int32 array.

FlashInfer hands out works one by one, each to the block with the least to do. Here they are handed
out a filling of the card at a time, the longest work of a filling to the block with the least to do
and so on, which NumPy does at once. Since a result does not depend on which block computes it,
outputs are bit for bit the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, LengthError, PlanError, ShapeError
from .host import INT32_MAX, host_ints

__all__ = ["FA3Shape", "plan_fa3"]

IntArray = npt.NDArray[np.int32]

ALIGN_WORDS = 4

# A tile of queries has as many rows as the kernel was compiled for at this width of a value.
TILE_ROWS = 128
TILE_ROWS_64 = 192

# Beyond so many works of one head FlashInfer lists one head only; all heads follow the same list.
MAX_WORKS_PER_HEAD = 4096

# Time to start a tile and to write it back, in keys: FlashInfer's estimate is two for each row.
KEYS_PER_ROW = 2

# How much of a schedule is handed out work by work.
LAST_FILLINGS = 3


class _Places(NamedTuple):
    """Offsets of the schedule's arrays in int32 words, in the order of FlashInfer's plan."""

    qo_tile_indices: int
    qo_indptr: int
    kv_indptr: int
    qo_lens: int
    kv_lens: int
    head_indices: int
    work_indptr: int
    batch_indices: int


@dataclass(frozen=True)
class FA3Shape:
    """What is the same for all FA3 schedules of a bucket; hashable and equal by value.

    Parameters
    ----------
    num_requests, num_rows
        Most requests and query rows (summed over requests) of a batch.
    num_qo_heads, head_dim_v
        Query heads, and the width of a value.
    num_sms
        Multiprocessors of the card.
    causal
        Whether a query sees only keys at or before its own position.
    window_left
        Keys that a query sees to the left of itself; -1 for all.

    Raises
    ------
    ArgumentError
        If the schedule's integers would not fit int32.
    """

    num_requests: int
    num_rows: int
    num_qo_heads: int
    head_dim_v: int
    num_sms: int
    causal: bool = True
    window_left: int = -1

    def __post_init__(self) -> None:
        if self.num_rows * self.num_qo_heads > INT32_MAX:
            raise ArgumentError(
                "num_rows",
                given=f"{self.num_rows} rows of {self.num_qo_heads} query heads",
                wanted="rows times heads below 2**31",
            )

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return TILE_ROWS_64 if self.head_dim_v == 64 else TILE_ROWS

    @property
    def works_per_head(self) -> int:
        """Most works of one query head: each request may leave its last tile nearly empty."""
        return -(-self.num_rows // self.tile_rows) + self.num_requests - 1

    @property
    def one_list(self) -> bool:
        """Whether all heads follow one list, each with thread blocks of its own."""
        return self.works_per_head > MAX_WORKS_PER_HEAD

    @property
    def capacity(self) -> int:
        """Most works of a schedule."""
        return self.works_per_head * (1 if self.one_list else self.num_qo_heads)

    @cached_property
    def places(self) -> _Places:
        """Offsets in the integer workspace, as FlashInfer's allocator would hand them out."""
        items = _aligned(self.capacity)
        blocks = _aligned(self.num_sms + 1)
        return _Places(
            qo_tile_indices=0,
            qo_indptr=items,
            kv_indptr=2 * items,
            qo_lens=3 * items,
            kv_lens=4 * items,
            head_indices=5 * items,
            work_indptr=6 * items,
            batch_indices=6 * items + blocks,
        )

    @cached_property
    def plan_info(self) -> tuple[int, ...]:
        """The 9 integers that FlashInfer's ``paged_run`` and ``ragged_run`` take as a plan."""
        return (*(4 * place for place in self.places), int(self.one_list))

    @property
    def schedule_words(self) -> int:
        """Length of the schedule in int32 words."""
        return self.places.batch_indices + self.capacity


def _aligned(words: int) -> int:
    return -(-words // ALIGN_WORDS) * ALIGN_WORDS


def plan_fa3(
    shape: FA3Shape,
    qo_indptr: object,
    kv_starts: object,
    kv_lens: object,
    *,
    out: IntArray | None = None,
) -> IntArray:
    """Write the schedule of one batch.

    Parameters
    ----------
    shape
        Static part of the bucket.
    qo_indptr
        ``[n + 1]`` integers, ``n <= num_requests``: offsets of the requests' query rows.
    kv_starts
        ``[n]`` integers: where each request begins in the page indices, or in the rows of key and
        value for attention without pages.
    kv_lens
        ``[n]`` integers: tokens of each request.
    out
        ``[shape.schedule_words]`` int32, contiguous, written in full; a new array when left out.

    Returns
    -------
    IntArray
        `out`: query tile, query offset, key offset, query length, key length and query head of
        each work, the running count of works by thread block, and the request of each work. Words
        in between are 0.

    Raises
    ------
    PlanError
        For a batch that exceeds the bucket.
    LengthError, ShapeError
        For negative lengths, arrays of another shape or type.
    """
    indptr = host_ints("qo_indptr", qo_indptr, 1)
    starts = host_ints("kv_starts", kv_starts, 1)
    lens = host_ints("kv_lens", kv_lens, 1)
    query_lens = indptr[1:] - indptr[:-1]
    tiles = -(-query_lens // shape.tile_rows)
    _check(shape, indptr, query_lens, starts, lens, int(tiles.sum()))
    if out is None:
        out = np.zeros(shape.schedule_words, np.int32)
    elif out.shape == (shape.schedule_words,) and out.dtype == np.int32 and out.flags.c_contiguous:
        out.fill(0)
    else:
        raise ShapeError(
            "out",
            given=f"{out.dtype} {out.shape}",
            wanted=f"contiguous int32 ({shape.schedule_words},), shape.schedule_words",
        )

    # Works of one head, the longest first: requests by their keys, tiles from the last.
    order = np.argsort(-lens, kind="stable")
    request = order.repeat(tiles[order]).astype(np.int32)
    count = request.size
    ends = np.add.accumulate(tiles[order])
    tile = ends.repeat(tiles[order]) - 1 - np.arange(count)
    keys = _visible_keys(shape, tile, query_lens[request], lens[request])
    cost = keys + KEYS_PER_ROW * shape.tile_rows

    heads = 1 if shape.one_list else shape.num_qo_heads
    block = _assign(np.tile(cost, heads), shape.num_sms)
    by_block = np.argsort(block, kind="stable")
    head, work = np.divmod(by_block, max(count, 1))
    request = request[work]
    columns: dict[str, npt.NDArray[Any]] = {
        "qo_tile_indices": tile[work],
        "qo_indptr": indptr[request],
        "kv_indptr": starts[request],
        "qo_lens": query_lens[request],
        "kv_lens": lens[request],
        "head_indices": head,
        "batch_indices": request,
    }
    places = shape.places
    for name, values in columns.items():
        out[getattr(places, name) :][: values.size] = values
    running = out[places.work_indptr + 1 :][: shape.num_sms]
    np.add.accumulate(np.bincount(block, minlength=shape.num_sms), out=running, dtype=np.int32)
    return out


def _check(
    shape: FA3Shape,
    indptr: IntArray,
    query_lens: IntArray,
    starts: IntArray,
    lens: IntArray,
    works: int,
) -> None:
    if not 0 < query_lens.size <= shape.num_requests:
        raise PlanError(
            "qo_indptr",
            given=f"{query_lens.size} requests",
            wanted=f"1 to {shape.num_requests}, the bucket's num_requests",
            remedy="Plan for a larger bucket.",
        )
    for name, values in (("kv_starts", starts), ("kv_lens", lens)):
        if values.size != query_lens.size:
            raise ShapeError(name, given=f"{values.size} numbers", wanted=f"{query_lens.size}")
    for name, values in (("qo_indptr", query_lens), ("kv_lens", lens)):
        if values.min() < 0:
            raise LengthError(name, given=f"a length of {values.min()}", wanted="0 or more")
    rows = int(indptr[-1] - indptr[0])
    if rows > shape.num_rows or works > shape.works_per_head:
        raise PlanError(
            "qo_indptr",
            given=f"{rows} query rows in all",
            wanted=f"at most {shape.num_rows}, the bucket's num_rows",
            remedy="Plan for a larger bucket.",
        )


def _visible_keys(
    shape: FA3Shape, tile: npt.NDArray[np.int64], query_lens: IntArray, kv_lens: IntArray
) -> npt.NDArray[np.int64]:
    """Keys that the rows of each work see, from the first that its first row sees to its last."""
    first_row = tile * shape.tile_rows
    context = (kv_lens - query_lens).astype(np.int64)
    last = kv_lens
    if shape.causal:
        last = np.minimum(context + first_row + shape.tile_rows, kv_lens)
    first = np.zeros_like(last)
    if shape.window_left >= 0:
        first = np.maximum(context + first_row - shape.window_left, 0)
    return np.maximum(last - first, 0)


def _assign(cost: npt.NDArray[np.int64], num_sms: int) -> npt.NDArray[np.int64]:
    """Thread block of each work, so that all have about the same to do."""
    block = np.empty(cost.size, np.int64)
    load = np.zeros(num_sms, np.int64)
    fillings = max(cost.size // num_sms - LAST_FILLINGS, 0)
    bulk = fillings * num_sms
    costs = cost[:bulk].reshape(fillings, num_sms)
    longest_first = np.argsort(-costs, axis=1, kind="stable")
    costs = np.take_along_axis(costs, longest_first, axis=1)
    blocks = block[:bulk].reshape(fillings, num_sms)
    for filling in range(fillings):
        least_loaded = np.argsort(load, kind="stable")
        blocks[filling, longest_first[filling]] = least_loaded
        load[least_loaded] += costs[filling]

    # The rest one by one, so that all blocks end together.
    rest = bulk + np.argsort(-cost[bulk:], kind="stable")
    heap = list(zip(load.tolist(), range(num_sms), strict=True))
    heapify(heap)
    chosen = []
    for work_cost in cost[rest].tolist():
        total, least = heap[0]
        chosen.append(least)
        heapreplace(heap, (total + work_cost, least))
    block[rest] = chosen
    return block
