"""Metadata of a plan from lengths that are arrays: the same lines for NumPy and for ``jax.numpy``.

The result equals what is planned on the host, array for array. Nothing here depends on a value, so
the lines can be traced; what a host plan would refuse becomes a status of the request.

They are written for a compiler that fuses: only sums over requests have to end a kernel, so there
are few of them one after another, and all else is element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .batch import Bucket
from .device_arithmetic import Arithmetic, Array, laid_out
from .device_schedule import ScheduleWork, schedule_of
from .device_status import PlanStatus
from .fa2_shape import FA2Shape
from .host import INT32_MAX
from .plan import MetadataLayout

__all__ = ["DeviceShape", "metadata_of", "most_pages"]


@dataclass(frozen=True)
class DeviceShape:
    """Everything static that metadata written on the device depends on.

    Parameters
    ----------
    bucket, layout
        Those of the plan.
    page_size, pool_pages
        Tokens in a page, and pages of a layer.
    schedule
        The FA2 schedule to write; `None` for kernels without one.
    flashinfer_chunks
        Whether that schedule has the chunk size of FlashInfer's planner.
    """

    bucket: Bucket
    layout: MetadataLayout
    page_size: int
    pool_pages: int
    schedule: FA2Shape | None = None
    flashinfer_chunks: bool = False


def most_pages(bucket: Bucket, page_size: int, width: int) -> int:
    """Most pages that a request of a bucket has in a table with rows of `width` entries; or 1."""
    return max(1, min(width, bucket.num_pages, INT32_MAX // page_size))


class _Requests(NamedTuple):
    """What is written of each request, all ``[requests]`` int32.

    Parameters
    ----------
    ends
        Where its rows of the query end.
    kv_lens, pages
        Tokens and pages; 0 for a request that is left out.
    status
        `PlanStatus`.
    """

    ends: Array
    kv_lens: Array
    pages: Array
    status: Array


def metadata_of(
    ops: Arithmetic, shape: DeviceShape, kv_lens: Array, cu_q_lens: Array, page_table: Array
) -> tuple[Array, Array]:
    """Return the metadata of a plan, and the status of each request.

    Parameters
    ----------
    ops
        Arithmetic of the arrays.
    shape
        Static part.
    kv_lens, cu_q_lens, page_table
        ``[n]``, ``[n + 1]`` and ``[n, width]`` int32, checked by `device_status.check_arrays`.

    Returns
    -------
    Array, Array
        ``[shape.layout.words]`` int32 and ``[n]`` int32, numbers of `PlanStatus`.
    """
    xp, bucket = ops.xp, shape.bucket
    requests = _judged(ops, shape, kv_lens, cu_q_lens, page_table)
    count, width = page_table.shape
    # The bucket's spare requests, and the one that owns all rows that nobody else has.
    rows = bucket.num_requests + 1
    spare = rows - count

    def padded(x: Array, value: int = 0) -> Array:
        return xp.concatenate([x, xp.full((spare,), value, np.int32)])

    after = xp.broadcast_to(requests.ends[-1:], (spare - 1,))
    ends = xp.concatenate([requests.ends, after, xp.full(1, bucket.num_tokens, np.int32)])
    owner = ops.owners(ends, bucket.num_tokens + 1)
    pages = padded(requests.pages)
    page_ends = ops.running_sum(pages)
    flat = page_table.reshape(-1)

    # Position of each row in its request. Where nothing is written it is before the start, since a
    # request that is left out has no keys. A field of no rows has one word nonetheless.
    token = xp.arange(max(bucket.num_tokens, 1), dtype=np.int32)
    row = xp.minimum(owner[: token.size], rows - 1)
    kv_all = padded(requests.kv_lens)
    position = ops.take(kv_all - ends, row) + token
    written = (position >= 0) & (token < bucket.num_tokens)
    column = ops.quotient(xp.maximum(position, 0), shape.page_size)
    page = ops.take(flat, xp.where(written, row * width + column, 0))
    slots = page * shape.page_size + position - column * shape.page_size

    # Where a row of the table begins, less the pages of the requests before it.
    first = xp.arange(rows, dtype=np.int32) * width - (page_ends - pages)
    place = xp.arange(max(bucket.num_pages, 1), dtype=np.int32)
    used = place < page_ends[-1]
    row = xp.minimum(ops.owners(page_ends, place.size), rows - 1)
    page = ops.take(flat, xp.where(used, ops.take(first, row) + place, 0))

    zero = xp.zeros(1, np.int32)
    last = requests.kv_lens - (requests.pages - 1) * shape.page_size
    fields = {
        "qo_indptr": xp.concatenate([zero, ends]),
        "kv_indptr": xp.concatenate([zero, page_ends]),
        "kv_lens": kv_all,
        "kv_last_page_len": padded(xp.where(requests.pages > 0, last, 0)),
        "slot_mapping": xp.where(written, slots, -1),
        "page_indices": xp.where(used, page, 0),
    }
    if shape.schedule is not None:
        query_lens = ends - xp.concatenate([zero, ends[:-1]])
        # More rows than promised might need more tiles than there is room for.
        promised = padded(xp.full(count, bucket.max_query_len, np.int32), bucket.num_tokens)
        tiled = xp.minimum(query_lens, promised)
        fields["fa2_schedule"] = schedule_of(
            ops,
            shape.schedule,
            ScheduleWork(tiled, ends - query_lens, ends, owner, pages),
            width=most_pages(bucket, shape.page_size, width),
            flashinfer_chunks=shape.flashinfer_chunks,
        )
    parts = [(start, fields[name]) for name, start, _ in shape.layout.fields]
    return laid_out(ops, parts, shape.layout.words), requests.status


def _judged(
    ops: Arithmetic, shape: DeviceShape, kv_lens: Array, cu_q_lens: Array, page_table: Array
) -> _Requests:
    """Say of each request whether it fits, and leave out those that do not."""
    xp, bucket, width = ops.xp, shape.bucket, page_table.shape[1]
    begins, ends = cu_q_lens[:-1], cu_q_lens[1:]
    # Offsets that start at 0 and never fall, whatever is given.
    highest = xp.maximum(ops.running_max(ends), xp.maximum(cu_q_lens[0], 0))
    before = xp.concatenate([xp.zeros(1, np.int32), highest[:-1]])
    query_lens = ends - begins
    given = xp.maximum(kv_lens, 0)
    whole = ops.quotient(given, shape.page_size)
    pages = whole + (given > whole * shape.page_size)
    alone = {
        PlanStatus.QUERY_ORDER: (begins < 0) | (ends < begins),
        PlanStatus.TOO_MANY_TOKENS: ends > bucket.num_tokens,
        PlanStatus.QUERY_TOO_LONG: query_lens > bucket.max_query_len,
        PlanStatus.KV_TOO_SHORT: (kv_lens < query_lens) | (kv_lens < 0),
        PlanStatus.TABLE_TOO_NARROW: pages > min(width, INT32_MAX // shape.page_size),
        # One that could never have its pages takes none from those after it.
        PlanStatus.TOO_MANY_PAGES: pages > bucket.num_pages,
    }
    status = xp.zeros(kv_lens.shape, np.int32)
    for code, found in reversed(alone.items()):
        status = xp.where(found, int(code), status)
    wanted = xp.where(status == 0, pages, 0)
    late = (wanted > 0) & (ops.running_sum(wanted) > bucket.num_pages)
    status = xp.where(late, int(PlanStatus.TOO_MANY_PAGES), status)
    # Read without a sign, negative numbers of pages are beyond any pool.
    read = xp.arange(width, dtype=np.int32) < pages[:, None]
    largest = xp.where(read, page_table, 0).astype(np.uint32).max(axis=1)
    lost = (status == 0) & (largest >= shape.pool_pages)
    status = xp.where(lost, int(PlanStatus.PAGE_OUTSIDE_POOL), status)
    out_of_order = (begins != before) | (ends != highest)
    status = xp.where(out_of_order, int(PlanStatus.QUERY_ORDER), status)
    fits = status == 0
    ends = xp.minimum(highest, bucket.num_tokens)
    return _Requests(ends, xp.where(fits, kv_lens, 0), xp.where(fits, pages, 0), status)
