"""From an engine's batch to a step: the split, kernels, lengths, buckets, plans and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from engine_step import (
    BLOCKS,
    CPU,
    PADDED,
    ROWS,
    SCALE,
    SM80,
    SM90,
    SM100,
    SM120,
    TABLE,
    batch_of,
    group_of,
    slots,
)

import jax_frontend.backend as by_jax
from interop import AttentionSpec, errors
from torch_backend.backend import (
    EngineBatch,
    MetadataBuilder,
    Platform,
    Split,
    StepBuilder,
    cumulative_pages,
    decode_lengths,
    draft_mask,
    split_batch,
)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def split(query_lens: list[int], threshold: int, uniform: bool) -> Split:
    lens = np.array(query_lens, np.int32)
    return split_batch(lens, np.concatenate([[0], np.cumsum(lens)]), threshold, uniform)


def split_by_rule(query_lens: list[int], threshold: int, uniform: bool) -> Split:
    """Section 2.3 of the behaviour, request by request."""
    first = query_lens[0]
    boundary = len(query_lens)
    if max(query_lens) <= threshold and (not uniform or threshold <= 1):
        pass
    elif first > threshold:
        boundary = 0
    else:
        for number, length in enumerate(query_lens):
            if (length not in (first, 0)) if uniform else length > threshold:
                boundary = number
                break
    rows = sum(query_lens[:boundary])
    return Split(boundary, len(query_lens) - boundary, rows, sum(query_lens) - rows)


SPLITS = [
    ([1, 1, 1], 1, True, (3, 0, 3, 0)),
    ([1, 1, 5, 1], 1, True, (2, 2, 2, 6)),
    ([5, 1], 1, True, (0, 2, 0, 6)),
    ([2, 2, 0, 0], 3, True, (4, 0, 4, 0)),
    ([2, 2, 3, 2], 3, True, (2, 2, 4, 5)),
    ([2, 1, 3, 0], 3, False, (4, 0, 6, 0)),
    ([2, 1, 4, 1], 3, False, (2, 2, 3, 5)),
    ([0, 0], 1, True, (2, 0, 0, 0)),
]


@pytest.mark.parametrize(("lens", "threshold", "uniform", "want"), SPLITS)
def test_splits(lens: list[int], threshold: int, uniform: bool, want: tuple[int, ...]) -> None:
    assert split(lens, threshold, uniform) == want


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_every_short_batch_is_split_by_the_rule(threshold: int, uniform: bool) -> None:
    for count in (1, 2, 3, 4):
        for lens in itertools.product(range(5), repeat=count):
            got = split(list(lens), threshold, uniform)
            assert got == split_by_rule(list(lens), threshold, uniform), lens


@pytest.mark.parametrize(
    ("lens", "xqa", "want"),
    [
        ((1, 1), False, (1, False)),
        ((3, 3), False, (3, False)),
        ((3, 2), False, (3, True)),
        ((3, 0), False, (3, True)),
        ((3, 0), True, (3, True)),
        ((3, 3), True, (3, False)),
        ((1, 0), True, (1, False)),
        ((), True, (1, False)),
    ],
)
def test_lengths_of_decodes(lens: tuple[int, ...], xqa: bool, want: tuple[int, bool]) -> None:
    assert decode_lengths(ints(*lens), xqa=xqa) == want


def test_masks_of_drafts() -> None:
    """The rows that the behaviour's section 8 gives."""
    assert draft_mask(ints(4), True).tolist() == [[1, 0], [3, 0], [7, 0], [15, 0]]
    assert draft_mask(ints(4), False).tolist() == [[15, 0]] * 4
    assert draft_mask(ints(33), True)[-1].tolist() == [65535, 65535, 1, 0]
    assert draft_mask(ints(2, 0, 1), True).tolist() == [[1, 0], [3, 0], [1, 0]]
    assert draft_mask(ints(2, 0, 1), False).tolist() == [[3, 0], [3, 0], [1, 0]]
    assert draft_mask(ints(4), True).dtype == np.uint16


def test_cumulative_pages_count_pages() -> None:
    assert cumulative_pages(ints(0, 1, 16, 17), 16).tolist() == [0, 0, 1, 2, 4]
    assert cumulative_pages(ints(0, 1, 16, 17), 16).dtype == np.int32


def test_a_mixed_step() -> None:
    step = StepBuilder(SM90, group_of(model_dtype="bfloat16")).build(batch_of())
    assert step.split == Split(2, 3, 2, 9)
    assert step.num_actual_tokens == ROWS
    assert step.bucket.num_tokens == PADDED
    assert step.decodes is not None
    assert step.prefills is not None
    assert (step.decodes.kernel.kernel, step.prefills.kernel.kernel) == ("xqa", "native")
    assert not step.all_trtllm
    assert step.decodes.max_seq_len == 9
    assert step.prefills.cum_seq_lens_q.tolist() == [0, 3, 9, 9]
    assert step.prefills.cum_pages.tolist() == [0, 2, 4, 4]
    assert (step.prefills.max_query_len, step.prefills.max_seq_len) == (6, 7)


