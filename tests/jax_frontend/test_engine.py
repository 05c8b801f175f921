"""A serving engine's layer in JAX: the bits that PyTorch computes, and the same refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from engine_step import (
    BLOCKS,
    CPU,
    KV,
    PADDED,
    PAGE,
    ROWS,
    SCALE,
    WIDTH,
    EngineStep,
    Layer,
    batch_of,
    group_of,
    slots,
)

import jax_frontend
import jax_frontend.backend as ours
import torch_backend.backend as theirs
from interop import errors
from interop.dlpack import to_jax
from torch_backend import PagedKVCache
from torch_backend.layouts import ORDERS

SLOTS = slots()
DEVICE = jax.devices("cpu")[0]
KINDS = ("handle", "arrays", "packed")


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy, since programs may donate it."""
    return jnp.array(to_jax(tensor.contiguous()), copy=True)


def layers(step: EngineStep, **more: Any) -> tuple[ours.AttentionImpl, theirs.AttentionImpl]:
    settings = {"model_dtype": "float32", "order": step.order} | more
    first, second = (
        kind(2 * step.kv_heads, WIDTH, SCALE, step.kv_heads, **settings)
        for kind in (ours.AttentionImpl, theirs.AttentionImpl)
    )
    return first, second


def cache_of(kind: str, step: EngineStep, impl: ours.AttentionImpl, layer: Layer) -> Any:
    """The engine's cache as JAX holds it."""
    scales = (layer._k_scale_float, layer._v_scale_float) if impl.quantised else None
    if kind == "handle":
        cache = PagedKVCache.from_packed(
            [step.cache.clone(memory_format=torch.preserve_format)],
            spec=impl.spec,
            dtype=impl.cache_dtype,
            order=step.order,
            scales=scales,
        )
        return jax_frontend.cache_handle(cache)
    axes = (0, 1, 2, 3) if step.layout == "HND" else (0, 2, 1, 3)
    memory = step.cache.permute(axes)
    if kind == "packed":
        return as_jax(memory)
    made = jax_frontend.init_cache(
        impl.spec,
        num_layers=1,
        num_pages=BLOCKS,
        page_size=PAGE,
        dtype=impl.cache_dtype,
        layout=step.layout,
        scales=scales,
    )
    return made.__class__(
        as_jax(memory[..., :WIDTH]), as_jax(memory[..., WIDTH:]), made.spec, made.scales
    )


def packed_after(kind: str, cache: Any, step: EngineStep) -> torch.Tensor:
    """The cache's contents with axes ``[blocks, heads, page, contents]``."""
    axes = (0, 1, 2, 3) if step.layout == "HND" else (0, 2, 1, 3)
    if kind == "packed":
        memory = torch.from_dlpack(cache)
    elif kind == "arrays":
        memory = torch.cat([torch.from_dlpack(cache.k), torch.from_dlpack(cache.v)], -1)
    else:
        from jax_frontend.cache import find_cache

        memory = torch.cat(find_cache(cache.name)[0].pools(0), -1)
    return memory.permute(axes)


def run_by_jax(
    step: EngineStep,
    impl: ours.AttentionImpl,
    kind: str,
    layer: Layer,
    step_metadata: theirs.Step,
    output: jax.Array,
    **given: Any,
) -> tuple[jax.Array, torch.Tensor]:
    cache = cache_of(kind, step, impl, layer)
    query = given.pop("query", None)
    query = as_jax(step.query) if query is None else query

    def program(
        query: Any, key: Any, value: Any, cache: Any, inputs: Any, slots: Any, out: Any
    ) -> Any:
        cache = impl.do_kv_cache_update(layer, key, value, cache, slots)
        return impl.forward(layer, query, key, value, cache, inputs, out, **given), cache

    inputs = ours.LayerInputs.of(step_metadata)
    rows = query, as_jax(step.key), as_jax(step.value)
    number = jnp.asarray(SLOTS, jnp.int32)
    out, after = jax.jit(program, donate_argnums=3)(*rows, cache, inputs, number, output)
    jax.block_until_ready(after)
    packed = packed_after(kind, after, step).clone()
    if kind == "handle":
        out.block_until_ready()
        jax_frontend.release_cache(after.name)
    return out, packed


# Packed arrays of JAX hold one layer, whose order is one of two.
PLACES = [(order, kind) for order in ORDERS for kind in KINDS if kind != "packed"]
PLACES += [("LBHNC", "packed"), ("LBNHC", "packed")]


