"""Plans made on a GPU: both front ends' metadata are NumPy's, and attention after them is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from device_plans import (
    CASES,
    EDGES,
    Case,
    Lengths,
    hostile,
    judged,
    outside,
    random_lengths,
    spoiled,
    written,
)
from families import FA2, need

import jax_frontend
import torch_backend
from interop import PlanStatus
from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import metadata_of
from interop.dlpack import to_jax, to_torch
from interop.ffi import python_calls
from torch_backend import PagedKVCache
from torch_backend.kernels import flashinfer_abi as abi

pytestmark = pytest.mark.gpu

GPU_CASES = [case for case in CASES if case.device.kind == "cuda"]
GPU_EDGES = [case for case in EDGES if case.device.kind == "cuda"]
by_case = pytest.mark.parametrize("case", GPU_CASES + GPU_EDGES, ids=lambda case: case.name)
SEEDS = 40


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    need(FA2[0])
    need(FA2[1])


def filled(case: Case, lengths: Lengths) -> Lengths:
    """The same batch in arrays of the bucket's size: the rest are requests without tokens."""
    spare = case.bucket.num_requests - lengths.kv_lens.size
    return Lengths(
        np.pad(lengths.kv_lens, (0, spare)),
        np.pad(lengths.cu_q_lens, (0, spare), mode="edge"),
        np.pad(lengths.page_table, ((0, spare), (0, 0))),
    )


def batches(case: Case) -> list[Lengths]:
    """Random ones, as many with numbers in them that no plan can use, and as many of any bits."""
    right = [] if case in EDGES else [random_lengths(case, seed) for seed in range(SEEDS)]
    wrong = [spoiled(case, x, i) for i, x in enumerate(right)]
    return [filled(case, x) for x in right + wrong + [hostile(case, i) for i in range(SEEDS)]]


def options(case: Case) -> dict[str, Any]:
    return {"bucket": case.bucket, "kernel": case.kernel, "split": case.split}


@by_case
def test_metadata_of_torch_are_those_of_numpy(case: Case) -> None:
    """Triton's kernels, overwriting one plan again and again."""
    plan = None
    for lengths in batches(case):
        there = [torch.from_numpy(array.copy()).cuda() for array in lengths.arrays]
        plan, status = torch_backend.plan_on_device(
            case.spec, case.cache, *there, **options(case), into=plan
        )
        static, shape = case.static
        assert plan.static == static
        words, verdict = metadata_of(NumPyArithmetic(), shape, *lengths.arrays)
        np.testing.assert_array_equal(status.cpu().numpy(), verdict)
        mask = written(case)
        np.testing.assert_array_equal(plan.metadata.cpu().numpy()[mask], words[mask])
        assert verdict.tolist() == judged(case, lengths)
        assert outside(case, plan.metadata.cpu().numpy()) == []


@by_case
def test_metadata_of_jax_are_those_of_numpy(case: Case) -> None:
    traces = 0

    @jax.jit
    def planned(*arrays: jax.Array) -> Any:
        nonlocal traces
        traces += 1
        plan, status = jax_frontend.plan_on_device(case.spec, case.cache, *arrays, **options(case))
        return plan, status

    for lengths in batches(case):
        plan, status = planned(*(jnp.asarray(array) for array in lengths.arrays))
        words, verdict = metadata_of(NumPyArithmetic(), case.static[1], *lengths.arrays)
        assert plan.static == case.static[0]
        np.testing.assert_array_equal(status, verdict)
        mask = written(case)
        np.testing.assert_array_equal(np.asarray(plan.metadata)[mask], words[mask])
    assert traces == 1


ATTENDED = [case for case in GPU_CASES if case.heads[1] > 1 and not case.window]


def step_of(case: Case) -> tuple[PagedKVCache, list[torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)
    cache = PagedKVCache(
        case.spec,
        num_layers=2,
        num_pages=case.cache.num_pages,
        page_size=case.page_size,
        dtype="bfloat16",
        device="cuda",
    )
    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)
    heads = (case.heads[0], case.heads[1], case.heads[1])
    rows = [
        torch.randn(
            case.bucket.num_tokens, count, 128, generator=generator, device="cuda",
            dtype=torch.bfloat16,
        )
        for count in heads
    ]  # fmt: skip
    return cache, rows


