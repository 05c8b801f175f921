"""Adapters for what JAX users have besides this project; each is imported where it is used.

All of them read keys and values from pages and take the same page table. Whatever keeps one from
running here is an exception, and so an entry among the errors of the run.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from interop import RaggedBatch
from interop.dlpack import to_jax
from torch_backend import PagedKVCache

from .workload import EJKERNEL, FLASH_ATTN3, PAGE_SIZE, PALLAS, SPEC

__all__ = [
    "Peer",
    "Tables",
    "as_pools",
    "decode_peers",
    "flash_attn3",
    "program",
    "tables",
]

Pools = tuple[tuple[jax.Array, jax.Array], ...]


class Tables(NamedTuple):
    """Where each request's keys lie.

    Parameters
    ----------
    pages
        ``[requests, width]`` int32.
    kv_lens
        ``[requests]`` int32.
    query_starts
        ``[requests + 1]`` int32.
    """

    pages: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array


Attend = Callable[[jax.Array, jax.Array, jax.Array, Tables], jax.Array]


@dataclass(frozen=True)
class Peer:
    """One kernel with one setting.

    Parameters
    ----------
    name, setting
        For the results.
    load
        Imports the library and returns ``attend(query, key_pages, value_pages, tables)``, one
        layer; query and result ``[tokens, num_qo_heads, head_dim]``.
    head_major
        Whether it wants the pool as ``[num_kv_heads, pages, page_size, head_dim]``.
    """

    name: str
    setting: str
    load: Callable[[], Attend]
    head_major: bool = False


def tables(batch: RaggedBatch) -> Tables:
    """Put a batch's page table and lengths on the card."""
    card = jax.devices("gpu")[0]
    assert batch.page_table is not None
    return Tables(
        *(
            jax.device_put(np.ascontiguousarray(values, np.int32), card)
            for values in (batch.page_table, batch.kv_lens, batch.qo_indptr)
        )
    )


def as_pools(cache: PagedKVCache, page_size: int = PAGE_SIZE, *, head_major: bool = False) -> Pools:
    """Keys and values of each layer as JAX arrays: views, or copies where heads come first."""

    def pool(tensor: Any) -> jax.Array:
        # Consecutive pages make a larger one; what they hold is random anyway.
        array = to_jax(tensor.view(-1, page_size, *tensor.shape[2:]))
        return jnp.transpose(array, (2, 0, 1, 3)) if head_major else array

    layers = range(cache.spec.num_layers)
    pools = tuple((pool(k), pool(v)) for k, v in map(cache.pools, layers))
    jax.block_until_ready(pools)
    return pools


def program(peer: Peer) -> Callable[[jax.Array, Pools, Tables], jax.Array]:
    """Compile a step over all layers of `pools`, each layer's output being the next one's query."""
    # Libraries are imported before anything is traced: some make arrays at their import.
    attend = peer.load()

    def step(query: jax.Array, pools: Pools, tables: Tables) -> jax.Array:
        x = query * 2
        for key, value in pools:
            x = attend(x, key, value, tables)
        return x * 2

    return jax.jit(step)


def flash_attn3(splits: int) -> Peer:
    """FlashAttention 3 as flash-attn3-jax 0.2.3 wraps it; `splits` of each request's keys."""

    def load() -> Attend:
        library = importlib.import_module("flash_attn3_jax")

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, tables: Tables) -> jax.Array:
            requests = tables.kv_lens.shape[0]
            out: jax.Array = library.flash_mha_with_kvcache(
                query.reshape(requests, -1, *query.shape[1:]),
                key,
                value,
                cache_seqlens=tables.kv_lens,
                page_table=tables.pages,
                softmax_scale=SPEC.sm_scale,
                is_causal=True,
                num_splits=splits,
            )
            return out.reshape(query.shape)

        return attend

    return Peer(FLASH_ATTN3, f"splits={splits}", load)


def pallas(splits: int, pages_per_block: int) -> Peer:
    """JAX's own paged attention for GPUs, which it has deprecated."""

    def load() -> Attend:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            library = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, tables: Tables) -> jax.Array:
            # It has no factor on the logits.
            out: jax.Array = library.paged_attention(
                query * SPEC.sm_scale,
                key,
                value,
                tables.pages,
                tables.kv_lens,
                k_splits=splits,
                pages_per_compute_block=pages_per_block,
            )
            return out

        return attend

    setting = f"k_splits={splits}, pages_per_compute_block={pages_per_block}"
    return Peer(PALLAS, setting, load, head_major=True)


def ejkernel(segments: int | None) -> Peer:
    """Ejkernel's Triton port of vLLM's unified attention; `segments` of the keys, `None` for one.

    Its own default takes 16 segments up to ``128 // num_kv_heads`` requests, and one beyond.
    """

    def load() -> Attend:
        library = importlib.import_module("ejkernel.kernels._triton.unified_attention")

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, tables: Tables) -> jax.Array:
            out: jax.Array = library.unified_attention(
                query,
                key,
                value,
                tables.kv_lens,
                tables.pages,
                tables.query_starts,
                softmax_scale=SPEC.sm_scale,
                causal=True,
                seq_threshold_3d=None if segments is None else tables.kv_lens.shape[0],
                num_par_softmax_segments=segments,
            )
            return out

        return attend

    return Peer(EJKERNEL, f"segments={segments or 1}", load)


def decode_peers(*, thorough: bool) -> list[Peer]:
    """Every peer with the settings among which the best counts."""
    if not thorough:
        return [flash_attn3(1), flash_attn3(8), ejkernel(None), ejkernel(16), pallas(8, 8)]
    return [
        *(flash_attn3(splits) for splits in (1, 4, 8)),
        *(ejkernel(segments) for segments in (None, 16)),
        *(pallas(*setting) for setting in ((16, 4), (8, 8), (4, 8), (4, 16))),
    ]
