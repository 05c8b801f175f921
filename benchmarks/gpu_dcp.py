"""Decode over a cache that is spread over ranks, on one GPU: the ranks take turns.

What the ranks exchange is not measured here, only what each of them computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

import jax_frontend
import torch_backend
from interop import Bucket
from interop.dcp import context_spec
from interop.sharding import LocalBatch, TokenShards
from torch_backend import PagedKVCache
from torch_backend.merging import combine_states, pack_partial, scale_partial, unpack_partial

from .gpu_steps import (
    DTYPE,
    GraphStep,
    layers_for,
    new_cache,
    random_query,
    release,
    time_jax,
    time_torch,
    to_jax_query,
    torch_layers,
)
from .recording import Run
from .timing import Timing
from .workload import PAGE_SIZE, SPEC, bucket_of, decode_shape, kv_bytes, make_batch, pages_for

__all__ = ["combine", "partials"]

RANKS = 4
REQUESTS, CONTEXT = 4, 32768
CALLS = 64  # of a graph that measures something small


def partials(run: Run) -> None:
    """Attention of all ranks over their own pages, one rank after another, against one cache.

    Four launches pay four times for what a launch costs, so the plain kernel is measured on as many
    bytes as one rank has, too.
    """
    lengths = [CONTEXT] * REQUESTS
    layers = layers_for(kv_bytes(lengths))
    shape = decode_shape(REQUESTS, CONTEXT, layers=layers, ranks=RANKS)
    query = random_query(REQUESTS)

    def add(case: str, timing: Timing, family: str) -> None:
        rate = kv_bytes(lengths) * layers / timing.median
        per_layer = timing.scaled(1e6 / layers)
        run.add(case, shape, per_layer, "us/layer", gb_per_s=rate * 1e-9, family=family)

    with run.attempt("one cache, PyTorch graph", shape):
        add("one cache, PyTorch graph", *_one_cache(run, query, lengths, layers))
        torch.cuda.empty_cache()
    with run.attempt("a cache of one share, PyTorch graph", shape):
        share = [CONTEXT // RANKS] * REQUESTS
        more = RANKS * layers
        timing, family = _one_cache(run, query, share, more)
        rate = kv_bytes(share) * more / timing.median
        per_layer = timing.scaled(1e6 / more)
        case = "a cache of one share, PyTorch graph"
        run.add(case, shape, per_layer, "us/layer", gb_per_s=rate * 1e-9, family=family)
        torch.cuda.empty_cache()
    caches = [new_cache(layers, pages_for([CONTEXT // RANKS] * REQUESTS)) for _ in range(RANKS)]
    views, bucket = _views(lengths)
    for case, measure in (("PyTorch graph", _torch), ("JAX unrolled", _jax)):
        with run.attempt(f"ranks in turn, {case}", shape):
            add(f"ranks in turn, {case}", *measure(run, query, caches, views, bucket, layers))
    torch.cuda.empty_cache()


def _one_cache(
    run: Run, query: torch.Tensor, lengths: list[int], layers: int
) -> tuple[Timing, str]:
    cache = new_cache(layers, pages_for(lengths))
    batch = make_batch([1] * len(lengths), lengths)
    plan = torch_backend.plan(SPEC, cache.spec, batch, bucket=bucket_of(batch), device=cache.device)
    graph = GraphStep(lambda: torch_layers(query, cache, plan, layers), plan)
    return time_torch(run, graph), plan.static.main[0].family


def _views(lengths: list[int]) -> tuple[list[LocalBatch], Bucket]:
    """Each rank's view of a decode, and the bucket of one rank."""
    batch = make_batch([1] * len(lengths), lengths, page_size=PAGE_SIZE * RANKS)
    shards = TokenShards(RANKS)
    views = [LocalBatch.of(batch, shards, rank, context_only=False) for rank in range(RANKS)]
    pages = max(int(view.pages(PAGE_SIZE).indptr[-1]) for view in views)
    return views, Bucket(len(lengths), len(lengths), pages, 1)


