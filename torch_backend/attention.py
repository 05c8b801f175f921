"""Attention over pages for PyTorch: the calls that models make."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from interop.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FrameworkError,
    PlanError,
    ShapeError,
    TransformError,
)
from interop.layer_plans import check_layer
from interop.plan import AttentionPlan, Launch
from interop.spec import dtype_name

from .cache import PagedKVCache, torch_dtype
from .dispatch import run
from .kernels import Operands
from .kernels.sinks import needs_lse
from .planning import check_lse, check_without_cache
from .sinks import check_sinks
from .writing import write_rows

# Kernels read rows with loads of 16 bytes; one that begins elsewhere would end the CUDA context.
KERNEL_ALIGNMENT = 16

__all__ = ["append", "attend", "paged_attention", "ragged_attention"]


@overload
def attend(
    query: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...
@overload
def attend(
    query: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: Literal[True],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attend(
    query: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attend(
    query: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the pages of one layer, which hold this step's tokens already (see `append`).

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``, contiguous, of the plan's dtype and device, where
        ``tokens`` is ``plan.bucket.num_tokens``.
    cache
        The cache that the plan was made for.
    plan
        From `plan`; one plan serves all layers of a step.
    layer
        Which layer of the cache to read.
    return_lse
        Also return the logarithm of each row's softmax denominator, without sinks: that is what
        `merge_states` needs.
    sinks
        ``[num_qo_heads]`` float32, where the plan's spec says that there are sinks, see
        `AttentionSpec`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        Output ``[tokens, num_qo_heads, head_dim_v]`` in the query's dtype and, when asked for, LSE
        ``[tokens, num_qo_heads]`` float32, natural logarithm. A row that sees no key, padding rows
        among them, has output 0 and LSE -inf.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError, PlanError
        For arguments that do not fit the plan; nothing is computed then.
    """
    check_cache(cache, plan)
    check_lse(plan.static, return_lse)
    check_rows("query", query, plan.static.query_shape, plan)
    _check_sinks(sinks, plan)
    pools = checked_pools(cache, layer)
    check_layer(plan.static, layer)
    scales = cache.scale_operands(layer)
    return _launch(query, *pools, plan, plan.static.main, return_lse, scales, sinks)


def append(
    key: Tensor, value: Tensor, cache: PagedKVCache, plan: AttentionPlan[Tensor], layer: int
) -> None:
    """Write this step's keys and values into the pages of one layer, in place.

    Parameters
    ----------
    key, value
        ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, head_dim_v]``; rows past
        the batch's own tokens are ignored.
    cache, plan, layer
        As for `attend`.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError, PlanError
        For arguments that do not fit the plan; nothing is written then.
    """
    check_cache(cache, plan)
    check_key_value(key, value, plan)
    _write(key, value, cache, plan, layer)


@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: Literal[True],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[Tensor],
    layer: int,
    *,
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`append` and `attend` in one call.

    Where the plan's bucket promises requests without context, attention reads `key` and `value`
    themselves and the pages are only written.
    """
    check_cache(cache, plan)
    check_lse(plan.static, return_lse)
    check_rows("query", query, plan.static.query_shape, plan)
    check_key_value(key, value, plan)
    _check_sinks(sinks, plan)
    check_layer(plan.static, layer)
    pools = _write(key, value, cache, plan, layer)
    if plan.static.own is not None:
        return _launch(query, key, value, plan, (plan.static.own,), return_lse, sinks=sinks)
    scales = cache.scale_operands(layer)
    return _launch(query, *pools, plan, plan.static.main, return_lse, scales, sinks)


@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan[Tensor],
    *,
    return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...
@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan[Tensor],
    *,
    return_lse: Literal[True],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan[Tensor],
    *,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan[Tensor],
    *,
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention without a cache: every request's keys and values are rows of the call.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``.
    key, value
        ``[kv_tokens, num_kv_heads, head_dim]`` and ``[kv_tokens, num_kv_heads, head_dim_v]``,
        request after request, ``kv_lens[i]`` rows each; ``kv_tokens`` is
        ``plan.bucket.num_pages``.
    plan
        From ``plan(spec, None, batch)``.
    """
    _check_plan(plan)
    check_without_cache(plan.static)
    check_lse(plan.static, return_lse)
    check_rows("query", query, plan.static.query_shape, plan)
    check_key_value(key, value, plan)
    _check_sinks(sinks, plan)
    return _launch(query, key, value, plan, plan.static.main, return_lse, sinks=sinks)


