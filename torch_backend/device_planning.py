"""Plans made on the device from lengths that the host never sees, for PyTorch and for JAX."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from interop.batch import Bucket
from interop.chunking import choose_chunk
from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import DeviceShape, metadata_of
from interop.device_schedule import counts_fit
from interop.device_status import PlanStatus, check_arrays, check_bucket
from interop.errors import ArgumentError, DeviceError, FrameworkError, PlanError
from interop.fa2_shape import FA2Shape
from interop.plan import AttentionPlan, Launch, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import Part, device_facts, serve
from .host_planning import check_specs
from .kernels import Device
from .kernels.flashinfer_fa2 import MAX_SCRATCH_BYTES, NEVER_SPLIT, SPLIT

__all__ = ["PlanStatus", "device_static", "plan_on_device"]

# Kernels whose metadata follow from lengths by arithmetic; FA3's schedule is made by a heap, which
# has no parallel form, and holds lengths of its own.
KERNELS = {"cpu": ("reference",), "cuda": ("fa2", "fa2_flashinfer")}


def device_static(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    bucket: Bucket,
    device: Device,
    *,
    kernel: str | None,
    split: bool | None,
    return_lse: bool,
    width: int,
) -> tuple[PlanStatic, DeviceShape]:
    """Choose the static part of a plan from its bucket alone, and what to write for it.

    Parameters
    ----------
    spec, cache_spec, bucket, kernel, split, return_lse
        As for `plan_on_device`.
    device
        The device.
    width
        Entries in a row of the page table.

    Raises
    ------
    ArgumentError, PlanError, UnsupportedError
        As `plan_on_device` does.
    """
    _check_kinds(spec, cache_spec, bucket)
    check_specs(spec, cache_spec)
    check_bucket(bucket)
    able = KERNELS[device.kind]
    if kernel is not None and kernel not in able:
        raise ArgumentError(
            "kernel",
            given=repr(kernel),
            wanted=f"None, or one of {', '.join(able)}: others cannot be planned for on a "
            f"{device.kind} device",
            remedy="Make the plan on the host for any other kernel.",
        )
    served = serve(
        spec,
        cache_spec,
        spec.dtype or cache_spec.dtype,
        bucket,
        bucket.num_requests + 1,
        device,
        "raise",
        kernel or able[0],
        bool(return_lse),
    )
    variant, schedule = 0, None
    if device.kind == "cuda":
        whole = _schedule(served.whole, SPLIT)
        variant = _variant(whole, bucket, kernel or able[0], split, min(width, bucket.num_pages))
        schedule = _schedule(served.whole, variant)
    static = served.static(False, (variant,))
    shape = DeviceShape(
        bucket,
        static.layout,
        cache_spec.page_size,
        cache_spec.num_pages,
        schedule,
        flashinfer_chunks=kernel == "fa2_flashinfer",
    )
    return static, shape


def _check_kinds(spec: object, cache_spec: object, bucket: object) -> None:
    for name, value, kind in (
        ("spec", spec, AttentionSpec),
        ("cache_spec", cache_spec, CacheSpec),
        ("bucket", bucket, Bucket),
    ):
        if not isinstance(value, kind):
            raise ArgumentError(name, given=type(value).__name__, wanted=f"a {kind.__name__}")


def _schedule(part: Part, variant: int) -> FA2Shape:
    """Shape of the schedule that a launch reads, from what the launch says of it."""
    work, family = part
    launch, _ = family.shape(work, variant)
    return _shape_of(launch, work.num_requests, work.device.num_sms)


def _shape_of(launch: Launch, num_requests: int, num_sms: int) -> FA2Shape:
    spec, info = launch.spec, launch.constants
    assert launch.cache is not None
    return FA2Shape(
        num_requests=num_requests,
        num_rows=info[1],
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_v=spec.head_dim_v,
        page_size=launch.cache.page_size,
        num_sms=num_sms,
        cta_tile_q=info[3],
        capacity=info[0],
        split=bool(info[14]),
        window_left=spec.window_left,
    )
