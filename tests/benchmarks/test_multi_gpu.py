"""The script for several GPUs over CPU ranks: all steps, both frameworks, and one that raises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import multi_gpu
from benchmarks.multi_ranks import DRY_CASES, Case, Problem, Way, ways_for

ROOT = Path(__file__).parents[2]


def test_a_dry_run_checks_every_way(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--device", "cpu", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-x2-*.json")
    document = json.loads(path.read_text())
    assert document["errors"] == []
    found = {(r["shape"].get("case"), r["case"]) for r in document["results"]}
    for case in DRY_CASES:
        for way in ways_for(2):
            assert (case.name, f"PyTorch, {way.name}") in found
            assert (case.name, f"JAX, {way.name}") in found
    steps = [result for result in document["results"] if "over_bound" in result]
    assert len(steps) == 12
    for step in steps:
        assert step["local_us"] > 0
        assert step["largest_difference"] < 1e-4
        shared = "dcp" in step["case"]
        assert bool(step["wire_bytes"]) == shared == (step["wire_us"] > 0)
    (ended,) = (r for r in document["results"] if r["unit"] == "s")
    assert ended["case"] == "all ranks end after one raised"


def test_four_ranks_also_share_heads_and_tokens() -> None:
    names = [way.name for way in ways_for(4)]
    assert len(set(names)) == len(names) == 5
    assert "tp 2 x dcp 2, a2a" in names


def test_parts_of_ranks_are_the_whole() -> None:
    problem = Problem(Case("", 2, 70, 3), "cpu", torch.float32)
    for way in (Way(4, 1, "a2a"), Way(4, 2, "ag_rs"), Way(4, 4, None)):
        heads = [problem.heads_of(way, rank) for rank in range(4)]
        assert np.array_equal(np.concatenate([np.r_[h] for h in heads]), np.arange(32))
        total = sum(float(problem.cache(way, rank).k.double().abs().sum()) for rank in range(4))
        whole = sum(float(problem.stored(i)[0].double().abs().sum()) for i in range(2))
        assert total == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("ranks", ["1", "3", "16"])
def test_refused_numbers_of_ranks(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        multi_gpu.main(["--device", "cpu", "--ranks", ranks])
    assert f"--ranks is {ranks}; want 2, 4 or 8" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() >= 8:
        pytest.skip("this machine has 8 GPUs")
    with pytest.raises(SystemExit):
        multi_gpu.main(["--ranks", "8"])
    assert "GPUs; want 8" in capsys.readouterr().err
