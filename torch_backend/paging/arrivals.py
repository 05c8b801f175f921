"""What requests that come ask for, and which published pages they can begin with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy.typing as npt

from interop.errors import ArgumentError, LengthError
from interop.host import host_ints

from .prefixes import NO_PAGES, Ints, PrefixIndex

__all__ = ["Arrival", "arrival", "arrivals"]


class Arrival(NamedTuple):
    """One request that comes.

    Parameters
    ----------
    num_tokens
        Tokens that it wants room for.
    namespace
        Whose prefixes it shares.
    num_ids
        How many of its tokens are known.
    found
        Published pages that hold the first of them, ``[n]``.
    """

    num_tokens: int
    namespace: Hashable
    num_ids: int
    found: Ints


def arrival(
    prefixes: PrefixIndex,
    num_tokens: int,
    tokens: npt.ArrayLike | None,
    namespace: Hashable,
    name: str = "tokens",
) -> Arrival:
    """Look up a request that comes, or say what is wrong with its arguments.

    `name` is what the caller knows `tokens` as. A request never begins with all of its known
    tokens, since the last one has to be computed for what follows it.
    """
    try:
        hash(namespace)
    except TypeError as error:
        raise ArgumentError(
            "namespace", given=f"{namespace!r} ({error})", wanted="something hashable"
        ) from error
    if tokens is None:
        return Arrival(num_tokens, namespace, 0, NO_PAGES)
    ids = host_ints(name, tokens, 1)
    if ids.size > num_tokens:
        raise LengthError(
            name, given=f"{ids.size} token ids", wanted=f"at most num_tokens, which is {num_tokens}"
        )
    full = max(0, ids.size - 1) // prefixes.page_size
    pages = ids[: full * prefixes.page_size].reshape(full, prefixes.page_size)
    return Arrival(num_tokens, namespace, ids.size, prefixes.find(pages, namespace))


def arrivals(
    prefixes: PrefixIndex,
    num_tokens: Sequence[int],
    tokens: Sequence[npt.ArrayLike | None] | None,
    namespaces: Sequence[Hashable] | None,
) -> list[Arrival]:
    """Look up several requests that come, or say what is wrong with their arguments."""
    nothing = [None] * len(num_tokens)
    tokens = nothing if tokens is None else tokens
    namespaces = nothing if namespaces is None else namespaces
    for name, size in (("tokens", len(tokens)), ("namespaces", len(namespaces))):
        if size != len(num_tokens):
            raise LengthError(
                name, given=size, wanted=f"one for each of {len(num_tokens)} requests"
            )
    return [
        arrival(prefixes, *arguments, name=f"tokens[{i}]")
        for i, arguments in enumerate(zip(num_tokens, tokens, namespaces, strict=True))
    ]
