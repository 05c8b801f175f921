"""A custom call's attributes: what it does, written as numbers that mean the same anywhere.

One table, `WORDS`, makes the attributes at the call site, the list that a handler is registered
with, and the way back; an attribute that a handler expects and a call lacks would end the process.
Everything is an int64 or a float. Text is packed into int64 words, because jax-tvm-ffi 0.1.3 frees
string attributes of more than 7 bytes twice, and array attributes cost it 2 µs a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import ArgumentError
from .plan import Launch
from .spec import AttentionSpec, CacheSpec

__all__ = ["ATTRIBUTES", "Call", "decode", "encode"]

MAX_CONSTANTS = 16
TEXT_WORD_BYTES = 8

# Name and number of words of each integer entry; floats follow.
WORDS = {
    "family": 2,
    "source": 1,
    "num_qo_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "head_dim_v": 1,
    "causal": 1,
    "sliding_window": 1,
    "dtype": 2,
    "num_layers": 1,
    "num_pages": 1,
    "page_size": 1,
    "cache_dtype": 2,
    "layout": 1,
    "device": 1,
    "constants": MAX_CONSTANTS + 1,
    "scratch_bytes": 1,
    "cache": 4,
    "layer": 1,
    "lse": 1,
}
FLOATS = ("sm_scale", "logits_soft_cap")
ATTRIBUTES = (
    *(f"{name}_{i:02d}" for name, count in WORDS.items() for i in range(count)),
    *FLOATS,
)


@dataclass(frozen=True)
class Call:
    """What one custom call does.

    Parameters
    ----------
    launch
        The kernel launch; for a write its `family` is ``"append"``.
    cache
        Name of a torch-owned cache, at most 32 bytes; ``""`` where the pools are operands.
    layer
        Layer of the pools; -1 where the page or slot numbers have the layer added already.
    lse
        Whether there is a result for the LSE.
    """

    launch: Launch
    cache: str
    layer: int
    lse: bool


def pack_text(argument: str, text: str, words: int) -> list[int]:
    """Pack text into int64 words of 8 bytes; `ArgumentError` if it is too long."""
    data = text.encode()
    room = words * TEXT_WORD_BYTES
    if len(data) > room:
        raise ArgumentError(argument, given=f"{text!r}", wanted=f"at most {room} bytes")
    data = data.ljust(room, b"\0")
    return [int(number) for number in np.frombuffer(data, "<i8")]


def unpack_text(words: tuple[int, ...]) -> str:
    """Read what `pack_text` wrote."""
    return np.array(words, "<i8").tobytes().rstrip(b"\0").decode()


def encode(call: Call) -> dict[str, np.int64 | float]:
    """Write a call as attributes: all of `ATTRIBUTES`, always."""
    launch, spec, cache = call.launch, call.launch.spec, call.launch.cache
    if len(launch.constants) > MAX_CONSTANTS:
        raise ArgumentError(
            "constants", given=f"{len(launch.constants)} numbers", wanted=f"up to {MAX_CONSTANTS}"
        )
    padding = [0] * (MAX_CONSTANTS - len(launch.constants))
    entries: dict[str, int | str | list[int]] = {
        "family": launch.family,
        "source": launch.source,
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "causal": int(spec.causal),
        "sliding_window": spec.sliding_window or 0,
        "dtype": spec.dtype or "",
        "num_layers": cache.num_layers if cache else 0,
        "num_pages": cache.num_pages if cache else 0,
        "page_size": cache.page_size if cache else 0,
        "cache_dtype": cache.dtype if cache else "",
        "layout": cache.layout if cache else "",
        "device": cache.device if cache else "",
        "constants": [len(launch.constants), *launch.constants, *padding],
        "scratch_bytes": launch.scratch_bytes,
        "cache": call.cache,
        "layer": call.layer,
        "lse": int(call.lse),
    }
    attributes: dict[str, np.int64 | float] = {}
    for name, count in WORDS.items():
        entry = entries[name]
        if isinstance(entry, str):
            entry = pack_text(name, entry, count)
        numbers = entry if isinstance(entry, list) else [entry]
        for i, number in enumerate(numbers):
            attributes[f"{name}_{i:02d}"] = np.int64(number)
    attributes["sm_scale"] = spec.sm_scale
    attributes["logits_soft_cap"] = spec.logits_soft_cap or 0.0
    return attributes


@lru_cache(maxsize=4096)
def decode(*values: int | float) -> Call:
    """Read a call back from the values of `ATTRIBUTES`, in their order."""
    entries: dict[str, tuple[int, ...]] = {}
    place = 0
    for name, count in WORDS.items():
        entries[name] = tuple(int(value) for value in values[place : place + count])
        place += count
    sm_scale, cap = values[place:]
    one = {name: words[0] for name, words in entries.items()}
    spec = AttentionSpec(
        one["num_qo_heads"],
        one["num_kv_heads"],
        one["head_dim"],
        head_dim_v=one["head_dim_v"],
        sm_scale=sm_scale,
        causal=bool(one["causal"]),
        sliding_window=one["sliding_window"] or None,
        logits_soft_cap=cap or None,
        dtype=unpack_text(entries["dtype"]) or None,
    )
    cache = None
    if one["num_layers"]:
        cache = CacheSpec(
            num_layers=one["num_layers"],
            num_pages=one["num_pages"],
            page_size=one["page_size"],
            num_kv_heads=one["num_kv_heads"],
            head_dim=one["head_dim"],
            head_dim_v=one["head_dim_v"],
            dtype=unpack_text(entries["cache_dtype"]),
            layout=unpack_text(entries["layout"]),
            device=unpack_text(entries["device"]),
        )
    constants = entries["constants"]
    launch = Launch(
        family=unpack_text(entries["family"]),
        source=unpack_text(entries["source"]),
        spec=spec,
        cache=cache,
        constants=constants[1 : 1 + constants[0]],
        scratch_bytes=one["scratch_bytes"],
    )
    return Call(launch, unpack_text(entries["cache"]), one["layer"], bool(one["lse"]))
