"""Writing new keys and values into pages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from interop.spec import FLOAT_DTYPES, FP8_DTYPES, NVFP4_DTYPES, CacheSpec

from .quantising import nvfp4_regions, quantise_fp8, quantise_nvfp4

__all__ = ["token_major", "warm", "write_rows"]


def token_major(pool: Tensor, layout: str) -> Tensor:
    """View a pool of either layout as ``[pages, page_size, heads, width]``."""
    return pool if layout == "NHD" else pool.transpose(1, 2)


def warm(
    spec: CacheSpec,
    device: torch.device,
    pools: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Load what `write_rows` needs for caches of `spec`, so that a CUDA graph may record it.

    Parameters
    ----------
    spec, device
        The cache.
    pools
        Key and value pools as `write_rows` will get them, where their strides, or the alignment of
        their addresses, are not those of a cache that was allocated as `spec` says. They stay as
        they are.
    """
    if device.type != "cuda":
        return
    from .triton_ops import warm_append, warm_append_nvfp4

    if pools is None:
        dtype = getattr(torch, spec.storage_dtype)
        pages = (
            torch.empty((1, *shape[1:]), dtype=dtype, device=device)
            for shape in (spec.key_shape, spec.value_shape)
        )
        pools = [(next(pages), next(pages))]
    # A quantised cache takes rows of every model dtype.
    row_dtypes = FLOAT_DTYPES if spec.quantized else (spec.dtype,)
    for key_pool, value_pool in pools:
        for name in row_dtypes:
            row_dtype = getattr(torch, name)
            if spec.dtype in NVFP4_DTYPES:
                warm_append_nvfp4(
                    key_pool,
                    value_pool,
                    row_dtype,
                    layout=spec.layout,
                    four_over_six=spec.dtype == "nvfp4_4over6",
                )
            else:
                warm_append(
                    token_major(key_pool, spec.layout),
                    token_major(value_pool, spec.layout),
                    row_dtype,
                )


def write_rows(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cache_spec: CacheSpec,
    slots: Tensor,
    scale_table: Tensor | None = None,
    scale_layer: Tensor | None = None,
) -> None:
    """Write row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    On a GPU a Triton kernel does it, which leaves the same bytes and can be recorded.

    Parameters
    ----------
    key, value
        ``[rows, heads, width]``, contiguous, at least as many rows as slots; of the cache's dtype,
        or of any float type where it is quantised.
    key_pool, value_pool
        Pages of a cache like `cache_spec`, or of one layer of it, in its layout; any strides whose
        last is 1, and of NVFP4 any page stride.
    cache_spec
        Gives dtype and layout.
    slots
        ``[slots]`` int32, ``page * page_size + offset`` in these pools.
    scale_table, scale_layer
        Of a quantised cache: ``[num_layers, 2, heads]`` float32, and ``[1]`` int32 on the device,
        which layer's scales to use.
    """
    if key.is_cuda:
        # The slots of a step without rows are one of -1, and its rows are at no address.
        if key.shape[0]:
            _launch(key, value, key_pool, value_pool, cache_spec, slots, scale_table, scale_layer)
        return
    # torch reads -1 as the last element, so padding has to be left out by name.
    rows = torch.nonzero(slots >= 0).flatten()
    kept = slots[rows].long()
    where = (kept // cache_spec.page_size, kept % cache_spec.page_size)
    scales: Iterable[Tensor | None] = (None, None)
    if scale_table is not None and scale_layer is not None:
        scales = scale_table[int(scale_layer)]
    for given, pool, scale in zip((key, value), (key_pool, value_pool), scales, strict=True):
        for part, region in _stored(given[rows], pool, cache_spec, scale):
            # As bytes: not every release of torch can write to fp8 by index.
            raw = torch.uint8 if region.itemsize == 1 else region.dtype
            token_major(region, cache_spec.layout).view(raw).index_put_(where, part.view(raw))


def _stored(
    rows: Tensor, pool: Tensor, spec: CacheSpec, scale: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """What to write for `rows`, and the part of the pool that it goes to."""
    if scale is None:
        return [(rows, pool)]
    if spec.dtype in FP8_DTYPES:
        return [(quantise_fp8(rows, scale, spec.dtype), pool)]
    parts = quantise_nvfp4(rows, scale, four_over_six=spec.dtype == "nvfp4_4over6")
    return list(zip(parts, nvfp4_regions(pool), strict=True))


def _launch(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    spec: CacheSpec,
    slots: Tensor,
    scale_table: Tensor | None,
    scale_layer: Tensor | None,
) -> None:
    # Here, because the CPU needs no Triton.
    from . import triton_ops

    if spec.dtype in NVFP4_DTYPES:
        assert scale_table is not None
        assert scale_layer is not None
        triton_ops.append_nvfp4(
            key,
            value,
            key_pool,
            value_pool,
            slots,
            layout=spec.layout,
            four_over_six=spec.dtype == "nvfp4_4over6",
            scale_table=scale_table,
            scale_layer=scale_layer,
        )
        return
    triton_ops.append(
        key,
        value,
        token_major(key_pool, spec.layout),
        token_major(value_pool, spec.layout),
        slots,
        scale_table=scale_table,
        scale_layer=scale_layer,
    )
