"""Who owns which page: no page for two, none lost, and errors that change nothing."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from interop.errors import ArgumentError, LengthError, OutOfPagesError
from torch_backend import PageAllocator

NUM_PAGES, PAGE_SIZE, RESERVED = 23, 4, 2


class Requests(RuleBasedStateMachine):
    """Requests that come, grow and go, beside a plain record of what each of them owns."""

    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, PAGE_SIZE, reserved=RESERVED)
        self.owned: dict[int, list[int]] = {}
        self.born = 0

    @property
    def free(self) -> set[int]:
        """Pages that nobody should own."""
        return set(range(RESERVED, NUM_PAGES)) - {p for pages in self.owned.values() for p in pages}

    @rule(target=known, num_tokens=st.integers(0, 40))
    def allocate(self, num_tokens: int) -> Any:
        request, need, free = self.born, -(-num_tokens // PAGE_SIZE), self.free
        self.born += 1
        if need > len(free):
            with pytest.raises(OutOfPagesError, match=f"{need - len(free)} missing") as error:
                self.allocator.allocate(request, num_tokens)
            assert error.value.missing == need - len(free)
            # It is as unknown as it was.
            with pytest.raises(ArgumentError):
                self.allocator.pages(request)
            need = 0
            self.allocator.allocate(request, 0)
            self.owned[request] = []
            return request
        pages = self.allocator.allocate(request, num_tokens).tolist()
        assert len(pages) == need
        assert set(pages) <= free
        self.owned[request] = pages
        return request

    @rule(request=known, num_tokens=st.integers(0, 60))
    def extend(self, request: int, num_tokens: int) -> None:
        have, free = self.owned[request], self.free
        need = max(0, -(-num_tokens // PAGE_SIZE) - len(have))
        if need > len(free):
            with pytest.raises(OutOfPagesError, match=f"{need - len(free)} missing") as error:
                self.allocator.extend(request, num_tokens)
            assert error.value.missing == need - len(free)
            return
        more = self.allocator.extend(request, num_tokens).tolist()
        assert len(more) == need
        assert set(more) <= free
        have += more

    @rule(request=consumes(known))
    def release(self, request: int) -> None:
        self.allocator.free(request)
        del self.owned[request]
        with pytest.raises(ArgumentError, match=f"request: got {request}, which owns nothing"):
            self.allocator.free(request)

    @rule(request=known)
    def allocate_again(self, request: int) -> None:
        owned = len(self.owned[request])
        with pytest.raises(ArgumentError, match=f"owns {owned} pages.*Use extend"):
            self.allocator.allocate(request, 1)

    @invariant()
    def all_agree(self) -> None:
        everything = [page for pages in self.owned.values() for page in pages]
        assert len(set(everything)) == len(everything), "a page has two owners"
        assert self.allocator.num_free == NUM_PAGES - RESERVED - len(everything)
        requests = list(self.owned)
        table = self.allocator.page_table(requests)
        assert table.dtype == np.int32
        assert table.shape == (len(requests), max(map(len, self.owned.values()), default=0))
        for row, request in enumerate(requests):
            assert self.allocator.pages(request).tolist() == self.owned[request]
            assert table[row, : len(self.owned[request])].tolist() == self.owned[request]

    def teardown(self) -> None:
        for request in self.owned:
            self.allocator.free(request)
        assert self.allocator.num_free == NUM_PAGES - RESERVED
        every = self.allocator.allocate("all", (NUM_PAGES - RESERVED) * PAGE_SIZE)
        assert sorted(every.tolist()) == list(range(RESERVED, NUM_PAGES))


class TestRequests(Requests.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


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


@pytest.mark.parametrize("call", ["extend", "free", "pages", "page_table"])
def test_requests_that_nobody_knows(call: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"extend": ("ghost", 1), "page_table": (["ghost"],)}
    with pytest.raises(ArgumentError, match="request: got 'ghost', which owns nothing here"):
        getattr(PageAllocator(4, 16), call)(*arguments.get(call, ("ghost",)))


@pytest.mark.parametrize(
    ("arguments", "reserved", "name"),
    [
        ((0, 16), 0, "num_pages"),
        ((1.5, 16), 0, "num_pages"),
        ((4, 0), 0, "page_size"),
        ((4, 16), 4, "reserved"),
        ((4, 16), -1, "reserved"),
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
