"""Calls on arrays whose heads are split over devices, outside of ``jax.shard_map``.

A plan, and the cache's spec in it, are those of one shard, as they are under ``shard_map``: a GPU's
schedule is made for the heads that one device has. Here such a plan meets arrays of all heads, and
each device runs the same custom call on its own. How that comes about depends on the mesh:

- Over axes of type ``Auto`` the compiler finds shardings after tracing, so the call is a
  `custom_partitioning`: its rule says that the heads of rows, pools and token are split alike, and
  its callback sees what Shardy has found. On one device JAX puts the plain custom call in its
  place, and on several each device's program has it, too.
- Over axes of type ``Explicit`` shardings are known while JAX traces, and the call is a
  ``shard_map`` over them.

Both refuse what would have to move between devices, rather than let XLA move it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from interop import ffi
from interop.attributes import Call, encode
from interop.errors import ArgumentError, PlanError
from interop.spec import AttentionSpec, CacheSpec

from .cache import CacheArrays, CacheHandle
from .head_shardings import CUT_IN_PLACE, HeadPlaces, Place, spec_of

__all__ = ["foreign_call", "shards_of", "spec_of_all", "spec_of_shard"]

Spec = TypeVar("Spec", AttentionSpec, CacheSpec)
Shape = tuple[tuple[int, ...], str]


def spec_of_shard(spec: Spec, shards: int) -> Spec:
    """Return the spec that each of several devices has if they share the heads of `spec`.

    With it a plan is made for arrays that are split by heads, under ``jax.shard_map`` and outside
    of it.

    Parameters
    ----------
    spec
        An `AttentionSpec` or a `CacheSpec` of all heads.
    shards
        How many devices.

    Raises
    ------
    ArgumentError
        Unless `shards` divides the KV heads.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ArgumentError("shards", given=repr(shards), wanted="a positive integer")
    if not isinstance(spec, (AttentionSpec, CacheSpec)):
        raise ArgumentError(
            "spec", given=type(spec).__name__, wanted="an AttentionSpec or a CacheSpec"
        )
    if spec.num_kv_heads % shards:
        raise ArgumentError(
            "shards",
            given=f"{shards} for {spec.num_kv_heads} KV heads",
            wanted="a divisor of num_kv_heads",
            remedy="More devices than KV heads can share tokens: see jax_frontend.dcp.",
        )
    return _scaled(spec, 1, shards)


def spec_of_all(spec: Spec, shards: int) -> Spec:
    """Return the spec of all heads, where `spec` is that of one of so many devices."""
    return _scaled(spec, shards, 1)