@pytest.mark.parametrize(("order", "kind"), PLACES)
def test_both_front_ends_compute_the_same_bits(order: str, kind: str) -> None:
    step = EngineStep(order)
    impl, other = layers(step)
    group = group_of(layout=step.layout)
    made = ours.MetadataBuilder(CPU, group, device=DEVICE).build(batch_of())
    output = jnp.full(step.query.shape, 7.0, jnp.float32)
    got, cache = run_by_jax(step, impl, kind, Layer(), made, output)
    want = torch.full_like(step.query, 7.0)
    other.do_kv_cache_update(Layer(), step.key, step.value, step.cache, torch.tensor(SLOTS))
    metadata = theirs.MetadataBuilder(CPU, group).build(batch_of())
    other.forward(Layer(), step.query, None, None, step.cache, metadata, want)
    np.testing.assert_array_equal(np.asarray(got), want.numpy())
    assert torch.equal(cache, step.cache)
    np.testing.assert_allclose(want[:ROWS].numpy(), step.want(), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_are_the_same_bits(kind: str) -> None:
    step, sinks = EngineStep(), np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    impl, _ = layers(step, sinks=sinks)
    _, other = layers(step, sinks=torch.from_numpy(sinks))
    group = group_of(sinks=True)
    made = ours.MetadataBuilder(CPU, group, device=DEVICE).build(batch_of())
    got, _ = run_by_jax(step, impl, kind, Layer(), made, jnp.zeros(step.query.shape))
    want = torch.zeros_like(step.query)
    other.do_kv_cache_update(Layer(), step.key, step.value, step.cache, torch.tensor(SLOTS))
    metadata = theirs.MetadataBuilder(CPU, group).build(batch_of())
    other.forward(Layer(), step.query, None, None, step.cache, metadata, want)
    np.testing.assert_array_equal(np.asarray(got), want.numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
def test_8_bits_everywhere_are_the_same_bits(kind: str, query_dtype: str | None) -> None:
    """Cache, query and output of 8 bits, with scales of their own."""
    step, layer = EngineStep(seed=3), Layer(0.03, 0.5, 2.0)
    step.cache = step.cache.to(torch.float8_e4m3fn)
    settings = {"kv_cache_dtype": "fp8", "model_dtype": "bfloat16"}
    impl, other = layers(step, **settings)
    group = group_of(dtype="float8_e4m3fn", layout=step.layout, **settings)
    step.key, step.value = step.key.bfloat16(), step.value.bfloat16()
    step.query = query = step.query.bfloat16()
    jax_query = as_jax(query)
    if query_dtype is not None:
        query = theirs.maybe_quant_query(query, query_dtype, torch.tensor(0.03))
        jax_query = ours.maybe_quant_query(jax_query, query_dtype, jnp.float32(0.03))
        raw = jax.lax.bitcast_convert_type(jax_query, jnp.uint8)
        np.testing.assert_array_equal(np.asarray(raw), query.view(torch.uint8).numpy())
    made = ours.MetadataBuilder(CPU, group, device=DEVICE).build(batch_of())
    output = jnp.zeros(query.shape, "float8_e4m3fn")
    scale = jnp.float32(0.013)
    got, cache = run_by_jax(
        step, impl, kind, layer, made, output, query=jax_query, output_scale=scale
    )
    want = torch.zeros(query.shape).to(torch.float8_e4m3fn)
    other.do_kv_cache_update(layer, step.key, step.value, step.cache, torch.tensor(SLOTS))
    metadata = theirs.MetadataBuilder(CPU, group).build(batch_of())
    other.forward(layer, query, None, None, step.cache, metadata, want, torch.tensor(0.013))
    raw = jax.lax.bitcast_convert_type(got, jnp.uint8)
    np.testing.assert_array_equal(np.asarray(raw), want.view(torch.uint8).numpy())
    assert want.float().any()
    assert torch.equal(cache.view(torch.uint8), step.cache.view(torch.uint8))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_donated_array_is_updated_where_it_lies(kv_cache_dtype: str, order: str) -> None:
    step = EngineStep(order)
    impl, _ = layers(step, kv_cache_dtype=kv_cache_dtype)
    dtype = "float32"
    if kv_cache_dtype == "fp8":
        dtype = "float8_e4m3fn"
        step.cache = step.cache.to(torch.float8_e4m3fn)
    group = group_of(layout=step.layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    builder = ours.MetadataBuilder(CPU, group, device=DEVICE)
    cache = cache_of("packed", step, impl, Layer())
    address = cache.unsafe_buffer_pointer()

    def program(rows: Any, cache: Any, inputs: Any, slots: Any) -> Any:
        cache = impl.do_kv_cache_update(Layer(), *rows[1:], cache, slots)
        output = jnp.zeros_like(rows[0])
        return impl.forward(Layer(), *rows, cache, inputs, output), cache

    rows = as_jax(step.query), as_jax(step.key), as_jax(step.value)
    inputs = ours.LayerInputs.of(builder.build(batch_of()))
    compiled = jax.jit(program, donate_argnums=1)
    for _ in range(2):
        _, cache = compiled(rows, cache, inputs, jnp.asarray(SLOTS, jnp.int32))
        assert cache.unsafe_buffer_pointer() == address


def test_every_8_bit_number_is_rounded_alike() -> None:
    """Rows around all numbers of both formats and all ties between them, and what is too large."""
    for name in ("float8_e4m3fn", "float8_e5m2"):
        codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float()
        codes = codes[codes.isfinite()].sort().values
        ties = (codes[1:] + codes[:-1]) / 2
        numbers = torch.cat(
            [codes, ties, ties * 1.001, ties * 0.999, torch.tensor([6e4, torch.nan])]
        )
        numbers = numbers.half()[: numbers.numel() // 8 * 8].view(-1, 1, 8)
        for scale in (1.0, 0.3):
            got = ours.maybe_quant_query(as_jax(numbers), name, jnp.float32(scale))
            want = theirs.maybe_quant_query(numbers, name, torch.tensor(scale))
            raw = jax.lax.bitcast_convert_type(got, jnp.uint8)
            np.testing.assert_array_equal(np.asarray(raw), want.view(torch.uint8).numpy())


def test_a_profiling_run() -> None:
    impl, _ = layers(EngineStep())
    output = jnp.full((3, 4, WIDTH), jnp.nan)
    assert not impl.forward(Layer(), output, None, None, None, None, output).any()  # type: ignore[arg-type]


def test_a_layer_that_shares_a_cache_does_not_write() -> None:
    step = EngineStep()
    impl, _ = layers(step, kv_sharing_target_layer_name="model.layers.0")
    cache = cache_of("packed", step, impl, Layer())
    rows = as_jax(step.key), as_jax(step.value)
    assert impl.do_kv_cache_update(Layer(), *rows, cache, jnp.asarray(SLOTS)) is cache


def test_steps_of_one_bucket_are_traced_once() -> None:
    step = EngineStep()
    impl, _ = layers(step)
    builder = ours.MetadataBuilder(CPU, group_of(), device=DEVICE)
    traced = []

    @jax.jit
    def program(query: Any, cache: Any, inputs: Any, output: Any) -> Any:
        traced.append(1)
        return impl.forward(Layer(), query, None, None, cache, inputs, output)

    cache, query = cache_of("packed", step, impl, Layer()), as_jax(step.query)
    for lens in ([6, 9, 7, 6, 0], [5, 10, 8, 7, 0]):
        made = builder.build(batch_of(seq_lens=lens))
        out = program(query, cache, ours.LayerInputs.of(made), jnp.zeros_like(query))
        eager = impl.forward(Layer(), query, None, None, cache, made, jnp.zeros_like(query))
        np.testing.assert_array_equal(np.asarray(out), np.asarray(eager))
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"alibi_slopes": [0.5] * 4}, errors.UnsupportedError),
        ({"attn_type": "encoder"}, errors.UnsupportedError),
        ({"sinks": np.ones(3, np.float32)}, errors.ShapeError),
        ({"kv_cache_dtype": "int8"}, errors.ArgumentError),
    ],
)
def test_settings_are_refused_with_the_same_text(settings: dict[str, Any], kind: type) -> None:
    said = []
    for impl in (ours.AttentionImpl, theirs.AttentionImpl):
        with pytest.raises(kind) as caught:
            impl(4, WIDTH, SCALE, KV, model_dtype="float32", **settings)
        said.append(str(caught.value))
    assert said[0] == said[1]


