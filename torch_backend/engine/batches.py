"""An engine's batch: its padding, its split into decodes and prefills, and its requests.

NumPy only, no loop over requests or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from interop.batch import RaggedBatch, check_slots
from interop.draft_masks import WORD, Mask, mask_words, ordered_rows, packed_rows, within
from interop.errors import LengthError, ShapeError
from interop.host import IntArray, host_ints, indptr

__all__ = [
    "NULL_BLOCK",
    "PAD_SLOT",
    "DecodeLengths",
    "EngineBatch",
    "EngineRequests",
    "Split",
    "cumulative_pages",
    "decode_lengths",
    "draft_mask",
    "split_batch",
]

NULL_BLOCK = 0
"""Block of no request: block tables are padded with it, and nothing is written to it."""

PAD_SLOT = -1
"""Slot of a padding row, which is not written."""


@dataclass(frozen=True, eq=False)
class EngineBatch:
    """One step as an engine describes it, decodes first; all arrays are the host's.

    Parameters
    ----------
    query_start_loc
        ``[num_reqs + 1]`` integers from 0, where each request's rows begin. Padding requests, at
        the tail, have none.
    seq_lens
        ``[num_reqs]`` integers: tokens of each request, this step's included; 0 for padding.
    block_table
        ``[num_reqs, width]`` integers, padded with block 0.
    num_actual_tokens
        Rows that count, ``query_start_loc[-1]`` or more where a graph's padding rows count as well;
        ``query_start_loc[-1]`` when left out.
    num_padded_tokens
        Rows of query and output; `num_actual_tokens` when left out.
    slot_mapping
        ``[num_actual_tokens]`` integers on the device, handed on to the layers as it is.
    causal
        Whether attention is causal.
    draft_masks
        ``[query_start_loc[-1], width]`` bool, for drafts that are trees: which of its own request's
        rows each row sees, see `RaggedBatch`. `causal` then counts for the split alone.
    """

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    num_actual_tokens: int | None = None
    num_padded_tokens: int | None = None
    slot_mapping: Any = None
    causal: bool = True
    draft_masks: Any = None


class EngineRequests(RaggedBatch):
    """A `RaggedBatch` in which block 0 is nobody's: rows that would go there have slot -1.

    Engines put block 0 in the place of blocks that a sliding window has left behind, and in all
    places for steps that only warm up.
    """

    __slots__ = ()

    def shared_pages(self, page_size: int) -> int:
        """As `RaggedBatch.shared_pages`; block 0 in all tables is no prefix, it is a warm-up."""
        table = self.page_table
        if table is None or not table.shape[1] or table[0, 0] == NULL_BLOCK:
            return 0
        return super().shared_pages(page_size)

    def slot_mapping(self, page_size: int) -> IntArray:
        """As `RaggedBatch.slot_mapping`, with -1 for tokens of block 0."""
        rows, pages, offsets = self._new_tokens(page_size)
        slots: IntArray = pages * np.array(page_size, np.int32) + offsets
        nobody = pages == NULL_BLOCK
        if nobody[nobody.argmax()] if nobody.size else False:
            slots[nobody] = PAD_SLOT
            kept = ~nobody
            check_slots(slots[kept], rows[kept], "slot {}".format)
        else:
            check_slots(slots, rows, "slot {}".format)
        return slots


class Split(NamedTuple):
    """How many requests and rows decode and prefill; decodes come first.

    Parameters
    ----------
    num_decodes, num_prefills
        Requests.
    num_decode_tokens, num_prefill_tokens
        Their rows.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_batch(
    query_lens: IntArray, query_start_loc: IntArray, threshold: int, uniform: bool
) -> Split:
    """Split a batch at its first prefill; whatever comes after that is prefill, too.

    Parameters
    ----------
    query_lens
        ``[num_reqs]`` rows of each request.
    query_start_loc
        ``[num_reqs + 1]`` where they begin.
    threshold
        Longest query that may be a decode.
    uniform
        Whether decodes must have one query length (padding of none aside).
    """
    count, tokens = query_lens.shape[0], int(query_start_loc[-1])
    longest, first = int(query_lens[query_lens.argmax()]), int(query_lens[0])
    if longest <= threshold and (not uniform or threshold <= 1):
        return Split(count, 0, tokens, 0)
    if first > threshold:
        return Split(0, count, 0, tokens)
    prefill = (query_lens != first) & (query_lens != 0) if uniform else query_lens > threshold
    boundary = int(prefill.argmax())
    if not prefill[boundary]:
        return Split(count, 0, tokens, 0)
    rows = int(query_start_loc[boundary])
    return Split(boundary, count - boundary, rows, tokens - rows)