@pytest.mark.parametrize("case", ATTENDED, ids=lambda case: case.name)
def test_a_graph_plans_from_what_its_tensors_hold(case: Case) -> None:
    """Replays after the lengths changed equal steps with a host plan of the same schedule."""
    cache, rows = step_of(case)
    first, *others = [filled(case, random_lengths(case, seed)) for seed in range(5)]
    there = [torch.from_numpy(array.copy()).cuda() for array in first.arrays]
    made = torch_backend.plan_on_device(case.spec, cache.spec, *there, **options(case))
    plan = made[0]
    torch_backend.paged_attention(*rows, cache, plan, 1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _, status = torch_backend.plan_on_device(
            case.spec, cache.spec, *there, **options(case), into=plan
        )
        out, lse = torch_backend.paged_attention(*rows, cache, plan, 1, return_lse=True)
    for lengths in [*others, first]:
        for tensor, array in zip(there, lengths.arrays, strict=True):
            tensor.copy_(torch.from_numpy(array))
        graph.replay()
        static, words = case.host(lengths.batch())
        host = replace(plan, static=static, metadata=torch.from_numpy(words).cuda())
        wanted, wanted_lse = torch_backend.paged_attention(*rows, cache, host, 1, return_lse=True)
        assert not status.any()
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)
        assert out.isfinite().all()


@pytest.mark.parametrize("case", ATTENDED, ids=lambda case: case.name)
def test_attention_of_jax_is_that_of_torch(case: Case) -> None:
    cache, rows = step_of(case)
    kv = jax_frontend.cache_handle(cache)

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, *arrays: jax.Array) -> Any:
        plan, status = jax_frontend.plan_on_device(case.spec, kv.spec, *arrays, **options(case))
        out, lse, kv = jax_frontend.paged_attention(
            query * 2, key * 2, value * 2, kv, plan, 1, return_lse=True
        )
        return out, lse, status, kv

    doubled = [x * 2 for x in rows]
    torch.cuda.synchronize()
    for seed in range(4):
        lengths = filled(case, random_lengths(case, 100 + seed))
        kv = jax_frontend.jax_after_torch(kv)
        arrays = [jnp.asarray(array) for array in lengths.arrays]
        out, lse, status, kv = step(*(to_jax(x) for x in rows), kv, *arrays)
        jax_frontend.torch_after_jax(kv)
        assert not np.asarray(status).any()
        there = [torch.from_numpy(array.copy()).cuda() for array in lengths.arrays]
        plan, _ = torch_backend.plan_on_device(case.spec, cache.spec, *there, **options(case))
        wanted, wanted_lse = torch_backend.paged_attention(
            *doubled, cache, plan, 1, return_lse=True
        )
        assert torch.equal(to_torch(out), wanted)
        assert torch.equal(to_torch(lse), wanted_lse)


