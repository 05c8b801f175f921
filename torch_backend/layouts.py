"""Caches that another engine allocated, seen in the shapes that this library reads.

Nothing here copies. An engine packs a token's key and value of one head side by side and stores
layers (L), pages (B), heads (H), the tokens of a page (N) and these contents (C) in one of a few
orders, which are named by their letters from far to near in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from interop.errors import ArgumentError, DeviceError, DTypeError, FrameworkError, ShapeError
from interop.spec import FP8_DTYPES, NVFP4_DTYPES, AttentionSpec, CacheSpec, dtype_name

__all__ = [
    "ORDERS",
    "PackedPools",
    "canonical",
    "canonical_strides",
    "import_packed",
    "split_packed",
]

# Memory orders, and the layout of one layer's pages in each.
ORDERS = {"LBHNC": "HND", "BLHNC": "HND", "BHLNC": "HND", "LBNHC": "NHD", "BLNHC": "NHD"}
ORDER_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}
# Axes of one layer's tensor as engines show it, whatever the memory order.
LOGICAL = "BHNC"
# GPU kernels read rows with loads of so many bytes.
GPU_ALIGNMENT = 16


class PackedPools(NamedTuple):
    """An imported cache.

    Parameters
    ----------
    layers
        Keys and values of each layer, ``[num_pages, page_size, num_kv_heads, width]`` in layout
        ``"NHD"``, ``[num_pages, num_kv_heads, page_size, width]`` in ``"HND"``.
    spec
        Shape of the cache; ``spec.layers_apart`` says that there is no `flat`.
    flat
        Keys and values of all layers, ``[num_layers * num_pages, ...]``, layer ``l`` from page
        ``l * num_pages`` on; `None` where layers do not follow one another in one memory.
    """

    layers: list[tuple[Tensor, Tensor]]
    spec: CacheSpec
    flat: tuple[Tensor, Tensor] | None


def canonical_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor for every dimension of size 1, the given ones for others.

    A dimension of size 1 is never stepped along, so frameworks leave any stride there. What reads
    strides all the same (a descriptor of the GPU's copy engine takes multiples of 16 bytes only)
    needs one that follows from the dimensions inside of it.

    Parameters
    ----------
    shape, strides
        Of one tensor, in elements.
    """
    found = list(strides)
    inner = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            found[axis] = inner
        inner = found[axis] * shape[axis]
    return tuple(found)


def canonical(tensor: Tensor) -> Tensor:
    """View a tensor with `canonical_strides`; the tensor itself where it has them already."""
    strides = canonical_strides(tensor.shape, tensor.stride())
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def split_packed(cache: Tensor, head_dim: int, *, order: str = "LBHNC") -> tuple[Tensor, Tensor]:
    """View one layer's packed cache as keys and values.

    Parameters
    ----------
    cache
        ``[num_pages, num_kv_heads, page_size, head_dim + head_dim_v]`` in this order of axes,
        whatever the order in memory; not NVFP4, see `import_packed`.
    head_dim
        Width of a key; the rest of the last dimension is the value.
    order
        Order in memory: ``"LBHNC"`` (or ``"HND"``), ``"BLHNC"``, ``"BHLNC"``, ``"LBNHC"`` (or
        ``"NHD"``), ``"BLNHC"``.

    Returns
    -------
    (Tensor, Tensor)
        Views ``[num_pages, num_kv_heads, page_size, width]`` where pages are head-major, else
        ``[num_pages, page_size, num_kv_heads, width]``. Both have the strides of `cache`: rows of
        key and value take turns, and pages may be further apart than a page is long.

    Raises
    ------
    ArgumentError, FrameworkError, ShapeError
        For an order without a name, and a tensor that has another order, has gaps within its rows,
        or overlaps itself.
    """
    order = _order_of(order)
    _check_tensor("cache", cache, 4)
    if not 0 < head_dim < cache.shape[3]:
        raise ShapeError(
            "head_dim",
            given=f"{head_dim}, with {cache.shape[3]} elements a token and head in the cache",
            wanted="fewer than these, since key and value lie side by side in them",
        )
    return _split(_in_memory_order("cache", cache, order), head_dim)


