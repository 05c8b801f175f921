"""Formats of quantised caches in NumPy: the bytes that writers have to leave, and what they mean.

Nothing here imports the packages under test and nothing in them imports this file. Conversions to 8
and 4 bits are those of ml_dtypes, which round to nearest, ties to even. Bytes come from float32
arithmetic, one operation at a time; what they stand for is float64.

Rows are ``[..., heads, width]``, scales ``[heads]`` float32, and what is stored is uint8.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

FP8 = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
NOT_A_NUMBER = 0x7F  # in either of them; a GPU writes no other


def fp8_bytes(rows: Array, scale: Array, dtype: str) -> Array:
    """Bytes of rows; what is too large becomes the largest number."""
    kind, most = FP8[dtype]
    with np.errstate(all="ignore"):
        scaled = rows.astype(F32) / scale[:, None]
        stored = np.clip(scaled, -most, most).astype(kind)
    codes: Array = np.where(np.isnan(scaled), np.uint8(NOT_A_NUMBER), stored.view(np.uint8))
    return codes


def fp8_real(stored: Array, scale: Array, dtype: str) -> Array:
    real: Array = stored.view(FP8[dtype][0]).astype(np.float64) * scale[:, None]
    return real


def _blocks(rows: Array, scale: Array, top: float) -> tuple[Array, Array, Array]:
    """Codes ``[..., 16]``, block scales and errors ``[..., 1]``, if the largest becomes `top`."""
    largest = np.abs(rows).max(-1, keepdims=True)
    wanted = np.minimum(largest / F32(top) / scale, F32(448.0))
    block_scale = wanted.astype(ml_dtypes.float8_e4m3fn)
    step = block_scale.astype(F32) * scale
    with_size = step > 0.0  # false of NaN, too
    scaled = np.where(with_size, rows / np.where(with_size, step, F32(1.0)), F32(0.0))
    stored = scaled.astype(ml_dtypes.float4_e2m1fn)
    missed = np.abs(stored.astype(F32)) * step - np.abs(rows)
    # A sum pairs its terms; the last of the running sums has added them one by one.
    error = np.cumsum(missed * missed, axis=-1, dtype=F32)[..., -1:]
    scales = np.where(np.isnan(wanted), np.uint8(NOT_A_NUMBER), block_scale.view(np.uint8))
    return stored.view(np.uint8) & 15, scales, error


def nvfp4_bytes(rows: Array, scale: Array, four_over_six: bool) -> tuple[Array, Array]:
    """Data ``[..., heads, width / 2]`` and block scales ``[..., heads, width / 16]``."""
    rows = rows.astype(F32).reshape(*rows.shape[:-1], -1, 16)
    scale = scale[:, None, None]
    with np.errstate(all="ignore"):
        codes, scales, error = _blocks(rows, scale, 6.0)
        if four_over_six:
            other_codes, other_scales, other_error = _blocks(rows, scale, 4.0)
            codes = np.where(other_error < error, other_codes, codes)
            scales = np.where(other_error < error, other_scales, scales)
    codes = codes.reshape(*codes.shape[:-2], -1)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scales[..., 0]


def nvfp4_real(data: Array, scales: Array, scale: Array) -> Array:
    codes = np.stack((data % 16, data // 16), axis=-1).reshape(*scales.shape, 16)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    real = values * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[..., None]
    wide: Array = real.reshape(*scales.shape[:-1], -1) * scale[:, None]
    return wide


def nvfp4_page(rows: Array, scale: Array, four_over_six: bool, layout: str) -> Array:
    """All bytes of one side of a page that holds rows ``[page_size, heads, width]``."""
    regions = nvfp4_bytes(rows, scale, four_over_six)
    if layout == "HND":
        regions = (regions[0].swapaxes(0, 1), regions[1].swapaxes(0, 1))
    return np.concatenate([region.ravel() for region in regions])
