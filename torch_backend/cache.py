"""Memory for keys and values: the paged pool that torch owns."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from interop.errors import (
    DeviceError,
    OutOfDeviceMemoryError,
)
from interop.spec import AttentionSpec, CacheSpec

from .writing import warm

__all__ = ["WHOLE_POOL", "PagedKVCache", "largest_num_pages"]

# Stands for a layer number where page and slot numbers already count from the pool's start.
WHOLE_POOL = -1


class PagedKVCache:
    """Keys and values of all layers of a model, in pages, owned by torch.

    Parameters
    ----------
    spec
        The attention that reads the cache; gives heads and head widths.
    num_layers, num_pages, page_size, dtype, layout
        See `interop.CacheSpec`; `dtype` takes a name or a ``torch.dtype``.
    device
        Where the pool lies, e.g. ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    Attributes
    ----------
    spec : CacheSpec
        Shape of the cache, to plan with.
    k, v : Tensor
        The flat pools; shapes in `interop.CacheSpec`. Pages start as zeros.

    Raises
    ------
    ArgumentError
        For sizes out of range.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 16,
        dtype: object = "bfloat16",
        layout: str = "NHD",
        device: torch.device | str = "cpu",
    ) -> None:
        where = device_of(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        self.spec = CacheSpec.of(
            spec,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            device=where.type,
        )
        self.device = where
        # Tensors made in inference mode can be written in that mode only, and the threads on which
        # XLA runs its calls are not in it.
        with torch.inference_mode(False):
            self.k, self.v = _allocate(self.spec, where)
            self._pools = {
                layer: layer_pools(self.k, self.v, self.spec, layer)
                for layer in (WHOLE_POOL, *range(num_layers))
            }
        warm(self.spec, where)

    def __repr__(self) -> str:
        return f"PagedKVCache({self.spec}, device={str(self.device)!r})"

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, views ``[num_pages, ...]`` of the flat pools."""
        return self._pools[layer]


def _allocate(spec: CacheSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both pools, as zeros; an error that says who has the memory where they do not fit."""
    dtype = torch_dtype(spec.dtype)
    try:
        return (
            torch.zeros(spec.key_shape, dtype=dtype, device=device),
            torch.zeros(spec.value_shape, dtype=dtype, device=device),
        )
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        need = spec.num_bytes
        raise OutOfDeviceMemoryError(
            f"the page pool needs {need / 2**30:.2f} GiB on {device}, where {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free: {(need - free) / 2**30:.2f} GiB missing. XLA takes "
            "three quarters of a card when it starts: set XLA_PYTHON_CLIENT_PREALLOCATE=false, or "
            "XLA_PYTHON_CLIENT_MEM_FRACTION to a smaller share, before JAX is imported. "
            "torch_backend.largest_num_pages says how large a pool fits.",
            missing_bytes=need - free,
        ) from error


def largest_num_pages(
    spec: AttentionSpec,
    *,
    num_layers: int,
    page_size: int = 16,
    dtype: object = "bfloat16",
    device: torch.device | str = "cuda",
    headroom_bytes: int = 1 << 30,
) -> int:
    """Pages per layer of the largest cache that fits a GPU's free memory now.

    Parameters
    ----------
    spec, num_layers, page_size, dtype, device
        As for `PagedKVCache`.
    headroom_bytes
        Memory to leave free for activations and scratch.

    Returns
    -------
    int
        0 where not even one page a layer fits.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    one = CacheSpec.of(
        spec,
        num_layers=num_layers,
        num_pages=1,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
    )
    return max(0, free - headroom_bytes) // one.num_bytes


def device_of(device: torch.device | str) -> torch.device:
    """Return the CPU or CUDA device that is meant, or say that it is none."""
    wanted = "'cpu' or 'cuda', or one of several such as 'cuda:1'"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError("device", given=repr(str(device)), wanted=wanted) from error
    if where.type not in ("cpu", "cuda"):
        raise DeviceError("device", given=repr(str(where)), wanted=wanted)
    return where


def layer_pools(k: Tensor, v: Tensor, spec: CacheSpec, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's keys and values as views of the flat pools; the pools for `WHOLE_POOL`."""
    if layer == WHOLE_POOL:
        return k, v
    first = layer * spec.num_pages
    return k[first : first + spec.num_pages], v[first : first + spec.num_pages]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch element type of the given name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