@pytest.mark.parametrize(
    ("platform", "kernels"),
    [
        (SM80, ("native", "native")),
        (SM90, ("xqa", "native")),
        (SM100, ("trtllm-gen", "trtllm-gen")),
        (SM120, ("xqa", "native")),
        (CPU, ("native", "native")),
    ],
)
def test_what_each_architecture_would_choose(platform: Platform, kernels: tuple[str, str]) -> None:
    step = StepBuilder(platform, group_of(model_dtype="bfloat16")).build(batch_of())
    assert step.decodes is not None
    assert step.prefills is not None
    assert (step.decodes.kernel.kernel, step.prefills.kernel.kernel) == kernels
    assert step.all_trtllm == (platform is SM100)


def test_drafts_are_decodes_where_kernels_take_them() -> None:
    batch = EngineBatch([0, 3, 5, 8], [6, 9, 8], np.array(TABLE[:3]))
    drafts = group_of(num_speculative_tokens=2)
    got = {
        name: StepBuilder(platform, drafts).build(batch).split
        for name, platform in (("8.0", SM80), ("9.0", SM90), ("10.0", SM100), ("cpu", CPU))
    }
    # FA2 takes queries of one length, XQA and TRTLLM-GEN of several.
    assert got == {
        "8.0": (1, 2, 3, 5),
        "9.0": (3, 0, 8, 0),
        "10.0": (3, 0, 8, 0),
        "cpu": (0, 3, 0, 8),
    }
    step = StepBuilder(SM90, drafts).build(batch)
    assert step.decodes is not None
    assert step.decodes.lengths == (3, True)
    assert step.decodes.mask is not None
    assert step.decodes.mask[:, 0].tolist() == [1, 3, 7, 1, 3, 1, 3, 7]
    step = StepBuilder(SM100, drafts).build(batch)
    assert step.decodes is not None
    assert step.decodes.mask is None


def test_without_a_mask_only_xqa_decodes() -> None:
    for platform, decodes in ((SM90, 2), (SM100, 0), (SM80, 0)):
        step = StepBuilder(platform, group_of()).build(batch_of(causal=False))
        assert step.split.num_decodes == decodes
        assert step.prefills is not None
        assert step.prefills.kernel.kernel == "native"


def test_lengths_that_the_host_must_know() -> None:
    assert not StepBuilder(SM100, group_of()).needs_host_lengths()
    assert StepBuilder(SM100, group_of()).needs_host_lengths(causal=False)
    assert StepBuilder(SM100, group_of(dcp_size=2)).needs_host_lengths()
    assert StepBuilder(SM90, group_of()).needs_host_lengths()
    assert not StepBuilder(SM90, group_of()).needs_host_lengths(prefills=False)
    assert StepBuilder(SM80, group_of()).needs_host_lengths(prefills=False)


def test_block_0_is_nobodys() -> None:
    """Steps that warm up have it in all places, and windows leave it behind them."""
    step = MetadataBuilder(CPU, group_of()).build(batch_of(block_table=np.zeros((5, 3), int)))
    (plan,) = step.plans.values()
    assert plan.views["slot_mapping"].tolist() == [-1] * PADDED
    table = np.array(TABLE)
    table[1, 0] = 0
    step = MetadataBuilder(CPU, group_of()).build(batch_of(block_table=table))
    (plan,) = step.plans.values()
    assert plan.views["slot_mapping"].tolist() == slots() + [-1] * (PADDED - ROWS)
    table[2] = [9, 4, 0]
    lens = [6, 5, 7, 6, 0]
    with pytest.raises(errors.SlotError, match="page_table: got slot 16"):
        table[1] = [9, 4, 0]
        MetadataBuilder(CPU, group_of()).build(batch_of(block_table=table, seq_lens=lens))


@pytest.mark.parametrize("builder", [MetadataBuilder, by_jax.MetadataBuilder])
def test_recorded_steps_have_one_bucket(builder: Any) -> None:
    made = builder(CPU, group_of(), max_model_len=12, graph_sizes=[4])
    statics = set()
    for lens in ([5, 9, 3], [8, 4, 1], [2]):
        count = len(lens)
        starts = list(range(count + 1))
        step = made.build(EngineBatch(starts, lens, np.array(TABLE)[:count], num_padded_tokens=4))
        assert (step.bucket.num_requests, step.bucket.num_tokens) == (4, 4)
        assert step.bucket.num_pages == 12
        assert step.bucket.max_query_len == 1
        (plan,) = step.plans.values()
        statics.add(plan.static)
    assert len(statics) == 1
    # A padding request is one of the decodes.
    step = made.build(
        EngineBatch([0, 1, 2, 2, 2], [5, 9, 0, 0], np.array(TABLE)[:4], num_padded_tokens=4)
    )
    assert step.split == Split(4, 0, 2, 0)
    (plan,) = step.plans.values()
    assert plan.static in statics
    mixed = made.build(batch_of(num_padded_tokens=None))
    assert mixed.bucket.num_requests == 8


