"""Masks of drafts: their bits, against loops that are written to be read."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interop import Bucket, CacheSpec, RaggedBatch
from interop.dcp import batch_bytes, context_bucket, own_batch, own_bucket
from interop.device_status import check_bucket
from interop.draft_masks import (
    largest_spread,
    mask_words,
    ordered_rows,
    packed_rows,
    spread_rows,
    unpacked_rows,
    within,
)
from interop.errors import ArgumentError, DTypeError, FrameworkError, PlanError, ShapeError
from interop.host import indptr
from interop.plan import Launch
from interop.spec import AttentionSpec

Array = np.ndarray[Any, np.dtype[Any]]

LENS = np.array([3, 0, 2], np.int32)
MASKS = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 1, 1]], bool)


def ints(*numbers: int) -> Array:
    return np.array(numbers, np.int32)


def trees(query_lens: list[int], seed: int) -> Array:
    rng = np.random.default_rng(seed)
    masks = rng.random((sum(query_lens), max(query_lens))) < 0.5
    own = np.concatenate([np.arange(count) for count in query_lens])
    masks[np.arange(len(own)), own] = True
    return masks


def test_a_batch_keeps_what_is_its_own() -> None:
    """A copy, without what lies past each request's tokens."""
    given = MASKS.copy()
    batch = RaggedBatch(LENS, [9, 4, 2], draft_masks=given)
    given[:] = False
    want = [[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert batch.draft_masks is not None
    assert batch.draft_masks.astype(int).tolist() == want
    assert batch.draft_rows(1, causal=True).tolist() == [[1], [3], [5], [1], [2]]
    wide = np.ones((5, 9), bool)
    wide[:, :3] = MASKS
    other = RaggedBatch(LENS, [9, 4, 2], draft_masks=torch.from_numpy(wide))
    assert other.draft_masks is not None and (other.draft_masks == batch.draft_masks).all()


@pytest.mark.parametrize(
    ("masks", "error", "text"),
    [
        (MASKS[:4], ShapeError, r"draft_masks: got shape \(4, 3\), want \[5, 3\] or wider"),
        (MASKS[:, :2], ShapeError, r"draft_masks: got shape \(5, 2\), want \[5, 3\] or wider"),
        (MASKS[0], ShapeError, r"draft_masks: got shape \(3,\)"),
        (MASKS.astype(np.uint8), DTypeError, "draft_masks: got uint8, want bool. Compare first"),
        (MASKS & (np.arange(3) > 0), ArgumentError, r"draft_masks\[0, 0\]: got False, want True"),
        ([[True], [True, False]], ShapeError, "draft_masks: got rows of different lengths"),
        (None.__class__, ShapeError, "draft_masks"),
    ],
)
def test_what_is_no_mask_is_refused(masks: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RaggedBatch(LENS, [9, 4, 2], draft_masks=masks)


def test_a_traced_mask_is_refused() -> None:
    def make(masks: jax.Array) -> jax.Array:
        RaggedBatch(LENS, [9, 4, 2], draft_masks=masks)
        return masks

    with pytest.raises(FrameworkError, match="draft_masks: got a traced array"):
        jax.jit(make)(jnp.asarray(MASKS))


def test_buckets_announce_masks() -> None:
    batch = RaggedBatch(LENS, [9, 4, 2], draft_masks=MASKS)
    plain = RaggedBatch(LENS, [9, 4, 2])
    assert Bucket.exactly(batch, 4).draft_masks and not Bucket.exactly(plain, 4).draft_masks
    table = np.arange(9).reshape(3, 3)
    paged = RaggedBatch(LENS, [9, 4, 2], table, draft_masks=MASKS)
    assert Bucket.covering(paged, 4) == Bucket(4, 8, 8, 4, draft_masks=True)
    Bucket(3, 5, 9, draft_masks=True).check(batch, 9)
    Bucket(3, 5, 9, draft_masks=True).check(plain, 9)
    with pytest.raises(PlanError, match=r"bucket\.draft_masks: got False for a batch with draft_m"):
        Bucket(3, 5, 9).check(batch, 9)
    with pytest.raises(PlanError, match=r"bucket\.draft_masks: got True with without_context=True"):
        Bucket(3, 5, 9, without_context=True, draft_masks=True)
    # Requests that all start in this step are no promise then: masks are read from pages.
    first = RaggedBatch([2], [2], draft_masks=np.eye(2, dtype=bool))
    assert not Bucket.exactly(first, 1).without_context
    with pytest.raises(
        PlanError, match=r"bucket\.draft_masks: got True for a plan made on the dev"
    ):
        check_bucket(Bucket(3, 5, 9, draft_masks=True))


def test_ranks_mask_their_own_rows_alone() -> None:
    batch = RaggedBatch(LENS, [9, 4, 2], draft_masks=MASKS)
    own = own_batch(batch)
    assert own.draft_masks is not None and (own.draft_masks == batch.draft_masks).all()
    bucket = Bucket(3, 5, 9, 3, draft_masks=True)
    context, mine = context_bucket(bucket, batch), own_bucket(bucket)
    assert context is not None and not context.draft_masks
    assert mine == Bucket(3, 5, 5, 3, draft_masks=True)
    other = MASKS.copy()
    other[2, 1] = True
    bytes_of = {
        batch_bytes(RaggedBatch(LENS, [9, 4, 2], draft_masks=masks))
        for masks in (None, MASKS, other)
    }
    assert len(bytes_of) == 3


def test_a_launch_with_masks_travels() -> None:
    spec, cache = AttentionSpec(4, 2, 8), CacheSpec(1, 4, 4, 2, 8)
    launch = Launch("fa2", "pages", spec, cache, (1, 2), 64, draft_masks=True)
    assert pickle.loads(pickle.dumps(launch)) == launch
    assert launch != Launch("fa2", "pages", spec, cache, (1, 2), 64)


@pytest.mark.parametrize("words", [1, 2, 3])
def test_packing_is_undone(words: int) -> None:
    masks = np.random.default_rng(words).random((7, 32 * words - 5)) < 0.5
    rows = packed_rows(masks, words)
    assert rows.shape == (7, words) and rows.dtype == np.int32
    assert (unpacked_rows(rows, masks.shape[1]) == masks).all()
    assert not unpacked_rows(rows, 32 * words)[:, masks.shape[1] :].any()


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.booleans())
def test_rows_without_masks(lens: list[int], causal: bool) -> None:
    words = max(1, mask_words(max(lens)))
    rows = ordered_rows(ints(*lens), words, causal)
    want = [
        [k <= i if causal else True for k in range(count)] + [False] * (32 * words - count)
        for count in lens
        for i in range(count)
    ]
    assert (unpacked_rows(rows, 32 * words) == np.array(want).reshape(-1, 32 * words)).all()


@given(st.data())
def test_bits_over_all_keys_against_a_loop(data: st.DataObject) -> None:
    """Requests without rows, with one, without keys; lengths that fill no whole bytes."""
    count = data.draw(st.integers(1, 5))
    query = [data.draw(st.integers(0, 6)) for _ in range(count)]
    keys = [each + data.draw(st.integers(0, 30)) for each in query]
    if data.draw(st.booleans()):
        # The request that pads a bucket.
        query, keys = [*query, data.draw(st.integers(0, 9))], [*keys, 0]
    own = [each if length else 0 for each, length in zip(query, keys, strict=True)]
    if not max(own):
        return
    masks = trees(own, data.draw(st.integers(0, 99)))
    rows = np.zeros((sum(query), 1), np.int32)
    rows[: sum(own)] = packed_rows(masks & within(ints(*own), masks.shape[1]), 1)
    bound = largest_spread(max(query), len(query), sum(keys))
    out, offsets = np.full(-(-bound // 4), -1, np.int32), np.empty(len(query) + 1, np.int32)
    spread_rows(rows, indptr(ints(*query)), ints(*query), ints(*keys), out, offsets)
    place, seen = 0, out.view(np.uint8)
    row = 0
    for request, (rows_of, length) in enumerate(zip(query, keys, strict=True)):
        assert offsets[request] == place
        for i in range(rows_of):
            for j in range(length):
                bit = i * length + j
                got = seen[place + bit // 8] >> (bit % 8) & 1
                drafted = j - (length - rows_of)
                want = drafted < 0 or bool(masks[row + i, drafted])
                assert bool(got) == want, (request, i, j)
        place += -(-rows_of * length // 8)
        row += rows_of
    assert offsets[-1] == place <= bound
    assert not seen[place:].any()
