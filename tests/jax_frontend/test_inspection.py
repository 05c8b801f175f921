"""Programs that copy a cache, and programs that do not."""

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
from small import SPEC, jax_rows, new_cache

import jax_frontend
from interop import AttentionSpec, RaggedBatch
from interop.errors import ArgumentError, FrameworkError, IsthmusError
from jax_frontend import CacheArrays, assert_no_cache_copies, spec_of_shard
from jax_frontend.inspection import CacheCopyError

LAYERS, PAGES = 3, 1009  # a prime: no other array is as large by chance
SIZES: dict[str, Any] = {"num_layers": LAYERS, "page_size": 4, "dtype": "float32"}
BATCH = RaggedBatch([1, 1], [3, 5], [[0, 1], [2, 3]])
DONATED = 1


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("for the virtual CPU devices of a machine without a GPU")


def new_arrays(**changes: Any) -> CacheArrays:
    return jax_frontend.init_cache(SPEC, **(SIZES | {"num_pages": PAGES} | changes))


def on_two(spec: P) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:2]), ("kv",)), spec)


def plan_for(kv: Any, spec: Any = SPEC, device: Any = None) -> Any:
    return jax_frontend.plan(spec, kv.spec, BATCH, device=device)


def scanned(rows: Any, kv: Any, plan: Any) -> Any:
    def block(carry: Any, layer: jax.Array) -> Any:
        query, kv = carry
        return jax_frontend.paged_attention(query, *rows[1:], kv, plan, layer), None

    return jax.lax.scan(block, (rows[0], kv), jnp.arange(LAYERS))[0]


def looped(rows: Any, kv: Any, plan: Any) -> Any:
    def body(carry: Any) -> Any:
        layer, query, kv = carry
        query, kv = jax_frontend.paged_attention(query, *rows[1:], kv, plan, layer)
        return layer + 1, query, kv

    start = (jnp.int32(0), rows[0], kv)
    return jax.lax.while_loop(lambda carry: carry[0] < LAYERS, body, start)


def branched(rows: Any, kv: Any, plan: Any) -> Any:
    def write(kv: Any) -> Any:
        return jax_frontend.append(*rows[1:], kv, plan, 0)

    return jax.lax.cond(rows[0].sum() > 0, write, lambda kv: kv, kv)


def in_turn(rows: Any, kv: Any, plan: Any) -> Any:
    query, key, value = rows
    for layer in range(LAYERS):
        query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
        key = key + query[:, :2]
    return query, kv


def read_only(rows: Any, kv: Any, plan: Any) -> Any:
    return jax_frontend.attend(rows[0], kv, plan, 1)


CLEAN = (scanned, looped, branched, in_turn, read_only)


def compiled(model: Callable[..., Any], kv: Any, plan: Any, rows: Any = None, **how: Any) -> Any:
    how = how or {"donate_argnums": DONATED}
    return jax.jit(model, **how).lower(rows or jax_rows(0, 2), kv, plan).compile()


@pytest.mark.parametrize("model", CLEAN)
def test_donated_arrays_are_not_copied(model: Callable[..., Any]) -> None:
    kv = new_arrays()
    donated = () if model is read_only else DONATED
    assert_no_cache_copies(compiled(model, kv, plan_for(kv), donate_argnums=donated), kv)


@pytest.mark.parametrize("model", CLEAN)
def test_a_torch_owned_cache_is_not_copied(model: Callable[..., Any]) -> None:
    kv = jax_frontend.cache_handle(new_cache(num_pages=PAGES), name="inspected")
    try:
        assert_no_cache_copies(compiled(model, kv, plan_for(kv), donate_argnums=()), kv)
    finally:
        jax_frontend.release_cache("inspected")


