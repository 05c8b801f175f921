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
from typing import Any

import numpy as np
import pytest
import torch
from device_plans import CASES, EDGES, Case, hostile, random_lengths, spoiled, written

from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import metadata_of

ROOT = Path(__file__).parents[2]
GPU_CASES = {case.name: case for case in CASES + EDGES if case.device.kind == "cuda"}
SEEDS = 4


def check(case: Case) -> None:
    from torch_backend.triton_planning import scratch_words, write_metadata

    static, shape = case.static
    for seed in range(SEEDS):
        batches = [hostile(case, seed)]
        if case not in EDGES:
            right = random_lengths(case, seed)
            batches += [right, spoiled(case, right, seed)]
        for given in batches:
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


def test_estimates_are_rounded_as_numpy_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the interpreter cannot tell: no product of the GPU's code is added unrounded."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torch_backend import triton_planning

    launched: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Any:
            return lambda *given, **named: launched.update({self.name: (given, named)})

    cut = triton_planning.cut
    for name in ("_judge", "_count", "cut", "_fill"):
        monkeypatch.setattr(triton_planning, name, Recorder(name))
    case = GPU_CASES["decode-split"]
    static, shape = case.static
    arrays = [torch.from_numpy(array) for array in random_lengths(case, 0).arrays]
    metadata = torch.zeros(static.layout.words, dtype=torch.int32)
    scratch = torch.zeros(triton_planning.scratch_words(shape), dtype=torch.int32)
    triton_planning.write_metadata(shape, *arrays, metadata, arrays[0].clone(), scratch)

    given, named = launched["cut"]
    constants = {name: named.pop(name) for name in list(named) if name in cut.arg_names}
    kinds = {torch.int32: "*i32", torch.float64: "*fp64"}
    signature = dict.fromkeys(constants, "constexpr")
    for name, value in zip(cut.arg_names, given, strict=False):
        signature[name] = kinds[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    source = ASTSource(fn=cut, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=named)
    assert "mul.rn.f64" in made.asm["ptx"]
    assert "fma.rn" not in made.asm["ptx"]


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
