"""Attention sinks, for every kernel: what they change follows from the LSE."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["apply_attention_sink"]


def apply_attention_sink(out: jax.Array, lse: jax.Array, attention_sink: jax.Array) -> jax.Array:
    """Give each row's softmax a sink: a key that has a logit and no value.

    With the LSE ``l`` of a row, ``e**l`` is its softmax denominator. A sink of logit ``s`` makes
    ``e**l + e**s`` of it, so the output is multiplied by ``1 / (1 + e**(s - l))``. That is exact,
    whichever kernel computed the row and in however many parts.

    Parameters
    ----------
    out
        ``[tokens, num_qo_heads, head_dim_v]``, attention without the sink.
    lse
        ``[tokens, num_qo_heads]`` float32, natural logarithm, as ``return_lse=True`` gives it.
    attention_sink
        ``[num_qo_heads]`` of any float type: the logit of each head's sink, a natural logarithm
        that ``sm_scale`` does not multiply.

    Returns
    -------
    jax.Array
        Shape and dtype of `out`; computed in float32. A row that sees no key stays 0.
    """
    share = jax.nn.sigmoid(lse - attention_sink.astype(jnp.float32))
    # Where both logits are -inf, their difference is NaN.
    share = jnp.where(jnp.isneginf(lse), 0.0, share)
    return (out.astype(jnp.float32) * share[:, :, None]).astype(out.dtype)
