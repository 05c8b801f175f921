"""Where a layer lies, and writing rows to its slots."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from interop.attributes import Call
from interop.errors import ArgumentError, PlanError
from interop.plan import Launch
from interop.spec import CacheSpec
from torch_backend.cache import WHOLE_POOL

from .arranged import ArrangedArrays
from .cache import CacheArrays, CacheHandle, handle_in_program, owned_scales, owned_token
from .partitioning import foreign_call

__all__ = ["Layer", "layer_operand", "place", "write_slots"]

Cache = TypeVar("Cache", CacheHandle, CacheArrays, ArrangedArrays)
Layer = int | jax.Array


def write_slots(
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    launch: Launch,
    slots: jax.Array,
    layer: Layer,
) -> Cache:
    """Write row ``t`` of key and value to slot ``slots[t]`` of a layer; returns the cache after it.

    `slots` are ``[slots]`` int32 with -1 for none, no more than there are rows. Nothing is checked.
    """
    shape = cache.spec
    number, offset = place(layer, shape)
    if offset is not None:
        # -1 is no slot and stays none; a layer that the cache lacks has no slots.
        inside = (slots >= 0) & (layer >= 0) & (layer < shape.num_layers)
        slots = jnp.where(inside, slots + offset * shape.page_size, -1)
    which: tuple[jax.Array, ...] = layer_operand(layer, shape)
    if isinstance(cache, CacheHandle):
        call = Call(launch, cache.name, number, False)
        token = jax.ShapeDtypeStruct(cache.token.shape, cache.token.dtype)
        given: tuple[jax.Array, ...] = (key, value, slots, owned_token(cache), *which)
        (after,) = foreign_call("isthmus_append", call, given, (token,))
        return handle_in_program(cache, after)
    scales: tuple[jax.Array, ...] = (*owned_scales(cache), *which)
    call = Call(launch, "", number, False, arrangement=cache.arrangement)
    results = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in cache.pools]
    given = (key, value, slots, *cache.pools, *scales)
    in_place = {3 + i: i for i in range(len(results))}
    return cache.with_pools(foreign_call("isthmus_append", call, given, results, aliases=in_place))


def place(layer: Layer, shape: CacheSpec) -> tuple[int, jax.Array | None]:
    """Layer for the call's attribute, and what to add to page numbers where it is traced.

    A layer that is known at trace time becomes a view of the pool when the call runs. A traced one
    that the cache lacks is taken to the nearest that it has, as JAX clamps indices when it reads.
    """
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        if not 0 <= layer < shape.num_layers:
            raise ArgumentError(
                "layer", given=int(layer), wanted=f"a layer from 0 to {shape.num_layers - 1}"
            )
        return int(layer), None
    if not isinstance(layer, jax.Array) or layer.shape or layer.dtype.kind not in "iu":
        raise ArgumentError(
            "layer",
            given=f"{type(layer).__name__} {getattr(layer, 'dtype', '')}"
            f"{list(getattr(layer, 'shape', ()))}",
            wanted="an integer or a scalar integer array",
        )
    if shape.layers_apart:
        raise PlanError(
            "layer",
            given="a traced number, for a cache whose layers lie apart",
            wanted="an integer that is known when the program is traced",
            remedy="Unroll the loop over layers, or import the cache layer after layer in one "
            "allocation.",
        )
    return WHOLE_POOL, _nearest(layer, shape) * shape.num_pages


def _nearest(layer: jax.Array, shape: CacheSpec) -> jax.Array:
    return jnp.clip(layer, 0, shape.num_layers - 1).astype(jnp.int32)


def layer_operand(layer: Layer, shape: CacheSpec) -> tuple[jax.Array, ...]:
    """Layer as an operand ``[1]``, by which kernels find its scales; none where there are none."""
    if not shape.quantized:
        return ()
    if isinstance(layer, jax.Array):
        return (_nearest(layer, shape).reshape(1),)
    return (jnp.full((1,), layer, jnp.int32),)
