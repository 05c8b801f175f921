"""Merging attention over disjoint sets of keys, in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from torch_backend.merging import check_states

__all__ = ["merge_states"]


def merge_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    Formula, shapes, dtypes and errors are those of `torch_backend.merge_states`.
    """
    check_states(jax.Array, "jax.Array", out_a, lse_a, out_b, lse_b)
    lses = [jnp.where(jnp.isfinite(s), s, -jnp.inf).astype(jnp.float32) for s in (lse_a, lse_b)]
    peak = jnp.maximum(*lses)
    floor = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = [jnp.exp(s - floor) for s in lses]
    total = weights[0] + weights[1]
    lse = floor + jnp.log(total)
    divisor = jnp.where(total == 0.0, 1.0, total)
    merged = jnp.zeros(out_a.shape, jnp.float32)
    for out, weight in zip((out_a, out_b), weights, strict=True):
        share = (weight / divisor)[..., None]
        merged = merged + jnp.where(share == 0.0, 0.0, out.astype(jnp.float32) * share)
    return merged.astype(out_a.dtype), lse
