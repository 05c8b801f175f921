"""Hypothesis strategies that draw attention problems, small enough for the oracle.

Hypothesis draws the shape of a problem, which is what shrinks well; the numbers in it and the
order of its pages come from NumPy's generator under a drawn seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from problem import NUMPY_DTYPES, Array, Layout, Pages, Problem

from interop import Bucket

Requests = list[tuple[int, int]]  # (query length, KV length) of each

seeds = st.integers(0, 2**20)


@dataclass(frozen=True)
class Space:
    """What problems are drawn from. A kernel family that does less says here what it does."""

    heads: tuple[tuple[int, int], ...] = ((4, 4), (8, 2), (9, 3), (8, 1), (1, 1), (6, 2))
    head_dims: tuple[tuple[int, int], ...] = (  # (head_dim, head_dim_v)
        *((64, 64), (128, 128), (5, 5), (1, 1)),
        *((7, 3), (16, 24), (64, 32)),
    )
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    page_sizes: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 32, 64)
    layouts: tuple[Layout, ...] = ("NHD", "HND")
    causal: tuple[bool, ...] = (True, False)
    sm_scales: tuple[float | None, ...] = (None, 0.11, 0.5)
    sliding_windows: tuple[int | None, ...] = (None, 1, 2, 7, 33, 1000)
    # Logits are about normal: the small caps bend most of them, the large one hardly any.
    soft_caps: tuple[float | None, ...] = (None, 0.7, 3.0, 30.0)
    # Whether batches bring masks of their own.
    draft_masks: tuple[bool, ...] = (False, False, True)


REFERENCE = Space()
"""All that the specs allow, which is what the reference family computes."""


@st.composite
def paged_problems(draw: st.DrawFn, space: Space = REFERENCE) -> Problem:
    """Problems over pages: shuffled, some of them spare, prefixes shared by several requests.

    All that no request may read (spare pages, ends of pages, the other layers, the new tokens'
    slots before the step) is either 0 or NaN, which shows in the answer if it is read after all.
    """
    page_size = draw(st.sampled_from(space.page_sizes))
    requests = draw(_paged_requests(page_size))
    bucket = draw(_buckets(requests, page_size))
    dtype = draw(st.sampled_from(space.dtypes))
    heads, widths = draw(st.sampled_from(space.heads)), draw(st.sampled_from(space.head_dims))
    num_layers = draw(st.integers(1, 3))
    layer = draw(st.integers(0, num_layers - 1))
    stale = draw(st.sampled_from((0.0, np.nan)))
    table, num_pages = draw(_page_tables(requests, page_size))
    rng = np.random.default_rng(draw(seeds))

    pools = []
    for width in widths:
        pool = np.full((num_layers * num_pages, page_size, heads[1], width), stale)
        mine = pool[layer * num_pages : (layer + 1) * num_pages]
        for request, (query_len, kv_len) in enumerate(requests):
            tokens = np.arange(kv_len - query_len)
            context = rng.standard_normal((len(tokens), heads[1], width))
            mine[table[request, tokens // page_size], tokens % page_size] = context
        pools.append(pool.astype(NUMPY_DTYPES[dtype]))
    num_tokens = sum(query_len for query_len, _ in requests)
    padded = num_tokens if bucket is None else bucket.num_tokens
    masks = None
    if draw(st.sampled_from(space.draft_masks)):
        masks, bucket = _draft_masks(rng, requests, bucket)
    return Problem(
        dtype,
        draw(_features(space)),
        *_lengths(requests),
        query=_rows(rng, dtype, num_tokens, padded, heads[0], widths[0]),
        key=_rows(rng, dtype, num_tokens, padded, heads[1], widths[0]),
        value=_rows(rng, dtype, num_tokens, padded, heads[1], widths[1]),
        bucket=bucket,
        pages=Pages(
            num_layers, layer, page_size, draw(st.sampled_from(space.layouts)), table, *pools
        ),
        draft_masks=masks,
    )


@st.composite
def ragged_problems(draw: st.DrawFn, space: Space = REFERENCE) -> Problem:
    """Problems without a cache: first prefills, and queries at the end of more keys."""
    length = st.integers(0, 24)
    first_prefill = length.map(lambda n: (n, n))
    later = st.tuples(length, length).map(lambda n: (n[0], n[0] + n[1]))
    requests = draw(st.lists(first_prefill | later, min_size=1, max_size=5))
    bucket = draw(_buckets(requests, page_size=1))
    dtype = draw(st.sampled_from(space.dtypes))
    heads, widths = draw(st.sampled_from(space.heads)), draw(st.sampled_from(space.head_dims))
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_keys = (sum(lens) for lens in _lengths(requests))
    padded, padded_keys = num_tokens, num_keys
    if bucket is not None:
        padded, padded_keys = bucket.num_tokens, bucket.num_pages
    masks = None
    if draw(st.sampled_from(space.draft_masks)):
        masks, bucket = _draft_masks(rng, requests, bucket)
    return Problem(
        dtype,
        draw(_features(space)),
        *_lengths(requests),
        query=_rows(rng, dtype, num_tokens, padded, heads[0], widths[0]),
        key=_rows(rng, dtype, num_keys, padded_keys, heads[1], widths[0]),
        value=_rows(rng, dtype, num_keys, padded_keys, heads[1], widths[1]),
        bucket=bucket,
        draft_masks=masks,
    )


@st.composite
def _paged_requests(draw: st.DrawFn, page_size: int) -> Requests:
    """Requests of one kind or of all kinds; contexts may fill more than two pages."""
    few = st.integers(1, 20)
    context = st.integers(1, max(40, 2 * page_size + 3))
    first_prefill = st.tuples(few, st.just(0))
    empty = st.just((0, 0))
    decode = st.tuples(st.just(1), context)
    drafts = st.tuples(st.integers(2, 4), context)  # several query tokens, as in speculation
    chunk = st.tuples(few, context)  # a later chunk of a prefill
    idle = st.tuples(st.just(0), context)  # a request that sits this step out
    # Batches without any context, and of one token each, are planned in other ways than the rest.
    kind = draw(
        st.sampled_from(
            (first_prefill | empty, decode, decode | drafts | first_prefill | chunk | idle | empty)
        )
    )
    lens = draw(st.lists(kind, min_size=1, max_size=5))
    return [(query_len, before + query_len) for query_len, before in lens]


@st.composite
def _page_tables(draw: st.DrawFn, requests: Requests, page_size: int) -> tuple[Array, int]:
    """Page table `[requests, columns]` int32, and the number of pages in the pool.

    A request whose context covers the shared prefix reads it there and never writes to it.
    """
    shared = draw(st.integers(0, 2))
    counts = [-(-kv_len // page_size) for _, kv_len in requests]
    # What lies past a request's pages is nobody's business, so it may be no page at all.
    filler = draw(st.sampled_from((0, -1, 2**31 - 1)))
    table = np.full((len(requests), max(counts) + draw(st.integers(0, 2))), filler, np.int32)
    dealt = shared
    for request, (query_len, kv_len) in enumerate(requests):
        first = shared if kv_len - query_len >= shared * page_size else 0
        own = counts[request] - first
        table[request, :first] = np.arange(first)
        table[request, first : first + own] = np.arange(dealt, dealt + own)
        dealt += own
    num_pages = max(1, dealt + draw(st.integers(0, 2)))
    shuffled = np.random.default_rng(draw(seeds)).permutation(num_pages)
    for request, count in enumerate(counts):
        table[request, :count] = shuffled[table[request, :count]]
    return table, num_pages


@st.composite
def _buckets(draw: st.DrawFn, requests: Requests, page_size: int) -> Bucket | None:
    """No bucket, or one with a little room to spare in any of its sizes."""
    if draw(st.booleans()):
        return None
    longest = max(query_len for query_len, _ in requests)
    spare = st.integers(0, 3)
    return Bucket(
        num_requests=len(requests) + draw(spare),
        num_tokens=sum(query_len for query_len, _ in requests) + draw(spare),
        num_pages=sum(-(-kv_len // page_size) for _, kv_len in requests) + draw(spare),
        max_query_len=draw(st.sampled_from((0, longest))),
        without_context=draw(st.booleans()) and all(q == kv for q, kv in requests),
    )


def _draft_masks(
    rng: np.random.Generator, requests: Requests, bucket: Bucket | None
) -> tuple[Array, Bucket | None]:
    """Masks of any tree, or of none that a tree has, and the bucket that announces them.

    What lies past a request's own tokens is arbitrary.
    """
    lens, _ = _lengths(requests)
    masks = rng.random((sum(lens), max(lens) + int(rng.integers(3)))) < rng.random()
    own = np.concatenate([np.arange(query_len) for query_len in lens])
    masks[np.arange(len(own)), own] = True
    if bucket is not None:
        bucket = replace(bucket, without_context=False, draft_masks=True)
    return masks, bucket


@st.composite
def _features(draw: st.DrawFn, space: Space) -> dict[str, Any]:
    return {
        "sm_scale": draw(st.sampled_from(space.sm_scales)),
        "causal": draw(st.sampled_from(space.causal)),
        "sliding_window": draw(st.sampled_from(space.sliding_windows)),
        "logits_soft_cap": draw(st.sampled_from(space.soft_caps)),
    }


def _lengths(requests: Requests) -> tuple[list[int], list[int]]:
    """Query lengths and KV lengths."""
    return [query_len for query_len, _ in requests], [kv_len for _, kv_len in requests]


def _rows(
    rng: np.random.Generator, dtype: str, count: int, padded: int, heads: int, width: int
) -> Array:
    """`count` normal rows `[heads, width]`, rounded to the dtype, and NaN up to `padded` rows."""
    rows = np.full((padded, heads, width), np.nan)
    rows[:count] = rng.standard_normal((count, heads, width))
    return rows.astype(NUMPY_DTYPES[dtype])
