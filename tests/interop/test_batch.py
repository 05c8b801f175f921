"""Ragged batches and buckets: worked examples, and a plain loop over random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given

from interop import Bucket, RaggedBatch
from interop.errors import (
    ArgumentError,
    LengthError,
    PageError,
    PlanError,
    ShapeError,
    SlotError,
)

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.mark.parametrize(
    ("kv_len", "pages", "last"),
    [(0, 0, 0), (1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16), (33, 3, 1)],
)
def test_page_counts_and_last_pages_of_16_tokens(kv_len: int, pages: int, last: int) -> None:
    batch = RaggedBatch([0], [kv_len])
    assert batch.pages(16).counts.tolist() == [pages]
    assert batch.pages(16).last_lens.tolist() == [last]


def test_slots_cross_a_page_boundary() -> None:
    # Pages 7 and 3 of 4 tokens: positions 0 to 7 lie in slots 28 to 31 and 12 to 15.
    whole = RaggedBatch([8], [8], [[7, 3]])
    assert whole.slot_mapping(4).tolist() == [28, 29, 30, 31, 12, 13, 14, 15]
    assert RaggedBatch([3], [6], [[7, 3]]).slot_mapping(4).tolist() == [31, 12, 13]
    assert RaggedBatch([1], [5], [[7, 3]]).slot_mapping(4).tolist() == [12]


def test_a_mixed_batch() -> None:
    batch = RaggedBatch([1, 3, 0, 2], [6, 3, 5, 9], [[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]])
    assert batch.qo_indptr.tolist() == [0, 1, 4, 4, 6]
    assert (batch.num_requests, batch.num_tokens, batch.max_query_len) == (4, 6, 3)
    assert not batch.without_context
    assert batch.pages(4).counts.tolist() == [2, 1, 2, 3]
    assert batch.pages(4).last_lens.tolist() == [2, 3, 1, 1]
    assert batch.page_indices(4, 12).tolist() == [7, 2, 10, 4, 11, 5, 1, 8]
    assert batch.slot_mapping(4).tolist() == [9, 40, 41, 42, 7, 32]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], Array, int, int]:
    """Query lengths, KV lengths, page table, page size and pages in the pool."""
    page_size = draw(st.integers(1, 9))
    lens = st.tuples(st.integers(0, 12), st.integers(0, 30))
    drawn = draw(st.lists(lens, min_size=1, max_size=6))
    query_lens, kv_lens = [q for q, _ in drawn], [q + context for q, context in drawn]
    counts = [-(-kv // page_size) for kv in kv_lens]
    num_pages = max(1, sum(counts) + draw(st.integers(0, 3)))
    order = draw(st.permutations(range(num_pages)))
    filler = draw(st.sampled_from((0, -1, num_pages, 2**31 - 1)))
    table = np.full((len(drawn), max(counts) + draw(st.integers(0, 2))), filler)
    for request, count in enumerate(counts):
        first = sum(counts[:request])
        table[request, :count] = order[first : first + count]
    return query_lens, kv_lens, table, page_size, num_pages


@given(batches())
def test_agrees_with_a_loop_over_tokens(
    drawn: tuple[list[int], list[int], Array, int, int],
) -> None:
    query_lens, kv_lens, table, page_size, num_pages = drawn
    batch = RaggedBatch(query_lens, kv_lens, table)
    used: list[int] = []
    for request, kv_len in enumerate(kv_lens):
        tokens_in_page: dict[int, int] = {}
        for token in range(kv_len):
            page = int(table[request, token // page_size])
            tokens_in_page[page] = tokens_in_page.get(page, 0) + 1
        used += tokens_in_page
        last = list(tokens_in_page.values())[-1] if tokens_in_page else 0
        assert batch.pages(page_size).counts[request] == len(tokens_in_page)
        assert batch.pages(page_size).last_lens[request] == last
    assert batch.page_indices(page_size, num_pages).tolist() == used
    slots = oracle.slot_mapping(query_lens, kv_lens, table, page_size)
    assert batch.slot_mapping(page_size).tolist() == slots
    assert batch.without_context == (query_lens == kv_lens)


@given(batches())
def test_everything_is_int32_and_nothing_is_modified(
    drawn: tuple[list[int], list[int], Array, int, int],
) -> None:
    query_lens, kv_lens, table, page_size, num_pages = drawn
    arrays = [np.asarray(x, np.int32) for x in (query_lens, kv_lens, table)]
    before = [array.copy() for array in arrays]
    batch = RaggedBatch(*arrays)
    results = [
        batch.qo_indptr,
        batch.pages(page_size).counts,
        batch.pages(page_size).last_lens,
        batch.page_indices(page_size, num_pages),
        batch.slot_mapping(page_size),
    ]
    assert {result.dtype for result in results} == {np.dtype(np.int32)}
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize(
    "convert",
    [
        list,
        np.int64,
        np.uint8,
        lambda x: np.asarray(x, np.int32),
        lambda x: np.repeat(np.asarray(x, np.int32), 2, axis=0)[::2],
        torch.tensor,
        jnp.asarray,
    ],
    ids=["list", "int64", "uint8", "int32", "strided", "torch", "jax"],
)
def test_any_integers_on_the_host_will_do(convert: Any) -> None:
    batch = RaggedBatch(convert([2, 1]), convert([5, 1]), convert([[3, 1], [2, 0]]))
    assert batch.page_indices(4, 4).tolist() == [3, 1, 2]
    assert batch.slot_mapping(4).tolist() == [15, 4, 8]


@pytest.mark.parametrize(
    "lens",
    [
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1]).to_sparse(),
        torch.empty(1, dtype=torch.int32, device="meta"),
    ],
    ids=["with a gradient", "bfloat16", "sparse", "meta"],
)
def test_tensors_that_numpy_cannot_read(lens: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"^kv_lens: got a Tensor that NumPy cannot read"):
        RaggedBatch([1], lens)


def test_read_pages_may_be_shared() -> None:
    batch = RaggedBatch([1, 1], [5, 6], [[0, 1], [0, 2]])
    assert batch.page_indices(4, 3).tolist() == [0, 1, 0, 2]
    assert batch.slot_mapping(4).tolist() == [4, 9]


BAD_BATCHES: dict[str, tuple[type[ArgumentError], str, tuple[Any, ...], str]] = {
    "no requests": (ShapeError, "query_lens", ([], []), "got no requests"),
    "rank of lengths": (ShapeError, "query_lens", ([[1]], [1]), r"got shape \(1, 1\)"),
    "scalar length": (ShapeError, "kv_lens", ([1], 1), r"got shape \(\)"),
    "no lengths": (ShapeError, "kv_lens", ([1], None), "kv_lens: got"),
    "fractions": (ShapeError, "query_lens", ([1.0], [1]), "got dtype float64, want integers"),
    "booleans": (ShapeError, "query_lens", ([True], [1]), "got dtype bool, want integers"),
    "text": (ShapeError, "kv_lens", ([1], ["1"]), "got dtype <U1, want integers"),
    "one length missing": (ShapeError, "kv_lens", ([1, 2], [3]), "got 1 lengths, want 2"),
    "negative query": (LengthError, "query_lens[1]", ([1, -2], [3, 3]), "got -2, want 0 or"),
    "negative cache": (LengthError, "kv_lens[1]", ([1, 0], [3, -1]), "got -1 with"),
    "query longer than cache": (
        LengthError,
        "kv_lens[1]",
        ([1, 4], [3, 3]),
        r"got 3 with query_lens\[1\] = 4, want at least the query length",
    ),
    "beyond int32": (LengthError, "kv_lens", ([1], [2**31]), "want values that fit int32"),
    "sum beyond int32": (LengthError, "kv_lens", ([1, 1], [2**30, 2**30]), "sum fits int32"),
    "rank of table": (ShapeError, "page_table", ([1], [1], [0]), r"got shape \(1,\)"),
    "uneven table": (ShapeError, "page_table", ([1, 1], [1, 1], [[0], [1, 2]]), "rows of"),
    "rows of table": (ShapeError, "page_table", ([1, 1], [1, 1], [[0]]), "want 2 rows"),
    "table of fractions": (ShapeError, "page_table", ([1], [1], [[0.5]]), "got dtype float64"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_cannot_be(name: str) -> None:
    kind, argument, arguments, text = BAD_BATCHES[name]
    with pytest.raises(kind, match=text) as error:
        RaggedBatch(*arguments)
    assert error.value.argument == argument


@pytest.mark.parametrize("method", [lambda b: b.page_indices(4, 8), lambda b: b.slot_mapping(4)])
def test_pages_that_are_missing(method: Callable[[RaggedBatch], object]) -> None:
    with pytest.raises(PageError, match=r"page_table: got none.*plan without a cache") as error:
        method(RaggedBatch([1], [1]))
    assert error.value.argument == "page_table"
    narrow = RaggedBatch([1, 1], [4, 9], [[0, 1], [2, 3]])
    wanted = r"page_table\[1\]: got 2 entries, want 3 for kv_lens\[1\] = 9 tokens in pages of 4"
    with pytest.raises(PageError, match=wanted):
        method(narrow)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1])
def test_pages_outside_the_pool(page: int) -> None:
    batch = RaggedBatch([1, 6], [1, 6], [[0, 99], [3, page]])
    wanted = rf"page_table\[1, 1\]: got {page}, want a page id from 0 to 7"
    with pytest.raises(PageError, match=wanted):
        batch.page_indices(4, 8)


def test_slots_that_two_requests_write() -> None:
    batch = RaggedBatch([1, 2, 1], [2, 2, 6], [[3, 0], [5, 0], [1, 3]])
    # Requests 0 and 2 both write offset 1 of page 3.
    with pytest.raises(SlotError, match=r"got slot 13 for tokens of requests 0 and 2.*copy them"):
        batch.slot_mapping(4)


def test_slots_that_one_request_writes_twice() -> None:
    with pytest.raises(SlotError, match="got slot 4 for tokens of requests 0 and 0"):
        RaggedBatch([8], [8], [[1, 1]]).slot_mapping(4)


@given(batches())
def test_the_covering_bucket_covers_with_powers_of_two(
    drawn: tuple[list[int], list[int], Array, int, int],
) -> None:
    query_lens, kv_lens, table, page_size, _ = drawn
    batch = RaggedBatch(query_lens, kv_lens, table)
    pages = int(batch.pages(page_size).counts.sum())
    bucket = Bucket.covering(batch, page_size)
    bucket.check(batch, pages)
    for size, need in (
        (bucket.num_requests, batch.num_requests),
        (bucket.num_tokens, batch.num_tokens),
        (bucket.num_pages, pages),
        (bucket.max_query_len, batch.max_query_len),
    ):
        assert size.bit_count() == 1
        # Twice a size that is a power of two already would be waste; one-token steps have a row
        # for each request, though.
        assert size < 2 * max(need, 1) or size == bucket.num_requests
    Bucket.exactly(batch, pages).check(batch, pages)


def test_a_batch_that_does_not_fit_its_bucket() -> None:
    batch = RaggedBatch([1, 3], [9, 3])
    fits = {"num_requests": 2, "num_tokens": 4, "num_pages": 4, "max_query_len": 3}
    Bucket(**fits).check(batch, 4)
    for name, size in fits.items():
        with pytest.raises(PlanError, match=f"want at least {size}. Use a larger bucket") as error:
            Bucket(**(fits | {name: size - 1})).check(batch, 4)
        assert error.value.argument == f"bucket.{name}"
        assert str(error.value.given) == f"{size - 1} for a batch that needs {size}"


def test_the_promise_of_no_context_is_checked() -> None:
    bucket = Bucket(2, 4, 4, without_context=True)
    bucket.check(RaggedBatch([1, 3], [1, 3]), 2)
    with pytest.raises(PlanError, match="whose request 1 has 2 tokens of context"):
        bucket.check(RaggedBatch([1, 3], [1, 5]), 3)


@pytest.mark.parametrize("name", ["num_requests", "num_tokens", "num_pages", "max_query_len"])
@pytest.mark.parametrize("size", [-1, 1.0, True, None])
def test_sizes_that_no_bucket_has(name: str, size: Any) -> None:
    with pytest.raises(LengthError, match="want 0 or a positive integer") as error:
        Bucket(**({"num_requests": 1, "num_tokens": 1, "num_pages": 1} | {name: size}))
    assert error.value.argument == name


def test_buckets_of_equal_sizes_are_equal() -> None:
    assert Bucket(2, 8, 4) == Bucket(2, 8, 4, max_query_len=8)
    assert hash(Bucket(2, 8, 4)) == hash(Bucket(np.int64(2), 8, 4, max_query_len=99))


def test_lengths_that_the_caller_counts_on_do_not_change_a_batch() -> None:
    kv_lens = np.array([4, 4], np.int32)
    batch = RaggedBatch(np.array([1, 1], np.int32), kv_lens, [[0, 1], [2, 3]])
    kv_lens += 1
    assert batch.kv_lens.tolist() == [4, 4]
    assert batch.pages(4).counts.tolist() == [1, 1]
