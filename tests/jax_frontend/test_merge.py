"""Merging in JAX: against the oracle, under jit, grad and vmap, and where a side saw no key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch

import jax_frontend
from interop.errors import DTypeError, FrameworkError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]
SHAPE = (5, 3, 4)
EMPTY = [-np.inf, np.inf, np.nan]
NAMES = ("out_a", "lse_a", "out_b", "lse_b")
merge = jax.jit(jax_frontend.merge_states)


def state(seed: int, spread: float = 1.0) -> tuple[Array, Array]:
    """Output and LSE of random attention."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(SHAPE, np.float32)
    return out, (spread * rng.standard_normal(SHAPE[:2])).astype(np.float32)


def states(seed: int) -> dict[str, jax.Array]:
    """Two random states by the names of the arguments."""
    arrays = map(jnp.asarray, (*state(seed), *state(seed + 1)))
    return dict(zip(NAMES, arrays, strict=True))


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_agrees_with_the_oracle(spread: float) -> None:
    a, b = state(0, spread), state(1, spread)
    want_out, want_lse = oracle.merge_states(*a, *b)
    out, lse = merge(*a, *b)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("garbage", [0.0, 7.0, np.nan, np.inf])
@pytest.mark.parametrize("empty_first", [True, False])
def test_an_empty_side_counts_for_nothing(empty: float, garbage: float, empty_first: bool) -> None:
    full = state(2)
    nothing = (np.full(SHAPE, garbage, np.float32), np.full(SHAPE[:2], empty, np.float32))
    out, lse = merge(*nothing, *full) if empty_first else merge(*full, *nothing)
    np.testing.assert_array_equal(out, full[0])
    np.testing.assert_array_equal(lse, full[1])


@pytest.mark.parametrize("first", EMPTY)
@pytest.mark.parametrize("second", EMPTY)
@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
def test_two_empty_sides_are_empty(first: float, second: float, garbage: float) -> None:
    out = np.full(SHAPE, garbage, np.float32)
    sides = (np.full(SHAPE[:2], lse, np.float32) for lse in (first, second))
    merged, lse = merge(*(x for side in sides for x in (out, side)))
    assert not np.asarray(merged).any()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_states_are_merged_in_32_bits_and_rounded_once(dtype: str) -> None:
    given = states(3)
    narrow = {name: x.astype(dtype) if x.ndim == 3 else x for name, x in given.items()}
    wide = {name: x.astype(jnp.float32) for name, x in narrow.items()}
    out, lse = merge(**narrow)
    want_out, want_lse = merge(**wide)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, want_out.astype(dtype))
    np.testing.assert_array_equal(lse, want_lse)


def test_rows_are_merged_each_on_its_own() -> None:
    a, b = state(3), state(4)
    a[1][0], b[1][1], a[1][2], b[1][2] = -np.inf, np.inf, -np.inf, np.nan
    a[0][0], b[0][1], b[0][2] = np.nan, np.nan, np.inf
    want_out, want_lse = oracle.merge_states(*a, *b)
    out, lse = merge(*a, *b)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


def test_a_batch_of_merges_is_a_vmap() -> None:
    given = states(5)
    stacked = {name: jnp.stack([x, 2 * x]) for name, x in given.items()}
    out, lse = jax.vmap(jax_frontend.merge_states)(*stacked.values())
    for number in range(2):
        one_out, one_lse = merge(*(x[number] for x in stacked.values()))
        np.testing.assert_allclose(out[number], one_out, rtol=1e-6)
        np.testing.assert_allclose(lse[number], one_lse, rtol=1e-6)


BAD_SHAPES = [
    ("out_a", (5, 3), "want [tokens, heads, head_dim_v]"),
    ("lse_a", (3, 5), "want [5, 3], to fit out_a"),
    ("out_b", (5, 3, 8), "want [5, 3, 4], to fit out_a"),
    ("lse_b", (5, 3, 1), "want [5, 3], to fit out_a"),
]


@pytest.mark.parametrize(("name", "shape", "wanted"), BAD_SHAPES)
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...], wanted: str) -> None:
    with pytest.raises(ShapeError) as error:
        jax.eval_shape(jax_frontend.merge_states, **(states(0) | {name: jnp.zeros(shape)}))
    assert str(error.value) == f"{name}: got {list(shape)}, {wanted}."


@pytest.mark.parametrize("name", NAMES)
def test_element_types_and_frameworks_that_do_not_fit(name: str) -> None:
    given = states(0)
    with pytest.raises(DTypeError, match=f"^{name}: got int32, want .*float32"):
        jax_frontend.merge_states(**(given | {name: given[name].astype(jnp.int32)}))
    tensor: Any = torch.zeros(given[name].shape)
    with pytest.raises(FrameworkError, match=rf"^{name}: got torch\.Tensor, want a jax\.Array"):
        jax_frontend.merge_states(**(given | {name: tensor}))
