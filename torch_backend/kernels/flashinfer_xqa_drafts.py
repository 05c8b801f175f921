"""XQA for several query tokens a request, in chains or trees: 9.0 and 12.x.

Requests may bring different numbers of tokens. Which of its own request's tokens each one sees is
said in bits, for chains as well, and a window counts by place in the cache. Both kinds of pages are
read by the kernel for 16-bit ones, which widens 8-bit ones and leaves the query as it is.
FlashInfer's wrapper does the same: the kernel that multiplies in 8 bits takes neither unequal
lengths nor all masks.

Like XQA for one token it needs no plan, reads whole pages and gives no LSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from interop.draft_masks import mask_words, ordered_rows
from interop.plan import Launch

from ..writing import token_major
from . import flashinfer_abi as abi
from .flashinfer_refusals import needs_capability, refuse_dtype, refuse_machine
from .flashinfer_xqa import (
    CAPABILITIES,
    KV_DTYPE,
    MOST_BLOCKS,
    MOST_HEADS,
    module_key,
    refuse_spec,
    write_page_table,
)
from .flashinfer_xqa_scratch import (
    Scratch,
    drafts_scratch_of,
    prepare,
    query_factor,
    row_blocks,
    warm,
)
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view

__all__ = ["XQADraftsFamily"]

# Longer queries are prefills, which kernels with larger tiles serve.
MOST_DRAFTS = 127

FIELDS = ("xqa_page_table", "xqa_kv_lens", "xqa_qo_indptr")
OWN_MASKS, UNUSED_ROWS = "xqa_masks", "xqa_unused_rows"


class XQADraftsFamily:
    """XQA over pages of the query's own type or of `KV_DTYPE`."""

    name = "xqa_drafts"
    recordable = True

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        masks = "draft_masks" if launch.draft_masks else OWN_MASKS
        unused = (UNUSED_ROWS,) if _Numbers(*launch.constants).padded else ()
        return (*FIELDS, masks, *unused)

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("xqa_page_table",)

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_machine(work)) is not None:
            return reason
        if work.device.capability not in CAPABILITIES:
            return needs_capability(work, "9.0, 12.0 or 12.1")
        if work.source != "pages" or work.cache is None:
            return "it reads pages, not rows of the call"
        if work.bucket.max_query_len < 2:
            return "it is for several query tokens a request, and the bucket admits one"
        if work.bucket.max_query_len > MOST_DRAFTS:
            return (
                f"it is for up to {MOST_DRAFTS} query tokens a request, and the bucket admits "
                f"{work.bucket.max_query_len}"
            )
        if (reason := refuse_dtype(work)) is not None:
            return reason
        if work.cache.dtype not in (KV_DTYPE, work.query_dtype):
            return f"it reads pages of {KV_DTYPE} or {work.query_dtype}, not of {work.cache.dtype}"
        if work.lse:
            return "it gives no LSE, and calls may ask for it: plan with return_lse=False"
        return refuse_spec(work.spec, work.cache.page_size) or _refuse_sizes(work)

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: how wide the table is, as a power of two."""
        busy = lengths.query_lens > 0
        return Decision((int(lengths.kv_units[busy].max(initial=1)) - 1).bit_length())

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        bucket, padded = work.bucket, work.num_requests > work.bucket.num_requests
        # The request that is padding is left out: it has more rows than any query, and no keys.
        numbers = _Numbers(
            num_sms=work.device.num_sms,
            requests=max(work.num_requests - padded, 1),
            rows=bucket.num_tokens,
            width=1 << variant,
            longest=bucket.max_query_len,
            padded=int(padded),
        )
        assert work.cache is not None
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=tuple(numbers),
            scratch_bytes=_places(work.spec, work.cache, numbers).total,
            draft_masks=bucket.draft_masks,
        )
        _load_early(launch, work.query_dtype)
        sizes = {
            "xqa_page_table": numbers.requests * numbers.width,
            "xqa_kv_lens": numbers.requests,
            "xqa_qo_indptr": numbers.requests + 1,
        }
        if not bucket.draft_masks:
            sizes[OWN_MASKS] = numbers.rows * mask_words(numbers.longest)
        if padded:
            sizes[UNUSED_ROWS] = -(-numbers.rows // 4)
        return launch, sizes

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; reads the field ``page_indices``, which is written before."""
        numbers = _Numbers(*launch.constants)
        query = lengths.query_lens[: numbers.requests]
        fields["xqa_qo_indptr"][:] = lengths.qo_indptr[: numbers.requests + 1]
        # Of requests without query rows nothing is read, but for their length.
        counted = lengths.kv_lens[: numbers.requests]
        np.maximum(counted, 1, out=fields["xqa_kv_lens"])
        busy = np.flatnonzero(query)
        table = fields["xqa_page_table"].reshape(numbers.requests, numbers.width)
        used = np.zeros((busy.size, numbers.width), np.int32)
        write_page_table(used, busy, lengths, fields["page_indices"])
        table.fill(0)
        table[busy] = used
        tokens = int(query.sum())
        if not launch.draft_masks:
            words = mask_words(numbers.longest)
            bits = fields[OWN_MASKS].reshape(numbers.rows, words)
            bits[:tokens] = ordered_rows(query, words, work.spec.causal)
            bits[tokens:] = 0
        if numbers.padded:
            fields[UNUSED_ROWS].view(np.uint8)[:] = (
                np.arange(4 * fields[UNUSED_ROWS].size) >= tokens
            )

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        spec, cache, metadata = launch.spec, launch.cache, operands.metadata
        assert cache is not None
        numbers = _Numbers(*launch.constants)
        call = _ready_drafts(launch, operands.out.device.index or 0)
        lens = metadata["xqa_kv_lens"]
        prepared = prepare(launch, call.places, operands, lens)
        key, value = operands.key, operands.value
        if cache.layout == "HND":
            key, value = (token_major(torch_view(pool), "HND") for pool in (key, value))
        call.function(
            False,  # not the kernel that multiplies in 8 bits
            numbers.num_sms,
            spec.num_kv_heads,
            spec.window_left + 1,
            query_factor(spec),
            prepared.query_factor,
            operands.out,
            1.0,
            prepared.query,
            operands.sinks,
            key,
            value,
            None,
            None,
            metadata["xqa_page_table"],
            numbers.width * cache.page_size,
            lens,
            numbers.requests,
            1.0,
            prepared.page_factor,
            numbers.longest,
            metadata["xqa_qo_indptr"],
            metadata["draft_masks" if launch.draft_masks else OWN_MASKS],
            prepared.semaphores,
            prepared.partials,
            # Launched early, it would read lengths and masks before what writes them has finished.
            False,
        )
        if cache.scales_per_head:
            from ..triton_ops import scale_output

            scales = torch_view(operands.scale_table), torch_view(operands.scale_layer)
            scale_output(torch_view(operands.out), *scales)
        if numbers.padded:
            unused = torch_view(metadata[UNUSED_ROWS]).view(torch.bool)[: numbers.rows]
            torch_view(operands.out).masked_fill_(unused[:, None, None], 0.0)