@pytest.mark.parametrize("manual", [True, False], ids=["shard_map", "jit"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_shards_are_not_copied(manual: bool, layout: str) -> None:
    parts = P(None, None, "kv") if layout == "NHD" else P(None, "kv")
    whole = new_arrays(sharding=on_two(parts), layout=layout)
    local = replace(whole, spec=spec_of_shard(whole.spec, 2))
    plan = plan_for(local, spec_of_shard(SPEC, 2), on_two(P()))
    rows = [jax.device_put(x, on_two(P(None, "kv"))) for x in jax_rows(0, 2)]
    model: Any = scanned
    if manual:
        model = jax.shard_map(
            scanned,
            mesh=on_two(P()).mesh,
            in_specs=(P(None, "kv"), parts, P()),
            out_specs=(P(None, "kv"), parts),
            check_vma=False,
        )
    assert_no_cache_copies(compiled(model, local, plan, rows), local)


def found(program: Any, kv: Any) -> tuple[str, ...]:
    """Instructions that are complained about, all of which the message names."""
    with pytest.raises(CacheCopyError) as caught:
        assert_no_cache_copies(program, kv)
    message = str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, IsthmusError)
    assert all(line in message for line in caught.value.instructions)
    assert message.startswith(f"the program makes {len(caught.value.instructions)} arrays")
    return caught.value.instructions


@pytest.mark.parametrize("model", [scanned, looped, in_turn])
def test_arrays_that_were_not_donated(model: Callable[..., Any]) -> None:
    kv = new_arrays()
    lines = found(compiled(model, kv, plan_for(kv), donate_argnums=()), kv)
    copies = [line for line in lines if ": copy to f32[3027,4,2,8]" in line]
    results = [line for line in lines if line.endswith("not in the memory of a donated argument")]
    assert len(copies) == len(results) == 2
    assert len(lines) == 4


def test_a_copy_inside_of_a_loop() -> None:
    def remembers(rows: Any, kv: Any, plan: Any) -> Any:
        def block(kv: Any, _: Any) -> Any:
            after = jax_frontend.append(*rows[1:], kv, plan, 0)
            return after, jax_frontend.attend(rows[0], kv, plan, 0)  # reads what was there before

        return jax.lax.scan(block, kv, length=2)

    kv = new_arrays()
    assert any(
        ": copy to f32[3027,4,2,8]" in x for x in found(compiled(remembers, kv, plan_for(kv)), kv)
    )


def test_layers_that_do_not_wait_for_one_another() -> None:
    def apart(rows: Any, kv: Any, plan: Any) -> Any:
        outs = []
        for layer in range(LAYERS):
            out, kv = jax_frontend.paged_attention(*rows, kv, plan, layer)
            outs.append(out)
        return outs, kv

    kv = new_arrays()
    assert len(found(compiled(apart, kv, plan_for(kv)), kv)) == 6


def test_a_stack_of_layers_that_a_scan_takes_apart() -> None:
    one = new_arrays(num_layers=1)

    def stacked(rows: Any, kv: Any, plan: Any) -> Any:
        def block(query: Any, pools: Any) -> Any:
            layer = CacheArrays(*pools, one.spec)
            query, layer = jax_frontend.paged_attention(query, *rows[1:], layer, plan, 0)
            return query, layer.pools

        stack = [pool.reshape(LAYERS, *one.k.shape) for pool in kv.pools]
        query, stack = jax.lax.scan(block, rows[0], stack)
        return query, kv.with_pools([pool.reshape(kv.k.shape) for pool in stack])

    lines = found(compiled(stacked, new_arrays(), plan_for(one)), new_arrays())
    assert any("fusion to f32[1009,4,2,8]" in line for line in lines)
    assert any("fusion to f32[3,1009,4,2,8]" in line for line in lines)


def test_a_layer_that_is_cut_out_and_put_back() -> None:
    one = new_arrays(num_layers=1)

    def sliced(rows: Any, kv: Any, plan: Any) -> Any:
        first = [pool[PAGES : 2 * PAGES] for pool in kv.pools]
        out, layer = jax_frontend.paged_attention(*rows, CacheArrays(*first, one.spec), plan, 0)
        pools = zip(kv.pools, layer.pools, strict=True)
        return out, kv.with_pools([a.at[PAGES : 2 * PAGES].set(b) for a, b in pools])

    kv = new_arrays()
    lines = found(compiled(sliced, kv, plan_for(one)), kv)
    assert any("to f32[1009,4,2,8]" in line for line in lines)
    assert any("dynamic-update-slice to f32[3027,4,2,8]" in line for line in lines)


def test_other_types_and_shapes_and_whole_pages_count() -> None:
    kv = new_arrays()

    def narrow(rows: Any, kv: Any, plan: Any) -> Any:
        return kv.k.astype(jnp.bfloat16)

    def joined(rows: Any, kv: Any, plan: Any) -> Any:
        return jnp.concatenate([kv.k.reshape(-1, 64), kv.v.reshape(-1, 64)])

    def some(rows: Any, kv: Any, plan: Any) -> Any:
        return kv.k[: PAGES + 1] + 1

    def less(rows: Any, kv: Any, plan: Any) -> Any:
        return kv.k[: PAGES - 1] + 1

    for model, text in (
        (narrow, "bf16[3027,4,2,8]"),
        (joined, "f32[6054,64]"),
        (some, "f32[1010,4,2,8]"),
    ):
        assert any(
            text in line for line in found(compiled(model, kv, None, donate_argnums=()), kv)
        ), text
    assert_no_cache_copies(compiled(less, kv, None, donate_argnums=()), kv)


def test_pools_that_are_only_looked_at() -> None:
    def norms(rows: Any, kv: Any, plan: Any) -> Any:
        return jnp.abs(kv.k.astype(jnp.bfloat16)).max(), kv

    kv = new_arrays()
    assert_no_cache_copies(compiled(norms, kv, None), kv)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (P(), "all-gather to f32[3027,4,2,8]"),
        (P(None, None, None, "kv"), "all-to-all to (f32["),
        (P(None, "kv"), "all-to-all to (f32["),
    ],
)
def test_pools_that_are_moved_between_devices(wanted: P, text: str) -> None:
    def moves(rows: Any, kv: Any, plan: Any) -> Any:
        return kv.with_pools(
            [jax.lax.with_sharding_constraint(x, on_two(wanted)) for x in kv.pools]
        )

    kv = new_arrays(sharding=on_two(P(None, None, "kv")))
    rows = [jax.device_put(x, on_two(P())) for x in jax_rows(0, 2)]
    lines = found(compiled(moves, kv, None, rows), kv)
    assert any(text in line for line in lines), lines
    # Where a device's part is as large as before, XLA puts it where the pool was.
    assert sum("not in the memory" in line for line in lines) == (2 if wanted == P() else 0)


