"""Cascade: the pages that all requests begin with are read once, and not once for each request.

All query rows together attend to the shared prefix, as one request; then each request's rows attend
to the rest of its pages ("cascade inference" in FlashInfer's documentation, two levels). How long
the prefix is, is data: one compiled program serves all lengths of it, 0 among them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from interop.chunking import reading_time
from interop.schedule import FA2Shape, choose_chunk, fa2_shape

from .flashinfer_fa2 import MAX_SCRATCH_BYTES, NEVER_SPLIT, SPLIT, FA2Family, balanced_shape
from .protocol import Decision, IntArray, Lengths, Work
from .two_levels import Level, TwoLevelFamily, interleaved

__all__ = ["MOST_PACKED_ROWS", "CascadeFamily", "cascade_pays"]

# Query rows of a request times heads of a group, up to which a tile waits for memory and not for
# arithmetic, so that reading less is faster.
MOST_PACKED_ROWS = 64

# Fitted to eight measured pairs of plain and cascade decode on an H200 (bf16, 32 query heads, 8 KV
# heads, head_dim 128; 8 to 256 requests, prefixes of 256 to 16384 tokens). Requests that share
# pages read them out of the L2 cache, in this share of the time that memory would take.
CACHED = 0.47
# Microseconds of the launches and merges that come on top, and of each query row and head of them.
EXTRA, EXTRA_ROW = 10.0, 6.4e-3

# All query rows are one request to the prefix, and the rows that pad a bucket another.
PREFIX_REQUESTS = 2

_FA2 = FA2Family()


class CascadeFamily(TwoLevelFamily):
    """First the prefix that all requests share, and then what each has for itself."""

    name = "cascade"

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if work.source != "pages" or work.role != "all":
            return "it reads the pages of all requests of a batch at once"
        if work.spec.sliding_window is not None:
            return "a sliding window leaves the shared prefix behind"
        if not work.any_speed:
            return "it is for batches whose requests begin with the same pages, where that pays"
        if work.device.kind == "cpu":
            return None
        if (reason := _FA2.refuse(work)) is not None:
            return reason
        size = max(shape.scratch_bytes for shape in _shapes(work, SPLIT))
        if size >= MAX_SCRATCH_BYTES:
            return f"partial results take {size} bytes, not fewer than {MAX_SCRATCH_BYTES}"
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: whether and how finely the rest is split, as of FA2."""
        if work.device.kind == "cpu":
            return Decision()
        _, rest = self.levels(work, lengths)
        choice = choose_chunk(_shapes(work, SPLIT)[1], rest.query_lens, rest.pages_seen)
        return Decision(SPLIT if choice.split else NEVER_SPLIT, choice.pages)

    def chunks(self, decision: Decision) -> tuple[int | None, int | None]:
        """See `TwoLevelFamily.chunks`."""
        return None, decision.detail

    def requests(self, work: Work) -> tuple[int, int]:
        """See `TwoLevelFamily.requests`."""
        return PREFIX_REQUESTS, 2 * work.num_requests

    def shapes(self, work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
        """See `TwoLevelFamily.shapes`."""
        return _shapes(work, variant)

    def levels(self, work: Work, lengths: Lengths) -> tuple[Level, Level]:
        """See `TwoLevelFamily.levels`."""
        assert work.cache is not None
        query, shared = lengths.query_lens, lengths.shared_units
        own = query[:-1] if work.num_requests > work.bucket.num_requests else query
        tokens = int(own.sum())
        # The first pages of the first request that has query rows are those of all.
        first = int(lengths.kv_indptr[(own > 0).argmax()])
        prefix = Level(
            np.array([tokens, work.bucket.num_tokens - tokens], np.int32),
            np.array([shared, 0], np.int32),
            np.array([shared * work.cache.page_size, 0], np.int32),
            first,
        )
        # Requests without query rows, which may have fewer pages, are all rest.
        skipped = np.where((query > 0) & (lengths.kv_units > 0), np.int32(shared), np.int32(0))
        tokens_skipped = skipped * np.int32(work.cache.page_size)
        rest = Level(
            interleaved(np.zeros_like(query), query),
            interleaved(skipped, lengths.kv_units - skipped),
            interleaved(tokens_skipped, lengths.kv_lens - tokens_skipped),
        )
        return prefix, rest


@lru_cache(maxsize=4096)
def _shapes(work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
    spec, bucket = work.spec, work.bucket
    assert work.cache is not None
    prefix = fa2_shape(
        num_requests=PREFIX_REQUESTS,
        num_rows=bucket.num_tokens,
        max_query_len=bucket.num_tokens,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=work.cache.page_size,
        num_sms=work.device.num_sms,
        split=True,
    )
    rest = balanced_shape(work, variant == SPLIT)
    return prefix, replace(rest, num_requests=2 * work.num_requests)


def cascade_pays(work: Work, query_lens: IntArray, shared_pages: int) -> bool:
    """Whether reading shared pages once saves more time than the extra launches take.

    Parameters
    ----------
    work
        What a bucket asks for.
    query_lens
        ``[num_requests]``, without padding.
    shared_pages
        Pages that all requests with query rows begin with, see `RaggedBatch.shared_pages`.

    Times are those of `interop.chunking.reading_time`.
    """
    if not shared_pages:
        return False
    prefix, rest = _shapes(work, SPLIT)
    rows = int(query_lens.sum())
    alone = int((-(-query_lens * rest.group_size // rest.cta_tile_q)).sum())
    together = -(-rows * prefix.group_size // prefix.cta_tile_q)
    saved = CACHED * reading_time(rest, alone * shared_pages)
    extra = EXTRA + EXTRA_ROW * rows * work.spec.num_qo_heads
    return saved > reading_time(prefix, together * shared_pages) + extra
