"""Decode over a cache that is spread over four ranks, on the CPU: what combining costs of a step.

The ranks are virtual devices of a process of its own, since JAX makes them when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
from interop import Bucket
from interop.dcp import COMBINES, wire_bytes
from jax_frontend import dcp, merging
from torch_backend import PagedKVCache
from torch_backend.merging import combine_states, pack_partial, scale_partial, unpack_partial

from .recording import Run
from .timing import Timing, measure_calls
from .workload import PAGE_SIZE, SPEC, decode_shape, make_batch

__all__ = ["combine"]

RANKS = 4
CONTEXT = 8192


def combine(run: Run) -> None:
    """A decode step from ``jax.jit`` over four ranks, and all of it but the attention."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cpu_dcp", str(file), str(int(run.quick))],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={RANKS}",
            },
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the process of the ranks ended: {done.stderr[-1500:]}")
        found = json.loads(file.read_text())
    run.results += found["results"]
    run.errors += found["errors"]


def _measure(run: Run) -> None:
    for requests in (1,) if run.quick else (1, 4):
        shape = decode_shape(requests, CONTEXT, dtype="float32", ranks=RANKS)
        with run.attempt("jax.jit", shape):
            _over_devices(run, requests, shape)
        with run.attempt("PyTorch", shape):
            _arithmetic(run, requests, shape)


def _add(run: Run, case: str, shape: dict[str, Any], timing: Timing, **more: Any) -> None:
    run.add(case, shape, timing.scaled(1e3), "ms", **more)


def _over_devices(run: Run, requests: int, shape: dict[str, Any]) -> None:
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("dcp",))
    heads, split, whole = P(None, "dcp"), P("dcp"), P()

    def on(part: P, *sizes: int) -> jax.Array:
        numbers = np.random.default_rng(0).standard_normal(sizes, np.float32)
        array: jax.Array = jax.device_put(numbers, NamedSharding(mesh, part))
        return array

    def jitted(step: Callable[..., Any], *parts: P) -> Callable[..., Any]:
        mapped = jax.shard_map(step, mesh=mesh, in_specs=parts, out_specs=heads, check_vma=False)
        return jax.jit(mapped)

    batch = make_batch([1] * requests, [CONTEXT] * requests, page_size=PAGE_SIZE * RANKS)
    pages = int(batch.pages(PAGE_SIZE * RANKS).indptr[-1])
    caches = [
        PagedKVCache(SPEC, num_layers=1, num_pages=pages, page_size=PAGE_SIZE, dtype="float32")
        for _ in range(RANKS)
    ]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, split))
    bucket = Bucket(requests, requests, pages, 1)
    plan = dcp.plan(SPEC, kv.spec, batch, mesh, "dcp", bucket=bucket)
    query = on(heads, requests, SPEC.num_qo_heads, SPEC.head_dim)
    key = on(whole, requests, SPEC.num_kv_heads, SPEC.head_dim)
    out = on(split, RANKS * requests, SPEC.num_qo_heads, SPEC.head_dim)
    lse = on(split, RANKS * requests, SPEC.num_qo_heads)
    calls = 10 if run.quick else 60
    for way in COMBINES:

        def step(query: Any, key: Any, kv: Any, plan: Any, way: str = way) -> Any:
            return dcp.attend(query, key, key, kv, plan, 0, axis_name="dcp", combine=way)

        def path(query: Any, out: Any, lse: Any, way: str = way) -> Any:
            # All that a step does but the attention itself, whose results are given.
            gathered = jax.lax.all_gather(query, "dcp", axis=1, tiled=True)
            return _combined(gathered + out, lse, way)

        program = jitted(step, heads, whole, split, split)
        part = jitted(path, heads, split, split)
        timing = measure_calls(
            lambda _, program=program: program(query, key, kv, plan).block_until_ready(),
            calls=calls,
        )
        alone = measure_calls(
            lambda _, part=part: part(query, out, lse).block_until_ready(), calls=4 * calls
        )
        _add(run, f"{way}, step", shape, timing, wire_bytes=wire_bytes(plan, way))
        share = alone.median / timing.median
        _add(run, f"{way}, combine", shape, alone, of_step=share)
    jax_frontend.release_cache(kv.name)


def _combined(out: jax.Array, lse: jax.Array, way: str) -> jax.Array:
    if way == "a2a":
        packed = merging.pack_partial(out, lse, RANKS)
        packed = jax.lax.all_to_all(packed, "dcp", split_axis=0, concat_axis=0)
        return merging.combine_states(*merging.unpack_partial(packed, out.dtype))[0]
    lses = jax.lax.all_gather(lse, "dcp")
    scaled, _ = merging.scale_partial(out, lses, jax.lax.axis_index("dcp"))
    summed: jax.Array = jax.lax.psum_scatter(scaled, "dcp", scatter_dimension=1, tiled=True)
    return summed


def _arithmetic(run: Run, requests: int, shape: dict[str, Any]) -> None:
    """What one rank computes to combine in PyTorch, without what crosses the wire."""
    out = torch.randn(requests, SPEC.num_qo_heads, SPEC.head_dim)
    lses = torch.randn(RANKS, requests, SPEC.num_qo_heads)

    def a2a() -> object:
        # Messages of one rank stand for those that it receives, which are as large.
        return combine_states(*unpack_partial(pack_partial(out, lses[0], RANKS)))

    def ag_rs() -> object:
        return scale_partial(out, lses, 0)

    for way, one in (("ag_rs", ag_rs), ("a2a", a2a)):
        timing = measure_calls(lambda _, one=one: one(), calls=20 if run.quick else 200)
        _add(run, f"{way}, arithmetic of one rank, PyTorch", shape, timing)


def _main(file: str, quick: str) -> None:
    run = Run(quick=bool(int(quick)), benchmark="cpu_dcp")
    _measure(run)
    Path(file).write_text(json.dumps({"results": run.results, "errors": run.errors}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
