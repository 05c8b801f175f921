"""A cache that is spread by token over a mesh axis: the same attention as over one whole cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dcp_problem import Shared, Sizes, assert_dealt, shared
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import Array, assert_within, from_torch, in_layout, to_torch, tolerance_of

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from interop.dcp import COMBINES, wire_bytes
from interop.errors import (
    ArgumentError,
    FrameworkError,
    PageError,
    PlanError,
    ShapeError,
    SlotError,
)
from jax_frontend import CacheArrays, dcp
from torch_backend import PagedKVCache

NAME = "ranks"
ROWS = P(None, "dcp")
EVERYWHERE = P()

# 24 query heads are a multiple of every number of ranks; 3 ranks' heads are no runs of KV heads.
SPEC = AttentionSpec(24, 2, 8)
RANKS = (1, 2, 3, 4, 8)
DEALS = [(ranks, interleave) for ranks in RANKS for interleave in (1, 2, 4, 16)]
SIZES = Sizes(4, 2)
# What is tested is not how well XLA optimises, which takes most of a compilation.
QUICK = {"xla_backend_optimization_level": 0}


def devices(count: int) -> Array:
    """Virtual devices, of which there is one where the tests have a GPU."""
    found = jax.devices("cpu")
    if len(found) < count:
        pytest.skip(f"needs {count} devices")
    return np.array(found[:count])


def mesh_of(ranks: int) -> Mesh:
    return Mesh(devices(ranks), ("dcp",))


def sizes_of(ranks: int, interleave: int, **more: Any) -> Sizes:
    return Sizes(ranks, interleave, page_size=max(4, interleave), **more)


def per_device(step: Callable[..., Any], mesh: Mesh, kv: Any, rows: P = ROWS) -> Any:
    """``step(query, key, value, kv, plan)`` on each rank, returning arrays of rows and the cache.

    Rows of key and value lie as `rows` says for all but the axis of ranks.
    """
    key_value = P(None, *(None if axis == "dcp" else axis[0] for axis in rows[1:]))
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(rows, key_value, key_value, kv, P("dcp")),
        out_specs=(rows, kv),
        # A scan's carry would have to say over which axes it varies.
        check_vma=False,
    )


def rows_of(problem: Shared) -> tuple[Array, Array, Array]:
    return problem.query, problem.key, problem.value


@contextmanager
def caches_of(problem: Shared, kind: str, layout: Any = "NHD") -> Iterator[tuple[Any, Any]]:
    """A cache of all ranks before the step, and a function that reads each rank's pools after."""
    sizes, mesh = problem.sizes, mesh_of(problem.sizes.ranks)
    shares = [
        [in_layout(sizes.dealt(pool, rank), layout) for rank in range(sizes.ranks)]
        for pool in (problem.key_pool, problem.value_pool)
    ]
    options: dict[str, Any] = {
        "num_layers": sizes.num_layers,
        "page_size": sizes.page_size,
        "dtype": problem.dtype,
        "layout": layout,
    }
    over_ranks = NamedSharding(mesh, P("dcp"))
    if kind == "handle":
        caches = [
            PagedKVCache(problem.spec, num_pages=sizes.num_pages, **options)
            for _ in range(sizes.ranks)
        ]
        for rank, cache in enumerate(caches):
            cache.k.copy_(to_torch(shares[0][rank], "cpu"))
            cache.v.copy_(to_torch(shares[1][rank], "cpu"))
        kv = jax_frontend.cache_handle(caches, name=NAME, sharding=over_ranks)

        def after(_: Any) -> list[list[Array]]:
            return [
                [in_layout(from_torch(pool), layout) for pool in (cache.k, cache.v)]
                for cache in caches
            ]

        try:
            yield kv, after
        finally:
            jax_frontend.release_cache(NAME)
        return
    arrays = whole_arrays(problem, mesh, options)
    k, v = (jax.device_put(np.concatenate(parts), over_ranks) for parts in shares)

    def split(kv: Any) -> list[list[Array]]:
        pools = [np.split(np.asarray(pool), sizes.ranks) for pool in (kv.k, kv.v)]
        return [[in_layout(part, layout) for part in parts] for parts in zip(*pools, strict=True)]

    yield replace(arrays, k=k, v=v), split


