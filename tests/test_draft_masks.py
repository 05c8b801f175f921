"""Masks of drafts from both front ends, beyond the numbers that tests/test_equivalence.py compares:
who reads them, plans of several layers, engines, and refusals in the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from engine_step import (
    CPU,
    KV_LENS,
    PAGE,
    QUERY_LENS,
    ROWS,
    SM90,
    SM100,
    TABLE,
    EngineStep,
    Layer,
    batch_of,
    group_of,
    slots,
)
from small import SPEC, jax_rows, new_cache, torch_rows

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, PlanStatic, RaggedBatch
from interop.errors import IsthmusError, PlanError, ShapeError, UnsupportedError
from jax_frontend import backend as jax_backend
from torch_backend import backend
from torch_backend.backend import StepBuilder, draft_mask
from torch_backend.host_planning import host_plan
from torch_backend.kernels import DRAFT_MASKS, FAMILIES, Device
from torch_backend.kernels import flashinfer_fa2 as fa2

frontends = pytest.mark.parametrize("frontend", [torch_backend, jax_frontend])

H200 = Device("cuda", (9, 0), 132)
GPU_SPEC = AttentionSpec(8, 2, 128)
GPU_CACHE = CacheSpec(2, 4096, 16, 2, 128, dtype="bfloat16", device="cuda")


def trees(query_lens: list[int], seed: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    masks = rng.random((sum(query_lens), max(query_lens))) < 0.5
    own = np.concatenate([np.arange(count) for count in query_lens])
    masks[np.arange(len(own)), own] = True
    return masks


def planned(
    batch: RaggedBatch, *, kernel: str | None = None, spec: AttentionSpec = GPU_SPEC, **more: Any
) -> tuple[PlanStatic, dict[str, np.ndarray[Any, Any]]]:
    options = {"bucket": None, "lse": True, "invariant": False} | more
    static, words = host_plan(
        spec,
        GPU_CACHE,
        batch,
        options["bucket"],
        H200,
        "raise",
        kernel,
        lambda n: np.zeros(n, np.int32),
        options["lse"],
        options["invariant"],
    )
    return static, static.layout.views(words)


# Who reads them.

PAGES = np.arange(80).reshape(4, 20)
BATCH = RaggedBatch([3, 1, 2, 0], [40, 300, 20, 7], PAGES, draft_masks=trees([3, 1, 2, 0]))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in DRAFT_MASKS])
def test_families_that_would_leave_masks_out_are_refused(name: str) -> None:
    text = f"kernel '{name}' cannot serve.*it reads no masks of drafts.*These can: .*fa2"
    with pytest.raises(UnsupportedError, match=text):
        planned(BATCH, kernel=name, lse=False)


def test_a_step_with_a_prefill_is_one_launch_with_masks() -> None:
    """Decodes see all, and the rows of the prefill what is before them, if the masks say so."""
    lens = [1, 1, 300]
    masks = np.tril(np.ones((300, 300), bool))
    masks = np.concatenate([masks[:1], masks[:1], masks])
    table = np.arange(60).reshape(3, 20)
    batch = RaggedBatch(lens, [100, 7, 310], table, draft_masks=masks)
    static, fields = planned(batch)
    assert [launch.family for launch in static.main] == ["fa2"]
    assert static.main[0].draft_masks
    assert fields["fa2_mask_indptr"].tolist() == [0, 13, 14, 14 + 300 * 310 // 8]


def test_batch_invariant_plans_mask_their_longer_requests() -> None:
    static, fields = planned(BATCH, invariant=True)
    assert [launch.family for launch in static.main] == ["fa2_invariant"] * 2
    decodes, others = static.main
    assert not decodes.draft_masks and others.draft_masks
    assert fields["fa2_mask_indptr"].tolist() == [0, 15, 15, 20, 20]


@pytest.mark.parametrize(
    "options",
    [
        {"spec": replace(GPU_SPEC, sliding_window=600, causal=False)},
        {"spec": replace(GPU_SPEC, sliding_window=600), "masked": True},
    ],
    ids=["not causal", "masked"],
)
def test_windows_whose_chunks_would_end_too_soon_are_never_split(options: dict[str, Any]) -> None:
    """FA2's chunks of a window end where a causal tile does: a row that sees more would lose it."""
    options = dict(options)
    masked = options.pop("masked", False)
    lens = [300, 200]
    table = np.arange(500).reshape(2, 250)
    masks = trees(lens) if masked else None
    batch = RaggedBatch(lens, [4000, 3000], table, draft_masks=masks)
    static, _ = planned(batch, kernel="fa2", **options)
    assert static.main[0].constants[14] == fa2.NEVER_SPLIT
    # The same lengths are split where attention is causal.
    plain = RaggedBatch(lens, [4000, 3000], table)
    static, _ = planned(plain, kernel="fa2", spec=replace(options["spec"], causal=True))
    assert static.main[0].constants[14] == fa2.SPLIT


