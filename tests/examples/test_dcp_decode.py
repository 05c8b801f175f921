"""The model over four ranks chooses the tokens that it chooses on one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_four_ranks_choose_the_same_tokens() -> None:
    command = [sys.executable, "-m", "examples.dcp_decode", "--max-new-tokens", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for way in ("PyTorch, 1 device", "JAX, 4 devices", "PyTorch, 4 processes"):
        assert [line.endswith(" 6  as on one device") for line in lines if way in line] == [True]
