"""Rows to store, and pools that hold something, for tests of what writes into caches."""

from __future__ import annotations

import torch
from torch import Tensor

from interop.spec import CacheSpec

PAGES = 6


def cache_spec(
    dtype: str, layout: str, page_size: int, shape: tuple[int, int, int], layers: int = 1
) -> CacheSpec:
    heads, width, width_v = shape
    return CacheSpec(layers, PAGES, page_size, heads, width, width_v, dtype, layout)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Ordinary numbers, among them numbers half-way between those of few bits, 0 and -0."""
    rows = torch.randn(shape, generator=generator) * 4.0
    few = torch.randint(-64, 65, shape, generator=generator) * 0.0625
    rows = torch.where(torch.rand(shape, generator=generator) < 0.5, few, rows)
    rows.view(-1)[::37] = -0.0
    return rows.to(dtype)


def any_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any float32 at all: subnormal, huge, infinite and not a number."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    rows = bits.to(torch.int32).view(torch.float32)
    # The sign of what is not a number is the platform's business.
    return rows.masked_fill(rows.isnan(), torch.nan)


def noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A pool that holds something; bytes in 8-bit pools."""
    if dtype.itemsize > 1:
        return torch.randn(shape, generator=generator).to(dtype)
    codes = torch.randint(0, 240, shape, generator=generator)
    # Both signs of what is finite in either fp8.
    return torch.where(codes < 120, codes, codes + 8).to(torch.uint8).view(dtype)


def pools_of(spec: CacheSpec, how: str, generator: torch.Generator) -> list[Tensor]:
    """Pools as a cache has them, with gaps between pages, or packed with one another."""
    dtype = getattr(torch, spec.storage_dtype)
    shapes = [spec.key_shape, spec.value_shape]
    if how == "whole":
        return [noise(shape, dtype, generator) for shape in shapes]
    if how == "gaps":
        return [noise((2 * s[0], *s[1:]), dtype, generator)[::2] for s in shapes]
    packed = noise((*shapes[0][:3], shapes[0][3] + shapes[1][3]), dtype, generator)
    return [packed[..., : shapes[0][3]], packed[..., shapes[0][3] :]]


def bytes_of(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8)


def _memory_of(pool: Tensor) -> Tensor:
    return pool if pool._base is None else pool._base


def copied(pools: list[Tensor], device: str = "cpu") -> list[Tensor]:
    """Copy pools with their strides, the memory between them, and what they share."""
    memory: dict[int, Tensor] = {}
    for pool in pools:
        base = _memory_of(pool)
        memory.setdefault(id(base), base.to(device, copy=True))
    copies = [memory[id(_memory_of(pool))].view(pool.dtype) for pool in pools]
    return [
        copy.as_strided(pool.shape, pool.stride(), pool.storage_offset())
        for copy, pool in zip(copies, pools, strict=True)
    ]


def assert_same(got: list[Tensor], want: list[Tensor], case: object) -> None:
    """Check that pools, and the memory between pages, hold the same bytes."""
    for a, b in zip(got, want, strict=True):
        assert torch.equal(bytes_of(a).cpu(), bytes_of(b)), case
        assert torch.equal(bytes_of(_memory_of(a)).cpu(), bytes_of(_memory_of(b))), case


def scales_of(spec: CacheSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scales of two layers, and which of them is meant."""
    table = torch.rand((2, 2, spec.num_kv_heads), generator=generator) * 3.0 + 0.01
    return table, torch.tensor([1], dtype=torch.int32)
