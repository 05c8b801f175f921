"""Decode context parallelism from both front ends: gloo processes and devices of a JAX mesh.

Each front end gets the same bytes. Pools and what each rank computes over its own pages come out
bit for bit, since the launches are the same; only the combination is each framework's own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from dcp_problem import Shared, Sizes, assert_dealt, shared
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import Array, assert_within, bits, from_torch, to_torch, tolerance_of

import jax_frontend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.dcp import COMBINES
from interop.errors import IsthmusError
from jax_frontend import dcp
from torch_backend import PagedKVCache

HERE = Path(__file__).parent
RANKS, SECONDS = 4, 240
SPEC = AttentionSpec(12, 2, 16)
DECODES = ([1, 1, 1, 0, 1], [9, 1, 40, 3, 16])
MIXED = ([1, 5, 0, 7, 2], [30, 5, 8, 24, 2])
CAPPED = replace(SPEC, logits_soft_cap=3.0)
# Two drafts that continue the same token, and one that continues the first of them.
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
DRAFTS = ([4, 1, 0, 3], [30, 6, 8, 24])
TREES = np.concatenate([TREE, TREE[:1], TREE[:3]])

PROBLEMS = {
    "decode over 4": shared(SPEC, Sizes(4), *DECODES, bucket=Bucket(6, 6, 20, 1)),
    "mixed over 4": shared(SPEC, Sizes(4, 2), *MIXED, bucket=Bucket(6, 17, 20)),
    "mixed over 3, of heads that do not nest": shared(CAPPED, Sizes(3, 4), *MIXED),
    "mixed over 2 in bfloat16": shared(SPEC, Sizes(2, num_pages=24), *MIXED, dtype="bfloat16"),
    "decode over 4 in bfloat16": shared(SPEC, Sizes(4, 4), *DECODES, dtype="bfloat16"),
    "trees of drafts over 4": shared(SPEC, Sizes(4, 2), *DRAFTS, draft_masks=TREES),
    "nothing to do": shared(SPEC, Sizes(4), [0, 0], [5, 30]),
    "mixed over 1": shared(SPEC, Sizes(1, num_pages=24), *MIXED),
}

BATCH = RaggedBatch([1, 1], [9, 17], [[0, 0], [3, 4]])
REFUSED: dict[str, dict[str, Any]] = {
    "heads": {"spec": AttentionSpec(6, 2, 16)},
    "window": {"spec": replace(SPEC, sliding_window=5)},
    "no mask": {"spec": replace(SPEC, causal=False)},
    "interleave": {"interleave": 3},
    "no interleave": {"interleave": 0},
    "another cache": {"spec": AttentionSpec(12, 4, 16)},
    "no spec": {"spec": None},
    "no bucket": {"bucket": 8},
    "no table": {"batch": ([1], [9], None)},
    "narrow table": {"batch": ([1], [17], [[0]])},
    "a page of nobody": {"batch": ([1], [17], [[0, 16]])},
    "a page for two": {"batch": ([1, 1], [5, 5], [[3], [3]])},
    "a small bucket": {"bucket": Bucket(2, 1, 8)},
    "masks that no bucket announced": {
        "batch": ([2], [5], [[3]]),
        "draft_masks": np.ones((2, 2), bool),
        "bucket": Bucket(1, 2, 4),
    },
    "a cascade": {"kernel": "cascade"},
}


def options_of(sizes: Sizes, dtype: str) -> dict[str, Any]:
    return {
        "num_layers": 1,
        "num_pages": sizes.num_pages,
        "page_size": sizes.page_size,
        "dtype": dtype,
    }


def pools_of(problem: Shared, rank: int) -> list[Array]:
    return [problem.sizes.dealt(pool, rank) for pool in (problem.key_pool, problem.value_pool)]


def case_of(problem: Shared) -> dict[str, Any]:
    """A problem as dcp_gloo.py reads it."""
    sizes, batch = problem.sizes, problem.batch
    ranks = range(sizes.ranks)
    heads = np.split(problem.query, sizes.ranks, axis=1)
    return {
        "spec": problem.spec,
        "cache_of": problem.spec,
        "ranks": sizes.ranks,
        "interleave": sizes.interleave,
        "batch": (batch.query_lens, batch.kv_lens, batch.page_table),
        "draft_masks": batch.draft_masks,
        "bucket": problem.bucket,
        "options": options_of(sizes, problem.dtype),
        "query": [to_torch(np.ascontiguousarray(part), "cpu") for part in heads],
        "key": to_torch(problem.key, "cpu"),
        "value": to_torch(problem.value, "cpu"),
        "pools": [[to_torch(pool, "cpu") for pool in pools_of(problem, rank)] for rank in ranks],
    }


def refused_case(changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments that no rank can plan with."""
    return {
        "spec": SPEC,
        "cache_of": SPEC,
        "ranks": RANKS,
        "interleave": 2,
        "batch": (BATCH.query_lens, BATCH.kv_lens, BATCH.page_table),
        "bucket": None,
        "options": options_of(Sizes(RANKS), "float32"),
        **changes,
    }


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank's process returned, by the name of the case."""
    folder = tmp_path_factory.mktemp("gloo")
    cases = {name: case_of(problem) for name, problem in PROBLEMS.items()}
    cases |= {name: refused_case(changes) for name, changes in REFUSED.items()}
    torch.save(list(cases.values()), folder / "cases")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "dcp_gloo.py"), str(folder), str(rank), str(RANKS),
             str(folder / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [torch.load(folder / f"results-{rank}", weights_only=False) for rank in range(RANKS)]
    return {
        name: [each[number] for each in results[: case["ranks"]]]
        for number, (name, case) in enumerate(cases.items())
    }


def mesh_of(ranks: int) -> Mesh:
    devices = jax.devices("cpu")
    if len(devices) < ranks:
        pytest.skip(f"needs {ranks} devices")
    return Mesh(np.array(devices[:ranks]), ("dcp",))


def over_devices(problem: Shared) -> tuple[dict[str, Any], Any]:
    """Each rank's partial attention, both combinations, and the pools after the step."""
    sizes = problem.sizes
    mesh = mesh_of(sizes.ranks)
    options = options_of(sizes, problem.dtype)
    caches = [PagedKVCache(problem.spec, **options) for _ in range(sizes.ranks)]
    for rank, cache in enumerate(caches):
        for ours, share in zip((cache.k, cache.v), pools_of(problem, rank), strict=True):
            ours.copy_(to_torch(share, "cpu"))
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, P("dcp")))

    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        kv = dcp.append(key, value, kv, plan, 0)
        gathered = jax.lax.all_gather(query, "dcp", axis=1, tiled=True)
        partial = jax_frontend.attend(gathered, kv, plan.context, 0, return_lse=True)
        combined = {
            combine: dcp.attend(
                query, key, value, kv, plan, 0, axis_name="dcp", combine=combine, return_lse=True
            )
            for combine in COMBINES
        }
        return [x[None] for x in partial], combined, kv

    rows = P(None, "dcp")
    program = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(rows, P(), P(), P("dcp"), P("dcp")),
        out_specs=(P("dcp"), rows, P("dcp")),
        check_vma=False,
    )
    try:
        plan = dcp.plan(
            problem.spec, kv.spec, problem.batch, mesh, "dcp",
            interleave=sizes.interleave, bucket=problem.bucket,
        )  # fmt: skip
        partial, combined, after = jax.block_until_ready(
            jax.jit(program)(problem.query, problem.key, problem.value, kv, plan)
        )
    finally:
        jax_frontend.release_cache(kv.name)
    assert after.spec == kv.spec
    return {"partial": partial, **combined}, [(cache.k, cache.v) for cache in caches]