def test_a_pool_that_is_gathered_in_another_shape() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("kv",))

    def gathers(pool: Any) -> Any:
        slots = pool.reshape(-1, 4 * 8)
        return jax.lax.with_sharding_constraint(slots, NamedSharding(mesh, P()))

    parts = NamedSharding(mesh, P(None, None, "kv"))
    kv = jax_frontend.init_cache(AttentionSpec(4, 4, 8), **SIZES, num_pages=PAGES, sharding=parts)
    lines = found(jax.jit(gathers).lower(kv.k).compile(), kv)
    assert any("to f32[12108,32]" in line for line in lines), lines


def test_shards_of_a_handle_are_as_large_as_all_of_them_and_as_one() -> None:
    caches = [new_cache(spec=spec_of_shard(SPEC, 2), num_pages=PAGES) for _ in range(2)]
    kv = jax_frontend.cache_handle(caches, name="two", sharding=on_two(P("kv")))
    try:
        for heads in (1, 2):
            pool = jnp.ones((LAYERS * PAGES, 4, heads, 8))
            program = jax.jit(lambda x: x + 1).lower(pool).compile()
            assert len(found(program, kv)) == 1
    finally:
        jax_frontend.release_cache("two")


def test_arguments_of_another_kind() -> None:
    kv = new_arrays()
    lowered = jax.jit(partial(read_only, jax_rows(0, 2))).lower(kv, plan_for(kv))
    with pytest.raises(ArgumentError, match=r"^compiled: got .*Lowered, want a compiled program"):
        assert_no_cache_copies(lowered, kv)  # type: ignore[arg-type]
    with pytest.raises(FrameworkError, match=r"^cache: got PagedKVCache, want a CacheHandle or"):
        assert_no_cache_copies(lowered.compile(), new_cache())  # type: ignore[arg-type]


@pytest.mark.gpu
def test_programs_of_a_gpu() -> None:
    spec = AttentionSpec(8, 2, 128)
    sizes: dict[str, Any] = SIZES | {"num_pages": PAGES, "page_size": 16, "dtype": "bfloat16"}
    rows = [jnp.ones((2, heads, 128), jnp.bfloat16) for heads in (8, 2, 2)]
    kv: Any = jax_frontend.init_cache(spec, **sizes)
    plan = plan_for(kv, spec)
    for model in (scanned, looped):
        assert_no_cache_copies(compiled(model, kv, plan, rows), kv)
        lines = found(compiled(model, kv, plan, rows, donate_argnums=()), kv)
        assert any("bf16[3027,16,2,128]" in line for line in lines)
        assert sum("not in the memory" in line for line in lines) == 2
    cache = new_cache(spec=spec, **sizes, device="cuda")
    kv = jax_frontend.cache_handle(cache, name="inspected")
    try:
        for model in (scanned, looped):
            assert_no_cache_copies(compiled(model, kv, plan, rows, donate_argnums=()), kv)
    finally:
        jax_frontend.release_cache("inspected")
