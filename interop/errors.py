"""The errors that both front ends raise.

Every message names the argument, says what was given and what is wanted, and ends with a remedy
where there is one. A call that raises has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CacheNotFoundError",
    "CollectiveError",
    "DTypeError",
    "DeviceError",
    "FrameworkError",
    "IsthmusError",
    "LengthError",
    "OutOfDeviceMemoryError",
    "OutOfPagesError",
    "PageError",
    "PlanError",
    "ShapeError",
    "SlotError",
    "TransformError",
    "UnsupportedError",
    "VersionError",
    "ZeroCopyError",
]


class IsthmusError(Exception):
    """Base of every error that this library raises on purpose."""


class ArgumentError(IsthmusError, ValueError):
    """An argument that cannot be used.

    Parameters
    ----------
    argument
        Name of the argument as the caller knows it, e.g. ``"query"`` or ``"page_table[3, 1]"``.
    given
        What was found, in words or as a value.
    wanted
        What would have been accepted.
    remedy
        What to do about it; left out where ``wanted`` says it all.
    """

    def __init__(self, argument: str, *, given: object, wanted: object, remedy: str = "") -> None:
        self.argument = argument
        self.given = given
        self.wanted = wanted
        self.remedy = remedy
        text = f"{argument}: got {given}, want {wanted}."
        super().__init__(f"{text} {remedy}" if remedy else text)


class ShapeError(ArgumentError):
    """An array has another shape, rank or memory layout than the call needs."""


class DTypeError(ArgumentError):
    """An array has another element type than the call needs."""


class DeviceError(ArgumentError):
    """An array, cache or plan lies on another device than the rest of the call."""


class FrameworkError(ArgumentError, TypeError):
    """A JAX array where a torch tensor is due, or the other way round."""


class LengthError(ArgumentError):
    """Lengths that are negative, do not fit together, or exceed what was promised."""


class PageError(ArgumentError):
    """A page id outside the pool, or a page table too narrow for its lengths."""


class SlotError(ArgumentError):
    """Two tokens of one step would be written to the same slot of the cache."""


class PlanError(ArgumentError):
    """A plan that does not fit the call, or a batch that does not fit the plan's bucket."""


class ZeroCopyError(ArgumentError):
    """Memory cannot be shared as it is; nothing was copied instead."""


class VersionError(IsthmusError, RuntimeError):
    """An installed library is outside the range that this code was checked against."""


class UnsupportedError(IsthmusError, NotImplementedError):
    """No kernel can serve the request; the message lists each kernel's reason."""


class TransformError(IsthmusError, NotImplementedError):
    """A transformation (``vmap``, a gradient) that attention over pages does not have."""


class OutOfPagesError(IsthmusError, RuntimeError):
    """The pool has fewer free pages than a request needs; nothing was allocated.

    Attributes
    ----------
    missing
        How many more pages would have been enough.
    """

    def __init__(self, message: str, *, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class OutOfDeviceMemoryError(IsthmusError, RuntimeError):
    """A page pool does not fit the memory that is free on its GPU; nothing was allocated.

    Attributes
    ----------
    missing_bytes
        How much more free memory would have been enough.
    """

    def __init__(self, message: str, *, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class CacheNotFoundError(IsthmusError, LookupError):
    """A compiled program names a cache that this process does not hold."""


class CollectiveError(IsthmusError, RuntimeError):
    """A collective of several ranks failed, most often because one of them is gone.

    The process group is of no more use: make a new one, or end the process.
    """
