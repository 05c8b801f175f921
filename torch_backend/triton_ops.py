"""Triton kernels, written once; PyTorch launches them directly and JAX through jax-triton.

Import this module only where Triton is installed: it comes with the ``cuda`` extra. Nothing here
allocates or waits when it launches. Loading a kernel while a stream is being captured fails, so
each function has a ``warm_`` beside it that loads what the function launches and changes no tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_items import (
    OPTIONS,
    load_items,
    none_of,
    scales_of_one,
    store_items,
    tile,
)
from .triton_quantised import (
    append_nvfp4,
    scale_output,
    scale_query,
    warm_append_nvfp4,
    warm_scale,
)

__all__ = [
    "append",
    "append_constants",
    "append_grid",
    "append_kernel",
    "append_nvfp4",
    "gather",
    "scale_output",
    "scale_query",
    "warm_append",
    "warm_append_nvfp4",
    "warm_gather",
    "warm_scale",
]

Strides = tuple[int, int, int]

# Largest finite value of each 8-bit type; what lies beyond is stored as that.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _to_fp8(items, scale, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``items / scale``, saturated and rounded to nearest even; NaN stays NaN."""
    # Not ``/``, which is approximate on a GPU.
    stored = tl.div_rn(items.to(tl.float32), scale[:, None])
    return tl.clamp(stored, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("slots", "scale_table", "scale_layer"),
)
def append_kernel(
    key, value, slots, scale_table, scale_layer, key_pool, value_pool, count,
    key_result, value_result,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, LARGEST: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    ITEMS: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` writes items ``i * ITEMS`` on of ``count`` rows of key and of value.

    ``key_result`` and ``value_result`` are the pools once more: jax-triton passes results as
    arguments of their own. Where ``LARGEST`` is 0, rows are stored as they are, and no scale is
    read.
    """
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = item // HEADS
    head = (item % HEADS).to(tl.int64)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=-1)
    # Both loads come before the first store, and neither waits for the slots.
    place = item.to(tl.int64)
    keys = load_items(key, place * KEY_WIDTH, inside, KEY_WIDTH, KEY_COLUMNS)
    values = load_items(value, place * VALUE_WIDTH, inside, VALUE_WIDTH, VALUE_COLUMNS)
    if LARGEST > 0.0:
        scales = scale_table + tl.load(scale_layer) * (2 * HEADS) + head
        keys = _to_fp8(keys, tl.load(scales), LARGEST, key_pool.dtype.element_ty)
        values = _to_fp8(values, tl.load(scales + HEADS), LARGEST, value_pool.dtype.element_ty)
    live = slot >= 0
    page = (slot // PAGE_SIZE).to(tl.int64)
    token = (slot % PAGE_SIZE).to(tl.int64)
    place = page * KEY_PAGE + token * KEY_TOKEN + head * KEY_HEAD
    store_items(key_pool, place, keys, live, KEY_WIDTH, KEY_COLUMNS)
    place = page * VALUE_PAGE + token * VALUE_TOKEN + head * VALUE_HEAD
    store_items(value_pool, place, values, live, VALUE_WIDTH, VALUE_COLUMNS)


@triton.jit(
    do_not_specialize_on_alignment=("page_indices", "valid_tokens", "scale_table", "scale_layer")
)
def _gather(
    key_pool, value_pool, page_indices, valid_tokens, key_rows, value_rows,
    scale_table, scale_layer,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    ITEMS: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, b)`` copies block ``b`` of page ``page_indices[i]`` to place ``i``."""
    entry = tl.program_id(0).to(tl.int64)
    valid = tl.load(valid_tokens + entry)
    if valid >= 0:
        page = tl.load(page_indices + entry).to(tl.int64)
        item = tl.program_id(1) * ITEMS + tl.arange(0, ITEMS)
        token = (item // HEADS).to(tl.int64)
        head = (item % HEADS).to(tl.int64)
        live = token < valid
        place = page * KEY_PAGE + token * KEY_TOKEN + head * KEY_HEAD
        keys = load_items(key_pool, place, live, KEY_WIDTH, KEY_COLUMNS)
        place = page * VALUE_PAGE + token * VALUE_TOKEN + head * VALUE_HEAD
        values = load_items(value_pool, place, live, VALUE_WIDTH, VALUE_COLUMNS)
        if SCALED:
            scales = scale_table + tl.load(scale_layer) * (2 * HEADS) + head
            keys = keys.to(tl.float32) * tl.load(scales)[:, None]
            values = values.to(tl.float32) * tl.load(scales + HEADS)[:, None]
        keys = tl.where(live[:, None], keys.to(key_rows.dtype.element_ty), 0.0)
        values = tl.where(live[:, None], values.to(value_rows.dtype.element_ty), 0.0)
        inside = token < PAGE_SIZE
        place = entry * (PAGE_SIZE * HEADS) + item
        store_items(key_rows, place * KEY_WIDTH, keys, inside, KEY_WIDTH, KEY_COLUMNS)
        store_items(value_rows, place * VALUE_WIDTH, values, inside, VALUE_WIDTH, VALUE_COLUMNS)


def append(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    *,
    scale_table: Tensor | None = None,
    scale_layer: Tensor | None = None,
) -> None:
    """Write row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    A program reads one or more whole tokens where heads and width allow: with 8 heads of 128 and
    16-bit pools, 2 KiB of key and 2 KiB of value, and writes as many.

    Parameters
    ----------
    key, value
        ``[rows, heads, width]``, contiguous, at least as many rows as slots.
    key_pool, value_pool
        ``[pages, page_size, heads, width]`` as views of any strides whose last is 1; the two
        may differ in width and strides. Their dtype is that of the rows, or float8_e4m3fn or
        float8_e5m2: then ``row / scale`` is stored, saturated and rounded to nearest even, and NaN
        stays NaN.
    slots
        ``[slots]`` int32.
    scale_table, scale_layer
        Of a quantised cache: ``[layers, 2, heads]`` float32, and ``[1]`` int32 on the device, which
        layer's scales to use.
    """
    _, page_size, heads, key_width = key_pool.shape
    constants = append_constants(
        page_size, heads, (key_width, value_pool.shape[3]),
        key_pool.stride()[:3], value_pool.stride()[:3], key_pool.dtype,
    )  # fmt: skip
    count = slots.shape[0]
    append_kernel[append_grid(count, constants)](
        key, value, slots, scale_table, scale_layer, key_pool, value_pool, count,
        key_pool, value_pool, **constants,
    )  # fmt: skip


def gather(
    key_pool: Tensor,
    value_pool: Tensor,
    page_indices: Tensor,
    valid_tokens: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    scale_table: Tensor | None = None,
    scale_layer: Tensor | None = None,
) -> None:
    """Copy pages to rows that follow one another: entry ``i`` to rows from ``i * page_size`` on.

    Parameters
    ----------
    key_pool, value_pool
        ``[pages, page_size, heads, width]`` as views of any strides whose last is 1.
    page_indices, valid_tokens
        ``[entries]`` int32: pages, and how many of their tokens to copy. The rows of the others
        become 0; an entry of -1 leaves its rows as they are.
    key_rows, value_rows
        ``[entries * page_size, heads, width]``, contiguous, in the dtype of the pools.
    scale_table, scale_layer
        As for `append`. With them, rows of any float type become ``stored * scale``, computed in
        float32.
    """
    _, page_size, heads, key_width = key_pool.shape
    constants = _item_constants(
        page_size, heads, (key_width, value_pool.shape[3]),
        key_pool.stride()[:3], value_pool.stride()[:3], key_rows.dtype,
    )  # fmt: skip
    blocks = triton.cdiv(page_size * heads, constants["ITEMS"])
    _gather[(valid_tokens.shape[0], blocks)](
        key_pool, value_pool, page_indices, valid_tokens, key_rows, value_rows,
        scale_table, scale_layer, SCALED=scale_table is not None, **constants,
    )  # fmt: skip


@lru_cache(maxsize=256)
def append_constants(
    page_size: int,
    heads: int,
    widths: tuple[int, int],
    key_strides: Strides,
    value_strides: Strides,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return what `append_kernel` is compiled for, by name; the same in both frameworks.

    Parameters
    ----------
    page_size, heads, widths
        Tokens in a page, heads, and widths of key and value.
    key_strides, value_strides
        Elements from page to page, token to token and head to head.
    dtype
        Element type of the pools.
    """
    items = _item_constants(page_size, heads, widths, key_strides, value_strides, dtype)
    return items | {"LARGEST": LARGEST.get(dtype, 0.0)}


def append_grid(count: int, constants: dict[str, Any]) -> tuple[int]:
    """Return how many programs of `append_kernel` write `count` rows."""
    return (triton.cdiv(count * constants["HEADS"], constants["ITEMS"]),)


@lru_cache(maxsize=256)
def _item_constants(
    page_size: int,
    heads: int,
    widths: tuple[int, int],
    key_strides: Strides,
    value_strides: Strides,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return constants of a kernel over items that stores `dtype`."""
    constants = {"PAGE_SIZE": page_size, "HEADS": heads} | OPTIONS
    constants["ITEMS"] = tile(max(widths), dtype)
    sides = zip(("KEY", "VALUE"), widths, (key_strides, value_strides), strict=True)
    for side, width, strides in sides:
        constants[f"{side}_WIDTH"] = width
        constants[f"{side}_COLUMNS"] = triton.next_power_of_2(width)
        for step, stride in zip(("PAGE", "TOKEN", "HEAD"), strides, strict=True):
            constants[f"{side}_{step}"] = stride
    return constants


def warm_append(key_pool: Tensor, value_pool: Tensor, row_dtype: torch.dtype) -> None:
    """Load `append` for these pools and rows of `row_dtype`."""
    key, value = (
        pool.new_empty((1, *pool.shape[2:]), dtype=row_dtype) for pool in (key_pool, value_pool)
    )
    append(key, value, key_pool, value_pool, none_of(key_pool), **_some_scales(key_pool))


def warm_gather(key_pool: Tensor, value_pool: Tensor, row_dtype: torch.dtype) -> None:
    """Load `gather` for these pools and rows of `row_dtype`."""
    key, value = (
        pool.new_empty(pool.shape[1:], dtype=row_dtype) for pool in (key_pool, value_pool)
    )
    none = none_of(key_pool)
    gather(key_pool, value_pool, none, none, key, value, **_some_scales(key_pool))


def _some_scales(pool: Tensor) -> dict[str, Tensor]:
    """Return scales for `token_major` pools; none where these are not quantised."""
    return scales_of_one(pool, pool.shape[2]) if pool.dtype in LARGEST else {}
