"""A plan's host side: the batch becomes integers, written into one buffer.

Both front ends call it; they differ in where the buffer goes afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from interop.batch import Bucket, RaggedBatch
from interop.draft_masks import mask_words
from interop.errors import ArgumentError, PlanError
from interop.plan import PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import Part, Served, Way, serve
from .kernels import Decision, Device, Lengths
from .kernels.cascade import cascade_pays

__all__ = ["NewBuffer", "check_kinds", "check_specs", "host_buffer", "host_plan", "host_plans"]

IntArray = npt.NDArray[np.int32]
NewBuffer = Callable[[int], IntArray]


def check_kinds(spec: object, batch: object, bucket: object) -> None:
    """Raise `ArgumentError` for the first argument that is of another kind."""
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError("spec", given=type(spec).__name__, wanted="an AttentionSpec")
    if not isinstance(batch, RaggedBatch):
        raise ArgumentError("batch", given=type(batch).__name__, wanted="a RaggedBatch")
    if bucket is not None and not isinstance(bucket, Bucket):
        raise ArgumentError("bucket", given=type(bucket).__name__, wanted="a Bucket, or None")


def check_specs(spec: AttentionSpec, cache: CacheSpec) -> None:
    """Raise `PlanError` where a cache does not have the heads and widths that `spec` reads."""
    for name in ("num_kv_heads", "head_dim", "head_dim_v"):
        if getattr(spec, name) != getattr(cache, name):
            raise PlanError(
                f"cache_spec.{name}",
                given=getattr(cache, name),
                wanted=f"{getattr(spec, name)}, as spec has it",
            )
    if cache.quantized:
        if spec.dtype is None:
            raise PlanError(
                "spec.dtype",
                given=f"none, and a cache of {cache.dtype}",
                wanted="the element type of query, key, value and output",
                remedy="Make the AttentionSpec with dtype='bfloat16', or whatever the model has.",
            )
    elif spec.dtype is not None and spec.dtype != cache.dtype:
        raise PlanError(
            "spec.dtype",
            given=f"{spec.dtype} with a cache of {cache.dtype}",
            wanted="the element type of the cache",
            remedy="Leave dtype out, or make the cache with that type.",
        )


def host_buffer(words: int) -> IntArray:
    """Make a buffer for metadata in plain host memory."""
    return np.empty(words, np.int32)


def host_plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    bucket: Bucket | None,
    device: Device,
    fallback: str,
    kernel: str | None,
    new_buffer: NewBuffer,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[PlanStatic, IntArray]:
    """Make a plan's static part and write its metadata into ``new_buffer(words)``, on the host.

    Both front ends call this; they differ in where the buffer goes afterwards. Arguments and errors
    are those of `plan`.
    """
    static, buffers = host_plans(
        spec,
        cache_spec,
        [batch],
        bucket,
        device,
        fallback,
        kernel,
        new_buffer,
        return_lse,
        batch_invariant,
    )
    return static, buffers[0]


def host_plans(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batches: Sequence[RaggedBatch],
    bucket: Bucket | None,
    device: Device,
    fallback: str,
    kernel: str | None,
    new_buffer: NewBuffer,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[PlanStatic, list[IntArray]]:
    """Plan several batches of equal query lengths with one static part, as `host_plan` plans one.

    They are the parts of one step that one program computes on several devices.
    """
    batch = batches[0]
    check_kinds(spec, batch, bucket)
    if cache_spec is not None:
        check_specs(spec, cache_spec)
        page_size, query_dtype = cache_spec.page_size, spec.dtype or cache_spec.dtype
    else:
        # Without a cache a token is a page of its own.
        if spec.dtype is None:
            raise PlanError(
                "spec.dtype",
                given="none, and no cache to take it from",
                wanted="the element type of query, key and value",
            )
        page_size, query_dtype = 1, spec.dtype
    rows = batch.num_requests
    num_pages = max(int(each.pages(page_size).indptr[-1]) for each in batches)
    if bucket is None:
        bucket = Bucket.exactly(batch, num_pages)
    else:
        bucket.check(batch, num_pages)
        # One request more than the bucket holds: it owns the padding rows and has no keys, so
        # every kernel leaves 0 and -inf there.
        rows = bucket.num_requests + 1
    served = serve(
        spec,
        cache_spec,
        query_dtype,
        bucket,
        rows,
        device,
        fallback,
        kernel,
        bool(return_lse),
        bool(batch_invariant),
    )
    wholes = [_whole(each, page_size, served, rows, bucket.num_tokens) for each in batches]
    way, decodes = _way(served, batches, wholes)
    prepared = [
        _Prepared.of(each, cache_spec, served, whole, way, decodes)
        for each, whole in zip(batches, wholes, strict=True)
    ]
    # Where batches need different variants, the highest serves all of them.
    decided = [each.decisions for each in prepared]
    variants = [max(each[i].variant for each in decided) for i in range(len(decided[0]))]
    static = served.static(way, tuple(variants))
    buffers = []
    for each in prepared:
        buffers.append(new_buffer(static.layout.words))
        each.write(static, variants, buffers[-1])
    return static, buffers


@dataclass(frozen=True)
class _Prepared:
    """A batch made ready to be written: everything that can be refused was."""

    parts: tuple[Part, ...]
    whole: Lengths
    lengths: list[Lengths]
    decisions: list[Decision]
    last_page_lens: IntArray
    slots: IntArray | None
    page_indices: IntArray | None
    draft_rows: IntArray | None

    @classmethod
    def of(
        cls,
        batch: RaggedBatch,
        cache_spec: CacheSpec | None,
        served: Served,
        whole: Lengths,
        way: Way,
        decodes: int,
    ) -> _Prepared:
        page_size, indices, slots = 1, None, None
        if cache_spec is not None:
            page_size = cache_spec.page_size
            indices = batch.page_indices(page_size, cache_spec.num_pages)
            slots = batch.slot_mapping(page_size)
        parts, bucket = served.parts(way), served.whole[0].bucket
        lengths = [whole]
        if way is Way.MIXED:
            by_length = served.by_length
            lengths = (
                _split_by_length(whole, batch.num_requests) if by_length else _split(whole, decodes)
            )
        if served.own is not None:
            # Over its own rows a request has as many keys as queries.
            rows = served.whole[0].num_requests
            own = _lengths(batch, batch.query_lens, batch.qo_indptr, rows, bucket.num_tokens)
            lengths.append(own)
        decisions = [family.decide(work, lengths[i]) for i, (work, family) in enumerate(parts)]
        masks = None
        if bucket.draft_masks:
            words = mask_words(bucket.max_query_len)
            masks = batch.draft_rows(words, served.whole[0].spec.causal)
        last_lens = batch.pages(page_size).last_lens
        return cls(parts, whole, lengths, decisions, last_lens, slots, indices, masks)

    def write(self, static: PlanStatic, variants: Sequence[int], buffer: IntArray) -> None:
        """Fill the metadata of a plan of these variants."""
        fields = static.layout.views(buffer)
        fields["qo_indptr"][:] = self.whole.qo_indptr
        fields["kv_indptr"][:] = self.whole.kv_indptr
        fields["kv_lens"][:] = self.whole.kv_lens
        if self.slots is not None and self.page_indices is not None:
            _fill(fields["kv_last_page_len"], self.last_page_lens)
            _fill(fields["slot_mapping"], self.slots, pad=-1)
            _fill(fields["page_indices"], self.page_indices)
        if self.draft_rows is not None:
            _fill(fields["draft_masks"], self.draft_rows.reshape(-1))
        launches = static.main if static.own is None else (*static.main, static.own)
        for i, (work, family) in enumerate(self.parts):
            decision = self.decisions[i]._replace(variant=variants[i])
            family.write(work, launches[i], self.lengths[i], decision, fields)


def _whole(
    batch: RaggedBatch, page_size: int, served: Served, rows: int, num_tokens: int
) -> Lengths:
    """Lengths of a batch for a launch over all of it."""
    pages = batch.pages(page_size)
    whole = _lengths(batch, pages.counts, pages.indptr, rows, num_tokens)
    if served.counts_shared:
        whole = replace(whole, shared_units=batch.shared_pages(page_size))
    return whole


def _way(
    served: Served, batches: Sequence[RaggedBatch], wholes: Sequence[Lengths]
) -> tuple[Way, int]:
    """Choose in which pieces batches are served, and say how many decodes come first."""
    if served.by_length:
        return Way.MIXED, 0
    if served.mixed is not None and (decodes := _leading_decodes(batches[0])):
        return Way.MIXED, decodes
    if served.cascade is not None:
        work, _ = served.cascade
        shares = zip(batches, wholes, strict=True)
        if all(cascade_pays(work, each.query_lens, whole.shared_units) for each, whole in shares):
            return Way.CASCADE, 0
    return Way.WHOLE, 0


def _leading_decodes(batch: RaggedBatch) -> int:
    """How many requests before the first with several query rows; 0 if there is none such."""
    return int((batch.query_lens > 1).argmax()) if batch.max_query_len > 1 else 0


def _split(whole: Lengths, decodes: int) -> list[Lengths]:
    """Lengths for a launch over the leading decodes, and for one over the rest."""
    left = Lengths(
        whole.query_lens[:decodes],
        whole.kv_lens[:decodes],
        whole.kv_units[:decodes],
        whole.qo_indptr[: decodes + 1],
        whole.kv_indptr[: decodes + 1],
    )
    rest = whole.query_lens.copy()
    rest[:decodes] = 0
    return [left, replace(whole, query_lens=rest, first=decodes)]


def _split_by_length(whole: Lengths, num_requests: int) -> list[Lengths]:
    """Lengths for a launch over the decodes, and for one over the rest and the padding."""
    decodes = whole.query_lens == 1
    decodes[num_requests:] = False
    return [
        replace(whole, query_lens=np.where(mine, whole.query_lens, np.int32(0)))
        for mine in (decodes, ~decodes)
    ]


def _lengths(
    batch: RaggedBatch, kv_units: IntArray, kv_indptr: IntArray, rows: int, num_tokens: int
) -> Lengths:
    """Lengths of a batch, padded to `rows` requests and `num_tokens` query rows."""
    count = batch.num_requests
    if rows == count:
        return Lengths(batch.query_lens, batch.kv_lens, kv_units, batch.qo_indptr, kv_indptr)
    query, kv, units = np.zeros((3, rows), np.int32)
    query[:count] = batch.query_lens
    query[-1] = num_tokens - batch.num_tokens
    kv[:count] = batch.kv_lens
    units[:count] = kv_units
    qo = np.empty(rows + 1, np.int32)
    _fill(qo, batch.qo_indptr, pad=batch.num_tokens)
    qo[-1] = num_tokens
    kv_all = np.empty(rows + 1, np.int32)
    _fill(kv_all, kv_indptr, pad=int(kv_indptr[-1]))
    return Lengths(query, kv, units, qo, kv_all)


def _fill(field: IntArray, values: IntArray, pad: int = 0) -> None:
    field[: values.size] = values
    if field.size > values.size:
        field[values.size :] = pad
