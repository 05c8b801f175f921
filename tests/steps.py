"""Steps of real size for the core, made where they run: no oracle, no trip through NumPy.

`new_step` makes one step for one compiled module; `Decoding` a sequence of decode steps of a small
model, which PyTorch and JAX compute with the same bits.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from families import only
from problem import Call, Layout
from torch import Tensor

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from torch_backend import PagedKVCache
from torch_backend.kernels.flashinfer_abi import ModuleKey

SPEC = AttentionSpec(8, 2, 128)


@dataclass(frozen=True)
class Step:
    """What one step's attention takes; solving it twice gives the same pools."""

    spec: AttentionSpec
    cache: PagedKVCache
    batch: RaggedBatch
    bucket: Bucket | None
    query: Tensor
    key: Tensor
    value: Tensor

    def plan(self, family: str | None) -> AttentionPlan[Tensor]:
        """A plan that the family serves; `None` leaves the choice to dispatch."""
        with only(family) if family else nullcontext():
            return torch_backend.plan(
                self.spec, self.cache.spec, self.batch, bucket=self.bucket, device=self.cache.device
            )

    def solve(self, family: str | None, call: Call = "append_then_attend") -> tuple[Tensor, Tensor]:
        """Output and LSE."""
        plan = self.plan(family)
        rows = self.query, self.key, self.value
        if call == "paged_attention":
            return torch_backend.paged_attention(*rows, self.cache, plan, 0, return_lse=True)
        torch_backend.append(self.key, self.value, self.cache, plan, 0)
        return torch_backend.attend(self.query, self.cache, plan, 0, return_lse=True)

    def with_nan_where_nobody_reads(self) -> Step:
        """The same step among NaN: pages of nobody, ends of pages, other layers, padding rows."""
        cache = self.cache
        pages = self.batch.pages(cache.spec.page_size)
        owned = self.batch.page_indices(cache.spec.page_size, cache.spec.num_pages)
        last = owned[pages.indptr[1:][pages.counts > 0] - 1]
        used = torch.zeros(len(cache.k), cache.spec.page_size, dtype=torch.bool)
        used[owned] = True
        for page, length in zip(last, pages.last_lens[pages.counts > 0], strict=True):
            used[page, length:] = False
        mask = used.to(cache.device)
        mask = mask[:, :, None, None] if cache.spec.layout == "NHD" else mask[:, None, :, None]
        spoiled = _cache(self.spec, cache)
        for ours, theirs in ((spoiled.k, cache.k), (spoiled.v, cache.v)):
            ours.copy_(theirs.masked_fill(~mask, torch.nan))
        rows = [x.clone() for x in (self.query, self.key, self.value)]
        for x in rows:
            x[self.batch.num_tokens :] = torch.nan
        return Step(self.spec, spoiled, self.batch, self.bucket, *rows)


def _cache(spec: AttentionSpec, like: PagedKVCache) -> PagedKVCache:
    shape = like.spec
    return PagedKVCache(
        spec,
        num_layers=shape.num_layers,
        num_pages=shape.num_pages,
        page_size=shape.page_size,
        dtype=shape.dtype,
        layout=shape.layout,
        device=like.device,
    )


