"""One layer's attention for a serving engine in PyTorch, over the cache that it allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interop.errors import ArgumentError, FrameworkError, PlanError
from interop.spec import FP8_DTYPES, dtype_name

from ..attention import attend
from ..cache import PagedKVCache, torch_dtype
from ..quantising import FP8_MAX
from ..sinks import refresh_sinks
from ..writing import write_rows
from .builder import Step
from .settings import (
    LayerSettings,
    Scales,
    check_fused_output,
    check_metadata,
    check_query_target,
    check_slots_fit,
)

__all__ = ["AttentionImpl", "maybe_quant_query"]


def maybe_quant_query(query: Tensor, target: object, scale: Tensor) -> Tensor:
    """Store a query in 8 bits: ``query * (1 / scale)``, no further from 0 than `target` reaches.

    Parameters
    ----------
    query
        ``[tokens, heads, head_dim]`` of ``float16`` or ``bfloat16``.
    target
        ``float8_e4m3fn`` or ``float8_e5m2``: what the result is of. If it is the query's own, the
        query comes back as it is.
    scale
        Scalar float32 on the query's device, ``real / stored``.

    Raises
    ------
    DTypeError, ShapeError
        For other types and shapes.
    """
    name = dtype_name(target)
    if dtype_name(query.dtype) == name:
        return query
    check_query_target(dtype_name(query.dtype), query.shape, name)
    return _quantise(query, scale, name)


def _quantise(rows: Tensor, scale: Tensor, dtype: str) -> Tensor:
    # By the reciprocal, as kernels do that round their output to 8 bits. XLA divides by a scalar in
    # no other way, so that this has the same bits from both front ends.
    most = FP8_MAX[dtype]
    scaled = (rows.float() * (1.0 / scale)).clamp_(-most, most)
    # A GPU writes every NaN alike, and here its sign would be kept.
    return scaled.masked_fill_(scaled.isnan(), torch.nan).to(torch_dtype(dtype))


class AttentionImpl(LayerSettings):
    """A layer that attends over an engine's cache; parameters are those of `LayerSettings`.

    An engine calls `do_kv_cache_update` and then `forward`, each with the layer that has the
    scales ``_q_scale_float``, ``_k_scale_float`` and ``_v_scale_float``, all 1 where it has none.

    `kv_cache` is one layer's tensor ``[num_blocks, heads, page_size, contents]`` in this order of
    axes whatever the order in memory: keys in the first half of a token's contents, values in the
    second (NVFP4: keys in the first half of the heads). It is read and written where it lies. A
    `PagedKVCache` is taken as well; it has scales of its own.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._seen: tuple[Any, ...] = ()
        self._view: PagedKVCache | None = None
        self._output_scale: Tensor | None = None
        self._sinks: Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Read the sinks again, which the engine may have loaded anew, to where they were before.

        Call it once for weights that are not float32 before a graph is recorded. Without sinks it
        does nothing.
        """
        if self.source is not None:
            self._sinks = refresh_sinks(self._sinks, self.source)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | PagedKVCache,
        metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which holds this step's keys and values already.

        Parameters
        ----------
        layer
            Has the scales.
        query
            ``[rows, num_heads, head_size]`` of the model's dtype, or of 8 bits, which are then
            multiplied by the layer's scale and brought back to the model's dtype first.
        key, value
            Not read.
        kv_cache
            See the class.
        metadata
            From `MetadataBuilder.build`; `None` for a profiling run, which fills `output` with 0.
        output
            ``[rows, num_heads, head_size]``. The step's ``num_actual_tokens`` first rows are
            written, and those after them stay as they are.
        output_scale
            Scalar float32 on the device: `output` is ``float8_e4m3fn`` and holds ``real / scale``.
            It is read once, in the first call, which must not be recorded. No kernel here rounds to
            8 bits by itself: it happens in an operation after it.
        output_block_scale
            Has to be `None`, as no kernel here writes 4-bit outputs.

        Returns
        -------
        Tensor
            `output`.

        Raises
        ------
        ArgumentError and its kinds
            For what does not fit, naming the argument; nothing is written then.
        UnsupportedError
            For 4-bit outputs.
        """
        if metadata is None:
            _bytes(output).zero_()
            return output
        check_metadata(metadata, Step)
        check_fused_output(
            dtype_name(output.dtype),
            scaled=output_scale is not None,
            block_scaled=output_block_scale is not None,
            model=self.model_dtype,
        )
        plan = metadata.plan_for(self.spec)
        count, rows = metadata.num_actual_tokens, plan.bucket.num_tokens
        self.check_output(output.shape, count)
        scale = None if output_scale is None else self._scale_of_output(output_scale)
        scales = Scales.of(layer)
        cache = self._cache(kv_cache, scales)
        real = self._real_query(query[:rows], scales)
        if self._sinks is None:
            self.process_weights_after_loading()
        out = attend(real, cache, plan, self._layer_in(kv_cache), sinks=self._sinks)
        if scale is not None:
            out = _quantise(out[:count], scale, dtype_name(output.dtype))
        _bytes(output[:count]).copy_(_bytes(out[:count]))
        return output

    def do_kv_cache_update(
        self,
        layer: object,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor | PagedKVCache,
        slot_mapping: Tensor,
    ) -> None:
        """Write rows to their slots; nothing, where this layer reads another one's cache.

        Parameters
        ----------
        layer, kv_cache
            As for `forward`.
        key, value
            ``[rows, num_kv_heads, head_size]`` of the model's dtype, at least as many rows as there
            are slots.
        slot_mapping
            ``[tokens]`` int64 or int32 on the device, ``block * page_size + offset``; -1 for a row
            that is not written.

        Raises
        ------
        ArgumentError and its kinds
            For what does not fit, naming the argument; nothing is written then.
        """
        if self.kv_sharing_target_layer_name is not None:
            return
        for name, given in (("key", key), ("value", value)):
            self.check_rows_written(name, given.shape, dtype_name(given.dtype))
        rows = min(key.shape[0], value.shape[0])
        check_slots_fit(slot_mapping.shape, dtype_name(slot_mapping.dtype), rows)
        cache = self._cache(kv_cache, Scales.of(layer))
        number = self._layer_in(kv_cache)
        write_rows(
            key.contiguous(),
            value.contiguous(),
            *cache.pools(number),
            cache.spec,
            slot_mapping.to(torch.int32),
            *cache.scale_operands(number),
        )

    def _layer_in(self, kv_cache: Tensor | PagedKVCache) -> int:
        return self.layer_index if isinstance(kv_cache, PagedKVCache) else 0

    def _cache(self, kv_cache: Tensor | PagedKVCache, scales: Scales) -> PagedKVCache:
        """Look at the engine's tensor as a cache; the view is kept for as long as it fits."""
        if isinstance(kv_cache, PagedKVCache):
            return kv_cache
        if not isinstance(kv_cache, Tensor):
            given = f"{type(kv_cache).__module__}.{type(kv_cache).__name__}"
            raise FrameworkError("kv_cache", given=given, wanted="a torch.Tensor or PagedKVCache")
        seen = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
        pair = (scales.key, scales.value)
        if self._view is None or self._seen[:4] != seen:
            self._view = PagedKVCache.from_packed(
                [kv_cache],
                spec=self.spec,
                dtype=self.cache_dtype,
                order=self.order,
                scales=pair if self.quantised else None,
            )
        elif self.quantised and self._seen[4] != pair:
            self._view.set_scales(pair)
        self._seen = (*seen, pair)
        return self._view

    def _real_query(self, query: Tensor, scales: Scales) -> Tensor:
        """Bring a query of 8 bits back to the model's dtype; others are real already."""
        if dtype_name(query.dtype) in FP8_DTYPES:
            return (query.float() * scales.query).to(torch_dtype(self.model_dtype))
        return query.contiguous()

    def _scale_of_output(self, output_scale: Tensor) -> Tensor:
        """Scale of an 8-bit output ``[]`` on its device, read in the first call."""
        if self._output_scale is None:
            if output_scale.is_cuda and torch.cuda.is_current_stream_capturing():
                raise PlanError(
                    "output_scale",
                    given="one that was not read before the graph that is being recorded",
                    wanted="a first call outside of a recording, which reads it",
                )
            number = float(output_scale)
            if not 0.0 < number < float("inf"):
                raise ArgumentError("output_scale", given=number, wanted="a positive number")
            self._output_scale = torch.full(
                (), number, dtype=torch.float32, device=output_scale.device
            )
        return self._output_scale


def _bytes(tensor: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since not every operation knows them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