# Layers, and what is refused.

LENS, KVS = [3, 0, 2, 1], [6, 5, 9, 4]
SMALL = [[7, 2, 0], [10, 3, 0], [5, 1, 8], [4, 0, 0]]


@frontends
def test_layers_of_one_step_share_masks(frontend: Any) -> None:
    """Whatever they would see without: a batch's masks win over a spec's."""
    specs = [SPEC, replace(SPEC, sliding_window=3), replace(SPEC, causal=False)]
    cache, masks = new_cache(0), trees(LENS)
    batch = RaggedBatch(LENS, KVS, SMALL, draft_masks=masks)
    plans = frontend.plan_layers(specs, cache.spec, batch)
    bits = [np.asarray(plan.views["draft_masks"]).tolist() for plan in plans]
    assert bits[0] == bits[1] == bits[2]
    rows, kv = (torch_rows(1), cache)
    if frontend is jax_frontend:
        rows, kv = jax_rows(1), jax_frontend.cache_handle(cache)
    for layer, spec in enumerate(specs):
        out = np.asarray(frontend.attend(rows[0], kv, plans[layer], layer))
        pools = (pool.numpy() for pool in cache.pools(layer))
        want, _ = oracle.paged_attention(
            np.asarray(rows[0]),
            *pools,
            LENS,
            KVS,
            np.array(SMALL),
            sliding_window=spec.sliding_window,
            draft_masks=masks,
        )
        np.testing.assert_allclose(out, want, atol=2e-6)
    if frontend is jax_frontend:
        jax_frontend.release_cache(kv.name)


