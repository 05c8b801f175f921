"""Which dimension of a call's arrays has heads, and which shardings of them a call can run under.

A call runs on each device's own heads, and no data moves for it. So arrays may be split over mesh
axes by their heads, all alike, and by nothing else. What differs is refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from interop.attributes import Call
from interop.errors import PlanError

from .arranged import NUM_POOLS

__all__ = ["HeadPlaces", "spec_of"]

# Name of an operand or result as the caller knows it, and its dimension of heads; `None` for what
# every device has whole.
Place = tuple[str, int | None]
Axes = tuple[str, ...]
Value = TypeVar("Value")

ROWS = ("query", "key", "value", "out", "lse")
# What may be whole where the others are split: every device then cuts its heads out of its own
# copy, a few rows. To cut a pool would be a copy of it.
CUT_IN_PLACE = ("query", "key", "value", "sinks", "cache.scales")
WHOLE = "whole on each device"


@dataclass(frozen=True)
class HeadPlaces:
    """The heads in the operands and results of one call.

    Parameters
    ----------
    call
        What one device does.
    shards
        Over how many devices heads have to be split; 1 where every device has all of them.
    given
        Places of the operands.
    made
        Places of the results. Scratch memory has none.
    """

    call: Call
    shards: int
    given: tuple[Place, ...]
    made: tuple[Place | None, ...]

    @classmethod
    def of(
        cls, target: str, call: Call, operands: Sequence[tuple[int, ...]], results: int
    ) -> HeadPlaces:
        """Find the places from the order in which `jax_frontend.handlers` takes a call's buffers.

        Parameters
        ----------
        target, call
            The custom call.
        operands
            Shapes of its operands, with the heads of all devices.
        results
            How many results it has.
        """
        launch = call.launch
        heads = 1 if launch.cache is not None and launch.cache.layout == "HND" else 2
        pools: list[Place] = [("cache.k", heads), ("cache.v", heads)]
        if call.cache:
            pools = [("cache.token", 0)]
        elif call.arrangement:
            pools = [("cache.pools", None)] * NUM_POOLS[call.arrangement]
        cache = [*pools]
        if launch.cache is not None and launch.cache.quantized and not call.cache:
            cache.append(("cache.scales", 2))
        rows: list[Place] = [("out", 1), ("lse", 1)]
        rows = rows[: 1 + call.lse]
        own_heads = launch.spec.num_qo_heads
        query: list[Place] = [("query", 1), ("sinks", 0)]
        query = query[: 1 + launch.spec.sinks]
        given: list[Place] = [*query, *cache]
        made: list[Place | None] = [*rows]
        if target == "isthmus_append":
            own_heads = launch.spec.num_kv_heads
            given, made = [("key", 1), ("value", 1), ("plan", None), *cache], [*pools]
        elif launch.source == "tokens":
            given = [*query, ("key", 1), ("value", 1)]
        if launch.scratch_bytes:
            made.append(None)
        if len(made) < results:
            made.append(("cache.token", 0))
        written = rows if call.continues else []
        given += [("plan", None)] * (len(operands) - len(given) - len(written)) + written
        return cls(call, operands[0][1] // own_heads, tuple(given), tuple(made))

    @property
    def kept(self) -> tuple[Place, ...]:
        """Places of the results without scratch memory."""
        return tuple(place for place in self.made if place is not None)

    def without_scratch(self, results: Iterable[Value]) -> list[Value]:
        """Leave scratch memory out of values that belong to the results."""
        pairs = zip(results, self.made, strict=True)
        return [value for value, place in pairs if place is not None]

    def axes(self, given: Sequence[Any], mesh: Any) -> Axes:
        """Return the mesh axes that heads are split over; none where each device has all heads.

        Parameters
        ----------
        given
            Partition specs of the operands.
        mesh
            Their mesh.

        Raises
        ------
        PlanError
            If that is not the split that the call's plan was made for, or not the only one.
        """
        found: dict[str, Axes] = {}
        for (name, heads), spec in zip(self.given, given, strict=True):
            axes = _real_axes(spec, mesh)
            if others := {i: names for i, names in axes.items() if i != heads}:
                self._refuse_other_dimension(name, heads, others)
            if heads is not None:
                found[name] = axes.get(heads, ())
        chosen = next((axes for axes in found.values() if axes), ())
        count = math.prod(mesh.shape[axis] for axis in chosen)
        if self.shards > 1:
            _check_alike(found)
        elif chosen:
            self._refuse_plan_of_all(chosen, count)
        if count != self.shards:
            self._refuse_other_plan(chosen, count)
        if self.call.cache and mesh.size > self.shards:
            raise PlanError(
                "cache",
                given=f"a handle of {self.shards} shards in a program of {mesh.size} devices",
                wanted="a shard for each device",
                remedy="Split heads over all axes of the mesh, with a cache on each of its "
                "devices: jax_frontend.cache_handle([cache, ...], sharding=...).",
            )
        return chosen

    def check_results(self, wanted: Sequence[Any], axes: Axes, mesh: Any) -> None:
        """Refuse results that the program wants otherwise than the devices make them.

        Rows may be wanted whole: nothing but a constraint on them says that, so it is no surprise.

        Parameters
        ----------
        wanted
            Partition specs of the results without scratch memory.
        axes
            What `axes` returned.
        mesh
            The mesh.

        Raises
        ------
        PlanError
            For every other difference.
        """
        for (name, heads), spec in zip(self.kept, wanted, strict=True):
            made = {heads: axes} if axes else {}
            split = _real_axes(spec, mesh)
            if split == made or (not split and name in ROWS):
                continue
            raise PlanError(
                name,
                given="wanted " + (f"with {self._described(name, split)}" if split else WHOLE),
                wanted=f"heads split over {_names(axes)}" if axes else WHOLE,
                remedy="Nothing is moved between devices for this call. Give its result the "
                "sharding that it has, by jax.lax.with_sharding_constraint, and what is computed "
                "from it the other.",
            )

    def _refuse_other_dimension(
        self, name: str, heads: int | None, axes: dict[int, Axes]
    ) -> NoReturn:
        raise PlanError(
            name,
            given=self._described(name, axes),
            wanted=WHOLE
            if heads is None
            else "no split but that of heads, which needs no data of another device",
            remedy="Plan with device=NamedSharding(mesh, PartitionSpec())."
            if name == "plan"
            else "Inside of jax.shard_map you choose yourself what is moved.",
        )

    def _refuse_other_plan(self, axes: Axes, count: int) -> NoReturn:
        raise PlanError(
            "plan",
            given=f"that of one of {self.shards} shards",
            wanted=f"that of one of {count}, for heads split over {_names(axes)}"
            if axes
            else "that of all heads, which every device has",
            remedy=f"Plan with jax_frontend.spec_of_shard(spec, {count}) of the attention spec and "
            "of the cache's."
            if axes
            else "Put the arrays on the mesh split by heads, or plan with the specs of all heads.",
        )

    def _refuse_plan_of_all(self, axes: Axes, count: int) -> NoReturn:
        spec = self.call.launch.spec
        remedy = (
            f"Plan with jax_frontend.spec_of_shard(spec, {count}) of the attention spec and of the "
            "cache's; the arrays stay as they are."
        )
        if spec.num_kv_heads % count:
            remedy = (
                f"{spec.num_kv_heads} KV heads cannot be dealt to {count} devices: use fewer, or "
                "split tokens (jax_frontend.dcp)."
            )
        elif self.call.arrangement:
            remedy = "Inside of jax.shard_map each device calls this with its own heads."
        raise PlanError(
            "plan",
            given=f"one for all heads ({spec.num_qo_heads} query, {spec.num_kv_heads} KV), with "
            f"arrays whose heads are split over {_names(axes)}",
            wanted="that of one device, since kernels' schedules depend on its heads",
            remedy=remedy,
        )

    def _described(self, name: str, axes: dict[int, Axes]) -> str:
        """Say how an operand or result is split."""
        cache = self.call.launch.cache
        names: tuple[str, ...] = ()
        if name in ROWS:
            names = ("tokens", "heads", "width")
        elif name in ("cache.k", "cache.v") and cache is not None:
            page = ("page_size", "heads") if cache.layout == "NHD" else ("heads", "page_size")
            names = ("pages", *page, "width")
        elif name == "plan":
            names = ("metadata",)
        elif name == "sinks":
            names = ("heads",)
        parts = [
            f"{names[i] if names else f'dimension {i}'} split over {_names(over)}"
            for i, over in axes.items()
        ]
        return " and ".join(parts)


def _check_alike(found: dict[str, Axes]) -> None:
    """Refuse heads that are split over other axes than those of another operand."""
    # What cannot be cut decides; without a cache, rows decide among themselves.
    first = max(found, key=lambda name: (bool(found[name]), name not in CUT_IN_PLACE))
    for name, axes in found.items():
        if axes == found[first] or (not axes and name in CUT_IN_PLACE):
            continue
        raise PlanError(
            name,
            given=f"heads split over {_names(axes)}" if axes else WHOLE,
            wanted=f"heads split over {_names(found[first])}, as those of {first} are",
            remedy="Nothing is moved between devices for this call: give the array that sharding "
            "where it is made.",
        )


def spec_of(sharding: Any) -> Any:
    """Return the partition spec of a sharding that the compiler has found."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    raise PlanError(
        "sharding",
        given=str(sharding),
        wanted="jax.sharding.NamedSharding, with one mesh for all arguments of the program",
    )


def _real_axes(spec: Any, mesh: Any) -> dict[int, Axes]:
    """Mesh axes that split each dimension; an axis of one device splits nothing."""
    axes = {}
    for dimension, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if names := tuple(name for name in names if mesh.shape[name] > 1):
            axes[dimension] = names
    return axes


def _names(axes: Iterable[str]) -> str:
    return ", ".join(f"mesh axis {axis!r}" for axis in axes)
