"""Attention in plain PyTorch, on any device: the family that every other one is measured by.

Requests of similar length are worked on together, a block of their keys at a time: rows of the
pages are gathered into a buffer of a bounded size, which all blocks of a call take turns with, and
the softmax runs over the blocks with a running maximum and sum (the "online softmax" of Milakov and
Gimelshein, 2018). Extra memory is at most `EXTRA_BYTES`, whatever the batch, as long as one token's
keys of all heads fit the buffer and a head is at least 8 wide. Everything is summed in float32.

What costs time on a CPU is memory that was never touched before, where every 4 KiB is a page fault,
and small operations. So buffers are reused, and are no larger than the call needs; keys go straight
from their pages to where the matrix product wants them; and index arithmetic is NumPy's.

On a GPU the lengths and page indices are read back from the device, so this family waits there and
cannot be recorded in a CUDA graph; dispatch says so when it falls back to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from interop.draft_masks import WORD, Mask, unpacked_rows
from interop.plan import Launch
from interop.spec import AttentionSpec

from .protocol import Decision, IntArray, Lengths, Operands, Work, host_array
from .reference_rows import HostArray, Rows, Scratch

__all__ = ["EXTRA_BYTES", "ReferenceFamily"]

# Elements of one gathered block (keys, then values, of all its requests and heads) and of its
# logits: small enough to stay in a cache of a CPU, large enough that few operations are needed.
BLOCK_ELEMENTS = 1 << 20
LOGIT_ELEMENTS = 1 << 20
# Elements of a block's query and output rows, over all its requests.
ROW_ELEMENTS = 1 << 20
# The gathered block as it lies in the pages and widened, and its row indices; logits and masks;
# copies of rows on their way in and out.
EXTRA_BYTES = 4 * (3 * BLOCK_ELEMENTS + 2 * LOGIT_ELEMENTS + 6 * ROW_ELEMENTS)
# Where a running maximum starts: unlike -inf it can be subtracted from itself.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class _Call:
    """What all blocks of one call share."""

    spec: AttentionSpec
    operands: Operands
    rows: Rows
    scratch: Scratch
    tokens: int  # keys that a gathered block holds, over all its requests
    masks: Mask | None = None  # [tokens, width], which of its request's rows each row sees


class _Group(NamedTuple):
    """Requests that are worked on together; all fields are ``[requests]`` on the host."""

    first_row: HostArray
    query_lens: HostArray
    kv_lens: HostArray
    first_page: HostArray


def _groups(
    qo: HostArray, kv_lens: HostArray, first_page: HostArray, tokens: int, most: int
) -> Iterator[_Group]:
    """Split the busy requests into groups of up to `most`, alike in query length.

    The keys of a group, padded to its longest, fit `tokens`.
    """
    query_lens = qo[1:] - qo[:-1]
    busy = np.flatnonzero((query_lens > 0) & (kv_lens > 0))
    if not busy.size:
        return
    # Query lengths up to the same power of two go together; among them the longest caches first.
    classes = np.frexp(query_lens[busy] - 1)[1]
    order = np.lexsort((-kv_lens[busy], classes))
    chosen, classes = busy[order], classes[order]
    ends = np.flatnonzero(classes[1:] != classes[:-1]) + 1
    begin = 0
    for end in [*ends.tolist(), chosen.size]:
        while begin < end:
            longest = int(kv_lens[chosen[begin]])
            count = max(1, min(tokens // longest, most))
            pick = chosen[begin : min(end, begin + count)]
            yield _Group(qo[pick], query_lens[pick], kv_lens[pick], first_page[pick])
            begin += pick.size


class ReferenceFamily:
    """The reference kernel family."""

    name = "reference"
    recordable = False

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        paged = self.page_fields(launch)
        masks = ("draft_masks",) if launch.draft_masks else ()
        return ("qo_indptr", "kv_indptr", "kv_lens", *paged, *masks)

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("page_indices",) if launch.source == "pages" else ()

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`: it can do everything."""
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: there is one way."""
        return Decision()

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`: the constant says how many requests are worked on together."""
        alone = (1,) if work.invariant else ()
        masks = work.bucket.draft_masks
        launch = Launch(
            self.name, work.source, work.spec, work.cache, constants=alone, draft_masks=masks
        )
        return launch, {}

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`: there is no schedule."""

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        operands = operands.as_torch()
        spec, metadata = launch.spec, operands.metadata
        operands.out.zero_()
        if operands.lse is not None:
            operands.lse.fill_(-math.inf)
        qo, kv_lens = _host(metadata["qo_indptr"]), _host(metadata["kv_lens"])
        # A step's own keys start where its queries do.
        own = launch.source == "tokens" and launch.cache is not None
        first_page = qo if own else _host(metadata["kv_indptr"])
        width = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v)
        tokens = max(1, min(BLOCK_ELEMENTS // width, LOGIT_ELEMENTS // spec.num_qo_heads))
        scratch = Scratch(operands.query.device)
        rows = Rows.of(launch, operands, scratch)
        masks = None
        if launch.draft_masks:
            count = operands.query.shape[0]
            bits = host_array(metadata["draft_masks"]).reshape(count, -1)
            masks = unpacked_rows(bits, WORD * bits.shape[1])
        call = _Call(spec, operands, rows, scratch, tokens, masks)
        # Sums run in another order where a request is padded to the length of others.
        most = launch.constants[0] if launch.constants else ROW_ELEMENTS // _row_elements(spec)
        for group in _groups(qo, kv_lens, first_page, tokens, max(1, most)):
            _attend_group(call, group)


def _row_elements(spec: AttentionSpec) -> int:
    """Elements of one query row and its output row."""
    return spec.num_qo_heads * (spec.head_dim + spec.head_dim_v)


def _host(field: Any) -> HostArray:
    # Places in a large pool pass 2**31 when they are multiplied out.
    return host_array(field).astype(np.int64)


def _attend_group(call: _Call, group: _Group) -> None:
    """Attention of one group, in blocks of query rows that keep the logits small."""
    requests = group.kv_lens.size
    keys = min(int(group.kv_lens.max()), max(1, call.tokens // requests))
    step = min(
        LOGIT_ELEMENTS // (requests * call.spec.num_qo_heads * keys),
        ROW_ELEMENTS // (requests * _row_elements(call.spec)),
    )
    step = max(step, 1)
    longest = int(group.query_lens.max())
    for begin in range(0, longest, step):
        _attend_rows(call, group, np.arange(begin, min(begin + step, longest)))


def _attend_rows(call: _Call, group: _Group, offset: HostArray) -> None:
    """Attention of query rows `offset` ``[rows]`` of each request of a group."""
    spec, operands, scratch = call.spec, call.operands, call.scratch

    def place(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(operands.query.device)

    requests, rows = group.kv_lens.size, offset.size
    batch = requests * spec.num_kv_heads
    # The query heads of a KV head are rows of one matrix.
    heads = (requests, spec.num_kv_heads, rows, spec.group_size)
    row = group.first_row[:, None] + offset
    position = (group.kv_lens - group.query_lens)[:, None] + offset  # [requests, rows]
    # Rows past the end of a request are computed with the others, from any query, and left out.
    kept, source = None, row
    if offset[-1] >= group.query_lens.min():
        kept = np.flatnonzero(offset < group.query_lens[:, None])
        source = np.minimum(row, operands.query.shape[0] - 1)

    query = operands.query.index_select(0, place(source.ravel()))
    query = query.view(requests, rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
    query = query.transpose(1, 2).reshape(batch, -1, spec.head_dim).float() * spec.sm_scale

    # Keys that some row sees: first <= key < last, for each request.
    last, first = group.kv_lens[:, None], np.zeros((requests, 1), np.int64)
    masks = None
    if call.masks is not None:
        masks = call.masks[source]
    elif spec.causal:
        last = np.minimum(last, position[:, -1:] + 1)
    if spec.window_left >= 0:
        first = np.minimum(np.maximum(position[:, :1] - spec.window_left, 0), last - 1)
    begin, end, step = int(first.min()), int(last.max()), max(1, call.tokens // requests)

    top: Tensor | None = None
    for left in range(begin, end, step):
        seen = np.arange(left, min(left + step, end))
        # What no row sees may hold anything, NaN included, and 0 * NaN is NaN: a key that some row
        # sees stands in for it, and is masked.
        token = np.minimum(np.maximum(seen, first), last - 1)
        found = call.rows.find(group.first_page, token)
        key = call.rows.gather(call.rows.key, found)
        logits = scratch.take("logits", torch.float32, batch, query.shape[1], seen.size)
        torch.bmm(query, key.transpose(1, 2), out=logits)
        if spec.logits_soft_cap is not None:
            logits.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
        hidden = _hidden(spec, seen, first, last, position, spec.causal and masks is None)
        if masks is not None:
            hidden = _masked(masks, seen, group.kv_lens - group.query_lens, hidden)
        if hidden is not None:
            by_row = logits.view(*heads, -1)
            by_row.masked_fill_(place(hidden)[:, None, :, None], -math.inf)
        peak = logits.amax(-1, keepdim=True)
        peak = peak.clamp_min_(LOWEST) if top is None else torch.maximum(top, peak)
        weights = logits.sub_(peak).exp_()
        value = call.rows.gather(call.rows.value, found)
        if top is None:
            total = weights.sum(-1, keepdim=True)
            summed = torch.bmm(weights, value)
        else:
            shrink = top.sub_(peak).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            summed.mul_(shrink).baddbmm_(weights, value)
        top = peak
    assert top is not None  # every request of a group has keys

    # The largest weight is 1, so a sum below it is 0: that of a row whose logits are all -inf.
    total.clamp_min_(1.0)
    divisor = total
    if operands.sinks is not None:
        # Beside a sink far above all logits, infinity here, the output rounds to 0.
        sink = operands.sinks.view(spec.num_kv_heads, 1, spec.group_size)
        divisor = (sink - top.view(*heads)).exp_().view_as(total).add_(total)
    summed.div_(divisor)
    target = place(row.ravel() if kept is None else row.ravel()[kept])

    def put(out: Tensor, result: Tensor) -> None:
        result = result.view(*heads, -1).transpose(1, 2).reshape(requests * rows, *out.shape[1:])
        if kept is not None:
            result = result.index_select(0, place(kept))
        out.index_copy_(0, target, result.to(out.dtype))

    put(operands.out, summed)
    if operands.lse is not None:
        put(operands.lse, total.log_().add_(top).masked_fill_(top == LOWEST, -math.inf))


def _masked(masks: Mask, seen: HostArray, context: HostArray, hidden: Mask | None) -> Mask | None:
    """Add to `hidden` what masks ``[requests, rows, width]`` hide of keys `seen` ``[keys]``.

    `context` is ``[requests]``, tokens before each request's own.
    """
    column = seen - context[:, None]
    if (column < 0).all():
        return hidden
    inside = np.clip(column, 0, masks.shape[2] - 1)[:, None]
    shown = np.take_along_axis(masks, np.broadcast_to(inside, (*masks.shape[:2], seen.size)), 2)
    unseen: Mask = ~shown & (column >= 0)[:, None]
    return unseen if hidden is None else hidden | unseen


def _hidden(
    spec: AttentionSpec,
    seen: HostArray,
    first: HostArray,
    last: HostArray,
    position: HostArray,
    causal: bool,
) -> Mask | None:
    """Which of the keys `seen` ``[keys]`` a row does not see, ``[requests, rows or 1, keys]``.

    `None` where every row sees all of them. `first`, `last` ``[requests, 1]`` and `position`
    ``[requests, rows]`` as in `_attend_rows`; `causal` says whether rows see nothing after them.
    """
    rows = position.shape[1]
    if rows == 1 and seen[0] >= first.max() and seen[-1] < last.min():
        return None
    hidden = ((seen < first) | (seen >= last))[:, None]
    if rows > 1:
        if causal:
            hidden = hidden | (seen > position[:, :, None])
        if spec.window_left >= 0:
            hidden = hidden | (seen < position[:, :, None] - spec.window_left)
    return hidden if hidden.any() else None
