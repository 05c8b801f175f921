"""Paged attention from PyTorch: append a step's keys and values to a paged cache, then attend."""

from __future__ import annotations

import numpy as np
import torch

import torch_backend
from interop import AttentionSpec, RaggedBatch


def main() -> None:
    """Serve a prefill of 5 tokens and a decode of 1 in one call, and check one row by hand."""
    torch.manual_seed(0)
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    cache = torch_backend.PagedKVCache(
        spec, num_layers=1, num_pages=8, page_size=4, dtype="float32", device="cpu"
    )
    # Request 0 begins; request 1 has 6 tokens in the cache (zeros here) and brings its seventh.
    batch = RaggedBatch(query_lens=[5, 1], kv_lens=[5, 7], page_table=np.array([[3, 1], [6, 0]]))
    plan = torch_backend.plan(spec, cache.spec, batch)

    query = torch.randn(6, 4, 64)
    key, value = torch.randn(6, 2, 64), torch.randn(6, 2, 64)
    output = torch_backend.paged_attention(query, key, value, cache, plan, 0)

    # The last token of request 0 sees its 5 keys; head 3 of the query reads head 1 of the cache.
    scores = torch.softmax(key[:5, 1] @ query[4, 3] / 64**0.5, dim=0)
    error = (output[4, 3] - scores @ value[:5, 1]).abs().max().item()
    print(f"output {tuple(output.shape)}, largest error {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