def whole_arrays(problem: Shared, mesh: Mesh, options: dict[str, Any]) -> CacheArrays:
    """Pools of all ranks one after another, each on its device, and the spec of one of them."""
    pages = problem.sizes.num_pages
    arrays = jax_frontend.init_cache(
        problem.spec,
        num_pages=pages * problem.sizes.ranks,
        sharding=NamedSharding(mesh, P("dcp")),
        **options,
    )
    return replace(arrays, spec=replace(arrays.spec, num_pages=pages))


def plan_of(problem: Shared, kv: Any) -> Any:
    sizes = problem.sizes
    return dcp.plan(
        problem.spec,
        kv.spec,
        problem.batch,
        mesh_of(sizes.ranks),
        "dcp",
        interleave=sizes.interleave,
        bucket=problem.bucket,
    )


def both_ways(query: Any, key: Any, value: Any, kv: Any, plan: Any, layer: Any = 0) -> Any:
    """Output and LSE of both ways to combine, after one write."""
    kv = dcp.append(key, value, kv, plan, layer)
    options: dict[str, Any] = {"axis_name": "dcp", "return_lse": True}
    results = [
        dcp.attend(query, key, value, kv, plan, layer, combine=combine, **options)
        for combine in COMBINES
    ]
    return results, kv


def check(problem: Shared, results: Any, pools: list[list[Array]], dtype: str = "") -> None:
    """Compare with the oracle: numbers within tolerance, pools byte for byte."""
    want, want_lse = problem.answer()
    tolerance = tolerance_of(dtype or problem.dtype)
    for out, lse in results:
        assert out.dtype == problem.dtype
        # Rounded by each rank, and once more in the sum.
        assert_within("out", np.asarray(out), want, 2 * tolerance.out)
        assert_within("lse", np.asarray(lse), want_lse, 2 * tolerance.lse)
        assert not np.asarray(out)[np.isneginf(want_lse)].any()
    whole = problem.pools_after()
    for rank, got in enumerate(pools):
        assert_dealt(problem, rank, got, whole)


def near(sizes: Sizes, count: int, seed: int) -> list[int]:
    """Lengths around multiples of a page of all ranks, and short ones."""
    edges = [many * sizes.round + off for many in (1, 2) for off in (-1, 0, 1)]
    edges += [1, sizes.ranks - 1, sizes.ranks, sizes.ranks * sizes.interleave + 1]
    return np.random.default_rng(seed).permutation(edges)[:count].tolist()


def batches_of(sizes: Sizes) -> Iterator[tuple[Bucket, list[int], list[int]]]:
    """Buckets and the lengths of batches: decodes of any length; then all that there is at once."""
    for seed in (0, 1):
        kv_lens = near(sizes, 6, seed)
        decodes = Bucket(8, 8, 8 * 3, 1)
        yield decodes, [int(length > 0) for length in kv_lens], kv_lens
        # A decode, a chunk after a context, a prefill, one that sits out, one without any token.
        context = [*near(sizes, 2, seed + 2), 0, *near(sizes, 1, seed + 4), 0]
        query_lens = [1, 5, 3 + 4 * seed, 0, 0]
        kv_lens = [a + b for a, b in zip(context, query_lens, strict=True)]
        yield Bucket(7, 15, 8 * 3), query_lens, kv_lens


