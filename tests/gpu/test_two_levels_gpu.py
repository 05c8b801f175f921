"""Cascade and masks of drafts on a GPU: the oracle, and the same bits by PyTorch and by JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import FA2, FA2_8BIT, need
from problem import Array, CacheKind, assert_within, tolerance_of
from stored_steps import StoredStep, new_stored_step, spoil

import jax_frontend
import torch_backend
from interop import Bucket, RaggedBatch
from interop.dlpack import to_jax
from interop.ffi import python_calls
from torch_backend.kernels import FAMILIES, Operands
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

FORMATS: dict[str, tuple[ModuleKey, dict[str, Any]]] = {
    "16-bit": (FA2[0], {"dtype": "bfloat16"}),
    "soft cap": (FA2[2], {"dtype": "bfloat16", "logits_soft_cap": 30.0}),
    "8-bit": (FA2_8BIT[0], {"dtype": "float8_e4m3fn"}),
    "8-bit, scales per head": (FA2_8BIT[0], {"dtype": "float8_e4m3fn", "scales": "per head"}),
}
formats = pytest.mark.parametrize("name", FORMATS)
families = pytest.mark.parametrize("family", ["cascade", "fa2_drafts"])
kinds = pytest.mark.parametrize("kind", get_args(CacheKind))

# Contexts around pages of 16; one request sits out, and one has nothing.
QUERIES = [1, 8, 3, 1, 5, 0, 2, 0]
LENS = [49, 56, 67, 48 + 1, 305, 40, 50, 0]


def trees(queries: list[int], seed: int = 0) -> Array:
    """Return masks of any kind in which each token sees itself."""
    rng = np.random.default_rng(seed)
    masks = rng.random((sum(queries), max(queries))) < 0.5
    own = np.concatenate([np.arange(count) for count in queries])
    masks[np.arange(len(own)), own] = True
    return masks


def step_of(
    name: str,
    family: str,
    queries: list[int],
    lens: list[int],
    bucket: Bucket | None = None,
    **kind: Any,
) -> StoredStep:
    """Make a step that the family serves: of requests that share pages, or of trees of drafts."""
    key, options = FORMATS[name]
    need(key)
    if family == "fa2_drafts":
        kind["draft_masks"] = trees(queries)
        bucket = None if bucket is None else replace(bucket, draft_masks=True)
    else:
        kind = {"shared_pages": 3} | kind
    return new_stored_step(query_lens=queries, kv_lens=lens, bucket=bucket, **options, **kind)


def assert_right(step: StoredStep, out: Any, lse: Any, name: str) -> None:
    """Compare with the oracle; the LSE of the keys alone, and no rows of padding."""
    want_out, want_lse, sizes = step.want()
    tolerance = tolerance_of("bfloat16", FORMATS[name][0])
    got = out.float().cpu().numpy()
    # Scales make real values larger than 1, and errors with them.
    scale = np.maximum(1.0, sizes)
    assert_within("out", got / scale, want_out / scale, tolerance.out)
    assert_within("lse", lse.cpu().numpy(), want_lse, tolerance.lse)
    assert not got[np.isneginf(want_lse)].any(), "rows that see no key are not zero"


CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "padded": {"bucket": Bucket(11, 26, 80, 8)},
    "HND": {"layout": "HND"},
    "many heads": {"heads": (32, 8)},
    "one key head": {"heads": (4, 1), "bucket": Bucket(11, 26, 80, 8)},
    "nothing shared": {"shared_pages": 0},
    "not causal": {"causal": False},
}


@pytest.mark.parametrize("case", CASES)
@families
@formats
def test_small_problems_against_the_oracle(name: str, family: str, case: str) -> None:
    step = step_of(name, family, QUERIES, LENS, **CASES[case])
    assert_right(step, *step.solve(family), name)


@pytest.mark.parametrize("requests", [2, 9, 40])
@pytest.mark.parametrize("query", [1, 4])
@families
@formats
def test_long_prefixes_and_contexts(name: str, family: str, query: int, requests: int) -> None:
    """So long that both launches are split; against the reference, which is right as above."""
    lens = np.random.default_rng(0).integers(2100, 2900, requests).tolist()
    step = step_of(name, family, [query] * requests, lens, heads=(32, 8), shared_pages=128)
    out, lse = step.solve(family)
    want, want_lse = step.solve("reference")
    assert lse is not None and want_lse is not None
    error = (out.float() - want.float()).norm() / want.float().norm()
    assert error < 0.01
    torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)


@kinds
@pytest.mark.parametrize("case", ["exact", "padded", "HND"])
@families
@formats
def test_jax_computes_the_same_bits(name: str, family: str, case: str, kind: CacheKind) -> None:
    step = step_of(name, family, QUERIES, LENS, **CASES[case])
    out, lse = step.solve(family)
    by_jax, log = step.solve_by_jax(family, kind)
    assert lse is not None and log is not None
    assert torch.equal(by_jax, out) and torch.equal(log, lse)


@families
@formats
def test_what_nobody_reads_changes_no_bit(name: str, family: str) -> None:
    step = step_of(name, family, QUERIES, LENS, Bucket(11, 26, 80, 8))
    want, want_lse = step.solve(family)
    spoil(step, torch.nan, torch.nan)
    assert step.cache.k.isnan().any()
    got, lse = step.solve(family)
    assert lse is not None and want_lse is not None
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("name", ["16-bit", "8-bit, scales per head"])
def test_sinks_of_drafts(name: str) -> None:
    """The output is what the sinks leave of it; the LSE is that of the keys."""
    step = step_of(name, "fa2_drafts", QUERIES, LENS)
    out, lse = step.solve("fa2_drafts")
    sinks = torch.linspace(-2.0, 6.0, step.spec.num_qo_heads, device="cuda")
    with_sinks = replace(step, spec=replace(step.spec, sinks=True))
    plan = with_sinks.plan("fa2_drafts")
    got, log = torch_backend.attend(
        step.query, step.cache, plan, step.layer, return_lse=True, sinks=sinks
    )
    assert lse is not None and torch.equal(log, lse)
    want = out.float() * torch.sigmoid(lse - sinks)[:, :, None]
    assert_within("out", got.float().cpu().numpy(), want.cpu().numpy(), 2e-2)


@families
def test_masks_in_one_launch_and_in_two(family: str) -> None:
    """What FA2 computes with a mask over all keys is what two launches compute."""
    step = step_of("16-bit", "fa2_drafts", QUERIES, LENS, heads=(32, 8))
    if family == "cascade":
        step = step_of("16-bit", "cascade", QUERIES, LENS, heads=(32, 8))
    one, one_lse = step.solve("fa2")
    two, two_lse = step.solve(family)
    assert one_lse is not None and two_lse is not None
    assert_within("out", one.float().cpu().numpy(), two.float().cpu().numpy(), 2e-2)
    torch.testing.assert_close(one_lse, two_lse, rtol=5e-3, atol=5e-3)
    assert_right(step, one, one_lse, "16-bit")


@pytest.mark.parametrize("window", [1, 5, 40, 1000])
def test_windows_of_masked_drafts(window: int) -> None:
    """In one launch of FA2, which never splits then."""
    need(FA2[1])
    step = new_stored_step(
        "bfloat16", QUERIES, LENS, draft_masks=trees(QUERIES), sliding_window=window
    )
    assert_right(step, *step.solve("fa2"), "16-bit")


@pytest.mark.parametrize("queries", [[300, 40], [700]])
def test_windows_that_are_not_causal(queries: list[int]) -> None:
    """Queries of several tiles, whose chunks would end too soon if they were split."""
    need(FA2[1])
    lens = [count + 3000 for count in queries]
    step = new_stored_step("bfloat16", queries, lens, causal=False, sliding_window=600)
    assert_right(step, *step.solve("fa2"), "16-bit")


@families
def test_a_recorded_call_serves_other_steps_of_its_bucket(family: str) -> None:
    """In a CUDA graph of PyTorch's: other lengths, other prefixes, other masks."""
    bucket = Bucket(11, 26, 160, 8)
    step = step_of("16-bit", family, QUERIES, LENS, bucket)
    plan = step.plan(family)

    def attend() -> Any:
        return torch_backend.attend(step.query, step.cache, plan, step.layer, return_lse=True)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    for shared in (0, 1, 2):
        batch = step.batch
        table = np.array(batch.page_table)
        table[:, shared:3] = np.arange(8)[:, None]
        masks = trees(QUERIES, seed=shared) if family == "fa2_drafts" else None
        other = replace(
            step,
            batch=RaggedBatch(batch.query_lens, batch.kv_lens, table, draft_masks=masks),
        )
        again = other.plan(family)
        assert again.static == plan.static
        plan.metadata.copy_(again.metadata)
        graph.replay()
        assert_right(other, out, lse, "16-bit")


