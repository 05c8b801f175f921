"""Attention in plain PyTorch, on any device: the family that every other one is measured by.

Requests of similar length are worked on together: their pages are gathered into buffers of a fixed
size, and the softmax runs over blocks of keys with a running maximum and sum (the "online softmax"
of Milakov and Gimelshein, 2018). Extra memory is at most `EXTRA_BYTES`, whatever the batch, as long
as one token's keys of all heads fit a buffer. Everything is accumulated in float32.

On a GPU the lengths are read back from the device, so this family waits there and cannot be
recorded in a CUDA graph; dispatch says so when it falls back to it.
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

from interop.plan import Launch
from interop.spec import AttentionSpec

from ..writing import token_major
from .protocol import Decision, IntArray, Lengths, Operands, Work

__all__ = ["EXTRA_BYTES", "ReferenceFamily"]

HostArray = npt.NDArray[np.int32]

# Elements of one gathered block (keys or values of all its requests and heads) and of its logits.
BLOCK_ELEMENTS = 1 << 21
LOGIT_ELEMENTS = 1 << 22
# Elements of a block's query and output rows, over all its requests.
ROW_ELEMENTS = 1 << 20
# Gathered and widened keys and values; logits, their exponentials and masks; copies of rows on
# their way in and out; float32 throughout.
EXTRA_BYTES = 4 * (4 * BLOCK_ELEMENTS + 4 * LOGIT_ELEMENTS + 6 * ROW_ELEMENTS)


@dataclass(frozen=True)
class _Rows:
    """Where the keys or the values of a call lie: in pages, or one row after another."""

    pool: Tensor  # [pages, page_size, heads, width]; rows count as pages of one token

    @classmethod
    def of(cls, buffer: Tensor, layout: str | None) -> _Rows:
        if layout is None:
            return cls(buffer.unsqueeze(1))
        return cls(token_major(buffer, layout))

    @property
    def page_size(self) -> int:
        return self.pool.shape[1]

    def block(self, pages: Tensor) -> Tensor:
        """Gather ``pages [requests, n]`` to float32 ``[requests, heads, n * page_size, width]``."""
        requests, count = pages.shape
        _, size, heads, width = self.pool.shape
        flat = pages.reshape(-1)
        # index_select copies whole pages where they are contiguous, so gather before transposing.
        if self.pool.is_contiguous():
            found = self.pool.index_select(0, flat)
        else:
            found = self.pool.transpose(1, 2).index_select(0, flat).transpose(1, 2)
        found = found.view(requests, count, size, heads, width).permute(0, 3, 1, 2, 4)
        out = torch.empty(found.shape, dtype=torch.float32, device=found.device)
        return out.copy_(found).view(requests, heads, count * size, width)


@dataclass(frozen=True)
class _Call:
    """What all blocks of one call share."""

    spec: AttentionSpec
    operands: Operands
    keys: _Rows
    values: _Rows
    pages: Tensor | None  # page_indices; `None` where rows follow one another
    tokens: int  # keys that a gathered block holds, over all its requests


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
    ends = np.append(np.flatnonzero(np.diff(classes)) + 1, chosen.size)
    begin = 0
    for end in ends.tolist():
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

    def fields(self, source: str) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        paged = ("page_indices",) if source == "pages" else ()
        return ("qo_indptr", "kv_indptr", "kv_lens", *paged)

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`: it can do everything."""
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: there is one way."""
        return Decision()

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        return Launch(self.name, work.source, work.spec, work.cache), {}

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
        pages: Tensor | None = None
        layout = None
        if launch.source == "pages":
            assert launch.cache is not None
            layout, pages = launch.cache.layout, metadata["page_indices"]
            first_page = _host(metadata["kv_indptr"])
        else:
            # A step's own keys start where its queries do.
            first_page = qo if launch.cache is not None else _host(metadata["kv_indptr"])
        keys = _Rows.of(operands.key, layout)
        values = _Rows.of(operands.value, layout)
        width = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v)
        tokens = max(keys.page_size, BLOCK_ELEMENTS // width)
        call = _Call(spec, operands, keys, values, pages, tokens)
        most = max(1, ROW_ELEMENTS // _row_elements(spec))
        for group in _groups(qo, kv_lens, first_page, tokens, most):
            _attend_group(call, group)


def _row_elements(spec: AttentionSpec) -> int:
    """Elements of one query row and its output row."""
    return spec.num_qo_heads * (spec.head_dim + spec.head_dim_v)


def _host(field: Tensor) -> HostArray:
    array: HostArray = field.cpu().numpy()
    return array


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


def _attend_rows(call: _Call, group: _Group, offset: npt.NDArray[np.int64]) -> None:
    """Attention of query rows `offset` ``[rows]`` of each request of a group."""
    spec, operands = call.spec, call.operands

    def place(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(operands.query.device)

    requests, rows = group.kv_lens.size, offset.size
    real = offset < group.query_lens[:, None]  # [requests, rows]
    row = group.first_row[:, None] + offset
    all_real = bool(real.all())
    target = place(row if all_real else row[real])
    position = (group.kv_lens - group.query_lens)[:, None] + offset  # [requests, rows]

    query = operands.query[place(np.minimum(row, operands.query.shape[0] - 1))].float()
    query = query.view(requests, rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(requests, spec.num_kv_heads, -1, spec.head_dim)
    query = query * spec.sm_scale

    # Keys that some row sees: first <= key < last, for each request.
    last, first = group.kv_lens, np.zeros_like(group.kv_lens)
    if spec.causal:
        last = np.minimum(last, position[:, -1] + 1)
    if spec.window_left >= 0:
        first = np.minimum(np.maximum(position[:, 0] - spec.window_left, 0), last - 1)
    size = call.keys.page_size
    step = max(size, call.tokens // requests // size * size)
    begin, end = int(first.min()) // size * size, int(last.max())

    top = query.new_full((*query.shape[:3], 1), -math.inf)
    total = torch.zeros_like(top)
    summed = query.new_zeros((*query.shape[:3], spec.head_dim_v))
    for left in range(begin, end, step):
        right = min(left + step, end)
        # Columns past a request's own pages are masked below; any page will do for them.
        column = np.arange(left // size, -(-right // size))
        column = np.minimum(column, ((last - 1) // size)[:, None])
        index = place(group.first_page[:, None] + column)
        page = index if call.pages is None else call.pages[index]
        key = call.keys.block(page)[:, :, : right - left]
        value = call.values.block(page)[:, :, : right - left]
        seen = np.arange(left, right)
        inside = (seen >= first[:, None]) & (seen < last[:, None])  # [requests, keys]
        if not inside.all():
            # What no row sees may hold anything, NaN included, and 0 * NaN is NaN.
            value = value.masked_fill_(place(~inside)[:, None, :, None], 0.0)
        logits = torch.matmul(query, key.transpose(2, 3))
        if spec.logits_soft_cap is not None:
            logits = logits.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
        visible = inside[:, None, :]
        if spec.causal and rows > 1:
            visible = visible & (seen <= position[:, :, None])
        if spec.window_left >= 0:
            visible = visible & (seen >= position[:, :, None] - spec.window_left)
        if not visible.all():
            by_head = logits.view(requests, spec.num_kv_heads, spec.group_size, rows, -1)
            by_head.masked_fill_(place(~visible)[:, None, None], -math.inf)
        peak = torch.maximum(top, logits.amax(-1, keepdim=True))
        floor = peak.masked_fill(peak == -math.inf, 0.0)
        weights = logits.sub_(floor).exp_()
        shrink = torch.exp(top - floor)
        total = total * shrink + weights.sum(-1, keepdim=True)
        summed = summed.mul_(shrink).add_(torch.matmul(weights, value))
        top = peak

    empty = total == 0.0
    summed = summed.div_(total.masked_fill(empty, 1.0)).masked_fill_(empty, 0.0)
    heads = (requests, spec.num_kv_heads, spec.group_size, rows)
    result = summed.view(*heads, spec.head_dim_v).permute(0, 3, 1, 2, 4).flatten(2, 3)
    result = result.to(operands.out.dtype)
    kept = None if all_real else place(real)
    operands.out[target] = result if kept is None else result[kept]
    if operands.lse is not None:
        lse = (top + total.masked_fill(empty, 1.0).log()).masked_fill_(empty, -math.inf)
        lse = lse.view(heads).permute(0, 3, 1, 2).flatten(2, 3)
        operands.lse[target] = lse if kept is None else lse[kept]
