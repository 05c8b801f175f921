"""The FA3 schedule: against recorded plans, by what the kernel reads, by how even it is.

``data/flashinfer_plans_h200.json.gz`` holds plans that the planner of FlashInfer 0.7.2.post1 made
on one H200 (see test_schedule.py).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interop.errors import ArgumentError, LengthError, PlanError, ShapeError
from interop.schedule_fa3 import FA3Shape, plan_fa3

RECORDED = Path(__file__).parents[1] / "data" / "flashinfer_plans_h200.json.gz"
with gzip.open(RECORDED, "rt") as file:
    CASES = [case for case in json.load(file)["cases"] if case["family"] == "fa3"]

NUM_SMS = 132
COLUMNS = ("qo_tile", "qo_start", "kv_start", "qo_len", "kv_len", "head", "work_indptr", "request")


def _shape(case: dict[str, Any]) -> FA3Shape:
    return FA3Shape(
        num_requests=case["batch"],
        num_rows=case["total_num_rows"],
        num_qo_heads=case["num_qo_heads"],
        head_dim_v=case["head_dim"],
        num_sms=NUM_SMS,
        causal=case["causal"],
        window_left=case["window_left"],
    )


def _works(words: Any, plan_info: Any, num_sms: int = NUM_SMS) -> tuple[Any, dict[str, Any]]:
    """Works in the order of the schedule: the thread block of each, and its numbers."""
    starts = dict(zip(COLUMNS, (offset // 4 for offset in plan_info[:8]), strict=True))
    indptr = words[starts.pop("work_indptr") :][: num_sms + 1]
    assert indptr[0] == 0
    count = indptr[-1]
    block = np.repeat(np.arange(num_sms), np.diff(indptr))
    return block, {name: words[start : start + count] for name, start in starts.items()}


def _load(shape: FA3Shape, block: Any, works: dict[str, Any]) -> Any:
    """What each thread block has to do by FlashInfer's own estimate, which ignores windows."""
    tile = shape.tile_rows
    last = works["qo_tile"] + 1 == -(-works["qo_len"] // tile)
    keys = works["kv_len"].astype(np.int64)
    if shape.causal:
        end = keys - works["qo_len"] + (works["qo_tile"] + 1) * tile
        keys = np.where(last, keys, np.clip(end, 0, keys))
    return np.bincount(block, keys + 2 * tile, minlength=shape.num_sms)


def _recorded(case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    words = np.array(case["int_workspace_i32"], np.int32)
    # The file leaves out zeros at the end.
    return _works(np.pad(words, (0, NUM_SMS + words.size)), case["plan_info"])


def test_recorded_plans_are_there() -> None:
    """63 plans each of graph mode and of eager mode."""
    assert [case["graph"] for case in CASES].count(True) == 63
    assert len(CASES) == 126


@pytest.mark.parametrize("case", [case for case in CASES if case["graph"]])
def test_plan_integers_equal_flashinfers(case: dict[str, Any]) -> None:
    """From the sizes of the bucket alone."""
    assert list(_shape(case).plan_info) == case["plan_info"]


@pytest.mark.parametrize("case", CASES)
def test_same_works_as_flashinfer_and_no_less_even(case: dict[str, Any]) -> None:
    """Every number of every work; only which thread block does it may differ."""
    shape = _shape(case)
    words = plan_fa3(shape, case["qo_indptr"], case["kv_indptr"][:-1], case["kv_lens"])
    ours, theirs = _works(words, shape.plan_info), _recorded(case)
    rows = [
        sorted(zip(*(works[name].tolist() for name in sorted(works)), strict=True))
        for _, works in (ours, theirs)
    ]
    assert rows[0] == rows[1]
    assert _load(shape, *ours).max() <= 1.02 * _load(shape, *theirs).max()


@pytest.mark.parametrize(
    ("lens", "heads", "uneven"),
    [
        ([16384], 32, 1.01),
        ([2048] * 8, 32, 1.01),
        ([8192, 512, 300, 4000, 100], 32, 1.01),
        ([1000] * 64, 32, 1.01),
        ([131072], 8, 1.002),
        ([4096], 32, 1.03),
    ],
)
def test_prefill_is_spread_evenly(lens: list[int], heads: int, uneven: float) -> None:
    """The fullest thread block has little more to do than the average one."""
    shape = FA3Shape(len(lens), sum(lens), heads, 128, NUM_SMS)
    qo_indptr = np.concatenate([[0], np.cumsum(lens)])
    words = plan_fa3(shape, qo_indptr, qo_indptr[:-1], lens)
    load = _load(shape, *_works(words, shape.plan_info))
    assert load.max() <= uneven * load.mean()


def test_work_outside_the_window_does_not_count() -> None:
    """With a narrow window all tiles are alike, so each thread block has as many, give or take."""
    shape = FA3Shape(1, 128 * NUM_SMS, 4, 128, NUM_SMS, window_left=63)
    words = plan_fa3(shape, [0, shape.num_rows], [0], [shape.num_rows])
    block, _ = _works(words, shape.plan_info)
    assert set(np.bincount(block)) == {4}


@st.composite
def batches(draw: st.DrawFn) -> tuple[FA3Shape, Any, Any]:
    """Draw a bucket and a batch anywhere within its limits."""
    n = draw(st.integers(1, 6))
    lens = st.lists(st.integers(0, 700), min_size=n, max_size=n)
    query_lens, context = np.array(draw(lens)), np.array(draw(lens))
    shape = FA3Shape(
        num_requests=n + draw(st.integers(0, 2)),
        num_rows=int(query_lens.sum()) + draw(st.sampled_from([0, 0, 3, 500])),
        num_qo_heads=draw(st.integers(1, 9)),
        head_dim_v=draw(st.sampled_from([64, 128, 256])),
        num_sms=draw(st.sampled_from([1, 20, NUM_SMS])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, 0, 100])),
    )
    return shape, query_lens, query_lens + context