@pytest.mark.parametrize(("ranks", "interleave"), DEALS)
def test_agrees_with_the_oracle(ranks: int, interleave: int) -> None:
    """Both ways to combine, on both kinds of cache, decodes and everything else."""
    sizes = sizes_of(ranks, interleave)
    kinds = itertools.cycle(
        ("handle", "arrays") if (ranks + interleave) % 2 else ("arrays", "handle")
    )
    programs: dict[Bucket, Any] = {}
    for bucket, query_lens, kv_lens in batches_of(sizes):
        problem = shared(SPEC, sizes, query_lens, kv_lens, bucket=bucket)
        with caches_of(problem, next(kinds)) as (kv, after):
            if bucket not in programs:
                step = per_device(both_ways, mesh_of(ranks), P("dcp"))
                programs[bucket] = jax.jit(step, compiler_options=QUICK)
            plan = plan_of(problem, kv)
            assert (plan.own is None) == (bucket.max_query_len == 1)
            results, kv = programs[bucket](*rows_of(problem), kv, plan)
            check(problem, results, after(jax.block_until_ready(kv)))


def solve(
    problem: Shared, kind: str = "arrays", model: Any = both_ways, layout: Any = "NHD"
) -> Any:
    """Results of one step, and each rank's pools after it."""
    with caches_of(problem, kind, layout) as (kv, after):
        step = per_device(model, mesh_of(problem.sizes.ranks), P("dcp"))
        results, kv = jax.jit(step)(*rows_of(problem), kv, plan_of(problem, kv))
        return results, after(jax.block_until_ready(kv))


def test_shards_whose_lse_are_far_apart() -> None:
    """Weights of the wrong base would be another power of the right ones."""
    sizes = Sizes(4, page_size=4)
    kv_lens = [3, 17, 40, 33, 1, 16]
    problem = shared(SPEC, sizes, [1] * 6, kv_lens, query_scale=12.0)
    lses = np.stack([problem.lse_of(rank) for rank in range(4)])
    spread = np.where(np.isfinite(lses), lses, np.nan)
    assert np.nanmax(np.nanmax(spread, 0) - np.nanmin(spread, 0)) > 10
    assert np.isneginf(lses).any()
    check(problem, *solve(problem))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_heads_that_do_not_nest_with_a_soft_cap(layout: str) -> None:
    # Ranks have query heads 0-1, 2-3 and 4-5, and key/value head 0 serves 0-2.
    spec = AttentionSpec(6, 2, 8, head_dim_v=12, logits_soft_cap=2.5, sm_scale=0.7)
    problem = shared(spec, Sizes(3, 2), [1, 4, 0, 2], [11, 4, 9, 25], bucket=Bucket(5, 9, 12))
    check(problem, *solve(problem, "handle", layout=layout))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_elements_of_16_bits(dtype: str) -> None:
    problem = shared(SPEC, Sizes(4), [1, 6, 1], [30, 20, 2], bucket=Bucket(4, 9, 16), dtype=dtype)
    check(problem, *solve(problem))