def said_by(kind: type, call: Any, *given: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*given)
    return str(caught.value)


def test_calls_are_refused_with_the_same_text() -> None:
    step = EngineStep()
    impl, other = layers(step)
    window, other_window = layers(step, sliding_window=3)
    made = ours.MetadataBuilder(CPU, group_of(), device=DEVICE).build(batch_of())
    metadata = theirs.MetadataBuilder(CPU, group_of()).build(batch_of())
    query, cache = as_jax(step.query), cache_of("packed", step, impl, Layer())
    eight, jax_eight = step.query.to(torch.float8_e4m3fn), query.astype("float8_e4m3fn")
    four = torch.zeros(PADDED, 4, 8, dtype=torch.uint8)
    one, jax_one = torch.tensor(1.0), jnp.float32(1.0)
    for kind, output, jax_output, scales, jax_scales in (
        (errors.ArgumentError, step.query, query, (None, one), (None, jax_one)),
        (errors.DTypeError, step.query, query, (one, None), (jax_one, None)),
        (errors.DTypeError, eight, jax_eight, (None, None), (None, None)),
        (errors.ArgumentError, eight, jax_eight, (one, one), (jax_one, jax_one)),
        (errors.ArgumentError, four, as_jax(four), (one, None), (jax_one, None)),
        (errors.UnsupportedError, four, as_jax(four), (one, one), (jax_one, jax_one)),
    ):
        given = Layer(), step.query, None, None, step.cache, metadata, output, *scales
        jax_given = Layer(), query, None, None, cache, made, jax_output, *jax_scales
        assert said_by(kind, impl.forward, *jax_given) == said_by(kind, other.forward, *given)
    jax_given = Layer(), query, None, None, cache, made, query
    given = Layer(), step.query, None, None, step.cache, metadata, step.query
    said = said_by(errors.PlanError, window.forward, *jax_given)
    assert said == said_by(errors.PlanError, other_window.forward, *given)
    key, value, jax_key = step.key, step.value, as_jax(step.key)
    number, jax_number = torch.arange(15), jnp.arange(15)
    for kind, rows, jax_rows in (
        (errors.ShapeError, (key[:, :1], value), (jax_key[:, :1], jax_key)),
        (errors.DTypeError, (key.half(), value), (jax_key.astype("float16"), jax_key)),
    ):
        said = said_by(kind, impl.do_kv_cache_update, Layer(), *jax_rows, cache, jax_number)
        assert said == said_by(kind, other.do_kv_cache_update, Layer(), *rows, step.cache, number)
    for numbers, jax_numbers in ((number.float(), jax_number.astype("float32")),):
        said = said_by(
            errors.ShapeError,
            impl.do_kv_cache_update,
            Layer(),
            jax_key,
            jax_key,
            cache,
            jax_numbers,
        )
        assert said == said_by(
            errors.ShapeError, other.do_kv_cache_update, Layer(), key, value, step.cache, numbers
        )
    jax_query = query.astype("float16")
    for query_given, target in ((query, "float8_e4m3fn"), (jax_query, "float32")):
        with pytest.raises(errors.DTypeError, match=r"^(query|target): got"):
            ours.maybe_quant_query(query_given, target, jax_one)


