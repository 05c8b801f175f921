"""Views of torch tensors as JAX arrays and back: the pointer is kept, or an error says why not.

The frameworks' own imports copy silently in some cases (a misaligned CPU tensor, a 64-bit element
type while JAX runs in 32 bits); these functions turn each of them into a `ZeroCopyError`.
"""

from __future__ import annotations

import jax
import torch
from torch import Tensor

from .errors import FrameworkError, ZeroCopyError
from .spec import dtype_name

__all__ = ["to_jax", "to_torch"]

# XLA's CPU runtime assumes this alignment and copies what does not have it.
CPU_ALIGNMENT = 64
# Without jax_enable_x64, JAX narrows these on import.
WIDE = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


def to_jax(tensor: Tensor) -> jax.Array:
    """View a torch tensor as a JAX array that shares its memory.

    The array is only as constant as the tensor: JAX assumes that nobody writes to it while a
    computation reads it.

    Parameters
    ----------
    tensor
        Contiguous; on the CPU aligned to 64 bytes, as every tensor is that torch allocates whole.

    Raises
    ------
    FrameworkError
        If `tensor` is no torch tensor.
    ZeroCopyError
        If its memory cannot be shared as it is.
    """
    if not isinstance(tensor, Tensor):
        raise FrameworkError("tensor", given=type(tensor).__name__, wanted="a torch.Tensor")
    name = dtype_name(tensor.dtype)
    if name in WIDE and not jax.config.read("jax_enable_x64"):
        raise ZeroCopyError(
            "tensor",
            given=f"dtype {name}, which JAX would narrow into a copy",
            wanted=f"dtype {WIDE[name]}",
            remedy=f"Convert with .to(torch.{WIDE[name]}), or set jax_enable_x64.",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ZeroCopyError(
            "tensor",
            given=f"a tensor on {tensor.device}",
            wanted="a tensor on a CPU or CUDA device",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ZeroCopyError(
            "tensor",
            given="a lazy view (conj or neg) whose values are not in memory yet",
            wanted="a tensor with its values in memory",
            remedy="Call .resolve_conj().resolve_neg() where a copy is acceptable.",
        )
    if not tensor.is_contiguous():
        raise ZeroCopyError(
            "tensor",
            given=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            wanted="a contiguous tensor",
            remedy="Call .contiguous() where a copy is acceptable.",
        )
    if tensor.device.type == "cpu" and tensor.data_ptr() % CPU_ALIGNMENT:
        raise ZeroCopyError(
            "tensor",
            given=f"an address {tensor.data_ptr() % CPU_ALIGNMENT} bytes past a multiple of "
            f"{CPU_ALIGNMENT}",
            wanted=f"CPU memory aligned to {CPU_ALIGNMENT} bytes",
            remedy="Allocate it whole with torch.empty rather than slicing a larger tensor.",
        )
    array: jax.Array = jax.dlpack.from_dlpack(tensor.detach())
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ZeroCopyError("tensor", given="a tensor that JAX copied", wanted="shared memory")
    return array


def to_torch(array: jax.Array) -> Tensor:
    """View a JAX array as a torch tensor that shares its memory.

    Do not write to the tensor, and do not keep it: while it lives, the array cannot be donated.

    Parameters
    ----------
    array
        A concrete array on one device, in row-major layout.

    Raises
    ------
    FrameworkError
        If `array` is no JAX array.
    ZeroCopyError
        If it is traced, spread over devices, or cannot be shared as it is.
    """
    if not isinstance(array, jax.Array):
        raise FrameworkError("array", given=type(array).__name__, wanted="a jax.Array")
    if isinstance(array, jax.core.Tracer):
        raise ZeroCopyError(
            "array",
            given="a traced array, which has no memory yet",
            wanted="a concrete array",
            remedy="Inside jax.jit, call jax_frontend with the traced array instead.",
        )
    if array.is_deleted():
        raise ZeroCopyError(
            "array",
            given="an array that was deleted or donated",
            wanted="an array that has its memory",
            remedy="Use the result of the call that it was donated to.",
        )
    if len(array.devices()) != 1:
        raise ZeroCopyError(
            "array",
            given=f"an array over {len(array.devices())} devices",
            wanted="an array on one device",
            remedy="Pass one of array.addressable_shards, as shard.data.",
        )
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    if tensor.numel() and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise ZeroCopyError("array", given="an array that torch copied", wanted="shared memory")
    return tensor
