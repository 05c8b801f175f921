"""Formats of quantised caches against ml_dtypes, and scales from samples."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays

from interop import AttentionSpec
from interop.errors import ArgumentError, DTypeError, ShapeError
from torch_backend import PagedKVCache, ScaleCalibrator, calibrate_scales
from torch_backend.quantising import (
    dequantise_fp8,
    dequantise_nvfp4,
    nvfp4_regions,
    quantise_fp8,
    quantise_nvfp4,
)

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
eight_bits = pytest.mark.parametrize("dtype", LARGEST)

# Of every magnitude, with many that lie between two numbers of a format.
NUMBERS = st.one_of(
    st.floats(-1e5, 1e5, width=32),
    st.sampled_from([0.0, -0.0, 448.0, 464.0, 465.0, 2.0**-10, 2.0**-9, 3 * 2.0**-11, 57344.0]),
    st.builds(lambda i, e: float(i * 2.0**e), st.integers(-63, 63), st.integers(-12, 8)),
)
ROWS = arrays(np.float32, (3, 2, 16), elements=NUMBERS)
SCALES = arrays(np.float32, 2, elements=st.floats(0.0078125, 64.0, width=32))


@eight_bits
@given(rows=ROWS, scale=SCALES)
def test_8_bits_are_those_of_ml_dtypes(dtype: str, rows: Any, scale: Any) -> None:
    stored = quantise_fp8(torch.from_numpy(rows), torch.from_numpy(scale), dtype)
    scaled = np.clip(rows / scale[:, None], -LARGEST[dtype], LARGEST[dtype])
    want = scaled.astype(getattr(ml_dtypes, dtype))
    assert stored.view(torch.uint8).numpy().tobytes() == want.tobytes()
    real = dequantise_fp8(stored, torch.from_numpy(scale)).numpy()
    np.testing.assert_array_equal(real, want.astype(np.float32) * scale[:, None])


@eight_bits
def test_what_is_no_number_stays_none(dtype: str) -> None:
    rows = torch.tensor([[[float("nan"), -float("nan"), float("inf"), -float("inf")]]])
    real = dequantise_fp8(quantise_fp8(rows, torch.ones(1), dtype), torch.ones(1))
    assert real[0, 0, :2].isnan().all()
    assert real[0, 0, 2:].tolist() == [LARGEST[dtype], -LARGEST[dtype]]


def block_by_hand(block: Any, scale: np.float32, divisor: float) -> tuple[Any, Any]:
    """Block scale and real numbers of 16 values: each value's nearest code is searched for."""
    largest = np.abs(block).max()
    wanted = np.minimum(largest / np.float32(divisor) / scale, np.float32(448))
    block_scale = wanted.astype(ml_dtypes.float8_e4m3fn)
    step = np.float32(block_scale) * scale
    real = []
    for value in block:
        size = 0.0 if step == 0 else float(np.abs(value) / step)
        distance = np.abs(E2M1 - size)
        nearest = np.flatnonzero(distance == distance.min())
        code = min(nearest, key=lambda code: code % 2)  # ties to even
        real.append(np.copysign(np.float32(E2M1[code]) * step, value))
    return block_scale, np.array(real, np.float32)


@given(rows=arrays(np.float32, (2, 2, 32), elements=NUMBERS), scale=SCALES)
def test_nvfp4_takes_the_nearest_number(rows: Any, scale: Any) -> None:
    data, blocks = quantise_nvfp4(torch.from_numpy(rows), torch.from_numpy(scale))
    assert data.shape == (2, 2, 16)
    assert blocks.shape == (2, 2, 2)
    real = dequantise_nvfp4(data, blocks, torch.from_numpy(scale)).numpy()
    stored = blocks.view(torch.uint8).numpy()
    for token, head, block in itertools.product(range(2), repeat=3):
        values = rows[token, head, 16 * block : 16 * block + 16]
        block_scale, want = block_by_hand(values, scale[head], 6.0)
        assert stored[token, head, block] == np.array(block_scale).view(np.uint8)
        got = real[token, head, 16 * block : 16 * block + 16]
        np.testing.assert_array_equal(got, want)


@given(rows=arrays(np.float32, (2, 1, 32), elements=NUMBERS), scale=SCALES)
def test_four_over_six_takes_the_scale_of_the_smaller_error(rows: Any, scale: Any) -> None:
    one = torch.from_numpy(scale[:1])
    values = torch.from_numpy(rows)
    real = dequantise_nvfp4(*quantise_nvfp4(values, one, four_over_six=True), one).numpy()
    for token, block in itertools.product(range(2), repeat=2):
        place = (token, 0, slice(16 * block, 16 * block + 16))
        ways = [block_by_hand(rows[place], scale[0], divisor)[1] for divisor in (6.0, 4.0)]
        errors = [float(((way - rows[place]) ** 2).astype(np.float64).sum()) for way in ways]
        mine = float(((real[place] - rows[place]) ** 2).astype(np.float64).sum())
        assert mine <= min(errors) * (1 + 1e-5)


