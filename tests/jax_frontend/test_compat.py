"""Signatures of other libraries mean what they mean there, and are served in place.

Where the installed JAX has the kernel whose signature it is, results are compared with that
kernel's own as well as with the oracle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec
from problem import Array, Problem, assert_within, bits, run_jax
from small import KV_LENS, PAGE_TABLE, SPEC, TOKENS, new_cache
from strategies import Space, paged_problems
from tpu_step import (
    PAGE_SIZE,
    PAGES,
    ROWS,
    Step,
    assert_right,
    import_or_skip,
    in_turn,
    new_step,
    padded,
)

import jax_frontend
from interop import AttentionSpec
from jax_frontend.compat import apply_attention_sink, paged_attention, ragged_paged_attention

STEP = new_step()
SINK = jnp.array([0.5, -1.0, 3.0, -jnp.inf])
FP8 = ml_dtypes.float8_e4m3fn

ways = pytest.mark.parametrize("call", [Step.__call__, Step.jitted], ids=["eager", "jitted"])

# What it computes

SMALL = Space(head_dims=((64, 64), (8, 8), (5, 5)), page_sizes=(1, 3, 16), draft_masks=(False,))


@settings(max_examples=6)
@given(paged_problems(SMALL).filter(lambda it: len(it.query) > 0))
def test_it_has_the_bits_of_the_front_end(problem: Problem) -> None:
    pages, requests, features = problem.pages, len(problem.kv_lens), dict(problem.features)
    assert pages is not None
    want = run_jax(problem, "cpu", "arrays")
    of_layer = pages.of_layer
    step = Step(
        *map(jnp.asarray, (problem.query, problem.key, problem.value)),
        in_turn(pages.key_pool[of_layer], pages.value_pool[of_layer]),
        padded(problem.kv_lens, requests + 2),
        padded(pages.table, requests + 2).ravel(),
        padded(np.cumsum([0, *problem.query_lens]), requests + 3),
        np.array([0, 0, requests], np.int32),
    )
    out, after = step.jitted(
        sm_scale=problem.spec.sm_scale,
        use_causal_mask=features["causal"],
        sliding_window=features["sliding_window"],
        soft_cap=features["logits_soft_cap"],
    )
    np.testing.assert_array_equal(bits(np.asarray(out)), bits(want.out))
    for side, pool in enumerate((want.key_pool, want.value_pool)):
        assert pool is not None
        ours = np.ascontiguousarray(after[:, :, side::2])
        np.testing.assert_array_equal(bits(ours), bits(pool[of_layer]))


@pytest.mark.parametrize(
    "features",
    [{}, {"sliding_window": 2, "soft_cap": 0.5, "k_scale": 0.5, "v_scale": 3.0}],
    ids=str,
)
def test_it_means_what_the_kernel_for_tpus_means(features: dict[str, Any]) -> None:
    tpu = import_or_skip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    out, written = STEP(**features)
    # Of the requests that have a query, as it knows no others. It does not write.
    some, starts = [0, 1, 3], [0, 1, 4, 6]
    lens, table = np.array(KV_LENS)[some], np.array(PAGE_TABLE)[some]
    metadata = (jnp.asarray(x, jnp.int32) for x in (lens, table, starts, [3]))
    want = tpu.ref_ragged_paged_attention(STEP.q, written, *metadata, **features)
    np.testing.assert_allclose(out[:TOKENS], want, atol=1e-5)


@ways
def test_scales_of_a_cache_that_is_not_quantised_are_factors(call: Callable[..., Any]) -> None:
    got = call(STEP, sm_scale=0.5, k_scale=3.0, v_scale=0.25, soft_cap=2.0)
    out, *rest = STEP.wanted(sm_scale=1.5, logits_soft_cap=2.0)
    assert_right(got, (0.25 * out, *rest))


@ways
def test_without_an_update_only_the_cache_is_read(call: Callable[..., Any]) -> None:
    want = STEP.wanted(write=False)
    spoiled = replace(STEP, k=STEP.k * jnp.nan, v=STEP.v * jnp.nan)
    for step in (spoiled, replace(STEP, k=None, v=None)):
        assert_right(call(step, update_kv_cache=False), want)


def test_a_sink_takes_its_share() -> None:
    out, lse, cache = STEP.wanted(sm_scale=0.4)
    share = 1.0 / (1.0 + np.exp(np.asarray(SINK) - lse))
    want = out * share[:, :, None], lse, cache
    assert_right(STEP.jitted(sm_scale=0.4, attention_sink=SINK), want)
    # The kernel for heads of 64 takes it by its place.
    assert_right(ragged_paged_attention(*STEP.arguments(), SINK, sm_scale=0.4), want)


def test_sinks_of_any_size() -> None:
    lse = jnp.array([[-jnp.inf, 0.0, 80.0, -200.0, 1.0, -jnp.inf, -jnp.inf]])
    sink = jnp.array([2.0, 0.0, -80.0, 200.0, -jnp.inf, -jnp.inf, jnp.inf])
    out = apply_attention_sink(jnp.ones((1, 7, 2), jnp.bfloat16), lse, sink)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[0, :, 0], [0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0])


# 8-bit floats


def stored(array: Any, scale: float) -> Array:
    return np.asarray(array / np.float32(scale)).astype(FP8)


QUANTISED = replace(STEP, kv_cache=STEP.kv_cache.astype(FP8))


@pytest.mark.parametrize("sink", [None, SINK], ids=["no sink", "sink"])
@pytest.mark.parametrize("as_stored", [True, False], ids=["stored", "rounded"])
def test_keys_and_values_of_8_bits(as_stored: bool, sink: jax.Array | None) -> None:
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    k, v = stored(STEP.k, 0.5), stored(STEP.v, 0.25)
    step = replace(QUANTISED, k=jnp.asarray(k), v=jnp.asarray(v)) if as_stored else QUANTISED
    out, after = step.jitted(sm_scale=0.3, attention_sink=sink, **scales)
    assert after.dtype == FP8
    # What is stored, in float32, which has room for all of it.
    wide = (x.astype(np.float32) for x in (k, v, QUANTISED.kv_cache))
    plain = replace(STEP, **dict(zip(("k", "v", "kv_cache"), wide, strict=True)))
    want, lse, cache = plain.wanted(sm_scale=0.15)
    if sink is not None:
        want = want / (1.0 + np.exp(np.asarray(sink) - lse))[:, :, None]
    assert_right((out, after.astype(jnp.float32)), (0.25 * want, lse, cache))


def test_an_array_of_8_bits_has_the_bits_of_a_cache_with_scales() -> None:
    spec = AttentionSpec(4, 2, 8, sm_scale=1.0, dtype="float32")
    ours = jax_frontend.init_cache(
        spec, num_layers=1, num_pages=PAGES, page_size=PAGE_SIZE, dtype="fp8", scales=(0.5, 2.0)
    )
    pools = (np.ascontiguousarray(QUANTISED.kv_cache[:, :, side::2]) for side in (0, 1))
    ours = ours.with_pools([jnp.array(pool) for pool in pools])
    want, ours = replace(STEP, kv_cache=ours).jitted()
    out, after = QUANTISED.jitted(k_scale=0.5, v_scale=2.0)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(after[:, :, 0::2], ours.k)
    np.testing.assert_array_equal(after[:, :, 1::2], ours.v)


def test_a_query_is_rounded_if_asked_for() -> None:
    for step in (STEP, QUANTISED):
        rounded = stored(step.q, 0.5) if step is QUANTISED else step.q / 0.5
        want, _ = replace(step, q=jnp.asarray(rounded.astype(np.float32))).jitted(sm_scale=0.5)
        np.testing.assert_array_equal(step.jitted(q_scale=0.5)[0], want)


# Where keys and values lie


def filled(cache: Array, rows: int, width: int) -> Array:
    """Add rows and columns of a number that must stay."""
    out = np.full((*cache.shape[:2], rows, width), 7.0).astype(cache.dtype)
    out[:, :, : cache.shape[2], : cache.shape[3]] = cache
    return out


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "rows", "shape"),
    [
        (ml_dtypes.bfloat16, 2, 8, (4, 128), (2, 2, 128)),
        (ml_dtypes.bfloat16, 1, 64, (4, 64), (1, 2, 128)),
        (ml_dtypes.bfloat16, 3, 64, (8, 64), (2, 2, 128)),
        (np.float32, 2, 64, (4, 128), (4, 1, 128)),
        (FP8, 3, 16, (8, 128), (2, 4, 128)),
        (np.float32, 1, 130, (2, 256), (2, 256)),
    ],
    ids=str,
)
def test_arrays_as_tpu_kernels_pack_them(
    dtype: Any, heads: int, width: int, rows: tuple[int, int], shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)

    def numbers(*size: int) -> Array:
        return rng.standard_normal(size, np.float32).astype(dtype)

    plain = numbers(PAGES, PAGE_SIZE, 2 * heads, width)
    step = replace(
        STEP,
        q=jnp.asarray(numbers(ROWS, 2 * heads, width)).astype("float32" if dtype == FP8 else dtype),
        k=jnp.asarray(numbers(ROWS, heads, width)),
        v=jnp.asarray(numbers(ROWS, heads, width)),
        kv_cache=plain,
    )
    want, cache = step.jitted()
    given = filled(plain, *rows).reshape(*plain.shape[:2], *shape)
    out, after = replace(step, kv_cache=given).jitted()
    np.testing.assert_array_equal(out, want)
    cache = filled(np.asarray(cache), *rows).reshape(given.shape)
    np.testing.assert_array_equal(np.asarray(after).astype("f4"), cache.astype("f4"))


def address(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


@pytest.mark.parametrize("shape", [(4, 8), (4, 1, 8)], ids=str)
def test_a_donated_array_is_written_in_place(shape: tuple[int, ...]) -> None:
    step = jax.jit(ragged_paged_attention, donate_argnums=3)
    given = STEP.arguments()
    given[3] = given[3].reshape(PAGES, PAGE_SIZE, *shape)
    assert_no_copies(step.lower(*given).compile().as_text(), given[3].size)
    for run in (step, ragged_paged_attention):
        where, before = address(given[3]), given[3]
        given[3] = run(*given)[1]
        assert address(given[3]) == where
        assert before.is_deleted()
    where = address(given[3])
    given[3] = ragged_paged_attention(*given, update_kv_cache=False)[1]
    assert address(given[3]) == where


def assert_no_copies(program: str, elements: int) -> None:
    sizes = re.findall(r"\[([0-9,]+)\]\S* copy", program)
    assert not [size for size in sizes if np.prod([int(n) for n in size.split(",")]) >= elements]


@pytest.mark.parametrize("traced", [False, True], ids=["number", "traced"])
@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_caches_of_our_own(kind: str, traced: bool) -> None:
    owned = new_cache(seed=3)
    pools = [x.numpy().copy() for x in owned.pools(1)]
    want, cache = replace(STEP, kv_cache=in_turn(*pools)).jitted(attention_sink=SINK)
    kv: Any = jax_frontend.init_cache(
        SPEC, num_layers=3, num_pages=12, page_size=4, dtype="float32"
    )
    kv = kv.with_pools([jnp.array(x.numpy()) for x in (owned.k, owned.v)])
    if kind == "handle":
        kv = jax_frontend.cache_handle(owned)
    step = replace(STEP, kv_cache=kv)
    run = partial(ragged_paged_attention, attention_sink=SINK)
    if traced:
        out, after = jax.jit(lambda layer, *given: run(*given, layer=layer))(1, *step.arguments())
    else:
        out, after = step.jitted(attention_sink=SINK, layer=1)
    np.testing.assert_array_equal(out, want)
    if kind == "handle":
        jax.block_until_ready(after)
        jax_frontend.release_cache(kv.name)
        written = [x.numpy() for x in owned.pools(1)]
    else:
        written = [np.asarray(x)[12:24] for x in after.pools]
    np.testing.assert_array_equal(in_turn(*written), cache)


# Within programs


def block(q: Any, cache: Any, *metadata: Any) -> Any:
    """A layer whose keys come from the one before, as in a model."""
    keys = STEP.k + q[:, :2]
    return ragged_paged_attention(q, keys, STEP.v, cache, *metadata, sm_scale=0.3)


def one_array_each(q: Any, caches: Any, *metadata: Any) -> Any:
    after = []
    for cache in caches:
        q, cache = block(q, cache, *metadata)
        after.append(cache)
    return q, jnp.stack(after)


def scanned(q: Any, caches: Any, *metadata: Any) -> Any:
    return jax.lax.scan(lambda q, cache: block(q, cache, *metadata), q, caches)


def one_array_in_all(q: Any, pool: Any, lens: Any, table: Any, *metadata: Any) -> Any:
    def layer(carry: Any, number: Any) -> Any:
        return block(*carry, lens, table + number * PAGES, *metadata), None

    return jax.lax.scan(layer, (q, pool), jnp.arange(3))[0]


def test_layers_in_a_loop() -> None:
    rng = np.random.default_rng(5)
    caches = rng.standard_normal((3, *STEP.kv_cache.shape), np.float32)
    q, _, _, _, lens, table, *rest = STEP.arguments()
    # Pages of requests that are not there: any will do, and numbers are added to them.
    metadata = lens, np.minimum(table, 9), *rest
    want = jax.jit(one_array_each)(q, caches, *metadata)
    pool = jnp.array(caches.reshape(-1, *caches.shape[2:]))
    flat = jax.jit(one_array_in_all, donate_argnums=1).lower(q, pool, *metadata).compile()
    assert_no_copies(flat.as_text(), pool.size)
    for out, after in (jax.jit(scanned)(q, caches, *metadata), flat(q, pool, *metadata)):
        np.testing.assert_array_equal(out, want[0])
        np.testing.assert_array_equal(after.reshape(caches.shape), want[1])


def test_layers_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["jax_frontend.compat.ragged_paged_attention"]
    planned: list[Any] = []

    def spied(*arguments: Any, **options: Any) -> Any:
        planned.append(options)
        return plan_on_device(*arguments, **options)

    plan_on_device = module.plan_on_device
    monkeypatch.setattr(module, "plan_on_device", spied)

    def layers(q: Any, k: Any, v: Any, cache: Any, *metadata: Any) -> Any:
        for _ in range(4):
            q, cache = ragged_paged_attention(q, k, v, cache, *metadata, sm_scale=0.77)
        return q, cache

    jax.jit(layers).lower(*STEP.arguments())
    assert len(planned) == 1


def test_heads_split_over_devices() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    heads, whole = PartitionSpec(None, "model"), PartitionSpec()
    pages = PartitionSpec(None, None, "model")
    step = jax.shard_map(
        partial(ragged_paged_attention, sm_scale=0.3),
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, whole, whole, whole, whole, PartitionSpec("model")),
        out_specs=(heads, pages),
        check_vma=False,
    )
    want = STEP.jitted(sm_scale=0.3, attention_sink=SINK)
    for ours, theirs in zip(jax.jit(step)(*STEP.arguments(), SINK), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# The signature of JAX's kernel for GPUs


@pytest.mark.parametrize(("lengths", "cap"), [([1, 32, 13], 3.0), (None, None)], ids=str)
def test_one_query_each_over_pages_of_each_head(lengths: Any, cap: float | None) -> None:
    gpu = import_or_skip("jax.experimental.pallas.ops.gpu.paged_attention")
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.standard_normal((3, 32, 16), np.float32))
    pools = [jnp.asarray(rng.standard_normal((2, 20, 8, 16), np.float32)) for _ in range(2)]
    table = rng.integers(0, 20, (3, 4)).astype(np.int32)
    options = {"attn_logits_soft_cap": cap, "pages_per_compute_block": 2, "k_splits": 2}
    given = q, *pools, jnp.asarray(table), None if lengths is None else jnp.asarray(lengths)
    out = jax.jit(partial(paged_attention, **options))(*given)
    want = gpu.paged_attention(*given, **options, interpret=True)
    np.testing.assert_allclose(out, want, atol=1e-5)
    by_pages = [np.asarray(pool).transpose(1, 2, 0, 3) for pool in pools]
    lens = [1, 1, 1], lengths or [32, 32, 32]
    features = {"sm_scale": 1.0, "logits_soft_cap": cap}
    exact, _ = oracle.paged_attention(np.asarray(q), *by_pages, *lens, table, **features)
    assert_within("out", np.asarray(out), exact, 1e-5)


def test_pages_of_each_head_are_read_in_place() -> None:
    q, pool = jnp.ones((2, 4, 8)), jnp.ones((2, 30, 4, 8))
    table = jnp.zeros((2, 3), jnp.int32)
    given = q, pool, pool, table, jnp.array([0, 5])
    assert_no_copies(jax.jit(paged_attention).lower(*given).compile().as_text(), pool.size)
    np.testing.assert_array_equal(paged_attention(*given)[:, 0, 0], [0.0, 1.0])
