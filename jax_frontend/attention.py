"""Attention over pages for code under ``jax.jit``: the calls that models make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from interop.attributes import Call
from interop.errors import DTypeError, FrameworkError, PlanError, ShapeError
from interop.ffi import guard
from interop.plan import AttentionPlan, Launch, PlanStatic
from interop.spec import AttentionSpec
from torch_backend.kernels import FAMILIES
from torch_backend.kernels.sinks import needs_lse
from torch_backend.planning import check_lse, check_without_cache
from torch_backend.sinks import SINKS_REMEDY, check_announced

from .arranged import ArrangedArrays
from .cache import CacheArrays, CacheHandle, handle_in_program, owned_scales, owned_token
from .layer_planning import check_layer_of, of_layer
from .partitioning import foreign_call, shards_of, spec_of_all
from .sinks import owned_sinks
from .writing import Layer, layer_operand, place, write_slots

__all__ = ["append", "attend", "paged_attention", "ragged_attention"]

Cache = TypeVar("Cache", CacheHandle, CacheArrays, ArrangedArrays)
Plan = AttentionPlan[jax.Array]

ROWS_REMEDY = "Rows are [tokens, heads, width]: plan with the batch and bucket of this step."
POOL_REMEDY = "Pools are flat and whole. Under shard_map give plan and cache one shard's spec."
SCALES_REMEDY = "Make the cache with jax_frontend.init_cache(..., scales=...)."


def attend(
    query: jax.Array,
    cache: Cache,
    plan: Plan,
    layer: Layer,
    *,
    return_lse: bool = False,
    return_cache: bool = False,
    sinks: jax.Array | None = None,
) -> Any:
    """Attend to the pages of one layer, which hold this step's tokens already (see `append`).

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]`` of the plan's dtype, where ``tokens`` is
        ``plan.bucket.num_tokens``.
    cache
        From `cache_handle` or `init_cache`, as it came out of the last `append`.
    plan
        From `plan`, passed into the jitted function as an argument.
    layer
        Which layer to read; an integer, or a traced scalar as in ``jax.lax.scan``.
    return_lse
        Also return the logarithm of each row's softmax denominator, without sinks: that is what
        `merge_states` needs.
    return_cache
        Also return the cache, ordered after this read; only needed where one program reads pages
        and then gives them to another request.
    sinks
        ``[num_qo_heads]`` float32, where the plan's spec says that there are sinks, see
        `AttentionSpec`.

    Returns
    -------
    jax.Array or tuple
        Output ``[tokens, num_qo_heads, head_dim_v]`` in the query's dtype; LSE
        ``[tokens, num_qo_heads]`` float32, natural logarithm, if asked for; the cache, if asked
        for. A row that sees no key, padding rows among them, has output 0 and LSE -inf.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, PlanError, ArgumentError
        At trace time, for arguments that do not fit the plan.
    TransformError
        Under ``vmap`` and differentiation.
    """
    shards = _check_call(query, "num_qo_heads", cache, plan)
    check_lse(plan.static, return_lse)
    check_rows("query", query, plan.static.query_shape, plan, shards)
    check_sinks(plan.spec, sinks, plan.spec.num_qo_heads * shards)
    check_layer_of(plan, layer)
    out, lse, cache = _attend(query, cache, plan, layer, return_lse, return_cache, sinks)
    results = (out,) + ((lse,) if return_lse else ()) + ((cache,) if return_cache else ())
    return results if len(results) > 1 else out


def append(key: jax.Array, value: jax.Array, cache: Cache, plan: Plan, layer: Layer) -> Cache:
    """Write this step's keys and values into the pages of one layer.

    Parameters
    ----------
    key, value
        ``[tokens, num_kv_heads, head_dim]`` and ``[tokens, num_kv_heads, head_dim_v]``; rows past
        the batch's own tokens are ignored.
    cache, plan, layer
        As for `attend`.

    Returns
    -------
    CacheHandle or CacheArrays
        The cache after the write; use it from here on, and return it from the jitted function: a
        write that no later call and no result depends on does not happen. `CacheArrays` are
        updated in place where the jitted function donates them, and copied where it does not.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, PlanError, ArgumentError, TransformError
        As `attend` does.
    """
    shards = _check_call(key, "num_kv_heads", cache, plan)
    check_key_value(key, value, plan, shards)
    slots = plan.static.layout.views(_owned(plan))["slot_mapping"]
    launch = Launch("append", "rows", plan.spec, plan.static.cache)
    return write_slots(key, value, cache, launch, slots, layer)


def paged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    plan: Plan,
    layer: Layer,
    *,
    return_lse: bool = False,
    sinks: jax.Array | None = None,
) -> Any:
    """`append` and `attend` in one call; returns ``(out, cache)`` or ``(out, lse, cache)``.

    Where the plan's bucket promises requests without context, attention reads `key` and `value`
    themselves and the pages are only written.
    """
    shards = _check_call(query, "num_qo_heads", cache, plan)
    check_lse(plan.static, return_lse)
    check_rows("query", query, plan.static.query_shape, plan, shards)
    check_key_value(key, value, plan, shards)
    check_sinks(plan.spec, sinks, plan.spec.num_qo_heads * shards)
    check_layer_of(plan, layer)
    # Before the write, so that a transformation of the query alone is refused before it, too.
    given = guard("paged_attention", query, key, value, *(() if sinks is None else (sinks,)))
    query, key, value = given[:3]
    cache = append(key, value, cache, plan, layer)
    if plan.static.own is not None:
        own = _own(query, key, value, plan, return_lse, *given[3:])
        out, lse = of_layer(plan, layer, *own)
    else:
        out, lse, cache = _attend(query, cache, plan, layer, return_lse, True, *given[3:])
    return (out, lse, cache) if return_lse else (out, cache)


def ragged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    plan: Plan,
    *,
    return_lse: bool = False,
    sinks: jax.Array | None = None,
) -> Any:
    """Attention without a cache: every request's keys and values are rows of the call.

    Shapes and errors are those of `torch_backend.ragged_attention`.
    """
    _check_plan(plan)
    check_without_cache(plan.static)
    check_lse(plan.static, return_lse)
    spec = plan.spec
    shards = min(shards_of(query, spec.num_qo_heads), shards_of(key, spec.num_kv_heads))
    check_rows("query", query, plan.static.query_shape, plan, shards)
    check_key_value(key, value, plan, shards)
    check_sinks(spec, sinks, spec.num_qo_heads * shards)
    out, lse = _own(query, key, value, plan, return_lse, sinks)
    return (out, lse) if return_lse else out


def _own(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    plan: Plan,
    lse: bool,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention over the rows of the call; the LSE where it was asked for or is needed."""
    static = plan.static
    launches = static.main if static.own is None else (static.own,)
    fields = static.layout.views(_owned(plan))
    lse = lse or needs_lse(launches)
    calls = [Call(launch, "", 0, lse) for launch in launches]
    operands = (query, *owned_sinks(sinks, plan), key, value)
    out, log, _ = _launch(static, calls, operands, fields)
    return out, log


