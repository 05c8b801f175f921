"""One rank of a group of processes, each of which runs ``python dcp_ranks.py``.

What a rank is to do is the name of a function below. It leaves what it found in a file of its own,
for the test that started it.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dcp_problem import SMALL, Shared, Sizes, shared
from problem import from_torch, to_torch

from interop import AttentionSpec, Bucket
from interop.dcp import COMBINES
from interop.errors import IsthmusError
from torch_backend import PagedKVCache, dcp

# 24 query heads are a multiple of every number of ranks; 3 ranks' heads are no runs of KV heads.
SPEC = AttentionSpec(24, 2, 8)
TIMEOUT = timedelta(seconds=20)


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
    """Give each rank something of its own; nobody may wait for anybody."""
    problem = small()
    first = rank.rank == 0
    cache = cache_of(problem, rank.rank)

    def plan(**changes: Any) -> Any:
        given = {
            "spec": problem.spec,
            "cache_spec": cache.spec,
            "batch": problem.batch,
            "interleave": 2,
            "bucket": problem.bucket,
        } | (changes if first else {})
        names = ("spec", "cache_spec", "batch")
        rest = {name: given[name] for name in ("interleave", "bucket")}
        return dcp.plan(*(given[name] for name in names), rank.group, **rest)

    longer = shared(SMALL, Sizes(2, 2), [1, 3], [10, 12]).batch
    said = {
        name: _said(lambda changes=changes: plan(**changes))
        for name, changes in {
            "spec": {"spec": replace(SMALL, sm_scale=0.5)},
            "cache_spec": {"cache_spec": replace(cache.spec, num_pages=32)},
            "batch": {"batch": longer},
            "interleave": {"interleave": 1},
            "bucket": {"bucket": Bucket(4, 8, 32)},
            "a window": {"spec": replace(SMALL, sliding_window=4)},
            "no batch": {"batch": None},
        }.items()
    }
    # And after all of that the group still works.
    said["nothing"] = _said(plan)
    return said


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


def main(name: str, rank: int, ranks: int, folder: str) -> None:
    """Run function `name` as one of several ranks."""
    # The reference family is asked for on purpose.
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    found = globals()[name](Rank(rank, ranks))
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(found))
    # No goodbye to a group that may have lost a rank.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
