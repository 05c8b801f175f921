"""Layers that attend differently on a GPU: one upload, the bits of plans made apart, recorded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from families import FA2, FA3, need

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.dlpack import to_jax, to_torch

pytestmark = pytest.mark.gpu

LAYERS = 4
SPECS = [AttentionSpec(32, 8, 128, sliding_window=300), AttentionSpec(32, 8, 128)] * (LAYERS // 2)

BATCHES = {
    "decode": ([1] * 12, [3000, *([400, 90, 1500, 16] * 3)][:12], Bucket(14, 14, 700, 1)),
    "mixed": ([1, 1, 400, 0, 200], [900, 3000, 400, 70, 1700], Bucket(8, 700, 500)),
    "prefill": ([300, 290], [5000, 300], None),
}


def filled_cache(seed: int) -> torch_backend.PagedKVCache:
    cache = torch_backend.PagedKVCache(SPECS[0], num_layers=LAYERS, num_pages=800, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)
    return cache


def batch_of(query_lens: list[int], kv_lens: list[int]) -> RaggedBatch:
    counts = [-(-length // 16) for length in kv_lens]
    table = np.zeros((len(counts), max(counts)), np.int32)
    order = np.random.default_rng(1).permutation(800)
    for row, ids in zip(table, np.split(order, np.cumsum(counts)), strict=False):
        row[: len(ids)] = ids[: len(row)]
    return RaggedBatch(query_lens, kv_lens, table)


def rows_of(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    return [
        torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (32, 8, 8)
    ]


@jax.jit
def jax_step(rows: Any, kv: Any, plans: Any) -> Any:
    outs = []
    for layer in range(LAYERS):
        out, kv = jax_frontend.paged_attention(*rows, kv, plans[layer], layer)
        outs.append(out)
    return outs, kv


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("name", BATCHES)
def test_one_upload_gives_the_bits_of_plans_made_apart(name: str, invariant: bool) -> None:
    for key in (*FA2[:2], *FA3[:2]):
        need(key)
    query_lens, kv_lens, bucket = BATCHES[name]
    batch = batch_of(query_lens, kv_lens)
    tokens = sum(query_lens) if bucket is None else bucket.num_tokens
    rows, cache = rows_of(tokens), filled_cache(1)
    options: dict[str, Any] = {"bucket": bucket, "batch_invariant": invariant}
    together = torch_backend.plan_layers(SPECS, cache.spec, batch, **options)
    apart = [torch_backend.plan(spec, cache.spec, batch, **options) for spec in SPECS]
    want = [
        torch_backend.paged_attention(*rows, cache, plan, layer) for layer, plan in enumerate(apart)
    ]
    got = [
        torch_backend.paged_attention(*rows, cache, together[layer], layer)
        for layer in range(LAYERS)
    ]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, theirs)
    assert len({plan.metadata.data_ptr() for plan in together}) == 1

    handle = jax_frontend.jax_after_torch(jax_frontend.cache_handle(cache))
    try:
        plans = jax_frontend.plan_layers(SPECS, cache.spec, batch, **options)
        given = [to_jax(x) for x in rows]
        torch.cuda.synchronize()
        for _ in range(5):  # recorded after the first runs
            outs, handle = jax_step(given, handle, plans)
        jax.block_until_ready((outs, handle))
    finally:
        jax_frontend.release_cache(handle.name)
    for ours, theirs in zip(outs, want, strict=True):
        assert torch.equal(to_torch(ours), theirs)
