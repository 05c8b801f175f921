"""Three ways to the same answer: the oracle, the PyTorch core and the JAX front end.

Each test body runs on every device that the `device` fixture offers. Problems are drawn at random;
how, and what makes them hard, is in strategies.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from problem import (
    NUMPY_DTYPES,
    TOLERANCES,
    Array,
    CacheKind,
    Call,
    Problem,
    appended_pools,
    assert_close,
    assert_identical,
    assert_same_pools,
    assert_within,
    bits,
    from_torch,
    run_jax,
    run_torch,
    to_torch,
)
from strategies import paged_problems, ragged_problems, seeds

import jax_frontend
import torch_backend
from torch_backend.kernels import reference

# Under jit every new shape is compiled, which takes longer than all the rest.
jax_examples = settings(max_examples=settings().max_examples // 4)

calls = pytest.mark.parametrize("call", get_args(Call))
cache_kinds = pytest.mark.parametrize("kind", get_args(CacheKind))
dtypes = pytest.mark.parametrize("dtype", TOLERANCES)


@calls
@given(problem=paged_problems())
def test_torch_over_pages(device: str, call: Call, problem: Problem) -> None:
    assert_close(run_torch(problem, device, call), problem)


@given(problem=ragged_problems())
def test_torch_without_cache(device: str, problem: Problem) -> None:
    assert_close(run_torch(problem, device), problem)


@calls
@cache_kinds
@jax_examples
@given(problem=paged_problems(), traced_layer=st.booleans())
def test_jax_over_pages(
    jax_device: str, kind: CacheKind, call: Call, problem: Problem, traced_layer: bool
) -> None:
    got = run_jax(problem, jax_device, kind, call, traced_layer=traced_layer)
    assert_close(got, problem)
    assert_identical(got, run_torch(problem, jax_device, call))


@jax_examples
@given(problem=ragged_problems())
def test_jax_without_cache(jax_device: str, problem: Problem) -> None:
    got = run_jax(problem, jax_device)
    assert_close(got, problem)
    assert_identical(got, run_torch(problem, jax_device))


@given(problem=paged_problems())
def test_reference_in_many_blocks(problem: Problem) -> None:
    """Problems of this size fit one block of the reference's, so make its blocks tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK_ELEMENTS", 256)
        patch.setattr(reference, "LOGIT_ELEMENTS", 64)
        assert_close(run_torch(problem, "cpu"), problem)


def with_any_bits(problem: Problem, seed: int) -> Problem:
    """The problem with new keys and values of random bits: NaNs, denormals, -0, all there is."""
    rng = np.random.default_rng(seed)

    def scramble(rows: Array) -> Array:
        low, high = np.iinfo(bits(rows).dtype).min, np.iinfo(bits(rows).dtype).max
        random = rng.integers(low, high, rows.shape, dtype=bits(rows).dtype, endpoint=True)
        scrambled: Array = random.view(rows.dtype)
        return scrambled

    return replace(problem, key=scramble(problem.key), value=scramble(problem.value))


@given(problem=paged_problems(), seed=seeds)
def test_torch_appends_the_very_bytes(device: str, problem: Problem, seed: int) -> None:
    problem = with_any_bits(problem, seed)
    assert_same_pools(run_torch(problem, device), *appended_pools(problem))


@cache_kinds
@jax_examples
@given(problem=paged_problems(), seed=seeds)
def test_jax_appends_the_very_bytes(
    jax_device: str, kind: CacheKind, problem: Problem, seed: int
) -> None:
    problem = with_any_bits(problem, seed)
    assert_same_pools(run_jax(problem, jax_device, kind), *appended_pools(problem))


def merge_operands(dtype: str) -> list[Array]:
    """Outputs and LSEs of two sides: every pair of LSEs that is special, and many that are not."""
    rng = np.random.default_rng(0)
    special = np.array([-np.inf, np.inf, 0.0, 50.0, -90.0, 700.0], np.float32)
    lse_a, lse_b = (x.ravel() for x in np.meshgrid(special, special))
    lse_a = np.concatenate([lse_a, 5 * rng.standard_normal(64)]).astype(np.float32)
    lse_b = np.concatenate([lse_b, 5 * rng.standard_normal(64)]).astype(np.float32)
    operands: list[Array] = []
    for lse in (lse_a.reshape(-1, 2), lse_b.reshape(-1, 2)):
        out = rng.standard_normal((*lse.shape, 24))
        # A side without keys should have output 0, but not every kernel writes it.
        out[~np.isfinite(lse)] = np.nan
        operands += [out.astype(NUMPY_DTYPES[dtype]), lse]
    return operands


def check_merged(out: Array, lse: Array, operands: list[Array], dtype: str) -> None:
    want_out, want_lse = oracle.merge_states(*operands)
    assert out.dtype == NUMPY_DTYPES[dtype]
    assert lse.dtype == np.float32
    assert_within("out", out, want_out, TOLERANCES[dtype].out)
    assert_within("lse", lse, want_lse, TOLERANCES[dtype].lse)
    assert not out[np.isneginf(want_lse)].any()


@dtypes
def test_torch_merges_states(device: str, dtype: str) -> None:
    operands = merge_operands(dtype)
    out, lse = torch_backend.merge_states(*(to_torch(x, device) for x in operands))
    check_merged(from_torch(out), from_torch(lse), operands, dtype)


@dtypes
def test_jax_merges_states(jax_device: str, dtype: str) -> None:
    operands = merge_operands(dtype)
    target = jax.devices(jax_device)[0]
    merge: Any = jax.jit(jax_frontend.merge_states)
    out, lse = merge(*(jax.device_put(x, target) for x in operands))
    check_merged(np.asarray(out), np.asarray(lse), operands, dtype)


@dtypes
def test_attention_in_two_parts_merges_to_the_whole(device: str, dtype: str) -> None:
    """The LSE that attention returns is the one that `merge_states` takes."""
    rng = np.random.default_rng(1)
    query, key, value = (
        rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
        for shape in ((3, 6, 32), (40, 2, 32), (40, 2, 16))
    )
    features = {"causal": False, "logits_soft_cap": 3.0}
    whole = Problem(dtype, features, [3], [40], query, key, value)
    states = []
    for part in (slice(0, 7), slice(7, 40)):
        some = replace(whole, key=key[part], value=value[part], kv_lens=[part.stop - part.start])
        answer = run_torch(some, device)
        states += [to_torch(answer.out, device), to_torch(answer.lse, device)]
    out, lse = (from_torch(x) for x in torch_backend.merge_states(*states))
    want_out, want_lse = oracle.ragged_attention(query, key, value, [3], [40], **features)
    assert_within("out", out, want_out, 2 * TOLERANCES[dtype].out)  # rounded twice
    assert_within("lse", lse, want_lse, TOLERANCES[dtype].lse)
