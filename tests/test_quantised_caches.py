"""Every format of a cache, from both front ends: the same bytes in the pool, the same result.

What the pages hold is read back with ml_dtypes and NumPy, and the oracle attends to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.errors import ArgumentError, PlanError, ShapeError, UnsupportedError
from torch_backend import PagedKVCache

Array = np.ndarray[Any, np.dtype[Any]]

HEADS, WIDTH, PAGE = 2, 32, 4
SPEC = AttentionSpec(4, HEADS, WIDTH, dtype="float32")
SIZES: dict[str, Any] = {"num_layers": 3, "num_pages": 12, "page_size": PAGE}
TABLE = [[7, 2, 0], [10, 3, 0], [4, 11, 0], [5, 1, 8]]
# First tokens, then a decode, a later chunk, a request that sits out and another decode.
STEPS = (
    RaggedBatch([5, 3, 4, 7], [5, 3, 4, 7], TABLE),
    RaggedBatch([1, 4, 0, 1], [6, 7, 4, 8], TABLE),
)
BUCKET = Bucket(num_requests=5, num_tokens=20, num_pages=16)
LAYER = 1

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

FORMATS = ("float8_e4m3fn", "float8_e5m2", "nvfp4", "nvfp4_4over6")
formats = pytest.mark.parametrize("dtype", FORMATS)
layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])


def scales_of(dtype: str, per_head: bool) -> Array:
    """Scales by layer, side and head that are neither 1 nor alike."""
    base = 0.003 if dtype.startswith("nvfp4") else 0.02
    table = base * (1 + np.arange(3 * 2 * HEADS, dtype=np.float32).reshape(3, 2, HEADS))
    return table if per_head else np.ascontiguousarray(table[:, :, :1].repeat(HEADS, 2))


def new_cache(dtype: str, layout: str = "NHD", *, per_head: bool = True) -> PagedKVCache:
    scales = scales_of(dtype, per_head)
    return PagedKVCache(SPEC, **SIZES, dtype=dtype, layout=layout, scales=scales)


def rows_of(step: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(step)
    query, key, value = (
        rng.standard_normal((BUCKET.num_tokens, heads, WIDTH), np.float32)
        for heads in (4, HEADS, HEADS)
    )
    return query, key, 3 * value


def held(pool: Array, spec: Any, scale: Array) -> Array:
    """Read a layer's pool as real numbers ``[pages, page_size, heads, width]`` in float64."""
    if not spec.dtype.startswith("nvfp4"):
        stored = pool.view(getattr(ml_dtypes, spec.dtype)).astype(np.float64)
        if spec.layout == "HND":
            stored = stored.swapaxes(1, 2)
        return stored * scale[:, None]
    pages, outer, inner, _ = pool.shape
    flat, cut = pool.reshape(pages, -1), outer * inner * WIDTH // 2
    data = flat[:, :cut].reshape(pages, outer, inner, WIDTH // 2)
    codes = np.stack([data & 15, data >> 4], -1).reshape(pages, outer, inner, WIDTH // 16, 16)
    blocks = flat[:, cut:].reshape(pages, outer, inner, WIDTH // 16)
    steps = blocks.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    real = (E2M1[codes] * steps[..., None]).reshape(pages, outer, inner, WIDTH)
    if spec.layout == "HND":
        real = real.swapaxes(1, 2)
    return real * scale[:, None]


def as_bytes(tensor: torch.Tensor) -> Array:
    return tensor.contiguous().view(torch.uint8).numpy()


def run_torch(cache: PagedKVCache) -> list[tuple[Array, Array]]:
    """Outputs and LSE of all steps on one layer."""
    results = []
    for number, batch in enumerate(STEPS):
        plan = torch_backend.plan(SPEC, cache.spec, batch, bucket=BUCKET)
        query, key, value = map(torch.from_numpy, rows_of(number))
        out, lse = torch_backend.paged_attention(
            query, key, value, cache, plan, LAYER, return_lse=True
        )
        results.append((out.numpy(), lse.numpy()))
    return results


def run_jax(kv: Any, traced: bool) -> tuple[list[tuple[Array, Array]], Any]:
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any, layer: Any) -> Any:
        return jax_frontend.paged_attention(query, key, value, kv, plan, layer, return_lse=True)

    static = () if traced else (5,)
    jitted = jax.jit(step, donate_argnums=3, static_argnums=static)
    results = []
    for number, batch in enumerate(STEPS):
        plan = jax_frontend.plan(SPEC, kv.spec, batch, bucket=BUCKET)
        layer = jnp.int32(LAYER) if traced else LAYER
        out, lse, kv = jitted(*map(jnp.asarray, rows_of(number)), kv, plan, layer)
        results.append((np.asarray(out), np.asarray(lse)))
    return results, jax.block_until_ready(kv)


@pytest.mark.parametrize("per_head", [False, True])
@layouts
@formats
def test_the_reference_reads_what_was_written(dtype: str, layout: str, per_head: bool) -> None:
    cache = new_cache(dtype, layout, per_head=per_head)
    assert cache.spec.scales_per_head == per_head
    results = run_torch(cache)
    scale = scales_of(dtype, per_head)[LAYER].astype(np.float64)
    pools = [
        held(as_bytes(pool), cache.spec, scale[side])
        for side, pool in enumerate(cache.pools(LAYER))
    ]
    # The last step saw all that the pages hold now.
    batch, (out, lse) = STEPS[-1], results[-1]
    query, key, value = rows_of(len(STEPS) - 1)
    lens = (batch.query_lens.tolist(), batch.kv_lens.tolist())
    tokens = batch.num_tokens
    want, want_lse = oracle.paged_attention(query[:tokens], *pools, *lens, np.array(TABLE))
    np.testing.assert_allclose(out[:tokens], want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[:tokens], want_lse, rtol=2e-5, atol=2e-5)
    assert (out[tokens:] == 0).all()
    # And they hold the rows, as exactly as the format can.
    slots = oracle.slot_mapping(*lens, np.array(TABLE), PAGE)
    coarse = 0.3 if dtype.startswith("nvfp4") else 0.13
    for rows, pool in ((key, pools[0]), (value, pools[1])):
        stored = pool.reshape(-1, HEADS, WIDTH)[np.asarray(slots)]
        error = np.abs(stored - rows[:tokens]).mean() / np.abs(rows[:tokens]).mean()
        assert error < coarse / 2


@pytest.mark.parametrize("traced", [False, True])
@layouts
@formats
def test_both_front_ends_agree_on_a_torch_owned_cache(
    dtype: str, layout: str, traced: bool
) -> None:
    ours, theirs = new_cache(dtype, layout), new_cache(dtype, layout)
    want = run_torch(ours)
    kv = jax_frontend.cache_handle(theirs)
    try:
        got, _ = run_jax(kv, traced)
    finally:
        jax_frontend.release_cache(kv.name)
    for (out, lse), (want_out, want_lse) in zip(got, want, strict=True):
        assert out.tobytes() == want_out.tobytes()
        assert lse.tobytes() == want_lse.tobytes()
    assert (as_bytes(ours.k) == as_bytes(theirs.k)).all()
    assert (as_bytes(ours.v) == as_bytes(theirs.v)).all()
    assert as_bytes(ours.k).any()


@pytest.mark.parametrize("traced", [False, True])
@layouts
@formats
def test_both_front_ends_agree_on_a_cache_that_jax_owns(
    dtype: str, layout: str, traced: bool
) -> None:
    ours = new_cache(dtype, layout)
    want = run_torch(ours)
    scales = scales_of(dtype, True)
    kv = jax_frontend.init_cache(SPEC, **SIZES, dtype=dtype, layout=layout, scales=scales)
    assert kv.spec == ours.spec
    got, kv = run_jax(kv, traced)
    for (out, lse), (want_out, want_lse) in zip(got, want, strict=True):
        assert out.tobytes() == want_out.tobytes()
        assert lse.tobytes() == want_lse.tobytes()
    assert np.asarray(kv.k).tobytes() == as_bytes(ours.k).tobytes()
    assert np.asarray(kv.v).tobytes() == as_bytes(ours.v).tobytes()


def engine_layers(dtype: torch.dtype, order: str) -> tuple[Any, list[torch.Tensor]]:
    """An engine's cache: what it hands over, and each layer as it sees it."""
    sizes = {"L": 3, "B": 12, "H": HEADS, "N": PAGE, "C": 2 * WIDTH}
    whole = torch.zeros([sizes[letter] for letter in order], dtype=dtype)
    logical = list(whole.permute([order.index(x) for x in "LBHNC"]))
    return whole, logical


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC", "LBNHC", "BLNHC"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_both_front_ends_agree_on_an_imported_cache(dtype: str, order: str) -> None:
    scales = scales_of(dtype, True) if dtype != "float32" else None
    plain = PagedKVCache(SPEC, **SIZES, dtype=dtype, scales=scales)
    want = run_torch(plain)
    caches = []
    for _ in range(2):
        storage = torch.float32 if dtype == "float32" else torch.uint8
        whole, logical = engine_layers(storage, order)
        cache = PagedKVCache.from_packed(whole, spec=SPEC, dtype=dtype, order=order, scales=scales)
        assert cache.spec.layers_apart == (not order.startswith("L"))
        assert cache.pools(2)[0].data_ptr() == logical[2].data_ptr()
        caches.append((cache, logical))
    for out, wanted in zip(run_torch(caches[0][0]), want, strict=True):
        assert out[0].tobytes() == wanted[0].tobytes()
    kv = jax_frontend.cache_handle(caches[1][0])
    try:
        if caches[1][0].spec.layers_apart:
            with pytest.raises(PlanError, match="layers lie apart"):
                run_jax(kv, True)
        got, _ = run_jax(kv, traced=order.startswith("L"))
    finally:
        jax_frontend.release_cache(kv.name)
    for out, wanted in zip(got, want, strict=True):
        assert out[0].tobytes() == wanted[0].tobytes()
    # The engine sees the same bytes, keys first and values after them.
    key, value = plain.pools(LAYER)
    for _, logical in caches:
        seen = logical[LAYER].view(key.dtype).permute(0, 2, 1, 3).contiguous()
        assert (as_bytes(seen[..., :WIDTH]) == as_bytes(key)).all()
        assert (as_bytes(seen[..., WIDTH:]) == as_bytes(value)).all()
        assert not as_bytes(logical[0]).any()


def test_a_later_calibration_is_seen_without_a_new_trace() -> None:
    cache = new_cache("fp8")
    kv = jax_frontend.cache_handle(cache)
    traces = 0

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        nonlocal traces
        traces += 1
        return jax_frontend.paged_attention(query, key, value, kv, plan, LAYER)

    try:
        plan = jax_frontend.plan(SPEC, kv.spec, STEPS[0], bucket=BUCKET)
        rows = [jnp.asarray(x) for x in rows_of(0)]
        for factor in (1.0, 4.0):
            scales = factor * scales_of("fp8", True)
            address = cache.scales.data_ptr()
            cache.set_scales(scales)
            assert cache.scales.data_ptr() == address
            out, kv = step(*rows, kv, plan)
            other = PagedKVCache(SPEC, **SIZES, dtype="fp8", scales=scales)
            assert np.asarray(out).tobytes() == run_torch(other)[0][0].tobytes()
    finally:
        jax_frontend.release_cache(kv.name)
    assert traces == 1


def test_scales_are_ignored_with_a_warning_where_nothing_is_quantised() -> None:
    makers: tuple[Callable[..., Any], ...] = (PagedKVCache, jax_frontend.init_cache)
    for make in makers:
        with pytest.warns(RuntimeWarning, match="scales are ignored: a cache of float32"):
            cache = make(SPEC, **SIZES, dtype="float32", scales=(2.0, 3.0))
        assert cache.scales is None
    with pytest.raises(ArgumentError, match="scales for a cache of float32"):
        PagedKVCache(SPEC, **SIZES, dtype="float32").set_scales((1.0, 1.0))


@pytest.mark.parametrize(
    ("scales", "error", "what"),
    [
        ((0.0, 1.0), ArgumentError, "0.0 for keys of head 0 in layer 0"),
        ((1.0, -2.0), ArgumentError, "-2.0 for values"),
        ((1.0, float("nan")), ArgumentError, "nan for values"),
        ((float("inf"), 1.0), ArgumentError, "inf for keys"),
        ((1.0, 1.0, 1.0), ShapeError, r"\[3\]"),
        (np.ones((2, 3, HEADS)), ShapeError, r"\[2, 3, 2\]"),
        ("large", ShapeError, "large"),
    ],
)
def test_scales_that_are_none_are_refused(scales: object, error: type, what: str) -> None:
    makers: tuple[Callable[..., Any], ...] = (PagedKVCache, jax_frontend.init_cache)
    for make in makers:
        with pytest.raises(error, match=what):
            make(SPEC, **SIZES, dtype="fp8", scales=scales)
    cache = new_cache("fp8")
    before = cache.scales.clone()
    with pytest.raises(error, match=what):
        cache.set_scales(scales)
    assert torch.equal(cache.scales, before)


def test_a_gpu_that_lacks_8_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn needs .* 8.9 .* cuda:0 has 8.0"):
        PagedKVCache(SPEC, **SIZES, dtype="fp8", device="cuda:0")


def test_scales_per_head_do_not_replace_scales_per_layer() -> None:
    cache = new_cache("fp8", per_head=False)
    with pytest.raises(ArgumentError, match="differ from head to head"):
        cache.set_scales(scales_of("fp8", True))


def test_a_quantised_cache_needs_the_type_of_the_query() -> None:
    cache = new_cache("fp8")
    spec = replace(SPEC, dtype=None)
    for plan in (torch_backend.plan, jax_frontend.plan):
        with pytest.raises(PlanError, match=r"spec.dtype: .*float8_e4m3fn"):
            plan(spec, cache.spec, STEPS[0])


def test_a_plan_without_lse_is_not_asked_for_it() -> None:
    cache = new_cache("fp8")
    plan = torch_backend.plan(SPEC, cache.spec, STEPS[0], return_lse=False)
    query, key, value = (torch.from_numpy(x[: STEPS[0].num_tokens]) for x in rows_of(0))
    torch_backend.append(key, value, cache, plan, LAYER)
    torch_backend.attend(query, cache, plan, LAYER)
    before = as_bytes(cache.k).copy()
    for call in (torch_backend.paged_attention, torch_backend.attend):
        rows = (query, key, value) if call is torch_backend.paged_attention else (query,)
        with pytest.raises(PlanError, match="return_lse=False"):
            call(*rows, cache, plan, 0, return_lse=True)
    assert (as_bytes(cache.k) == before).all()
    jax_plan = jax_frontend.plan(SPEC, cache.spec, STEPS[0], return_lse=False)
    kv = jax_frontend.init_cache(SPEC, **SIZES, dtype="fp8", scales=scales_of("fp8", True))
    with pytest.raises(PlanError, match="return_lse=False"):
        jax_frontend.attend(jnp.asarray(query.numpy()), kv, jax_plan, LAYER, return_lse=True)


@formats
def test_a_slot_of_minus_one_changes_no_byte(dtype: str) -> None:
    cache = new_cache(dtype)
    plan = torch_backend.plan(SPEC, cache.spec, STEPS[0], bucket=BUCKET)
    plan.views["slot_mapping"].fill_(-1)
    before = [as_bytes(pool).copy() for pool in (cache.k, cache.v)]
    _, key, value = map(torch.from_numpy, rows_of(0))
    torch_backend.append(key, value, cache, plan, LAYER)
    for pool, was in zip((cache.k, cache.v), before, strict=True):
        assert (as_bytes(pool) == was).all()


def test_a_layer_reads_the_pages_of_another_and_never_writes() -> None:
    """KV sharing: layer 2 of this model has no keys of its own and attends to layer 1's."""
    cache = new_cache("fp8")
    kv = jax_frontend.cache_handle(new_cache("fp8"))
    plans = (
        torch_backend.plan(SPEC, cache.spec, STEPS[0], bucket=BUCKET),
        jax_frontend.plan(SPEC, cache.spec, STEPS[0], bucket=BUCKET),
    )
    query, key, value = rows_of(0)
    torch_backend.append(*map(torch.from_numpy, (key, value)), cache, plans[0], 1)
    want = torch_backend.attend(torch.from_numpy(-query), cache, plans[0], 1)

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        kv = jax_frontend.append(key, value, kv, plan, 1)
        owners = jnp.array([0, 1, 1])

        def block(kv: Any, layer: Any) -> Any:
            out, kv = jax_frontend.attend(-query, kv, plan, owners[layer], return_cache=True)
            return kv, out

        return jax.lax.scan(block, kv, jnp.arange(3))

    try:
        kv, outs = step(*map(jnp.asarray, (query, key, value)), kv, plans[1])
        jax.block_until_ready(outs)
    finally:
        jax_frontend.release_cache(kv.name)
    assert np.asarray(outs)[2].tobytes() == want.numpy().tobytes()
    assert np.asarray(outs)[1].tobytes() == want.numpy().tobytes()
    assert not as_bytes(cache.pools(2)[0]).any()


@formats
def test_a_forked_page_is_copied_in_every_layer(dtype: str) -> None:
    cache = new_cache(dtype)
    for pool in (cache.k, cache.v):
        pool.view(torch.uint8).random_(0, 100)
    before = [as_bytes(pool).copy() for pool in (cache.k, cache.v)]
    allocator = torch_backend.PageAllocator(12, PAGE)
    (first,) = allocator.allocate("parent", 2).tolist()
    allocator.fork("parent", "child")
    allocator.extend("child", 3)
    copies = allocator.take_copies()
    (second,) = allocator.pages("child").tolist()
    assert first != second
    cache.copy_pages(copies)
    for pool, was in zip((cache.k, cache.v), before, strict=True):
        for layer in range(3):
            was[12 * layer + second] = was[12 * layer + first]
        assert (as_bytes(pool) == was).all()


def test_every_alias_names_its_format() -> None:
    for name, dtype in itertools.product(("fp8", "fp8_e4m3"), ("float8_e4m3fn",)):
        assert PagedKVCache(SPEC, **SIZES, dtype=name).spec.dtype == dtype
    assert PagedKVCache(SPEC, **SIZES, dtype="fp8_e5m2").spec.dtype == "float8_e5m2"
    assert PagedKVCache(SPEC, **SIZES, dtype=torch.float8_e4m3fn).spec.dtype == "float8_e4m3fn"
