"""Compile FlashInfer's modules ahead of the first request: ``python -m torch_backend.prebuild``.

For example, for a model with heads of 128 in bfloat16 that has layers with a sliding window::

    python -m torch_backend.prebuild --head-dim 128 --dtype bfloat16 --sliding-window both

and for one with 4 query heads for each key head that keeps its cache in 8 bits, in pages of 16::

    python -m torch_backend.prebuild --cache-dtype float8_e4m3fn --group-size 4 --page-size 16
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from interop.errors import IsthmusError
from interop.spec import FP8_DTYPES, AttentionSpec

from .kernels import flashinfer_abi as abi
from .kernels import flashinfer_xqa as xqa
from .kernels.flashinfer_fa import HEAD_DIMS
from .kernels.flashinfer_fa3 import FA3_CAPABILITY
from .kernels.flashinfer_refusals import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["build", "main", "modules_for"]

# Compiling a module is some ten jobs of unequal length, so more jobs than cores fill the cores.
JOBS_PER_CORE = 2

CHOICES = {"no": (False,), "yes": (True,), "both": (False, True)}


def modules_for(
    spec: AttentionSpec,
    dtype: str,
    capability: tuple[int, int],
    *,
    cache_dtype: str | None = None,
    page_size: int = 16,
) -> tuple[abi.ModuleKey, ...]:
    """Which compiled modules attention by `spec` uses on a device.

    Parameters
    ----------
    spec
        The arithmetic. Its scale is not compiled in; of the heads only XQA has the number that
        share a key head.
    dtype
        Element type of the query.
    capability
        Compute capability of the device.
    cache_dtype
        Element type of the cache, where that is ``"float8_e4m3fn"`` or ``"float8_e5m2"``; `None`
        for `dtype`.
    page_size
        Tokens in a page, which only XQA has compiled in.
    """
    backends = ("fa2", "fa3") if capability == FA3_CAPABILITY else ("fa2",)
    window, cap = spec.sliding_window is not None, spec.logits_soft_cap is not None
    plain = [abi.ModuleKey(backend, dtype, spec.head_dim, window, cap) for backend in backends]
    if cache_dtype is None:
        return tuple(plain)
    # Besides these, as rows of a call have the query's type, and so have FA3's copies of pages.
    keys = [*plain, replace(plain[0], kv_dtype=cache_dtype)]
    has_xqa = cache_dtype == xqa.KV_DTYPE and capability in xqa.CAPABILITIES
    if has_xqa and xqa.refuse_spec(spec, page_size) is None:
        keys.append(xqa.module_key(spec, dtype, cache_dtype, page_size))
    return tuple(keys)


def build(
    keys: Iterable[abi.ModuleKey],
    report: Callable[[abi.ModuleKey, IsthmusError | None], None] = lambda key, error: None,
) -> dict[abi.ModuleKey, IsthmusError]:
    """Compile modules side by side; those that are compiled already cost nothing.

    Parameters
    ----------
    keys
        The modules.
    report
        Called with each module as it is done, and with the error if it failed.

    Returns
    -------
    dict
        The errors of those that failed.
    """
    # The slowest first, so that it is not alone at the end.
    todo = sorted(set(keys), key=lambda key: -abi.BUILD_SECONDS[key.backend])
    failed: dict[abi.ModuleKey, IsthmusError] = {}
    if not todo:
        return failed
    with _jobs_each(len(todo)), ThreadPoolExecutor(len(todo)) as pool:
        running = {pool.submit(abi.build, key): key for key in todo}
        for done in as_completed(running):
            key, error = running[done], done.exception()
            if isinstance(error, IsthmusError):
                failed[key] = error
            elif error is not None:
                raise error
            report(key, failed.get(key))
    return failed


@contextmanager
def _jobs_each(builds: int) -> Iterator[None]:
    """Share the cores among builds: ninja, which runs each, takes its limit from MAX_JOBS."""
    if "MAX_JOBS" in os.environ:
        yield
        return
    cores = os.cpu_count() or 1
    os.environ["MAX_JOBS"] = str(max(1, JOBS_PER_CORE * cores // builds))
    try:
        yield
    finally:
        del os.environ["MAX_JOBS"]


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a module could not be compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_backend.prebuild",
        description="Compile FlashInfer's attention kernels ahead of the first request.",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128], choices=HEAD_DIMS)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--sliding-window", default="no", choices=CHOICES)
    parser.add_argument("--soft-cap", default="no", choices=CHOICES)
    parser.add_argument(
        "--cache-dtype",
        choices=FP8_DTYPES,
        help="element type of the cache, where it is not that of the query",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=1,
        help="query heads that share a key head, for kernels that have it compiled in",
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page, for the same")
    parser.add_argument(
        "--capability",
        type=_capability,
        metavar="MAJOR.MINOR",
        help="compute capability to choose kernels for; that of the first GPU when left out",
    )
    options = parser.parse_args(arguments)
    if options.capability is not None:
        capability = options.capability
    elif torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    else:
        parser.error("there is no GPU here to choose kernels for; pass --capability, e.g. 9.0")
    keys = [
        key
        for head_dim in options.head_dim
        for dtype in options.dtype
        for window in CHOICES[options.sliding_window]
        for cap in CHOICES[options.soft_cap]
        for key in modules_for(
            AttentionSpec(
                options.group_size,
                1,
                head_dim,
                sliding_window=1 if window else None,
                logits_soft_cap=1.0 if cap else None,
            ),
            dtype,
            capability,
            cache_dtype=options.cache_dtype,
            page_size=options.page_size,
        )
    ]
    return _build_and_show(keys)


def _build_and_show(keys: Sequence[abi.ModuleKey]) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    columns = (
        TextColumn("compiling {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        waiting = [str(key) for key in keys]
        task = progress.add_task("; ".join(waiting), total=len(keys))

        def report(key: abi.ModuleKey, error: IsthmusError | None) -> None:
            waiting.remove(str(key))
            progress.update(task, advance=1, description="; ".join(waiting) or "finished")
            progress.print(f"{key}: {error or 'compiled'}", markup=False)

        failed = build(keys, report)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
