"""Attention sinks: logits without a value, one for each query head, that take part in the softmax.

With the LSE ``l`` of a row's keys, ``e**l`` is the softmax denominator. A sink of logit ``s`` makes
``e**l + e**s`` of it, so the output is multiplied by ``1 / (1 + e**(s - l))``. That is exact,
whichever kernel computed the row and in however many parts, but a sink counts once: attention over
parts of the keys is merged first. So the LSE that calls return is that of the keys alone.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from interop.errors import (
    DeviceError,
    DTypeError,
    FrameworkError,
    PlanError,
    ShapeError,
    TransformError,
)
from interop.spec import FLOAT_DTYPES, AttentionSpec, dtype_name

__all__ = [
    "apply_sinks",
    "check_announced",
    "check_sinks",
    "refresh_sinks",
    "scale_rows",
    "warm",
]

SINKS_REMEDY = "There is one logit for each query head, on every rank for its own heads."
DTYPE_REMEDY = "Convert once: torch_backend.refresh_sinks in PyTorch, .astype in JAX."


def check_announced(spec: AttentionSpec, sinks: object) -> None:
    """Raise `PlanError` where a call brings sinks and its plan has none, or the other way round."""
    if sinks is not None and not spec.sinks:
        raise PlanError(
            "sinks",
            given="logits, with a plan made without",
            wanted="None",
            remedy="Plan with AttentionSpec(..., sinks=True), by which a kernel is chosen.",
        )
    if sinks is None and spec.sinks:
        raise PlanError(
            "sinks",
            given="None, with a plan made with AttentionSpec(..., sinks=True)",
            wanted=f"float32 [{spec.num_qo_heads}], a logit for each query head",
            remedy="Plan without, for layers that have none.",
        )


def check_sinks(spec: AttentionSpec, sinks: object, heads: int, device: torch.device) -> None:
    """Check the sinks of a call against its plan.

    Parameters
    ----------
    spec
        The spec of the plan.
    sinks
        What the caller gave, or `None`.
    heads, device
        How many there have to be, and where.

    Raises
    ------
    PlanError, FrameworkError, ShapeError, DTypeError, DeviceError, TransformError
        Naming ``sinks``.
    """
    check_announced(spec, sinks)
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise FrameworkError(
            "sinks",
            given=f"{type(sinks).__module__}.{type(sinks).__name__}",
            wanted="a torch.Tensor",
            remedy="Use interop.dlpack.to_torch, or call jax_frontend with JAX arrays.",
        )
    if sinks.shape != (heads,):
        raise ShapeError("sinks", given=list(sinks.shape), wanted=f"{[heads]}", remedy=SINKS_REMEDY)
    if sinks.dtype != torch.float32:
        raise DTypeError(
            "sinks", given=dtype_name(sinks.dtype), wanted="float32", remedy=DTYPE_REMEDY
        )
    if sinks.device != device:
        raise DeviceError("sinks", given=str(sinks.device), wanted=f"{device}, where the plan lies")
    if is_functorch_wrapped_tensor(sinks) or (sinks.requires_grad and torch.is_grad_enabled()):
        raise TransformError(
            "sinks are transformed, and attention over pages has no vmap and no gradient: it is "
            "for inference. Call it under torch.no_grad(), or pass a detached tensor."
        )
    if not sinks.is_contiguous():
        raise ShapeError(
            "sinks",
            given=f"strides {sinks.stride()}",
            wanted="a contiguous tensor",
            remedy="Call sinks.contiguous(); nothing is copied silently.",
        )


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give rows of attention their sinks, which were left out of the softmax.

    For partial results: merge them first, as a sink counts once.

    Parameters
    ----------
    out
        ``[tokens, num_qo_heads, head_dim_v]``, attention without sinks.
    lse
        ``[tokens, num_qo_heads]`` float32, natural logarithm, as ``return_lse=True`` gives it.
    sinks
        ``[num_qo_heads]`` float32: natural logarithms that ``sm_scale`` does not multiply.

    Returns
    -------
    Tensor
        Like `out`; computed in float32. A row that sees no key, with an LSE of -inf, is 0.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError
        Naming the first argument that does not fit.
    """
    for name, tensor in (("out", out), ("lse", lse), ("sinks", sinks)):
        if not isinstance(tensor, Tensor):
            raise FrameworkError(name, given=type(tensor).__name__, wanted="a torch.Tensor")
        if tensor.device != out.device:
            raise DeviceError(name, given=str(tensor.device), wanted=f"{out.device}, as out has")
        if name != "out" and tensor.dtype != torch.float32:
            raise DTypeError(name, given=dtype_name(tensor.dtype), wanted="float32")
    if out.ndim != 3 or dtype_name(out.dtype) not in FLOAT_DTYPES:
        raise ShapeError(
            "out",
            given=f"{dtype_name(out.dtype)} {list(out.shape)}",
            wanted=f"[tokens, num_qo_heads, head_dim_v] of {', '.join(FLOAT_DTYPES)}",
        )
    for name, tensor, shape in (("lse", lse, out.shape[:2]), ("sinks", sinks, out.shape[1:2])):
        if tensor.shape != shape:
            raise ShapeError(name, given=list(tensor.shape), wanted=list(shape))
    out = out.contiguous()
    result = torch.empty_like(out)
    if out.is_cuda and out.numel():
        from .triton_sinks import apply

        with torch.cuda.device_of(out):
            apply(out, result, lse.contiguous(), sinks.contiguous())
        return result
    return result.copy_(out.float() * _share(lse, sinks)[:, :, None])


