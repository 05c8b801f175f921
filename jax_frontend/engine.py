"""One layer's attention for a serving engine in JAX, and the builder of its metadata.

Arguments are those of `torch_backend.backend`. What is written in place there is returned here:
`do_kv_cache_update` returns the cache after the write, `forward` the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from interop.errors import DTypeError, FrameworkError, PlanError, ShapeError
from interop.plan import AttentionPlan, Launch
from interop.spec import FP8_DTYPES, AttentionSpec, CacheSpec, dtype_name
from torch_backend.engine.builder import PlanningBuilder, Step
from torch_backend.engine.settings import (
    LayerSettings,
    Scales,
    check_fused_output,
    check_metadata,
    check_query_target,
    check_slots_fit,
    plan_among,
)
from torch_backend.quantising import FP8_MAX

from .arranged import SIDE_BY_SIDE, ArrangedArrays, warm_writes
from .attention import attend
from .cache import CacheArrays, CacheHandle, default_device
from .planning import plan
from .writing import write_slots

__all__ = ["AttentionImpl", "LayerInputs", "MetadataBuilder", "maybe_quant_query"]


@dataclass(frozen=True)
class LayerInputs:
    """A `Step` as layers under ``jax.jit`` take it: a pytree, and so an argument of the program.

    Steps of one bucket have equal static parts, so a program is traced once for them.

    Parameters
    ----------
    plans
        One for each kind of layer.
    num_actual_tokens
        ``[]`` int32, rows that count.
    slot_mapping
        ``[tokens]`` int32, where the engine gave one.
    causal
        Whether attention is causal.
    """

    plans: tuple[AttentionPlan[jax.Array], ...]
    num_actual_tokens: jax.Array
    slot_mapping: jax.Array | None
    causal: bool

    @classmethod
    def of(cls, step: Step) -> LayerInputs:
        """Take from a step what layers need."""
        count = jnp.asarray(step.num_actual_tokens, jnp.int32)
        return cls(tuple(step.plans.values()), count, step.slot_mapping, step.causal)

    def plan_for(self, spec: AttentionSpec) -> AttentionPlan[Any]:
        """As `Step.plan_for`."""
        return plan_among({made.spec: made for made in self.plans}, spec, self.causal)


jax.tree_util.register_dataclass(
    LayerInputs,
    data_fields=["plans", "num_actual_tokens", "slot_mapping"],
    meta_fields=["causal"],
)


class MetadataBuilder(PlanningBuilder):
    """A `PlanningBuilder` for JAX; parameters are its own.

    Call `build` outside of ``jax.jit``, and pass ``LayerInputs.of(step)`` into the program.
    """

    _plan = staticmethod(plan)


def maybe_quant_query(query: jax.Array, target: object, scale: jax.Array) -> jax.Array:
    """As `torch_backend.backend.maybe_quant_query`, with the same bits on the CPU."""
    name = dtype_name(target)
    if query.dtype.name == name:
        return query
    check_query_target(query.dtype.name, query.shape, name)
    return _quantise(query, scale, name)


def _quantise(rows: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """As `torch_backend.engine.layer` does, with its bits.

    XLA's own conversion rounds to 16 bits first on a CPU, and so some numbers twice.
    """
    real = rows.astype(jnp.float32) * (1.0 / jnp.asarray(scale, jnp.float32).reshape(()))
    mantissa, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    size = jnp.minimum(jnp.abs(real), FP8_MAX[dtype])
    # The nearest number with so many bits, ties to even, and its exponent counted from the bias.
    bits, drop = jax.lax.bitcast_convert_type(size, jnp.uint32), 23 - mantissa
    nearest = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = (nearest >> drop) - ((127 - bias) << mantissa)
    # Below the smallest normal number steps are even.
    small = jnp.round(size * 2.0 ** (bias - 1 + mantissa)).astype(jnp.uint32)
    code = jnp.where(size < 2.0 ** (1 - bias), small, normal)
    code = jnp.where(jnp.signbit(real), code | 0x80, code)
    code = jnp.where(jnp.isnan(real), 0x7F, code).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, dtype)


class AttentionImpl(LayerSettings):
    """A layer that attends over an engine's cache; parameters are those of `LayerSettings`.

    `kv_cache` is a `CacheHandle` (torch owns the memory), a `CacheArrays`, or one layer's packed
    array in the order that memory has: ``[num_blocks, heads, page_size, contents]`` for
    ``"LBHNC"``, ``[num_blocks, page_size, heads, contents]`` for ``"LBNHC"``. Arrays are updated in
    place where the program donates them. The first two have scales of their own; those of a packed
    array are the layer's, as numbers of the program, and so are sinks.
    """

    def forward(
        self,
        layer: object,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        kv_cache: CacheHandle | CacheArrays | jax.Array,
        metadata: Step | LayerInputs | None,
        output: jax.Array,
        output_scale: jax.Array | None = None,
        output_block_scale: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to the cache, which holds this step's keys and values already.

        Parameters and errors are those of `torch_backend.backend.AttentionImpl.forward`; `metadata`
        is ``LayerInputs.of(step)`` under ``jax.jit``. `output` is not read but for the rows after
        ``num_actual_tokens``, which the result has, too; `output_scale` stays on the device.

        Returns
        -------
        jax.Array
            Like `output`.
        """
        if metadata is None:
            return jnp.zeros_like(output)
        if isinstance(metadata, Step):
            metadata = LayerInputs.of(metadata)
        check_metadata(metadata, LayerInputs)
        check_fused_output(
            output.dtype.name,
            scaled=output_scale is not None,
            block_scaled=output_block_scale is not None,
            model=self.model_dtype,
        )
        made = metadata.plan_for(self.spec)
        rows = made.bucket.num_tokens
        self.check_output(output.shape, rows)
        scales = Scales.of(layer)
        real = self._real_query(query[:rows], scales)
        cache, number = self._cache(kv_cache, scales)
        sinks = None if self.source is None else jnp.asarray(self.source, jnp.float32)
        out = attend(real, cache, made, number, sinks=sinks)
        if output_scale is not None:
            out = _quantise(out, output_scale, output.dtype.name)
        counts = (jnp.arange(rows) < metadata.num_actual_tokens)[:, None, None]
        kept = jnp.where(counts, out, output[:rows])
        return kept if output.shape[0] == rows else jnp.concatenate([kept, output[rows:]])

    def do_kv_cache_update(
        self,
        layer: object,
        key: jax.Array,
        value: jax.Array,
        kv_cache: CacheHandle | CacheArrays | jax.Array,
        slot_mapping: jax.Array,
    ) -> Any:
        """Write rows to their slots; returns the cache after it, to be used from there on.

        Parameters and errors are those of `torch_backend.backend.AttentionImpl.do_kv_cache_update`.
        """
        if self.kv_sharing_target_layer_name is not None:
            return kv_cache
        for name, given in (("key", key), ("value", value)):
            self.check_rows_written(name, given.shape, given.dtype.name)
        rows = min(key.shape[0], value.shape[0])
        check_slots_fit(slot_mapping.shape, slot_mapping.dtype.name, rows)
        cache, number = self._cache(kv_cache, Scales.of(layer))
        # An operation, so that the slots lie in memory of the program's own (`attention._owned`).
        slots = jnp.maximum(slot_mapping.astype(jnp.int32), -1)
        launch = Launch("append", "rows", self.spec, cache.spec)
        after = write_slots(key, value, cache, launch, slots, number)
        return after.pools[0] if isinstance(after, ArrangedArrays) else after

    def _cache(
        self, kv_cache: CacheHandle | CacheArrays | jax.Array, scales: Scales
    ) -> tuple[Any, int]:
        """Return the cache and the number of this layer in it."""
        if isinstance(kv_cache, (CacheHandle, CacheArrays)):
            self._check_cache(kv_cache.spec)
            return kv_cache, self.layer_index
        if not isinstance(kv_cache, jax.Array):
            raise FrameworkError(
                "kv_cache",
                given=f"{type(kv_cache).__module__}.{type(kv_cache).__name__}",
                wanted="a CacheHandle, CacheArrays or a jax.Array",
            )
        shape = self._packed_spec(kv_cache.shape, kv_cache.dtype.name)
        factors = None
        if shape.quantized:
            pair = jnp.asarray([scales.key, scales.value], jnp.float32)
            factors = jnp.broadcast_to(pair[None, :, None], shape.scales_shape)
        if shape.device == "cuda":
            where = default_device().local_hardware_id
            warm_writes(shape, SIDE_BY_SIDE, kv_cache.shape[1:], where)
        return ArrangedArrays((kv_cache,), SIDE_BY_SIDE, shape, factors), 0

    def _packed_spec(self, shape: Sequence[int], dtype: str) -> CacheSpec:
        """Shape of the cache that a packed array is."""
        spec, order = self.spec, {"HND": "LBHNC", "NHD": "LBNHC"}.get(self.order, self.order)
        width = spec.head_dim + spec.head_dim_v
        if order not in ("LBHNC", "LBNHC") or self.cache_dtype.startswith("nvfp4"):
            raise ShapeError(
                "kv_cache",
                given=f"an array in the order {order} of {self.cache_dtype}",
                wanted="LBHNC or LBNHC, of 8 bits or more",
                remedy="Import the engine's memory with PagedKVCache.from_packed and pass a "
                "cache_handle of it.",
            )
        heads_at, tokens_at = (1, 2) if order == "LBHNC" else (2, 1)
        if len(shape) != 4 or shape[heads_at] != spec.num_kv_heads or shape[3] != width:
            axes = ["num_blocks", "page_size", "page_size", str(width)]
            axes[heads_at] = str(spec.num_kv_heads)
            raise ShapeError("kv_cache", given=list(shape), wanted=f"[{', '.join(axes)}]")
        if dtype != self.cache_dtype:
            raise DTypeError("kv_cache", given=dtype, wanted=self.cache_dtype)
        return CacheSpec.of(
            spec,
            num_layers=1,
            num_pages=shape[0],
            page_size=shape[tokens_at],
            dtype=self.cache_dtype,
            layout="HND" if order == "LBHNC" else "NHD",
            device="cpu" if default_device().platform == "cpu" else "cuda",
        )

    def _check_cache(self, shape: CacheSpec) -> None:
        for name, wanted in (
            ("num_kv_heads", self.spec.num_kv_heads),
            ("head_dim", self.spec.head_dim),
            ("dtype", self.cache_dtype),
        ):
            if getattr(shape, name) != wanted:
                raise PlanError(
                    f"kv_cache.{name}", given=getattr(shape, name), wanted=f"{wanted}, this layer's"
                )

    def _real_query(self, query: jax.Array, scales: Scales) -> jax.Array:
        """Bring a query of 8 bits back to the model's dtype; others are real already."""
        if query.dtype.name in FP8_DTYPES:
            return (query.astype(jnp.float32) * scales.query).astype(self.model_dtype)
        return query
