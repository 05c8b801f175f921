"""Host time of planning a step, with the upload of its metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

import jax_frontend
import torch_backend
from interop import CacheSpec, RaggedBatch

from .engine import step_calls
from .recording import Run
from .timing import measure_calls
from .workload import PAGE_SIZE, SPEC, bucket_of, decode_shape, make_batch, pages_for

__all__ = ["planning"]


def planning(run: Run) -> None:
    """`plan` for 32 and 256 decodes of 8k tokens, and the batch that it is made from."""
    context = 8192
    for requests in (32, 256):
        lengths = [context] * requests
        cache = CacheSpec(
            num_layers=32,
            num_pages=pages_for(lengths),
            page_size=PAGE_SIZE,
            num_kv_heads=SPEC.num_kv_heads,
            head_dim=SPEC.head_dim,
            device="cuda",
        )
        first = make_batch([1] * requests, lengths)
        shape = decode_shape(requests, context)
        with run.attempt("plan", shape):
            _one(run, cache, first, shape)


def _one(run: Run, cache: CacheSpec, first: RaggedBatch, shape: dict[str, Any]) -> None:
    bucket = bucket_of(first)
    card = jax.devices("gpu")[0]

    def batch(_: None = None) -> RaggedBatch:
        # A new one each time, as in serving: batches keep what plans compute from them.
        return RaggedBatch(first.query_lens, first.kv_lens, first.page_table)

    def from_torch(batch: RaggedBatch) -> None:
        torch_backend.plan(SPEC, cache, batch, bucket=bucket, device="cuda:0")

    def from_jax(batch: RaggedBatch) -> jax.Array:
        return jax_frontend.plan(SPEC, cache, batch, bucket=bucket, device=card).metadata

    def add(case: str, call: Callable[[Any], Any], prepare: Callable[[], Any]) -> None:
        calls = 50 if run.quick else 300
        timing = measure_calls(call, calls=calls, prepare=prepare, wait=torch.cuda.synchronize)
        run.add(case, shape, timing.scaled(1e6), "us")

    add("PyTorch", from_torch, batch)
    add("JAX", from_jax, batch)
    add("JAX, until it is on the card", lambda new: from_jax(new).block_until_ready(), batch)
    add("RaggedBatch", batch, lambda: None)
    for case, call in step_calls(cache, first, "cuda:0").items():
        add(case, lambda _, call=call: call(), lambda: None)
