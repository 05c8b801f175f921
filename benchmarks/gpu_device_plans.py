"""Plans made on the device, and a whole decode loop in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_backend
from interop import Bucket, CacheSpec
from interop.ffi import python_calls
from torch_backend import PagedKVCache

from .gpu_steps import (
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
from .timing import Timing, summary
from .workload import PAGE_SIZE, SPEC, decode_shape, make_batch, pages_for

__all__ = ["loop", "planning"]

# Plans that one program makes, each from the lengths that the one before it leaves.
CHAIN = 16
# Tokens that the loop decodes, and lengths at which a step of it is timed alone.
TOKENS, SAMPLED = 128, 5
LAYERS = 32

# Ways to plan: whether the schedule may split keys among thread blocks.
SPLITS = {"split": True, "unsplit": False}


def planning(run: Run) -> None:
    """Planning a decode of 8k tokens on the device, wholly inside programs of both frameworks."""
    context = 8192
    for requests in (32, 256):
        lengths = [context] * requests
        batch = make_batch([1] * requests, lengths)
        table = np.asarray(batch.page_table, np.int32)
        cache = CacheSpec(
            num_layers=LAYERS,
            num_pages=pages_for(lengths),
            page_size=PAGE_SIZE,
            num_kv_heads=SPEC.num_kv_heads,
            head_dim=SPEC.head_dim,
            device="cuda",
        )
        bucket = Bucket(requests, requests, pages_for(lengths), 1)
        lens = np.full(requests, context - CHAIN - 1, np.int32)
        offsets = np.arange(requests + 1, dtype=np.int32)
        arrays = lens, offsets, table
        shape = decode_shape(requests, context)
        for name, split in SPLITS.items():
            for framework, one in (("JAX", _jax_plans), ("PyTorch graph", _torch_plans)):
                case = f"{framework}, {name}"
                with run.attempt(case, shape):
                    timing = one(run, cache, bucket, split, arrays)
                    run.add(case, shape, timing.scaled(1e6 / CHAIN), "us")


def _jax_plans(
    run: Run, cache: CacheSpec, bucket: Bucket, split: bool, arrays: tuple[Any, ...]
) -> Timing:
    @jax.jit
    def plans(lens: jax.Array, offsets: jax.Array, table: jax.Array) -> list[jax.Array]:
        # As in a loop, the arrays are the program's own.
        lens, table, made = lens + 0, jnp.maximum(table, 0), []
        for _ in range(CHAIN):
            plan, status = jax_frontend.plan_on_device(
                SPEC, cache, lens, offsets, table, bucket=bucket, split=split
            )
            lens = lens + 1 + status
            made.append(plan.metadata)
        return made

    there = [jax.device_put(array, jax.devices("gpu")[0]) for array in arrays]
    return time_jax(run, lambda: plans(*there))


def _torch_plans(
    run: Run, cache: CacheSpec, bucket: Bucket, split: bool, arrays: tuple[Any, ...]
) -> Timing:
    start, offsets, table = (torch.from_numpy(array).cuda() for array in arrays)
    lens = start.clone()
    plan, _ = torch_backend.plan_on_device(
        SPEC, cache, lens, offsets, table, bucket=bucket, split=split
    )

    def plans() -> torch.Tensor:
        lens.copy_(start)
        for _ in range(CHAIN):
            _, status = torch_backend.plan_on_device(
                SPEC, cache, lens, offsets, table, bucket=bucket, split=split, into=plan
            )
            lens.add_(1)
        return status

    return time_torch(run, GraphStep(plans))


def loop(run: Run) -> None:
    """128 tokens at 32 x 1024 through 32 layers, against the same kernels without all the rest."""
    requests, context = 32, 1024
    longest = context + TOKENS
    cache = new_cache(LAYERS, pages_for([longest] * requests))
    query = random_query(requests)
    shape = decode_shape(requests, context, layers=LAYERS, tokens=TOKENS)
    kv = jax_frontend.cache_handle(cache)
    for name, split in SPLITS.items():
        case = f"kernels alone, {name}"
        with run.attempt(case, shape):
            run.add(case, shape, _kernels(run, cache, query, split), "us")
        case = f"JAX loop, {name}"
        with run.attempt(case, shape):
            program = _program(cache, to_jax_query(query), kv, split)
            timing = time_jax(run, program)
            run.add(case, shape, timing.scaled(1e6 / TOKENS), "us")
            calls = summary([_calls(program) / TOKENS])
            run.add(f"{case}, handler calls", shape, calls, "a token")
            with run.attempt(f"{case}, copies", shape):
                copies = {key: count / TOKENS for key, count in _copies(program).items()}
                to_device = summary([copies["HtoD"]])
                run.add(f"{case}, copies to the device", shape, to_device, "a token", **copies)
    release(kv)


def _kernels(run: Run, cache: PagedKVCache, query: torch.Tensor, split: bool) -> Timing:
    """A step's attention and writes, recorded by PyTorch, on average over the lengths met."""
    requests, context = query.shape[0], 1024
    longest = context + TOKENS
    table = make_batch([1] * requests, [longest] * requests).page_table
    bucket = Bucket(requests, requests, pages_for([longest] * requests), 1)
    offsets = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    there = torch.from_numpy(np.asarray(table, np.int32)).cuda()
    timings = []
    for length in np.linspace(context + 1, longest, SAMPLED).astype(int).tolist():
        lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
        plan, _ = torch_backend.plan_on_device(
            SPEC, cache.spec, lens, offsets, there, bucket=bucket, split=split
        )
        graph = GraphStep(lambda plan=plan: torch_layers(query, cache, plan, LAYERS, write=True))
        timings.append(time_torch(run, graph))
    # Time grows with length in a line, so the mean of evenly spaced lengths is that of all.
    columns = ([t.median for t in timings], [t.low for t in timings], [t.high for t in timings])
    median, low, high = (float(np.mean(column)) for column in columns)
    return Timing(median, low, high, timings[0].repeats, timings[0].steps).scaled(1e6)


