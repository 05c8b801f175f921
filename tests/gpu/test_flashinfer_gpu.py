"""FA2 and FA3 at real sizes: against the reference, and against FlashInfer's own objects.

Small problems against the oracle, and against JAX, are in test_equivalence.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from families import FA2, FA3, VARIANTS, need, this_gpu
from problem import Call, Tolerance, tolerance_of
from steps import Step, new_step
from torch import Tensor

import jax_frontend
import torch_backend
from interop import Bucket, RaggedBatch
from interop.dlpack import to_jax, to_torch
from torch_backend.kernels import FAMILIES, Lengths, Operands, Work
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

variants = pytest.mark.parametrize("key", VARIANTS, ids=str)

LARGE: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "uneven decode": ([1] * 33, [20000, *([100, 700, 1500, 16] * 8)], {}),
    "even decode": ([1] * 64, [1024] * 64, {}),
    "verification": ([5] * 16, [3000, *([400] * 15)], {}),
    "chunked prefill": ([700, 1, 300, 129], [5000, 2000, 300, 1500], {}),
    "first prefill": ([2000, 77, 500], [2000, 77, 500], {}),
    "first prefill, padded": (
        [2000, 77, 500],
        [2000, 77, 500],
        {"bucket": Bucket(8, 4096, 512, without_context=True)},
    ),
    "not causal": ([700, 1, 300], [5000, 2000, 300], {"causal": False}),
    "one head each": ([100, 3], [900, 800], {"heads": (4, 4)}),
    "one key head": ([100, 3], [900, 800], {"heads": (8, 1)}),
    "HND, pages of 64": ([100, 3], [900, 800], {"layout": "HND", "page_size": 64}),
    "pages of 1": ([100, 3], [900, 800], {"page_size": 1}),
    # Long enough for FA3 to have the pages copied into rows first.
    "long chunks": ([1500, 1200], [4000, 2500], {}),
    "long chunks, padded, HND": (
        [1500, 1200],
        [4000, 2501],
        {"bucket": Bucket(2, 3000, 600), "layout": "HND"},
    ),
    "mixed, long": ([1, 1, 1500], [900, 3000, 2600], {}),
    "mixed, padded": (
        [1, 1, 0, 1, 400, 2, 150],
        [900, 3000, 70, 1, 400, 800, 700],
        {"bucket": Bucket(12, 700, 600)},
    ),
}


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], limit: Tolerance) -> None:
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        a, b = a.double(), b.double()
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), name
        error = (a - b)[finite].abs() / b[finite].abs().clamp(min=1.0)
        assert error.max() <= getattr(limit, name), name


def call_for(name: str) -> Call:
    return "paged_attention" if "first" in name else "append_then_attend"


@pytest.mark.parametrize("name", LARGE)
@variants
def test_problems_of_real_size_against_the_reference(key: ModuleKey, name: str) -> None:
    need(key)
    query_lens, kv_lens, options = LARGE[name]
    step, call = new_step(key, query_lens, kv_lens, **options), call_for(name)
    want = step.solve("reference", call)
    assert_near(step.solve(key.backend, call), want, tolerance_of(key.dtype, key))


@pytest.mark.parametrize("name", LARGE)
@variants
def test_what_nobody_reads_changes_no_bit(key: ModuleKey, name: str) -> None:
    """NaN in pages of nobody, in ends of pages, in other layers and in padding rows."""
    need(key)
    query_lens, kv_lens, options = LARGE[name]
    step = new_step(key, query_lens, kv_lens, num_layers=2, **options)
    spoiled = step.with_nan_where_nobody_reads()
    assert spoiled.cache.k.isnan().any()
    want, got = (it.solve(key.backend, call_for(name)) for it in (step, spoiled))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mixed, padded", "mixed, long"])
@pytest.mark.parametrize("key", [FA3[0], FA3[3]], ids=str)
def test_decodes_and_prefills_of_one_step_are_two_launches(key: ModuleKey, name: str) -> None:
    """FA2 serves the decodes and FA3 the rest, in one output; JAX computes the same bits."""
    need(key)
    query_lens, kv_lens, options = LARGE[name]
    step = new_step(key, query_lens, kv_lens, **options).with_nan_where_nobody_reads()
    assert [launch.family for launch in step.plan(None).static.main] == ["fa2", "fa3"]
    got = step.solve(None)
    assert_near(got, step.solve("reference"), tolerance_of(key.dtype, key))
    handle = jax_frontend.cache_handle(step.cache)
    try:
        plan = jax_frontend.plan(step.spec, step.cache.spec, step.batch, bucket=step.bucket)
        attend = jax.jit(jax_frontend.attend, static_argnums=3, static_argnames="return_lse")
        handle = jax_frontend.jax_after_torch(handle)
        by_jax = attend(to_jax(step.query), handle, plan, 0, return_lse=True)
        jax.block_until_ready(by_jax)
    finally:
        jax_frontend.release_cache(handle.name)
    for ours, theirs in zip(by_jax, got, strict=True):
        assert torch.equal(to_torch(ours), theirs)


def test_thousands_of_requests_share_one_list_for_all_heads() -> None:
    """FA3's schedule is another one beyond 4096 works of a head."""
    key = FA3[0]
    need(key)
    step = new_step(key, [1, 2, 1] * 1400, [1, 30, 9] * 1400, heads=(4, 2))
    assert_near(step.solve("fa3"), step.solve("reference"), tolerance_of(key.dtype, key))


