"""Plans made on the device: NumPy's side of the arithmetic, and PyTorch's front end."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_plans import (
    CASES,
    EDGES,
    SHORT,
    Case,
    Lengths,
    differences,
    hostile,
    judged,
    outside,
    random_lengths,
    seeds,
    spoiled,
)
from hypothesis import given, settings

import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import metadata_of
from interop.device_schedule import ScheduleWork, schedule_of
from interop.device_status import PlanStatus
from interop.errors import IsthmusError
from interop.schedule import FA2Shape, cta_tile_q
from torch_backend import PagedKVCache
from torch_backend.device_planning import plan_on_device

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "flashinfer_plans_h200.json.gz"
NUMPY = NumPyArithmetic()

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def planned(case: Case, lengths: Lengths) -> tuple[Any, Any]:
    words, status = metadata_of(NUMPY, case.static[1], *lengths.arrays)
    assert words.dtype == status.dtype == np.int32
    return words, status


@by_case
@settings(max_examples=300)
@given(seed=seeds)
def test_equals_the_host_plan(case: Case, seed: int) -> None:
    lengths = random_lengths(case, seed)
    words, status = planned(case, lengths)
    assert not status.any()
    static, wanted = case.host(lengths.batch())
    assert static == case.static[0]
    assert hash(static) == hash(case.static[0])
    # Words between fields are 0 on both sides here.
    np.testing.assert_array_equal(words, wanted)


@by_case
@settings(max_examples=150)
@given(seed=seeds)
def test_what_does_not_fit_is_left_out(case: Case, seed: int) -> None:
    lengths = spoiled(case, random_lengths(case, seed), seed)
    words, status = planned(case, lengths)
    assert status.tolist() == judged(case, lengths)
    assert differences(case, lengths, words) == []


@pytest.mark.parametrize("case", CASES + EDGES, ids=lambda case: case.name)
@settings(max_examples=100)
@given(seed=seeds)
def test_no_numbers_lead_outside_the_pool(case: Case, seed: int) -> None:
    lengths = hostile(case, seed)
    words, status = planned(case, lengths)
    assert status.tolist() == judged(case, lengths)
    assert outside(case, words) == []


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
def test_equals_the_host_plan_without_rows_or_pages(case: Case) -> None:
    kv = [0, 5] if case.bucket.num_pages else [0, 0]
    table = np.array([[-9, -9], [4999, -9]], np.int32)
    lengths = Lengths(np.array(kv, np.int32), np.zeros(3, np.int32), table)
    words, status = planned(case, lengths)
    assert not status.any()
    static, wanted = case.host(lengths.batch())
    assert static == case.static[0]
    np.testing.assert_array_equal(words, wanted)


@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=100)
@given(seed=seeds)
def test_longer_queries_than_promised_do_not_crowd_out_others(split: bool, seed: int) -> None:
    """Their tiles are no more than were promised, so those of the others have their places."""
    # A tile has 4 rows, a request with 7 rows two of them.
    case = Case("", replace(SHORT, num_tokens=60), heads=(32, 8), width=100, split=split)
    rng = np.random.default_rng(seed)
    right = random_lengths(case, seed, 9)
    query = np.diff(right.cu_q_lens)
    at = rng.integers(9)
    query[at] = 60 - (query.sum() - query[at])
    offsets = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    kv = right.kv_lens
    kv[at] = max(kv[at], query[at])
    lengths = replace(right, cu_q_lens=offsets)
    words, status = planned(case, lengths)
    fits = status == 0
    assert fits.sum() >= 7 or query[at] <= 7

    shape = case.static[1].schedule
    assert shape is not None
    schedule = case.static[0].layout.views(words)["fa2_schedule"]
    places = shape.places
    flags = schedule[places.block_valid_mask // 4 :].view(np.uint8)[: shape.capacity]
    items = int(flags.sum())
    assert flags[:items].all()
    request, qo_tile, kv_tile = (
        schedule[place // 4 :][:items]
        for place in (places.request_indices, places.qo_tile_indices, places.kv_tile_indices)
    )
    chunk = schedule[places.kv_chunk_size // 4]
    for i in np.flatnonzero(fits):
        chunks = max(-(-int(kv[i]) // int(chunk)), 1) if split else 1
        mine = request == i
        found = sorted(zip(qo_tile[mine].tolist(), kv_tile[mine].tolist(), strict=True))
        tiles = -(-int(query[i]) * 4 // shape.cta_tile_q)
        assert found == [(t, k) for t in range(tiles) for k in range(chunks)]
    o_indptr = schedule[places.o_indptr // 4 :][: shape.num_requests + 1]
    if not split:
        np.testing.assert_array_equal(o_indptr[: offsets.size], offsets)
        return
    assert 4 * o_indptr[-1] * 32 * (128 + 1) <= shape.scratch_bytes
    merge = schedule[places.merge_indptr // 4 :][: 60 + 1]
    parts = np.diff(merge)
    assert (parts >= 0).all()
    for i in range(9):
        own = parts[offsets[i] : offsets[i + 1]]
        assert own.sum() == o_indptr[i + 1] - o_indptr[i]
        assert own[:7].all()
        assert not own[7:].any()


with gzip.open(RECORDED, "rt") as file:
    RECORDED_PLANS = [
        case for case in json.load(file)["cases"] if case["family"] == "fa2" and case["graph"]
    ]


def test_schedules_equal_those_that_flashinfer_made() -> None:
    """All that were recorded in graph mode, but those with a chunk size of the caller's."""
    checked = 0
    for case in RECORDED_PLANS:
        if case["fixed_split_size"] > 0:
            continue
        rows, batch, info = case["total_num_rows"], case["batch"], case["plan_info"]
        group = case["num_qo_heads"] // case["num_kv_heads"]
        shape = FA2Shape(
            num_requests=batch,
            num_rows=rows,
            num_qo_heads=case["num_qo_heads"],
            num_kv_heads=case["num_kv_heads"],
            head_dim_v=case["head_dim"],
            page_size=case["page_size"],
            num_sms=132,
            cta_tile_q=cta_tile_q((rows - batch + 1) * group, case["head_dim"]),
            capacity=info[0],
            split=not case["disable_split_kv"],
            window_left=case["window_left"],
        )
        offsets = np.array(case["qo_indptr"], np.int32)
        pages = np.diff(np.array(case["kv_indptr"], np.int32))
        owner = NUMPY.owners(offsets[1:], rows + 1)
        work = ScheduleWork(np.diff(offsets), offsets[:-1], offsets[1:], owner, pages)
        width = max(int(pages.max()), 1)
        words = schedule_of(NUMPY, shape, work, width=width, flashinfer_chunks=True)
        wanted = np.array(case["int_workspace_i32"], np.int32)
        if offsets[-1] < rows:
            # Here the rows of nobody belong to nobody; a plan has a request for them.
            words[shape.places.total_num_rows // 4] = offsets[-1]
            if shape.split:
                words[shape.places.merge_indptr // 4 :][offsets[-1] + 1 : rows + 1] = 0
        np.testing.assert_array_equal(words, wanted)
        checked += 1
    assert checked > 90


# PyTorch's front end

SPEC = AttentionSpec(4, 2, 8)
BUCKET = Bucket(4, 8, 12)
LENS = torch.tensor([6, 3, 5, 9], dtype=torch.int32)
OFFSETS = torch.tensor([0, 1, 4, 4, 6], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]], dtype=torch.int32)