def import_packed(
    tensors: Tensor | Sequence[Tensor],
    *,
    spec: AttentionSpec,
    dtype: object | None = None,
    order: str = "LBHNC",
) -> PackedPools:
    """View a cache that an engine allocated as pools of this library, without a copy.

    Parameters
    ----------
    tensors
        Either one tensor for each layer, ``[num_pages, num_kv_heads, page_size, head_dim +
        head_dim_v]`` in this order of axes whatever the order in memory, or one tensor of all
        layers whose axes are in the order that `order` names, e.g. ``[num_layers, num_pages,
        page_size, num_kv_heads, head_dim + head_dim_v]`` for ``"LBNHC"``.

        NVFP4 has ``2 * num_kv_heads`` heads, those of the keys first, and ``head_dim / 2 +
        head_dim / 16`` bytes in the last dimension. The bytes of a page's keys, and those of its
        values, must lie together.
    spec
        The attention that reads the cache.
    dtype
        Format of the cache as `interop.CacheSpec` has it. It may be left out where the tensors have
        it; bytes (``uint8``) are taken for the 8-bit floats or the NVFP4 that it names.
    order
        As for `split_packed`.

    Raises
    ------
    ArgumentError, FrameworkError, ShapeError, DTypeError, DeviceError
        For tensors that do not fit `spec`, `order` and one another, or that would need a copy.
    """
    order = _order_of(order)
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError("spec", given=type(spec).__name__, wanted="an AttentionSpec")
    named = _layers_of(tensors, order)
    first = named[0][1]
    shape = _cache_spec(first, len(named), spec, dtype, order)
    storage = getattr(torch, shape.storage_dtype)
    layers = []
    for name, tensor in named:
        _check_alike(name, tensor, first)
        packed = _in_memory_order(name, _plain(tensor, storage), order, len(named))
        if shape.dtype in NVFP4_DTYPES:
            key, value = _halves(name, packed, shape.layout)
        else:
            key, value = _split(packed, shape.head_dim)
        if first.is_cuda:
            check_gpu_alignment(name, key, value)
        layers.append((key, value))
    keys, values = (_in_one([layer[side] for layer in layers]) for side in (0, 1))
    if keys is None or values is None:
        return PackedPools(layers, replace(shape, layers_apart=True), None)
    return PackedPools(layers, shape, (keys, values))


def _order_of(order: object) -> str:
    """Return one of `ORDERS`, or say that it is none."""
    if isinstance(order, str) and ORDER_ALIASES.get(order, order) in ORDERS:
        return ORDER_ALIASES.get(order, order)
    given = repr(order)
    if order == "LHBNC":
        given += ", in which a page's heads lie in as many places"
    raise ArgumentError(
        "order",
        given=given,
        wanted=f"one of {', '.join(ORDERS)}",
        remedy="Have the engine allocate its cache in one of these orders.",
    )


def _check_tensor(name: str, tensor: object, rank: int) -> None:
    if not isinstance(tensor, Tensor):
        raise FrameworkError(
            name,
            given=f"{type(tensor).__module__}.{type(tensor).__name__}",
            wanted="a torch.Tensor",
            remedy="View a JAX array with interop.dlpack.to_torch.",
        )
    if tensor.ndim != rank:
        raise ShapeError(name, given=f"shape {list(tensor.shape)}", wanted=f"{rank} dimensions")
    if tensor.layout != torch.strided or not tensor.numel():
        given = f"{tensor.layout} of {list(tensor.shape)}"
        raise ShapeError(name, given=given, wanted="a dense tensor that is not empty")


