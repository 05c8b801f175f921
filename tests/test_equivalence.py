"""Three ways to the same answer: the oracle, the PyTorch core and the JAX front end.

Each test body runs on every device that the `device` fixture offers. Problems are drawn at random;
how, and what makes them hard, is in strategies.py.
"""

from __future__ import annotations

from typing import get_args

import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from problem import (
    NUMPY_DTYPES,
    TOLERANCES,
    CacheKind,
    Call,
    Problem,
    assert_close,
    assert_identical,
    run_jax,
    run_torch,
)
from strategies import paged_problems, ragged_problems

import jax_frontend
import torch_backend
from torch_backend.kernels import reference

# Under jit every new shape is compiled, which takes longer than all the rest.
jax_examples = settings(max_examples=settings.default.max_examples // 4)

calls = pytest.mark.parametrize("call", get_args(Call))
cache_kinds = pytest.mark.parametrize("kind", get_args(CacheKind))


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
