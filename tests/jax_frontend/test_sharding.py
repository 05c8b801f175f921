"""KV heads split over devices by shard_map, on both kinds of cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small import BATCH, BUCKET, SIZES, jax_rows

import jax_frontend
import torch_backend
from interop import AttentionSpec
from torch_backend import PagedKVCache

Array = np.ndarray[Any, np.dtype[Any]]
WHOLE = AttentionSpec(8, 4, 8, sliding_window=7)
HEADS = P(None, "kv")
SHARDS = pytest.mark.parametrize("shards", [2, 4])
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])
STEPS = 3


def mesh_of(shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:shards]), ("kv",))


def rows_of(seed: int) -> tuple[Array, Array, Array]:
    """Query, key and value rows of all heads, with rows to spare."""
    rng = np.random.default_rng(seed)
    query, key, value = (
        rng.standard_normal((BUCKET.num_tokens, heads, 8), np.float32) for heads in (8, 4, 4)
    )
    return query, key, value


def unsharded(layout: str) -> tuple[list[Array], PagedKVCache]:
    """Outputs of a few steps over two layers by the core, and the cache after them."""
    cache = PagedKVCache(WHOLE, **SIZES, layout=layout)
    plan = torch_backend.plan(WHOLE, cache.spec, BATCH, bucket=BUCKET)
    outs = []
    for seed in range(STEPS):
        query, key, value = map(torch.from_numpy, rows_of(seed))
        for layer in (0, 2):
            torch_backend.append(key, value, cache, plan, layer)
            result = torch_backend.attend(query, cache, plan, layer)
            assert isinstance(result, torch.Tensor)
            query = result
        outs.append(query.numpy())
    return outs, cache


def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """Two layers; what each device runs on its heads."""
    for layer in (0, 2):
        kv = jax_frontend.append(key, value, kv, plan, layer)
        query = jax_frontend.attend(query, kv, plan, layer)
    return query, kv


def step_in_a_scan(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """The same by paged_attention over traced layers."""

    def block(carry: Any, layer: jax.Array) -> Any:
        query, kv = carry
        return jax_frontend.paged_attention(query, key, value, kv, plan, layer), None

    return jax.lax.scan(block, (query, kv), jnp.array([0, 2]))[0]


def run(model: Callable[..., Any], mesh: Mesh, kv: Any, kv_parts: P) -> tuple[list[Array], Any]:
    """Outputs of a few steps that are not waited for, and the cache after them."""
    shards = mesh.devices.size
    local = AttentionSpec(8 // shards, 4 // shards, 8, sliding_window=7)
    program = partial(jax.jit, donate_argnums=3)(
        jax.shard_map(
            model,
            mesh=mesh,
            in_specs=(HEADS, HEADS, HEADS, kv_parts, P()),
            out_specs=(HEADS, kv_parts),
            # A scan's carry has to say over which axes it varies; the plan's lack of them is fine.
            check_vma=False,
        )
    )
    whole = NamedSharding(mesh, P())
    outs = []
    for seed in range(STEPS):
        plan = jax_frontend.plan(local, kv.spec, BATCH, bucket=BUCKET, device=whole)
        arrays = (jax.device_put(x, NamedSharding(mesh, HEADS)) for x in rows_of(seed))
        out, kv = program(*arrays, kv, plan)
        outs.append(out)
    return [np.asarray(out) for out in outs], jax.block_until_ready(kv)


@SHARDS
@LAYOUTS
@pytest.mark.parametrize("model", [step, step_in_a_scan])
def test_shards_that_torch_owns(shards: int, layout: str, model: Callable[..., Any]) -> None:
    want, whole = unsharded(layout)
    mesh = mesh_of(shards)
    local = AttentionSpec(8 // shards, 4 // shards, 8)
    caches = [PagedKVCache(local, **SIZES, layout=layout) for _ in range(shards)]
    kv = jax_frontend.cache_handle(caches, name="shards", sharding=NamedSharding(mesh, P("kv")))
    try:
        got, kv = run(model, mesh, kv, P("kv"))
    finally:
        jax_frontend.release_cache("shards")
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    heads = 2 if layout == "NHD" else 1
    assert torch.equal(torch.cat([cache.k for cache in caches], heads), whole.k)
    assert torch.equal(torch.cat([cache.v for cache in caches], heads), whole.v)
    assert np.asarray(kv.token).tolist() == list(range(shards))


@SHARDS
@LAYOUTS
@pytest.mark.parametrize("model", [step, step_in_a_scan])
def test_pools_that_jax_owns(shards: int, layout: str, model: Callable[..., Any]) -> None:
    want, whole = unsharded(layout)
    mesh = mesh_of(shards)
    parts = P(None, None, "kv") if layout == "NHD" else P(None, "kv")
    kv = jax_frontend.init_cache(WHOLE, **SIZES, layout=layout, sharding=NamedSharding(mesh, parts))
    kv = replace(kv, spec=replace(kv.spec, num_kv_heads=4 // shards))
    before = [shard.data.unsafe_buffer_pointer() for shard in kv.k.addressable_shards]
    got, kv = run(model, mesh, kv, parts)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(kv.k, whole.k.numpy())
    np.testing.assert_array_equal(kv.v, whole.v.numpy())
    # Donated and updated in place, on every device.
    assert [shard.data.unsafe_buffer_pointer() for shard in kv.k.addressable_shards] == before


def test_without_shard_map_the_whole_pool_does_not_fit_one_shards_spec() -> None:
    from interop.errors import ShapeError

    mesh = mesh_of(2)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=NamedSharding(mesh, P(None, None, "kv")))
    kv = replace(kv, spec=replace(kv.spec, num_kv_heads=2))
    local = AttentionSpec(4, 2, 8)
    plan = jax_frontend.plan(local, kv.spec, BATCH)
    with pytest.raises(ShapeError, match=r"^cache\.k: .*Under shard_map"):
        jax.eval_shape(lambda: jax_frontend.attend(jax_rows(0)[0], kv, plan, 0))
