"""Paged attention inside `jax.jit`, on a cache that PyTorch owns; nothing is copied."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, RaggedBatch
from jax_frontend import CacheHandle


@jax.jit
def step(
    query: Array, key: Array, value: Array, kv: CacheHandle, plan: AttentionPlan[Array]
) -> tuple[Array, CacheHandle]:
    """Append the step's keys and values, attend, and hand the cache's order token on."""
    return jax_frontend.paged_attention(query, key, value, kv, plan, 0)


def main() -> None:
    """Serve a prefill of 5 tokens and a decode of 1 in one call, and check it in PyTorch."""
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    cache = torch_backend.PagedKVCache(
        spec, num_layers=1, num_pages=8, page_size=4, dtype="float32", device="cpu"
    )
    # Request 0 begins; request 1 has 6 tokens in the cache (zeros here) and brings its seventh.
    batch = RaggedBatch(query_lens=[5, 1], kv_lens=[5, 7], page_table=np.array([[3, 1], [6, 0]]))
    plan = jax_frontend.plan(spec, cache.spec, batch)

    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (6, 4, 64))
    key, value = (jax.random.normal(k, (6, 2, 64)) for k in keys[1:])
    kv = jax_frontend.cache_handle(cache)
    output, kv = step(query, key, value, kv, plan)

    # The last token of request 0 sees its 5 keys; head 3 of the query reads head 1 of the cache.
    scores = jax.nn.softmax(key[:5, 1] @ query[4, 3] / 64**0.5)
    error = float(abs(output[4, 3] - scores @ value[:5, 1]).max())
    print(f"output {output.shape}, largest error {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
