"""Combining the states of several ranks in JAX: like PyTorch, under jit and inside shard_map."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problem import bits, from_torch, to_torch

import jax_frontend.merging as front_end
import torch_backend.merging as core
from interop.errors import ArgumentError, DTypeError, FrameworkError, ShapeError
from jax_frontend.merging import (
    combine_states,
    merge_states,
    pack_partial,
    scale_partial,
    unpack_partial,
)

Array = np.ndarray[Any, np.dtype[Any]]
TOKENS, HEADS = 5, 24
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
# Errors of a few roundings in float32, or of one in the dtype, since exp differs in the last bit.
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
combine = jax.jit(combine_states)
scale = jax.jit(scale_partial)


def states(ranks: int, width: int = 16, spread: float = 1.0) -> tuple[Array, Array]:
    """Outputs and LSEs of random attention on each rank, some of them empty."""
    rng = np.random.default_rng(ranks)
    outs = rng.standard_normal((ranks, TOKENS, HEADS, width), np.float32)
    lses = (spread * rng.standard_normal((ranks, TOKENS, HEADS))).astype(np.float32)
    nothing = rng.random(lses.shape) < 0.4
    nothing[:, 0, 0] = True
    lses[nothing] = rng.choice(np.array([-np.inf, np.inf, np.nan], np.float32), nothing.sum())
    outs[nothing] = np.nan
    return outs, lses


@RANKS
@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("spread", [30.0, 1000.0])
def test_agrees_with_the_oracle(ranks: int, width: int, spread: float) -> None:
    outs, lses = states(ranks, width, spread)
    nothing = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    every = zip(outs, lses, strict=True)
    want = reduce(lambda one, two: oracle.merge_states(*one, *two), every, nothing)
    for got, right in zip(combine(outs, lses), want, strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-6, atol=2e-6)


@RANKS
@DTYPES
def test_agrees_with_the_core(ranks: int, dtype: str) -> None:
    outs, lses = states(ranks, 80, spread=10.0)
    ours = jnp.asarray(outs, dtype), jnp.asarray(lses)
    theirs = to_torch(np.array(ours[0]), "cpu"), to_torch(lses, "cpu")
    tolerance = TOLERANCE[dtype]

    def compare(got: tuple[jax.Array, ...], want: tuple[torch.Tensor, ...]) -> None:
        assert got[0].dtype == dtype
        for one, two, error in zip(got, want, (tolerance, 1e-6), strict=True):
            wide = from_torch(two).astype(np.float32)
            np.testing.assert_allclose(np.asarray(one, np.float32), wide, rtol=error, atol=error)

    compare(combine(*ours), core.combine_states(*theirs))
    for rank in range(ranks):
        want = core.scale_partial(theirs[0][rank], theirs[1], rank)
        compare(scale(ours[0][rank], ours[1], rank), want)


@DTYPES
def test_states_are_combined_in_32_bits_and_rounded_once(dtype: str) -> None:
    outs, lses = states(4, spread=2.0)
    narrow = jnp.asarray(outs, dtype)
    out, lse = combine(narrow, lses)
    wide, wide_lse = combine(narrow.astype(jnp.float32), lses)
    np.testing.assert_array_equal(out, wide.astype(dtype))
    np.testing.assert_array_equal(lse, wide_lse)


def test_a_merge_is_a_combination_of_two() -> None:
    outs, lses = states(2, 80, spread=5.0)
    pair = map(jnp.asarray, (outs[0], lses[0], outs[1], lses[1]))
    for ours, theirs in zip(jax.jit(merge_states)(*pair), combine(outs, lses), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def random_bits(dtype: str, heads: int, width: int) -> tuple[Array, Array]:
    """Output of `dtype` and LSE of any bits, among them many NaNs."""
    rng = np.random.default_rng(4)
    integer = np.uint32 if dtype == "float32" else np.uint16
    out_bits = rng.integers(0, np.iinfo(integer).max, (TOKENS, heads, width), integer, True)
    lse_bits = rng.integers(0, 2**32, (TOKENS, heads), np.uint32)
    lse_bits[0] = np.float32(-np.inf).view(np.uint32)
    return out_bits.view(jnp.dtype(dtype)), lse_bits.view(np.float32)


@RANKS
@DTYPES
@pytest.mark.parametrize("width", [7, 64])
def test_messages_have_the_bytes_of_the_core(ranks: int, dtype: str, width: int) -> None:
    out, lse = random_bits(dtype, 3 * ranks, width)
    want = core.pack_partial(to_torch(out, "cpu"), to_torch(lse, "cpu"), ranks)
    packed = jax.jit(pack_partial, static_argnums=2)(out, lse, ranks)
    assert packed.dtype.kind == "u"
    np.testing.assert_array_equal(bits(np.asarray(packed)), bits(from_torch(want)))
    outs, lses = jax.jit(unpack_partial, static_argnums=1)(packed, dtype)
    assert outs.dtype == dtype
    for got, whole in ((outs, out), (lses, lse)):
        np.testing.assert_array_equal(np.concatenate(list(bits(np.asarray(got))), 1), bits(whole))


def on_ranks(ranks: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on each rank, on the first part of its arguments; stack what it returns."""
    devices = jax.devices()
    if len(devices) < ranks:
        pytest.skip(f"needs {ranks} devices")
    mesh = Mesh(np.array(devices[:ranks]), ("rank",))

    def program(*arguments: jax.Array) -> Any:
        result = function(*(argument[0] for argument in arguments))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("rank"), out_specs=P("rank")))


