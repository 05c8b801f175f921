"""Which tokens of its own request each query token of a step sees: trees of drafts, as bits.

A model that verifies drafts brings several query tokens for a request, some of them alternatives of
one another, so "all before me" is not what they see. What a token sees of the request's context is
never masked. In bits a row is ``ceil(max_query_len / 32)`` int32 words, bit ``k`` of the row for
the ``k``-th query token of its request; FlashInfer's XQA reads the same words as pairs of uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, DTypeError, ShapeError
from .host import IntArray, host_array, indptr

__all__ = [
    "WORD",
    "Mask",
    "checked_masks",
    "largest_spread",
    "mask_words",
    "ordered_rows",
    "packed_rows",
    "spread_rows",
    "unpacked_rows",
    "within",
]

Mask = npt.NDArray[np.bool_]

WORD = 32
BYTE = 8


def mask_words(max_query_len: int) -> int:
    """Return the words of a row for queries of up to so many tokens."""
    return -(-max_query_len // WORD)


def checked_masks(masks: object, query_lens: IntArray, qo_indptr: IntArray) -> Mask:
    """Return masks as a copy of what the caller gave, with what lies past each request cleared.

    Parameters
    ----------
    masks
        ``[tokens, width]`` bool on the host, see `RaggedBatch`.
    query_lens, qo_indptr
        ``[num_requests]`` and ``[num_requests + 1]``, the requests' rows and where they begin.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Naming ``draft_masks``, for another shape or type, and for a token that does not see itself.
    """
    array = host_array("draft_masks", masks)
    tokens, longest = int(qo_indptr[-1]), int(query_lens.max())
    if array.ndim != 2 or array.shape[0] != tokens or array.shape[1] < longest:
        raise ShapeError(
            "draft_masks",
            given=f"shape {array.shape}",
            wanted=f"[{tokens}, {longest}] or wider: a row for each query token, a column for each "
            "token of the longest query",
        )
    if array.dtype != np.bool_:
        raise DTypeError(
            "draft_masks",
            given=str(array.dtype),
            wanted="bool",
            remedy="Compare first, as in masks != 0.",
        )
    own = np.arange(tokens) - qo_indptr[:-1].repeat(query_lens)
    blind = ~array[np.arange(tokens), own] if tokens else np.zeros(0, np.bool_)
    if blind.any():
        row = int(blind.argmax())
        raise ArgumentError(
            f"draft_masks[{row}, {int(own[row])}]",
            given="False",
            wanted="True: every token sees itself",
            remedy="Leave tokens that count for nothing out of the batch.",
        )
    return array[:, :longest] & within(query_lens, longest)


def within(query_lens: IntArray, width: int) -> Mask:
    """Return which columns of each token's row are of its own request, ``[tokens, width]``."""
    inside: Mask = np.arange(width) < query_lens.repeat(query_lens)[:, None]
    return inside


def packed_rows(masks: Mask, words: int) -> IntArray:
    """Return masks ``[tokens, width]`` as bits, ``[tokens, words]`` int32."""
    rows = np.zeros((masks.shape[0], words * WORD // BYTE), np.uint8)
    packed = np.packbits(masks, axis=1, bitorder="little")
    rows[:, : packed.shape[1]] = packed
    return rows.view("<i4").astype(np.int32, copy=False)


def ordered_rows(query_lens: IntArray, words: int, causal: bool) -> IntArray:
    """Return the bits of requests without masks, ``[tokens, words]`` int32.

    Row ``i`` of a request sees rows 0 to ``i`` where attention is causal, and else all of them.
    """
    seen = query_lens.repeat(query_lens)
    if causal:
        starts = indptr(query_lens)[:-1].repeat(query_lens)
        seen = np.arange(1, seen.size + 1, dtype=np.int32) - starts
    bits = np.clip(seen[:, None].astype(np.int64) - WORD * np.arange(words), 0, WORD)
    return ((np.int64(1) << bits) - 1).astype(np.uint32).view(np.int32)


def largest_spread(max_query_len: int, num_requests: int, num_keys: int) -> int:
    """Return the most bytes that `spread_rows` fills for batches of these sizes."""
    return -(-max_query_len * num_keys // BYTE) + num_requests


def spread_rows(
    rows: IntArray,
    qo_indptr: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    out: IntArray,
    out_indptr: IntArray,
) -> None:
    """Write masks over all keys of each request, as FlashInfer's FA2 reads them.

    The bit of query token ``i`` and key ``j`` is bit ``i * kv_len + j`` of its request, least
    significant first; each request begins with a byte of its own.

    Parameters
    ----------
    rows
        ``[tokens, words]`` int32, bits among each request's own tokens.
    qo_indptr
        ``[num_requests + 1]`` int32, where each request's rows begin.
    query_lens, kv_lens
        ``[num_requests]`` int32; requests without query tokens have no mask.
    out
        int32 words whose bytes are written, `largest_spread` of them or more.
    out_indptr
        ``[num_requests + 1]`` int32, written: the byte at which each request begins.
    """
    query, keys = query_lens.astype(np.int64), kv_lens.astype(np.int64)
    out_indptr[0] = 0
    np.add.accumulate(-(-query * keys // BYTE), out=out_indptr[1:])
    data = out.view(np.uint8)
    end = int(out_indptr[-1])
    data[:end] = 255
    data[end:] = 0
    # Requests without keys, padding among them, have no bits.
    masked = np.flatnonzero((query_lens > 1) & (kv_lens > 0))
    request = masked.repeat(query_lens[masked])
    if not request.size:
        return
    local = np.arange(request.size) - indptr(query_lens[masked])[:-1].repeat(query_lens[masked])
    own = rows[qo_indptr[request] + local]
    bits = unpacked_rows(own, WORD * own.shape[1])
    hidden, column = np.nonzero(~bits & within(query_lens[masked], bits.shape[1]))
    who = request[hidden]
    bit = local[hidden] * keys[who] + (keys[who] - query[who]) + column
    clear = ~(np.uint8(1) << (bit % BYTE).astype(np.uint8))
    np.bitwise_and.at(data, out_indptr[who] + bit // BYTE, clear)


def unpacked_rows(rows: npt.NDArray[Any], width: int) -> Mask:
    """Return bits ``[tokens, words]`` int32 as masks ``[tokens, width]``."""
    bits = np.unpackbits(rows.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    return bits[:, :width].astype(np.bool_)
