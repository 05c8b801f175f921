"""A serving engine's layer in PyTorch: its cache where it lies, rows, scales, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from engine_step import (
    BLOCKS,
    CPU,
    KV,
    PADDED,
    PAGE,
    QO,
    ROWS,
    SCALE,
    WIDTH,
    EngineStep,
    Layer,
    batch_of,
    group_of,
    slots,
)

import torch_backend
from interop import errors
from torch_backend.backend import (
    AttentionImpl,
    MetadataBuilder,
    Scales,
    Step,
    bmm1_scale,
    bmm2_scale,
    capabilities,
    maybe_quant_query,
)
from torch_backend.layouts import ORDERS
from torch_backend.quantising import dequantise_nvfp4, nvfp4_regions, quantise_nvfp4

SLOTS = torch.tensor(slots())


def impl_of(step: EngineStep, **more: Any) -> AttentionImpl:
    heads = step.kv_heads
    settings = {"model_dtype": "float32", "order": step.order} | more
    return AttentionImpl(2 * heads, WIDTH, SCALE, heads, **settings)


def metadata_of(step: EngineStep, **more: Any) -> Step:
    group = group_of(layout=step.layout, num_kv_heads=step.kv_heads, **more)
    return MetadataBuilder(CPU, group).build(batch_of())


@pytest.mark.parametrize("kv_heads", [KV, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_served_where_it_lies(order: str, kv_heads: int) -> None:
    """Also I7 and I8: one key head, and pages further apart than a page is long."""
    step = EngineStep(order, kv_heads=kv_heads)
    impl, metadata = impl_of(step), metadata_of(step)
    before = step.cache.clone()
    assert impl.do_kv_cache_update(Layer(), step.key, step.value, step.cache, SLOTS) is None
    pages = before.transpose(1, 2).reshape(BLOCKS * PAGE, kv_heads, 2 * WIDTH)
    pages[SLOTS] = torch.cat([step.key, step.value], -1)[:ROWS]
    assert torch.equal(step.cache, pages.view(BLOCKS, PAGE, kv_heads, -1).transpose(1, 2))
    output = torch.full_like(step.query, 7.0)
    after = step.cache.clone()
    given = impl.forward(Layer(), step.query, None, None, step.cache, metadata, output)
    assert given is output
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-6)
    assert torch.equal(output[ROWS:], torch.full_like(output[ROWS:], 7.0))
    assert torch.equal(step.cache, after)
    assert impl._view is not None
    assert impl._view.k.untyped_storage().data_ptr() == step.cache.untyped_storage().data_ptr()


def test_forged_strides_of_one_head() -> None:
    """I7: strides of axes of size 1 may be anything, and the view has those that follow."""
    step = EngineStep("LBNHC", kv_heads=1)
    stride = list(step.cache.stride())
    stride[1] = 1
    forged = step.cache.as_strided(step.cache.shape, stride)
    impl = impl_of(step)
    output = torch.empty_like(step.query)
    impl.forward(Layer(), step.query, None, None, forged, metadata_of(step), output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-6)
    assert impl._view is not None
    assert impl._view.k.stride() == (PAGE * 2 * WIDTH, 2 * WIDTH, WIDTH, 1)
    assert impl._view.k.data_ptr() == step.cache.data_ptr()


def test_inference_mode() -> None:
    """Engines run in it, with caches and scales that were made in it."""
    with torch.inference_mode():
        step = EngineStep()
        step.cache = step.cache.to(torch.float8_e4m3fn)
        impl = impl_of(step, kv_cache_dtype="fp8")
        group = group_of(dtype="float8_e4m3fn", kv_cache_dtype="fp8")
        metadata = MetadataBuilder(CPU, group).build(batch_of())
        output = torch.empty_like(step.query)
        for layer in (Layer(), Layer(1.0, 1.0, 2.0)):
            impl.do_kv_cache_update(layer, step.key, step.value, step.cache, SLOTS)
            impl.forward(layer, step.query, None, None, step.cache, metadata, output)
        wide = step.cache.float()
        step.cache = torch.cat([wide[..., :WIDTH], 2.0 * wide[..., WIDTH:]], -1)
        np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-5)


def test_rows_that_are_slices() -> None:
    """Query, key and value cut out of one projection, as models have them."""
    step = EngineStep()
    parts = torch.cat([step.query, step.key, step.value], 1)
    query, key, value = parts.split([QO, KV, KV], 1)
    impl = impl_of(step)
    impl.do_kv_cache_update(Layer(), key, value, step.cache, SLOTS)
    output = torch.empty_like(step.query)
    impl.forward(Layer(), query, key, value, step.cache, metadata_of(step), output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-6)


def test_a_profiling_run_touches_the_output_alone() -> None:
    step = EngineStep()
    before = step.cache.clone()
    output = torch.full_like(step.query, torch.nan)
    impl = impl_of(step)
    given = impl.forward(Layer(), step.query, step.key, step.value, step.cache, None, output)
    assert given is output
    assert not output.any()
    assert torch.equal(step.cache, before)
    eight = output.to(torch.float8_e4m3fn)
    eight.view(torch.uint8).fill_(255)
    assert not impl.forward(Layer(), step.query, None, None, step.cache, None, eight).float().any()


@pytest.mark.parametrize("order", ORDERS)
def test_padding_slots_change_no_byte(order: str) -> None:
    """I14: -1 is no index from the end, and rows without a slot are not written."""
    step = EngineStep(order)
    impl, before = impl_of(step), step.cache.clone()
    impl.do_kv_cache_update(Layer(), step.key, step.value, step.cache, torch.full((PADDED,), -1))
    assert torch.equal(step.cache, before)
    impl.do_kv_cache_update(Layer(), step.key, step.value, step.cache, SLOTS[:2].to(torch.int32))
    changed = (step.cache != before).flatten(2).any(-1).nonzero()[:, 0].unique().tolist()
    assert changed == sorted((SLOTS[:2] // PAGE).tolist())


def test_a_layer_that_shares_a_cache_does_not_write() -> None:
    step = EngineStep()
    before = step.cache.clone()
    impl = impl_of(step, kv_sharing_target_layer_name="model.layers.0")
    impl.do_kv_cache_update(Layer(), step.key, step.value, step.cache, SLOTS)
    assert torch.equal(step.cache, before)
    output = torch.empty_like(step.query)
    impl.forward(Layer(), step.query, None, None, step.cache, metadata_of(step), output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-6)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_bytes_of_8_bit_caches(kv_cache_dtype: str) -> None:
    """Row 36: an engine stores 8-bit floats as bytes; each layer has scales of its own."""
    step, layer = EngineStep(), Layer(0.03, 0.5, 2.0)
    name = "float8_e5m2" if kv_cache_dtype == "fp8_e5m2" else "float8_e4m3fn"
    step.cache = step.cache.to(getattr(torch, name)).view(torch.uint8)
    impl = impl_of(step, kv_cache_dtype=kv_cache_dtype)
    group = group_of(dtype=name, kv_cache_dtype=kv_cache_dtype)
    metadata = MetadataBuilder(CPU, group).build(batch_of())
    impl.do_kv_cache_update(layer, step.key, step.value, step.cache, SLOTS)
    output = torch.empty_like(step.query)
    impl.forward(layer, step.query, None, None, step.cache, metadata, output)
    eight = step.cache.view(getattr(torch, name)).float()
    step.cache = torch.cat([0.5 * eight[..., :WIDTH], 2.0 * eight[..., WIDTH:]], -1)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-5)
    written = step.cache.transpose(1, 2).reshape(BLOCKS * PAGE, KV, -1)[SLOTS]
    error = (written - torch.cat([step.key, step.value], -1)[:ROWS]).abs()
    assert float(error.max()) < 0.6  # half a step of e5m2 at 4, and keys halved


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_4_bit_caches(name: str, order: str) -> None:
    """Rows 25, 29 and 37: keys in the first half of the heads, a page's data before its scales."""
    step, layer = EngineStep(order), Layer(1.0, 0.02, 0.03)
    packed = capabilities.customize_spec(name, KV, WIDTH)
    assert packed is not None
    sizes = {"L": 3, "B": BLOCKS, "H": packed.head_slots, "N": PAGE, "C": packed.row_bytes}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=torch.uint8)
    cache = whole.permute([order.index(axis) for axis in "LBHNC"])[1]
    impl = impl_of(step, kv_cache_dtype=name)
    group = group_of(dtype=name, kv_cache_dtype=name, layout="HND")
    metadata = MetadataBuilder(CPU, group).build(batch_of())
    every = torch.arange(BLOCKS * PAGE)
    rows = step.cache.transpose(1, 2).reshape(BLOCKS * PAGE, KV, 2 * WIDTH)
    impl.do_kv_cache_update(layer, rows[..., :WIDTH], rows[..., WIDTH:], cache, every)
    output = torch.empty_like(step.query)
    impl.forward(layer, step.query, None, None, cache, metadata, output)
    stored = []
    for half, given, scale in zip(
        rows.split(WIDTH, -1), cache.chunk(2, 1), (0.02, 0.03), strict=True
    ):
        four = name == "nvfp4_4over6"
        scales = torch.full((KV,), scale)
        data, blocks = quantise_nvfp4(half, scales, four_over_six=four)
        regions = nvfp4_regions(given)
        written = [region.transpose(1, 2).reshape(BLOCKS * PAGE, KV, -1) for region in regions]
        assert torch.equal(written[0], data)
        assert torch.equal(written[1].view(torch.uint8), blocks.view(torch.uint8))
        stored.append(dequantise_nvfp4(data, blocks, scales))
    step.cache = torch.cat(stored, -1).view(BLOCKS, PAGE, KV, -1).transpose(1, 2)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-5)
    assert not whole.unbind(order.index("L"))[0].any()


