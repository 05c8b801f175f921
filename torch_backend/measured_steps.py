"""What `measuring` times: a step of a bucket's size, and how long one layer of it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.errors import PlanError
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec, CacheSpec

from .attention import attend, paged_attention, ragged_attention
from .cache import PagedKVCache
from .device_planning import check_kind
from .dispatch import device_facts, works_of
from .host_planning import check_specs
from .kernels import FAMILIES, Work

__all__ = ["Step", "median_time"]

WARM_UP = 3
# Of a CUDA graph, so that the time between launches counts as little as in a recorded step; over
# some layers, so that pages come from memory rather than from a cache of the card.
CALLS, LAYERS = 8, 4

Call = Callable[[int], object]


class Step:
    """What is timed: one step's rows, and a cache of as many pages.

    Parameters
    ----------
    work
        What the families are asked for.
    batch
        Lengths, and pages of `cache`.
    cache
        `None` for attention without one.
    rows
        Query, key and value.
    """

    def __init__(
        self,
        work: Work,
        batch: RaggedBatch,
        cache: PagedKVCache | None,
        rows: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        self.work = work
        self.batch = batch
        self.cache = cache
        self.rows = rows

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        cache_spec: CacheSpec | None,
        bucket: Bucket,
        batch: RaggedBatch | None,
        device: torch.device,
        lse: bool,
    ) -> Step:
        """Make rows and pages of normal numbers; arguments are those of `measure_kernels`."""
        check_kind("spec", spec, AttentionSpec)
        check_kind("bucket", bucket, Bucket)
        if cache_spec is not None:
            check_specs(spec, cache_spec)
        elif spec.dtype is None:
            raise PlanError(
                "spec.dtype",
                given="none, and no cache to take it from",
                wanted="the element type of query, key and value",
            )
        page_size = 1 if cache_spec is None else cache_spec.page_size
        lengths = _even_batch(bucket, page_size) if batch is None else batch
        pages = lengths.pages(page_size)
        num_pages = int(pages.indptr[-1])
        bucket.check(lengths, num_pages)
        order = np.random.default_rng(0).permutation(max(num_pages, 1)).astype(np.int32)
        cache, shape = None, None
        if cache_spec is not None:
            table = np.zeros((lengths.num_requests, max(pages.most, 1)), np.int32)
            table[np.arange(table.shape[1]) < pages.counts[:, None]] = order[:num_pages]
            lengths = RaggedBatch(lengths.query_lens, lengths.kv_lens, table)
            cache = _filled_cache(spec, cache_spec, max(num_pages, 1), device)
            shape = cache.spec
        dtype = spec.dtype or (shape.dtype if shape is not None else "")
        works = works_of(
            spec, shape, dtype, bucket, bucket.num_requests + 1, device_facts(device), lse
        )
        # A bucket without context attends to the rows of the call.
        work = works[1] if bucket.without_context and len(works) == 2 else works[0]
        key_rows = bucket.num_pages if shape is None else bucket.num_tokens
        sizes = (
            (bucket.num_tokens, spec.num_qo_heads, spec.head_dim),
            (key_rows, spec.num_kv_heads, spec.head_dim),
            (key_rows, spec.num_kv_heads, spec.head_dim_v),
        )
        kind = getattr(torch, dtype)
        query, key, value = (torch.randn(size, dtype=kind, device=device) for size in sizes)
        return cls(work, lengths, cache, (query, key, value))

    def call(self, with_plan: AttentionPlan[Tensor]) -> Call:
        """One layer's attention; the argument counts calls."""
        lse = self.work.lse

        def one(number: int) -> object:
            if self.cache is None:
                return ragged_attention(*self.rows, with_plan, return_lse=lse)
            layer = number % LAYERS
            if self.work.source == "tokens":
                return paged_attention(*self.rows, self.cache, with_plan, layer, return_lse=lse)
            return attend(self.rows[0], self.cache, with_plan, layer, return_lse=lse)

        return one


def _even_batch(bucket: Bucket, page_size: int) -> RaggedBatch:
    """Tokens and pages of a bucket dealt out evenly."""
    count = max(bucket.num_requests, 1)
    query_lens = np.full(count, min(bucket.num_tokens // count, bucket.max_query_len))
    rest = min(bucket.num_tokens - int(query_lens.sum()), count)
    query_lens[:rest] = np.minimum(query_lens[:rest] + 1, bucket.max_query_len)
    if bucket.without_context:
        return RaggedBatch(query_lens, query_lens)
    kv_lens = np.maximum(bucket.num_pages // count * page_size, query_lens)
    return RaggedBatch(query_lens, kv_lens)


def _filled_cache(
    spec: AttentionSpec, like: CacheSpec, num_pages: int, device: torch.device
) -> PagedKVCache:
    # Only scales that differ make heads have scales of their own.
    scales = np.ones((LAYERS, *like.scales_shape[1:]), np.float32)
    scales += np.arange(like.num_kv_heads, dtype=np.float32) / 8
    cache = PagedKVCache(
        spec,
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=like.page_size,
        dtype=like.dtype,
        layout=like.layout,
        device=device,
        scales=scales if like.scales_per_head else None,
    )
    if not like.quantized:
        for pool in (cache.k, cache.v):
            pool.normal_()
    return cache


def median_time(step: Step, with_plan: AttentionPlan[Tensor], repeats: int) -> float:
    """Microseconds of a call."""
    call = step.call(with_plan)
    for i in range(WARM_UP):
        call(i)
    if step.work.device.kind == "cpu":
        times = []
        for i in range(repeats):
            start = time.perf_counter()
            call(i)
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    def calls() -> None:
        for i in range(CALLS):
            call(i)

    launches = with_plan.static.main
    if all(FAMILIES[launch.family].recordable for launch in launches):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        calls = graph.replay
        calls()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for before, after in events:
        before.record()
        calls()
        after.record()
    torch.cuda.synchronize()
    took = statistics.median(before.elapsed_time(after) for before, after in events)
    return took * 1e3 / CALLS
