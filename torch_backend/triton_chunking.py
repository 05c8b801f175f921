"""Triton kernels that choose a plan's chunk size: `interop.chunking` for plans made on a GPU.

Import this module only where Triton is installed. Times are estimated in 64 bits, as on the host,
so that both choose the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cut", "seen_pages"]


@triton.jit
def seen_pages(kv_indptr, i, inside, seen):
    """Pages of requests as a tile reads them, at least 1."""
    first = tl.load(kv_indptr + i, mask=inside, other=0)
    pages = tl.load(kv_indptr + 1 + i, mask=inside, other=0) - first
    return tl.minimum(tl.maximum(pages, 1), seen)


@triton.jit
def _piece(
    qo_indptr, kv_indptr, start, count, rows, max_query_len, group, tile, seen, BLOCK: tl.constexpr
):
    """Numbers of some requests, their rows with tiles, tiles, and pages."""
    i = start + tl.arange(0, BLOCK)
    inside = i < rows
    first = tl.load(qo_indptr + i, mask=inside, other=0)
    query_len = tl.load(qo_indptr + 1 + i, mask=inside, other=0) - first
    tiled = tl.where(i < count, tl.minimum(query_len, max_query_len), query_len)
    tiles = (tiled * group + (tile - 1)) // tile
    return i, tiled, tiles, seen_pages(kv_indptr, i, inside, seen)


@triton.jit
def _attend(path, busy, left, items, slots, wave):
    """Estimated time of chunks that one slot works on for `path`, before merging."""
    path_square, busy_square = path * path, busy * busy
    within = tl.sqrt(tl.sqrt(path_square * path_square + busy_square * busy_square))
    rest = path - left
    waves = busy + wave + tl.where(rest > 0, rest, 0.0)
    waves = tl.where(waves > path, waves, path)
    return tl.where(items <= slots, within, waves)


@triton.jit
def _best_chunk(
    qo_indptr, kv_indptr, cuts, estimate, longest,
    count, rows, max_query_len, group, tile, page_size, seen, capacity, least_tokens,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pages of a chunk; see `interop.device_schedule`."""
    number = tl.arange(0, CANDIDATES)
    cut_into = tl.load(cuts + number)
    chunks = (longest + (cut_into - 1)) // cut_into
    chunk = chunks.to(tl.float64)
    extra = tl.zeros([CANDIDATES, BLOCK], tl.float64)
    cut, squares = extra, extra
    weights = tl.zeros([BLOCK], tl.float64)
    weighted = weights
    for start in range(0, rows, BLOCK):
        _, _, tiles, pages = _piece(
            qo_indptr, kv_indptr, start, count, rows, max_query_len, group, tile, seen, BLOCK
        )
        weight, length = tiles.to(tl.float64), pages.to(tl.float64)
        weights += weight
        weighted += weight * length
        before = (pages[None, :] - 1) // chunks[:, None]
        whole = (before * chunks[:, None]).to(tl.float64)
        rest = length[None, :] - whole
        extra += before.to(tl.float64) * weight[None, :]
        cut += tl.minimum(before, 1).to(tl.float64) * weight[None, :]
        squares += (whole * chunk[:, None] + rest * rest) * weight[None, :]
    extra, cut = tl.sum(extra, axis=1), tl.sum(cut, axis=1)
    squares = tl.sum(squares, axis=1)
    num_tiles = tl.zeros([CANDIDATES], tl.float64) + tl.sum(weights, axis=0)
    total = tl.zeros([CANDIDATES], tl.float64) + tl.sum(weighted, axis=0)

    full, alone, slots = tl.load(estimate), tl.load(estimate + 1), tl.load(estimate + 2)
    block, cut_rows = tl.load(estimate + 3), tl.load(estimate + 4)
    left_of, wave, part = tl.load(estimate + 5), tl.load(estimate + 6), tl.load(estimate + 7)
    most = longest.to(tl.float64)
    total = tl.where(total > 1.0, total, 1.0)
    busy = full * total / slots
    left = left_of * squares / (2 * total)
    items = num_tiles + extra
    attend = _attend(alone * chunk, busy, left, items, slots, wave)
    unsplit = tl.sum(tl.where(number == 0, attend, 0.0), axis=0)
    cut_least = tl.sum(tl.where(number == 1, cut, 0.0), axis=0)
    cut_time = cut_rows / tl.where(num_tiles > 1.0, num_tiles, 1.0)
    merge = block * extra + cut_time * cut + part * (most / chunk)
    by_size = most * page_size / least_tokens
    by_items = most * capacity / total
    finest = tl.where(by_items < by_size, by_items, by_size)
    gain = unsplit - busy - cut_time * cut_least + block * num_tiles
    x = gain / (block * total / most + part)
    bound = x * most / tl.where(x < most, most - x, 1.0)
    bound = tl.where((x < most) & (bound < finest), bound, finest)
    pays = (num_tiles > 0.0) & (busy + (block + cut_time) * cut_least < unsplit)
    bound = tl.where(pays & (finest >= 2.0), bound, 0.0)
    tried = (cut_into.to(tl.float64) <= bound) & (items <= capacity)
    times = tl.where(tried, attend + merge, float("inf"))
    times = tl.where(number == 0, unsplit, times)
    first = tl.min(tl.where(times == tl.min(times, axis=0), number, CANDIDATES), axis=0)
    return tl.sum(tl.where(number == first, chunks, 0), axis=0)