def test_caches_that_do_not_fit() -> None:
    step = EngineStep()
    impl, _ = layers(step)
    made = ours.MetadataBuilder(CPU, group_of(), device=DEVICE).build(batch_of())
    query, cache = as_jax(step.query), cache_of("packed", step, impl, Layer())
    for kind, given, text in (
        (errors.FrameworkError, step.cache, "kv_cache: got torch.Tensor, want a CacheHandle"),
        (errors.ShapeError, cache[..., :-1], "kv_cache: got"),
        (errors.DTypeError, cache.astype("float16"), "kv_cache: got float16, want float32"),
    ):
        with pytest.raises(kind, match=text):
            impl.forward(Layer(), query, None, None, given, made, query)
    crossing, _ = layers(step, order="BLHNC")
    with pytest.raises(errors.ShapeError, match="kv_cache: got an array in the order BLHNC"):
        crossing.forward(Layer(), query, None, None, cache, made, query)
    wide = jax_frontend.init_cache(
        group_of(head_dim=32).spec, num_layers=1, num_pages=BLOCKS, page_size=PAGE, dtype="float32"
    )
    with pytest.raises(errors.PlanError, match=r"kv_cache\.head_dim: got 32, want 16"):
        impl.forward(Layer(), query, None, None, wide, made, query)
