"""Attention steps on caches whose pages hold known numbers, in 8 bits or in 16.

The pages are filled directly, with all tokens of the step, so that what is right follows from the
stored bytes and the scales alone: `StoredStep.want` asks the oracle, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import oracle
import torch
from families import only
from problem import Array, CacheKind, Layout
from torch import Tensor

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from interop.dlpack import to_jax, to_torch
from torch_backend import PagedKVCache

Scales = Literal["one", "per head"]

# Stored numbers are about this large, so that real ones are about 1 at scales of 1 / STORED.
STORED = 64.0
# By head, then all over again: powers of two, so that a query that fits 8 bits still does when the
# scales of its heads' keys have been multiplied in.
KEY_FACTORS, VALUE_FACTORS = (1.0, 2.0, 0.5), (0.5, 1.0, 4.0)


@dataclass(frozen=True)
class StoredStep:
    """What one step's attention takes; it does not write."""

    spec: AttentionSpec
    cache: PagedKVCache
    batch: RaggedBatch
    bucket: Bucket | None
    layer: int
    query: Tensor

    def plan(self, family: str | None, lse: bool = True) -> AttentionPlan[Tensor]:
        """A plan that the family serves; `None` leaves the choice to dispatch."""
        with only(family) if family else nullcontext():
            return torch_backend.plan(
                self.spec,
                self.cache.spec,
                self.batch,
                bucket=self.bucket,
                device=self.cache.device,
                return_lse=lse,
            )

    def solve(self, family: str | None, lse: bool = True) -> tuple[Tensor, Tensor | None]:
        """Output and LSE (`None` where it is not asked for), by PyTorch."""
        plan = self.plan(family, lse)
        got = torch_backend.attend(self.query, self.cache, plan, self.layer, return_lse=lse)
        return got if isinstance(got, tuple) else (got, None)

    def solve_by_jax(
        self, family: str | None, kind: CacheKind, *, lse: bool = True, traced: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The same by JAX, in one ``jax.jit``, on a cache that torch or that JAX owns."""
        with only(family) if family else nullcontext(), self.jax_cache(kind) as kv:
            plan = jax_frontend.plan(
                self.spec, kv.spec, self.batch, bucket=self.bucket, return_lse=lse
            )

            def step(query: jax.Array, kv: Any, plan: Any, layer: Any) -> Any:
                return jax_frontend.attend(query, kv, plan, layer, return_lse=lse)

            jitted = jax.jit(step, static_argnums=() if traced else 3)
            got = jax.block_until_ready(jitted(to_jax(self.query), kv, plan, self.layer))
        out, log = got if lse else (got, None)
        return to_torch(out), None if log is None else to_torch(log)

    @contextmanager
    def jax_cache(self, kind: CacheKind) -> Iterator[Any]:
        """The step's cache as JAX holds it."""
        if kind == "handle":
            handle = jax_frontend.cache_handle(self.cache)
            try:
                yield jax_frontend.jax_after_torch(handle)
            finally:
                jax_frontend.release_cache(handle.name)
            return
        shape = self.cache.spec
        kv = jax_frontend.init_cache(
            self.spec,
            num_layers=shape.num_layers,
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            dtype=shape.dtype,
            layout=shape.layout,
            scales=self.cache.scales,
        )
        k, v = (jax.device_put(_host(pool), kv.k.sharding) for pool in (self.cache.k, self.cache.v))
        yield replace(kv, k=k, v=v)

    def pages(self) -> tuple[Array, Array]:
        """The layer's real keys and values, ``[num_pages, page_size, heads, width]`` float32."""
        shape, real = self.cache.spec, []
        for side, pool in enumerate(self.cache.pools(self.layer)):
            pages = pool.float() if shape.layout == "NHD" else pool.float().transpose(1, 2)
            if self.cache.scales is not None:
                pages = pages * self.cache.scales[self.layer, side][:, None]
            real.append(pages.cpu().numpy())
        return real[0], real[1]

    def want(self) -> tuple[Array, Array, Array]:
        """Output and LSE, and what the output would be of the values' magnitudes, in float64."""
        keys, values = self.pages()
        table = self.batch.page_table
        assert table is not None
        lens = self.batch.query_lens.tolist(), self.batch.kv_lens.tolist()
        features = {
            "sm_scale": self.spec.sm_scale,
            "causal": self.spec.causal,
            "sliding_window": self.spec.sliding_window,
            "logits_soft_cap": self.spec.logits_soft_cap,
            "draft_masks": self.batch.draft_masks,
        }
        query = self.query.float().cpu().numpy()
        out, lse = oracle.paged_attention(query, keys, values, *lens, table, **features)
        sizes, _ = oracle.paged_attention(query, keys, np.abs(values), *lens, table, **features)
        return out, lse, sizes


def new_stored_step(
    dtype: str,
    query_lens: list[int],
    kv_lens: list[int],
    *,
    scales: Scales = "one",
    heads: tuple[int, int] = (8, 2),
    width: int = 128,
    page_size: int = 16,
    layout: Layout = "NHD",
    bucket: Bucket | None = None,
    query_dtype: str = "bfloat16",
    device: str = "cuda",
    seed: int = 0,
    shared_pages: int = 0,
    draft_masks: Array | None = None,
    **features: Any,
) -> StoredStep:
    """Make a step in the second of three layers, whose scales all differ.

    Pages are in random order, three of them nobody's, and all are full of numbers. Queries fit
    e4m3, so that a kernel that rounds them to it changes nothing. Requests have the first
    `shared_pages` in common, as many of them as their context fills.
    """
    spec = AttentionSpec(*heads, width, dtype=query_dtype, **features)
    counts = [-(-n // page_size) for n in kv_lens]
    table = np.zeros((len(kv_lens), max(1, *counts)), np.int32)
    order = np.random.default_rng(seed).permutation(sum(counts) + 3)
    for row, ids in zip(table, np.split(order, np.cumsum(counts))[:-1], strict=True):
        row[: len(ids)] = ids
    for row, query, kv in zip(table, query_lens, kv_lens, strict=True):
        common = min(shared_pages, (kv - query) // page_size)
        row[:common] = table[int(np.argmax(kv_lens)), :common]
    num_layers, quantized = 3, dtype.startswith("float8")
    cache = PagedKVCache(
        spec,
        num_layers=num_layers,
        num_pages=len(order),
        page_size=page_size,
        dtype=dtype,
        layout=layout,
        device=device,
        scales=_scales(num_layers, heads[1], scales) if quantized else None,
    )
    assert cache.spec.scales_per_head == (quantized and scales == "per head" and heads[1] > 1)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    for pool in (cache.k, cache.v):
        pool.copy_(normal(*pool.shape) * (STORED if quantized else 1.0))
    rows = sum(query_lens) if bucket is None else bucket.num_tokens
    query = normal(rows, heads[0], width).to(torch.float8_e4m3fn)
    query = query.to(getattr(torch, query_dtype))
    query[sum(query_lens) :] = torch.nan
    batch = RaggedBatch(query_lens, kv_lens, table, draft_masks=draft_masks)
    return StoredStep(spec, cache, batch, bucket, 1, query)


def spoil(step: StoredStep, nothing: float, past_the_end: float) -> None:
    """Write over the pages of nobody and of other layers, and over the ends of pages in use."""
    cache, shape = step.cache, step.cache.spec
    pages = step.batch.pages(shape.page_size)
    owned = step.batch.page_indices(shape.page_size, shape.num_pages)
    used = torch.zeros(shape.num_pages, shape.page_size, dtype=torch.int64)
    used[owned] = 1
    ends = owned[pages.indptr[1:][pages.counts > 0] - 1]
    for page, length in zip(ends, pages.last_lens[pages.counts > 0], strict=True):
        used[page, length:] = 2
    used = used.to(cache.device)[:, :, None, None]
    if shape.layout == "HND":
        used = used.transpose(1, 2)
    for everything, mine in zip((cache.k, cache.v), cache.pools(step.layer), strict=True):
        kept = mine.float()
        everything.copy_(torch.full_like(everything, 1.0, dtype=torch.float32) * nothing)
        mine.copy_(torch.where(used == 1, kept, torch.where(used == 2, past_the_end, nothing)))


def _scales(num_layers: int, heads: int, kind: Scales) -> Array:
    """Scales ``[num_layers, 2, heads]``, of keys and of values; none is 1."""
    table = np.empty((num_layers, 2, heads), np.float32)
    for side, (size, factors) in enumerate(((1.3, KEY_FACTORS), (0.7, VALUE_FACTORS))):
        by_head = np.resize(np.array(factors if kind == "per head" else [1.0]), heads)
        table[:, side] = size / STORED * by_head * (1 + np.arange(num_layers))[:, None] / 2
    return table


def _host(pool: Tensor) -> Array:
    """The same bytes as a NumPy array of the same type, which torch's own conversion lacks."""
    bits = pool.cpu().view(torch.uint8 if pool.itemsize == 1 else torch.int16).numpy()
    name = str(pool.dtype).removeprefix("torch.")
    return bits.view(getattr(ml_dtypes, name)).copy()
