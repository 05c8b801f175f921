"""Tokens spread over ranks: worked examples, and a deal of one token after another by hand."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.errors import ArgumentError, PageError, PlanError, SlotError
from interop.sharding import LocalBatch, TokenShards, check_dcp, own_kv_heads

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = (1, 2, 3, 4, 8)
# (page_size, size, interleave)
GROUPS = [
    (page_size, size, interleave)
    for page_size in (4, 16)
    for size in SIZES
    for interleave in range(1, page_size + 1)
    if page_size % interleave == 0
]


def deal(count: int, size: int, interleave: int) -> list[tuple[int, int]]:
    """Rank of each token and how many that rank had before it, dealt in turns of `interleave`."""
    had = [0] * size
    dealt = []
    rank = turn = 0
    for _ in range(count):
        dealt.append((rank, had[rank]))
        had[rank] += 1
        turn += 1
        if turn == interleave:
            rank, turn = (rank + 1) % size, 0
    return dealt


@pytest.mark.parametrize(
    ("length", "size", "interleave", "want"),
    [
        (0, 4, 1, [0, 0, 0, 0]),
        (1, 4, 1, [1, 0, 0, 0]),
        (25, 4, 1, [7, 6, 6, 6]),
        (25, 4, 4, [8, 8, 5, 4]),
        (130, 4, 16, [34, 32, 32, 32]),
        (65, 2, 16, [33, 32]),
        (17, 2, 16, [16, 1]),
    ],
)
def test_local_lengths_worked_out(length: int, size: int, interleave: int, want: list[int]) -> None:
    shards, lens = TokenShards(size, interleave), np.array([length], np.int32)
    assert [shards.local_lens(lens, rank).item() for rank in range(size)] == want


@pytest.mark.parametrize(
    ("interleave", "want"),
    [
        (1, [[28, -1, 29, -1, 30, -1, 31, -1, 12, -1], [-1, 28, -1, 29, -1, 30, -1, 31, -1, 12]]),
        (2, [[28, 29, -1, -1, 30, 31, -1, -1, 12, 13], [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1]]),
    ],
)
def test_slots_worked_out(interleave: int, want: list[list[int]]) -> None:
    # Pages 7 and 3 of 4 tokens on each of two ranks hold positions 0 to 7 and 8 to 15.
    batch = RaggedBatch([10], [10], [[7, 3]])
    for rank in range(2):
        local = LocalBatch.of(batch, TokenShards(2, interleave), rank, context_only=True)
        assert local.slot_mapping(4).tolist() == want[rank]


@pytest.mark.parametrize(("page_size", "size", "interleave"), GROUPS)
def test_agrees_with_dealing_by_hand(page_size: int, size: int, interleave: int) -> None:
    shards = TokenShards(size, interleave)
    shards.check(page_size)
    count = 3 * page_size * size + 2
    dealt = deal(count, size, interleave)
    positions = np.arange(count, dtype=np.int32)
    assert list(zip(shards.owner(positions), shards.local_positions(positions), strict=True)) == (
        dealt
    )
    lens = np.arange(count + 1, dtype=np.int32)
    table = np.array([9, 4, 7, 2], np.int32)
    pages = table[positions // (page_size * size)]
    total = np.zeros(count + 1, np.int32)
    for rank in range(size):
        local = shards.local_lens(lens, rank)
        held = np.cumsum([0] + [owner == rank for owner, _ in dealt])
        np.testing.assert_array_equal(local, held)
        assert (local <= shards.local_lens(lens, 0)).all()
        total += local
        # Whoever reads a rank's tokens in order finds the t-th in entry t // page_size.
        want = [
            table[t // page_size] * page_size + t % page_size if owner == rank else -1
            for owner, t in dealt
        ]
        np.testing.assert_array_equal(shards.slots(pages, positions, page_size, rank), want)
        offsets = positions % (page_size * size)
        np.testing.assert_array_equal(shards.slots(pages, offsets, page_size, rank), want)
    np.testing.assert_array_equal(total, lens)


@st.composite
def groups_and_batches(
    draw: st.DrawFn,
) -> tuple[TokenShards, int, list[int], list[int], Array, int]:
    """Shards, page size, query and KV lengths, page table, pages in the pool."""
    page_size, size, interleave = draw(st.sampled_from(GROUPS))
    # Lengths around multiples of what one entry of the table holds, and short ones.
    near = st.builds(
        lambda entries, more: max(0, entries * page_size * size + more),
        st.integers(0, 2),
        st.integers(-2, 2),
    )
    lens = st.tuples(st.integers(0, 9) | st.integers(0, 1), near | st.integers(0, 2 * size))
    drawn = draw(st.lists(lens, min_size=1, max_size=5))
    query_lens, kv_lens = [q for q, _ in drawn], [q + context for q, context in drawn]
    counts = [-(-kv // (page_size * size)) for kv in kv_lens]
    num_pages = max(1, sum(counts) + draw(st.integers(0, 2)))
    order = draw(st.permutations(range(num_pages)))
    table = np.full((len(drawn), max(counts) + draw(st.integers(0, 1))), -1, np.int32)
    for request, count in enumerate(counts):
        first = sum(counts[:request])
        table[request, :count] = order[first : first + count]
    return TokenShards(size, interleave), page_size, query_lens, kv_lens, table, num_pages


@given(groups_and_batches(), st.booleans())
def test_a_batch_agrees_with_dealing_by_hand(
    drawn: tuple[TokenShards, int, list[int], list[int], Array, int], context_only: bool
) -> None:
    shards, page_size, query_lens, kv_lens, table, num_pages = drawn
    given_arrays = [np.array(x, np.int32) for x in (query_lens, kv_lens, table)]
    before = [array.copy() for array in given_arrays]
    whole = RaggedBatch(*given_arrays)
    for rank in range(shards.size):
        lens, counts, pages, slots = [], [], [], []
        for request, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
            dealt = deal(kv_len, shards.size, shards.interleave)
            context = kv_len - query_len
            read = dealt[:context] if context_only else dealt
            lens.append(sum(owner == rank for owner, _ in read))
            counts.append(-(-lens[-1] // page_size))
            pages += table[request, : counts[-1]].tolist()
            for owner, t in dealt[context:]:
                slot = table[request, t // page_size] * page_size + t % page_size
                slots.append(slot if owner == rank else -1)

        local = LocalBatch.of(whole, shards, rank, context_only=context_only)
        assert local.kv_lens.tolist() == lens
        assert local.pages(page_size).counts.tolist() == counts
        assert local.page_indices(page_size, num_pages).tolist() == pages
        assert local.slot_mapping(page_size).tolist() == slots
        assert local.query_lens.tolist() == query_lens
        assert local.qo_indptr.tolist() == whole.qo_indptr.tolist()
        assert (local.num_tokens, local.max_query_len) == (whole.num_tokens, whole.max_query_len)
        assert not local.without_context
        arrays = (local.kv_lens, local.page_indices(page_size, num_pages))
        assert {x.dtype for x in (*arrays, local.slot_mapping(page_size))} == {np.dtype(np.int32)}
    assert whole.kv_lens.tolist() == kv_lens
    for array, was in zip(given_arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize("extra", range(-3, 4))
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_written_step_by_step_is_read_in_order(size: int, extra: int) -> None:
    # A prompt of two entries' tokens less or more a few, and then a token a step; what a rank
    # reads is its own tokens, each where it was written, and nothing else.
    page_size, shards = 4, TokenShards(size, 2)
    prompt = 2 * page_size * size + extra
    table = np.array([[5, 0, 3, 1]], np.int32)
    pools = np.full((size, 6 * page_size), -1)
    for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, prompt + 6))]:
        batch = RaggedBatch([last - first], [last], table)
        seen: list[int] = []
        for rank, pool in enumerate(pools):
            local = LocalBatch.of(batch, shards, rank, context_only=False)
            slots = local.slot_mapping(page_size)
            pool[slots[slots >= 0]] = np.arange(first, last)[slots >= 0]
            ids = local.page_indices(page_size, 6)
            read = pool.reshape(6, page_size)[ids].reshape(-1)[: local.kv_lens[0]].tolist()
            assert read == sorted(read)
            assert -1 not in read
            seen += read
        assert sorted(seen) == list(range(last))


@pytest.mark.parametrize("rank", range(4))
def test_what_is_wrong_with_a_table_is_found_on_every_rank(rank: int) -> None:
    shards = TokenShards(4)

    def local(*arguments: Any, context_only: bool = False) -> LocalBatch:
        return LocalBatch.of(RaggedBatch(*arguments), shards, rank, context_only=context_only)

    # Token 16 opens a second entry, and lies on rank 0.
    narrow = local([1, 1], [1, 17], [[0], [1]])
    wanted = (
        r"page_table\[1\]: got 1 entries, want 2 for kv_lens\[1\] = 17 tokens in pages of 4 on 4 "
    )
    for call in (lambda: narrow.page_indices(4, 8), lambda: narrow.slot_mapping(4)):
        with pytest.raises(PageError, match=wanted):
            call()
    for context_only in (False, True):
        outside = local([1, 1], [1, 17], [[0, 3], [1, 8]], context_only=context_only)
        with pytest.raises(PageError, match=r"page_table\[1, 1\]: got 8, want a page id from 0 to"):
            outside.page_indices(4, 8)
    # Position 2 of both requests is on rank 2.
    shared = local([1, 1], [3, 3], [[6], [6]])
    with pytest.raises(SlotError, match="got slot 24 of rank 2 for tokens of requests 0 and 1"):
        shared.slot_mapping(4)
    with pytest.raises(PageError, match="page_table: got none"):
        local([1], [1]).page_indices(4, 8)


def test_neighbours_in_a_shared_page_may_lie_on_two_ranks() -> None:
    # Position 1 of one request and 2 of the other: nobody writes what somebody else writes.
    batch = RaggedBatch([1, 1], [2, 3], [[6], [6]])
    slots = [
        LocalBatch.of(batch, TokenShards(4), rank, context_only=False).slot_mapping(4).tolist()
        for rank in range(4)
    ]
    assert slots == [[-1, -1], [24, -1], [-1, 24], [-1, -1]]


def test_all_ranks_together_may_have_more_slots_than_int32() -> None:
    # The places of these two in a page of all 8 ranks differ by 2**32.
    batch = RaggedBatch([1, 1], [1, 1], [[1], [1 + 2**25]])
    local = LocalBatch.of(batch, TokenShards(8), 0, context_only=False)
    assert local.slot_mapping(16).tolist() == [16, 16 * (1 + 2**25)]


@pytest.mark.parametrize("method", ["page_indices", "slot_mapping"])
def test_an_interleave_that_cuts_pages(method: str) -> None:
    local = LocalBatch.of(RaggedBatch([1], [1], [[0]]), TokenShards(2, 3), 0, context_only=False)
    arguments = (4, 1) if method == "page_indices" else (4,)
    with pytest.raises(ArgumentError, match=r"shards\.interleave: got 3 with pages of 4 tokens"):
        getattr(local, method)(*arguments)


def test_a_shard_keeps_no_promise_of_no_context() -> None:
    bucket = Bucket(1, 4, 1, without_context=True)
    whole = RaggedBatch([4], [4], [[0]])
    bucket.check(whole, 1)
    with pytest.raises(PlanError, match=r"bucket\.without_context"):
        bucket.check(LocalBatch.of(whole, TokenShards(1), 0, context_only=True), 1)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "2"])
@pytest.mark.parametrize("name", ["size", "interleave"])
def test_shards_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match="want a positive integer") as error:
        TokenShards(**({"size": 2, "interleave": 1} | {name: value}))
    assert error.value.argument == f"shards.{name}"


def test_shards_are_equal_by_value() -> None:
    assert TokenShards(4) == TokenShards(np.int64(4), interleave=np.int32(1))
    assert hash(TokenShards(4)) == hash(TokenShards(np.int64(4)))


@pytest.mark.parametrize("rank", [-1, 2, 0.0, True, None])
def test_ranks_that_there_are_not(rank: Any) -> None:
    with pytest.raises(ArgumentError, match="want an integer from 0 to 1") as error:
        LocalBatch.of(RaggedBatch([1], [1]), TokenShards(2), rank, context_only=False)
    assert error.value.argument == "rank"


@pytest.mark.parametrize(
    "batch", [None, LocalBatch.of(RaggedBatch([1], [1]), TokenShards(2), 0, context_only=False)]
)
def test_only_whole_batches_are_sharded(batch: Any) -> None:
    with pytest.raises(ArgumentError, match="want the RaggedBatch of all ranks' tokens") as error:
        LocalBatch.of(batch, TokenShards(2), 0, context_only=False)
    assert error.value.argument == "batch"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(24, 24), (24, 8), (24, 4), (24, 2), (24, 1), (48, 8), (72, 24)]
)
def test_key_value_heads_of_each_rank(heads: int, kv_heads: int, size: int) -> None:
    found = own_kv_heads(AttentionSpec(heads, kv_heads, 64), TokenShards(size))
    each = heads // size
    assert found.dtype == np.int32
    assert len(found) == size
    shared = each // found.shape[1]  # query heads that read one of the listed
    assert shared * found.shape[1] == each
    for rank, listed in enumerate(found):
        want = [head // (heads // kv_heads) for head in range(rank * each, (rank + 1) * each)]
        assert [listed[j // shared] for j in range(each)] == want
        if each % (heads // kv_heads) == 0 or (heads // kv_heads) % each == 0:
            assert len(set(listed.tolist())) == len(listed), "a head is listed twice for nothing"


def test_key_value_heads_whose_runs_do_not_nest() -> None:
    # Runs of 4 query heads on 3 ranks, and of 6 that share a key/value head.
    found = own_kv_heads(AttentionSpec(12, 2, 64), TokenShards(3))
    assert found.tolist() == [[0, 0], [0, 1], [1, 1]]


SPEC = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
REFUSED: dict[str, tuple[dict[str, Any], TokenShards, str, str]] = {
    "window": (
        {"sliding_window": 7},
        TokenShards(2),
        "spec.sliding_window",
        "got 7 with decode context parallelism, want None: .* count a window in the tokens they "
        "see. Serve layers with a window from a cache that each rank holds whole",
    ),
    "no mask": ({"causal": False}, TokenShards(1), "spec.causal", "got False with decode context"),
    "heads": (
        {},
        TokenShards(3),
        "spec.num_qo_heads",
        "got 8 over 3 ranks, want a multiple of the ranks.*spec counts the heads of all ranks",
    ),
    "interleave": (
        {},
        TokenShards(2, 32),
        "shards.interleave",
        "got 32 with pages of 16 tokens, want a divisor of page_size. An interleave of 1 fits",
    ),
}


def cache_of(spec: AttentionSpec, dtype: str = "bfloat16") -> CacheSpec:
    return CacheSpec.of(spec, num_layers=1, num_pages=4, page_size=16, dtype=dtype, device="cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name(name: str) -> None:
    features, shards, argument, text = REFUSED[name]
    spec = AttentionSpec(**SPEC, **features)
    with pytest.raises(ArgumentError, match=text) as error:
        check_dcp(spec, cache_of(spec), shards)
    assert error.value.argument == argument


def test_what_can_be_sharded() -> None:
    spec = AttentionSpec(**SPEC, logits_soft_cap=30.0)
    for size in (1, 2, 4, 8):
        check_dcp(spec, cache_of(spec), TokenShards(size, 16))


def test_a_group_needs_shards_and_a_cache() -> None:
    spec = AttentionSpec(**SPEC)
    without: Any = None
    with pytest.raises(ArgumentError, match="shards: got int, want a TokenShards"):
        check_dcp(spec, cache_of(spec), 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cache_spec: got None, want a CacheSpec"):
        check_dcp(spec, without, TokenShards(2))
    with pytest.raises(ArgumentError, match=r"spec\.num_qo_heads: got 8 over 3 ranks"):
        own_kv_heads(spec, TokenShards(3))
