"""A cache that is spread by token over processes: the same attention as over one whole cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dcp_ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dcp_problem import SMALL, Shared, Sizes, assert_dealt, shared
from dcp_ranks import run_ranks
from problem import assert_within, to_torch, tolerance_of

import torch_backend
from interop import AttentionSpec
from interop.dcp import COMBINES, wire_bytes
from interop.errors import ArgumentError, DeviceError, FrameworkError, PlanError, ShapeError
from torch_backend import PagedKVCache, dcp


def check(problem: Shared, found: list[Any], name: str) -> None:
    """Compare what ranks found with the oracle, and with one another."""
    want, want_lse = problem.answer()
    tolerance = tolerance_of(problem.dtype)
    for combine in COMBINES:
        out = np.concatenate([each[combine][0] for each in found], 1)
        lse = np.concatenate([each[combine][1] for each in found], 1)
        # Rounded by each rank, and once more in the sum.
        assert_within(f"out of {name}", out, want, 2 * tolerance.out)
        assert_within(f"lse of {name}", lse, want_lse, 2 * tolerance.lse)
        assert not out[np.isneginf(want_lse)].any(), name
    whole = problem.pools_after()
    for rank, each in enumerate(found):
        assert_dealt(problem, rank, each["pools"], whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_agrees_with_the_oracle(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(tmp_path, "agree", ranks)
    problems = dict(dcp_ranks.problems(ranks))
    assert len(problems) >= 15
    for name, problem in problems.items():
        check(problem, [each[name] for each in found], name)


def test_lse_are_far_apart_in_the_problem_of_that_name() -> None:
    """Weights of the wrong base would be another power of the right ones."""
    problem = dict(dcp_ranks.problems(4))["LSE far apart"]
    lses = np.stack([problem.lse_of(rank) for rank in range(4)])
    spread = np.where(np.isfinite(lses), lses, np.nan)
    assert np.nanmax(np.nanmax(spread, 0) - np.nanmin(spread, 0)) > 10
    assert np.isneginf(lses).any()


def test_heads_over_groups_and_tokens_within_them(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, "heads_and_tokens", 4)
    problem = shared(AttentionSpec(8, 2, 8), Sizes(2), [1, 4], [11, 9])
    want, want_lse = problem.answer()
    for combine in COMBINES:
        out, lse = (np.concatenate([each[combine][i] for each in found], 1) for i in (0, 1))
        assert_within("out", out, want, tolerance_of("float32").out)
        assert_within("lse", lse, want_lse, tolerance_of("float32").lse)


def test_pages_of_8_bits(tmp_path: Path) -> None:
    ranks = 2
    found = run_ranks(tmp_path, "eight_bits", ranks)
    spec = replace(dcp_ranks.SPEC, dtype="float32")
    one = PagedKVCache(
        spec, num_layers=1, num_pages=16, page_size=8, dtype="fp8", scales=(0.02, 0.03)
    )
    # New rows of long queries are attended to before they are rounded to 8 bits.
    for name, lens, limit in (
        ("prefill", ([18, 3], [18, 3]), 0.2),
        ("decode", ([1, 1], [19, 4]), 1e-5),
    ):
        problem = shared(spec, Sizes(ranks, 2), *lens)
        plan = torch_backend.plan(spec, one.spec, problem.batch)
        rows = [to_torch(x, "cpu") for x in (problem.query, problem.key, problem.value)]
        want = torch_backend.paged_attention(*rows, one, plan, 0)
        assert isinstance(want, torch.Tensor)
        for way in range(2):
            out = np.concatenate([each[name][way] for each in found], 1)
            np.testing.assert_allclose(out, want.numpy(), rtol=0, atol=limit)


def test_ranks_that_disagree_all_hear_of_it(tmp_path: Path) -> None:
    ranks = 4
    *others, odd = run_ranks(tmp_path, "disagree", ranks)
    for name in ("spec", "cache_spec", "batch", "interleave", "bucket", "kernel"):
        for each in (*others, odd):
            want = f"PlanError: {name}: got different ones on rank 0 and rank {ranks - 1}"
            assert each[name].startswith(want), each[name]
    assert odd["a window"].startswith("ArgumentError: spec.sliding_window: got 4 with decode")
    assert odd["no batch"].startswith("ArgumentError: batch: got NoneType")
    for name, each in itertools.product(("a window", "no batch"), others):
        assert each[name].startswith(f"PlanError: plan: got arguments that rank {ranks - 1} refus")
    assert {each["nothing"] for each in (*others, odd)} == {"nothing"}


def test_the_others_do_not_wait_longer_than_the_timeout(tmp_path: Path) -> None:
    first, *others = run_ranks(tmp_path, "refuses", 2)
    assert first["said"].startswith("ShapeError: query: got")
    for each in others:
        assert each["said"].startswith("CollectiveError: all_gather over 2 ranks failed on rank")
        assert each["seconds"] < 20  # the group's timeout is 4


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    for each in run_ranks(tmp_path, "dies", 4, lost=1):
        assert each["said"].startswith("CollectiveError: "), each["said"]
        assert "another rank has ended" in each["said"]


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


PROBLEM = shared(SMALL, Sizes(1), [1, 3], [9, 12])


def plan_of(group: Any, spec: AttentionSpec = SMALL, **options: Any) -> Any:
    cache = dcp_ranks.cache_of(PROBLEM, 0)
    return dcp.plan(spec, cache.spec, PROBLEM.batch, group, **options)


@pytest.mark.parametrize("verify", [True, False])
def test_what_one_rank_refuses(group: Any, verify: bool) -> None:
    def refuse(error: type, match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            plan_of(group, verify=verify, **options)

    refuse(ArgumentError, r"spec.causal: .*decode context", spec=replace(SMALL, causal=False))
    refuse(ArgumentError, r"sliding_window: got 4 with", spec=replace(SMALL, sliding_window=4))
    refuse(ArgumentError, r"interleave: got 3 with pages of 4", interleave=3)
    refuse(ArgumentError, r"interleave: got 0, want a positive", interleave=0)


def test_a_group_that_is_none(group: Any) -> None:
    for wrong in (None, 3):
        with pytest.raises(ArgumentError, match=r"group: got a .*new_group"):
            plan_of(wrong)


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ArgumentError, match=r"not initialised.*init_process_group"):
        plan_of(None)


def test_calls_are_checked_before_any_collective(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(group)
    cache = dcp_ranks.cache_of(PROBLEM, 0)
    query, key, value = dcp_ranks.rows_of(PROBLEM, 0)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        monkeypatch.setattr(dcp, name, lambda *_: pytest.fail("a collective"))
    before = cache.k.clone()

    def refuse(error: type, match: str, *rows: Any, **changes: Any) -> None:
        given = {"cache": cache, "plan": plan, "combine": "ag_rs"} | changes
        with pytest.raises(error, match=match):
            dcp.paged_attention(
                *rows, given["cache"], given["plan"], 0, group, combine=given["combine"]
            )

    refuse(ArgumentError, "combine: got 'ring'", query, key, value, combine="ring")
    refuse(ShapeError, "query: got", query[:, :2].contiguous(), key, value)
    refuse(ShapeError, "key: got", query, key[:, :1].contiguous(), value)
    refuse(FrameworkError, "value: got", query, key, value.numpy())
    other = PagedKVCache(SMALL, num_layers=1, num_pages=8, page_size=4, dtype="float32")
    refuse(PlanError, "cache: got one of", query, key, value, cache=other)
    single = torch_backend.plan(SMALL, cache.spec, PROBLEM.batch)
    refuse(ArgumentError, "plan: got a AttentionPlan", query, key, value, plan=single)
    wrong = replace(plan, shards=replace(plan.shards, size=2))
    refuse(PlanError, "group: got one of 1 ranks", query, key, value, plan=wrong)
    array = replace(plan, context=replace(plan.context, metadata=plan.context.metadata.numpy()))
    refuse(FrameworkError, "plan: got AttentionPlan of ndarray", query, key, value, plan=array)
    for layer in (1, -1, True, None):
        for call in (dcp.attend, dcp.paged_attention):
            with pytest.raises(ArgumentError, match=f"layer: got {layer}, want a layer from 0"):
                call(query, key, value, cache, plan, layer, group)
    for backend, given in ((None, "nothing"), ("nccl", None)):
        monkeypatch.setattr(dcp, "backend_of", lambda group, kind, backend=backend: backend)
        if given:
            refuse(DeviceError, f"one that moves cpu tensors with {given}.*gloo", query, key, value)
    assert torch.equal(cache.k.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_on_the_wire_are_those_of_the_formula(
    dtype: str, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where collectives are called, in a group that is made up."""
    ranks, spec = 4, AttentionSpec(8, 2, 16, head_dim_v=24)
    received = {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 0}

    def all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
        received["all_gather"] += (ranks - 1) * rows.nbytes
        return torch.stack([rows] * ranks)

    def reduce_scatter(rows: torch.Tensor, group: Any) -> torch.Tensor:
        received["reduce_scatter"] += (ranks - 1) * rows[0].nbytes
        return rows[0].clone()

    def all_to_all(rows: torch.Tensor, group: Any) -> torch.Tensor:
        received["all_to_all"] += (ranks - 1) * rows[0].nbytes
        return rows.clone()

    for fake in (all_gather, reduce_scatter, all_to_all):
        monkeypatch.setattr(dcp, fake.__name__, fake)
    monkeypatch.setattr(dcp, "check_group", lambda group: (0, ranks))
    monkeypatch.setattr(dcp, "backend_of", lambda group, kind: "gloo")
    problem = shared(spec, Sizes(ranks), [1, 1, 1], [9, 12, 40], dtype=dtype)
    cache = dcp_ranks.cache_of(problem, 0)
    plan = dcp.plan(spec, cache.spec, problem.batch, None, verify=False)
    dcp.paged_attention(*dcp_ranks.rows_of(problem, 0), cache, plan, 0, None, combine=combine)

    expected = wire_bytes(plan, combine)
    assert sum(received.values()) == sum(expected.values())
    element, tokens, heads = (4 if dtype == "float32" else 2), 3, 2
    assert expected["query"] == 3 * tokens * heads * 16 * element
    if combine == "ag_rs":
        assert received["all_to_all"] == 0
        assert received["all_gather"] == expected["query"] + expected["lse"]
        assert received["reduce_scatter"] == expected["out"] == 3 * tokens * heads * 24 * element
        assert expected["lse"] == 3 * tokens * 8 * 4
    else:
        assert received["all_to_all"] == expected["out"]
        assert expected["out"] == 3 * tokens * heads * (24 * element + 4)
        assert expected["lse"] == 0
