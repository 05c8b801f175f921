"""What a TRTLLM-GEN launch keeps in its metadata and its scratch, where, and how it is filled.

Sizes are those that FlashInfer's launcher and kernels reckon with, as read from the sources of
version 0.7.2.post1. Nothing in scratch outlives a call, so that calls on several streams, and on
memory that XLA hands out, need know nothing of one another.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from interop.host import round_up
from interop.plan import ALIGN_WORDS, Launch
from interop.spec import AttentionSpec, CacheSpec

from .protocol import Operands, torch_view

__all__ = [
    "Scratch",
    "Sizes",
    "Words",
    "copied_pages",
    "idle_operands",
    "prepared",
    "scratch_of",
    "words_of",
]

ALIGN_BYTES = 256
FACTOR_BYTES = 8
# Counters come in eights, one for a head of a request or one for a multiprocessor.
COUNTER_STEP = 8
# Query rows of a thread block, of all that a kernel may have; partial results are float32 at most.
MOST_TILE_ROWS = 256
# The launcher reckons query lengths in tiles of this many rows, and keeps a guard behind them.
STATS_TILE_ROWS, STATS_GUARD_BYTES = 256, 1 << 20


class Sizes(NamedTuple):
    """A launch's static numbers, as `Launch.constants` holds them.

    Parameters
    ----------
    num_sms
        Streaming multiprocessors.
    requests
        Rows of the block table.
    rows
        Query rows.
    width
        Pages of a row of the block table.
    max_query_len
        Query rows that a request may have.
    pages
        Pages to copy before the call; 0 where the kernel reads the cache.
    lse
        Whether calls may ask for the LSE.
    """

    num_sms: int
    requests: int
    rows: int
    width: int
    max_query_len: int
    pages: int
    lse: int


class Words(NamedTuple):
    """Where parts of the field of lengths begin, in words; -1 for a part that there is not."""

    lens: int
    no_keys: int
    """Of each query row a byte: whether it has no keys."""
    q_indptr: int
    kv_indptr: int
    valid_tokens: int
    total: int


def words_of(sizes: Sizes, *, context: bool) -> Words:
    """Places of the parts of the field of lengths."""
    parts = {
        "lens": sizes.requests,
        "no_keys": -(-sizes.rows // 4),
        "q_indptr": sizes.requests + 1 if context or sizes.max_query_len > 1 else 0,
        "kv_indptr": sizes.requests + 1 if context else 0,
        "valid_tokens": sizes.pages,
    }
    places, at = {}, 0
    for name, count in parts.items():
        places[name] = at if count else -1
        at += round_up(count, ALIGN_WORDS)
    return Words(**places, total=at)


class Scratch(NamedTuple):
    """At which byte each part of scratch begins, each as long as up to the next."""

    counters: int
    """How many bytes of them there are; they come first."""
    factors: int
    query: int
    key: int
    value: int
    workspace: int
    total: int


@lru_cache(maxsize=4096)
def scratch_of(
    spec: AttentionSpec, cache: CacheSpec, sizes: Sizes, *, context: bool, rounds: bool
) -> Scratch:
    """Places of the parts of scratch.

    Parameters
    ----------
    spec, cache, sizes
        The launch.
    context
        Whether it is the kernel for prefill, which does not split keys.
    rounds
        Whether the kernel is handed a query of 8 bits.
    """
    slots = max(sizes.requests * spec.num_qo_heads, sizes.num_sms)
    counters = 4 * round_up(slots, COUNTER_STEP)
    factors = round_up(counters, ALIGN_BYTES)
    query = factors + (ALIGN_BYTES if cache.quantized and not context else 0)
    query_bytes = sizes.rows * spec.num_qo_heads * spec.head_dim if rounds else 0
    key = query + round_up(query_bytes, ALIGN_BYTES)
    page = cache.page_size * spec.num_kv_heads * spec.head_dim * 2
    # Page 0 of the copies stands for none.
    copies = round_up((sizes.pages + 1) * page, ALIGN_BYTES) if sizes.pages else 0
    value = key + copies
    workspace = value + copies
    total = workspace + ALIGN_BYTES
    if sizes.lse:
        tiled = round_up(sizes.max_query_len, STATS_TILE_ROWS)
        total += round_up(8 * spec.num_qo_heads * sizes.requests * tiled, ALIGN_BYTES)
        total += STATS_GUARD_BYTES
    if not context:
        # Keys are split among as many blocks as there are multiprocessors, and no more; each has
        # maxima and sums of its rows, and their partial outputs.
        total += sizes.num_sms * MOST_TILE_ROWS * (8 + 4 * spec.head_dim)
    return Scratch(counters, factors, query, key, value, workspace, total)


def copied_pages(
    operands: Operands, places: Scratch, sizes: Sizes, cache: CacheSpec, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy the pages in use, scales applied, into scratch; page 0 of the copies becomes 0."""
    from ..triton_ops import gather

    dtype, scratch = operands.query.dtype, operands.scratch
    shape = (sizes.pages + 1, cache.page_size, cache.num_kv_heads, cache.head_dim)
    copies = [
        scratch[start:].view(dtype)[: math.prod(shape)].view(shape)
        for start in (places.key, places.value)
    ]
    rows = [copy[1:].view(-1, *shape[2:]) for copy in copies]
    for copy in copies:
        copy[0].zero_()
    gather(
        operands.key.transpose(1, 2),
        operands.value.transpose(1, 2),
        torch_view(operands.metadata["page_indices"]),
        valid[: sizes.pages],
        rows[0],
        rows[1],
        scale_table=operands.scale_table,
        scale_layer=operands.scale_layer,
    )
    return copies[0].transpose(1, 2), copies[1].transpose(1, 2)


