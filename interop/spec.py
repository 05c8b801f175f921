"""What attention computes (`AttentionSpec`) and what a paged cache looks like (`CacheSpec`).

Both are frozen, hashable, equal by value and free of any framework: they travel inside compiled
programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ArgumentError, DTypeError

__all__ = [
    "CACHE_DTYPES",
    "FLOAT_DTYPES",
    "FP8_DTYPES",
    "NVFP4_BLOCK",
    "NVFP4_DTYPES",
    "AttentionSpec",
    "CacheSpec",
    "dtype_name",
]

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FLOAT_DTYPES = tuple(ELEMENT_BYTES)
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
# 4-bit values with an 8-bit scale for every block of 16 along a head; the second picks each block's
# scale by the smaller error.
NVFP4_DTYPES = ("nvfp4", "nvfp4_4over6")
NVFP4_BLOCK = 16
CACHE_DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES, *NVFP4_DTYPES)
# What serving engines call these formats.
CACHE_DTYPE_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
LAYOUTS = ("NHD", "HND")

INT32_MAX = 2**31 - 1
# Page and slot numbers travel as int32, and a traced layer is added to them.
MAX_SLOTS = INT32_MAX


def dtype_name(dtype: object) -> str:
    """Name of a torch, NumPy or JAX element type: ``"float32"``, ``"bfloat16"``, ..."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(name or dtype).removeprefix("torch.")


