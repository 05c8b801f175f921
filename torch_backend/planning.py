"""From a batch to a plan: the metadata is written on the host and travels in one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.errors import ArgumentError, DeviceError, PlanError
from interop.plan import AttentionPlan, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .cache import device_of
from .dispatch import Choice, choose, device_facts, serve, works_of
from .kernels import Device, Lengths

__all__ = ["explain", "host_plan", "plan"]

IntArray = npt.NDArray[np.int32]


def _check_kinds(spec: object, batch: object, bucket: object) -> None:
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
    if spec.dtype is not None and spec.dtype != cache.dtype:
        raise PlanError(
            "spec.dtype",
            given=f"{spec.dtype} with a cache of {cache.dtype}",
            wanted="the element type of the cache",
            remedy="Leave dtype out, or make the cache with that type.",
        )


def check_without_cache(static: PlanStatic) -> None:
    """Raise `PlanError` where a plan is for a cache, and the call brings all keys itself."""
    if static.cache is not None:
        raise PlanError(
            "plan",
            given="a plan for a cache",
            wanted="a plan made with cache_spec=None",
            remedy="Use attend or paged_attention with this plan.",
        )


def host_plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    bucket: Bucket | None,
    device: Device,
    fallback: str,
    kernel: str | None,
    new_buffer: Callable[[int], IntArray],
) -> tuple[PlanStatic, IntArray]:
    """Make a plan's static part and write its metadata into ``new_buffer(words)``, on the host.

    Both front ends call this; they differ in where the buffer goes afterwards. Arguments and errors
    are those of `plan`.
    """
    _check_kinds(spec, batch, bucket)
    if cache_spec is not None:
        check_specs(spec, cache_spec)
        page_size = cache_spec.page_size
        indices = batch.page_indices(page_size, cache_spec.num_pages)
        slots = batch.slot_mapping(page_size)
        pages = batch.pages(page_size)
        query_dtype = spec.dtype or cache_spec.dtype
    else:
        # Without a cache a token is a page of its own.
        pages = batch.pages(1)
        if spec.dtype is None:
            raise PlanError(
                "spec.dtype",
                given="none, and no cache to take it from",
                wanted="the element type of query, key and value",
            )
        query_dtype = spec.dtype
    rows = batch.num_requests
    num_pages = int(pages.indptr[-1])
    if bucket is None:
        bucket = Bucket.exactly(batch, num_pages)
    else:
        bucket.check(batch, num_pages)
        # One request more than the bucket holds: it owns the padding rows and has no keys, so
        # every kernel leaves 0 and -inf there.
        rows = bucket.num_requests + 1
    served = serve(spec, cache_spec, query_dtype, bucket, rows, device, fallback, kernel)
    whole = _lengths(batch, pages.counts, pages.indptr, rows, bucket.num_tokens)
    decodes = _leading_decodes(batch) if served.mixed is not None else 0
    parts = served.parts(decodes > 0)
    lengths = _split(whole, decodes) if decodes else [whole]
    if served.own is not None:
        # Over its own rows a request has as many keys as queries.
        own = _lengths(batch, batch.query_lens, batch.qo_indptr, rows, bucket.num_tokens)
        lengths.append(own)
    decisions = [family.decide(work, lengths[i]) for i, (work, family) in enumerate(parts)]
    static = served.static(decodes > 0, tuple(decision.variant for decision in decisions))

    buffer = new_buffer(static.layout.words)
    fields = static.layout.views(buffer)
    fields["qo_indptr"][:] = whole.qo_indptr
    fields["kv_indptr"][:] = whole.kv_indptr
    fields["kv_lens"][:] = whole.kv_lens
    if cache_spec is not None:
        _fill(fields["kv_last_page_len"], pages.last_lens)
        _fill(fields["slot_mapping"], slots, pad=-1)
        _fill(fields["page_indices"], indices)
    launches = static.main if static.own is None else (*static.main, static.own)
    for i, (work, family) in enumerate(parts):
        family.write(work, launches[i], lengths[i], decisions[i], fields)
    return static, buffer


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


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: torch.device | str | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
) -> AttentionPlan[Tensor]:
    """Plan one step's attention for PyTorch.

    Parameters
    ----------
    spec
        The arithmetic.
    cache_spec
        ``cache.spec`` of the cache to read; `None` for attention without a cache, whose keys and
        values are then rows of the call (``spec.dtype`` has to be given).
    batch
        This step's requests.
    bucket
        Sizes to pad to, so that the static part stays the same from step to step; the batch's own
        sizes when left out.
    device
        Where the step runs; the current device of the cache's kind when left out.
    fallback
        What to do on a GPU where only the slow reference family can serve: ``"warn"`` once for a
        bucket, or ``"raise"``.
    kernel
        Name of the kernel family to use, as `explain` has them; the best that can serve when left
        out. ``"fa2_flashinfer"`` is FA2 on the schedule of FlashInfer's planner.

    Returns
    -------
    AttentionPlan
        With its metadata on `device`. The copy there is asynchronous on a GPU.

    Raises
    ------
    ShapeError, LengthError, PageError, SlotError
        For a page table that does not fit the lengths or the pool.
    PlanError
        For a batch that does not fit the bucket, or a cache that does not fit the spec.
    UnsupportedError
        If no kernel can serve the request; the message has each kernel's reason.
    """
    where = _device(device, cache_spec)
    # torch's pinned allocator does not hand memory out again before the copies from it are done, so
    # a later plan can't overwrite a buffer whose copy is still in flight.
    pinned = where.type == "cuda"
    buffers: list[Tensor] = []

    def new_buffer(words: int) -> IntArray:
        buffers.append(torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=pinned))
        return buffers[0].numpy()

    static, _ = host_plan(
        spec, cache_spec, batch, bucket, device_facts(where), fallback, kernel, new_buffer
    )
    return AttentionPlan(static, buffers[0].to(where, non_blocking=True))


def explain(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    device: torch.device | str | None = None,
    *,
    bucket: Bucket | None = None,
) -> tuple[Choice, ...]:
    """Say which kernel serves each part of a step, and for every other one why it does not.

    Parameters are those of `plan`. Print the results for people to read.
    """
    where = _device(device, cache_spec)
    _check_kinds(spec, batch, bucket)
    if cache_spec is not None:
        check_specs(spec, cache_spec)
    num_pages = int(batch.pages(cache_spec.page_size if cache_spec is not None else 1).indptr[-1])
    if bucket is None:
        bucket = Bucket.exactly(batch, num_pages)
    else:
        bucket.check(batch, num_pages)
    dtype = spec.dtype or (cache_spec.dtype if cache_spec is not None else "float32")
    works = works_of(spec, cache_spec, dtype, bucket, batch.num_requests, device_facts(where))
    return tuple(choose(work) for work in works)


def check_cache_spec(cache_spec: object) -> None:
    """Raise `ArgumentError` unless `cache_spec` is a `CacheSpec` or `None`."""
    if cache_spec is not None and not isinstance(cache_spec, CacheSpec):
        raise ArgumentError(
            "cache_spec",
            given=type(cache_spec).__name__,
            wanted="a CacheSpec, or None for attention without a cache",
            remedy="Pass cache.spec of a cache.",
        )


def _device(device: torch.device | str | None, cache_spec: CacheSpec | None) -> torch.device:
    check_cache_spec(cache_spec)
    kind = cache_spec.device if cache_spec is not None else torch.get_default_device().type
    where = device_of(kind if device is None else device)
    if cache_spec is not None and where.type != cache_spec.device:
        raise DeviceError(
            "device", given=str(where), wanted=f"a {cache_spec.device} device, where the cache lies"
        )
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where
