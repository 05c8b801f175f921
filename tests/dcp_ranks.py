"""Ranks that are processes: what one of them does, and how a test starts a group of them.

What a rank is to do is the name of a function below. It leaves what it found in a file of its own,
for the test that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from dcp_problem import SMALL, Shared, Sizes, shared
from problem import from_torch, to_torch

from interop import AttentionSpec, Bucket
from interop.dcp import COMBINES
from interop.errors import IsthmusError
from torch_backend import PagedKVCache, collectives, dcp

# 24 query heads are a multiple of every number of ranks; 3 ranks' heads are no runs of KV heads.
SPEC = AttentionSpec(24, 2, 8)
TIMEOUT = timedelta(seconds=20)

SECONDS = 120


def run_ranks(folder: Path, name: str, ranks: int, *, lost: int = 0) -> list[Any]:
    """Start the processes: what each of them found, of all but the last `lost` ones."""
    # One process imports all of this once, and every rank is forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here = Path(__file__).resolve().parent
    with mock.patch.dict(os.environ, PYTHONPATH=f"{here.parent}{os.pathsep}{here}"):
        processes = [
            context.Process(target=main, args=(name, rank, ranks, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    try:
        deadline = time.monotonic() + SECONDS
        for rank, process in enumerate(processes[: ranks - lost]):
            process.join(max(1.0, deadline - time.monotonic()))
            error = folder / f"error{rank}"
            said = error.read_text() if error.exists() else f"exit code {process.exitcode}"
            assert process.exitcode == 0, f"rank {rank}: {said}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(ranks - lost)]


@dataclass(frozen=True)
class Rank:
    """Where a process stands."""

    rank: int
    ranks: int

    @property
    def group(self) -> Any:
        return dist.group.WORLD


def problems(ranks: int) -> Iterator[tuple[str, Shared]]:
    """Steps of every kind for a group of this many ranks, the same wherever they are made."""
    for interleave in (1, 2, 4, 16):
        sizes = Sizes(ranks, interleave, page_size=max(4, interleave), num_pages=32)
        edges = [many * sizes.round + off for many in (1, 2) for off in (-1, 0, 1)]
        edges += [1, max(ranks - 1, 1), ranks, ranks * interleave + 1]
        decodes = [1] * len(edges)
        yield f"decodes, I = {interleave}", shared(SPEC, sizes, decodes, edges)
        bucket = Bucket(16, 20, 64, 1)
        padded = shared(SPEC, sizes, [1, 0, 1], [edges[1], 5, 1], bucket=bucket)
        yield f"padded decodes, I = {interleave}", padded
        # A decode, a chunk after a context, a prefill, one that sits out, one without any token.
        lens = [1, 5, 7, 0, 0], [edges[3], edges[5] + 5, 7, edges[0], 0]
        mixed = shared(SPEC, sizes, *lens, bucket=Bucket(7, 15, 32))
        yield f"mixed, I = {interleave}", mixed
    sizes = Sizes(ranks, num_pages=32)
    far = shared(SPEC, sizes, [1] * 4, [3, 17, 40, 33], query_scale=12.0)
    yield "LSE far apart", far
    capped = AttentionSpec(24, 2, 8, head_dim_v=12, logits_soft_cap=2.5, sm_scale=0.7)
    yield "soft cap", shared(capped, sizes, [1, 4], [11, 9])
    half = shared(SPEC, sizes, [1, 6, 1], [30, 20, 2], dtype="bfloat16")
    yield "bfloat16", half
    if ranks == 3:
        # Ranks have query heads 0-1, 2-3 and 4-5, and key/value head 0 serves 0-2.
        irregular = AttentionSpec(6, 2, 8)
        yield "heads that do not nest", shared(irregular, sizes, [1, 4], [11, 9])


def cache_of(problem: Shared, rank: int) -> PagedKVCache:
    """A rank's cache before the step."""
    sizes = problem.sizes
    cache = PagedKVCache(
        problem.spec,
        num_layers=sizes.num_layers,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        dtype=problem.dtype,
    )
    cache.k.copy_(to_torch(sizes.dealt(problem.key_pool, rank), "cpu"))
    cache.v.copy_(to_torch(sizes.dealt(problem.value_pool, rank), "cpu"))
    return cache


