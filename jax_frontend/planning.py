"""Plans for JAX: the core's plan, with its metadata as a JAX array."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import torch

from interop.batch import Bucket, RaggedBatch
from interop.dlpack import to_jax
from interop.errors import DeviceError
from interop.plan import AttentionPlan, PlanStatic
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.dispatch import device_facts
from torch_backend.host_planning import IntArray, NewBuffer, host_buffer, host_plan
from torch_backend.kernels import Device
from torch_backend.planning import check_cache_spec, uploaded

from .cache import default_device

__all__ = ["placed", "plan"]


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

    def make(facts: Device, new_buffer: NewBuffer) -> tuple[PlanStatic, IntArray]:
        return host_plan(
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

    return AttentionPlan(*placed(device, cache_spec, make))


def placed(
    device: object,
    cache_spec: CacheSpec | None,
    make: Callable[[Device, NewBuffer], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Make a plan on the host and bring its metadata to where JAX wants them.

    Parameters
    ----------
    device, cache_spec
        As for `plan`.
    make
        As for `torch_backend.planning.uploaded`, with what dispatch needs to know of the device
        before the buffer.

    Returns
    -------
    tuple
        What `make` returned, with the metadata as a JAX array.

    Raises
    ------
    ArgumentError, DeviceError
        For a cache spec or a device that is none, and devices on which the cache does not lie.
    """
    target, kind = _target_for(device, cache_spec)
    if kind == "cuda" and isinstance(target, jax.Device):
        # Through torch's memory: were a buffer of XLA's own allocated for each step, the memory of
        # the steps would move about, and recorded launches would have to be recorded again.
        where = torch.device("cuda", target.local_hardware_id)
        *parts, metadata = uploaded(where, partial(make, device_facts(where)))
        return (*parts, to_jax(metadata))
    # Devices of a sharding are taken to be alike.
    where = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
    *parts, buffer = make(device_facts(where), host_buffer)
    return (*parts, jax.device_put(buffer, target))


def _target_for(
    device: object, cache_spec: CacheSpec | None
) -> tuple[jax.Device | jax.sharding.Sharding, str]:
    """Where a plan's metadata go, and the kind of device in this library's words."""
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
