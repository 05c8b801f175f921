"""What a run writes down: results and errors, with the machine and the versions they belong to."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .timing import Timing

__all__ = ["Run", "machine", "versions"]

SCHEMA = 1
PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "apache-tvm-ffi",
    "jax-tvm-ffi",
    "jax-triton",
    "flashinfer-python",
    "flash-attn3-jax",
    "ejkernel",
)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip() or None


def machine() -> dict[str, Any]:
    """Kind of machine (for file names), processor, cores, and the card where there is one."""
    import torch

    facts: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "card": None}
    facts["torch_threads"] = torch.get_num_threads()
    # Above the number of cores it says that CPU figures are those of a busy machine.
    facts["load_average"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        facts |= {
            "card": card.name,
            "capability": [card.major, card.minor],
            "multiprocessors": card.multi_processor_count,
            "card_memory_bytes": card.total_memory,
            "driver": _driver(),
        }
    name = facts["card"] or f"cpu {platform.machine()}"
    facts["kind"] = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return facts


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA and of every package that a figure may depend on."""
    import torch

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@dataclass
class Run:
    """One run of the benchmarks: how thorough it is, and what it found.

    Parameters
    ----------
    quick
        Fewer repeats and shapes.
    """

    quick: bool = False
    benchmark: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    wall_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Repeats of a measurement."""
        return 3 if self.quick else 5

    @property
    def seconds(self) -> float:
        """About how long one repeat lasts."""
        # Long enough for the wait at its end not to count: that takes about half a millisecond.
        return 0.05 if self.quick else 0.12

    def add(self, case: str, shape: dict[str, Any], value: Timing, unit: str, **more: Any) -> None:
        """Write down one result; `more` are figures derived from it and notes."""
        self.results.append(
            {
                "benchmark": self.benchmark,
                "case": case,
                "shape": shape,
                "unit": unit,
                "median": value.median,
                "min": value.low,
                "max": value.high,
                "repeats": value.repeats,
                "steps": value.steps,
                **more,
            }
        )

    @contextmanager
    def attempt(self, case: str, shape: dict[str, Any] | None = None) -> Iterator[None]:
        """Go on after an exception, with its text in the errors."""
        try:
            yield
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.errors.append(
                {
                    "benchmark": self.benchmark,
                    "case": case,
                    "shape": shape or {},
                    "error": text[:2000],
                    "at": f"{Path(where.filename).name}:{where.lineno}",
                }
            )

    @contextmanager
    def timed(self, benchmark: str) -> Iterator[None]:
        """Run one benchmark: its name goes with its results, an exception only ends it."""
        self.benchmark = benchmark
        start = time.perf_counter()
        with self.attempt("whole benchmark"):
            yield
        self.wall_seconds[benchmark] = time.perf_counter() - start

    def document(self, date: str) -> dict[str, Any]:
        """Everything, as it goes into the JSON file."""
        return {
            "schema": SCHEMA,
            "date": date,
            "quick": self.quick,
            "machine": machine(),
            "versions": versions(),
            "wall_seconds": self.wall_seconds,
            "results": self.results,
            "errors": self.errors,
        }

    def write(self, path: Path, date: str) -> dict[str, Any]:
        """Write the document to `path` and return it."""
        document = self.document(date)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        return document
