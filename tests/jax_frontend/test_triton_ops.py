"""What XLA is told to launch on pools that JAX owns, checked without a GPU.

Triton compiles for a GPU that is not there; JAX's part of jax-triton that needs one is replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from interop.errors import VersionError
from interop.spec import CacheSpec
from jax_frontend import triton_ops as jax_ops
from jax_frontend.triton_ops import append_arrays
from torch_backend.writing import token_major

ROWS = 6


class Launches:
    """Stands for the part of jaxlib that keeps compiled kernels; remembers what it is given."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, ...]] = []
        self.calls: list[tuple[Any, ...]] = []

    def kernel(self, *given: Any) -> int:
        self.kernels.append(given)
        return len(self.kernels)

    def call(self, *given: Any) -> Launches:
        self.calls.append(given)
        return self

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return b"launch"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    pytest.importorskip("triton")
    from jax._src.lib import gpu_triton

    made = Launches()
    parts = {
        "get_compute_capability": lambda device: 90,
        "get_serialized_metadata": lambda: b"",
        "TritonKernel": made.kernel,
        "TritonKernelCall": made.call,
        "create_array_parameter": lambda zeroed, alignment: ("array", alignment),
        "create_scalar_parameter": lambda number, dtype: (dtype, number),
    }
    for name, part in parts.items():
        monkeypatch.setattr(gpu_triton, name, part, raising=False)
    jax_ops._triton_call.cache_clear()
    yield made
    jax_ops._triton_call.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax_triton"]:
        del sys.modules[name]


def abstract(spec: CacheSpec, row_dtype: str) -> list[jax.ShapeDtypeStruct]:
    heads = spec.num_kv_heads
    shapes: list[tuple[tuple[int, ...], str]] = [
        ((ROWS + 2, heads, spec.head_dim), row_dtype),
        ((ROWS + 2, heads, spec.head_dim_v), row_dtype),
        (spec.key_shape, spec.storage_dtype),
        (spec.value_shape, spec.storage_dtype),
        ((ROWS,), "int32"),
    ]
    if spec.quantized:
        shapes += [(spec.scales_shape, "float32"), ((1,), "int32")]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


class Recorder:
    """Stands for a Triton kernel that torch launches."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return self

    def __call__(self, *given: Any, **constants: Any) -> None:
        self.given, self.constants = given, constants


def launched_by_torch(spec: CacheSpec, row_dtype: str, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the core launches for the same arguments."""
    from torch_backend import triton_ops, triton_quantised

    recorder = Recorder()
    monkeypatch.setattr(triton_ops, "append_kernel", recorder)
    monkeypatch.setattr(triton_quantised, "append_nvfp4_kernel", recorder)
    key, value, *pools, slots = (
        torch.empty(a.shape, dtype=getattr(torch, a.dtype.name))
        for a in abstract(spec, row_dtype)[:5]
    )
    scales: dict[str, Any] = {"scale_table": None, "scale_layer": None}
    if spec.quantized:
        scales = dict.fromkeys(scales, torch.empty(0))
    if spec.storage_dtype == "uint8":
        four_over_six = spec.dtype == "nvfp4_4over6"
        scales |= {"layout": spec.layout, "four_over_six": four_over_six}
        triton_ops.append_nvfp4(key, value, pools[0], pools[1], slots, **scales)
    else:
        views = [token_major(pool, spec.layout) for pool in pools]
        triton_ops.append(key, value, views[0], views[1], slots, **scales)
    monkeypatch.undo()
    return recorder


FORMATS = (
    ("bfloat16", "bfloat16"),
    ("float8_e4m3fn", "float16"),
    ("float8_e5m2", "bfloat16"),
    ("nvfp4", "float32"),
    ("nvfp4_4over6", "bfloat16"),
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_xla_launches_what_torch_launches(
    dtype: tuple[str, str], layout: str, launches: Launches
) -> None:
    """Same kernel, grid and constants; pools in place; accesses of 16 bytes in what is compiled."""
    name, row_dtype = dtype
    spec = CacheSpec(2, 5, 16, 8, 128, 128, name, layout, "cuda", name != "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        recorder = launched_by_torch(spec, row_dtype, patch)

    def step(key: Any, value: Any, k: Any, v: Any, slots: Any, *scales: Any) -> Any:
        return append_arrays(key, value, k, v, slots, spec, *scales)

    given = abstract(spec, row_dtype)
    traced = jax.jit(step, donate_argnums=(2, 3)).trace(*given)
    (call,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "triton_kernel_call"]
    constants = {n: value for n, value in recorder.constants.items() if n.isupper()}
    options = {n: value for n, value in recorder.constants.items() if not n.isupper()}
    assert call.params["grid"] == recorder.grid
    assert {n: call.params[n] for n in constants} == constants
    assert {n: call.params[n] for n in options} == options
    assert set(call.params["fn"].arg_names) == set(constants) | set(
        call.params["fn"].arg_names[: len(recorder.given)]
    )
    assert [out.aval.shape for out in call.outvars] == [spec.key_shape, spec.value_shape]

    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for operand, result in ((5, 0), (6, 1)):
        assert f"output_tuple_indices = [{result}], operand_index = {operand}" in text
    (kernel,), (launch,) = launches.kernels, launches.calls
    parameters = launch[4]
    # Torch's arguments in torch's order: seven arrays, the number of slots, both pools again.
    assert [kind for kind, _ in parameters] == ["array"] * 7 + ["i32"] + ["array"] * 2
    assert parameters[7] == ("i32", ROWS)
    ptx = kernel[4]
    assert ptx.count("ld.global.v4") >= 2
    if spec.storage_dtype != "uint8":
        assert ptx.count("st.global.v4") == 2
        assert "div.full" not in ptx
    assert ".ftz" not in ptx


def test_nothing_to_write_is_no_launch(launches: Launches) -> None:
    spec = CacheSpec(1, 2, 16, 8, 128, dtype="bfloat16", device="cuda")
    rows, pool = jnp.zeros((3, 8, 128), jnp.bfloat16), jnp.zeros(spec.key_shape, jnp.bfloat16)
    k, v = append_arrays(rows, rows, pool, pool, jnp.zeros(0, jnp.int32), spec)
    assert k is pool
    assert v is pool
    assert not launches.calls


@pytest.mark.parametrize("kept", ["/somewhere", "", None])
def test_torch_keeps_the_place_of_its_kernels(
    kept: str | None, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept is None:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", kept)
    jax_ops._triton_call()
    assert os.environ.get("TRITON_CACHE_DIR") == (kept or None)


def test_without_jax_triton_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    jax_ops._triton_call.cache_clear()
    spec = CacheSpec(1, 2, 16, 8, 128, dtype="bfloat16", device="cuda")
    rows, pool = jnp.zeros((1, 8, 128), jnp.bfloat16), jnp.zeros(spec.key_shape, jnp.bfloat16)
    with pytest.raises(VersionError, match=r"isthmus-attention\[cuda\]"):
        append_arrays(rows, rows, pool, pool, jnp.zeros(1, jnp.int32), spec)
