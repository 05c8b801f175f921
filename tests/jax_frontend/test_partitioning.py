"""Heads split over devices under plain jax.jit, over meshes whose axes are Auto or Explicit."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from small import BATCH, SIZES

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.errors import ArgumentError, PlanError, ShapeError, TransformError
from jax_frontend import partitioning, spec_of_shard
from jax_frontend.arranged import IN_TURN, ArrangedArrays
from torch_backend import PagedKVCache

Array = np.ndarray[Any, np.dtype[Any]]
WHOLE = AttentionSpec(8, 4, 8, sliding_window=7, dtype="float32")
# Rows that divide by the devices, so that a test may split them.
BUCKET = Bucket(num_requests=6, num_tokens=8, num_pages=16)
ROWS = P(None, "kv")
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])


def pools_of(layout: str, axis: Any = "kv") -> P:
    return P(None, None, axis) if layout == "NHD" else P(None, axis)


def rows_of(seed: int) -> tuple[Array, Array, Array]:
    """Query, key and value rows of all heads, with rows to spare."""
    rng = np.random.default_rng(seed)
    query, key, value = (
        rng.standard_normal((BUCKET.num_tokens, heads, 8), np.float32) for heads in (8, 4, 4)
    )
    return query, key, value


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("for the virtual CPU devices of a machine without a GPU")


@dataclass(frozen=True)
class Setting:
    """A mesh, and what lies on it."""

    mesh: Mesh

    @classmethod
    def of(cls, shards: int, kind: AxisType) -> Setting:
        return cls(Mesh(np.array(jax.devices()[:shards]), ("kv",), axis_types=(kind,)))

    @classmethod
    def square(cls, *kinds: AxisType) -> Setting:
        grid = np.array(jax.devices()[:4]).reshape(2, 2)
        return cls(Mesh(grid, ("dp", "kv"), axis_types=kinds))

    def on(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def rows(self, seed: int, spec: P = ROWS) -> list[jax.Array]:
        return [jax.device_put(x, self.on(spec)) for x in rows_of(seed)]

    def plan(self, cache_spec: CacheSpec, shards: int | None = None, whole: P | None = None) -> Any:
        """A plan of one shard, for a cache of all heads or of one shard's."""
        shards = self.mesh.size if shards is None else shards
        local = spec_of_shard(WHOLE, shards)
        cache_spec = replace(cache_spec, num_kv_heads=local.num_kv_heads)
        place = self.on(P() if whole is None else whole)
        return jax_frontend.plan(local, cache_spec, BATCH, bucket=BUCKET, device=place)


@cache
def unsharded(layout: str) -> tuple[Array, PagedKVCache]:
    """Output of two layers by the core, and the cache after them."""
    kv = PagedKVCache(WHOLE, **SIZES, layout=layout)
    plan = torch_backend.plan(WHOLE, kv.spec, BATCH, bucket=BUCKET)
    query, key, value = map(torch.from_numpy, rows_of(0))
    for layer in (0, 2):
        torch_backend.append(key, value, kv, plan, layer)
        out = torch_backend.attend(query, kv, plan, layer)
        assert isinstance(out, torch.Tensor)
        query = out
    return query.numpy(), kv


def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """Two layers, one call after another."""
    for layer in (0, 2):
        kv = jax_frontend.append(key, value, kv, plan, layer)
        query, kv = jax_frontend.attend(query, kv, plan, layer, return_cache=True)
        key = key + 0 * query.sum()  # as in a model, the next write waits for this read
    return query, kv


def step_in_a_scan(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """The same by paged_attention over traced layers."""

    def block(carry: Any, layer: jax.Array) -> Any:
        query, kv = carry
        return jax_frontend.paged_attention(query, key, value, kv, plan, layer), None

    return jax.lax.scan(block, (query, kv), jnp.array([0, 2]))[0]


def step_in_a_loop(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """The same in a while loop."""

    def body(carry: Any) -> Any:
        layer, query, kv = carry
        query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
        return layer + 2, query, kv

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (jnp.int32(0), query, kv))[1:]


# On four devices each has one KV head.
MODELS = pytest.mark.parametrize(
    ("model", "shards"), [(step, 2), (step_in_a_scan, 2), (step_in_a_loop, 2), (step, 4)]
)


@KINDS
@LAYOUTS
@MODELS
def test_pools_that_jax_owns(
    kind: AxisType, shards: int, layout: str, model: Callable[..., Any]
) -> None:
    want, whole = unsharded(layout)
    on = Setting.of(shards, kind)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, layout=layout, sharding=on.on(pools_of(layout)))
    plan = on.plan(kv.spec)
    before = [shard.data.unsafe_buffer_pointer() for shard in kv.k.addressable_shards]
    compiled = jax.jit(model, donate_argnums=3).lower(*on.rows(0), kv, plan).compile()
    jax_frontend.assert_no_cache_copies(compiled, kv)
    out, kv = compiled(*on.rows(0), kv, plan)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(kv.k, whole.k.numpy())
    np.testing.assert_array_equal(kv.v, whole.v.numpy())
    assert out.sharding.is_equivalent_to(on.on(ROWS), 3)
    assert kv.k.sharding.is_equivalent_to(on.on(pools_of(layout)), 4)
    assert [shard.data.unsafe_buffer_pointer() for shard in kv.k.addressable_shards] == before


