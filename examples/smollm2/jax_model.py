"""The model in JAX: one jitted step, a scan over layers, paged attention through the front end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax import Array, lax

import jax_frontend
from examples.engine import StepInputs
from examples.smollm2.config import LlamaConfig
from examples.smollm2.gguf_weights import LayerWeights, Weights
from interop import AttentionPlan, AttentionSpec
from interop.dlpack import to_jax
from jax_frontend import CacheHandle
from torch_backend import PagedKVCache


class JaxStep:
    """One engine step of the JAX model; the weights are views of the given arrays.

    Parameters
    ----------
    weights : Weights of float32 NumPy arrays, on 64-byte boundaries
    cache : PagedKVCache
        On the CPU, owned by torch; JAX carries its handle from step to step.

    Attributes
    ----------
    num_traces : int
        How often JAX traced the model: once a bucket.
    """

    name = "jax"

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights[npt.NDArray[np.float32]],
        spec: AttentionSpec,
        cache: PagedKVCache,
    ) -> None:
        self._weights = weights.map(lambda array: to_jax(torch.from_numpy(array)))
        self._spec = spec
        self._cache_spec = cache.spec
        self._kv = jax_frontend.cache_handle(cache)
        # The weights are on the CPU, and so must the rest be, even where JAX prefers a GPU.
        self._device = jax.devices("cpu")[0]
        self.num_traces = 0

        @jax.jit
        def step(
            weights: Weights[Array],
            token_ids: Array,
            positions: Array,
            logit_rows: Array,
            kv: CacheHandle,
            plan: AttentionPlan[Array],
        ) -> tuple[Array, CacheHandle]:
            self.num_traces += 1
            return forward(config, weights, token_ids, positions, logit_rows, kv, plan)

        self._step = step

    def __call__(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Logits ``[bucket.num_requests, vocab]`` of the rows that ``inputs.logit_rows`` names."""
        plan = jax_frontend.plan(
            self._spec,
            self._cache_spec,
            inputs.batch,
            bucket=inputs.bucket,
            device=self._device,
        )
        logits, self._kv = self._step(
            self._weights, inputs.token_ids, inputs.positions, inputs.logit_rows, self._kv, plan
        )
        return np.asarray(logits)


def forward(
    config: LlamaConfig,
    weights: Weights[Array],
    token_ids: Array,
    positions: Array,
    logit_rows: Array,
    kv: CacheHandle,
    plan: Any,
    attention: Callable[..., Any] = jax_frontend.paged_attention,
) -> tuple[Array, CacheHandle]:
    """Run all layers over a ragged batch and write its keys and values to the cache.

    Parameters
    ----------
    token_ids, positions : int32 ``[tokens]``
    logit_rows : int32 ``[rows]``, the tokens whose logits are wanted
    plan : what ``attention`` takes
    attention : ``attention(query, key, value, kv, plan, layer)``

    Returns
    -------
    float32 ``[rows, vocab]``, and the handle that the next step must take
    """
    norm = functools.partial(_rms_norm, eps=config.rms_norm_eps)
    cos = weights.rotary_cos[positions][:, None, :]
    sin = weights.rotary_sin[positions][:, None, :]

    def block(
        carry: tuple[Array, CacheHandle], xs: tuple[Array, LayerWeights[Array]]
    ) -> tuple[tuple[Array, CacheHandle], None]:
        (hidden, kv), (layer, own) = carry, xs
        heads = _linear(norm(hidden, own.attention_norm), own.qkv)
        heads = heads.reshape(hidden.shape[0], -1, config.head_dim)
        query_end = config.num_qo_heads
        key_end = query_end + config.num_kv_heads
        query, key, value = jnp.split(heads, (query_end, key_end), axis=1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        attended, kv = attention(query, key, value, kv, plan, layer)
        hidden = hidden + _linear(attended.reshape(hidden.shape[0], -1), own.attention_output)

        gate, up = jnp.split(_linear(norm(hidden, own.mlp_norm), own.gate_up), 2, axis=-1)
        hidden = hidden + _linear(jax.nn.silu(gate) * up, own.down)
        return (hidden, kv), None

    hidden = weights.embedding[token_ids]
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    (hidden, kv), _ = lax.scan(block, (hidden, kv), (layers, weights.layers))
    # Logits of 16 bits would tie too often.
    last = norm(hidden[logit_rows], weights.final_norm)
    return _linear(last, weights.embedding, jnp.float32), kv


def _linear(rows: Array, matrix: Array, out: Any = None) -> Array:
    """``rows @ matrix.T`` for a matrix kept as ``[out, in]``, in dtype ``out``."""
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(rows, matrix, contracted, preferred_element_type=out or rows.dtype)


def _rms_norm(hidden: Array, scale: Array, eps: float) -> Array:
    # In float32, since squares are beyond float16.
    mean_square = jnp.mean(jnp.square(hidden.astype(jnp.float32)), axis=-1, keepdims=True)
    return (hidden * lax.rsqrt(mean_square + eps)).astype(hidden.dtype) * scale


def _rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split form: pair i is elements i and i + head_dim / 2."""
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
