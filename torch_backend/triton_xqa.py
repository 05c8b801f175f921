"""What XQA needs before it runs over a quantised cache, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_items import WARPS, load_items, scales_of_one, store_items, tile

__all__ = ["prepare_xqa", "warm_prepare_xqa"]


@triton.jit(
    do_not_specialize=("factor", "count", "num_semaphores"),
    do_not_specialize_on_alignment=("scale_table", "scale_layer"),
)
def _prepare(
    query, scaled, factors, semaphores, scale_table, scale_layer, factor, count, num_semaphores,
    PER_HEAD: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ITEMS: tl.constexpr, COLUMNS: tl.constexpr, KV_COLUMNS: tl.constexpr,
    SEMAPHORE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` scales query items from ``i * ITEMS`` on; the first one does all the rest.

    Where heads share their scales the query stays as it is, and there is one program.
    """
    program = tl.program_id(0)
    scales = scale_table + tl.load(scale_layer) * (2 * KV_HEADS)
    key_scale = tl.load(scales)
    value_scale = tl.load(scales + KV_HEADS)
    if PER_HEAD:
        kv_head = tl.arange(0, KV_COLUMNS)
        key_scale = tl.max(tl.load(scales + kv_head, mask=kv_head < KV_HEADS, other=0.0), 0)
        value_scale = tl.full((), 1.0, tl.float32)
        item = program * ITEMS + tl.arange(0, ITEMS)
        live = item < count * HEADS
        place = item.to(tl.int64) * WIDTH
        own = tl.load(scales + item % HEADS // (HEADS // KV_HEADS))
        rows = load_items(query, place, live, WIDTH, COLUMNS).to(tl.float32)
        rows = rows * tl.div_rn(own, key_scale)[:, None]
        store_items(scaled, place, rows.to(scaled.dtype.element_ty), live, WIDTH, COLUMNS)
    if program == 0:
        tl.store(factors, key_scale / value_scale * factor)
        tl.store(factors + 1, value_scale)
        if SEMAPHORE_COLUMNS > 0:
            index = tl.arange(0, SEMAPHORE_COLUMNS)
            nothing = tl.zeros((SEMAPHORE_COLUMNS,), tl.int32)
            tl.store(semaphores + index, nothing, mask=index < num_semaphores)


def prepare_xqa(
    query: Tensor,
    scaled: Tensor | None,
    factors: Tensor,
    semaphores: Tensor | None,
    scale_table: Tensor,
    scale_layer: Tensor,
    factor: float,
) -> None:
    """Write XQA's factors, clear its semaphores and, where heads have their own scales, scale rows.

    XQA multiplies ``q . k`` by the first factor and by the second one, and the output by the
    second. Where heads share their scales these are ``factor * key_scale / value_scale`` and
    ``value_scale``. Where they do not they are ``factor * largest`` and 1, with the largest of the
    layer's key scales, and queries are multiplied by ``key_scale / largest``: by a small scale as
    it is, too much of them would be lost when the kernel rounds them to 8 bits.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``, contiguous.
    scaled
        Like `query`, written; `None` where heads share their scales.
    factors
        ``[2]`` float32, written.
    semaphores
        ``[n]`` int32, which become 0; `None` for none.
    scale_table, scale_layer
        ``[layers, 2, num_kv_heads]`` float32, and ``[1]`` int32 on the device, which layer's scales
        to use.
    factor
        What the logits are to be multiplied by beside the scales.
    """
    tokens, heads, width = query.shape
    kv_heads, count = scale_table.shape[2], 0 if semaphores is None else semaphores.shape[0]
    items = tile(width, query.dtype)
    programs = 1 if scaled is None else max(1, triton.cdiv(tokens * heads, items))
    _prepare[(programs,)](
        query, scaled, factors, semaphores, scale_table, scale_layer, factor, tokens, count,
        PER_HEAD=scaled is not None, HEADS=heads, KV_HEADS=kv_heads, WIDTH=width,
        ITEMS=items, COLUMNS=triton.next_power_of_2(width),
        KV_COLUMNS=triton.next_power_of_2(kv_heads),
        SEMAPHORE_COLUMNS=triton.next_power_of_2(count) if count else 0, num_warps=WARPS,
    )  # fmt: skip


def warm_prepare_xqa(query: Tensor, num_kv_heads: int, num_semaphores: int, per_head: bool) -> None:
    """Compile and load `prepare_xqa` for queries like this, so that a CUDA graph may record it."""
    factors = torch.empty(2, device=query.device)
    semaphores = None
    if num_semaphores:
        semaphores = torch.empty(num_semaphores, dtype=torch.int32, device=query.device)
    scaled = torch.empty_like(query) if per_head else None
    scales = scales_of_one(query, num_kv_heads)
    prepare_xqa(query, scaled, factors, semaphores, factor=1.0, **scales)
