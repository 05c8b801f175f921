"""Triton kernels, written once; PyTorch launches them directly and JAX through the custom call.

Import this module only where Triton is installed: it comes with the ``cuda`` extra.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["append", "gather", "warm_append", "warm_gather"]

# Elements that one program copies; 16 bytes a thread for 16-bit types and 4 warps.
BLOCK = 1024


@triton.jit
def _append_side(
    rows, pool, row, page, offset, first, heads, width, page_stride, token_stride, head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy elements ``first .. first + BLOCK`` of one row ``[heads, width]`` to its slot."""
    element = first + tl.arange(0, BLOCK)
    inside = element < heads * width
    value = tl.load(rows + row * heads * width + element, mask=inside)
    head = element // width
    place = page * page_stride + offset * token_stride + head * head_stride + element % width
    tl.store(pool + place, value, mask=inside)


@triton.jit
def _append(
    key, value, key_pool, value_pool, slots, page_size, heads, key_width, value_width,
    key_page_stride, key_token_stride, key_head_stride,
    value_page_stride, value_token_stride, value_head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``(t, b)`` copies block ``b`` of row ``t`` of key and value to slot ``slots[t]``."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    slot = tl.load(slots + row)
    if slot >= 0:
        # Pools pass 2**31 elements easily, so places are 64 bits wide.
        page = (slot // page_size).to(tl.int64)
        offset = (slot % page_size).to(tl.int64)
        _append_side(
            key, key_pool, row, page, offset, first, heads, key_width,
            key_page_stride, key_token_stride, key_head_stride, BLOCK,
        )  # fmt: skip
        _append_side(
            value, value_pool, row, page, offset, first, heads, value_width,
            value_page_stride, value_token_stride, value_head_stride, BLOCK,
        )  # fmt: skip


@triton.jit
def _gather_side(
    pool, rows, page, entry, valid, first, page_size, heads, width,
    page_stride, token_stride, head_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy elements ``first .. first + BLOCK`` of a page to its place among the rows."""
    element = first + tl.arange(0, BLOCK)
    token = element // (heads * width)
    inside = token < page_size
    within = element % (heads * width)
    place = token * token_stride + (within // width) * head_stride + within % width
    value = tl.load(pool + page * page_stride + place, mask=inside & (token < valid), other=0.0)
    tl.store(rows + entry * page_size * heads * width + element, value, mask=inside)


@triton.jit
def _gather(
    key_pool, value_pool, page_indices, valid_tokens, key_rows, value_rows,
    page_size, heads, key_width, value_width,
    key_page_stride, key_token_stride, key_head_stride,
    value_page_stride, value_token_stride, value_head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``(i, b)`` copies block ``b`` of page ``page_indices[i]`` to place ``i``."""
    entry = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    valid = tl.load(valid_tokens + entry)
    if valid >= 0:
        page = tl.load(page_indices + entry).to(tl.int64)
        _gather_side(
            key_pool, key_rows, page, entry, valid, first, page_size, heads, key_width,
            key_page_stride, key_token_stride, key_head_stride, BLOCK,
        )  # fmt: skip
        _gather_side(
            value_pool, value_rows, page, entry, valid, first, page_size, heads, value_width,
            value_page_stride, value_token_stride, value_head_stride, BLOCK,
        )  # fmt: skip


def gather(
    key_pool: Tensor,
    value_pool: Tensor,
    page_indices: Tensor,
    valid_tokens: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
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
        ``[entries * page_size, heads, width]``, contiguous.
    """
    _, page_size, heads, key_width = key_pool.shape
    value_width = value_pool.shape[3]
    elements = page_size * heads * max(key_width, value_width)
    _gather[(valid_tokens.shape[0], triton.cdiv(elements, BLOCK))](
        key_pool, value_pool, page_indices, valid_tokens, key_rows, value_rows,
        page_size, heads, key_width, value_width,
        *key_pool.stride()[:3], *value_pool.stride()[:3], BLOCK=BLOCK,
    )  # fmt: skip


def append(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> None:
    """Write row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    Parameters
    ----------
    key, value
        ``[rows, heads, width]``, contiguous, at least as many rows as slots.
    key_pool, value_pool
        ``[pages, page_size, heads, width]`` as views of any strides whose last is 1; the two
        may differ in width.
    slots
        ``[slots]`` int32.
    """
    _, page_size, heads, key_width = key_pool.shape
    value_width = value_pool.shape[3]
    grid = (slots.shape[0], triton.cdiv(heads * max(key_width, value_width), BLOCK))
    _append[grid](
        key, value, key_pool, value_pool, slots, page_size, heads, key_width, value_width,
        *key_pool.stride()[:3], *value_pool.stride()[:3], BLOCK=BLOCK,
    )  # fmt: skip


def warm_gather(key_pool: Tensor, value_pool: Tensor) -> None:
    """Compile and load `gather` for these pools, as `warm_append` does for `append`."""
    _, page_size, heads, key_width = key_pool.shape
    none = torch.full((1,), -1, dtype=torch.int32, device=key_pool.device)
    key_rows = key_pool.new_empty((page_size, heads, key_width))
    value_rows = value_pool.new_empty((page_size, heads, value_pool.shape[3]))
    gather(key_pool, value_pool, none, none, key_rows, value_rows)


def warm_append(key_pool: Tensor, value_pool: Tensor) -> None:
    """Compile and load `append` for these pools, so that it can be recorded in a CUDA graph.

    Loading a kernel while a stream is being captured fails; this writes nothing.
    """
    _, _, heads, key_width = key_pool.shape
    key = key_pool.new_empty((1, heads, key_width))
    value = value_pool.new_empty((1, heads, value_pool.shape[3]))
    slots = torch.full((1,), -1, dtype=torch.int32, device=key_pool.device)
    append(key, value, key_pool, value_pool, slots)
