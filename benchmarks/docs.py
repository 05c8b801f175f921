"""Fills the tables of the documents from result files: ``python -m benchmarks.docs RESULT ...``.

A block begins with ``<!-- performance: NAME -->`` (a benchmark, ``cpu`` or ``targets``) or
``<!-- performance -->`` (the summary) and ends with ``<!-- /performance -->``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import result_rows, target_rows

__all__ = ["fill", "main"]

PAGES = ("README.md", "docs/performance.md")
BLOCK = re.compile(r"<!-- performance(?:: (\w+))? -->\n.*?<!-- /performance -->", re.DOTALL)
CPU_BENCHMARKS = ("cpu_overhead", "cpu_decode", "cpu_planning")

# Rows of the targets that the README shows.
SUMMARY = (
    "32 layers: JAX unrolled",
    "32 layers and writes: JAX unrolled",
    "handler calls in a steady step: JAX unrolled",
    "decode bandwidth",
    "decode from JAX, 32 x 1024",
    "one of 32k",
    "one of 64k",
    "prefill 1 x 16384",
    "append of",
    "bf16 / fp8",
    "that share 16384 tokens",
    "eight drafts in a tree",
    "allocator:",
    "over 4 ranks",
)

Document = dict[str, Any]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _source(path: Path, document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    where = machine.get("card") or f"{machine['processor']}, {machine['cores']} cores"
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{where}; {named}; `{path.as_posix()}`."


def _results(document: Document, benchmarks: Sequence[str]) -> str:
    rows = [row for name in benchmarks for row in result_rows(document, name)]
    return _table(("shape", "case", "median", ""), rows)


def _targets(document: Document, only: Sequence[str] = ()) -> str:
    rows = [
        row for row in target_rows(document) if not only or any(part in row[0] for part in only)
    ]
    return _table(("what", "target", "measured", ""), rows)


def _merged(documents: Sequence[tuple[Path, Document]]) -> Document:
    """One document of all benchmarks, each from the first that has it."""
    merged: Document = {"wall_seconds": {}, "results": []}
    for _, document in documents:
        new = set(document["wall_seconds"]) - set(merged["wall_seconds"])
        merged["wall_seconds"] |= {name: document["wall_seconds"][name] for name in sorted(new)}
        merged["results"] += [it for it in document["results"] if it["benchmark"] in new]
    return merged


def fill(text: str, documents: Sequence[tuple[Path, Document]]) -> str:
    """Return `text` with its blocks filled from the first document that has what each shows."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name in (None, "targets"):
            body = _targets(_merged(documents), SUMMARY if name is None else ())
            sources = documents
        else:
            benchmarks = CPU_BENCHMARKS if name == "cpu" else (name,)
            sources = [it for it in documents if set(benchmarks) & set(it[1]["wall_seconds"])][:1]
            if not sources:
                return match[0]
            body = _results(sources[0][1], benchmarks)
        start = match[0].split("\n", 1)[0]
        named = "\n\n".join(_source(path, document) for path, document in sources)
        return f"{start}\n{body}\n\n{named}\n<!-- /performance -->"

    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the blocks of all pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.docs", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="result files, the first wins")
    chosen = parser.parse_args(arguments)
    documents = [(path, json.loads(path.read_text())) for path in chosen.results]
    for page in map(Path, PAGES):
        page.write_text(fill(page.read_text(), documents))


if __name__ == "__main__":
    main()
