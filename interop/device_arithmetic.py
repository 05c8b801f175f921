"""What plans on the device need of arrays: the part that NumPy and ``jax.numpy`` spell apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

__all__ = ["Arithmetic", "Array", "NumPyArithmetic", "laid_out"]

Array = Any


class Arithmetic(Protocol):
    """Arithmetic of one kind of array; integers are int32 throughout."""

    @property
    def xp(self) -> Any:
        """The module that has all functions which both kinds of array spell alike."""

    def running_sum(self, x: Array) -> Array:
        """Sum of each element and all before it, ``[n]``."""

    def running_max(self, x: Array) -> Array:
        """Largest of each element and all before it, ``[n]``."""

    def owners(self, ends: Array, count: int) -> Array:
        """How many of the rising `ends` are at or before each position from 0, ``[count]``."""

    def quotient(self, x: Array, y: Array | int) -> Array:
        """``x // y`` of numbers that are 0 or more by numbers that are 1 or more."""

    def take(self, x: Array, index: Array) -> Array:
        """``x[index]`` of a flat array, for indices that it has."""

    def wide(self) -> AbstractContextManager[Any]:
        """Within it floating-point numbers have 64 bits."""

    def float64(self, x: Array) -> Array:
        """`x` as 64-bit floating-point numbers."""


class NumPyArithmetic:
    """`Arithmetic` of NumPy."""

    @property
    def xp(self) -> Any:
        """See `Arithmetic.xp`."""
        return np

    def running_sum(self, x: Array) -> Array:
        """See `Arithmetic.running_sum`."""
        return np.cumsum(x, dtype=np.int32)

    def running_max(self, x: Array) -> Array:
        """See `Arithmetic.running_max`."""
        return np.maximum.accumulate(x)

    def owners(self, ends: Array, count: int) -> Array:
        """See `Arithmetic.owners`."""
        positions = np.arange(count, dtype=np.int32)
        return np.searchsorted(ends, positions, side="right").astype(np.int32)

    def quotient(self, x: Array, y: Array | int) -> Array:
        """See `Arithmetic.quotient`."""
        return x // y

    def take(self, x: Array, index: Array) -> Array:
        """See `Arithmetic.take`."""
        return x[index]

    def wide(self) -> AbstractContextManager[Any]:
        """See `Arithmetic.wide`."""
        return nullcontext()

    def float64(self, x: Array) -> Array:
        """See `Arithmetic.float64`."""
        return np.asarray(x, np.float64)


def laid_out(ops: Arithmetic, parts: Sequence[tuple[int, Array]], size: int) -> Array:
    """One int32 array ``[size]`` of `parts` at their offsets, in rising order; 0 in between."""
    xp, pieces, end = ops.xp, [], 0
    for start, part in parts:
        pieces += [xp.zeros(start - end, np.int32)] * (start > end) + [part]
        end = start + part.shape[0]
    pieces += [xp.zeros(size - end, np.int32)] * (size > end)
    return xp.concatenate(pieces)
