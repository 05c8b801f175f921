"""The Triton kernel that gives rows of attention their sinks.

Import this module only where Triton is installed: it comes with the ``cuda`` extra.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .triton_items import OPTIONS, load_items, store_items, tile

__all__ = ["apply"]


@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("lse", "sinks"),
)
def _apply(
    out, result, lse, sinks, count,
    FACTOR: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ITEMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` scales items ``i * ITEMS`` on of ``[count, HEADS, WIDTH]``, and their LSE."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item // HEADS < count
    place = item.to(tl.int64)
    log = tl.load(lse + place, mask=live, other=float("-inf"))
    if FACTOR != 1.0:
        log = log * FACTOR
        # Several warps read the same logarithms; none may write before all have read.
        tl.debug_barrier()
        tl.store(lse + place, log, mask=live)
    sink = tl.load(sinks + item % HEADS)
    share = tl.div_rn(1.0, 1.0 + tl.exp(sink - log))
    # Where both logits are -inf, their difference is NaN.
    share = tl.where(log == float("-inf"), 0.0, share)
    place = place * WIDTH
    items = load_items(out, place, live, WIDTH, COLUMNS).to(tl.float32) * share[:, None]
    store_items(result, place, items.to(result.dtype.element_ty), live, WIDTH, COLUMNS)


def apply(out: Tensor, result: Tensor, lse: Tensor, sinks: Tensor, factor: float = 1.0) -> None:
    """Multiply rows by the share of the softmax that their sinks leave, in one launch.

    Parameters
    ----------
    out, result
        ``[tokens, num_qo_heads, head_dim_v]``, contiguous; `result` is written, and may be `out`.
        The product is computed in float32 and rounded once.
    lse
        ``[tokens, num_qo_heads]`` float32, contiguous; multiplied by `factor` in place first, to
        be a natural logarithm then.
    sinks
        ``[num_qo_heads]`` float32.
    factor
        1 for an LSE that is a natural logarithm.
    """
    tokens, heads, width = out.shape
    items = tile(width, result.dtype)
    _apply[(triton.cdiv(tokens * heads, items),)](
        out, result, lse, sinks, tokens, FACTOR=factor, HEADS=heads, WIDTH=width,
        ITEMS=items, COLUMNS=triton.next_power_of_2(width), **OPTIONS,
    )  # fmt: skip