@pytest.mark.parametrize("name", PROBLEMS)
def test_both_front_ends(name: str, over_gloo: dict[str, list[dict[str, Any]]]) -> None:
    problem, theirs = PROBLEMS[name], over_gloo[name]
    ours, pools = over_devices(problem)
    whole = problem.pools_after()
    for rank, result in enumerate(theirs):
        for kind in (result["pools"], pools[rank]):
            assert_dealt(problem, rank, [from_torch(pool) for pool in kind], whole)
        # Attention over a rank's own pages: the same launch, the same bits.
        for one, other in zip(result["partial"], ours["partial"], strict=True):
            np.testing.assert_array_equal(bits(from_torch(one)), bits(np.asarray(other)[rank]))
    want = problem.answer()
    # Rounded by each rank, and once more in the sum.
    tolerance = [2 * getattr(tolerance_of(problem.dtype), part) for part in ("out", "lse")]
    for combine, number in itertools.product(COMBINES, (0, 1)):
        part = f"{combine}, {('out', 'lse')[number]}"
        core = np.concatenate([from_torch(each[combine][number]) for each in theirs], axis=1)
        assert_within(part, core, want[number], tolerance[number])
        got = np.asarray(ours[combine][number])
        assert_within(part, got, core, apart(problem.dtype, combine, number))


def apart(dtype: str, combine: str, number: int) -> float:
    """How far the front ends may be apart after they combined the same partial states.

    Their exp and log differ in the last bit, so in float32 a result differs by a few such bits. An
    all-to-all is followed by one sum in float32 and one rounding, in the order of ranks on both
    sides: at most the last bit of the output's dtype differs. A reduce-scatter adds what was
    rounded before, in an order and a precision of the framework's own.
    """
    if dtype == "float32" or number == 1:
        return 1e-6
    return 2.0**-8 if combine == "a2a" else 2.0**-6


@pytest.mark.parametrize("name", REFUSED)
def test_both_front_ends_refuse_in_the_same_words(
    name: str, over_gloo: dict[str, list[dict[str, Any]]]
) -> None:
    case = refused_case(REFUSED[name])
    cache = PagedKVCache(case["cache_of"], **case["options"])
    mesh = mesh_of(RANKS)
    with pytest.raises(IsthmusError) as error:
        batch = RaggedBatch(*case["batch"], draft_masks=case.get("draft_masks"))
        dcp.plan(
            case["spec"], cache.spec, batch, mesh, "dcp", interleave=case["interleave"],
            bucket=case["bucket"], kernel=case.get("kernel"),
        )  # fmt: skip
    text = f"{type(error.value).__name__}: {error.value}"
    assert over_gloo[name] == [{"error": text}] * RANKS