def new_cache() -> PagedKVCache:
    return PagedKVCache(SPEC, num_layers=2, num_pages=12, page_size=4, dtype="float32")


def rows(cache: PagedKVCache) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)
    return [torch.randn(8, heads, 8, generator=generator) for heads in (4, 2, 2)]


def test_attends_as_with_a_host_plan() -> None:
    cache = new_cache()
    inputs = rows(cache)
    batch = RaggedBatch(OFFSETS.diff(), LENS, TABLE)
    host = torch_backend.plan(SPEC, cache.spec, batch, bucket=BUCKET)
    plan, status = plan_on_device(SPEC, cache.spec, LENS, OFFSETS, TABLE, bucket=BUCKET)
    assert plan.static == host.static
    assert status.tolist() == [0, 0, 0, 0]
    wanted = torch_backend.paged_attention(*inputs, cache, host, 1, return_lse=True)
    pools = cache.k.clone(), cache.v.clone()
    inputs = rows(cache)
    found = torch_backend.paged_attention(*inputs, cache, plan, 1, return_lse=True)
    for ours, theirs in zip((*found, cache.k, cache.v), (*wanted, *pools), strict=True):
        assert torch.equal(ours, theirs)


def test_requests_that_fit_are_served_and_others_left_alone() -> None:
    cache = new_cache()
    inputs = rows(cache)
    before = cache.k.clone()
    lens, table = LENS.clone(), TABLE.clone()
    lens[0], table[3, 1] = 2**31 - 1, 12
    plan, status = plan_on_device(SPEC, cache.spec, lens, OFFSETS, table, bucket=BUCKET)
    assert status.tolist() == [PlanStatus.TABLE_TOO_NARROW, 0, 0, PlanStatus.PAGE_OUTSIDE_POOL]
    out, lse = torch_backend.paged_attention(*inputs, cache, plan, 0, return_lse=True)
    alone = RaggedBatch([3], [3], [[10]])
    wanted = torch_backend.ragged_attention(
        *(x[1:4] for x in inputs),
        torch_backend.plan(replace(SPEC_OWN), None, alone),
    )
    assert torch.allclose(out[1:4], wanted, atol=1e-6)
    assert not out[[0, 4, 5, 6, 7]].any()
    assert lse[[0, 4, 5, 6, 7]].isneginf().all()
    changed = (cache.k != before).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[10, 0], [10, 1], [10, 2]]


