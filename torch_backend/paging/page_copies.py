"""Copies of pages that the device has yet to make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from interop.host import IntArray

from .prefixes import Ints

__all__ = ["CopyPages", "PendingCopies"]


@dataclass(frozen=True, eq=False)
class CopyPages:
    """Pages whose contents are to be copied in every layer before the next step writes anything.

    Read all sources before writing any target (``index_select``, then ``index_copy``), or copy
    pair by pair in this order: the source of a pair may be the target of a later one. No target
    comes twice. ``len`` counts the pairs.

    Parameters
    ----------
    source, target
        Page ids, ``[n]`` int32 each.
    """

    source: IntArray
    target: IntArray

    def __len__(self) -> int:
        return self.source.size


class PendingCopies:
    """Collects copies until someone takes them, all of them relative to the pools as they are.

    Attributes
    ----------
    total
        Copies collected so far.
    """

    def __init__(self) -> None:
        self._source: dict[int, int] = {}  # by target
        self.total = 0

    def __len__(self) -> int:
        return len(self._source)

    def add(self, source: Ints, target: Ints) -> None:
        """Collect copies from pages ``[n]`` to pages ``[n]``, which have just been handed out."""
        for first, second in zip(source.tolist(), target.tolist(), strict=True):
            # What is to be copied may be a copy that has not been made yet. So no pair reads what
            # one before it writes, and a page that was freed and handed out as the target of
            # another pair may replace the first, wherever that stands.
            self._source[second] = self._source.get(first, first)
        self.total += source.size

    def take(self) -> CopyPages:
        """Return what was collected and begin anew."""
        count = len(self._source)
        copies = CopyPages(
            source=np.fromiter(self._source.values(), np.int32, count),
            target=np.fromiter(self._source, np.int32, count),
        )
        self._source.clear()
        return copies
