"""Decode context parallelism over `torch.distributed`: a cache spread by token over several ranks.

Attention over a part of the keys, with its LSE, combines to attention over all of them
(`merging.combine_states`); `interop.dcp.wire_bytes` says what crosses the wire. The group is an
argument of every call; nothing is kept between calls.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.dcp import (
    DCPPlan,
    batch_bytes,
    check_combine,
    context_bucket,
    context_spec,
    own_batch,
    own_bucket,
    own_spec,
)
from interop.errors import ArgumentError, DeviceError, PlanError
from interop.plan import AttentionPlan
from interop.sharding import LocalBatch, TokenShards, check_dcp, own_kv_heads
from interop.spec import AttentionSpec, CacheSpec

from . import attention
from .agreement import agreed
from .cache import PagedKVCache
from .collectives import Group, all_gather, all_to_all, backend_of, check_group, reduce_scatter
from .host_planning import check_kinds
from .merging import combine_states, merge_states, pack_partial, scale_partial, unpack_partial
from .planning import check_cache_spec
from .planning import plan as plan_one
from .sinks import apply_sinks, check_sinks

__all__ = ["append", "attend", "paged_attention", "plan"]


def plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    batch: RaggedBatch,
    group: Group,
    *,
    interleave: int = 1,
    bucket: Bucket | None = None,
    device: torch.device | str | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    verify: bool = True,
) -> DCPPlan[Tensor]:
    """Plan one step of a group of ranks; every rank calls this with the same arguments.

    Parameters
    ----------
    spec
        The attention of the whole group: all its query heads. A rank has
        ``num_qo_heads / ranks`` of them, in the order of ranks, and all key/value heads.
    cache_spec
        ``cache.spec`` of this rank's cache; equal on all ranks.
    batch
        The step's requests with their full lengths. One page id stands for that page of every
        rank's cache, so it covers ``page_size * ranks`` tokens, and a request needs
        ``ceil(kv_len / (page_size * ranks))`` of them.
    group
        The `torch.distributed` process group.
    interleave
        How many tokens in a row one rank owns; a divisor of the page size.
    bucket
        Sizes to pad to, with ``num_pages`` those of one rank. Its `max_query_len` decides how
        attention is split: where it is 1, a rank attends over all its tokens at once; else over
        those before this step, and over the step's own rows apart.
    device, fallback, kernel
        As for `torch_backend.plan`; `kernel` serves attention over pages.
    verify
        Compare all ranks' arguments, which is a small all-gather and a wait for it. Turn it off
        once a program is known to be right.

    Raises
    ------
    ArgumentError, PlanError, PageError, ShapeError, SlotError, UnsupportedError
        For arguments that do not fit, on the rank that has them, and `PlanError` on every other
        rank (with `verify`; no rank is left waiting).
    """
    rank, size = check_group(group)

    def make() -> DCPPlan[Tensor]:
        check_kinds(spec, batch, bucket)
        check_cache_spec(cache_spec)
        shards = TokenShards(size, interleave)
        check_dcp(spec, cache_spec, shards, kernel)
        return _plan(spec, cache_spec, batch, shards, rank, bucket, device, fallback, kernel)

    if not verify:
        return make()
    given = {
        "spec": repr(spec).encode(),
        "cache_spec": repr(cache_spec).encode(),
        "interleave": repr(interleave).encode(),
        "bucket": repr(bucket).encode(),
        "kernel": repr(kernel).encode(),
        "batch": batch_bytes(batch),
    }
    return agreed(make, given, group, device)


def _plan(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    batch: RaggedBatch,
    shards: TokenShards,
    rank: int,
    bucket: Bucket | None,
    device: torch.device | str | None,
    fallback: str,
    kernel: str | None,
) -> DCPPlan[Tensor]:
    longest = batch.max_query_len if bucket is None else bucket.max_query_len
    local = LocalBatch.of(batch, shards, rank, context_only=longest > 1)
    context = plan_one(
        context_spec(spec),
        cache_spec,
        local,
        bucket=context_bucket(bucket, batch),
        device=device,
        fallback=fallback,
        kernel=kernel,
    )
    own = None
    if longest > 1:
        own = plan_one(
            own_spec(spec, shards, context.static.query_dtype),
            None,
            own_batch(batch),
            bucket=own_bucket(bucket),
            device=context.metadata.device,
            fallback=fallback,
        )
    return DCPPlan(context, own, spec, shards)


def append(
    key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor], layer: int
) -> None:
    """Write the rows that this rank owns into its cache.

    Parameters
    ----------
    key, value
        ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, head_dim_v]``, the same on
        every rank.
    cache, plan, layer
        As for `torch_backend.append`; the cache is this rank's.
    """
    _check_plan(plan)
    attention.append(key, value, cache, plan.context, layer)


@overload
def attend(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: Literal[True],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: DCPPlan[Tensor],
    layer: int,
    group: Group,
    *,
    combine: str = "ag_rs",
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to all tokens of all ranks; every rank of the group calls this.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads / ranks, head_dim]``, this rank's heads.
    key, value
        This step's rows as for `append`, which has to come before.
    cache, plan, layer
        This rank's cache, the step's plan, and which layer to read.
    group
        The process group that the plan was made for.
    combine
        ``"ag_rs"``: all-gather of LSE, and reduce-scatter of outputs in their own dtype. ``"a2a"``:
        one all-to-all of outputs with their LSE, summed in float32 in the order of ranks.
    return_lse
        Also return the LSE, without sinks.
    sinks
        ``[num_qo_heads / ranks]`` float32, those of this rank's heads, where the plan's spec says
        that there are sinks. They count once, after all ranks' keys are combined.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        Output ``[tokens, num_qo_heads / ranks, head_dim_v]`` and LSE
        ``[tokens, num_qo_heads / ranks]`` float32, natural logarithm, both over all tokens of all
        ranks. A row that sees no key has output 0 and LSE -inf.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError, PlanError, ArgumentError
        For arguments that do not fit the plan, before this rank's first collective. Ranks are not
        asked again for what they have: where only some refuse, the others wait for the group's
        timeout.
    CollectiveError
        If another rank is gone, or did not come within the group's timeout.
    """
    rank = _check_call(query, key, value, cache, plan, layer, group, combine, sinks)
    out, lse = _attend(query, key, value, cache, plan, layer, group, combine, rank, sinks)
    return (out, lse) if return_lse else out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: DCPPlan[Tensor],
    layer: int,
    group: Group,
    combine: str,
    rank: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    gathered = _gather_heads(query, group)
    out, lse = attention.attend(gathered, cache, plan.context, layer, return_lse=True)
    if combine == "a2a":
        out, lse = _combine_a2a(out, lse, group, plan.shards.size)
    else:
        out, lse = _combine_ag_rs(out, lse, group, rank)
    if plan.own is not None:
        out, lse = _with_own_rows(query, key, value, plan, rank, out, lse)
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return out, lse


