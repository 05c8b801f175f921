"""Run by test_dcp_processes.py in processes of their own, with virtual CPU devices.

``steps FILE RANKS STEPS ROUND WAIT``
    Many steps in flight over that many ranks, waiting for every WAIT-th (never, if 0); after ROUND
    steps the same lengths come again. Writes the outputs.
``rank FILE PROCESS PORT``
    One of two processes whose devices are the ranks together; writes what it computed, and the
    errors of plans that the other process does not make.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from dcp_problem import SMALL, Shared, small_step
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import to_torch

import jax_frontend
from interop import Bucket, RaggedBatch
from interop.errors import IsthmusError
from jax_frontend import dcp
from torch_backend import PagedKVCache

SPEC = SMALL


def jitted(step: Any, mesh: Mesh) -> Any:
    """A step on all ranks of a mesh."""
    parts = (P(None, "dcp"), P(), P(), P("dcp"), P("dcp"))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=parts, out_specs=(P(None, "dcp"), P("dcp")), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=3)


def both_ways(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """Output and LSE by both ways to combine."""
    results = []
    for combine in ("ag_rs", "a2a"):
        *result, kv = dcp.paged_attention(
            query, key, value, kv, plan, 0, axis_name="dcp", combine=combine, return_lse=True
        )
        results += result
    return results, kv


def steps(file: str, ranks: int, count: int, round_: int, wait: int) -> None:
    """Decode step after step."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("dcp",))
    sizes: dict[str, Any] = {"num_layers": 1, "page_size": 4, "dtype": "float32"}
    caches = [PagedKVCache(SPEC, num_pages=12, **sizes) for _ in range(ranks)]
    kv: Any = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, P("dcp")))
    rng = np.random.default_rng(0)
    rows = [
        jax.device_put(rng.standard_normal((4, heads, 8), np.float32), NamedSharding(mesh, part))
        for heads, part in ((8, P(None, "dcp")), (2, P()), (2, P()))
    ]
    table = rng.permutation(12).reshape(4, 3)
    program = jitted(both_ways, mesh)
    outs = []
    for step in range(count):
        length = 1 + step % round_
        batch = RaggedBatch([1, 1, 0, 1], [length, length + 3, 3, length + 1], table)
        plan = dcp.plan(SPEC, kv.spec, batch, mesh, "dcp", bucket=Bucket(4, 4, 12, 1))
        results, kv = program(*rows, kv, plan)
        outs.append(results)
        if wait and step % wait == wait - 1:
            jax.block_until_ready(kv)
    np.savez(file, **{f"out{i}": np.stack([x[i] for x in outs]) for i in (0, 2)})


def rank(file: str, process: int, port: str) -> None:
    """Compute with the other process, and make plans that one of both cannot make."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    mesh = Mesh(np.array(jax.devices()), ("dcp",))
    problem = small_step()
    written: dict[str, Any] = {}
    for kind, kv in (("arrays", arrays_of(problem, mesh)), ("handle", handle_of(problem, mesh))):
        plan = dcp.plan(
            SPEC, kv.spec, problem.batch, mesh, "dcp", interleave=2, bucket=problem.bucket
        )
        rows = [
            spread(x, mesh, part)
            for x, part in (
                (problem.query, P(None, "dcp")),
                (problem.key, P()),
                (problem.value, P()),
            )
        ]
        results, kv = jitted(both_ways, mesh)(*rows, kv, plan)
        for number, result in enumerate(results):
            for shard in result.addressable_shards:
                written[f"{kind} {number} {shard.index[1].start}"] = np.asarray(shard.data)
    written["errors"] = json.dumps(errors(problem, arrays_of(problem, mesh).spec, mesh, process))
    np.savez(file, **written)


def spread(array: Any, mesh: Mesh, part: P) -> jax.Array:
    """Lay an array that every process has whole over the devices of all processes."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, part), lambda index: array[index]
    )


def arrays_of(problem: Shared, mesh: Mesh) -> Any:
    """Pools that JAX owns, each rank's on its device."""
    pages, sizes = problem.sizes.num_pages, problem.sizes
    kv = jax_frontend.init_cache(
        SPEC, num_layers=1, num_pages=pages * sizes.ranks, page_size=sizes.page_size,
        dtype="float32", sharding=NamedSharding(mesh, P("dcp")),
    )  # fmt: skip
    k, v = (
        spread(np.concatenate([sizes.dealt(pool, each) for each in range(4)]), mesh, P("dcp"))
        for pool in (problem.key_pool, problem.value_pool)
    )
    return replace(kv, k=k, v=v, spec=replace(kv.spec, num_pages=pages))


def handle_of(problem: Shared, mesh: Mesh) -> Any:
    """Pools that torch owns; a process has those of its own ranks."""
    sizes = problem.sizes
    mine = [
        i for i, device in enumerate(mesh.devices) if device.process_index == jax.process_index()
    ]
    caches = []
    for each in mine:
        cache = PagedKVCache(
            SPEC, num_layers=1, num_pages=sizes.num_pages, page_size=sizes.page_size,
            dtype="float32",
        )  # fmt: skip
        cache.k.copy_(to_torch(sizes.dealt(problem.key_pool, each), "cpu"))
        cache.v.copy_(to_torch(sizes.dealt(problem.value_pool, each), "cpu"))
        caches.append(cache)
    return jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, P("dcp")))


def errors(problem: Shared, cache_spec: Any, mesh: Mesh, process: int) -> dict[str, str]:
    """What ``plan`` raises where process 1 gives other arguments than process 0."""
    longer = replace(problem.bucket, num_tokens=20)
    others: dict[str, tuple[Any, ...]] = {
        "spec": (replace(SPEC, sm_scale=0.5), problem.batch, problem.bucket),
        "batch": (SPEC, RaggedBatch([1, 5], [5, 36], problem.batch.page_table[:2]), problem.bucket),
        "bucket": (SPEC, problem.batch, longer),
        "refused": (replace(SPEC, sliding_window=3), problem.batch, problem.bucket),
        "no spec": (None, problem.batch, problem.bucket),
        "none": (SPEC, problem.batch, problem.bucket),
    }
    texts = {}
    for name, other in others.items():
        spec, batch, bucket = other if process else (SPEC, problem.batch, problem.bucket)
        try:
            dcp.plan(spec, cache_spec, batch, mesh, "dcp", interleave=2, bucket=bucket)
        except IsthmusError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
