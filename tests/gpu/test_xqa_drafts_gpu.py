"""XQA for several query tokens on a GPU: the oracle, and the same bits by PyTorch and by JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from families import XQA_DRAFTS, need
from problem import Array, CacheKind, assert_within
from stored_steps import StoredStep, new_stored_step, spoil

import torch_backend
from interop import Bucket, RaggedBatch
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

FORMATS: dict[str, tuple[ModuleKey, dict[str, Any]]] = {
    "8-bit": (XQA_DRAFTS[0], {"dtype": "float8_e4m3fn"}),
    "8-bit, scales per head": (XQA_DRAFTS[0], {"dtype": "float8_e4m3fn", "scales": "per head"}),
    "16-bit": (XQA_DRAFTS[2], {"dtype": "bfloat16"}),
}
formats = pytest.mark.parametrize("name", FORMATS)
kinds = pytest.mark.parametrize("masks", ["chain", "tree", "full"])

# Around pages of 16 and tiles of 256 keys; one request sits out, and one has nothing.
QUERIES = [1, 8, 3, 1, 5, 0, 2, 4, 0]
LENS = [1, 8, 67, 256, 257, 40, 300, 513, 0]


def trees(queries: list[int], seed: int = 0) -> Array:
    """Return masks of any kind in which each token sees itself."""
    rng = np.random.default_rng(seed)
    masks = rng.random((sum(queries), max(queries))) < 0.5
    own = np.concatenate([np.arange(count) for count in queries])
    masks[np.arange(len(own)), own] = True
    return masks


def step_of(
    name: str,
    masks: str,
    queries: list[int] = QUERIES,
    lens: list[int] = LENS,
    bucket: Bucket | None = None,
    **kind: Any,
) -> StoredStep:
    key, options = FORMATS[name]
    need(key)
    if masks == "tree":
        kind["draft_masks"] = trees(queries)
        bucket = None if bucket is None else replace(bucket, draft_masks=True)
    if masks == "full":
        kind["causal"] = False
    return new_stored_step(query_lens=queries, kv_lens=lens, bucket=bucket, **options, **kind)


def assert_right(step: StoredStep, out: Any) -> None:
    """Compare with the oracle; scales make real values larger than 1, and errors with them."""
    want, _, sizes = step.want()
    got, scale = out.float().cpu().numpy(), np.maximum(1.0, sizes)
    assert_within("out", got / scale, want / scale, 2e-2)
    assert not got[sizes == 0].any(), "rows that see no key are not zero"


CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "padded": {"bucket": Bucket(12, 40, 200, 9)},
    "HND": {"layout": "HND"},
    "many heads": {"heads": (32, 8)},
    "one key head": {"heads": (4, 1), "bucket": Bucket(12, 40, 200, 8)},
    "scaled": {"sm_scale": 0.3},
}


@pytest.mark.parametrize("case", CASES)
@kinds
@formats
def test_small_problems_against_the_oracle(name: str, masks: str, case: str) -> None:
    step = step_of(name, masks, **CASES[case])
    assert_right(step, step.solve("xqa_drafts", lse=False)[0])


@pytest.mark.parametrize("query", [2, 8, 9, 33, 70])
@pytest.mark.parametrize("masks", ["chain", "tree"])
@formats
def test_one_request_in_many_parts(name: str, masks: str, query: int) -> None:
    """Rows of several blocks, masks of several words, keys of several parts."""
    step = step_of(name, masks, [query], [3000 + query])
    assert_right(step, step.solve("xqa_drafts", lse=False)[0])


@pytest.mark.parametrize("window", [1, 5, 33, 300, 10000])
@pytest.mark.parametrize("masks", ["chain", "tree"])
def test_windows(masks: str, window: int) -> None:
    need(XQA_DRAFTS[1])
    step = step_of("8-bit, scales per head", masks, sliding_window=window)
    assert_right(step, step.solve("xqa_drafts", lse=False)[0])


@pytest.mark.parametrize("kind", get_args(CacheKind))
@pytest.mark.parametrize("case", ["exact", "padded", "HND"])
@pytest.mark.parametrize("masks", ["chain", "tree"])
@formats
def test_jax_computes_the_same_bits(name: str, masks: str, case: str, kind: CacheKind) -> None:
    step = step_of(name, masks, **CASES[case])
    out, _ = step.solve("xqa_drafts", lse=False)
    by_jax, _ = step.solve_by_jax("xqa_drafts", kind, lse=False)
    assert torch.equal(by_jax, out)


@pytest.mark.parametrize("name", ["8-bit", "16-bit"])
@pytest.mark.parametrize("lens", [[2048 + 8] * 32, [20000, 30, 700]], ids=["even", "uneven"])
def test_real_sizes_against_fa2(name: str, lens: list[int]) -> None:
    step = step_of(name, "tree", [8] * len(lens), lens, heads=(32, 8))
    got, _ = step.solve("xqa_drafts", lse=False)
    want, _ = step.solve("reference")
    assert (got.float() - want.float()).norm() / want.float().norm() < 0.01


@pytest.mark.parametrize("name", ["8-bit", "16-bit"])
def test_sinks(name: str) -> None:
    """Each counts as one more key of its query head, in every row."""
    step = step_of(name, "tree")
    out, lse = step.solve("reference")
    sinks = torch.linspace(-2.0, 6.0, step.spec.num_qo_heads, device="cuda")
    with_sinks = replace(step, spec=replace(step.spec, sinks=True))
    plan = with_sinks.plan("xqa_drafts", lse=False)
    got = torch_backend.attend(step.query, step.cache, plan, step.layer, sinks=sinks)
    assert lse is not None
    want = out.float() * torch.sigmoid(lse - sinks)[:, :, None]
    assert_within("out", got.float().cpu().numpy(), want.cpu().numpy(), 3e-2)


@formats
def test_what_nobody_reads_changes_no_bit(name: str) -> None:
    step = step_of(name, "tree", bucket=Bucket(12, 40, 200, 8))
    want, _ = step.solve("xqa_drafts", lse=False)
    spoil(step, torch.nan, 1.0)
    got, _ = step.solve("xqa_drafts", lse=False)
    assert torch.equal(got, want)


@formats
def test_many_runs_give_the_same_bits(name: str) -> None:
    """Blocks count themselves in semaphores, which each call clears for itself."""
    step = step_of(name, "tree", [8, 3], [3000, 5000])
    plan = step.plan("xqa_drafts", lse=False)
    want = torch_backend.attend(step.query, step.cache, plan, step.layer)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(torch_backend.attend(step.query, step.cache, plan, step.layer))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@formats
def test_a_recorded_call_serves_other_steps_of_its_bucket(name: str) -> None:
    """In a CUDA graph of PyTorch's: other lengths and other masks."""
    step = step_of(name, "tree", bucket=Bucket(12, 40, 400, 8))
    plan = step.plan("xqa_drafts", lse=False)
    torch_backend.attend(step.query, step.cache, plan, step.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_backend.attend(step.query, step.cache, plan, step.layer)
    for seed in (1, 2):
        # The longest stays, and with it the width of the table of pages.
        lens = [length - seed if 60 < length < 400 else length for length in LENS]
        batch = RaggedBatch(QUERIES, lens, step.batch.page_table, draft_masks=trees(QUERIES, seed))
        other = replace(step, batch=batch)
        again = other.plan("xqa_drafts", lse=False)
        assert again.static == plan.static
        plan.metadata.copy_(again.metadata)
        graph.replay()
        assert_right(other, out)
