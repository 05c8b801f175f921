"""How time is taken: wall time over many dispatched steps, with one wait at their end."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Timing", "measure", "measure_calls", "measure_pair", "summary"]

# XLA records the launches of a step over its first runs, one address after another.
WARM_UP_STEPS = 12
MOST_STEPS = 400


@dataclass(frozen=True)
class Timing:
    """Median and range of repeated measurements, in seconds until `scaled`.

    Parameters
    ----------
    median, low, high
        Of the repeats.
    repeats
        How many there were.
    steps
        Steps that one repeat took the mean of.
    """

    median: float
    low: float
    high: float
    repeats: int
    steps: int

    def scaled(self, factor: float) -> Timing:
        """Return the same measurement in another unit."""
        return Timing(
            self.median * factor, self.low * factor, self.high * factor, self.repeats, self.steps
        )


def summary(samples: list[float], steps: int = 1) -> Timing:
    """Median and range of `samples`."""
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples), steps)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> float:
    """Seconds from the dispatch of the first of `steps` steps to the end of the last one."""
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    wait(result)
    return time.perf_counter() - start


def measure(
    step: Callable[[], Any],
    wait: Callable[[Any], Any],
    *,
    repeats: int,
    seconds: float,
) -> Timing:
    """Time of one step while steps are dispatched without waiting for each other.

    Parameters
    ----------
    step
        Dispatches one step.
    wait
        Called with the last step's result; returns when the device has finished.
    repeats
        Repeats, each with its own wait.
    seconds
        About how long one repeat lasts; decides how many steps it has.
    """
    for _ in range(WARM_UP_STEPS):
        wait(step())
    once = _run(step, wait, WARM_UP_STEPS) / WARM_UP_STEPS
    steps = max(1, min(MOST_STEPS, round(seconds / once)))
    with _no_collection():
        samples = [_run(step, wait, steps) / steps for _ in range(repeats)]
    return summary(samples, steps)


def measure_calls(
    call: Callable[[Any], Any],
    *,
    calls: int,
    prepare: Callable[[], Any] = lambda: None,
    wait: Callable[[], Any] = lambda: None,
) -> Timing:
    """Host time of single calls.

    Parameters
    ----------
    call
        Takes what `prepare` made for it.
    calls
        How many are measured.
    prepare, wait
        Run before and after each one, outside of the measurement.
    """
    samples = []
    with _no_collection():
        for _ in range(WARM_UP_STEPS + calls):
            argument = prepare()
            start = time.perf_counter()
            call(argument)
            samples.append(time.perf_counter() - start)
            wait()
    return summary(samples[WARM_UP_STEPS:])


def measure_pair(
    first: Callable[[], Any], second: Callable[[], Any], *, calls: int
) -> tuple[Timing, Timing, Timing]:
    """Two synchronous calls in turn, and the second's time less the first's, pair by pair.

    Taking turns lets both see the same state of the machine, which on a busy one drifts by more
    than the difference that is looked for.
    """
    pairs: list[tuple[float, float]] = []
    for _ in range(WARM_UP_STEPS):
        first()
        second()
    with _no_collection():
        for _ in range(calls):
            start = time.perf_counter()
            first()
            middle = time.perf_counter()
            second()
            pairs.append((middle - start, time.perf_counter() - middle))
    return (
        summary([a for a, _ in pairs]),
        summary([b for _, b in pairs]),
        summary([b - a for a, b in pairs]),
    )
