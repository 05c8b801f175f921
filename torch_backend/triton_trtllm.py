"""What TRTLLM-GEN's decode needs before it runs over 8-bit pages, in one Triton kernel."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_items import OPTIONS, load_items, scales_of_one, store_items, tile

__all__ = ["prepare_trtllm", "warm_prepare_trtllm"]

LARGEST = 448.0  # of float8_e4m3fn


@triton.jit(
    do_not_specialize=("factor", "count"),
    do_not_specialize_on_alignment=("scale_table", "scale_layer"),
)
def _prepare(
    query, rounded, factors, scale_table, scale_layer, factor, count,
    ROUND: tl.constexpr, LARGEST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, ITEMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` rounds query items from ``i * ITEMS`` on; the first one writes the factors."""
    program = tl.program_id(0)
    if program == 0:
        scales = scale_table + tl.load(scale_layer) * (2 * KV_HEADS)
        tl.store(factors, factor * tl.load(scales))
        tl.store(factors + 1, tl.load(scales + KV_HEADS))
    if ROUND:
        item = program * ITEMS + tl.arange(0, ITEMS)
        live = item // HEADS < count
        place = item.to(tl.int64) * WIDTH
        items = load_items(query, place, live, WIDTH, COLUMNS).to(tl.float32)
        items = tl.clamp(items, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        store_items(rounded, place, items.to(rounded.dtype.element_ty), live, WIDTH, COLUMNS)


def prepare_trtllm(
    query: Tensor,
    rounded: Tensor | None,
    factors: Tensor,
    scale_table: Tensor,
    scale_layer: Tensor,
    sm_scale: float,
) -> None:
    """Write the kernel's two factors and, where it wants one, an 8-bit query.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``, contiguous.
    rounded
        The same in float8_e4m3fn, written: rounded to nearest even, beyond 448 to that, and NaN
        stays NaN. `None` where the kernel reads the query as it is.
    factors
        ``[2]`` float32, written: ``sm_scale * key_scale / ln(2)`` for the logits, which the kernel
        takes to the base of 2, and the scale of the values.
    scale_table, scale_layer
        ``[layers, 2, num_kv_heads]`` float32, and ``[1]`` int32 on the device, which layer's scales
        to use. Heads share them: those of the first head are read.
    sm_scale
        Factor on the logits.
    """
    tokens, heads, width = query.shape
    items = tile(width, query.dtype)
    programs = 1 if rounded is None else max(1, triton.cdiv(tokens * heads, items))
    _prepare[(programs,)](
        query, query if rounded is None else rounded, factors, scale_table, scale_layer,
        sm_scale / math.log(2.0), tokens,
        ROUND=rounded is not None, LARGEST=LARGEST, HEADS=heads, KV_HEADS=scale_table.shape[2],
        WIDTH=width, ITEMS=items, COLUMNS=triton.next_power_of_2(width), **OPTIONS,
    )  # fmt: skip


def warm_prepare_trtllm(query: Tensor, num_kv_heads: int, *, rounds: bool) -> None:
    """Load `prepare_trtllm` for queries like this one, which stays as it is."""
    rounded = torch.empty_like(query, dtype=torch.float8_e4m3fn) if rounds else None
    factors = torch.empty(2, dtype=torch.float32, device=query.device)
    prepare_trtllm(query, rounded, factors, **scales_of_one(query, num_kv_heads), sm_scale=1.0)
