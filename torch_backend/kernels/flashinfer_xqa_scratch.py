"""What XQA keeps in scratch: factors of a quantised cache, semaphores, partial results, a query.

Nothing in it outlives a call, so that calls on several streams, and on memory that XLA hands out,
need know nothing of one another.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interop.host import power_of_two, round_up
from interop.plan import Launch
from interop.spec import AttentionSpec, CacheSpec

from .protocol import Operands, torch_view

__all__ = [
    "Prepared",
    "Scratch",
    "drafts_scratch_of",
    "prepare",
    "query_factor",
    "row_blocks",
    "scratch_of",
    "splits_of",
    "warm",
]

# Keys that a thread block works on at a time, in the kernel that multiplies in 8 bits and in the
# one that widens pages.
TILE_KEYS = {True: 64, False: 256}

# Query rows, each a head of a token, that a thread block has where requests have several tokens.
DRAFT_ROWS = 32

# Scratch begins with the two factors of `triton_xqa`, and its parts are aligned.
FACTOR_BYTES, ALIGN_BYTES = 16, 256


class Scratch(NamedTuple):
    """What a launch keeps in its scratch, and at which byte it begins."""

    semaphores: int
    """How many there are; they come after the factors."""
    partials: int
    query: int
    total: int


@lru_cache(maxsize=4096)
def scratch_of(
    spec: AttentionSpec, cache: CacheSpec, num_sms: int, rows: int, width: int, widens: int = 0
) -> Scratch:
    """Sizes by the rules of the functions that launch the kernels.

    `widens` says that 8-bit pages are read by the kernel for 16-bit ones.
    """
    splits = splits_of(spec, cache, num_sms, rows, width, widens)
    blocks = rows * spec.num_kv_heads
    semaphores = blocks if splits > 1 else 0
    first = FACTOR_BYTES + 4 * semaphores if cache.quantized or semaphores else 0
    partials = query = round_up(first, ALIGN_BYTES)
    if semaphores:
        query += round_up(_bytes_of_partials(spec, cache, splits * blocks, widens), ALIGN_BYTES)
    total = query
    if cache.scales_per_head:
        total += 2 * rows * spec.num_qo_heads * spec.head_dim
    return Scratch(semaphores, partials, query, total)


@lru_cache(maxsize=4096)
def drafts_scratch_of(
    spec: AttentionSpec,
    cache: CacheSpec,
    num_sms: int,
    requests: int,
    rows: int,
    width: int,
    longest: int,
) -> Scratch:
    """Sizes for several query tokens a request, by the rules of the function that launches them.

    Parameters
    ----------
    requests, rows
        How many there are, and query rows of all of them.
    width
        Pages of the longest request that the table has room for.
    longest
        Query tokens of the longest.
    """
    tiles = -(-width * cache.page_size // TILE_KEYS[False])
    splits = min(max(num_sms // (requests * spec.num_kv_heads), 1), tiles)
    blocks = requests * spec.num_kv_heads * row_blocks(spec, longest)
    semaphores = blocks if splits > 1 else 0
    first = FACTOR_BYTES + 4 * semaphores if cache.quantized or semaphores else 0
    partials = query = round_up(first, ALIGN_BYTES)
    if semaphores:
        size = _bytes_in_16_bits(spec, DRAFT_ROWS, splits * blocks)
        query += round_up(size, ALIGN_BYTES)
    total = query
    if cache.scales_per_head:
        total += 2 * rows * spec.num_qo_heads * spec.head_dim
    return Scratch(semaphores, partials, query, total)


def row_blocks(spec: AttentionSpec, longest: int) -> int:
    """Thread blocks for the query rows of a request's longest query and one key head."""
    return -(-longest * spec.group_size // DRAFT_ROWS)


def splits_of(
    spec: AttentionSpec, cache: CacheSpec, num_sms: int, rows: int, width: int, widens: int = 0
) -> int:
    """Into how many parts the kernel cuts each row's keys."""
    in_8_bits = cache.quantized and not widens
    blocks = rows * spec.num_kv_heads
    tiles = -(-width * cache.page_size // TILE_KEYS[in_8_bits])
    # In 8 bits a quarter of three blocks on each multiprocessor, rounded half up.
    most = (3 * num_sms // blocks + 2) // 4 if in_8_bits else num_sms // blocks
    return min(max(most, 1), tiles)


def _bytes_of_partials(spec: AttentionSpec, cache: CacheSpec, parts: int, widens: int = 0) -> int:
    """Partial outputs of all parts in 16 bits, after maxima and sums of their rows in 32 bits."""
    group = spec.group_size
    if not cache.quantized or widens:
        return _bytes_in_16_bits(spec, group, parts)
    rows, out = 8 * group, 2 * group * spec.head_dim
    return round_up(rows * parts, out) + out * parts


def _bytes_in_16_bits(spec: AttentionSpec, rows: int, parts: int) -> int:
    """The same of the kernel for 16-bit pages, with so many rows to a part."""
    # Heads are padded to a power of two from 64 on, maxima and sums to 32 rows each.
    numbers, out = 2 * 128, 2 * rows * max(64, power_of_two(spec.head_dim))
    return round_up(numbers * parts, out) + out * parts


def query_factor(spec: AttentionSpec) -> float:
    """By what the logits are to be multiplied before the kernel divides them by sqrt(head_dim)."""
    return spec.sm_scale * math.sqrt(spec.head_dim)


class Prepared(NamedTuple):
    """The query that the kernel reads, and tensors at whose start it finds the rest.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``.
    query_factor, page_factor
        One float32 each; `None` where the cache has no scales.
    semaphores, partials
        Cleared counters, and room for partial results.
    """

    query: Any
    query_factor: Tensor | None
    page_factor: Tensor | None
    semaphores: Any
    partials: Any


def prepare(launch: Launch, places: Scratch, operands: Operands, unused: Any) -> Prepared:
    """Fill a launch's scratch; `unused` stands in for what the kernel does not look at."""
    spec, cache, query = launch.spec, launch.cache, operands.query
    assert cache is not None
    if not places.total:
        return Prepared(query, None, None, unused, unused)
    scratch = torch_view(operands.scratch)
    semaphores, partials = None, unused
    if places.semaphores:
        semaphores = scratch[FACTOR_BYTES:][: 4 * places.semaphores].view(torch.int32)
        partials = scratch[places.partials :]
    if not cache.quantized:
        assert semaphores is not None  # there is nothing else
        return Prepared(query, None, None, semaphores.zero_(), partials)
    from ..triton_xqa import prepare_xqa

    rows, scaled = torch_view(query), None
    if cache.scales_per_head:
        scaled = scratch[places.query :].view(rows.dtype)[: rows.numel()].view(rows.shape)
        query = scaled
    factors = scratch[:8].view(torch.float32)
    scales = torch_view(operands.scale_table), torch_view(operands.scale_layer)
    prepare_xqa(rows, scaled, factors, semaphores, *scales, query_factor(spec))
    counters = unused if semaphores is None else semaphores
    return Prepared(query, factors, factors[1:], counters, partials)


@cache
def warm(spec: AttentionSpec, pool: CacheSpec, dtype: str, semaphores: int) -> None:
    """Load what `prepare` and the family launch beside XQA, so that a CUDA graph may record it."""
    if not pool.quantized:
        return
    from ..triton_ops import warm_scale
    from ..triton_xqa import warm_prepare_xqa

    shape = (1, spec.num_qo_heads, spec.head_dim)
    query = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    warm_prepare_xqa(query, spec.num_kv_heads, semaphores, pool.scales_per_head)
    if pool.scales_per_head:
        warm_scale(query, query, spec.num_kv_heads)