def _attend(
    query: jax.Array,
    cache: Cache,
    plan: Plan,
    layer: Layer,
    lse: bool,
    hand_on: bool,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, Cache]:
    """Attention over pages; the cache that comes back is ordered after it if `hand_on` says so."""
    static, shape = plan.static, cache.spec
    lse = lse or needs_lse(static.main)
    rows: tuple[jax.Array, ...] = (query, *owned_sinks(sinks, plan))
    fields = static.layout.views(_owned(plan))
    number, offset = place(layer, shape)
    if offset is not None:
        named = (FAMILIES[launch.family].page_fields(launch) for launch in static.main)
        for name in {name for names in named for name in names}:
            fields[name] += offset
    which: tuple[jax.Array, ...] = layer_operand(layer, shape)
    if isinstance(cache, CacheHandle):
        token = owned_token(cache)
        calls = [Call(launch, cache.name, number, lse) for launch in static.main]
        operands = (*rows, token, *which)
        out, log, after = _launch(static, calls, operands, fields, token if hand_on else None)
        out, log = of_layer(plan, layer, out, log)
        return out, log, cache if after is None else handle_in_program(cache, after)
    how = cache.arrangement
    calls = [Call(launch, "", number, lse, arrangement=how) for launch in static.main]
    pools = (*rows, *cache.pools, *owned_scales(cache), *which)
    out, log, _ = _launch(static, calls, pools, fields)
    out, log = of_layer(plan, layer, out, log)
    # XLA orders reads and writes of arrays by itself.
    return out, log, cache


