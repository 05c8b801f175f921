"""Masks of drafts by FA2 in two launches: the context without a mask, and then the rest with one.

With a mask FA2 looks up a bit for every query row and key, which takes about as long again as the
attention. So whole pages of context, which every row sees, are attended to without, and what is
masked is no more than this step's tokens and less than a page before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from interop.draft_masks import largest_spread, spread_rows
from interop.host import INT32_MAX
from interop.plan import Launch
from interop.schedule import FA2Shape, choose_chunk

from .flashinfer_fa2 import (
    MASK_FIELDS,
    MAX_SCRATCH_BYTES,
    NEVER_SPLIT,
    SPLIT,
    FA2Family,
    balanced_shape,
)
from .protocol import Decision, IntArray, Lengths, Work
from .two_levels import Level, TwoLevelFamily, interleaved

__all__ = ["LEAST_TOKENS", "DraftsFA2Family"]

# Tokens in the pages of a bucket, from which on two launches are faster than one with a mask.
# Measured on one H200 with eight drafts a request (bf16, 32 query heads, 8 KV heads, head_dim 128),
# us a layer, two launches against one: 38 against 35 at 8 x 1024, 59 against 86 at 32 x 1024.
LEAST_TOKENS = 16384

_FA2 = FA2Family()


class DraftsFA2Family(TwoLevelFamily):
    """First whole pages of each request's context, and then the rest of its pages."""

    name = "fa2_drafts"

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if not work.bucket.draft_masks:
            return "it serves plans of a bucket with draft_masks=True"
        if work.source != "pages" or work.cache is None:
            return "it reads pages, not rows of the call"
        if work.invariant:
            return "it counts pages of context, and how many are split depends on the batch"
        if work.spec.sliding_window is not None:
            return "a window counts from a request's end, which the first launch does not see"
        if not work.any_speed:
            if work.device.kind == "cpu":
                return "the reference reads masks in one go"
            if (tokens := work.bucket.num_pages * work.cache.page_size) < LEAST_TOKENS:
                return f"one launch is faster over {tokens} tokens, fewer than {LEAST_TOKENS}"
        if work.device.kind == "cpu":
            return None
        plain = replace(work, bucket=replace(work.bucket, draft_masks=False))
        if (reason := _FA2.refuse(plain)) is not None:
            return reason
        if (size := _mask_bytes(work)) > INT32_MAX:
            return f"masks take up to {size} bytes, more than it can count"
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: whether and how finely the context is split, as of FA2."""
        if work.device.kind == "cpu":
            return Decision()
        context, _ = self.levels(work, lengths)
        shape = _shapes(work, SPLIT)[0]
        choice = choose_chunk(shape, context.query_lens, context.pages_seen)
        split = choice.split and shape.scratch_bytes < MAX_SCRATCH_BYTES
        return Decision(SPLIT if split else NEVER_SPLIT, choice.pages)

    def chunks(self, decision: Decision) -> tuple[int | None, int | None]:
        """See `TwoLevelFamily.chunks`."""
        return decision.detail, None

    def requests(self, work: Work) -> tuple[int, int]:
        """See `TwoLevelFamily.requests`."""
        return 2 * work.num_requests, 2 * work.num_requests

    def shapes(self, work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
        """See `TwoLevelFamily.shapes`."""
        return _shapes(work, variant)

    def levels(self, work: Work, lengths: Lengths) -> tuple[Level, Level]:
        """See `TwoLevelFamily.levels`."""
        assert work.cache is not None
        query, page_size = lengths.query_lens, np.int32(work.cache.page_size)
        # The padding request has rows and no keys.
        context = np.maximum(lengths.kv_lens - query, 0) // page_size
        tokens, none = context * page_size, np.zeros_like(query)
        pages = interleaved(context, lengths.kv_units - context)
        kv_lens = interleaved(tokens, lengths.kv_lens - tokens)
        return (
            Level(interleaved(query, none), pages, kv_lens),
            Level(interleaved(none, query), pages, kv_lens),
        )

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        launch, sizes = super().shape(work, variant)
        if launch.constants:
            bits, offsets = MASK_FIELDS
            sizes |= {bits: max(1, -(-_mask_bytes(work) // 4)), offsets: 2 * work.num_requests + 1}
        return launch, sizes

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; masks are read from ``draft_masks``, written before."""
        super().write(work, launch, lengths, decision, fields)
        if launch.constants:
            _, rest = self.levels(work, lengths)
            spread_rows(
                fields["draft_masks"].reshape(work.bucket.num_tokens, -1),
                fields["second_qo_indptr"],
                rest.query_lens,
                rest.kv_lens,
                *(fields[name] for name in MASK_FIELDS),
            )


@lru_cache(maxsize=4096)
def _shapes(work: Work, variant: int) -> tuple[FA2Shape, FA2Shape]:
    twice = 2 * work.num_requests
    context, rest = (balanced_shape(work, split) for split in (variant == SPLIT, False))
    return replace(context, num_requests=twice), replace(rest, num_requests=twice)


def _mask_bytes(work: Work) -> int:
    """Most bytes of masks: each request's rows over its own tokens and less than a page more."""
    bucket, cache = work.bucket, work.cache
    assert cache is not None
    before = (cache.page_size - 1) * min(work.num_requests, bucket.num_tokens)
    keys = min(bucket.num_tokens + before, bucket.num_pages * cache.page_size)
    return largest_spread(bucket.max_query_len, 2 * work.num_requests, keys)