def test_inputs_are_left_as_they_are() -> None:
    """I12's neighbour I1: arrays that other groups share are not edited."""
    batch = batch_of()
    before = [np.array(x) for x in (batch.query_start_loc, batch.seq_lens, batch.block_table)]
    MetadataBuilder(CPU, group_of()).build(batch)
    after = batch.query_start_loc, batch.seq_lens, batch.block_table
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_metadata_of_two_steps_share_no_memory() -> None:
    """I17: a step that is still in flight is not overwritten by the next."""
    builder = MetadataBuilder(CPU, group_of())
    batch = batch_of()
    first = builder.build(batch)
    (plan,) = first.plans.values()
    kept = plan.metadata.clone()
    batch.seq_lens[:] = [5, 5, 5, 6, 0]
    second = builder.build(batch)
    assert torch.equal(plan.metadata, kept)
    assert not torch.equal(next(iter(second.plans.values())).metadata, kept)


def test_windows_of_a_group() -> None:
    """I21: refused where layers share a plan, and a plan each where no native kernel is used."""
    specs = tuple(AttentionSpec(4, 2, 16, sm_scale=SCALE, sliding_window=w) for w in (None, 4))
    group = group_of(specs=specs, model_dtype="bfloat16")
    for platform in (SM80, SM90, SM120, CPU):
        with pytest.raises(
            errors.ArgumentError, match=r"group\.specs: got layers with window_left"
        ):
            StepBuilder(platform, group).build(batch_of())
    builder = StepBuilder(SM100, group)
    step = builder.build(batch_of())
    assert step.all_trtllm
    assert builder.specs(step) == group.specs
    decode = EngineBatch([0, 1, 2], [6, 9], np.array(TABLE[:2]))
    assert StepBuilder(SM90, group).build(decode).all_trtllm


def test_soft_caps_of_a_group() -> None:
    specs = tuple(AttentionSpec(4, 2, 16, logits_soft_cap=cap) for cap in (None, 4.0))
    with pytest.raises(errors.ArgumentError, match="layers that differ in soft cap"):
        StepBuilder(CPU, group_of(specs=specs)).build(batch_of())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
def test_sinks_on_10_x(phase: str, causal: bool) -> None:
    """I23: pure and mixed batches are served, though a phase is absent."""
    batch = {
        "decode": EngineBatch([0, 1, 2], [6, 9], np.array(TABLE[:2]), causal=causal),
        "prefill": EngineBatch([0, 3, 9], [7, 6], np.array(TABLE[2:4]), causal=causal),
        "mixed": batch_of(causal=causal),
    }[phase]
    step = StepBuilder(SM100, group_of(sinks=True, model_dtype="bfloat16")).build(batch)
    assert step.all_trtllm == causal
    assert (step.decodes is not None) == (phase != "prefill" and causal)
    assert (step.prefills is not None) == (phase != "decode" or not causal)


@pytest.mark.parametrize("builder", [MetadataBuilder, by_jax.MetadataBuilder])
@pytest.mark.parametrize(
    ("more", "batch", "text"),
    [
        ({"sinks": True, "dcp_size": 2}, {}, "have sinks, and 2 ranks would each count them"),
        ({"dcp_size": 2}, {"causal": False}, "not causal: under decode context parallelism"),
        (
            {"dtype": "nvfp4", "kv_cache_dtype": "nvfp4"},
            {"causal": False},
            "not causal: attention over nvfp4 is causal",
        ),
        ({"dcp_size": 2}, {}, r"a step of 2 ranks has a plan of its own: call dcp\.plan"),
    ],
)
def test_steps_that_nothing_serves(builder: Any, more: Any, batch: Any, text: str) -> None:
    made = builder(CPU, group_of(**more))
    with pytest.raises(errors.UnsupportedError, match=text):
        made.build(batch_of(**batch))


@pytest.mark.parametrize("builder", [MetadataBuilder, by_jax.MetadataBuilder])
@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"query_start_loc": [1, 2]}, errors.ShapeError, "query_start_loc: got 2 offsets from"),
        ({"query_start_loc": [0]}, errors.ShapeError, "query_start_loc: got 1 offsets"),
        ({"seq_lens": [1, 2]}, errors.ShapeError, "seq_lens: got 2 lengths, want 5"),
        ({"query_start_loc": [0, 2, 1, 3, 3, 3]}, errors.LengthError, r"query_lens\[1\]: got -1"),
        ({"seq_lens": [0] * 5}, errors.LengthError, r"kv_lens\[3\]: got 0 with query_lens"),
        (
            {"num_actual_tokens": 3},
            errors.LengthError,
            "num_actual_tokens: got 3, want at least 11",
        ),
        (
            {"num_padded_tokens": 3},
            errors.LengthError,
            "num_padded_tokens: got 3, want at least 11",
        ),
        ({"block_table": [[BLOCKS]] * 5}, errors.PageError, "page_table"),
    ],
)
def test_batches_that_do_not_fit(builder: Any, more: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        builder(CPU, group_of()).build(batch_of(**more))
