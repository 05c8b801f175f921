"""Run by test_dcp_equivalence.py, once for each rank: the core's side, over gloo.

Arguments: folder, rank, number of ranks, and the file by which ranks find each other. Reads
``cases`` and writes ``results-RANK``, both lists in `torch.save`'s format.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_backend
from interop import RaggedBatch
from interop.errors import IsthmusError
from torch_backend import PagedKVCache, dcp
from torch_backend.collectives import all_gather

SECONDS = timedelta(seconds=120)


def solve(case: dict[str, Any], group: Any, rank: int) -> dict[str, Any]:
    """What a rank computes; without rows the text of the error that planning raises."""
    batch = RaggedBatch(*case["batch"], draft_masks=case.get("draft_masks"))
    options: dict[str, Any] = case["options"]
    cache = PagedKVCache(case["cache_of"], **options)
    try:
        plan = dcp.plan(
            case["spec"], cache.spec, batch, group,
            interleave=case["interleave"], bucket=case["bucket"], kernel=case.get("kernel"),
        )  # fmt: skip
    except IsthmusError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    for ours, share in zip((cache.k, cache.v), case["pools"][rank], strict=True):
        ours.copy_(share)
    query, key, value = case["query"][rank], case["key"], case["value"]
    dcp.append(key, value, cache, plan, 0)
    gathered = torch.cat(all_gather(query, group).unbind(), dim=1)
    results = {"partial": torch_backend.attend(gathered, cache, plan.context, 0, return_lse=True)}
    for combine in ("ag_rs", "a2a"):
        results[combine] = dcp.attend(
            query, key, value, cache, plan, 0, group, combine=combine, return_lse=True
        )
    return {**results, "pools": (cache.k, cache.v)}


def main(folder: Path, rank: int, ranks: int, store: str) -> None:
    """Solve every case that this rank takes part in."""
    # Ranks share the cores.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=SECONDS
    )
    groups = {size: dist.new_group(range(size), timeout=SECONDS) for size in range(1, ranks + 1)}
    cases = torch.load(folder / "cases", weights_only=False)
    results = [
        solve(case, groups[case["ranks"]], rank) if rank < case["ranks"] else None for case in cases
    ]
    torch.save(results, folder / f"results-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
