"""Writing rows into pages on the CPU, against a plain loop that finds its numbers by search."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from interop.spec import FLOAT_DTYPES, FP8_DTYPES, NVFP4_DTYPES, CacheSpec
from torch_backend.writing import write_rows

PAGES = 4
F32 = np.float32
Floats = npt.NDArray[np.float32]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decoded(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """All finite non-negative numbers of an 8-bit type, in the order of their codes."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].numpy()


def nearest(x: float, grid: npt.NDArray[np.float64]) -> int:
    """Code of the number nearest to ``x >= 0``; of two as near, the even code."""
    distance = np.abs(grid - min(x, float(grid[-1])))
    codes = np.flatnonzero(distance == distance.min())
    return int(next(code for code in codes if len(codes) == 1 or code % 2 == 0))


def to_fp8(row: Floats, scale: np.float32, dtype: torch.dtype) -> list[int]:
    grid = decoded(dtype)
    scaled = row / scale
    return [nearest(abs(float(x)), grid) | (128 if np.signbit(x) else 0) for x in scaled]


def block_to_nvfp4(
    block: Floats, scale: np.float32, top: float
) -> tuple[int, list[int], np.float32]:
    """Code of the block scale, codes of the values, sum of squared errors."""
    grid = decoded(torch.float8_e4m3fn)
    wanted = min(np.abs(block).max() / F32(top) / scale, F32(448.0))
    code = nearest(float(wanted), grid)
    step = F32(grid[code]) * scale
    if step == 0.0:
        return code, [0] * 16, np.cumsum(block * block, dtype=F32)[-1]
    codes = [nearest(abs(float(x)), E2M1) for x in block / step]
    error = F32(0.0)
    for x, c in zip(np.abs(block), codes, strict=True):
        missed = F32(E2M1[c]) * step - x
        error = error + missed * missed
    return code, [c + 8 * bool(np.signbit(x)) for c, x in zip(codes, block, strict=True)], error


def to_nvfp4(row: Floats, scale: np.float32, four_over_six: bool) -> tuple[list[int], list[int]]:
    """Data bytes and codes of block scales."""
    data, scales = [], []
    for block in row.reshape(-1, 16):
        code, codes, error = block_to_nvfp4(block, scale, 6.0)
        if four_over_six:
            other = block_to_nvfp4(block, scale, 4.0)
            if other[2] < error:
                code, codes, _ = other
        scales.append(code)
        data += [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return data, scales


def looped(
    rows: Tensor, pool: Tensor, spec: CacheSpec, slots: Tensor, scales: Tensor | None
) -> None:
    """Write rows one by one: the meaning of `write_rows`, for one side."""
    _, d1, d2, _ = pool.shape
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, token = divmod(slot, spec.page_size)
        for head in range(spec.num_kv_heads):
            at = (token, head) if spec.layout == "NHD" else (head, token)
            given = rows[row, head]
            if scales is None:
                pool[page, at[0], at[1]] = given
                continue
            scale, numbers = F32(scales[head].item()), given.float().numpy()
            if spec.dtype in FP8_DTYPES:
                codes = to_fp8(numbers, scale, pool.dtype)
                pool.view(torch.uint8)[page, at[0], at[1]] = torch.tensor(codes, dtype=torch.uint8)
                continue
            data, blocks = to_nvfp4(numbers, scale, spec.dtype == "nvfp4_4over6")
            flat = pool[page].view(-1)
            item = at[0] * d2 + at[1]
            flat[item * len(data) : (item + 1) * len(data)] = torch.tensor(data, dtype=torch.uint8)
            start = d1 * d2 * len(data) + item * len(blocks)
            flat[start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.uint8)


def few_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of few bits, which often lie half-way between two that can be stored."""
    rows = torch.randint(-96, 97, shape, generator=generator) * 0.0625
    rows.view(-1)[::29] = -0.0
    return rows


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FP8_DTYPES, *NVFP4_DTYPES])
def test_rows_are_written_as_a_loop_writes_them(dtype: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for heads, page_size in product((1, 2, 4), (1, 3)):
        spec = CacheSpec(1, PAGES, page_size, heads, 32, 16, dtype, layout)
        row_dtype = torch.bfloat16 if spec.quantized else getattr(torch, dtype)
        pools = [
            # Every other page of something larger.
            torch.randint(0, 100, (2 * s[0], *s[1:]), generator=generator)
            .to(torch.uint8 if spec.quantized else row_dtype)
            .view(getattr(torch, spec.storage_dtype))[::2]
            for s in (spec.key_shape, spec.value_shape)
        ]
        rows = [few_bits((5, heads, w), generator).to(row_dtype) for w in (32, 16)]
        # Three layers' scales; powers of 2 in the middle one, so that half-way stays half-way.
        table = torch.rand((3, 2, heads), generator=generator) + 0.5
        table[1, :, ::2] = 0.5
        table[1, 1] *= 0.25
        slots = torch.randperm(PAGES * page_size, generator=generator)[:4].int()
        slots[2] = -1
        scales = (table, torch.tensor([1], dtype=torch.int32)) if spec.quantized else ()
        expected = [pool.clone() for pool in pools]
        for side in (0, 1):
            chosen = table[1, side] if spec.quantized else None
            looped(rows[side], expected[side], spec, slots, chosen)
        before = [pool.clone() for pool in pools]
        write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
        for got, want, old in zip(pools, expected, before, strict=True):
            same = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
            assert same.all(), (spec, int((~same).sum()))
            assert not torch.equal(
                got.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8)
            )


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_fp8_saturates_and_keeps_what_is_not_a_number(dtype: str) -> None:
    spec = CacheSpec(1, 1, 2, 1, 8, dtype=dtype)
    pool = torch.zeros(spec.key_shape, dtype=getattr(torch, dtype))
    row = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-30, -1e-30, 3.0])
    rows = row.expand(2, 1, 8).contiguous()
    scales = torch.full((1, 2, 1), 2.0), torch.tensor([0], dtype=torch.int32)
    slots = torch.tensor([0, -1], dtype=torch.int32)
    write_rows(rows, rows, pool, pool.clone(), spec, slots, *scales)
    most = torch.finfo(pool.dtype).max
    want = torch.tensor([most, -most, most, -most, torch.nan, 0.0, -0.0, 1.5])
    torch.testing.assert_close(pool[0, 0, 0].float(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(pool[0, 0, 0].float())[6]
    assert not pool[0, 1].float().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "nvfp4"])
def test_no_slot_no_write(dtype: str) -> None:
    spec = CacheSpec(1, 2, 4, 2, 32, dtype=dtype)
    shape = spec.key_shape
    pool = torch.randint(0, 100, shape, dtype=torch.uint8).to(torch.uint8)
    pool = pool.view(getattr(torch, spec.storage_dtype)) if spec.quantized else pool.bfloat16()
    before = pool.clone()
    rows = torch.randn(3, 2, 32).bfloat16()
    scales = (torch.ones(spec.scales_shape), torch.tensor([0]).int()) if spec.quantized else ()
    for slots in (torch.empty(0), torch.full((3,), -1)):
        write_rows(rows, rows, pool, pool, spec, slots.int(), *scales)
        assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))
