"""Who owns which page."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from interop.errors import ArgumentError, LengthError
from interop.host import IntArray, count_of, host_ints

from .arrivals import Arrival, arrival, arrivals
from .page_copies import CopyPages, PendingCopies
from .page_pool import AllocatorStats, Mask, PagePool
from .page_rows import PageRows, counts_of
from .prefixes import NO_PAGES, Ints

__all__ = ["AllocatorStats", "CopyPages", "PageAllocator"]


class PageAllocator:
    """Hands out the pages of one layer's range to requests, which share what they have in common.

    The same page ids serve every layer of a cache, so one allocator serves one cache. It is for one
    thread at a time. A call that raises has changed nothing. A request keeps a page until it is
    freed, unless the page has to be copied before it is written.

    *Writing.* `allocate` and `extend` announce that tokens up to `num_tokens` will be written,
    `make_writable` that some will be written again; nothing else may be. Pages that others see as
    well are replaced by copies then: `take_copies` says which the device has to make.

    *Sharing.* A `fork` begins with the pages of another request. `allocate` with token ids begins
    with pages that hold the same prefix, of those that `commit` has published.

    Parameters
    ----------
    num_pages, page_size
        Those of the cache.
    reserved
        Page ids below this number are never handed out (engines keep page 0 for padding).
    low_watermark
        Pages that new requests leave for the growth of those that run.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, reserved: int = 0, low_watermark: int = 0
    ) -> None:
        num_pages, page_size = count_of("num_pages", num_pages), count_of("page_size", page_size)
        reserved = count_of("reserved", reserved)
        low_watermark = count_of("low_watermark", low_watermark)
        total = num_pages - reserved
        for name, size, good, wanted in (
            ("num_pages", num_pages, num_pages > 0, "a positive integer"),
            ("page_size", page_size, page_size > 0, "a positive integer"),
            ("reserved", reserved, total > 0, f"a number from 0 to {num_pages - 1}"),
            ("low_watermark", low_watermark, low_watermark < total, f"less than {total} pages"),
        ):
            if not good:
                raise ArgumentError(name, given=size, wanted=wanted)
        self.page_size, self.low_watermark = page_size, low_watermark
        self._pool = PagePool(num_pages, page_size, reserved)
        self._rows = PageRows(page_size)
        self._copies = PendingCopies()
        self._lookup_tokens = self._hit_tokens = self._num_forks = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, those among them that can still be found included."""
        return self._pool.num_left

    def stats(self) -> AllocatorStats:
        """Count pages and events; looks at every page."""
        return AllocatorStats(
            **self._pool.counts(),
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            forks=self._num_forks,
            copies=self._copies.total,
        )

    def can_allocate(
        self, num_tokens: int, tokens: npt.ArrayLike | None = None, *, namespace: Hashable = None
    ) -> bool:
        """Whether `allocate` with these arguments would find enough pages."""
        count, pool = count_of("num_tokens", num_tokens), self._pool
        found = arrival(pool.prefixes, count, tokens, namespace).found
        return pool.missing(self._pages_for(count) - found.size, [found], self.low_watermark) <= 0

    def allocate(
        self,
        request: Hashable,
        num_tokens: int,
        tokens: npt.ArrayLike | None = None,
        *,
        namespace: Hashable = None,
    ) -> IntArray:
        """Give a new request the pages for `num_tokens` tokens and return their ids.

        Parameters
        ----------
        request
            Any name that a dictionary can hold.
        num_tokens
            Tokens to have room for.
        tokens
            Ids ``[n]`` of the first of them; int32 arrays are read fastest. Published pages that
            hold these are shared, and need not be computed again. `num_cached_tokens` says how
            many tokens that are: whole pages, never all `n`, for the last one's output is needed.
        namespace
            Requests find only what requests with an equal namespace have published. So it names
            what besides tokens decides on keys and values (adapter, images, weights), or a tenant.

        Returns
        -------
        array
            Page ids ``[pages]`` int32, shared ones first.

        Raises
        ------
        OutOfPagesError
            If fewer pages than `low_watermark` would be left.
        ArgumentError
            If the request owns pages, or `tokens` are no integers or more than `num_tokens`.
        """
        self._rows.check_new([request])
        count = count_of("num_tokens", num_tokens)
        self._admit([request], [arrival(self._pool.prefixes, count, tokens, namespace)])
        return self.pages(request)

    def allocate_many(
        self,
        requests: Sequence[Hashable],
        num_tokens: npt.ArrayLike,
        tokens: Sequence[npt.ArrayLike | None] | None = None,
        *,
        namespaces: Sequence[Hashable] | None = None,
    ) -> IntArray:
        """Allocate for all of several new requests, or raise what `allocate` does for none.

        Parameters
        ----------
        requests, num_tokens, tokens, namespaces
            What `allocate` takes, one for each request. They do not share with each other what
            none has computed yet.

        Returns
        -------
        array
            `num_cached_tokens` of each request, ``[len(requests)]`` int32. For the pages there is
            `page_table`.
        """
        counts = counts_of(requests, num_tokens).tolist()
        self._rows.check_new(requests)
        news = arrivals(self._pool.prefixes, counts, tokens, namespaces)
        self._admit(requests, news)
        return self.page_size * np.array([new.found.size for new in news], np.int32)

    def extend(self, request: Hashable, num_tokens: int) -> IntArray:
        """Grow a request to hold `num_tokens` tokens in all; returns the ids it was given.

        If its last page is partly filled and shared, a copy takes its place, whose id is none of
        those: see `take_copies`.

        Raises
        ------
        OutOfPagesError
            If too few pages are free; the request keeps what it has.
        ArgumentError
            If the request is unknown.
        """
        rows, pool, row = self._rows, self._pool, self._rows.row(request)
        length = rows.lengths.item(row)
        wanted = max(count_of("num_tokens", num_tokens), length)
        have, need = self._pages_for(length), self._pages_for(wanted)
        pages, copied = NO_PAGES, 0
        if wanted > length and length % self.page_size:
            # It is not published, since only full pages are.
            copied = int(pool.owners.item(rows.table.item(row, have - 1)) > 1)
        if need - have + copied:
            pool.check([request], need - have + copied)
            rows.widen(need)
            pages = pool.take(need - have + copied)
            if copied:
                self._replace(row, np.array([have - 1]), pages[:1])
                pages = pages[1:]
            rows.table[row, have:need] = pages
        rows.lengths[row] = wanted
        return pages.astype(np.int32)

    def extend_many(self, requests: Sequence[Hashable], num_tokens: npt.ArrayLike) -> None:
        """Extend all of several requests, or raise what `extend` does for none.

        Parameters
        ----------
        requests, num_tokens
            What `extend` takes, one for each request; no request twice.
        """
        rows, pool, size = self._rows, self._pool, self.page_size
        counts, row = counts_of(requests, num_tokens), rows.rows(requests)
        if np.unique(row).size != row.size:
            raise ArgumentError("requests", given="a request twice", wanted="each once")
        lengths = rows.lengths[row]
        counts = np.maximum(counts, lengths)
        have = -(-lengths // size)
        extra = -(-counts // size) - have
        partial = np.flatnonzero((counts > lengths) & (lengths % size != 0))
        last = rows.table[row[partial], have[partial] - 1].astype(np.int64)
        copied = partial[pool.all_but_last_owner(last)]
        total = int(extra.sum()) + copied.size
        pool.check(requests, total)
        if total:
            rows.widen(int((have + extra).max()))
            pages = pool.take(total)
            for i, page in zip(copied.tolist(), pages[:, None], strict=False):
                self._replace(row.item(i), have[i : i + 1] - 1, page)
            rows.place(row, have, extra, pages[copied.size :])
        rows.lengths[row] = counts

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int | None = None) -> None:
        """Let a new request begin with the tokens of another, without computing them again.

        They share pages until one of them extends into a page that is partly filled.

        Parameters
        ----------
        parent, child
            A request that has pages, and a new one, which gets the same namespace.
        num_tokens
            How many tokens; left out, all that the parent has room for. With fewer the parent
            may go on to write those behind them, since the page in which they end is copied now.

        Raises
        ------
        OutOfPagesError
            If there is no page for that copy.
        ArgumentError
            If the parent is unknown, the child is known, or the parent has fewer tokens.
        """
        rows, source = self._rows, self._rows.row(parent, "parent")
        rows.check_new([child], "child")
        length = rows.lengths.item(source)
        count = length if num_tokens is None else count_of("num_tokens", num_tokens)
        if count > length:
            raise LengthError("num_tokens", given=count, wanted=f"at most the parent's {length}")
        need = self._pages_for(count)
        shared = need if count == length else count // self.page_size
        self._pool.check([child], need - shared)
        row = rows.add(child, count, rows.namespaces[source])
        pages = rows.pages(source, 0, shared)
        self._pool.share(pages)
        rows.table[row, :shared] = pages
        if shared < need:
            rows.table[row, shared:need] = page = self._pool.take(1)
            self._copies.add(rows.pages(source, shared, need), page)
        rows.cached[row] = count
        rows.published[row] = min(rows.published.item(source), count // self.page_size)
        self._num_forks += 1

    def make_writable(self, request: Hashable, first_token: int, num_tokens: int) -> None:
        """Announce that tokens will be written again, and give them pages that nobody else sees.

        Parameters
        ----------
        request
            A request that has these tokens.
        first_token, num_tokens
            Position of the first one in the request, and how many they are. All of them have to be
            written: of the pages that are replaced, only those that also hold other tokens are
            copied.

        Raises
        ------
        OutOfPagesError
            If too few pages are free.
        ArgumentError
            If the request is unknown or has no such tokens.
        """
        rows, row, size = self._rows, self._rows.row(request), self.page_size
        first, count = count_of("first_token", first_token), count_of("num_tokens", num_tokens)
        end, length = first + count, rows.lengths.item(row)
        if end > length:
            given = f"{count} from token {first} on"
            wanted = f"some of the {length} tokens of request {request!r}"
            remedy = "Use extend to grow a request."
            raise LengthError("num_tokens", given=given, wanted=wanted, remedy=remedy)
        start, stop = first // size, self._pages_for(end) if count else 0
        columns = start + np.flatnonzero(~self._pool.writable(rows.pages(row, start, stop)))
        if columns.size:
            self._pool.check([request], columns.size)
            kept = (columns * size < first) | (((columns + 1) * size > end) & (end < length))
            self._replace(row, columns, self._pool.take(columns.size), kept)
            rows.published[row] = min(rows.published.item(row), columns.item(0))

    def take_copies(self) -> CopyPages:
        """Copies that calls have asked for since the last time, for the device to make.

        They read what steps have written so far and come before anything that a later step writes.
        `page_table` refuses to answer while there are any.
        """
        return self._copies.take()

    def commit(self, request: Hashable, tokens: npt.ArrayLike) -> None:
        """Publish the full pages of a request, so that requests with the same prefix find them.

        Call it once their keys and values are written, or are sure to be before the device begins
        with a step that is planned later.

        Parameters
        ----------
        request
            A request of this allocator.
        tokens
            Ids ``[n]`` of its tokens from the first one on, as far as they are written.

        Raises
        ------
        ArgumentError
            If the request is unknown or has fewer tokens, if these are no integers, or if they
            differ from those that its pages were published with.
        """
        rows, row, size = self._rows, self._rows.row(request), self.page_size
        ids, length = host_ints("tokens", tokens, 1), rows.lengths.item(row)
        if ids.size > length:
            wanted = f"at most the {length} of request {request!r}"
            raise LengthError("tokens", given=f"{ids.size} token ids", wanted=wanted)
        full, known = ids.size // size, rows.published.item(row)
        if full > known:
            ids = ids[: full * size].reshape(full, size)
            rows.published[row] = self._pool.prefixes.publish(
                rows.pages(row, 0, full), ids, known, rows.namespaces[row]
            )

    def free(self, request: Hashable) -> None:
        """Take back all pages of a request; published ones can be found until they are needed.

        Raises
        ------
        ArgumentError
            If the request is unknown, which a second `free` makes it.
        """
        row = self._rows.row(request)
        self._pool.release(self._rows.pages(row, 0, self._rows.count(row)))
        self._rows.drop(request)

    def pages(self, request: Hashable) -> IntArray:
        """Page ids of a request in order, ``[pages]`` int32."""
        row = self._rows.row(request)
        return self._rows.table[row, : self._rows.count(row)].copy()

    def num_cached_tokens(self, request: Hashable) -> int:
        """How many of its first tokens a request found in the cache when it came."""
        return self._rows.cached.item(self._rows.row(request))

    def page_table(self, requests: Sequence[Hashable]) -> IntArray:
        """Page ids of several requests, ``[len(requests), widest]`` int32, padded with anything."""
        if self._copies:
            raise ArgumentError(
                "requests",
                given=f"a page table while {len(self._copies)} copies of pages wait",
                wanted="no page that is yet to be filled",
                remedy="Call take_copies and copy these pages on the device before the step.",
            )
        row = self._rows.rows(requests)
        widest = self._pages_for(self._rows.lengths[row].max(initial=0).item())
        return self._rows.table[row, :widest]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _admit(self, requests: Sequence[Hashable], news: Sequence[Arrival]) -> None:
        """Let new requests in, or raise."""
        rows, pool = self._rows, self._pool
        found = [new.found for new in news]
        needs = [self._pages_for(new.num_tokens) for new in news]
        total = sum(needs) - sum(pages.size for pages in found)
        pool.check(requests, total, found, self.low_watermark)
        rows.widen(max(needs, default=0))
        # Before any page is taken, since those that are found may be next to be evicted.
        for pages in found:
            pool.share(pages)
        taken, at = pool.take(total), 0
        for request, new, need in zip(requests, news, needs, strict=True):
            row, start = rows.add(request, new.num_tokens, new.namespace), new.found.size
            rows.table[row, :start] = new.found
            rows.table[row, start:need] = taken[at : at + need - start]
            at += need - start
            rows.cached[row], rows.published[row] = start * self.page_size, start
            self._lookup_tokens += new.num_ids
            self._hit_tokens += start * self.page_size

    def _replace(
        self, row: int, columns: Ints, pages: Ints, kept: Mask | slice = slice(None)
    ) -> None:
        """Put other pages into columns of a row, and have what is in those `kept` copied."""
        old = self._rows.table[row, columns].astype(np.int64)
        self._rows.table[row, columns] = pages
        self._copies.add(old[kept], pages[kept])
        self._pool.release(old)
