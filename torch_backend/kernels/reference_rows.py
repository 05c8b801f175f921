"""Where the reference family finds keys and values, and how it gathers them as float32.

Pages of any strides are seen as rows of one token and head each, which one index then gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from interop.plan import Launch
from interop.spec import NVFP4_DTYPES, CacheSpec

from ..quantising import dequantise_nvfp4, nvfp4_regions
from ..writing import token_major
from .protocol import Operands, host_array

__all__ = ["Found", "HostArray", "Rows", "Scratch"]

HostArray = npt.NDArray[np.int64]
# Page ids (rows, where there are no pages) and tokens in these, each ``[requests, n]``.
Found = tuple[HostArray, HostArray]


class Scratch:
    """Buffers that the blocks of one call take turns with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return ``[*shape]`` of any content; whoever took `name` before must be done with it."""
        count = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < count:
            self._kept.pop((name, dtype), None)
            kept = None  # let go of the smaller one first
            kept = torch.empty(count, dtype=dtype, device=self._device)
            self._kept[name, dtype] = kept
        return kept[:count].view(shape)


@dataclass(frozen=True)
class _Side:
    """Keys or values of a call as rows of one token and head, wherever they lie.

    Row ``page * step[0] + token * step[1] + head * step[2]`` of a part ``[rows, width]`` belongs to
    one token and head. NVFP4 has two parts, data and block scales.
    """

    parts: tuple[Tensor, ...]
    steps: tuple[tuple[int, int, int], ...]
    scale: Tensor | None  # [num_kv_heads]

    @classmethod
    def of(cls, parts: Sequence[Tensor], scale: Tensor | None) -> _Side:
        """View parts ``[pages, tokens, heads, width]`` of any strides."""
        rows, steps = [], []
        for part in parts:
            # Some operations on a CPU do not know 8-bit floats, and all know bytes.
            plain = part.view(torch.uint8) if part.element_size() == 1 else part
            # Rows that overlap are as good as others to read from.
            unit = math.gcd(*plain.stride()[:3]) or 1
            last = sum((plain.shape[i] - 1) * plain.stride(i) for i in range(3))
            count = last // unit + 1 if plain.numel() else 0
            rows.append(plain.as_strided((count, plain.shape[3]), (unit, 1)))
            page, token, head = (plain.stride(i) // unit for i in range(3))
            steps.append((page, token, head))
        return cls(tuple(rows), tuple(steps), scale)


@dataclass(frozen=True)
class Rows:
    """How the keys and values of a call lie: in pages, or one row after another."""

    key: _Side
    value: _Side
    num_heads: int
    pages: npt.NDArray[np.int32] | None  # page_indices; `None` where tokens follow one another
    page_size: int
    dtype: str | None  # format of a quantised cache
    scratch: Scratch

    @classmethod
    def of(cls, launch: Launch, operands: Operands, scratch: Scratch) -> Rows:
        """Find the rows of a launch; `operands` are torch tensors."""
        heads, cache = launch.spec.num_kv_heads, launch.cache
        if launch.source == "tokens" or cache is None:
            key, value = (_Side.of([rows[:, None]], None) for rows in operands[1:3])
            return cls(key, value, heads, None, 1, None, scratch)
        scales: Sequence[Tensor | None] = (None, None)
        if cache.quantized:
            scales = operands.scale_table[int(host_array(operands.scale_layer)[0])]
        key, value = (
            _Side.of(_page_parts(pool, cache), scale)
            for pool, scale in zip(operands[1:3], scales, strict=True)
        )
        pages = host_array(operands.metadata["page_indices"])
        dtype = cache.dtype if cache.quantized else None
        return cls(key, value, heads, pages, cache.page_size, dtype, scratch)

    def find(self, first_page: HostArray, token: HostArray) -> Found:
        """Return where tokens ``[requests, n]`` of requests lie."""
        column = token // self.page_size
        page = first_page[:, None] + column
        if self.pages is not None:
            page = self.pages[page].astype(np.int64)
        return page, token - column * self.page_size

    def _index(self, found: Found, step: tuple[int, int, int]) -> HostArray:
        """Return rows ``[requests * num_heads * n]`` of what `find` returned."""
        page, token = found
        heads = np.arange(self.num_heads)[:, None] * step[2]
        rows: HostArray = ((page * step[0] + token * step[1])[:, None] + heads).ravel()
        return rows

    def gather(self, side: _Side, found: Found) -> Tensor:
        """Return float32 ``[requests * num_heads, n, width]``, until the next call of this."""
        requests = found[0].shape[0]
        gathered: list[Tensor] = []
        index, at = None, None
        for part, step in zip(side.parts, side.steps, strict=True):
            if step != at:
                index, at = torch.from_numpy(self._index(found, step)).to(part.device), step
            assert index is not None
            name = f"found{len(gathered)}"
            rows = self.scratch.take(name, part.dtype, index.numel(), part.shape[1])
            torch.index_select(part, 0, index, out=rows)
            gathered.append(rows.view(requests * self.num_heads, -1, part.shape[1]))
        stored = gathered[0]
        if side.scale is None or self.dtype is None:
            return stored if stored.dtype == torch.float32 else self._wide(stored)
        scale = side.scale.repeat(requests)
        if self.dtype in NVFP4_DTYPES:
            blocks = gathered[1].view(torch.float8_e4m3fn)
            # As rows [tokens, heads, ...], whose heads have the scales.
            wide = dequantise_nvfp4(stored.transpose(0, 1), blocks.transpose(0, 1), scale)
            return wide.transpose(0, 1)
        return self._wide(stored.view(getattr(torch, self.dtype))).mul_(scale[:, None, None])

    def _wide(self, rows: Tensor) -> Tensor:
        return self.scratch.take("wide", torch.float32, *rows.shape).copy_(rows)


def _page_parts(pool: Tensor, cache: CacheSpec) -> list[Tensor]:
    """Return a pool, or the regions of its pages, as ``[pages, page_size, heads, width]``."""
    parts = nvfp4_regions(pool) if cache.dtype in NVFP4_DTYPES else (pool,)
    return [token_major(part, cache.layout) for part in parts]
