"""Decode context parallelism on one GPU: ranks computed one after another, and JAX on an axis of 1.

Between ranks nothing but rows is exchanged, so one card can stand for all of them: what a rank
would receive is put together here from what the others computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest
import torch
from dcp_problem import Shared, Sizes, assert_dealt, shared
from families import FA2, FA2_8BIT, FA3, need, only
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import Array, assert_within, bits, from_torch, to_torch, tolerance_of
from torch import Tensor

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from interop.dcp import COMBINES, context_spec, own_bucket, own_spec
from interop.sharding import LocalBatch, TokenShards, own_kv_heads
from jax_frontend import dcp
from torch_backend import PagedKVCache
from torch_backend.kernels.flashinfer_abi import ModuleKey
from torch_backend.merging import (
    combine_states,
    merge_states,
    pack_partial,
    scale_partial,
    unpack_partial,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE = "bfloat16"
# A multiple of every number of ranks; 2 and 3 ranks' heads are no runs of key/value heads' own.
SPEC = AttentionSpec(24, 4, 128)
RANKS = (2, 3, 4, 8)
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Group:
    """All ranks of a step, on one device, or each on its own."""

    problem: Shared
    apart: bool = False

    @property
    def shards(self) -> TokenShards:
        return TokenShards(self.problem.sizes.ranks, self.problem.sizes.interleave)

    @cached_property
    def rows(self) -> list[Tensor]:
        """Query, key and value of all heads."""
        problem = self.problem
        return [to_torch(x, DEVICE) for x in (problem.query, problem.key, problem.value)]

    @cached_property
    def caches(self) -> list[PagedKVCache]:
        """Every rank's cache before the step."""
        problem, caches = self.problem, []
        for rank in range(self.shards.size):
            where = f"{DEVICE}:{rank}" if self.apart else DEVICE
            cache = PagedKVCache(
                problem.spec, num_layers=1, num_pages=problem.sizes.num_pages,
                page_size=problem.sizes.page_size, dtype=problem.dtype, device=where,
            )  # fmt: skip
            pools = (problem.key_pool, problem.value_pool)
            for ours, pool in zip((cache.k, cache.v), pools, strict=True):
                ours.copy_(to_torch(problem.sizes.dealt(pool, rank), where))
            caches.append(cache)
        return caches

    def batch(self, rank: int) -> LocalBatch:
        """A rank's view of the step."""
        longest = self.problem.bucket.max_query_len
        batch = self.problem.batch
        return LocalBatch.of(batch, self.shards, rank, context_only=longest > 1)

    def plan(self, rank: int) -> AttentionPlan[Tensor]:
        """A rank's plan of all query heads over its own tokens."""
        return torch_backend.plan(
            context_spec(self.problem.spec),
            self.caches[rank].spec,
            self.batch(rank),
            bucket=self.problem.bucket,
            device=DEVICE,
            fallback="raise",
        )

    def partials(self) -> list[State]:
        """Write the step's rows, and attend, on every rank."""
        query, key, value = self.rows
        states = []
        for rank, cache in enumerate(self.caches):
            plan = self.plan(rank)
            torch_backend.append(key, value, cache, plan, 0)
            states.append(torch_backend.attend(query, cache, plan, 0, return_lse=True))
        return states

    def own(self, rank: int) -> State:
        """Causal attention of a rank's heads over the step's own rows."""
        query, key, value = self.rows
        batch, bucket = self.problem.batch, self.problem.bucket
        plan = torch_backend.plan(
            own_spec(self.problem.spec, self.shards, self.problem.dtype),
            None,
            RaggedBatch(batch.query_lens, batch.query_lens),
            bucket=own_bucket(bucket),
            device=DEVICE,
            fallback="raise",
        )
        heads = own_kv_heads(self.problem.spec, self.shards)[rank].tolist()
        mine = query.chunk(self.shards.size, 1)[rank].contiguous()
        rows = (x[:, heads].contiguous() for x in (key, value))
        return torch_backend.ragged_attention(mine, *rows, plan, return_lse=True)


def a2a(states: list[State], rank: int) -> State:
    """What a rank makes of the messages that it receives."""
    messages = [pack_partial(out, lse, len(states))[rank] for out, lse in states]
    return combine_states(*unpack_partial(torch.stack(messages)))


def ag_rs(states: list[State], rank: int) -> State:
    """What a rank gets of the sum of all ranks' terms."""
    lses = torch.stack([lse for _, lse in states])
    terms = [scale_partial(out, lses, each) for each, (out, _) in enumerate(states)]
    summed = torch.stack([out.float() for out, _ in terms]).sum(0).to(terms[0][0].dtype)
    ranks = len(states)
    return summed.chunk(ranks, 1)[rank].contiguous(), terms[0][1].chunk(ranks, 1)[rank].contiguous()