class _Numbers(NamedTuple):
    """The launch's constants."""

    num_sms: int
    requests: int
    rows: int
    width: int
    longest: int
    padded: int


class _Ready(NamedTuple):
    """A launch made ready on a device."""

    function: Any
    places: Scratch


@lru_cache(maxsize=4096)
def _ready_drafts(launch: Launch, device: int) -> _Ready:
    spec, cache = launch.spec, launch.cache
    assert cache is not None
    dtype = spec.dtype or cache.dtype
    key = module_key(spec, dtype, cache.dtype, cache.page_size, drafts=True)
    places = _places(spec, cache, _Numbers(*launch.constants))
    return _Ready(abi.load(key, device)["xqa_wrapper"], places)


def _places(spec: Any, cache: Any, numbers: _Numbers) -> Scratch:
    return drafts_scratch_of(
        spec,
        cache,
        numbers.num_sms,
        numbers.requests,
        numbers.rows,
        numbers.width,
        numbers.longest,
    )


def _load_early(launch: Launch, dtype: str) -> None:
    """Compile and load while a plan is made, not inside a custom call or a graph's recording."""
    if torch.cuda.is_available():
        call = _ready_drafts(launch, torch.cuda.current_device())
        assert launch.cache is not None
        warm(launch.spec, launch.cache, dtype, call.places.semaphores)


def _refuse_sizes(work: Work) -> str | None:
    """Which sizes it cannot count."""
    cache, bucket = work.cache, work.bucket
    assert cache is not None
    blocks = work.spec.num_kv_heads * row_blocks(work.spec, bucket.max_query_len)
    for size in (blocks, work.num_requests):
        if size > MOST_BLOCKS:
            return f"a grid of {size} blocks is more than the {MOST_BLOCKS} that a card launches"
    heads = cache.num_layers * cache.num_pages * cache.page_size * cache.num_kv_heads
    if heads >= MOST_HEADS:
        return f"a pool of {heads} heads has 2**32 or more, which it cannot count"
    return None
