"""The oracle against answers worked out by hand or from first principles."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch


def test_queries_are_the_last_tokens_of_the_request() -> None:
    assert oracle.visible_keys(0, 2, 5) == [0, 1, 2, 3]
    assert oracle.visible_keys(1, 2, 5) == [0, 1, 2, 3, 4]
    assert oracle.visible_keys(0, 2, 5, causal=False) == [0, 1, 2, 3, 4]


def test_queries_before_the_first_key_see_nothing() -> None:
    assert [oracle.visible_keys(i, 3, 1) for i in range(3)] == [[], [], [0]]


def test_window_counts_the_query_and_bounds_the_past_only() -> None:
    assert oracle.visible_keys(1, 2, 5, sliding_window=1) == [4]
    assert oracle.visible_keys(0, 2, 5, sliding_window=3) == [1, 2, 3]
    assert oracle.visible_keys(0, 2, 5, sliding_window=3, causal=False) == [1, 2, 3, 4]


def test_two_equal_keys_halve_the_weight_and_add_log_two() -> None:
    query, key = np.ones((1, 1, 4)), np.ones((2, 1, 4))
    value = np.array([[[1.0, 0.0]], [[0.0, 3.0]]])
    out, lse = oracle.attend_request(query, key, value)
    np.testing.assert_allclose(out, [[[0.5, 1.5]]])
    np.testing.assert_allclose(lse, [[4 / 2 + np.log(2)]])


def test_the_cap_is_applied_to_the_scaled_logit() -> None:
    one = np.ones((1, 1, 1))
    _, lse = oracle.attend_request(6 * one, one, one, sm_scale=0.5, logits_soft_cap=2.0)
    np.testing.assert_allclose(lse, [[2 * np.tanh(1.5)]])


def test_a_row_without_keys_is_zero_with_lse_minus_infinity() -> None:
    query, nothing = np.ones((1, 2, 4)), np.ones((0, 1, 4))
    out, lse = oracle.attend_request(query, nothing, nothing)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_pytorchs_dense_attention(causal: bool) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((7, heads, 16)) for heads in (9, 3, 3))
    out, _ = oracle.attend_request(query, key, value, causal=causal)
    q, k, v = (torch.from_numpy(x).transpose(0, 1)[None] for x in (query, key, value))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    np.testing.assert_allclose(out, want[0].transpose(0, 1).numpy(), rtol=1e-12, atol=1e-12)


def test_slots_of_a_chunk_and_of_a_request_without_queries() -> None:
    table = np.array([[7, 3, -1], [2, -1, -1], [5, 0, 9]])
    assert oracle.slot_mapping([3, 0, 2], [6, 2, 9], table, 4) == [31, 12, 13, 3, 36]


def test_append_skips_slot_minus_one_and_padding() -> None:
    new = np.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    pages = np.zeros((2, 2, 1, 1))
    key_pages, value_pages = oracle.append(new, 10 * new, pages, pages, [2, -1])
    assert key_pages.ravel().tolist() == [0, 0, 1, 0]
    assert value_pages.ravel().tolist() == [0, 0, 10, 0]
    assert not pages.any()


def test_pages_hold_the_same_tokens_as_ragged_rows() -> None:
    rng = np.random.default_rng(1)
    query_lens, kv_lens, page_size = [2, 0, 1], [5, 0, 3], 2
    query, key, value = (rng.standard_normal((n, 2, 4)) for n in (3, 8, 8))
    table = np.array([[4, 0, 2], [9, 9, 9], [1, 3, 9]])
    slots = oracle.slot_mapping(kv_lens, kv_lens, table, page_size)
    blank = np.full((5, page_size, 2, 4), np.nan)
    keys, values = oracle.append(key, value, blank, blank, slots)
    paged = oracle.paged_attention(query, keys, values, query_lens, kv_lens, table)
    ragged = oracle.ragged_attention(query, key, value, query_lens, kv_lens)
    for got, want in zip(paged, ragged, strict=True):
        np.testing.assert_array_equal(got, want)


def test_merging_parts_gives_the_whole() -> None:
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((6, heads, 8)) for heads in (4, 2, 2))
    whole = oracle.attend_request(query, key, value, causal=False)
    first = oracle.attend_request(query, key[:2], value[:2], causal=False)
    second = oracle.attend_request(query, key[2:], value[2:], causal=False)
    for got, want in zip(oracle.merge_states(*first, *second), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("nothing", [-np.inf, np.inf])
def test_merging_with_nothing_gives_the_other_side(nothing: float) -> None:
    out, lse = np.full((1, 1, 2), 3.0), np.full((1, 1), 700.0)
    no_out, no_lse = np.zeros((1, 1, 2)), np.full((1, 1), nothing)
    for got in (
        oracle.merge_states(out, lse, no_out, no_lse),
        oracle.merge_states(no_out, no_lse, out, lse),
    ):
        np.testing.assert_array_equal(got[0], out)
        np.testing.assert_array_equal(got[1], lse)
    both = oracle.merge_states(no_out, no_lse, no_out, no_lse)
    assert not both[0].any()
    assert both[1].item() == -np.inf
