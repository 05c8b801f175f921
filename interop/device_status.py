"""What a plan made on the device says of each request, and what it refuses beforehand."""

from __future__ import annotations

from enum import IntEnum

from .batch import Bucket
from .errors import DTypeError, PlanError, ShapeError
from .host import INT32_MAX

__all__ = ["PlanStatus", "check_arrays", "check_bucket"]


class PlanStatus(IntEnum):
    """What became of a request in a plan that was made on the device.

    Of several reasons the first one in this order is given. A request whose status is not `OK` is
    left out of the step: nothing of it is read or written, and its rows of the output are 0, of the
    LSE -inf. Only where it has more rows than ``bucket.max_query_len``, those past that many may be
    left as they were.
    """

    OK = 0
    QUERY_ORDER = 1
    """``cu_q_lens`` does not start at 0, or falls, before or at this request."""
    TOO_MANY_TOKENS = 2
    """Its rows reach beyond ``bucket.num_tokens``."""
    QUERY_TOO_LONG = 3
    """It has more rows than ``bucket.max_query_len``."""
    KV_TOO_SHORT = 4
    """``kv_lens``, which count the tokens of this step, too, are less than its query length."""
    TABLE_TOO_NARROW = 5
    """Its tokens need more pages than a row of ``page_table`` has."""
    TOO_MANY_PAGES = 6
    """Its pages, after those of the requests before it, are more than ``bucket.num_pages``."""
    PAGE_OUTSIDE_POOL = 7
    """A page that it needs is none of the cache's."""


def check_bucket(bucket: Bucket) -> None:
    """Raise `PlanError` for a bucket that only plans made on the host have."""
    if bucket.without_context:
        raise PlanError(
            "bucket.without_context",
            given="True for a plan made on the device",
            wanted="False, since lengths are not known when the program is traced",
            remedy="Leave it out: requests without context are then served from their pages.",
        )
    if bucket.draft_masks:
        raise PlanError(
            "bucket.draft_masks",
            given="True for a plan made on the device",
            wanted="False, since masks come from a batch on the host",
            remedy="Use plan for steps that verify trees of drafts.",
        )


def check_arrays(bucket: Bucket, kv_lens: object, cu_q_lens: object, page_table: object) -> None:
    """Check element types and shapes of what a plan is made from on the device.

    Parameters
    ----------
    bucket
        The bucket.
    kv_lens, cu_q_lens, page_table
        Anything with a ``dtype`` and a ``shape``.

    Raises
    ------
    DTypeError, ShapeError
        Naming the array.
    """
    arrays = {"kv_lens": kv_lens, "cu_q_lens": cu_q_lens, "page_table": page_table}
    shapes = []
    for name, array in arrays.items():
        dtype = str(getattr(array, "dtype", "none")).removeprefix("torch.")
        if dtype != "int32":
            raise DTypeError(
                name,
                given=dtype,
                wanted="int32, in which metadata travels",
                remedy=f"Cast {name} where its values are known to fit.",
            )
        shapes.append(tuple(getattr(array, "shape", ())))
    lens, starts, table = shapes
    if len(lens) != 1 or not 0 < lens[0] <= bucket.num_requests:
        raise ShapeError(
            "kv_lens",
            given=list(lens),
            wanted=f"[requests], 1 to {bucket.num_requests} of them as bucket.num_requests says",
        )
    if starts != (lens[0] + 1,):
        raise ShapeError(
            "cu_q_lens",
            given=list(starts),
            wanted=f"[{lens[0] + 1}]: 0, then the running sum of the query lengths",
        )
    if len(table) != 2 or table[0] != lens[0] or not 0 < table[0] * table[1] <= INT32_MAX:
        raise ShapeError(
            "page_table",
            given=list(table),
            wanted=f"[{lens[0]}, width], with at least one entry and fewer than 2**31",
        )
