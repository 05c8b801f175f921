"""Combining attention over disjoint sets of keys, in jax.numpy.

The formulas are those of `torch_backend.merging`, with the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type

from interop.errors import DTypeError, FrameworkError
from interop.sharding import check_rank
from interop.spec import FLOAT_DTYPES, dtype_name
from torch_backend.merging import (
    LSE_ROWS,
    ROWS,
    STACKED_LSE_ROWS,
    STACKED_ROWS,
    check_heads,
    check_states,
    packed_width,
)

__all__ = ["combine_states", "merge_states", "pack_partial", "scale_partial", "unpack_partial"]


def merge_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    Shapes, dtypes and errors are those of `torch_backend.merge_states`.
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    check_states(jax.Array, "jax.Array", states, (ROWS, LSE_ROWS, ROWS, LSE_ROWS))
    weights, lse = _weights(jnp.stack((lse_a, lse_b)))
    return _sum((out_a, out_b), weights).astype(out_a.dtype), lse


def combine_states(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of the keys of all ranks, from attention over those of each.

    Shapes, dtypes and errors are those of `torch_backend.combine_states`.
    """
    states = {"outs": outs, "lses": lses}
    check_states(jax.Array, "jax.Array", states, (STACKED_ROWS, STACKED_LSE_ROWS))
    weights, lse = _weights(lses)
    return _sum(outs, weights).astype(outs.dtype), lse


def scale_partial(
    out: jax.Array, lses: jax.Array, rank: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One rank's term of the sum that `combine_states` computes, for a sum over ranks.

    Shapes, dtypes and errors are those of `torch_backend.scale_partial`. `rank` may be traced, as
    ``jax.lax.axis_index`` is.
    """
    states = {"out": out, "lses": lses}
    check_states(jax.Array, "jax.Array", states, (ROWS, STACKED_LSE_ROWS))
    if not isinstance(rank, jax.Array):
        rank = check_rank(rank, lses.shape[0])
    weights, lse = _weights(lses)
    weight = jax.lax.dynamic_index_in_dim(weights, rank, keepdims=False)
    return _weighted(out, weight).astype(out.dtype), lse


def pack_partial(out: jax.Array, lse: jax.Array, size: int) -> jax.Array:
    """Put output and LSE of each rank's heads into one message for that rank.

    Arguments, bytes and errors are those of `torch_backend.pack_partial`, but the messages are
    unsigned integers as wide as the elements of `out`. Were they bfloat16, XLA would convert them
    to float32 and back for a collective on the CPU, which changes the bits of a NaN, and halves of
    an LSE may look like one.

    Returns
    -------
    jax.Array
        ``[size, tokens, heads / size, head_dim_v + k]``, uint32 (``k = 1``) or uint16 (``k = 2``).
    """
    check_states(jax.Array, "jax.Array", {"out": out, "lse": lse}, (ROWS, LSE_ROWS))
    check_heads(out, size)
    tokens, heads, width = out.shape
    words = _words(out.dtype)
    halves = 4 // np.dtype(words).itemsize
    lse_bits = bitcast_convert_type(lse, words).reshape(tokens, heads, halves)
    rows = jnp.concatenate((bitcast_convert_type(out, words), lse_bits), axis=-1)
    return jnp.moveaxis(rows.reshape(tokens, size, heads // size, width + halves), 1, 0)


def unpack_partial(packed: jax.Array, dtype: object) -> tuple[jax.Array, jax.Array]:
    """Read the messages of all ranks about one rank's heads.

    Parameters
    ----------
    packed
        ``[ranks, tokens, heads, head_dim_v + k]`` as `pack_partial` makes it.
    dtype
        Element type of the outputs.

    Returns
    -------
    (jax.Array, jax.Array)
        Output ``[ranks, tokens, heads, head_dim_v]`` and LSE ``[ranks, tokens, heads]`` float32, as
        `combine_states` takes them.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError
        If it is no such message.
    """
    if not isinstance(packed, jax.Array):
        given = f"{type(packed).__module__}.{type(packed).__name__}"
        raise FrameworkError("packed", given=given, wanted="a jax.Array")
    name = dtype_name(dtype)
    if name not in FLOAT_DTYPES:
        raise DTypeError("dtype", given=name, wanted=f"one of {', '.join(FLOAT_DTYPES)}")
    words = _words(name)
    if packed.dtype != words:
        raise DTypeError("packed", given=packed.dtype, wanted=f"{words.__name__}, bits of {name}")
    width = packed_width(packed, name)
    lse_bits = packed[..., width:] if words is np.uint16 else packed[..., width]
    outs = bitcast_convert_type(packed[..., :width], jnp.dtype(name))
    return outs, bitcast_convert_type(lse_bits, jnp.float32)


def _words(dtype: object) -> type[np.unsignedinteger[Any]]:
    """Integers as wide as elements of `dtype`."""
    return np.uint32 if dtype_name(dtype) == "float32" else np.uint16


def _weights(lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights of states and LSE of their union, from their LSEs; states are the first axis."""
    lses = jnp.where(jnp.isfinite(lses), lses, -jnp.inf)
    peak = lses.max(0)
    floor = jnp.where(peak == -jnp.inf, 0.0, peak)
    terms = jnp.exp(lses - floor)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return terms / jnp.where(total == 0.0, 1.0, total), floor + jnp.log(total)


def _weighted(out: jax.Array, weight: jax.Array) -> jax.Array:
    """Output times its weight in float32; where that is 0, the output may hold anything."""
    weight = weight[..., None]
    return jnp.where(weight == 0.0, 0.0, out.astype(jnp.float32) * weight)


def _sum(outs: Iterable[jax.Array], weights: jax.Array) -> jax.Array:
    """Weighted sum of outputs in float32."""
    total: Any = 0.0
    for out, weight in zip(outs, weights, strict=True):
        total = total + _weighted(out, weight)
    return total
