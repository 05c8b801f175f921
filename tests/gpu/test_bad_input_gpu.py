"""Calls on a GPU that do not fit: an error in words, and a card that works as before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
import torch
from families import FA2, need
from steps import Step, new_step

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.dlpack import to_jax
from interop.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OutOfDeviceMemoryError,
    PlanError,
    ShapeError,
    UnsupportedError,
)
from torch_backend import PagedKVCache, dispatch

pytestmark = pytest.mark.gpu

HERE = "cuda"
LENS = [1, 1, 3], [40, 7, 100]
GIB = 2**30


def a_step(device: str = HERE) -> Step:
    """A step in which nothing is wrong."""
    return new_step(FA2[0], *LENS, device=device)


@pytest.fixture(autouse=True)
def usable() -> Iterator[None]:
    """After each test nothing is pending on the card, and a good call gives what it gave before."""
    need(FA2[0])
    step = a_step()
    want = step.solve("fa2")
    yield
    torch.cuda.synchronize()
    for ours, theirs in zip(step.solve("fa2"), want, strict=True):
        assert torch.equal(ours, theirs)


def _pool(pages: int, **sizes: Any) -> PagedKVCache:
    spec = AttentionSpec(8, 8, 256)
    return PagedKVCache(spec, num_layers=2, num_pages=pages, device=HERE, **sizes)


@pytest.mark.parametrize("share", [1.2, 3.0])  # values do not fit beside the keys; nothing does
def test_a_pool_that_does_not_fit(share: float) -> None:
    torch.cuda.empty_cache()
    one = _pool(1).spec.num_bytes
    free, _ = torch.cuda.mem_get_info()
    pages = int(share * free / one)
    with pytest.raises(OutOfDeviceMemoryError) as error:
        _pool(pages)
    missing = pages * one - free
    assert abs(error.value.missing_bytes - missing) < GIB
    text = str(error.value)
    assert f"{pages * one / GIB:.2f} GiB on cuda:0" in text
    assert f"{error.value.missing_bytes / GIB:.2f} GiB missing" in text
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert name in text
    assert "largest_num_pages" in text
    assert free - torch.cuda.mem_get_info()[0] < GIB, "the refused pool keeps memory"


def test_the_largest_pool_fits() -> None:
    spec = AttentionSpec(8, 8, 256)
    pages = torch_backend.largest_num_pages(spec, num_layers=2, headroom_bytes=2 * GIB)
    pool = _pool(pages)
    assert torch.cuda.mem_get_info()[0] < 3 * GIB
    del pool
    torch.cuda.empty_cache()
    assert torch_backend.largest_num_pages(spec, num_layers=2, headroom_bytes=2**60) == 0


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(("cache_on", "rows_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_rows_on_another_device_than_the_cache(cache_on: str, rows_on: str, name: str) -> None:
    step = a_step(cache_on)
    plan = torch_backend.plan(step.spec, step.cache.spec, step.batch)
    rows = {"query": step.query, "key": step.key, "value": step.value}
    rows[name] = rows[name].to(rows_on)
    before = step.cache.k.clone(), step.cache.v.clone()
    with pytest.raises(DeviceError, match=rf"{name}: got {rows_on}.*, want {cache_on}.*plan lies"):
        torch_backend.paged_attention(**rows, cache=step.cache, plan=plan, layer=0)
    if name != "query":
        with pytest.raises(DeviceError, match=f"{name}: got {rows_on}"):
            torch_backend.append(rows["key"], rows["value"], step.cache, plan, 0)
    assert torch.equal(step.cache.k, before[0])
    assert torch.equal(step.cache.v, before[1])


def test_jax_rows_on_the_cpu_with_a_cache_on_the_gpu() -> None:
    step = a_step()
    handle = jax_frontend.cache_handle(step.cache)
    attend = jax.jit(jax_frontend.attend, static_argnums=3)
    try:
        plan = jax_frontend.plan(step.spec, step.cache.spec, step.batch)
        query = to_jax(step.query)
        elsewhere = jax.device_put(query, jax.devices("cpu")[0])
        with pytest.raises(ValueError, match="devices"):
            attend(elsewhere, handle, plan, 0)
        handle = jax_frontend.jax_after_torch(handle)
        jax.block_until_ready(attend(query, handle, plan, 0))
        with pytest.raises(DeviceError, match=r"device: got cpu .*want a cuda device"):
            jax_frontend.plan(step.spec, step.cache.spec, step.batch, device=jax.devices("cpu")[0])
    finally:
        jax_frontend.release_cache(handle.name)


def test_a_plan_for_another_device() -> None:
    step = a_step()
    with pytest.raises(DeviceError, match="device: got cpu, want a cuda device"):
        torch_backend.plan(step.spec, step.cache.spec, step.batch, device="cpu")
    plan = torch_backend.plan(step.spec, step.cache.spec, step.batch)
    on_the_host = replace(plan, metadata=plan.metadata.cpu())
    with pytest.raises(DeviceError, match=r"plan: got metadata on cpu, want cuda:0.*device=cache"):
        torch_backend.attend(step.query, step.cache, on_the_host, 0)
    other = a_step("cpu")
    cpu_plan = torch_backend.plan(other.spec, other.cache.spec, other.batch)
    with pytest.raises(PlanError, match=r"cache: got one of .*want the cache that the plan"):
        torch_backend.attend(step.query, step.cache, cpu_plan, 0)


def test_a_plan_for_another_spec_or_bucket() -> None:
    step = a_step()
    other = new_step(FA2[0], *LENS, page_size=32)
    plan = other.plan("fa2")
    with pytest.raises(PlanError, match="page_size=32"):
        torch_backend.attend(step.query, step.cache, plan, 0)
    with pytest.raises(PlanError, match=r"cache_spec\.num_kv_heads: got 8, want 4"):
        torch_backend.plan(AttentionSpec(8, 4, 128), step.cache.spec, step.batch)
    bucket = Bucket(4, 8, 64)
    plan = torch_backend.plan(step.spec, step.cache.spec, step.batch, bucket=bucket)
    with pytest.raises(ShapeError, match=r"query: got \[5, 32, 128\], want \[8, 32, 128\]"):
        torch_backend.attend(step.query, step.cache, plan, 0)
    for name, small in (
        ("num_requests", Bucket(2, 8, 64)),
        ("num_tokens", Bucket(4, 4, 64)),
        ("num_pages", Bucket(4, 8, 3)),
        ("max_query_len", Bucket(4, 8, 64, 2)),
    ):
        with pytest.raises(PlanError, match=rf"bucket\.{name}: got "):
            torch_backend.plan(step.spec, step.cache.spec, step.batch, bucket=small)


def test_rows_of_another_type_or_layout() -> None:
    step = a_step()
    plan = step.plan("fa2")
    with pytest.raises(DTypeError, match="query: got float16, want bfloat16"):
        torch_backend.attend(step.query.half(), step.cache, plan, 0)
    with pytest.raises(ShapeError, match=r"query: got strides .*\.contiguous\(\)"):
        torch_backend.attend(step.query.mT.contiguous().mT, step.cache, plan, 0)
    # A layout of the kernels' integers that they would misread.
    lengths = torch.tensor(LENS[1], device=HERE)
    with pytest.raises(ShapeError, match="kv_lens: got a tensor on a GPU, want host memory"):
        RaggedBatch(LENS[0], lengths)


def _float32() -> tuple[Any, ...]:
    spec = AttentionSpec(4, 2, 64)
    cache = PagedKVCache(spec, num_layers=1, num_pages=8, dtype="float32", device=HERE)
    return spec, cache.spec, RaggedBatch([1, 2], [9, 20], [[3, 0], [1, 2]])


@pytest.mark.parametrize("front_end", [torch_backend, jax_frontend])
def test_what_no_kernel_does_is_refused_on_demand(front_end: Any) -> None:
    with pytest.raises(UnsupportedError) as error:
        front_end.plan(*_float32(), fallback="raise")
    for family in ("fa3", "fa2"):
        reason = f"{family}: it computes in float16 and bfloat16, not in float32"
        assert reason in str(error.value)


def test_falling_back_warns_once_for_a_bucket() -> None:
    spec, cache_spec, batch = _float32()
    bucket = Bucket(2, 4, 8)
    dispatch.serve.cache_clear()
    with pytest.warns(RuntimeWarning, match="falls back to the reference family.*fa2: it computes"):
        torch_backend.plan(spec, cache_spec, batch, bucket=bucket)
    # A second warning would be an error.
    shorter = RaggedBatch([1, 1], [8, 20], batch.page_table)
    plan = torch_backend.plan(spec, cache_spec, shorter, bucket=bucket)
    assert [launch.family for launch in plan.static.main] == ["reference"]


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rows_that_begin_between_words(name: str) -> None:
    spec = AttentionSpec(8, 2, 128)
    cache = PagedKVCache(spec, num_layers=1, num_pages=8, device=HERE)
    plan = torch_backend.plan(spec, cache.spec, RaggedBatch([1], [5], [[3]]))
    rows = {"query": 8, "key": 2, "value": 2}
    aligned = {
        which: torch.randn(heads * 128 + 1, dtype=torch.bfloat16, device=HERE)[:-1]
        for which, heads in rows.items()
    }
    given = {which: part.view(1, -1, 128) for which, part in aligned.items()}
    shifted = torch.randn(rows[name] * 128 + 1, dtype=torch.bfloat16, device=HERE)[1:]
    given[name] = shifted.view(1, -1, 128)
    with pytest.raises(ShapeError, match=rf"^{name}: got an address 2 bytes past a multiple of 16"):
        torch_backend.paged_attention(**given, cache=cache, plan=plan, layer=0)
    assert not cache.k.any()


def test_the_name_of_a_released_cache_is_not_given_again() -> None:
    """A recorded program would go on in the memory of the cache that had it."""
    step = a_step()
    named = jax_frontend.cache_handle(step.cache, name="once")
    jax_frontend.release_cache("once")
    numbered = jax_frontend.cache_handle(step.cache)
    jax_frontend.release_cache(numbered.name)
    with pytest.raises(ArgumentError, match=r"name: got 'once', .* released, want a name that no"):
        jax_frontend.cache_handle(a_step().cache, name="once")
    other = jax_frontend.cache_handle(a_step().cache)
    assert other.name not in (named.name, numbered.name)
    jax_frontend.release_cache(other.name)
