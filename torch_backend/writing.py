"""Writing new keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from interop.spec import CacheSpec

__all__ = ["token_major", "warm", "write_rows"]


def token_major(pool: Tensor, layout: str) -> Tensor:
    """View a pool of either layout as ``[pages, page_size, heads, width]``."""
    return pool if layout == "NHD" else pool.transpose(1, 2)


def warm(spec: CacheSpec, device: torch.device) -> None:
    """Load what `write_rows` needs for caches of `spec`, so that a CUDA graph may record it."""
    if device.type != "cuda":
        return
    from .triton_ops import warm_append

    shapes = spec.key_shape, spec.value_shape
    dtype = getattr(torch, spec.dtype)
    pools = [torch.empty((1, *shape[1:]), dtype=dtype, device=device) for shape in shapes]
    warm_append(*(token_major(pool, spec.layout) for pool in pools))


def write_rows(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, layout: str, slots: Tensor
) -> None:
    """Write row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    Parameters
    ----------
    key, value
        ``[rows, heads, width]``, at least as many rows as slots.
    key_pool, value_pool
        Pages ``[pages, page_size, heads, width]`` (``"NHD"``) or
        ``[pages, heads, page_size, width]`` (``"HND"``), any page stride.
    layout
        ``"NHD"`` or ``"HND"``.
    slots
        ``[slots]`` int32, ``page * page_size + offset``.
    """
    key_pool, value_pool = token_major(key_pool, layout), token_major(value_pool, layout)
    if key.is_cuda:
        # Here, because the CPU needs no Triton.
        from .triton_ops import append

        append(key, value, key_pool, value_pool, slots)
        return
    # torch reads -1 as the last element, so padding has to be left out by name.
    rows = torch.nonzero(slots >= 0).flatten()
    kept = slots[rows].long()
    page_size = key_pool.shape[1]
    where = (kept // page_size, kept % page_size)
    key_pool.index_put_(where, key[rows])
    value_pool.index_put_(where, value[rows])
