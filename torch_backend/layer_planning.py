"""Plans for models whose layers attend differently: one batch, several specs, one upload."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.errors import ArgumentError
from interop.layer_plans import COMMON, LayerPlans, check_layers, joined
from interop.plan import PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import device_facts
from .host_planning import IntArray, NewBuffer, host_buffer, host_plan
from .kernels import Device
from .planning import device_for, uploaded

__all__ = ["HostLayerPlans", "host_layer_plans", "plan_layers"]

# Static parts, which of them is each layer's, and the metadata.
HostLayerPlans = tuple[tuple[PlanStatic, ...], tuple[int, ...], IntArray]


def plan_layers(
    specs: Sequence[AttentionSpec],
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: torch.device | str | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> LayerPlans[Tensor]:
    """Plan one step's attention for a model whose layers attend differently.

    Parameters
    ----------
    specs
        The arithmetic of each layer of the cache, in order; equal ones share a plan. They may
        differ in scale, masks and soft cap.
    cache_spec, batch, bucket, device, fallback, kernel, return_lse, batch_invariant
        As for `plan`.

    Returns
    -------
    LayerPlans
        ``plans[layer]`` is the plan to pass with a layer. All are views of one array, which
        travelled in one copy; lengths, pages and slots are there once.

    Raises
    ------
    ArgumentError
        If there is not one spec for each layer of the cache.
    PlanError
        If layers disagree in heads, widths or dtype; and as `plan` does.
    ShapeError, LengthError, PageError, SlotError, UnsupportedError
        As `plan` does.
    """
    where = device_for(device, cache_spec)

    def make(new_buffer: NewBuffer) -> HostLayerPlans:
        return host_layer_plans(
            specs,
            cache_spec,
            batch,
            bucket,
            device_facts(where),
            fallback,
            kernel,
            new_buffer,
            return_lse,
            batch_invariant,
        )

    return LayerPlans(*uploaded(where, make))


def host_layer_plans(
    specs: Sequence[AttentionSpec],
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    bucket: Bucket | None,
    device: Device,
    fallback: str,
    kernel: str | None,
    new_buffer: NewBuffer,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> HostLayerPlans:
    """Make static parts, say which is each layer's, and write ``new_buffer(words)`` on the host.

    Arguments and errors are those of `plan_layers`.
    """
    layers = check_layers(specs, cache_spec)
    if not isinstance(batch, RaggedBatch):
        raise ArgumentError("batch", given=type(batch).__name__, wanted="a RaggedBatch")
    distinct = list(dict.fromkeys(layers))
    kinds = tuple(distinct.index(spec) for spec in layers)
    shared = _OnceCounted(batch)
    made = [
        host_plan(
            spec,
            cache_spec,
            shared,
            bucket,
            device,
            fallback,
            kernel,
            host_buffer,
            return_lse,
            batch_invariant,
        )
        for spec in distinct
    ]
    statics, whole = joined(tuple(static for static, _ in made), kinds)
    buffer = new_buffer(whole.words)
    for i, (static, (alone, words)) in enumerate(zip(statics, made, strict=True)):
        for name, place in static.layout.slices.items():
            if i == 0 or name not in COMMON:
                buffer[place] = words[alone.layout.slices[name]]
    return statics, kinds, buffer


class _OnceCounted(RaggedBatch):
    """A batch while it is planned for several specs: pages and slots are looked up once.

    It asks the batch itself, which may have rules of its own for them.
    """

    __slots__ = ("_batch", "_found")

    _batch: RaggedBatch
    _found: dict[tuple[int, ...], IntArray]

    def __init__(self, batch: RaggedBatch) -> None:
        self._batch = batch
        for name in RaggedBatch.__slots__:
            setattr(self, name, getattr(batch, name))
        self._found = {}

    def page_indices(self, page_size: int, num_pages: int) -> IntArray:
        """See `RaggedBatch.page_indices`."""
        key = (page_size, num_pages)
        if key not in self._found:
            self._found[key] = self._batch.page_indices(page_size, num_pages)
        return self._found[key]

    def shared_pages(self, page_size: int) -> int:
        """See `RaggedBatch.shared_pages`."""
        return self._batch.shared_pages(page_size)

    def slot_mapping(self, page_size: int) -> IntArray:
        """See `RaggedBatch.slot_mapping`."""
        key = (page_size,)
        if key not in self._found:
            self._found[key] = self._batch.slot_mapping(page_size)
        return self._found[key]