WAYS: dict[str, Callable[[list[State], int], State]] = {"a2a": a2a, "ag_rs": ag_rs}


def decode_of(sizes: Sizes) -> Shared:
    """Decodes around multiples of a page of all ranks, and requests shorter than the ranks are."""
    ranks, whole = sizes.ranks, sizes.round
    kv_lens = [1, ranks - 1, ranks, whole - 1, whole, whole + 1, 2 * whole + 5, 0]
    query_lens = [min(length, 1) for length in kv_lens]
    bucket = Bucket(10, 10, 8 * 3, 1)
    return shared(SPEC, sizes, query_lens, kv_lens, bucket=bucket, dtype=DTYPE, query_scale=3.0)


def mixed_of(sizes: Sizes) -> Shared:
    """A decode, a chunk, a prefill, requests that sit out, padding."""
    query_lens = [1, 9, 20, 0, 0, 1]
    kv_lens = [sizes.round + 1, 2 * sizes.round + 3, 20, 7, 0, 1]
    bucket = Bucket(8, 40, 8 * 3)
    return shared(SPEC, sizes, query_lens, kv_lens, bucket=bucket, dtype=DTYPE)


STEPS = {"decode": decode_of, "mixed": mixed_of}
steps = pytest.mark.parametrize("step", STEPS)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    need(FA2[0])


@steps
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", [FA2[0], FA3[0]], ids=str)
def test_ranks_one_after_another(key: ModuleKey, ranks: int, step: str) -> None:
    need(key)
    with only(key.backend):
        _ranks_one_after_another(key, STEPS[step](Sizes(ranks, 4, page_size=16, num_pages=24)))


def _ranks_one_after_another(key: ModuleKey, problem: Shared) -> None:
    group, ranks = Group(problem), problem.sizes.ranks
    states = group.partials()
    whole = problem.pools_after()
    for rank, cache in enumerate(group.caches):
        assert_dealt(problem, rank, [from_torch(cache.k), from_torch(cache.v)], whole)
    want, want_lse = problem.answer()
    for way, combine in WAYS.items():
        parts = [combine(states, rank) for rank in range(ranks)]
        if problem.bucket.max_query_len > 1:
            parts = [merge_states(*part, *group.own(rank)) for rank, part in enumerate(parts)]
        out, lse = (from_torch(torch.cat(each, 1)) for each in zip(*parts, strict=True))
        # Rounded by each rank, in each combination, and where parts are merged.
        assert_within(f"{way}, out", out, want, 2 * tolerance_of(DTYPE, key).out)
        assert_within(f"{way}, lse", lse, want_lse, 2 * tolerance_of(DTYPE, key).lse)
        assert not out[np.isneginf(want_lse)].any()


@steps
def test_a_rank_without_tokens_leaves_zeros(step: str) -> None:
    """Whatever its pages hold."""
    problem = STEPS[step](Sizes(8, 16, page_size=16, num_pages=24))
    states = Group(problem).partials()
    out, lse = states[7]
    assert torch.isneginf(lse).any()
    assert not out[torch.isneginf(lse)].any()
    assert all(out.isfinite().all() for out, _ in states)


def test_ranks_of_8_bit_pages_give_what_one_cache_does() -> None:
    need(FA2_8BIT[0])
    spec = replace(SPEC, dtype=DTYPE)
    sizes = Sizes(4, 4, page_size=16, num_pages=24)
    shards = TokenShards(4, 4)
    options: dict[str, Any] = {
        "num_layers": 1, "num_pages": 24, "dtype": "fp8", "scales": (0.02, 0.03), "device": DEVICE,
    }  # fmt: skip
    one = PagedKVCache(spec, page_size=sizes.round, **options)
    caches = [PagedKVCache(spec, page_size=16, **options) for _ in range(4)]
    for query_lens, kv_lens in (([130, 3, 64], [130, 3, 64]), ([1, 1, 1], [131, 4, 65])):
        problem = shared(spec, sizes, query_lens, kv_lens, dtype=DTYPE)
        query, key, value = Group(problem).rows
        whole = torch_backend.plan(spec, one.spec, problem.batch, fallback="raise")
        want = torch_backend.paged_attention(query, key, value, one, whole, 0, return_lse=True)
        states = []
        for rank, cache in enumerate(caches):
            local = LocalBatch.of(problem.batch, shards, rank, context_only=False)
            plan = torch_backend.plan(context_spec(spec), cache.spec, local, fallback="raise")
            torch_backend.append(key, value, cache, plan, 0)
            states.append(torch_backend.attend(query, cache, plan, 0, return_lse=True))
    # The decodes: without a mask a prefill would see its own future.
    parts = [a2a(states, rank) for rank in range(4)]
    tolerance = tolerance_of(DTYPE, FA2[0])
    for number, limit in ((0, tolerance.out), (1, tolerance.lse)):
        got = from_torch(torch.cat([part[number] for part in parts], 1))
        assert_within("fp8", got, from_torch(want[number]), 2 * limit)
    for rank, cache in enumerate(caches):
        for ours, pool in ((cache.k, one.k), (cache.v, one.v)):
            share = sizes.dealt(pool.view(torch.uint8).cpu().numpy(), rank)
            np.testing.assert_array_equal(ours.view(torch.uint8).cpu().numpy(), share)


