"""Formats of quantised caches against an oracle in NumPy, pages of NVFP4, and scales."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantised
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays
from quantised import FP8, Array
from torch import Tensor

from interop import AttentionSpec, CacheSpec
from interop.errors import ArgumentError, DTypeError, ShapeError
from torch_backend import PagedKVCache, ScaleCalibrator, calibrate_scales
from torch_backend.quantising import (
    check_scales,
    dequantise_fp8,
    dequantise_nvfp4,
    nvfp4_regions,
    quantise_fp8,
    quantise_nvfp4,
)
from torch_backend.writing import token_major, write_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
eight_bits = pytest.mark.parametrize("dtype", FP8)
ways = pytest.mark.parametrize("four_over_six", [False, True])
layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])

# Any float32, with many that lie half-way between two numbers of a format.
NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 2.0**-10, 2.0**-17]),
    st.builds(lambda i, e: float(i * 2.0**e), st.integers(-63, 63), st.integers(-18, 10)),
)
# All that a cache may have.
SCALES = st.one_of(
    st.integers(-8, 6).map(lambda e: 2.0**e), st.floats(2.0**-126, 2.0**116, width=32)
)


def edges(grid: Array) -> Array:
    """Numbers of a format, those half-way between two, and the next float32 on either side."""
    grid = grid.astype(np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    near = [np.nextafter(points, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    points = np.concatenate([points, *near])
    return np.concatenate([points, -points])


def finite(dtype: str) -> Array:
    """Numbers of an 8-bit format that are not negative, in order."""
    numbers = np.arange(128, dtype=np.uint8).view(FP8[dtype][0]).astype(np.float32)
    return numbers[np.isfinite(numbers)]


def assert_fp8(rows: Array, scale: Array, dtype: str, device: str = "cpu") -> None:
    """Check bytes and meaning of rows ``[tokens, heads, width]``."""
    given, by = torch.from_numpy(rows).to(device), torch.from_numpy(scale).to(device)
    stored = quantise_fp8(given, by, dtype)
    want = quantised.fp8_bytes(rows, scale, dtype)
    assert stored.dtype == getattr(torch, dtype)
    got = stored.view(torch.uint8).cpu().numpy()
    np.testing.assert_array_equal(got, want)
    assert_real(dequantise_fp8(stored, by), quantised.fp8_real(want, scale, dtype))


def assert_nvfp4(rows: Array, scale: Array, four_over_six: bool, device: str = "cpu") -> None:
    given, by = torch.from_numpy(rows).to(device), torch.from_numpy(scale).to(device)
    data, blocks = quantise_nvfp4(given, by, four_over_six=four_over_six)
    want = quantised.nvfp4_bytes(rows, scale, four_over_six)
    assert (data.dtype, blocks.dtype) == (torch.uint8, torch.float8_e4m3fn)
    np.testing.assert_array_equal(blocks.view(torch.uint8).cpu().numpy(), want[1])
    np.testing.assert_array_equal(data.cpu().numpy(), want[0])
    assert_real(dequantise_nvfp4(data, blocks, by), quantised.nvfp4_real(*want, scale))


def assert_real(got: Tensor, want: Array) -> None:
    """Check float32 against float64, which rounds at most twice less."""
    assert got.dtype == torch.float32
    most = float(np.finfo(np.float32).max)
    small = 2.0**-145  # subnormal numbers have fewer bits
    with np.errstate(over="ignore"):
        want = np.where(np.abs(want) > most, want.astype(np.float32), want)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2.0**-22, atol=small)
    assert (np.signbit(got.cpu().numpy()) == np.signbit(want))[~np.isnan(want)].all()


@eight_bits
def test_8_bits_round_at_every_edge(device: str, dtype: str) -> None:
    points = edges(finite(dtype))
    scale = np.array([1.0, 0.5, 2.0**-20, 0.3, 7.0], np.float32)
    rows = points[:, None, None] * scale[:, None]
    assert_fp8(rows, scale, dtype, device)


@eight_bits
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_can_be_stored(kind: torch.dtype, dtype: str) -> None:
    rows = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(kind)
    rows = rows.view(-1, 1, 1).repeat(1, 3, 1)
    scale = np.array([1.0, 0.02, 3e-7], np.float32)
    got = quantise_fp8(rows, torch.from_numpy(scale), dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got, quantised.fp8_bytes(rows.float().numpy(), scale, dtype))


@eight_bits
@given(
    rows=arrays(np.float32, (2, 2, 16), elements=NUMBERS),
    scale=arrays(np.float32, 2, elements=SCALES),
)
def test_8_bits_are_those_of_ml_dtypes(dtype: str, rows: Array, scale: Array) -> None:
    assert_fp8(rows, scale, dtype)


@eight_bits
def test_8_bits_saturate_and_what_is_no_number_stays_none(device: str, dtype: str) -> None:
    given = [torch.nan, -torch.nan, torch.inf, -torch.inf, 1e30, -1e30, -0.0, -1e-30]
    rows = torch.tensor(given, device=device).view(1, 1, -1)
    stored = quantise_fp8(rows, torch.ones(1, device=device), dtype)
    real = dequantise_fp8(stored, torch.ones(1, device=device))[0, 0].cpu()
    assert stored.view(torch.uint8)[0, 0, :2].tolist() == [0x7F, 0x7F]
    assert real[:2].isnan().all()
    most = FP8[dtype][1]
    assert real[2:].tolist() == [most, -most, most, -most, 0.0, 0.0]
    assert torch.signbit(real[6:]).all()


@eight_bits
def test_what_was_read_is_stored_as_it_was(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    codes = codes[codes.float().isfinite()].view(1, 1, -1).repeat(1, 3, 1)
    scale = torch.tensor([1.0, 0.37, 1e4])
    again = quantise_fp8(dequantise_fp8(codes, scale), scale, dtype)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@ways
def test_4_bits_round_at_every_edge(device: str, four_over_six: bool) -> None:
    points = edges(np.array(E2M1))
    points = points[np.abs(points) <= 6.0]
    # Each in a block whose largest number is 6, so that the block scale is 1 where the scale is.
    rows = np.full((len(points), 3, 16), 6.0, np.float32)
    rows[:, :, 1:15] = points[:, None, None]
    scale = np.array([1.0, 2.0**-6, 0.3], np.float32)
    assert_nvfp4(rows * scale[:, None], scale, four_over_six, device)
    data, blocks = quantise_nvfp4(torch.from_numpy(rows[:, :1]), torch.ones(1))
    assert (blocks.float() == 1.0).all()
    # The nearest by search; of two as near, that of the even code.
    distance = np.abs(np.abs(points.astype(np.float64))[:, None] - np.array(E2M1))
    nearest = [min(range(8), key=lambda code: (row[code], code % 2)) for row in distance]
    want = np.array(nearest) + 8 * np.signbit(points)
    np.testing.assert_array_equal(data[:, 0, 1].numpy(), want + 16 * want)


@ways
def test_block_scales_round_at_every_edge(device: str, four_over_six: bool) -> None:
    grid = finite("float8_e4m3fn")
    sizes = np.concatenate([edges(grid), np.array([460.0, 464.0, 480.0, 1e4], np.float32)])
    rows = np.zeros((len(sizes), 2, 32), np.float32)
    rows[:, :, 3] = 6 * sizes[:, None]
    rows[:, :, 20] = -4 * sizes[:, None]
    scale = np.array([1.0, 0.7], np.float32)
    assert_nvfp4(rows * scale[:, None], scale, four_over_six, device)


@ways
@pytest.mark.parametrize("kind", ["any", "few bits", "normal"])
def test_many_blocks(device: str, kind: str, four_over_six: bool) -> None:
    rng = np.random.default_rng(0)
    shape = (400, 4, 64)
    if kind == "any":
        rows = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    elif kind == "few bits":
        rows = (rng.integers(-48, 49, shape) * 0.125).astype(np.float32)
        rows[..., ::16] = 6.0
    else:
        rows = rng.standard_normal(shape, np.float32)
        rows *= 2.0 ** rng.integers(-9, 9, (400, 4, 1))
    scale = np.array([1.0, 0.25, 0.003, 1e-5], np.float32)
    assert_nvfp4(rows, scale, four_over_six, device)


@ways
@given(
    rows=arrays(np.float32, (1, 2, 32), elements=NUMBERS),
    scale=arrays(np.float32, 2, elements=SCALES),
)
def test_4_bits_are_those_of_ml_dtypes(four_over_six: bool, rows: Array, scale: Array) -> None:
    assert_nvfp4(rows, scale, four_over_six)


@ways
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_stored_as_their_float32(
    kind: torch.dtype, four_over_six: bool
) -> None:
    rows = torch.randn(50, 2, 48, generator=torch.manual_seed(0)).to(kind)
    scale = torch.tensor([0.01, 0.5])
    got = quantise_nvfp4(rows, scale, four_over_six=four_over_six)
    want = quantised.nvfp4_bytes(rows.float().numpy(), scale.numpy(), four_over_six)
    np.testing.assert_array_equal(got[0].numpy(), want[0])
    np.testing.assert_array_equal(got[1].view(torch.uint8).numpy(), want[1])


@ways
def test_blocks_of_zeros_and_of_what_is_no_number(device: str, four_over_six: bool) -> None:
    rows = torch.ones(1, 1, 80, device=device)
    rows[..., :16] = 0.0
    rows[..., 1] = -0.0
    rows[..., 16:32] = 1e-12  # too small for any block scale
    rows[..., 35] = torch.nan
    rows[..., 50] = -torch.inf
    scale = torch.ones(1, device=device)
    data, blocks = quantise_nvfp4(rows, scale, four_over_six=four_over_six)
    assert blocks.view(torch.uint8)[0, 0].tolist()[:4] == [0, 0, 0x7F, 0x7E]
    assert not data[..., :24].any()
    real = dequantise_nvfp4(data, blocks, scale)[0, 0]
    assert real[:32].tolist() == [0.0] * 32
    assert real[32:48].isnan().all()
    assert real[50] == -448 * 6
    assert real[64:].tolist() == pytest.approx([1.0] * 16, rel=0.04)


@given(rows=arrays(np.float32, (2, 1, 32), elements=st.floats(-1e5, 1e5, width=32)))
def test_four_over_six_takes_the_scale_of_the_smaller_error(rows: Array) -> None:
    scale = np.array([0.5], np.float32)
    mine = quantised_errors(rows, scale, four_over_six=True)
    six = quantised_errors(rows, scale, four_over_six=False)
    # By its definition, and what float32 makes of it.
    assert (mine <= six * (1 + 1e-5) + 1e-12).all()


def quantised_errors(rows: Array, scale: Array, *, four_over_six: bool) -> Array:
    """Squared errors of blocks, in float64."""
    one = torch.from_numpy(scale)
    stored = quantise_nvfp4(torch.from_numpy(rows), one, four_over_six=four_over_six)
    missed = dequantise_nvfp4(*stored, one).double().numpy() - rows
    return (missed**2).reshape(-1, 16).sum(-1)


def test_four_over_six_is_better_on_average() -> None:
    rows = np.random.default_rng(0).standard_normal((256, 1, 64), np.float32)
    scale = np.array([0.01], np.float32)
    errors = [quantised_errors(rows, scale, four_over_six=way).mean() for way in (False, True)]
    assert errors[1] < 0.95 * errors[0]


def test_of_two_scales_as_good_the_smaller_is_kept() -> None:
    # 2 * 6 and 3 * 4 are 12 exactly.
    rows = torch.zeros(1, 1, 16)
    rows[..., 5] = 12.0
    _, blocks = quantise_nvfp4(rows, torch.ones(1), four_over_six=True)
    assert blocks.item() == 2.0
    # 8 is a number of the second only: 3 * (4, 8 / 3) against 2 * (6, 4).
    rows[..., 6] = 9.0
    _, blocks = quantise_nvfp4(rows, torch.ones(1), four_over_six=True)
    assert blocks.item() == 3.0


def test_errors_are_added_in_order(device: str) -> None:
    """Where both scales are nearly as good, rounding decides, so all have to round alike."""
    rng = np.random.default_rng(0)
    scale = np.array([0.7], np.float32)
    ends = rng.uniform(-1, 1, (2, 2000, 1, 16)).astype(np.float32) * np.float32(6)
    ends[..., 0] = 6.3  # so that a block has the same two scales all the way
    ends *= scale
    block_scales = [quantised.nvfp4_bytes(end, scale, True)[1] for end in ends]
    six, four = ends[:, (block_scales[1] != block_scales[0])[:, 0, 0]]
    low, high = np.zeros((len(six), 1, 1), np.float32), np.ones((len(six), 1, 1), np.float32)

    def between(part: Array) -> Array:
        return six + part * (four - six)

    first = quantised.nvfp4_bytes(between(low), scale, True)[1]
    for _ in range(30):
        middle = (low + high) / 2
        same = quantised.nvfp4_bytes(between(middle), scale, True)[1] == first
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    near = [between(low * (1 + k * np.float32(2.0**-23))) for k in range(-8, 9)]
    assert_nvfp4(np.concatenate(near), scale, True, device)


def test_a_width_that_has_no_blocks() -> None:
    with pytest.raises(ShapeError, match="heads of 24, want a multiple of 16"):
        quantise_nvfp4(torch.ones(1, 1, 24), torch.ones(1))


def paged(spec: CacheSpec, page_stride: int) -> Tensor:
    """Values of a cache whose pages have other things between them."""
    pages, d1, d2, row = spec.value_shape
    memory = torch.arange(pages * page_stride).to(torch.uint8)
    return memory.as_strided((pages, d1, d2, row), (page_stride, d2 * row, row, 1))


@layouts
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_regions_are_views_of_a_page(heads: int, layout: str) -> None:
    for page_size, width in ((1, 16), (4, 64), (3, 32)):
        spec = CacheSpec(1, 3, page_size, heads, 16, width, "nvfp4", layout)
        pool = paged(spec, 7001)
        data, blocks = nvfp4_regions(pool)
        d1, d2 = pool.shape[1:3]
        assert data.shape == (3, d1, d2, width // 2)
        assert blocks.shape == (3, d1, d2, width // 16)
        assert (data.dtype, blocks.dtype) == (torch.uint8, torch.float8_e4m3fn)
        assert data.stride() == (7001, d2 * width // 2, width // 2, 1)
        assert blocks.stride() == (7001, d2 * width // 16, width // 16, 1)
        assert data.data_ptr() == pool.data_ptr()
        assert blocks.data_ptr() == pool.data_ptr() + d1 * d2 * width // 2


@ways
@layouts
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_pages_hold_what_the_oracle_would_write(
    heads: int, layout: str, four_over_six: bool
) -> None:
    """Whole pages byte by byte, with as many sizes of values as there are blocks."""
    dtype = "nvfp4_4over6" if four_over_six else "nvfp4"
    rng = np.random.default_rng(heads)
    for page_size in (3, 4):
        spec = CacheSpec(1, 3, page_size, heads, 32, 64, dtype, layout)
        key_pool = torch.zeros(spec.key_shape, dtype=torch.uint8)
        value_pool = paged(spec, 4001)
        memory = value_pool._base
        assert memory is not None
        between = memory.clone()
        table = rng.uniform(0.003, 0.01, (1, 2, heads)).astype(np.float32)
        pages, sides = [2, 0], []
        for width in (32, 64):
            rows = rng.standard_normal((2 * page_size, heads, width // 16, 16), np.float32)
            sizes = 2.0 ** rng.permutation(np.linspace(-5, 1, rows[..., 0].size))
            rows *= sizes.astype(np.float32).reshape(rows.shape[:-1])[..., None]
            sides.append(rows.reshape(-1, heads, width))
        slots = [page * page_size + token for page in pages for token in range(page_size)]
        write_rows(
            torch.from_numpy(sides[0]), torch.from_numpy(sides[1]), key_pool, value_pool, spec,
            torch.tensor(slots).int(), torch.from_numpy(table), torch.tensor([0]).int(),
        )  # fmt: skip
        for rows, pool, scale in zip(sides, (key_pool, value_pool), table[0], strict=True):
            for place, page in enumerate(pages):
                held = rows[place * page_size : (place + 1) * page_size]
                want = quantised.nvfp4_page(held, scale, four_over_six, layout)
                np.testing.assert_array_equal(pool[page].reshape(-1).numpy(), want)
            # And read as tokens and heads, to which the scales belong.
            data, blocks = (token_major(region, layout)[pages] for region in nvfp4_regions(pool))
            real = dequantise_nvfp4(data, blocks, torch.from_numpy(scale))
            want = quantised.nvfp4_real(*quantised.nvfp4_bytes(rows, scale, four_over_six), scale)
            assert_real(real.reshape(rows.shape), want)
            assert np.abs(want - rows).max() < 0.2 * np.abs(rows).max()
        # Neither the page that got nothing nor what lies between pages was touched.
        assert not key_pool[1].any()
        for page in (0, 2):
            length = value_pool[page].numel()
            assert (memory[page * 4001 :][:length] != between[page * 4001 :][:length]).any()
            memory[page * 4001 :][:length] = between[page * 4001 :][:length]
        assert torch.equal(memory, between)


def test_strides_of_single_tokens_and_heads_mean_nothing() -> None:
    memory = torch.arange(2 * 4 * 18, dtype=torch.uint8)
    for shape, stride in (
        ((2, 4, 1, 18), (72, 18, 1, 1)),
        ((2, 1, 4, 18), (72, 5, 18, 1)),
        ((8, 1, 1, 18), (18, 1, 7, 1)),
    ):
        data, blocks = nvfp4_regions(memory.as_strided(shape, stride))
        pages = memory.view(shape[0], -1)
        cut = pages.shape[1] * 8 // 9
        assert torch.equal(data.reshape(shape[0], -1), pages[:, :cut])
        assert torch.equal(blocks.reshape(shape[0], -1).view(torch.uint8), pages[:, cut:])


@pytest.mark.parametrize(
    ("pool", "what"),
    [
        (torch.zeros(3, 4, 4, 18)[:, :, ::2], "side by side"),
        (torch.zeros(3, 8, 2, 18)[:, ::2], "side by side"),
        (torch.zeros(3, 4, 2, 27)[..., :18], "side by side"),
        (torch.zeros(3, 1, 1, 36)[..., ::2], "side by side"),
        (torch.zeros(3, 2, 4, 18).transpose(1, 2), "side by side"),
        (torch.zeros(3, 4, 2, 10), "rows of 10 bytes, want .* a multiple of 9"),
    ],
)
def test_pages_that_have_no_regions(pool: Tensor, what: str) -> None:
    with pytest.raises(ShapeError, match=f"pool: got .*{what}"):
        nvfp4_regions(pool.to(torch.uint8) if pool.is_contiguous() else as_bytes(pool))


def as_bytes(pool: Tensor) -> Tensor:
    """Bytes with the strides of `pool`."""
    assert pool._base is not None
    memory = torch.zeros(pool._base.numel(), dtype=torch.uint8)
    return memory.as_strided(pool.shape, pool.stride(), pool.storage_offset())


@pytest.mark.parametrize("dtype", [*FP8, "nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_take_the_largest_value_to_the_largest_number(dtype: str, per_head: bool) -> None:
    key = torch.tensor([[[1.0, -3.0], [0.5, 0.0]]])
    scales = calibrate_scales(key, -2 * key, dtype, per_head=per_head)
    largest = torch.tensor([[3.0, 0.5], [6.0, 1.0]])
    if not per_head:
        largest = largest.amax(1, keepdim=True).expand(2, 2)
    most = FP8[dtype][1] if dtype in FP8 else 448.0 * 6.0
    torch.testing.assert_close(scales, largest / most)


def test_calibration_over_several_batches_fills_a_cache() -> None:
    calibrator = ScaleCalibrator(2, 2, "nvfp4", per_head=True, margin=1.5)
    key = torch.ones(3, 2, 16)
    calibrator.update(0, key, 4 * key)
    calibrator.update(0, 2 * key, key)
    calibrator.update(0, key[:0], key[:0])
    scales = calibrator.scales()
    assert scales.shape == (2, 2, 2)
    expected = torch.tensor([2.0, 4.0]) * 1.5 / (448 * 6)
    torch.testing.assert_close(scales[0], expected[:, None].expand(2, 2))
    assert (scales[1] == 1.0).all()  # nothing was seen
    spec = AttentionSpec(2, 2, 16, dtype="float32")
    cache = PagedKVCache(spec, num_layers=2, num_pages=2, dtype="nvfp4", scales=scales)
    assert torch.equal(cache.scales, scales)


@pytest.mark.parametrize("dtype", [*FP8, "nvfp4"])
def test_calibrated_scales_lose_little(dtype: str) -> None:
    rows = torch.randn(200, 2, 32, generator=torch.manual_seed(0)) * torch.tensor([[1e-4], [300.0]])
    scale = calibrate_scales(rows, rows, dtype, per_head=True)[0]
    if dtype in FP8:
        real = dequantise_fp8(quantise_fp8(rows, scale, dtype), scale)
    else:
        real = dequantise_nvfp4(*quantise_nvfp4(rows, scale), scale)
    coarse = {"float8_e4m3fn": 0.04, "float8_e5m2": 0.08, "nvfp4": 0.11}[dtype]
    error = (real - rows).square().mean((0, 2)).sqrt() / rows.square().mean((0, 2)).sqrt()
    assert (error < coarse).all()
    top = rows.abs().amax((0, 2))
    torch.testing.assert_close(real.abs().amax((0, 2)), top)


def test_scales_of_next_to_nothing_are_1() -> None:
    rows = torch.full((1, 1, 16), 1e-37)
    assert (calibrate_scales(rows, torch.zeros_like(rows), "fp8") == 1.0).all()
    scales = calibrate_scales(torch.full_like(rows, 3e38), rows, "fp8", margin=2.0)
    assert 1e36 < scales[0, 0] < torch.inf


def test_samples_that_are_none() -> None:
    calibrator = ScaleCalibrator(1, 2, "fp8")
    rows = torch.ones(3, 2, 4)
    for layer in (1, -1):
        with pytest.raises(ArgumentError, match=f"layer: got {layer}, want a layer from 0 to 0"):
            calibrator.update(layer, rows, rows)
    with pytest.raises(ShapeError, match=r"value: got \[3, 1, 4\]"):
        calibrator.update(0, rows, rows[:, :1])
    broken = rows.clone()
    broken[1, 1, 2] = float("nan")
    with pytest.raises(ArgumentError, match="key: got nan in head 1, want finite"):
        calibrator.update(0, broken, rows)
    broken[1, 1, 2] = -float("inf")
    with pytest.raises(ArgumentError, match="value: got inf in head 1, want finite"):
        calibrator.update(0, rows, broken)
    assert (calibrator.scales() == 1.0).all()
    with pytest.raises(ShapeError, match=r"key: got \[3\]"):
        calibrate_scales(torch.ones(3), torch.ones(3), "fp8")


def test_calibrators_that_cannot_be() -> None:
    with pytest.raises(DTypeError, match="dtype: got bfloat16"):
        ScaleCalibrator(1, 2, "bfloat16")
    with pytest.raises(ArgumentError, match="num_kv_heads: got 0"):
        ScaleCalibrator(1, 0, "fp8")
    for margin in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"margin: got {margin}"):
            ScaleCalibrator(1, 2, "fp8", margin=margin)


def test_inference_mode_may_end_between_calls() -> None:
    spec = AttentionSpec(1, 1, 16, dtype="float32")
    rows = torch.ones(1, 1, 16)
    with torch.inference_mode():
        calibrator = ScaleCalibrator(1, 1, "fp8")
        calibrator.update(0, rows.clone(), rows.clone())
        given = torch.tensor([2.0, 3.0])
        caches = [
            PagedKVCache(spec, num_layers=1, num_pages=2, dtype="fp8", scales=scales)
            for scales in (None, (2.0, 3.0), given, (given[0], given[1]), calibrator.scales())
        ]
    calibrator.update(0, 2 * rows, rows)
    expected = torch.tensor([2.0, 1.0]) / 448
    torch.testing.assert_close(calibrator.scales().flatten(), expected)
    for cache in caches:
        cache.set_scales((5.0, 6.0))
        assert cache.scales is not None
        assert cache.scales.flatten().tolist() == [5.0, 6.0]


def fp8_spec(layers: int, heads: int) -> CacheSpec:
    return CacheSpec(layers, 2, 4, heads, 16, dtype="fp8")


def ramp(*shape: int) -> Array:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float64).reshape(shape)


@pytest.mark.parametrize(("layers", "heads"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_scales_in_all_their_shapes(layers: int, heads: int) -> None:
    spec = fp8_spec(layers, heads)
    shape = (layers, 2, heads)
    by_layer, by_head = ramp(layers), ramp(layers, heads)
    cases: list[tuple[Any, Array]] = [
        (None, np.ones(shape)),
        (2.5, np.full(shape, 2.5)),
        (np.float64(3.0), np.full(shape, 3.0)),
        ((2, 3.0), np.broadcast_to([[2.0], [3.0]], shape)),
        ([2.0, 3.0], np.broadcast_to([[2.0], [3.0]], shape)),
        (np.array([2.0, 3.0]), np.broadcast_to([[2.0], [3.0]], shape)),
        (ramp(layers, 2), np.broadcast_to(ramp(layers, 2)[..., None], shape)),
        (ramp(layers, 2).tolist(), np.broadcast_to(ramp(layers, 2)[..., None], shape)),
        (ramp(*shape), ramp(*shape)),
        # A tuple has keys first, whatever the number of layers.
        ((by_head, 100 * by_head), np.stack([by_head, 100 * by_head], 1)),
        ((2.0, by_head), np.stack([np.full_like(by_head, 2.0), by_head], 1)),
        (
            (by_layer, 100 * by_layer),
            np.broadcast_to(np.stack([by_layer, 100 * by_layer], 1)[..., None], shape),
        ),
    ]
    for scales, want in cases:
        table = check_scales(scales, spec)
        assert table.dtype == torch.float32
        assert table.is_contiguous()
        np.testing.assert_array_equal(table.numpy(), want)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: torch.tensor(x, dtype=torch.float64),
        lambda x: torch.tensor(x, dtype=torch.bfloat16),
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: np.array(x).astype(ml_dtypes.bfloat16),
        jnp.asarray,
    ],
)
def test_scales_of_every_kind_are_copied(kind: Any) -> None:
    spec = fp8_spec(2, 2)
    whole = kind(ramp(2, 2, 2).tolist())
    for scales in (whole, (kind(ramp(2).tolist()), kind(ramp(2).tolist()))):
        table = check_scales(scales, spec)
        assert not table.requires_grad
        before = table.clone()
        table.fill_(7.0)
        assert torch.equal(check_scales(scales, spec), before)


@pytest.mark.parametrize(
    ("scales", "what"),
    [
        (np.ones(4), r"got shape \[4\]"),
        (np.ones((2, 3)), r"got shape \[2, 3\]"),
        (np.ones((3, 4)), r"got shape \[3, 4\]"),
        (np.ones((2, 3, 4)), r"got shape \[2, 3, 4\]"),
        (np.ones((3, 2, 1)), r"got shape \[3, 2, 1\]"),
        (np.ones((1, 3, 2, 4)), r"got shape \[1, 3, 2, 4\]"),
        ((1.0,), r"got a tuple of shapes \[\[\]\]"),
        ((1.0, 1.0, 1.0), r"got a tuple of shapes \[\[\], \[\], \[\]\]"),
        ((1.0, np.ones(4)), r"got a tuple of shapes \[\[\], \[4\]\]"),
        ((np.ones((4, 3)), 1.0), r"got a tuple of shapes \[\[4, 3\], \[\]\]"),
        ("large", "got 'large'"),
        ([[1.0], [1.0, 2.0]], "got .*, want numbers"),
        ((1.0, None), r"got a tuple|nan for values"),
    ],
)
def test_scales_of_other_shapes(scales: Any, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        check_scales(scales, fp8_spec(3, 4))


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (-2.0, "-2.0"),
        (np.nan, "nan"),
        (np.inf, "inf"),
        (-np.inf, "-inf"),
        (1e39, "inf"),  # as float32
        (1e36, "9.99.*e.35"),
        (1e-39, "1.0.*e-39"),
        (1e-60, "0.0"),
    ],
)
def test_scales_that_are_no_positive_numbers(wrong: float, shown: str) -> None:
    table = np.ones((3, 2, 4))
    table[2, 1, 3] = wrong
    what = f"scales: got ({shown}) for values of head 3 in layer 2, want a number from"
    with pytest.raises(ArgumentError, match=what):
        check_scales(table, fp8_spec(3, 4))
    with pytest.raises(ArgumentError, match="for keys of head 0 in layer 0"):
        check_scales((wrong, 1.0), fp8_spec(3, 4))