def test_scales_that_change_are_seen() -> None:
    step = EngineStep()
    step.cache = step.cache.to(torch.float8_e4m3fn)
    impl = impl_of(step, kv_cache_dtype="fp8")
    group = group_of(dtype="float8_e4m3fn", kv_cache_dtype="fp8")
    metadata = MetadataBuilder(CPU, group).build(batch_of())
    outputs = []
    for value in (1.0, 3.0):
        output = torch.empty_like(step.query)
        layer = Layer(1.0, 1.0, value)
        outputs.append(impl.forward(layer, step.query, None, None, step.cache, metadata, output))
    torch.testing.assert_close(outputs[1][:ROWS], 3.0 * outputs[0][:ROWS])


@pytest.mark.parametrize("eight", [False, True])
def test_q_scale_counts_for_queries_of_8_bits_alone(eight: bool) -> None:
    """I3: a calibrated scale beside a query of the model's dtype changes nothing."""
    step = EngineStep()
    step.cache = step.cache.to(torch.float8_e4m3fn)
    impl = impl_of(step, kv_cache_dtype="fp8", model_dtype="bfloat16")
    group = group_of(dtype="float8_e4m3fn", kv_cache_dtype="fp8", model_dtype="bfloat16")
    metadata = MetadataBuilder(CPU, group).build(batch_of())
    query = step.query.bfloat16()
    outputs = []
    for q_scale in (1.0, 0.03):
        given = query
        if eight:
            given = maybe_quant_query(query, torch.float8_e4m3fn, torch.tensor(q_scale))
            assert given.dtype == torch.float8_e4m3fn
        output = torch.empty_like(query)
        layer = Layer(q_scale, 0.5, 2.0)
        impl.forward(layer, given, None, None, step.cache, metadata, output)
        outputs.append(output[:ROWS].float())
    if not eight:
        assert torch.equal(*outputs)
    step.query = query.float()
    wide = step.cache.float()
    step.cache = torch.cat([0.5 * wide[..., :WIDTH], 2.0 * wide[..., WIDTH:]], -1)
    for output in outputs:
        error = np.abs(output.numpy() - step.want()).max()
        assert error < (0.25 if eight else 0.03)