def _wrapper_answer(step: Step, backend: str, *, graph: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Output, natural LSE and plan integers of FlashInfer's own object for paged prefill."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    cache, spec, batch = step.cache, step.spec, step.batch
    pages = batch.pages(cache.spec.page_size)
    index = {
        "qo_indptr": batch.qo_indptr,
        "paged_kv_indptr": pages.indptr,
        "paged_kv_indices": batch.page_indices(cache.spec.page_size, cache.spec.num_pages),
        "paged_kv_last_page_len": pages.last_lens,
    }
    host = {name: torch.from_numpy(array.copy()) for name, array in index.items()}
    buffers = {f"{name}_buf": array.cuda() for name, array in host.items()} if graph else {}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
        cache.spec.layout,
        use_cuda_graph=graph,
        backend=backend,
        **buffers,
    )
    wrapper.plan(
        *host.values(),
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        cache.spec.page_size,
        causal=spec.causal,
        sm_scale=spec.sm_scale,
        window_left=spec.window_left,
        logits_soft_cap=spec.logits_soft_cap,
        q_data_type=step.query.dtype,
        kv_data_type=step.query.dtype,
    )
    out, lse = wrapper.run(step.query, (cache.k, cache.v), return_lse=True)
    return out, lse.mul_(float(np.log(2.0))), list(wrapper._plan_info)


@pytest.mark.filterwarnings("ignore")  # of FlashInfer's own
@pytest.mark.parametrize("name", ["uneven decode", "verification", "chunked prefill"])
@variants
def test_same_bits_as_flashinfers_own_objects(key: ModuleKey, name: str) -> None:
    """On FlashInfer's schedule for FA2; with FA3 no bit depends on the schedule."""
    need(key)
    step = new_step(key, *LARGE[name][:2])
    family = "fa3" if key.backend == "fa3" else "fa2_flashinfer"
    got = step.solve(family)
    *want, plan_info = _wrapper_answer(step, key.backend, graph=key.backend == "fa2")
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    if key.backend == "fa2":
        (launch,) = step.plan(family).static.main
        assert list(launch.constants[: len(plan_info)]) == plan_info


