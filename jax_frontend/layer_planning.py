"""Plans for models whose layers attend differently, with their metadata as one JAX array."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from interop.batch import Bucket, RaggedBatch
from interop.layer_plans import LayerPlans, check_layer
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.host_planning import NewBuffer
from torch_backend.kernels import Device
from torch_backend.layer_planning import HostLayerPlans, host_layer_plans

from .planning import placed

__all__ = ["check_layer_of", "of_layer", "plan_layers"]


def plan_layers(
    specs: Sequence[AttentionSpec],
    cache_spec: CacheSpec | None,
    batch: RaggedBatch,
    *,
    bucket: Bucket | None = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
    fallback: str = "warn",
    kernel: str | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> LayerPlans[jax.Array]:
    """Plan one step's attention for a model whose layers attend differently, outside ``jax.jit``.

    The result is a pytree with one leaf: pass it to the jitted step as an argument, and
    ``plans[layer]`` with a layer. There, layers are numbers that are known while tracing. A loop
    over layers is a scan over groups of layers that are alike, each group with all its kinds:
    ``plans[0]`` with ``2 * i``, ``plans[1]`` with ``2 * i + 1``. A traced layer that has another
    plan gets NaN for its output and LSE.

    Parameters
    ----------
    specs, cache_spec, batch, bucket, fallback, kernel, return_lse, batch_invariant
        As for `torch_backend.plan_layers`; under ``shard_map``, those of one shard.
    device
        Where the metadata goes; JAX's default device when left out.

    Raises
    ------
    ArgumentError, ShapeError, LengthError, PageError, SlotError, PlanError, UnsupportedError
        As `torch_backend.plan_layers` does.
    """

    def make(facts: Device, new_buffer: NewBuffer) -> HostLayerPlans:
        return host_layer_plans(
            specs,
            cache_spec,
            batch,
            bucket,
            facts,
            fallback,
            kernel,
            new_buffer,
            return_lse,
            batch_invariant,
        )

    return LayerPlans(*placed(device, cache_spec, make))


def check_layer_of(plan: AttentionPlan[jax.Array], layer: int | jax.Array) -> None:
    """Raise `PlanError` where a known layer has another plan; `of_layer` is for traced ones."""
    if isinstance(layer, (int, np.integer)):
        check_layer(plan.static, int(layer))


def of_layer(
    plan: AttentionPlan[jax.Array], layer: int | jax.Array, out: jax.Array, lse: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Make NaN of what a plan computed for a traced layer that has another plan."""
    layers, cache = plan.static.layers, plan.static.cache
    if not layers or cache is None or not isinstance(layer, jax.Array):
        return out, lse
    # A layer that the cache lacks is taken to the nearest, as `attend` does.
    nearest = jnp.clip(layer, 0, cache.num_layers - 1)
    right = jnp.isin(nearest, jnp.array(layers, nearest.dtype))
    out = jnp.where(right, out, jnp.nan)
    return out, None if lse is None else jnp.where(right, lse, jnp.nan)