REFUSED: dict[str, Any] = {
    "shape": lambda: RaggedBatch(LENS, KVS, SMALL, draft_masks=np.ones((5, 3), bool)),
    "dtype": lambda: RaggedBatch(LENS, KVS, SMALL, draft_masks=np.ones((6, 3))),
    "blind": lambda: RaggedBatch(LENS, KVS, SMALL, draft_masks=np.zeros((6, 3), bool)),
    "bucket": lambda: RaggedBatch(LENS, KVS, SMALL, draft_masks=trees(LENS)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_front_ends_refuse_in_the_same_words(name: str) -> None:
    texts = set()
    for frontend in (torch_backend, jax_frontend):
        with pytest.raises(IsthmusError, match="draft_masks") as error:
            frontend.plan(SPEC, new_cache().spec, REFUSED[name](), bucket=Bucket(4, 6, 12))
        texts.add(f"{type(error.value).__name__}: {error.value}")
    assert len(texts) == 1


@frontends
def test_plans_from_the_device_have_no_masks(frontend: Any) -> None:
    array = jnp.asarray if frontend is jax_frontend else torch.tensor
    lens = array(np.array(KVS, np.int32))
    with pytest.raises(PlanError, match=r"bucket\.draft_masks: got True for a plan made on the"):
        frontend.plan_on_device(
            SPEC,
            new_cache().spec,
            lens,
            array(np.array([0, 3, 3, 5, 6], np.int32)),
            array(np.array(SMALL, np.int32)),
            bucket=Bucket(4, 6, 12, draft_masks=True),
        )


def test_one_program_serves_a_bucket() -> None:
    """Other masks, or none, are data."""
    cache, bucket = new_cache(0), Bucket(5, 8, 14, draft_masks=True)
    kv = jax_frontend.cache_handle(cache)
    traces = []

    @jax.jit
    def step(query: jax.Array, kv: Any, plan: Any) -> jax.Array:
        traces.append(1)
        return jnp.asarray(jax_frontend.attend(query, kv, plan, 0))

    query = jax_rows(1, 8)[0]
    outs = []
    try:
        for masks in (trees(LENS, 1), trees(LENS, 2), None):
            batch = RaggedBatch(LENS, KVS, SMALL, draft_masks=masks)
            plan = jax_frontend.plan(SPEC, cache.spec, batch, bucket=bucket)
            outs.append(np.asarray(step(query, kv, plan)))
    finally:
        jax_frontend.release_cache(kv.name)
    assert len(traces) == 1
    chain = torch_backend.plan(
        SPEC, cache.spec, RaggedBatch(LENS, KVS, SMALL), bucket=Bucket(5, 8, 14)
    )
    want = torch_backend.attend(torch.from_numpy(np.array(query)), cache, chain, 0)
    np.testing.assert_array_equal(outs[2], want.numpy())
    assert not np.array_equal(outs[0], outs[1])


# Serving engines.

ENGINE_MASKS = trees(QUERY_LENS)


@pytest.mark.parametrize("causal", [True, False])
def test_an_engines_steps_of_trees(causal: bool) -> None:
    """The same bits by both front ends, and what the oracle says; padding rows stay."""
    step, batch = EngineStep(), batch_of(draft_masks=ENGINE_MASKS, causal=causal)
    sizes = (4, 16, 0.31, 2)
    other = backend.AttentionImpl(*sizes, model_dtype="float32", order=step.order)
    metadata = backend.MetadataBuilder(CPU, group_of()).build(batch)
    assert metadata.bucket.draft_masks
    assert not metadata.use_cascade
    other.do_kv_cache_update(Layer(), step.key, step.value, step.cache, torch.tensor(slots()))
    want = torch.full_like(step.query, 7.0)
    other.forward(Layer(), step.query, None, None, step.cache, metadata, want)
    np.testing.assert_allclose(want[:ROWS].numpy(), step.want(draft_masks=ENGINE_MASKS), atol=2e-6)
    assert (want[ROWS:] == 7.0).all()
    impl = jax_backend.AttentionImpl(*sizes, model_dtype="float32", order=step.order)
    made = jax_backend.MetadataBuilder(CPU, group_of(), device=jax.devices("cpu")[0]).build(batch)
    cache = jnp.asarray(step.cache.transpose(1, 2).contiguous().numpy())
    got = impl.forward(
        Layer(),
        jnp.asarray(step.query.numpy()),
        None,
        None,
        cache,
        made,
        jnp.full(step.query.shape, 7.0),
    )
    np.testing.assert_array_equal(np.asarray(got), want.numpy())


def test_xqas_words_are_the_masks() -> None:
    drafts = group_of(num_speculative_tokens=2, model_dtype="bfloat16")
    batch = batch_of(draft_masks=ENGINE_MASKS)
    step = StepBuilder(SM90, drafts).build(batch)
    assert step.decodes is not None and step.decodes.mask is not None
    count = step.split.num_decode_tokens
    rows = np.array(QUERY_LENS[: step.split.num_decodes], np.int32)
    assert (step.decodes.mask == draft_mask(rows, True, ENGINE_MASKS)).all()
    for row, own in enumerate(np.repeat(rows, rows)):
        want = sum(1 << k for k in range(own) if ENGINE_MASKS[row, k])
        assert step.decodes.mask[row].tolist() == [want, 0], row
    assert step.decodes.mask.shape == (count, 2)
    chain = StepBuilder(SM90, drafts).build(batch_of())
    assert not chain.bucket.draft_masks
    assert chain.decodes is not None and chain.decodes.mask is not None
    assert chain.decodes.mask[-1].tolist() == [7, 0]


def test_trtllm_gen_reads_no_masks() -> None:
    step = StepBuilder(SM100, group_of(model_dtype="bfloat16")).build(
        batch_of(draft_masks=ENGINE_MASKS)
    )
    assert step.decodes is not None
    assert step.decodes.kernel.kernel == "native"
    assert step.decodes.kernel.why == "TRTLLM-GEN reads no masks of drafts"


def test_recorded_steps_with_masks_have_buckets_of_their_own() -> None:
    starts = np.array([0, 2, 4], np.int32)
    sizes = {"query_start_loc": starts, "seq_lens": [6, 9], "block_table": TABLE[:2]}
    builder = StepBuilder(CPU, group_of(num_speculative_tokens=1), graph_sizes=(4,))
    buckets = [
        builder.build(batch_of(**sizes, num_padded_tokens=4, draft_masks=masks)).bucket
        for masks in (None, np.tril(np.ones((2, 2), bool))[[0, 1, 0, 1]])
    ]
    assert buckets[1] == replace(buckets[0], draft_masks=True)


def test_masks_of_an_engine_are_checked() -> None:
    with pytest.raises(ShapeError, match="draft_masks: got shape"):
        StepBuilder(CPU, group_of()).build(batch_of(draft_masks=ENGINE_MASKS[:3]))
    assert PAGE * len(TABLE[0]) >= max(KV_LENS)