@variants
@pytest.mark.parametrize("longest", [1, 8, 400])
def test_plans_equal_the_compiled_planners(key: ModuleKey, longest: int) -> None:
    """Plan integers, and the works (FA3) or the whole schedule (FA2), for a random batch."""
    need(key)
    rng = np.random.default_rng(longest)
    requests, page_size = 30, 16
    query_lens = rng.integers(0, longest + 1, requests)
    kv_lens = query_lens + rng.integers(0, 6000, requests)
    step = new_step(key, query_lens.tolist(), kv_lens.tolist(), heads=(16, 4))
    spec, batch = step.spec, step.batch
    pages = batch.pages(page_size)
    arrays = {"qo_indptr": batch.qo_indptr, "kv_indptr": pages.indptr, "kv_len_arr": batch.kv_lens}
    pinned = torch.zeros(16 << 20, dtype=torch.uint8, pin_memory=True)
    values: dict[str, Any] = {name: torch.from_numpy(it.copy()) for name, it in arrays.items()}
    values |= {
        "float_workspace_buffer": torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
        "int_workspace_buffer": torch.zeros(16 << 20, dtype=torch.uint8, device="cuda"),
        "page_locked_int_workspace_buffer": pinned,
        "total_num_rows": batch.num_tokens,
        "batch_size": requests,
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "page_size": page_size,
        "enable_cuda_graph": True,
        "head_dim_qk": key.head_dim,
        "head_dim_vo": key.head_dim,
        "causal": spec.causal,
        "window_left": spec.window_left,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "num_colocated_ctas": 0,
        "uniform_q_len": 0,
    }
    planner = abi.jit_spec(key).build_and_load().plan
    plan_info = list(planner(*abi.arrange(abi.SIGNATURES[key.backend]["plan"], values)))
    torch.cuda.synchronize()
    theirs = pinned.view(torch.int32).numpy()

    family = FAMILIES["fa3" if key.backend == "fa3" else "fa2_flashinfer"]
    bucket = Bucket.exactly(batch, int(pages.indptr[-1]))
    work = Work(spec, step.cache.spec, this_gpu(), key.dtype, requests, bucket, "pages")
    lengths = Lengths(batch.query_lens, batch.kv_lens, pages.counts, batch.qo_indptr, pages.indptr)
    decision = family.decide(work, lengths)
    launch, sizes = family.shape(work, decision.variant)
    assert list(launch.constants[: len(plan_info)]) == plan_info
    fields = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    family.write(work, launch, lengths, decision, fields)
    (ours,) = fields.values()
    if key.backend == "fa2":
        assert ours.tolist() == theirs[: ours.size].tolist()
        return
    starts = [offset // 4 for offset in plan_info[:8]]
    count = int(ours[starts[6] + this_gpu().num_sms])

    def works(words: Any) -> list[tuple[int, ...]]:
        columns = [words[s:][:count].tolist() for i, s in enumerate(starts) if i != 6]
        return sorted(zip(*columns, strict=True))

    assert works(ours) == works(theirs)


@pytest.mark.parametrize("key", [FA2[0], FA3[0]], ids=str)
def test_running_allocates_nothing(key: ModuleKey) -> None:
    """So that it can be recorded; output, LSE and scratch are the caller's."""
    need(key)
    bucket = Bucket(4, 1024, 256, without_context=True)
    step = new_step(key, [300, 40, 7], [300, 40, 7], bucket=bucket)
    plan = step.plan(key.backend)
    own = plan.static.own
    assert own is not None
    for launch in (*plan.static.main, own):
        keys = (step.cache.k, step.cache.v) if launch.source == "pages" else (step.key, step.value)
        scratch = torch.empty(max(launch.scratch_bytes, 1), dtype=torch.uint8, device="cuda")
        operands = Operands(
            step.query,
            *keys,
            plan.views,
            torch.empty(plan.static.out_shape, dtype=step.query.dtype, device="cuda"),
            torch.empty(plan.static.out_shape[:2], device="cuda"),
            scratch if launch.scratch_bytes else None,
        )
        family = FAMILIES[launch.family]
        family.run(launch, operands)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        family.run(launch, operands)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


def test_writes_and_reads_beyond_two_to_the_32_elements() -> None:
    """At the end of pools of 20 GiB: places in pools are counted in 64 bits."""
    need(FA2[0])
    small = new_step(FA2[0], [1, 1], [5, 40])
    pages = 5 * 2**32 // small.cache.spec.num_bytes * small.cache.spec.num_pages
    cache = torch_backend.PagedKVCache(small.spec, num_layers=1, num_pages=pages, device="cuda")
    assert cache.k.numel() > 2**32
    used = small.cache.spec.num_pages
    for ours, theirs in ((cache.k, small.cache.k), (cache.v, small.cache.v)):
        ours[-used:] = theirs
    batch = RaggedBatch([1, 1], [5, 40], small.batch.page_table + (pages - used))
    far = Step(small.spec, cache, batch, None, small.query, small.key, small.value)
    for ours, theirs in zip(far.solve("fa2"), small.solve("fa2"), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(cache.k[-used:], small.cache.k)
