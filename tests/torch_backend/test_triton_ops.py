"""The Triton kernels against PyTorch, under Triton's interpreter on the CPU.

TRITON_INTERPRET has to be set before Triton is imported, so this file, run as a program, makes all
checks in a process of its own and prints what came of each.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from stored import PAGES, any_bits, assert_same, cache_spec, copied, numbers, pools_of, scales_of
from torch import Tensor

from interop.spec import FLOAT_DTYPES, FP8_DTYPES, NVFP4_DTYPES, CacheSpec
from torch_backend.triton_quantised import _sum_of_16
from torch_backend.writing import token_major, write_rows

ROOT = Path(__file__).parents[2]
# Heads, widths of key and value.
SHAPES = ((1, 16, 16), (2, 48, 16), (3, 5, 7), (4, 32, 32), (8, 128, 128))
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


def launch_append(
    key: Tensor,
    value: Tensor,
    pools: list[Tensor],
    spec: CacheSpec,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    from torch_backend import triton_ops

    named: dict[str, Any] = {}
    if scales is not None:
        named = {"scale_table": scales[0], "scale_layer": scales[1]}
    if spec.dtype in NVFP4_DTYPES:
        named |= {"layout": spec.layout, "four_over_six": spec.dtype == "nvfp4_4over6"}
        triton_ops.append_nvfp4(key, value, *pools, slots, **named)
    else:
        views = (token_major(pool, spec.layout) for pool in pools)
        triton_ops.append(key, value, *views, slots, **named)


def append_cases() -> Iterator[tuple[CacheSpec, str, str]]:
    for dtype, layout, shape in product(
        (*FLOAT_DTYPES, *FP8_DTYPES, *NVFP4_DTYPES), ("NHD", "HND"), SHAPES
    ):
        nvfp4 = dtype in NVFP4_DTYPES
        if nvfp4 and shape[1] % 16:
            continue
        rows = (dtype,) if dtype in FLOAT_DTYPES else FLOAT_DTYPES
        hows = ("whole", "gaps") if nvfp4 else ("whole", "gaps", "packed")
        for number, how in enumerate(hows):
            page_size = (1, 4, 3)[number]
            yield cache_spec(dtype, layout, page_size, shape), rows[number % len(rows)], how


@check
def append_leaves_the_bytes_that_torch_leaves() -> None:
    generator = torch.Generator().manual_seed(0)
    for spec, row_dtype, how in append_cases():
        dtype = getattr(torch, row_dtype)
        pools = pools_of(spec, how, generator)
        count = min(5, PAGES * spec.page_size - 1)
        key, value = (
            numbers((count + 2, spec.num_kv_heads, width), dtype, generator)
            for width in (spec.head_dim, spec.head_dim_v)
        )
        slots = torch.randperm(PAGES * spec.page_size, generator=generator)[:count].int()
        slots[1] = -1
        scales = scales_of(spec, generator) if spec.quantized else None
        expected = copied(pools)
        write_rows(key, value, *expected, spec, slots, *(scales or ()))
        launch_append(key, value, pools, spec, slots, scales)
        assert_same(pools, expected, (spec, how))


@check
def nothing_is_written_where_slots_say_so() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in ("bfloat16", "float8_e4m3fn", "nvfp4_4over6"):
        spec = cache_spec(dtype, "NHD", 4, (2, 32, 32))
        pools = pools_of(spec, "gaps", generator)
        before = copied(pools)
        rows = torch.randn((9, 2, 32), generator=generator).bfloat16()
        scales = scales_of(spec, generator) if spec.quantized else None
        for slots in (torch.full((9,), -1), torch.empty(0)):
            launch_append(rows, rows, pools, spec, slots.int(), scales)
            assert_same(pools, before, spec)


@check
def any_float32_is_stored_as_torch_stores_it() -> None:
    generator = torch.Generator().manual_seed(2)
    for dtype in (*FP8_DTYPES, *NVFP4_DTYPES):
        spec = cache_spec(dtype, "NHD", 16, (4, 64, 64))
        pools = pools_of(spec, "whole", generator)
        rows = [any_bits((64, 4, 64), generator) for _ in range(2)]
        scales = scales_of(spec, generator)
        scales[0][1] = torch.tensor([2.0**-20, 2.0**20, 3.0, 7.0])
        # Half-way cases remain so in an exact division alone, not in a product with a reciprocal.
        halves = numbers((32, 4, 64), torch.float32, generator) * scales[0][1, 1, :, None]
        rows[1][::2] = halves
        rows[1][::8] *= 2.0**-120
        slots = torch.arange(64, dtype=torch.int32)
        expected = copied(pools)
        write_rows(*rows, *expected, spec, slots, *scales)
        launch_append(rows[0], rows[1], pools, spec, slots, scales)
        assert_same(pools, expected, spec)


@triton.jit
def _sum_blocks(terms, sums, BLOCKS: tl.constexpr):  # noqa: N803
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(sums + block, _sum_of_16(tl.load(terms + element), BLOCKS))


@check
def errors_are_added_from_the_first_to_the_last() -> None:
    terms = torch.rand((64, 16), generator=torch.Generator().manual_seed(7))
    sums = torch.empty(64)
    _sum_blocks[(1,)](terms, sums, 64)
    want = terms[:, 0]
    for element in range(1, 16):
        want = want + terms[:, element]
    assert torch.equal(sums, want)


@check
def gather_copies_pages_into_rows() -> None:
    from torch_backend import triton_ops

    generator = torch.Generator().manual_seed(3)
    for dtype, layout, shape, page_size in product(
        ("float32", "bfloat16", *FP8_DTYPES), ("NHD", "HND"), SHAPES[1:], (1, 4)
    ):
        spec = cache_spec(dtype, layout, page_size, shape)
        pools = pools_of(spec, "gaps", generator)
        views = [token_major(pool, layout) for pool in pools]
        row_dtype = torch.float16 if spec.quantized else pools[0].dtype
        scales = scales_of(spec, generator) if spec.quantized else None
        indices = torch.tensor([3, 0, 5, 2], dtype=torch.int32)
        valid = torch.tensor([page_size, page_size - 1, -1, 0], dtype=torch.int32)
        real = []
        for side, view in enumerate(views):
            # What is not valid may hold anything.
            view[0, page_size - 1] = torch.nan
            view[2] = torch.nan
            factor = scales[0][1, side, :, None] if scales is not None else 1.0
            real.append((view.float() * factor).to(row_dtype))
        rows = [
            torch.full((4 * page_size, *view.shape[2:]), 7.0, dtype=row_dtype) for view in views
        ]
        named = dict(zip(("scale_table", "scale_layer"), scales or (), strict=False))
        triton_ops.gather(*views, indices, valid, *rows, **named)
        for view, got in zip(real, rows, strict=True):
            want = torch.full_like(got, 7.0).view(4, page_size, *view.shape[2:])
            want[0] = view[3]
            want[1] = view[0]
            want[1, page_size - 1] = 0.0
            want[3] = 0.0
            assert torch.equal(got.view(want.shape), want), (spec, page_size)


@check
def query_and_output_are_scaled_by_their_kv_head() -> None:
    from torch_backend import triton_ops

    generator = torch.Generator().manual_seed(4)
    for heads, kv_heads, width in ((8, 2, 64), (6, 6, 48), (32, 1, 16)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rows = torch.randn((5, heads, width), generator=generator).to(dtype)
            table = torch.rand((3, 2, kv_heads), generator=generator)
            layer = torch.tensor([2], dtype=torch.int32)
            factors = table[2].repeat_interleave(heads // kv_heads, 1)[..., None]
            scaled = torch.full_like(rows, 7.0)
            triton_ops.scale_query(rows, scaled, table, layer)
            assert torch.equal(scaled, (rows.float() * factors[0]).to(dtype))
            want = (rows.float() * factors[1]).to(dtype)
            triton_ops.scale_output(rows, table, layer)
            assert torch.equal(rows, want)
            triton_ops.warm_scale(rows, rows, kv_heads)
            assert torch.equal(rows, want)


@check
def sinks_take_their_share_of_the_rows() -> None:
    from torch_backend import triton_sinks

    generator = torch.Generator().manual_seed(8)
    base = math.log(2.0)
    for (heads, width), dtype in product(((8, 64), (6, 48), (3, 5)), (torch.bfloat16, torch.half)):
        out = torch.randn((5, heads, width), generator=generator).to(dtype)
        lse = torch.randn((5, heads), generator=generator) * 30
        sinks = torch.randn(heads, generator=generator) * 30
        # No key; a sink that is none; neither; a sink that takes all.
        lse[0], lse[1, 0], sinks[0], sinks[1] = -torch.inf, -torch.inf, -torch.inf, torch.inf
        out[0], out[1, 0] = 0.0, 0.0
        for factor in (1.0, base):
            natural = lse * factor
            share = torch.sigmoid(natural - sinks).masked_fill(natural == -torch.inf, 0.0)
            want, got, log = out.float() * share[..., None], out.clone(), lse.clone()
            result = got if factor == base else torch.full_like(out, 7.0)
            triton_sinks.apply(got, result, log, sinks, factor)
            assert torch.equal(log, natural)
            torch.testing.assert_close(result, want.to(dtype), rtol=2**-7, atol=1e-7)
            assert not result[:, 1].any()
            assert not result[0].any()
            assert torch.equal(result[2:, 0], out[2:, 0])


@check
def warming_up_changes_nothing() -> None:
    from torch_backend import triton_ops

    generator = torch.Generator().manual_seed(6)
    for dtype in ("bfloat16", "float8_e5m2"):
        spec = cache_spec(dtype, "HND", 4, (2, 32, 16))
        pools = pools_of(spec, "packed", generator)
        before = copied(pools)
        views = [token_major(pool, "HND") for pool in pools]
        triton_ops.warm_append(views[0], views[1], torch.bfloat16)
        triton_ops.warm_gather(views[0], views[1], torch.bfloat16)
        assert_same(pools, before, spec)
    spec = cache_spec("nvfp4", "HND", 4, (2, 32, 16))
    pools = pools_of(spec, "whole", generator)
    before = copied(pools)
    for four_over_six in (False, True):
        triton_ops.warm_append_nvfp4(
            pools[0], pools[1], torch.float16, layout="HND", four_over_six=four_over_six
        )
    assert_same(pools, before, spec)


def convert_exactly(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert floats for Triton's interpreter, which by itself cuts bfloat16 off and errs in fp8.

    It keeps types that NumPy lacks as their bits. All roundings here are to nearest even.
    """
    import triton.language as tl

    types = {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    width = types[source].itemsize
    given = torch.from_numpy(bits.reshape(-1).view(f"int{8 * width}").copy()).view(types[source])
    made = given.float().to(types[target])
    size = types[target].itemsize
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return made.view(integer).numpy().view(f"uint{8 * size}").reshape(bits.shape)


def main() -> None:
    from triton.runtime import interpreter

    interpreter._convert_float = convert_exactly
    outcomes = {}
    for name, function in CHECKS.items():
        try:
            # What overflows is infinite, as on a GPU; the interpreter is NumPy, which says so.
            with np.errstate(all="ignore"):
                function()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    main()
