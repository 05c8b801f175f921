"""Plans made on the device from lengths that the host never sees, for PyTorch and for JAX."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from interop.batch import Bucket
from interop.chunking import choose_chunk
from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import DeviceShape, metadata_of
from interop.device_status import PlanStatus, check_arrays, check_bucket
from interop.errors import (
    ArgumentError,
    DeviceError,
    FrameworkError,
    PlanError,
    UnsupportedError,
)
from interop.fa2_shape import FA2Shape
from interop.plan import AttentionPlan, Launch, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import Part, Way, device_facts, serve, works_of
from .host_planning import check_specs
from .kernels import FAMILIES, Device
from .kernels.flashinfer_fa2 import MAX_SCRATCH_BYTES, NEVER_SPLIT, SPLIT, schedule_shape

__all__ = ["PlanStatus", "device_static", "plan_on_device", "planning_launch", "shape_of"]

# Kernels whose metadata follow from lengths by arithmetic. FA3's schedule is made by a heap, one
# request after another.
KERNELS = {"cpu": ("reference",), "cuda": ("fa2", "fa2_flashinfer", "reference")}


def device_static(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    bucket: Bucket,
    device: Device,
    *,
    kernel: str | None,
    split: bool | None,
    return_lse: bool,
    batch_invariant: bool = False,
) -> tuple[PlanStatic, DeviceShape]:
    """Choose the static part of a plan from its bucket alone, and say what to write for it.

    Parameters
    ----------
    spec, cache_spec, bucket, kernel, split, return_lse
        As for `plan_on_device`.
    device
        The device.

    Raises
    ------
    ArgumentError, PlanError, UnsupportedError
        As `plan_on_device` does.
    """
    if batch_invariant:
        raise UnsupportedError(
            "plan_on_device makes no batch-invariant plans: the schedules of fa2_invariant are "
            "written on the host. Use plan(..., batch_invariant=True)."
        )
    check_kind("spec", spec, AttentionSpec)
    check_kind("cache_spec", cache_spec, CacheSpec)
    check_kind("bucket", bucket, Bucket)
    check_specs(spec, cache_spec)
    check_bucket(bucket)
    splits = None if split is None else bool(split)
    return _static(spec, cache_spec, bucket, device, kernel, splits, bool(return_lse))


@lru_cache(maxsize=1024)
def _static(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    bucket: Bucket,
    device: Device,
    kernel: str | None,
    split: bool | None,
    lse: bool,
) -> tuple[PlanStatic, DeviceShape]:
    able = KERNELS[device.kind]
    name = able[0] if kernel is None else kernel
    if name not in able:
        raise ArgumentError(
            "kernel",
            given=repr(kernel),
            wanted=f"None, or one of {', '.join(able)}, which can be planned for on a "
            f"{device.kind} device",
            remedy="Plan on the host for others.",
        )
    dtype = spec.dtype or cache_spec.dtype
    rows = bucket.num_requests + 1
    work = works_of(spec, cache_spec, dtype, bucket, rows, device, lse)[0]
    if (reason := FAMILIES[name].refuse(work)) is not None:
        raise UnsupportedError(
            f"kernel {name!r}, for which plans can be made on the device, cannot serve attention "
            f"over pages: {reason}. Plan on the host, or pass kernel='reference', which is slow "
            "and waits for the device on every call."
        )
    served = serve(spec, cache_spec, dtype, bucket, rows, device, "raise", name, lse)
    variant, schedule, by_flashinfer = 0, None, name == "fa2_flashinfer"
    if name != "reference":
        variant = _variant(served.whole, bucket, split, by_flashinfer)
        schedule = _schedule(served.whole, variant)
    static = served.static(Way.WHOLE, (variant,))
    shape = DeviceShape(
        bucket,
        static.layout,
        cache_spec.page_size,
        cache_spec.num_pages,
        schedule,
        by_flashinfer,
    )
    return static, shape


def planning_launch(static: PlanStatic, shape: DeviceShape) -> Launch:
    """Describe the planning for a bucket so completely that any process can repeat it.

    The arguments are what `device_static` returned; `shape_of` reads the launch back.
    """
    bucket, schedule = shape.bucket, shape.schedule
    return Launch(
        family="plan",
        source=static.main[0].family,
        spec=static.spec,
        cache=static.cache,
        constants=(
            bucket.num_requests,
            bucket.num_tokens,
            bucket.num_pages,
            bucket.max_query_len,
            int(schedule is not None and schedule.split),
            int(static.lse),
        ),
    )


def shape_of(launch: Launch, device: Device) -> DeviceShape:
    """What to write for a launch that `planning_launch` made."""
    requests, tokens, pages, longest, split, lse = launch.constants
    assert launch.cache is not None
    return device_static(
        launch.spec,
        launch.cache,
        Bucket(requests, tokens, pages, longest),
        device,
        kernel=launch.source,
        split=bool(split),
        return_lse=bool(lse),
    )[1]


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `ArgumentError` unless `value` is of that kind."""
    if not isinstance(value, kind):
        raise ArgumentError(name, given=type(value).__name__, wanted=f"a {kind.__name__}")


def _variant(part: Part, bucket: Bucket, split: bool | None, by_flashinfer: bool) -> int:
    """Choose whether the bucket's schedule may split."""
    if by_flashinfer:
        if split is False:
            raise ArgumentError(
                "split", given="False with kernel 'fa2_flashinfer'", wanted="True: it always splits"
            )
        return SPLIT
    whole = _schedule(part, SPLIT)
    able = whole.scratch_bytes < MAX_SCRATCH_BYTES
    if split and not able:
        raise PlanError(
            "bucket",
            given=f"one whose partial results take {whole.scratch_bytes} bytes",
            wanted=f"fewer than {MAX_SCRATCH_BYTES}, which the kernel can count",
            remedy="Leave split out, or plan for fewer rows.",
        )
    if split is None:
        split = able and _splitting_pays(whole, bucket)
    return SPLIT if split else NEVER_SPLIT


