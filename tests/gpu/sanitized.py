"""A decode by FA2 and a prefill by FA3, each after a write: run under compute-sanitizer."""

from __future__ import annotations

import numpy as np
import torch

import torch_backend
from interop import AttentionSpec, RaggedBatch

SPEC = AttentionSpec(4, 2, 128)
# Lengths that fill neither pages nor tiles; the mean query of the prefill is long enough for FA3.
STEPS = {"decode": ([1, 1, 1], [50, 1, 333]), "prefill": ([150, 131], [150, 200])}


def main() -> None:
    """Run both and see that the results are numbers."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    wanted = {"decode": "fa2", "prefill": "fa3" if hopper else "fa2"}
    for name, (query_lens, kv_lens) in STEPS.items():
        counts = [-(-n // 16) for n in kv_lens]
        table = np.zeros((len(kv_lens), max(counts)), np.int32)
        for row, end, count in zip(table, np.cumsum(counts), counts, strict=True):
            row[:count] = np.arange(end - count, end)
        batch = RaggedBatch(query_lens, kv_lens, table)
        cache = torch_backend.PagedKVCache(
            SPEC, num_layers=1, num_pages=sum(counts), page_size=16, device="cuda"
        )
        cache.k.normal_()
        cache.v.normal_()
        plan = torch_backend.plan(SPEC, cache.spec, batch, fallback="raise")
        families = {launch.family for launch in plan.static.main}
        assert families == {wanted[name]}, families
        query, key, value = (
            torch.randn(batch.num_tokens, heads, 128, device="cuda").bfloat16()
            for heads in (4, 2, 2)
        )
        out, lse = torch_backend.paged_attention(query, key, value, cache, plan, 0, return_lse=True)
        torch.cuda.synchronize()
        assert out.isfinite().all()
        assert lse.isfinite().all()
        print(f"{name} by {wanted[name]} is done")


if __name__ == "__main__":
    main()
