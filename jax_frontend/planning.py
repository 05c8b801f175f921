"""Plans for JAX: the core's plan, with its metadata as a JAX array."""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt
import torch

from interop.batch import Bucket, RaggedBatch
from interop.dlpack import to_jax
from interop.errors import DeviceError
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.dispatch import device_facts
from torch_backend.host_planning import host_plan
from torch_backend.kernels import Device
from torch_backend.planning import check_cache_spec
from torch_backend.planning import plan as core_plan

from .cache import default_device

__all__ = ["facts_of", "plan", "target_for"]


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> AttentionPlan[jax.Array]:
    """Plan one step's attention for JAX, outside of ``jax.jit``.

    The result is a pytree with one leaf: pass it to the jitted step as an argument. Plans of one
    bucket have equal static parts, so the step is traced once per bucket; on a GPU a few times, as
    schedules that split long requests, and mixed batches, have static parts of their own.

    Parameters
    ----------
    spec, cache_spec, batch, bucket, fallback, kernel, return_lse, batch_invariant
        As for `torch_backend.plan`; under ``shard_map``, those of one shard.
    device
        Where the metadata goes; JAX's default device when left out.

    Raises
    ------
    ShapeError, LengthError, PageError, SlotError, PlanError, UnsupportedError
        As `torch_backend.plan` does.
    """
    target, kind = target_for(device, cache_spec)
    if kind == "cuda" and isinstance(target, jax.Device):
        core = core_plan(
            spec,
            cache_spec,
            batch,
            bucket=bucket,
            device=torch.device("cuda", target.local_hardware_id),
            fallback=fallback,
            kernel=kernel,
            return_lse=return_lse,
            batch_invariant=batch_invariant,
        )
        # Through torch's memory: were a buffer of XLA's own allocated for each step, the memory of
        # the steps would move about, and recorded launches would have to be recorded again.
        return AttentionPlan(core.static, to_jax(core.metadata))
    facts = facts_of(kind)

    def new_buffer(words: int) -> npt.NDArray[np.int32]:
        return np.empty(words, np.int32)

    static, buffer = host_plan(
        spec,
        cache_spec,
        batch,
        bucket,
        facts,
        fallback,
        kernel,
        new_buffer,
        return_lse,
        batch_invariant,
    )
    return AttentionPlan(static, jax.device_put(buffer, target))


def target_for(
    device: object, cache_spec: CacheSpec | None
) -> tuple[jax.Device | jax.sharding.Sharding, str]:
    """Where a plan's metadata go, and the kind of device in this library's words.

    Raises
    ------
    ArgumentError, DeviceError
        For a cache spec or a device that is none, and devices on which the cache does not lie.
    """
    check_cache_spec(cache_spec)
    target = device if device is not None else default_device()
    if not isinstance(target, (jax.Device, jax.sharding.Sharding)):
        raise DeviceError(
            "device",
            given=repr(device),
            wanted="a jax.Device, such as jax.devices()[0], or a jax.sharding.Sharding",
        )
    first = next(iter(target.device_set)) if isinstance(target, jax.sharding.Sharding) else target
    kind = "cpu" if first.platform == "cpu" else "cuda"
    if cache_spec is not None and cache_spec.device != kind:
        raise DeviceError(
            "device",
            given=f"{first.platform} (JAX's default device, where none is passed)",
            wanted=f"a {cache_spec.device} device, where the cache lies",
        )
    return target, kind


def facts_of(kind: str) -> Device:
    """What dispatch needs to know of the devices of a kind, which are taken to be alike."""
    return device_facts(torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0))
