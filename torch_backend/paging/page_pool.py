"""How many owners each page has, which pages are free, which wait to be found again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interop.errors import OutOfPagesError

from .prefixes import Ints, PrefixIndex

__all__ = ["AllocatorStats", "Mask", "PagePool"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AllocatorStats:
    """Where the pages are now, and what happened since the allocator was made.

    Parameters
    ----------
    total
        Pages that can be handed out: ``free + cached + used``.
    free, cached, used
        Pages with nothing in them; without an owner but published, so that they can be found;
        owned by requests.
    shared
        Used pages that have several owners.
    lookup_tokens, hit_tokens
        Known tokens of requests that came, and how many of them were in the cache.
    evictions
        Cached pages that became free because pages were needed.
    forks, copies
        Calls of ``fork``, and pages that were to be copied.
    """

    total: int
    free: int
    cached: int
    used: int
    shared: int
    lookup_tokens: int
    hit_tokens: int
    evictions: int
    forks: int
    copies: int


class PagePool:
    """Pages, each of them owned by requests, or cached, or free.

    A page whose last owner leaves is *cached* if it is published under its prefix, else *free*.
    Cached pages become free in the order in which they were left, the last page of a request
    before those it builds on, and only when no page is free. Callers see to it that there are
    enough. Page ids are int64 here, see `Ints`.

    Parameters
    ----------
    num_pages, page_size
        Those of the cache.
    reserved
        Page ids below this number belong to nobody here.

    Attributes
    ----------
    total
        Pages that can be handed out.
    owners
        How many requests own each page, ``[num_pages]`` int32.
    num_free, num_cached
        Pages without an owner: with nothing in them, and published.
    num_evicted
        Cached pages that became free so far.
    prefixes
        The published pages.
    """

    def __init__(self, num_pages: int, page_size: int, reserved: int) -> None:
        self._page_size = page_size
        self.prefixes = PrefixIndex(num_pages, page_size)
        self.owners = np.zeros(num_pages, np.int32)
        # Free pages are a stack whose top is `num_free`; low ids leave first.
        self._free = np.arange(num_pages - 1, reserved - 1, -1, dtype=np.int64)
        self.total = self.num_free = self._free.size
        self.num_cached = self.num_evicted = 0
        # Cached pages in the order in which they were left. An entry from `_head` to `_tail` counts
        # while its page points back at it, so that a page which is owned again leaves the queue
        # without a search.
        self._queue = np.zeros(2 * self.total, np.int64)
        self._place = np.full(num_pages, -1, np.int64)
        self._head = self._tail = 0

    @property
    def num_left(self) -> int:
        """Pages without an owner."""
        return self.num_free + self.num_cached

    def counts(self) -> dict[str, int]:
        """Those fields of `AllocatorStats` that are about pages."""
        return {
            "total": self.total,
            "free": self.num_free,
            "cached": self.num_cached,
            "used": self.total - self.num_left,
            "shared": int(np.count_nonzero(self.owners > 1)),
            "evictions": self.num_evicted,
        }

    def missing(self, count: int, found: Sequence[Ints] = (), keep: int = 0) -> int:
        """How many pages are too few; 0 or less where there are enough.

        Parameters
        ----------
        count
            Pages to take.
        found
            Pages to share: runs ``[n]`` that may have pages in common.
        keep
            Pages that have to be left.
        """
        idle = self._num_idle(found) if found else 0
        # Who takes nothing away is not in the way of those for whom pages are kept.
        return count + keep + idle - self.num_left if count or idle else 0

    def check(
        self,
        requests: Sequence[Hashable],
        count: int,
        found: Sequence[Ints] = (),
        keep: int = 0,
    ) -> None:
        """Raise `OutOfPagesError` where pages are `missing` for these requests."""
        missing = self.missing(count, found, keep)
        if missing > 0:
            one = len(requests) == 1
            who = f"request {requests[0]!r} needs" if one else f"{len(requests)} requests need"
            kept = f" and {keep} kept for requests that run" if keep else ""
            raise OutOfPagesError(
                f"{who} {count} more pages of {self._page_size} tokens, "
                f"{self.num_left - self._num_idle(found)} are free{kept}: {missing} missing. "
                "Free a finished request, wait, or make the cache larger.",
                missing=missing,
            )

    def _num_idle(self, found: Sequence[Ints]) -> int:
        """How many pages without an owner there are in some runs of pages."""
        idle = [pages[self.owners[pages] == 0] for pages in found if pages.size]
        if len(idle) < 2:
            return sum(pages.size for pages in idle)
        return np.unique(np.concatenate(idle)).size

    def all_but_last_owner(self, pages: Ints) -> Ints:
        """Which of some requests has to leave its page to others, ``[at most n]`` indices.

        Each request ``[n]`` wants to write one page. Those that share it leave it one by one, until
        the last owner has it for itself.
        """
        owners = self.owners[pages]
        leaving = []
        left: dict[int, int] = {}
        for i in np.flatnonzero(owners > 1).tolist():
            page = pages.item(i)
            left[page] = left.get(page, owners.item(i)) - 1
            if left[page]:
                leaving.append(i)
        return np.array(leaving, np.int64)

    def writable(self, pages: Ints) -> Mask:
        """Whether nobody else sees each of these owned pages, ``[n]`` bool."""
        return (self.owners[pages] == 1) & (self.prefixes.node[pages] == 0)

    def take(self, count: int) -> Ints:
        """Hand out `count` pages ``[count]``, each to one owner."""
        if count > self.num_free:
            self._evict(count - self.num_free)
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.owners[pages] = 1
        return pages

    def share(self, pages: Ints) -> None:
        """Add an owner to each of these pages ``[n]``, no page twice."""
        if not pages.size:
            return
        owners = self.owners[pages]
        cached = pages[owners == 0]
        self._place[cached] = -1
        self.num_cached -= cached.size
        self.owners[pages] = owners + 1

    def release(self, pages: Ints) -> None:
        """Take an owner from each of these pages ``[n]``, which follow each other in a request."""
        owners = self.owners[pages] - 1
        self.owners[pages] = owners
        left = pages[owners == 0][::-1]
        nodes = self.prefixes.node[left]
        if np.count_nonzero(nodes):  # a fifth of the time of `any`, and most calls end here
            self._enqueue(left[nodes != 0])
            left = left[nodes == 0]
        self._push(left)

    def _push(self, pages: Ints) -> None:
        self._free[self.num_free : self.num_free + pages.size] = pages
        self.num_free += pages.size

    def _enqueue(self, pages: Ints) -> None:
        if self._tail + pages.size > self._queue.size:
            # At most `total` entries count, so half of the queue has been used up since last time.
            entries = self._queue[self._head : self._tail]
            entries = entries[self._place[entries] == np.arange(self._head, self._tail)]
            self._head, self._tail = 0, entries.size
            self._queue[: self._tail] = entries
            self._place[entries] = np.arange(self._tail)
        end = self._tail + pages.size
        self._queue[self._tail : end] = pages
        self._place[pages] = np.arange(self._tail, end)
        self._tail = end
        self.num_cached += pages.size

    def _evict(self, count: int) -> None:
        """Free the `count` pages that were left first."""
        missing = count
        while missing:
            # A few more than wanted, since some entries may not count any more.
            end = min(self._head + 2 * missing + 64, self._tail)
            pages = self._queue[self._head : end]
            at = np.flatnonzero(self._place[pages] == np.arange(self._head, end))[:missing]
            pages = pages[at]
            missing -= pages.size
            self._head = end if missing else self._head + int(at[-1]) + 1
            self.prefixes.forget(pages)
            self._push(pages)
        self.num_cached -= count
        self.num_evicted += count
