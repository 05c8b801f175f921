"""FA2 for batch-invariant plans: a request's bits are the same whatever else is in the batch.

Tiles, chunks and merges are those of `interop.fa2_invariant`. A bucket of one token a request is
one launch; any other is two, decodes and then the rest, even where a batch has only one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from interop.errors import ArgumentError
from interop.fa2_invariant import decode_shape, plan_decodes, prefill_shape
from interop.plan import ALIGN_WORDS, Launch
from interop.schedule import FA2Shape, plan_fa2

from .flashinfer_fa2 import MAX_SCRATCH_BYTES, FA2Family, place_rows, schedule_shape
from .protocol import Decision, IntArray, Lengths, Work

__all__ = ["InvariantFA2Family"]

# Integers of FlashInfer's plan that are byte offsets into the schedule: rows in all, request, query
# tile, KV chunk, merges, partial results, chunk size, flags.
OFFSETS = (2, 4, 5, 6, 7, 8, 9, 12)


class InvariantFA2Family(FA2Family):
    """FA2 on schedules that leave each request alone."""

    name = "fa2_invariant"

    def refuse(self, work: Work) -> str | None:
        """See `KernelFamily.refuse`."""
        if not work.invariant:
            return "it serves plans made with batch_invariant=True"
        if (reason := super().refuse(work)) is not None:
            return reason
        try:
            decodes, _ = _shapes(work)
        except ArgumentError as error:
            return str(error)
        if decodes.scratch_bytes >= MAX_SCRATCH_BYTES:
            return (
                f"partial results of {work.bucket.num_pages} pages in chunks of a fixed size take "
                f"{decodes.scratch_bytes} bytes, not fewer than {MAX_SCRATCH_BYTES}"
            )
        return None

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """See `KernelFamily.decide`: there is one way."""
        return Decision()

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """See `KernelFamily.shape`."""
        launch, sizes = super().shape(work, variant)
        before, words = _places(work)
        if before:
            constants = list(launch.constants)
            for i in OFFSETS:
                # Without splitting there are no merges, and the kernel does not look there.
                constants[i] += 4 * before
            launch = replace(launch, constants=tuple(constants))
        schedule = next(name for name in sizes if name.endswith("schedule"))
        return launch, sizes | {schedule: words}

    def _write_schedule(
        self,
        work: Work,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        schedule = fields["fa2_schedule" if work.source == "pages" else "fa2_own_schedule"]
        if work.source == "tokens":
            fields["fa2_own_kv_indptr"][:] = lengths.kv_indptr
        shape, (before, _) = self._shape(work, decision.variant), _places(work)
        out = schedule[before : before + shape.schedule_words]
        if shape.split:
            plan_decodes(shape, lengths.query_lens, lengths.kv_units, lengths.qo_indptr, out)
        else:
            plan_fa2(shape, lengths.query_lens, out=out)
            place_rows(shape, lengths.qo_indptr, out)

    def _shape(self, work: Work, variant: int) -> FA2Shape:
        decodes, others = _shapes(work)
        return decodes if _is_decode(work) else others

    def _scales_output(self, launch: Launch) -> bool:
        # The last launch scales all rows, as it converts all LSE.
        return bool(launch.constants[-1])


def _is_decode(work: Work) -> bool:
    return work.role == "decodes" or work.bucket.max_query_len <= 1


@lru_cache(maxsize=4096)
def _shapes(work: Work) -> tuple[FA2Shape, FA2Shape]:
    """Shape of a launch for the decodes of a bucket, and of one for all others."""
    sizes = schedule_shape(work, cta_tile_q=1, capacity=1)
    padding = work.role == "all" and _is_decode(work)
    return decode_shape(sizes, work.bucket.num_pages, padding=padding), prefill_shape(sizes)


def _places(work: Work) -> tuple[int, int]:
    """Words of the schedule before that of this launch, and words of all."""
    decodes, others = _shapes(work)
    if work.role == "all":
        return 0, decodes.schedule_words
    before = -(-decodes.schedule_words // ALIGN_WORDS) * ALIGN_WORDS
    return 0 if work.role == "decodes" else before, before + others.schedule_words