def _positive(argument: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(argument, given=f"{value!r}", wanted="a positive integer")
    number = int(value.__index__())
    if number < 1:
        raise ArgumentError(argument, given=number, wanted="a positive integer")
    return number


def _number(value: object) -> float:
    """Return a float, NaN for what is none, so that one check refuses both."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


@dataclass(frozen=True, init=False)
class AttentionSpec:
    """One attention layer's arithmetic, the same for every step.

    For query row ``i`` and key ``j`` of one request the logit is ``sm_scale * (q_i . k_j)``, with a
    soft cap ``c`` it becomes ``c * tanh(logit / c)``; the output is the softmax-weighted sum of the
    values of all visible keys.

    Parameters
    ----------
    num_qo_heads, num_kv_heads
        Heads of query and output, heads of key and value. The first must be a multiple of the
        second; query head ``h`` reads key/value head ``h // (num_qo_heads // num_kv_heads)``.
    head_dim
        Width of a query and key head.
    head_dim_v
        Width of a value and output head; `head_dim` when left out.
    sm_scale
        Factor on the logits; ``1 / sqrt(head_dim)`` when left out.
    causal
        Whether a query sees only keys at or before its own position. Queries are the last
        ``query_len`` of the request's ``kv_len`` positions.
    sliding_window
        How many tokens a query sees, itself included, below 2**31; `None` for all of them.
    logits_soft_cap
        The cap ``c`` above; `None` for none.
    dtype
        Element type of query and output (``"float32"``, ``"float16"`` or ``"bfloat16"``);
        that of the cache when left out.
    sinks
        Whether calls bring a logit for each query head, a natural logarithm that neither `sm_scale`
        nor the soft cap changes: the softmax has it as one more key, which has no value. So the
        denominator is ``sum_j exp(logit_j) + exp(sink)``. Kernels are chosen by this.

    Raises
    ------
    ArgumentError
        For a value outside these ranges.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    sm_scale: float
    causal: bool
    sliding_window: int | None
    logits_soft_cap: float | None
    dtype: str | None
    sinks: bool

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        sm_scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        dtype: object | None = None,
        sinks: bool = False,
    ) -> None:
        heads = _positive("num_qo_heads", num_qo_heads)
        kv_heads = _positive("num_kv_heads", num_kv_heads)
        width = _positive("head_dim", head_dim)
        if heads % kv_heads:
            raise ArgumentError(
                "num_qo_heads",
                given=f"{heads} with num_kv_heads = {kv_heads}",
                wanted="a multiple of num_kv_heads",
            )
        width_v = width if head_dim_v is None else _positive("head_dim_v", head_dim_v)
        scale = 1.0 / math.sqrt(width) if sm_scale is None else _number(sm_scale)
        if not math.isfinite(scale) or scale == 0.0:
            raise ArgumentError(
                "sm_scale", given=repr(sm_scale), wanted="a finite number other than 0"
            )
        window = None if sliding_window is None else _positive("sliding_window", sliding_window)
        if window is not None and window > INT32_MAX:
            # Kernels read it as int32 and would cut it to another number.
            raise ArgumentError(
                "sliding_window",
                given=window,
                wanted=f"at most {INT32_MAX}",
                remedy="Leave it out for a query that sees all tokens before it.",
            )
        cap = None if logits_soft_cap is None else _number(logits_soft_cap)
        if cap is not None and not (math.isfinite(cap) and cap > 0.0):
            raise ArgumentError(
                "logits_soft_cap",
                given=repr(logits_soft_cap),
                wanted="a positive number, or None for no cap",
            )
        if not isinstance(sinks, int) or sinks not in (0, 1):
            raise ArgumentError(
                "sinks",
                given=type(sinks).__name__,
                wanted="True or False",
                remedy="The logits themselves are an argument of attend.",
            )
        values = {
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "head_dim_v": width_v,
            "sm_scale": scale,
            "causal": bool(causal),
            "sliding_window": window,
            "logits_soft_cap": cap,
            "dtype": None if dtype is None else _float_dtype("dtype", dtype),
            "sinks": bool(sinks),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """Keys visible to the left of a query, itself not counted; -1 for all of them."""
        return -1 if self.sliding_window is None else self.sliding_window - 1


def _float_dtype(argument: str, dtype: object) -> str:
    name = dtype_name(dtype)
    if name not in FLOAT_DTYPES:
        raise DTypeError(argument, given=name, wanted=f"one of {', '.join(FLOAT_DTYPES)}")
    return name


def _cache_dtype(dtype: object) -> str:
    name = dtype_name(dtype)
    name = CACHE_DTYPE_ALIASES.get(name, name)
    if name not in CACHE_DTYPES:
        raise DTypeError("dtype", given=name, wanted=f"one of {', '.join(CACHE_DTYPES)}")
    return name


@dataclass(frozen=True)
class CacheSpec:
    """Shape and element type of a paged key/value cache.

    All layers lie in one flat pool for keys and one for values:
    ``[num_layers * num_pages, page_size, num_kv_heads, head_dim]`` in layout ``"NHD"``,
    ``[num_layers * num_pages, num_kv_heads, page_size, head_dim]`` in ``"HND"``. Layer ``l`` owns
    pages ``l * num_pages`` to ``(l + 1) * num_pages - 1``, so a layer is an offset, never a copy.

    Parameters
    ----------
    num_layers, num_pages
        Layers, and pages *per layer*. Page ids in a page table run from 0 to ``num_pages - 1``.
    page_size
        Tokens in a page.
    num_kv_heads, head_dim, head_dim_v
        As in `AttentionSpec`.
    dtype
        ``"float32"``, ``"float16"``, ``"bfloat16"``, or a quantised format: ``"float8_e4m3fn"``
        (also ``"fp8"``, ``"fp8_e4m3"``), ``"float8_e5m2"`` (``"fp8_e5m2"``), ``"nvfp4"`` and
        ``"nvfp4_4over6"``. NVFP4 pools are bytes: in place of `head_dim` their last dimension is
        ``head_dim / 2 + head_dim / 16``, and a page holds all its data before all its block scales.
    layout
        ``"NHD"`` (token-major pages) or ``"HND"`` (head-major pages).
    device
        Kind of device: ``"cpu"`` or ``"cuda"``.
    scales_per_head
        Of a quantised cache: whether heads of a layer may have scales of their own. Kernels save
        work where they need not.
    layers_apart
        Whether layers lie in memory of their own, as an imported cache's may. Page numbers then
        count within a layer only, and a layer must be a number known when a program is traced.

    Raises
    ------
    ArgumentError
        For a value outside these ranges, or a pool whose slots do not fit into int32.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    dtype: str = "bfloat16"
    layout: str = "NHD"
    device: str = "cpu"
    scales_per_head: bool = False
    layers_apart: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        width_v = _positive("head_dim_v", self.head_dim_v or self.head_dim)
        object.__setattr__(self, "head_dim_v", width_v)
        object.__setattr__(self, "dtype", _cache_dtype(self.dtype))
        object.__setattr__(self, "scales_per_head", bool(self.scales_per_head and self.quantized))
        object.__setattr__(self, "layers_apart", bool(self.layers_apart))
        for name in ("head_dim", "head_dim_v"):
            if self.dtype in NVFP4_DTYPES and getattr(self, name) % NVFP4_BLOCK:
                raise ArgumentError(
                    name,
                    given=f"{getattr(self, name)} with dtype {self.dtype}",
                    wanted=f"a multiple of {NVFP4_BLOCK}, the values that share a block scale",
                )
        if self.layout not in LAYOUTS:
            raise ArgumentError("layout", given=repr(self.layout), wanted="'NHD' or 'HND'")
        if self.device not in ("cpu", "cuda"):
            raise ArgumentError("device", given=repr(self.device), wanted="'cpu' or 'cuda'")
        slots = self.num_layers * self.num_pages * self.page_size
        if slots > MAX_SLOTS:
            raise ArgumentError(
                "num_pages",
                given=f"{slots} slots over all layers",
                wanted=f"at most {MAX_SLOTS}, since slots travel as int32",
                remedy="Use several caches, each for some of the layers.",
            )

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: object,
        layout: str = "NHD",
        device: str,
        scales_per_head: bool = False,
    ) -> CacheSpec:
        """Return the shape of a cache with the heads and widths that `spec` reads.

        Raises
        ------
        ArgumentError
            If `spec` is no `AttentionSpec`, and as the class does.
        """
        if not isinstance(spec, AttentionSpec):
            raise ArgumentError("spec", given=type(spec).__name__, wanted="an AttentionSpec")
        return cls(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            dtype=dtype_name(dtype),
            layout=layout,
            device=device,
            scales_per_head=scales_per_head,
        )

    @property
    def quantized(self) -> bool:
        """Whether pools hold ``real / scale`` in fewer bits, and the cache has scales."""
        return self.dtype not in FLOAT_DTYPES

    @property
    def storage_dtype(self) -> str:
        """Element type of the pools: ``"uint8"`` for NVFP4, else `dtype`."""
        return "uint8" if self.dtype in NVFP4_DTYPES else self.dtype

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """Shape of a quantised cache's scales: layers, key and value, heads."""
        return (self.num_layers, 2, self.num_kv_heads)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of the flat key pool."""
        return self._pool_shape(self.head_dim)

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        """Shape of the flat value pool."""
        return self._pool_shape(self.head_dim_v)

    @property
    def num_bytes(self) -> int:
        """Bytes of both pools."""
        elements = math.prod(self.key_shape) + math.prod(self.value_shape)
        return ELEMENT_BYTES.get(self.dtype, 1) * elements

    def _pool_shape(self, width: int) -> tuple[int, int, int, int]:
        pages = self.num_layers * self.num_pages
        if self.dtype in NVFP4_DTYPES:
            width = width // 2 + width // NVFP4_BLOCK
        if self.layout == "NHD":
            return (pages, self.page_size, self.num_kv_heads, width)
        return (pages, self.num_kv_heads, self.page_size, width)
