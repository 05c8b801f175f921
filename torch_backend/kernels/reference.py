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
from typing import Any

import torch
from interop.plan import Launch
from interop.spec import AttentionSpec
from torch import Tensor

from .protocol import Lengths, Operands, Work

__all__ = ["EXTRA_BYTES", "ReferenceFamily"]

# Elements of one gathered block (keys or values of all its requests and heads) and of its logits.
BLOCK_ELEMENTS = 1 << 21
LOGIT_ELEMENTS = 1 << 22
# Gathered and widened keys and values, logits, their exponentials and one mask, float32 throughout.
EXTRA_BYTES = 4 * (4 * BLOCK_ELEMENTS + 4 * LOGIT_ELEMENTS)


@dataclass
class _Keys:
    """Where one side's (key or value) rows lie: pages of a pool, or rows one after another."""

    pool: Tensor  # [pages, page_size, heads, width], strided as the layout has it
    page_size: int

    @classmethod
    def of(cls, rows: Tensor, layout: str | None) -> _Keys:
        if layout is None:
            return cls(rows.unsqueeze(1), 1)
        pool = rows if layout == "NHD" else rows.transpose(1, 2)
        return cls(pool, pool.shape[1])

    def block(self, pages: Tensor) -> Tensor:
        """Gather ``pages [requests, n]`` into float32 ``[requests, heads, n * page_size, width]``."""
        requests, count = pages.shape
        _, size, heads, width = self.pool.shape
        flat = pages.reshape(-1)
        # index_select copies whole pages where they are contiguous, so gather before transposing.
        if self.pool.is_contiguous():
            found = self.pool.index_select(0, flat)
        else:
            found = self.pool.transpose(1, 2).index_select(0, flat).transpose(1, 2)
        found = found.view(requests, count, size, heads, width).permute(0, 3, 1, 2, 4)
        out = torch.empty(
            (requests, heads, count, size, width), dtype=torch.float32, device=found.device
        )
        return out.copy_(found).view(requests, heads, count * size, width)


@dataclass
class _Group:
    """Requests that are worked on together: rows of query and first pages of each."""

    first_row: Tensor  # [requests] first query row
    query_lens: Tensor  # [requests]
    kv_lens: Tensor  # [requests]
    first_page: Tensor  # [requests] offset into page_indices


