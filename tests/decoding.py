"""A small decoder whose tokens depend on all before them, and a loop on the host that decodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
from interop import AttentionSpec, Bucket, RaggedBatch
from torch_backend import PagedKVCache

LAYERS, VOCAB, PAGE_SIZE = 3, 23, 4


@dataclass(frozen=True)
class Decoder:
    """Random weights of a decoder without norms or rotary embedding: attention is what counts.

    Parameters
    ----------
    spec, dtype
        Arithmetic and element type of the attention; all else is float32.
    """

    spec: AttentionSpec
    dtype: str

    def weights(self) -> dict[str, jax.Array]:
        rng = np.random.default_rng(7)
        spec, width = self.spec, self.spec.num_qo_heads * self.spec.head_dim
        columns = (spec.num_qo_heads + 2 * spec.num_kv_heads) * spec.head_dim
        shapes = {
            "embedding": (VOCAB, width),
            "qkv": (LAYERS, width, columns),
            "output": (LAYERS, width, width),
            "head": (width, VOCAB),
        }
        made = {name: rng.standard_normal(shape) / width**0.5 for name, shape in shapes.items()}
        made["embedding"] *= width**0.5
        made["places"] = rng.standard_normal((64, width))
        return {name: jnp.asarray(array, jnp.float32) for name, array in made.items()}

    def __call__(
        self, weights: Any, token_ids: jax.Array, positions: jax.Array, kv: Any, plan: Any
    ) -> tuple[jax.Array, Any]:
        """Logits ``[tokens, VOCAB]`` and the cache; layers in a scan."""
        spec, tokens = self.spec, token_ids.shape[0]
        heads = (spec.num_qo_heads, spec.num_qo_heads + spec.num_kv_heads)
        # All bits of float32 on a GPU, too, so that rounding decides no token.
        dot = partial(jnp.dot, precision="highest")

        def block(carry: Any, xs: Any) -> Any:
            (hidden, kv), (layer, qkv, output) = carry, xs
            rows = dot(hidden, qkv).reshape(tokens, -1, spec.head_dim).astype(self.dtype)
            query, key, value = jnp.split(rows, heads, axis=1)
            out, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
            out = out.reshape(tokens, -1).astype(jnp.float32)
            return (jnp.tanh(hidden + 3 * dot(out, output)), kv), None

        hidden = weights["embedding"][token_ids] + weights["places"][positions % 64]
        layers = jnp.arange(LAYERS, dtype=jnp.int32), weights["qkv"], weights["output"]
        (hidden, kv), _ = jax.lax.scan(block, (hidden, kv), layers)
        return dot(hidden, weights["head"]), kv


CPU = Decoder(AttentionSpec(4, 2, 8), "float32")


def new_cache(decoder: Decoder, num_pages: int, device: str = "cpu") -> PagedKVCache:
    """A cache with random numbers in it, the same each time."""
    cache = PagedKVCache(
        decoder.spec,
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=decoder.dtype,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(3)
    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)
    return cache


@dataclass
class Seats:
    """Requests as a decode loop takes them."""

    tokens: Any
    kv_lens: Any
    page_table: Any

    @property
    def count(self) -> int:
        return len(self.tokens)

    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(x) for x in (self.tokens, self.kv_lens, self.page_table))


def seats(kv_lens: list[int], room: int, seed: int = 0) -> tuple[Seats, int]:
    """Requests with pages for `room` further tokens each, and how many pages there are."""
    rng = np.random.default_rng(seed)
    pages = [-(-(length + room) // PAGE_SIZE) for length in kv_lens]
    ids = rng.permutation(sum(pages)).astype(np.int32)
    table = np.full((len(pages), max(pages)), -1, np.int32)
    for row, own in zip(table, np.split(ids, np.cumsum(pages)[:-1]), strict=True):
        row[: own.size] = own
    tokens = rng.integers(0, VOCAB, len(pages), dtype=np.int32)
    return Seats(tokens, np.array(kv_lens, np.int32), table), sum(pages)


def step_by_step(
    model: Any,
    weights: Any,
    cache: PagedKVCache,
    spec: AttentionSpec,
    given: Seats,
    steps: int,
    *,
    rounding: float = 1e-2,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens ``[requests, steps]`` of a loop in Python that plans each step on the host.

    Also returns where other programs must choose the same: up to the first token whose logit leads
    by no more than `rounding` may amount to.
    """
    run = jax.jit(model)
    kv = jax_frontend.cache_handle(cache)
    token, lens, count = given.tokens, given.kv_lens.copy(), given.count
    bucket = Bucket(count, count, given.page_table.size, 1)
    found, leads = [], []
    for _ in range(steps):
        batch = RaggedBatch(np.ones(count, np.int32), lens + 1, given.page_table)
        plan = jax_frontend.plan(spec, cache.spec, batch, bucket=bucket)
        logits, kv = run(weights, jnp.asarray(token), jnp.asarray(lens), kv, plan)
        best, token = jax.lax.top_k(logits, 2)
        leads.append(np.asarray(best[:, 0] - best[:, 1]))
        token = np.asarray(token[:, 0], np.int32)
        found.append(token)
        lens += 1
    sure = np.logical_and.accumulate(np.stack(leads, axis=1) > rounding, axis=1)
    assert sure.mean() > 0.5
    return np.stack(found, axis=1), sure
