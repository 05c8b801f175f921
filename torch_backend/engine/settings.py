"""What a layer is, for both front ends: the engine's parameters as an `AttentionSpec`, and scales.

A stored number is ``real / scale``. The scale of keys and the softmax scale multiply the logits,
that of values the output, and that of the query only where the query is stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from interop.errors import ArgumentError, DTypeError, PlanError, ShapeError, UnsupportedError
from interop.plan import AttentionPlan
from interop.spec import FP8_DTYPES, AttentionSpec, dtype_name

from .batches import EngineBatch
from .capabilities import cache_dtype_of, is_quantised, supports_attention_type

__all__ = [
    "LayerSettings",
    "Scales",
    "bmm1_scale",
    "bmm2_scale",
    "check_fused_output",
    "check_metadata",
    "check_query_target",
    "check_slots_fit",
    "plan_among",
]

OUTPUT_FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Scales:
    """A layer's scales of query, keys and values, one number each for the whole tensor."""

    query: float = 1.0
    key: float = 1.0
    value: float = 1.0

    @classmethod
    def of(cls, layer: object) -> Scales:
        """Read them from an engine's layer; a layer without them has all 1."""
        query, key, value = (
            float(getattr(layer, f"_{name}_scale_float", 1.0)) for name in ("q", "k", "v")
        )
        return cls(query, key, value)


def bmm1_scale(sm_scale: float, scales: Scales, query_dtype: str, kv_cache_dtype: str) -> float:
    """Return the factor on the products of stored query and stored keys (rows 50 and 54).

    Parameters
    ----------
    sm_scale
        Of the real ones.
    query_dtype
        Element type of the query *tensor*: a query of 16 bits is real, whatever its scale says.
    kv_cache_dtype
        The engine's name of the cache's format.
    """
    if query_dtype in FP8_DTYPES:
        sm_scale *= scales.query
    return sm_scale * scales.key if is_quantised(kv_cache_dtype) else sm_scale


def bmm2_scale(scales: Scales, kv_cache_dtype: str, output_scale: float | None = None) -> float:
    """Return the factor on the weighted sum of stored values (rows 55 and 57).

    `output_scale` is that of an output stored in 8 bits.
    """
    scale = scales.value if is_quantised(kv_cache_dtype) else 1.0
    return scale if output_scale is None else scale / output_scale


class LayerSettings:
    """One attention layer as an engine describes it (rows 38 to 43).

    Parameters
    ----------
    num_heads, head_size, scale, num_kv_heads
        Query heads, width of a head, softmax scale, key/value heads (`num_heads` when `None`).
    alibi_slopes
        Has to be `None`: no kernel adds such a bias.
    sliding_window
        Tokens that a query sees, itself included; `None` for all.
    kv_cache_dtype
        The engine's name of the cache's format.
    logits_soft_cap
        Cap on the logits; `None` or 0 for none.
    attn_type
        Has to be ``"decoder"``.
    kv_sharing_target_layer_name
        The layer whose cache this one reads, and does not write.
    sinks
        ``[num_heads]`` of any float type, or `None`; kept as `source`.
    model_dtype
        Element type of query, key, value and output.
    order
        Order of the cache in memory, one of `layouts.ORDERS` or ``"NHD"``, ``"HND"``.
    layer_index
        Which layer this is of a cache that has several.

    Raises
    ------
    UnsupportedError
        For ALiBi and another attention type.
    ArgumentError, ShapeError, DTypeError
        For sizes and formats that do not fit.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
        *,
        model_dtype: object,
        order: str = "LBNHC",
        layer_index: int = 0,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError(
                "alibi_slopes: no kernel adds a bias to the logits, and without it the layer's "
                "results would be wrong. Serve the model with another attention backend."
            )
        if not (answer := supports_attention_type(attn_type)):
            raise UnsupportedError(f"attn_type: {answer.why}.")
        dtype = dtype_name(model_dtype)
        self.spec = AttentionSpec(
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            head_size,
            sm_scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            dtype=dtype,
            sinks=sinks is not None,
        )
        if sinks is not None:
            _check_sinks(sinks, num_heads)
        self.source = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.cache_dtype = cache_dtype_of(kv_cache_dtype, dtype)
        self.quantised = is_quantised(kv_cache_dtype)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.order = order
        self.layer_index = layer_index

    @property
    def model_dtype(self) -> str:
        """Element type of query, key, value and output."""
        assert self.spec.dtype is not None
        return self.spec.dtype

    def check_rows_written(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Raise unless an array is keys or values ``[rows, num_kv_heads, head_size]`` to write."""
        spec = self.spec
        if len(shape) != 3 or tuple(shape[1:]) != (spec.num_kv_heads, spec.head_dim):
            raise ShapeError(
                name,
                given=list(shape),
                wanted=f"[rows, {spec.num_kv_heads}, {spec.head_dim}]",
            )
        if dtype != self.model_dtype:
            raise DTypeError(name, given=dtype, wanted=self.model_dtype)

    def check_output(self, shape: Sequence[int], rows: int) -> None:
        """Raise unless an output ``[rows, num_heads, head_size]`` has so many rows or more."""
        wanted = (self.spec.num_qo_heads, self.spec.head_dim)
        if len(shape) != 3 or shape[0] < rows or tuple(shape[1:]) != wanted:
            raise ShapeError(
                "output",
                given=list(shape),
                wanted=f"[rows, {wanted[0]}, {wanted[1]}] of at least {rows} rows",
            )