def rows_of(problem: Shared, rank: int) -> list[torch.Tensor]:
    """A rank's query heads, and all key and value heads."""
    heads = problem.spec.num_qo_heads // problem.sizes.ranks
    query = problem.query[:, rank * heads : (rank + 1) * heads]
    return [to_torch(np.ascontiguousarray(x), "cpu") for x in (query, problem.key, problem.value)]


def solve(problem: Shared, rank: Rank, group: Any) -> dict[str, Any]:
    """Results of both ways to combine, and the pools after the step."""
    cache = cache_of(problem, rank.rank)
    plan = dcp.plan(
        problem.spec,
        cache.spec,
        problem.batch,
        group,
        interleave=problem.sizes.interleave,
        bucket=problem.bucket,
    )
    rows = rows_of(problem, rank.rank)
    found: dict[str, Any] = {}
    for combine in COMBINES:
        out, lse = dcp.paged_attention(
            *rows, cache, plan, 0, group, combine=combine, return_lse=True
        )
        found[combine] = from_torch(out), lse.numpy()
    found["pools"] = [from_torch(pool) for pool in (cache.k, cache.v)]
    return found


def agree(rank: Rank) -> dict[str, Any]:
    """Solve all problems."""
    return {name: solve(problem, rank, rank.group) for name, problem in problems(rank.ranks)}


def small(interleave: int = 2, ranks: int = 2) -> Shared:
    return shared(SMALL, Sizes(ranks, interleave), [1, 3], [9, 12])


def heads_and_tokens(rank: Rank) -> dict[str, Any]:
    """Two groups of two ranks: each has the tokens of one key/value head."""
    groups = [dist.new_group([0, 1], timeout=TIMEOUT), dist.new_group([2, 3], timeout=TIMEOUT)]
    half, group = rank.rank // 2, groups[rank.rank // 2]
    whole = shared(AttentionSpec(8, 2, 8), Sizes(2), [1, 4], [11, 9])
    mine = replace(
        whole,
        spec=AttentionSpec(4, 1, 8),
        query=whole.query[:, 4 * half : 4 * half + 4],
        key=whole.key[:, half : half + 1],
        value=whole.value[:, half : half + 1],
        key_pool=whole.key_pool[:, :, half : half + 1],
        value_pool=whole.value_pool[:, :, half : half + 1],
    )
    return solve(mine, Rank(rank.rank % 2, 2), group)


def eight_bits(rank: Rank) -> dict[str, Any]:
    """A prefill into pages of 8 bits, and a decode from them."""
    spec = replace(SPEC, dtype="float32")
    sizes = Sizes(rank.ranks, 2)
    cache = PagedKVCache(
        spec, num_layers=1, num_pages=16, page_size=4, dtype="fp8", scales=(0.02, 0.03)
    )
    found = {}
    for name, lens in (("prefill", ([18, 3], [18, 3])), ("decode", ([1, 1], [19, 4]))):
        problem = shared(spec, sizes, *lens)
        plan = dcp.plan(spec, cache.spec, problem.batch, rank.group, interleave=2)
        rows = rows_of(problem, rank.rank)
        found[name] = [
            from_torch(dcp.paged_attention(*rows, cache, plan, 0, rank.group, combine=combine))
            for combine in COMBINES
        ]
    return found


