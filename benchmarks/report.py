"""Tables of a run: what was measured, which targets are met, what failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .targets import TARGETS, Figures

__all__ = ["print_report", "results_table", "targets_table"]

Document = dict[str, Any]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def targets_table(document: Document) -> Table | None:
    """Targets of the benchmarks that ran; `None` where they have none."""
    table = Table(title="targets", title_justify="left")
    for name, side in (("what", "left"), ("target", "right"), ("measured", "right"), ("", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    figures = Figures(document)
    for target in TARGETS:
        if target.benchmark not in document["wall_seconds"]:
            continue
        try:
            value = target.measure(figures)
        except LookupError:
            table.add_row(target.what, target.wanted, "-", "not measured")
            continue
        verdict = "[green]met" if target.met(value) else "[red]missed"
        unit = f" {target.unit}" if target.unit else ""
        table.add_row(target.what, target.wanted, _number(value) + unit, verdict)
    return table if table.row_count else None


def results_table(document: Document, benchmark: str) -> Table:
    """All medians of one benchmark, the best setting where a case has several."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for result in document["results"]:
        if result["benchmark"] != benchmark:
            continue
        shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
        known = rows.get((shape, result["case"]))
        if known is None or result["median"] < known["median"]:
            rows[shape, result["case"]] = result
    table = Table(title=benchmark, title_justify="left")
    for name, side in (("shape", "left"), ("case", "left"), ("median", "right"), ("", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    last = None
    for (shape, case), result in rows.items():
        notes = []
        if "tflops" in result:
            notes.append(f"{result['tflops']:.0f} TFLOP/s")
        if "gb_per_s" in result:
            notes.append(f"{result['gb_per_s']:.0f} GB/s")
        if result.get("setting"):
            notes.append(result["setting"])
        table.add_row(
            "" if shape == last else shape,
            case,
            f"{_number(result['median'])} {result['unit']}",
            ", ".join(notes),
        )
        last = shape
    return table


def print_report(document: Document, console: Console) -> None:
    """Print a table for each benchmark, the targets, and what failed."""
    for benchmark in document["wall_seconds"]:
        table = results_table(document, benchmark)
        if table.row_count:
            console.print(table)
    targets = targets_table(document)
    if targets is not None:
        console.print(targets)
    for error in document["errors"]:
        first = error["error"].split("\n")[0][:160]
        console.print(
            f"[red]failed:[/red] {error['benchmark']}, {error['case']} {error['shape']}: ", end=""
        )
        console.print(first, markup=False, highlight=False)
