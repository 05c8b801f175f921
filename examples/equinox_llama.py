"""The demo's model as Equinox modules, with paged attention through the JAX front end.

The layers are one module whose arrays have a leading axis. `jax.lax.scan` runs over it with a
traced layer index, so a compiled program holds one layer, however many there are.

Run it with ``python -m examples.equinox_llama "What is the capital of France?"``.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax import Array, lax

import jax_frontend
from examples import answering
from examples.smollm2 import LlamaConfig, Weights
from interop import AttentionPlan
from interop.dlpack import to_jax
from jax_frontend import CacheHandle


class Block(eqx.Module):
    """One layer; its parts have the names of their arrays in `LayerWeights`."""

    attention_norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    attention_output: eqx.nn.Linear
    mlp_norm: eqx.nn.RMSNorm
    gate_up: eqx.nn.Linear
    down: eqx.nn.Linear
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, key: Array) -> None:
        def linear(inputs: int, outputs: int, key: Array) -> eqx.nn.Linear:
            return eqx.nn.Linear(inputs, outputs, use_bias=False, key=key)

        keys = jax.random.split(key, 4)
        hidden, wide = config.hidden_size, config.intermediate_size
        query_end, key_end = config.qkv_rows
        self.attention_norm = _norm(config)
        self.qkv = linear(hidden, 2 * key_end - query_end, keys[0])
        self.attention_output = linear(query_end, hidden, keys[1])
        self.mlp_norm = _norm(config)
        self.gate_up = linear(hidden, 2 * wide, keys[2])
        self.down = linear(wide, hidden, keys[3])
        self.config = config

    def __call__(
        self,
        hidden: Array,
        rotary: tuple[Array, Array],
        kv: CacheHandle,
        plan: AttentionPlan[Array],
        layer: Array,
    ) -> tuple[Array, CacheHandle]:
        """The layer's output ``[tokens, hidden]``, like its input, and the next handle."""
        config, tokens = self.config, hidden.shape[0]
        # Equinox's modules take one token each; `vmap` gives them the batch.
        heads = jax.vmap(self.qkv)(jax.vmap(self.attention_norm)(hidden))
        heads = heads.reshape(tokens, -1, config.head_dim)
        ends = (config.num_qo_heads, config.num_qo_heads + config.num_kv_heads)
        query, key, value = jnp.split(heads, ends, axis=1)
        query, key = _rotate(query, rotary), _rotate(key, rotary)
        attended, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
        hidden = hidden + jax.vmap(self.attention_output)(attended.reshape(tokens, -1))

        gate_up = jax.vmap(self.gate_up)(jax.vmap(self.mlp_norm)(hidden))
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return hidden + jax.vmap(self.down)(jax.nn.silu(gate) * up), kv


class Llama(eqx.Module):
    """The whole decoder; its embedding is the output head, too."""

    embedding: eqx.nn.Embedding
    layers: Block  # all of them: its arrays are [layers, ...]
    final_norm: eqx.nn.RMSNorm
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, key: Array) -> None:
        key, layers_key = jax.random.split(key)
        layer_keys = jax.random.split(layers_key, config.num_layers)
        self.embedding = eqx.nn.Embedding(config.vocab_size, config.hidden_size, key=key)
        self.layers = eqx.filter_vmap(lambda key: Block(config, key))(layer_keys)
        self.final_norm = _norm(config)
        self.config = config

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        logit_rows: Array,
        kv: CacheHandle,
        plan: AttentionPlan[Array],
    ) -> tuple[Array, CacheHandle]:
        """Float32 logits ``[rows, vocab]`` of the tokens that ``logit_rows`` names, and a handle.

        ``token_ids`` and ``positions`` are int32 ``[tokens]``: the ragged batch that is planned.
        """
        rotary = _rotary(self.config, positions)
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def run(
            carry: tuple[Array, CacheHandle], xs: tuple[Array, Block]
        ) -> tuple[tuple[Array, CacheHandle], None]:
            (hidden, kv), (layer, own) = carry, xs
            return eqx.combine(own, static)(hidden, rotary, kv, plan, layer), None

        hidden = jax.vmap(self.embedding)(token_ids)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (hidden, kv), _ = lax.scan(run, (hidden, kv), (layers, arrays))
        last = jax.vmap(self.final_norm)(hidden[logit_rows])
        return last @ self.embedding.weight.T, kv


def load(config: LlamaConfig, weights: Weights[npt.NDArray[np.float32]]) -> Llama:
    """The model on the given arrays, none of them copied: Equinox keeps ``[out, in]``, too."""

    def places(model: Llama) -> list[Array]:
        parts = [getattr(model.layers, name) for name in weights.layers._fields]
        return [part.weight for part in (model.embedding, model.final_norm, *parts)]

    # Shapes only: random weights would be made and thrown away.
    model = eqx.filter_eval_shape(Llama, config, jax.random.key(0))
    arrays = (weights.embedding, weights.final_norm, *weights.layers)
    return eqx.tree_at(places, model, [to_jax(torch.from_numpy(array)) for array in arrays])


def _norm(config: LlamaConfig) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(config.hidden_size, config.rms_norm_eps, use_bias=False)


def _rotary(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines ``[tokens, 1, head_dim / 2]`` (Su et al., RoFormer, section 3.4)."""
    exponents = jnp.arange(0, config.head_dim, 2) / config.head_dim
    angles = positions[:, None, None] / config.rope_theta**exponents
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(heads: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotary embedding, half-split form: pair i is elements i and i + head_dim / 2."""
    (cos, sin), (first, second) = rotary, jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


if __name__ == "__main__":
    answering.main(load)