def test_scales_of_both_products() -> None:
    scales = Scales(0.03, 0.5, 2.0)
    assert bmm1_scale(0.25, scales, "bfloat16", "auto") == 0.25
    assert bmm1_scale(0.25, scales, "bfloat16", "fp8") == 0.125
    assert bmm1_scale(0.25, scales, "float8_e4m3fn", "fp8") == 0.25 * 0.03 * 0.5
    assert bmm2_scale(scales, "auto") == 1.0
    assert bmm2_scale(scales, "nvfp4") == 2.0
    assert bmm2_scale(scales, "fp8", output_scale=0.5) == 4.0
    assert Scales.of(object()) == Scales()


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_are_stored_as_asked_for(target: str) -> None:
    """Row 51: a target of e5m2 gives e5m2; what is too large is taken to the largest."""
    query = torch.randn(5, 2, 16, dtype=torch.bfloat16)
    query[0, 0, 0] = 1e6
    scale = torch.tensor(0.5)
    stored = maybe_quant_query(query, target, scale)
    assert stored.dtype == getattr(torch, target)
    assert float(stored[0, 0, 0]) == torch.finfo(stored.dtype).max
    want = (query.float() / 0.5).clamp(-448, 448).to(stored.dtype)
    assert torch.equal(stored[1:].view(torch.uint8), want[1:].view(torch.uint8))
    assert maybe_quant_query(stored, target, scale) is stored


