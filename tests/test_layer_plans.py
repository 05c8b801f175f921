"""Layers that attend differently: one array for all plans, and the bits of plans made apart."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from small import BATCH, BUCKET, KV_LENS, PAGE_TABLE, QUERY_LENS, jax_rows, new_cache, torch_rows

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, LayerPlans, PlanStatic, RaggedBatch
from interop.dlpack import to_torch
from interop.errors import ArgumentError, FrameworkError, IsthmusError, PlanError
from torch_backend.engine.batches import EngineRequests
from torch_backend.host_planning import host_plan
from torch_backend.kernels import Device
from torch_backend.layer_planning import host_layer_plans

LOCAL = AttentionSpec(4, 2, 8, sliding_window=3)
GLOBAL = AttentionSpec(4, 2, 8, logits_soft_cap=10.0)
SPECS = [LOCAL, GLOBAL, LOCAL]

frontends = pytest.mark.parametrize("frontend", [torch_backend, jax_frontend])
buckets = pytest.mark.parametrize("bucket", [None, BUCKET], ids=["exact", "padded"])


def count(bucket: Bucket | None) -> int:
    return BATCH.num_tokens if bucket is None else bucket.num_tokens


def host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array)


@frontends
@buckets
def test_all_plans_are_one_array_with_what_plans_have_apart(
    frontend: Any, bucket: Bucket | None
) -> None:
    cache = new_cache().spec
    plans = frontend.plan_layers(SPECS, cache, BATCH, bucket=bucket)
    assert len(plans) == 3 and [plan.spec for plan in plans] == SPECS
    assert plans[0] is plans[2] and plans[-1] is plans[2]
    assert all(plan.metadata is plans.metadata for plan in plans)
    assert [plan.static.layers for plan in plans] == [(0, 2), (1,), (0, 2)]
    for spec, plan in zip(SPECS, plans, strict=True):
        apart = frontend.plan(spec, cache, BATCH, bucket=bucket)
        for name, field in apart.views.items():
            assert np.array_equal(host(plan.views[name]), host(field)), name
        assert replace(plan.static, layout=apart.static.layout, layers=()) == apart.static
    # The reference has no schedules, so here all of it is shared.
    assert len(plans.metadata) == len(apart.metadata)


@buckets
@pytest.mark.parametrize("call", ["attend", "paged_attention"])
def test_torch_has_the_bits_of_plans_made_apart(bucket: Bucket | None, call: str) -> None:
    query, key, value = torch_rows(1, count(bucket))
    answers = []
    for together in (True, False):
        cache = new_cache(0)
        plans: Any
        if together:
            plans = torch_backend.plan_layers(SPECS, cache.spec, BATCH, bucket=bucket)
        else:
            plans = [torch_backend.plan(s, cache.spec, BATCH, bucket=bucket) for s in SPECS]
        outs = []
        for layer in range(3):
            if call == "attend":
                torch_backend.append(key, value, cache, plans[layer], layer)
                outs += torch_backend.attend(query, cache, plans[layer], layer, return_lse=True)
            else:
                rows = query, key, value
                outs.append(torch_backend.paged_attention(*rows, cache, plans[layer], layer))
        answers.append([*outs, cache.k, cache.v])
    for ours, theirs in zip(*answers, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(answers[0][0], answers[0][2 if call == "attend" else 1])


@jax.jit
def jax_step(rows: Any, kv: Any, plans: Any) -> Any:
    """All layers, where `plans` is `LayerPlans` or a list."""
    query, key, value = rows
    outs = []
    for layer in range(3):
        out, lse, kv = jax_frontend.paged_attention(
            query, key, value, kv, plans[layer], layer, return_lse=True
        )
        outs += [out, lse]
    return outs, kv


@jax.jit
def jax_pairs(rows: Any, kv: Any, plans: Any) -> Any:
    """Layers 0 and 1 as a scan over one group of two layers."""

    def group(kv: Any, i: jax.Array) -> Any:
        first = jax_frontend.paged_attention(*rows, kv, plans[0], 2 * i, return_lse=True)
        second = jax_frontend.paged_attention(*rows, first[2], plans[1], 2 * i + 1, return_lse=True)
        return second[2], [*first[:2], *second[:2]]

    kv, outs = jax.lax.scan(group, kv, jnp.arange(1))
    return [out[0] for out in outs], kv


@buckets
@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_jax_has_the_bits_of_torch(bucket: Bucket | None, kind: str) -> None:
    want_cache = new_cache(0)
    plans = torch_backend.plan_layers(SPECS, want_cache.spec, BATCH, bucket=bucket)
    want = []
    for layer in range(3):
        rows = torch_rows(1, count(bucket))
        want += torch_backend.paged_attention(
            *rows, want_cache, plans[layer], layer, return_lse=True
        )
    for step in (jax_step, jax_pairs):
        cache = new_cache(0)
        kv: Any
        if kind == "handle":
            kv = jax_frontend.cache_handle(cache)
        else:
            kv = jax_frontend.init_cache(
                LOCAL, num_layers=3, num_pages=12, page_size=4, dtype="float32"
            )
            kv = replace(kv, k=jnp.array(cache.k.numpy()), v=jnp.array(cache.v.numpy()))
        theirs = jax_frontend.plan_layers(SPECS, kv.spec, BATCH, bucket=bucket)
        try:
            outs, kv = jax.block_until_ready(step(jax_rows(1, count(bucket)), kv, theirs))
        finally:
            if kind == "handle":
                jax_frontend.release_cache(kv.name)
        for got, right in zip(outs, want, strict=False):
            assert torch.equal(to_torch(got), right)


def test_in_jax_they_are_one_leaf_and_steps_of_a_bucket_share_a_trace() -> None:
    cache = new_cache().spec
    plans = jax_frontend.plan_layers(SPECS, cache, BATCH, bucket=BUCKET)
    assert len(jax.tree.leaves(plans)) == 1
    other = RaggedBatch([1, 2], [9, 2], [[3, 4, 5], [6, 0, 0]])
    traces = []

    @jax.jit
    def step(plans: Any) -> Any:
        traces.append(plans)
        return plans[1].metadata

    for batch in (BATCH, other, BATCH):
        step(jax_frontend.plan_layers(SPECS, cache, batch, bucket=BUCKET))
    assert len(traces) == 1


def test_equal_layers_have_a_plan_for_all() -> None:
    cache = new_cache().spec
    plans = torch_backend.plan_layers([LOCAL] * 3, cache, BATCH)
    apart = torch_backend.plan(LOCAL, cache, BATCH)
    assert plans[0] is plans[1] is plans[2]
    assert plans[0].static == apart.static


def test_without_a_cache() -> None:
    local, everywhere = (replaced(spec) for spec in (LOCAL, GLOBAL))
    batch = RaggedBatch([3, 2], [3, 2])
    plans = torch_backend.plan_layers([local, everywhere], None, batch)
    rows = torch_rows(1, 5)
    for spec, plan in zip([local, everywhere], plans, strict=True):
        apart = torch_backend.plan(spec, None, batch)
        got = torch_backend.ragged_attention(*rows, plan)
        assert torch.equal(got, torch_backend.ragged_attention(*rows, apart))


def replaced(spec: AttentionSpec) -> AttentionSpec:
    window, cap = spec.sliding_window, spec.logits_soft_cap
    return AttentionSpec(4, 2, 8, sliding_window=window, logits_soft_cap=cap, dtype="float32")


H200 = Device("cuda", (9, 0), 132)
BIG = [AttentionSpec(32, 8, 128, sliding_window=1024), AttentionSpec(32, 8, 128)]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    "query_lens", [[1] * 8, [300, 500], [1, 1, 300]], ids=["decode", "prefill", "mixed"]
)
def test_each_has_its_own_schedule_on_a_gpu(query_lens: list[int], invariant: bool) -> None:
    cache = CacheSpec(4, 4096, 16, 8, 128, device="cuda")
    kv_lens = [3000 + 1000 * (i % 2) + length for i, length in enumerate(query_lens)]
    table = np.arange(len(kv_lens) * 300).reshape(len(kv_lens), 300)
    batch = RaggedBatch(query_lens, kv_lens, table)
    pages = int(batch.pages(16).indptr[-1])
    bucket = Bucket(10, 1000, pages + 9, max(query_lens))

    def new(words: int) -> np.ndarray[Any, Any]:
        return np.zeros(words, np.int32)

    rest = (cache, batch, bucket, H200, "raise", None, new, True, invariant)
    statics, kinds, words = host_layer_plans(BIG * 2, *rest)
    assert kinds == (0, 1, 0, 1)
    places: set[int] = set()
    for spec, static in zip(BIG, statics, strict=True):
        apart, alone = host_plan(spec, *rest)
        assert static.main == apart.main
        ours, theirs = static.layout.views(words), apart.layout.views(alone)
        assert list(ours) == list(theirs)
        for name, field in theirs.items():
            written = ours[name]
            assert np.array_equal(written, field) or "schedule" in name, name
            if "schedule" in name:
                place = static.layout.slices[name]
                assert place.start % 4 == 0 and not places & set(range(place.start, place.stop))
                places |= set(range(place.start, place.stop))
                assert meaningful(written, static, name) == meaningful(field, apart, name)
    assert PlanStatic.from_json(statics[1].to_json()) == statics[1]


def meaningful(words: np.ndarray[Any, Any], static: PlanStatic, name: str) -> list[int]:
    """A schedule up to where it may have gaps that nobody writes."""
    launch = next(one for one in static.main if one.family.startswith(name[:3]))
    return list(words[: launch.constants[0]])


@frontends
def test_a_layer_of_another_kind_is_refused(frontend: Any) -> None:
    cache = new_cache(0)
    plans = frontend.plan_layers(SPECS, cache.spec, BATCH)
    is_torch = frontend is torch_backend
    rows = torch_rows(1) if is_torch else jax_rows(1)
    kv: Any = cache if is_torch else jax_frontend.cache_handle(cache)
    before = cache.k.clone()
    try:
        for layer, plan, layers in ((1, plans[0], "0, 2"), (2, plans[1], "1")):
            given = f"the plan of layers {layers} for layer {layer}"
            with pytest.raises(PlanError, match=given):
                frontend.attend(rows[0], kv, plan, layer)
            with pytest.raises(PlanError, match=given):
                frontend.paged_attention(*rows, kv, plan, layer)
        with pytest.raises(FrameworkError, match="LayerPlans"):
            frontend.attend(rows[0], kv, plans, 0)
    finally:
        if not is_torch:
            jax_frontend.release_cache(kv.name)
    assert torch.equal(cache.k, before)


def test_a_traced_layer_of_another_kind_gives_nan() -> None:
    cache = new_cache(0)
    kv = jax_frontend.cache_handle(cache)
    plans = jax_frontend.plan_layers(SPECS, kv.spec, BATCH)
    attend = jax.jit(jax_frontend.attend, static_argnames="return_lse")
    try:
        for layer in range(3):
            right = attend(jax_rows(1)[0], kv, plans[layer], np.int32(layer), return_lse=True)
            wrong = attend(
                jax_rows(1)[0], kv, plans[1 - layer % 2], np.int32(layer), return_lse=True
            )
            assert not any(jnp.isnan(x).any() for x in right)
            assert all(jnp.isnan(x).all() for x in wrong)
        with pytest.raises(ArgumentError, match="known when the program is traced"):
            jax.jit(lambda plans, i: plans[i].metadata)(plans, 1)
    finally:
        jax_frontend.release_cache(kv.name)


@frontends
@pytest.mark.parametrize(
    ("specs", "kind", "message"),
    [
        ([LOCAL, AttentionSpec(8, 2, 8), LOCAL], PlanError, r"specs\[1\].num_qo_heads: got 8"),
        ([LOCAL, LOCAL, AttentionSpec(4, 1, 8)], PlanError, r"specs\[2\].num_kv_heads"),
        ([LOCAL, AttentionSpec(4, 2, 16), LOCAL], PlanError, r"specs\[1\].head_dim"),
        ([LOCAL, LOCAL, replaced(LOCAL)], PlanError, r"specs\[2\].dtype"),
        ([LOCAL, GLOBAL], ArgumentError, "2 specs for a cache of 3 layers"),
        ([], ArgumentError, "no layers"),
        (LOCAL, ArgumentError, "AttentionSpec"),
        ([LOCAL, 3, GLOBAL], ArgumentError, r"specs\[1\]: got int"),
    ],
    ids=str,
)
def test_layers_that_disagree_are_refused_by_name(
    frontend: Any, specs: Any, kind: type[IsthmusError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        frontend.plan_layers(specs, new_cache().spec, BATCH)


def test_what_a_batch_is_refused_for_is_refused_here() -> None:
    cache = new_cache().spec
    with pytest.raises(IsthmusError, match="page id"):
        torch_backend.plan_layers(
            SPECS, cache, RaggedBatch(QUERY_LENS, KV_LENS, np.array(PAGE_TABLE) + 9)
        )
    with pytest.raises(ArgumentError, match="batch"):
        torch_backend.plan_layers(SPECS, cache, "batch")


def test_they_travel_to_another_process() -> None:
    plans = torch_backend.plan_layers(SPECS, new_cache().spec, BATCH)
    assert plans[1] is plans[1]
    copy: LayerPlans[torch.Tensor] = pickle.loads(pickle.dumps(plans))
    assert copy.statics == plans.statics and copy[1].metadata is copy.metadata
    theirs = jax_frontend.plan_layers(SPECS, new_cache().spec, BATCH)
    exported = jax.export.export(jax.jit(lambda plans: plans[1].metadata))(theirs)
    loaded = jax.export.deserialize(exported.serialize())
    assert np.array_equal(loaded.call(theirs), theirs.metadata)


@frontends
def test_a_batch_with_rules_of_its_own_keeps_them(frontend: Any) -> None:
    """Rows of an engine's block 0 go nowhere, however many plans are made."""
    cache = new_cache(0)
    batch = EngineRequests([3, 1], [3, 6], [[2, 0], [5, 0]])
    together = frontend.plan_layers(SPECS, cache.spec, batch)
    for layer, spec in enumerate(SPECS):
        alone = frontend.plan(spec, cache.spec, batch)
        slots = np.asarray(together[layer].views["slot_mapping"]).tolist()
        assert slots == np.asarray(alone.views["slot_mapping"]).tolist()
        assert slots == [8, 9, 10, -1]
