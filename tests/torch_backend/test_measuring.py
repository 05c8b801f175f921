"""Measured choices of kernels: files, what dispatch makes of them, and what explain says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.errors import ArgumentError, PlanError, UnsupportedError
from torch_backend import choice_files, measure_kernels, measuring, use_measured_choices
from torch_backend.choice_files import TWO_LAUNCHES, ChoiceFile, Measurement, work_class
from torch_backend.dispatch import choose, works_of
from torch_backend.host_planning import host_plan
from torch_backend.kernels import FAMILIES, Device
from torch_backend.kernels.reference import ReferenceFamily

SPEC = AttentionSpec(4, 2, 8)
CACHE = CacheSpec(3, 99, 4, 2, 8, dtype="float32")
BUCKET = Bucket(4, 6, 20, 3)
BATCH = RaggedBatch([1, 2], [5, 9], [[3, 4, 0], [5, 6, 7]])


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    use_measured_choices(None)


class Twin(ReferenceFamily):
    """The reference under another name, after it in the order."""

    name = "twin"


@pytest.fixture
def twin() -> Iterator[None]:
    """Two families that serve the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "twin", Twin())
        yield
        use_measured_choices(None)


def times(patch: pytest.MonkeyPatch, **microseconds: float) -> None:
    """Let a family take so long."""

    def of(step: Any, plan: Any, repeats: int) -> float:
        step.call(plan)(0)
        launches = plan.static.main if plan.static.own is None else (plan.static.own,)
        return microseconds["_".join(launch.family for launch in launches)]

    patch.setattr(measuring, "median_time", of)


def family_of(**options: Any) -> str:
    static = torch_backend.plan(SPEC, CACHE, BATCH, bucket=BUCKET, **options).static
    return static.main[0].family


def test_a_measurement_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    found = measure_kernels(SPEC, CACHE, BUCKET, path=path, repeats=3)
    assert found.family == "reference" and str(found).endswith(" us")
    assert [name for name, _ in found.microseconds] == ["reference"]
    assert 0 < found.microseconds[0][1] < 1e7
    raw = json.loads(path.read_text())
    assert set(raw) == {"format", "card", "versions", "choices"}
    assert raw["card"]["name"] == "cpu" and raw["versions"]["torch"] == torch.__version__
    (choice,) = raw["choices"]
    assert choice["work"]["bucket"] == {
        "num_requests": 4,
        "num_tokens": 8,
        "num_pages": 32,
        "max_query_len": 4,
        "draft_masks": False,
        "without_context": False,
    }
    assert "num_pages" not in choice["work"]["cache"]
    assert ChoiceFile.read(path).choices == {found.work: found}
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("bucket", "cache", "source"),
    [
        (Bucket(4, 4, 20, 1), CACHE, "pages"),
        (Bucket(3, 10, 6, without_context=True), CACHE, "tokens"),
        (Bucket(3, 10, 40, without_context=False), None, "tokens"),
        (Bucket(4, 3, 5), replace(CACHE, dtype="float8_e4m3fn", scales_per_head=True), "pages"),
        (Bucket(4, 4, 8, 1), replace(CACHE, layout="HND"), "pages"),
    ],
    ids=["decode", "first prefill", "no cache", "fp8", "HND"],
)
def test_steps_of_all_kinds_are_made(bucket: Bucket, cache: CacheSpec | None, source: str) -> None:
    spec = AttentionSpec(4, 2, 8, dtype="float32")
    found = measure_kernels(spec, cache, bucket, repeats=1)
    work = json.loads(found.work)
    assert found.family == "reference" and work["source"] == source
    # The class of plans that are made with this cache.
    shape = None if cache is None else replace(cache, num_layers=2)
    works = works_of(spec, shape, "float32", bucket, 9, Device("cpu"))
    assert found.work in map(work_class, works)


