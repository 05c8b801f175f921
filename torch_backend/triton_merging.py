"""Triton kernels of `merging`: any number of ranks, any width of a head, nothing but the outputs.

Import this module only where Triton is installed: it comes with the ``cuda`` extra.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine", "merge", "merge_into", "scale"]

# Elements of output that one program computes, where a head is not wider.
BLOCK = 1024


@triton.jit
def _load_lse(lses, place, inside):
    """LSEs, infinite ones and NaN as -inf."""
    lse = tl.load(lses + place, mask=inside, other=float("-inf"))
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def _floor(peak):
    """What to subtract from LSEs whose largest is `peak`."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _finish(floor, total):
    """Divisor of the terms, and LSE, from the sum of all terms ``exp(lse - floor)``."""
    divisor = tl.where(total == 0.0, 1.0, total)
    return divisor, tl.where(total == 0.0, float("-inf"), floor + tl.log(divisor))


@triton.jit
def _union(lses, place, rank_stride, inside, RANKS: tl.constexpr):
    """Floor and divisor of the terms of all ranks, and LSE of their union."""
    peak = _load_lse(lses, place, inside)
    at = place
    for _ in tl.static_range(1, RANKS):
        at += rank_stride
        peak = tl.maximum(peak, _load_lse(lses, at, inside))
    floor = _floor(peak)
    total = tl.exp(_load_lse(lses, place, inside) - floor)
    at = place
    for _ in tl.static_range(1, RANKS):
        at += rank_stride
        total += tl.exp(_load_lse(lses, at, inside) - floor)
    divisor, lse = _finish(floor, total)
    return floor, divisor, lse


@triton.jit
def _weighted(out, place, within, weight):
    """Outputs times their weights; those of weight 0 are not read."""
    value = tl.load(out + place, mask=within & (weight != 0.0)[:, None], other=0.0)
    return value.to(tl.float32) * weight[:, None]


