"""Looking for copies of a cache in the programs that XLA made."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from interop.errors import ArgumentError, FrameworkError, IsthmusError

from .cache import CacheArrays, CacheHandle
from .partitioning import spec_of_all

__all__ = ["CacheCopyError", "assert_no_cache_copies"]

# What names arrays, or makes none out of others; the computations that they call are looked at.
NO_COPY = {
    "after-all",
    "async-start",
    "bitcast",
    "broadcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
}
ARRAY = re.compile(r"[a-z][a-z0-9]*\[([0-9,]*)\]")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)")
COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
# ``{1}: (3, {}``: the result's place, and the operand (of a call) or parameter (of a program).
ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{")


class CacheCopyError(IsthmusError, AssertionError):
    """A compiled program copies a cache, or a layer of it.

    Attributes
    ----------
    instructions
        Name, operation and result of each instruction, e.g.
        ``"copy.12: copy to f32[3027,4,2,8]"``.
    """

    def __init__(self, message: str, *, instructions: tuple[str, ...]) -> None:
        super().__init__(message)
        self.instructions = instructions


def assert_no_cache_copies(compiled: jax.stages.Compiled, cache: CacheHandle | CacheArrays) -> None:
    """Raise if a compiled program makes an array as large as a cache's pool, or a layer of one.

    For your own tests::

        compiled = jax.jit(step, donate_argnums=1).lower(params, kv, plan).compile()
        jax_frontend.assert_no_cache_copies(compiled, kv)

    Loops, branches and the programs of `shard_map` are looked at, too. An array counts that has as
    many elements as a pool, a layer of it or both pools together, on one device or on all devices,
    whatever its element type; and one of whole pages that has at least as many as a layer. So give
    the cache a number of pages that makes it of no other array's size: a prime number will do.

    Parameters
    ----------
    compiled
        From ``jitted.lower(...).compile()``.
    cache
        The cache that the program was compiled for. Of `CacheArrays`, also those that were donated.

    Raises
    ------
    CacheCopyError
        If the program copies, gathers, slices or computes such an array; or returns one that is
        not in the memory of an argument, as pools are that were donated. It is an `AssertionError`.
    ArgumentError, FrameworkError
        For arguments of another kind.
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise ArgumentError(
            "compiled",
            given=f"{type(compiled).__module__}.{type(compiled).__name__}",
            wanted="a compiled program",
            remedy="Pass jax.jit(step).lower(...).compile().",
        )
    if not isinstance(cache, (CacheHandle, CacheArrays)):
        raise FrameworkError(
            "cache", given=type(cache).__name__, wanted="a CacheHandle or CacheArrays"
        )
    text = compiled.as_text()
    if text is None:
        raise ArgumentError("compiled", given="a program without text", wanted="XLA's text of it")
    sizes = _Sizes.of(cache)
    found = list(_copies(text, sizes))
    if isinstance(cache, CacheArrays):
        found += _own_results(text, sizes)
    if not found:
        return
    listing = "\n".join(f"  {line}" for line in found)
    raise CacheCopyError(
        f"the program makes {len(found)} arrays as large as the cache's pools or a layer of them:\n"
        f"{listing}\n"
        "Donate CacheArrays to the program and return them. Keep them whole, in the carry of a "
        "loop; let each append come after the attend before it; split them by heads. A CacheHandle "
        "cannot be copied.",
        instructions=tuple(found),
    )


