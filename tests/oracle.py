"""Attention in NumPy float64, written to be read: what every kernel and front end is measured by.

Nothing here imports the packages under test and nothing in them imports this file. It is slow on
purpose: a loop per request, per head and per query token, so that each line can be checked by eye.

Shapes follow the packages. Queries are `[tokens, num_qo_heads, head_dim]`, keys
`[tokens, num_kv_heads, head_dim]`, values `[tokens, num_kv_heads, head_dim_v]`. Pools here are
those of *one* layer, token-major: `[num_pages, page_size, num_kv_heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Lengths = Sequence[int]


def visible_keys(
    query_index: int,
    query_len: int,
    kv_len: int,
    *,
    causal: bool = True,
    sliding_window: int | None = None,
    draft_mask: Array | None = None,
) -> list[int]:
    """Positions of the keys that one query token of a request attends to.

    The queries are the *last* `query_len` positions of the `kv_len` tokens, so query `i` sits at
    position `kv_len - query_len + i`. A window of W tokens counts the query itself; it bounds the
    past only, so without the causal mask the keys after the query stay visible.

    A draft mask `[query_len, query_len]` stands in for the causal mask: query `i` sees the step's
    token `k` where ``draft_mask[i, k]`` is true, and all that came before the step.
    """
    position = kv_len - query_len + query_index
    keys = []
    for key in range(kv_len):
        drafted = key - (kv_len - query_len)
        if draft_mask is not None:
            if drafted >= 0 and not draft_mask[query_index, drafted]:
                continue
        elif causal and key > position:
            continue
        if sliding_window is not None and key <= position - sliding_window:
            continue
        keys.append(key)
    return keys


def attend_request(
    query: Array,
    key: Array,
    value: Array,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    draft_mask: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of one request over its own keys and values, all tokens given densely.

    Query heads are dealt to KV heads in runs: head `h` reads KV head `h // (qo_heads / kv_heads)`.
    The logit is `s = sm_scale * q.k` with `sm_scale = head_dim ** -0.5` unless given; a soft cap c
    turns it into `c * tanh(s / c)`. Returns the output `[query_len, num_qo_heads, head_dim_v]` and
    the natural-log LSE `[query_len, num_qo_heads]`, both float64. A query that sees no key gives
    output 0 and LSE -inf.

    A sink ``[num_qo_heads]`` is the logit of one more key, whose value is 0: neither scaled nor
    capped, seen by every query. The LSE is that of the other keys. For `draft_mask` see
    `visible_keys`.
    """
    query_len, num_qo_heads, head_dim = query.shape
    kv_len, num_kv_heads, head_dim_v = value.shape
    group = num_qo_heads // num_kv_heads
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    query, key, value = (x.astype(np.float64) for x in (query, key, value))

    out = np.zeros((query_len, num_qo_heads, head_dim_v))
    lse = np.full((query_len, num_qo_heads), -np.inf)
    for i in range(query_len):
        keys = visible_keys(
            i,
            query_len,
            kv_len,
            causal=causal,
            sliding_window=sliding_window,
            draft_mask=draft_mask,
        )
        if not keys:
            continue
        for head in range(num_qo_heads):
            logits = scale * (key[keys, head // group] @ query[i, head])
            if logits_soft_cap is not None:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            largest = logits.max()
            weights = np.exp(logits - largest)
            out[i, head] = weights @ value[keys, head // group] / weights.sum()
            lse[i, head] = largest + np.log(weights.sum())
            if sinks is not None:
                out[i, head] *= np.exp(lse[i, head] - np.logaddexp(lse[i, head], sinks[head]))
    return out, lse


def ragged_attention(
    query: Array,
    key: Array,
    value: Array,
    query_lens: Lengths,
    kv_lens: Lengths,
    *,
    draft_masks: Array | None = None,
    **features: Any,
) -> tuple[Array, Array]:
    """Attention without a cache: each request's tokens lie one after another in all three arrays.

    `features` are the keyword arguments of `attend_request`; rows of `draft_masks`
    `[tokens, columns]` are those of all requests, one after another. Returns `(out, lse)` in
    float64.
    """
    out = np.zeros((*query.shape[:2], value.shape[2]))
    lse = np.full(query.shape[:2], -np.inf)
    first_query = first_key = 0
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        rows = slice(first_query, first_query + query_len)
        keys = slice(first_key, first_key + kv_len)
        mask = None if draft_masks is None else draft_masks[rows, :query_len]
        out[rows], lse[rows] = attend_request(
            query[rows], key[keys], value[keys], draft_mask=mask, **features
        )
        first_query += query_len
        first_key += kv_len
    return out, lse


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    query_lens: Lengths,
    kv_lens: Lengths,
    page_table: Array,
    *,
    draft_masks: Array | None = None,
    **features: Any,
) -> tuple[Array, Array]:
    """Attention over one layer's pages: token `t` of request `r` is in `page_table[r, t // P]`.

    Masks and `features` are those of `ragged_attention`. Returns `(out, lse)` in float64.
    """
    page_size = key_pages.shape[1]
    out = np.zeros((*query.shape[:2], value_pages.shape[3]))
    lse = np.full(query.shape[:2], -np.inf)
    first_query = 0
    for request, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        tokens = np.arange(kv_len)
        pages, offsets = page_table[request, tokens // page_size], tokens % page_size
        rows = slice(first_query, first_query + query_len)
        mask = None if draft_masks is None else draft_masks[rows, :query_len]
        keys, values = key_pages[pages, offsets], value_pages[pages, offsets]
        out[rows], lse[rows] = attend_request(
            query[rows], keys, values, draft_mask=mask, **features
        )
        first_query += query_len
    return out, lse


def slot_mapping(
    query_lens: Lengths, kv_lens: Lengths, page_table: Array, page_size: int
) -> list[int]:
    """Slot `page * page_size + offset` of each new token, in batch order.

    The new tokens of a request are the last `query_len` of its `kv_len` tokens.
    """
    slots = []
    for request, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        for token in range(kv_len - query_len, kv_len):
            page = int(page_table[request, token // page_size])
            slots.append(page * page_size + token % page_size)
    return slots


def append(
    key: Array, value: Array, key_pages: Array, value_pages: Array, slots: Sequence[int]
) -> tuple[Array, Array]:
    """Copies of one layer's pages with token `t` of `key` and `value` written to `slots[t]`.

    A slot of -1 writes nothing. Rows of `key` and `value` beyond `slots` are padding. Bytes are
    copied as they are, so the result can be compared bit for bit.
    """
    page_size = key_pages.shape[1]
    key_pages, value_pages = key_pages.copy(), value_pages.copy()
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        key_pages[slot // page_size, slot % page_size] = key[token]
        value_pages[slot // page_size, slot % page_size] = value[token]
    return key_pages, value_pages


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys, from the result over each of them.

    `out_*` is `[tokens, heads, head_dim_v]` and `lse_*` the natural-log LSE `[tokens, heads]`. With
    the LSE as log of the softmax denominator, the weights are the two shares of the sum of the
    denominators. A side that saw no key has LSE -inf (+inf, which some kernels write for that, is
    read the same way) and weight 0; if neither saw one the result is 0 with LSE -inf.
    """
    out = np.zeros(out_a.shape)
    lse = np.full(lse_a.shape, -np.inf)
    for row in np.ndindex(*lse_a.shape):
        sides = [
            (float(side_lse[row]), side_out[row].astype(np.float64))
            for side_out, side_lse in ((out_a, lse_a), (out_b, lse_b))
            if np.isfinite(side_lse[row])
        ]
        if not sides:
            continue
        largest = max(side_lse for side_lse, _ in sides)
        total = sum(np.exp(side_lse - largest) for side_lse, _ in sides)
        for side_lse, side_out in sides:
            out[row] += np.exp(side_lse - largest) / total * side_out
        lse[row] = largest + np.log(total)
    return out, lse
