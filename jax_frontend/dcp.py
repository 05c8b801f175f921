"""Decode context parallelism inside ``jax.shard_map``: a cache spread by token over a mesh axis.

The arithmetic is that of `torch_backend.dcp`; the collectives are XLA's, and the local attention
is the same custom call.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interop.batch import Bucket, RaggedBatch
from interop.dcp import DCPPlan, check_combine, context_spec, own_bucket, own_spec
from interop.errors import ArgumentError, PlanError
from interop.plan import AttentionPlan
from interop.sharding import LocalBatch, TokenShards, check_dcp, own_kv_heads
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.dispatch import device_facts
from torch_backend.host_planning import host_plan, host_plans
from torch_backend.planning import check_cache_spec

from . import attention
from .cache import CacheArrays, CacheHandle
from .merging import combine_states, merge_states, pack_partial, scale_partial, unpack_partial

__all__ = ["append", "attend", "paged_attention", "plan"]

Cache = TypeVar("Cache", CacheHandle, CacheArrays)
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
) -> DCPPlan[jax.Array]:
    """Plan one step for all ranks of a mesh axis, outside of ``jax.jit``.

    The result is a pytree of arrays that are split over the axis: its ``in_specs`` of `shard_map`
    is ``PartitionSpec(axis_name)``. With several processes each calls this with the same arguments.

    Parameters
    ----------
    spec, batch, interleave, bucket, fallback, kernel
        As for `torch_backend.dcp.plan`.
    cache_spec
        Spec of one rank's cache (of a `CacheHandle` of several shards it is that).
    mesh, axis_name
        The mesh, and the axis whose devices are the ranks. Over its other axes the plan is the
        same.

    Raises
    ------
    ArgumentError
        For an axis that the mesh lacks.
    ShapeError, PageError, SlotError, PlanError, UnsupportedError
        As `torch_backend.dcp.plan` does.
    """
    check_cache_spec(cache_spec)
    if not isinstance(mesh, Mesh) or axis_name not in mesh.shape:
        raise ArgumentError(
            "axis_name",
            given=f"{axis_name!r} of {getattr(mesh, 'axis_names', type(mesh).__name__)}",
            wanted="an axis of the mesh",
            remedy="Make the mesh with it: jax.make_mesh((ranks,), ('dcp',)).",
        )
    shards = TokenShards(mesh.shape[axis_name], interleave)
    check_dcp(spec, cache_spec, shards)
    _check_processes(spec, cache_spec, batch, interleave, bucket)
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    device = next(iter(sharding.addressable_devices))
    where = torch.device("cpu")
    if device.platform != "cpu":
        where = torch.device("cuda", device.local_hardware_id)
    facts = device_facts(where)
    longest = batch.max_query_len if bucket is None else bucket.max_query_len
    locals_ = [
        LocalBatch.of(batch, shards, rank, context_only=longest > 1) for rank in range(shards.size)
    ]
    static, buffers = host_plans(
        context_spec(spec), cache_spec, locals_, bucket, facts, fallback, kernel, _new_buffer
    )
    own = None
    if longest > 1:
        own_static, own_buffer = host_plan(
            own_spec(spec, shards, static.query_dtype),
            None,
            RaggedBatch(batch.query_lens, batch.query_lens),
            own_bucket(bucket),
            facts,
            fallback,
            None,
            _new_buffer,
        )
        own = AttentionPlan(own_static, _split([own_buffer] * shards.size, sharding))
    return DCPPlan(AttentionPlan(static, _split(buffers, sharding)), own, spec, shards)


def _new_buffer(words: int) -> IntArray:
    return np.empty(words, np.int32)


def _split(buffers: list[IntArray], sharding: NamedSharding) -> jax.Array:
    """Lay the metadata of ranks one after another, each on its rank's devices."""
    words = buffers[0].size

    def part(index: tuple[slice, ...]) -> IntArray:
        start = index[0].start or 0
        return buffers[start // words]

    return jax.make_array_from_callback((words * len(buffers),), sharding, part)


def _check_processes(*arguments: object) -> None:
    """Raise `PlanError` on all processes of a `jax.distributed` job unless they plan the same."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    spec, cache_spec, batch, interleave, bucket = arguments
    assert isinstance(batch, RaggedBatch)
    table = b"" if batch.page_table is None else batch.page_table.tobytes()
    texts = [repr(value).encode() for value in (spec, cache_spec, interleave, bucket)]
    texts += [batch.query_lens.tobytes(), batch.kv_lens.tobytes(), table]
    digest = hashlib.blake2b(b"|".join(texts), digest_size=4).digest()
    mine = np.frombuffer(digest, np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1)
    if (everyone != everyone[0]).any():
        raise PlanError(
            "plan",
            given="different arguments in different processes",
            wanted="the same spec, cache_spec, batch, interleave and bucket in every process",
        )


def append(
    key: jax.Array, value: jax.Array, cache: Cache, plan: DCPPlan[jax.Array], layer: Any
) -> Cache:
    """Write the rows that this rank owns into its cache, inside of `shard_map`.

    Parameters
    ----------
    key, value
        ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, head_dim_v]``, the same on
        every rank.
    cache, plan, layer
        As for `jax_frontend.append`; the cache is this rank's.
    """
    _check_plan(plan)
    return attention.append(key, value, cache, plan.context, layer)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: DCPPlan[jax.Array],
    layer: Any,
    *,
    axis_name: str,
    combine: str = "ag_rs",
    return_lse: bool = False,
    return_cache: bool = False,
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
    combine, return_lse
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
    _check_call(query, key, value, cache, plan, axis_name, combine)
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
    results = (out,) + ((lse,) if return_lse else ()) + ((cache,) if return_cache else ())
    return results if len(results) > 1 else out


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: DCPPlan[jax.Array],
    layer: Any,
    *,
    axis_name: str,
    combine: str = "ag_rs",
    return_lse: bool = False,
) -> Any:
    """`append` and `attend` in one call; returns ``(out, cache)`` or ``(out, lse, cache)``."""
    _check_call(query, key, value, cache, plan, axis_name, combine)
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
    )


def _combine_ag_rs(
    out: jax.Array, lse: jax.Array, plan: DCPPlan[jax.Array], axis_name: str
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
    plan: DCPPlan[jax.Array],
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


def _check_plan(plan: object) -> None:
    if not isinstance(plan, DCPPlan) or not isinstance(plan.context, AttentionPlan):
        raise ArgumentError(
            "plan",
            given=f"a {type(plan).__name__}",
            wanted="a plan from jax_frontend.dcp.plan",
        )


def _check_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: DCPPlan[jax.Array],
    axis_name: str,
    combine: str,
) -> None:
    """Refuse, while the program is traced, what does not fit."""
    _check_plan(plan)
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
    spec, tokens = plan.spec, plan.num_tokens
    if isinstance(plan.context.metadata, jax.Array):
        words = plan.context.static.layout.words
        if plan.context.metadata.shape != (words,):
            raise PlanError(
                "plan",
                given=f"metadata {list(plan.context.metadata.shape)} of all ranks",
                wanted=f"[{words}], that of one rank",
                remedy="Give shard_map in_specs of PartitionSpec(axis_name) for the plan.",
            )
    attention.check_cache(cache, plan.context)
    shape = (tokens, plan.num_local_heads, spec.head_dim)
    attention.check_rows("query", query, shape, plan.context)
    attention.check_key_value(key, value, plan.context)
