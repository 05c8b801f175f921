"""The shapes that are measured: 32 query and 8 key/value heads of width 128, pages of 16 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interop import AttentionSpec, Bucket, RaggedBatch

__all__ = [
    "EJKERNEL",
    "FLASH_ATTN3",
    "OURS",
    "PAGE_SIZE",
    "PALLAS",
    "SPEC",
    "bucket_of",
    "causal_flops",
    "decode_shape",
    "kv_bytes",
    "make_batch",
    "pages_for",
]

# Libraries by the names that results have for them.
OURS = "this project"
PALLAS = "pallas paged_attention"
FLASH_ATTN3 = "flash-attn3-jax"
EJKERNEL = "ejkernel unified_attention"

SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
PAGE_SIZE = 16


def pages_for(kv_lens: Sequence[int]) -> int:
    """Pages that requests of these lengths fill."""
    return sum(-(-length // PAGE_SIZE) for length in kv_lens)


def make_batch(
    query_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0, page_size: int = PAGE_SIZE
) -> RaggedBatch:
    """Return a batch whose pages lie in the pool in random order, as they do after a while."""
    counts = -(-np.asarray(kv_lens) // page_size)
    table = np.zeros((counts.size, int(counts.max())), np.int32)
    pages = np.random.default_rng(seed).permutation(int(counts.sum())).astype(np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = pages
    return RaggedBatch(query_lens, kv_lens, table)


def bucket_of(batch: RaggedBatch, *, without_context: bool = False) -> Bucket:
    """Return the bucket that a server would pad this batch to if it were its largest."""
    return Bucket(
        batch.num_requests,
        batch.num_tokens,
        int(batch.pages(PAGE_SIZE).indptr[-1]),
        batch.max_query_len,
        without_context,
    )


def decode_shape(requests: int, context: int, **more: Any) -> dict[str, Any]:
    """Describe a decode of equal lengths, for the results."""
    return {"requests": requests, "context": context, **more}


def kv_bytes(kv_lens: Sequence[int], element_bytes: int = 2) -> int:
    """Bytes of keys and values that one layer's decode has to read."""
    width = SPEC.num_kv_heads * (SPEC.head_dim + SPEC.head_dim_v)
    return sum(kv_lens) * width * element_bytes


def causal_flops(lengths: Sequence[int]) -> float:
    """Floating point operations of causal attention over whole requests, one layer.

    Two matrix products of ``length x length x head_dim`` for each head, half of them masked.
    """
    return sum(2.0 * SPEC.num_qo_heads * SPEC.head_dim * length**2 for length in lengths)
