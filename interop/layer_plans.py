"""Plans for a model whose layers differ in their arithmetic: one array, one copy to the device.

Layers that attend differently (windows, soft caps, scales) need schedules of their own, but share
lengths, pages and slots. `LayerPlans` is one metadata array in which what is common stands once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

from .errors import ArgumentError, PlanError
from .plan import AttentionPlan, MetadataLayout, PlanStatic
from .spec import AttentionSpec, CacheSpec

__all__ = ["COMMON", "LayerPlans", "check_layer", "check_layers", "joined"]

Metadata = TypeVar("Metadata")

# What every plan of a batch has, whatever the arithmetic.
COMMON = ("qo_indptr", "kv_indptr", "kv_lens", "kv_last_page_len", "slot_mapping", "page_indices")

# In these, all layers of a model have to agree: rows of one layer go on to the next.
SAME = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "dtype")


@dataclass(frozen=True, eq=False)
class LayerPlans(Generic[Metadata]):
    """One step's plans of all layers: the same class for PyTorch and JAX (a pytree of one leaf).

    ``plans[layer]`` is the `AttentionPlan` of a layer. Layers of equal arithmetic have the same
    one. A plan knows its layers: to attend to another one with it is refused.

    Parameters
    ----------
    statics
        Static part of each kind of layer.
    kinds
        For each layer, which of them is its own.
    metadata
        int32 on the device, what all plans share and then what each has for itself.
    """

    statics: tuple[PlanStatic, ...]
    kinds: tuple[int, ...]
    metadata: Metadata

    @cached_property
    def _plans(self) -> tuple[AttentionPlan[Metadata], ...]:
        return tuple(AttentionPlan(static, self.metadata) for static in self.statics)

    def __getstate__(self) -> dict[str, Any]:
        # The plans would arrive as copies that share nothing with the metadata.
        return {name: value for name, value in self.__dict__.items() if name != "_plans"}

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, layer: int) -> AttentionPlan[Metadata]:
        """Plan of a layer; raises `ArgumentError` for one that is not known while tracing."""
        try:
            number = operator.index(layer)
        except TypeError as error:
            raise ArgumentError(
                "layer",
                given=f"a {type(layer).__name__}",
                wanted="an integer that is known when the program is traced",
                remedy="Plans differ in more than numbers. Scan over groups of layers that are "
                "alike: plans[0] for the first of each group, plans[1] for the second, ...",
            ) from error
        return self._plans[self.kinds[number]]

    def __iter__(self) -> Iterator[AttentionPlan[Metadata]]:
        return (self._plans[kind] for kind in self.kinds)


def check_layers(specs: object, cache_spec: CacheSpec | None) -> tuple[AttentionSpec, ...]:
    """Return the specs of all layers as a tuple.

    Raises
    ------
    ArgumentError
        If `specs` is no sequence of `AttentionSpec`, or not one for each layer of the cache.
    PlanError
        If two layers disagree in heads, widths or dtype.
    """
    if not isinstance(specs, Sequence) or not specs:
        given = "no layers" if isinstance(specs, Sequence) else type(specs).__name__
        raise ArgumentError("specs", given=given, wanted="a sequence with each layer's spec")
    for i, spec in enumerate(specs):
        if not isinstance(spec, AttentionSpec):
            raise ArgumentError(f"specs[{i}]", given=type(spec).__name__, wanted="an AttentionSpec")
        for name in SAME:
            if getattr(spec, name) != getattr(specs[0], name):
                raise PlanError(
                    f"specs[{i}].{name}",
                    given=getattr(spec, name),
                    wanted=f"{getattr(specs[0], name)}, as specs[0] has it",
                    remedy="Plan apart for layers that differ in more than scale, masks and cap.",
                )
    if cache_spec is not None and len(specs) != cache_spec.num_layers:
        raise ArgumentError(
            "specs",
            given=f"{len(specs)} specs for a cache of {cache_spec.num_layers} layers",
            wanted="one for each layer",
        )
    return tuple(specs)


@lru_cache(maxsize=1024)
def joined(
    statics: tuple[PlanStatic, ...], kinds: tuple[int, ...]
) -> tuple[tuple[PlanStatic, ...], MetadataLayout]:
    """Lay plans of one batch out in one array.

    Parameters
    ----------
    statics
        Static parts as they would be alone.
    kinds
        For each layer, which of them is its own.

    Returns
    -------
    tuple of PlanStatic
        With the fields' places in the shared array, and the layers that each is for.
    MetadataLayout
        The whole array; ``"name@i"`` is a field of the i-th plan alone.
    """
    sizes: dict[str, int] = {}
    for i, static in enumerate(statics):
        for name, _, length in static.layout.fields:
            shared = sizes.setdefault(_name(name, i), length)
            assert shared == length
    whole = MetadataLayout.of(dict(sorted(sizes.items(), key=lambda item: "@" in item[0])))
    places = {name: (offset, length) for name, offset, length in whole.fields}
    made = []
    for i, static in enumerate(statics):
        fields = tuple((name, *places[_name(name, i)]) for name, *_ in static.layout.fields)
        # Without a cache there is no layer to be checked, and one plan for all is right for all.
        mine = tuple(layer for layer, kind in enumerate(kinds) if kind == i)
        layers = mine if static.cache is not None and len(statics) > 1 else ()
        made.append(replace(static, layout=MetadataLayout(fields), layers=layers))
    return tuple(made), whole


def _name(name: str, i: int) -> str:
    return name if name in COMMON else f"{name}@{i}"


def check_layer(static: PlanStatic, layer: int) -> None:
    """Raise `PlanError` where a plan for some layers is used for another one."""
    if static.layers and layer not in static.layers:
        raise PlanError(
            "plan",
            given=f"the plan of layers {', '.join(map(str, static.layers))} for layer {layer}",
            wanted="that of the layer, whose window, scale or cap is another",
            remedy="Pass plans[layer], where plans is what plan_layers returned.",
        )
