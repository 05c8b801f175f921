"""Merging in PyTorch: against the oracle, and where one side or both saw no key."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from problem import from_torch, to_torch

import jax_frontend
import torch_backend
from interop.errors import DTypeError, FrameworkError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]
SHAPE = (5, 3, 4)
EMPTY = [-np.inf, np.inf, np.nan]


def state(seed: int, spread: float = 1.0) -> tuple[Array, Array]:
    """Output and LSE of random attention."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(SHAPE, np.float32)
    return out, (spread * rng.standard_normal(SHAPE[:2])).astype(np.float32)


def merge(*states: Array) -> tuple[Array, Array]:
    """Merge NumPy arrays with the core."""
    out, lse = torch_backend.merge_states(
        *(to_torch(np.ascontiguousarray(x), "cpu") for x in states)
    )
    return from_torch(out), from_torch(lse)


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_agrees_with_the_oracle(spread: float) -> None:
    # A spread of 1000 underflows every exp that is not taken relative to the larger side.
    a, b = state(0, spread), state(1, spread)
    out, lse = merge(*a, *b)
    want_out, want_lse = oracle.merge_states(*a, *b)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_states_are_merged_in_32_bits_and_rounded_once(dtype: str) -> None:
    element = getattr(torch, dtype)
    a, b = ((torch.from_numpy(o).to(element), torch.from_numpy(s)) for o, s in (state(0), state(1)))
    out, lse = torch_backend.merge_states(*a, *b)
    wide, wide_lse = torch_backend.merge_states(a[0].float(), a[1], b[0].float(), b[1])
    assert out.dtype == element
    assert lse.dtype == torch.float32
    assert torch.equal(out, wide.to(element))
    assert torch.equal(lse, wide_lse)


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
    assert not merged.any()
    assert (lse == -np.inf).all()


def test_rows_are_merged_each_on_its_own() -> None:
    a, b = state(3), state(4)
    a[1][0], b[1][1], a[1][2], b[1][2] = -np.inf, np.inf, -np.inf, np.nan
    a[0][0], b[0][1], b[0][2] = np.nan, np.nan, np.inf
    out, lse = merge(*a, *b)
    want_out, want_lse = oracle.merge_states(*a, *b)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


def test_both_orders_give_the_same() -> None:
    a, b = state(5), state(6)
    for ours, theirs in zip(merge(*a, *b), merge(*b, *a), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_sum_of_large_lses_does_not_overflow() -> None:
    out, lse = state(7)[0], np.full(SHAPE[:2], 1e30, np.float32)
    merged, lse = merge(out, lse, out, lse)
    np.testing.assert_allclose(merged, out)
    assert np.isfinite(lse).all()


def test_the_inputs_stay_as_they_are() -> None:
    states = [torch.from_numpy(x) for x in (*state(8), *state(9))]
    before = [x.clone() for x in states]
    torch_backend.merge_states(*states)
    assert all(map(torch.equal, states, before))


BAD_SHAPES = [
    ("out_a", (5, 3), "want [tokens, heads, head_dim_v]"),
    ("lse_a", (3, 5), "want [5, 3], to fit out_a"),
    ("out_b", (5, 3, 8), "want [5, 3, 4], to fit out_a"),
    ("lse_b", (5, 3, 1), "want [5, 3], to fit out_a"),
]
NAMES = ("out_a", "lse_a", "out_b", "lse_b")


@pytest.mark.parametrize(("name", "shape", "wanted"), BAD_SHAPES)
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...], wanted: str) -> None:
    states = dict(zip(NAMES, map(torch.from_numpy, (*state(0), *state(1))), strict=True))
    states[name] = torch.zeros(shape)
    with pytest.raises(ShapeError) as error:
        torch_backend.merge_states(**states)
    assert str(error.value) == f"{name}: got {list(shape)}, {wanted}."


@pytest.mark.parametrize("name", NAMES)
def test_element_types_and_frameworks_that_do_not_fit(name: str) -> None:
    states = dict(zip(NAMES, map(torch.from_numpy, (*state(0), *state(1))), strict=True))
    with pytest.raises(DTypeError, match=f"^{name}: got float64, want .*float32"):
        torch_backend.merge_states(**(states | {name: states[name].double()}))
    with pytest.raises(FrameworkError, match=rf"^{name}: got .*, want a torch\.Tensor"):
        torch_backend.merge_states(**(states | {name: states[name].numpy()}))


@pytest.mark.parametrize("empty", [None, *EMPTY])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_frameworks_agree(empty: float | None, dtype: str) -> None:
    import jax.numpy as jnp

    a, b = state(10), state(11)
    if empty is not None:
        a[1][:2], b[1][1:3] = empty, empty
        a[0][:2] = np.nan
    theirs = jax_frontend.merge_states(
        *(jnp.asarray(x, dtype if x.ndim == 3 else None) for x in (*a, *b))
    )
    ours = torch_backend.merge_states(
        *(
            torch.from_numpy(x).to(getattr(torch, dtype) if x.ndim == 3 else torch.float32)
            for x in (*a, *b)
        )
    )
    # exp and log of two libraries differ in the last bit, which rounding can carry on.
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert theirs[0].dtype.name == dtype
    np.testing.assert_allclose(
        ours[0].float().numpy(), np.asarray(theirs[0], np.float32), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(ours[1].numpy(), np.asarray(theirs[1]), rtol=1e-6, atol=1e-6)
