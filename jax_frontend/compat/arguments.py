"""What callers of other libraries' signatures pass, checked under the names that they know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interop.errors import ArgumentError, DTypeError, FrameworkError, ShapeError
from interop.host import INT32_MAX, host_ints

from ..cache import default_device

__all__ = ["array", "checked", "device_kind", "integers", "number", "window"]


def number(name: str, value: object, *, positive: bool = False, remedy: str = "") -> float:
    """Return a finite number other than 0 that is known when the program is traced."""
    if isinstance(value, Real) and not isinstance(value, bool):
        plain = float(value)
        if math.isfinite(plain) and (plain > 0.0 if positive else plain != 0.0):
            return plain
    raise ArgumentError(
        name,
        given=_described(value),
        wanted=f"a {'positive' if positive else 'finite'} number"
        f"{'' if positive else ' other than 0'}, known when the program is traced",
        remedy=remedy,
    )


def window(value: object) -> int:
    """Return a number of tokens that is known when the program is traced."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        tokens = int(value)
        if 0 < tokens <= INT32_MAX:
            return tokens
    raise ArgumentError(
        "sliding_window",
        given=_described(value),
        wanted="a positive integer known when the program is traced, or None",
        remedy="It counts the tokens that a query sees, itself included.",
    )


def array(name: str, value: Any, *ranks: int) -> jax.Array:
    """Return a JAX array of one of these ranks."""
    if not isinstance(value, jax.Array):
        raise FrameworkError(
            name,
            given=f"{type(value).__module__}.{type(value).__name__}",
            wanted="a jax.Array",
            remedy="jnp.asarray makes one of a NumPy array.",
        )
    if value.ndim not in ranks:
        raise ShapeError(
            name,
            given=f"shape {list(value.shape)}",
            wanted=f"{' or '.join(map(str, ranks))} dimensions",
        )
    return value


def checked(name: str, value: Any, shape: tuple[int, ...], dtypes: Sequence[str]) -> jax.Array:
    """Return a JAX array of this shape and of one of these dtypes."""
    found = array(name, value, len(shape))
    if found.shape != shape:
        raise ShapeError(name, given=list(found.shape), wanted=list(shape))
    if found.dtype.name not in dtypes:
        wanted = " or ".join(dtypes)
        remedy = f"Convert it with {name}.astype; nothing is converted silently."
        raise DTypeError(name, given=found.dtype.name, wanted=wanted, remedy=remedy)
    return found


def integers(name: str, value: Any, *ranks: int) -> jax.Array:
    """Return integers as int32: those of JAX, traced or not, and what NumPy reads on the host.

    Values that int32 cannot hold are refused on the host. Those of JAX become the nearest that it
    can, which is no length and no page of any cache.
    """
    if not isinstance(value, jax.Array):
        rank = np.ndim(value)
        return jnp.asarray(host_ints(name, value, rank if rank in ranks else ranks[0]))
    found = array(name, value, *ranks)
    if found.dtype.kind not in "iu":
        raise DTypeError(name, given=found.dtype.name, wanted="integers, best int32")
    if found.dtype != jnp.int32 and found.dtype.itemsize >= 4:
        found = jnp.clip(found, -INT32_MAX if found.dtype.kind == "i" else 0, INT32_MAX)
    return found.astype(jnp.int32)


def device_kind(given: jax.Array) -> str:
    """Kind of the device that an array lies on; while tracing, of JAX's default device."""
    if isinstance(given, jax.core.Tracer):
        return "cpu" if default_device().platform == "cpu" else "cuda"
    return "cpu" if next(iter(given.devices())).platform == "cpu" else "cuda"


def _described(value: object) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"a traced {value.aval.str_short()}"
    if isinstance(value, jax.Array):
        return f"a jax.Array {value.dtype.name}{list(value.shape)}"
    return repr(value)
