"""Dispatch: who serves what and why, and when a mixed batch becomes two launches."""

from __future__ import annotations

import numpy as np
import pytest

import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, PlanStatic, RaggedBatch
from interop.errors import ArgumentError, UnsupportedError
from torch_backend.dispatch import MIXED_LEAST_QUERY_LEN, works_of
from torch_backend.kernels import Device
from torch_backend.planning import host_plan

H200 = Device("cuda", (9, 0), 132)
A100 = Device("cuda", (8, 0), 108)
SPEC = AttentionSpec(32, 8, 128)
CACHE = CacheSpec(4, 512, 16, 8, 128, device="cuda")


def batch_of(query_lens: list[int], context: int) -> RaggedBatch:
    kv_lens = [length + context for length in query_lens]
    pages = max(-(-length // 16) for length in kv_lens)
    table = np.arange(len(query_lens) * pages).reshape(len(query_lens), pages)
    return RaggedBatch(query_lens, kv_lens, table)


def new(words: int) -> np.ndarray:
    return np.empty(words, np.int32)


def planned(
    batch: RaggedBatch, bucket: Bucket | None = None, device: Device = H200
) -> tuple[PlanStatic, np.ndarray]:
    return host_plan(SPEC, CACHE, batch, bucket, device, "raise", None, new)


def families(batch: RaggedBatch, bucket: Bucket | None = None, device: Device = H200) -> list[str]:
    return [launch.family for launch in planned(batch, bucket, device)[0].main]


def test_one_kind_of_request_is_one_launch() -> None:
    assert families(batch_of([1] * 8, 100)) == ["fa2"]
    assert families(batch_of([300, 500], 100)) == ["fa3"]
    assert families(batch_of([2, 3, 2], 100)) == ["fa2"]


def test_decodes_before_prefills_are_two_launches() -> None:
    mixed = batch_of([1, 1, 0, 1, 300], 100)
    assert families(mixed) == ["fa2", "fa3"]
    bucket = Bucket(8, 512, 64)
    assert families(mixed, bucket) == ["fa2", "fa3"]
    # Every mixed batch of the bucket has the same static part.
    other = planned(batch_of([1, 400], 30), bucket)[0]
    assert other is planned(mixed, bucket)[0]


def test_decodes_after_prefills_stay_with_them() -> None:
    assert families(batch_of([300, 1, 1], 100)) == ["fa2"]
    assert families(batch_of([1, 300, 1], 100)) == ["fa2", "fa3"]


def test_short_queries_and_other_cards_are_one_launch() -> None:
    assert families(batch_of([1, 1, MIXED_LEAST_QUERY_LEN - 1], 100)) == ["fa2"]
    # Without FA3 one family serves both kinds of request, as well in one launch.
    assert families(batch_of([1, 1, 300], 100), device=A100) == ["fa2"]


def test_each_launch_plans_its_own_requests() -> None:
    static, words = planned(batch_of([1, 1, 0, 1, 300], 100), Bucket(8, 512, 64))
    fields = static.layout.views(words)
    decodes, prefills = static.main
    capacity, rows, count = decodes.constants[0], decodes.constants[1], decodes.constants[2]
    schedule = fields["fa2_schedule"]
    # FlashInfer's kernel merges as many rows as stand there: those of the decodes.
    assert schedule[count // 4] == 3
    flags = schedule.view(np.uint8)[decodes.constants[12] :][:capacity]
    assert flags.sum() == 3 and rows == 8
    # 300 rows are 3 tiles of 128 for each head; the padding rows are works of no keys.
    assert prefills.constants[-1] == 0
    lengths = fields["fa3_schedule"][prefills.constants[3] // 4 :]
    works = fields["fa3_schedule"][prefills.constants[6] // 4 :][132]
    assert set(lengths[:works].tolist()) == {300, 512 - 303}


def test_works_name_their_roles() -> None:
    arguments = (SPEC, CACHE, "bfloat16", Bucket(8, 512, 64), 9, H200)
    assert [work.role for work in works_of(*arguments)] == ["all", "decodes", "prefills"]


def test_explain_says_why_not() -> None:
    cache = CacheSpec(4, 512, 16, 8, 128, dtype="float32")
    (choice,) = torch_backend.explain(SPEC, cache, batch_of([1], 3))
    assert choice.family == "reference"
    assert str(choice).startswith("all over pages: reference\n  not fa3: it needs an NVIDIA GPU")


def test_fallback_is_refused_or_warned_of() -> None:
    cache = CacheSpec(4, 512, 16, 8, 128, dtype="float32", device="cuda")
    batch = batch_of([1], 3)
    with pytest.raises(UnsupportedError, match="fa2: it computes in float16 and bfloat16"):
        host_plan(SPEC, cache, batch, None, H200, "raise", None, new)
    with pytest.warns(RuntimeWarning, match="falls back to the reference.*not in float32"):
        host_plan(SPEC, cache, batch, None, H200, "warn", None, new)
    with pytest.raises(ArgumentError, match="fallback: got 'maybe', want 'warn' or 'raise'"):
        host_plan(SPEC, cache, batch, None, H200, "maybe", None, new)


def test_a_kernel_can_be_asked_for_by_name() -> None:
    def plan(kernel: str, device: Device = H200) -> list[str]:
        batch = batch_of([1, 1, 300], 100)
        static, _ = host_plan(SPEC, CACHE, batch, None, device, "raise", kernel, new)
        return [launch.family for launch in static.main]

    assert plan("fa2") == ["fa2"]
    assert plan("fa2_flashinfer") == ["fa2_flashinfer"]
    assert plan("reference") == ["reference"]
    with pytest.raises(
        ArgumentError, match="kernel: got 'fa9', want None, or one of fa3, xqa, trtllm_gen"
    ):
        plan("fa9")
    wanted = (
        "kernel 'fa3' cannot serve.*capability 9.0.*These can: fa2, fa2_flashinfer, cascade, "
        "reference"
    )
    with pytest.raises(UnsupportedError, match=wanted):
        plan("fa3", A100)
