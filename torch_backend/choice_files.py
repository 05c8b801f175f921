"""Files of measured kernel choices, and the one that dispatch goes by.

A file belongs to one card and to the versions it was measured with. Of any other it is ignored, and
every `Choice` says why.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from interop.batch import Bucket
from interop.errors import ArgumentError
from interop.host import power_of_two

from .kernels import FAMILIES, Device, Work

__all__ = [
    "TWO_LAUNCHES",
    "ChoiceFile",
    "Measurement",
    "active_file",
    "bucket_class",
    "card_of",
    "note_on",
    "recorded",
    "set_active",
    "work_class",
]

FORMAT = "isthmus measured kernels 1"
PACKAGES = ("isthmus-attention", "torch", "flashinfer-python")

TWO_LAUNCHES = "two launches"
"""In place of a family: decodes and prefills of a mixed batch apart, as the static table has it."""


@dataclass(frozen=True)
class Measurement:
    """What was measured for one class of work.

    Parameters
    ----------
    work
        The class, as JSON text.
    family
        The fastest family, or `TWO_LAUNCHES`.
    microseconds
        ``(family, median time of a layer)`` of each that was measured, fastest first.
    """

    work: str
    family: str
    microseconds: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """The times in one line."""
        return ", ".join(f"{name} {time:.1f} us" for name, time in self.microseconds)


def bucket_class(bucket: Bucket) -> Bucket:
    """Return the bucket of all that share a choice: each size rounded up to a power of two."""
    return Bucket(
        power_of_two(bucket.num_requests),
        power_of_two(bucket.num_tokens),
        power_of_two(bucket.num_pages),
        power_of_two(bucket.max_query_len),
        bucket.without_context,
        bucket.draft_masks,
    )


def work_class(work: Work) -> str:
    """Write what a choice may depend on as JSON: how large the pool is does not matter."""
    cache = work.cache
    return json.dumps(
        {
            "spec": asdict(work.spec),
            "cache": cache
            and {
                name: getattr(cache, name)
                for name in ("page_size", "dtype", "layout", "scales_per_head")
            },
            "query_dtype": work.query_dtype,
            "bucket": asdict(bucket_class(work.bucket)),
            "source": work.source,
            "role": work.role,
            "lse": work.lse,
        },
        sort_keys=True,
    )


def card_of(device: torch.device) -> dict[str, Any]:
    """What a device is known by in files."""
    if device.type != "cuda":
        return {"name": device.type, "kind": device.type, "capability": [0, 0], "num_sms": 0}
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "kind": "cuda",
        "capability": [facts.major, facts.minor],
        "num_sms": facts.multi_processor_count,
    }


def _cards() -> list[dict[str, Any]]:
    """All devices of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]
    return [card_of(device) for device in devices]


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True)
class ChoiceFile:
    """What stands in a file.

    Parameters
    ----------
    path
        Where it is.
    card, versions
        What it was measured on and with.
    choices
        Measurements by class of work.
    """

    path: str
    card: dict[str, Any]
    versions: dict[str, str]
    choices: dict[str, Measurement]

    @classmethod
    def new(cls, path: str, card: dict[str, Any]) -> ChoiceFile:
        """An empty one for a card and the versions that are installed."""
        return cls(path, card, _versions(), {})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ChoiceFile:
        """Read a file.

        Raises
        ------
        ArgumentError
            If there is none, or if it is not as `write` leaves it.
        """
        name = os.fspath(path)
        try:
            return cls._parsed(name, json.loads(Path(name).read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                "path",
                given=f"{name}, which cannot be read ({type(error).__name__}: {error})",
                wanted="a file that measure_kernels wrote",
                remedy="Delete it and measure again.",
            ) from error

    @classmethod
    def _parsed(cls, path: str, raw: Any) -> ChoiceFile:
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}, not {FORMAT!r}")
        card, versions = raw["card"], raw["versions"]
        if set(card) != {"name", "kind", "capability", "num_sms"}:
            raise ValueError(f"a card with {', '.join(sorted(card))}")
        choices = {}
        for item in raw["choices"]:
            times = tuple((str(name), float(time)) for name, time in item["microseconds"].items())
            family, work = item["family"], json.dumps(item["work"], sort_keys=True)
            if family not in (*FAMILIES, TWO_LAUNCHES):
                raise ValueError(f"unknown family {family!r}")
            if family not in dict(times):
                raise ValueError(f"no time for {family!r}, which is chosen")
            choices[work] = Measurement(work, family, times)
        return cls(path, dict(card), {str(k): str(v) for k, v in versions.items()}, choices)

    def with_measured(self, measurement: Measurement) -> ChoiceFile:
        """Return a copy with one measurement more, or a newer one."""
        return replace(self, choices=self.choices | {measurement.work: measurement})

    def write(self) -> None:
        """Replace the file in one step, so that no reader sees half of it."""
        raw = {
            "format": FORMAT,
            "card": self.card,
            "versions": self.versions,
            "choices": [
                {
                    "work": json.loads(one.work),
                    "family": one.family,
                    "microseconds": dict(one.microseconds),
                }
                for one in self.choices.values()
            ],
        }
        part = Path(f"{self.path}.{os.getpid()}.part")
        part.write_text(json.dumps(raw, indent=1) + "\n")
        part.replace(self.path)

    def why_foreign(self) -> str | None:
        """Why the file does not speak of this machine and these versions; `None` if it does."""
        if self.card not in (cards := _cards()):
            names = ", ".join(card["name"] for card in cards)
            return f"measured on {self.card['name']}, and here are {names}"
        for package, found in _versions().items():
            if (then := self.versions.get(package, "not installed")) != found:
                return f"measured with {package} {then}, and here is {found}"
        return None

    def is_of(self, device: Device) -> bool:
        """Whether the file was measured on a device with these facts."""
        card = self.card
        facts = Device(
            card["kind"], (card["capability"][0], card["capability"][1]), card["num_sms"]
        )
        return facts == device


@dataclass(frozen=True)
class Active:
    """The file that dispatch goes by, and why it does not where it does not."""

    file: ChoiceFile
    ignored: str | None


_active: Active | None = None


def active_file() -> Active | None:
    """Return the file in use, if any."""
    return _active


def set_active(active: Active | None) -> None:
    """Use a file from here on. Whoever calls this clears dispatch's caches."""
    global _active
    _active = active


def recorded(work: Work) -> Measurement | None:
    """What was measured for work like this, on the device that it is for."""
    if _active is None or _active.ignored or work.invariant:
        return None
    if not _active.file.is_of(work.device):
        return None
    return _active.file.choices.get(work_class(work))


def note_on(work: Work) -> str:
    """What to tell people of the file in use and this work; nothing where there is no file."""
    if _active is None:
        return ""
    path = _active.file.path
    if _active.ignored:
        return f"{path} is ignored: {_active.ignored}"
    if work.invariant:
        return f"{path} does not count for batch-invariant plans"
    if not _active.file.is_of(work.device):
        return f"{path} is ignored: measured on {_active.file.card['name']}, another device"
    found = recorded(work)
    if found is None:
        return f"not measured in {path}"
    return f"measured in {path}: {found}"