@pytest.mark.parametrize("kind", ["handle", "arrays"])
@pytest.mark.parametrize("combine", COMBINES)
def test_a_scan_over_layers(kind: str, combine: str) -> None:
    """Layers are traced; each has pages of its own."""
    sizes = Sizes(4, 2, num_layers=3)
    problem = shared(SPEC, sizes, [1, 3, 0, 1], [9, 20, 4, 32], bucket=Bucket(4, 6, 12))
    layers = (2, 0, 1)

    def model(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        def block(kv: Any, layer: jax.Array) -> Any:
            out, lse, kv = dcp.paged_attention(
                query, key, value, kv, plan, layer,
                axis_name="dcp", combine=combine, return_lse=True,
            )  # fmt: skip
            return kv, (out, lse)

        kv, (outs, lses) = jax.lax.scan(block, kv, jnp.array(layers))
        return [(outs[i], lses[i]) for i in range(len(layers))], kv

    results, pools = solve(problem, kind, model)
    for layer, (out, lse) in zip(layers, results, strict=True):
        want, want_lse = problem.answer(layer)
        assert_within("out", np.asarray(out), want, tolerance_of("float32").out)
        assert_within("lse", np.asarray(lse), want_lse, tolerance_of("float32").lse)
    whole = problem.pools_after(layers)
    for rank, got in enumerate(pools):
        assert_dealt(problem, rank, got, whole)


@pytest.mark.parametrize("kind", ["handle", "arrays"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_over_one_axis_and_tokens_over_another(ranks: int, kind: str) -> None:
    sizes, halves = Sizes(ranks, 2), 2
    spec = AttentionSpec(16, 2, 8)
    local = AttentionSpec(8, 1, 8)
    problem = shared(spec, sizes, [1, 4, 0, 1], [9, 13, 4, 1], bucket=Bucket(4, 8, 12))
    mesh = Mesh(devices(halves * ranks).reshape(halves, ranks), ("tp", "dcp"))
    options: dict[str, Any] = {"num_layers": 1, "page_size": sizes.page_size, "dtype": "float32"}
    pools = problem.key_pool, problem.value_pool
    shares = [[sizes.dealt(pool, rank) for rank in range(ranks)] for pool in pools]
    if kind == "handle":
        caches = []
        for half, rank in itertools.product(range(halves), range(ranks)):
            cache = PagedKVCache(local, num_pages=sizes.num_pages, **options)
            for ours, share in zip((cache.k, cache.v), shares, strict=True):
                ours.copy_(to_torch(share[rank][:, :, half : half + 1], "cpu"))
            caches.append(cache)
        parts = P(("tp", "dcp"))
        kv: Any = jax_frontend.cache_handle(caches, name=NAME, sharding=NamedSharding(mesh, parts))
    else:
        parts = P("dcp", None, "tp")
        kv = jax_frontend.init_cache(
            spec,
            num_pages=sizes.num_pages * ranks,
            sharding=NamedSharding(mesh, parts),
            **options,
        )
        k, v = (
            jax.device_put(np.concatenate(share), NamedSharding(mesh, parts)) for share in shares
        )
        one = replace(kv.spec, num_pages=sizes.num_pages, num_kv_heads=1)
        kv = replace(kv, k=k, v=v, spec=one)
    step = per_device(both_ways, mesh, parts, rows=P(None, ("tp", "dcp")))
    plan = dcp.plan(local, kv.spec, problem.batch, mesh, "dcp", interleave=2, bucket=problem.bucket)
    try:
        results, kv = jax.block_until_ready(jax.jit(step)(*rows_of(problem), kv, plan))
    finally:
        if kind == "handle":
            jax_frontend.release_cache(NAME)
    if kind == "handle":
        # Shards are dealt to devices in the order of the axes that the token is split over.
        got = [
            [
                np.concatenate(
                    [from_torch(pool(caches[half * ranks + rank])) for half in (0, 1)], 2
                )
                for pool in (lambda cache: cache.k, lambda cache: cache.v)
            ]
            for rank in range(ranks)
        ]
    else:
        got = list(zip(*(np.split(np.asarray(x), ranks) for x in (kv.k, kv.v)), strict=True))
    check(problem, results, got)


def test_a_mesh_as_jax_makes_it() -> None:
    """With the axis types and checks that make_mesh and shard_map have by default."""
    problem = shared(SPEC, Sizes(4), [1, 3, 1], [30, 20, 2], bucket=Bucket(4, 6, 12))
    mesh = jax.make_mesh((4,), ("dcp",), devices=devices(4))
    key_value = NamedSharding(mesh, EVERYWHERE)
    query, *rows = rows_of(problem)
    step = jax.shard_map(
        both_ways,
        mesh=mesh,
        in_specs=(ROWS, EVERYWHERE, EVERYWHERE, P("dcp"), P("dcp")),
        out_specs=(ROWS, P("dcp")),
    )
    with caches_of(problem, "handle") as (kv, after):
        token = jax.device_put(np.arange(4, dtype=np.int32), NamedSharding(mesh, P("dcp")))
        kv = replace(kv, token=token)
        plan = dcp.plan(problem.spec, kv.spec, problem.batch, mesh, "dcp", bucket=problem.bucket)
        results, kv = jax.jit(step)(
            jax.device_put(query, NamedSharding(mesh, ROWS)),
            *(jax.device_put(x, key_value) for x in rows),
            kv,
            plan,
        )
        check(problem, results, after(jax.block_until_ready(kv)))


@pytest.mark.parametrize(
    ("query_lens", "bucket"), [([0, 0], None), ([3, 4], Bucket(3, 8, 20, without_context=True))]
)
def test_steps_without_rows_and_without_context(
    query_lens: list[int], bucket: Bucket | None
) -> None:
    kv_lens = [length or 5 for length in query_lens]
    problem = shared(SPEC, SIZES, query_lens, kv_lens, bucket=bucket, dtype="bfloat16")
    check(problem, *solve(problem))


def test_another_plan_of_the_bucket_is_not_traced_again() -> None:
    traces = 0

    def counted(*arguments: Any) -> Any:
        nonlocal traces
        traces += 1
        return both_ways(*arguments)

    sizes, bucket = Sizes(4), Bucket(6, 8, 24)
    program = jax.jit(per_device(counted, mesh_of(4), P("dcp")), donate_argnums=3)
    # Ranks need more pages than others, or none, and requests come and go.
    for query_lens, kv_lens in (
        ([1, 1, 1, 1], [9, 1, 33, 16]),
        ([3, 1], [3, 50]),
        ([1, 1, 1, 0, 2, 1], [1, 2, 3, 0, 17, 5]),
    ):
        problem = shared(SPEC, sizes, query_lens, kv_lens, bucket=bucket)
        with caches_of(problem, "handle") as (kv, after):
            results, kv = program(*rows_of(problem), kv, plan_of(problem, kv))
            check(problem, results, after(jax.block_until_ready(kv)))
    assert traces == 1


def test_fp8_pages_hold_and_give_what_those_of_one_cache_do() -> None:
    """A prefill into the pages, and a decode from them; caches of both kinds in one program."""
    ranks, sizes = 4, Sizes(4, 2)
    spec = replace(SPEC, dtype="float32")
    scales = np.random.default_rng(0).uniform(0.01, 0.03, (1, 2, 2)).astype(np.float32)
    options: dict[str, Any] = {"num_layers": 1, "dtype": "fp8", "scales": scales}
    one = PagedKVCache(spec, num_pages=16, page_size=sizes.round, **options)
    caches = [PagedKVCache(spec, num_pages=16, page_size=4, **options) for _ in range(ranks)]
    over_ranks = NamedSharding(mesh_of(ranks), P("dcp"))
    handle = jax_frontend.cache_handle(caches, name=NAME, sharding=over_ranks)
    arrays = jax_frontend.init_cache(
        spec, num_pages=16 * ranks, page_size=4, sharding=over_ranks, **options
    )
    arrays = replace(arrays, spec=replace(arrays.spec, num_pages=16))
    # Every device has the scales whole.
    parts = P("dcp"), replace(arrays, k=P("dcp"), v=P("dcp"), scales=EVERYWHERE)

    def model(query: Any, key: Any, value: Any, kvs: Any, plan: Any) -> Any:
        results, after = [], []
        for kv, combine in zip(kvs, COMBINES, strict=True):
            *result, kv = dcp.paged_attention(
                query, key, value, kv, plan, 0, axis_name="dcp", combine=combine, return_lse=True
            )
            results.append(result)
            after.append(kv)
        return results, tuple(after)

    kvs: Any = handle, arrays
    try:
        for query_lens, kv_lens in (([18, 3, 33], [18, 3, 33]), ([1, 1, 1], [19, 4, 34])):
            problem = shared(spec, sizes, query_lens, kv_lens)
            rows = [to_torch(x, "cpu") for x in rows_of(problem)]
            whole = torch_backend.plan(spec, one.spec, problem.batch)
            want = torch_backend.paged_attention(*rows, one, whole, 0, return_lse=True)
            plan = plan_of(problem, handle)
            program = jax.jit(per_device(model, mesh_of(ranks), parts))
            results, kvs = program(*rows_of(problem), kvs, plan)
            # New rows of long queries are attended to before they are rounded to 8 bits.
            tolerance = 2e-5 if plan.own is None else 0.15
            for result in results:
                for got, right in zip(result, want, strict=True):
                    assert_within("fp8", np.asarray(got), right.numpy(), tolerance)
        jax.block_until_ready(kvs)
    finally:
        jax_frontend.release_cache(NAME)
    for pool, side in ((one.k, "k"), (one.v, "v")):
        split = np.split(np.asarray(getattr(kvs[1], side)).view(np.uint8), ranks)
        for rank, cache in enumerate(caches):
            share = sizes.dealt(pool.view(torch.uint8).numpy(), rank)
            assert share.any()
            ours = getattr(cache, side).view(torch.uint8).numpy()
            np.testing.assert_array_equal(ours, share)
            np.testing.assert_array_equal(split[rank], share)


def received(jaxpr: Any, ranks: int) -> dict[str, int]:
    """Bytes that a rank receives in a program, by the collective, where each sends to each."""
    found: dict[str, int] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("all_gather", "reduce_scatter", "all_to_all"):
            ends = equation.outvars if name == "all_gather" else equation.invars
            size = sum(end.aval.size * end.aval.dtype.itemsize for end in ends)
            found[name] = found.get(name, 0) + size * (ranks - 1) // ranks
        for part in equation.params.values():
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                for other, size in received(inner, ranks).items():
                    found[other] = found.get(other, 0) + size
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "query_lens"), [(4, [1, 1]), (3, [4, 1]), (1, [1, 1])])
def test_bytes_on_the_wire(ranks: int, query_lens: list[int], dtype: str) -> None:
    """Those of the program's collectives, and of the formula."""
    problem = shared(SPEC, Sizes(ranks), query_lens, [30, 7], dtype=dtype)
    tokens, element = sum(query_lens), 4 if dtype == "float32" else 2
    with caches_of(problem, "handle") as (kv, _):
        plan = plan_of(problem, kv)
        for combine in COMBINES:

            def step(*arguments: Any, way: str = combine) -> Any:
                out, kv = dcp.paged_attention(*arguments, 0, axis_name="dcp", combine=way)
                return out, kv

            traced = jax.make_jaxpr(per_device(step, mesh_of(ranks), P("dcp")))
            count = received(traced(*rows_of(problem), kv, plan).jaxpr, ranks)
            stated = wire_bytes(plan, combine)
            assert sum(count.values()) == sum(stated.values())
            row = tokens * (ranks - 1) * SPEC.num_qo_heads // ranks
            if combine == "a2a":
                assert count["all_gather"] == stated["query"] == row * 8 * element
                assert count["all_to_all"] == stated["out"] == row * (8 * element + 4)
                assert stated["lse"] == 0
            else:
                assert stated["lse"] == row * ranks * 4
                assert count["all_gather"] == stated["query"] + stated["lse"]
                assert count["reduce_scatter"] == stated["out"] == row * 8 * element


@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_an_exported_program(kind: str) -> None:
    problem = shared(SPEC, Sizes(4, 2), [1, 3, 1], [30, 20, 2], bucket=Bucket(4, 6, 12))
    with caches_of(problem, kind) as (kv, after):
        plan = plan_of(problem, kv)
        program = jax.jit(per_device(both_ways, mesh_of(4), P("dcp")), compiler_options=QUICK)
        checks = map(jax.export.DisabledSafetyCheck.custom_call, jax_frontend.FFI_TARGETS)
        over = {"rows": ROWS, "key": EVERYWHERE, "value": EVERYWHERE}
        rows = [
            jax.device_put(x, NamedSharding(mesh_of(4), part))
            for x, part in zip(rows_of(problem), over.values(), strict=True)
        ]
        exported = jax.export.export(program, disabled_checks=list(checks))(*rows, kv, plan)
        loaded = jax.export.deserialize(exported.serialize())
        results, kv = loaded.call(*rows, kv, plan_of(problem, kv))
        check(problem, results, after(jax.block_until_ready(kv)))


MESH_TEXT = r"with a mesh of \('dcp',\), want an axis of the mesh\. Make the mesh with it"
BAD_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such axis": ({"axis_name": "tp"}, ArgumentError, rf"axis_name: got 'tp' {MESH_TEXT}"),
    "two axes": ({"axis_name": ["dcp"]}, ArgumentError, rf"axis_name: got \['dcp'\] {MESH_TEXT}"),
    "no mesh": ({"mesh": 4}, ArgumentError, "mesh: got a int without devices of this process"),
    "no spec": ({"spec": None}, ArgumentError, "spec: got NoneType, want an AttentionSpec"),
    "heads": (
        {"spec": AttentionSpec(6, 2, 8)},
        ArgumentError,
        "spec.num_qo_heads: got 6 over 4 ranks, want a multiple of the ranks",
    ),
    "window": (
        {"spec": replace(SPEC, sliding_window=9)},
        ArgumentError,
        "spec.sliding_window: got 9 with decode context parallelism, want None",
    ),
    "no mask": (
        {"spec": replace(SPEC, causal=False)},
        ArgumentError,
        "spec.causal: got False with decode context parallelism, want True",
    ),
    "another cache": (
        {"spec": AttentionSpec(8, 4, 8)},
        PlanError,
        "cache_spec.num_kv_heads: got 2, want 4, as spec has it",
    ),
    "no cache": ({"cache_spec": None}, ArgumentError, "cache_spec: got None, want a CacheSpec"),
    "a cache itself": ({"cache_spec": 3}, ArgumentError, "cache_spec: got int, want a CacheSpec"),
    "interleave": (
        {"interleave": 3},
        ArgumentError,
        "shards.interleave: got 3 with pages of 4 tokens, want a divisor of page_size",
    ),
    "no interleave": (
        {"interleave": 0},
        ArgumentError,
        "shards.interleave: got 0, want a positive integer",
    ),
    "no batch": ({"batch": [1, 1]}, ArgumentError, "batch: got list, want a RaggedBatch"),
    "no bucket": ({"bucket": 8}, ArgumentError, "bucket: got int, want a Bucket"),
    "small bucket": (
        {"bucket": Bucket(3, 1, 9)},
        PlanError,
        "bucket.num_tokens: got 1 for a batch that needs 3",
    ),
    "context after all": (
        {"bucket": Bucket(3, 3, 9, without_context=True)},
        PlanError,
        "bucket.without_context: got True for a batch whose request 2 has 16 tokens of context",
    ),
    "no table": (
        {"batch": RaggedBatch([1], [9])},
        PageError,
        r"page_table: got none, want an array \[1, pages\]",
    ),
    "narrow table": (
        {"batch": RaggedBatch([1], [17], [[0]])},
        PageError,
        r"page_table\[0\]: got 1 entries, want 2 for kv_lens\[0\] = 17 tokens in pages of 4 on 4",
    ),
    "a page of nobody": (
        {"batch": RaggedBatch([1], [17], [[0, 16]])},
        PageError,
        r"page_table\[0, 1\]: got 16, want a page id from 0 to 15",
    ),
    "a page for two": (
        {"batch": RaggedBatch([1, 1], [5, 5], [[3], [3]])},
        SlotError,
        "page_table: got slot 12 of rank 2 for tokens of requests 0 and 1",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_that_cannot_be(name: str) -> None:
    changes, kind, text = BAD_PLANS[name]
    cache = PagedKVCache(SPEC, num_layers=1, num_pages=16, page_size=4, dtype="float32")
    arguments: dict[str, Any] = {
        "spec": SPEC,
        "cache_spec": cache.spec,
        "batch": RaggedBatch([1, 1, 1], [9, 1, 17], [[0, 0], [2, 0], [3, 4]]),
        "mesh": mesh_of(4),
        "axis_name": "dcp",
        "interleave": 2,
    }
    dcp.plan(**arguments)
    with pytest.raises(kind, match=f"^{text}"):
        dcp.plan(**arguments | changes)


def test_calls_that_do_not_fit_are_refused_while_traced() -> None:
    problem = shared(SPEC, SIZES, [1, 3, 1], [30, 20, 2], bucket=Bucket(4, 6, 12))
    mesh = mesh_of(4)

    def attempt(
        kv: Any, plan: Any, combine: str = "a2a", axis: str = "dcp", parts: Any = None, **more: Any
    ) -> None:
        def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
            return dcp.paged_attention(
                query, key, value, kv, plan, 0, axis_name=axis, combine=combine
            )[0]

        rows, kv_parts, plan_parts = parts or (ROWS, P("dcp"), P("dcp"))
        in_specs = (rows, EVERYWHERE, EVERYWHERE, kv_parts, plan_parts)
        mapped = jax.shard_map(
            step, mesh=more.get("mesh", mesh), in_specs=in_specs, out_specs=ROWS, check_vma=False
        )
        jax.eval_shape(mapped, *rows_of(problem), kv, plan)

    split, whole = P("dcp"), EVERYWHERE
    with caches_of(problem, "handle") as (kv, _):
        plan = plan_of(problem, kv)
        attempt(kv, plan)
        other = replace(kv, spec=replace(kv.spec, num_pages=9))
        in_torch = AttentionPlan(plan.context.static, torch.zeros(4))
        for kind, text, arguments, options in (
            (
                ArgumentError,
                r"combine: got 'rs', want 'ag_rs' \(all-",
                (kv, plan),
                {"combine": "rs"},
            ),
            (ArgumentError, r"axis_name: got 'tp', which is no axis", (kv, plan), {"axis": "tp"}),
            (PlanError, r"axis_name: got 'dcp' of 2 devices", (kv, plan), {"mesh": mesh_of(2)}),
            (
                PlanError,
                r"plan: got metadata .* Give shard_map",
                (kv, plan),
                {"parts": (ROWS, split, whole)},
            ),
            (
                PlanError,
                r"cache: got a handle of 4 shards, want",
                (kv, plan),
                {"parts": (ROWS, whole, split)},
            ),
            (
                ShapeError,
                r"query: got \[6, 24, 8\], want \[6, 6, 8\]",
                (kv, plan),
                {"parts": (whole, split, split)},
            ),
            (ArgumentError, r"plan: got a AttentionPlan, want a plan from", (kv, plan.context), {}),
            (PlanError, r"cache: got one of CacheSpec", (other, plan), {}),
        ):
            with pytest.raises(kind, match="^" + text):
                attempt(*arguments, **options)
        with pytest.raises(FrameworkError, match=r"^plan: got AttentionPlan of Tensor, want"):
            dcp.append(*rows_of(problem)[1:], kv, replace(plan, context=in_torch), 0)
    one = PagedKVCache(SPEC, num_layers=1, num_pages=16, page_size=4, dtype="float32")
    kv = jax_frontend.cache_handle(one, name=NAME)
    shared_by_all = (ROWS, whole, split)
    try:
        # Each rank would write its own tokens over those of the others.
        with pytest.raises(PlanError, match=r"^cache: got a handle of 1 shards for 4 ranks, want"):
            attempt(kv, plan, parts=shared_by_all)
    finally:
        jax_frontend.release_cache(NAME)
    attempt(kv, plan, parts=shared_by_all)  # nobody knows yet how many it will be


def test_a_plan_of_all_ranks_writes_nothing() -> None:
    problem = shared(SPEC, SIZES, [1, 3, 1], [30, 20, 2])
    _, key, value = map(jnp.asarray, rows_of(problem))
    with caches_of(problem, "arrays") as (kv, _):
        plan = plan_of(problem, kv)
        with pytest.raises(PlanError, match=r"^plan: got metadata .* not that of one rank, want"):
            dcp.append(key, value, kv, plan, 0)