def _splitting_pays(shape: FA2Shape, bucket: Bucket) -> bool:
    """Whether requests that have even shares of a bucket are served faster in chunks."""
    requests = min(bucket.num_requests, bucket.num_tokens)
    numbers = np.arange(requests, dtype=np.int64)
    query_lens = np.minimum((bucket.num_tokens + numbers) // requests, bucket.max_query_len)
    pages = (bucket.num_pages + numbers) // requests
    return choose_chunk(shape, query_lens, pages).split


def _schedule(part: Part, variant: int) -> FA2Shape:
    """Shape of the schedule that a launch reads, from what the launch says of it."""
    work, family = part
    launch, _ = family.shape(work, variant)
    info = launch.constants
    shape = schedule_shape(work, cta_tile_q=info[3], capacity=info[0])
    return replace(shape, split=bool(info[14]))


def plan_on_device(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    kv_lens: Tensor,
    cu_q_lens: Tensor,
    page_table: Tensor,
    *,
    bucket: Bucket,
    kernel: str | None = None,
    split: bool | None = None,
    return_lse: bool = True,
    into: AttentionPlan[Tensor] | None = None,
    batch_invariant: bool = False,
) -> tuple[AttentionPlan[Tensor], Tensor]:
    """Plan one step's attention from lengths on the device, without reading them on the host.

    Nothing waits, so this may be recorded in a CUDA graph, together with the step that uses the
    plan; call it once before, since the first call for a bucket loads what it launches. A replay
    plans from what the three tensors then hold.

    Parameters
    ----------
    spec, cache_spec
        As for `plan`; a cache is needed.
    kv_lens
        ``[requests]`` int32: tokens of each request, those that this step appends among them. Up to
        ``bucket.num_requests`` of them.
    cu_q_lens
        ``[requests + 1]`` int32: 0, then the running sum of the query lengths.
    page_table
        ``[requests, width]`` int32: the pages of each request in order. What comes after its last
        page is ignored. As `plan` refuses it and this cannot: two requests must not write to the
        same slot.
    bucket
        Sizes of the plan, without the promise ``without_context``.
    kernel
        ``"fa2"`` on a GPU when left out, also for long queries: FA3's schedule holds lengths and is
        made by a heap. ``"fa2_flashinfer"`` is FA2 on the schedule of FlashInfer's planner, and
        ``"reference"``, the one for the CPU, waits for the device.
    split
        Whether FA2 may split a request's keys among thread blocks. When left out, it may where a
        bucket with evenly long requests is served faster for it. Say `True` where a few requests
        are much longer than the others, which costs the others 2 to 3 %; without splitting, the
        schedule follows from the query lengths alone.
    return_lse
        As for `plan`.
    into
        A plan that an earlier call returned: its metadata are overwritten, and it is returned.
    batch_invariant
        As for `plan`, but only `False` can be served.

    Returns
    -------
    AttentionPlan, Tensor
        A plan with the static part of a host plan of the same kernel and variant, and
        ``[requests]`` int32 numbers of `PlanStatus`: 0 for requests that are served, else the
        reason why one is left out.

    Raises
    ------
    FrameworkError, DeviceError, DTypeError, ShapeError
        For tensors of another kind, device, element type or shape.
    PlanError, ArgumentError
        For a bucket or a kernel that cannot be planned for on the device, and for an `into` of
        another static part.
    UnsupportedError
        If FA2 cannot serve the request on this GPU, and for `batch_invariant`.
    """
    check_kind("bucket", bucket, Bucket)
    tensors = {"kv_lens": kv_lens, "cu_q_lens": cu_q_lens, "page_table": page_table}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise FrameworkError(
                name,
                given=f"{type(tensor).__module__}.{type(tensor).__name__}",
                wanted="a torch tensor",
                remedy="For lengths on the host make a RaggedBatch and call plan.",
            )
    check_arrays(bucket, kv_lens, cu_q_lens, page_table)
    check_kind("cache_spec", cache_spec, CacheSpec)
    for name, tensor in tensors.items():
        if tensor.device.type != cache_spec.device or tensor.device != kv_lens.device:
            raise DeviceError(
                name,
                given=str(tensor.device),
                wanted=f"a {cache_spec.device} device as the cache has, the same for all three",
            )
    static, shape = device_static(
        spec,
        cache_spec,
        bucket,
        device_facts(kv_lens.device),
        kernel=kernel,
        split=split,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    if into is None:
        words = torch.zeros(static.layout.words, dtype=torch.int32, device=kv_lens.device)
        into = AttentionPlan(static, words)
    elif into.static != static or into.metadata.device != kv_lens.device:
        raise PlanError(
            "into",
            given=f"a plan on {into.metadata.device} with another static part",
            wanted=f"one that plan_on_device made on {kv_lens.device} with the same arguments",
        )
    status = torch.empty_like(kv_lens)
    if kv_lens.device.type == "cuda":
        from .triton_planning import scratch_words, write_metadata

        scratch = torch.empty(scratch_words(shape), dtype=torch.int32, device=kv_lens.device)
        write_metadata(shape, kv_lens, cu_q_lens, page_table, into.metadata, status, scratch)
    else:
        arrays = (tensor.numpy() for tensor in tensors.values())
        words, numbers = metadata_of(NumPyArithmetic(), shape, *arrays)
        into.metadata.numpy()[:] = words
        status.numpy()[:] = numbers
    return into, status
