"""Attention sinks in JAX; `torch_backend.sinks` says what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from interop.plan import AttentionPlan
from torch_backend.kernels import FAMILIES

__all__ = ["apply_sinks", "owned_sinks"]


def apply_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """Give rows of attention their sinks, which were left out of the softmax.

    With the LSE ``l`` of a row, ``e**l`` is its softmax denominator. A sink of logit ``s`` makes
    ``e**l + e**s`` of it, so the output is multiplied by ``1 / (1 + e**(s - l))``. That is exact,
    whichever kernel computed the row and in however many parts. Merge partial results first, as a
    sink counts once.

    Parameters
    ----------
    out
        ``[tokens, num_qo_heads, head_dim_v]``, attention without sinks.
    lse
        ``[tokens, num_qo_heads]`` float32, natural logarithm, as ``return_lse=True`` gives it.
    sinks
        ``[num_qo_heads]`` of any float type: the logit of each head's sink, a natural logarithm
        that ``sm_scale`` does not multiply.

    Returns
    -------
    jax.Array
        Shape and dtype of `out`; computed in float32. A row that sees no key stays 0.
    """
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32))
    # Where both logits are -inf, their difference is NaN.
    share = jnp.where(jnp.isneginf(lse), 0.0, share)
    return (out.astype(jnp.float32) * share[:, :, None]).astype(out.dtype)


def owned_sinks(sinks: jax.Array | None, plan: AttentionPlan[Any]) -> tuple[jax.Array, ...]:
    """Sinks as the operand of a call, in memory of the program's own where it may be recorded.

    A jit argument may move from step to step, and a layer's slice of one does; the result of an
    operation does not. Word 0 of the metadata is always 0, which XLA cannot know.
    """
    if sinks is None:
        return ()
    if not FAMILIES[plan.static.main[0].family].recordable:
        return (sinks,)
    return (sinks + plan.metadata[0].astype(jnp.float32),)
