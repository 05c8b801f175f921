"""What pages cost on the host: handing them out, taking them back, finding prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torch_backend.paging.allocator import PageAllocator

from .recording import Run
from .timing import measure_calls
from .workload import PAGE_SIZE

__all__ = ["allocator"]


def allocator(run: Run) -> None:
    """`PageAllocator`: operations on pages, one decode step's calls, prompts of 32k tokens."""
    _operations(run)
    _step(run)
    _prefixes(run)
    _fork(run)


def _measure(
    run: Run,
    case: str,
    shape: dict[str, Any],
    call: Callable[[Any], Any],
    *,
    pages: int = 0,
    prepare: Callable[[], Any] = lambda: None,
) -> None:
    """Time of a call, or of one of the `pages` that it hands out or takes back."""
    timing = measure_calls(call, calls=10 if run.quick else 200, prepare=prepare)
    if pages:
        run.add(case, shape, timing.scaled(1e9 / pages), "ns/page", pages_per_call=pages)
    else:
        run.add(case, shape, timing.scaled(1e6), "us")


def _operations(run: Run) -> None:
    """Requests that come with a prompt, grow page by page, and go."""
    requests, prompt, more = 256, 32, 16
    pool = PageAllocator(requests * (prompt + more), PAGE_SIZE)
    names = range(requests)
    growth = range((prompt + 1) * PAGE_SIZE, (prompt + more + 1) * PAGE_SIZE, PAGE_SIZE)
    prompts = np.full(requests, prompt * PAGE_SIZE, np.int32)
    grown = [np.full(requests, length, np.int32) for length in growth]

    def together(_: object) -> None:
        pool.allocate_many(names, prompts)
        for lengths in grown:
            pool.extend_many(names, lengths)
        for name in names:
            pool.free(name)

    def one_by_one(_: object) -> None:
        for name in names:
            pool.allocate(name, prompt * PAGE_SIZE)
        for length in growth:
            for name in names:
                pool.extend(name, length)
        for name in names:
            pool.free(name)

    # Each page is handed out once and taken back once.
    pages = 2 * requests * (prompt + more)
    shape = {"requests": requests, "prompt pages": prompt, "more pages, each": more}
    _measure(run, "allocate_many, extend_many, free", shape, together, pages=pages)
    _measure(run, "allocate, extend, free", shape, one_by_one, pages=pages)


def _step(run: Run) -> None:
    """Each request grows by one token, and so every sixteenth by a page."""
    requests, context = 256, 2048
    pool = PageAllocator(2 * requests * context // PAGE_SIZE, PAGE_SIZE)
    names = list(range(requests))
    lengths = context + np.arange(requests, dtype=np.int32) % PAGE_SIZE
    pool.allocate_many(names, lengths)

    def one_more() -> Any:
        np.add(lengths, 1, out=lengths)
        return lengths

    shape = {"requests": requests, "context": context}
    _measure(run, "extend_many", shape, lambda now: pool.extend_many(names, now), prepare=one_more)
    _measure(run, "page_table", shape, lambda _: pool.page_table(names))


def _prefixes(run: Run) -> None:
    """A long prompt that is in the cache, and others that are not and need its room."""
    length = 32768
    pool = PageAllocator(2 * length // PAGE_SIZE, PAGE_SIZE)
    random = np.random.default_rng(0)
    prompt, other = random.integers(150_000, size=(2, length), dtype=np.int32)

    def serve(tokens: Any) -> None:
        pool.allocate("request", length, tokens)
        pool.commit("request", tokens)
        pool.free("request")

    def another() -> Any:
        other[0] += 1
        return other

    serve(prompt)
    shape = {"prompt": length, "page_size": PAGE_SIZE}
    _measure(run, "lookup, all found", shape, lambda _: pool.can_allocate(length, prompt))
    _measure(run, "lookup, nothing found", shape, lambda _: pool.can_allocate(length, other))
    _measure(run, "allocate, commit, free: all found", shape, lambda _: serve(prompt))
    # From the third on each of its pages is taken from the prompt that was left first.
    _measure(run, "allocate, commit, free: all evicted", shape, serve, prepare=another)


def _fork(run: Run) -> None:
    """A second sample of a request, up to the copy of the page that both would write."""
    length = 2048 + PAGE_SIZE // 2
    pool = PageAllocator(1024, PAGE_SIZE)
    pool.allocate("parent", length)

    def fork(_: object) -> None:
        pool.fork("parent", "child")
        pool.extend("child", length + 1)
        assert len(pool.take_copies()) == 1
        pool.free("child")

    _measure(run, "fork, extend, free", {"context": length}, fork)
