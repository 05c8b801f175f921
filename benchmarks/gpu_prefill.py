"""Prefill on a GPU: through pages, over a request's own rows, and mixed with decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch

from . import peers
from .gpu_steps import (
    DTYPE,
    GraphStep,
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
from .workload import SPEC, bucket_of, causal_flops, make_batch, pages_for

__all__ = ["PREFILL_SHAPES", "mixed", "prefill"]

PREFILL_SHAPES = ((1, 16384), (8, 2048))
LAYERS = 4
# Decodes as (requests, context), prefills as (requests, new tokens, context before them).
MIXES = (
    ((32, 1024), (1, 512, 0)),
    ((32, 1024), (1, 2048, 2048)),
    ((128, 2048), (1, 2048, 0)),
    ((128, 2048), (4, 1024, 4096)),
    ((8, 8192), (1, 8192, 0)),
)


def prefill(run: Run) -> None:
    """Causal prefill of whole requests, as a rate of floating point operations."""
    for requests, length in PREFILL_SHAPES[:1] if run.quick else PREFILL_SHAPES:
        shape = {"requests": requests, "length": length, "layers": LAYERS}
        with run.attempt("all kernels", shape):
            _prefill_of(run, requests, length, shape)


def _prefill_of(run: Run, requests: int, length: int, shape: dict[str, Any]) -> None:
    lengths = [length] * requests
    flops = causal_flops(lengths) * LAYERS
    tokens = sum(lengths)
    batch = make_batch(lengths, lengths)
    cache = new_cache(LAYERS, pages_for(lengths))
    query = random_query(tokens)
    key, value = (
        torch.randn(tokens, SPEC.num_kv_heads, SPEC.head_dim, dtype=DTYPE, device="cuda")
        for _ in range(2)
    )
    jax_query, jax_key, jax_value = (to_jax_query(rows) for rows in (query, key, value))
    kv = jax_frontend.cache_handle(cache)

    def add(case: str, timing: Timing, **more: Any) -> None:
        rate = flops / timing.median * 1e-12
        run.add(case, shape, timing.scaled(1e3 / LAYERS), "ms/layer", tflops=rate, **more)

    def plans(bucket: Bucket) -> tuple[AttentionPlan[torch.Tensor], AttentionPlan[jax.Array]]:
        return (
            torch_backend.plan(SPEC, cache.spec, batch, bucket=bucket, device=cache.device),
            jax_frontend.plan(SPEC, cache.spec, batch, bucket=bucket),
        )

    with run.attempt("through pages", shape):
        plan, jax_plan = plans(bucket_of(batch))
        timing = time_torch(run, lambda: torch_layers(query, cache, plan, LAYERS))
        add("through pages, PyTorch", timing, family=plan.static.main[0].family)
        through_pages = _chain(
            lambda x, kv, plan, layer: (jax_frontend.attend(x, kv, plan, layer), kv)
        )
        timing = time_jax(run, lambda: through_pages(jax_query, kv, jax_plan))
        add("through pages, JAX", timing)

    with run.attempt("own rows and write pages", shape):
        first, jax_first = plans(bucket_of(batch, without_context=True))

        def whole() -> Any:
            x = query
            for layer in range(LAYERS):
                x = torch_backend.paged_attention(x, key, value, cache, first, layer)
            return x

        assert first.static.own is not None
        family = first.static.own.family
        add("own rows and write pages, PyTorch", time_torch(run, whole), family=family)
        with_pages = _chain(
            lambda x, kv, plan, layer, key, value: jax_frontend.paged_attention(
                x, key, value, kv, plan, layer
            )
        )
        timing = time_jax(run, lambda: with_pages(jax_query, kv, jax_first, jax_key, jax_value))
        add("own rows and write pages, JAX", timing)

    with run.attempt("own rows alone", shape):
        _own_rows(run, add, batch, (query, key, value), (jax_query, jax_key, jax_value))

    dense = tuple(
        rows.reshape(requests, length, *rows.shape[1:]) for rows in (jax_query, jax_key, jax_value)
    )
    with run.attempt("cuDNN dense, JAX", shape):

        @jax.jit
        def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            x = query * 2
            for _ in range(LAYERS):
                x = jax.nn.dot_product_attention(
                    x, key, value, scale=SPEC.sm_scale, is_causal=True, implementation="cudnn"
                )
            return x * 2

        add("cuDNN dense, JAX", time_jax(run, lambda: cudnn(*dense)))

    for page_size in (16, 128):
        case = f"flash-attn3-jax, pages of {page_size}"
        with run.attempt(case, shape):
            pools = peers.as_pools(cache, page_size)
            tables = peers.tables(make_batch(lengths, lengths, page_size=page_size))
            theirs = peers.program(peers.flash_attn3(1))
            timing = time_jax(run, lambda: theirs(jax_query, pools, tables))  # noqa: B023
            add(case, timing)
    release(kv)


def _chain(layer_of: Callable[..., tuple[jax.Array, Any]]) -> Callable[..., jax.Array]:
    """Compile a step of `LAYERS` layers, each a call ``(x, kv, plan, layer, *rows)``."""

    def step(query: jax.Array, kv: Any, plan: Any, *rows: jax.Array) -> jax.Array:
        x = query * 2
        for layer in range(LAYERS):
            x, kv = layer_of(x, kv, plan, layer, *rows)
        return x * 2

    return jax.jit(step)


def _own_rows(
    run: Run,
    add: Callable[..., None],
    batch: RaggedBatch,
    rows: Sequence[torch.Tensor],
    jax_rows: Sequence[jax.Array],
) -> None:
    """Attention without a cache: no pages are read or written."""
    spec = AttentionSpec(SPEC.num_qo_heads, SPEC.num_kv_heads, SPEC.head_dim, dtype="bfloat16")
    bucket = Bucket(batch.num_requests, batch.num_tokens, batch.num_tokens, batch.max_query_len)
    query, key, value = rows
    plan = torch_backend.plan(spec, None, batch, bucket=bucket, device=query.device)

    def step() -> Any:
        x = query
        for _ in range(LAYERS):
            x = torch_backend.ragged_attention(x, key, value, plan)
        return x

    add("own rows alone, PyTorch", time_torch(run, step), family=plan.static.main[0].family)
    jax_plan = jax_frontend.plan(spec, None, batch, bucket=bucket)
    program = _chain(
        lambda x, kv, plan, layer, key, value: (
            jax_frontend.ragged_attention(x, key, value, plan),
            kv,
        )
    )
    jax_query, *others = jax_rows
    add("own rows alone, JAX", time_jax(run, lambda: program(jax_query, None, jax_plan, *others)))


def mixed(run: Run) -> None:
    """A batch of decodes and prefills: one launch over all, and what the plan makes of it."""
    for decodes, prefills in MIXES[:2] if run.quick else MIXES:
        shape = {"decodes": list(decodes), "prefills": list(prefills), "layers": LAYERS}
        with run.attempt("both ways", shape):
            _mix(run, decodes, prefills, shape)


def _mix(
    run: Run,
    decodes: tuple[int, int],
    prefills: tuple[int, int, int],
    shape: dict[str, Any],
) -> None:
    first = [decodes[1]] * decodes[0]
    count, new, before = prefills
    kv_lens = first + [before + new] * count
    query_lens = [1] * len(first) + [new] * count
    batch = make_batch(query_lens, kv_lens)
    cache = new_cache(LAYERS, pages_for(kv_lens))
    query = random_query(sum(query_lens))

    def one(case: str, kernel: str | None) -> None:
        with run.attempt(case, shape):
            plan = torch_backend.plan(
                SPEC,
                cache.spec,
                batch,
                bucket=bucket_of(batch),
                device=cache.device,
                kernel=kernel,
            )
            step = GraphStep(lambda: torch_layers(query, cache, plan, LAYERS))
            timing = time_torch(run, step)
            families = [launch.family for launch in plan.static.main]
            run.add(case, shape, timing.scaled(1e6 / LAYERS), "us/layer", families=families)

    one("one launch, FA2", "fa2")
    one("as planned", None)
    release()
