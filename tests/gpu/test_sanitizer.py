"""No kernel reads or writes outside of its memory, as NVIDIA's compute-sanitizer sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from families import VARIANTS, need

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("sanitized.py")


def _sanitizer() -> str | None:
    folders = [
        Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home
    ]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which("compute-sanitizer", path=path)


def test_memcheck_finds_nothing() -> None:
    need(VARIANTS[0])
    sanitizer = _sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin")
    search = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        # Each tensor in memory of its own, or accesses past its end would hit another's.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1"]
    # PyTorch asks the driver for much that may be missing, and looks at the answer.
    command += ["--report-api-errors", "no", "--target-processes", "application-only"]
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    report = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, report
    assert "ERROR SUMMARY: 0 errors" in report
    assert "decode by fa2 is done" in done.stdout