def _groups(qo: Tensor, kv_lens: Tensor, starts: Tensor, tokens: int) -> Iterator[_Group]:
    """Split the requests into groups whose padded keys fit `tokens`, alike in query length."""
    query_lens = qo[1:] - qo[:-1]
    busy = torch.nonzero((query_lens > 0) & (kv_lens > 0)).flatten()
    if not busy.numel():
        return
    classes = torch.ceil(torch.log2(query_lens[busy].double())).long()
    # One stable sort by length, then one by class: groups are runs of the result.
    by_length = torch.argsort(kv_lens[busy], descending=True, stable=True)
    order = by_length[torch.argsort(classes[by_length], stable=True)]
    chosen = busy[order]
    sizes = torch.unique_consecutive(classes[order], return_counts=True)[1].tolist()
    begin = 0
    for size in sizes:
        end = begin + size
        while begin < end:
            longest = int(kv_lens[chosen[begin]])
            count = max(1, min(tokens // longest, end - begin))
            pick = chosen[begin : begin + count]
            yield _Group(qo[pick].long(), query_lens[pick].long(), kv_lens[pick].long(), starts[pick].long())
            begin += count


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

    def shape(self, work: Work) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        return Launch(self.name, work.source, work.spec, work.cache), {}

    def write(
        self, work: Work, launch: Launch, lengths: Lengths, fields: Mapping[str, Any]
    ) -> None:
        """See `KernelFamily.write`: there is no schedule."""

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        operands = operands.as_torch()
        spec, metadata = launch.spec, operands.metadata
        operands.out.zero_()
        if operands.lse is not None:
            operands.lse.fill_(-math.inf)
        qo = metadata["qo_indptr"].cpu()
        pages: Tensor | None = None
        layout = None
        if launch.source == "pages":
            assert launch.cache is not None
            layout, pages = launch.cache.layout, metadata["page_indices"]
            starts = metadata["kv_indptr"].cpu()
        else:
            starts = qo if launch.cache is not None else metadata["kv_indptr"].cpu()
        keys = _Keys.of(operands.key, layout)
        values = _Keys.of(operands.value, layout)
        width = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v)
        tokens = max(keys.page_size, BLOCK_ELEMENTS // width)
        for group in _groups(qo, metadata["kv_lens"].cpu(), starts, tokens):
            _attend_group(spec, operands, group, keys, values, pages, tokens)


def _attend_group(
    spec: AttentionSpec,
    operands: Operands,
    group: _Group,
    keys: _Keys,
    values: _Keys,
    pages: Tensor | None,
    tokens: int,
) -> None:
    """Attention of one group, in blocks of query rows."""
    requests = group.kv_lens.numel()
    block_tokens = min(int(group.kv_lens.max()), max(1, tokens // requests))
    logits_a_row = requests * spec.num_qo_heads * block_tokens
    step = max(1, LOGIT_ELEMENTS // logits_a_row)
    for begin in range(0, int(group.query_lens.max()), step):
        stop = min(begin + step, int(group.query_lens.max()))
        _attend_rows(spec, operands, group, keys, values, pages, tokens, begin, stop)


def _attend_rows(
    spec: AttentionSpec,
    operands: Operands,
    group: _Group,
    keys: _Keys,
    values: _Keys,
    pages: Tensor | None,
    tokens: int,
    begin: int,
    stop: int,
) -> None:
    """Attention of query rows ``begin .. stop`` of each request of a group."""
    device = operands.query.device
    requests, rows = group.kv_lens.numel(), stop - begin
    offset = torch.arange(begin, stop)
    real = offset < group.query_lens[:, None]  # [requests, rows]
    row = (group.first_row[:, None] + offset).clamp(max=operands.query.shape[0] - 1)
    position = (group.kv_lens - group.query_lens)[:, None] + offset
    # Keys that some row of the block sees: first .. last, for each request.
    last = group.kv_lens
    first = torch.zeros_like(last)
    if spec.causal:
        last = torch.minimum(last, position[:, -1] + 1).clamp(min=1)
    if spec.window_left >= 0:
        first = (position[:, 0] - spec.window_left).clamp(min=0)
        first = torch.minimum(first, last - 1)

    query = operands.query[row.to(device)].float() * spec.sm_scale
    query = query.view(requests, rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(requests, spec.num_kv_heads, -1, spec.head_dim)

    size = keys.page_size
    low = int(first.min()) // size * size
    high = int(last.max())
    width = max(size, tokens // requests // size * size)
    top = query.new_full((requests, spec.num_kv_heads, query.shape[2], 1), -math.inf)
    total = torch.zeros_like(top)
    summed = query.new_zeros((*top.shape[:3], spec.head_dim_v))
    for left in range(low, high, width):
        right = min(left + width, high)
        column = torch.arange(left // size, -(-right // size))
        # Columns past a request's own pages are masked below; any page will do for them.
        own = torch.minimum(column, ((last - 1) // size)[:, None])
        index = (group.first_page[:, None] + own).to(device)
        page = index if pages is None else pages[index]
        key = keys.block(page)[:, :, : right - left]
        value = values.block(page)[:, :, : right - left]
        seen = torch.arange(left, right)
        inside = (seen >= first[:, None]) & (seen < last[:, None])  # [requests, keys]
        if not bool(inside.all()):
            # What no row sees may hold anything, NaN included, and 0 * NaN is NaN.
            value = value.masked_fill_(~inside.to(device)[:, None, :, None], 0.0)
        logits = torch.matmul(query, key.transpose(2, 3))
        if spec.logits_soft_cap is not None:
            logits = torch.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
        visible = inside[:, None, :].expand(requests, rows, -1)
        if spec.causal:
            visible = visible & (seen <= position[:, :, None])
        if spec.window_left >= 0:
            visible = visible & (seen >= position[:, :, None] - spec.window_left)
        if not bool(visible.all()):
            hidden = ~visible.to(device)[:, None, None]
            logits = logits.view(requests, spec.num_kv_heads, spec.group_size, rows, -1)
            logits = logits.masked_fill_(hidden, -math.inf).flatten(2, 3)
        peak = torch.maximum(top, logits.amax(-1, keepdim=True))
        floor = peak.masked_fill(peak == -math.inf, 0.0)
        weights = logits.sub_(floor).exp_()
        shrink = torch.exp(top - floor)
        total = total * shrink + weights.sum(-1, keepdim=True)
        summed = summed * shrink + torch.matmul(weights, value)
        top = peak

    empty = total == 0.0
    result = (summed / total.masked_fill(empty, 1.0)).masked_fill_(empty, 0.0)
    shape = (requests, spec.num_kv_heads, spec.group_size, rows)
    result = result.view(*shape, spec.head_dim_v).permute(0, 3, 1, 2, 4)
    kept = real.to(device)
    target = row.to(device)[kept]
    operands.out[target] = result.flatten(2, 3)[kept].to(operands.out.dtype)
    if operands.lse is not None:
        lse = (top + total.masked_fill(empty, 1.0).log()).masked_fill_(empty, -math.inf)
        operands.lse[target] = lse.view(shape).permute(0, 3, 1, 2).flatten(2, 3)[kept]
