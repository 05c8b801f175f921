"""The demo's model as Flax NNX modules, with paged attention through the JAX front end.

The layers are one module whose arrays have a leading axis. `nnx.scan` runs over it with a traced
layer index, so a compiled program holds one layer, however many there are.

Run it with ``python -m examples.flax_llama "What is the capital of France?"``.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from flax import nnx
from jax import Array

import jax_frontend
from examples import answering
from examples.smollm2 import LlamaConfig, Weights
from interop import AttentionPlan
from interop.dlpack import to_jax
from jax_frontend import CacheHandle


class Block(nnx.Module):
    """One layer; its parts have the names of their arrays in `LayerWeights`."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        hidden, wide = config.hidden_size, config.intermediate_size
        query_end, key_end = config.qkv_rows
        self.attention_norm = _norm(config, rngs)
        self.qkv = linear(hidden, 2 * key_end - query_end)
        self.attention_output = linear(query_end, hidden)
        self.mlp_norm = _norm(config, rngs)
        self.gate_up = linear(hidden, 2 * wide)
        self.down = linear(wide, hidden)
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
        heads = self.qkv(self.attention_norm(hidden)).reshape(tokens, -1, config.head_dim)
        ends = (config.num_qo_heads, config.num_qo_heads + config.num_kv_heads)
        query, key, value = jnp.split(heads, ends, axis=1)
        query, key = _rotate(query, rotary), _rotate(key, rotary)
        attended, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
        hidden = hidden + self.attention_output(attended.reshape(tokens, -1))

        gate, up = jnp.split(self.gate_up(self.mlp_norm(hidden)), 2, axis=-1)
        return hidden + self.down(nnx.silu(gate) * up), kv


class Llama(nnx.Module):
    """The whole decoder; its embedding is the output head, too."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.embedding = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = blocks(rngs)  # all of them: the arrays are [layers, ...]
        self.final_norm = _norm(config, rngs)
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

        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(
            carry: tuple[Array, CacheHandle], layer: Array, block: Block
        ) -> tuple[Array, CacheHandle]:
            hidden, kv = carry
            return block(hidden, rotary, kv, plan, layer)

        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        hidden, kv = run((self.embedding(token_ids), kv), layers, self.layers)
        return self.embedding.attend(self.final_norm(hidden[logit_rows])), kv


def load(config: LlamaConfig, weights: Weights[npt.NDArray[np.float32]]) -> Llama:
    """The model with the given arrays; matrices are copied, since Flax keeps ``[in, out]``."""
    arrays = weights.map(lambda array: to_jax(torch.from_numpy(array)))
    # Shapes only: random weights would be made and thrown away.
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    model.embedding.embedding.set_value(arrays.embedding)
    model.final_norm.scale.set_value(arrays.final_norm)
    for name, array in arrays.layers._asdict().items():
        part = getattr(model.layers, name)
        if isinstance(part, nnx.Linear):
            part.kernel.set_value(array.mT)
        else:
            part.scale.set_value(array)
    return model


def _norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)


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
