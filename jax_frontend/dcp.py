"""Decode context parallelism inside ``jax.shard_map``: a cache spread by token over a mesh axis.

The arithmetic is that of `torch_backend.dcp`; the collectives are XLA's, and the local attention
is the same custom call.

On virtual CPU devices, XLA may wait for itself forever where more than 32 steps with collectives
are in flight over all of them: read a result more often than that, or make twice as many devices
as ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interop.batch import Bucket, RaggedBatch
from interop.dcp import (
    DCPPlan,
    check_combine,
    context_bucket,
    context_spec,
    own_batch,
    own_bucket,
    own_spec,
)
from interop.errors import ArgumentError, CacheNotFoundError, PlanError
from interop.plan import AttentionPlan
from interop.sharding import LocalBatch, TokenShards, check_dcp, own_kv_heads
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.dispatch import device_facts
from torch_backend.host_planning import check_kinds, host_buffer, host_plan, host_plans
from torch_backend.planning import check_cache_spec

from . import attention
from .agreement import agreed, batch_bytes
from .cache import CacheArrays, CacheHandle, find_cache
from .merging import combine_states, merge_states, pack_partial, scale_partial, unpack_partial
from .sinks import apply_sinks

__all__ = ["append", "attend", "paged_attention", "plan"]

Cache = TypeVar("Cache", CacheHandle, CacheArrays)
Plan = DCPPlan[jax.Array]
IntArray = npt.NDArray[np.int32]


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    batch: RaggedBatch,
    mesh: Mesh,
    axis_name: str,
    *,
    interleave: int = 1,
    bucket: Bucket | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    verify: bool = True,
) -> Plan:
    """Plan one step for all ranks of a mesh axis, outside of ``jax.jit``.

    The result is a pytree of arrays that are split over the axis: its ``in_specs`` of `shard_map`
    is ``PartitionSpec(axis_name)``. Where the mesh spans several processes, each of them calls this
    with the same arguments.

    Parameters
    ----------
    spec, batch, interleave, bucket, fallback, kernel
        As for `torch_backend.dcp.plan`.
    cache_spec
        Spec of one rank's cache (of a `CacheHandle` of several shards it is that).
    mesh, axis_name
        The mesh, and the axis whose devices are the ranks. Over its other axes the plan is the
        same.
    verify
        Where the mesh spans several processes, compare the arguments of all of them, which is a
        small all-gather on the devices and a wait for it. Turn it off once a program is known to be
        right.

    Raises
    ------
    ArgumentError
        For an axis that the mesh lacks, and as `torch_backend.dcp.plan` does.
    PageError, ShapeError, SlotError, UnsupportedError
        As `torch_backend.dcp.plan` does, in the process whose arguments do not fit.
    PlanError
        For arguments that do not fit one another; in every process where they differ, or where
        another process refused its own (with `verify`; none is left waiting).
    """
    if not isinstance(mesh, Mesh) or not mesh.local_devices:
        raise ArgumentError(
            "mesh",
            given=f"a {type(mesh).__name__} without devices of this process",
            wanted="a jax.sharding.Mesh of the ranks' devices",
        )

    def make() -> Plan:
        return _plan(spec, cache_spec, batch, mesh, axis_name, interleave, bucket, fallback, kernel)

    processes = {device.process_index for device in mesh.devices.flat}
    if not verify or len(processes) == 1:
        return make()
    given = {
        "spec": repr(spec).encode(),
        "cache_spec": repr(cache_spec).encode(),
        "axis_name": repr(axis_name).encode(),
        "interleave": repr(interleave).encode(),
        "bucket": repr(bucket).encode(),
        "kernel": repr(kernel).encode(),
        "batch": batch_bytes(batch),
    }
    return agreed(make, given, mesh)


def _plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    batch: RaggedBatch,
    mesh: Mesh,
    axis_name: str,
    interleave: int,
    bucket: Bucket | None,
    fallback: str,
    kernel: str | None,
) -> Plan:
    check_kinds(spec, batch, bucket)
    check_cache_spec(cache_spec)
    if axis_name not in mesh.axis_names:
        raise ArgumentError(
            "axis_name",
            given=f"{axis_name!r} with a mesh of {mesh.axis_names}",
            wanted="an axis of the mesh",
            remedy="Make the mesh with it: jax.make_mesh((ranks,), ('dcp',)).",
        )
    shards = TokenShards(mesh.shape[axis_name], interleave)
    check_dcp(spec, cache_spec, shards, kernel)
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    device: jax.Device = mesh.local_devices[0]
    where = torch.device("cpu")
    if device.platform != "cpu":
        where = torch.device("cuda", device.local_hardware_id)
    facts = device_facts(where)
    longest = batch.max_query_len if bucket is None else bucket.max_query_len
    locals_ = [
        LocalBatch.of(batch, shards, rank, context_only=longest > 1) for rank in range(shards.size)
    ]
    static, buffers = host_plans(
        context_spec(spec),
        cache_spec,
        locals_,
        context_bucket(bucket, batch),
        facts,
        fallback,
        kernel,
        host_buffer,
    )
    own = None
    if longest > 1:
        own_static, own_buffer = host_plan(
            own_spec(spec, shards, static.query_dtype),
            None,
            own_batch(batch),
            own_bucket(bucket),
            facts,
            fallback,
            None,
            host_buffer,
        )
        own = AttentionPlan(own_static, _split([own_buffer] * shards.size, sharding))
    return DCPPlan(AttentionPlan(static, _split(buffers, sharding)), own, spec, shards)


def _split(buffers: list[IntArray], sharding: NamedSharding) -> jax.Array:
    """Lay the metadata of ranks one after another, each on its rank's devices."""
    words = buffers[0].size

    def part(index: tuple[slice, ...] | None) -> IntArray:
        start = (index[0].start if index else None) or 0
        return buffers[start // words]

    return jax.make_array_from_callback((words * len(buffers),), sharding, part)


def append(key: jax.Array, value: jax.Array, cache: Cache, plan: Plan, layer: Any) -> Cache:
    """Write the rows that this rank owns into its cache, inside of `shard_map`.

    Parameters
    ----------
    key, value
        ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, head_dim_v]``, the same on
        every rank.
    cache, plan, layer
        As for `jax_frontend.append`; the cache is this rank's.
    """
    _check_kind(plan)
    _check_part(plan)
    return attention.append(key, value, cache, plan.context, layer)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: Plan,
    layer: Any,
    *,
    axis_name: str,
    combine: str = "ag_rs",
    return_lse: bool = False,
    return_cache: bool = False,
    sinks: jax.Array | None = None,
) -> Any:
    """Attend to all tokens of all ranks, inside of `shard_map` over `axis_name`.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads / ranks, head_dim]``, this rank's heads.
    key, value
        This step's rows as for `append`, which has to come before.
    cache, plan, layer, return_cache
        As for `jax_frontend.attend`, of this rank.
    axis_name
        The mesh axis that the plan was made for.
    combine, return_lse, sinks
        As for `torch_backend.dcp.attend`.

    Returns
    -------
    jax.Array or tuple
        Output ``[tokens, num_qo_heads / ranks, head_dim_v]``; the LSE and the cache if asked for.

    Raises
    ------
    ArgumentError
        At trace time, for an axis that is not there.
    FrameworkError, ShapeError, DTypeError, PlanError
        At trace time, for arguments that do not fit the plan.
    """
    _check_call(query, key, value, cache, plan, axis_name, combine, sinks)
    gathered = jax.lax.all_gather(query, axis_name, axis=1, tiled=True)
    out, lse, cache = attention.attend(
        gathered, cache, plan.context, layer, return_lse=True, return_cache=True
    )
    if combine == "a2a":
        packed = pack_partial(out, lse, plan.shards.size)
        packed = jax.lax.all_to_all(packed, axis_name, split_axis=0, concat_axis=0)
        out, lse = combine_states(*unpack_partial(packed, out.dtype))
    else:
        out, lse = _combine_ag_rs(out, lse, plan, axis_name)
    if plan.own is not None:
        out, lse = _with_own_rows(query, key, value, plan, axis_name, out, lse)
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    results = (out,) + ((lse,) if return_lse else ()) + ((cache,) if return_cache else ())
    return results if len(results) > 1 else out


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: Plan,
    layer: Any,
    *,
    axis_name: str,
    combine: str = "ag_rs",
    return_lse: bool = False,
    sinks: jax.Array | None = None,
) -> Any:
    """`append` and `attend` in one call; returns ``(out, cache)`` or ``(out, lse, cache)``."""
    _check_call(query, key, value, cache, plan, axis_name, combine, sinks)
    cache = append(key, value, cache, plan, layer)
    return attend(
        query,
        key,
        value,
        cache,
        plan,
        layer,
        axis_name=axis_name,
        combine=combine,
        return_lse=return_lse,
        return_cache=True,
        sinks=sinks,
    )


