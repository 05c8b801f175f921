"""On a GPU the Triton kernels leave the bytes that PyTorch leaves on the CPU, from JAX, too."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from stored import any_bits, assert_same, bytes_of, copied, numbers, pools_of, scales_of
from torch import Tensor

from interop.errors import VersionError
from interop.spec import FLOAT_DTYPES, FP8_DTYPES, NVFP4_DTYPES, CacheSpec
from jax_frontend.triton_ops import append_arrays
from torch_backend.writing import token_major, warm, write_rows

pytestmark = pytest.mark.gpu

DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES, *NVFP4_DTYPES)
# Heads, widths of key and value.
SHAPES = ((1, 128, 128), (2, 192, 128), (3, 48, 80), (4, 64, 64), (8, 256, 16))


def spec_of(
    dtype: str, layout: str, shape: tuple[int, int, int], *, layers: int = 1, pages: int = 40
) -> CacheSpec:
    heads, width, width_v = shape
    return CacheSpec(layers, pages, 16, heads, width, width_v, dtype, layout, "cuda")


def rows_of(spec: CacheSpec, count: int, generator: torch.Generator) -> list[Tensor]:
    """Keys and values: float32 of any bits or ordinary ones for a quantised cache."""
    shapes = [(count, spec.num_kv_heads, width) for width in (spec.head_dim, spec.head_dim_v)]
    if not spec.quantized:
        return [numbers(shape, getattr(torch, spec.dtype), generator) for shape in shapes]
    rows = [numbers(shape, torch.float32, generator) for shape in shapes]
    for part in rows:
        part[::4] = any_bits(tuple(part[::4].shape), generator)
        part[1::4] *= 2.0**-100
    return rows


def slots_of(spec: CacheSpec, count: int, generator: torch.Generator) -> Tensor:
    slots = torch.randperm(spec.num_pages * spec.page_size, generator=generator)[:count].int()
    slots[1::7] = -1
    return slots


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_leave_the_bytes_of_the_cpu(dtype: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        spec = spec_of(dtype, layout, shape)
        hows = ("whole", "gaps") if dtype in NVFP4_DTYPES else ("whole", "gaps", "packed")
        for how, count in product(hows, (1, 300)):
            pools = pools_of(spec, how, generator)
            rows = rows_of(spec, count + 3, generator)
            slots = slots_of(spec, count, generator)
            scales = scales_of(spec, generator) if spec.quantized else ()
            there = copied(pools, "cuda")
            write_rows(
                rows[0].cuda(), rows[1].cuda(), there[0], there[1], spec, slots.cuda(),
                *(part.cuda() for part in scales),
            )  # fmt: skip
            write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
            assert_same(there, pools, (spec, how, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_rows_writes_nothing(dtype: str) -> None:
    """Its plan has one slot all the same, of -1, and an array without elements has no address."""
    generator = torch.Generator().manual_seed(0)
    spec = spec_of(dtype, "NHD", SHAPES[3])
    kept = pools_of(spec, "whole", generator)
    pools = copied(kept, "cuda")
    rows = [part.cuda() for part in rows_of(spec, 0, generator)]
    assert rows[0].data_ptr() == 0
    scales = [part.cuda() for part in (scales_of(spec, generator) if spec.quantized else ())]
    slots = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
    torch.cuda.synchronize()
    assert_same(pools, kept, spec)


@pytest.mark.parametrize("row_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [*FP8_DTYPES, *NVFP4_DTYPES])
def test_rows_of_16_bits_are_stored_alike(dtype: str, row_dtype: torch.dtype) -> None:
    """Every number that there is, of both signs."""
    spec = spec_of(dtype, "NHD", (8, 128, 128), pages=4)
    bits = torch.arange(2**16).to(torch.int16)
    every = bits.view(row_dtype).masked_fill(bits.view(row_dtype).isnan(), torch.nan)
    generator = torch.Generator().manual_seed(1)
    # Blocks of one magnitude, and blocks of all.
    rows = [every.view(64, 8, 128), every[torch.randperm(2**16, generator=generator)]]
    rows[1] = rows[1].view(64, 8, 128)
    pools = pools_of(spec, "whole", generator)
    scales, slots = scales_of(spec, generator), torch.arange(64, dtype=torch.int32)
    there = copied(pools, "cuda")
    write_rows(
        rows[0].cuda(), rows[1].cuda(), there[0], there[1], spec, slots.cuda(),
        *(part.cuda() for part in scales),
    )  # fmt: skip
    write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
    assert_same(there, pools, spec)


@pytest.mark.parametrize("row_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_gather_reads_every_fp8_number(dtype: str, row_dtype: torch.dtype) -> None:
    from torch_backend.triton_ops import gather

    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    pool = every.view(1, 16, 2, 8).expand(3, 16, 2, 8).contiguous()
    generator = torch.Generator().manual_seed(2)
    scales = scales_of(spec_of(dtype, "NHD", (2, 8, 8)), generator)
    indices = torch.tensor([2, 0], dtype=torch.int32).cuda()
    valid = torch.tensor([16, 5], dtype=torch.int32).cuda()
    rows = [torch.full((32, 2, 8), 7.0, dtype=row_dtype, device="cuda") for _ in range(2)]
    gather(
        pool.cuda(), pool.cuda(), indices, valid, rows[0], rows[1],
        scale_table=scales[0].cuda(), scale_layer=scales[1].cuda(),
    )  # fmt: skip
    for side in (0, 1):
        want = (pool[0].float() * scales[0][1, side, :, None]).to(row_dtype).expand(2, 16, 2, 8)
        want = want.clone()
        want[1, 5:] = 0.0
        got = rows[side].cpu().view(want.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_query_and_output_are_scaled() -> None:
    from torch_backend.triton_ops import scale_output, scale_query

    generator = torch.Generator().manual_seed(3)
    for dtype, (heads, kv_heads, width) in product(FLOAT_DTYPES, ((32, 8, 128), (6, 2, 80))):
        rows = torch.randn((33, heads, width), generator=generator).to(getattr(torch, dtype))
        table = torch.rand((3, 2, kv_heads), generator=generator)
        layer = torch.tensor([2], dtype=torch.int32).cuda()
        factors = table[2].repeat_interleave(heads // kv_heads, 1)[..., None]
        there = rows.cuda()
        scaled = torch.empty_like(there)
        scale_query(there, scaled, table.cuda(), layer)
        scale_output(there, table.cuda(), layer)
        assert torch.equal(scaled.cpu(), (rows.float() * factors[0]).to(rows.dtype))
        assert torch.equal(there.cpu(), (rows.float() * factors[1]).to(rows.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "nvfp4_4over6"])
def test_a_write_is_recorded_once_it_is_warm(dtype: str) -> None:
    """Of a shape that no other test has, so that nothing else loads the kernel."""
    spec = spec_of(dtype, "HND", (5, 112, 144))
    generator = torch.Generator().manual_seed(4)
    pools = pools_of(spec, "whole", generator)
    rows, slots = rows_of(spec, 19, generator), torch.full((19,), -1, dtype=torch.int32)
    scales = scales_of(spec, generator) if spec.quantized else ()
    there = [part.cuda() for part in (*rows, *copied(pools), slots, *scales)]
    warm(spec, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = torch.cuda.memory_allocated()
        write_rows(*there[:4], spec, *there[4:])
        assert torch.cuda.memory_allocated() == held
    for _ in range(2):
        slots = slots_of(spec, 19, generator)
        there[4].copy_(slots)
        graph.replay()
        write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
        assert_same(there[2:4], pools, spec)


def test_a_pool_of_more_than_2_31_elements() -> None:
    spec = CacheSpec(1, 2**17 + 64, 16, 8, 128, 16, "float8_e4m3fn", "NHD", "cuda")
    shapes = spec.key_shape, spec.value_shape
    pools = [torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda") for shape in shapes]
    rows = [torch.ones((2, 8, width), dtype=torch.bfloat16, device="cuda") for width in (128, 16)]
    last = spec.num_pages * spec.page_size - 1
    slots = torch.tensor([last, 3], dtype=torch.int32, device="cuda")
    scales = (torch.ones(spec.scales_shape).cuda(), torch.zeros(1, dtype=torch.int32).cuda())
    write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
    for pool in pools:
        tokens = pool.view(torch.uint8).flatten(0, 1).flatten(1)
        written = torch.nonzero(tokens.any(1)).flatten().tolist()
        assert written == [3, last]
        assert (tokens[written] == 0x38).all()


def to_jax(tensor: Tensor) -> jax.Array:
    """Copy to JAX's GPU; fp8 travels as bytes, bfloat16 as float32."""
    device = jax.devices("gpu")[0]
    if tensor.itemsize == 1:
        made = jax.device_put(bytes_of(tensor).numpy(), device)
        return made.view(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))
    if tensor.dtype == torch.bfloat16:
        return jax.device_put(tensor.float().numpy(), device).astype(jnp.bfloat16)
    return jax.device_put(tensor.numpy(), device)