def _launch(
    static: PlanStatic,
    calls: Sequence[Call],
    operands: tuple[jax.Array, ...],
    fields: dict[str, jax.Array],
    token: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Run launches one after another: output, LSE if asked for, the token if one is handed on."""
    written: tuple[jax.Array, ...] = ()
    for number, call in enumerate(calls):
        launch, family = call.launch, FAMILIES[call.launch.family]
        # Of all shards' heads where the arrays are (see `partitioning`).
        tokens, heads, _ = operands[0].shape
        shape = (tokens, heads, static.spec.head_dim_v)
        results = [jax.ShapeDtypeStruct(shape, static.query_dtype)]
        if call.lse:
            results.append(jax.ShapeDtypeStruct(shape[:2], jnp.float32))
        rows = len(results)
        if launch.scratch_bytes:
            results.append(jax.ShapeDtypeStruct((launch.scratch_bytes,), jnp.uint8))
        if token is not None and call is calls[-1]:
            results.append(jax.ShapeDtypeStruct(token.shape, token.dtype))
        given = (*operands, *(fields[name] for name in family.fields(launch)))
        made = foreign_call(
            "isthmus_attend" if family.recordable else "isthmus_attend_waiting",
            replace(call, continues=number > 0),
            (*given, *written),
            results,
            # Each launch writes rows of its own requests and leaves the others as they are.
            aliases={len(given) + i: i for i in range(len(written))},
        )
        written = made[:rows]
    return written[0], written[1] if calls[0].lse else None, None if token is None else made[-1]


def _owned(plan: Plan) -> jax.Array:
    """Metadata, in memory of the program's own where the call may be recorded.

    XLA replays recorded launches only while their addresses stay the same. A jit argument moves
    from step to step; the result of an operation does not. Adding word 0, which is always 0
    (`MetadataLayout`), is an operation that XLA cannot fold away.
    """
    if not FAMILIES[plan.static.main[0].family].recordable:
        return plan.metadata
    return plan.metadata + plan.metadata[0]


def _check_plan(plan: object) -> None:
    if not isinstance(plan, AttentionPlan) or not isinstance(plan.metadata, jax.Array):
        raise FrameworkError(
            "plan",
            given=f"{type(plan).__name__} of {type(getattr(plan, 'metadata', None)).__name__}",
            wanted="a plan from jax_frontend.plan",
        )


def _check_call(rows: jax.Array, heads: str, cache: object, plan: Plan) -> int:
    """Check plan and cache, and return how many shards' heads the arrays have."""
    _check_plan(plan)
    shards = shards_of(rows, getattr(plan.spec, heads), cache, plan.static.cache)
    check_cache(cache, plan, shards)
    return shards


def check_cache(cache: object, plan: Plan, shards: int = 1) -> None:
    _check_plan(plan)
    if not isinstance(cache, (CacheHandle, CacheArrays, ArrangedArrays)):
        raise FrameworkError(
            "cache",
            given=f"{type(cache).__module__}.{type(cache).__name__}",
            wanted="a CacheHandle or CacheArrays",
            remedy="Make one with jax_frontend.cache_handle(cache) or jax_frontend.init_cache.",
        )
    wanted = plan.static.cache
    # Pools of all shards may have one shard's spec, as under shard_map, or their own.
    whole = wanted if wanted is None else spec_of_all(wanted, shards)
    if cache.spec != wanted and (isinstance(cache, CacheHandle) or cache.spec != whole):
        raise PlanError(
            "cache",
            given=f"one of {cache.spec}",
            wanted=f"the cache that the plan was made for, {wanted}",
            remedy="Plan with the spec of the cache that is passed here.",
        )
    if isinstance(cache, CacheHandle):
        if cache.token.shape != (shards,):
            raise PlanError(
                "cache",
                given=f"a handle of {cache.token.size} shards",
                wanted="the handle of one shard",
                remedy="Inside jax.shard_map, split the handle over the mesh axis of its shards. "
                "Outside of it, pass rows with the heads of all shards.",
            )
        return
    if isinstance(cache, ArrangedArrays):
        return  # checked by whoever made it, who knows the caller's names
    shape = cache.spec if shards == 1 or whole is None else whole
    _check_array("cache.k", cache.k, shape.key_shape, shape.storage_dtype, POOL_REMEDY)
    _check_array("cache.v", cache.v, shape.value_shape, shape.storage_dtype, POOL_REMEDY)
    if shape.quantized:
        _check_array("cache.scales", cache.scales, shape.scales_shape, "float32", SCALES_REMEDY)


def check_key_value(key: jax.Array, value: jax.Array, plan: Plan, shards: int = 1) -> None:
    static = plan.static
    heads = static.spec.num_kv_heads
    rows = static.bucket.num_tokens if static.cache is not None else static.bucket.num_pages
    check_rows("key", key, (rows, heads, static.spec.head_dim), plan, shards)
    check_rows("value", value, (rows, heads, static.spec.head_dim_v), plan, shards)


def check_sinks(spec: AttentionSpec, sinks: Any, heads: int) -> None:
    check_announced(spec, sinks)
    if sinks is not None:
        _check_array("sinks", sinks, (heads,), "float32", SINKS_REMEDY)


def check_rows(
    name: str, rows: Any, shape: tuple[int, int, int], plan: Plan, shards: int = 1
) -> None:
    tokens, heads, width = shape
    _check_array(name, rows, (tokens, heads * shards, width), plan.static.query_dtype, ROWS_REMEDY)


def _check_array(
    name: str, array: Any, shape: tuple[int, ...], dtype: str, shape_remedy: str
) -> None:
    if not isinstance(array, jax.Array):
        raise FrameworkError(
            name,
            given=f"{type(array).__module__}.{type(array).__name__}",
            wanted="a jax.Array",
            remedy="Use interop.dlpack.to_jax, or call torch_backend with torch tensors.",
        )
    if array.shape != shape:
        raise ShapeError(
            name, given=list(array.shape), wanted=f"{list(shape)}", remedy=shape_remedy
        )
    if array.dtype.name != dtype:
        raise DTypeError(name, given=array.dtype.name, wanted=dtype)