@KINDS
@MODELS
def test_shards_that_torch_owns(kind: AxisType, shards: int, model: Callable[..., Any]) -> None:
    want, whole = unsharded("NHD")
    on = Setting.of(shards, kind)
    caches = [PagedKVCache(spec_of_shard(WHOLE, shards), **SIZES) for _ in range(shards)]
    kv = jax_frontend.cache_handle(caches, name="parts", sharding=on.on(P("kv")))
    try:
        compiled = jax.jit(model).lower(*on.rows(0), kv, on.plan(kv.spec)).compile()
        jax_frontend.assert_no_cache_copies(compiled, kv)
        out, kv = jax.block_until_ready(compiled(*on.rows(0), kv, on.plan(kv.spec)))
    finally:
        jax_frontend.release_cache("parts")
    np.testing.assert_array_equal(out, want)
    assert torch.equal(torch.cat([cache.k for cache in caches], 2), whole.k)
    assert torch.equal(torch.cat([cache.v for cache in caches], 2), whole.v)
    assert np.asarray(kv.token).tolist() == list(range(shards))


@KINDS
def test_quantised_pools_with_scales_of_their_own(kind: AxisType) -> None:
    sizes = SIZES | {"dtype": "fp8"}
    scales = np.random.default_rng(1).uniform(0.5, 2, (3, 2, 4)).astype(np.float32)
    kv = jax_frontend.init_cache(WHOLE, **sizes, scales=scales)
    plan = jax_frontend.plan(WHOLE, kv.spec, BATCH, bucket=BUCKET)
    want, _ = jax.jit(step_in_a_scan)(*map(jnp.asarray, rows_of(0)), kv, plan)
    on = Setting.of(2, kind)
    kv = jax_frontend.init_cache(WHOLE, **sizes, scales=scales, sharding=on.on(pools_of("NHD")))
    got, _ = jax.jit(step_in_a_scan)(*on.rows(0), kv, on.plan(kv.spec))
    np.testing.assert_array_equal(got, want)


@KINDS
def test_the_rows_of_a_call_and_lse(kind: AxisType) -> None:
    on = Setting.of(2, kind)
    batch = RaggedBatch([3, 2], [3, 2], [[0], [1]])
    fresh = Bucket(num_requests=2, num_tokens=8, num_pages=8, without_context=True)

    def attend(rows: Any, sharding: Any, shards: int) -> Any:
        kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=sharding and on.on(pools_of("NHD")))
        specs = [spec_of_shard(spec, shards) for spec in (WHOLE, kv.spec)]
        plan = jax_frontend.plan(*specs, batch, bucket=fresh, device=sharding)
        assert plan.static.own is not None
        bare = RaggedBatch([3, 2], [3, 2])
        alone = jax_frontend.plan(specs[0], None, bare, bucket=fresh, device=sharding)

        @jax.jit
        def run(query: Any, key: Any, value: Any, kv: Any, plan: Any, alone: Any) -> Any:
            rows = query, key, value
            out, lse, _ = jax_frontend.paged_attention(*rows, kv, plan, 0, return_lse=True)
            return out, lse, *jax_frontend.ragged_attention(*rows, alone, return_lse=True)

        return run(*rows, kv, plan, alone)

    want = attend(map(jnp.asarray, rows_of(0)), None, 1)
    got = attend(on.rows(0), on.on(P()), 2)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding.is_equivalent_to(on.on(ROWS), ours.ndim)