@dataclass
class _Sizes:
    """What is as large as a cache.

    Parameters
    ----------
    elements
        Numbers of elements of pools and their layers, together and apart.
    pages
        Shapes of a page.
    """

    elements: set[int] = field(default_factory=set)
    pages: list[Counter[int]] = field(default_factory=list)

    @classmethod
    def of(cls, cache: CacheHandle | CacheArrays) -> _Sizes:
        """Sizes of a cache on one device and on all."""
        sizes = cls()
        for key, value in _pool_shapes(cache):
            for pools in ([key], [value], [key, value]):
                total = sum(map(math.prod, pools))
                sizes.elements |= {total, total // cache.spec.num_layers}
            sizes.pages += [Counter(key[1:]), Counter(value[1:])]
        return sizes

    def as_large(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of that shape is as large as a pool or a layer."""
        elements = math.prod(shape)
        if elements in self.elements:
            return True
        whole_pages = any(page <= Counter(shape) for page in self.pages)
        return whole_pages and elements >= min(self.elements)


def _pool_shapes(
    cache: CacheHandle | CacheArrays,
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of both pools, on one device and on all of them."""
    if isinstance(cache, CacheHandle):
        specs = (cache.spec, spec_of_all(cache.spec, cache.token.size))
        return [(spec.key_shape, spec.value_shape) for spec in specs]
    pools = (cache.k, cache.v)
    whole = tuple(tuple(pool.shape) for pool in pools)
    parts = tuple(
        shape if pool.sharding is None else tuple(pool.sharding.shard_shape(shape))
        for pool, shape in zip(pools, whole, strict=True)
    )
    return [(parts[0], parts[1]), (whole[0], whole[1])]


def _copies(text: str, sizes: _Sizes) -> Iterator[str]:
    """Instructions of a program that make arrays as large as a cache."""
    instructions = list(_instructions(text))
    fused = {
        name
        for _, _, operation, rest in instructions
        if operation == "fusion"
        for name in re.findall(r"calls=%?([^\s,}]+)", rest)
    }
    for place, made, operation, rest in instructions:
        # What is inside of a fusion never lies in memory; the fusion's own result does.
        if place[0] in fused or operation in NO_COPY or operation.endswith(("-done", "-update")):
            continue
        arrays = _arrays(made)
        large = {i for i, shape in enumerate(arrays) if sizes.as_large(shape)}
        if operation == "custom-call":
            large -= _aliased(rest, "output_to_operand_aliasing")
        # Parts of one array, as an all-to-all makes them.
        parts = len(set(arrays)) == 1 and sum(map(math.prod, arrays)) in sizes.elements
        if large or (parts and operation.startswith("all-to-all")):
            yield f"{place[1]}: {operation} to {_without_layouts(made)}"


def _instructions(text: str) -> Iterator[tuple[tuple[str, str], str, str, str]]:
    """Each instruction: its computation and name, the type of its result, operation, the rest."""
    computation = ""
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            computation = header[2]
        elif computation and (match := INSTRUCTION.match(line)):
            made, rest = _split_type(match[3])
            operation, _, rest = rest.partition("(")
            yield (computation, match[2]), made, operation, rest


def _split_type(text: str) -> tuple[str, str]:
    """Split ``type operation(...)``; the type of a tuple is in brackets and has spaces."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if letter == " " and not depth:
            return text[:i], text[i + 1 :]
    return text, ""


def _arrays(made: str) -> list[tuple[int, ...]]:
    """Shapes of the arrays in a type."""
    return [tuple(map(int, filter(None, dims.split(",")))) for dims in ARRAY.findall(made)]


def _without_layouts(made: str) -> str:
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", made)


def _aliased(text: str, attribute: str) -> set[int]:
    """Places of the results that an attribute says to lie in the memory of an operand."""
    start = text.find(f"{attribute}={{")
    if start < 0:
        return set()
    # The attribute ends where its braces do.
    depth = 0
    end = start
    for end in range(text.index("{", start), len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if not depth:
            break
    return {int(place or 0) for place in ALIAS.findall(text[start:end])}


def _own_results(text: str, sizes: _Sizes) -> list[str]:
    """Results of a program that are as large as a cache and not in the memory of an argument."""
    header = text.partition("\n")[0]
    made: Any = re.search(r"\nENTRY .*?\n\s+ROOT %?\S+ = (.*?)\n\}", text, re.DOTALL)
    results = _arrays(_split_type(made[1])[0])
    donated = _aliased(header, "input_output_alias")
    return [
        f"result {i} of {list(shape)}: not in the memory of a donated argument"
        for i, shape in enumerate(results)
        if i not in donated and sizes.as_large(shape)
    ]