def jax_bytes(array: jax.Array) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def assert_jax_same(arrays: tuple[jax.Array, jax.Array], pools: list[Tensor]) -> None:
    for array, pool in zip(arrays, pools, strict=True):
        assert np.array_equal(jax_bytes(array), bytes_of(pool).numpy())


@pytest.fixture
def jax_triton() -> None:
    from jax_frontend.triton_ops import _triton_call

    try:
        jax.devices("gpu")
        _triton_call()
    except (RuntimeError, VersionError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_writes_in_place_what_torch_writes(dtype: str, layout: str, jax_triton: None) -> None:
    generator = torch.Generator().manual_seed(5)
    for shape, count in product(((2, 192, 128), (3, 48, 80), (8, 128, 128)), (1, 50)):
        spec = spec_of(dtype, layout, shape)
        pools = pools_of(spec, "whole", generator)
        rows = rows_of(spec, count + 3, generator)
        slots = slots_of(spec, count, generator)
        scales = scales_of(spec, generator) if spec.quantized else ()

        def step(
            key: Any, value: Any, k: Any, v: Any, slots: Any, *scales: Any, spec: CacheSpec = spec
        ) -> Any:
            return append_arrays(key, value, k, v, slots, spec, *scales)

        given = [to_jax(part) for part in (*rows, *pools, slots, *scales)]
        where = [pool.unsafe_buffer_pointer() for pool in given[2:4]]
        kept = jax.jit(step)(*given)
        donated = jax.jit(step, donate_argnums=(2, 3))
        before = [jax_bytes(pool) for pool in given[2:4]]
        assert all(
            np.array_equal(old, bytes_of(pool).numpy())
            for old, pool in zip(before, pools, strict=True)
        )
        after = donated(*given)
        assert [pool.unsafe_buffer_pointer() for pool in after] == where
        write_rows(rows[0], rows[1], pools[0], pools[1], spec, slots, *scales)
        assert_jax_same(after, pools)
        assert_jax_same(kept, pools)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "nvfp4"])
