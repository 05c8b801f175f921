"""Tables of a run: what was measured, which targets are met, what failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .targets import TARGETS, Figures

__all__ = ["print_report", "result_rows", "results_table", "target_rows", "targets_table"]

Document = dict[str, Any]

RIGHT = ("target", "measured", "median")


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def target_rows(document: Document) -> list[tuple[str, str, str, str]]:
    """What, bound, value and verdict of each target of the benchmarks that ran."""
    figures = Figures(document)
    rows = []
    for target in TARGETS:
        if target.benchmark not in document["wall_seconds"]:
            continue
        try:
            value = target.measure(figures)
        except LookupError:
            rows.append((target.what, target.wanted, "-", "not measured"))
            continue
        unit = f" {target.unit}" if target.unit else ""
        verdict = "met" if target.met(value) else "missed"
        rows.append((target.what, target.wanted, _number(value) + unit, verdict))
    return rows


def result_rows(document: Document, benchmark: str) -> list[tuple[str, str, str, str]]:
    """Shape, case, median and notes of one benchmark, the best setting of each case."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for result in document["results"]:
        if result["benchmark"] != benchmark:
            continue
        shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
        known = best.get((shape, result["case"]))
        if known is None or result["median"] < known["median"]:
            best[shape, result["case"]] = result
    rows = []
    last = None
    for (shape, case), result in best.items():
        notes = []
        if "tflops" in result:
            notes.append(f"{result['tflops']:.0f} TFLOP/s")
        if "gb_per_s" in result:
            notes.append(f"{result['gb_per_s']:.0f} GB/s")
        if result.get("setting"):
            notes.append(result["setting"])
        median = f"{_number(result['median'])} {result['unit']}"
        rows.append(("" if shape == last else shape, case, median, ", ".join(notes)))
        last = shape
    return rows


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in RIGHT else "left")
    return table


def targets_table(document: Document) -> Table | None:
    """Targets of the benchmarks that ran; `None` where they have none."""
    table = _table("targets", "what", "target", "measured", "")
    colours = {"met": "[green]met", "missed": "[red]missed"}
    for what, wanted, value, verdict in target_rows(document):
        table.add_row(what, wanted, value, colours.get(verdict, verdict))
    return table if table.row_count else None


def results_table(document: Document, benchmark: str) -> Table:
    """All medians of one benchmark, the best setting where a case has several."""
    table = _table(benchmark, "shape", "case", "median", "")
    for row in result_rows(document, benchmark):
        table.add_row(*row)
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
