"""What is constant of an FA2 schedule for a bucket of batches: tile, capacity, and places.

All integers equal those of FlashInfer's planner in graph mode at the same capacity (checked against
version 0.7.2.post1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .errors import ArgumentError
from .host import INT32_MAX

__all__ = ["BLOCKS_PER_SM", "FA2Shape", "cta_tile_q", "fa2_shape"]

# FlashInfer's planner counts on two resident thread blocks on every multiprocessor.
BLOCKS_PER_SM = 2

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
