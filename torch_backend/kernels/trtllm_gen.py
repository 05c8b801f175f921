"""FlashInfer's TRTLLM-GEN kernels: decode and prefill on compute capability 10.0 and 10.3.

**Never run on hardware.** What is handed over was compared with the signatures and the sources of
the installed FlashInfer, and recorded calls were replayed on a CPU by what these document. Nobody
has launched the kernels from here, and nothing is known of their speed or accuracy.

They need no plan: a table of pages and a length for each request, and offsets where query lengths
differ. A request without keys would be left as it was in memory, so none is handed over without: it
reads one key of page 0, and its rows become 0 (their LSE -inf) afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.errors import UnsupportedError
from interop.plan import Launch
from interop.spec import FP8_DTYPES, NVFP4_DTYPES, dtype_name

from ..layouts import canonical
from . import flashinfer_abi as abi
from .flashinfer_fa import HEAD_DIMS
from .flashinfer_refusals import needs_capability, refuse_dtype, refuse_machine, refuse_widths
from .page_copies import write_valid_tokens
from .protocol import Decision, IntArray, Lengths, Operands, Work, torch_view
from .trtllm_gen_scratch import (
    Scratch,
    Sizes,
    Words,
    copied_pages,
    idle_operands,
    prepared,
    scratch_of,
    words_of,
)

__all__ = ["CAPABILITIES", "TrtllmGenFamily"]

CAPABILITIES = ((10, 0), (10, 3))
PAGE_SIZES = (16, 32, 64)
# For these there are kernels only where several query heads share a key head.
LARGE_PAGE_SIZES = (128, 256, 512, 1024)
KV_DTYPE = "float8_e4m3fn"
MODULE = abi.ModuleKey("trtllm_gen", "", 0)

# Queries up to this length are for the kernel that splits keys among thread blocks.
MOST_DECODE_QUERY_LEN = 8
MOST_SCRATCH_BYTES = 1 << 30
# The last dimension of a grid has one block for each request.
MOST_REQUESTS = 65535
# Strides are handed on as int32.
MOST_ELEMENTS = 2**31

# How 8-bit pages are widened for a bfloat16 query: keys and values each by themselves, which is
# what FlashInfer's own Python asks for.
SEPARATE_KV = 2


class TrtllmGenFamily:
    """One of the kernels over one way of reading pages.

    Parameters
    ----------
    name
        Name in plans and messages.
    context
        Whether it is the kernel for prefill, or the one for queries of up to
        `MOST_DECODE_QUERY_LEN` rows, which splits keys.
    copied
        Whether it is for 8-bit pages that are copied into 16-bit ones before, scales applied, as
        prefill has no kernel for a 16-bit query over 8-bit pages.
    """

    recordable = True

    def __init__(self, name: str, *, context: bool, copied: bool = False) -> None:
        self.name = name
        self._context = context
        self._copied = copied

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        own = (f"{self.name}_pages", f"{self.name}_lens")
        return ("page_indices", *own) if self._copied else own

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`; a table of copies knows nothing of layers."""
        return ("page_indices",) if self._copied else (f"{self.name}_pages",)

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_machine(work)) is not None:
            return reason
        if work.device.capability not in CAPABILITIES:
            return needs_capability(work, "10.0 or 10.3")
        if work.source != "pages" or work.cache is None:
            return "it reads pages, not rows of the call"
        for reason in (self._refuse_call(work), self._refuse_cache(work), _refuse_spec(work)):
            if reason is not None:
                return reason
        return self._refuse_sizes(work) or abi.why_no_cubins()

    def _refuse_call(self, work: Work) -> str | None:
        longest = work.bucket.max_query_len
        if work.bucket.num_tokens == 0:
            return "there are no query rows to launch it for"
        if self._context and longest <= MOST_DECODE_QUERY_LEN:
            return f"queries of {longest} rows are too short for the kernel for prefill"
        if not self._context and longest > MOST_DECODE_QUERY_LEN:
            return (
                f"it decodes up to {MOST_DECODE_QUERY_LEN} tokens a request, and the bucket admits "
                f"queries of {longest} rows"
            )
        if work.spec.sinks and work.lse:
            return "its LSE counts attention sinks, which LSE is not to: plan with return_lse=False"
        if work.spec.sinks and work.role != "all":
            # FA2 applies sinks to all rows, once the last launch is done.
            return "it leaves mixed batches with attention sinks to one launch"
        if work.role != "all" and work.lse:
            return "of a mixed batch its LSE would cover the rows of the other launch, too"
        if work.role != "all" and work.cache is not None and work.cache.quantized:
            # FA2 applies the scales of values to all rows, once the last launch is done.
            return "it leaves mixed batches over 8-bit pages to one launch of another family"
        return refuse_dtype(work)

    def _refuse_cache(self, work: Work) -> str | None:
        spec, cache = work.spec, work.cache
        assert cache is not None
        if cache.layout != "HND":
            return f"it reads pages of layout HND, not {cache.layout}"
        if cache.dtype in NVFP4_DTYPES:
            return (
                f"for {cache.dtype} it wants an 8-bit query, and the block scales of values by "
                "fours of tokens, where this cache has them token by token"
            )
        if self._copied:
            wanted: tuple[str, ...] = FP8_DTYPES
        elif self._context:
            wanted = (work.query_dtype,)
        else:
            wanted = (work.query_dtype, KV_DTYPE)
        if cache.dtype not in wanted:
            return f"it reads pages of {' and '.join(wanted)}, not of {cache.dtype}"
        if cache.quantized and not self._copied:
            if cache.scales_per_head:
                return "it takes one scale for all heads, and this cache has one for each"
            if spec.window_left >= 0 and work.bucket.max_query_len > 1:
                return (
                    "with a window over 8-bit pages, queries of several rows were reported to come "
                    "out wrong (flashinfer-ai/flashinfer issue 3864)"
                )
        if cache.page_size in LARGE_PAGE_SIZES and spec.group_size == 1:
            return (
                f"it reads pages of {cache.page_size} tokens only where several query heads share "
                "a key head"
            )
        if cache.page_size not in PAGE_SIZES + LARGE_PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES + LARGE_PAGE_SIZES))
            return f"it reads pages of {sizes} tokens, not of {cache.page_size}"
        return None

    def _refuse_sizes(self, work: Work) -> str | None:
        cache, sizes = work.cache, self._sizes(work, 0)
        assert cache is not None
        if sizes.requests > MOST_REQUESTS:
            return (
                f"a grid of {sizes.requests} requests is more than the {MOST_REQUESTS} that a card "
                "launches"
            )
        page = cache.page_size * cache.num_kv_heads * cache.head_dim
        if page >= MOST_ELEMENTS:
            return f"a page of {page} elements is 2**31 or more, which it cannot count"
        total = self._scratch(work.spec, cache, sizes, work.query_dtype).total
        if total > MOST_SCRATCH_BYTES:
            return f"it would need {total} bytes of scratch, more than {MOST_SCRATCH_BYTES}"
        return None

    def _sizes(self, work: Work, variant: int) -> Sizes:
        bucket = work.bucket
        one_token = not self._context and bucket.max_query_len == 1
        return Sizes(
            num_sms=work.device.num_sms,
            # Of queries of one token each, padding rows are requests as well.
            requests=bucket.num_tokens if one_token else bucket.num_requests,
            rows=bucket.num_tokens,
            width=1 << variant,
            max_query_len=bucket.max_query_len,
            pages=max(bucket.num_pages, 1) if self._copied else 0,
            lse=int(work.lse),
        )

    def _scratch(self, spec: Any, cache: Any, sizes: Sizes, dtype: str) -> Scratch:
        rounds = cache.quantized and not self._context and dtype == "float16"
        return scratch_of(spec, cache, sizes, context=self._context, rounds=rounds)

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`; the variant is the table's width, as a power of two."""
        busy = lengths.query_lens > 0
        return Decision((int(lengths.kv_units[busy].max(initial=1)) - 1).bit_length())

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        assert work.cache is not None
        sizes = self._sizes(work, variant)
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=tuple(sizes),
            scratch_bytes=self._scratch(work.spec, work.cache, sizes, work.query_dtype).total,
        )
        if torch.cuda.is_available() and torch.cuda.get_device_capability() in CAPABILITIES:
            where = torch.device("cuda", torch.cuda.current_device())
            _warm(self, launch, work.query_dtype, where)
        words = words_of(sizes, context=self._context).total
        return launch, {
            f"{self.name}_pages": sizes.requests * sizes.width,
            f"{self.name}_lens": words,
        }

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; reads the field ``page_indices``, which is written before."""
        sizes = Sizes(*launch.constants)
        at = words_of(sizes, context=self._context)
        words = fields[f"{self.name}_lens"]
        words.fill(0)
        each_row = np.arange(lengths.query_lens.size).repeat(lengths.query_lens)
        start = int(lengths.qo_indptr[lengths.first])
        flags = words[at.no_keys :].view(np.uint8)[: sizes.rows]
        flags[start : start + each_row.size] = lengths.kv_lens[each_row] == 0
        # Rows of the block table: each row of queries of one token, or each request that has rows.
        if at.q_indptr < 0:
            request = each_row
        else:
            request = np.flatnonzero(lengths.query_lens)
            if request.size and not lengths.kv_lens[request[-1]]:
                request = request[:-1]  # the padding
            q_indptr = words[at.q_indptr :][: sizes.requests + 1]
            q_indptr[: request.size] = lengths.qo_indptr[request]
            q_indptr[request.size :] = lengths.qo_indptr[request[-1] + 1] if request.size else 0
        lens = words[at.lens :][: sizes.requests]
        lens.fill(1)
        np.maximum(lengths.kv_lens[request], 1, out=lens[: request.size])
        if at.kv_indptr >= 0:
            # Offsets in pages, of whole tables that follow one another.
            counted = -(-lens // launch.cache.page_size) if launch.cache is not None else lens
            np.cumsum(counted, out=words[at.kv_indptr + 1 :][: sizes.requests])
        table = fields[f"{self.name}_pages"].reshape(sizes.requests, sizes.width)
        table.fill(0)
        columns = np.arange(sizes.width)
        in_use = columns < lengths.kv_units[request][:, None]
        places = (lengths.kv_indptr[request][:, None] + columns)[in_use]
        if self._copied:
            # Of the copies page 0 is nobody's.
            table[: request.size][in_use] = places + 1
            assert launch.cache is not None
            valid = words[at.valid_tokens :][: sizes.pages]
            write_valid_tokens(valid, lengths, launch.cache.page_size)
        else:
            table[: request.size][in_use] = fields["page_indices"][places]

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        spec, cache = launch.spec, launch.cache
        assert cache is not None
        sizes, operands = Sizes(*launch.constants), operands.as_torch()
        call = _ready(
            self, launch, dtype_name(operands.query.dtype), operands.out.device.index or 0
        )
        at, places, scratch = call.words, call.places, operands.scratch
        words = torch_view(operands.metadata[f"{self.name}_lens"])
        table = torch_view(operands.metadata[f"{self.name}_pages"])
        # The decodes of a mixed batch have the first rows only.
        query, out = operands.query[: sizes.rows], operands.out[: sizes.rows]
        key, value = operands.key, operands.value
        scales: tuple[Any, Any] = (spec.sm_scale, 1.0)
        if self._copied:
            key, value = copied_pages(operands, places, sizes, cache, words[at.valid_tokens :])
        elif cache.quantized:
            query, scales = prepared(query, operands, places, spec.sm_scale)
        counters = scratch[: places.counters]
        workspace = scratch[places.workspace :]
        lse = None if operands.lse is None else canonical(operands.lse)
        values = abi.TRTLLM_GEN_UNUSED | {
            "out": canonical(out),
            "query": canonical(query),
            "key_cache": canonical(key),
            "value_cache": canonical(value),
            "workspace_buffer": workspace,
            # The kernel leaves zeros behind, but scratch may hold anything before.
            "multi_ctas_kv_counter_buffer": counters.zero_(),
            "block_tables": table.view(sizes.requests, sizes.width),
            "seq_lens": words[at.lens :][: sizes.requests],
            "max_q_len": sizes.max_query_len,
            "max_kv_len": sizes.width * cache.page_size,
            "bmm1_scale": scales[0],
            "bmm2_scale": scales[1],
            "batch_size": sizes.requests,
            "window_left": spec.window_left,
            "sm_count": sizes.num_sms,
            "workspace_size": workspace.numel(),
            "cum_seq_lens_q": _part(words, at.q_indptr, sizes.requests + 1),
            "cum_seq_lens_kv": _part(words, at.kv_indptr, sizes.requests + 1),
            "attention_sinks": operands.sinks,
            "lse": lse,
            "lse_stride_tokens": 0 if lse is None else lse.stride(0),
            "lse_stride_heads": 0 if lse is None else lse.stride(1),
            "bf16q_fp8kv_transform_mode": (
                SEPARATE_KV if query.dtype == torch.bfloat16 and cache.quantized else 0
            ),
        }
        call.function(*(values[name] for name in call.names))
        no_keys = words[at.no_keys :].view(torch.bool)[: sizes.rows]
        out.masked_fill_(no_keys[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(no_keys[:, None], -math.inf)


class _Ready(NamedTuple):
    """A launch made ready on a device."""

    function: Any
    names: tuple[str, ...]
    words: Words
    places: Scratch


@lru_cache(maxsize=4096)
def _ready(family: TrtllmGenFamily, launch: Launch, dtype: str, device: int) -> _Ready:
    context, sizes = family._context, Sizes(*launch.constants)
    name = f"trtllm_paged_attention_{'context' if context else 'decode'}"
    function = abi.load(MODULE, device)[name]
    places = family._scratch(launch.spec, launch.cache, sizes, dtype)
    names = abi.SIGNATURES["trtllm_gen"][name]
    return _Ready(function, names, words_of(sizes, context=context), places)


def _refuse_spec(work: Work) -> str | None:
    spec = work.spec
    if not spec.causal and work.bucket.max_query_len > 1:
        return "it masks keys after each query, and attention is asked for without that mask"
    if spec.logits_soft_cap is not None:
        return "it has no soft cap on the logits"
    if spec.head_dim not in HEAD_DIMS:
        return f"it was compiled for head_dim {HEAD_DIMS}, not for {spec.head_dim}"
    if (reason := refuse_widths(spec)) is not None:
        return reason
    if spec.sm_scale < 0:
        return f"a negative sm_scale, here {spec.sm_scale}, was never tried with it"
    return None


def _part(words: Tensor, start: int, count: int) -> Tensor | None:
    return None if start < 0 else words[start : start + count]


@lru_cache(maxsize=4096)
def _warm(family: TrtllmGenFamily, launch: Launch, dtype: str, where: torch.device) -> None:
    """Run a launch once on a page of zeros, while a plan is made.

    Its kernel is chosen by the launch's numbers and loaded when it is first used, which a custom
    call or a graph's recording must not do.
    """
    at = words_of(Sizes(*launch.constants), context=family._context)
    try:
        family.run(launch, idle_operands(launch, at, getattr(torch, dtype), where))
    except Exception as error:
        raise UnsupportedError(
            f"TRTLLM-GEN cannot load or run a kernel for {family.name} here: {error}. Plan with "
            "kernel='fa2'."
        ) from error
