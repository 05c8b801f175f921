"""Ranks that are threads of one process: `torch_backend.dcp` as it is, over rows put in a list.

Starting processes takes seconds; this is for the many small cases of a sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from torch_backend import dcp

Found = TypeVar("Found")


class Threads:
    """A group of ranks. Whatever a rank receives is what the others gave, in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rank = threading.local()
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)
        self._pool = ThreadPoolExecutor(size)

    def run(self, work: Callable[[int], Found]) -> list[Found]:
        """Results of ``work(rank)`` of all ranks, which run at the same time."""

        def guarded(rank: int) -> Found:
            self._rank.number = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()  # or the others would wait
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(self.size)]
        broken = [future.exception() for future in futures]
        # The first cause, and not what it did to those that waited.
        for error in sorted(filter(None, broken), key=_is_consequence):
            raise error
        return [future.result() for future in futures]

    def _exchange(self, rows: Tensor) -> list[Tensor]:
        self._given[self._rank.number] = rows
        self._barrier.wait()
        everyone = list(self._given)
        self._barrier.wait()
        return everyone

    def all_gather(self, rows: Tensor, group: Threads) -> Tensor:
        return torch.stack(self._exchange(rows))

    def reduce_scatter(self, rows: Tensor, group: Threads) -> Tensor:
        terms = [each[self._rank.number] for each in self._exchange(rows)]
        return torch.stack(terms).sum(0)

    def all_to_all(self, rows: Tensor, group: Threads) -> Tensor:
        return torch.stack([each[self._rank.number] for each in self._exchange(rows)])

    def check_group(self, group: Threads) -> tuple[int, int]:
        return self._rank.number, self.size

    def close(self) -> None:
        self._pool.shutdown()


def _is_consequence(error: BaseException | None) -> bool:
    return isinstance(error, threading.BrokenBarrierError)


@contextmanager
def threads(size: int) -> Iterator[Threads]:
    """A group of threads, which `torch_backend.dcp` takes for a process group meanwhile."""
    group = Threads(size)
    names = ("all_gather", "reduce_scatter", "all_to_all", "check_group")
    instead = {name: getattr(group, name) for name in names}
    try:
        with mock.patch.multiple(dcp, **instead, backend_of=lambda group, kind: "gloo"):
            yield group
    finally:
        group.close()