def _torch(
    run: Run,
    query: torch.Tensor,
    caches: list[PagedKVCache],
    views: list[LocalBatch],
    bucket: Bucket,
    layers: int,
) -> tuple[Timing, str]:
    plans = [
        torch_backend.plan(context_spec(SPEC), cache.spec, view, bucket=bucket, device=cache.device)
        for cache, view in zip(caches, views, strict=True)
    ]

    def body() -> torch.Tensor:
        x = query
        for layer in range(layers):
            outs = [
                torch_backend.attend(x, cache, plan, layer, return_lse=True)[0]
                for cache, plan in zip(caches, plans, strict=True)
            ]
            # Any of them stands for the sum: a model's next layer has to wait for this one.
            x = outs[-1]
        return x

    return time_torch(run, GraphStep(body)), plans[0].static.main[0].family


def _jax(
    run: Run,
    query: torch.Tensor,
    caches: list[PagedKVCache],
    views: list[LocalBatch],
    bucket: Bucket,
    layers: int,
) -> tuple[Timing, str]:
    handles = [jax_frontend.cache_handle(cache) for cache in caches]
    plans = [
        jax_frontend.plan(context_spec(SPEC), cache.spec, view, bucket=bucket)
        for cache, view in zip(caches, views, strict=True)
    ]

    def step(x: jax.Array, handles: Any, plans: Any) -> jax.Array:
        x = x * 2
        for layer in range(layers):
            # Every rank's result goes on, or XLA would leave its attention out.
            outs = [
                jax_frontend.attend(x, kv, plan, layer, return_lse=True)[0]
                for kv, plan in zip(handles, plans, strict=True)
            ]
            x = sum(outs[1:], outs[0])
        return x * 2

    program: Callable[..., jax.Array] = jax.jit(step)
    rows = to_jax_query(query)
    try:
        timing = time_jax(run, lambda: program(rows, handles, plans))
        return timing, plans[0].static.main[0].family
    finally:
        release(*handles)


def combine(run: Run) -> None:
    """What a rank computes to combine, by the call."""
    for tokens in (4, 256) if run.quick else (4, 32, 256):
        shape = {"tokens": tokens, "ranks": RANKS, "heads": SPEC.num_qo_heads}
        for case, (call, size) in _calls(tokens).items():
            with run.attempt(case, shape):
                timing = time_torch(run, GraphStep(_repeated(call)))
                rate = size * CALLS / timing.median
                per_call = timing.scaled(1e6 / CALLS)
                run.add(case, shape, per_call, "us/call", gb_per_s=rate * 1e-9)


def _calls(tokens: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Calls by name, each with the bytes that it has to read and write at least."""
    heads, width = SPEC.num_qo_heads, SPEC.head_dim_v
    outs = torch.randn(RANKS, tokens, heads, width, dtype=DTYPE, device="cuda")
    lses = torch.randn(RANKS, tokens, heads, device="cuda")
    received = torch.stack(
        [pack_partial(out, lse, RANKS)[0] for out, lse in zip(outs, lses, strict=True)]
    )
    row = width * DTYPE.itemsize + 4
    combined = tokens * heads * (RANKS + 1) * row
    return {
        "a2a, pack": (lambda: pack_partial(outs[0], lses[0], RANKS), tokens * heads * 2 * row),
        "a2a, combine": (lambda: combine_states(*unpack_partial(received)), combined // RANKS),
        "ag_rs, scale": (
            lambda: scale_partial(outs[0], lses, 0),
            tokens * heads * (2 * row + 4 * (RANKS - 1)),
        ),
        "combine, all heads": (lambda: combine_states(outs, lses), combined),
    }


def _repeated(call: Callable[[], Any]) -> Callable[[], None]:
    def body() -> None:
        for _ in range(CALLS):
            call()

    return body
