"""A custom call's attributes: what it does, written so that any process can read it.

The call is written as one line of JSON and cut into pieces of up to 7 bytes, always the same number
of them, because an attribute that a handler expects and a call lacks ends the process. The pieces
are so short for two faults of jax-tvm-ffi 0.1.3, which both come from how it keeps what it decodes:
a longer string is freed before the handler reads it, and a number or an array is never freed (about
15 bytes a number and call). tvm-ffi keeps strings of up to 7 bytes inside a value, where nothing
can go wrong.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from typing import Any

from .errors import ArgumentError
from .plan import Launch
from .spec import AttentionSpec, CacheSpec

__all__ = ["ATTRIBUTES", "Call", "decode", "encode"]

PIECE_BYTES = 7
PIECES = 52
# Written once, with the spec, since a cache that it reads has the same.
SHARED_FIELDS = ("num_kv_heads", "head_dim", "head_dim_v")
CACHE_FIELDS = tuple(field.name for field in fields(CacheSpec) if field.name not in SHARED_FIELDS)
ATTRIBUTES = tuple(f"call_{i:02d}" for i in range(PIECES))


@dataclass(frozen=True)
class Call:
    """What one custom call does.

    Parameters
    ----------
    launch
        The kernel launch; for a write its `family` is ``"append"``. Where its spec says that there
        are sinks, the second operand of attention has them.
    cache
        Name of a torch-owned cache; ``""`` where the pools are operands.
    layer
        Layer of the pools; -1 where the page or slot numbers have the layer added already.
    lse
        Whether there is a result for the LSE.
    continues
        Whether output and LSE are operands, too: rows that an earlier launch of the plan wrote.
    arrangement
        Where pools that are operands lie otherwise than the cache's spec says, how they do.
    """

    launch: Launch
    cache: str
    layer: int
    lse: bool
    continues: bool = False
    arrangement: str = ""


def _short(value: Any) -> Any:
    """Return 0 and 1 for the longer words that JSON has for truth values."""
    return int(value) if isinstance(value, bool) else value


@lru_cache(maxsize=4096)
def encode(call: Call) -> dict[str, str]:
    """Write a call as attributes: all of `ATTRIBUTES`, always.

    Raises
    ------
    ArgumentError
        If the text does not fit, which no plan of ours and no cache name of 64 plain characters
        causes.
    """
    launch = call.launch
    text = json.dumps(
        [
            launch.family,
            launch.source,
            [_short(value) for value in astuple(launch.spec)],
            launch.cache and [_short(getattr(launch.cache, name)) for name in CACHE_FIELDS],
            launch.constants,
            launch.scratch_bytes,
            int(launch.draft_masks),
            call.cache,
            call.layer,
            int(call.lse),
            int(call.continues),
            *([call.arrangement] if call.arrangement else ()),
        ],
        separators=(",", ":"),
    )
    room = PIECES * PIECE_BYTES
    if len(text) > room:
        raise ArgumentError("call", given=f"{len(text)} bytes: {text}", wanted=f"up to {room}")
    pieces = range(0, room, PIECE_BYTES)
    return {name: text[i : i + PIECE_BYTES] for name, i in zip(ATTRIBUTES, pieces, strict=True)}


@lru_cache(maxsize=4096)
def decode(text: str) -> Call:
    """Read a call back from the values of `ATTRIBUTES`, joined in their order."""
    family, source, spec, cache, constants, scratch_bytes, masks, *rest = json.loads(text)
    names = [field.name for field in fields(AttentionSpec)]
    attention = AttentionSpec(**dict(zip(names, spec, strict=True)))
    pool = None
    if cache is not None:
        shared = {name: getattr(attention, name) for name in SHARED_FIELDS}
        pool = CacheSpec(**shared, **dict(zip(CACHE_FIELDS, cache, strict=True)))
    launch = Launch(
        family=family,
        source=source,
        spec=attention,
        cache=pool,
        constants=tuple(constants),
        scratch_bytes=scratch_bytes,
        draft_masks=bool(masks),
    )
    name, layer, lse, continues, *arrangement = rest
    return Call(launch, name, layer, bool(lse), bool(continues), *arrangement)
