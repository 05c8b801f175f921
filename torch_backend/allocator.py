"""Who owns which page."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from interop.errors import ArgumentError, OutOfPagesError
from interop.host import count_of

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out the pages of one layer's range to requests, each page to one owner at a time.

    The same page ids serve every layer of a cache, so one allocator serves one cache.

    Parameters
    ----------
    num_pages, page_size
        Those of the cache.
    reserved
        Page ids below this number are never handed out (engines keep page 0 for padding).
    """

    def __init__(self, num_pages: int, page_size: int, *, reserved: int = 0) -> None:
        num_pages, page_size = count_of("num_pages", num_pages), count_of("page_size", page_size)
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if not size:
                raise ArgumentError(name, given=size, wanted="a positive integer")
        if not 0 <= reserved < num_pages:
            raise ArgumentError(
                "reserved", given=reserved, wanted=f"a number from 0 to {num_pages - 1}"
            )
        self.page_size = page_size
        # Free pages are a stack whose top is `_free_count`; low ids leave first.
        self._free = np.arange(num_pages - 1, reserved - 1, -1, dtype=np.int32)
        self._free_count = self._free.size
        # One row of page ids a request, so that a page table is a gather of rows.
        self._table = np.zeros((8, 8), np.int32)
        self._row: dict[Hashable, int] = {}
        self._count: dict[Hashable, int] = {}
        self._spare_rows = list(range(7, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._free_count

    def _pages_for(self, num_tokens: int) -> int:
        return -(-count_of("num_tokens", num_tokens) // self.page_size)

    def _known(self, request: Hashable) -> None:
        if request not in self._row:
            raise ArgumentError(
                "request",
                given=f"{request!r}, which owns nothing here",
                wanted="a request that allocate was called for and free was not",
            )

    def _take(self, request: Hashable, extra: int) -> None:
        if extra > self._free_count:
            missing = extra - self._free_count
            raise OutOfPagesError(
                f"request {request!r} needs {extra} more pages of {self.page_size} tokens, "
                f"{self._free_count} are free: {missing} missing. Free a finished request, wait, "
                "or make the cache larger.",
                missing=missing,
            )
        have = self._count[request]
        need = have + extra
        if need > self._table.shape[1]:
            wider = np.zeros((self._table.shape[0], max(need, 2 * self._table.shape[1])), np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        top = self._free_count
        self._table[self._row[request], have:need] = self._free[top - extra : top][::-1]
        self._free_count = top - extra
        self._count[request] = need

    def allocate(self, request: Hashable, num_tokens: int) -> npt.NDArray[np.int32]:
        """Give a new request the pages for `num_tokens` tokens and return their ids.

        Raises
        ------
        OutOfPagesError
            If too few pages are free; nothing is allocated.
        ArgumentError
            If the request owns pages already.
        """
        pages = self._pages_for(num_tokens)
        if request in self._row:
            raise ArgumentError(
                "request",
                given=f"{request!r}, which owns {self._count[request]} pages",
                wanted="a new request",
                remedy="Use extend to grow a request.",
            )
        if not self._spare_rows:
            rows = self._table.shape[0]
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._spare_rows = list(range(2 * rows - 1, rows - 1, -1))
        self._row[request] = self._spare_rows.pop()
        self._count[request] = 0
        try:
            self._take(request, pages)
        except OutOfPagesError:
            self._spare_rows.append(self._row.pop(request))
            del self._count[request]
            raise
        return self.pages(request)

    def extend(self, request: Hashable, num_tokens: int) -> npt.NDArray[np.int32]:
        """Grow a request to hold `num_tokens` tokens in all; returns the ids it was given.

        Raises
        ------
        OutOfPagesError
            If too few pages are free; the request keeps what it has.
        ArgumentError
            If the request is unknown.
        """
        self._known(request)
        have = self._count[request]
        self._take(request, max(0, self._pages_for(num_tokens) - have))
        return self.pages(request)[have:]

    def free(self, request: Hashable) -> None:
        """Take back all pages of a request.

        Raises
        ------
        ArgumentError
            If the request is unknown, which a second `free` makes it.
        """
        self._known(request)
        row, count = self._row.pop(request), self._count.pop(request)
        top = self._free_count
        self._free[top : top + count] = self._table[row, :count][::-1]
        self._free_count = top + count
        self._spare_rows.append(row)

    def pages(self, request: Hashable) -> npt.NDArray[np.int32]:
        """Page ids of a request in order, ``[pages]`` int32."""
        self._known(request)
        return self._table[self._row[request], : self._count[request]].copy()

    def page_table(self, requests: Sequence[Hashable]) -> npt.NDArray[np.int32]:
        """Page ids of several requests, ``[len(requests), widest]`` int32, padded with anything."""
        for request in requests:
            self._known(request)
        widest = max((self._count[request] for request in requests), default=0)
        return self._table[[self._row[request] for request in requests], :widest]