def _program(
    cache: PagedKVCache,
    query: jax.Array,
    kv: jax_frontend.CacheHandle,
    split: bool,
) -> Callable[[], Any]:
    """The loop as one call; its model is attention alone, layer after layer."""
    requests, context = query.shape[0], 1024
    longest = context + TOKENS
    table = make_batch([1] * requests, [longest] * requests).page_table

    def loop(query: jax.Array, kv: Any, *arrays: jax.Array) -> Any:
        def model(token_ids: jax.Array, positions: jax.Array, kv: Any, plan: Any) -> Any:
            # Each token's query is another one, as in a model.
            x = query * (1 + token_ids[:, None, None]).astype(query.dtype)
            for layer in range(LAYERS):
                rows = x[:, : SPEC.num_kv_heads]
                x, kv = jax_frontend.paged_attention(x, rows, rows, kv, plan, layer)
            return x[:, 0], kv

        return jax_frontend.generate(
            model,
            arrays[0],
            kv,
            arrays[1],
            arrays[2],
            spec=SPEC,
            max_new_tokens=TOKENS,
            split=split,
        )

    arrays = (
        np.zeros(requests, np.int32),
        np.full(requests, context, np.int32),
        np.asarray(table, np.int32),
    )
    there = [jax.device_put(array, jax.devices("gpu")[0]) for array in arrays]
    compiled, state = jax.jit(loop), [kv]

    def call() -> jax.Array:
        made = compiled(query, state[0], *there)
        state[0] = made.cache
        result: jax.Array = made.tokens
        return result

    assert int(np.asarray(compiled(query, kv, *there).num_tokens).min()) == TOKENS
    return call


def _calls(program: Callable[[], Any]) -> int:
    """Handler calls of one run, after those in which XLA records."""
    before = python_calls.total()
    jax.block_until_ready(program())
    return python_calls.total() - before


def _copies(program: Callable[[], Any]) -> dict[str, int]:
    """Copies between host and device in one run, as the card's profiler counts them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        jax.block_until_ready(program())
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    if not any("BatchPrefill" in name or "prefill" in name.lower() for name in names):
        raise RuntimeError("the profiler saw no attention kernel, so its copies mean nothing")
    return {kind: sum(f"Memcpy {kind}" in name for name in names) for kind in ("HtoD", "DtoH")}
