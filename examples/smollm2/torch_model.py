"""The model in PyTorch: every layer calls the core's paged attention directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

import torch_backend
from examples.engine import StepInputs
from examples.smollm2.config import LlamaConfig
from examples.smollm2.gguf_weights import LayerWeights, Weights
from interop import AttentionSpec
from torch_backend import PagedKVCache


class TorchStep:
    """One engine step of the PyTorch model; the weights are views of the given arrays.

    Parameters
    ----------
    weights : Weights of float32 NumPy arrays
    cache : PagedKVCache
        On the CPU; written by each step at the slots of the step's batch.
    """

    name = "torch"

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights[npt.NDArray[np.float32]],
        spec: AttentionSpec,
        cache: PagedKVCache,
    ) -> None:
        self._config = config
        self._weights = weights.map(torch.from_numpy)
        self._spec = spec
        self._cache = cache

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Logits ``[bucket.num_requests, vocab]`` of the rows that ``inputs.logit_rows`` names."""
        plan = torch_backend.plan(self._spec, self._cache.spec, inputs.batch, bucket=inputs.bucket)
        logits = forward(
            self._config,
            self._weights,
            torch.from_numpy(inputs.token_ids),
            torch.from_numpy(inputs.positions),
            torch.from_numpy(inputs.logit_rows),
            self._cache,
            plan,
        )
        result: npt.NDArray[np.float32] = logits.numpy()
        return result


def forward(
    config: LlamaConfig,
    weights: Weights[Tensor],
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    cache: PagedKVCache,
    plan: Any,
    attention: Callable[..., Any] = torch_backend.paged_attention,
) -> Tensor:
    """Run all layers over a ragged batch and write its keys and values to ``cache``.

    Parameters
    ----------
    token_ids, positions : int32 ``[tokens]``
    logit_rows : int32 ``[rows]``, the tokens whose logits are wanted
    plan : what ``attention`` takes
    attention : ``attention(query, key, value, cache, plan, layer)``

    Returns
    -------
    float32 ``[rows, vocab]``
    """
    width, eps = (config.hidden_size,), config.rms_norm_eps
    cos = weights.rotary_cos[positions].unsqueeze(1)
    sin = weights.rotary_sin[positions].unsqueeze(1)
    hidden = embedding(token_ids, weights.embedding)
    for layer in range(config.num_layers):
        own = LayerWeights(*(stacked[layer] for stacked in weights.layers))
        normed = rms_norm(hidden, width, own.attention_norm, eps)
        query, key, value = _project_heads(config, normed, own.qkv)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        attended = attention(query, key, value, cache, plan, layer)
        hidden = hidden + linear(attended.flatten(1), own.attention_output)

        normed = rms_norm(hidden, width, own.mlp_norm, eps)
        gate, up = linear(normed, own.gate_up).chunk(2, dim=-1)
        hidden = hidden + linear(silu(gate) * up, own.down)
    last = rms_norm(hidden[logit_rows], width, weights.final_norm, eps)
    return linear(last, weights.embedding)


def _project_heads(
    config: LlamaConfig, hidden: Tensor, qkv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each ``[tokens, heads, head_dim]`` and contiguous."""
    heads = linear(hidden, qkv).unflatten(-1, (-1, config.head_dim))
    counts = (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
    query, key, value = heads.split(counts, dim=1)
    return query, key, value.contiguous()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split form: pair i is elements i and i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
