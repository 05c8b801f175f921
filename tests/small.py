"""One small step for tests that are not about numbers: a mixed batch over a shuffled pool."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from interop import AttentionSpec, Bucket, RaggedBatch
from torch_backend import PagedKVCache

Array = np.ndarray[Any, np.dtype[Any]]

SPEC = AttentionSpec(4, 2, 8)
SIZES: dict[str, Any] = {"num_layers": 3, "num_pages": 12, "page_size": 4, "dtype": "float32"}

# A decode, a first prefill, a request that sits the step out, a later chunk.
QUERY_LENS, KV_LENS = [1, 3, 0, 2], [6, 3, 5, 9]
PAGE_TABLE = [[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]]
BATCH = RaggedBatch(QUERY_LENS, KV_LENS, PAGE_TABLE)
TOKENS = BATCH.num_tokens
BUCKET = Bucket(num_requests=6, num_tokens=9, num_pages=16)


def new_cache(seed: int | None = None, spec: AttentionSpec = SPEC, **sizes: Any) -> PagedKVCache:
    """A cache of `SIZES` and of `sizes`, filled with normal numbers if there is a seed."""
    cache = PagedKVCache(spec, **(SIZES | sizes))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for pool in (cache.k, cache.v):
            pool.normal_(generator=generator)
    return cache


def rows(seed: int, count: int = TOKENS, spec: AttentionSpec = SPEC) -> tuple[Array, Array, Array]:
    """Query, key and value rows in float32."""
    rng = np.random.default_rng(seed)
    shapes = (
        (count, spec.num_qo_heads, spec.head_dim),
        (count, spec.num_kv_heads, spec.head_dim),
        (count, spec.num_kv_heads, spec.head_dim_v),
    )
    query, key, value = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return query, key, value


def torch_rows(seed: int, count: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """The same as torch tensors."""
    return tuple(torch.from_numpy(x) for x in rows(seed, count))


def jax_rows(seed: int, count: int = TOKENS) -> tuple[jax.Array, ...]:
    """The same as JAX arrays."""
    return tuple(jax.numpy.asarray(x) for x in rows(seed, count))


def snapshot(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of both pools, to see later what has changed."""
    return cache.k.clone(), cache.v.clone()


def unchanged(cache: PagedKVCache, before: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether both pools hold what they held."""
    return torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
