"""Shapes in which TPU code holds a layer's keys and values, as one array of rows and columns."""

from __future__ import annotations

import jax

from interop.errors import DTypeError, ShapeError
from interop.spec import FLOAT_DTYPES, FP8_DTYPES, AttentionSpec, CacheSpec

from ..arranged import INTERLEAVED, ArrangedArrays, warm_writes
from ..cache import default_device
from .arguments import device_kind

__all__ = ["arranged", "cache_spec_of", "heads_of"]

# Columns of a TPU's registers, and bytes of one of their words.
LANES, WORD_BYTES = 128, 4
# Heads of this width have key and value side by side in the columns.
HALF = LANES // 2


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _forms(num_kv_heads: int, head_dim: int, item_bytes: int) -> dict[tuple[int, ...], int]:
    """Dimensions after ``[num_pages, page_size]``, and how wide the rows are in each case.

    Rows of keys and values take turns. TPU kernels fill rows up to whole words, of which each has
    several, and columns up to whole registers.
    """
    packed = WORD_BYTES // item_bytes
    forms: dict[tuple[int, ...], int] = {}
    for width in (head_dim, _up(head_dim, LANES)):
        rows = _up(2 * num_kv_heads, packed)
        forms[2 * num_kv_heads, width] = width
        forms[rows // packed, packed, width] = width
    if head_dim == HALF:
        forms[_up(num_kv_heads, packed) // packed, packed, LANES] = HALF
    return forms


def heads_of(kv_cache: jax.Array, head_dim: int) -> int:
    """Heads of keys that fill a cache of which no keys are given, padding among them."""
    *rows, width = kv_cache.shape[2:]
    count = rows[0] if len(rows) == 1 else rows[0] * rows[1]
    return max(count if (len(rows), head_dim, width) == (2, HALF, LANES) else count // 2, 1)


def cache_spec_of(kv_cache: jax.Array, num_kv_heads: int, head_dim: int) -> CacheSpec:
    """Shape of the cache that a TPU kernel's array is, or a `ShapeError` or `DTypeError`."""
    dtype = kv_cache.dtype.name
    if dtype not in (*FLOAT_DTYPES, *FP8_DTYPES):
        wanted = f"one of {', '.join((*FLOAT_DTYPES, *FP8_DTYPES))}"
        raise DTypeError("kv_cache", given=dtype, wanted=wanted)
    forms = _forms(num_kv_heads, head_dim, kv_cache.dtype.itemsize)
    if kv_cache.shape[2:] not in forms:
        raise ShapeError(
            "kv_cache",
            given=list(kv_cache.shape),
            wanted=f"[num_pages, page_size, 2 * {num_kv_heads}, {head_dim}] for q and k of these "
            f"heads, or after page_size one of {', '.join(map(str, map(list, forms)))}",
            remedy="Keys and values take turns on the head axis: key 0, value 0, key 1, value 1.",
        )
    pages, page_size = kv_cache.shape[:2]
    return CacheSpec(
        num_layers=1,
        num_pages=pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device_kind(kv_cache),
    )


def arranged(kv_cache: jax.Array, spec: CacheSpec) -> ArrangedArrays:
    """Look at a TPU kernel's array as pools of `spec`, without a copy."""
    forms = _forms(spec.num_kv_heads, spec.head_dim, kv_cache.dtype.itemsize)
    pages, page_size, *form = kv_cache.shape
    whole = kv_cache.reshape(pages, page_size, -1, forms[tuple(form)])
    if spec.device == "cuda":
        warm_writes(spec, whole.shape[1:], default_device().local_hardware_id)
    return ArrangedArrays((whole,), INTERLEAVED, spec)