class DecodeLengths(NamedTuple):
    """Query lengths as kernels of the TRTLLM interface take them.

    Parameters
    ----------
    q_len_per_req
        Rows of every request, or of the longest.
    ragged
        Whether requests differ, and the kernel needs offsets.
    """

    q_len_per_req: int
    ragged: bool


def decode_lengths(query_lens: IntArray, *, xqa: bool) -> DecodeLengths:
    """Describe the query lengths of a batch's decodes.

    Parameters
    ----------
    query_lens
        ``[num_decodes]``; 0 for padding.
    xqa
        Whether the kernel is XQA, which takes padding requests for rows of their own.
    """
    if not query_lens.size:
        return DecodeLengths(1, False)
    longest, least = int(query_lens[query_lens.argmax()]), int(query_lens[query_lens.argmin()])
    if longest <= 1:
        return DecodeLengths(1, False)
    if longest == least:
        return DecodeLengths(longest, False)
    if xqa and int(query_lens.sum()) == longest * query_lens.size:
        return DecodeLengths(longest, False)
    return DecodeLengths(longest, True)


def draft_mask(
    query_lens: IntArray, causal: bool, masks: Mask | None = None
) -> npt.NDArray[np.uint16]:
    """Which of its request's rows each row sees, as XQA reads it for queries of several rows.

    Parameters
    ----------
    query_lens
        ``[num_decodes]`` rows of each request.
    causal
        Whether row ``i`` sees rows 0 to ``i``, or all of its request.
    masks
        ``[sum(query_lens), width]``, what the rows see instead.

    Returns
    -------
    NDArray
        ``[sum(query_lens), 2 * ceil(longest / 32)]`` uint16, bit ``k`` of a row for row ``k``, in
        words of 32 bits, the low half first.
    """
    words = mask_words(int(query_lens[query_lens.argmax()]))
    if masks is None:
        rows = ordered_rows(query_lens, words, causal)
    else:
        own = masks[: int(query_lens.sum()), : WORD * words]
        rows = packed_rows(own & within(query_lens, own.shape[1]), words)
    return rows.astype("<i4").view(np.uint16)


def cumulative_pages(seq_lens: IntArray, page_size: int) -> IntArray:
    """Offsets ``[n + 1]`` of requests' pages: ``[0, cumsum(ceil(seq_lens / page_size))]`` int32."""
    return indptr(-(-seq_lens // np.array(page_size, np.int32)))


class HostBatch(NamedTuple):
    """An `EngineBatch` that was checked, as int32 on the host."""

    query_lens: IntArray
    query_start_loc: IntArray
    requests: EngineRequests
    num_actual_tokens: int
    num_padded_tokens: int


def read_batch(batch: EngineBatch) -> HostBatch:
    """Check an engine's batch and bring it into the shape that plans are made from.

    Raises
    ------
    ShapeError, LengthError
        For arrays of other shapes, offsets that fall, and rows that do not fit one another.
    """
    starts = host_ints("query_start_loc", batch.query_start_loc, 1)
    if starts.size < 2 or starts[0] != 0:
        raise ShapeError(
            "query_start_loc",
            given=f"{starts.size} offsets from {starts[:1].tolist()}",
            wanted="num_reqs + 1 offsets, the first of which is 0",
        )
    lens = host_ints("seq_lens", batch.seq_lens, 1)
    if lens.size != starts.size - 1:
        raise ShapeError(
            "seq_lens", given=f"{lens.size} lengths", wanted=f"{starts.size - 1}, one per request"
        )
    query_lens = starts[1:] - starts[:-1]
    requests = EngineRequests(query_lens, lens, batch.block_table, draft_masks=batch.draft_masks)
    rows = int(starts[-1])
    actual = rows if batch.num_actual_tokens is None else int(batch.num_actual_tokens)
    padded = actual if batch.num_padded_tokens is None else int(batch.num_padded_tokens)
    for name, value, least in (
        ("num_actual_tokens", actual, rows),
        ("num_padded_tokens", padded, actual),
    ):
        if value < least:
            raise LengthError(name, given=value, wanted=f"at least {least}")
    return HostBatch(query_lens, starts, requests, actual, padded)