SPEC_OWN = AttentionSpec(4, 2, 8, dtype="float32")


def test_a_plan_is_overwritten_where_asked() -> None:
    cache = new_cache()
    plan, _ = plan_on_device(SPEC, cache.spec, LENS, OFFSETS, TABLE, bucket=BUCKET)
    before = plan.metadata.data_ptr()
    one = torch.tensor([1], dtype=torch.int32)
    again, status = plan_on_device(
        SPEC,
        cache.spec,
        one,
        torch.tensor([0, 1], dtype=torch.int32),
        TABLE[:1, ::2],
        bucket=BUCKET,
        into=plan,
    )
    assert again is plan
    assert plan.metadata.data_ptr() == before
    assert status.tolist() == [0]
    host = torch_backend.plan(SPEC, cache.spec, RaggedBatch([1], [1], [[7]]), bucket=BUCKET)
    for name, field in host.views.items():
        assert torch.equal(plan.views[name], field), name


def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    cuda = replace(new_cache().spec, device="cuda")
    two = torch.zeros(2, 3, dtype=torch.int32)
    return {
        "int64": ({"kv_lens": LENS.long()}, r"kv_lens: got int64, want int32.*Cast kv_lens"),
        "float": ({"page_table": TABLE.float()}, r"page_table: got float32, want int32"),
        "numpy": ({"cu_q_lens": OFFSETS.numpy()}, r"cu_q_lens: got numpy.ndarray, want a torch"),
        "offsets": ({"cu_q_lens": OFFSETS[1:]}, r"cu_q_lens: got \[4\], want \[5\]"),
        "too many": (
            {"bucket": Bucket(3, 8, 12)},
            r"kv_lens: got \[4\], want \[requests\], 1 to 3",
        ),
        "rank": ({"kv_lens": two}, r"kv_lens: got \[2, 3\], want \[requests\]"),
        "table": ({"page_table": TABLE[:2]}, r"page_table: got \[2, 3\], want \[4, width\]"),
        "no table": ({"page_table": TABLE[:, :0]}, r"page_table: got \[4, 0\]"),
        "promise": (
            {"bucket": replace(BUCKET, without_context=True)},
            r"bucket.without_context: got True .*lengths are not known",
        ),
        "no bucket": ({"bucket": None}, r"bucket: got NoneType, want a Bucket"),
        "no cache": ({"cache_spec": None}, r"cache_spec: got NoneType, want a CacheSpec"),
        "device": ({"cache_spec": cuda}, r"kv_lens: got cpu, want a cuda device"),
        "kernel": ({"kernel": "fa3"}, r"kernel: got 'fa3', want None, or one of reference"),
        "heads": ({"spec": AttentionSpec(4, 4, 8)}, r"cache_spec.num_kv_heads: got 2, want 4"),
        "into": (
            {"into": plan_on_device(**ARGUMENTS(), bucket=Bucket(5, 8, 12))[0]},
            r"into: got a plan on cpu with another static part",
        ),
    }


def ARGUMENTS() -> dict[str, Any]:  # noqa: N802
    return {
        "spec": SPEC,
        "cache_spec": new_cache().spec,
        "kv_lens": LENS,
        "cu_q_lens": OFFSETS,
        "page_table": TABLE,
    }


@pytest.mark.parametrize("name", refusals())
def test_refused_by_name(name: str) -> None:
    changes, message = refusals()[name]
    arguments = ARGUMENTS() | {"bucket": BUCKET} | changes
    into = arguments.get("into")
    before = None if into is None else into.metadata.clone()
    with pytest.raises(IsthmusError, match=message):
        plan_on_device(**arguments)
    if into is not None:
        assert torch.equal(into.metadata, before)
