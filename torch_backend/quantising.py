"""Formats that store keys and values in 8 or 4 bits, in plain PyTorch on any device.

Every step is one IEEE operation on float32, in the order that is written here and never fused, so
that the Triton kernels which write caches give the same bytes. What is rounded goes to the nearest,
ties to even.

FP8: ``stored = fp8(clamp(x / scale, -max, max))``; NaN becomes the byte ``0x7f``.

NVFP4: 16 values along a head share a block scale ``s``, itself an e4m3 number. With the head's
global scale ``g`` and ``a = max|x|`` of the block, ``s = e4m3(min((a / 6) / g, 448))`` and
``step = s * g``. Each value is stored as ``e2m1(x / step)``, no further from 0 than 6 and with the
sign of ``x``, and reads as ``e2m1 * step``. Where ``step`` is 0 all data are 0. NaN in a block
makes ``s`` the byte ``0x7f`` and its data 0, so that all of the block reads as NaN.

The variant "4-over-6" also tries ``(a / 4) / g`` in place of ``(a / 6) / g`` and keeps it if its
error is smaller, which wastes the largest e2m1 number but has finer steps below it. The error is
the sum of ``m * m`` over the block from the first value to the last, ``m = |e2m1| * step - |x|``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from interop.errors import ArgumentError, DTypeError, ShapeError
from interop.spec import FP8_DTYPES, NVFP4_BLOCK, NVFP4_DTYPES, CacheSpec, dtype_name

__all__ = [
    "ScaleCalibrator",
    "calibrate_scales",
    "check_scales",
    "dequantise_fp8",
    "dequantise_nvfp4",
    "nvfp4_regions",
    "quantise_fp8",
    "quantise_nvfp4",
]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FP8_MAX = {"float8_e4m3fn": E4M3_MAX, "float8_e5m2": 57344.0}
E2M1_MAX = 6.0
# XLA takes what is less for 0.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Halfway between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties go to the even code.
E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _by_head(scale: Tensor) -> Tensor:
    """Scales ``[heads]`` in the shape that rows ``[..., heads, width]`` are divided by."""
    return scale.unsqueeze(-1)


def quantise_fp8(rows: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Store rows in 8 bits.

    Parameters
    ----------
    rows
        ``[..., heads, width]`` of a floating type.
    scale
        ``[heads]`` float32, ``real / stored``.
    dtype
        ``"float8_e4m3fn"`` or ``"float8_e5m2"``.

    Returns
    -------
    Tensor
        Like `rows`, of that type.
    """
    most = FP8_MAX[dtype]
    scaled = (rows.float() / _by_head(scale)).clamp_(-most, most)
    # A GPU writes every NaN alike, and here its sign would be kept.
    return scaled.masked_fill_(scaled.isnan(), torch.nan).to(getattr(torch, dtype))


def dequantise_fp8(stored: Tensor, scale: Tensor) -> Tensor:
    """Return ``stored * scale`` as float32; shapes as in `quantise_fp8`."""
    return stored.float().mul_(_by_head(scale))


def _codes(scaled: Tensor) -> Tensor:
    """Codes 0 to 7 of the e2m1 numbers nearest to ``abs(scaled)``, as int64."""
    size = scaled.abs()
    codes = torch.zeros_like(size, dtype=torch.int64)
    for below, middle in enumerate(E2M1_MIDDLES):
        # From an even code a tie stays, from an odd one it goes up.
        codes += (size > middle) if below % 2 == 0 else (size >= middle)
    return codes