def scale_rows(out: Tensor, lse: Tensor, sinks: Tensor, factor: float) -> None:
    """Turn an LSE into a natural logarithm and give its rows their sinks, both in place.

    On a GPU that is one launch; nothing is allocated, and it may be recorded.

    Parameters
    ----------
    out, lse, sinks
        As for `apply_sinks`, contiguous.
    factor
        What `lse` is multiplied by first.
    """
    if out.is_cuda:
        from .triton_sinks import apply

        with torch.cuda.device_of(out):
            apply(out, out, lse, sinks, factor)
        return
    lse.mul_(factor)
    out.copy_(out.float() * _share(lse, sinks)[:, :, None])


@cache
def warm(heads: int, width: int, dtype: str, factor: float, device: int) -> None:
    """Load what `scale_rows` launches on a GPU, so that a CUDA graph may record it."""
    from .triton_sinks import apply

    where = torch.device("cuda", device)
    out = torch.empty((1, heads, width), dtype=getattr(torch, dtype), device=where)
    lse = torch.zeros((1, heads), device=where)
    apply(out, out, lse, lse[0], factor)


def _share(lse: Tensor, sinks: Tensor) -> Tensor:
    """What the sinks leave of the softmax, ``[tokens, num_qo_heads]``."""
    # Where both logits are -inf, their difference is NaN.
    return torch.sigmoid(lse - sinks).masked_fill_(lse == -math.inf, 0.0)


def refresh_sinks(sinks: Tensor | None, source: Tensor) -> Tensor:
    """Sinks for `attend` from a model's weights, at one address for good.

    Recorded CUDA graphs and compiled programs keep the address of what they read, so new weights
    have to be copied to where the old ones are.

    Parameters
    ----------
    sinks
        What the last call for this layer returned; `None` for the first one.
    source
        ``[num_qo_heads]`` of any float type, on the device of the layer.

    Returns
    -------
    Tensor
        ``[num_qo_heads]`` float32. First `source` itself where it is float32 and contiguous, else
        a copy of it; after that always the tensor that was passed in.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError
        For a source that cannot be copied; nothing has changed then.
    """
    if not isinstance(source, Tensor):
        raise FrameworkError("source", given=type(source).__name__, wanted="a torch.Tensor")
    if dtype_name(source.dtype) not in FLOAT_DTYPES:
        raise DTypeError(
            "source", given=dtype_name(source.dtype), wanted=f"one of {', '.join(FLOAT_DTYPES)}"
        )
    shape = source.shape if sinks is None else sinks.shape
    if source.ndim != 1 or source.shape != shape:
        raise ShapeError(
            "source",
            given=list(source.shape),
            wanted="[num_qo_heads]" if sinks is None else list(shape),
        )
    source = source.detach()
    if sinks is None:
        return source.to(torch.float32).contiguous()
    # Also under inference mode's own tensors: an update is no part of a gradient.
    with torch.no_grad():
        return sinks.copy_(source)