@triton.jit
def _rows(rows, heads, ROWS: tl.constexpr):
    """Rows of a program, each a head of a token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64), (row // heads).to(tl.int64), (row % heads).to(tl.int64), row < rows


@triton.jit(do_not_specialize=["rows", "lse_rank_stride", "lse_token_stride", "lse_head_stride"])
def _combine(
    outs, lses, combined, lse, rows, heads, width,
    out_rank_stride, out_token_stride, out_head_stride,
    lse_rank_stride, lse_token_stride, lse_head_stride,
    RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program ``b`` combines rows ``b * ROWS`` and following of all ranks."""
    row, token, head, inside = _rows(rows, heads, ROWS)
    lse_at = token * lse_token_stride + head * lse_head_stride
    floor, divisor, whole = _union(lses, lse_at, lse_rank_stride, inside, RANKS)
    tl.store(lse + row, whole, mask=inside)
    column = tl.arange(0, WIDTH)
    within = inside[:, None] & (column < width)[None, :]
    at = (token * out_token_stride + head * out_head_stride)[:, None] + column[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for _ in tl.static_range(RANKS):
        weight = tl.div_rn(tl.exp(_load_lse(lses, lse_at, inside) - floor), divisor)
        total += _weighted(outs, at, within, weight)
        lse_at += lse_rank_stride
        at += out_rank_stride
    place = row[:, None] * width + column[None, :]
    tl.store(combined + place, total.to(combined.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lse_a", "lse_b", "lse"])
def _merge(
    out_a, lse_a, out_b, lse_b, merged, lse, rows, width,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program ``b`` merges rows ``b * ROWS`` and following of two contiguous states."""
    row, _, _, inside = _rows(rows, 1, ROWS)
    a, b = _load_lse(lse_a, row, inside), _load_lse(lse_b, row, inside)
    if FACTOR != 1.0:
        a, b = a * FACTOR, b * FACTOR
    floor = _floor(tl.maximum(a, b))
    a, b = tl.exp(a - floor), tl.exp(b - floor)
    divisor, whole = _finish(floor, a + b)
    tl.store(lse + row, whole, mask=inside)
    column = tl.arange(0, WIDTH)
    within = inside[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    total = _weighted(out_a, place, within, tl.div_rn(a, divisor))
    total += _weighted(out_b, place, within, tl.div_rn(b, divisor))
    tl.store(merged + place, total.to(merged.dtype.element_ty), mask=within)


@triton.jit(
    do_not_specialize=["rows", "lse_rank_stride", "lse_token_stride", "lse_head_stride", "rank"]
)
def _scale(
    out, lses, scaled, lse, rank, rows, heads, width, out_token_stride, out_head_stride,
    lse_rank_stride, lse_token_stride, lse_head_stride,
    RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program ``b`` scales rows ``b * ROWS`` and following by the weight of `rank`."""
    row, token, head, inside = _rows(rows, heads, ROWS)
    lse_at = token * lse_token_stride + head * lse_head_stride
    floor, divisor, whole = _union(lses, lse_at, lse_rank_stride, inside, RANKS)
    tl.store(lse + row, whole, mask=inside)
    own_at = lse_at + rank.to(tl.int64) * lse_rank_stride
    weight = tl.div_rn(tl.exp(_load_lse(lses, own_at, inside) - floor), divisor)
    column = tl.arange(0, WIDTH)
    within = inside[:, None] & (column < width)[None, :]
    at = (token * out_token_stride + head * out_head_stride)[:, None] + column[None, :]
    value = _weighted(out, at, within, weight)
    place = row[:, None] * width + column[None, :]
    tl.store(scaled + place, value.to(scaled.dtype.element_ty), mask=within)


def combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See `merging.combine_states`; arguments are checked there."""
    outs = _dense_rows(outs)
    result, lse = _results(outs[0])
    strides = (*outs.stride()[:3], *lses.stride())
    ranks, _, heads, width = outs.shape
    rows = lse.numel()
    _launch(
        _combine, rows, width, outs, lses, result, lse, rows, heads, width, *strides, RANKS=ranks
    )
    return result, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See `merging.merge_states`; arguments are checked there."""
    result, lse = _results(out_a)
    out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
    merge_into(out_a, lse_a, out_b, lse_b, result, lse)
    return result, lse


def merge_into(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    merged: Tensor,
    lse: Tensor,
    factor: float = 1.0,
) -> None:
    """Merge two states into tensors that are there, in one launch.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b
        As for `merging.merge_states`, contiguous.
    merged, lse
        Like them, written. `merged` may be one of the outputs, `lse` none of the LSE: several warps
        read these, and one may write before another has read.
    factor
        What turns the LSE that come in into natural logarithms.
    """
    rows, width = lse.numel(), merged.shape[2]
    _launch(
        _merge, rows, width, out_a, lse_a, out_b, lse_b, merged, lse, rows, width, FACTOR=factor
    )


def scale(out: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """See `merging.scale_partial`; arguments are checked there."""
    out = _dense_rows(out)
    result, lse = _results(out)
    strides = (*out.stride()[:2], *lses.stride())
    ranks, rows, (_, heads, width) = lses.shape[0], lse.numel(), out.shape
    _launch(
        _scale, rows, width, out, lses, result, lse, rank, rows, heads, width, *strides, RANKS=ranks
    )
    return result, lse


def _dense_rows(out: Tensor) -> Tensor:
    """Outputs whose last stride is 1: most often these themselves."""
    return out if out.stride(-1) == 1 else out.contiguous()


def _results(out: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous output like `out` and the LSE of its rows."""
    shape, device = out.shape, out.device
    result = torch.empty(shape, dtype=out.dtype, device=device)
    return result, torch.empty(shape[:2], dtype=torch.float32, device=device)


def _launch(kernel: Any, rows: int, width: int, *arguments: Any, **constants: float) -> None:
    """Launch a kernel for `rows` outputs of `width` elements, where its first argument lies."""
    wide = triton.next_power_of_2(width)
    many = max(1, BLOCK // wide)
    with torch.cuda.device_of(arguments[0]):
        # Products are rounded before they are added, as they are elsewhere.
        kernel[(triton.cdiv(rows, many),)](
            *arguments, **constants, ROWS=many, WIDTH=wide, enable_fp_fusion=False
        )
