"""From a batch to a plan: the metadata is written on the host and travels in one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.errors import ArgumentError, DeviceError, PlanError
from interop.plan import AttentionPlan, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .cache import device_of
from .dispatch import Choice, cascade_of, choose, device_facts, works_of
from .host_planning import IntArray, NewBuffer, check_kinds, check_specs, host_plan
from .kernels.cascade import cascade_pays

__all__ = [
    "check_cache_spec",
    "check_lse",
    "check_without_cache",
    "device_for",
    "explain",
    "plan",
    "uploaded",
]


def check_lse(static: PlanStatic, return_lse: bool) -> None:
    """Raise `PlanError` where a call asks for the LSE, and its plan was made without."""
    if return_lse and not static.lse:
        raise PlanError(
            "return_lse",
            given="True with a plan made with return_lse=False",
            wanted="a plan that may be asked for the LSE",
            remedy="Leave return_lse out of plan: it then chooses kernels that give the LSE.",
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


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: torch.device | str | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
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
    return_lse
        Whether calls may ask for the LSE. With `False` a kernel that gives none may serve, which is
        the fastest for one-token decode from a cache of ``float8_e4m3fn`` on an H100 or H200.
    batch_invariant
        Whether a request's output and LSE must have the same bits whatever else is in the batch,
        wherever it stands there, and whatever the bucket. Only ``"fa2_invariant"`` and
        ``"reference"`` promise it; see docs/invariance.md for what it costs.

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
    where = device_for(device, cache_spec)

    def make(new_buffer: NewBuffer) -> tuple[PlanStatic, IntArray]:
        return host_plan(
            spec,
            cache_spec,
            batch,
            bucket,
            device_facts(where),
            fallback,
            kernel,
            new_buffer,
            return_lse,
            batch_invariant,
        )

    return AttentionPlan(*uploaded(where, make))


def uploaded(where: torch.device, make: Callable[[NewBuffer], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Make a plan on the host and copy its metadata to a device.

    Parameters
    ----------
    where
        The device.
    make
        ``make(new_buffer)`` writes the metadata into ``new_buffer(words)``, of which it asks for
        one, and returns it last, behind all else that the plan consists of.

    Returns
    -------
    tuple
        What `make` returned, with the metadata as a tensor on the device. The copy there is
        asynchronous on a GPU.
    """
    # torch's pinned allocator does not hand memory out again before the copies from it are done, so
    # a later plan can't overwrite a buffer whose copy is still in flight.
    pinned = where.type == "cuda"
    buffers: list[Tensor] = []

    def new_buffer(words: int) -> IntArray:
        buffers.append(torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=pinned))
        return buffers[0].numpy()

    *parts, _ = make(new_buffer)
    return (*parts, buffers[0].to(where, non_blocking=True))


def explain(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    device: torch.device | str | None = None,
    *,
    bucket: Bucket | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[Choice, ...]:
    """Say which kernel serves each part of a step, and for every other one why it does not.

    Parameters are those of `plan`. Print the results for people to read.
    """
    where = device_for(device, cache_spec)
    check_kinds(spec, batch, bucket)
    if cache_spec is not None:
        check_specs(spec, cache_spec)
    num_pages = int(batch.pages(cache_spec.page_size if cache_spec is not None else 1).indptr[-1])
    if bucket is None:
        bucket = Bucket.exactly(batch, num_pages)
    else:
        bucket.check(batch, num_pages)
    dtype = spec.dtype or (cache_spec.dtype if cache_spec is not None else "float32")
    facts = device_facts(where)
    works = works_of(
        spec, cache_spec, dtype, bucket, batch.num_requests, facts, return_lse, batch_invariant
    )
    choices = [choose(work) for work in works]
    if len(works) == 1 and (cascade := cascade_of(works[0])) is not None:
        work, family = cascade
        shared = batch.shared_pages(work.cache.page_size if work.cache is not None else 1)
        if cascade_pays(work, batch.query_lens, shared):
            note = f"all requests begin with the same {shared} pages"
            choices[0] = replace(choices[0], family=family.name, note=note)
    return tuple(choices)


def check_cache_spec(cache_spec: object) -> None:
    """Raise `ArgumentError` unless `cache_spec` is a `CacheSpec` or `None`."""
    if cache_spec is not None and not isinstance(cache_spec, CacheSpec):
        raise ArgumentError(
            "cache_spec",
            given=type(cache_spec).__name__,
            wanted="a CacheSpec, or None for attention without a cache",
            remedy="Pass cache.spec of a cache.",
        )


def device_for(device: torch.device | str | None, cache_spec: CacheSpec | None) -> torch.device:
    """Where a step runs, with its number; see `plan`."""
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
