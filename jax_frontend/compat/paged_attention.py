"""The signature of JAX's own paged attention for GPUs, which JAX has deprecated.

It is for code that waits to be moved; ``docs/migration.md`` says how to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from interop.batch import Bucket
from interop.errors import ShapeError, UnsupportedError
from interop.spec import FLOAT_DTYPES, AttentionSpec, CacheSpec

from .. import attention
from ..arranged import HEADS_FIRST, ArrangedArrays
from ..device_planning import plan_on_device
from .arguments import array, checked, device_kind, integers, number

__all__ = ["paged_attention"]

# Kernels count the step from head to head in 32 bits, and here a head is a whole pool away.
MAX_ELEMENTS = 2**32


@dataclass(frozen=True)
class _Call:
    spec: AttentionSpec
    cache: CacheSpec
    bucket: Bucket


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Attention of one query token a request, as ``jax.experimental.pallas.ops.gpu`` has it.

    The pages are read where they lie.

    Parameters
    ----------
    q
        ``[batch, num_heads, head_dim]``. Logits are ``q . k`` as they are: multiply `q` by the
        model's scale.
    k_pages, v_pages
        ``[num_kv_heads, total_num_pages, page_size, head_dim]`` of the type of `q`.
    block_tables
        ``[batch, pages_per_sequence]``.
    lengths
        ``[batch]`` tokens of each request; `None` where all pages of all are full.
    k_scales_pages, v_scales_pages
        `None`: pages with a scale for each token are not read.
    attn_logits_soft_cap
        Logits become ``cap * tanh(logits / cap)``; `None` for no cap.
    block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret, debug, mask_value
        Not looked at. The plan decides how the work is cut, and masked keys are left out.

    Returns
    -------
    jax.Array
        Like `q`. Rows are 0 where a length is 0, is more than the table has room for, or where a
        page of it is none of the pool.

    Raises
    ------
    ArgumentError, DTypeError, FrameworkError, ShapeError, UnsupportedError
        At trace time, for arguments that cannot be used.
    TransformError
        Under ``vmap`` and differentiation.
    """
    del block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret, debug
    del mask_value
    for name, scales in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scales is not None:
            raise UnsupportedError(
                f"{name}: no kernel here reads pages with a scale for each token. Use pages of q's "
                "type, or a cache of 8-bit floats with a scale for each head "
                "(jax_frontend.init_cache with dtype='float8_e4m3fn')."
            )
    q = array("q", q, 3)
    k_pages = array("k_pages", k_pages, 4)
    heads, pages, page_size, width = k_pages.shape
    batch = q.shape[0]
    if not batch or not heads or q.shape[1] % heads or q.shape[2] != width:
        raise ShapeError(
            "q",
            given=list(q.shape),
            wanted=f"[batch, a multiple of {heads}, {width}], from the heads of k_pages",
        )
    checked("q", q, q.shape, FLOAT_DTYPES)
    checked("k_pages", k_pages, k_pages.shape, (q.dtype.name,))
    checked("v_pages", v_pages, k_pages.shape, (q.dtype.name,))
    table = integers("block_tables", block_tables, 2)
    if table.shape[0] != batch or not table.size:
        wanted = f"[{batch}, pages_per_sequence], a row for each of q"
        raise ShapeError("block_tables", given=list(table.shape), wanted=wanted)
    if lengths is None:
        lengths = jnp.full((batch,), table.shape[1] * page_size, jnp.int32)
    lengths = integers("lengths", lengths, 1)
    if lengths.size != batch:
        raise ShapeError("lengths", given=list(lengths.shape), wanted=[batch])
    kind = device_kind(k_pages)
    if kind == "cuda" and k_pages.size >= MAX_ELEMENTS:
        raise ShapeError(
            "k_pages",
            given=f"{k_pages.size} elements",
            wanted=f"fewer than {MAX_ELEMENTS}, as kernels count the step to the next head",
            remedy="Use jax_frontend.init_cache, whose heads lie within a page.",
        )
    cap = attn_logits_soft_cap
    call = _Call(
        AttentionSpec(
            q.shape[1],
            heads,
            width,
            sm_scale=1.0,
            logits_soft_cap=None
            if cap is None
            else number("attn_logits_soft_cap", cap, positive=True),
        ),
        CacheSpec(1, pages, page_size, heads, width, dtype=q.dtype.name, device=kind),
        Bucket(batch, batch, table.size, 1),
    )
    return _step(q, k_pages, v_pages, table, lengths, call=call)


@partial(jax.jit, static_argnames="call")
def _step(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    call: _Call,
) -> jax.Array:
    starts = jnp.arange(lengths.size + 1, dtype=jnp.int32)
    plan, _ = plan_on_device(call.spec, call.cache, lengths, starts, table, bucket=call.bucket)
    cache = ArrangedArrays((k_pages, v_pages), HEADS_FIRST, call.cache)
    out: Any = attention.attend(q, cache, plan, 0)
    return out