def test_a_scan_over_layers_writes_in_place(dtype: str, jax_triton: None) -> None:
    """A traced layer shifts slots and chooses scales; the pools are the loop's carry."""
    generator = torch.Generator().manual_seed(6)
    spec = spec_of(dtype, "NHD", (4, 64, 64), layers=3, pages=8)
    pools = pools_of(spec, "whole", generator)
    rows = rows_of(spec, 9, generator)
    slots = slots_of(spec, 9, generator)
    table = torch.rand(spec.scales_shape, generator=generator) + 0.5
    per_layer = spec.num_pages * spec.page_size

    def step(key: Any, value: Any, k: Any, v: Any, slots: Any, table: Any) -> Any:
        def block(carry: Any, layer: Any) -> Any:
            places = jnp.where(slots >= 0, slots + layer * per_layer, -1)
            scales = (table, layer[None]) if spec.quantized else ()
            return append_arrays(key, value, *carry, places, spec, *scales), None

        return jax.lax.scan(block, (k, v), jnp.arange(3, dtype=jnp.int32))[0]

    given = [to_jax(part) for part in (*rows, *pools, slots, table)]
    where = [pool.unsafe_buffer_pointer() for pool in given[2:4]]
    after = jax.jit(step, donate_argnums=(2, 3))(*given)
    assert [pool.unsafe_buffer_pointer() for pool in after] == where
    for layer in range(3):
        places = torch.where(slots >= 0, slots + layer * per_layer, -1).int()
        scales = (table, torch.tensor([layer], dtype=torch.int32)) if spec.quantized else ()
        write_rows(rows[0], rows[1], pools[0], pools[1], spec, places, *scales)
    assert_jax_same(after, pools)


def test_torch_compiles_kernels_after_jax_has(jax_triton: None) -> None:
    assert os.environ.get("TRITON_CACHE_DIR") != ""
    spec = spec_of("bfloat16", "NHD", (7, 24, 24))
    pool = torch.zeros(spec.key_shape, dtype=torch.bfloat16, device="cuda")
    rows = torch.ones((1, 7, 24), dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([5], dtype=torch.int32, device="cuda")
    write_rows(rows, rows, pool, pool.clone(), spec, slots)
    assert float(token_major(pool, "NHD").float().sum()) == 7 * 24