@families
def test_running_allocates_nothing(family: str) -> None:
    step = step_of("8-bit, scales per head", family, QUERIES, LENS)
    plan = step.plan(family)
    (launch,) = plan.static.main
    operands = Operands(
        step.query,
        *step.cache.pools(step.layer),
        plan.views,
        torch.empty(plan.static.out_shape, dtype=step.query.dtype, device="cuda"),
        None,
        torch.empty(launch.scratch_bytes, dtype=torch.uint8, device="cuda"),
        *step.cache.scale_operands(step.layer),
    )
    run = FAMILIES[launch.family].run
    run(launch, operands)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(launch, operands)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@families
def test_steady_steps_of_jax_run_no_python(family: str) -> None:
    """XLA replays what it recorded, although each step has a new plan: one program for all."""
    queries, lens = [2] * 4, np.array([52, 300, 77, 51])
    step = step_of("16-bit", family, queries, (lens + 40).tolist(), Bucket(6, 10, 64, 2))
    traces = []

    @jax.jit
    def layers(query: jax.Array, kv: Any, plan: Any) -> jax.Array:
        traces.append(1)

        def body(out: jax.Array, layer: jax.Array) -> Any:
            return jax_frontend.attend(out + query, kv, plan, layer), None

        out, _ = jax.lax.scan(body, query, jnp.arange(3))
        return out

    calls = []
    with step.jax_cache("handle") as kv:
        for i in range(40):
            masks = trees(queries, seed=i) if family == "fa2_drafts" else None
            batch = RaggedBatch(queries, lens + i, step.batch.page_table, draft_masks=masks)
            plan = jax_frontend.plan(step.spec, kv.spec, batch, bucket=step.bucket, kernel=family)
            query = torch.zeros_like(step.query).normal_()
            jax.block_until_ready(layers(to_jax(query), kv, plan))
            calls.append(python_calls["isthmus_attend"])
    assert calls[-1] == calls[-20]
    assert len(traces) == 1


def test_a_shared_prefix_is_noticed() -> None:
    """By plans of both front ends, without a kernel named."""
    key, options = FORMATS["16-bit"]
    need(key)
    step = new_stored_step(
        query_lens=[1] * 64, kv_lens=[4200] * 64, heads=(32, 8), shared_pages=260, **options
    )
    plan = step.plan(None)
    assert [launch.family for launch in plan.static.main] == ["cascade"]
    out, lse = step.solve(None)
    want, _ = step.solve("fa2")
    assert (out.float() - want.float()).norm() / want.float().norm() < 0.01
    by_jax, log = step.solve_by_jax(None, "handle")
    assert lse is not None and log is not None
    assert torch.equal(by_jax, out) and torch.equal(log, lse)


@families
def test_many_runs_give_the_same_bits(family: str) -> None:
    """The merge reads what it writes: no row may be read after another warp wrote it."""
    step = step_of("16-bit", family, QUERIES, LENS, heads=(32, 8))
    plan = step.plan(family)
    want = torch_backend.attend(step.query, step.cache, plan, step.layer, return_lse=True)
    for _ in range(300):
        got = torch_backend.attend(step.query, step.cache, plan, step.layer, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
