"""The signature that TPU code calls: ragged paged attention that plans on the device.

Meanings are those of the kernels of the tpu-inference project (``ragged_paged_attention`` in
version 3, and its variant for heads of 64), whose docstrings say what each argument is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from interop.batch import Bucket
from interop.device_status import PlanStatus
from interop.errors import ArgumentError, ShapeError
from interop.host import count_of, host_ints
from interop.plan import AttentionPlan
from interop.spec import FLOAT_DTYPES, FP8_DTYPES, AttentionSpec, CacheSpec
from torch_backend.cache import torch_dtype

from .. import attention
from ..arranged import ArrangedArrays
from ..cache import CacheArrays, CacheHandle
from ..device_planning import plan_on_device
from .arguments import array, checked, integers, number, window
from .tpu_pages import arranged, cache_spec_of, heads_of

__all__ = ["ragged_paged_attention"]

# What makes TPU kernels fast, debugs them, or fills masked logits, which here are left out.
TPU_ONLY = frozenset(
    [
        "mask_value",
        "chunk_prefill_size",
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "d_block_sizes",
        "p_block_sizes",
        "m_block_sizes",
        "vmem_limit_bytes",
        "debug_mode",
        "disable_bounds_checks",
        "disable_semaphore_checks",
    ]
)


@dataclass(frozen=True)
class _Factors:
    """What is multiplied, and where.

    Parameters
    ----------
    logits, output
        Factors on both.
    stored
        Of an array of 8-bit floats: what its keys and its values stand for, over what is stored.
    query
        The query is divided by this, rounded to the cache's type and taken back; `None` for not.
    """

    logits: float
    output: float
    stored: tuple[float, float] | None
    query: float | None


@dataclass(frozen=True)
class _Call:
    """What one call does, as far as that is known when the program is traced.

    Parameters
    ----------
    spec, cache, bucket
        Arithmetic, shape of the cache, and sizes of the plan.
    factors
        Factors.
    layer
        Layer of a cache of several, where it is not traced.
    """

    spec: AttentionSpec
    cache: CacheSpec
    bucket: Bucket
    factors: _Factors
    layer: int


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: Any,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    layer: int | jax.Array = 0,
    max_query_len: int | None = None,
    return_status: bool = False,
    **tpu_only: Any,
) -> Any:
    """Write this step's keys and values into their pages, and attend to all that these hold.

    All integers may be arrays on the device, traced or not: the plan is made there. Layers of one
    program that have equal plans compute them once.

    Parameters
    ----------
    q
        ``[max_num_tokens, num_q_heads, head_dim]``, requests one after another.
    k, v
        ``[max_num_tokens, num_kv_heads, head_dim]`` of the type of `q`. For an array of 8-bit
        floats they may have its type, and are stored as they are. `None` where `update_kv_cache` is
        false.
    kv_cache
        One layer, as TPU code has it: ``[num_pages, page_size, 2 * num_kv_heads, head_dim]`` in
        which key and value of a head are neighbours; or what TPU kernels make of that, the third
        dimension cut into packed words, with their padding of heads and of `head_dim` to 128. Or a
        `CacheHandle` or `CacheArrays`. Arrays are written in place where they are donated or made
        by the program. Outside of ``jax.jit`` this call donates them.
    kv_lens
        ``[max_num_seqs]`` tokens of each request, those of this step included.
    page_indices
        ``[max_num_seqs * pages_per_seq]``, or ``[max_num_seqs, pages_per_seq]``.
    cu_q_lens
        ``[max_num_seqs + 1]``, the running sum of query lengths from 0.
    distribution
        ``[3]``, ``i <= j <= k``. There are `k` requests; what the arrays hold of others is ignored.
        TPU kernels find decodes before `i` and whole prefills before `j`; here all are alike.
    attention_sink
        ``[num_q_heads]``, see `AttentionSpec`.
    sm_scale
        Factor on the logits; as on a TPU it is 1 when left out.
    sliding_window
        How many tokens a query sees, itself included; `None` for all.
    soft_cap
        Logits become ``soft_cap * tanh(logits / soft_cap)``; `None` for no cap.
    q_scale
        Round the query to the cache's type as a TPU does, which multiplies in that type. Nothing
        here needs it.
    k_scale, v_scale
        Factors on the keys and values in the cache. What is stored is `k` and `v` as they are; only
        those that are rounded to an array of 8-bit floats are divided first.
    use_causal_mask
        Whether a query sees only keys at or before its own position.
    update_kv_cache
        Whether `k` and `v` are written. If not, nothing looks at them: all keys are in the cache.
    layer
        Which layer of a `CacheHandle` or `CacheArrays`; a number, or a traced scalar.
    max_query_len
        Most query tokens of one request, where that is known: kernels are faster for 1.
    return_status
        Also return ``[max_num_seqs]`` int32, numbers of `interop.device_status.PlanStatus`: 0 for
        requests that are served. Where `distribution` is out of order, all are ``QUERY_ORDER``.
    tpu_only
        Arguments of TPU kernels that change no result (block sizes and the like) are ignored.

    Returns
    -------
    (jax.Array, Any) or (jax.Array, Any, jax.Array)
        Output, like `q`; the cache in the form in which it was given, after the write; the status,
        if asked for. Rows of no request are 0, and so are those of a request whose numbers do not
        fit the arrays, of which nothing is written. That goes for all requests where `distribution`
        is traced and out of order.

    Raises
    ------
    ArgumentError, DTypeError, FrameworkError, LengthError, PlanError, ShapeError, UnsupportedError
        At trace time, for arguments that cannot be used; nothing is written or donated then.
    TransformError
        Under ``vmap`` and differentiation.
    """
    for name in tpu_only.keys() - TPU_ONLY:
        known = ", ".join(sorted(TPU_ONLY))
        raise ArgumentError(name, given="an argument", wanted=f"none but those named, and {known}")
    q = array("q", q, 3)
    metadata = _metadata(kv_lens, page_indices, cu_q_lens, distribution)
    update = bool(update_kv_cache)
    cache = _cache_spec(kv_cache, q, k if update else None)
    if q.shape[1] % cache.num_kv_heads or q.shape[2] != cache.head_dim:
        raise ShapeError(
            "q",
            given=list(q.shape),
            wanted=f"[max_num_tokens, a multiple of {cache.num_kv_heads}, {cache.head_dim}], from "
            "the heads of keys",
        )
    checked("q", q, q.shape, FLOAT_DTYPES if cache.quantized else (cache.dtype,))
    if attention_sink is not None:
        checked("attention_sink", attention_sink, q.shape[1:2], FLOAT_DTYPES)
    factors = _factors(kv_cache, cache, sm_scale, q_scale, k_scale, v_scale)
    spec = AttentionSpec(
        q.shape[1],
        cache.num_kv_heads,
        cache.head_dim,
        head_dim_v=cache.head_dim_v,
        sm_scale=factors.logits,
        causal=bool(use_causal_mask),
        sliding_window=None if sliding_window is None else window(sliding_window),
        logits_soft_cap=None if soft_cap is None else number("soft_cap", soft_cap, positive=True),
        dtype=q.dtype.name if cache.quantized else None,
        sinks=attention_sink is not None,
    )
    lens, table = metadata[:2]
    longest = 0 if max_query_len is None else count_of("max_query_len", max_query_len)
    bucket = Bucket(lens.size, q.shape[0], table.size, longest)
    traced = isinstance(layer, jax.Array)
    call = _Call(spec, cache, bucket, factors, 0 if traced else _layer(layer))
    rows = _rows(k, v, q, kv_cache, cache) if update else None
    donates = update and not isinstance(kv_cache, CacheHandle)
    run = _donating if donates else _keeping
    out, after, status = run(
        kv_cache, q, rows, metadata, attention_sink, layer if traced else None, call=call
    )
    after = kv_cache if after is None else after
    return (out, after, status) if return_status else (out, after)


def _step(
    kv_cache: Any,
    q: jax.Array,
    rows: tuple[jax.Array, jax.Array] | None,
    metadata: tuple[jax.Array, ...],
    attention_sink: jax.Array | None,
    traced_layer: jax.Array | None,
    *,
    call: _Call,
) -> tuple[jax.Array, Any, jax.Array]:
    """Plan, write, attend. Layers that are alike trace it once, as it is compiled by itself."""
    factors, stored_as = call.factors, call.cache.dtype
    layer = call.layer if traced_layer is None else traced_layer
    plan, status = _plan(call, *metadata)
    is_array = isinstance(kv_cache, jax.Array)
    cache = arranged(kv_cache, call.cache) if is_array else kv_cache
    if rows is not None:
        k, v = rows
        if is_array and factors.stored is not None:
            as_it_is = k.dtype.name == stored_as
            cache = _with_scales(cache, (1.0, 1.0) if as_it_is else factors.stored)
            k, v = k.astype(q.dtype), v.astype(q.dtype)
        cache = attention.append(k, v, cache, plan, layer)
    if is_array and factors.stored is not None:
        cache = _with_scales(cache, factors.stored)
    if factors.query is not None:
        q = _rounded(q, factors.query, stored_as)
    sinks = None if attention_sink is None else attention_sink.astype(jnp.float32)
    out, cache = attention.attend(q, cache, plan, layer, return_cache=True, sinks=sinks)
    if factors.output != 1.0:
        out = (out.astype(jnp.float32) * factors.output).astype(out.dtype)
    if call.bucket.max_query_len < call.bucket.num_tokens:
        # Of a request that breaks this promise, kernels may leave rows as memory had them.
        slots = plan.static.layout.views(plan.metadata)["slot_mapping"]
        out = jnp.where(slots[:, None, None] >= 0, out, jnp.zeros((), out.dtype))
    if is_array:
        cache = cache.pools[0]
    if rows is None and not isinstance(kv_cache, CacheHandle):
        cache = None  # what is handed back unchanged, outside of a program, is a copy
    return out, cache, status


_donating = jax.jit(_step, static_argnames="call", donate_argnames="kv_cache")
_keeping = jax.jit(_step, static_argnames="call")


def _plan(
    call: _Call,
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
) -> tuple[AttentionPlan[jax.Array], jax.Array]:
    """Plan for the requests that `distribution` says are there."""
    i, j, k = distribution
    in_order = (i >= 0) & (i <= j) & (j <= k) & (k <= kv_lens.size)
    count = jnp.where(in_order, k, 0)
    request = jnp.arange(cu_q_lens.size)
    # What comes after the last request may hold anything.
    cu_q_lens = jnp.where(request <= count, cu_q_lens, cu_q_lens[count])
    kv_lens = jnp.where(request[:-1] < count, kv_lens, 0)
    plan, status = plan_on_device(
        call.spec, call.cache, kv_lens, cu_q_lens, page_table, bucket=call.bucket
    )
    return plan, jnp.where(in_order, status, int(PlanStatus.QUERY_ORDER))


def _metadata(
    kv_lens: Any, page_indices: Any, cu_q_lens: Any, distribution: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Lengths, page table, query offsets and distribution as int32, of shapes that agree."""
    lens = integers("kv_lens", kv_lens, 1)
    table = integers("page_indices", page_indices, 1, 2)
    requests = lens.size
    if not requests:
        raise ShapeError("kv_lens", given="no requests", wanted="room for one or more")
    fits = table.shape[0] == requests if table.ndim == 2 else not table.size % requests
    if not fits or not table.size:
        raise ShapeError(
            "page_indices",
            given=list(table.shape),
            wanted=f"[{requests} * pages_per_seq] or [{requests}, pages_per_seq], as kv_lens has "
            f"{requests} requests",
        )
    starts = integers("cu_q_lens", cu_q_lens, 1)
    ends = integers("distribution", distribution, 1)
    for name, found, size in (("cu_q_lens", starts, requests + 1), ("distribution", ends, 3)):
        if found.size != size:
            raise ShapeError(name, given=list(found.shape), wanted=[size])
    if not isinstance(distribution, jax.core.Tracer):
        i, j, k = host_ints("distribution", np.asarray(distribution), 1).tolist()
        if not 0 <= i <= j <= k <= requests:
            raise ArgumentError(
                "distribution",
                given=[i, j, k],
                wanted=f"0 <= i <= j <= k <= {requests}: ends of decodes, of prefills, of all",
            )
    return lens, table.reshape(requests, -1), starts, ends


