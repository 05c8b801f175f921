"""What the specs accept, what they refuse, and that they are values."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop import AttentionSpec, CacheSpec
from interop.errors import ArgumentError, DTypeError
from interop.spec import MAX_SLOTS, dtype_name

CACHE: dict[str, Any] = {
    "num_layers": 2,
    "num_pages": 5,
    "page_size": 4,
    "num_kv_heads": 3,
    "head_dim": 8,
}


def test_what_is_left_out_follows_from_the_rest() -> None:
    spec = AttentionSpec(9, 3, 64)
    assert spec.head_dim_v == 64
    assert spec.sm_scale == 1 / math.sqrt(64)
    assert spec.causal
    assert spec.group_size == 3
    assert spec.window_left == -1
    assert spec.dtype is None
    assert CacheSpec(**CACHE, head_dim_v=5).head_dim_v == 5
    assert CacheSpec(**CACHE).head_dim_v == 8


@pytest.mark.parametrize(("window", "left"), [(1, 0), (2, 1), (4096, 4095)])
def test_the_window_counts_the_query_and_the_kernels_number_does_not(
    window: int, left: int
) -> None:
    assert AttentionSpec(2, 1, 8, sliding_window=window).window_left == left


def test_specs_are_equal_by_value_however_the_numbers_are_written() -> None:
    one = AttentionSpec(8, 2, 16, sm_scale=0.5, sliding_window=7, dtype=torch.float16)
    two = AttentionSpec(
        np.int64(8), np.int32(2), 16, sm_scale=np.float64(0.5), sliding_window=7, dtype=np.float16
    )
    assert one == two
    assert hash(one) == hash(two)
    assert CacheSpec(**CACHE, dtype="float32") == CacheSpec(
        **{name: np.int64(size) for name, size in CACHE.items()}, dtype="float32"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim_v": 8},
        {"sm_scale": 0.3},
        {"causal": False},
        {"sliding_window": 3},
        {"logits_soft_cap": 30.0},
        {"dtype": "float32"},
    ],
)
def test_each_feature_makes_another_spec(change: dict[str, Any]) -> None:
    assert AttentionSpec(4, 2, 16, **change) != AttentionSpec(4, 2, 16)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.zeros(0, "bfloat16").dtype, "bfloat16"),
        (np.dtype("float32"), "float32"),
        (np.float16, "float16"),
        ("torch.float32", "float32"),
        ("float16", "float16"),
    ],
)
def test_names_of_element_types(dtype: object, name: str) -> None:
    assert dtype_name(dtype) == name


@pytest.mark.parametrize(
    ("argument", "change", "text"),
    [
        ("num_qo_heads", {"num_qo_heads": 0}, "got 0, want a positive integer"),
        ("num_qo_heads", {"num_qo_heads": 4.0}, "got 4.0, want a positive integer"),
        ("num_qo_heads", {"num_qo_heads": True}, "got True, want a positive integer"),
        ("num_qo_heads", {"num_kv_heads": 3}, "got 4 with num_kv_heads = 3, want a multiple"),
        ("num_qo_heads", {"num_kv_heads": 8}, "got 4 with num_kv_heads = 8, want a multiple"),
        ("num_kv_heads", {"num_kv_heads": -1}, "got -1, want a positive integer"),
        ("head_dim", {"head_dim": 0}, "got 0, want a positive integer"),
        ("head_dim_v", {"head_dim_v": 0}, "got 0, want a positive integer"),
        ("sm_scale", {"sm_scale": 0.0}, "got 0.0, want a finite number other than 0"),
        ("sm_scale", {"sm_scale": math.nan}, "got nan, want a finite number"),
        ("sm_scale", {"sm_scale": "big"}, "got 'big', want a finite number"),
        ("sm_scale", {"sm_scale": 10**400}, "got 1000"),
        ("sliding_window", {"sliding_window": 0}, "got 0, want a positive integer"),
        ("sliding_window", {"sliding_window": -1}, "got -1, want a positive integer"),
        ("sliding_window", {"sliding_window": 2**31}, "got 2147483648, want at most 2147483647"),
        ("logits_soft_cap", {"logits_soft_cap": 0.0}, "got 0.0, want a positive number, or None"),
        ("logits_soft_cap", {"logits_soft_cap": math.inf}, "got inf, want a positive number"),
        ("logits_soft_cap", {"logits_soft_cap": math.nan}, "got nan, want a positive number"),
        ("dtype", {"dtype": "float64"}, "got float64, want one of float32, float16, bfloat16"),
        ("dtype", {"dtype": torch.int32}, "got int32, want one of float32, float16, bfloat16"),
    ],
)
def test_attention_that_cannot_be(argument: str, change: dict[str, Any], text: str) -> None:
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16} | change
    with pytest.raises(ArgumentError) as error:
        AttentionSpec(**given)
    assert error.value.argument == argument
    assert f"{argument}: {text}" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "change", "text"),
    [
        *((name, {name: 0}, "got 0, want a positive integer") for name in CACHE),
        ("page_size", {"page_size": 1.5}, "got 1.5, want a positive integer"),
        ("layout", {"layout": "DNH"}, "got 'DNH', want 'NHD' or 'HND'"),
        ("device", {"device": "tpu"}, "got 'tpu', want 'cpu' or 'cuda'"),
        ("dtype", {"dtype": "int8"}, "got int8, want one of float32, float16, bfloat16"),
    ],
)
def test_caches_that_cannot_be(argument: str, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        CacheSpec(**(CACHE | change))
    assert error.value.argument == argument
    assert f"{argument}: {text}" in str(error.value)


def test_an_element_type_is_refused_by_its_own_kind_of_error() -> None:
    with pytest.raises(DTypeError):
        CacheSpec(**CACHE, dtype="float64")


def test_pools_of_both_layouts() -> None:
    token_major = CacheSpec(**CACHE, head_dim_v=6)
    assert token_major.key_shape == (10, 4, 3, 8)
    assert token_major.value_shape == (10, 4, 3, 6)
    head_major = CacheSpec(**CACHE, head_dim_v=6, layout="HND")
    assert head_major.key_shape == (10, 3, 4, 8)
    assert head_major.value_shape == (10, 3, 4, 6)


def test_slots_of_all_layers_fit_int32() -> None:
    largest = {"num_pages": MAX_SLOTS // 7, "page_size": 1, "num_layers": 7}
    CacheSpec(**(CACHE | largest))
    with pytest.raises(ArgumentError, match="Use several caches"):
        CacheSpec(**(CACHE | largest | {"num_layers": 8}))
