"""What an allocator knows of each request, one row of arrays for each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from interop.errors import ArgumentError, ShapeError
from interop.host import count_of, host_ints

from .prefixes import Ints

__all__ = ["PageRows", "counts_of"]


def counts_of(requests: Sequence[Hashable], num_tokens: npt.ArrayLike) -> Ints:
    """Read the tokens that each of several requests is to have room for, ``[n]``."""
    counts = host_ints("num_tokens", num_tokens, 1)
    if counts.size != len(requests):
        raise ShapeError("num_tokens", given=f"shape {counts.shape}", wanted=f"({len(requests)},)")
    negative = counts < 0
    if negative.any():
        at = int(negative.argmax())
        count_of(f"num_tokens[{at}]", counts.item(at))
    return counts.astype(np.int64)


class PageRows:
    """Rows of page ids and counts, which grow to twice their size when they are full.

    Parameters
    ----------
    page_size
        Tokens in a page.

    Attributes
    ----------
    table
        Page ids of each request, ``[rows, width]`` int32.
    lengths
        Tokens that each request has room for, ``[rows]`` int64.
    cached
        Tokens that were there when the request came, ``[rows]`` int64.
    published
        Pages from the first on that are published, ``[rows]`` int64.
    namespaces
        Whose prefixes each request shares, one for each row.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.table = np.zeros((8, 8), np.int32)
        self.lengths, self.cached, self.published = np.zeros((3, 8), np.int64)
        self.namespaces: list[Hashable] = [None] * 8
        self._row: dict[Hashable, int] = {}
        self._spare = list(range(7, -1, -1))

    def row(self, request: Hashable, argument: str = "request") -> int:
        """Row of a request that is known, or an `ArgumentError`."""
        try:
            return self._row[request]
        except (KeyError, TypeError):  # TypeError: what cannot be hashed was never allocated
            raise ArgumentError(
                argument,
                given=f"{request!r}, which owns nothing here",
                wanted="a request that allocate was called for and free was not",
            ) from None

    def rows(self, requests: Sequence[Hashable]) -> Ints:
        """Rows ``[n]`` of several requests, all of which are known, or an `ArgumentError`."""
        try:
            found = [self._row[request] for request in requests]
        except (KeyError, TypeError):
            found = [self.row(request) for request in requests]
        return np.array(found, np.int64)

    def count(self, row: int) -> int:
        """Pages of the request in this row."""
        return -(-self.lengths.item(row) // self._page_size)

    def pages(self, row: int, start: int, stop: int) -> Ints:
        """Page ids from one place in a row to another, ``[stop - start]``."""
        return self.table[row, start:stop].astype(np.int64)

    def check_new(self, requests: Sequence[Hashable], argument: str = "request") -> None:
        """Refuse requests that are known, that come twice, or that no dictionary can hold."""
        seen: set[Hashable] = set()
        for request in requests:
            try:
                known = request in self._row
                twice = request in seen
                seen.add(request)
            except TypeError as error:
                raise ArgumentError(
                    argument, given=f"{request!r} ({error})", wanted="something hashable"
                ) from error
            if known:
                raise ArgumentError(
                    argument,
                    given=f"{request!r}, which owns {self.count(self._row[request])} pages",
                    wanted="a new request",
                    remedy="Use extend to grow a request.",
                )
            if twice:
                raise ArgumentError(argument, given=f"{request!r} twice", wanted="each once")

    def add(self, request: Hashable, num_tokens: int, namespace: Hashable) -> int:
        """Give a new request a row and return it."""
        if not self._spare:
            count = len(self.namespaces)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self.lengths, self.cached, self.published = np.concatenate(
                [[self.lengths, self.cached, self.published], np.zeros((3, count), np.int64)], 1
            )
            self.namespaces += [None] * count
            self._spare = list(range(2 * count - 1, count - 1, -1))
        row = self._row[request] = self._spare.pop()
        self.lengths[row], self.namespaces[row] = num_tokens, namespace
        return row

    def drop(self, request: Hashable) -> None:
        """Forget a request that is known."""
        self._spare.append(self._row.pop(request))

    def widen(self, pages: int) -> None:
        """Make rows wide enough for `pages` page ids."""
        rows, width = self.table.shape
        if pages > width:
            wider = np.zeros((rows, max(pages, 2 * width)), np.int32)
            wider[:, :width] = self.table
            self.table = wider

    def place(self, rows: Ints, starts: Ints, counts: Ints, pages: Ints) -> None:
        """Write runs of page ids: `counts` of `pages` from column `starts` of `rows` on.

        Parameters
        ----------
        rows, starts, counts
            ``[n]``.
        pages
            ``[sum(counts)]``, run after run.
        """
        skipped = starts - (np.cumsum(counts) - counts)
        columns = np.arange(pages.size) + np.repeat(skipped, counts)
        self.table[np.repeat(rows, counts), columns] = pages
