"""Decode called from JAX, side by side with what else JAX users can call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_frontend

from . import peers
from .gpu_decode import BANDWIDTH_SHAPES
from .gpu_steps import (
    jax_step,
    new_cache,
    random_query,
    release,
    time_jax,
    to_jax_query,
)
from .recording import Run
from .timing import Timing
from .workload import OURS, SPEC, bucket_of, decode_shape, kv_bytes, make_batch, pages_for

__all__ = ["decode"]

LAYERS = 16
TARGET_SHAPES = ((32, 1024), (8, 8192), (128, 2048))


def decode(run: Run) -> None:
    """Sixteen layers in one jit, steps in flight, the same lengths all along, by every library."""
    for requests, context in TARGET_SHAPES[:1] if run.quick else BANDWIDTH_SHAPES:
        shape = decode_shape(requests, context, layers=LAYERS)
        with run.attempt("all peers", shape):
            thorough = (requests, context) in TARGET_SHAPES and not run.quick
            _side_by_side(run, requests, context, shape, thorough)


def _side_by_side(
    run: Run, requests: int, context: int, shape: dict[str, Any], thorough: bool
) -> None:
    lengths = [context] * requests
    size = kv_bytes(lengths) * LAYERS
    cache = new_cache(LAYERS, pages_for(lengths))
    batch = make_batch([1] * requests, lengths)
    query = to_jax_query(random_query(requests))
    kv = jax_frontend.cache_handle(cache)

    def add(case: str, timing: Timing, **more: Any) -> None:
        rate = size / timing.median * 1e-9
        run.add(case, shape, timing.scaled(1e6 / LAYERS), "us/layer", gb_per_s=rate, **more)

    plan = jax_frontend.plan(SPEC, cache.spec, batch, bucket=bucket_of(batch))
    ours = jax_step(LAYERS)
    expected: jax.Array | None = None
    with run.attempt(OURS, shape):
        timing = time_jax(run, lambda: ours(query, kv, plan)[0])
        add(OURS, timing, setting="", family=plan.static.main[0].family)
        expected = ours(query, kv, plan)[0].astype(jnp.float32)

    tables = peers.tables(batch)
    pools = {False: peers.as_pools(cache)}
    for peer in peers.decode_peers(thorough=thorough):
        with run.attempt(f"{peer.name}, {peer.setting}", shape):
            if peer.head_major not in pools:
                pools[peer.head_major] = peers.as_pools(cache, head_major=True)
            step, own = peers.program(peer), pools[peer.head_major]
            timing = time_jax(run, lambda: step(query, own, tables))  # noqa: B023
            notes: dict[str, Any] = {"setting": peer.setting}
            if expected is not None:
                # A kernel that gives other numbers would be no comparison.
                out = step(query, own, tables).astype(jnp.float32)
                notes["largest_difference"] = float(jnp.abs(out - expected).max())
                notes["largest_value"] = float(jnp.abs(expected).max())
            add(peer.name, timing, **notes)
    del pools
    release(kv)
