"""Decode of requests that begin with the same pages, read once or once for each request."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from interop import RaggedBatch
from torch_backend import PagedKVCache

from .gpu_steps import (
    DTYPE,
    FRONT_ENDS,
    GraphStep,
    layers_for,
    new_cache,
    random_query,
    release,
    time_torch,
)
from .recording import Run
from .workload import PAGE_SIZE, SPEC, kv_bytes

__all__ = ["cascade"]

# Requests, tokens of the prefix that all share, and tokens of each one's own.
SHAPES = (
    (64, 16384, 256),
    (64, 2048, 256),
    (64, 512, 256),
    (64, 256, 256),
    (8, 16384, 256),
    (8, 2048, 256),
    (8, 1024, 256),
    (256, 1024, 1024),
)
QUICK = SHAPES[:1]
# Without a kernel named, the plan chooses.
WAYS = {"plain": "fa2", "cascade": "cascade", "chosen": None}
SCALES = (0.02, 0.03)


def cascade(run: Run) -> None:
    """Each way to read a shared prefix, from both front ends, and FlashInfer's own."""
    for requests, prefix, own in QUICK if run.quick else SHAPES:
        shape: dict[str, Any] = {"requests": requests, "prefix": prefix, "own": own}
        batch, pages = shared_batch(requests, prefix, own)
        layers = layers_for(kv_bytes([prefix, *[own] * requests]))
        shape["layers"] = layers
        query = random_query(requests)
        cache = new_cache(layers, pages)
        for way, kernel in WAYS.items():
            _measure(run, way, shape, SPEC, cache, batch, query, kernel)
        with run.attempt("FlashInfer's cascade", shape):
            theirs = GraphStep(_flashinfer(query, cache, batch, prefix // PAGE_SIZE, layers))
            timing = time_torch(run, theirs).scaled(1e6 / layers)
            run.add("FlashInfer's cascade", shape, timing, "us/layer")
        del cache
        release()
        if shape["requests"] == 64 and prefix == 16384:
            in_8_bits = new_cache(layers, pages, "float8_e4m3fn", SCALES)
            model = replace(SPEC, dtype="bfloat16")
            for way, kernel in WAYS.items():
                _measure(run, f"{way}, fp8", shape, model, in_8_bits, batch, query, kernel)
            del in_8_bits
            release()


def _measure(
    run: Run,
    way: str,
    shape: dict[str, Any],
    spec: Any,
    cache: PagedKVCache,
    batch: RaggedBatch,
    query: torch.Tensor,
    kernel: str | None,
) -> None:
    for front_end, measure in FRONT_ENDS.items():
        case, layers = f"{way}, {front_end}", shape["layers"]
        with run.attempt(case, shape):
            timing, family = measure(run, spec, cache, batch, query, layers, kernel=kernel)
            run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", family=family)


def shared_batch(requests: int, prefix: int, own: int) -> tuple[RaggedBatch, int]:
    """Return one-token decodes whose tables begin alike, and the pages that they have in all."""
    shared, rest = prefix // PAGE_SIZE, -(-own // PAGE_SIZE)
    total = shared + requests * rest
    pages = np.random.default_rng(0).permutation(total).astype(np.int32)
    table = np.empty((requests, shared + rest), np.int32)
    table[:, :shared] = pages[:shared]
    table[:, shared:] = pages[shared:].reshape(requests, rest)
    return RaggedBatch([1] * requests, [prefix + own] * requests, table), total


def _flashinfer(
    query: torch.Tensor, cache: PagedKVCache, batch: RaggedBatch, shared: int, layers: int
) -> Callable[[], torch.Tensor]:
    """The same through FlashInfer's wrapper for shared prefixes and its planner."""
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    table = torch.from_numpy(np.asarray(batch.page_table)).cuda()
    requests, width = table.shape

    def offsets(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    each = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        [offsets(0, requests), each],
        [offsets(0, shared), each * (width - shared)],
        [table[0, :shared].contiguous(), table[:, shared:].reshape(-1)],
        [offsets(PAGE_SIZE), torch.full_like(each[1:], PAGE_SIZE)],
        SPEC.num_qo_heads,
        SPEC.num_kv_heads,
        SPEC.head_dim,
        PAGE_SIZE,
        causal=True,
        sm_scale=SPEC.sm_scale,
        q_data_type=DTYPE,
    )

    def step() -> torch.Tensor:
        x = query
        for layer in range(layers):
            x = wrapper.run(x, cache.pools(layer))
        return x

    return step
