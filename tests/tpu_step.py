"""The step of `small` as TPU code passes it: one array for keys and values, room to spare."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from problem import assert_within
from small import KV_LENS, PAGE_TABLE, QUERY_LENS, SPEC, TOKENS, Array, jax_rows

from jax_frontend.compat import ragged_paged_attention

PAGES, PAGE_SIZE = 12, 4
ROWS, REQUESTS = 9, 6

# What the arrays hold of requests that are not there, of which TPU code says nothing.
GARBAGE = 2**31 - 5


def padded(values: Any, size: int) -> Array:
    """Integers, and garbage after them."""
    out = np.full((size, *np.shape(values)[1:]), GARBAGE, np.int32)
    out[: len(values)] = values
    return out


def in_turn(key_pool: Array, value_pool: Array) -> Array:
    """Put pools ``[pages, page_size, heads, width]`` into one, with twice the heads."""
    pages, page_size, _, width = key_pool.shape
    return np.stack((key_pool, value_pool), 3).reshape(pages, page_size, -1, width)


@cache
def program(**options: Any) -> Any:
    """One jitted function for equal options, so that equal shapes are compiled once."""
    return jax.jit(partial(ragged_paged_attention, **options), donate_argnums=3)


@dataclass(frozen=True)
class Step:
    """Arguments of `ragged_paged_attention`: four requests, in arrays for six."""

    q: Any
    k: Any
    v: Any
    kv_cache: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    distribution: Any

    def arguments(self) -> list[Any]:
        """All of them; a NumPy cache as a copy, which may be donated."""
        arguments = [getattr(self, field.name) for field in fields(self)]
        if isinstance(self.kv_cache, np.ndarray):
            arguments[3] = jnp.array(self.kv_cache)
        return arguments

    def __call__(self, **options: Any) -> Any:
        return ragged_paged_attention(*self.arguments(), **options)

    def jitted(self, attention_sink: Any = None, **options: Any) -> Any:
        """The same with every array traced, and the cache donated."""
        return program(**options)(*self.arguments(), attention_sink)

    def wanted(self, *, write: bool = True, **features: Any) -> tuple[Array, Array, Array]:
        """Output and LSE of the rows in use, and the array after the step, by the oracle."""
        features = {"sm_scale": 1.0} | features
        q, k, v, cache = (np.asarray(x) for x in (self.q, self.k, self.v, self.kv_cache))
        table = np.array(PAGE_TABLE)
        pools = cache[:, :, 0::2], cache[:, :, 1::2]
        if write:
            slots = oracle.slot_mapping(QUERY_LENS, KV_LENS, table, PAGE_SIZE)
            pools = oracle.append(k, v, *pools, slots)
        lens = QUERY_LENS, KV_LENS
        out, lse = oracle.paged_attention(q[:TOKENS], *pools, *lens, table, **features)
        return out, lse, in_turn(*pools)


def new_step(seed: int = 0) -> Step:
    """Make one in float32."""
    shape = (PAGES, PAGE_SIZE, 2 * SPEC.num_kv_heads, SPEC.head_dim)
    return Step(
        *jax_rows(seed, ROWS),
        np.random.default_rng(seed).standard_normal(shape, np.float32),
        padded(KV_LENS, REQUESTS),
        padded(PAGE_TABLE, REQUESTS),
        padded(np.cumsum([0, *QUERY_LENS]), REQUESTS + 1),
        np.array([1, 1, len(KV_LENS)], np.int32),
    )


def assert_right(got: Any, want: tuple[Array, Array, Array]) -> None:
    """Compare an answer with the oracle's: the output within rounding, the cache bit for bit."""
    out, cache = (np.asarray(x) for x in got)
    assert_within("out", out[:TOKENS], want[0], 1e-5)
    assert not out[TOKENS:].any(), "rows of no request are not zero"
    np.testing.assert_array_equal(cache, want[2])


def import_or_skip(name: str) -> Any:
    """Import a module of JAX that a release may have moved or dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)
