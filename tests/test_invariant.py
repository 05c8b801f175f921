"""Batch-invariant plans on the CPU: in both front ends a request's bits are its own.

What FA2 would compute on an H200 is followed through its schedule; the kernel itself runs in
gpu/test_invariant_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from invariance import Answers, Company, World, assert_same_bits, companies

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, PlanStatic, RaggedBatch
from interop.dlpack import to_jax, to_torch
from interop.errors import UnsupportedError
from interop.fa2_invariant import CHUNK_TOKENS
from torch_backend.dispatch import works_of
from torch_backend.host_planning import host_plan
from torch_backend.kernels import FAMILIES, INVARIANT, Device

SPEC = AttentionSpec(4, 2, 16)
LENS = {
    "decode": [(1, kv) for kv in (37, 400, 1, 16, 233, 90, 1200, 55, 17, 700, 64, 301)],
    "prefill": [(9, 40), (120, 300), (33, 33), (64, 500), (5, 900), (2, 7)],
    "mixed": [(1, 600), (50, 70), (1, 33), (0, 12), (7, 400), (1, 1), (90, 90)],
}
FEW = {"decode": (3, 6, 1, 9), "prefill": (1, 4), "mixed": (1, 0, 4, 2)}
H200 = Device("cuda", (9, 0), 132)


@pytest.fixture(params=LENS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@jax.jit
def jax_step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    return jax_frontend.paged_attention(query, key, value, kv, plan, 0, return_lse=True)


def solve_jax(world: World, company: Company) -> Answers:
    """`World.solve` by JAX, from a cache that torch owns."""
    plan = jax_frontend.plan(
        world.spec,
        world.cache.spec,
        world.batch(company),
        bucket=company.bucket,
        batch_invariant=True,
    )
    handle = jax_frontend.cache_handle(world.cache)
    rows = [to_jax(x) for x in world.operands(company)]
    try:
        out, lse, _ = jax.block_until_ready(jax_step(*rows, handle, plan))
    finally:
        jax_frontend.release_cache(handle.name)
    return world.by_request(company, to_torch(out).clone(), to_torch(lse).clone())


@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 100, "logits_soft_cap": 20.0}], ids=str
)
def test_company_changes_no_bit(kind: str, features: dict[str, Any]) -> None:
    spec = AttentionSpec(4, 2, 16, **features)
    world = World.of(spec, LENS[kind], "float32", "cpu")
    named = companies(LENS[kind], FEW[kind])
    want = world.solve(named.pop("all"))
    assert all(not out.isnan().any() for out, _ in want.values())
    for company in named.values():
        assert_same_bits(world.solve(company), want)
    assert_same_bits(solve_jax(world, named["few in the bucket of all"]), want)


def test_without_the_promise_company_changes_bits() -> None:
    """Or the test above would show nothing."""
    world = World.of(SPEC, LENS["decode"], "float32", "cpu")

    def rows(company: Company) -> torch.Tensor:
        plan = torch_backend.plan(SPEC, world.cache.spec, world.batch(company))
        return torch_backend.paged_attention(*world.operands(company), world.cache, plan, 0)

    together = rows(Company(tuple(range(12))))
    alone = torch.cat([rows(Company((i,))) for i in range(12)])
    assert not torch.equal(together, alone)
    torch.testing.assert_close(together, alone)


def test_rows_of_the_call_without_a_cache(kind: str) -> None:
    lens = [(query, query) for query, _ in LENS[kind]]
    spec = AttentionSpec(4, 2, 16, dtype="float32")
    world = World.of(spec, [(q, max(kv, 1)) for q, kv in lens], "float32", "cpu")

    def solve(company: Company) -> Answers:
        query_lens = [lens[i][0] for i in company.requests]
        batch = RaggedBatch(query_lens, query_lens)
        plan = torch_backend.plan(spec, None, batch, batch_invariant=True)
        rows = world.operands(company)
        answer = torch_backend.ragged_attention(*rows, plan, return_lse=True)
        return world.by_request(company, *answer)

    want = solve(Company(tuple(range(len(lens)))))
    assert_same_bits(solve(Company(FEW[kind])), want)


def test_requests_without_context_read_their_pages() -> None:
    """In another bucket they would, so in one that promises that there is no context, too."""
    world = World.of(SPEC, [(9, 9), (40, 40), (1, 1)], "float32", "cpu")
    everyone = Company((0, 1, 2))
    plan = world.plan(everyone)
    assert plan.bucket.without_context and plan.static.own is None
    bucket = Bucket(5, 60, 10)
    assert_same_bits(world.solve(replace(everyone, bucket=bucket)), world.solve(everyone))


def test_the_static_part_keeps_the_promise() -> None:
    world = World.of(SPEC, LENS["mixed"], "float32", "cpu")
    static = world.plan(Company((0, 1))).static
    assert static.batch_invariant
    assert PlanStatic.from_json(static.to_json()) == static
    other = torch_backend.plan(SPEC, world.cache.spec, world.batch(Company((0, 1)))).static
    assert not other.batch_invariant and other != static and other.main != static.main
    # As programs were exported that know nothing of it.
    old = other.to_json().replace(',"batch_invariant":false', "")
    assert old != other.to_json() and PlanStatic.from_json(old) == other


def test_an_exported_program_keeps_the_promise() -> None:
    world = World.of(SPEC, LENS["mixed"], "float32", "cpu")
    company = companies(LENS["mixed"], FEW["mixed"])["few in the bucket of all"]
    handle = jax_frontend.cache_handle(world.cache)
    rows = [to_jax(x) for x in world.operands(company)]
    plan = jax_frontend.plan(
        SPEC, handle.spec, world.batch(company), bucket=company.bucket, batch_invariant=True
    )
    try:
        safe = [
            jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_frontend.FFI_TARGETS
        ]
        exported = jax.export.export(jax_step, disabled_checks=safe)(*rows, handle, plan)
        loaded = jax.export.deserialize(exported.serialize())
        out, lse, _ = jax.block_until_ready(loaded.call(*rows, handle, plan))
    finally:
        jax_frontend.release_cache(handle.name)
    got = world.by_request(company, to_torch(out), to_torch(lse))
    assert_same_bits(got, world.solve(Company((1, 0, 4, 2))))


@pytest.mark.parametrize("frontend", [torch_backend, jax_frontend])
def test_plans_made_on_the_device_promise_nothing(frontend: Any) -> None:
    lengths = [np.array(x, np.int32) for x in ([5], [0, 1], [[0]])]
    given = [
        torch.from_numpy(x) if frontend is torch_backend else jax.numpy.asarray(x) for x in lengths
    ]
    cache = CacheSpec(1, 2, 16, 2, 16, dtype="float32")
    with pytest.raises(UnsupportedError, match="plan_on_device makes no batch-invariant plans"):
        frontend.plan_on_device(SPEC, cache, *given, bucket=Bucket(1, 1, 1), batch_invariant=True)


BIG = AttentionSpec(32, 8, 128)
POOL = CacheSpec(4, 8192, 16, 8, 128, device="cuda")


def planned(
    company: Company,
    lens: list[tuple[int, int]],
    spec: AttentionSpec = BIG,
    pool: CacheSpec = POOL,
) -> tuple[PlanStatic, np.ndarray[Any, Any]]:
    """Plan for an H200; words that nobody writes hold garbage of an earlier plan."""
    table = np.arange(len(lens) * 600).reshape(len(lens), 600)[list(company.requests)]
    query_lens, kv_lens = zip(*(lens[i] for i in company.requests), strict=True)
    batch = RaggedBatch(query_lens, kv_lens, table)

    def garbage(words: int) -> np.ndarray[Any, Any]:
        return np.full(words, 0x5A5A5A5A, np.int32)

    return host_plan(
        spec, pool, batch, company.bucket, H200, "raise", None, garbage, batch_invariant=True
    )


def followed(
    company: Company, static: PlanStatic, words: np.ndarray[Any, Any]
) -> dict[int, list[Any]]:
    """What FA2 does for each request: work items as it reads them, and merges of each row.

    Every row of the output has to be written last by the launch that owns it.
    """
    fields = static.layout.views(words)
    qo, schedule = fields["qo_indptr"], fields["fa2_schedule"]
    found: dict[int, list[Any]] = {i: [] for i in company.requests}
    owner = np.full(qo[-1], -1)
    for number, launch in enumerate(static.main):
        capacity, most_rows, rows_at, tile, *starts, merge_at, o_at, chunk_at = launch.constants[
            :10
        ]
        request, qo_tile, kv_tile = (schedule[at // 4 :][:capacity] for at in starts)
        flags_at, split = launch.constants[12], launch.constants[14]
        flags = schedule.view(np.uint8)[flags_at:][:capacity]
        num_items = int(flags.sum())
        assert set(flags.tolist()) <= {0, 1} and flags[:num_items].all()
        rows = int(schedule[rows_at // 4])
        assert rows <= most_rows
        merge = schedule[merge_at // 4 :][: rows + 1]
        if split:
            owner[:rows] = np.where(np.diff(merge) > 0, number, owner[:rows])
            # Rows without parts are written, too: with 0, so nobody may have been there before.
            assert number == 0
        for item in range(num_items):
            i = int(request[item])
            first, last = qo[i], qo[i + 1]
            if not split:
                # The kernel writes rows where the schedule, not the query, says that they are.
                assert schedule[o_at // 4 + i] == first
                owner[first:last] = number
            if i >= len(company.requests):
                continue  # padding
            parts = np.diff(merge[first : last + 1]).tolist() if split else []
            if split:
                assert merge[first] == schedule[o_at // 4 + i]
            chunk = int(schedule[chunk_at // 4]) if split else 0
            item_of = (tile, chunk, int(qo_tile[item]), int(kv_tile[item]), parts)
            found[company.requests[i]].append((launch.family, *item_of))
    assert (owner >= 0).all(), "rows that no launch owns"
    return found


GPU_LENS = {
    "decode": [(1, kv) for kv in (4096, 8192, 5000, 9000, 4097, 6000, 2048, 2049, 1, 16, 7000, 90)],
    "prefill": [(700, 5000), (64, 9000), (2, 8192), (300, 4096), (5, 6000), (1000, 1000)],
    "mixed": [(1, 9000), (300, 4096), (1, 5000), (0, 70), (7, 8192), (1, 4096), (129, 6000)],
}


@pytest.mark.parametrize("features", [{}, {"sliding_window": 5000}], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (40, 2), (8 * 150, 8)], ids=str)
def test_fa2_does_the_same_for_a_request_in_all_company(
    kind: str, heads: tuple[int, int], features: dict[str, Any]
) -> None:
    lens = GPU_LENS[kind]
    spec = AttentionSpec(*heads, 128, **features)
    pool = replace(POOL, num_kv_heads=heads[1])
    named = companies(lens, FEW[kind])
    plans = {name: planned(company, lens, spec, pool) for name, company in named.items()}
    want = followed(named["all"], *plans["all"])
    for request, items in want.items():
        query, kv = lens[request]
        if query > 1:
            assert all(item[1:3] == (128, 0) for item in items)
            assert len(items) == -(-query * (heads[0] // heads[1]) // 128)
        elif query == 1:
            seen = min(kv, spec.sliding_window or kv)
            assert max(item[4] for item in items) + 1 == -(-seen // CHUNK_TOKENS)
            assert {item[2] for item in items} == {CHUNK_TOKENS}
    for name, company in named.items():
        got = followed(company, *plans[name])
        assert got == {i: want[i] for i in company.requests}, name


def test_decodes_and_others_are_two_launches_of_one_array() -> None:
    lens = GPU_LENS["mixed"]
    static, _ = planned(Company(tuple(range(len(lens)))), lens)
    assert [launch.family for launch in static.main] == ["fa2_invariant"] * 2
    # The second turns the LSE of both into natural ones.
    assert [launch.constants[-1] for launch in static.main] == [0, 1]
    bucket = Bucket(9, 900, 3000, 300)
    alone = [planned(Company((i,), bucket), lens)[0] for i in (0, 1, 3)]
    assert alone[0] is alone[1] is alone[2]
    only_decodes, _ = planned(Company((0, 1)), GPU_LENS["decode"])
    assert [launch.family for launch in only_decodes.main] == ["fa2_invariant"]


def test_only_families_that_promise_it_serve() -> None:
    bucket = Bucket(8, 8, 600, 1)
    work = works_of(BIG, POOL, "bfloat16", bucket, 9, H200, True, True)[0]
    refusals = {name: torch_backend.dispatch.refusal(FAMILIES[name], work) for name in FAMILIES}
    assert {name for name, reason in refusals.items() if reason is None} == set(INVARIANT)
    assert refusals["fa3"] == "what it computes for a request depends on the rest of the batch"
    plain = replace(work, invariant=False)
    assert FAMILIES["fa2_invariant"].refuse(plain) == (
        "it serves plans made with batch_invariant=True"
    )


def test_a_kernel_that_cannot_promise_it_is_refused_by_name() -> None:
    world = World.of(SPEC, LENS["decode"], "float32", "cpu")
    with pytest.raises(UnsupportedError, match=r"'fa2'.*depends on the rest of the batch"):
        world.plan(Company((1,)), kernel="fa2")
    (choice,) = torch_backend.explain(
        SPEC, world.cache.spec, world.batch(Company((1,))), batch_invariant=True
    )
    assert choice.family == "reference"
    assert ("fa3", "what it computes for a request depends on the rest of the batch") in (
        choice.refusals
    )


def test_partial_results_that_are_too_many_are_refused() -> None:
    bucket = Bucket(1, 1, 2**27, 1)
    spec = AttentionSpec(256, 8, 256)
    pool = CacheSpec(1, 2, 16, 8, 256, device="cuda")
    work = works_of(spec, pool, "bfloat16", bucket, 2, H200, True, True)[0]
    reason = FAMILIES["fa2_invariant"].refuse(work)
    assert reason is not None and "partial results of 134217728 pages" in reason
