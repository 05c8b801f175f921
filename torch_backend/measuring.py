"""Which kernel is best is measured: time the families that can serve a bucket, and go by that.

Off unless asked for: `measure_kernels` writes a file, `use_measured_choices` reads it, and the
static order of `kernels.FAMILIES` serves whatever was not measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from interop.batch import Bucket, RaggedBatch
from interop.errors import ArgumentError, UnsupportedError
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec, CacheSpec

from .choice_files import (
    TWO_LAUNCHES,
    Active,
    ChoiceFile,
    Measurement,
    active_file,
    card_of,
    set_active,
    work_class,
)
from .dispatch import refusal, serve
from .kernels import CASCADE, FAMILIES, Work
from .measured_steps import Step, median_time
from .planning import device_for, plan

__all__ = ["MeasuredChoices", "measure_kernels", "use_measured_choices"]


def measure_kernels(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    bucket: Bucket,
    *,
    path: str | os.PathLike[str] | None = None,
    batch: RaggedBatch | None = None,
    device: torch.device | str | None = None,
    kernels: Sequence[str] | None = None,
    return_lse: bool = True,
    repeats: int = 20,
) -> Measurement:
    """Time one layer's attention by every family that can serve a bucket.

    Modules that are not compiled yet are compiled, which takes minutes. A cache of the bucket's
    pages is allocated for the time of the call.

    Parameters
    ----------
    spec, cache_spec, device, return_lse
        As for `plan`. Of `cache_spec` the numbers of layers and pages do not matter.
    bucket
        Its sizes, rounded up to powers of two, are what the choice is for. One that promises
        requests without context is measured with `paged_attention`, others with `attend`.
    path
        File to write the choice to. One that is there keeps its other choices; it must be of this
        card and these versions.
    batch
        Lengths to measure with; tokens and pages of the bucket dealt out evenly when left out. Its
        page table is not looked at.
    kernels
        Names of the families to time; when left out all that can serve, the reference on a GPU only
        where there is no other.
    repeats
        Timings of each, whose median counts.

    Returns
    -------
    Measurement
        The fastest and all times.

    Raises
    ------
    ArgumentError
        For a file that is none or belongs to another card or to other versions, and for names of
        families that do not exist.
    PlanError
        For lengths that the bucket does not hold.
    UnsupportedError
        If none of the families can serve.
    """
    where = device_for(device, cache_spec)
    file = None if path is None else _file_for(path, card_of(where))
    repeats = max(int(repeats), 1)
    step = Step.of(spec, cache_spec, bucket, batch, where, return_lse)
    times = {}
    for name in _candidates(step.work, kernels):
        times[name] = median_time(step, _planned(step, name), repeats)
    if kernels is None and len((mixed := _planned(step, None)).static.main) > 1:
        times[TWO_LAUNCHES] = median_time(step, mixed, repeats)
    if not times:
        raise UnsupportedError(
            f"none of the families {', '.join(kernels or FAMILIES)} can serve attention over "
            f"{step.work.source} here; torch_backend.explain has the reasons."
        )
    ordered = sorted(times.items(), key=lambda item: item[1])
    measured = Measurement(work_class(step.work), ordered[0][0], tuple(ordered))
    if file is not None:
        file.with_measured(measured).write()
        _reread(file.path)
    return measured


class MeasuredChoices:
    """Measured choices in use; as a context, until its end.

    Parameters
    ----------
    ignored
        Why the file does not count here; `None` where it does.
    """

    def __init__(self, before: Active | None, ignored: str | None) -> None:
        self._before = before
        self.ignored = ignored

    def __enter__(self) -> MeasuredChoices:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _use(self._before)


def use_measured_choices(path: str | os.PathLike[str] | None) -> MeasuredChoices:
    """Let plans of this process, of both front ends, prefer the kernels that were measured fastest.

    A plan that names its kernel, and one that is batch-invariant, stay as they are. So does a plan
    of a bucket that was not measured. Plans made before keep their kernels; those made from here on
    may have other static parts, and programs are traced for them once more.

    Parameters
    ----------
    path
        File of `measure_kernels`; `None` for no file, as it is from the start. A file of another
        card or of other versions is ignored, and `explain` says so.

    Returns
    -------
    MeasuredChoices
        In a ``with`` statement, what was in use before is in use again at its end.

    Raises
    ------
    ArgumentError
        For a file that is missing or damaged; nothing is changed then.
    """
    before = active_file()
    if path is None:
        _use(None)
        return MeasuredChoices(before, None)
    file = ChoiceFile.read(path)
    ignored = file.why_foreign()
    _use(Active(file, ignored))
    return MeasuredChoices(before, ignored)


def _use(active: Active | None) -> None:
    set_active(active)
    serve.cache_clear()


def _reread(path: str) -> None:
    """Take what was just written into use if the file is in use."""
    active = active_file()
    if active is not None and Path(active.file.path).absolute() == Path(path).absolute():
        use_measured_choices(active.file.path)


@contextmanager
def _going_by(active: Active | None) -> Iterator[None]:
    before = active_file()
    _use(active)
    try:
        yield
    finally:
        _use(before)


def _file_for(path: str | os.PathLike[str], card: dict[str, Any]) -> ChoiceFile:
    name = os.fspath(path)
    if not Path(name).exists():
        return ChoiceFile.new(name, card)
    file, new = ChoiceFile.read(name), ChoiceFile.new(name, card)
    if (file.card, file.versions) != (new.card, new.versions):
        why = file.why_foreign() or f"measured on {file.card['name']}"
        raise ArgumentError(
            "path",
            given=f"{name}, {why}",
            wanted=f"a file of {card['name']} and the versions that are installed",
            remedy="Delete it, or write to another file.",
        )
    return file


def _candidates(work: Work, kernels: Sequence[str] | None) -> list[str]:
    for name in kernels or ():
        if name not in FAMILIES:
            raise ArgumentError(
                "kernels", given=repr(name), wanted=f"names among {', '.join(FAMILIES)}"
            )
    names = FAMILIES if kernels is None else kernels
    asked = replace(work, any_speed=True)
    able = [name for name in names if refusal(FAMILIES[name], asked) is None]
    if kernels is None:
        # What is measured shares no pages.
        able = [name for name in able if name != CASCADE]
    if kernels is None and work.device.kind != "cpu" and len(able) > 1:
        able = [name for name in able if name != "reference"]
    return able


def _planned(step: Step, family: str | None) -> AttentionPlan[Tensor]:
    """Plan as if a family had been measured fastest, or by the static table."""
    work, active = step.work, None
    device = step.rows[0].device
    if family is not None:
        as_if = Measurement(work_class(work), family, ())
        active = Active(ChoiceFile.new("", card_of(device)).with_measured(as_if), None)
    with _going_by(active):
        return plan(
            work.spec,
            None if step.cache is None else step.cache.spec,
            step.batch,
            bucket=work.bucket,
            device=device,
            return_lse=work.lse,
        )