@overload
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: Literal[True],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, plan: DCPPlan[Tensor],
    layer: int, group: Group, *, combine: str = "ag_rs", return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: DCPPlan[Tensor],
    layer: int,
    group: Group,
    *,
    combine: str = "ag_rs",
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`append` and `attend` in one call."""
    rank = _check_call(query, key, value, cache, plan, layer, group, combine, sinks)
    attention.append(key, value, cache, plan.context, layer)
    out, lse = _attend(query, key, value, cache, plan, layer, group, combine, rank, sinks)
    return (out, lse) if return_lse else out


def _gather_heads(query: Tensor, group: Group) -> Tensor:
    """Queries of all ranks, ``[tokens, num_qo_heads, head_dim]``, in the order of ranks."""
    return all_gather(query, group).transpose(0, 1).flatten(1, 2).contiguous()


def _combine_ag_rs(out: Tensor, lse: Tensor, group: Group, rank: int) -> tuple[Tensor, Tensor]:
    lses = all_gather(lse, group)
    size, tokens, heads = lses.shape
    scaled, total = scale_partial(out, lses, rank)
    # The heads of each rank one after another, [ranks, tokens, heads, width].
    parts = scaled.unflatten(1, (size, heads // size)).transpose(0, 1)
    mine = total.view(tokens, size, heads // size)[:, rank]
    return reduce_scatter(parts, group), mine.contiguous()


def _combine_a2a(out: Tensor, lse: Tensor, group: Group, size: int) -> tuple[Tensor, Tensor]:
    packed = all_to_all(pack_partial(out, lse, size), group)
    return combine_states(*unpack_partial(packed))


def _with_own_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: DCPPlan[Tensor],
    rank: int,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge attention over the context with that over the step's own rows."""
    assert plan.own is not None
    heads = own_kv_heads(plan.spec, plan.shards)[rank].tolist()
    if heads != list(range(key.shape[1])):
        # As views, so that no index has to reach the device.
        key, value = (torch.stack([rows[:, i] for i in heads], dim=1) for rows in (key, value))
    own_out, own_lse = attention.ragged_attention(query, key, value, plan.own, return_lse=True)
    return merge_states(out, lse, own_out, own_lse)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, DCPPlan) or not isinstance(plan.context, AttentionPlan):
        raise ArgumentError(
            "plan",
            given=f"a {type(plan).__name__}",
            wanted="a plan from torch_backend.dcp.plan",
        )


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    plan: DCPPlan[Tensor],
    layer: int,
    group: Group,
    combine: str,
    sinks: Tensor | None,
) -> int:
    """Refuse what does not fit before any collective; returns this process's rank."""
    _check_plan(plan)
    check_combine(combine)
    rank, size = check_group(group)
    if size != plan.shards.size:
        raise PlanError(
            "group",
            given=f"one of {size} ranks",
            wanted=f"the group of {plan.shards.size} ranks that the plan was made for",
        )
    attention.check_cache(cache, plan.context)
    spec, tokens = plan.spec, plan.num_tokens
    shape = (tokens, plan.num_local_heads, spec.head_dim)
    attention.check_rows("query", query, shape, plan.context)
    attention.check_key_value(key, value, plan.context)
    check_sinks(spec, sinks, plan.num_local_heads, plan.context.metadata.device)
    attention.checked_pools(cache, layer)  # or it would be refused between two collectives
    kind = query.device.type
    backend = backend_of(group, kind)
    if backend is None or (kind == "cuda" and backend == "gloo"):
        gpu = kind == "cuda"
        raise DeviceError(
            "group",
            given=f"one that moves {kind} tensors with {backend or 'nothing'}",
            wanted=f"a group for tensors on {query.device}",
            remedy=f"Make it with backend='{'nccl' if gpu else 'gloo'}', or 'cpu:gloo,cuda:nccl'.",
        )
    return rank