def _scaled(spec: Spec, times: int, parts: int) -> Spec:
    names = ["num_kv_heads"]
    if isinstance(spec, AttentionSpec):
        names.append("num_qo_heads")
    heads: dict[str, Any] = {name: getattr(spec, name) * times // parts for name in names}
    return replace(spec, **heads)


def shards_of(rows: object, heads: int, cache: object = None, spec: CacheSpec | None = None) -> int:
    """How many shards' heads the arrays of a call have; 1 where they fit the plan as it is.

    Parameters
    ----------
    rows, heads
        Rows ``[tokens, heads, width]`` of the call, and how many heads the plan has for them.
    cache, spec
        The call's cache, and the spec that the plan has for it; `None` for a call without one.
    """
    if not isinstance(rows, jax.Array) or rows.ndim != 3 or not _can_split():
        return 1
    shards, rest = divmod(rows.shape[1], heads)
    if rest or shards < 2:
        return 1
    # Rows alone may be a mistake; the cache has to have the same heads.
    if isinstance(cache, CacheHandle):
        return shards if cache.token.shape == (shards,) else 1
    if isinstance(cache, CacheArrays) and spec is not None:
        shapes = [getattr(pool, "shape", None) for pool in cache.pools]
        whole = spec_of_all(spec, shards)
        return shards if shapes == [whole.key_shape, whole.value_shape] else 1
    return shards if cache is None else 1


def _can_split() -> bool:
    """Whether a program may run on several devices that JAX, not the caller, deals arrays to."""
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes


def foreign_call(
    target: str,
    call: Call,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """As `interop.ffi.foreign_call`, on the heads that each device has.

    Parameters
    ----------
    target, operands, aliases
        As there, with the heads of all devices.
    call
        What one device does. Where the first operand has several times the heads that `call` has,
        it has to be split over as many devices.
    results
        Shapes with the heads of all devices. Scratch memory is of the size that one device needs,
        and is not handed back where there may be several.

    Raises
    ------
    PlanError
        For shardings that the call would have to move data for, or that do not fit `call`: at
        trace time over ``Explicit`` axes. Over ``Auto`` axes XLA refuses to compile the program,
        with the error's text in its own.
    TransformError
        Under ``vmap`` and differentiation.
    """
    aliases = aliases or {}
    if not _can_split():
        return ffi.foreign_call(target, call, operands, results, aliases=aliases)
    split = _Split(target, call, _shapes(operands), _shapes(results), tuple(aliases.items()))
    guarded = ffi.guard(ffi.name_of(target), *operands)
    mesh = _explicit_mesh(split, guarded)
    return tuple(_partitioned(split)(*guarded) if mesh is None else split.typed(mesh, guarded))


def _shapes(values: Iterable[Any]) -> tuple[Shape, ...]:
    return tuple((tuple(value.shape), value.dtype.name) for value in values)


@dataclass(frozen=True)
class _Split:
    """One call of all devices, and what each device runs of it.

    Parameters
    ----------
    target, call, operands, results, aliases
        As for `foreign_call`.
    """

    target: str
    call: Call
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    aliases: tuple[tuple[int, int], ...]

    @cached_property
    def places(self) -> HeadPlaces:
        """Where the heads are."""
        shapes = [shape for shape, _ in self.operands]
        return HeadPlaces.of(self.target, self.call, shapes, len(self.results))

    def local(self, *operands: jax.Array) -> list[jax.Array]:
        """Run the call on one device's arrays."""
        results = []
        for (shape, dtype), place in zip(self.results, self.places.made, strict=True):
            part = list(shape)
            if place is not None and place[1] is not None:
                part[place[1]] //= self.places.shards
            results.append(jax.ShapeDtypeStruct(part, dtype))
        made = ffi.bare_call(self.target, self.call, operands, results, aliases=dict(self.aliases))
        return self.places.without_scratch(made)

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Stand for the call until it is known how many devices run the program."""
        if self.places.shards == 1:
            return self.local(*operands)
        return _one_device_p.bind(*operands, split=self)

    def rule(self, mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        """Shardy's rule: heads are split alike, no other dimensions have to do with each other.

        JAX asks for it while it writes a program of several devices. Nothing in that says what
        `partition` will put there later, and JAX can be told to look up compiled programs on disk
        by their text alone, so the call is written there, too, as a constant that nobody uses.
        """
        del mesh, operand_types, result_types
        text = "".join(encode(self.call).values())
        mlir.ir_constant(np.frombuffer(text.encode(), np.uint8))
        shards = self.places.shards
        sizes: dict[str, Any] = {}
        mappings = []
        shapes = (*self.operands, *self.places.without_scratch(self.results))
        places = (*self.places.given, *self.places.kept)
        for number, ((shape, _), (_, heads)) in enumerate(zip(shapes, places, strict=True)):
            factors: list[Any] = [f"x{number}_{i}" for i in range(len(shape))]
            if heads is not None and shards > 1:
                own, size = factors[heads], shape[heads] // shards
                factors[heads] = "shards" if size == 1 else CompoundFactor("shards", own)
                if size > 1:
                    sizes[own] = size
            mappings.append(ArrayMapping(*factors))
        # The size of a factor that is a whole dimension somewhere is found there.
        if shards > 1 and not any("shards" in mapping for mapping in mappings):
            sizes["shards"] = shards
        count = len(self.operands)
        return SdyShardingRule(tuple(mappings[:count]), tuple(mappings[count:]), **sizes)

    def partition(self, mesh: Any, arguments: Any, results: Any) -> Any:
        """Say what each device runs and what it gets, or refuse what Shardy has found."""
        places = self.places
        axes = places.axes([spec_of(x.sharding) for x in arguments], mesh)
        places.check_results([spec_of(x.sharding) for x in results], axes, mesh)
        given: tuple[Any, ...] = tuple(x.sharding for x in arguments)
        made: list[Any] = [x.sharding for x in results]
        if axes:
            given = tuple(NamedSharding(mesh, spec) for spec in _specs(places.given, axes))
            made = [NamedSharding(mesh, spec) for spec in _specs(places.kept, axes)]
        return mesh, self.local, made, given

    def typed(self, mesh: Any, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Run the call over a mesh whose shardings are part of the arrays' types."""
        places = self.places
        axes = places.axes([jax.typeof(x).sharding.spec for x in operands], mesh)
        if not axes:
            return self.local(*operands)
        specs = _specs(places.given, axes)
        cut = [
            jax.sharding.reshard(x, NamedSharding(mesh, spec)) if name in CUT_IN_PLACE else x
            for x, spec, (name, _) in zip(operands, specs, places.given, strict=True)
        ]
        run = jax.shard_map(
            self.local,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=_specs(places.kept, axes),
            check_vma=False,
        )
        return run(*cut)


def _specs(places: Iterable[Place], axes: tuple[str, ...]) -> list[PartitionSpec]:
    """How arrays lie whose heads are split over mesh axes."""
    return [
        PartitionSpec() if heads is None else PartitionSpec(*[None] * heads, axes)
        for _, heads in places
    ]


def _explicit_mesh(split: _Split, operands: Iterable[jax.Array]) -> Any:
    """The mesh in the types of arrays, if its axes are of type ``Explicit``; else `None`."""
    for array in operands:
        mesh = jax.typeof(array).sharding.mesh
        if mesh.empty or mesh.are_all_axes_auto:
            continue
        if mesh.are_all_axes_explicit:
            return mesh
        if split.places.shards > 1:
            raise PlanError(
                "mesh",
                given=f"axes {mesh.axis_names} of the types {mesh.axis_types}",
                wanted="axes of type Auto, or axes of type Explicit",
                remedy="Inside of jax.shard_map any mesh will do.",
            )
    return None


@lru_cache(maxsize=4096)
def _partitioned(split: _Split) -> Any:
    """The call over axes of type ``Auto``; one object for equal calls, traced once."""
    call = custom_partitioning(split.whole)
    call.def_partition(split.partition, sharding_rule=split.rule)
    # Inlined where a program is traced. Outside of one, JAX would run what is inside operation by
    # operation, and gather the operands of a custom call.
    return jax.jit(call, inline=True)


def _refuse_one_device(_: Any, *__: Any, split: _Split) -> NoReturn:
    spec = split.call.launch.spec
    raise PlanError(
        "plan",
        given=f"that of one of {split.places.shards} shards ({spec.num_qo_heads} query and "
        f"{spec.num_kv_heads} KV heads), in a program that runs on one device",
        wanted="the plan of all heads",
        remedy="Plan with the specs of all heads, or put the arrays on a mesh, split by heads.",
    )


def _shapes_of_results(*_: Any, split: _Split) -> list[Any]:
    kept = split.places.without_scratch(split.results)
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in kept]


# Stands where only a program of several devices has something to run.
_one_device_p = Primitive("isthmus_one_device")
_one_device_p.multiple_results = True
_one_device_p.def_abstract_eval(_shapes_of_results)
mlir.register_lowering(_one_device_p, _refuse_one_device)