def _check_sinks(sinks: Any, num_heads: int) -> None:
    shape = tuple(getattr(sinks, "shape", ()))
    if shape != (num_heads,):
        raise ShapeError("sinks", given=f"shape {list(shape)}", wanted=f"[{num_heads}], one a head")


def check_query_target(query_dtype: str, shape: Sequence[int], target: str) -> None:
    """Raise where a query cannot be stored as `target` (row 51).

    Raises
    ------
    DTypeError, ShapeError
        Naming ``query`` or ``target``.
    """
    if query_dtype not in ("float16", "bfloat16"):
        raise DTypeError("query", given=query_dtype, wanted="float16 or bfloat16, to be quantised")
    if target not in FP8_DTYPES:
        raise DTypeError("target", given=target, wanted=" or ".join(FP8_DTYPES))
    if len(shape) != 3:
        raise ShapeError("query", given=list(shape), wanted="[tokens, heads, head_dim]")


def check_fused_output(output_dtype: str, *, scaled: bool, block_scaled: bool, model: str) -> None:
    """Raise where an output cannot be written as asked for (row 56).

    Parameters
    ----------
    output_dtype
        Of the output tensor.
    scaled, block_scaled
        Whether `output_scale` and `output_block_scale` were given.
    model
        The model's dtype.

    Raises
    ------
    ArgumentError, DTypeError, UnsupportedError
        Naming the argument.
    """
    if block_scaled and not scaled:
        raise ArgumentError(
            "output_block_scale", given="one without output_scale", wanted="None, or both"
        )
    if not scaled:
        if output_dtype != model:
            raise DTypeError(
                "output",
                given=f"{output_dtype} without output_scale",
                wanted=f"{model}, the model's dtype",
            )
        return
    if output_dtype == "uint8":
        if not block_scaled:
            raise ArgumentError(
                "output_block_scale", given="None for an output of 4 bits", wanted="a tensor"
            )
        raise UnsupportedError(
            "output: 4-bit outputs are written by TRTLLM-GEN alone, and by no kernel of this "
            "backend. Leave the fusion out, see fused_output_quant."
        )
    if output_dtype != OUTPUT_FP8:
        raise DTypeError("output", given=output_dtype, wanted=f"{OUTPUT_FP8} with output_scale")
    if block_scaled:
        raise ArgumentError("output_block_scale", given=f"one for {OUTPUT_FP8}", wanted="None")


def check_metadata(metadata: object, kind: type) -> None:
    """Raise `PlanError` for what is no step of a builder."""
    if not isinstance(metadata, kind):
        given = type(metadata).__name__
        if isinstance(metadata, EngineBatch):
            given = "an EngineBatch"
        raise PlanError(
            "metadata",
            given=given,
            wanted=f"None for a profiling run, or a {kind.__name__}",
            remedy="Pass what MetadataBuilder.build returns.",
        )


def check_slots_fit(slots: Sequence[int], dtype: str, rows: int) -> None:
    """Raise unless a slot mapping ``[slots]`` has integers, no more than there are `rows`."""
    if len(slots) != 1 or dtype not in ("int32", "int64"):
        raise ShapeError(
            "slot_mapping", given=f"{dtype} {list(slots)}", wanted="[tokens] of int32 or int64"
        )
    if slots[0] > rows:
        raise ShapeError(
            "slot_mapping",
            given=f"{slots[0]} slots for {rows} rows of key and value",
            wanted="no more slots than rows",
        )


def plan_among(
    plans: Mapping[AttentionSpec, AttentionPlan[Any]], spec: AttentionSpec, causal: bool
) -> AttentionPlan[Any]:
    """Return the plan of a layer that computes `spec`, causal or not as its step is.

    Raises
    ------
    PlanError
        If none was made: the layer's window, soft cap or scale is not its group's.
    """
    made = plans.get(spec) or plans.get(replace(spec, causal=causal))
    if made is None:
        raise PlanError(
            "metadata",
            given=f"plans for {', '.join(map(str, plans)) or 'no layer'}",
            wanted=f"one for this layer's {spec}",
            remedy="Layers of one plan have one window, soft cap and scale: put this layer into a "
            "group of its own.",
        )
    return made