def prepared(
    query: Tensor, operands: Operands, places: Scratch, sm_scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Write the query that is read over 8-bit pages, and the two scales, into scratch."""
    from ..triton_trtllm import prepare_trtllm

    scratch, rounded = operands.scratch, None
    if places.key > places.query:
        rounded = scratch[places.query :][: query.numel()].view(torch.float8_e4m3fn)
        rounded = rounded.view(query.shape)
    factors = scratch[places.factors :][:FACTOR_BYTES].view(torch.float32)
    scales = operands.scale_table, operands.scale_layer
    prepare_trtllm(query, rounded, factors, *scales, sm_scale)
    return query if rounded is None else rounded, (factors[:1], factors[1:])


def idle_operands(launch: Launch, at: Words, dtype: torch.dtype, where: torch.device) -> Operands:
    """Buffers for a call that reads one key of a page of zeros for every request."""
    spec, cache, sizes = launch.spec, launch.cache, Sizes(*launch.constants)
    assert cache is not None

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=where)

    words = zeros(at.total)
    words[at.lens :][: sizes.requests] = 1
    if at.kv_indptr >= 0:
        offsets = torch.arange(sizes.requests + 1, dtype=torch.int32, device=where)
        words[at.kv_indptr :][: sizes.requests + 1] = offsets
    if sizes.pages:
        words[at.valid_tokens :] = -1
    fields = {
        f"{launch.family}_lens": words,
        f"{launch.family}_pages": zeros(sizes.requests * sizes.width),
        "page_indices": zeros(sizes.pages),
    }
    query = zeros(sizes.rows, spec.num_qo_heads, spec.head_dim, dtype=dtype)
    page = (1, *cache.key_shape[1:])
    return Operands(
        query=query,
        key=zeros(*page, dtype=getattr(torch, cache.dtype)),
        value=zeros(*page, dtype=getattr(torch, cache.dtype)),
        metadata=fields,
        out=torch.empty_like(query),
        lse=zeros(*query.shape[:2], dtype=torch.float32) if sizes.lse else None,
        scratch=zeros(launch.scratch_bytes, dtype=torch.uint8),
        scale_table=zeros(1, 2, spec.num_kv_heads, dtype=torch.float32),
        scale_layer=zeros(1),
        sinks=zeros(spec.num_qo_heads, dtype=torch.float32) if spec.sinks else None,
    )
