"""Memory for keys and values: the paged pool that torch owns."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from interop.errors import (
    ArgumentError,
    DeviceError,
    OutOfDeviceMemoryError,
    UnsupportedError,
)
from interop.spec import AttentionSpec, CacheSpec

from .layouts import import_packed
from .paging import CopyPages
from .quantising import check_scales
from .shared_memory import SharedPools, attach_shared, create_shared
from .writing import warm

__all__ = ["WHOLE_POOL", "PagedKVCache", "largest_num_pages"]

# Stands for a layer number where page and slot numbers already count from the pool's start.
WHOLE_POOL = -1

# Its multiprocessors have an instruction for it, which the Triton kernels use.
LEAST_CAPABILITY_8BIT = (8, 9)


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
    scales
        Of a quantised cache, ``real / stored`` of keys and values: a number, a tuple of keys' and
        values' own, or an array; see `quantising.check_scales` for their shapes. All 1 when left
        out. On a cache that is not quantised they are ignored, with a warning.

    Attributes
    ----------
    spec : CacheSpec
        Shape of the cache, to plan with.
    k, v : Tensor
        The flat pools; shapes in `interop.CacheSpec`. Pages start as zeros. An imported cache whose
        layers lie apart (``spec.layers_apart``) has none.
    scales : Tensor or None
        ``[num_layers, 2, num_kv_heads]`` float32 on the device, of a quantised cache.

    Raises
    ------
    ArgumentError, ShapeError
        For sizes out of range, and scales that are no positive numbers.
    """

    spec: CacheSpec
    device: torch.device
    k: Tensor
    v: Tensor
    scales: Tensor | None

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
        scales: object | None = None,
    ) -> None:
        where = device_of(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        shape = CacheSpec.of(
            spec,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            device=where.type,
        )
        shape, table = checked_scales(shape, scales)
        _check_device(shape, where)
        # Tensors made in inference mode can be written in that mode only, and the threads on which
        # XLA runs its calls are not in it.
        with torch.inference_mode(False):
            self._hold(shape, where, _allocate(shape, where), (), table)

    @classmethod
    def from_packed(
        cls,
        tensors: Tensor | Sequence[Tensor],
        *,
        spec: AttentionSpec,
        dtype: object | None = None,
        order: str = "LBHNC",
        scales: object | None = None,
    ) -> PagedKVCache:
        """Look at a cache that another engine allocated, with keys and values packed side by side.

        Nothing is copied: both sides see each other's writes, and the memory lives as long as
        either. Layers that do not lie one after another in one memory give a cache with
        ``spec.layers_apart``, whose layers must be known when a JAX program is traced.

        Parameters
        ----------
        tensors, spec, dtype, order
            As for `layouts.import_packed`.
        scales
            As for the class.

        Raises
        ------
        ArgumentError, FrameworkError, ShapeError, DTypeError, DeviceError
            For tensors that do not fit, or would have to be copied.
        """
        packed = import_packed(tensors, spec=spec, dtype=dtype, order=order)
        shape, table = checked_scales(packed.spec, scales)
        _check_device(shape, packed.layers[0][0].device)
        cache = cls.__new__(cls)
        with torch.inference_mode(False):
            cache._hold(shape, packed.layers[0][0].device, packed.flat, packed.layers, table)
        return cache

    @classmethod
    def create_shared(
        cls,
        path: str | os.PathLike[str],
        spec: AttentionSpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 16,
        dtype: object = "bfloat16",
        layout: str = "NHD",
        scales: object | None = None,
    ) -> PagedKVCache:
        """Make a cache on the CPU in a file that other processes `attach`.

        Parameters
        ----------
        path
            A file that does not exist, best on a file system in memory such as ``/dev/shm``. To
            delete it is left to the caller; processes that have the cache keep it.
        spec, num_layers, num_pages, page_size, dtype, layout, scales
            As for the class.
        """
        shape = CacheSpec.of(
            spec,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            device="cpu",
        )
        shape, table = checked_scales(shape, scales)
        with torch.inference_mode(False):
            return cls._of_shared(create_shared(path, shape, table))

    @classmethod
    def attach(
        cls, path: str | os.PathLike[str], expected: CacheSpec | None = None
    ) -> PagedKVCache:
        """Look at the cache in a file that a process made with `create_shared`.

        Nothing orders what processes write and read: they have to tell one another when a write is
        finished.

        Parameters
        ----------
        path
            The file.
        expected
            Shape that the cache must have; any when left out.

        Raises
        ------
        ArgumentError, PlanError, OSError
            For a file that is none of these, or has another shape.
        """
        with torch.inference_mode(False):
            return cls._of_shared(attach_shared(path, expected))

    @classmethod
    def _of_shared(cls, shared: SharedPools) -> PagedKVCache:
        cache = cls.__new__(cls)
        flat = shared.key, shared.value
        cache._hold(shared.spec, torch.device("cpu"), flat, (), shared.scales)
        return cache

    def _hold(
        self,
        spec: CacheSpec,
        device: torch.device,
        flat: tuple[Tensor, Tensor] | None,
        layers: Sequence[tuple[Tensor, Tensor]],
        scales: Tensor | None,
    ) -> None:
        """Take hold of memory: both flat pools, or else a pair of views for each layer."""
        self.spec = spec
        self.device = device
        self._pools = dict(enumerate(layers))
        if flat is not None:
            self.k, self.v = flat
            self._pools = {
                layer: layer_pools(*flat, spec, layer)
                for layer in (WHOLE_POOL, *range(spec.num_layers))
            }
        self.scales = None if scales is None else scales.to(device)
        # A kernel finds a layer's scales by a number in memory, as a layer may be traced. Each is
        # aligned to 16 bytes, or else Triton would compile a kernel of its own for those that are.
        numbers = torch.arange(spec.num_layers, dtype=torch.int32, device=device)
        self._numbers = numbers.repeat_interleave(4).view(-1, 4)[:, :1].unbind(0)
        warm(spec, device, layers if flat is None else [flat])

    def __repr__(self) -> str:
        return f"PagedKVCache({self.spec}, device={str(self.device)!r})"

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, views ``[num_pages, ...]`` of the flat pools."""
        return self._pools[layer]

    def copy_pages(self, copies: CopyPages) -> None:
        """Make the copies that a `PageAllocator` asks for, in all layers, before the next write.

        Parameters
        ----------
        copies
            From `PageAllocator.take_copies`. All sources are read before a target is written. On a
            GPU the copies are made on torch's current stream.
        """
        if not len(copies):
            return
        source, target = (
            torch.from_numpy(pages.astype(np.int64)).to(self.device)
            for pages in (copies.source, copies.target)
        )
        for layer in range(self.spec.num_layers):
            for pool in self.pools(layer):
                # As bytes, since not every operation knows 8-bit floats.
                plain = pool.view(torch.uint8) if pool.element_size() == 1 else pool
                plain.index_copy_(0, target, plain.index_select(0, source))

    def scale_operands(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales of all layers and the number of one, as kernels take them; `None` without."""
        if self.scales is None:
            return None, None
        return self.scales, self._numbers[layer]

    def set_scales(self, scales: object) -> None:
        """Replace the scales of a quantised cache, in place, so that recorded graphs see them.

        What the pages hold was stored with the old scales and means nothing from here on.

        Parameters
        ----------
        scales
            As for the class. They may differ from head to head only if the first ones did, since
            plans depend on it.

        Raises
        ------
        ArgumentError, ShapeError
            For scales that do not fit; nothing is changed then.
        """
        if self.scales is None:
            raise ArgumentError(
                "scales", given=f"scales for a cache of {self.spec.dtype}", wanted="a quantised one"
            )
        shape, table = checked_scales(self.spec, scales)
        if shape.scales_per_head and not self.spec.scales_per_head:
            raise ArgumentError(
                "scales",
                given="scales that differ from head to head",
                wanted="one scale a layer, as the cache was made with",
                remedy="Make the cache with scales per head.",
            )
        assert table is not None
        with torch.inference_mode(False):
            self.scales.copy_(table)


def checked_scales(spec: CacheSpec, scales: object | None) -> tuple[CacheSpec, Tensor | None]:
    """Return the spec of a cache with these scales, and the scales on the host.

    Parameters
    ----------
    spec
        Shape of the cache.
    scales
        As `PagedKVCache` takes them.

    Raises
    ------
    ArgumentError, ShapeError
        For scales that do not fit.
    """
    if not spec.quantized:
        if scales is not None:
            warnings.warn(
                f"scales are ignored: a cache of {spec.dtype} holds numbers as they are. Make it "
                "with dtype='float8_e4m3fn' to store them in 8 bits.",
                RuntimeWarning,
                stacklevel=3,
            )
        return spec, None
    table = check_scales(scales, spec)
    per_head = bool((table != table[:, :, :1]).any())
    return replace(spec, scales_per_head=per_head or spec.scales_per_head), table


def _check_device(spec: CacheSpec, device: torch.device) -> None:
    """Raise `UnsupportedError` where a GPU cannot convert to the format of a cache."""
    if not spec.quantized or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY_8BIT:
        major, minor = capability
        raise UnsupportedError(
            f"a cache of {spec.dtype} needs a GPU that converts to 8-bit floats, of compute "
            f"capability 8.9 or later, and {device} has {major}.{minor}. Make the cache with "
            "dtype='bfloat16'."
        )


def _allocate(spec: CacheSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both pools, as zeros; an error that says who has the memory where they do not fit."""
    dtype = torch_dtype(spec.storage_dtype)
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
