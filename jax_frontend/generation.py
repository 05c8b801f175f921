"""A whole decode loop in one compiled program: plan, model, choice of tokens, stop, and again.

Plans are made on the device, so nothing comes back to Python between two tokens. Rows never move: a
request that has stopped keeps its row, is planned as one without tokens, and so is neither read nor
written. Query lengths are therefore the same in all steps, and where keys are not split the
schedule is a constant of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from interop.batch import Bucket
from interop.device_status import PlanStatus
from interop.errors import ArgumentError, DTypeError, FrameworkError, ShapeError
from interop.host import count_of
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec

from .cache import CacheArrays, CacheHandle
from .device_planning import plan_on_device

__all__ = ["Generated", "StopReason", "generate", "greedy"]

Cache = TypeVar("Cache", CacheHandle, CacheArrays)


class StopReason(IntEnum):
    """Why a request got no further token."""

    MAX_NEW_TOKENS = 0
    """It has as many as it may have."""
    END_OF_TEXT = 1
    """Its last token ends a text."""
    NO_ROOM = 2
    """Its next token has no place in the cache; ``Generated.status`` says what was too small."""


class Generated(NamedTuple):
    """What `generate` made.

    Parameters
    ----------
    tokens
        ``[requests, max_new_tokens]`` int32: the new tokens of each request, then zeros.
    num_tokens
        ``[requests]`` int32: how many are new; a token that ends the text counts.
    kv_lens
        ``[requests]`` int32: tokens in the cache now. The last one of a request is not among them:
        it is what the next call begins with.
    stop_reason
        ``[requests]`` int32, numbers of `StopReason`.
    status
        ``[requests]`` int32, numbers of `interop.PlanStatus`: what did not fit where the reason is
        ``NO_ROOM``, else ``OK``.
    cache
        The cache after the last step.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    kv_lens: jax.Array
    stop_reason: jax.Array
    status: jax.Array
    cache: Any


class _State(NamedTuple):
    """What one step hands to the next; arrays are ``[requests]`` where nothing else is said."""

    step: jax.Array  # []
    last: jax.Array
    active: jax.Array
    made: Generated