def _layers_of(tensors: object, order: str) -> list[tuple[str, Tensor]]:
    """Name each layer's tensor, and bring its axes into the order `LOGICAL`."""
    if isinstance(tensors, (list, tuple)):
        if not tensors:
            raise ArgumentError("tensors", given="none", wanted="one for each layer")
        for layer, tensor in enumerate(tensors):
            _check_tensor(f"tensors[{layer}]", tensor, 4)
        return [(f"tensors[{layer}]", tensor) for layer, tensor in enumerate(tensors)]
    _check_tensor("tensors", tensors, 5)
    assert isinstance(tensors, Tensor)
    _check_nested("tensors", tensors, order, order)
    axes = [order.replace("L", "").index(letter) for letter in LOGICAL]
    layers = tensors.unbind(order.index("L"))
    return [("tensors", layer.permute(axes)) for layer in layers]


def _check_alike(name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.device != first.device:
        raise DeviceError(
            name, given=str(tensor.device), wanted=f"{first.device}, where the first layer lies"
        )
    if tensor.dtype != first.dtype:
        raise DTypeError(
            name,
            given=dtype_name(tensor.dtype),
            wanted=f"{dtype_name(first.dtype)}, as the first layer has",
        )
    if tensor.shape != first.shape:
        raise ShapeError(
            name,
            given=list(tensor.shape),
            wanted=f"{list(first.shape)}, as the first layer has",
            remedy="Import layers of different shapes as caches of their own.",
        )


def _cache_spec(
    first: Tensor, num_layers: int, spec: AttentionSpec, dtype: object | None, order: str
) -> CacheSpec:
    """Shape of the cache whose first layer this is, checked against the tensor."""
    held = dtype_name(first.dtype)
    if dtype is None and held == "uint8":
        raise DTypeError(
            "dtype",
            given="none for a cache of bytes",
            wanted=f"what they stand for, one of {', '.join((*FP8_DTYPES, *NVFP4_DTYPES))}",
        )
    if first.device.type not in ("cpu", "cuda"):
        raise DeviceError("tensors", given=str(first.device), wanted="CPU or CUDA tensors")
    pages, heads, page_size, width = first.shape
    shape = CacheSpec.of(
        spec,
        num_layers=num_layers,
        num_pages=pages,
        page_size=page_size,
        dtype=held if dtype is None else dtype,
        layout=ORDERS[order],
        device=first.device.type,
    )
    accepted = {shape.storage_dtype} | ({"uint8"} if shape.dtype in FP8_DTYPES else set())
    if held not in accepted:
        raise DTypeError(
            "tensors",
            given=held,
            wanted=f"{' or '.join(sorted(accepted))} for a cache of {shape.dtype}",
            remedy="Nothing is converted: import the cache with the dtype that it has.",
        )
    if shape.storage_dtype != "uint8":
        wanted, what = (spec.num_kv_heads, spec.head_dim + spec.head_dim_v), "key and value"
    elif spec.head_dim_v == spec.head_dim:
        wanted, what = (2 * spec.num_kv_heads, shape.key_shape[3]), "data and block scales"
    else:
        raise ShapeError(
            "spec.head_dim_v",
            given=f"{spec.head_dim_v} with head_dim = {spec.head_dim}",
            wanted="head_dim, since heads of keys and values share one axis in NVFP4",
        )
    if (heads, width) != wanted:
        raise ShapeError(
            "tensors",
            given=f"{list(first.shape)} as [num_pages, heads, page_size, contents]",
            wanted=f"{wanted[0]} heads, and {what} in {wanted[1]} elements, from spec",
            remedy="A layer's axes keep this order whatever its order in memory; those of one "
            "tensor for all layers are in the order that `order` names.",
        )
    return shape


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View memory as `dtype`, which has the same size."""
    # A new tensor, since one of inference mode, or with a gradient, refuses later writes.
    with torch.inference_mode(False):
        fresh = torch.empty(0, dtype=dtype, device=tensor.device)
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        return fresh.set_(tensor.untyped_storage(), *where)


def _in_memory_order(name: str, tensor: Tensor, order: str, num_layers: int = 1) -> Tensor:
    """Bring a layer's axes from `LOGICAL` into `order`, and check that memory has that order."""
    axes = order.replace("L", "")
    view = canonical(tensor.permute([LOGICAL.index(letter) for letter in axes]))
    _check_nested(name, view, axes, order)
    outer, row = view.shape[2] * view.shape[3], view.shape[3]
    layers_at = order.index("L") - 1  # between steps along this axis lie the other layers
    dense = view.stride(2) == row and (layers_at == 1 or view.stride(1) == outer)
    if layers_at >= 0 and view.shape[layers_at] > 1:
        between = num_layers * (view.shape[1] * outer if layers_at == 0 else outer)
        dense = dense and view.stride(layers_at) >= between
    if not dense:
        raise _misplaced(name, view, axes, order)
    return view


def _check_nested(name: str, view: Tensor, axes: str, order: str) -> None:
    """Raise unless each axis steps over all that the axes after it span."""
    span = 1
    for axis in reversed(range(view.ndim)):
        if view.shape[axis] == 1:
            continue
        if view.stride(axis) < span or (axis == view.ndim - 1 and view.stride(axis) != 1):
            raise _misplaced(name, view, axes, order)
        span += (view.shape[axis] - 1) * view.stride(axis)


def _misplaced(name: str, view: Tensor, axes: str, order: str) -> ShapeError:
    far_to_near = sorted(range(view.ndim), key=view.stride, reverse=True)
    found = "".join(axes[axis] for axis in far_to_near if view.shape[axis] > 1)
    sizes = ", ".join(f"{letter}={size}" for letter, size in zip(axes, view.shape, strict=True))
    return ShapeError(
        name,
        given=f"strides {view.stride()} of axes {sizes}, from far to near {found}",
        wanted=f"memory in the order {order} with the contents of a token and head side by side",
        remedy="Name the order that the cache has; one that has none of the names would need a "
        "copy, and nothing is copied silently.",
    )


def _split(packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    return canonical(packed[..., :head_dim]), canonical(packed[..., head_dim:])


def _halves(name: str, packed: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values of NVFP4, which are halves of the heads."""
    key, value = (canonical(half) for half in packed.chunk(2, 1 if layout == "HND" else 2))
    dense = (key.shape[2] * key.shape[3], key.shape[3], 1)
    if key.stride()[1:] != dense:
        raise ShapeError(
            name,
            given=f"strides {key.stride()} of the keys {list(key.shape)}",
            wanted="all bytes of a page's keys together, since its block scales follow its data",
            remedy="Have the engine allocate NVFP4 caches in the order LBHNC or BLHNC.",
        )
    return key, value


def check_gpu_alignment(name: str, *pools: Tensor) -> None:
    """Raise `ShapeError` where kernels could not read rows of these pools 16 bytes at a time."""
    for pool in pools:
        # Rows of NVFP4 are regions of a page, which its reader finds by itself.
        axes = 1 if pool.dtype == torch.uint8 else 3
        steps = [pool.element_size() * stride for stride in pool.stride()[:axes]]
        start = pool.data_ptr() % GPU_ALIGNMENT
        if start or any(step % GPU_ALIGNMENT for step in steps):
            raise ShapeError(
                name,
                given=f"keys or values {start} bytes past a multiple of {GPU_ALIGNMENT}, with "
                f"steps of {steps} bytes",
                wanted=f"multiples of {GPU_ALIGNMENT} bytes, which kernels read at once",
                remedy="Have the engine align its cache, and pad its pages, to as much.",
            )


def _in_one(pools: list[Tensor]) -> Tensor | None:
    """View layers as one pool; `None` where they do not follow one another in one memory."""
    first = pools[0]
    if len(pools) == 1:
        return first
    pages = first.shape[0]
    steps = {after.storage_offset() - before.storage_offset() for before, after in pairwise(pools)}
    # A single page has no stride of its own, so any distance between layers will do.
    page_stride = first.stride(0) if pages > 1 else max(steps)
    memories = [pool.untyped_storage() for pool in pools]
    alike = {(m.data_ptr(), m.nbytes(), p.stride()) for m, p in zip(memories, pools, strict=True)}
    if len(alike) > 1 or page_stride <= 0 or steps != {pages * page_stride}:
        return None
    with torch.inference_mode(False):
        shape = (len(pools) * pages, *first.shape[1:])
        return first.as_strided(shape, (page_stride, *first.stride()[1:]))
