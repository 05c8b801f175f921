"""Shapes in which TPU code holds the keys and values of a layer, all in one array."""

from __future__ import annotations

import jax

from interop.errors import DTypeError, ShapeError
from interop.host import round_up
from interop.spec import FLOAT_DTYPES, FP8_DTYPES, CacheSpec

from ..arranged import IN_TURN, SIDE_BY_SIDE, ArrangedArrays, warm_writes
from ..cache import default_device
from .arguments import device_kind

__all__ = ["arranged", "cache_spec_of", "heads_of"]

# Columns of a TPU's registers, and bytes of one of their words.
LANES, WORD_BYTES = 128, 4
# Heads of this width have key and value in one row of a register's columns.
HALF = LANES // 2


def _forms(num_kv_heads: int, head_dim: int, item_bytes: int) -> dict[tuple[int, ...], str]:
    """What may come after ``[num_pages, page_size]``, and how keys and values lie in it.

    TPU kernels fill rows up to whole words, of which each takes several, and columns up to whole
    registers.
    """
    packed = WORD_BYTES // item_bytes
    forms: dict[tuple[int, ...], str] = {}
    for width in (head_dim, round_up(head_dim, LANES)):
        forms[2 * num_kv_heads, width] = IN_TURN
        forms[round_up(2 * num_kv_heads, packed) // packed, packed, width] = IN_TURN
    if head_dim == HALF:
        # Instead of rows in turn, where those of one head have this shape, too: so TPU code has it.
        forms[round_up(num_kv_heads, packed) // packed, packed, LANES] = SIDE_BY_SIDE
    return forms


def heads_of(kv_cache: jax.Array, head_dim: int) -> int:
    """Heads of keys that fill a cache of which no keys are given, padding among them."""
    *rows, width = kv_cache.shape[2:]
    count = rows[0] if len(rows) == 1 else rows[0] * rows[1]
    halves = (len(rows), head_dim, width) == (2, HALF, LANES)
    return max(count if halves else count // 2, 1)


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
            wanted="[num_pages, page_size] and then one of "
            f"{', '.join(map(str, map(list, forms)))}, for {num_kv_heads} heads of {head_dim}",
            remedy="Key 0, value 0, key 1, value 1 and so on follow one another in a token.",
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
    """Look at a TPU kernel's array as pools of `spec`.

    Calls get the array as it is, and not in another shape: XLA copies what a call writes in place
    if it was reshaped before.
    """
    _, _, *form = kv_cache.shape
    how = _forms(spec.num_kv_heads, spec.head_dim, kv_cache.dtype.itemsize)[tuple(form)]
    if spec.device == "cuda":
        warm_writes(spec, how, kv_cache.shape[1:], default_device().local_hardware_id)
    return ArrangedArrays((kv_cache,), how, spec)
