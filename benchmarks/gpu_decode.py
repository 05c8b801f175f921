"""Decode on a GPU: a whole step from both frameworks, and bandwidth against the card's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import torch

import jax_frontend
import torch_backend
from interop import AttentionPlan, RaggedBatch
from interop.ffi import python_calls
from torch_backend import PagedKVCache

from .gpu_steps import (
    GraphStep,
    flashinfer_layers,
    jax_step,
    layers_for,
    new_cache,
    random_query,
    read_bandwidth,
    release,
    time_jax,
    time_torch,
    to_jax_query,
    torch_layers,
)
from .recording import Run
from .timing import Timing, summary
from .workload import PAGE_SIZE, SPEC, bucket_of, decode_shape, kv_bytes, make_batch, pages_for

__all__ = ["BANDWIDTH_SHAPES", "bandwidth", "step"]

# Requests and context, as in the published figures.
BANDWIDTH_SHAPES = ((64, 256), (32, 1024), (128, 2048), (8, 8192), (1, 32768))
STEADY_STEPS = 50

# Ways to write a step's layers, and the layers in the body of the loop.
JAX_STEPS = {"JAX unrolled": 0, "JAX scan": 1, "JAX scan, unroll 4": 4}


class _Batches:
    """Batches of one bucket, each with lengths and pages of its own, in an endless round."""

    def __init__(self, requests: int, context: int) -> None:
        self.all = [
            make_batch(
                [1] * requests,
                [context - (3 * i + request) % PAGE_SIZE for request in range(requests)],
                seed=i,
            )
            for i in range(16)
        ]
        self.bucket = bucket_of(self.all[0])
        self._round = itertools.cycle(self.all)

    def next(self) -> RaggedBatch:
        """Return a new batch each time, as in serving: they keep what plans compute from them."""
        known = next(self._round)
        return RaggedBatch(known.query_lens, known.kv_lens, known.page_table)


def step(run: Run) -> None:
    """A decode step of up to 32 layers, 32 requests x 1024, new metadata every step."""
    requests, context, most = 32, 1024, 32
    batches = _Batches(requests, context)
    cache = new_cache(most, pages_for([context] * requests))
    query = random_query(requests)
    jax_query = to_jax_query(query)
    kv = jax_frontend.cache_handle(cache)
    for layers in (4, most) if run.quick else (1, 2, 4, 8, 16, most):
        # Attention alone at every depth; with the writes of keys and values at the last one.
        for write in (False, True) if layers == most else (False,):
            shape = decode_shape(requests, context, layers=layers)
            suffix = " and writes" if write else ""
            with run.attempt(f"PyTorch graph{suffix}", shape):
                graph = _graph_with_new_plans(cache, batches, query, layers, write)
                family = _family(cache, batches)
                _add(run, f"PyTorch graph{suffix}", shape, time_torch(run, graph), family)
                if layers == most:
                    _memory(run, f"PyTorch graph{suffix}", shape, graph, _wait_torch)
            for name, scan in JAX_STEPS.items():
                with run.attempt(name + suffix, shape):
                    one = _jax_with_new_plans(cache, batches, jax_query, kv, layers, scan, write)
                    _add(run, name + suffix, shape, time_jax(run, one))
                    if layers == most:
                        _handler_calls(run, name + suffix, shape, one)
                        _memory(run, name + suffix, shape, one, jax.block_until_ready)
    with run.attempt("PyTorch eager", shape):
        plan = torch_backend.plan(
            SPEC, cache.spec, batches.next(), bucket=batches.bucket, device=cache.device
        )
        timing = time_torch(run, lambda: torch_layers(query, cache, plan, most))
        _add(run, "PyTorch eager", shape, timing)
    release(kv)


def _wait_torch(_: Any) -> None:
    torch.cuda.synchronize()


def _add(run: Run, case: str, shape: dict[str, Any], timing: Timing, family: str = "") -> None:
    layers = shape["layers"]
    more = {"family": family} if family else {}
    step_us = timing.median * 1e6
    run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", step_us=step_us, **more)


def _family(cache: PagedKVCache, batches: _Batches) -> str:
    plan = torch_backend.plan(
        SPEC, cache.spec, batches.next(), bucket=batches.bucket, device=cache.device
    )
    return plan.static.main[0].family


def _graph_with_new_plans(
    cache: PagedKVCache, batches: _Batches, query: torch.Tensor, layers: int, write: bool
) -> Callable[[], Any]:
    def plan() -> AttentionPlan[torch.Tensor]:
        return torch_backend.plan(
            SPEC, cache.spec, batches.next(), bucket=batches.bucket, device=cache.device
        )

    own = plan()
    graph = GraphStep(lambda: torch_layers(query, cache, own, layers, write=write), own)

    def one() -> Any:
        graph.load(plan())
        return graph()

    return one


def _jax_with_new_plans(
    cache: PagedKVCache,
    batches: _Batches,
    query: jax.Array,
    kv: jax_frontend.CacheHandle,
    layers: int,
    scan: int,
    write: bool,
) -> Callable[[], Any]:
    program = jax_step(layers, scan=scan, write=write)

    def one() -> Any:
        nonlocal kv
        plan = jax_frontend.plan(SPEC, cache.spec, batches.next(), bucket=batches.bucket)
        out, kv = program(query, kv, plan)
        return out

    return one


def _handler_calls(run: Run, case: str, shape: dict[str, Any], one: Callable[[], Any]) -> None:
    """How often XLA enters Python to launch attention and writes, in a steady step."""
    before = python_calls.copy()
    for _ in range(STEADY_STEPS):
        last = one()
    jax.block_until_ready(last)
    each = {
        target: (count - before[target]) / STEADY_STEPS for target, count in python_calls.items()
    }
    value = summary([sum(each.values())], STEADY_STEPS)
    run.add(f"{case}, handler calls", shape, value, "calls/step", **each)


def _memory(
    run: Run,
    case: str,
    shape: dict[str, Any],
    one: Callable[[], Any],
    wait: Callable[[Any], Any],
) -> None:
    """How much more device memory both frameworks have taken after many more steps."""
    before = _memory_facts()
    for _ in range(STEADY_STEPS):
        last = one()
    wait(last)
    after = _memory_facts()
    growth = {name: after[name] - before[name] for name in before}
    # What the driver gave out counts; what a framework's pool hands round inside does not.
    taken = max(0, growth.pop("driver"))
    value = summary([taken / STEADY_STEPS], STEADY_STEPS)
    run.add(f"{case}, memory", shape, value, "bytes/step", growth_bytes=growth)


def _memory_facts() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    facts = {
        "driver": total - free,
        "torch_reserved": stats["reserved_bytes.all.current"],
        "torch_segments": stats["segment.all.allocated"],
        "torch_allocations": stats["allocation.all.allocated"],
    }
    for name, value in (jax.devices("gpu")[0].memory_stats() or {}).items():
        if name in ("pool_bytes", "peak_bytes_in_use", "bytes_reserved"):
            facts[f"jax_{name}"] = value
    return facts


def bandwidth(run: Run) -> None:
    """Bytes of keys and values read per second, against what the card reads at best."""
    limit, reader = read_bandwidth(run)
    run.add("device read", {}, limit.scaled(1e-9), "GB/s", reader=reader)
    torch.cuda.empty_cache()
    shapes = ((32, 1024), (128, 2048)) if run.quick else BANDWIDTH_SHAPES
    for requests, context in shapes:
        with run.attempt("all kernels", decode_shape(requests, context)):
            _bandwidth_of(run, requests, context, limit.median)


def _bandwidth_of(run: Run, requests: int, context: int, limit: float) -> None:
    lengths = [context] * requests
    size = kv_bytes(lengths)
    layers = layers_for(size)
    shape = decode_shape(requests, context, layers=layers)
    cache = new_cache(layers, pages_for(lengths))
    batch = make_batch([1] * requests, lengths)
    bucket = bucket_of(batch)
    query = random_query(requests)
    kv = jax_frontend.cache_handle(cache)

    def add(case: str, timing: Timing, **more: Any) -> None:
        rate = size * layers / timing.median
        figures = {"gb_per_s": rate * 1e-9, "of_limit": rate / limit}
        run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", **figures, **more)

    with run.attempt("PyTorch graph", shape):
        plan = torch_backend.plan(SPEC, cache.spec, batch, bucket=bucket, device=cache.device)
        graph = GraphStep(lambda: torch_layers(query, cache, plan, layers), plan)
        add("PyTorch graph", time_torch(run, graph), family=plan.static.main[0].family)
    with run.attempt("JAX unrolled", shape):
        jax_query = to_jax_query(query)
        jax_plan = jax_frontend.plan(SPEC, cache.spec, batch, bucket=bucket)
        program = jax_step(layers)
        add("JAX unrolled", time_jax(run, lambda: program(jax_query, kv, jax_plan)[0]))
    with run.attempt("FlashInfer graph", shape):
        theirs = GraphStep(flashinfer_layers(query, cache, batch, layers))
        add("FlashInfer graph", time_torch(run, theirs))
    release(kv)