def new_step(
    key: ModuleKey,
    query_lens: list[int],
    kv_lens: list[int],
    *,
    heads: tuple[int, int] = (32, 8),
    page_size: int = 16,
    layout: Layout = "NHD",
    bucket: Bucket | None = None,
    num_layers: int = 1,
    seed: int = 0,
    device: str = "cuda",
    **features: Any,
) -> Step:
    """Normal numbers, pages in random order and three of them nobody's."""
    if key.window:
        features.setdefault("sliding_window", 300)
    if key.soft_cap:
        features.setdefault("logits_soft_cap", 30.0)
    spec = AttentionSpec(*heads, key.head_dim, **features)
    counts = [-(-n // page_size) for n in kv_lens]
    table = np.zeros((len(kv_lens), max(1, *counts)), np.int32)
    order = np.random.default_rng(seed).permutation(sum(counts) + 3)
    for row, ids in zip(table, np.split(order, np.cumsum(counts))[:-1], strict=True):
        row[: len(ids)] = ids
    cache = PagedKVCache(
        spec,
        num_layers=num_layers,
        num_pages=len(order),
        page_size=page_size,
        dtype=key.dtype,
        layout=layout,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(seed)

    def normal(count: int) -> Tensor:
        shape = (sum(query_lens) if bucket is None else bucket.num_tokens, count, key.head_dim)
        return torch.randn(shape, dtype=cache.k.dtype, device=device, generator=generator)

    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)
    rows = [normal(count) for count in (heads[0], heads[1], heads[1])]
    return Step(spec, cache, RaggedBatch(query_lens, kv_lens, table), bucket, *rows)


@dataclass(frozen=True)
class Decoding:
    """Decode steps of a small model whose requests change places from step to step.

    In every step each request grows by a token, and one request is much longer than the others.
    All arithmetic between the calls is exact or rounded once, so that it does not matter which
    framework does it.
    """

    num_steps: int
    device: str = "cuda"
    num_layers: int = 4
    spec: AttentionSpec = SPEC
    requests: int = 13
    num_pages: int = 512

    @property
    def bucket(self) -> Bucket:
        """Two rows are to spare."""
        return Bucket(self.requests + 2, self.requests + 2, self.num_pages, 1)

    @cached_property
    def batches(self) -> list[RaggedBatch]:
        """The batch of each step."""
        rng = np.random.default_rng(7)
        first = np.array([2000, *rng.integers(0, 150, self.requests - 1)])
        counts = -(-(first + self.num_steps) // 16)
        table = np.zeros((self.requests, counts.max()), np.int32)
        ids = np.split(rng.permutation(self.num_pages)[: counts.sum()], np.cumsum(counts)[:-1])
        for row, pages in zip(table, ids, strict=True):
            row[: len(pages)] = pages
        batches = []
        for step in range(self.num_steps):
            order = rng.permutation(self.requests)
            kv_lens = first[order] + step + 1
            batches.append(RaggedBatch([1] * self.requests, kv_lens, table[order]))
        return batches

    @cached_property
    def queries(self) -> list[Tensor]:
        """What goes into the first layer in each step, ``[rows, 8, 128]`` bfloat16."""
        generator = torch.Generator(self.device).manual_seed(8)
        shape = (self.bucket.num_tokens, self.spec.num_qo_heads, self.spec.head_dim)
        return [
            torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
            for _ in range(self.num_steps)
        ]

    def new_cache(self) -> PagedKVCache:
        """Pools whose context is made of normal numbers, always the same."""
        cache = PagedKVCache(
            self.spec, num_layers=self.num_layers, num_pages=self.num_pages, device=self.device
        )
        generator = torch.Generator(self.device).manual_seed(9)
        for pool in (cache.k, cache.v):
            pool.normal_(generator=generator)
        return cache

    def new_arrays(self) -> jax_frontend.CacheArrays:
        """The same pools, owned by JAX."""
        cache = self.new_cache()
        host = [
            pool.view(torch.int16).cpu().numpy().view(jnp.bfloat16) for pool in (cache.k, cache.v)
        ]
        arrays = jax_frontend.init_cache(
            self.spec, num_layers=self.num_layers, num_pages=self.num_pages
        )
        k, v = (jax.device_put(pool.copy(), arrays.k.sharding) for pool in host)
        return replace(arrays, k=k, v=v)

    def torch_plan(self, cache: PagedKVCache, step: int) -> AttentionPlan[Tensor]:
        """The step's plan for PyTorch."""
        return torch_backend.plan(self.spec, cache.spec, self.batches[step], bucket=self.bucket)

    def jax_plan(self, cache: Any, step: int) -> AttentionPlan[jax.Array]:
        """The step's plan for JAX."""
        return jax_frontend.plan(self.spec, cache.spec, self.batches[step], bucket=self.bucket)

    def torch_step(self, query: Tensor, cache: PagedKVCache, plan: AttentionPlan[Tensor]) -> Tensor:
        """The model in PyTorch, on whatever stream is current."""
        out = query
        for layer in range(self.num_layers):
            out = out + query
            key, value = out[:, :2].contiguous(), out[:, 2:4].contiguous()
            out = torch_backend.paged_attention(out, key, value, cache, plan, layer)
        return out

    def jax_step(self, query: jax.Array, cache: Any, plan: Any) -> tuple[jax.Array, Any]:
        """The model in JAX, layer after layer."""
        out = query
        for layer in range(self.num_layers):
            out, cache = self._block(out, query, cache, plan, layer)
        return out, cache

    def jax_scan(self, query: jax.Array, cache: Any, plan: Any) -> tuple[jax.Array, Any]:
        """The model in JAX, as a scan over its layers."""

        def body(carry: Any, layer: jax.Array) -> Any:
            out, cache = carry
            return self._block(out, query, cache, plan, layer), None

        carry, _ = jax.lax.scan(body, (query, cache), jnp.arange(self.num_layers))
        return carry

    @staticmethod
    def _block(out: jax.Array, query: jax.Array, cache: Any, plan: Any, layer: Any) -> Any:
        out = out + query
        return jax_frontend.paged_attention(out, out[:, :2], out[:, 2:4], cache, plan, layer)