def _write(
    key: Tensor, value: Tensor, cache: PagedKVCache, plan: AttentionPlan[Tensor], layer: int
) -> tuple[Tensor, Tensor]:
    """Write rows to their slots; returns the layer's pools."""
    pools = checked_pools(cache, layer)
    slots = plan.views["slot_mapping"]
    write_rows(key, value, *pools, cache.spec, slots, *cache.scale_operands(layer))
    return pools


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan[Tensor],
    launches: tuple[Launch, ...],
    return_lse: bool,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    static = plan.static
    out = torch.empty(static.out_shape, dtype=query.dtype, device=query.device)
    lse = None
    if return_lse or needs_lse(launches):
        lse = torch.empty(static.out_shape[:2], dtype=torch.float32, device=query.device)
    scratch = None
    scratch_bytes = max(launch.scratch_bytes for launch in launches)
    if scratch_bytes:
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=query.device)
    if static.bucket.num_tokens:
        operands = Operands(query, key, value, plan.views, out, lse, scratch, *scales, sinks)
        for launch in launches:
            run(launch, operands)
    return (out, lse) if return_lse and lse is not None else out


def checked_pools(cache: PagedKVCache, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's pools; raises `ArgumentError` for a layer that the cache lacks."""
    known = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
    if not known or not 0 <= layer < cache.spec.num_layers:
        raise ArgumentError(
            "layer", given=repr(layer), wanted=f"a layer from 0 to {cache.spec.num_layers - 1}"
        )
    return cache.pools(layer)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, AttentionPlan) or not isinstance(plan.metadata, Tensor):
        raise FrameworkError(
            "plan",
            given=f"{type(plan).__name__} of {type(getattr(plan, 'metadata', None)).__name__}",
            wanted="a plan from torch_backend.plan",
        )


def check_cache(cache: PagedKVCache, plan: AttentionPlan[Tensor]) -> None:
    _check_plan(plan)
    if not isinstance(cache, PagedKVCache):
        raise FrameworkError("cache", given=type(cache).__name__, wanted="a PagedKVCache")
    if cache.spec != plan.static.cache:
        raise PlanError(
            "cache",
            given=f"one of {cache.spec}",
            wanted=f"the cache that the plan was made for, {plan.static.cache}",
            remedy="Plan with cache.spec of the cache that is passed here.",
        )
    if plan.metadata.device != cache.device:
        raise DeviceError(
            "plan",
            given=f"metadata on {plan.metadata.device}",
            wanted=f"{cache.device}, where the cache lies",
            remedy="Pass device=cache.device to plan.",
        )


def check_key_value(key: Tensor, value: Tensor, plan: AttentionPlan[Tensor]) -> None:
    static = plan.static
    heads = static.spec.num_kv_heads
    rows = static.bucket.num_tokens if static.cache is not None else static.bucket.num_pages
    check_rows("key", key, (rows, heads, static.spec.head_dim), plan)
    check_rows("value", value, (rows, heads, static.spec.head_dim_v), plan)


def _check_sinks(sinks: object, plan: AttentionPlan[Tensor]) -> None:
    check_sinks(plan.spec, sinks, plan.spec.num_qo_heads, plan.metadata.device)


def check_rows(
    name: str, rows: Tensor, shape: tuple[int, int, int], plan: AttentionPlan[Tensor]
) -> None:
    if not isinstance(rows, Tensor):
        raise FrameworkError(
            name,
            given=f"{type(rows).__module__}.{type(rows).__name__}",
            wanted="a torch.Tensor",
            remedy="Use interop.dlpack.to_torch, or call jax_frontend with JAX arrays.",
        )
    if tuple(rows.shape) != shape:
        raise ShapeError(
            name,
            given=list(rows.shape),
            wanted=f"{list(shape)} ([tokens, heads, width] of the plan)",
            remedy="Plan with the batch and bucket of this step.",
        )
    if rows.dtype != torch_dtype(plan.static.query_dtype):
        raise DTypeError(name, given=dtype_name(rows.dtype), wanted=plan.static.query_dtype)
    if rows.device != plan.metadata.device:
        raise DeviceError(
            name, given=str(rows.device), wanted=f"{plan.metadata.device}, where the plan lies"
        )
    if is_functorch_wrapped_tensor(rows):
        raise TransformError(
            f"{name} is transformed by torch.func, and attention over pages has no vmap and no "
            "gradient. Put the examples of a vmap into one RaggedBatch and call it once."
        )
    if rows.requires_grad and torch.is_grad_enabled():
        raise TransformError(
            f"{name} requires grad, and attention over pages has no gradient: it is for inference. "
            "Call it under torch.no_grad(), or pass a detached tensor."
        )
    if not rows.is_contiguous():
        raise ShapeError(
            name,
            given=f"strides {rows.stride()}",
            wanted="a contiguous tensor",
            remedy=f"Call {name}.contiguous(); nothing is copied silently.",
        )
    if rows.is_cuda and rows.data_ptr() % KERNEL_ALIGNMENT:
        raise ShapeError(
            name,
            given=f"an address {rows.data_ptr() % KERNEL_ALIGNMENT} bytes past a multiple of "
            f"{KERNEL_ALIGNMENT}",
            wanted=f"memory aligned to {KERNEL_ALIGNMENT} bytes, which kernels read at once",
            remedy=f"Call {name}.clone(), or slice at a multiple of {KERNEL_ALIGNMENT} bytes.",
        )
