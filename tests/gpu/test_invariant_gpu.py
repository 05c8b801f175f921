"""Batch-invariant plans on a GPU: FA2 gives each request the same bits in all company.

The requests' schedules are followed on the CPU in test_invariant.py.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from families import FA2, FA2_8BIT, need
from invariance import Answers, Company, World, assert_same_bits, companies
from problem import tolerance_of

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket
from interop.dlpack import to_jax, to_torch
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

LENS = {
    "decode": [(1, kv) for kv in (4096, 8192, 5000, 9000, 4097, 6000, 2048, 2049, 1, 16, 7000, 90)],
    "prefill": [
        (700, 5000),
        (64, 9000),
        (2, 8192),
        (300, 4096),
        (5, 6000),
        (1000, 1000),
        *((17 * i, 4096 + 100 * i) for i in range(1, 7)),
    ],
    "mixed": [
        (1, 9000),
        (300, 4096),
        (1, 5000),
        (0, 70),
        (7, 8192),
        (1, 4096),
        (129, 6000),
        (1, 8192),
        (1, 300),
        (1100, 4500),
        (1, 7000),
        (2, 4100),
    ],
}
FEW = {"decode": (3, 6, 1, 2), "prefill": (1, 4, 0, 2), "mixed": (1, 0, 4, 2)}
KEYS = [FA2[0], FA2[1], FA2[2], FA2[4], FA2_8BIT[0]]

kinds = pytest.mark.parametrize("kind", LENS)


def spec_of(key: ModuleKey) -> AttentionSpec:
    features: dict[str, Any] = {}
    if key.window:
        features["sliding_window"] = 5000
    if key.soft_cap:
        features["logits_soft_cap"] = 30.0
    return AttentionSpec(8, 2, key.head_dim, **features)


def world_of(key: ModuleKey, kind: str) -> World:
    need(key)
    pages = key.kv_dtype if key in FA2_8BIT else None
    return World.of(spec_of(key), LENS[kind], key.dtype, "cuda", pages)


@kinds
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_company_changes_no_bit(key: ModuleKey, kind: str) -> None:
    world = world_of(key, kind)
    named = companies(LENS[kind], FEW[kind])
    families = {launch.family for launch in world.plan(named["all"]).static.main}
    assert families == {"fa2_invariant"}
    want = world.solve(named.pop("all"))
    for company in named.values():
        assert_same_bits(world.solve(company), want)


@kinds
@pytest.mark.parametrize("key", [FA2[0], FA2_8BIT[0]], ids=str)
def test_answers_are_right(key: ModuleKey, kind: str) -> None:
    world = world_of(key, kind)
    for company in companies(LENS[kind], FEW[kind]).values():
        got, want = world.solve(company), world.solve(company, kernel="reference")
        for request, (out, lse) in got.items():
            limit, (right, right_lse) = tolerance_of(key.dtype, key), want[request]
            error = (out.float() - right.float()).abs()
            assert (error <= limit.out * right.float().abs().clamp(min=1.0)).all(), request
            assert torch.allclose(lse, right_lse, rtol=limit.lse, atol=limit.lse), request


def test_a_decode_keeps_its_bits_when_prefills_join() -> None:
    """Pure steps and mixed ones have buckets of their own, and plans of one and two launches."""
    world = world_of(FA2[0], "mixed")
    decodes = tuple(i for i, (query, _) in enumerate(LENS["mixed"]) if query == 1)
    alone = world.solve(Company(decodes, Bucket(8, 8, 4000, 1)))
    assert_same_bits(alone, world.solve(Company(tuple(range(12)))))


@kinds
def test_jax_computes_the_same_bits(kind: str) -> None:
    world = world_of(FA2[0], kind)
    company = companies(LENS[kind], FEW[kind])["few in the bucket of all"]
    want: Answers = world.solve(Company(tuple(range(12))))
    handle = jax_frontend.jax_after_torch(jax_frontend.cache_handle(world.cache))
    plan = jax_frontend.plan(
        world.spec,
        world.cache.spec,
        world.batch(company),
        bucket=company.bucket,
        batch_invariant=True,
    )
    rows = [to_jax(x) for x in world.operands(company)]
    torch.cuda.synchronize()

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        return jax_frontend.paged_attention(query, key, value, kv, plan, 0, return_lse=True)

    out, lse, _ = jax.block_until_ready(step(*rows, handle, plan))
    assert_same_bits(world.by_request(company, to_torch(out), to_torch(lse)), want)


@kinds
def test_a_recorded_step_replays_after_a_larger_plan_in_the_same_memory(kind: str) -> None:
    """What the larger plan left behind is no work of the smaller one's."""
    world = world_of(FA2[0], kind)
    named = companies(LENS[kind], FEW[kind])
    large, small = named["all, padded"], named["few in the bucket of all"]
    want = world.solve(large)
    plan = world.plan(small)
    rows = [x.clone() for x in world.operands(small)]

    def step() -> Any:
        return torch_backend.paged_attention(*rows, world.cache, plan, 0, return_lse=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for company in (large, small, large, small):
        other = world.plan(company)
        assert other.static == plan.static
        plan.metadata.copy_(other.metadata)
        for mine, theirs in zip(rows, world.operands(company), strict=True):
            mine.copy_(theirs)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(world.by_request(company, out, lse), want)
