"""Who owns which page: what each call gives, refuses and leaves as it was.

`test_allocator_machine.py` has the invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from interop.errors import ArgumentError, LengthError, OutOfPagesError, ShapeError
from torch_backend import PageAllocator
from torch_backend.paging.allocator import AllocatorStats, CopyPages


def serve(
    allocator: PageAllocator, request: str, tokens: list[int], *, namespace: Any = None
) -> list[int]:
    """Allocate for a prompt, compute it, publish it; returns its pages."""
    pages = allocator.allocate(request, len(tokens), tokens, namespace=namespace)
    allocator.commit(request, tokens)
    return pages.tolist()


def apply(copies: CopyPages, pool: npt.NDArray[Any]) -> None:
    """What a device does with pools ``[layers, pages, ...]``."""
    pool[:, copies.target] = pool[:, copies.source]


def test_the_error_says_how_many_pages_are_missing() -> None:
    allocator = PageAllocator(4, 16)
    allocator.allocate("a", 40)
    with pytest.raises(OutOfPagesError) as error:
        allocator.allocate("b", 80)
    assert error.value.missing == 4
    assert str(error.value) == (
        "request 'b' needs 5 more pages of 16 tokens, 1 are free: 4 missing. "
        "Free a finished request, wait, or make the cache larger."
    )
    assert allocator.num_free == 1
    allocator.allocate("b", 16)


@pytest.mark.parametrize("tokens", [-1, 1.5, None, "3"])
def test_counts_of_tokens_that_are_none(tokens: Any) -> None:
    allocator = PageAllocator(4, 16)
    allocator.allocate("known", 1)
    for call, request in ((allocator.allocate, "new"), (allocator.extend, "known")):
        with pytest.raises(LengthError, match=r"num_tokens: got .*, want 0 or "):
            call(request, tokens)
    assert allocator.num_free == 3
    allocator.allocate("new", 48)


@pytest.mark.parametrize("ghost", ["ghost", ["what no dictionary can hold"]])
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("extend", (1,)),
        ("free", ()),
        ("pages", ()),
        ("num_cached_tokens", ()),
        ("make_writable", (0, 0)),
        ("commit", ([],)),
        ("fork", ("child",)),
    ],
)
def test_requests_that_nobody_knows(call: str, arguments: tuple[Any, ...], ghost: Any) -> None:
    with pytest.raises(ArgumentError, match=r"(request|parent): got .*, which owns nothing here"):
        getattr(PageAllocator(4, 16), call)(ghost, *arguments)


@pytest.mark.parametrize(("call", "arguments"), [("extend_many", ([1, 1],)), ("page_table", ())])
def test_a_request_among_others_that_nobody_knows(call: str, arguments: tuple[Any, ...]) -> None:
    allocator = PageAllocator(4, 16)
    allocator.allocate("known", 1)
    with pytest.raises(ArgumentError, match="request: got 'ghost', which owns nothing here"):
        getattr(allocator, call)(["known", "ghost"], *arguments)


@pytest.mark.parametrize(
    ("arguments", "reserved", "name"),
    [
        ((0, 16), 0, "num_pages"),
        ((1.5, 16), 0, "num_pages"),
        ((4, 0), 0, "page_size"),
        ((4, 16), 4, "reserved"),
        ((4, 16), -1, "reserved"),
        ((4, 16), 1.5, "reserved"),
    ],
)
def test_allocators_that_cannot_be(arguments: Any, reserved: int, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        PageAllocator(*arguments, reserved=reserved)
    assert error.value.argument == name


def test_what_is_returned_is_a_copy() -> None:
    allocator = PageAllocator(8, 4)
    allocator.allocate("a", 12)
    pages, table = allocator.pages("a"), allocator.page_table(["a"])
    pages[:], table[:] = 99, 99
    assert allocator.pages("a").tolist() == [0, 1, 2]


@pytest.mark.parametrize("low_watermark", [-1, 1.5, 3, None])
def test_watermarks_that_cannot_be(low_watermark: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        PageAllocator(4, 16, reserved=1, low_watermark=low_watermark)
    assert error.value.argument == "low_watermark"


def test_prompts_share_whole_pages_that_are_published() -> None:
    allocator = PageAllocator(16, 4)
    prompt = list(range(10))
    first = allocator.allocate("a", 10, prompt).tolist()
    assert allocator.num_cached_tokens("a") == 0
    # Not before they are written.
    assert not set(first) & set(allocator.allocate("b", 10, prompt).tolist())
    assert allocator.num_cached_tokens("b") == 0
    allocator.commit("a", prompt)
    assert allocator.allocate("c", 10, prompt).tolist()[:2] == first[:2]
    assert allocator.num_cached_tokens("c") == 8
    assert allocator.stats() == AllocatorStats(
        total=16,
        free=16 - 3 - 3 - 1,
        cached=0,
        used=7,
        shared=2,
        lookup_tokens=30,
        hit_tokens=8,
        evictions=0,
        forks=0,
        copies=0,
    )


@pytest.mark.parametrize(
    ("num_tokens", "cached"), [(0, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)]
)
def test_the_last_token_is_never_found(num_tokens: int, cached: int) -> None:
    allocator = PageAllocator(16, 4)
    serve(allocator, "a", list(range(20)))
    allocator.allocate("b", 20, list(range(num_tokens)))
    assert allocator.num_cached_tokens("b") == cached


@pytest.mark.parametrize("kind", [list, np.int32, np.int64, np.uint16])
def test_tokens_of_any_integers(kind: Any) -> None:
    allocator = PageAllocator(16, 4)
    tokens: Any = list(range(9)) if kind is list else np.arange(9, dtype=kind)
    allocator.allocate("a", 9, tokens)
    allocator.commit("a", tokens)
    allocator.allocate("b", 9, list(range(9)))
    assert allocator.num_cached_tokens("b") == 8


def test_namespaces_keep_prefixes_apart_even_where_all_hashes_are_equal() -> None:
    allocator = PageAllocator(16, 4)
    prefixes = allocator._pool.prefixes
    prefixes._hashes = (  # type: ignore[method-assign]
        lambda tokens, start, before: np.zeros(len(tokens), np.uint64)
    )
    prompt = [1, 2, 3, 4, 5]
    pages = {space: serve(allocator, space, prompt, namespace=space) for space in ("x", "y")}
    for space in ("y", "x"):
        again = allocator.allocate(space + "again", 5, prompt, namespace=space)
        assert again[0] == pages[space][0]
    allocator.allocate("none", 5, prompt)
    assert allocator.num_cached_tokens("none") == 0
    with pytest.raises(ArgumentError, match=r"namespace: .*unhashable"):
        allocator.allocate("list", 5, prompt, namespace=[])


def test_pages_with_equal_tokens_and_another_prefix_are_not_shared() -> None:
    allocator = PageAllocator(16, 4)
    serve(allocator, "a", [0, 1, 2, 3, 4, 5, 6, 7])
    for prompt in ([4, 5, 6, 7, 0], [9, 1, 2, 3, 4, 5, 6, 7, 0], [4, 5, 6, 7, 4, 5, 6, 7, 0]):
        assert allocator.can_allocate(9, prompt)
        allocator.allocate("b", 9, prompt)
        assert allocator.num_cached_tokens("b") == 0
        allocator.free("b")


def test_a_conversation_is_found_from_turn_to_turn() -> None:
    allocator = PageAllocator(32, 4)
    text = list(range(6))
    for turn in range(4):
        allocator.allocate(turn, len(text), text)
        assert allocator.num_cached_tokens(turn) == (4 * turn + 4 if turn else 0)
        for _ in range(4):
            text.append(100 + len(text))
            allocator.extend(turn, len(text))
            allocator.commit(turn, text)
        allocator.free(turn)


def test_the_least_recently_left_page_is_evicted_and_children_go_first() -> None:
    allocator = PageAllocator(6, 4)
    old = serve(allocator, "old", list(range(9)))[:2]
    new = serve(allocator, "new", [7] * 9)[:2]
    allocator.free("old")
    allocator.free("new")
    # Found again, so left last of all.
    allocator.allocate("again", 9, list(range(9)))
    allocator.free("again")
    assert allocator.stats().cached == 4 and allocator.num_free == 6
    evicted = [[], [], *([page] for page in (*new[::-1], *old[::-1]))]
    for number, pages in enumerate(evicted):
        given = allocator.allocate(number, 4).tolist()
        assert given == pages if pages else not set(given) & {*old, *new}
    assert allocator.stats().evictions == 4


@pytest.mark.parametrize("taken", range(5))
def test_how_many_are_found_after_some_are_evicted(taken: int) -> None:
    allocator = PageAllocator(8, 4)
    serve(allocator, "a", list(range(32)))
    allocator.free("a")
    allocator.allocate("b", 4 * taken)
    assert allocator.stats().evictions == taken
    assert allocator.stats().cached == 8 - taken
    allocator.allocate("c", 4 * (8 - taken), list(range(4 * (8 - taken))))
    assert allocator.num_cached_tokens("c") == 4 * (7 - taken)


def test_found_pages_are_not_evicted_for_those_that_find_them() -> None:
    allocator = PageAllocator(4, 4)
    prompt = list(range(16))
    pages = serve(allocator, "a", prompt)
    allocator.free("a")
    # Three are found; what they lack is the fourth, the only one that may go.
    assert allocator.allocate("b", 16, prompt).tolist()[:3] == pages[:3]
    allocator.free("b")
    with pytest.raises(OutOfPagesError, match="needs 2 more pages of 4 tokens, 1 are free: 1 miss"):
        allocator.allocate("c", 20, prompt)
    assert not allocator.can_allocate(20, prompt)
    assert allocator.can_allocate(16, prompt)


def test_one_of_two_pages_with_the_same_prefix_is_enough() -> None:
    allocator = PageAllocator(6, 4)
    prompt = list(range(8))
    allocator.allocate_many("ab", [8, 8], [prompt, prompt])
    for request in "ab":
        allocator.commit(request, prompt)
    kept = allocator.pages("b").tolist()
    allocator.free("a")
    allocator.allocate("big", 16)
    assert allocator.stats().evictions == 2
    assert not set(kept) & set(allocator.pages("big").tolist())
    allocator.free("big")
    allocator.allocate("c", 9, [*prompt, 1])
    assert allocator.num_cached_tokens("c") == 8
    assert allocator.pages("c").tolist()[:2] == kept


@pytest.mark.parametrize(
    ("tokens", "error", "match"),
    [
        ([1] * 9, LengthError, "tokens: got 9 token ids, want at most num_tokens, which is 8"),
        ([1.0], ShapeError, "tokens: got dtype float64, want integers"),
        ([True], ShapeError, "tokens: got dtype bool, want integers"),
        ([[1]], ShapeError, r"tokens: got shape \(1, 1\), want an array of 1 dimension"),
        ([2**31], LengthError, "tokens: got values 2147483648"),
        ("text", ShapeError, "tokens: got shape"),
    ],
)
def test_tokens_that_are_none(tokens: Any, error: type[Exception], match: str) -> None:
    allocator = PageAllocator(4, 4)
    allocator.allocate("a", 8)
    calls: list[Callable[[], Any]] = [
        lambda: allocator.allocate("b", 8, tokens),
        lambda: allocator.can_allocate(8, tokens),
        lambda: allocator.commit("a", tokens),
    ]
    before = allocator.stats()
    for call in calls:
        with pytest.raises(error, match=match.replace("num_tokens, which is 8", "")):
            call()
    with pytest.raises(error, match=match.replace("tokens:", r"tokens\[1\]:")):
        allocator.allocate_many([1, 2], [4, 8], [None, tokens])
    assert allocator.stats() == before
    allocator.allocate("b", 8)


def test_commit_refuses_other_tokens_than_it_was_given_before() -> None:
    allocator = PageAllocator(8, 4)
    allocator.allocate("a", 12)
    allocator.commit("a", [0, 1, 2, 3])
    allocator.fork("a", "b")
    with pytest.raises(ArgumentError, match=r"tokens 0 to 3 or before them .*make_writ"):
        allocator.commit("a", [0, 1, 2, 4, 5, 5, 5, 5])
    allocator.commit("a", list(range(12)))
    # The child shares pages which its parent has published since.
    with pytest.raises(ArgumentError, match="tokens 8 to 11 or before them that differ"):
        allocator.commit("b", [*range(8), 0, 0, 0, 0])
    with pytest.raises(ArgumentError, match="tokens 4 to 7 or before them that differ"):
        allocator.commit("b", [*range(4), 0, *range(5, 12)])
    allocator.commit("b", list(range(12)))
    allocator.allocate("c", 13, list(range(13)))
    assert allocator.num_cached_tokens("c") == 12


def test_parallel_samples_share_a_prompt_and_part_where_they_differ() -> None:
    layers, size = 2, 4
    allocator = PageAllocator(16, size)
    pool = np.zeros((layers, 16, size))
    samples = ["s0", "s1", "s2"]
    allocator.allocate("s0", 6)
    for position in range(6):
        pool[:, allocator.pages("s0")[position // size], position % size] = position
    for sample in samples[1:]:
        allocator.fork("s0", sample)
    assert allocator.stats().shared == allocator.stats().used == 2
    assert not allocator.take_copies()

    lengths = [7, 6, 7]
    allocator.extend_many(samples, lengths)
    # One of the three keeps the page, and one of them does not write it yet.
    with pytest.raises(ArgumentError, match=r"2 copies of pages wait.*take_copies"):
        allocator.page_table(samples)
    copies = allocator.take_copies()
    assert len(copies) == 2 == allocator.stats().copies
    assert copies.source.dtype == copies.target.dtype == np.int32
    assert set(copies.source.tolist()) == {int(allocator.pages("s1")[1])}
    apply(copies, pool)
    table = allocator.page_table(samples)
    assert len(set(table[:, 0].tolist())) == 1 and len(set(table[:, 1].tolist())) == 3
    for sample in (0, 2):
        pool[:, table[sample, 1], 2] = 100 + sample
    for row, length in zip(table, lengths, strict=True):
        assert pool[:, row].reshape(layers, -1)[:, :6].tolist() == [list(range(6))] * layers
        assert len(row) * size >= length
    assert not allocator.take_copies()
    # The last owner writes in place.
    allocator.extend("s1", 7)
    assert not allocator.take_copies()
    assert allocator.pages("s1").tolist() == table[1].tolist()


def test_all_who_write_a_page_leave_it_to_the_last() -> None:
    allocator = PageAllocator(8, 4)
    allocator.allocate("a", 2)
    allocator.fork("a", "b")
    allocator.extend_many(["b", "a"], [3, 3])
    assert len(allocator.take_copies()) == 1
    assert allocator.stats().used == 2


def test_no_copy_where_nothing_is_written() -> None:
    allocator = PageAllocator(8, 4)
    allocator.allocate("a", 6)
    allocator.fork("a", "b")
    assert allocator.extend("b", 6).size == allocator.extend("b", 2).size == 0
    allocator.extend_many(["a", "b"], [6, 1])
    allocator.make_writable("a", 6, 0)
    allocator.make_writable("a", 5, 0)
    assert not allocator.take_copies()
    # Nor where a page is full.
    allocator.fork("a", "c", 4)
    assert allocator.extend("c", 5).tolist() == [2]
    assert not allocator.take_copies()


def test_a_fork_of_fewer_tokens_does_not_hold_up_its_parent() -> None:
    allocator = PageAllocator(8, 4)
    pages = allocator.allocate("a", 16).tolist()
    allocator.fork("a", "b", 6)
    copies = allocator.take_copies()
    assert copies.source.tolist() == pages[1:2]
    assert copies.target.tolist() == allocator.pages("b").tolist()[1:]
    assert allocator.pages("b").tolist()[:1] == pages[:1]
    assert allocator.pages("a").tolist() == pages
    assert allocator.stats().shared == 1
    allocator.extend("b", 9)
    allocator.extend("a", 17)
    assert not allocator.take_copies()
    with pytest.raises(LengthError, match="num_tokens: got 18, want at most the parent's 17"):
        allocator.fork("a", "c", 18)
    with pytest.raises(ArgumentError, match="child: got 'b', which owns 3 pages"):
        allocator.fork("a", "b")


def test_a_fork_publishes_what_it_does_not_share() -> None:
    allocator = PageAllocator(16, 4)
    serve(allocator, "a", list(range(12)))
    allocator.fork("a", "b", 6)
    other = [*range(6), *[50] * 6]
    allocator.extend("b", 12)
    allocator.commit("b", other)
    for prompt, request in ((other, "b"), (list(range(12)), "a")):
        found = allocator.allocate("c", 13, [*prompt, 1]).tolist()
        assert found[:3] == allocator.pages(request).tolist()
        allocator.free("c")


def test_a_fork_that_finds_no_page_for_its_copy() -> None:
    allocator = PageAllocator(2, 4)
    allocator.allocate("a", 8)
    before = allocator.stats()
    with pytest.raises(OutOfPagesError, match=r"'b' needs 1 more pages.*1 missing"):
        allocator.fork("a", "b", 5)
    assert allocator.stats() == before
    allocator.fork("a", "b", 4)


def test_copies_of_copies_read_what_is_there() -> None:
    allocator = PageAllocator(8, 4)
    (page,) = allocator.allocate("a", 2).tolist()
    allocator.fork("a", "b")
    allocator.extend("b", 3)
    # Its page is yet to be copied when it is copied again.
    allocator.fork("b", "c", 2)
    copies = allocator.take_copies()
    assert copies.source.tolist() == [page, page]
    assert copies.target.tolist() == [allocator.pages("b")[0], allocator.pages("c")[0]]


def test_a_page_that_waits_for_a_copy_may_go_to_another() -> None:
    allocator = PageAllocator(3, 4)
    pages = {request: allocator.allocate(request, 2).item() for request in "ax"}
    allocator.fork("a", "b")
    allocator.extend("b", 3)
    allocator.free("b")
    allocator.fork("x", "b")
    allocator.extend("b", 3)
    copies = allocator.take_copies()
    assert (copies.source.tolist(), copies.target.tolist()) == ([pages["x"]], [2])


def test_tokens_are_written_again_in_pages_of_their_own() -> None:
    allocator = PageAllocator(16, 4)
    tokens = list(range(14))
    old = serve(allocator, "a", tokens)
    allocator.fork("a", "b")
    # Pages 0 and 2 keep some tokens; page 1 is written in full.
    allocator.make_writable("b", 2, 7)
    new = allocator.pages("b").tolist()
    assert not set(new[:3]) & set(old) and new[3] == old[3]
    copies = allocator.take_copies()
    assert copies.source.tolist() == [old[0], old[2]]
    assert copies.target.tolist() == [new[0], new[2]]
    assert allocator.pages("a").tolist() == old
    # The last page's tokens end with the request's.
    allocator.make_writable("b", 12, 2)
    assert not allocator.take_copies()
    changed = [*tokens[:2], *[50] * 7, *tokens[9:]]
    allocator.commit("b", changed[:12])
    for prompt, pages in ((tokens, old), (changed, new)):
        allocator.allocate("c", 14, prompt)
        assert allocator.pages("c").tolist()[:3] == pages[:3]
        allocator.free("c")


def test_a_published_page_is_not_written_by_its_only_owner() -> None:
    allocator = PageAllocator(4, 4)
    (page,) = serve(allocator, "a", [1, 2, 3, 4])
    allocator.make_writable("a", 3, 1)
    assert allocator.take_copies().source.tolist() == [page]
    assert allocator.stats().cached == 1
    allocator.allocate("b", 5, [1, 2, 3, 4, 5])
    assert allocator.num_cached_tokens("b") == 4


@pytest.mark.parametrize(
    ("first", "count", "argument"),
    [(7, 2, "num_tokens"), (9, 0, "num_tokens"), (-1, 1, "first_token"), (0, -1, "num_tokens")],
)
def test_tokens_that_cannot_be_written_again(first: int, count: int, argument: str) -> None:
    allocator = PageAllocator(4, 4)
    allocator.allocate("a", 8)
    with pytest.raises(LengthError) as error:
        allocator.make_writable("a", first, count)
    assert error.value.argument == argument


def test_the_watermark_is_for_requests_that_run() -> None:
    allocator = PageAllocator(10, 4, low_watermark=3)
    allocator.allocate("a", 24)
    assert allocator.can_allocate(4) and not allocator.can_allocate(5)
    with pytest.raises(OutOfPagesError) as error:
        allocator.allocate("b", 8)
    assert str(error.value) == (
        "request 'b' needs 2 more pages of 4 tokens, 4 are free and 3 kept for requests that run: "
        "1 missing. Free a finished request, wait, or make the cache larger."
    )
    with pytest.raises(OutOfPagesError, match="2 requests need 2 more pages"):
        allocator.allocate_many(["b", "c"], [1, 1])
    allocator.extend("a", 40)
    assert allocator.num_free == 0
    # Who takes no page is welcome.
    assert allocator.can_allocate(0)
    allocator.allocate("b", 0)


def test_watermark_counts_cached_pages_that_a_request_would_take() -> None:
    allocator = PageAllocator(4, 4, low_watermark=1)
    serve(allocator, "a", list(range(12)))
    allocator.free("a")
    assert allocator.num_free == 4
    assert allocator.can_allocate(12, list(range(12)))
    assert not allocator.can_allocate(13, list(range(13)))


def test_batches_are_all_or_nothing() -> None:
    allocator = PageAllocator(6, 4)
    allocator.allocate_many(["a", "b"], [4, 6])
    allocator.fork("b", "c")
    before = allocator.stats()
    tables = [allocator.pages(request).tolist() for request in "abc"]
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        # Two pages and a copy, and three are free; then one more.
        (lambda: allocator.extend_many("abc", [12, 7, 9]), OutOfPagesError, "4 more.*1 missing"),
        (lambda: allocator.extend_many(["a", "b", "a"], [5, 7, 5]), ArgumentError, "twice"),
        (lambda: allocator.extend_many(["a", "b"], [5, -1]), LengthError, r"num_tokens\[1\]"),
        (
            lambda: allocator.extend_many(["a", "b"], [5]),
            ShapeError,
            r"got shape \(1,\), want \(2,",
        ),
        (lambda: allocator.extend_many(["a"], [1.5]), ShapeError, "num_tokens: .*float64"),
        (lambda: allocator.allocate_many("de", [8, 8]), OutOfPagesError, "4 more.*1 missing"),
        (lambda: allocator.allocate_many("da", [8, 1]), ArgumentError, "'a', which owns 1 pages"),
        (lambda: allocator.allocate_many("dd", [1, 1]), ArgumentError, "'d' twice"),
        (lambda: allocator.allocate_many([[]], [1]), ArgumentError, "want something hashable"),
        (lambda: allocator.allocate_many("de", [1, 1], [[1]]), LengthError, "tokens: got 1, want"),
        (
            lambda: allocator.allocate_many("de", [1, 1], namespaces=[1]),
            LengthError,
            "namespaces: got 1, want one for each of 2 requests",
        ),
    ]
    for call, error, match in calls:
        with pytest.raises(error, match=match):
            call()
        assert allocator.stats() == before
        assert [allocator.pages(request).tolist() for request in "abc"] == tables
        assert not allocator.take_copies()
    allocator.extend_many("abc", [12, 7, 6])
    assert allocator.num_free == 0


def test_empty_batches() -> None:
    allocator = PageAllocator(4, 4)
    assert allocator.allocate_many([], []).tolist() == []
    allocator.extend_many([], [])
    assert allocator.page_table([]).shape == (0, 0)
    assert allocator.num_free == 4


def test_rows_grow_to_twice_their_size_and_are_used_again() -> None:
    allocator = PageAllocator(5000, 1)
    shapes = set()
    for length in range(1, 1500):
        allocator.allocate(length, 0)
        allocator.extend(1, length)
        shapes.add(allocator._rows.table.shape)
    assert len(shapes) < 2 * 12
    assert allocator.pages(1).tolist() == list(range(1499))
    for _ in range(3):
        for length in range(2, 1500):
            allocator.free(length)
        allocator.allocate_many(range(2, 1500), [1] * 1498)
    assert allocator._rows.table.shape == (2048, 2048)
    assert allocator.num_free == 5000 - 1499 - 1498


def test_the_queue_of_cached_pages_goes_round() -> None:
    allocator = PageAllocator(5, 1)
    serve(allocator, "a", list(range(5)))
    allocator.free("a")
    for turn in range(40):
        count = 2 + turn % 3
        allocator.allocate("b", count, list(range(count)))
        assert allocator.num_cached_tokens("b") == count - 1
        allocator.commit("b", list(range(count)))
        allocator.free("b")
        stats = allocator.stats()
        assert stats.free + stats.cached == 5
