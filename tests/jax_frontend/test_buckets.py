"""One program for all batches of a bucket, whose padding nobody can see."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import BATCH, BUCKET, QUERY_LENS, SIZES, SPEC, TOKENS, jax_rows, new_cache, rows

import jax_frontend
from interop import Bucket, RaggedBatch

Array = np.ndarray[Any, np.dtype[Any]]
Kind = Literal["handle", "arrays"]
kinds = pytest.mark.parametrize("kind", ["handle", "arrays"])
WIDE = Bucket(num_requests=8, num_tokens=32, num_pages=64)


def different_batches(count: int) -> list[RaggedBatch]:
    """Batches of different numbers of requests and lengths that all fit `WIDE`."""
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(count):
        query_lens = rng.integers(0, 5, rng.integers(1, 9))
        kv_lens = query_lens + rng.integers(0, 20, query_lens.size)
        pages = rng.permutation(64)[: 8 * query_lens.size].reshape(query_lens.size, 8)
        batches.append(RaggedBatch(query_lens, kv_lens, pages))
    return batches


@kinds
def test_a_hundred_batches_are_traced_once(kind: Kind) -> None:
    traces = []

    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        traces.append(plan.static)
        for layer in range(2):
            query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
        return query, kv

    program = jax.jit(step, donate_argnums=3)
    kv: Any = jax_frontend.init_cache(SPEC, **(SIZES | {"num_pages": 64}))
    if kind == "handle":
        kv = jax_frontend.cache_handle(new_cache(num_pages=64), name="buckets")
    arrays = jax_rows(0, WIDE.num_tokens)
    batches = different_batches(100)
    assert len({batch.page_table.tobytes() for batch in batches}) == 100  # type: ignore[union-attr]
    for batch in batches:
        plan = jax_frontend.plan(SPEC, kv.spec, batch, bucket=WIDE)
        _, kv = program(*arrays, kv, plan)
    jax.block_until_ready(kv)
    if kind == "handle":
        jax_frontend.release_cache("buckets")
    assert len(traces) == 1
    larger = jax_frontend.plan(SPEC, kv.spec, batches[0], bucket=Bucket(9, 32, 64))
    program.lower(*arrays, kv, larger)
    assert len(traces) == 2, "the counter counts"


def solve(batch: RaggedBatch, bucket: Bucket | None, spare: float) -> tuple[Array, Array, Array]:
    """Output, LSE and key pool of one step whose rows to spare hold `spare`."""
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    plan = jax_frontend.plan(SPEC, kv.spec, batch, bucket=bucket)
    padded = []
    for array in rows(3, batch.num_tokens):
        full = np.full((plan.bucket.num_tokens, *array.shape[1:]), spare, np.float32)
        full[: batch.num_tokens] = array
        padded.append(full)
    query, key, value = map(jax.numpy.asarray, padded)

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        return jax_frontend.paged_attention(query, key, value, kv, plan, 1, return_lse=True)

    out, lse, kv = step(query, key, value, kv, plan)
    return np.asarray(out), np.asarray(lse), np.asarray(kv.k)


@pytest.mark.parametrize("spare", [0.0, 5.0, np.nan, np.inf])
def test_padding_rows_are_zero_and_see_no_key(spare: float) -> None:
    out, lse, pool = solve(BATCH, BUCKET, spare)
    assert not out[TOKENS:].any()
    assert (lse[TOKENS:] == -np.inf).all()
    assert np.isfinite(out).all()
    assert np.isfinite(lse[:TOKENS]).all()
    assert np.isfinite(pool).all()


@settings(max_examples=10)
@given(st.tuples(*(st.integers(0, 7) for _ in range(3))), st.booleans())
def test_padding_changes_nothing_bit_for_bit(spare: tuple[int, int, int], exact: bool) -> None:
    bucket = Bucket(
        num_requests=4 + spare[0],
        num_tokens=TOKENS + spare[1],
        num_pages=8 + spare[2],
        max_query_len=max(QUERY_LENS) if exact else 0,
    )
    want, got = solve(BATCH, None, np.nan), solve(BATCH, bucket, np.nan)
    np.testing.assert_array_equal(got[0][:TOKENS], want[0])
    np.testing.assert_array_equal(got[1][:TOKENS], want[1])
    np.testing.assert_array_equal(got[2], want[2])


def test_a_bucket_without_anything_in_it() -> None:
    idle = RaggedBatch([0], [3], [[1]])
    out, lse, pool = solve(idle, BUCKET, np.nan)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not pool.any()
    out, lse, pool = solve(idle, None, np.nan)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)
    assert not pool.any()
