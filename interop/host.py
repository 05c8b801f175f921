"""What callers give of lengths and counts, as int32 on the host, or an error that says why not.

And the arithmetic of sizes that all parts share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import FrameworkError, LengthError, ShapeError

__all__ = [
    "INT32",
    "INT32_MAX",
    "ONE",
    "IntArray",
    "count_of",
    "host_array",
    "host_ints",
    "indptr",
    "power_of_two",
    "round_up",
]

IntArray = npt.NDArray[np.int32]
INT32_MAX = 2**31 - 1

# Plans are made in every step from a few hundred lengths, so what counts is the overhead of each
# NumPy call. ``x[x.argmax()]`` has a third of that of ``x.max()`` (the same for ``min`` and
# ``any``), ``accumulate`` half of that of ``cumsum``, and an operand that is an array of rank 0
# half of that of a Python number.
INT32 = np.dtype(np.int32)
ONE: IntArray = np.array(1, np.int32)


def host_ints(argument: str, value: object, rank: int) -> IntArray:
    """Return `value` as a contiguous int32 array of `rank` dimensions, or say why it is none.

    Takes NumPy arrays, lists, CPU torch tensors and anything else that NumPy reads from the host.
    """
    array = host_array(argument, value)
    if array.ndim != rank:
        raise ShapeError(
            argument, given=f"shape {array.shape}", wanted=f"an array of {rank} dimension(s)"
        )
    if array.dtype == INT32:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.zeros(array.shape, np.int32)
    if array.dtype.kind not in "iu":
        raise ShapeError(argument, given=f"dtype {array.dtype}", wanted="integers")
    low, high = int(array.min()), int(array.max())
    if low < -INT32_MAX or high > INT32_MAX:
        raise LengthError(argument, given=f"values {low} to {high}", wanted="values that fit int32")
    return np.ascontiguousarray(array, dtype=np.int32)


def host_array(argument: str, value: object) -> npt.NDArray[Any]:
    """Return `value` as an array of the host, the same memory where it can be, or say why not."""
    if type(value) is np.ndarray:
        return value
    if getattr(value, "is_cuda", False):
        raise ShapeError(
            argument,
            given="a tensor on a GPU",
            wanted="host memory, since plans are made on the host",
            remedy=f"Keep {argument} on the host, or call .cpu() where a wait is acceptable.",
        )
    # By name, since this module may not import JAX to ask.
    if any(kind.__name__ == "Tracer" for kind in type(value).__mro__):
        raise FrameworkError(
            argument,
            given="a traced array",
            wanted="values on the host",
            remedy="Make batches and plans outside of jax.jit and pass the plan in.",
        )
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ShapeError(
            argument, given=f"rows of different lengths ({error})", wanted="a rectangular array"
        ) from error
    except (TypeError, RuntimeError) as error:
        # So says a tensor that is sparse, has a gradient or is of a type that NumPy lacks.
        raise ShapeError(
            argument,
            given=f"a {type(value).__name__} that NumPy cannot read ({error})",
            wanted="an array in host memory",
        ) from error


def indptr(lengths: IntArray) -> IntArray:
    """Offsets ``[n + 1]`` of runs with the given lengths ``[n]``: 0, then the running sum."""
    out = np.empty(lengths.shape[0] + 1, np.int32)
    out[0] = 0
    np.add.accumulate(lengths, out=out[1:])
    return out


def count_of(argument: str, value: object) -> int:
    """Return a non-negative integer, or say why `value` is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 0:
        raise LengthError(argument, given=repr(value), wanted="0 or a positive integer")
    return int(value.__index__())


def round_up(size: int, step: int) -> int:
    """Return the least multiple of `step` that is not below `size`."""
    return -(-size // step) * step


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`; 1 for 0."""
    return 1 << (max(size, 1) - 1).bit_length()
