"""Kernels measured on a GPU, and plans that go by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FA2, FA3, need

import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from torch_backend.choice_files import TWO_LAUNCHES

pytestmark = pytest.mark.gpu

SPEC = AttentionSpec(32, 8, 128)
CACHE = CacheSpec(2, 4096, 16, 8, 128, device="cuda")


def test_decode_is_measured_and_gone_by(tmp_path: Path) -> None:
    need(FA2[0])
    bucket, path = Bucket(32, 32, 2048, 1), tmp_path / "kernels.json"
    names = ["fa2", "fa2_flashinfer"]
    found = torch_backend.measure_kernels(SPEC, CACHE, bucket, path=path, kernels=names)
    times = dict(found.microseconds)
    # 32 requests of 1024 tokens are 134 MB: no card reads them in 10 us, and none takes a second.
    assert set(times) == set(names) and all(10 < time < 1e6 for time in times.values())
    assert found.family == min(times, key=lambda name: times[name])
    batch = RaggedBatch([1] * 3, [900, 40, 7], torch.arange(300).reshape(3, 100))
    with torch_backend.use_measured_choices(path) as choices:
        assert choices.ignored is None
        plan = torch_backend.plan(SPEC, CACHE, batch, bucket=bucket)
        assert plan.static.main[0].family == found.family
        (choice,) = torch_backend.explain(SPEC, CACHE, batch, bucket=bucket)
        assert str(found) in choice.note
    assert torch_backend.plan(SPEC, CACHE, batch, bucket=bucket).static.main[0].family == "fa2"


def test_a_mixed_bucket_is_measured_in_one_launch_and_in_two() -> None:
    need(FA3[0])
    table = torch.zeros(33, 1, dtype=torch.int32)
    batch = RaggedBatch([1] * 32 + [512], [1024] * 32 + [512], table)
    found = torch_backend.measure_kernels(SPEC, CACHE, Bucket(33, 544, 2080, 512), batch=batch)
    assert {TWO_LAUNCHES, "fa2", "fa3", "fa2_flashinfer"} <= {
        name for name, _ in found.microseconds
    }
    assert "reference" not in dict(found.microseconds)
