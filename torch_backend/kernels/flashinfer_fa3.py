"""FlashInfer's FA3 kernels on this library's schedules: prefill on compute capability 9.0.

Their tiles are 128 rows of one query head, of which a short query would waste most. A plan's
integers are static for a bucket, so they travel as constants of the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.plan import Launch
from interop.schedule_fa3 import FA3Shape, plan_fa3

from .flashinfer_fa import (
    Call,
    load_early,
    needs_capability,
    ready,
    refuse_any,
    to_natural,
)
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view

__all__ = ["FA3Family"]

FA3_CAPABILITY = (9, 0)

# Below so many query rows for each request on average FA3's tiles of 128 rows of one head stay so
# empty that FA2 is faster: it packs a group of heads into a tile, and FA3 has about 1.5 times its
# speed on full tiles only (542 against 354 TFLOP/s).
FA3_LEAST_MEAN_QUERY_LEN = 128


class FA3Family:
    """FlashInfer's FA3 kernels on the schedule of `interop.schedule_fa3`."""

    name = "fa3"
    recordable = True

    def fields(self, source: str) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        return ("page_indices", "fa3_schedule") if source == "pages" else ("fa3_own_schedule",)

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_any(work)) is not None:
            return reason
        if work.device.capability != FA3_CAPABILITY:
            return needs_capability(work, "9.0")
        if work.source == "tokens" and _value_rows(work) == 0:
            return "there are no rows of key and value for its copy engine to point at"
        mean = work.bucket.num_tokens / max(work.bucket.num_requests, 1)
        if work.role == "prefills":
            # How many of the requests are prefills is not known; how long one may be is.
            mean = work.bucket.max_query_len
        if mean < FA3_LEAST_MEAN_QUERY_LEN:
            return (
                f"the bucket has {mean:.3g} query rows a request, and below "
                f"{FA3_LEAST_MEAN_QUERY_LEN} its tiles of 128 rows stay too empty to be fast"
            )
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: there is one way."""
        return Decision()

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        shape = _fa3_shape(work)
        words, padding, scratch = shape.schedule_words, 0, 0
        if work.source == "tokens" and work.num_requests > work.bucket.num_requests:
            padding = 4 * words
            words += -(-_value_rows(work) // 4)
            element = torch.finfo(getattr(torch, work.query_dtype)).bits // 8
            scratch = _value_rows(work) * work.spec.num_kv_heads * work.spec.head_dim_v * element
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=(*shape.plan_info, padding),
            scratch_bytes=scratch,
        )
        load_early("fa3", work, launch)
        field = "fa3_schedule" if work.source == "pages" else "fa3_own_schedule"
        return launch, {field: words}

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`."""
        shape = _fa3_shape(work)
        field = fields["fa3_schedule" if work.source == "pages" else "fa3_own_schedule"]
        plan_fa3(
            shape,
            lengths.qo_indptr[lengths.first :],
            lengths.kv_indptr[lengths.first : -1],
            lengths.kv_lens[lengths.first :],
            out=field[: shape.schedule_words],
        )
        if field.size > shape.schedule_words:
            padding = field[shape.schedule_words :].view(np.uint8)
            padding[: lengths.kv_indptr[-1]] = 0
            padding[lengths.kv_indptr[-1] :] = 1

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        call = _ready_fa3(launch)
        # All offsets and lengths are in the schedule; the kernel looks at no other array for them,
        # so the schedule stands in where the signature has one.
        if launch.source == "pages":
            schedule = operands.metadata["fa3_schedule"]
            call.function(
                operands.out,  # no scratch; the kernel asks it for the device
                schedule,
                call.plan_info,
                operands.query,
                operands.key,
                operands.value,
                schedule,
                schedule,
                operands.metadata["page_indices"],
                schedule,
                operands.out,
                operands.lse,
                *call.options,
            )
        else:
            schedule = operands.metadata["fa3_own_schedule"]
            value, padding = operands.value, launch.constants[-1]
            if padding:
                value = _without_padding(value, operands.scratch, schedule, padding)
            call.function(
                operands.out,
                schedule,
                call.plan_info,
                operands.query,
                operands.key,
                value,
                schedule,
                schedule,
                operands.out,
                operands.lse,
                *call.options,
            )
        to_natural(operands.lse)


@lru_cache(maxsize=4096)
def _ready_fa3(launch: Launch) -> Call:
    return ready("fa3", launch, launch.constants[:-1], False)


@lru_cache(maxsize=4096)
def _fa3_shape(work: Work) -> FA3Shape:
    return FA3Shape(
        num_requests=work.num_requests,
        num_rows=work.bucket.num_tokens,
        num_qo_heads=work.spec.num_qo_heads,
        head_dim_v=work.spec.head_dim_v,
        num_sms=work.device.num_sms,
        causal=work.spec.causal,
        window_left=work.spec.window_left,
    )


def _value_rows(work: Work) -> int:
    """Rows of key and value in the call, for attention over these."""
    return work.bucket.num_tokens if work.cache is not None else work.bucket.num_pages


def _without_padding(value: Any, scratch: Any, schedule: Any, padding: int) -> Tensor:
    """Copy `value` with zeros in its padding rows.

    FA3 reads values in whole tiles and multiplies those past a request's end by 0, which makes NaN
    of what is not finite. Between requests the rows are another's values; past the last one they
    may hold anything. The copy takes about 1 % of the time of the attention that it is for.
    """
    rows = torch_view(value)
    copy = torch_view(scratch).view(rows.dtype)[: rows.numel()].view(rows.shape)
    copy.copy_(rows)
    is_padding = torch_view(schedule).view(torch.bool)[padding : padding + rows.shape[0]]
    return copy.masked_fill_(is_padding[:, None, None], 0.0)