@steps
@pytest.mark.parametrize("rank", [0, 3])
def test_jax_computes_a_ranks_part_with_the_same_bits(rank: int, step: str) -> None:
    group = Group(STEPS[step](Sizes(4, 4, page_size=16, num_pages=24)))
    want = group.partials()[rank]
    fresh = Group(group.problem).caches[rank]
    kv = jax_frontend.cache_handle(fresh)
    rows = (group.problem.query, group.problem.key, group.problem.value)

    @jax.jit
    def program(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        kv = jax_frontend.append(key, value, kv, plan, 0)
        return *jax_frontend.attend(query, kv, plan, 0, return_lse=True), kv

    try:
        kv = jax_frontend.jax_after_torch(kv)
        plan = jax_frontend.plan(
            context_spec(SPEC), kv.spec, group.batch(rank), bucket=group.problem.bucket
        )
        *got, kv = jax.block_until_ready(program(*rows, kv, plan))
    finally:
        jax_frontend.release_cache(kv.name)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(np.asarray(ours)), bits(from_torch(theirs)))
    for ours, theirs in zip((fresh.k, fresh.v), _pools(group.caches[rank]), strict=True):
        np.testing.assert_array_equal(bits(from_torch(ours)), bits(theirs))


def _pools(cache: PagedKVCache) -> list[Array]:
    return [from_torch(cache.k), from_torch(cache.v)]


@steps
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("kind", ["handle", "arrays"])
@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_jax_over_devices(ranks: int, kind: str, combine: str, step: str) -> None:
    """An axis of one rank on one GPU, and of more where there are more."""
    devices = jax.devices(DEVICE)
    if len(devices) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    problem = STEPS[step](Sizes(ranks, 4, page_size=16, num_pages=24))
    group = Group(problem, apart=True)
    mesh = Mesh(np.array(devices[:ranks]), ("dcp",))
    over_ranks = NamedSharding(mesh, P("dcp"))
    kv: Any
    if kind == "handle":
        kv = jax_frontend.cache_handle(group.caches, sharding=over_ranks)
        kv = jax_frontend.jax_after_torch(kv)
    else:
        kv = jax_frontend.init_cache(
            SPEC, num_layers=1, num_pages=24 * ranks, page_size=16, dtype=DTYPE,
            sharding=over_ranks,
        )  # fmt: skip
        k, v = (
            jax.device_put(
                np.concatenate([problem.sizes.dealt(pool, rank) for rank in range(ranks)]),
                over_ranks,
            )
            for pool in (problem.key_pool, problem.value_pool)
        )
        kv = replace(kv, k=k, v=v, spec=replace(kv.spec, num_pages=24))

    def rank_step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        out, lse, kv = dcp.paged_attention(
            query, key, value, kv, plan, 0, axis_name="dcp", combine=combine, return_lse=True
        )
        return (out, lse), kv

    rows = P(None, "dcp")
    program = jax.shard_map(
        rank_step,
        mesh=mesh,
        in_specs=(rows, P(), P(), P("dcp"), P("dcp")),
        out_specs=(rows, P("dcp")),
        check_vma=False,
    )
    try:
        plan = dcp.plan(
            SPEC, kv.spec, problem.batch, mesh, "dcp", interleave=4, bucket=problem.bucket,
            fallback="raise",
        )  # fmt: skip
        given = (problem.query, problem.key, problem.value, kv, plan)
        (out, lse), kv = jax.block_until_ready(jax.jit(program, donate_argnums=3)(*given))
    finally:
        if kind == "handle":
            jax_frontend.release_cache(kv.name)
    want, want_lse = problem.answer()
    tolerance = tolerance_of(DTYPE, FA2[0])
    assert_within("out", np.asarray(out), want, 2 * tolerance.out)
    assert_within("lse", np.asarray(lse), want_lse, 2 * tolerance.lse)
    if kind == "handle":
        after = [_pools(cache) for cache in group.caches]
    else:
        pools = (np.split(np.asarray(pool), ranks) for pool in (kv.k, kv.v))
        after = [list(parts) for parts in zip(*pools, strict=True)]
    whole = problem.pools_after()
    for rank, parts in enumerate(after):
        assert_dealt(problem, rank, parts, whole)
    if ranks == 1 and problem.bucket.max_query_len == 1:
        # One rank's part is the whole, and weights are 1.
        alone = Group(problem).partials()[0]
        np.testing.assert_array_equal(bits(np.asarray(out)), bits(from_torch(alone[0])))