def _cache_spec(kv_cache: Any, q: jax.Array, k: jax.Array | None) -> CacheSpec:
    """Shape of a cache of any of the three kinds; `k` is `None` where none are written."""
    if isinstance(kv_cache, (CacheHandle, CacheArrays)):
        return kv_cache.spec
    pages = array("kv_cache", kv_cache, 4, 5)
    heads = heads_of(pages, q.shape[2]) if k is None else array("k", k, 3).shape[1]
    return cache_spec_of(pages, heads, q.shape[2])


def _factors(
    kv_cache: Any, cache: CacheSpec, sm_scale: Any, q_scale: Any, k_scale: Any, v_scale: Any
) -> _Factors:
    """Check the scales and say where they are applied."""
    logits = number("sm_scale", sm_scale, remedy="Multiply q by a factor that is traced.")
    query = None if q_scale is None else number("q_scale", q_scale, positive=True)
    key = None if k_scale is None else number("k_scale", k_scale, positive=True)
    value = None if v_scale is None else number("v_scale", v_scale, positive=True)
    if not isinstance(kv_cache, jax.Array) and cache.quantized:
        for name, scale in (("q_scale", query), ("k_scale", key), ("v_scale", value)):
            if scale is not None:
                raise ArgumentError(
                    name,
                    given=scale,
                    wanted="None for a quantised cache that has scales of its own",
                    remedy="Make the cache with scales=(k_scale, v_scale).",
                )
    logits *= query or 1.0
    if cache.quantized:
        stored = (key or 1.0, value or 1.0) if isinstance(kv_cache, jax.Array) else None
        return _Factors(logits, 1.0, stored, query)
    return _Factors(logits * (key or 1.0), value or 1.0, None, query)