def _combine_ag_rs(
    out: jax.Array, lse: jax.Array, plan: Plan, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    rank = jax.lax.axis_index(axis_name)
    lses = jax.lax.all_gather(lse, axis_name)
    scaled, total = scale_partial(out, lses, rank)
    summed = jax.lax.psum_scatter(scaled, axis_name, scatter_dimension=1, tiled=True)
    heads = plan.num_local_heads
    return summed, jax.lax.dynamic_slice_in_dim(total, rank * heads, heads, axis=1)


def _with_own_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    plan: Plan,
    axis_name: str,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Merge attention over the context with that over the step's own rows."""
    assert plan.own is not None
    every = own_kv_heads(plan.spec, plan.shards)
    if every.tolist() != [list(range(key.shape[1]))] * plan.shards.size:
        heads = jnp.asarray(every)[jax.lax.axis_index(axis_name)]
        key, value = jnp.take(key, heads, axis=1), jnp.take(value, heads, axis=1)
    own = attention.ragged_attention(query, key, value, plan.own, return_lse=True)
    return merge_states(out, lse, *own)


def _check_kind(plan: object) -> None:
    if not isinstance(plan, DCPPlan) or not isinstance(plan.context, AttentionPlan):
        raise ArgumentError(
            "plan",
            given=f"a {type(plan).__name__}",
            wanted="a plan from jax_frontend.dcp.plan",
        )


def _check_part(plan: Plan) -> None:
    """Refuse a plan that is not one rank's; one of another framework is refused elsewhere."""
    metadata, words = plan.context.metadata, plan.context.static.layout.words
    if isinstance(metadata, jax.Array) and metadata.shape != (words,):
        raise PlanError(
            "plan",
            given=f"metadata {list(metadata.shape)}, not that of one rank",
            wanted=f"[{words}]",
            remedy="Give shard_map in_specs of PartitionSpec(axis_name) for the plan.",
        )


def _check_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: Plan,
    axis_name: str,
    combine: str,
    sinks: jax.Array | None,
) -> None:
    """Refuse, while the program is traced, what does not fit."""
    _check_kind(plan)
    check_combine(combine)
    try:
        size = jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ArgumentError(
            "axis_name",
            given=f"{axis_name!r}, which is no axis here",
            wanted="an axis of the mesh of the jax.shard_map that this is called in",
        ) from error
    if size != plan.shards.size:
        raise PlanError(
            "axis_name",
            given=f"{axis_name!r} of {size} devices",
            wanted=f"the axis of {plan.shards.size} devices that the plan was made for",
        )
    _check_part(plan)
    attention.check_cache(cache, plan.context)
    _check_shards(cache, size)
    spec, tokens = plan.spec, plan.num_tokens
    shape = (tokens, plan.num_local_heads, spec.head_dim)
    attention.check_rows("query", query, shape, plan.context)
    attention.check_key_value(key, value, plan.context)
    attention.check_sinks(spec, sinks, plan.num_local_heads)


def _check_shards(cache: object, size: int) -> None:
    """Refuse a torch-owned cache that several ranks would share, each taking it for its own.

    Of several processes each has its own ranks' shards only, and an exported program's cache may
    be made later.
    """
    if not isinstance(cache, CacheHandle) or jax.process_count() > 1:
        return
    try:
        count = len(find_cache(cache.name))
    except CacheNotFoundError:
        return
    if count % size:
        raise PlanError(
            "cache",
            given=f"a handle of {count} shards for {size} ranks",
            wanted="a shard for each rank",
            remedy="Make it with jax_frontend.cache_handle([cache of rank 0, ...], sharding=...).",
        )