def test_outputs_of_8_bits() -> None:
    step = EngineStep()
    impl, metadata = impl_of(step), metadata_of(step)
    plain = torch.empty_like(step.query)
    impl.forward(Layer(), step.query, None, None, step.cache, metadata, plain)
    output = torch.full(plain.shape, 7.0).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    impl.forward(Layer(), step.query, None, None, step.cache, metadata, output, scale)
    want = (plain / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(output[:ROWS].float(), want[:ROWS])
    assert (output[ROWS:].float() == 7.0).all()
    # The scale was read in the first call; a recorded one finds it there.
    impl.forward(Layer(), step.query, None, None, step.cache, metadata, output, 2 * scale)
    assert torch.equal(output[:ROWS].float(), want[:ROWS])


def test_layers_of_another_window_are_refused() -> None:
    """I21: all layers of a plan have one window; a layer is asked for its own, not the group's."""
    step = EngineStep()
    impl = impl_of(step, sliding_window=3)
    output = torch.full_like(step.query, 7.0)
    with pytest.raises(errors.PlanError, match=r"^metadata: got plans for .* sliding_window=3"):
        impl.forward(Layer(), step.query, None, None, step.cache, metadata_of(step), output)
    assert (output == 7.0).all()
    metadata = metadata_of(step, sliding_window=3)
    impl.forward(Layer(), step.query, None, None, step.cache, metadata, output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(sliding_window=3), atol=2e-6)


@pytest.mark.parametrize(
    ("more", "features"),
    [
        ({"logits_soft_cap": 0.7}, {"logits_soft_cap": 0.7}),
        ({"logits_soft_cap": 0.0}, {}),
    ],
)
def test_soft_caps(more: dict[str, Any], features: dict[str, Any]) -> None:
    step = EngineStep()
    output = torch.empty_like(step.query)
    metadata = metadata_of(step, **features)
    impl_of(step, **more).forward(Layer(), step.query, None, None, step.cache, metadata, output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(**features), atol=2e-6)


def test_sinks_of_a_layer() -> None:
    """Rows 43 and 44: any float type, and new weights at the address of the old ones."""
    step, source = EngineStep(), torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16)
    impl, metadata = impl_of(step, sinks=source), metadata_of(step, sinks=True)
    output = torch.empty_like(step.query)
    for sinks in ([1.0, -2.0, 3.0, 0.5], [2.0, 2.0, -1.0, 4.0]):
        source.copy_(torch.tensor(sinks))
        impl.process_weights_after_loading()
        assert impl._sinks is not None
        address = impl._sinks.data_ptr()
        impl.forward(Layer(), step.query, None, None, step.cache, metadata, output)
        want = step.want(sinks=np.array(sinks))
        np.testing.assert_allclose(output[:ROWS].numpy(), want, atol=2e-6)
        impl.process_weights_after_loading()
        assert impl._sinks.data_ptr() == address
    plain = impl_of(step)
    with pytest.raises(errors.PlanError, match=r"^metadata: got plans for"):
        plain.forward(Layer(), step.query, None, None, step.cache, metadata, output)


def test_steps_that_are_not_causal() -> None:
    step = EngineStep()
    metadata = MetadataBuilder(CPU, group_of()).build(batch_of(causal=False))
    assert (metadata.split.num_decodes, metadata.split.num_prefills) == (0, 5)
    output = torch.empty_like(step.query)
    impl_of(step).forward(Layer(), step.query, None, None, step.cache, metadata, output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(causal=False), atol=2e-6)


def test_a_cache_of_this_library_is_taken_as_well() -> None:
    step = EngineStep()
    impl = impl_of(step, layer_index=1)
    cache = torch_backend.PagedKVCache(
        impl.spec, num_layers=2, num_pages=BLOCKS, page_size=PAGE, dtype="float32"
    )
    group = group_of()
    builder = MetadataBuilder(CPU, type(group)(group.specs, cache.spec, "float32"))
    metadata = builder.build(batch_of())
    for layer in range(2):
        cache.pools(layer)[0].normal_()
    cache.pools(1)[0].copy_(step.cache.transpose(1, 2)[..., :WIDTH])
    cache.pools(1)[1].copy_(step.cache.transpose(1, 2)[..., WIDTH:])
    first = cache.pools(0)[0].clone()
    for where in (cache, step.cache):
        impl.do_kv_cache_update(Layer(), step.key, step.value, where, SLOTS)
    output = torch.empty_like(step.query)
    impl.forward(Layer(), step.query, None, None, cache, metadata, output)
    np.testing.assert_allclose(output[:ROWS].numpy(), step.want(), atol=2e-6)
    assert torch.equal(cache.pools(0)[0], first)