def test_a_model_whose_weights_are_split_needs_no_more_than_a_sum() -> None:
    on = Setting.of(2, AxisType.Auto)

    def model(x: Any, weights: Any, kv: Any, plan: Any) -> Any:
        for layer in range(3):
            query = (x @ weights[0]).reshape(-1, 8, 8)
            key = (x @ weights[1]).reshape(-1, 4, 8)
            out, kv = jax_frontend.paged_attention(query, key, key, kv, plan, layer)
            x = x + out.reshape(-1, 64) @ weights[2]
        return x, kv

    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16), np.float32)
    weights = [rng.standard_normal(size, np.float32) / 8 for size in ((16, 64), (16, 32), (64, 16))]
    kv = jax_frontend.init_cache(WHOLE, **SIZES)
    plan = jax_frontend.plan(WHOLE, kv.spec, BATCH, bucket=BUCKET)
    want, _ = jax.jit(model)(x, weights, kv, plan)
    split = [on.on(spec) for spec in (ROWS, ROWS, P("kv"))]
    x, weights = jax.device_put(x, on.on(P())), jax.device_put(weights, split)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    program = jax.jit(model, donate_argnums=2).lower(x, weights, kv, on.plan(kv.spec)).compile()
    jax_frontend.assert_no_cache_copies(program, kv)
    text = program.as_text() or ""
    assert len(re.findall(r" all-reduce\(", text)) == 3
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    got, _ = program(x, weights, kv, on.plan(kv.spec))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@KINDS
@pytest.mark.parametrize("axes", ["kv", ("dp", "kv"), ("kv", "dp")])
def test_some_axes_of_a_mesh_of_two(kind: AxisType, axes: Any) -> None:
    want, whole = unsharded("NHD")
    on = Setting.square(kind, kind)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD", axes)))
    plan = on.plan(kv.spec, 2 if axes == "kv" else 4)
    out, kv = jax.jit(step, donate_argnums=3)(*on.rows(0, P(None, axes)), kv, plan)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(kv.k, whole.k.numpy())


@KINDS
def test_rows_that_every_device_has_are_cut_where_they_lie(kind: AxisType) -> None:
    on = Setting.of(2, kind)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    program = jax.jit(jax_frontend.paged_attention, static_argnums=5)
    arguments = (*on.rows(0, P()), kv, on.plan(kv.spec), 0)
    text = program.lower(*arguments).compile().as_text() or ""
    assert not re.search(r" (all-\w+|collective-\w+)\(", text)
    want, _ = program(*on.rows(0), *arguments[3:])
    np.testing.assert_array_equal(program(*arguments)[0], want)


@KINDS
def test_outside_of_any_program(kind: AxisType) -> None:
    want, _ = unsharded("NHD")
    on = Setting.of(2, kind)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    out, kv = step(*on.rows(0), kv, on.plan(kv.spec))
    np.testing.assert_array_equal(out, want)
    assert out.sharding.is_equivalent_to(on.on(ROWS), 3)


@KINDS
def test_a_whole_plan_where_every_device_has_everything(kind: AxisType) -> None:
    want, _ = unsharded("NHD")
    on = Setting.of(2, kind)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(P()))
    out, _ = jax.jit(step)(*on.rows(0, P()), kv, on.plan(kv.spec, 1))
    np.testing.assert_array_equal(out, want)


def test_an_explicit_program_is_exported() -> None:
    want, _ = unsharded("NHD")
    on = Setting.of(2, AxisType.Explicit)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_frontend.FFI_TARGETS]
    arguments = (*on.rows(0), kv, on.plan(kv.spec))
    exported = jax.export.export(jax.jit(step), disabled_checks=checks)(*arguments)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(*arguments)[0], want)


def without_ids(text: str) -> list[str]:
    """A program's instructions without the tables and names that are for debugging."""
    lines = [line for line in text.splitlines() if " = " in line or "HloModule" in line]
    return [re.sub(r"[.]\d+|, metadata=\{[^}]*\}", "", line) for line in lines]