@pytest.mark.parametrize("case", ATTENDED, ids=lambda case: case.name)
def test_what_does_not_fit_is_neither_read_nor_written(case: Case) -> None:
    """Pages of nobody hold NaN; requests that fit come out as if they were alone."""
    for seed in range(6):
        cache, rows = step_of(case)
        lengths = filled(case, spoiled(case, random_lengths(case, seed), seed))
        there = [torch.from_numpy(array.copy()).cuda() for array in lengths.arrays]
        plan, status = torch_backend.plan_on_device(case.spec, cache.spec, *there, **options(case))
        slots = plan.views["slot_mapping"].cpu().numpy()
        written = slots[slots >= 0]
        assert (written < cache.spec.num_pages * case.page_size).all()
        fields = {name: field.cpu().numpy() for name, field in plan.views.items()}
        used = fields["page_indices"][: fields["kv_indptr"][-1]]
        nobodys = np.setdiff1d(np.arange(cache.spec.num_pages), used)
        layer = cache.spec.num_pages
        for pool in (cache.k, cache.v):
            pool[torch.from_numpy(layer + nobodys).cuda()] = torch.nan
        before = cache.k.clone()
        out, lse = torch_backend.paged_attention(*rows, cache, plan, 1, return_lse=True)
        served = status.cpu().numpy() == PlanStatus.OK
        differs = (cache.k != before) & ~(cache.k.isnan() & before.isnan())
        places = differs.flatten(2).any(-1).nonzero().cpu().numpy()
        changed = (places[:, 0] - layer) * case.page_size + places[:, 1]
        assert np.isin(changed, written).all()
        ends = np.minimum(np.maximum.accumulate(np.maximum(lengths.cu_q_lens, 0)), out.shape[0])
        for i, fits in enumerate(served):
            first = int(ends[i]) if i else 0
            # What a request has beyond the longest query of the bucket may be left as it was.
            count = min(int(ends[i + 1]) - first, case.bucket.max_query_len)
            assert out[first : first + count].isfinite().all()
            if not fits:
                assert not out[first : first + count].any()
                assert lse[first : first + count].isneginf().all()


def test_flashinfers_own_planner_agrees() -> None:
    """Its compiled module plans the same bytes for the case that follows its rules."""
    case = next(case for case in GPU_CASES if case.name == "by-flashinfer")
    planner = abi.jit_spec(FA2[0]).build_and_load().plan
    pinned = torch.zeros(16 << 20, dtype=torch.uint8, pin_memory=True)
    values: dict[str, Any] = {
        "float_workspace_buffer": torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
        "int_workspace_buffer": torch.zeros(16 << 20, dtype=torch.uint8, device="cuda"),
        "page_locked_int_workspace_buffer": pinned,
        "total_num_rows": case.bucket.num_tokens,
        # The last request of a bucket owns the padding.
        "batch_size": case.bucket.num_requests + 1,
        "num_qo_heads": case.heads[0],
        "num_kv_heads": case.heads[1],
        "page_size": case.page_size,
        "enable_cuda_graph": True,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "causal": True,
        "window_left": -1,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "num_colocated_ctas": 0,
        "uniform_q_len": 0,
    }
    for seed in range(10):
        lengths = filled(case, random_lengths(case, seed))
        there = [torch.from_numpy(array.copy()).cuda() for array in lengths.arrays]
        plan, _ = torch_backend.plan_on_device(case.spec, case.cache, *there, **options(case))
        fields = {name: field.cpu() for name, field in plan.views.items()}
        values |= {name: fields[name] for name in ("qo_indptr", "kv_indptr")}
        values["kv_len_arr"] = fields["kv_lens"]
        pinned.zero_()
        info = list(planner(*abi.arrange(abi.SIGNATURES["fa2"]["plan"], values)))
        assert list(plan.static.main[0].constants[: len(info)]) == info
        torch.cuda.synchronize()
        words = fields["fa2_schedule"].numpy()
        theirs = pinned.view(torch.int32).numpy()[: words.size]
        np.testing.assert_array_equal(theirs, words)


def test_a_steady_step_plans_without_python() -> None:
    """Even where lengths and page table are arguments of the program, which move."""
    case = next(case for case in GPU_CASES if case.name == "decode-split")
    cache, rows = step_of(case)
    kv = jax_frontend.jax_after_torch(jax_frontend.cache_handle(cache))
    query = to_jax(rows[0])

    @jax.jit
    def step(query: Any, kv: Any, *arrays: jax.Array) -> Any:
        plan, _ = jax_frontend.plan_on_device(case.spec, kv.spec, *arrays, **options(case))
        return jax_frontend.attend(query * 2, kv, plan, 0) * 2

    given = [filled(case, random_lengths(case, seed)).arrays for seed in range(5)]
    batches = [[jnp.asarray(array) for array in arrays] for arrays in given]
    out = query
    for i in range(60):
        if i == 30:
            jax.block_until_ready(out)
            before = python_calls.total()
        out = step(query, kv, *batches[i % 5])
    jax.block_until_ready(out)
    assert python_calls["isthmus_plan"]
    assert python_calls.total() == before