def _layer(layer: Any) -> int:
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        return int(layer)
    raise ArgumentError("layer", given=repr(layer), wanted="an integer, or a traced scalar")


def _rows(
    k: Any, v: Any, q: jax.Array, kv_cache: Any, cache: CacheSpec
) -> tuple[jax.Array, jax.Array]:
    """Keys and values that can be written, both of one dtype."""
    dtypes: tuple[str, ...] = (q.dtype.name,)
    if isinstance(kv_cache, jax.Array) and cache.dtype in FP8_DTYPES:
        dtypes += (cache.dtype,)
    shape = q.shape[0], cache.num_kv_heads
    k = checked("k", k, (*shape, cache.head_dim), dtypes)
    return k, checked("v", v, (*shape, cache.head_dim_v), (k.dtype.name,))


def _with_scales(cache: ArrangedArrays, scales: tuple[float, float]) -> ArrangedArrays:
    """Return the cache with a table of scales, which is a constant of the program."""
    table = np.broadcast_to(np.array(scales, np.float32)[:, None], cache.spec.scales_shape)
    return replace(cache, scales=jnp.asarray(table))


def _rounded(q: jax.Array, scale: float, dtype: str) -> jax.Array:
    """Round ``q / scale`` to `dtype`, as a TPU does that multiplies in it."""
    largest = torch.finfo(torch_dtype(dtype)).max
    scaled = jnp.clip(q / jnp.asarray(scale, q.dtype), -largest, largest)
    return scaled.astype(dtype).astype(q.dtype)