def _said(call: Any) -> str:
    """Class and text of the error that a call raises."""
    try:
        call()
    except (IsthmusError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagree(rank: Rank) -> dict[str, str]:
    """Give the last rank something of its own; nobody may wait for anybody."""
    problem = small(ranks=rank.ranks)
    odd = rank.rank == rank.ranks - 1
    cache = cache_of(problem, rank.rank)

    def plan(**changes: Any) -> Any:
        given = {
            "spec": problem.spec,
            "cache_spec": cache.spec,
            "batch": problem.batch,
            "interleave": 2,
            "bucket": problem.bucket,
            "kernel": None,
        } | (changes if odd else {})
        names = ("spec", "cache_spec", "batch")
        rest = {name: given[name] for name in ("interleave", "bucket", "kernel")}
        return dcp.plan(*(given[name] for name in names), rank.group, **rest)

    longer = shared(SMALL, Sizes(rank.ranks, 2), [1, 3], [10, 12]).batch
    said = {
        name: _said(lambda changes=changes: plan(**changes))
        for name, changes in {
            "spec": {"spec": replace(SMALL, sm_scale=0.5)},
            "cache_spec": {"cache_spec": replace(cache.spec, num_pages=32)},
            "batch": {"batch": longer},
            "interleave": {"interleave": 1},
            "bucket": {"bucket": Bucket(4, 8, 32)},
            "kernel": {"kernel": "reference"},
            "a window": {"spec": replace(SMALL, sliding_window=4)},
            "no batch": {"batch": None},
        }.items()
    }
    # And after all of that the group still works.
    said["nothing"] = _said(plan)
    return said


def refuses(rank: Rank) -> dict[str, Any]:
    """Rank 0 refuses a call, and lives; the others come alone to the first collective."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    problem = small(ranks=rank.ranks)
    cache = cache_of(problem, rank.rank)
    plan = dcp.plan(problem.spec, cache.spec, problem.batch, rank.group, interleave=2)
    query, key, value = rows_of(problem, rank.rank)
    if rank.rank == 0:
        query = query[1:]
    start = time.monotonic()
    said = _said(lambda: dcp.paged_attention(query, key, value, cache, plan, 0, group))
    seconds = time.monotonic() - start
    dist.barrier()  # the other group still works, and rank 0 is there until all are done
    return {"said": said, "seconds": seconds}


def collect(rank: Rank) -> dict[str, Any]:
    """What each collective gives, over the whole group, and over a part of it in its own order."""
    part = [0, 2]
    pair = dist.new_group(part, timeout=TIMEOUT)
    found: dict[str, Any] = {}
    for name, group in (("all", rank.group), ("pair", pair)):
        if name == "pair" and rank.rank not in part:
            found["outside"] = _said(lambda: collectives.check_group(pair))
            continue
        here, size = collectives.check_group(group)
        rows = 100 * rank.rank + torch.arange(float(size * 6)).view(size, 2, 3)
        strided = rows.transpose(1, 2)
        none = torch.empty(size, 0, 3)
        found[name] = {
            "place": (here, size),
            "all_gather": collectives.all_gather(rows[0].T, group),
            "reduce_scatter": collectives.reduce_scatter(strided, group),
            "all_to_all": collectives.all_to_all(strided, group),
            "of 16 bits": collectives.all_to_all(strided.bfloat16(), group),
            "of none": [
                collective(none, group).shape
                for collective in (
                    collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all
                )
            ],
        }  # fmt: skip
    return found


def dies(rank: Rank) -> dict[str, Any]:
    """The last rank ends in the middle of a step."""
    problem = small(ranks=rank.ranks)
    cache = cache_of(problem, rank.rank)
    group = rank.group
    plan = dcp.plan(problem.spec, cache.spec, problem.batch, group, interleave=2)
    rows = rows_of(problem, rank.rank)
    dcp.paged_attention(*rows, cache, plan, 0, group)
    if rank.rank == rank.ranks - 1:
        os._exit(3)
    return {"said": _said(lambda: [dcp.attend(*rows, cache, plan, 0, group) for _ in range(2)])}


def main(name: str, rank: int, ranks: int, folder: Path) -> None:
    """Run function `name` as one of several ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        found = globals()[name](Rank(rank, ranks))
        (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # No goodbye to a group that may have lost a rank.
    os._exit(0)
