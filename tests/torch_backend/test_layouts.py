"""Caches of other engines: every order in memory, seen without a copy, or refused with a reason."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from small import BATCH, PAGE_TABLE, SIZES, SPEC, new_cache, torch_rows
from torch import Tensor

import torch_backend
from interop import AttentionSpec
from interop.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FrameworkError,
    ShapeError,
)
from torch_backend import PagedKVCache
from torch_backend.layouts import (
    ORDERS,
    canonical,
    canonical_strides,
    check_gpu_alignment,
    import_packed,
    split_packed,
)

LAYERS, PAGES, HEADS, PAGE_SIZE, WIDTH, WIDTH_V = 3, 5, 2, 4, 8, 16
UNEVEN = AttentionSpec(4, HEADS, WIDTH, head_dim_v=WIDTH_V)
EVEN = AttentionSpec(4, HEADS, WIDTH)
LAYER_MAJOR = ("LBHNC", "LBNHC")


def allocated(order: str, **sizes: int) -> Tensor:
    """One tensor of all layers, its axes in `order`, in which every element is another number."""
    default = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": PAGE_SIZE, "C": WIDTH + WIDTH_V}
    shape = [(default | sizes)[letter] for letter in order]
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def logical(whole: Tensor, order: str) -> Tensor:
    """The same memory with axes ``LBHNC``."""
    return whole.permute([order.index(letter) for letter in "LBHNC"])


def per_layer(whole: Tensor, order: str) -> list[Tensor]:
    """The same memory as an engine hands it to its layers: axes ``BHNC`` whatever the order."""
    return list(logical(whole, order).unbind())


def head_major(pool: Tensor, order: str) -> Tensor:
    return pool if ORDERS[order] == "HND" else pool.transpose(1, 2)


def shares(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


GOLDEN = [
    ((10, 1, 16, 128), (2048, 1, 128, 1), (2048, 2048, 128, 1)),
    ((16, 1, 8, 32), (256, 1, 32, 1), (256, 256, 32, 1)),
    ((5, 16, 1, 64), (1024, 64, 7, 1), (1024, 64, 64, 1)),
    ((10, 1, 16, 64), (4096, 64, 128, 1), (4096, 2048, 128, 1)),
    ((1, 1, 1), (9, 9, 9), (1, 1, 1)),
    ((2, 3), (3, 1), (3, 1)),
]


@pytest.mark.parametrize(("shape", "strides", "wanted"), GOLDEN)
def test_canonical_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    assert canonical_strides(shape, strides) == wanted
    memory = torch.arange(41000)
    tensor = memory.as_strided(shape, strides, 5)
    view = canonical(tensor)
    assert view.stride() == wanted
    assert (view is tensor) == (strides == wanted)
    assert view.data_ptr() == tensor.data_ptr()
    assert torch.equal(view, tensor)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_canonical_strides_change_dimensions_of_size_1_only(shape: list[int], random: Any) -> None:
    strides = [random.randrange(20) for _ in shape]
    found = canonical_strides(shape, strides)
    assert all(
        size == 1 or new == old for size, new, old in zip(shape, found, strides, strict=True)
    )
    assert canonical_strides(shape, found) == found
    ones = [1] * len(shape)
    assert canonical_strides(ones, strides) == tuple(ones)


@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "one a layer"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_seen_where_it_lies(order: str, as_list: bool) -> None:
    whole = allocated(order)
    packed = import_packed(per_layer(whole, order) if as_list else whole, spec=UNEVEN, order=order)
    spec, wanted = packed.spec, logical(whole, order)
    assert (spec.num_layers, spec.num_pages, spec.page_size) == (LAYERS, PAGES, PAGE_SIZE)
    assert (spec.layout, spec.dtype, spec.device) == (ORDERS[order], "float32", "cpu")
    assert (spec.head_dim, spec.head_dim_v) == (WIDTH, WIDTH_V)
    for layer, (key, value) in enumerate(packed.layers):
        assert torch.equal(head_major(key, order), wanted[layer, ..., :WIDTH])
        assert torch.equal(head_major(value, order), wanted[layer, ..., WIDTH:])
        assert shares(key, whole)
        assert shares(value, whole)
        assert key.shape[1:] == spec.key_shape[1:]
        assert value.shape[1:] == spec.value_shape[1:]
        # Kernels are told one stride of a page for both.
        assert key.stride() == value.stride()
    assert spec.layers_apart == (packed.flat is None) == (order not in LAYER_MAJOR)
    if packed.flat is not None:
        assert tuple(pool.shape for pool in packed.flat) == (spec.key_shape, spec.value_shape)
        for side, pool in enumerate(packed.flat):
            assert torch.equal(pool, torch.cat([layer[side] for layer in packed.layers]))
            assert shares(pool, whole)


@pytest.mark.parametrize("order", ORDERS)
def test_one_layer_is_split(order: str) -> None:
    whole = allocated(order)
    for layer, tensor in enumerate(per_layer(whole, order)):
        key, value = split_packed(tensor, WIDTH, order=order)
        assert torch.equal(head_major(key, order), logical(whole, order)[layer, ..., :WIDTH])
        assert torch.equal(head_major(value, order), logical(whole, order)[layer, ..., WIDTH:])
        assert shares(key, whole)
        assert shares(value, whole)


def test_short_names() -> None:
    whole = allocated("LBNHC")
    by_name = import_packed(whole, spec=UNEVEN, order="NHD")
    assert by_name.spec.layout == "NHD"
    assert torch.equal(by_name.layers[1][0], whole[1, ..., :WIDTH])
    assert import_packed(allocated("LBHNC"), spec=UNEVEN, order="HND").spec.layout == "HND"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("letter", "LBHN")
def test_sizes_of_one(order: str, letter: str) -> None:
    """Whatever stride a dimension of size 1 has, the views have one that fits."""
    whole = allocated(order, **{letter: 1})
    spec = AttentionSpec(4, 1 if letter == "H" else HEADS, WIDTH, head_dim_v=WIDTH_V)
    layers = per_layer(whole, order)
    forged = []
    for one in layers:
        sizes = zip(one.shape, one.stride(), strict=True)
        forged.append(one.as_strided(one.shape, [7 if n == 1 else step for n, step in sizes]))
    packed = import_packed(forged, spec=spec, order=order)
    wanted = logical(whole, order)
    for layer, pools in enumerate(packed.layers):
        parts = wanted[layer].split([WIDTH, WIDTH_V], -1)
        for pool, part in zip(pools, parts, strict=True):
            assert torch.equal(head_major(pool, order), part)
            assert pool.stride() == canonical_strides(pool.shape, pool.stride())
            assert pool.data_ptr() == part.data_ptr()
    # One page a layer, or one layer, makes each order layer-major.
    assert (packed.flat is not None) == (order in LAYER_MAJOR or letter in "LB")
    if packed.flat is not None:
        for side in (0, 1):
            assert torch.equal(packed.flat[side], torch.cat([p[side] for p in packed.layers]))


def test_layers_of_several_memories_lie_apart() -> None:
    layers = [torch.randn(PAGES, HEADS, PAGE_SIZE, 2 * WIDTH) for _ in range(2)]
    packed = import_packed(layers, spec=EVEN)
    assert packed.flat is None
    assert packed.spec.layers_apart
    # So do layers of one memory in another order, and two layers that are the same.
    whole = torch.randn(3, PAGES, HEADS, PAGE_SIZE, 2 * WIDTH)
    for some in ([2, 1, 0], [0, 0], [0, 2, 1]):
        packed = import_packed([whole[layer] for layer in some], spec=EVEN)
        assert packed.flat is None
        for layer, (key, value) in zip(some, packed.layers, strict=True):
            assert torch.equal(torch.cat([key, value], -1), whole[layer])


def test_pages_with_gaps_between_them() -> None:
    """A page may be padded; every second layer is one of them."""
    page = HEADS * PAGE_SIZE * 2 * WIDTH
    memory = torch.arange(4 * PAGES * (page + 32), dtype=torch.float32)
    steps = (page + 32, PAGE_SIZE * 2 * WIDTH, 2 * WIDTH, 1)
    layers = [
        memory.as_strided((PAGES, HEADS, PAGE_SIZE, 2 * WIDTH), steps, i * PAGES * (page + 32))
        for i in range(4)
    ]
    packed = import_packed(layers, spec=EVEN)
    assert packed.flat is not None
    assert torch.equal(torch.cat(packed.flat, -1), torch.cat(layers))
    packed = import_packed(layers[::2], spec=EVEN)
    assert packed.flat is None
    assert torch.equal(packed.layers[1][1], layers[2][..., WIDTH:])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("held", ["bytes", "floats"])
def test_8_bit_floats_may_be_stored_as_bytes(dtype: str, held: str) -> None:
    kind = getattr(torch, dtype)
    stored = torch.randint(0, 256, (2, PAGES, HEADS, PAGE_SIZE, 2 * WIDTH), dtype=torch.uint8)
    given = stored if held == "bytes" else stored.view(kind)
    packed = import_packed(given, spec=EVEN, dtype=dtype if held == "bytes" else None)
    assert packed.spec.dtype == dtype
    assert packed.flat is not None
    assert packed.flat[0].dtype == kind
    assert shares(packed.flat[0], stored)
    both = torch.cat([pool.view(torch.uint8) for pool in packed.flat], -1)
    assert torch.equal(both, stored.flatten(0, 1))


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_nvfp4_halves_of_the_heads(order: str) -> None:
    spec = AttentionSpec(4, HEADS, 32)
    whole = allocated(order, H=2 * HEADS, C=32 // 2 + 32 // 16).to(torch.uint8)
    packed = import_packed(whole, spec=spec, dtype="nvfp4", order=order)
    assert packed.spec.dtype == "nvfp4"
    assert (packed.flat is None) == (order == "BLHNC")
    for layer, (key, value) in enumerate(packed.layers):
        assert torch.equal(key, logical(whole, order)[layer, :, :HEADS])
        assert torch.equal(value, logical(whole, order)[layer, :, HEADS:])
        assert shares(key, whole)
        assert key.shape[1:] == packed.spec.key_shape[1:]


def test_nvfp4_whose_keys_are_scattered_is_refused() -> None:
    spec = AttentionSpec(4, HEADS, 32)
    for order in ("LBNHC", "BLNHC", "BHLNC"):
        whole = allocated(order, H=2 * HEADS, C=18).to(torch.uint8)
        with pytest.raises(ShapeError, match="all bytes of a page's keys together"):
            import_packed(whole, spec=spec, dtype="nvfp4", order=order)
    # With one token a page, or one head, they are not scattered.
    whole = allocated("LBNHC", H=2 * HEADS, C=18, N=1).to(torch.uint8)
    key, _ = import_packed(whole, spec=spec, dtype="nvfp4", order="LBNHC").layers[0]
    assert torch.equal(key, whole[0, :, :, :HEADS])
    whole = allocated("BHLNC", H=2, C=18).to(torch.uint8)
    packed = import_packed(whole, spec=AttentionSpec(4, 1, 32), dtype="nvfp4", order="BHLNC")
    assert torch.equal(packed.layers[2][1], whole[:, 1:, 2])
    with pytest.raises(ShapeError, match="share one axis"):
        uneven = AttentionSpec(4, HEADS, 32, head_dim_v=48)
        import_packed(whole, spec=uneven, dtype="nvfp4")


def test_memory_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        whole = allocated("LBHNC")
        leaf = allocated("LBHNC")
    packed = import_packed(whole, spec=UNEVEN)
    assert packed.flat is not None
    packed.flat[0].zero_()
    assert not whole[..., :WIDTH].any()
    with torch.inference_mode():
        packed = import_packed(leaf, spec=UNEVEN)
    assert packed.flat is not None
    assert not packed.flat[0].is_inference()
    leaf = allocated("LBHNC").requires_grad_()
    packed = import_packed(leaf, spec=UNEVEN)
    packed.layers[0][0].zero_()
    assert not leaf[0, ..., :WIDTH].any()


WHOLE = allocated("LBHNC")
REFUSED: list[tuple[Any, dict[str, Any], type[ArgumentError], str]] = [
    (WHOLE, {"order": "LHBNC"}, ArgumentError, "order: got 'LHBNC', in which a page's heads"),
    (WHOLE, {"order": "LBNCH"}, ArgumentError, "want one of LBHNC, BLHNC, BHLNC, LBNHC, BLNHC"),
    (WHOLE, {"order": None}, ArgumentError, "order: got None"),
    (WHOLE, {"spec": SIZES}, ArgumentError, "spec: got dict"),
    (WHOLE.numpy(), {}, FrameworkError, "interop.dlpack.to_torch"),
    ([WHOLE[0].numpy()], {}, FrameworkError, r"tensors\[0\]: got numpy"),
    ([], {}, ArgumentError, "tensors: got none"),
    (WHOLE[0], {}, ShapeError, "want 5 dimensions"),
    ([WHOLE], {}, ShapeError, "want 4 dimensions"),
    (WHOLE[:, :0], {}, ShapeError, "not empty"),
    (WHOLE.to_sparse(), {}, ShapeError, "want a dense tensor"),
    ([WHOLE[0], WHOLE[1, 1:]], {}, ShapeError, r"tensors\[1\]: got \[4, 2, 4, 24\]"),
    ([WHOLE[0], WHOLE[1].half()], {}, DTypeError, r"tensors\[1\]: got float16"),
    ([WHOLE[0], WHOLE[1].to("meta")], {}, DeviceError, r"tensors\[1\]: got meta"),
    (WHOLE.to("meta"), {}, DeviceError, "CPU or CUDA"),
    (WHOLE.to(torch.uint8), {}, DTypeError, "dtype: got none for a cache of bytes"),
    (WHOLE, {"dtype": "bfloat16"}, DTypeError, "got float32, want bfloat16"),
    (WHOLE, {"dtype": "fp8"}, DTypeError, "got float32, want float8_e4m3fn or uint8"),
    (WHOLE.to(torch.int32), {}, DTypeError, "got int32"),
    (WHOLE, {"spec": SPEC}, ShapeError, "want 2 heads, and key and value in 16 elements"),
    (WHOLE, {"order": "LBNHC"}, ShapeError, r"\[5, 4, 2, 24\].*want 2 heads"),
    # Axes that are named otherwise than they lie.
    (WHOLE.transpose(0, 1), {"order": "BLHNC"}, ShapeError, "from far to near LBHNC"),
    (WHOLE.unbind(), {"order": "BLHNC"}, ShapeError, "from far to near BHNC"),
    (WHOLE.unbind(), {"order": "BHLNC"}, ShapeError, "want memory in the order BHLNC"),
    (WHOLE.unbind(), {"order": "LBNHC"}, ShapeError, r"axes B=5, N=4, H=2, C=24, .* BHNC"),
    (list(allocated("LBNHC").transpose(2, 3)), {}, ShapeError, "from far to near BNHC"),
    (list(allocated("BHLNC").permute(2, 0, 1, 3, 4)), {}, ShapeError, "strides"),
    (list(allocated("LHBNC").transpose(1, 2)), {}, ShapeError, "from far to near HBNC"),
    # Rows with gaps, and memory that overlaps itself.
    (allocated("LBHNC", C=48)[..., ::2], {}, ShapeError, "would need a copy"),
    (allocated("LBHNC", C=48)[..., :24], {}, ShapeError, "side by side"),
    (allocated("LBHNC", B=1).expand(-1, 5, -1, -1, -1), {}, ShapeError, "strides"),
]


@pytest.mark.parametrize(("tensors", "changes", "error", "match"), REFUSED)
def test_what_would_need_a_copy_or_does_not_fit_is_refused(
    tensors: Any, changes: dict[str, Any], error: type[ArgumentError], match: str
) -> None:
    with pytest.raises(error, match=match):
        import_packed(tensors, **({"spec": UNEVEN} | changes))


def test_a_layer_is_refused_as_a_cache_is() -> None:
    with pytest.raises(ShapeError, match="head_dim: got 24, with 24 elements"):
        split_packed(WHOLE[0], 24)
    with pytest.raises(ShapeError, match="cache: got shape"):
        split_packed(WHOLE, WIDTH)
    with pytest.raises(ArgumentError, match="LHBNC"):
        split_packed(WHOLE[0], WIDTH, order="LHBNC")
    with pytest.raises(ShapeError, match="cache: got strides"):
        split_packed(WHOLE[0].transpose(1, 2), WIDTH)


def test_what_a_gpu_could_not_read() -> None:
    memory = torch.zeros(4096)
    assert memory.data_ptr() % 16 == 0
    check_gpu_alignment("tensors", memory.view(4, 4, 4, 64))
    for shape, strides, start in (
        ((4, 4, 4, 8), (128, 32, 8, 1), 1),
        ((4, 4, 4, 6), (96, 24, 6, 1), 0),
        ((4, 4, 4, 8), (130, 32, 8, 1), 0),
    ):
        with pytest.raises(ShapeError, match="multiples of 16 bytes"):
            check_gpu_alignment("tensors", memory.as_strided(shape, strides, start))
    # Rows of NVFP4 are no rows in memory; its pages are.
    memory = torch.zeros(4096, dtype=torch.uint8)
    check_gpu_alignment("tensors", memory.as_strided((2, 4, 4, 18), (288, 72, 18, 1)))
    with pytest.raises(ShapeError):
        check_gpu_alignment("tensors", memory.as_strided((2, 4, 4, 18), (290, 72, 18, 1)))


@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "one a layer"])
@pytest.mark.parametrize("order", ORDERS)
def test_attention_reads_and_writes_it(order: str, as_list: bool) -> None:
    own = new_cache(seed=1, layout=ORDERS[order])
    axes = {"L": 3, "B": 12, "H": 2, "N": 4, "C": 16}
    whole = torch.zeros([axes[letter] for letter in order])
    packed = torch.cat([own.k, own.v], -1).view(3, 12, *own.k.shape[1:3], 16)
    # Ours is layer by layer, with axes of a page as in `order`.
    ours = "LB" + ("HN" if ORDERS[order] == "HND" else "NH") + "C"
    whole.permute([order.index(letter) for letter in ours]).copy_(packed)
    cache = PagedKVCache.from_packed(
        per_layer(whole, order) if as_list else whole, spec=SPEC, order=order
    )
    before, used = whole.clone(), sorted({page for row in PAGE_TABLE for page in row})
    query, key, value = torch_rows(seed=2)
    for layer in range(3):
        answers = []
        for one in (own, cache):
            plan = torch_backend.plan(SPEC, one.spec, BATCH)
            answers.append(
                torch_backend.paged_attention(query, key, value, one, plan, layer, return_lse=True)
            )
        for ours_, theirs in zip(*answers, strict=True):
            assert torch.equal(ours_, theirs)
        for mine, theirs in zip(own.pools(layer), cache.pools(layer), strict=True):
            assert torch.equal(mine, theirs)
    # The engine's memory has it, and pages that nobody owns are as they were.
    assert not torch.equal(whole, before)
    rest = [page for page in range(12) if page not in used]
    assert torch.equal(logical(whole, order)[:, rest], logical(before, order)[:, rest])
