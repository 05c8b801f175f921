"""Requests that come, share, fork, grow and go, beside a model that knows what every slot holds.

A slot of the model's device holds the whole text up to its token. So a page that is shared with the
wrong request, copied too late or written by someone else shows up as a wrong text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from interop.errors import ArgumentError, OutOfPagesError
from torch_backend.paging.allocator import PageAllocator

NUM_PAGES, SIZE, RESERVED, WATERMARK = 21, 3, 2, 2
TOTAL = NUM_PAGES - RESERVED

# Some beginning and a few letters more, so that prefixes are found.
texts = st.builds(
    lambda length, more: ("abbab" * 4)[:length] + more,
    st.integers(0, 13),
    st.text("ab", max_size=5),
)
namespaces = st.integers(0, 1)
rooms = st.integers(0, 4)
numbers = st.integers(0, 59)
# Steps before a call; most of them publish all that is written.
steps = st.sampled_from(["publish", "publish", "step", ""])


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@dataclass
class Known:
    """What the model knows of a request."""

    namespace: int
    text: str
    room: int  # tokens that were announced
    written: int  # tokens of the text that are on the device
    cached: int
    pages: list[int] = field(default_factory=list)

    def prefix(self, num_tokens: int) -> str:
        return f"{self.namespace}:{self.text[:num_tokens]}"


class Machine(RuleBasedStateMachine):
    """Calls of all kinds; copies and writes happen on the device when `step` says so."""

    collisions = False

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, SIZE, reserved=RESERVED, low_watermark=WATERMARK)
        self.known: dict[int, Known] = {}
        self.device: dict[int, list[str]] = {p: [""] * SIZE for p in range(NUM_PAGES)}
        # Prefix of each published page, the first one published first; those without an owner in
        # the order in which they are to be evicted.
        self.published: dict[int, str] = {}
        self.queue: list[int] = []
        self.born = 0
        self.evictions = self.forks = self.copies = self.lookups = self.hits = 0

    # What the model says of the pages.

    @property
    def owners(self) -> Counter[int]:
        return Counter(page for request in self.known.values() for page in request.pages)

    @property
    def num_free(self) -> int:
        return TOTAL - len(self.owners)

    def choose(self, which: int) -> tuple[int, Known]:
        return [*self.known.items()][which % len(self.known)]

    def find(self, new: Known) -> list[int]:
        """Pages that hold the beginning of a text, never all of it."""
        found = []
        for end in range(SIZE, len(new.text), SIZE):
            pages = [p for p, prefix in self.published.items() if prefix == new.prefix(end)]
            if not pages:
                break
            found.append(pages[0])
        return found

    def take(self, pages: Sequence[int], revived: Sequence[int] = ()) -> None:
        """Pages that were handed out belonged to nobody, and those first in the queue left it."""
        before = self.num_free - len(self.queue)
        self.queue = [page for page in self.queue if page not in revived]
        assert len(set(pages)) == len(pages)
        assert not set(pages) & (set(self.owners) | set(range(RESERVED)) | set(revived))
        evicted = self.queue[: max(0, len(pages) - before)]
        assert set(evicted) == set(pages) & set(self.published)
        self.queue = self.queue[len(evicted) :]
        gone = [self.published.pop(page) for page in evicted]
        self.evictions += len(evicted)
        for prefix in gone:
            if prefix not in self.published.values():
                assert not any(p.startswith(prefix) for p in self.published.values())

    def leave(self, pages: Sequence[int]) -> None:
        """Pages of a request that it does not own any more, from its first one on."""
        owners = self.owners
        for page in reversed(pages):
            if page in self.published and not owners[page]:
                self.queue.append(page)

    @contextmanager
    def refused(self, error: type[Exception], match: str) -> Iterator[None]:
        """Something raises and changes nothing."""
        before = self.allocator.stats()
        with pytest.raises(error, match=match):
            yield
        assert self.allocator.stats() == before
        self.all_agree()

    @contextmanager
    def room_for(self, count: int, revived: int = 0, keep: int = 0) -> Iterator[bool]:
        """Whether there are pages; where not, the call has to say how many are missing."""
        missing = count + revived + keep - self.num_free
        if missing <= 0 or not count + revived:
            yield True
            return
        with self.refused(OutOfPagesError, f" {missing} missing"):
            yield False

    # Calls.

    def arrive(self, news: list[Known], call: Any) -> None:
        found = [self.find(new) for new in news]
        need = sum(pages_for(new.room) for new in news) - sum(map(len, found))
        revived = {page for pages in found for page in pages} & set(self.queue)
        requests = list(range(self.born, self.born + len(news)))
        self.born += len(news)
        with self.room_for(need, len(revived), WATERMARK) as fits:
            if len(news) == 1:
                (new,) = news
                possible = self.allocator.can_allocate(
                    new.room, ids(new.text), namespace=new.namespace
                )
                assert possible == fits
            cached = call(requests)
        if not fits:
            return
        assert cached == [SIZE * len(pages) for pages in found]
        taken = []
        for request, new, pages in zip(requests, news, found, strict=True):
            new.pages = self.allocator.pages(request).tolist()
            assert new.pages[: len(pages)] == pages
            assert len(new.pages) == pages_for(new.room)
            taken += new.pages[len(pages) :]
            new.cached = new.written = SIZE * len(pages)
            self.lookups += len(new.text)
            self.hits += new.cached
        self.take(taken, list(revived))
        self.known |= zip(requests, news, strict=True)

    @rule(text=texts, room=rooms, namespace=namespaces, before=steps)
    def allocate(self, text: str, room: int, namespace: int, before: str) -> None:
        self.step(before)
        new = Known(namespace, text, len(text) + room, 0, 0)

        def call(requests: list[int]) -> list[int]:
            (request,) = requests
            pages = self.allocator.allocate(
                request, new.room, np.array(ids(text), np.int32), namespace=namespace
            )
            assert pages.tolist() == self.allocator.pages(request).tolist()
            return [self.allocator.num_cached_tokens(request)]

        self.arrive([new], call)

    @rule(arriving=st.lists(st.tuples(texts, rooms, namespaces), max_size=4), before=steps)
    def allocate_many(self, arriving: list[tuple[str, int, int]], before: str) -> None:
        self.step(before)
        news = [Known(space, text, len(text) + room, 0, 0) for text, room, space in arriving]
        self.arrive(
            news,
            lambda requests: self.allocator.allocate_many(
                requests,
                [new.room for new in news],
                [ids(new.text) for new in news],
                namespaces=[new.namespace for new in news],
            ).tolist(),
        )

    def grow(self, growing: dict[int, int], call: Any) -> None:
        """Extend requests to some numbers of tokens each."""
        owners = self.owners
        copied = []
        for request, room in growing.items():
            known = self.known[request]
            if room > known.room and known.room % SIZE and owners[known.pages[-1]] > 1:
                owners[known.pages[-1]] -= 1
                copied.append(request)
        need = len(copied) + sum(
            max(0, pages_for(room) - len(self.known[request].pages))
            for request, room in growing.items()
        )
        with self.room_for(need) as fits:
            call()
        if not fits:
            return
        taken = []
        for request, room in growing.items():
            known = self.known[request]
            pages, have = self.allocator.pages(request).tolist(), len(known.pages)
            known.room = max(known.room, room)
            assert len(pages) == pages_for(known.room)
            kept = have - (request in copied)
            assert pages[:kept] == known.pages[:kept]
            taken += pages[kept:]
        self.take(taken)
        for request in growing:
            self.known[request].pages = self.allocator.pages(request).tolist()
        self.copies += len(copied)

    @precondition(lambda self: self.known)
    @rule(which=numbers, more=st.integers(-3, 12))
    def extend(self, which: int, more: int) -> None:
        request, known = self.choose(which)
        room, have = max(0, known.room + more), len(known.pages)
        given: list[int] = []
        self.grow(
            {request: room},
            lambda: given.extend(self.allocator.extend(request, room).tolist()),
        )
        assert given == known.pages[have:]

    @precondition(lambda self: self.known)
    @rule(which=numbers, more=st.lists(st.integers(-1, 5), max_size=6))
    def extend_many(self, which: int, more: list[int]) -> None:
        known = [*self.known]
        start = which % len(known)
        requests = [*known[start:], *known[:start]][: len(more)]
        growing = {
            request: max(0, self.known[request].room + count)
            for request, count in zip(requests, more, strict=False)
        }
        self.grow(growing, lambda: self.allocator.extend_many(requests, list(growing.values())))

    @precondition(lambda self: self.known)
    @rule(which=numbers, text=st.text("ab", min_size=1, max_size=5))
    def append(self, which: int, text: str) -> None:
        """Tokens for room that was announced."""
        _, known = self.choose(which)
        known.text = (known.text + text)[: known.room]

    @precondition(lambda self: self.known)
    @rule(which=numbers, leave_out=st.sampled_from([0, 0, 0, 1, 2, 5]), before=steps)
    def fork(self, which: int, leave_out: int, before: str) -> None:
        """Only of requests that are written as far as their text goes."""
        parent, old = self.choose(which)
        if old.written < len(old.text):
            self.step(before or "step")
        count = max(0, old.written - leave_out)
        need = int(count < old.room and count % SIZE != 0)
        child, self.born = self.born, self.born + 1
        new = Known(old.namespace, old.text[:count], count, count, count)
        with self.room_for(need) as fits:
            if count == old.room:
                self.allocator.fork(parent, child)
            else:
                self.allocator.fork(parent, child, count)
        if not fits:
            return
        new.pages = self.allocator.pages(child).tolist()
        shared = pages_for(count) - need
        assert new.pages[:shared] == old.pages[:shared]
        assert len(new.pages) == pages_for(count)
        assert self.allocator.num_cached_tokens(child) == count
        self.take(new.pages[shared:])
        self.known[child] = new
        self.forks += 1
        self.copies += need

    @precondition(lambda self: self.known)
    @rule(which=numbers, back=st.integers(0, 8), text=st.text("ab", min_size=1))
    def rewrite(self, which: int, back: int, text: str) -> None:
        """Other tokens from somewhere on."""
        request, known = self.choose(which)
        first = max(0, known.written - back)
        end = len(known.text)
        owners = self.owners
        columns = [
            column
            for column in range(first // SIZE, pages_for(end) if end > first else 0)
            if owners[known.pages[column]] > 1 or known.pages[column] in self.published
        ]
        with self.room_for(len(columns)) as fits:
            self.allocator.make_writable(request, first, end - first)
        if not fits:
            return
        pages = self.allocator.pages(request).tolist()
        changed = [c for c, (a, b) in enumerate(zip(known.pages, pages, strict=True)) if a != b]
        assert changed == columns
        self.take([pages[column] for column in columns])
        old, known.pages = known.pages, pages
        self.leave([old[column] for column in columns])
        self.copies += sum(
            column * SIZE < first or (column + 1) * SIZE > end < known.room for column in columns
        )
        known.text = (known.text[:first] + text * end)[:end]
        known.written = first

    @precondition(lambda self: self.known)
    @rule(which=numbers, leave_out=rooms)
    def commit_some(self, which: int, leave_out: int) -> None:
        request, known = self.choose(which)
        self.commit(request, max(0, known.written - leave_out))

    def commit(self, request: int, count: int) -> None:
        known = self.known[request]
        self.allocator.commit(request, ids(known.text[:count]))
        nodes = self.allocator._pool.prefixes.node
        for column, page in enumerate(known.pages[: count // SIZE]):
            prefix = known.prefix((column + 1) * SIZE)
            if self.collisions and not nodes[page]:
                assert page not in self.published
                continue
            assert nodes[page]
            assert self.published.setdefault(page, prefix) == prefix

    @precondition(lambda self: self.known)
    @rule(which=numbers, before=steps)
    def free(self, which: int, before: str) -> None:
        self.step(before)
        request, _ = self.choose(which)
        self.allocator.free(request)
        self.leave(self.known.pop(request).pages)
        with self.refused(ArgumentError, f"request: got {request}, which owns nothing"):
            self.allocator.free(request)

    @rule(kind=steps)
    def step(self, kind: str) -> None:
        """What the device does, copies, then writes; and all that is written may be published."""
        if not kind:
            return
        copies = self.allocator.take_copies()
        pairs = list(zip(copies.source.tolist(), copies.target.tolist(), strict=True))
        assert len(set(copies.target.tolist())) == len(copies) == len(pairs)
        at_once = self.device | {target: list(self.device[source]) for source, target in pairs}
        for source, target in pairs:
            self.device[target] = list(self.device[source])
        assert self.device == at_once
        owners = self.owners
        for known in self.known.values():
            for position in range(known.written, len(known.text)):
                page = known.pages[position // SIZE]
                assert owners[page] == 1, "a shared page is written"
                assert page not in self.published, "a published page is written"
                self.device[page][position % SIZE] = known.prefix(position + 1)
            known.written = len(known.text)
        self.all_right()
        for request, known in self.known.items():
            if kind == "publish":
                self.commit(request, known.written)

    @precondition(lambda self: self.known)
    @rule(which=numbers)
    def bad_calls(self, which: int) -> None:
        request, known = self.choose(which)
        call, ghost, room = self.allocator, -1, known.room
        for argument, bad in {
            "request": lambda: call.allocate(request, 3),
            "requests?": lambda: call.allocate_many([ghost, ghost], [1, 1]),
            "requests": lambda: call.extend_many([request, request], [room + 9] * 2),
            "request ": lambda: call.extend_many([request, ghost], [room + 9] * 2),
            r"num_tokens\[1\]": lambda: call.allocate_many([-2, -3], [3, -1]),
            r"tokens\[1\]": lambda: call.allocate_many([-2, -3], [3, 1], [[1], [1, 2]]),
            "tokens": lambda: call.allocate(ghost, 3, [1.0, 2.0]),
            "parent": lambda: call.fork(ghost, -2),
            "child": lambda: call.fork(request, request),
            "num_tokens": lambda: call.fork(request, ghost, room + 1),
            "num_tokens ": lambda: call.make_writable(request, room, 1),
            "tokens ": lambda: call.commit(request, [0] * (room + 1)),
        }.items():
            with self.refused(ArgumentError, f"^{argument.strip()}: "):
                bad()
        if known.pages and known.pages[0] in self.published:
            other = ids("c" + known.text[1 : known.written])
            published = self.allocator._rows.published[self.allocator._rows.row(request)]
            if len(other) // SIZE > published:
                with self.refused(ArgumentError, "^tokens: .* differ from those published"):
                    self.allocator.commit(request, other)

    # What always holds.

    @invariant()
    def all_agree(self) -> None:
        owners = self.owners
        assert self.allocator._pool.owners[sorted(owners)].tolist() == [
            owners[page] for page in sorted(owners)
        ]
        assert self.allocator._pool.owners.sum() == owners.total()
        for request, known in self.known.items():
            assert self.allocator.pages(request).tolist() == known.pages
        stats = self.allocator.stats()
        assert stats.total == TOTAL == stats.free + stats.cached + stats.used
        assert stats.used == len(owners)
        assert stats.cached == len(self.queue)
        assert self.allocator.num_free == self.num_free
        assert stats.shared == sum(count > 1 for count in owners.values())
        assert (stats.evictions, stats.forks, stats.copies) == (
            self.evictions,
            self.forks,
            self.copies,
        )
        assert (stats.lookup_tokens, stats.hit_tokens) == (self.lookups, self.hits)

    def all_right(self) -> None:
        """Each request reads its own text. (Between steps copies may be missing.)"""
        requests = list(self.known)
        table = self.allocator.page_table(requests)
        for row, known in zip(table.tolist(), self.known.values(), strict=True):
            read = [self.device[row[i // SIZE]][i % SIZE] for i in range(known.written)]
            assert read == [known.prefix(i + 1) for i in range(known.written)]

    def teardown(self) -> None:
        for request in self.known:
            self.allocator.free(request)
        assert self.allocator.num_free == TOTAL
        self.allocator.low_watermark = 0
        every = self.allocator.allocate("all", TOTAL * SIZE)
        assert sorted(every.tolist()) == list(range(RESERVED, NUM_PAGES))
        assert self.allocator.stats().cached == 0


class CollidingMachine(Machine):
    """Two hashes for all prefixes: fewer are found, and none that is wrong."""

    collisions = True

    def __init__(self) -> None:
        super().__init__()
        prefixes = self.allocator._pool.prefixes
        # Hypothesis wants to see the same again.
        prefixes._weights[:], prefixes._salt[:] = (1, 3, 7), 1
        hashes = prefixes._hashes
        prefixes._hashes = lambda *arguments: hashes(*arguments) % np.uint64(2)  # type: ignore


class TestRequests(Machine.TestCase):
    settings = settings(max_examples=180, stateful_step_count=60)


class TestCollisions(CollidingMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=60)