def test_four_over_six_is_better_on_average() -> None:
    values, scale = torch.randn(256, 1, 64, generator=torch.manual_seed(0)), torch.ones(1) / 100
    errors = [
        float((dequantise_nvfp4(*quantise_nvfp4(values, scale, four_over_six=way), scale) - values)
              .square().mean())
        for way in (False, True)
    ]  # fmt: skip
    assert errors[1] < 0.95 * errors[0]


def test_zeros_are_stored_as_zeros() -> None:
    data, blocks = quantise_nvfp4(torch.zeros(1, 1, 16), torch.ones(1))
    assert not data.any()
    assert not blocks.view(torch.uint8).any()


def test_a_width_that_has_no_blocks() -> None:
    with pytest.raises(ShapeError, match="heads of 24, want a multiple of 16"):
        quantise_nvfp4(torch.ones(1, 1, 24), torch.ones(1))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_regions_of_a_page(heads: int) -> None:
    """Data of the whole page, then its block scales; also where pages are far apart."""
    page_size, width = 4, 32
    row = width // 2 + width // 16
    storage = torch.arange(3 * 1000, dtype=torch.int64).to(torch.uint8)
    pool = storage.as_strided((3, page_size, heads, row), (1000, heads * row, row, 1))
    data, blocks = nvfp4_regions(pool)
    assert data.shape == (3, page_size, heads, 16)
    assert blocks.shape == (3, page_size, heads, 2)
    assert blocks.dtype == torch.float8_e4m3fn
    for page in range(3):
        inside = storage[1000 * page : 1000 * page + page_size * heads * row]
        cut = page_size * heads * 16
        assert torch.equal(data[page].flatten(), inside[:cut])
        assert torch.equal(blocks[page].contiguous().view(torch.uint8).flatten(), inside[cut:])
    with pytest.raises(ShapeError, match="side by side"):
        nvfp4_regions(torch.zeros(3, page_size, 2 * heads, row, dtype=torch.uint8)[:, :, ::2])


@eight_bits
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_take_the_largest_value_to_the_largest_number(dtype: str, per_head: bool) -> None:
    key = torch.tensor([[[1.0, -3.0], [0.5, 0.0]]])
    scales = calibrate_scales(key, -2 * key, dtype, per_head=per_head)
    largest = torch.tensor([[3.0, 0.5], [6.0, 1.0]])
    if not per_head:
        largest = largest.amax(1, keepdim=True).expand(2, 2)
    torch.testing.assert_close(scales, largest / LARGEST[dtype])


def test_calibration_over_several_batches_fills_a_cache() -> None:
    calibrator = ScaleCalibrator(2, 2, "nvfp4", per_head=True, margin=1.5)
    key = torch.ones(3, 2, 16)
    calibrator.update(0, key, 4 * key)
    calibrator.update(0, 2 * key, key)
    scales = calibrator.scales()
    assert scales.shape == (2, 2, 2)
    expected = torch.tensor([2.0, 4.0]) * 1.5 / (448 * 6)
    torch.testing.assert_close(scales[0], expected[:, None].expand(2, 2))
    assert (scales[1] == 1.0).all()  # nothing was seen
    spec = AttentionSpec(2, 2, 16, dtype="float32")
    cache = PagedKVCache(spec, num_layers=2, num_pages=2, dtype="nvfp4", scales=scales)
    assert torch.equal(cache.scales, scales)


def test_samples_that_are_none() -> None:
    calibrator = ScaleCalibrator(1, 2, "fp8")
    rows = torch.ones(3, 2, 4)
    with pytest.raises(ArgumentError, match="layer: got 1, want a layer from 0 to 0"):
        calibrator.update(1, rows, rows)
    with pytest.raises(ShapeError, match=r"value: got \[3, 1, 4\]"):
        calibrator.update(0, rows, rows[:, :1])
    broken = rows.clone()
    broken[1, 1, 2] = float("nan")
    with pytest.raises(ArgumentError, match="key: got nan in head 1, want finite"):
        calibrator.update(0, broken, rows)
    assert (calibrator.scales() == 1.0).all()
    with pytest.raises(DTypeError, match="dtype: got bfloat16"):
        ScaleCalibrator(1, 2, "bfloat16")