REFUSED_SETTINGS = [
    ({"alibi_slopes": [0.5] * 4}, errors.UnsupportedError, "alibi_slopes: no kernel adds a bias"),
    ({"attn_type": "encoder"}, errors.UnsupportedError, "attn_type: attention is of decoders"),
    ({"sinks": torch.ones(3)}, errors.ShapeError, r"sinks: got shape \[3\], want \[4\]"),
    ({"kv_cache_dtype": "int8"}, errors.ArgumentError, "kv_cache_dtype: got 'int8'"),
    ({"kv_cache_dtype": "float16"}, errors.ArgumentError, "kv_cache_dtype: got 'float16'"),
]


@pytest.mark.parametrize(("settings", "kind", "text"), REFUSED_SETTINGS)
def test_refused_settings(settings: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        impl_of(EngineStep(), **settings)


def test_refused_outputs() -> None:
    step = EngineStep()
    impl, metadata, scale = impl_of(step), metadata_of(step), torch.tensor(1.0)
    plain, eight = step.query.clone(), step.query.to(torch.float8_e4m3fn)
    four = torch.zeros(PADDED, QO, WIDTH // 2, dtype=torch.uint8)
    for output, scales, kind, text in (
        (plain, (None, scale), errors.ArgumentError, "output_block_scale: got one without"),
        (plain, (scale, None), errors.DTypeError, "output: got float32, want float8_e4m3fn"),
        (eight, (None, None), errors.DTypeError, "output: got float8_e4m3fn without output_scale"),
        (eight, (scale, scale), errors.ArgumentError, "output_block_scale: got one for float8"),
        (four, (scale, None), errors.ArgumentError, "output_block_scale: got None for an output"),
        (four, (scale, scale), errors.UnsupportedError, "4-bit outputs are written by TRTLLM-GEN"),
        (eight, (0 * scale, None), errors.ArgumentError, "output_scale: got 0.0"),
        (plain[:2], (None, None), errors.ShapeError, "output: got"),
        (plain[:, :1], (None, None), errors.ShapeError, "output: got"),
    ):
        before = output.clone()
        with pytest.raises(kind, match=text):
            impl.forward(Layer(), step.query, None, None, step.cache, metadata, output, *scales)
        assert torch.equal(output.view(torch.uint8), before.view(torch.uint8))


def test_refused_calls() -> None:
    step = EngineStep()
    impl, metadata = impl_of(step), metadata_of(step)
    output, before = torch.empty_like(step.query), step.cache.clone()

    def forward(kind: type, text: str, query: Any = step.query, cache: Any = step.cache) -> None:
        with pytest.raises(kind, match=text):
            impl.forward(Layer(), query, None, None, cache, metadata, output)

    def update(kind: type, text: str, **more: Any) -> None:
        given = {"key": step.key, "value": step.value, "slot_mapping": SLOTS} | more
        with pytest.raises(kind, match=text):
            impl.do_kv_cache_update(Layer(), kv_cache=step.cache, **given)

    forward(errors.ShapeError, "^query: ", query=step.query[:3])
    forward(errors.DTypeError, "^query: got float16, want float32", query=step.query.half())
    forward(errors.FrameworkError, "^kv_cache: got numpy", cache=step.cache.numpy())
    # Row 35: the contents of neighbouring rows have to lie side by side.
    apart = torch.zeros(BLOCKS, PAGE, KV, 4 * WIDTH)[..., : 2 * WIDTH].transpose(1, 2)
    forward(errors.ShapeError, r"^tensors\[0\]: got strides", cache=apart)
    forward(errors.ShapeError, "^tensors: got", cache=step.cache[..., :-1])
    forward(errors.DTypeError, "^tensors: got float16", cache=step.cache.half())
    update(errors.ShapeError, "^key: got", key=step.key[:, :1])
    update(errors.DTypeError, "^value: got float16, want float32", value=step.value.half())
    update(
        errors.ShapeError,
        "^slot_mapping: got 13 slots",
        slot_mapping=torch.arange(15)[:13],
        key=step.key[:12],
    )
    update(errors.ShapeError, "^slot_mapping: got float32", slot_mapping=SLOTS.float())
    with pytest.raises(errors.PlanError, match=re.escape("metadata: got an EngineBatch, want")):
        impl.forward(Layer(), step.query, None, None, step.cache, batch_of(), output)  # type: ignore[arg-type]
    for query, target, text in (
        (step.query, "float8_e4m3fn", "query: got float32, want float16 or bfloat16"),
        (step.query.half(), "float32", "target: got float32"),
        (step.query.half()[0], "float8_e4m3fn", "query: got"),
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            maybe_quant_query(query, target, torch.tensor(1.0))
    assert torch.equal(step.cache, before)
