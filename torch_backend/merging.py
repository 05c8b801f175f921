"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from interop.errors import ShapeError

__all__ = ["merge_states"]


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    With ``m = max(lse_a, lse_b)``, ``a = exp(lse_a - m)``, ``b = exp(lse_b - m)`` the result is
    ``out_a * a / (a + b) + out_b * b / (a + b)`` and ``m + ln(a + b)``, as attention states
    combine in Ye et al., "FlashInfer" (2025). A side whose LSE is infinite or NaN counts as empty,
    whatever its output holds; where both are empty, the output is 0 and the LSE -inf.

    Parameters
    ----------
    out_a, out_b
        ``[tokens, heads, head_dim_v]``, one dtype.
    lse_a, lse_b
        ``[tokens, heads]`` float32, natural logarithm.

    Returns
    -------
    (Tensor, Tensor)
        Output in the inputs' dtype, LSE float32.

    Raises
    ------
    ShapeError
        If the shapes do not fit together.
    """
    check_merge_shapes(out_a.shape, lse_a.shape, out_b.shape, lse_b.shape)
    sides = [(out_a, lse_a.float()), (out_b, lse_b.float())]
    # +inf marks an empty side, too: some kernels write it where no key was seen.
    sides = [(o, s.masked_fill(~torch.isfinite(s), -torch.inf)) for o, s in sides]
    peak = torch.maximum(sides[0][1], sides[1][1])
    floor = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = [torch.exp(s - floor) for _, s in sides]
    total = weights[0] + weights[1]
    lse = floor + torch.log(total)
    divisor = total.masked_fill(total == 0.0, 1.0)
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for (out, _), weight in zip(sides, weights, strict=True):
        share = (weight / divisor).unsqueeze(-1)
        merged += torch.where(share == 0.0, 0.0, out.float() * share)
    return merged.to(out_a.dtype), lse


def check_merge_shapes(
    out_a: tuple[int, ...], lse_a: tuple[int, ...], out_b: tuple[int, ...], lse_b: tuple[int, ...]
) -> None:
    """Raise `ShapeError` unless the four shapes are ``[t, h, d]``, ``[t, h]`` twice over."""
    if len(out_a) != 3:
        raise ShapeError("out_a", given=list(out_a), wanted="[tokens, heads, head_dim_v]")
    for name, shape, wanted in (
        ("lse_a", lse_a, out_a[:2]),
        ("out_b", out_b, out_a),
        ("lse_b", lse_b, out_a[:2]),
    ):
        if tuple(shape) != tuple(wanted):
            raise ShapeError(name, given=list(shape), wanted=f"{list(wanted)}, to fit out_a")
