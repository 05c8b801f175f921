"""Uneven decode batches: our planner against FlashInfer's and against fixed chunks of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torch_backend
from interop import RaggedBatch
from torch_backend import PagedKVCache

from .gpu_steps import (
    GraphStep,
    flashinfer_layers,
    layers_for,
    new_cache,
    random_query,
    release,
    time_torch,
    torch_layers,
)
from .recording import Run
from .workload import PAGE_SIZE, SPEC, bucket_of, kv_bytes, make_batch, pages_for

__all__ = ["BATCHES", "OURS", "THEIRS", "uneven"]

OURS = "our planner"
THEIRS = "FlashInfer's planner"
FIXED_TOKENS = (512, 1024, 2048, 4096)


def _random(requests: int, longest: int) -> list[int]:
    lengths = np.random.default_rng(requests).integers(1, longest + 1, requests)
    return [int(length) for length in lengths]


BATCHES: dict[str, list[int]] = {
    "64: one of 32k, rest 512": [32768] + [512] * 63,
    "128: one of 64k, rest 1024": [65536] + [1024] * 127,
    "64: four of 16k, rest 256": [16384] * 4 + [256] * 60,
    "64 random 1 to 4096": _random(64, 4096),
    "32 random 1 to 2048": _random(32, 2048),
    "256 random 1 to 2048": _random(256, 2048),
    "32 x 1024": [1024] * 32,
    "128 x 2048": [2048] * 128,
    "16 x 2048": [2048] * 16,
    "8 x 8192": [8192] * 8,
}


def uneven(run: Run) -> None:
    """Time of a layer for ten batches, replayed from CUDA graphs."""
    names = list(BATCHES)[:2] if run.quick else list(BATCHES)
    for name in names:
        with run.attempt("all planners", {"batch": name}):
            _one_batch(run, name, BATCHES[name])


def _one_batch(run: Run, name: str, lengths: list[int]) -> None:
    size = kv_bytes(lengths)
    layers = layers_for(size)
    shape = {"batch": name, "requests": len(lengths), "tokens": sum(lengths), "layers": layers}
    cache = new_cache(layers, pages_for(lengths))
    batch = make_batch([1] * len(lengths), lengths)
    query = random_query(len(lengths))
    expected: torch.Tensor | None = None
    for case, make in _cases(cache, batch, query, layers).items():
        with run.attempt(case, shape):
            body, notes = make()
            graph = GraphStep(body)
            timing = time_torch(run, graph)
            out = graph().float()
            # Every planner has to give the same numbers, up to the order of summation.
            expected = out if expected is None else expected
            notes["largest_difference"] = float((out - expected).abs().max())
            notes["largest_value"] = float(expected.abs().max())
            notes["gb_per_s"] = size * layers / timing.median * 1e-9
            run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", **notes)
    release()


Body = Callable[[], torch.Tensor]


def _cases(
    cache: PagedKVCache, batch: RaggedBatch, query: torch.Tensor, layers: int
) -> dict[str, Callable[[], tuple[Body, dict[str, Any]]]]:
    """Makers of a step's body with notes, by planner."""

    def ours() -> tuple[Body, dict[str, Any]]:
        plan = torch_backend.plan(
            SPEC, cache.spec, batch, bucket=bucket_of(batch), device=cache.device
        )
        notes = {
            "family": plan.static.main[0].family,
            "constants": list(plan.static.main[0].constants),
        }
        return lambda: torch_layers(query, cache, plan, layers), notes

    def theirs(split: int | None) -> Callable[[], tuple[Body, dict[str, Any]]]:
        return lambda: (
            flashinfer_layers(query, cache, batch, layers, split_pages=split),
            {},
        )

    cases = {THEIRS: theirs(None), OURS: ours}
    for tokens in FIXED_TOKENS:
        cases[f"fixed {tokens}"] = theirs(tokens // PAGE_SIZE)
    return cases
