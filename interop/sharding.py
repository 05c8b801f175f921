"""Which rank of a decode-context-parallel group holds which token, and where it lies there.

The tokens of a request are dealt to the ranks of a group in runs of ``interleave`` tokens. All
ranks share one page table: its entry ``b`` stands for ``page_size * size`` positions, and is the
page that holds each rank's ``page_size`` tokens of them.

NumPy only, no loop over requests or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from .batch import RaggedBatch, check_slots
from .errors import ArgumentError
from .host import IntArray, indptr
from .spec import AttentionSpec, CacheSpec

__all__ = ["LocalBatch", "TokenShards", "check_dcp", "check_rank", "own_kv_heads"]


@dataclass(frozen=True)
class TokenShards:
    """How the tokens of every request are spread over the ranks of a group.

    Position ``p`` belongs to rank ``(p // interleave) % size``.

    Parameters
    ----------
    size
        Ranks in the group.
    interleave
        Neighbouring tokens that stay on one rank; has to divide the cache's ``page_size``.

    Raises
    ------
    ArgumentError
        If one of the two is no positive integer.
    """

    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "interleave"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ArgumentError(
                    f"shards.{name}", given=repr(value), wanted="a positive integer"
                )
            object.__setattr__(self, name, int(value))

    def check(self, page_size: int) -> None:
        """Raise `ArgumentError` unless pages of `page_size` tokens hold whole runs."""
        if page_size % self.interleave:
            raise ArgumentError(
                "shards.interleave",
                given=f"{self.interleave} with pages of {page_size} tokens",
                wanted="a divisor of page_size",
                remedy="An interleave of 1 fits every page.",
            )

    def owner(self, positions: IntArray) -> IntArray:
        """Rank that holds the token at each position, in the shape of `positions`."""
        return positions // self.interleave % self.size

    def local_positions(self, positions: IntArray) -> IntArray:
        """How many tokens before each position its owner holds, in the shape of `positions`."""
        run = positions // (self.size * self.interleave)
        return run * self.interleave + positions % self.interleave

    def local_lens(self, lens: IntArray, rank: int) -> IntArray:
        """How many of the first `lens` tokens `rank` holds, in the shape of `lens`.

        No rank holds more than rank 0.
        """
        round_ = self.size * self.interleave
        whole = lens // round_
        rest = lens - whole * round_ - rank * self.interleave
        np.minimum(np.maximum(rest, 0, out=rest), self.interleave, out=rest)
        rest += whole * self.interleave
        return rest

    def slots(self, pages: IntArray, positions: IntArray, page_size: int, rank: int) -> IntArray:
        """Slots ``page * page_size + offset`` of tokens on `rank`, -1 where another rank owns them.

        Parameters
        ----------
        pages
            ``[tokens]``: the page-table entry of each token, which is
            ``page_table[request, position // (page_size * size)]``.
        positions
            ``[tokens]``: where each token stands in its request, or within its entry.
        page_size
            Tokens that a page holds on one rank.
        rank
            The rank.
        """
        slots = pages * np.array(page_size, np.int32) + self.local_positions(positions) % page_size
        slots[self.owner(positions) != rank] = -1
        return slots


class LocalBatch(RaggedBatch):
    """One rank's view of a batch whose tokens are spread over a group; made by `of`.

    ``query_lens``, ``qo_indptr`` and ``page_table`` are those of the whole batch, ``kv_lens`` count
    tokens that the rank's cache holds, so a ``kv_len`` may be shorter than its query. No rank has
    more tokens of a request, or pages in use, than rank 0.

    What is wrong with a page table is found on the whole batch, so that every rank refuses it,
    whichever rank would have read the page in question.
    """

    __slots__ = ("rank", "shards", "whole")

    whole: RaggedBatch
    shards: TokenShards
    rank: int

    def __init__(
        self, whole: RaggedBatch, shards: TokenShards, rank: int, context_only: bool
    ) -> None:
        self.whole = whole
        self.shards = shards
        self.rank = rank
        self.query_lens = whole.query_lens
        self.page_table = whole.page_table
        # Of the step's own rows, which are attended to apart.
        self.draft_masks = None
        self.qo_indptr = whole.qo_indptr
        self.num_tokens = whole.num_tokens
        self.max_query_len = whole.max_query_len
        held = whole.kv_lens - whole.query_lens if context_only else whole.kv_lens
        self.kv_lens = shards.local_lens(held, rank)
        self._pages = {}

    @classmethod
    def of(
        cls, batch: RaggedBatch, shards: TokenShards, rank: int, *, context_only: bool
    ) -> LocalBatch:
        """Return the view that `rank` has of `batch`.

        Parameters
        ----------
        batch
            The whole batch, with the lengths of all tokens; entries of its page table stand for
            ``page_size * shards.size`` tokens each.
        shards
            How tokens are spread.
        rank
            Rank in the group, from 0.
        context_only
            Whether ``kv_lens`` leave out this step's tokens, to which queries then attend apart.
            Without a mask that is needed wherever a request brings several: one token may see all
            that is in the cache, which its owner has written it to.

        Raises
        ------
        ArgumentError
            If `batch` is one rank's view already, or for a rank that the group does not have.
        """
        if not isinstance(batch, RaggedBatch) or isinstance(batch, LocalBatch):
            raise ArgumentError(
                "batch", given=type(batch).__name__, wanted="the RaggedBatch of all ranks' tokens"
            )
        return cls(batch, shards, check_rank(rank, shards.size), context_only)

    @property
    def without_context(self) -> bool:
        """Always `False`: that a request starts in this step says nothing of a rank's share."""
        return False

    def shared_pages(self, page_size: int) -> int:
        """None that count: attention over a rank's share reads each request by itself."""
        return 0

    def page_indices(self, page_size: int, num_pages: int) -> IntArray:
        """Return the rank's page ids in use, request after request, ``[sum(counts)]`` int32.

        Raises
        ------
        PageError
            If the table is missing, too narrow for the whole batch, or names a page outside
            ``[0, num_pages)`` for any rank.
        """
        self.shards.check(page_size)
        table = self.whole._checked_table(page_size, self.shards.size)
        ids = super().page_indices(page_size, num_pages)
        # The entries that are in use, but not for what this rank reads.
        counts = self.pages(page_size).counts
        unread = self.whole.pages(page_size * self.shards.size).counts - counts
        first = counts - indptr(unread)[:-1]
        columns = first.repeat(unread)
        columns += np.arange(columns.size, dtype=np.int32)
        others = table[np.arange(counts.size).repeat(unread), columns].view(np.uint32)
        if others.size and others[others.argmax()] >= num_pages:
            self.whole.page_indices(page_size * self.shards.size, num_pages)  # says which
        return ids

    def slot_mapping(self, page_size: int) -> IntArray:
        """Where the rank writes this step's tokens, ``[tokens]`` int32; -1 for other ranks' tokens.

        Raises
        ------
        SlotError
            If two tokens would share a slot, on any rank.
        """
        self.shards.check(page_size)
        size = self.shards.size
        rows, pages, offsets = self.whole._new_tokens(page_size, size)
        # Places in a page of all ranks; wide, since `size` ranks may have more slots than int32.
        places = pages.astype(np.int64) * (page_size * size) + offsets

        def name(place: int) -> str:
            page, offset = (np.array([part], np.int32) for part in divmod(place, page_size * size))
            owner = int(self.shards.owner(offset)[0])
            slot = int(self.shards.slots(page, offset, page_size, owner)[0])
            return f"slot {slot} of rank {owner}"

        check_slots(places, rows, name)
        return self.shards.slots(pages, offsets, page_size, self.rank)


def check_rank(rank: object, size: int) -> int:
    """Return `rank`, or raise `ArgumentError` if a group of `size` ranks has no such rank."""
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= rank.__index__() < size:
        raise ArgumentError("rank", given=repr(rank), wanted=f"an integer from 0 to {size - 1}")
    return int(rank.__index__())


def own_kv_heads(spec: AttentionSpec, shards: TokenShards) -> IntArray:
    """Which key/value heads each rank's own query heads read.

    Rank ``r`` has query heads ``r * h`` to ``(r + 1) * h - 1`` of the group, with
    ``h = num_qo_heads / size``. Where runs of ``h`` heads and runs of ``group_size`` heads do not
    nest, a key/value head is listed several times, so that every rank has equally many, and each
    of them serves equally many query heads.

    Parameters
    ----------
    spec
        Attention of the whole group.
    shards
        The group.

    Returns
    -------
    IntArray
        ``[size, n]`` int32: query head ``j`` of rank ``r`` reads entry ``j // (h / n)`` of row `r`.

    Raises
    ------
    ArgumentError
        If the ranks cannot have equally many query heads.
    """
    _check_heads(spec, shards)
    heads = spec.num_qo_heads // shards.size
    # Runs of both kinds start at multiples of this, so such a stretch reads one key/value head.
    together = gcd(heads, spec.group_size)
    first = np.arange(0, spec.num_qo_heads, together, dtype=np.int32)
    return (first // np.array(spec.group_size, np.int32)).reshape(shards.size, -1)


def _check_heads(spec: AttentionSpec, shards: TokenShards) -> None:
    if spec.num_qo_heads % shards.size:
        raise ArgumentError(
            "spec.num_qo_heads",
            given=f"{spec.num_qo_heads} over {shards.size} ranks",
            wanted="a multiple of the ranks, which have equally many query heads",
            remedy="spec counts the heads of all ranks together.",
        )


def check_dcp(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    shards: TokenShards,
    kernel: str | None = None,
) -> None:
    """Refuse what cannot be computed over a cache that is spread over ranks.

    Parameters
    ----------
    spec
        Attention of the whole group.
    cache_spec
        The cache of one rank.
    shards
        How tokens are spread over the ranks.
    kernel
        The kernel family that was asked for.

    Raises
    ------
    ArgumentError
        Naming what does not go together, with the same message in both front ends.
    """
    if not isinstance(shards, TokenShards):
        raise ArgumentError("shards", given=type(shards).__name__, wanted="a TokenShards")
    if cache_spec is None:
        raise ArgumentError(
            "cache_spec",
            given="None",
            wanted="a CacheSpec, whose tokens the ranks share",
            remedy="Plan attention without a cache on each rank by itself.",
        )
    if kernel == "cascade":
        raise ArgumentError(
            "kernel",
            given="'cascade' with decode context parallelism",
            wanted="another one, or None: a rank reads its share of each request by itself",
        )
    if spec.sliding_window is not None:
        # Rank r holds positions r, r + R, ...: W of its tokens reach back R times as far as W
        # positions, and how far depends on the query's own position.
        raise ArgumentError(
            "spec.sliding_window",
            given=f"{spec.sliding_window} with decode context parallelism",
            wanted="None: a rank holds every few tokens of a request, and kernels count a window "
            "in the tokens they see",
            remedy="Serve layers with a window from a cache that each rank holds whole.",
        )
    if not spec.causal:
        raise ArgumentError(
            "spec.causal",
            given="False with decode context parallelism",
            wanted="True: a step's new tokens are written before their context is read, and only "
            "a causal mask keeps the two apart",
            remedy="Serve attention without the mask from a cache that each rank holds whole.",
        )
    _check_heads(spec, shards)
    shards.check(cache_spec.page_size)
