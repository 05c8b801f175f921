"""What does not fit the signatures of other libraries: refused by name, or left out of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KV_LENS, PAGE_TABLE, new_cache
from tpu_step import Step, assert_right, new_step

import jax_frontend
from interop import AttentionSpec
from interop.errors import (
    ArgumentError,
    DTypeError,
    FrameworkError,
    LengthError,
    ShapeError,
    TransformError,
    UnsupportedError,
)
from jax_frontend.compat import paged_attention, ragged_paged_attention

STEP = new_step()
WANT = STEP.wanted()


def given(**changes: Any) -> Step:
    return replace(STEP, **changes)


# Integers


def test_lists_and_integers_of_any_type_are_taken() -> None:
    metadata = ("kv_lens", "page_indices", "cu_q_lens", "distribution")
    for dtype in (np.int64, np.uint32, np.uint64):
        as_dtype = {name: getattr(STEP, name).astype(dtype) for name in metadata}
        assert_right(given(**as_dtype)(), WANT)
    assert_right(given(**{name: getattr(STEP, name).tolist() for name in metadata})(), WANT)


def test_traced_integers_of_64_bits_do_not_wrap() -> None:
    with jax.enable_x64(True):
        wide = {name: getattr(STEP, name).astype(np.int64) for name in ("kv_lens", "page_indices")}
        assert_right(given(**wide).jitted(), WANT)
        # As int32 these would be 3 and page 2.
        wide["kv_lens"][1] += 2**32
        wide["page_indices"][0, 1] += 2**32
        out, cache, status = given(**wide).jitted(return_status=True)
    assert_left_out(out, cache, status, [0, 1])


def assert_left_out(out: Any, cache: Any, status: Any, requests: list[int]) -> None:
    """These requests have zeros and have written nothing; the others are right."""
    rows = {0: slice(0, 1), 1: slice(1, 4), 2: slice(4, 4), 3: slice(4, 6)}
    out, cache, wanted = np.array(out), np.asarray(cache), WANT[2].copy()
    for request in requests:
        assert not out[rows[request]].any()
        out[rows[request]] = WANT[0][rows[request]]
        # Slots of its new tokens.
        count = rows[request].stop - rows[request].start
        for token in range(KV_LENS[request] - count, KV_LENS[request]):
            page = PAGE_TABLE[request][token // 4], token % 4
            wanted[page] = STEP.kv_cache[page]
    assert_right((out, cache), (WANT[0], WANT[1], wanted))
    assert np.flatnonzero(status).tolist() == requests


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("kv_lens", 1, -1),
        ("kv_lens", 1, 2),  # fewer than the queries
        ("kv_lens", 1, 13),  # more than three pages hold
        ("kv_lens", 1, 2**31 - 1),
        ("page_indices", (1, 0), -1),
        ("page_indices", (1, 0), 12),
        ("page_indices", (1, 0), 2**31 - 1),
    ],
)
def test_a_request_that_does_not_fit_is_left_out(name: str, at: Any, value: int) -> None:
    changed = getattr(STEP, name).copy()
    changed[at] = value
    assert_left_out(*given(**{name: changed}).jitted(return_status=True), [1])


def test_a_request_with_more_queries_than_promised_is_left_out() -> None:
    assert_left_out(*STEP.jitted(max_query_len=2, return_status=True), [1])


@pytest.mark.parametrize("starts", [[0, 1, 10, 10, 12], [0, 1, -1, 4, 6], [0, 7, 4, 4, 6]], ids=str)
def test_query_offsets_that_are_none_write_nothing_elsewhere(starts: list[int]) -> None:
    offsets = STEP.cu_q_lens.copy()
    offsets[:5] = starts
    out, cache, status = given(cu_q_lens=offsets).jitted(return_status=True)
    assert np.asarray(status)[:4].any()
    assert np.isfinite(out).all()
    own = np.unique([PAGE_TABLE[r][t // 4] for r in range(4) for t in range(KV_LENS[r])])
    others = np.setdiff1d(np.arange(12), own)
    np.testing.assert_array_equal(np.asarray(cache)[others], STEP.kv_cache[others])


OUT_OF_ORDER = [[2, 1, 4], [0, 5, 4], [-1, 1, 4], [1, 1, 7], [2**31 - 1, -2, 4], [1, 1, -1]]


@pytest.mark.parametrize("ends", OUT_OF_ORDER, ids=str)
def test_a_distribution_out_of_order(ends: list[int]) -> None:
    step = given(distribution=np.array(ends, np.int32))
    with pytest.raises(ArgumentError, match=r"distribution: got .*want 0 <= i <= j <= k <= 6"):
        step()
    with pytest.raises(ArgumentError, match="distribution: got"):
        given(distribution=jnp.array(ends))()
    out, cache, status = step.jitted(return_status=True)
    assert np.asarray(status).all()
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(cache, STEP.kv_cache)


def test_only_requests_within_the_distribution_count() -> None:
    for ends in ([0, 0, 2], [2, 2, 2]):
        out, cache = given(distribution=np.array(ends, np.int32)).jitted()
        assert not np.asarray(out)[4:].any()
        wanted = WANT[2].copy()
        for token in (7, 8):
            wanted[8 if token == 8 else 1, token % 4] = STEP.kv_cache[
                8 if token == 8 else 1, token % 4
            ]
        np.testing.assert_array_equal(cache, wanted)
        np.testing.assert_array_equal(np.asarray(out)[:4], STEP.jitted()[0][:4])


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows of another rank": ({"q": STEP.q[0]}, ShapeError, r"q: got shape \[4, 8\], want 3"),
    "no JAX array": ({"k": np.ones((9, 2, 8))}, FrameworkError, "k: got numpy.ndarray"),
    "no keys": ({"k": None}, FrameworkError, "k: got builtins.NoneType"),
    "key heads": ({"k": STEP.k[:, :1]}, ShapeError, r"kv_cache: got .*1 heads of 8"),
    "value heads": ({"v": STEP.v[:, :1]}, ShapeError, r"v: got \[9, 1, 8\], want \[9, 2, 8\]"),
    "query heads": ({"q": STEP.q[:, :3]}, ShapeError, r"q: got .*a multiple of 2, 8\]"),
    "head width": ({"q": STEP.q[:, :, :4]}, ShapeError, "kv_cache: got .*2 heads of 4"),
    "key tokens": ({"k": STEP.k[:8]}, ShapeError, r"k: got \[8, 2, 8\], want \[9, 2, 8\]"),
    "half keys": ({"k": STEP.k.astype("bfloat16")}, DTypeError, "k: got bfloat16, want float32"),
    "half queries": ({"q": STEP.q.astype("float16")}, DTypeError, "q: got float16, want float32"),
    "cache of integers": (
        {"kv_cache": STEP.kv_cache.astype(np.int8)}, DTypeError, "kv_cache: got int8, want one of",
    ),
    "cache of rank 3": ({"kv_cache": STEP.kv_cache[0]}, ShapeError, "kv_cache: got .*4 or 5 dim"),
    "odd rows": ({"kv_cache": STEP.kv_cache[:, :, :3]}, ShapeError, "kv_cache: got .*key 0|Key 0"),
    "lengths of floats": ({"kv_lens": jnp.ones(6)}, DTypeError, "kv_lens: got float32, want int"),
    "no requests": ({"kv_lens": []}, ShapeError, "kv_lens: got no requests"),
    "lengths too large": ({"kv_lens": np.full(6, 2**40)}, LengthError, "kv_lens: got values"),
    "pages of nobody": ({"page_indices": np.zeros(7, int)}, ShapeError, r"page_indices: got \[7\]"),
    "rows of nobody": ({"page_indices": np.zeros((5, 3), int)}, ShapeError, "page_indices: got"),
    "no pages": ({"page_indices": np.zeros((6, 0), int)}, ShapeError, "page_indices: got"),
    "offsets": ({"cu_q_lens": np.zeros(6, int)}, ShapeError, r"cu_q_lens: got \[6\], want \[7\]"),
    "ends": ({"distribution": np.array([4])}, ShapeError, r"distribution: got \[1\], want \[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_are_refused_by_name(case: str) -> None:
    changes, error, text = REFUSED[case]
    step = given(**changes)
    with pytest.raises(error, match=text):
        step()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "scale of 0": ({"sm_scale": 0.0}, "sm_scale: got 0.0, want a finite number other than 0"),
    "no number": ({"sm_scale": "1"}, "sm_scale: got '1'"),
    "truth": ({"sm_scale": True}, "sm_scale: got True"),
    "array": ({"sm_scale": jnp.float32(1)}, r"sm_scale: got a jax.Array float32\[\]"),
    "infinite scale": ({"sm_scale": float("inf")}, "sm_scale: got inf"),
    "key scale": ({"k_scale": 0.0}, "k_scale: got 0.0, want a positive number"),
    "value scale": ({"v_scale": -1.0}, "v_scale: got -1.0, want a positive number"),
    "query scale": ({"q_scale": float("nan")}, "q_scale: got nan, want a positive number"),
    "cap": ({"soft_cap": 0.0}, "soft_cap: got 0.0, want a positive number"),
    "window of 0": ({"sliding_window": 0}, "sliding_window: got 0, want a positive integer"),
    "half a window": ({"sliding_window": 2.5}, "sliding_window: got 2.5"),
    "window": ({"sliding_window": 2**31}, "sliding_window: got 2147483648"),
    "layer of an array": ({"layer": 1}, "layer: got 1, want a layer from 0 to 0"),
    "no layer": ({"layer": "0"}, "layer: got '0', want an integer"),
    "longest": ({"max_query_len": -1}, "max_query_len: got -1"),
    "unknown": ({"out_dtype": "float32"}, "out_dtype: got an argument, want none but"),
    "sink": ({"attention_sink": jnp.ones(3)}, r"attention_sink: got \[3\], want \[4\]"),
    "sink of integers": ({"attention_sink": jnp.ones(4, int)}, "attention_sink: got int32"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_refused_by_name(case: str) -> None:
    options, text = OPTIONS[case]
    arguments = STEP.arguments()
    with pytest.raises(ArgumentError, match=text):
        ragged_paged_attention(*arguments, **options)
    assert not arguments[3].is_deleted()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sm_scale", 0.5), ("k_scale", 0.5), ("soft_cap", 2.0), ("sliding_window", 3)],
)
def test_traced_numbers_are_refused_by_name(name: str, value: float) -> None:
    def step(traced: Any, *arguments: Any) -> Any:
        return ragged_paged_attention(*arguments, **{name: traced})

    with pytest.raises(ArgumentError, match=rf"{name}: got a traced .*known when the program is"):
        jax.jit(step)(value, *STEP.arguments())


def test_arguments_of_tpu_kernels_are_let_by() -> None:
    tuning = {"d_block_sizes": (1, 64, 1, 64), "vmem_limit_bytes": 1 << 20, "mask_value": -1e30}
    assert_right(STEP(num_kv_pages_per_block=2, **tuning), WANT)


@pytest.fixture
def quantised() -> Iterator[jax_frontend.CacheHandle]:
    cache = new_cache(spec=AttentionSpec(4, 2, 8, dtype="float32"), num_layers=1, dtype="fp8")
    handle = jax_frontend.cache_handle(cache)
    yield handle
    jax_frontend.release_cache(handle.name)


def test_a_cache_with_scales_takes_no_others(quantised: Any) -> None:
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(ArgumentError, match=f"{name}: got 2.0, want None for a quantised"):
            given(kv_cache=quantised)(**{name: 2.0})
    with pytest.raises(DTypeError, match="k: got float8_e4m3fn, want float32"):
        given(kv_cache=quantised, k=STEP.k.astype("float8_e4m3fn"))()


def test_transformations_are_refused() -> None:
    with pytest.raises(TransformError, match="no gradient"):
        jax.grad(lambda q: given(q=q)()[0].sum())(STEP.q)
    with pytest.raises(TransformError, match="no vmap"):
        jax.vmap(lambda q: given(q=q)()[0])(jnp.stack([STEP.q, STEP.q]))


# The signature of JAX's kernel for GPUs

PAGED: dict[str, Any] = {
    "q": jnp.ones((2, 4, 8)),
    "k_pages": jnp.ones((2, 5, 4, 8)),
    "v_pages": jnp.ones((2, 5, 4, 8)),
    "block_tables": jnp.zeros((2, 3), jnp.int32),
    "lengths": jnp.array([3, 7]),
}

PAGED_REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scales": ({"k_scales_pages": jnp.ones((2, 5, 4))}, UnsupportedError, "^k_scales_pages: no"),
    "heads": ({"q": jnp.ones((2, 3, 8))}, ShapeError, r"q: got \[2, 3, 8\].*a multiple of 2"),
    "width": ({"q": jnp.ones((2, 4, 16))}, ShapeError, "q: got"),
    "values": ({"v_pages": jnp.ones((2, 5, 4, 4))}, ShapeError, "v_pages: got"),
    "8 bits": ({"k_pages": jnp.ones((2, 5, 4, 8), jnp.int8)}, DTypeError, "k_pages: got int8"),
    "tables": ({"block_tables": jnp.zeros((3, 3), jnp.int32)}, ShapeError, "block_tables: got"),
    "table of floats": ({"block_tables": jnp.zeros((2, 3))}, DTypeError, "block_tables: got float"),
    "lengths": ({"lengths": jnp.array([3])}, ShapeError, r"lengths: got \[1\], want \[2\]"),
    "cap": ({"attn_logits_soft_cap": 0.0}, ArgumentError, "attn_logits_soft_cap: got 0.0"),
}


@pytest.mark.parametrize("case", PAGED_REFUSED)
def test_pages_of_each_head_are_refused_by_name(case: str) -> None:
    changes, error, text = PAGED_REFUSED[case]
    with pytest.raises(error, match=text):
        paged_attention(**(PAGED | changes))


@pytest.mark.parametrize("lengths", [[3, -1], [3, 13], [3, 2**31 - 1]], ids=str)
def test_a_length_that_is_none_gives_zeros(lengths: list[int]) -> None:
    out = paged_attention(**(PAGED | {"lengths": jnp.array(lengths)}))
    np.testing.assert_array_equal(out[:, 0, 0], [1.0, 0.0])
    table = jnp.zeros((2, 3), jnp.int32).at[1, 0].set(5)
    out = paged_attention(**(PAGED | {"block_tables": table}))
    np.testing.assert_array_equal(out[:, 0, 0], [1.0, 0.0])