@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_on_one_device_the_program_is_what_it_was(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv: Any = jax_frontend.init_cache(WHOLE, **SIZES)
    if kind == "handle":
        kv = jax_frontend.cache_handle(PagedKVCache(WHOLE, **SIZES), name="one")
    plan = jax_frontend.plan(WHOLE, kv.spec, BATCH, bucket=BUCKET)
    texts = []
    for devices in (jax.device_count(), 1):
        monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
        jax.clear_caches()
        arguments = (*map(jnp.asarray, rows_of(0)), kv, plan)
        lowered = jax.jit(step_in_a_scan, donate_argnums=3).lower(*arguments)
        texts.append((lowered.as_text(), without_ids(lowered.compile().as_text() or "")))
    if kind == "handle":
        jax_frontend.release_cache("one")
    assert texts[0] == texts[1]


def test_programs_that_do_different_things_have_different_texts() -> None:
    # Where JAX is told to leave the callback's address out of the key of its cache on disk, the
    # text is all that a program is found by.
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    rows = on.rows(0)

    def text(layer: int) -> str:
        def one(query: Any, kv: Any, plan: Any) -> Any:
            return jax_frontend.attend(query, kv, plan, layer)

        lowered = jax.jit(one).lower(rows[0], kv, on.plan(kv.spec)).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text(1) != text(2)
    assert text(1) == text(1)


def refused(kind: AxisType, text: str) -> AbstractContextManager[Any]:
    """Typed where JAX knows shardings while it traces; else XLA's error with the text."""
    if kind == AxisType.Explicit:
        return pytest.raises(PlanError, match="^" + text)
    return pytest.raises(jax.errors.JaxRuntimeError, match="PlanError: " + text)


WIDTH = P(None, None, "kv")
MOVED = {
    "tokens": ({"rows": P("kv")}, r"key: got tokens split over mesh axis 'kv', want no split but"),
    "width of rows": ({"rows": WIDTH}, r"key: got width split over mesh axis 'kv', want no split"),
    "pages": ({"pools": P("kv")}, r"cache\.k: got pages split over mesh axis 'kv', want no split"),
    "places": ({"pools": P(None, "kv")}, r"cache\.k: got page_size split over mesh axis 'kv'"),
    "width": ({"pools": P(None, None, None, "kv")}, r"cache\.k: got width split over mesh axis"),
    "whole pools": (
        {"pools": P()},
        r"cache\.k: got whole on each device, want heads split over mesh axis 'kv', as those of key"
        " are. Nothing is moved",
    ),
    "whole arrays": (
        {"pools": P(), "rows": P()},
        "plan: got that of one of 2 shards, want that of all heads, which every device has. Put",
    ),
    "a plan of all": (
        {"shards": 1},
        r"plan: got one for all heads \(8 query, 4 KV\), with arrays whose heads are split over "
        r"mesh axis 'kv', want .* Plan with jax_frontend\.spec_of_shard\(spec, 2\)",
    ),
    "a plan of fewer": (
        {"shards": 4},
        r"plan: got that of one of 4 shards, want that of one of 2, for heads split over mesh axis "
        r"'kv'. Plan with jax_frontend\.spec_of_shard\(spec, 2\)",
    ),
}


@KINDS
@pytest.mark.parametrize("name", MOVED)
def test_what_would_have_to_move_is_refused(kind: AxisType, name: str) -> None:
    changes, text = MOVED[name]
    on = Setting.of(2, kind)
    pools = on.on(changes.get("pools", pools_of("NHD")))
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=pools)
    rows = on.rows(0, changes.get("rows", ROWS))
    plan = on.plan(kv.spec, changes.get("shards"))
    with refused(kind, text):
        jax.jit(step)(*rows, kv, plan)
    assert not np.asarray(kv.k).any()


def test_a_plan_that_is_split_is_refused() -> None:
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    with refused(AxisType.Auto, "plan: got metadata split over mesh axis 'kv', want whole on each"):
        jax.jit(step)(*on.rows(0), kv, on.plan(kv.spec, whole=P("kv")))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (P("kv"), "out: got wanted with tokens split over mesh axis 'kv', want heads split over"),
        (WIDTH, "out: got wanted with width split over mesh axis 'kv', want heads split over"),
        (P(), None),  # nothing but this very line asks for it
    ],
)
def test_results_that_are_wanted_otherwise(wanted: P, text: str | None) -> None:
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))

    def constrained(query: Any, kv: Any, plan: Any) -> Any:
        out = jax_frontend.attend(query, kv, plan, 0)
        return jax.lax.with_sharding_constraint(out, on.on(wanted))

    query, _, _ = on.rows(0)
    if text is None:
        assert jax.jit(constrained)(query, kv, on.plan(kv.spec)).sharding.is_fully_replicated
        return
    with refused(AxisType.Auto, text):
        jax.jit(constrained)(query, kv, on.plan(kv.spec))