def greedy(logits: jax.Array, step: jax.Array) -> jax.Array:
    """Choose the token of the largest logit, of equal ones the first.

    Parameters
    ----------
    logits
        ``[requests, vocab]``.
    step
        Not looked at.

    Returns
    -------
    jax.Array
        ``[requests]`` int32.
    """
    del step
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def generate(
    model: Callable[[jax.Array, jax.Array, Cache, AttentionPlan[jax.Array]], Any],
    tokens: jax.Array,
    cache: Cache,
    kv_lens: jax.Array,
    page_table: jax.Array,
    *,
    spec: AttentionSpec,
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
    limits: jax.Array | None = None,
    sample: Callable[[jax.Array, jax.Array], jax.Array] = greedy,
    bucket: Bucket | None = None,
    kernel: str | None = None,
    split: bool | None = None,
) -> Generated:
    """Decode up to `max_new_tokens` tokens for each request, wholly on the device.

    A ``lax.while_loop``, to be called inside ``jax.jit``: each step plans, runs the model, which
    writes one token of each request to the cache and attends, and chooses the next tokens. It ends
    when no request goes on. The pages that a request may come to need are reserved beforehand.

    Parameters
    ----------
    model
        ``model(token_ids, positions, cache, plan)`` gives logits ``[requests, vocab]`` and the
        cache after its writes. It calls `paged_attention` (or `append` and `attend`) with the plan
        once a layer; ``token_ids`` and ``positions`` are ``[requests]`` int32.
    tokens
        ``[requests]`` int32: the token that each request begins with, known but not in the cache.
        One of `end_tokens` is a request that has stopped.
    cache
        From `cache_handle` or `init_cache`; in it are the tokens before. Donate `CacheArrays`.
    kv_lens
        ``[requests]`` int32: how many tokens of each request are in the cache.
    page_table
        ``[requests, width]`` int32: pages of each request in order, those for new tokens among
        them. Where there are fewer than `width`, -1 in the others makes the request stop there.
        No two requests may have the same page to write to.
    spec
        Arithmetic of the model's attention.
    max_new_tokens
        Most new tokens of a request, 1 or more.
    end_tokens
        Tokens that end a text.
    limits
        ``[requests]`` int32: most new tokens of each, where they differ; 0 is an empty seat.
    sample
        ``sample(logits, step)`` gives ``[requests]`` int32 tokens; ``step`` is a scalar that counts
        from 0, for ``jax.random.fold_in``. Rows of requests that have stopped hold no meaning.
    bucket
        Sizes of the plans: ``num_tokens`` is the number of requests. When left out, pages enough
        for the whole table.
    kernel, split
        As for `plan_on_device`.

    Returns
    -------
    Generated
        New tokens, lengths, and why each request stopped.

    Raises
    ------
    FrameworkError, DTypeError, ShapeError, ArgumentError, PlanError, UnsupportedError
        At trace time, for arguments that do not fit together; those of `plan_on_device`, too.
    """
    count = _requests(tokens, kv_lens, limits)
    most = count_of("max_new_tokens", max_new_tokens)
    if most == 0:
        raise ArgumentError("max_new_tokens", given=0, wanted="1 or more")
    ends = np.array([count_of("end_tokens", token) for token in end_tokens], np.int32)
    if not isinstance(cache, (CacheHandle, CacheArrays)):
        raise FrameworkError(
            "cache", given=type(cache).__name__, wanted="a CacheHandle or CacheArrays"
        )
    if bucket is None:
        bucket = _whole_table(page_table, count)
    elif bucket.num_tokens != count:
        raise ArgumentError(
            "bucket.num_tokens",
            given=bucket.num_tokens,
            wanted=f"{count}, one row for each request",
        )
    offsets = np.arange(count + 1, dtype=np.int32)
    cache_spec, sizes = cache.spec, bucket

    def going_on(state: _State) -> jax.Array:
        return state.active.any()

    def body(state: _State) -> _State:
        made = state.made
        lens = jnp.where(state.active, made.kv_lens + 1, 0)
        plan, verdict = plan_on_device(
            spec, cache_spec, lens, jnp.asarray(offsets), page_table,
            bucket=sizes, kernel=kernel, split=split,
        )  # fmt: skip
        positions = jnp.where(state.active, made.kv_lens, 0)
        logits, after = model(state.last, positions, made.cache, plan)
        chosen = _checked_choice(sample(logits, state.step), count)
        served = state.active & (verdict == PlanStatus.OK)
        num_tokens = made.num_tokens + served
        ended = served & _is_one_of(chosen, ends)
        full = num_tokens >= most if limits is None else num_tokens >= limits
        reason = jnp.where(ended, int(StopReason.END_OF_TEXT), made.stop_reason)
        lost = state.active & ~served
        made = Generated(
            # A request gets a token in every step until it stops, so the step is its place.
            tokens=lax.dynamic_update_slice_in_dim(
                made.tokens, jnp.where(served, chosen, 0)[:, None], state.step, axis=1
            ),
            num_tokens=num_tokens,
            kv_lens=made.kv_lens + served,
            stop_reason=jnp.where(lost, int(StopReason.NO_ROOM), reason),
            status=jnp.where(lost, verdict, made.status),
            cache=after,
        )
        last = jnp.where(served, chosen, state.last)
        return _State(state.step + 1, last, served & ~ended & ~full & (state.step + 1 < most), made)

    over = _is_one_of(tokens, ends)
    active = ~over if limits is None else ~over & (limits > 0)
    # Under shard_map what the loop carries varies from the start, as it will after a step.
    zeros = tokens - tokens + (kv_lens - kv_lens)
    start = Generated(
        tokens=jnp.broadcast_to(zeros[:, None], (count, most)),
        num_tokens=zeros,
        kv_lens=kv_lens,
        stop_reason=jnp.where(over, int(StopReason.END_OF_TEXT), zeros),
        status=zeros,
        cache=cache,
    )
    return lax.while_loop(going_on, body, _State(jnp.int32(0), tokens, active, start)).made


def _requests(tokens: object, kv_lens: object, limits: object) -> int:
    """How many requests there are; raises unless all arrays are int32 of that length."""
    arrays = {"tokens": tokens, "kv_lens": kv_lens}
    if limits is not None:
        arrays["limits"] = limits
    count = -1
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise FrameworkError(
                name,
                given=f"{type(array).__module__}.{type(array).__name__}",
                wanted="a jax.Array",
                remedy="Pass it into the jitted function as an argument.",
            )
        if array.dtype != np.int32:
            raise DTypeError(name, given=str(array.dtype), wanted="int32")
        if array.ndim != 1 or array.size == 0 or count not in (-1, array.size):
            wanted = "[requests]" if count < 0 else f"[{count}], as tokens has"
            raise ShapeError(name, given=list(array.shape), wanted=wanted)
        count = array.size
    return count


def _whole_table(page_table: object, count: int) -> Bucket:
    shape = tuple(getattr(page_table, "shape", ()))
    if len(shape) != 2:
        raise ShapeError("page_table", given=list(shape), wanted=f"[{count}, width]")
    return Bucket(count, count, shape[0] * shape[1], 1)


def _is_one_of(tokens: jax.Array, ends: np.ndarray[Any, Any]) -> jax.Array:
    return (tokens[:, None] == ends).any(axis=1)


def _checked_choice(chosen: Any, count: int) -> jax.Array:
    if getattr(chosen, "shape", None) != (count,) or chosen.dtype != np.int32:
        given = f"{getattr(chosen, 'dtype', type(chosen).__name__)}"
        shape = list(getattr(chosen, "shape", ()))
        raise ShapeError(
            "sample",
            given=f"a result of {given} {shape}",
            wanted=f"int32 [{count}], one token for each request",
        )
    return chosen