@DTYPES
def test_an_all_to_all_changes_no_bit(dtype: str) -> None:
    # XLA's CPU collectives work on float32 where the type is bfloat16, which changes NaNs: a
    # message of that type would lose bits of an LSE whose half looks like one.
    ranks = 4
    out, lse = random_bits(dtype, 6 * ranks, 64)
    every_out = np.stack([np.roll(out, rank, axis=0) for rank in range(ranks)])
    every_lse = np.stack([np.roll(lse, rank, axis=0) for rank in range(ranks)])

    def exchange(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = jax.lax.all_to_all(pack_partial(out, lse, ranks), "rank", 0, 0)
        return unpack_partial(packed, dtype)

    # [receiver, sender, ...]; indexed as NumPy arrays, since XLA computes even where it slices.
    outs, lses = map(np.asarray, on_ranks(ranks, exchange)(every_out, every_lse))
    for rank in range(ranks):
        own = slice(6 * rank, 6 * rank + 6)
        np.testing.assert_array_equal(bits(outs[rank]), bits(every_out[:, :, own]))
        np.testing.assert_array_equal(bits(lses[rank]), bits(every_lse[:, :, own]))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_both_ways_over_devices_give_the_combination(ranks: int) -> None:
    outs, lses = states(ranks, 64, spread=10.0)
    want_out, want_lse = combine(outs, lses)

    def a2a(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = jax.lax.all_to_all(pack_partial(out, lse, ranks), "rank", 0, 0)
        return combine_states(*unpack_partial(packed, out.dtype))

    def ag_rs(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index("rank")
        scaled, total = scale_partial(out, jax.lax.all_gather(lse, "rank"), rank)
        own = jax.lax.psum_scatter(scaled, "rank", scatter_dimension=1, tiled=True)
        each = HEADS // ranks
        return own, jax.lax.dynamic_slice_in_dim(total, rank * each, each, axis=1)

    for way in (a2a, ag_rs):
        out, lse = on_ranks(ranks, way)(outs, lses)
        got = np.concatenate(list(np.asarray(out)), axis=1)
        np.testing.assert_allclose(got, want_out, rtol=1e-6, atol=1e-6)
        got = np.concatenate(list(np.asarray(lse)), axis=1)
        np.testing.assert_allclose(got, want_lse, rtol=1e-6, atol=1e-6)


def test_errors_have_the_words_of_the_core() -> None:
    outs, lses = (jnp.zeros(x.shape) for x in states(2))
    out, lse = outs[0], lses[0]
    numpy: Any = np.zeros(outs.shape, np.float32)
    calls: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
        ("combine_states", (out, lses), ShapeError),
        ("combine_states", (outs, lse), ShapeError),
        ("combine_states", (outs[:0], lses[:0]), ShapeError),
        ("combine_states", (outs.astype(jnp.int32), lses), DTypeError),
        ("combine_states", (outs, lses.astype(jnp.float16)), DTypeError),
        ("scale_partial", (out, lse, 0), ShapeError),
        ("scale_partial", (out, lses, 2), ArgumentError),
        ("pack_partial", (out, lse, 5), ShapeError),
        ("pack_partial", (out.astype(jnp.float8_e4m3fn), lse, 2), DTypeError),
    ]
    for name, arguments, kind in calls:
        with pytest.raises(kind) as ours:
            getattr(front_end, name)(*arguments)
        tensors = (
            torch.zeros(x.shape, dtype=getattr(torch, x.dtype.name))
            if isinstance(x, jax.Array)
            else x
            for x in arguments
        )
        with pytest.raises(kind) as theirs:
            getattr(core, name)(*tensors)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(FrameworkError, match=r"^outs: got numpy\.ndarray, want a jax\.Array"):
        combine_states(numpy, lses)


def test_messages_that_are_none() -> None:
    message = pack_partial(jnp.zeros((2, 4, 8), jnp.bfloat16), jnp.zeros((2, 4)), 2)
    unpack: Callable[..., Any] = partial(unpack_partial, dtype="bfloat16")
    with pytest.raises(DTypeError, match=r"^packed: got bfloat16, want uint16, bits of bfloat16"):
        unpack(message.view(jnp.bfloat16))
    with pytest.raises(DTypeError, match=r"^packed: got uint16, want uint32, bits of float32"):
        unpack_partial(message, jnp.float32)
    with pytest.raises(DTypeError, match=r"^dtype: got float8_e5m2, want one of float32"):
        unpack_partial(message, jnp.float8_e5m2)
    for short in (message[..., :2], message[0]):
        with pytest.raises(ShapeError, match=r"^packed: .* want \[ranks, tokens, heads, head_dim"):
            unpack(short)
    with pytest.raises(FrameworkError, match=r"^packed: got torch\.Tensor, want a jax\.Array"):
        unpack(torch.zeros(2, 2, 2, 10))
