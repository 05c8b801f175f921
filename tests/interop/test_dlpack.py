"""Views between the frameworks: the same address, or an error that says how to get there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interop.dlpack import to_jax, to_torch
from interop.errors import FrameworkError, ZeroCopyError

DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_keeps_its_memory_as_an_array(dtype: str) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    array = to_jax(tensor)
    assert array.shape == (2, 3, 4)
    assert array.dtype.name == dtype
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_keeps_its_memory_as_a_tensor(dtype: str) -> None:
    array = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    tensor = to_torch(array)
    assert tuple(tensor.shape) == (2, 3, 4)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert to_jax(tensor).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


def test_what_torch_writes_is_what_jax_reads() -> None:
    tensor = torch.zeros(4, 4)
    array = to_jax(tensor)
    tensor[1, 2] = 7.0
    assert np.asarray(array)[1, 2] == 7.0


def test_a_tensor_that_requires_a_gradient_is_viewed_without_it() -> None:
    tensor = torch.zeros(16, requires_grad=True)
    assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_nothing_has_no_address_to_keep() -> None:
    assert to_jax(torch.zeros(0, 3)).shape == (0, 3)
    assert tuple(to_torch(jnp.zeros((0, 3))).shape) == (0, 3)


def pool_slice() -> torch.Tensor:
    """A slice that starts four bytes into an aligned tensor."""
    return torch.zeros(64)[1:33]


# What is refused, what the message says of it, and the remedy, which the test follows.
REFUSED: dict[str, tuple[torch.Tensor, str, str, Any]] = {
    "misaligned": (
        pool_slice(),
        "an address 4 bytes past a multiple of 64, want CPU memory aligned to 64 bytes",
        "Allocate it whole with torch.empty",
        lambda x: torch.empty(32).copy_(x),
    ),
    "transposed": (
        torch.zeros(4, 8).T,
        r"strides \(1, 8\) for shape \(8, 4\), want a contiguous tensor",
        r"Call \.contiguous\(\)",
        lambda x: x.contiguous(),
    ),
    "every other row": (
        torch.zeros(8, 16)[::2],
        r"strides \(32, 1\) for shape \(4, 16\), want a contiguous tensor",
        r"Call \.contiguous\(\)",
        lambda x: x.contiguous(),
    ),
    "int64": (
        torch.zeros(16, dtype=torch.int64),
        "dtype int64, which JAX would narrow into a copy, want dtype int32",
        r"Convert with \.to\(torch\.int32\), or set jax_enable_x64",
        lambda x: x.to(torch.int32),
    ),
    "float64": (
        torch.zeros(16, dtype=torch.float64),
        "dtype float64, which JAX would narrow into a copy, want dtype float32",
        r"Convert with \.to\(torch\.float32\), or set jax_enable_x64",
        lambda x: x.to(torch.float32),
    ),
    "complex128": (
        torch.zeros(16, dtype=torch.complex128),
        "dtype complex128, which JAX would narrow into a copy, want dtype complex64",
        r"Convert with \.to\(torch\.complex64\), or set jax_enable_x64",
        lambda x: x.to(torch.complex64),
    ),
    "lazily conjugated": (
        torch.zeros(16, dtype=torch.complex64).conj(),
        "conj",
        "resolve_conj",
        lambda x: x.resolve_conj(),
    ),
    "without memory": (
        torch.zeros(16, device="meta"),
        "a tensor on meta, want a tensor on a CPU or CUDA device",
        "",
        lambda x: torch.zeros(16),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_would_be_copied(name: str) -> None:
    tensor, text, remedy, follow = REFUSED[name]
    with pytest.raises(ZeroCopyError, match=text) as error:
        to_jax(tensor)
    assert error.value.argument == "tensor"
    error.match(remedy)
    mended = follow(tensor)
    assert to_jax(mended).unsafe_buffer_pointer() == mended.data_ptr()


def test_a_traced_array_has_no_memory() -> None:
    with pytest.raises(ZeroCopyError, match=r"array: got a traced array.*call jax_frontend") as e:
        jax.jit(lambda x: to_torch(x) and x)(jnp.zeros(4))
    assert e.value.argument == "array"


def test_an_array_over_devices_is_several_buffers() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    array = jax.device_put(jnp.arange(32.0), NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(ZeroCopyError, match=r"over 2 devices.*array\.addressable_shards"):
        to_torch(array)
    halves = [to_torch(shard.data) for shard in array.addressable_shards]
    assert torch.equal(torch.cat(halves), torch.arange(32.0))


def test_an_array_that_was_donated_has_no_memory_any_more() -> None:
    array = jnp.zeros(4)
    array.delete()
    with pytest.raises(ZeroCopyError, match="array: got an array that was deleted or donated"):
        to_torch(array)


@pytest.mark.parametrize("other", [np.zeros(4), [0.0], None])
def test_other_things_are_neither(other: Any) -> None:
    given = type(other).__name__
    with pytest.raises(FrameworkError, match=rf"tensor: got {given}, want a torch\.Tensor"):
        to_jax(other)
    with pytest.raises(FrameworkError, match=rf"array: got {given}, want a jax\.Array"):
        to_torch(other)


def test_each_way_refuses_the_other_framework() -> None:
    with pytest.raises(FrameworkError):
        to_jax(jnp.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(FrameworkError):
        to_torch(torch.zeros(4))  # type: ignore[arg-type]
