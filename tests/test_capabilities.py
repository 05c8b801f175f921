"""docs/capabilities.md has each row once, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capabilities.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?[^`]*`")
LAST_ROW = 81
STATES = ("tested on CPU", "on an H200", "never run on hardware", "refused", "not yet")


def rows() -> dict[str, list[str]]:
    """Cells of each line of the page's tables, by the first cell."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    found = {line[0].strip(): line for line in cells if line[0].strip() not in ("row", "---")}
    assert len(found) == sum(line[0].strip() not in ("row", "---") for line in cells), "a row twice"
    return found


def named() -> list[tuple[str, str]]:
    """Files and functions that the page names."""
    return sorted({(file, name) for file, name in NAMED.findall(PAGE.read_text())})


def test_every_row_is_there_and_whole() -> None:
    found = rows()
    assert {str(number) for number in range(1, LAST_ROW + 1)} <= set(found)
    for number, cells in found.items():
        assert len(cells) == 5, f"row {number} has {len(cells)} cells"
        assert any(state in cells[4] for state in STATES), f"row {number}: {cells[4]!r}"
        if "tested on CPU" in cells[4]:
            assert NAMED.search(cells[3]), f"row {number} names no test"


@pytest.mark.parametrize(("file", "name"), named())
def test_each_test_is_there(file: str, name: str) -> None:
    text = (ROOT / file).read_text()
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
