"""The FA2 schedule: against recorded plans, by what the kernel reads, by measured time.

``data/flashinfer_plans_h200.json.gz`` holds plans that the planners of FlashInfer 0.7.2.post1 made
on one H200: inputs, plan integers, workspace sizes and the zeroed integer workspace afterwards.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interop.errors import ArgumentError, LengthError, PlanError, ShapeError
from interop.schedule import (
    FA2Shape,
    choose_chunk,
    cta_tile_q,
    fa2_shape,
    flashinfer_chunk_pages,
    plan_fa2,
)

RECORDED = Path(__file__).parents[1] / "data" / "flashinfer_plans_h200.json.gz"
with gzip.open(RECORDED, "rt") as file:
    FA2_CASES = [case for case in json.load(file)["cases"] if case["family"] == "fa2"]

NUM_SMS = 132


def _case_id(case: dict[str, Any]) -> str:
    mode = "graph" if case["graph"] else "eager"
    return (
        f"{mode}-{case['batch']}x{case['total_num_rows']}-heads{case['num_qo_heads']}"
        f"by{case['num_kv_heads']}-page{case['page_size']}-window{case['window_left']}"
    )


def _cases(*, graph: bool) -> list[Any]:
    return [pytest.param(case, id=_case_id(case)) for case in FA2_CASES if case["graph"] == graph]


def _shape(case: dict[str, Any], tile: int, capacity: int, *, split: bool) -> FA2Shape:
    return FA2Shape(
        num_requests=case["batch"],
        num_rows=case["total_num_rows"],
        num_qo_heads=case["num_qo_heads"],
        num_kv_heads=case["num_kv_heads"],
        head_dim_v=case["head_dim"],
        page_size=case["page_size"],
        num_sms=NUM_SMS,
        cta_tile_q=tile,
        capacity=capacity,
        split=split,
        window_left=case["window_left"],
    )


def _lengths(case: dict[str, Any]) -> tuple[Any, Any]:
    return np.diff(case["qo_indptr"]), np.diff(case["kv_indptr"])


def _chunk(shape: FA2Shape, case: dict[str, Any]) -> int:
    if case["fixed_split_size"] > 0:
        return int(case["fixed_split_size"])
    return flashinfer_chunk_pages(shape, *_lengths(case))


def test_all_recorded_plans_are_used() -> None:
    """The two tests below cover 254 plans: none is left out, whatever its options."""
    assert len(_cases(graph=True)) == len(_cases(graph=False)) == 127


@pytest.mark.parametrize("case", _cases(graph=True))
def test_equals_flashinfers_graph_mode_plan(case: dict[str, Any]) -> None:
    """Plan integers, workspace sizes and every byte, from the inputs alone."""
    batch, rows = case["batch"], case["total_num_rows"]
    group = case["num_qo_heads"] // case["num_kv_heads"]
    tile = cta_tile_q((rows - batch + 1) * group, case["head_dim"])
    capacity = max(2 * NUM_SMS // case["num_kv_heads"], -(-rows * group // tile) + batch - 1)
    shape = _shape(case, tile, capacity, split=not case["disable_split_kv"])

    assert list(shape.plan_info) == case["plan_info"]
    assert [shape.scratch_bytes, shape.places.end] == case["workspace"]
    query_lens, kv_pages = _lengths(case)
    chunk = _chunk(shape, case) if shape.split else None
    words = plan_fa2(shape, query_lens, kv_pages, kv_chunk_pages=chunk)
    assert words.tolist() == case["int_workspace_i32"]


@pytest.mark.parametrize("case", _cases(graph=False))
def test_equals_flashinfers_eager_plan(case: dict[str, Any]) -> None:
    """Array by array: an eager plan has no padding, no flags and no row count, so other offsets."""
    (capacity, rows, _, tile, request, qo_tile, kv_tile, merge, o_indptr, chunk_size, *_, split) = (
        case["plan_info"]
    )
    query_lens, kv_pages = _lengths(case)
    group = case["num_qo_heads"] // case["num_kv_heads"]
    assert tile == cta_tile_q(int(query_lens.sum()) * group // case["batch"], case["head_dim"])
    shape = _shape(case, tile, capacity, split=bool(split))
    chunk = None if case["disable_split_kv"] else _chunk(shape, case)
    words = plan_fa2(shape, query_lens, kv_pages, kv_chunk_pages=chunk if split else None)

    recorded = np.array(case["int_workspace_i32"], np.int32)
    places = shape.places
    pairs = [
        (places.request_indices, request, capacity),
        (places.qo_tile_indices, qo_tile, capacity),
        (places.kv_tile_indices, kv_tile, capacity),
        (places.o_indptr, o_indptr, case["batch"] + 1),
    ]
    if split:
        pairs.append((places.merge_indptr, merge, rows + 1))
    for ours, theirs, count in pairs:
        assert (words[ours // 4 :][:count] == recorded[theirs // 4 :][:count]).all()
    flags = words.view(np.uint8)[places.block_valid_mask :][:capacity]
    assert flags.all()
    if split or chunk is None:
        assert words[places.kv_chunk_size // 4] == recorded[chunk_size // 4]
    else:  # FlashInfer's search found a chunk for all of the longest request; the kernel ignores it
        assert recorded[chunk_size // 4] == chunk * case["page_size"]
    assert shape.scratch_bytes == case["workspace"][0]


# Microseconds per layer on an H200: FA2 decode, 32 query heads, 8 KV heads, head_dim 128, bf16,
# pages of 16, at these fixed chunks; the last number is for the variant that never splits.
COLUMNS = (512, 1024, 2048, 4096)
MEASURED = {
    "64, one of 32k": ([32768] + [512] * 63, (83, 80, 88, 104), 466),
    "128, one of 64k": ([65536] + [1024] * 127, (221, 208, 205, 226), 979),
    "64, four of 16k": ([16384] * 4 + [256] * 60, (98, 95, 102, 104), 246),
    "64 up to 4096": ((64, 4096), (151, 148, 149, 153), 153),
    "32 up to 2048": ((32, 2048), (50, 51, 47, 47), 47),
    "256 up to 2048": ((256, 2048), (308, 293, 276, 277), 277),
    "32 of 1024": ([1024] * 32, (49, 40, 40, 40), 40),
    "128 of 2048": ([2048] * 128, (284, 276, 259, 259), 257),
    "16 of 2048": ([2048] * 16, (47, 43, 45, 44), 47),
    "8 of 8192": ([8192] * 8, (81, 77, 73, 82), 125),
}


def _decode_shape(num_requests: int, *, split: bool = True, **changes: int) -> FA2Shape:
    sizes = {
        "num_requests": num_requests,
        "num_rows": num_requests,
        "max_query_len": 1,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim_v": 128,
        "page_size": 16,
        "num_sms": NUM_SMS,
    }
    return fa2_shape(**(sizes | changes), split=split)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("order", ["as measured", "reversed"])
def test_chosen_chunk_is_within_3_percent_of_the_best_measured(name: str, order: str) -> None:
    """In the bucket's own capacity; random batches by their class, over several seeds.

    Between two columns the time is taken to be linear in the logarithm of the chunk.
    """
    lens, times, never = MEASURED[name]
    if isinstance(lens, tuple):
        batches = [np.random.default_rng(i).integers(1, lens[1] + 1, lens[0]) for i in range(5)]
    else:
        batches = [np.array(lens)]
    for kv_lens in batches:
        kv_pages = -(-kv_lens // 16)
        if order == "reversed":
            kv_pages = kv_pages[::-1]
        shape = _decode_shape(len(kv_lens))
        chunk, split = choose_chunk(shape, np.ones_like(kv_pages), kv_pages)
        assert COLUMNS[0] <= chunk * 16 <= COLUMNS[-1]
        time = np.interp(np.log2(chunk * 16), np.log2(COLUMNS), times)
        assert time <= 1.03 * min(times)
        assert (time if split else never) <= 1.03 * min(*times, never)


@pytest.mark.parametrize(
    ("kv_lens", "split"),
    [
        ([2048] * 128, False),
        ([1024] * 32, False),
        ([8192] * 256, False),
        ([32768] + [512] * 63, True),
        ([131072], True),
        ([0] * 8, False),
    ],
)
def test_splits_only_where_it_pays(kv_lens: list[int], split: bool) -> None:
    """Even batches that fill the card are not split, long requests among short ones are."""
    pages = -(-np.array(kv_lens) // 16)
    choice = choose_chunk(_decode_shape(len(kv_lens)), np.ones_like(pages), pages)
    assert choice.split == split
    assert split or choice.pages == max(1, pages.max())


def test_nothing_to_do() -> None:
    """A batch without a query has no work items, and nothing to split."""
    shape = _decode_shape(8)
    assert choose_chunk(shape, [0] * 8, [9] * 8) == (9, False)
    words = plan_fa2(shape, [0] * 8, [9] * 8)
    words[shape.places.kv_chunk_size // 4] = 0
    assert not words.any()


def test_rows_that_share_a_request_are_not_taken_for_one_each() -> None:
    """Two rows and two tiles in two requests look like plain decode, but are one request's."""
    shape = FA2Shape(2, 2, 16, 1, 128, 16, NUM_SMS, 16, 8)
    words = plan_fa2(shape, [2, 0], [4, 1], kv_chunk_pages=2)
    places = shape.places
    assert words[:4].tolist() == [0, 0, 0, 0]
    assert words[places.qo_tile_indices // 4 :][:4].tolist() == [0, 0, 1, 1]
    assert words[places.kv_tile_indices // 4 :][:4].tolist() == [0, 1, 0, 1]
    assert words[places.o_indptr // 4 :][:3].tolist() == [0, 4, 4]
    assert words[places.merge_indptr // 4 :][:3].tolist() == [0, 2, 4]


def test_chunk_grows_until_the_items_fit() -> None:
    """However tight the capacity, a chunk is chosen that fits it."""
    kv_pages = np.array([2048] + [32] * 63)
    chunks = []
    for capacity in (64, 65, 68, 80, 128):
        shape = FA2Shape(64, 64, 32, 8, 128, 16, NUM_SMS, 16, capacity)
        words = plan_fa2(shape, np.ones(64, np.int32), kv_pages)
        chunks.append(int(words[shape.places.kv_chunk_size // 4]) // 16)
        assert np.sum(-(-kv_pages // chunks[-1])) <= capacity
    assert chunks == [2048, 1024, 512, 128, 64]


@st.composite
def batches(draw: st.DrawFn) -> tuple[FA2Shape, Any, Any]:
    """Draw a bucket and a batch anywhere within its limits."""
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 3), (8, 4), (3, 16)]))
    n = draw(st.integers(1, 6))
    max_query_len = draw(st.sampled_from([1, 2, 5, 40, 150]))
    query_lens = draw(st.lists(st.integers(0, max_query_len), min_size=n, max_size=n).map(np.array))
    kv_pages = draw(st.lists(st.integers(0, 90), min_size=n, max_size=n).map(np.array))
    shape = fa2_shape(
        num_requests=n + draw(st.integers(0, 2)),
        num_rows=max(1, int(query_lens.sum())) + draw(st.sampled_from([0, 0, 3])),
        max_query_len=max_query_len,
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim_v=draw(st.sampled_from([64, 128, 256])),
        page_size=draw(st.sampled_from([1, 16, 64])),
        num_sms=draw(st.sampled_from([1, 20, NUM_SMS])),
        split=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 30, 700])),
    )
    return shape, query_lens, kv_pages


@given(batches(), st.data())
def test_kernel_reads_each_key_once_and_merges_each_part_once(
    batch: tuple[FA2Shape, Any, Any], data: st.DataObject
) -> None:
    """Follow the kernel's own index arithmetic through the schedule."""
    shape, query_lens, kv_pages = batch
    words = plan_fa2(shape, query_lens, kv_pages)
    places, tile, group = shape.places, shape.cta_tile_q, shape.group_size
    flags = words.view(np.uint8)[places.block_valid_mask :][: shape.capacity]
    num_items = int(flags.sum())
    assert flags[:num_items].all()
    request, qo_tile, kv_tile = (
        words[place // 4 :][:num_items].tolist()
        for place in (places.request_indices, places.qo_tile_indices, places.kv_tile_indices)
    )
    o_indptr = words[places.o_indptr // 4 :][: shape.num_requests + 1].tolist()
    chunk_size = int(words[places.kv_chunk_size // 4])
    num_rows = int(words[places.total_num_rows // 4])
    assert num_rows == query_lens.sum()
    if not shape.split:
        assert o_indptr[: len(query_lens) + 1] == [0, *np.cumsum(query_lens)]
        assert not any(kv_tile)

    # Any length that fills as many pages.
    slack = [data.draw(st.integers(0, shape.page_size - 1)) if p else 0 for p in kv_pages]
    kv_lens = (kv_pages * shape.page_size - slack).tolist()
    window = shape.window_left if shape.window_left >= 0 else max(kv_lens)
    tiles_of = [-(-int(q) * group // tile) for q in query_lens]
    read: dict[tuple[int, int], list[tuple[int, int]]] = {}
    written: list[tuple[int, int, int]] = []  # partial row, request, query row
    for r, t, k in zip(request, qo_tile, kv_tile, strict=True):
        kv_len, qo_len = kv_lens[r], int(query_lens[r])
        start = max(0, kv_len + t * tile // group - qo_len - window)
        if shape.split:
            span = tuple(min(i * chunk_size + start, kv_len) for i in (k, k + 1))
            parts = -(-min(max(kv_len, 1), window + tile) // chunk_size)
        else:
            span, parts = (min(start, kv_len), kv_len), 1
        read.setdefault((r, t), []).append(span)
        first, end = t * tile // group, min(qo_len, -(-(t + 1) * tile // group))
        if t * tile % group == 0:  # else the row's first heads belong to the tile before
            written += [(o_indptr[r] + q * parts + k, r, q) for q in range(first, end)]
        else:
            written += [(o_indptr[r] + q * parts + k, r, q) for q in range(first + 1, end)]

    assert set(read) == {(r, t) for r, tiles in enumerate(tiles_of) for t in range(tiles)}
    for (r, t), spans in read.items():
        start = max(0, kv_lens[r] + t * tile // group - int(query_lens[r]) - window)
        assert spans[0][0] == min(start, kv_lens[r])
        # Behind a sliding window the kernel stops where the tile's last row, being causal, stops.
        last_row = min(int(query_lens[r]), -(-(t + 1) * tile // group))
        seen = kv_lens[r] if shape.window_left < 0 else kv_lens[r] - int(query_lens[r]) + last_row
        assert seen <= spans[-1][1] <= kv_lens[r]
        assert all(a[1] == b[0] for a, b in pairwise(spans))

    assert sorted(row for row, _, _ in written) == list(range(o_indptr[-1]))
    if shape.split:
        assert 4 * o_indptr[-1] * shape.num_qo_heads * (shape.head_dim_v + 1) <= shape.scratch_bytes
        merge = words[places.merge_indptr // 4 :][: num_rows + 1].tolist()
        qo_indptr = [0, *np.cumsum(query_lens).tolist()]
        merged = [
            (part, r, q)
            for r, n in enumerate(query_lens)
            for q in range(n)
            for part in range(merge[qo_indptr[r] + q], merge[qo_indptr[r] + q + 1])
        ]
        assert sorted(written) == merged


@given(batches())
def test_one_plan_is_the_same_however_it_is_asked_for(batch: tuple[FA2Shape, Any, Any]) -> None:
    """Into a used buffer, padded with empty requests, with the chunk that would be chosen."""
    shape, query_lens, kv_pages = batch
    words = plan_fa2(shape, query_lens, kv_pages)
    out = np.full(shape.schedule_words, -7, np.int32)
    assert plan_fa2(shape, query_lens, kv_pages, out=out) is out
    assert (out == words).all()
    padding = (0, shape.num_requests - len(query_lens))
    padded = plan_fa2(shape, np.pad(query_lens, padding), np.pad(kv_pages, padding))
    assert (padded == words).all()
    if shape.split:
        chunk = choose_chunk(shape, query_lens, kv_pages).pages
        chosen = plan_fa2(shape, query_lens, kv_pages, kv_chunk_pages=chunk)
    else:
        chosen = plan_fa2(shape, query_lens)
    assert (chosen == words).all()


def test_static_part_is_a_value() -> None:
    """Equal buckets have equal shapes, with equal hashes, whatever was computed from them."""
    shape = _decode_shape(64)
    assert shape.plan_info == _decode_shape(64).plan_info
    assert shape == _decode_shape(64)
    assert hash(shape) == hash(_decode_shape(64))
    assert shape != _decode_shape(64, split=False)
    assert shape.plan_info[13:] == (1, 1)
    assert _decode_shape(64, split=False).plan_info[13:] == (1, 0)


@pytest.mark.parametrize(("num_requests", "capacity"), [(1, 96), (64, 160), (128, 224), (256, 352)])
def test_capacity_of_decode_buckets(num_requests: int, capacity: int) -> None:
    """Two fillings of the card beyond one item a request; without splitting one item a request."""
    shape = _decode_shape(num_requests)
    assert shape.capacity == capacity
    assert shape.scratch_bytes == 32 * 4 * capacity * (128 + 1) * 4
    unsplit = _decode_shape(num_requests, split=False)
    assert (unsplit.capacity, unsplit.scratch_bytes) == (num_requests, 0)


def test_refusals_name_argument_and_remedy_and_leave_the_buffer() -> None:
    """What exceeds the bucket is refused before anything is written."""
    shape = _decode_shape(4)
    ones, out = np.ones(4, np.int32), np.full(shape.schedule_words, 5, np.int32)
    with pytest.raises(PlanError, match=r"query_lens: got 5 requests, want 1 to 4.*larger bucket"):
        plan_fa2(shape, np.ones(5, np.int32), np.ones(5, np.int32), out=out)
    with pytest.raises(PlanError, match="query_lens: got 0 requests"):
        plan_fa2(shape, np.ones(0, np.int32), np.ones(0, np.int32), out=out)
    with pytest.raises(PlanError, match="got 5 query rows in all, want at most 4"):
        plan_fa2(shape, [2, 1, 1, 1], ones, out=out)
    with pytest.raises(PlanError, match=r"got 400 work items.*want at most 96.*larger KV chunks"):
        plan_fa2(shape, ones, ones * 100, kv_chunk_pages=1, out=out)
    wide = FA2Shape(1, 64, 8, 8, 128, 16, NUM_SMS, 16, 64)
    with pytest.raises(PlanError, match="got 4294967296 work items"):
        plan_fa2(wide, [64], [2**30], kv_chunk_pages=1)
    with pytest.raises(ArgumentError, match="kv_chunk_pages: got 0, want 1 or more"):
        plan_fa2(shape, ones, ones, kv_chunk_pages=0, out=out)
    with pytest.raises(LengthError, match="kv_pages: got a length of -1"):
        plan_fa2(shape, ones, [1, 1, -1, 1], out=out)
    with pytest.raises(LengthError, match="query_lens: got a length of -3"):
        plan_fa2(shape, [1, -3, 1, 1], ones, out=out)
    with pytest.raises(ShapeError, match="kv_pages: got 3 numbers, want 4"):
        plan_fa2(shape, ones, ones[:3], out=out)
    with pytest.raises(ShapeError, match="kv_pages: got none, want pages of each request"):
        plan_fa2(shape, ones, out=out)
    assert (out == 5).all()
    with pytest.raises(ShapeError, match=r"out: got int64 .*want contiguous int32"):
        plan_fa2(shape, ones, ones, out=out.astype(np.int64))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_rows: got 1000000000 rows"):
        _decode_shape(4, num_rows=10**9, max_query_len=10**9)


@pytest.mark.parametrize(
    ("packed_len", "head_dim_v", "tile"),
    [
        (16, 128, 16),
        (17, 128, 64),
        (64, 128, 64),
        (65, 128, 128),
        (65, 256, 64),
        (16, 256, 16),
        (32, 512, 16),
        (33, 512, 32),
    ],
)
def test_query_tile(packed_len: int, head_dim_v: int, tile: int) -> None:
    """The rule of FlashInfer 0.7.2 at its edges."""
    assert cta_tile_q(packed_len, head_dim_v) == tile
