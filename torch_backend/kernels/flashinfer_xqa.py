"""FlashInfer's XQA kernels: decode of one token a request on compute capability 9.0 and 12.x.

They need no plan: a table of pages and a length for each query row. Each row's keys are cut into
the same number of parts, whose partial results are merged by the thread block that comes last;
blocks count themselves in semaphores.

Over 8-bit pages the kernel multiplies in 8 bits: it rounds the query to e4m3, beyond 448 to that,
and the softmax weights as well. Its copy engine brings pages whole, and values past a request's end
are multiplied by 0, so they must be finite, as all is that this library writes for finite values.

On 12.0 and 12.1 there is no such kernel: the one for 16-bit pages widens 8-bit ones. **That was
never run on hardware.**
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from interop.plan import ALIGN_WORDS, Launch
from interop.spec import AttentionSpec

from ..writing import token_major
from . import flashinfer_abi as abi
from .flashinfer_refusals import needs_capability, refuse_dtype, refuse_machine, refuse_widths
from .flashinfer_xqa_scratch import Scratch, prepare, query_factor, scratch_of, splits_of, warm
from .protocol import Decision, IntArray, KernelFamily, Lengths, Operands, Work, torch_view

__all__ = [
    "CAPABILITIES",
    "KV_DTYPE",
    "MOST_BLOCKS",
    "MOST_HEADS",
    "XQAFamily",
    "module_key",
    "refuse_spec",
    "write_page_table",
]

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (12, 0), (12, 1))
PAGE_SIZES = (16, 32, 64, 128)
KV_DTYPE = "float8_e4m3fn"
MOST_HEAD_DIM, MOST_GROUP = 256, 32
HEAD_DIM_STEP = 16
# The last dimension of a grid.
MOST_BLOCKS = 65535
# The kernel for 16-bit pages counts heads of the pool in 32 unsigned bits.
MOST_HEADS = 2**32

# All rows are cut into as many parts, whatever their lengths. Where a part is this long, and this
# many times what a block would have to do if the work of all rows were dealt evenly to two blocks
# on each multiprocessor, FA2's schedule is faster.
LONG_PART, UNEVEN = 2048, 3

# Variants from here on are those of the family that serves such batches. It serves others as well,
# so of the variants of several batches the highest serves all.
OTHERS = 32


class XQAFamily:
    """XQA over pages of one kind: 8-bit ones, or 16-bit ones.

    Parameters
    ----------
    name
        Name in plans and messages.
    quantized
        Whether it reads pages of `KV_DTYPE`, or of the query's own type.
    instead
        The family that serves batches of very uneven lengths, where it can.
    """

    recordable = True

    def __init__(self, name: str, *, quantized: bool, instead: KernelFamily | None = None) -> None:
        self.name = name
        self._quantized = quantized
        self._instead = instead

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.fields`."""
        return ("xqa_page_table", "xqa_rows")

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """See `KernelFamily.page_fields`."""
        return ("xqa_page_table",)

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if (reason := refuse_machine(work)) is not None:
            return reason
        if work.device.capability not in CAPABILITIES:
            return needs_capability(work, "9.0, 12.0 or 12.1")
        if (reason := self._refuse_call(work)) is not None:
            return reason
        assert work.cache is not None
        return refuse_spec(work.spec, work.cache.page_size) or self._refuse_sizes(work)

    def _refuse_call(self, work: Work) -> str | None:
        """What is asked of it that it does not do, whatever the shapes."""
        bucket = work.bucket
        if work.source != "pages" or work.cache is None:
            return "it reads pages, not rows of the call"
        if bucket.num_tokens == 0:
            return "there are no query rows to launch it for"
        if bucket.max_query_len != 1:
            return (
                "it decodes one token a request, and the bucket admits queries of "
                f"{bucket.max_query_len} rows"
            )
        if work.role != "all":
            return "it leaves the decodes of mixed batches to a family that serves prefills as well"
        if (reason := refuse_dtype(work)) is not None:
            return reason
        wanted = KV_DTYPE if self._quantized else work.query_dtype
        if work.cache.dtype != wanted:
            return f"it reads pages of {wanted}, not of {work.cache.dtype}"
        if work.lse:
            return "it gives no LSE, and calls may ask for it: plan with return_lse=False"
        return None

    def _refuse_sizes(self, work: Work) -> str | None:
        """Which sizes it cannot count."""
        cache, rows = work.cache, work.bucket.num_tokens
        assert cache is not None
        in_8_bits = self._quantized and not _widens(work)
        if (blocks := rows * (cache.num_kv_heads if in_8_bits else 1)) > MOST_BLOCKS:
            return f"a grid of {blocks} blocks is more than the {MOST_BLOCKS} that a card launches"
        heads = cache.num_layers * cache.num_pages * cache.page_size * cache.num_kv_heads
        if not in_8_bits and heads >= MOST_HEADS:
            return f"a pool of {heads} heads has 2**32 or more, which it cannot count"
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`.

        The variant says how wide the table is, as a power of two; from `OTHERS` on it is one of the
        family that serves instead.
        """
        busy = lengths.query_lens > 0
        kv_lens = lengths.kv_lens[busy]
        variant = (int(lengths.kv_units[busy].max(initial=1)) - 1).bit_length()
        other = self._instead
        if other is not None and _is_uneven(work, kv_lens, variant) and other.refuse(work) is None:
            decision = other.decide(work, lengths)
            return Decision(OTHERS + decision.variant, decision.detail)
        return Decision(variant)

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        if variant >= OTHERS:
            assert self._instead is not None
            return self._instead.shape(work, variant - OTHERS)
        assert work.cache is not None
        rows, width = work.bucket.num_tokens, 1 << variant
        # Where there is a request for padding. Others have at least the key of their own row.
        empty = int(work.num_requests > work.bucket.num_requests)
        widens = _widens(work)
        scratch = scratch_of(work.spec, work.cache, work.device.num_sms, rows, width, widens)
        launch = Launch(
            family=self.name,
            source=work.source,
            spec=work.spec,
            cache=work.cache,
            constants=(work.device.num_sms, rows, width, empty, *([1] if widens else [])),
            scratch_bytes=scratch.total,
        )
        _load_early(launch, work.query_dtype)
        words = _flags_at(rows) + -(-rows // 4) if empty else rows
        return launch, {"xqa_page_table": rows * width, "xqa_rows": words}

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """See `KernelFamily.write`; reads the field ``page_indices``, which is written before."""
        if launch.family != self.name:
            self._write_instead(work, launch, lengths, decision, fields)
            return
        _, rows, width, empty, *_ = launch.constants
        # A row is a request's only one; all rows of the request that is padding have no keys.
        request = np.arange(lengths.query_lens.size).repeat(lengths.query_lens)
        kv_lens = lengths.kv_lens[request]
        # The kernel reads at least one key of each row: without keys of its own, that of page 0.
        np.maximum(kv_lens, 1, out=fields["xqa_rows"][:rows])
        if empty:
            fields["xqa_rows"][_flags_at(rows) :].view(np.uint8)[:rows] = kv_lens == 0
        else:
            assert kv_lens.all()
        table = fields["xqa_page_table"].reshape(rows, width)
        write_page_table(table, request, lengths, fields["page_indices"])

    def _write_instead(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        other = self._instead
        assert other is not None
        # Another batch of the same plan may have asked for that family.
        detail = decision.detail or other.decide(work, lengths).detail
        other.write(work, launch, lengths, Decision(decision.variant - OTHERS, detail), fields)

    def run(self, launch: Launch, operands: Operands) -> None:
        """See `KernelFamily.run`."""
        spec, cache, metadata = launch.spec, launch.cache, operands.metadata
        assert cache is not None
        num_sms, rows, width, empty, *widens = launch.constants
        call = _ready(launch, operands.out.device.index or 0)
        lens = metadata["xqa_rows"]
        prepared = prepare(launch, call.places, operands, lens)
        key, value = operands.key, operands.value
        if cache.layout == "HND":
            key, value = (token_major(torch_view(pool), "HND") for pool in (key, value))
        call.function(
            cache.quantized and not widens,  # which of the two kernels
            num_sms,
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
            width * cache.page_size,
            lens,
            rows,
            1.0,
            prepared.page_factor,
            1,
            None,
            None,
            prepared.semaphores,
            prepared.partials,
            # Launched early, the 8-bit kernel would read lengths, pages and factors before what
            # writes them has finished.
            False,
        )
        if cache.scales_per_head:
            from ..triton_ops import scale_output

            scales = torch_view(operands.scale_table), torch_view(operands.scale_layer)
            scale_output(torch_view(operands.out), *scales)
        if empty:
            flags = torch_view(lens)[_flags_at(rows) :].view(torch.bool)[:rows]
            torch_view(operands.out).masked_fill_(flags[:, None, None], 0.0)


def refuse_spec(spec: AttentionSpec, page_size: int) -> str | None:
    """Why there is no compiled module for `spec` and pages of `page_size`; `None` if there is."""
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MOST_HEAD_DIM:
        return (
            f"it is compiled for head_dim up to {MOST_HEAD_DIM} in steps of {HEAD_DIM_STEP}, not "
            f"for {spec.head_dim}"
        )
    if (reason := refuse_widths(spec)) is not None:
        return reason
    if spec.group_size > MOST_GROUP:
        return f"it takes up to {MOST_GROUP} query heads for a key head, not {spec.group_size}"
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"it reads pages of {sizes} tokens, not of {page_size}"
    if spec.logits_soft_cap is not None:
        return "it has no soft cap on the logits"
    if spec.sm_scale < 0:
        return f"a negative sm_scale, here {spec.sm_scale}, was never tried with it"
    return None


def module_key(
    spec: AttentionSpec, dtype: str, kv_dtype: str, page_size: int, *, drafts: bool = False
) -> abi.ModuleKey:
    """Which compiled module decodes by `spec`; see `flashinfer_abi.ModuleKey`."""
    return abi.ModuleKey(
        "xqa",
        dtype,
        spec.head_dim,
        window=spec.window_left >= 0,
        kv_dtype=kv_dtype,
        page_size=page_size,
        group_size=spec.group_size,
        drafts=drafts,
    )


def write_page_table(
    table: IntArray, request: npt.NDArray[Any], lengths: Lengths, page_indices: IntArray
) -> None:
    """Write a row of pages for each request that is named, 0 after its own.

    Parameters
    ----------
    table
        ``[rows, width]``, written.
    request
        ``[rows]`` whose pages they are.
    lengths
        Of the batch.
    page_indices
        The plan's field, already written.
    """
    rows, width = table.shape
    counts = lengths.kv_units[request]
    # Runs of entries that are in use and of others, row after row.
    kinds, runs = np.zeros((rows, 2), np.bool_), np.empty((rows, 2), np.intp)
    kinds[:, 0], runs[:, 0] = True, counts
    np.subtract(width, counts, out=runs[:, 1])
    in_use = kinds.repeat(runs.reshape(-1)).reshape(rows, width)
    table.fill(0)
    if counts.sum() == lengths.kv_indptr[-1]:
        table[in_use] = page_indices[: lengths.kv_indptr[-1]]
    else:
        # Some requests have pages and are not named.
        places = lengths.kv_indptr[request][:, None] + np.arange(width)
        table[in_use] = page_indices[places[in_use]]


def _flags_at(rows: int) -> int:
    """Where flags of rows without keys stand after the rows' lengths, in words."""
    return -(-rows // ALIGN_WORDS) * ALIGN_WORDS


def _widens(work: Work) -> bool:
    """Whether 8-bit pages are read by the kernel for 16-bit ones."""
    assert work.cache is not None
    return work.cache.quantized and work.device.capability != HOPPER


def _is_uneven(work: Work, kv_lens: IntArray, variant: int) -> bool:
    spec, cache, num_sms = work.spec, work.cache, work.device.num_sms
    assert cache is not None
    seen = kv_lens if spec.window_left < 0 else np.minimum(kv_lens, spec.window_left + 1)
    rows, width = work.bucket.num_tokens, 1 << variant
    splits = splits_of(spec, cache, num_sms, rows, width, _widens(work))
    part = int(seen.max(initial=0)) // splits
    even = int(seen.sum(dtype=np.int64)) * spec.num_kv_heads / (2 * num_sms)
    return part >= LONG_PART and part > UNEVEN * even


class _Ready(NamedTuple):
    """A launch made ready on a device."""

    function: Any
    places: Scratch


@lru_cache(maxsize=4096)
def _ready(launch: Launch, device: int) -> _Ready:
    assert launch.cache is not None
    function = abi.load(_key_of(launch), device)["xqa_wrapper"]
    num_sms, rows, width, _, *widens = launch.constants
    return _Ready(function, scratch_of(launch.spec, launch.cache, num_sms, rows, width, *widens))


def _key_of(launch: Launch) -> abi.ModuleKey:
    spec, cache = launch.spec, launch.cache
    assert cache is not None
    return module_key(spec, spec.dtype or cache.dtype, cache.dtype, cache.page_size)


def _load_early(launch: Launch, dtype: str) -> None:
    """Compile and load while a plan is made, not inside a custom call or a graph's recording."""
    if torch.cuda.is_available():
        call = _ready(launch, torch.cuda.current_device())
        assert launch.cache is not None
        warm(launch.spec, launch.cache, dtype, call.places.semaphores)
