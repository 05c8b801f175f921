"""Compiling ahead, and the doctor's report, without compiling anything."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from interop import AttentionSpec
from interop.errors import UnsupportedError
from torch_backend import doctor, prebuild
from torch_backend.kernels import Device
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels.flashinfer_abi import ModuleKey

BROKEN = ModuleKey("fa2", "bfloat16", 256)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ModuleKey, str]]:
    """Modules that were asked for, with the number of jobs that each build might use."""
    asked: list[tuple[ModuleKey, str]] = []

    def build(key: ModuleKey) -> None:
        asked.append((key, os.environ["MAX_JOBS"]))
        if key == BROKEN:
            raise UnsupportedError("nvcc: not found")

    monkeypatch.setattr(abi, "build", build)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return asked


def test_modules_of_a_spec() -> None:
    """FA3 on compute capability 9.0 only; features that are compiled in are part of the key."""
    spec = AttentionSpec(32, 8, 128, sliding_window=4096)
    both = (
        ModuleKey("fa2", "float16", 128, window=True),
        ModuleKey("fa3", "float16", 128, window=True),
    )
    assert prebuild.modules_for(spec, "float16", (9, 0)) == both
    assert prebuild.modules_for(spec, "float16", (8, 0)) == both[:1]
    capped = AttentionSpec(32, 8, 64, logits_soft_cap=30.0)
    key = ModuleKey("fa2", "bfloat16", 64, soft_cap=True)
    assert prebuild.modules_for(capped, "bfloat16", (12, 0)) == (key,)


def test_builds_run_side_by_side_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [ModuleKey("fa2", "float16", width) for width in (64, 128, 256)]
    together = threading.Barrier(len(keys), timeout=20)
    monkeypatch.setattr(abi, "build", lambda key: together.wait())
    assert prebuild.build(keys) == {}


def test_jobs_and_failures(built: list[Any]) -> None:
    reported = {}
    keys = [ModuleKey("fa2", "bfloat16", 128), BROKEN, BROKEN]
    failed = prebuild.build(keys, reported.__setitem__)
    assert sorted(key.head_dim for key, _ in built) == [128, 256]
    assert {jobs for _, jobs in built} == {"16"}
    assert "MAX_JOBS" not in os.environ
    assert list(failed) == [BROKEN]
    assert reported == {keys[0]: None, BROKEN: failed[BROKEN]}
    assert prebuild.build([]) == {}


def test_jobs_that_the_user_chose_stay(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    prebuild.build([ModuleKey("fa2", "bfloat16", 128)])
    assert built[0][1] == os.environ["MAX_JOBS"] == "3"


def test_command_line(built: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--head-dim 64 128 --dtype float16 --sliding-window both --capability 9.0"
    assert prebuild.main(arguments.split()) == 0
    assert {key for key, _ in built} == {
        ModuleKey(backend, "float16", width, window)
        for backend in ("fa2", "fa3")
        for width in (64, 128)
        for window in (False, True)
    }
    assert "fa3 float16 head_dim 64, window: compiled" in capsys.readouterr().out


def test_command_line_says_what_failed(
    built: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prebuild.main(["--head-dim", "256", "--capability", "8.0"]) == 1
    assert "fa2 bfloat16 head_dim 256: nvcc: not found" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_command_line_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prebuild.main([])
    assert "pass --capability, e.g. 9.0" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_without_a_gpu() -> None:
    report = doctor.report()
    assert f"torch {torch.__version__}" in report
    assert "GPU: none that PyTorch can use" in report
    assert "decode, 32 requests: reference" in report
    assert "not fa2: it needs an NVIDIA GPU, and this is a cpu device" in report
    assert len(report.splitlines()) < 50


def test_doctor_says_which_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "is_built", lambda key: key.backend == "fa2")
    lines = "\n".join(doctor._kernels(Device("cuda", (9, 0), 132)))
    assert "decode, 32 requests: fa2 (compiled)" in lines
    assert "first prefill, 4 x 2048: fa3 (to be compiled at first use, 75 s on 16 cores" in lines
    assert "not fa3: the bucket has 1 query rows a request" in lines
