"""The Triton kernels that plan, against NumPy, under Triton's interpreter on the CPU.

TRITON_INTERPRET has to be set before Triton is imported, so this file, run as a program, checks all
cases in a process of its own and prints what came of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from device_plans import CASES, Case, random_lengths, spoiled, written

from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import metadata_of

ROOT = Path(__file__).parents[2]
GPU_CASES = {case.name: case for case in CASES if case.device.kind == "cuda"}
SEEDS = 4


def check(case: Case) -> None:
    from torch_backend.triton_planning import scratch_words, write_metadata

    static, shape = case.static
    for seed in range(SEEDS):
        lengths = random_lengths(case, seed)
        for given in (lengths, spoiled(case, lengths, seed)):
            wanted, verdict = metadata_of(NumPyArithmetic(), shape, *given.arrays)
            arrays = [torch.from_numpy(array.copy()) for array in given.arrays]
            # What a plan that is overwritten had; every word of a field has to be written.
            metadata = torch.full((static.layout.words,), -77, dtype=torch.int32)
            status = torch.full_like(arrays[0], -77)
            scratch = torch.full((scratch_words(shape),), -77, dtype=torch.int32)
            write_metadata(shape, *arrays, metadata, status, scratch)
            np.testing.assert_array_equal(status.numpy(), verdict)
            mask = written(case)
            found = np.where(mask, metadata.numpy(), 0)
            np.testing.assert_array_equal(found, wanted)
            # What lies between the fields is nobody's.
            assert not wanted[~mask].any()


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", GPU_CASES)
def test_metadata_are_those_of_numpy(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def main() -> None:
    """Check all cases, and print the text of each one's failure."""
    found = {}
    for name, case in GPU_CASES.items():
        try:
            check(case)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
