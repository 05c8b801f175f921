"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interop.errors import DTypeError, FrameworkError, ShapeError
from interop.spec import FLOAT_DTYPES, dtype_name

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
    FrameworkError, ShapeError, DTypeError
        Naming the first argument that does not fit the others.
    """
    check_states(Tensor, "torch.Tensor", out_a, lse_a, out_b, lse_b)
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


def check_states(
    kind: type, kind_name: str, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any
) -> None:
    """Check the arguments of `merge_states` of either framework.

    Parameters
    ----------
    kind, kind_name
        Array class of the framework, and its name for people.
    out_a, lse_a, out_b, lse_b
        The arguments.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError
        Naming the first argument that does not fit.
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, array in states.items():
        if not isinstance(array, kind):
            given = f"{type(array).__module__}.{type(array).__name__}"
            raise FrameworkError(name, given=given, wanted=f"a {kind_name}")
    if len(out_a.shape) != 3:
        raise ShapeError("out_a", given=list(out_a.shape), wanted="[tokens, heads, head_dim_v]")
    rows = tuple(out_a.shape[:2])
    shapes = {
        "out_a": tuple(out_a.shape),
        "lse_a": rows,
        "out_b": tuple(out_a.shape),
        "lse_b": rows,
    }
    dtype = dtype_name(out_a.dtype)
    if dtype not in FLOAT_DTYPES:
        raise DTypeError("out_a", given=dtype, wanted=f"one of {', '.join(FLOAT_DTYPES)}")
    dtypes = {"out_a": dtype, "lse_a": "float32", "out_b": dtype, "lse_b": "float32"}
    for name, array in states.items():
        if tuple(array.shape) != shapes[name]:
            raise ShapeError(
                name, given=list(array.shape), wanted=f"{list(shapes[name])}, to fit out_a"
            )
        if dtype_name(array.dtype) != dtypes[name]:
            raise DTypeError(name, given=dtype_name(array.dtype), wanted=dtypes[name])
