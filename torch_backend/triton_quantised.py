"""Triton kernels of quantised caches: the NVFP4 writer, and scales on queries and outputs.

`triton_ops` has the rest, and everything that this module offers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_items import OPTIONS, load_items, none_of, scales_of_one, store_items, tile

__all__ = [
    "append_nvfp4",
    "append_nvfp4_kernel",
    "nvfp4_constants",
    "nvfp4_grid",
    "scale_output",
    "scale_query",
    "warm_append_nvfp4",
    "warm_scale",
]

# Blocks of 16 values that a program quantises.
NVFP4_BLOCKS = 128


@triton.jit
def _sum_of_16(terms, BLOCKS: tl.constexpr):
    """Sum ``[BLOCKS, 16]`` along its rows, from the first element to the last.

    ``tl.sum`` adds in an order of the compiler's. Each split parts elements of even and of odd
    place, so after four of them every element is a tensor of its own.
    """
    even, odd = tl.split(tl.reshape(terms, (BLOCKS, 8, 2)))
    e0, e2 = tl.split(tl.reshape(even, (BLOCKS, 4, 2)))
    e1, e3 = tl.split(tl.reshape(odd, (BLOCKS, 4, 2)))
    e0, e4 = tl.split(tl.reshape(e0, (BLOCKS, 2, 2)))
    e1, e5 = tl.split(tl.reshape(e1, (BLOCKS, 2, 2)))
    e2, e6 = tl.split(tl.reshape(e2, (BLOCKS, 2, 2)))
    e3, e7 = tl.split(tl.reshape(e3, (BLOCKS, 2, 2)))
    e0, e8 = tl.split(e0)
    e1, e9 = tl.split(e1)
    e2, e10 = tl.split(e2)
    e3, e11 = tl.split(e3)
    e4, e12 = tl.split(e4)
    e5, e13 = tl.split(e5)
    e6, e14 = tl.split(e6)
    e7, e15 = tl.split(e7)
    first = e0 + e1 + e2 + e3 + e4 + e5 + e6 + e7
    return first + e8 + e9 + e10 + e11 + e12 + e13 + e14 + e15


@triton.jit
def _e2m1(magnitude, largest, scale, TOP: tl.constexpr, BLOCKS: tl.constexpr):
    """Quantise magnitudes ``[BLOCKS, 16]`` so that the largest of a block becomes ``TOP``.

    Returns block scales ``[BLOCKS]``, what 1 stands for with them ``[BLOCKS]``, rounded magnitudes
    (0, 0.5, 1, 1.5, 2, 3, 4 or 6), and the sum of squared errors ``[BLOCKS]``.
    """
    wanted = tl.div_rn(tl.div_rn(largest, TOP), scale)
    # Comparisons with NaN are false, so that NaN stays.
    block_scale = tl.where(wanted > 448.0, 448.0, wanted).to(tl.float8e4nv)
    step = block_scale.to(tl.float32) * scale
    # Neither where the scale is too small for e4m3, nor where a value is NaN.
    some = step > 0.0
    steps = tl.div_rn(magnitude, tl.where(some, step, 1.0)[:, None])
    steps = tl.where(some[:, None], steps, 0.0)
    # Next to such a power of 2, float32 has neighbours 0.5, 1 and 2 apart, as e2m1 has below 2,
    # below 4 and from 4 on; so the addition rounds, to nearest and half-way cases to even.
    power = tl.where(steps < 2.0, 4194304.0, tl.where(steps < 4.0, 8388608.0, 16777216.0))
    rounded = (steps + power) - power
    rounded = tl.where(rounded > 6.0, 6.0, rounded)
    miss = rounded * step[:, None] - magnitude
    return block_scale, step, rounded, _sum_of_16(miss * miss, BLOCKS)


@triton.jit
def _append_nvfp4_side(
    values, pool, slots, scale_table, scale_layer, count,
    SIDE: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, TOKEN: tl.constexpr, HEAD: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` writes blocks of 16 values from ``i * BLOCKS`` on."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // (HEADS * (WIDTH // 16))
    head = block // (WIDTH // 16) % HEADS
    within = block % (WIDTH // 16)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=-1)
    scale = tl.load(scale_table + (tl.load(scale_layer) * 2 + SIDE) * HEADS + head)
    element = block.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(values + element, mask=inside[:, None], other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    # The largest magnitude as an integer, among which NaN is the largest and so is kept.
    largest = tl.max(bits & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    magnitude = tl.abs(x)
    block_scale, step, rounded, error = _e2m1(magnitude, largest, scale, 6.0, BLOCKS)
    if FOUR_OVER_SIX:
        scale_4, step_4, rounded_4, error_4 = _e2m1(magnitude, largest, scale, 4.0, BLOCKS)
        better = error_4 < error
        block_scale = tl.where(better, scale_4, block_scale)
        step = tl.where(better, step_4, step)
        rounded = tl.where(better[:, None], rounded_4, rounded)
    # 2**-126 takes e2m1's exponents to where float32 has the same bits, subnormal numbers included.
    code = (rounded * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    code = code | tl.where((step > 0.0)[:, None], (bits >> 28) & 8, 0)
    low, high = tl.split(tl.reshape(code, (BLOCKS, 8, 2)))
    packed = (low | (high << 4)).to(tl.uint8)
    # A page holds the data of all its rows, then all their block scales.
    live = slot >= 0
    start = (slot // PAGE_SIZE).to(tl.int64) * PAGE
    place = ((slot % PAGE_SIZE) * TOKEN + head * HEAD) * (WIDTH // 16) + within
    data = pool + start + place * 8
    tl.store(data[:, None] + tl.arange(0, 8)[None, :], packed, mask=live[:, None])
    scales = pool + start + PAGE_SIZE * HEADS * (WIDTH // 2) + place
    tl.store(scales, block_scale.to(tl.uint8, bitcast=True), mask=live)


@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("slots", "scale_table", "scale_layer"),
)
def append_nvfp4_kernel(
    key, value, slots, scale_table, scale_layer, key_pool, value_pool, count,
    key_result, value_result,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PAGE: tl.constexpr, VALUE_PAGE: tl.constexpr,
    TOKEN: tl.constexpr, HEAD: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` writes blocks ``i * BLOCKS`` on of ``count`` rows of key and value.

    ``key_result`` and ``value_result`` are the pools once more, as in `triton_ops.append_kernel`.
    """
    _append_nvfp4_side(
        key, key_pool, slots, scale_table, scale_layer, count,
        0, HEADS, PAGE_SIZE, KEY_WIDTH, KEY_PAGE, TOKEN, HEAD, FOUR_OVER_SIX, BLOCKS,
    )  # fmt: skip
    _append_nvfp4_side(
        value, value_pool, slots, scale_table, scale_layer, count,
        1, HEADS, PAGE_SIZE, VALUE_WIDTH, VALUE_PAGE, TOKEN, HEAD, FOUR_OVER_SIX, BLOCKS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("scale_table", "scale_layer"),
)
def _scale_rows(
    rows, scaled, scale_table, scale_layer, count,
    SIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ITEMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` scales items ``i * ITEMS`` on of ``[count, HEADS, WIDTH]``."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item // HEADS < count
    head = item % HEADS // (HEADS // KV_HEADS)
    scale = tl.load(scale_table + (tl.load(scale_layer) * 2 + SIDE) * KV_HEADS + head)
    place = item.to(tl.int64) * WIDTH
    items = load_items(rows, place, live, WIDTH, COLUMNS).to(tl.float32) * scale[:, None]
    store_items(scaled, place, items.to(scaled.dtype.element_ty), live, WIDTH, COLUMNS)


def append_nvfp4(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    *,
    layout: str,
    four_over_six: bool,
    scale_table: Tensor,
    scale_layer: Tensor,
) -> None:
    """Quantise row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    `quantising.quantise_nvfp4` says how; this leaves the same bytes.

    Parameters
    ----------
    key, value
        ``[rows, heads, width]``, contiguous, at least as many rows as slots, of any float type;
        ``width`` is a multiple of 16.
    key_pool, value_pool
        ``[pages, page_size, heads, width / 2 + width / 16]`` (``"NHD"``) or
        ``[pages, heads, page_size, width / 2 + width / 16]`` (``"HND"``) uint8, where each page's
        bytes lie side by side: first all data, then all block scales. Any page stride.
    slots
        ``[slots]`` int32.
    layout
        ``"NHD"`` or ``"HND"``.
    four_over_six
        Whether a block may be scaled so that its largest value becomes 4 and not 6, where that
        makes the smaller squared error.
    scale_table, scale_layer
        Global scales ``[layers, 2, heads]`` float32, and ``[1]`` int32 on the device, which layer's
        to use.
    """
    page_size, heads = key_pool.shape[1:3] if layout == "NHD" else key_pool.shape[2:0:-1]
    constants = nvfp4_constants(
        page_size, heads, (key.shape[2], value.shape[2]),
        (key_pool.stride(0), value_pool.stride(0)), layout, four_over_six,
    )  # fmt: skip
    append_nvfp4_kernel[nvfp4_grid(slots.shape[0], constants)](
        key, value, slots, scale_table, scale_layer, key_pool, value_pool, slots.shape[0],
        key_pool, value_pool, **constants,
    )  # fmt: skip


@lru_cache(maxsize=256)
def nvfp4_constants(
    page_size: int,
    heads: int,
    widths: tuple[int, int],
    page_strides: tuple[int, int],
    layout: str,
    four_over_six: bool,
) -> dict[str, Any]:
    """Return what `append_nvfp4_kernel` is compiled for, by name; the same in both frameworks."""
    return {
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "KEY_WIDTH": widths[0],
        "VALUE_WIDTH": widths[1],
        "KEY_PAGE": page_strides[0],
        "VALUE_PAGE": page_strides[1],
        "TOKEN": heads if layout == "NHD" else 1,
        "HEAD": 1 if layout == "NHD" else page_size,
        "FOUR_OVER_SIX": four_over_six,
        "BLOCKS": NVFP4_BLOCKS,
        **OPTIONS,
    }


def nvfp4_grid(count: int, constants: dict[str, Any]) -> tuple[int]:
    """Return how many programs of `append_nvfp4_kernel` write `count` rows."""
    width = max(constants["KEY_WIDTH"], constants["VALUE_WIDTH"])
    return (triton.cdiv(count * constants["HEADS"] * width, 16 * constants["BLOCKS"]),)


def scale_query(query: Tensor, scaled: Tensor, scale_table: Tensor, scale_layer: Tensor) -> None:
    """Multiply a query by the scale of the keys that it will meet.

    Parameters
    ----------
    query, scaled
        ``[tokens, num_qo_heads, head_dim]``, contiguous; `scaled` is written, and may be `query`.
        The product is computed in float32.
    scale_table, scale_layer
        ``[layers, 2, num_kv_heads]`` float32, and ``[1]`` int32 on the device, which layer's scales
        to use.
    """
    _scale(query, scaled, 0, scale_table, scale_layer)


def scale_output(out: Tensor, scale_table: Tensor, scale_layer: Tensor) -> None:
    """Multiply an output ``[tokens, num_qo_heads, head_dim_v]`` by its values' scale, in place.

    Parameters and arithmetic are those of `scale_query`.
    """
    _scale(out, out, 1, scale_table, scale_layer)


def _scale(
    rows: Tensor, scaled: Tensor, side: int, scale_table: Tensor, scale_layer: Tensor
) -> None:
    tokens, heads, width = rows.shape
    items = tile(width, scaled.dtype)
    _scale_rows[(triton.cdiv(tokens * heads, items),)](
        rows, scaled, scale_table, scale_layer, tokens,
        SIDE=side, HEADS=heads, KV_HEADS=scale_table.shape[2], WIDTH=width,
        ITEMS=items, COLUMNS=triton.next_power_of_2(width), **OPTIONS,
    )  # fmt: skip


def warm_append_nvfp4(
    key_pool: Tensor,
    value_pool: Tensor,
    row_dtype: torch.dtype,
    *,
    layout: str,
    four_over_six: bool,
) -> None:
    """Load `append_nvfp4` for these pools and rows of `row_dtype`."""
    heads = key_pool.shape[2 if layout == "NHD" else 1]
    # Of 9 bytes, 8 are 16 values and 1 is their scale.
    key, value = (
        key_pool.new_empty((1, heads, pool.shape[3] // 9 * 16), dtype=row_dtype)
        for pool in (key_pool, value_pool)
    )
    append_nvfp4(
        key, value, key_pool, value_pool, none_of(key_pool),
        layout=layout, four_over_six=four_over_six, **scales_of_one(key_pool, heads),
    )  # fmt: skip


def warm_scale(query: Tensor, out: Tensor, num_kv_heads: int) -> None:
    """Load `scale_query` and `scale_output` for tensors like these, which stay as they are."""
    scales = scales_of_one(query, num_kv_heads)
    scale_query(query[:0], query[:0], **scales)
    scale_output(out[:0], **scales)