def test_the_fastest_is_preferred_in_both_front_ends(
    twin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    times(monkeypatch, reference=9.0, twin=3.0)
    assert family_of() == "reference"
    found = measure_kernels(SPEC, CACHE, BUCKET, path=path)
    assert found.family == "twin"
    assert found.microseconds == (("twin", 3.0), ("reference", 9.0))
    # Off until it is asked for; lru caches see the change.
    assert family_of() == "reference"
    with use_measured_choices(path) as choices:
        assert choices.ignored is None
        assert family_of() == "twin"
        assert family_of(kernel="reference") == "reference"
        assert family_of(batch_invariant=True) == "reference"
        theirs = jax_frontend.plan(SPEC, CACHE, BATCH, bucket=BUCKET)
        assert theirs.static.main[0].family == "twin"
        (choice,) = torch_backend.explain(SPEC, CACHE, BATCH, bucket=BUCKET)
        assert choice.family == "twin"
        assert f"measured in {path}: twin 3.0 us, reference 9.0 us" in str(choice)
        # Another bucket of the class shares the choice; other buckets have the static one.
        near = torch_backend.plan(SPEC, CACHE, BATCH, bucket=Bucket(3, 5, 17, 3)).static
        far = torch_backend.plan(SPEC, CACHE, BATCH, bucket=Bucket(9, 6, 20, 3)).static
        assert (near.main[0].family, far.main[0].family) == ("twin", "reference")
        (other,) = torch_backend.explain(SPEC, CACHE, BATCH, bucket=Bucket(9, 6, 20, 3))
        assert f"  not measured in {path}" in str(other)
    assert family_of() == "reference"
    (choice,) = torch_backend.explain(SPEC, CACHE, BATCH, bucket=BUCKET)
    assert choice.note == "" and "measured" not in str(choice)


def test_a_file_in_use_that_is_measured_again_counts_at_once(
    twin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    times(monkeypatch, reference=1.0, twin=3.0)
    measure_kernels(SPEC, CACHE, Bucket(16, 16, 16), path=path)
    use_measured_choices(path)
    times(monkeypatch, reference=9.0, twin=3.0)
    measure_kernels(SPEC, CACHE, BUCKET, path=path)
    assert family_of() == "twin"
    assert len(ChoiceFile.read(path).choices) == 2  # the other choice is kept


def test_some_kernels_and_lengths_of_ones_own(twin: None) -> None:
    found = measure_kernels(SPEC, CACHE, BUCKET, kernels=["twin"], batch=BATCH, repeats=1)
    assert found.family == "twin" and len(found.microseconds) == 1
    with pytest.raises(ArgumentError, match="kernels: got 'fa9'"):
        measure_kernels(SPEC, CACHE, BUCKET, kernels=["fa9"])
    with pytest.raises(UnsupportedError, match="none of the families fa3 can serve"):
        measure_kernels(SPEC, CACHE, BUCKET, kernels=["fa3"])
    with pytest.raises(PlanError, match=r"bucket.num_requests"):
        measure_kernels(SPEC, CACHE, Bucket(1, 6, 20), batch=BATCH)
    with pytest.raises(PlanError, match=r"spec.dtype: got none, and no cache"):
        measure_kernels(SPEC, None, BUCKET)
    with pytest.raises(PlanError, match=r"cache_spec.num_kv_heads"):
        measure_kernels(SPEC, replace(CACHE, num_kv_heads=4), BUCKET)


def written(path: Path, **changes: Any) -> Path:
    """A file in which reference was measured, with some of it changed."""
    measure_kernels(SPEC, CACHE, BUCKET, path=path, repeats=1)
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(raw))
    return path


OTHER_CARD = {"name": "NVIDIA A100", "kind": "cuda", "capability": [8, 0], "num_sms": 108}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"card": OTHER_CARD}, "measured on NVIDIA A100, and here are cpu"),
        ({"versions": {"torch": "1.0"}}, "measured with isthmus-attention not installed"),
    ],
    ids=["card", "versions"],
)
def test_a_foreign_file_is_ignored_and_explain_says_why(
    changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_files, "version", lambda package: "7.0")
    path = written(tmp_path / "kernels.json", **changes)
    with use_measured_choices(path) as choices:
        assert choices.ignored is not None and choices.ignored.startswith(why)
        assert family_of() == "reference"
        (choice,) = torch_backend.explain(SPEC, CACHE, BATCH, bucket=BUCKET)
        assert f"{path} is ignored: {why}" in str(choice)
    before = path.read_text()
    with pytest.raises(ArgumentError, match=r"path: got .*kernels\.json, measured (on|with)"):
        measure_kernels(SPEC, CACHE, BUCKET, path=path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": "isthmus measured kernels 0"}',
        '{"format": "isthmus measured kernels 1", "card": {}, "versions": {}, "choices": []}',
    ],
)
def test_a_damaged_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    for call in (
        use_measured_choices,
        lambda path: measure_kernels(SPEC, CACHE, BUCKET, path=path),
    ):
        with pytest.raises(ArgumentError, match=r"kernels\.json, which cannot be read"):
            call(path)
    assert choice_files.active_file() is None and path.read_text() == text