@given(batches())
def test_each_tile_of_each_head_is_worked_on_once(batch: tuple[FA3Shape, Any, Any]) -> None:
    """With the offsets and lengths of its own request, within the bucket's capacity."""
    shape, query_lens, kv_lens = batch
    qo_indptr = np.concatenate([[0], np.cumsum(query_lens)])
    kv_starts = 1000 + np.arange(len(kv_lens))
    out = np.full(shape.schedule_words, -7, np.int32)
    assert plan_fa3(shape, qo_indptr, kv_starts, kv_lens, out=out) is out
    assert (out == plan_fa3(shape, qo_indptr, kv_starts, kv_lens)).all()
    _, works = _works(out, shape.plan_info, shape.num_sms)
    assert len(works["head"]) <= shape.capacity
    found = set(zip(*(works[k].tolist() for k in ("request", "qo_tile", "head")), strict=True))
    assert len(found) == len(works["head"])
    assert found == {
        (r, tile, head)
        for r, n in enumerate(query_lens)
        for tile in range(-(-int(n) // shape.tile_rows))
        for head in range(shape.num_qo_heads)
    }
    request = works["request"]
    assert (works["qo_start"] == qo_indptr[request]).all()
    assert (works["kv_start"] == kv_starts[request]).all()
    assert (works["qo_len"] == query_lens[request]).all()
    assert (works["kv_len"] == kv_lens[request]).all()


def test_very_long_prefill_has_one_list_for_all_heads() -> None:
    """Beyond 4096 works a head, as FlashInfer does."""
    shape = FA3Shape(1, 4097 * 128, 8, 128, NUM_SMS)
    assert shape.plan_info[8] == 1
    assert shape.capacity == 4097
    words = plan_fa3(shape, [0, shape.num_rows], [0], [shape.num_rows])
    _, works = _works(words, shape.plan_info)
    assert sorted(works["qo_tile"].tolist()) == list(range(4097))
    assert not works["head"].any()
    assert FA3Shape(1, 4096 * 128, 8, 128, NUM_SMS).plan_info[8] == 0


def test_refusals_name_argument_and_remedy_and_leave_the_buffer() -> None:
    """What exceeds the bucket is refused before anything is written."""
    shape = FA3Shape(2, 300, 4, 128, NUM_SMS)
    out = np.full(shape.schedule_words, 5, np.int32)
    with pytest.raises(PlanError, match=r"qo_indptr: got 3 requests, want 1 to 2.*larger bucket"):
        plan_fa3(shape, [0, 1, 2, 3], [0, 0, 0], [1, 1, 1], out=out)
    with pytest.raises(PlanError, match="got 301 query rows in all, want at most 300"):
        plan_fa3(shape, [0, 301], [0], [301], out=out)
    with pytest.raises(ShapeError, match="kv_starts: got 2 numbers, want 1"):
        plan_fa3(shape, [0, 1], [0, 0], [1], out=out)
    with pytest.raises(ShapeError, match="kv_lens: got 2 numbers, want 1"):
        plan_fa3(shape, [0, 1], [0], [1, 1], out=out)
    with pytest.raises(LengthError, match="qo_indptr: got a length of -1, want 0 or more"):
        plan_fa3(shape, [0, 3, 2], [0, 0], [3, 3], out=out)
    with pytest.raises(LengthError, match="kv_lens: got a length of -2, want 0 or more"):
        plan_fa3(shape, [0, 1], [0], [-2], out=out)
    assert (out == 5).all()
    with pytest.raises(ShapeError, match=r"out: got int64 .*want contiguous int32"):
        plan_fa3(shape, [0, 1], [0], [1], out=out.astype(np.int64))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_rows: got 100000000 rows of 32 query heads"):
        FA3Shape(1, 10**8, 32, 128, NUM_SMS)
