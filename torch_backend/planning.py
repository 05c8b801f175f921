"""From a batch to a plan: the metadata is written on the host and travels in one copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch, indptr
from interop.errors import ArgumentError, DeviceError, PlanError
from interop.plan import AttentionPlan, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import Choice, choose, device_facts, serve, static_plan, works_of
from .kernels import Device, Lengths

__all__ = ["explain", "host_plan", "plan"]

IntArray = npt.NDArray[np.int32]


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


def host_plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    bucket: Bucket | None,
    device: Device,
    fallback: str,
    new_buffer: Callable[[int], IntArray],
) -> tuple[PlanStatic, IntArray]:
    """Make a plan's static part and write its metadata into ``new_buffer(words)``, on the host.

    Both front ends call this; they differ in where the buffer goes afterwards. Arguments and errors
    are those of `plan`.
    """
    if not isinstance(batch, RaggedBatch):
        raise ArgumentError("batch", given=type(batch).__name__, wanted="a RaggedBatch")
    indices = slots = None
    if cache_spec is not None:
        check_specs(spec, cache_spec)
        indices = batch.page_indices(cache_spec.page_size, cache_spec.num_pages)
        slots = batch.slot_mapping(cache_spec.page_size, cache_spec.num_pages)
        kv_units, pages = batch.num_pages(cache_spec.page_size), indices.size
        query_dtype = spec.dtype or cache_spec.dtype
    else:
        kv_units, pages = batch.kv_lens, int(batch.kv_lens.sum())
        if spec.dtype is None:
            raise PlanError(
                "spec.dtype",
                given="none, and no cache to take it from",
                wanted="the element type of query, key and value",
            )
        query_dtype = spec.dtype
    requests = batch.num_requests
    if bucket is None:
        bucket, rows = Bucket.exactly(batch, pages), requests
    else:
        bucket.check(batch, pages)
        # One request more than the bucket holds: it owns the padding rows and has no keys, so
        # every kernel leaves 0 and -inf there.
        rows = bucket.num_requests + 1
    served = serve(spec, cache_spec, query_dtype, bucket, rows, device, fallback)
    paged = _lengths(batch, kv_units, rows, bucket.num_tokens)
    # Over its own rows a request has as many keys as queries.
    per_work = (paged, _lengths(batch, batch.query_lens, rows, bucket.num_tokens))[: len(served)]
    decisions = [
        family.decide(work, lengths)
        for (work, family), lengths in zip(served, per_work, strict=True)
    ]
    static = static_plan(served, tuple(decision.variant for decision in decisions))

    buffer = new_buffer(static.layout.words)
    fields = static.layout.views(buffer)
    fields["qo_indptr"][:] = paged.qo_indptr
    fields["kv_indptr"][:] = paged.kv_indptr
    fields["kv_lens"][:] = paged.kv_lens
    if cache_spec is not None:
        _fill(fields["kv_last_page_len"], batch.last_page_lens(cache_spec.page_size))
        _fill(fields["slot_mapping"], slots, pad=-1)
        _fill(fields["page_indices"], indices)
    launches = (static.main, static.own)
    for (work, family), launch, lengths, decision in zip(
        served, launches, per_work, decisions, strict=False
    ):
        assert launch is not None
        family.write(work, launch, lengths, decision, fields)
    return static, buffer


def _lengths(batch: RaggedBatch, kv_units: IntArray, rows: int, num_tokens: int) -> Lengths:
    """Lengths of a batch, padded to `rows` requests and `num_tokens` query rows."""
    if rows == batch.num_requests:
        return Lengths(batch.query_lens, batch.kv_lens, kv_units, batch.qo_indptr, indptr(kv_units))
    query, kv, units = (np.zeros(rows, np.int32) for _ in range(3))
    query[: batch.num_requests] = batch.query_lens
    query[-1] = num_tokens - batch.num_tokens
    kv[: batch.num_requests] = batch.kv_lens
    units[: batch.num_requests] = kv_units
    return Lengths(query, kv, units, indptr(query), indptr(units))


def _fill(field: IntArray, values: IntArray | None, pad: int = 0) -> None:
    assert values is not None
    field[: values.size] = values
    field[values.size :] = pad


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: torch.device | str | None = None,
    fallback: str = "warn",
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
        buffers.append(torch.empty(words, dtype=torch.int32, pin_memory=pinned))
        return buffers[0].numpy()

    static, _ = host_plan(
        spec, cache_spec, batch, bucket, device_facts(where), fallback, new_buffer
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
    if bucket is None:
        size = cache_spec.page_size if cache_spec is not None else 1
        bucket = Bucket.exactly(batch, int(batch.num_pages(size).sum()))
    dtype = spec.dtype or (cache_spec.dtype if cache_spec is not None else "float32")
    works = works_of(spec, cache_spec, dtype, bucket, batch.num_requests, device_facts(where))
    return tuple(choose(work) for work in works)


def _device(device: torch.device | str | None, cache_spec: CacheSpec | None) -> torch.device:
    kind = cache_spec.device if cache_spec is not None else torch.get_default_device().type
    where = torch.device(kind if device is None else device)
    if cache_spec is not None and where.type != cache_spec.device:
        raise DeviceError(
            "device", given=str(where), wanted=f"a {cache_spec.device} device, where the cache lies"
        )
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where
