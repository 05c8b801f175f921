"""The documents' code runs, and says what the documents say it says.

Each page runs in a fresh process on the CPU. A ``python`` block is run unless it is marked
``no-run``; blocks of a page share their names, those of the README run apart, since readers copy
them apart. A ``text`` block right after a block that runs is what that block prints, and the error
that it ends with; blanks count as one, and ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = "README.md"
PAGES = [README, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block that runs."""

    line: int
    code: str
    said: str | None


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    fenced = list(FENCED.finditer(text))
    for match, after in zip(fenced, [*fenced[1:], None], strict=True):
        language, mark, code = match.groups()
        assert language, f"{page}: a block without a language"
        assert mark in ("", " no-run"), f"{page}: {mark!r}"
        if language != "python" or mark:
            continue
        adjoins = after is not None and not text[match.end() : after.start()].strip()
        said = after.group(3) if after and adjoins and after.group(1) == "text" else None
        yield Block(text.count("\n", 0, match.start(3)), code, said)


def folded(text: str) -> str:
    return " ".join(text.split())


def run_block(page: str, block: Block, names: dict[str, Any]) -> None:
    # So many lines before it that a traceback names the line of the page.
    code = compile("\n" * block.line + block.code, page, "exec")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    except Exception as error:
        if block.said is None:
            raise
        printed.write(f"{type(error).__name__}: {error}")
    if block.said is not None:
        pattern = re.escape(folded(block.said)).replace(re.escape("..."), ".*")
        said = folded(printed.getvalue())
        assert re.fullmatch(pattern, said), f"{page}, line {block.line + 1} says: {said}"


def run_page(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        run_block(page, block, {"__name__": "__main__"} if page == README else names)


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks_of(page))])
def test_code_of_a_page(page: str) -> None:
    quiet = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-W", "error", __file__, page],
        cwd=ROOT,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_a_block_that_says_something_else_is_found() -> None:
    names: dict[str, Any] = {}
    run_block("page", Block(0, "print(1, 2)", "1\n ...\n"), names)
    run_block("page", Block(0, "1 / 0", "ZeroDivisionError: ..."), names)
    with pytest.raises(AssertionError, match="page, line 4 says: 3"):
        run_block("page", Block(3, "print(3)", "4"), names)
    with pytest.raises(AssertionError, match=r"says: \n"):
        run_block("page", Block(0, "pass", "ZeroDivisionError: ..."), names)
    with pytest.raises(ZeroDivisionError):
        run_block("page", Block(0, "1 / 0", None), names)


def test_every_error_has_its_section() -> None:
    import jax_frontend  # noqa: F401  with torch_backend; errors are defined there, too
    from interop.errors import IsthmusError

    def kinds(error: type) -> set[str]:
        return {error.__name__}.union(*map(kinds, error.__subclasses__()))

    page = (ROOT / "docs" / "errors.md").read_text()
    assert set(re.findall(r"^## `(\w+)`", page, re.MULTILINE)) == kinds(IsthmusError)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


if __name__ == "__main__":
    run_page(sys.argv[1])
