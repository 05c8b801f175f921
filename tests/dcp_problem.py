"""One step of a group of ranks: caches dealt by token, and the answer of one whole cache.

Who owns which token is worked out here a second time, position after position. A page of the whole
cache holds ``page_size * ranks`` tokens in their order; a rank's page of the same number holds the
rank's share of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from problem import NUMPY_DTYPES, Array, bits

from interop import AttentionSpec, Bucket, RaggedBatch

SMALL = AttentionSpec(8, 2, 8)

# An entry of a page table that nobody may read.
NOBODY = 2**30


@dataclass(frozen=True)
class Sizes:
    """How tokens are dealt, and what a rank's cache looks like."""

    ranks: int
    interleave: int = 1
    page_size: int = 4
    num_pages: int = 16  # of one layer on one rank
    num_layers: int = 1

    @property
    def round(self) -> int:
        """Tokens that one entry of the page table stands for."""
        return self.page_size * self.ranks

    def places(self, rank: int) -> list[int]:
        """Places in a page of all ranks that a rank holds, in the order in which it holds them."""
        return [
            place for place in range(self.round) if place // self.interleave % self.ranks == rank
        ]

    def dealt(self, whole: Array, rank: int) -> Array:
        """A rank's share of whole pages ``[pages, page_size * ranks, heads, width]``."""
        return np.ascontiguousarray(whole[:, self.places(rank)])

    def local_len(self, length: int, rank: int) -> int:
        """How many of the first tokens of a request a rank holds."""
        return sum(position // self.interleave % self.ranks == rank for position in range(length))


@dataclass(frozen=True)
class Shared:
    """A step, and the whole pools before it; rows to spare, and slots without a token, hold NaN."""

    spec: AttentionSpec
    sizes: Sizes
    dtype: str
    batch: RaggedBatch
    bucket: Bucket
    query: Array  # [tokens, num_qo_heads, head_dim] of all ranks
    key: Array
    value: Array
    key_pool: Array  # [num_layers * num_pages, page_size * ranks, heads, width]
    value_pool: Array

    @property
    def num_tokens(self) -> int:
        """Rows that belong to a request."""
        return self.batch.num_tokens

    def layer(self, pool: Array, layer: int) -> Array:
        """Pages of a layer."""
        return pool[layer * self.sizes.num_pages : (layer + 1) * self.sizes.num_pages]

    def pools_after(self, layers: tuple[int, ...] = (0,)) -> tuple[Array, Array]:
        """Whole pools after the step's rows are appended to some layers."""
        table = self.batch.page_table
        assert table is not None
        lens = (self.batch.query_lens.tolist(), self.batch.kv_lens.tolist())
        slots = oracle.slot_mapping(*lens, table, self.sizes.round)
        pools = self.key_pool.copy(), self.value_pool.copy()
        for layer in layers:
            views = [self.layer(pool, layer) for pool in pools]
            after = oracle.append(self.key, self.value, views[0], views[1], slots)
            for view, content in zip(views, after, strict=True):
                view[:] = content
        return pools

    def answer(self, layer: int = 0) -> tuple[Array, Array]:
        """Output and LSE in float64, of all rows: 0 and -inf where there is no token."""
        key_pool, value_pool = self.pools_after((layer,))
        table, tokens = self.batch.page_table, self.num_tokens
        assert table is not None
        out = np.zeros((*self.query.shape[:2], self.spec.head_dim_v))
        lse = np.full(out.shape[:2], -np.inf)
        out[:tokens], lse[:tokens] = oracle.paged_attention(
            self.query[:tokens],
            self.layer(key_pool, layer),
            self.layer(value_pool, layer),
            self.batch.query_lens.tolist(),
            self.batch.kv_lens.tolist(),
            table,
            sm_scale=self.spec.sm_scale,
            logits_soft_cap=self.spec.logits_soft_cap,
            draft_masks=self.batch.draft_masks,
        )
        return out, lse

    def lse_of(self, rank: int) -> Array:
        """LSE of a decode over one rank's tokens alone, ``[requests, heads]``."""
        pools = [self.sizes.dealt(pool, rank) for pool in self.pools_after()]
        table = self.batch.page_table
        assert table is not None
        local = [self.sizes.local_len(int(length), rank) for length in self.batch.kv_lens]
        return oracle.paged_attention(
            self.query[: self.num_tokens],
            pools[0],
            pools[1],
            self.batch.query_lens.tolist(),
            local,
            table,
            sm_scale=self.spec.sm_scale,
            causal=False,
        )[1]


def shared(
    spec: AttentionSpec,
    sizes: Sizes,
    query_lens: list[int],
    kv_lens: list[int],
    *,
    bucket: Bucket | None = None,
    dtype: str = "float32",
    query_scale: float = 1.0,
    seed: int = 0,
    draft_masks: Array | None = None,
) -> Shared:
    """Make a step of normal numbers over pages in random order."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // sizes.round) for length in kv_lens]
    table = np.full((len(kv_lens), max(1, *counts)), NOBODY, np.int32)
    assert sum(counts) <= sizes.num_pages
    order = rng.permutation(sizes.num_pages)[: sum(counts)]
    for row, pages in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: len(pages)] = pages
    batch = RaggedBatch(query_lens, kv_lens, table, draft_masks=draft_masks)
    if bucket is None:
        bucket = Bucket(
            batch.num_requests,
            batch.num_tokens,
            sum(counts),
            batch.max_query_len,
            draft_masks=draft_masks is not None,
        )

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])

    in_context = np.zeros((sizes.num_pages, sizes.round), np.bool_)
    for query_len, kv_len, pages in zip(query_lens, kv_lens, table, strict=True):
        for position in range(kv_len - query_len):
            in_context[pages[position // sizes.round], position % sizes.round] = True
    pools = []
    for width in (spec.head_dim, spec.head_dim_v):
        pool = normal(sizes.num_layers * sizes.num_pages, sizes.round, spec.num_kv_heads, width)
        pool[~np.tile(in_context, (sizes.num_layers, 1))] = np.nan
        pools.append(pool)
    rows = [
        normal(bucket.num_tokens, heads, width)
        for heads, width in (
            (spec.num_qo_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim_v),
        )
    ]
    rows[0] = (rows[0] * query_scale).astype(rows[0].dtype)
    for each in rows:
        each[batch.num_tokens :] = np.nan
    return Shared(spec, sizes, dtype, batch, bucket, *rows, *pools)


def small_step() -> Shared:
    """A mixed batch over four ranks, the same wherever it is made."""
    sizes, bucket = Sizes(4, 2), Bucket(6, 13, 20)
    return shared(SMALL, sizes, [1, 5, 0, 4, 1], [5, 37, 3, 17, 1], bucket=bucket)


def assert_dealt(problem: Shared, rank: int, got: Any, want: Any) -> None:
    """Check that a rank's pools hold its share of the whole pools, byte for byte."""
    for ours, whole in zip(got, want, strict=True):
        share = problem.sizes.dealt(whole, rank)
        np.testing.assert_array_equal(bits(ours), bits(share), err_msg=f"pool of rank {rank}")