def test_pools_that_are_wanted_whole_are_refused() -> None:
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))

    def constrained(key: Any, value: Any, kv: Any, plan: Any) -> Any:
        kv = jax_frontend.append(key, value, kv, plan, 0)
        return replace(kv, k=jax.lax.with_sharding_constraint(kv.k, on.on(P())))

    _, key, value = on.rows(0)
    with refused(AxisType.Auto, r"cache\.k: got wanted whole on each device, want heads split"):
        jax.jit(constrained)(key, value, kv, on.plan(kv.spec))


@KINDS
def test_a_handle_needs_a_shard_on_each_device(kind: AxisType) -> None:
    on = Setting.square(kind, kind)
    caches = [PagedKVCache(spec_of_shard(WHOLE, 2), **SIZES) for _ in range(2)]
    parts = jax_frontend.cache_handle(caches, name="parts", sharding=on.on(P("kv")))
    alone = PagedKVCache(WHOLE, **SIZES)
    one = jax_frontend.cache_handle(alone, name="one", sharding=on.on(P()))
    every = jax_frontend.cache_handle([alone, alone], name="every", sharding=on.on(P("kv")))
    unsplit = replace(parts, token=jax.device_put(np.arange(2, dtype=np.int32), on.on(P())))
    try:
        with refused(kind, "cache: got a handle of 2 shards in a program of 4 devices, want a"):
            jax.jit(step)(*on.rows(0), parts, on.plan(parts.spec, 2))
        with refused(kind, "cache: got a handle of 1 shards in a program of 4 devices, want a"):
            jax.jit(step)(*on.rows(0, P()), one, on.plan(one.spec, 1))
        with refused(kind, r"cache\.token: got whole on each device, want heads split over mesh"):
            jax.jit(step)(*on.rows(0), unsplit, on.plan(parts.spec, 2))
        with pytest.raises(PlanError, match=r"^cache: got one of CacheSpec.*num_kv_heads=4"):
            jax.jit(step)(*on.rows(0), every, on.plan(parts.spec, 2))
    finally:
        for name in ("parts", "one", "every"):
            jax_frontend.release_cache(name)
    assert not any(cache.k.any() for cache in (*caches, alone))


def test_more_devices_than_kv_heads() -> None:
    on = Setting.of(2, AxisType.Explicit)
    spec = AttentionSpec(8, 1, 8)
    kv = jax_frontend.init_cache(spec, **SIZES, sharding=on.on(P()))
    plan = jax_frontend.plan(spec, kv.spec, BATCH, bucket=BUCKET, device=on.on(P()))
    with pytest.raises(PlanError, match=r"1 KV heads cannot be dealt to 2 devices.*dcp"):
        jax.jit(jax_frontend.attend, static_argnums=3)(on.rows(0)[0], kv, plan, 0)


@KINDS
def test_pools_of_another_arrangement_are_for_shard_map(kind: AxisType) -> None:
    on = Setting.of(2, kind)
    spec = CacheSpec.of(WHOLE, **SIZES, device="cpu")
    plan = jax_frontend.plan(WHOLE, spec, BATCH, bucket=BUCKET, device=on.on(P()))
    _, key, value = on.rows(0)
    for where, text in (
        (P(), r"plan: got one for all heads .* Inside of jax\.shard_map each device"),
        (P(None, None, "kv"), r"cache\.pools: got dimension 2 split over .*, want whole on each"),
    ):
        pool = jax.device_put(np.zeros((36, 4, 8, 8), np.float32), on.on(where))
        with refused(kind, text):
            jax.block_until_ready(
                jax_frontend.append(key, value, ArrangedArrays((pool,), IN_TURN, spec), plan, 0)
            )


def test_axes_of_both_types() -> None:
    on = Setting.square(AxisType.Auto, AxisType.Explicit)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    with pytest.raises(PlanError, match=r"^mesh: got axes \('dp', 'kv'\) of the types"):
        jax.jit(step)(*on.rows(0), kv, on.plan(kv.spec, 2))


def test_one_device_with_the_plan_of_a_shard() -> None:
    on = Setting.of(2, AxisType.Auto)
    one = SingleDeviceSharding(jax.devices()[0])
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=one)
    plan = jax.device_put(on.plan(kv.spec), one)
    with pytest.raises(PlanError, match=r"^plan: got that of one of 2 shards .* on one device"):
        jax.jit(step)(*map(jnp.asarray, rows_of(0)), kv, plan)