def _with_scale(blocks: Tensor, wanted: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block scales nearest to ``wanted / scale``, codes, and the sum of squared errors."""
    block_scale = (wanted / scale).clamp_max_(E4M3_MAX).to(E4M3)
    step = block_scale.float() * scale
    scaled = torch.where(step == 0.0, 0.0, blocks / step.masked_fill(step == 0.0, 1.0))
    codes = _codes(scaled)
    values = torch.tensor(E2M1_VALUES, device=blocks.device)[codes]
    missed = values * step - blocks.abs()
    squares = missed * missed
    error = squares[..., 0]
    for i in range(1, NVFP4_BLOCK):
        # One after another, as a kernel adds them.
        error = error + squares[..., i]
    negative = torch.signbit(blocks) & (step > 0.0)
    return block_scale, codes + 8 * negative, error


def quantise_nvfp4(
    rows: Tensor, global_scale: Tensor, *, four_over_six: bool = False
) -> tuple[Tensor, Tensor]:
    """Store rows in 4 bits, with a scale for every 16 values along a head.

    Parameters
    ----------
    rows
        ``[..., heads, width]`` of a floating type.
    global_scale
        ``[heads]`` float32.
    four_over_six
        Choose each block's scale by the smaller error.

    Returns
    -------
    (Tensor, Tensor)
        Data ``[..., heads, width / 2]`` uint8, element ``2 i`` in the low half of byte ``i``, and
        block scales ``[..., heads, width / 16]`` of ``float8_e4m3fn``.

    Raises
    ------
    ShapeError
        For a width that is no multiple of 16.
    """
    if rows.shape[-1] % NVFP4_BLOCK:
        raise ShapeError(
            "rows",
            given=f"heads of {rows.shape[-1]}",
            wanted=f"a multiple of {NVFP4_BLOCK}, the values that share a block scale",
        )
    blocks = rows.float().unflatten(-1, (-1, NVFP4_BLOCK))
    scale = _by_head(global_scale).unsqueeze(-1).expand(*blocks.shape[:-1], 1)
    largest = blocks.abs().amax(-1, keepdim=True)
    # By tensors: a GPU multiplies by the reciprocal of a Python number instead.
    six, four = torch.tensor([E2M1_MAX, 4.0], device=rows.device)
    block_scale, codes, error = _with_scale(blocks, largest / six, scale)
    if four_over_six:
        other_scale, other_codes, other_error = _with_scale(blocks, largest / four, scale)
        better = (other_error < error).unsqueeze(-1)
        bits = torch.where(better, other_scale.view(torch.uint8), block_scale.view(torch.uint8))
        block_scale, codes = bits.view(E4M3), torch.where(better, other_codes, codes)
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), block_scale.squeeze(-1)


def dequantise_nvfp4(data: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return what `quantise_nvfp4` stored, ``[..., heads, width]`` float32."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()
    signed = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=data.device)
    step = block_scales.float() * _by_head(global_scale)
    values = signed[codes].unflatten(-1, (-1, NVFP4_BLOCK))
    return (values * step.unsqueeze(-1)).flatten(-2)


def nvfp4_regions(pool: Tensor) -> tuple[Tensor, Tensor]:
    """View pages of NVFP4 as data and block scales.

    Parameters
    ----------
    pool
        ``[pages, d1, d2, width / 2 + width / 16]`` uint8 with any stride from page to page; ``d1``
        and ``d2`` are tokens and heads in ``"NHD"``, heads and tokens in ``"HND"``.

    Returns
    -------
    (Tensor, Tensor)
        Views ``[pages, d1, d2, width / 2]`` uint8 and ``[pages, d1, d2, width / 16]`` of
        ``float8_e4m3fn``.

    Raises
    ------
    ShapeError
        For rows that are no data with their scales, and if the bytes of a page do not lie together.
    """
    pages, outer, inner, row = pool.shape
    # Of 9 bytes, 8 are 16 values and 1 is their scale.
    if row % 9:
        raise ShapeError(
            "pool",
            given=f"rows of {row} bytes",
            wanted="width / 2 + width / 16 bytes, a multiple of 9",
        )
    # Strides of dimensions of size 1 mean nothing, and this leaves them out.
    if not pool[:1].is_contiguous():
        raise ShapeError(
            "pool",
            given=f"shape {list(pool.shape)} with strides {list(pool.stride())}",
            wanted="the bytes of a page side by side, since its block scales follow its data",
            remedy="Only pages may have gaps between them, not tokens, heads or bytes.",
        )
    scales, page = row // 9, pool.stride(0)
    data = row - scales
    items = outer * inner
    start = pool.storage_offset()
    return (
        pool.as_strided((pages, outer, inner, data), (page, inner * data, data, 1), start),
        pool.as_strided(
            (pages, outer, inner, scales),
            (page, inner * scales, scales, 1),
            start + items * data,
        ).view(E4M3),
    )


def _largest(dtype: str) -> float:
    """Return the largest number of a format, without its scale."""
    return FP8_MAX[dtype] if dtype in FP8_DTYPES else E4M3_MAX * E2M1_MAX


@dataclass
class ScaleCalibrator:
    """Finds scales of a cache from samples of the keys and values that it will hold.

    A scale takes the largest magnitude that was seen to the largest number of the format: 448 for
    e4m3, 57344 for e5m2, and 448 * 6 for NVFP4, whose scale is the global one. It is 1 where only
    zeros were seen, or so little that the scale would be no normal float32.

    Parameters
    ----------
    num_layers, num_kv_heads
        Those of the cache.
    dtype
        Format of the cache.
    per_head
        Whether heads get scales of their own; else all of a layer get the largest.
    margin
        Factor on the magnitudes, for values beyond those that were seen.

    Raises
    ------
    ArgumentError, DTypeError
        For sizes and margins that are not positive, and formats that have no scales.
    """

    num_layers: int
    num_kv_heads: int
    dtype: str
    per_head: bool = False
    margin: float = 1.0
    _seen: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        spec = CacheSpec(self.num_layers, 1, 1, self.num_kv_heads, NVFP4_BLOCK, dtype=self.dtype)
        if not spec.quantized:
            formats = ", ".join((*FP8_DTYPES, *NVFP4_DTYPES))
            raise DTypeError("dtype", given=spec.dtype, wanted=f"one of {formats}")
        if not 0.0 < self.margin < math.inf:
            raise ArgumentError(
                "margin", given=self.margin, wanted="a positive, finite number, often 1"
            )
        self.dtype = spec.dtype
        # A tensor made in inference mode could be updated in that mode only.
        with torch.inference_mode(False):
            self._seen = torch.zeros(spec.scales_shape)

    def update(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in samples of one layer.

        Parameters
        ----------
        layer
            Which layer they are of.
        key, value
            ``[tokens, num_kv_heads, width]``.

        Raises
        ------
        ArgumentError, ShapeError
            For a layer that there is not, rows of other heads, and values that are not finite.
        """
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(
                "layer", given=layer, wanted=f"a layer from 0 to {self.num_layers - 1}"
            )
        found = []
        for name, rows in (("key", key), ("value", value)):
            if rows.ndim != 3 or rows.shape[1] != self.num_kv_heads:
                raise ShapeError(
                    name, given=list(rows.shape), wanted=f"[tokens, {self.num_kv_heads}, width]"
                )
            sizes = rows.detach().float().abs()
            largest = sizes.amax((0, 2)).cpu() if rows.numel() else torch.zeros(rows.shape[1])
            if not bool(torch.isfinite(largest).all()):
                head = int(torch.nonzero(~torch.isfinite(largest))[0])
                raise ArgumentError(
                    name,
                    given=f"{float(largest[head])} in head {head}",
                    wanted="finite numbers",
                    remedy="Leave out rows that hold no tokens.",
                )
            found.append(largest)
        torch.maximum(self._seen[layer], torch.stack(found), out=self._seen[layer])

    def scales(self) -> Tensor:
        """Return scales so far, ``[num_layers, 2, num_kv_heads]`` float32, for a cache to take."""
        seen = self._seen
        if not self.per_head:
            seen = seen.amax(-1, keepdim=True).expand_as(seen)
        scales = seen / _largest(self.dtype) * self.margin
        return torch.where(scales >= SMALLEST_SCALE, scales, 1.0)


def calibrate_scales(
    key: Tensor, value: Tensor, dtype: object, *, per_head: bool = False, margin: float = 1.0
) -> Tensor:
    """Scales of one layer from samples, ``[2, num_kv_heads]`` float32; see `ScaleCalibrator`."""
    if key.ndim != 3:
        raise ShapeError("key", given=list(key.shape), wanted="[tokens, num_kv_heads, width]")
    calibrator = ScaleCalibrator(
        1, key.shape[1], dtype_name(dtype), per_head=per_head, margin=margin
    )
    calibrator.update(0, key, value)
    return calibrator.scales()[0]


def check_scales(scales: object | None, cache_spec: CacheSpec) -> Tensor:
    """Return scales as a cache keeps them, ``[num_layers, 2, num_kv_heads]`` float32 on the host.

    Parameters
    ----------
    scales
        `None` for 1 everywhere, or a number for all; a tuple ``(key, value)``, each of them a
        number, ``[num_layers]`` or ``[num_layers, num_kv_heads]``; or an array (a list, too)
        ``[2]``, ``[num_layers, 2]`` or ``[num_layers, 2, num_kv_heads]``, whose 2 are keys and
        values.
    cache_spec
        The cache.

    Raises
    ------
    ShapeError
        For another shape.
    ArgumentError
        For a scale that is no positive number, is so small that float32 has it with fewer bits, or
        so large that the largest stored number would read as infinite.
    """
    layers, _, heads = shape = cache_spec.scales_shape
    # Tensors made in inference mode could be replaced in that mode only.
    with torch.inference_mode(False):
        if isinstance(scales, tuple):
            sides = [_floats(side) for side in scales]
            given = f"a tuple of shapes {[list(side.shape) for side in sides]}"
        else:
            array = _floats(1.0 if scales is None else scales)
            sides = list(array.unbind(min(array.ndim, 2) - 1)) if array.ndim else [array] * 2
            given = f"shape {list(array.shape)}"
        if len(sides) != 2 or any(
            side.shape not in ((), (layers,), (layers, heads)) for side in sides
        ):
            raise ShapeError(
                "scales",
                given=given,
                wanted=f"a number, a tuple (key, value) of numbers, [{layers}] or "
                f"[{layers}, {heads}], or an array [2], [{layers}, 2] or {list(shape)}",
                remedy="Dimensions are layers, then key and value, then heads.",
            )
        wide = [side.unsqueeze(-1) if side.ndim == 1 else side for side in sides]
        table = torch.stack([side.expand(layers, heads) for side in wide], dim=1)
    most = torch.finfo(torch.float32).max / _largest(cache_spec.dtype)
    wrong = ~((table >= SMALLEST_SCALE) & (table <= most))
    if bool(wrong.any()):
        layer, side, head = torch.nonzero(wrong)[0].tolist()
        raise ArgumentError(
            "scales",
            given=f"{float(table[layer, side, head])} for {('keys', 'values')[side]} "
            f"of head {head} in layer {layer}",
            wanted=f"a number from {SMALLEST_SCALE:.3g} to {most:.3g}: what a stored 1 stands for",
            remedy="ScaleCalibrator finds scales from samples.",
        )
    return table


def _floats(scales: object) -> Tensor:
    """Return what was given as scales, or a part of it, as float32 on the host."""
    if isinstance(scales, Tensor):
        return scales.detach().to("cpu", torch.float32)
    try:
        # Too large a number becomes infinite, which is refused by name. A copy, because torch warns
        # of arrays that it may not write to, such as those of JAX.
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.array(scales, dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ShapeError(
            "scales", given=repr(scales), wanted="numbers, or arrays of them"
        ) from error
