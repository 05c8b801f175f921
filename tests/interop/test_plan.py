"""Plans as values: where the metadata lies, what makes two plans equal, and the way to JSON."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from small import BATCH, BUCKET, SPEC, new_cache

import torch_backend
from interop import AttentionSpec, Bucket, Launch, MetadataLayout, PlanStatic, RaggedBatch

sizes = st.dictionaries(st.text(min_size=1), st.integers(0, 40), min_size=1, max_size=8)


@given(sizes)
def test_fields_are_aligned_disjoint_and_within_the_array(lengths: dict[str, int]) -> None:
    layout = MetadataLayout.of(lengths)
    array = np.full(layout.words, -1)
    for number, (name, view) in enumerate(layout.views(array).items()):
        assert len(view) == lengths[name]
        assert layout.slices[name].start % 4 == 0  # 16 bytes
        assert (view == -1).all(), "another field lies here, too"
        view[:] = number
    assert layout.words % 4 == 0
    assert (array == -1).sum() <= 3 * len(lengths)
    assert list(layout.views(array)) == list(lengths)


def statics() -> dict[str, PlanStatic]:
    """Static parts that have every field filled in some way."""
    cache = new_cache().spec
    features = AttentionSpec(
        4, 2, 8, sm_scale=0.1, causal=False, sliding_window=5, logits_soft_cap=30.0, dtype="float32"
    )
    first = RaggedBatch([3], [3], [[1]])
    promise = Bucket(2, 8, 4, without_context=True)
    mixed = torch_backend.plan(SPEC, cache, BATCH, bucket=BUCKET).static
    scheduled = Launch("fa2", "pages", SPEC, cache, (7, 0, 2**40), 4096)
    return {
        "cache": mixed,
        "features": torch_backend.plan(features, cache, BATCH).static,
        "own rows": torch_backend.plan(SPEC, cache, first, bucket=promise).static,
        "no cache": torch_backend.plan(features, None, RaggedBatch([3], [3])).static,
        "schedule": replace(mixed, main=(scheduled,)),
    }


@pytest.mark.parametrize("name", statics())
def test_json_keeps_everything(name: str) -> None:
    static = statics()[name]
    back = PlanStatic.from_json(static.to_json())
    assert back == static
    assert hash(back) == hash(static)
    assert back.main[0].constants == static.main[0].constants


def test_steps_of_one_bucket_have_equal_static_parts() -> None:
    cache = new_cache().spec
    other = RaggedBatch([2, 0, 4], [9, 8, 4], [[1, 2, 3], [4, 5, 0], [6, 7, 8]])
    one, two = (torch_backend.plan(SPEC, cache, batch, bucket=BUCKET) for batch in (BATCH, other))
    assert one.static == two.static
    assert hash(one.static) == hash(two.static)
    assert not np.array_equal(one.metadata, two.metadata)


CHANGES: dict[str, Callable[[PlanStatic], Any]] = {
    "spec": lambda static: AttentionSpec(4, 2, 8, sliding_window=3),
    "cache": lambda static: replace(static.cache, layout="HND") if static.cache else None,
    "query_dtype": lambda static: "float16",
    "bucket": lambda static: replace(static.bucket, num_pages=17),
    "layout": lambda static: MetadataLayout((*static.layout.fields, ("more", 999, 1))),
    "main": lambda static: (replace(static.main[0], constants=(1,)),),
    "own": lambda static: static.main[0],
}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_makes_another_plan(field: str) -> None:
    static = statics()["cache"]
    assert replace(static, **{field: CHANGES[field](static)}) != static


def test_word_0_is_0_and_padding_says_so() -> None:
    plan = torch_backend.plan(SPEC, new_cache().spec, BATCH, bucket=BUCKET)
    assert plan.metadata[0] == 0
    views = {name: view.tolist() for name, view in plan.views.items()}
    # One request beyond the bucket's six owns the three rows of padding.
    assert views["qo_indptr"] == [0, 1, 4, 4, 6, 6, 6, 9]
    assert views["kv_lens"] == [6, 3, 5, 9, 0, 0, 0]
    assert views["kv_indptr"] == [0, 2, 3, 5, 8, 8, 8, 8]
    assert views["kv_last_page_len"] == [2, 3, 1, 1, 0, 0, 0]
    assert views["page_indices"] == [7, 2, 10, 4, 11, 5, 1, 8] + [0] * 8
    assert views["slot_mapping"] == [9, 40, 41, 42, 7, 32, -1, -1, -1]


def test_plans_cannot_be_changed() -> None:
    plan = torch_backend.plan(SPEC, new_cache().spec, BATCH)
    with pytest.raises(FrozenInstanceError):
        plan.static = plan.static  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        plan.static.query_dtype = "float16"  # type: ignore[misc]


def test_pickled_plans_keep_nothing_of_this_process() -> None:
    plan = torch_backend.plan(SPEC, new_cache().spec, BATCH)
    assert plan.views and hash(plan.static)
    back = pickle.loads(pickle.dumps(plan))
    assert back.static == plan.static
    assert "views" not in vars(back)
    assert "_hash" not in vars(back.static)
    assert torch.equal(back.views["kv_lens"], plan.views["kv_lens"])
