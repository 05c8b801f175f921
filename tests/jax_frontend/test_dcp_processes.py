"""Ranks in several processes, and many steps in flight: the same answer, and nobody waits forever.

What may wait forever runs in processes of its own, which end after a while whatever happens.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dcp_problem import small_step
from problem import assert_within, tolerance_of

HERE = Path(__file__).parent
SECONDS = 240
STEPS, ROUND = 500, 20


def start(devices: int, *arguments: object) -> subprocess.Popen[str]:
    """Start dcp_process.py with that many virtual devices."""
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])
    return subprocess.Popen(
        [sys.executable, str(HERE / "dcp_process.py"), *map(str, arguments)],
        env=os.environ
        | {
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait until all have ended well; end them all if one has not."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("ranks", "devices", "wait"), [(4, 8, 0), (8, 8, 16)])
def test_500_steps_in_flight(tmp_path: Path, ranks: int, devices: int, wait: int) -> None:
    file = tmp_path / "outs.npz"
    finish([start(devices, "steps", file, ranks, STEPS, ROUND, wait)])
    with np.load(file) as outs:
        for name, out in outs.items():
            assert out.shape[0] == STEPS
            assert np.isfinite(out).all()
            assert not np.array_equal(out[0], out[1])
            # The same lengths give the same output, bit for bit.
            rounds = out.reshape(STEPS // ROUND, ROUND, *out.shape[1:])
            np.testing.assert_array_equal(rounds, np.broadcast_to(rounds[:1], rounds.shape), name)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What two processes with two ranks each have written."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    finish([start(2, "rank", folder / f"{i}.npz", i, port) for i in range(2)])
    written = []
    for i in range(2):
        with np.load(folder / f"{i}.npz") as file:
            written.append(dict(file))
    return written


@pytest.mark.parametrize("kind", ["arrays", "handle"])
def test_two_processes_compute_what_one_does(
    kind: str, two_processes: list[dict[str, np.ndarray]]
) -> None:
    problem = small_step()
    want, want_lse = problem.answer()
    parts, ranks = two_processes[0] | two_processes[1], problem.sizes.ranks
    heads = problem.spec.num_qo_heads // ranks
    for number in range(4):
        got = np.concatenate(
            [parts[f"{kind} {number} {rank * heads}"] for rank in range(ranks)], axis=1
        )
        if number % 2:
            assert_within("lse", got, want_lse, tolerance_of("float32").lse)
        else:
            assert_within("out", got, want, tolerance_of("float32").out)


def test_both_processes_hear_of_other_arguments(
    two_processes: list[dict[str, np.ndarray]],
) -> None:
    first, second = (json.loads(str(written["errors"])) for written in two_processes)
    assert first.keys() == second.keys() == {"spec", "batch", "bucket", "refused", "no spec"}
    for name in ("spec", "batch", "bucket"):
        assert first[name] == second[name]
        assert first[name].startswith(
            f"PlanError: {name}: got different ones in process 0 and process 1, want the same"
        )
    for name in ("refused", "no spec"):
        assert first[name].startswith("PlanError: plan: got arguments that process 1 refused")
    assert second["refused"].startswith("ArgumentError: spec.sliding_window: got 3 with decode")
    assert second["no spec"].startswith("ArgumentError: spec: got NoneType")
