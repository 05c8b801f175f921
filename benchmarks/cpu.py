"""What any machine can measure: the bridge's overhead, the reference kernel, planning."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import numpy as np
import torch

import jax_frontend
import torch_backend
from interop import CacheSpec, RaggedBatch
from torch_backend import PagedKVCache
from torch_backend.kernels.reference import EXTRA_BYTES

from .engine import step_calls
from .recording import Run
from .timing import measure_calls, measure_pair, summary
from .workload import PAGE_SIZE, SPEC, bucket_of, decode_shape, make_batch, pages_for

__all__ = ["decode", "overhead", "planning"]


def _cache(requests: int, context: int) -> PagedKVCache:
    cache = PagedKVCache(
        SPEC,
        num_layers=1,
        num_pages=pages_for([context] * requests),
        page_size=PAGE_SIZE,
        dtype="float32",
        device="cpu",
    )
    cache.k.normal_()
    cache.v.normal_()
    return cache


def _query(requests: int) -> torch.Tensor:
    return torch.randn(requests, SPEC.num_qo_heads, SPEC.head_dim)


def overhead(run: Run) -> None:
    """`attend` from ``jax.jit`` against the same call from PyTorch, decode batch of 8.

    With few keys the difference is what the bridge does; with more it is as much what a call finds
    in the processor's caches after the other.
    """
    for context in (16, 128):
        _overhead_at(run, 8, context)


def _overhead_at(run: Run, requests: int, context: int) -> None:
    cache = _cache(requests, context)
    batch = make_batch([1] * requests, [context] * requests)
    cpu = jax.devices("cpu")[0]
    query = _query(requests)
    jax_query = jax.device_put(query.numpy(), cpu)
    kv = jax_frontend.cache_handle(cache, sharding=jax.sharding.SingleDeviceSharding(cpu))
    plan = torch_backend.plan(SPEC, cache.spec, batch, device="cpu")
    jax_plan = jax_frontend.plan(SPEC, cache.spec, batch, device=cpu)
    step = jax.jit(lambda query, kv, plan: jax_frontend.attend(query, kv, plan, 0))
    usual = torch.get_num_threads()
    for threads in sorted({1, usual}):
        torch.set_num_threads(threads)
        from_torch, from_jax, difference = measure_pair(
            lambda: torch_backend.attend(query, cache, plan, 0),
            lambda: step(jax_query, kv, jax_plan).block_until_ready(),
            calls=10 if run.quick else 400,
        )
        shape = decode_shape(requests, context, dtype="float32", torch_threads=threads)
        run.add("PyTorch", shape, from_torch.scaled(1e6), "us")
        run.add("jax.jit", shape, from_jax.scaled(1e6), "us")
        # The fastest calls are those that nothing else on the machine got in the way of.
        fastest = (from_jax.low - from_torch.low) * 1e6
        run.add("difference", shape, difference.scaled(1e6), "us", between_fastest=fastest)
    torch.set_num_threads(usual)
    jax_frontend.release_cache(kv.name)


def decode(run: Run) -> None:
    """The reference kernel against SDPA on dense keys and values plus their gathering."""
    requests, context = 8, 2048
    cache = _cache(requests, context)
    batch = make_batch([1] * requests, [context] * requests)
    plan = torch_backend.plan(SPEC, cache.spec, batch, device="cpu")
    query = _query(requests)
    pages = torch.from_numpy(batch.page_indices(PAGE_SIZE, cache.spec.num_pages).astype(np.int64))

    def dense(pool: torch.Tensor) -> torch.Tensor:
        rows = pool.index_select(0, pages)
        return rows.view(requests, context, SPEC.num_kv_heads, -1).transpose(1, 2)

    def sdpa(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query.unsqueeze(2), key, value, enable_gqa=True
        )

    gathered = dense(cache.k), dense(cache.v)
    calls = 3 if run.quick else 25
    shape = decode_shape(requests, context, dtype="float32")
    reference, baseline, _ = measure_pair(
        lambda: torch_backend.attend(query, cache, plan, 0),
        lambda: sdpa(dense(cache.k), dense(cache.v)),
        calls=calls,
    )
    only_sdpa = measure_calls(lambda _: sdpa(*gathered), calls=calls)
    out = torch_backend.attend(query, cache, plan, 0)
    assert isinstance(out, torch.Tensor)
    error = (out - sdpa(*gathered)[:, :, 0]).abs().max()
    run.add("reference", shape, reference.scaled(1e3), "ms", largest_difference=float(error))
    run.add("gather + SDPA", shape, baseline.scaled(1e3), "ms")
    run.add("SDPA alone", shape, only_sdpa.scaled(1e3), "ms")

    for more in (requests,) if run.quick else (requests, 4 * requests):
        shape = decode_shape(more, context, dtype="float32")
        with run.attempt("reference, extra memory", shape):
            value = summary([_peak_extra_bytes(more, context) / 2**20])
            run.add("reference, extra memory", shape, value, "MiB", bound_mib=EXTRA_BYTES / 2**20)


def _peak_extra_bytes(requests: int, context: int) -> int:
    """Largest resident memory during a call less that before it, as Linux counts it."""
    cache = _cache(requests, context)
    batch = make_batch([1] * requests, [context] * requests)
    plan = torch_backend.plan(SPEC, cache.spec, batch, device="cpu")
    query = _query(requests)

    def call() -> None:
        torch_backend.attend(query, cache, plan, 0)

    call()  # threads and code are resident from here on
    # Freed memory that the allocator keeps would hide what the call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def planning(run: Run) -> None:
    """`RaggedBatch` and `plan` for 256 requests of 8k tokens, on the host."""
    requests, context = 256, 8192
    num_pages = pages_for([context] * requests)
    cache = CacheSpec(
        num_layers=32, num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=8, head_dim=128
    )
    first = make_batch([1] * requests, [context] * requests)
    query_lens, kv_lens, table = first.query_lens, first.kv_lens, first.page_table
    bucket = bucket_of(first)
    cpu = jax.devices("cpu")[0]

    def batch() -> RaggedBatch:
        return RaggedBatch(query_lens, kv_lens, table)

    calls = 20 if run.quick else 200
    shape = decode_shape(requests, context)
    for name, call in {
        "RaggedBatch": lambda _: batch(),
        "RaggedBatch + plan, PyTorch": lambda _: torch_backend.plan(
            SPEC, cache, batch(), bucket=bucket, device="cpu"
        ),
        "RaggedBatch + plan, JAX": lambda _: jax_frontend.plan(
            SPEC, cache, batch(), bucket=bucket, device=cpu
        ),
        **{
            name: lambda _, call=call: call()
            for name, call in step_calls(cache, first, "cpu").items()
        },
    }.items():
        timing = measure_calls(call, calls=calls)
        run.add(name, shape, timing.scaled(1e3), "ms")
