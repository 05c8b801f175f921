"""One step's batch of requests on the host, and the bucket that its plan is padded to.

NumPy only, no loop over requests or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .draft_masks import Mask, checked_masks, ordered_rows, packed_rows
from .errors import LengthError, PageError, PlanError, ShapeError, SlotError
from .host import INT32_MAX, ONE, IntArray, count_of, host_ints, indptr, power_of_two

__all__ = ["Bucket", "RaggedBatch"]


@dataclass(frozen=True)
class Bucket:
    """Sizes that a plan is padded to, so that its static part stays the same from step to step.

    Parameters
    ----------
    num_requests, num_tokens, num_pages
        Most requests, query tokens and page-table entries in use (summed over requests) that a
        batch of this bucket may have. Query, key, value and output have ``num_tokens`` rows; rows
        beyond the batch's own tokens are ignored on the way in and zero on the way out.
    max_query_len
        Longest query of one request; ``num_tokens`` when left out. 1 says that every request
        decodes one token, which lets a kernel choose smaller tiles.
    without_context
        Promises that every request starts in this step (``kv_lens == query_lens``): attention
        may then read this step's own keys and values instead of the pages.
    draft_masks
        Whether batches may bring masks of their own, see `RaggedBatch`. Batches without them are
        served all the same; a kernel is chosen that reads masks.
    """

    num_requests: int
    num_tokens: int
    num_pages: int
    max_query_len: int = 0
    without_context: bool = False
    draft_masks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_tokens", "num_pages"):
            object.__setattr__(self, name, count_of(name, getattr(self, name)))
        longest = count_of("max_query_len", self.max_query_len) or self.num_tokens
        object.__setattr__(self, "max_query_len", min(longest, self.num_tokens))
        if self.without_context and self.draft_masks:
            raise PlanError(
                "bucket.draft_masks",
                given="True with without_context=True",
                wanted="one of the two: drafts continue what a cache holds",
            )

    @classmethod
    def exactly(cls, batch: RaggedBatch, pages: int) -> Bucket:
        """Return the bucket that `batch`, with `pages` pages in use, fills to the brim."""
        return cls(
            batch.num_requests,
            batch.num_tokens,
            pages,
            batch.max_query_len,
            batch.without_context and batch.draft_masks is None,
            batch.draft_masks is not None,
        )

    @classmethod
    def covering(cls, batch: RaggedBatch, page_size: int) -> Bucket:
        """Return the bucket of `batch` with every size rounded up to a power of two."""
        pages = int(batch.pages(page_size).indptr[-1])
        longest = power_of_two(batch.max_query_len)
        requests = power_of_two(batch.num_requests)
        tokens = requests if longest == 1 else power_of_two(batch.num_tokens)
        masks = batch.draft_masks is not None
        return cls(requests, tokens, power_of_two(pages), longest, draft_masks=masks)

    def check(self, batch: RaggedBatch, pages: int) -> None:
        """Raise `PlanError` naming the first size of this bucket that `batch` exceeds."""
        for name, limit, need in (
            ("num_requests", self.num_requests, batch.num_requests),
            ("num_tokens", self.num_tokens, batch.num_tokens),
            ("num_pages", self.num_pages, pages),
            ("max_query_len", self.max_query_len, batch.max_query_len),
        ):
            if need > limit:
                raise PlanError(
                    f"bucket.{name}",
                    given=f"{limit} for a batch that needs {need}",
                    wanted=f"at least {need}",
                    remedy="Use a larger bucket, or Bucket.covering(batch, page_size).",
                )
        if batch.draft_masks is not None and not self.draft_masks:
            raise PlanError(
                "bucket.draft_masks",
                given="False for a batch with draft_masks",
                wanted="True",
                remedy="Say so in every bucket of the loop: a kernel is chosen by it.",
            )
        if self.without_context and not batch.without_context:
            worst = int((batch.kv_lens - batch.query_lens).argmax())
            raise PlanError(
                "bucket.without_context",
                given=f"True for a batch whose request {worst} has "
                f"{int((batch.kv_lens - batch.query_lens)[worst])} tokens of context",
                wanted="requests without context, or a bucket without that promise",
            )


class Pages(NamedTuple):
    """How requests fill pages of one size.

    Parameters
    ----------
    counts
        ``[num_requests]`` int32, ``ceil(kv_lens / page_size)``; 0 for an empty request.
    indptr
        ``[num_requests + 1]`` int32, running sum of `counts`.
    last_lens
        ``[num_requests]`` int32 tokens in the last page: 1 to ``page_size``, 0 without a page.
    fewest, most
        Smallest and largest count.
    """

    counts: IntArray
    indptr: IntArray
    last_lens: IntArray
    fewest: int
    most: int


class RaggedBatch:
    """Requests of different lengths that are served in one step.

    Parameters
    ----------
    query_lens
        ``[num_requests]`` integers: tokens that each request brings to this step. 0 is allowed.
    kv_lens
        ``[num_requests]`` integers: tokens that each request's cache holds *after* this step's
        tokens have been appended, so ``kv_lens >= query_lens``.
    page_table
        ``[num_requests, width]`` integers: the pages of each request in order. Entries past
        ``ceil(kv_len / page_size)`` are ignored. Leave out for attention without a cache.
    draft_masks
        ``[tokens, width]`` bool, of drafts that are no chain: row ``t`` says which of its own
        request's query tokens the ``t``-th query token of the batch sees, column 0 being the
        request's first. `width` is that of the longest query or more; columns past a request's own
        tokens are ignored. Every token sees itself, and all of the request's context, or as much of
        it as a sliding window lets it see, which counts by place in the cache. Where masks are
        given, ``causal`` of the spec says nothing.

    The others are host arrays of any integer type (NumPy, lists, CPU tensors); none is ever
    modified. The tokens of a request lie next to each other in query, key and value.

    Raises
    ------
    ShapeError, LengthError
        For arrays of another rank or type, negative lengths, or a cache shorter than its query.
    DTypeError, ArgumentError
        For masks that are not bool, or of a token that does not see itself.
    """

    __slots__ = (
        "_pages",
        "draft_masks",
        "kv_lens",
        "max_query_len",
        "num_tokens",
        "page_table",
        "qo_indptr",
        "query_lens",
    )

    query_lens: IntArray
    kv_lens: IntArray
    page_table: IntArray | None
    draft_masks: Mask | None
    qo_indptr: IntArray
    num_tokens: int
    max_query_len: int
    _pages: dict[int, Pages]

    def __init__(
        self,
        query_lens: object,
        kv_lens: object,
        page_table: object | None = None,
        *,
        draft_masks: object | None = None,
    ) -> None:
        query = host_ints("query_lens", query_lens, 1)
        kv = host_ints("kv_lens", kv_lens, 1)
        if query.size == 0:
            raise ShapeError("query_lens", given="no requests", wanted="at least one request")
        if kv.shape != query.shape:
            raise ShapeError(
                "kv_lens", given=f"{kv.size} lengths", wanted=f"{query.size}, one per query length"
            )
        self._check_lengths(query, kv)
        table = None if page_table is None else host_ints("page_table", page_table, 2)
        if table is not None and table.shape[0] != query.size:
            raise ShapeError(
                "page_table",
                given=f"shape {table.shape}",
                wanted=f"{query.size} rows, one per request",
            )
        # Copies, since sums of them are kept: the caller may count its own arrays on.
        query, kv = query.copy(), kv.copy()
        self.query_lens = query
        self.kv_lens = kv
        self.page_table = table
        self.qo_indptr = indptr(query)
        self.num_tokens = int(self.qo_indptr[-1])
        self.max_query_len = int(query[query.argmax()])
        self.draft_masks = None
        if draft_masks is not None:
            self.draft_masks = checked_masks(draft_masks, query, self.qo_indptr)
        self._pages = {}

    @staticmethod
    def _check_lengths(query: IntArray, kv: IntArray) -> None:
        if query[query.argmin()] < 0:
            worst = int(query.argmin())
            raise LengthError(
                f"query_lens[{worst}]", given=int(query[worst]), wanted="0 or a positive length"
            )
        shorter = kv < query
        if shorter[shorter.argmax()]:
            worst = int((kv - query).argmin())
            raise LengthError(
                f"kv_lens[{worst}]",
                given=f"{int(kv[worst])} with query_lens[{worst}] = {int(query[worst])}",
                wanted="at least the query length",
                remedy="kv_lens count the tokens that this step appends, too.",
            )
        if int(kv[kv.argmax()]) * kv.size <= INT32_MAX:
            return
        for name, lengths in (("query_lens", query), ("kv_lens", kv)):
            if int(lengths.sum(dtype=np.int64)) > INT32_MAX:
                raise LengthError(
                    name, given="more than 2**31 - 1 tokens", wanted="a batch whose sum fits int32"
                )

    @property
    def num_requests(self) -> int:
        """Number of requests, empty ones included."""
        return int(self.query_lens.shape[0])

    @property
    def without_context(self) -> bool:
        """Whether every request starts in this step."""
        return self.kv_lens.tobytes() == self.query_lens.tobytes()  # faster than comparing arrays

    def draft_rows(self, words: int, causal: bool) -> IntArray:
        """Which of its request's tokens each token sees, as bits ``[tokens, words]`` int32.

        Parameters
        ----------
        words
            Words of a row; see `draft_masks`.
        causal
            What holds for a batch without masks.
        """
        if self.draft_masks is None:
            return ordered_rows(self.query_lens, words, causal)
        return packed_rows(self.draft_masks, words)

    def pages(self, page_size: int) -> Pages:
        """How the requests' tokens fill pages of `page_size` tokens; computed once per size."""
        found = self._pages.get(page_size)
        if found is None:
            size = np.array(page_size, np.int32)
            counts: IntArray = -(-self.kv_lens // size)
            last_lens: IntArray = self.kv_lens - (counts - ONE) * size
            fewest, most = int(counts[counts.argmin()]), int(counts[counts.argmax()])
            if fewest == 0:
                last_lens[counts == 0] = 0
            found = Pages(counts, indptr(counts), last_lens, fewest, most)
            self._pages[page_size] = found
        return found

    def _checked_table(self, page_size: int, ranks: int = 1) -> IntArray:
        """Page table, if there is one and it is wide enough.

        An entry stands for `page_size` tokens on each of `ranks` ranks.
        """
        table, pages = self.page_table, self.pages(page_size * ranks)
        if table is None:
            raise PageError(
                "page_table",
                given="none",
                wanted=f"an array [{self.num_requests}, pages]",
                remedy="Pass page_table to RaggedBatch, or plan without a cache.",
            )
        if pages.most > table.shape[1]:
            worst = int(pages.counts.argmax())
            raise PageError(
                f"page_table[{worst}]",
                given=f"{table.shape[1]} entries",
                wanted=f"{pages.most} for kv_lens[{worst}] = {int(self.kv_lens[worst])} "
                f"tokens in pages of {page_size}" + (f" on {ranks} ranks" if ranks > 1 else ""),
            )
        return table

    def page_indices(self, page_size: int, num_pages: int) -> IntArray:
        """Return the page ids in use, request after request, ``[sum(ceil(kv_lens / P))]`` int32.

        Raises
        ------
        PageError
            If the table is missing, too narrow, or names a page outside ``[0, num_pages)``.
        """
        table, pages = self._checked_table(page_size), self.pages(page_size)
        width = pages.most
        if pages.fewest == width:
            used = table[:, :width].reshape(-1)
        else:
            # True for the entries in use and False for the others, row after row.
            in_use = np.zeros((self.num_requests, 2), np.bool_)
            in_use[:, 0] = True
            runs = np.empty((self.num_requests, 2), np.intp)
            runs[:, 0] = pages.counts
            np.subtract(width, pages.counts, out=runs[:, 1])
            used = table[:, :width][in_use.repeat(runs.reshape(-1)).reshape(-1, width)]
        ids = used.view(np.uint32)  # read without a sign, negative ids are beyond any pool
        if ids.size and ids[ids.argmax()] >= num_pages:
            bad = (table[:, :width] < 0) | (table[:, :width] >= num_pages)
            row, col = np.argwhere(bad & (np.arange(width) < pages.counts[:, None]))[0]
            raise PageError(
                f"page_table[{row}, {col}]",
                given=int(table[row, col]),
                wanted=f"a page id from 0 to {num_pages - 1}",
            )
        return used

    def shared_pages(self, page_size: int) -> int:
        """Pages with which the tables of all requests that have query tokens begin alike.

        Whole pages of context only, so none has a token of this step; 0 where fewer than two
        requests have query tokens. Page ids are taken as they are.
        """
        busy = self.query_lens.nonzero()[0]
        if busy.size < 2:
            return 0
        table = self._checked_table(page_size)
        first = table[busy, :1]
        # Most batches share nothing, and this is all that they pay for.
        if not table.shape[1] or first.tobytes() != first[:1].tobytes() * busy.size:
            return 0
        context = self.kv_lens[busy] - self.query_lens[busy]
        most = int(context[context.argmin()]) // page_size
        same = (table[busy, :most] == table[busy[0], :most]).all(axis=0)
        return most if same.all() else int(same.argmin())

    def slot_mapping(self, page_size: int) -> IntArray:
        """Where this step's tokens are written: ``page * page_size + offset``, ``[tokens]`` int32.

        Token ``j`` of a request sits at position ``kv_len - query_len + j``. Page ids are taken as
        they are: `page_indices` checks them.

        Raises
        ------
        SlotError
            If two tokens would share a slot.
        """
        rows, pages, offsets = self._new_tokens(page_size)
        slots: IntArray = pages * np.array(page_size, np.int32) + offsets
        check_slots(slots, rows, "slot {}".format)
        return slots

    def _new_tokens(
        self, page_size: int, ranks: int = 1
    ) -> tuple[npt.NDArray[np.intp], IntArray, IntArray]:
        """Request, page id and place in the page of each of this step's tokens, ``[tokens]`` each.

        An entry of the page table stands for `page_size` tokens on each of `ranks` ranks.
        """
        table, page_size = self._checked_table(page_size, ranks), page_size * ranks
        pages, size = self.pages(page_size), np.array(page_size, np.int32)
        if self.max_query_len <= 1:
            rows = self.query_lens.nonzero()[0]
            column, offset = pages.counts[rows] - ONE, pages.last_lens[rows] - ONE
        else:
            rows = np.arange(self.num_requests).repeat(self.query_lens)
            # A token's position is its row of the query plus what is constant in its request.
            rest = self.kv_lens - self.qo_indptr[1:]
            positions = rest.repeat(self.query_lens) + np.arange(self.num_tokens, dtype=np.int32)
            column, offset = np.divmod(positions, size)
        return rows, table[rows, column], offset


def check_slots(
    slots: npt.NDArray[np.integer[Any]],
    rows: npt.NDArray[np.integer[Any]],
    name: Callable[[int], str],
) -> None:
    """Raise `SlotError` if two of the `slots` are one; token ``t`` is of request ``rows[t]``.

    `name` gives people's name of a slot.
    """
    ordered = slots.copy()
    ordered.sort()
    twice = ordered[1:] == ordered[:-1]
    if twice.size and twice[twice.argmax()]:
        slot = int(ordered[twice.argmax()])
        owners = rows[slots == slot][:2].tolist()
        raise SlotError(
            "page_table",
            given=f"{name(slot)} for tokens of requests {owners[0]} and {owners[1]}",
            wanted="a slot of its own for each token",
            remedy="Pages that are written may not be shared; copy them first.",
        )