def test_a_choice_that_is_none_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "kernels.json")
    raw = json.loads(path.read_text())
    for changes in ({"family": "fa9"}, {"family": "fa2"}, {"microseconds": []}):
        choices = [raw["choices"][0] | changes]
        path.write_text(json.dumps(raw | {"choices": choices}))
        with pytest.raises(ArgumentError, match="cannot be read"):
            use_measured_choices(path)
    with pytest.raises(ArgumentError, match=r"cannot be read .FileNotFoundError"):
        use_measured_choices(tmp_path / "none.json")


def test_contexts_nest(tmp_path: Path) -> None:
    first, second = (written(tmp_path / f"{name}.json") for name in "ab")
    with use_measured_choices(first):
        with use_measured_choices(second):
            assert "b.json" in note()
        assert "a.json" in note()
        with use_measured_choices(None):
            assert note() == ""
        assert "a.json" in note()
    assert note() == ""


def note() -> str:
    return torch_backend.explain(SPEC, CACHE, BATCH, bucket=BUCKET)[0].note


H200 = Device("cuda", (9, 0), 132)
H200_CARD = {"name": "NVIDIA H200", "kind": "cuda", "capability": [9, 0], "num_sms": 132}
BIG = AttentionSpec(32, 8, 128)
POOL = CacheSpec(4, 512, 16, 8, 128, device="cuda")


def h200_plan(query_lens: list[int], bucket: Bucket) -> list[str]:
    table = np.arange(len(query_lens) * 30).reshape(len(query_lens), 30)
    batch = RaggedBatch(query_lens, [length + 9 for length in query_lens], table)

    def new(words: int) -> Any:
        return np.empty(words, np.int32)

    static, _ = host_plan(BIG, POOL, batch, bucket, H200, "raise", None, new)
    return [launch.family for launch in static.main]


@pytest.mark.parametrize(
    ("family", "mixed", "prefill"),
    [
        ("fa2", ["fa2"], ["fa2"]),
        # Also where by the static table its tiles would stay too empty.
        ("fa3", ["fa3"], ["fa3"]),
        (TWO_LAUNCHES, ["fa2", "fa3"], ["fa2"]),
        ("xqa", ["fa2", "fa3"], ["fa2"]),
    ],
)
def test_mixed_batches_of_a_gpu(
    family: str,
    mixed: list[str],
    prefill: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One family for all requests, or decodes and prefills apart; what refuses does not serve."""
    monkeypatch.setattr(choice_files, "_cards", lambda: [H200_CARD])
    bucket = Bucket(8, 512, 64)
    work = works_of(BIG, POOL, "bfloat16", bucket, 9, H200)[0]
    measured = Measurement(work_class(work), family, ((family, 5.0),))
    file = ChoiceFile.new(str(tmp_path / "kernels.json"), H200_CARD).with_measured(measured)
    file.write()
    assert h200_plan([1, 1, 300], bucket) == ["fa2", "fa3"]
    with use_measured_choices(file.path):
        if family == "xqa":
            assert ("xqa", "it decodes one token a request") in [
                (name, reason.split(",")[0]) for name, reason in choose(work).refusals
            ]
            assert "measured in" in choose(work).note
        else:
            assert h200_plan([1, 1, 300], bucket) == mixed
            assert h200_plan([200, 1], bucket) == prefill
        # The file speaks of this device only.
        cpu = works_of(SPEC, CACHE, "float32", BUCKET, 5, Device("cpu"))[0]
        assert "is ignored: measured on NVIDIA H200, another device" in choose(cpu).note
    assert h200_plan([1, 1, 300], bucket) == ["fa2", "fa3"]