@triton.jit
def _flashinfer_chunk(
    qo_indptr, kv_indptr, longest, least, budget,
    count, rows, max_query_len, group, tile, seen,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pages of a chunk by the search of FlashInfer's planner."""
    low, high = least, longest
    while low < high:
        middle = (low + high) // 2
        items = tl.zeros([BLOCK], tl.float64)
        for start in range(0, rows, BLOCK):
            _, _, tiles, pages = _piece(
                qo_indptr, kv_indptr, start, count, rows, max_query_len, group, tile, seen, BLOCK
            )
            each = (pages + (middle - 1)) // middle
            items += each.to(tl.float64) * tiles.to(tl.float64)
        if tl.sum(items, axis=0) > budget:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=(
        "count", "rows", "max_query_len", "group", "tile", "page_size", "seen", "capacity",
        "num_rows", "least_tokens", "least_pages", "budget", "o_indptr_at",
        "chunk_at", "rows_at",
    ),
    do_not_specialize_on_alignment=(
        "qo_indptr", "kv_indptr", "schedule", "item_ends", "cuts", "estimate",
    ),
)  # fmt: skip
def cut(
    qo_indptr, kv_indptr, schedule, item_ends, cuts, estimate,
    count, rows, max_query_len, group, tile, page_size, seen, capacity, num_rows,
    least_tokens, least_pages, budget, o_indptr_at, chunk_at, rows_at,
    SPLIT: tl.constexpr, FLASHINFER: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the chunk size, and count work items and partial results; one program."""
    chunk = -1
    if SPLIT:
        longest = 1
        for start in range(0, rows, BLOCK):
            i = start + tl.arange(0, BLOCK)
            pages = seen_pages(kv_indptr, i, i < rows, seen)
            longest = tl.maximum(longest, tl.max(pages, axis=0))
        if FLASHINFER:
            chunk = _flashinfer_chunk(
                qo_indptr, kv_indptr, longest, least_pages, budget,
                count, rows, max_query_len, group, tile, seen, BLOCK,
            )  # fmt: skip
        else:
            chunk = _best_chunk(
                qo_indptr, kv_indptr, cuts, estimate, longest,
                count, rows, max_query_len, group, tile, page_size, seen, capacity,
                least_tokens, CANDIDATES, BLOCK,
            )  # fmt: skip
    tl.store(schedule + chunk_at, chunk * page_size)
    tl.store(schedule + rows_at, num_rows)
    tl.store(schedule + o_indptr_at, 0)
    items_before, parts_before = 0, 0
    for start in range(0, rows, BLOCK):
        i, tiled, tiles, pages = _piece(
            qo_indptr, kv_indptr, start, count, rows, max_query_len, group, tile, seen, BLOCK
        )
        if SPLIT:
            chunks = (pages + (chunk - 1)) // chunk
            items, parts = tiles * chunks, tiled * chunks
            part_ends = parts_before + tl.cumsum(parts, axis=0)
            parts_before += tl.sum(parts, axis=0)
        else:
            items = tiles
            part_ends = tl.load(qo_indptr + 1 + i, mask=i < rows, other=0)
        tl.store(item_ends + i, items_before + tl.cumsum(items, axis=0), mask=i < rows)
        tl.store(schedule + o_indptr_at + 1 + i, part_ends, mask=i < rows)
        items_before += tl.sum(items, axis=0)
