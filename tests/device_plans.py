"""Plans made on the device: buckets to plan for, random batches of them, and what is right.

What is right is a host plan of the same static part. Where a request does not fit its bucket, that
is the host plan of a batch in which it has no keys; which ones do not fit is said by `judged`, one
request after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from interop import AttentionSpec, Bucket, CacheSpec, PlanStatic, RaggedBatch
from interop.device_metadata import DeviceShape
from interop.device_status import PlanStatus
from interop.schedule import choose_chunk
from torch_backend.device_planning import device_static
from torch_backend.host_planning import host_plan
from torch_backend.kernels import Device
from torch_backend.kernels import flashinfer_fa2 as fa2
from torch_backend.kernels.protocol import Decision

Array = np.ndarray[Any, np.dtype[np.int32]]

H200 = Device("cuda", (9, 0), 132)
CPU = Device("cpu")


@dataclass(frozen=True)
class Case:
    """A bucket, and a way of planning for it.

    Parameters
    ----------
    name, bucket
        Name of the test, and the bucket.
    heads
        Heads of query, and of key and value.
    page_size, width
        Tokens in a page, entries in a row of the page table.
    window
        Sliding window.
    kernel, split
        As for `plan_on_device`.
    device
        What is planned for.
    """

    name: str
    bucket: Bucket
    heads: tuple[int, int] = (32, 8)
    page_size: int = 16
    width: int = 40
    window: int | None = None
    kernel: str | None = None
    split: bool | None = None
    device: Device = H200

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(*self.heads, 128, sliding_window=self.window)

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(
            2, 5000, self.page_size, self.heads[1], 128, dtype="bfloat16", device=self.device.kind
        )

    @cached_property
    def static(self) -> tuple[PlanStatic, DeviceShape]:
        """Static part of the plan and of its metadata."""
        return device_static(
            self.spec,
            self.cache,
            self.bucket,
            self.device,
            kernel=self.kernel,
            split=self.split,
            return_lse=True,
        )

    def host(self, batch: RaggedBatch) -> tuple[PlanStatic, Array]:
        """Plan on the host, in the same variant."""
        schedule = self.static[1].schedule

        def decide(family: Any, work: Any, lengths: Any) -> Decision:
            pages = choose_chunk(
                family._shape(work, fa2.SPLIT), lengths.query_lens, lengths.kv_units
            ).pages
            assert schedule is not None
            return Decision(int(schedule.split), pages)

        with mock.patch.object(fa2.FA2Family, "decide", decide):
            return host_plan(
                self.spec,
                self.cache,
                batch,
                self.bucket,
                self.device,
                "raise",
                self.static[0].main[0].family,
                lambda words: np.zeros(words, np.int32),
            )


SMALL = Bucket(5, 9, 40)
DECODE = Bucket(32, 32, 2000, 1)
PREFILL = Bucket(6, 300, 400)
SHORT = Bucket(9, 40, 300, 7)

CASES = (
    Case("reference", SMALL, device=CPU),
    Case("one-chunk", SMALL),
    Case("decode", DECODE, width=300, split=False),
    Case("decode-split", DECODE, width=300, split=True),
    Case("one-kv-head-split", DECODE, heads=(8, 1), page_size=64, split=True),
    Case("prefill", PREFILL, split=False),
    Case("prefill-split", PREFILL, split=True),
    Case("short-queries-split", SHORT, heads=(6, 2), page_size=1, width=300, split=True),
    Case("window-split", PREFILL, window=100, split=True),
    Case("by-flashinfer", DECODE, width=300, kernel="fa2_flashinfer"),
    Case("prefill-by-flashinfer", PREFILL, kernel="fa2_flashinfer", window=300),
)


# Buckets without rows or without pages: their fields have one word nonetheless.
EDGES = (
    Case("no-rows", Bucket(2, 0, 4), width=2, device=CPU),
    Case("no-pages-on-the-cpu", Bucket(2, 4, 0), width=2, device=CPU),
    Case("no-pages", Bucket(2, 4, 0), width=2, split=False),
    Case("no-pages-split", Bucket(2, 4, 0), width=2, split=True),
    Case("no-pages-by-flashinfer", Bucket(2, 4, 0), width=2, kernel="fa2_flashinfer"),
)


def written(case: Case) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which words of a plan's metadata mean something; those in between are for alignment."""
    static, device_shape = case.static
    mask = np.zeros(static.layout.words, np.bool_)
    fields = static.layout.views(mask)
    for field in fields.values():
        field[:] = True
    if (shape := device_shape.schedule) is not None:
        schedule, at = fields["fa2_schedule"], shape.places
        schedule[:] = False
        parts = [(at.request_indices, shape.capacity), (at.qo_tile_indices, shape.capacity)]
        parts += [(at.kv_tile_indices, shape.capacity), (at.o_indptr, shape.num_requests + 1)]
        parts += [(at.kv_chunk_size, 1), (at.total_num_rows, 1)]
        parts += [(at.block_valid_mask, -(-shape.capacity // 4))]
        if shape.split:
            parts += [(at.merge_indptr, shape.num_rows + 1)]
        for place, count in parts:
            schedule[place // 4 :][:count] = True
    return mask


@dataclass(frozen=True)
class Lengths:
    """What a plan is made from, ``[n]``, ``[n + 1]`` and ``[n, width]`` int32."""

    kv_lens: Array
    cu_q_lens: Array
    page_table: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.kv_lens, self.cu_q_lens, self.page_table

    def batch(self) -> RaggedBatch:
        return RaggedBatch(np.diff(self.cu_q_lens), self.kv_lens, self.page_table)


def random_lengths(case: Case, seed: int, count: int | None = None) -> Lengths:
    """Lengths of a batch that fits its bucket; entries of the table that nobody reads are -9."""
    rng = np.random.default_rng(seed)
    bucket, size = case.bucket, case.page_size
    n = int(rng.integers(1, bucket.num_requests + 1)) if count is None else count
    most = min(bucket.max_query_len, 2 * bucket.num_tokens // n)
    query = rng.integers(rng.integers(0, 2), most + 1, n)
    while query.sum() > bucket.num_tokens:
        query[rng.integers(n)] //= 2
    limit = min(case.width, bucket.num_pages)
    style = rng.integers(4)
    if style == 0:  # a few long ones among short ones
        pages = np.minimum(rng.pareto(0.7, n) * bucket.num_pages / (4 * n), limit)
    elif style == 1:  # all alike, as full as can be
        pages = np.full(n, min(bucket.num_pages // n, limit))
    else:
        pages = rng.integers(0, limit + 1, n)
    pages = np.maximum(pages.astype(np.int64), -(-query // size))
    while pages.sum() > bucket.num_pages:
        pages = np.maximum(pages * 3 // 4, -(-query // size))
    kv = np.maximum(pages * size - rng.integers(0, size, n), query)
    kv[pages == 0] = 0
    used = -(-kv // size)
    table = np.full((n, case.width), -9, np.int32)
    order = rng.permutation(case.cache.num_pages)[: used.sum()]
    for row, ids in zip(table, np.split(order, np.cumsum(used)[:-1]), strict=True):
        row[: ids.size] = ids
    offsets = np.concatenate([[0], np.cumsum(query)])
    return Lengths(kv.astype(np.int32), offsets.astype(np.int32), table)


seeds = st.integers(0, 2**63 - 1)


def spoiled(case: Case, lengths: Lengths, seed: int) -> Lengths:
    """The same with a few numbers that no plan can use."""
    rng = np.random.default_rng(seed)
    kv, offsets, table = (array.copy() for array in lengths.arrays)
    bucket, n = case.bucket, kv.size
    high = np.int64(2**31 - 1)
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(n)
        match rng.integers(7):
            case 0:
                kv[at] = rng.choice([-1, -high - 1, 0, high])
            case 1:
                kv[at] = rng.integers(0, 2 * case.width * case.page_size)
            case 2:
                table[at, rng.integers(3)] = rng.choice([-1, case.cache.num_pages, high])
            case 3:  # more pages than the bucket has, of requests that fit alone
                kv[:] = np.maximum(kv, rng.integers(1, case.page_size * case.width, n))
                table[table < 0] = 0
            case 4:
                offsets[rng.integers(n + 1)] = rng.integers(-3, bucket.num_tokens + 3)
            case 5:
                offsets[rng.integers(n + 1)] = rng.choice([-high - 1, high])
            case 6:
                offsets[rng.integers(n + 1) :] += rng.integers(1, bucket.num_tokens + 2)
    return Lengths(kv, offsets, table)


def hostile(case: Case, seed: int, count: int | None = None) -> Lengths:
    """Any 32 bits: numbers that look right, those next to limits, and random ones."""
    rng = np.random.default_rng(seed)
    bucket, high = case.bucket, 2**31 - 1
    n = int(rng.integers(1, bucket.num_requests + 1)) if count is None else count
    limits = [-high - 1, -1, 0, 1, case.page_size, bucket.num_tokens, high - 1, high]
    limits += [case.cache.num_pages - 1, case.cache.num_pages, case.width * case.page_size]

    def draw(*size: int) -> Array:
        numbers = rng.integers(0, 9, size)
        wild = np.where(
            rng.random(size) < 0.5,
            rng.choice(limits, size),
            rng.integers(-high - 1, high + 1, size),
        )
        return np.where(rng.random(size) < rng.choice([0, 0.05, 1]), wild, numbers).astype(np.int32)

    offsets = draw(n + 1)
    if rng.random() < 0.6:  # else the order of offsets is all that is ever wrong
        offsets = np.sort(np.clip(offsets, 0, 2 * bucket.num_tokens))
        offsets[0] = 0
    return Lengths(draw(n), offsets, draw(n, case.width))


def outside(case: Case, words: Array) -> list[str]:
    """Names of the fields of metadata by which memory of nobody would be read or written."""
    fields, bucket = case.static[0].layout.views(words), case.bucket
    slots = case.cache.num_pages * case.page_size
    limits = {
        "slot_mapping": (-1, slots - 1),
        "page_indices": (0, case.cache.num_pages - 1),
        "kv_indptr": (0, bucket.num_pages),
        "qo_indptr": (0, bucket.num_tokens),
        "kv_lens": (0, case.width * case.page_size),
        "kv_last_page_len": (0, case.page_size),
    }
    found = [
        name
        for name, (low, high) in limits.items()
        if fields[name].min() < low or fields[name].max() > high
    ]
    found += [name for name in ("kv_indptr", "qo_indptr") if (np.diff(fields[name]) < 0).any()]
    pages = np.diff(fields["kv_indptr"])
    return found + ["kv_lens past pages"] * bool((fields["kv_lens"] > pages * case.page_size).any())


def judged(case: Case, lengths: Lengths) -> list[PlanStatus]:
    """Status of each request, one after another."""
    bucket, found = case.bucket, []
    highest, taken = 0, 0
    kv, offsets, table = (array.tolist() for array in lengths.arrays)
    if offsets[0] > 0:
        highest = offsets[0]
    for i, length in enumerate(kv):
        before = highest if i else 0
        begin, end = offsets[i], offsets[i + 1]
        highest = max(highest, end)
        pages = -(-max(length, 0) // case.page_size)
        status = PlanStatus.OK
        if begin < 0 or end < begin:
            status = PlanStatus.QUERY_ORDER
        elif end > bucket.num_tokens:
            status = PlanStatus.TOO_MANY_TOKENS
        elif end - begin > bucket.max_query_len:
            status = PlanStatus.QUERY_TOO_LONG
        elif length < max(end - begin, 0):
            status = PlanStatus.KV_TOO_SHORT
        elif pages > case.width:
            status = PlanStatus.TABLE_TOO_NARROW
        elif pages > bucket.num_pages:
            status = PlanStatus.TOO_MANY_PAGES
        else:
            taken += pages
            if pages and taken > bucket.num_pages:
                status = PlanStatus.TOO_MANY_PAGES
            elif not all(0 <= page < case.cache.num_pages for page in table[i][:pages]):
                status = PlanStatus.PAGE_OUTSIDE_POOL
        if begin != before or end != highest:
            status = PlanStatus.QUERY_ORDER
        found.append(status)
    return found


class LeftOut(RaggedBatch):
    """A batch in which some requests have rows but no keys, and write nothing."""

    def slot_mapping(self, page_size: int) -> Array:
        assert self.page_table is not None
        slots = np.full(self.num_tokens, -1, np.int32)
        for i, kv_len in enumerate(self.kv_lens.tolist()):
            first, end = self.qo_indptr[i : i + 2].tolist()
            for row in range(first, end) if kv_len else ():
                page, offset = divmod(kv_len - end + row, page_size)
                slots[row] = self.page_table[i, page] * page_size + offset
        return slots


def left_out(case: Case, lengths: Lengths, status: list[PlanStatus]) -> RaggedBatch:
    """The batch that is served of `lengths`, the requests with a status having no keys."""
    highest = np.maximum.accumulate(np.maximum(lengths.cu_q_lens, 0))
    highest[0] = 0
    query = np.diff(np.minimum(highest, case.bucket.num_tokens))
    kv = np.where(np.array(status) == PlanStatus.OK, lengths.kv_lens, 0).astype(np.int32)
    batch = LeftOut(query, np.maximum(kv, query), lengths.page_table)
    batch.kv_lens = kv
    batch.max_query_len = min(batch.max_query_len, case.bucket.max_query_len)
    return batch


def differences(case: Case, lengths: Lengths, words: Array) -> list[str]:
    """Names of the fields in which metadata are not what they should be."""
    status = judged(case, lengths)
    batch = left_out(case, lengths, status)
    static = case.static[0]
    plain = case
    if batch.query_lens.max() > case.bucket.max_query_len:
        # The host has no schedule for so long a query; a test of its own looks at ours.
        plain = replace(case, device=CPU, kernel=None)
    host_static, wanted = plain.host(batch)
    assert plain is not case or host_static == static
    ours, theirs = static.layout.views(words), host_static.layout.views(wanted)
    return [name for name, field in theirs.items() if not np.array_equal(ours[name], field)]