def test_heads_of_rows_that_are_not_those_of_the_cache() -> None:
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    query, key, value = on.rows(0)
    plan = on.plan(kv.spec)
    with pytest.raises(ShapeError, match=r"^key: got \[8, 2, 8\], want \[8, 4, 8\]"):
        jax.eval_shape(lambda: jax_frontend.paged_attention(query, key[:, :2], value, kv, plan, 0))
    alone = jax_frontend.plan(
        spec_of_shard(WHOLE, 2), None, RaggedBatch([3], [3]), bucket=BUCKET, device=on.on(P())
    )
    with pytest.raises(ShapeError, match=r"^query: got \[8, 8, 8\], want \[8, 4, 8\]"):
        jax.eval_shape(lambda: jax_frontend.ragged_attention(query, key[:, :2], value, alone))


def test_no_vmap_and_no_gradient_of_arrays_that_are_split() -> None:
    on = Setting.of(2, AxisType.Auto)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=on.on(pools_of("NHD")))
    query, key, value = on.rows(0)
    plan = on.plan(kv.spec)

    def loss(key: Any) -> Any:
        return jax_frontend.append(key, value, kv, plan, 0).k.sum()

    with pytest.raises(TransformError, match="append has no gradient"):
        jax.grad(loss)(key)
    with pytest.raises(TransformError, match="attend has no vmap over 2"):
        jax.vmap(lambda query: jax_frontend.attend(query, kv, plan, 0))(jnp.stack([query] * 2))


def test_specs_of_a_shard() -> None:
    cache_spec = CacheSpec(3, 12, 4, 4, 8, dtype="float16", layout="HND")
    assert spec_of_shard(WHOLE, 4) == AttentionSpec(2, 1, 8, sliding_window=7, dtype="float32")
    assert spec_of_shard(cache_spec, 2) == replace(cache_spec, num_kv_heads=2)
    assert partitioning.spec_of_all(spec_of_shard(WHOLE, 4), 4) == WHOLE
    for spec, shards, text in (
        (WHOLE, 3, "shards: got 3 for 4 KV heads, want a divisor"),
        (WHOLE, 0, "shards: got 0, want a positive integer"),
        (WHOLE, True, "shards: got True, want a positive integer"),
        ("spec", 2, "spec: got str, want an AttentionSpec or a CacheSpec"),
    ):
        with pytest.raises(ArgumentError, match="^" + text):
            spec_of_shard(spec, shards)  # type: ignore[type-var]


@pytest.mark.gpu
@KINDS
def test_two_gpus_compute_what_they_do_under_shard_map(kind: AxisType) -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    spec = AttentionSpec(16, 4, 128)
    local = spec_of_shard(spec, 2)
    sizes: dict[str, Any] = SIZES | {"page_size": 16, "dtype": "bfloat16"}
    on = Setting.of(2, kind)
    rng = np.random.default_rng(0)
    rows = [
        jax.device_put(
            jnp.asarray(rng.standard_normal((8, heads, 128), np.float32), jnp.bfloat16), on.on(ROWS)
        )
        for heads in (16, 4, 4)
    ]

    def run(name: str, parts: P, new: Callable[[], Any]) -> list[Array]:
        results = []
        for manual in (True, False):
            kv = new()
            local_spec = replace(kv.spec, num_kv_heads=2)
            plan = jax_frontend.plan(local, local_spec, BATCH, bucket=BUCKET, device=on.on(P()))
            model: Any = step_in_a_scan
            if manual:
                model = jax.shard_map(
                    model,
                    mesh=on.mesh,
                    in_specs=(ROWS, ROWS, ROWS, parts, P()),
                    out_specs=(ROWS, parts),
                    check_vma=False,
                )
                kv = replace(kv, spec=local_spec)
            compiled = jax.jit(model, donate_argnums=3).lower(*rows, kv, plan).compile()
            jax_frontend.assert_no_cache_copies(compiled, kv)
            out, _ = compiled(*rows, kv, plan)
            results.append(np.asarray(out.astype(jnp.float32)))
            if isinstance(kv, jax_frontend.CacheHandle):
                jax_frontend.release_cache(kv.name)
        np.testing.assert_array_equal(*results, err_msg=name)
        return results

    def handle() -> Any:
        caches = [PagedKVCache(local, **sizes, device=f"cuda:{i}") for i in range(2)]
        return jax_frontend.cache_handle(caches, sharding=on.on(P("kv")))

    def arrays() -> Any:
        return jax_frontend.init_cache(spec, **sizes, sharding=on.on(pools_of("NHD")))

    ours = run("arrays", pools_of("NHD"), arrays)
    theirs = run("handle", P("kv"), handle)
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert ours[0].any()
