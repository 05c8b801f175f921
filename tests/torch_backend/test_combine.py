"""Combining the states of several ranks in PyTorch, and packing them for an all-to-all."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import reduce
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from problem import bits, from_torch, to_torch

from interop.errors import ArgumentError, DeviceError, DTypeError, FrameworkError, ShapeError
from interop.sharding import TokenShards
from torch_backend.merging import (
    combine_states,
    merge_states,
    pack_partial,
    scale_partial,
    unpack_partial,
)

Array = np.ndarray[Any, np.dtype[Any]]
TOKENS, HEADS = 5, 24
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
WIDTHS = pytest.mark.parametrize("width", [16, 64, 80, 128])
NARROW = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
EMPTY = [-np.inf, np.inf, np.nan]


def states(ranks: int, width: int = 16, spread: float = 1.0, seed: int = 0) -> tuple[Array, Array]:
    """Outputs and LSEs of random attention on each rank."""
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((ranks, TOKENS, HEADS, width), np.float32)
    return outs, (spread * rng.standard_normal((ranks, TOKENS, HEADS))).astype(np.float32)


def combined(outs: Array, lses: Array, device: str) -> tuple[Array, Array]:
    """Combine NumPy arrays with the core."""
    out, lse = combine_states(to_torch(outs, device), to_torch(lses, device))
    return from_torch(out), from_torch(lse)


def want(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Combine them with the oracle, in float64, one rank after another."""
    nothing = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    every = zip(outs, lses, strict=True)
    return reduce(lambda one, two: oracle.merge_states(*one, *two), every, nothing)


@RANKS
@WIDTHS
@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_agrees_with_the_oracle(device: str, ranks: int, width: int, spread: float) -> None:
    outs, lses = states(ranks, width, spread)
    out, lse = combined(outs, lses, device)
    want_out, want_lse = want(outs, lses)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_shards_of_a_request_combine_to_its_attention(device: str, ranks: int) -> None:
    # Keys of later ranks match the query better, so that LSEs lie more than 10 apart and a base
    # other than e shows, although it would cancel among equals.
    rng = np.random.default_rng(1)
    length, heads, width = 5 * ranks + 1, 2, 16
    owner = TokenShards(ranks).owner(np.arange(length, dtype=np.int32))
    query = np.abs(rng.standard_normal((1, heads, width)))
    value = rng.standard_normal((length, heads, width))
    key = query * (6 * owner / ranks)[:, None, None] + rng.standard_normal((length, heads, width))
    whole_out, whole_lse = oracle.attend_request(query, key, value, causal=False)
    parts = [
        oracle.attend_request(query, key[owner == rank], value[owner == rank], causal=False)
        for rank in range(ranks)
    ]
    outs, lses = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    assert np.ptp(lses, axis=0).max() > 10
    out, lse = combined(outs, lses, device)
    np.testing.assert_allclose(out, whole_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5)
    wrong, _ = combined(outs, (lses / np.log(2.0)).astype(np.float32), device)
    assert np.abs(wrong - whole_out).max() > 1e-3


@RANKS
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
def test_empty_ranks_count_for_nothing(
    device: str, ranks: int, empty: float, garbage: float
) -> None:
    outs, lses = states(ranks, 80, spread=20.0)
    nothing = np.random.default_rng(2).random(lses.shape) < 0.5
    nothing[:, 0, 0], nothing[:, 0, 1] = True, False
    nothing[1:, 0, 2] = True
    nothing[0, 0, 2] = False
    lses[nothing], outs[nothing] = empty, garbage
    out, lse = combined(outs, lses, device)
    want_out, want_lse = want(outs, lses)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
    # Alone, a rank's state stays as it is to the last bit.
    np.testing.assert_array_equal(out[0, 2], outs[0, 0, 2])
    assert lse[0, 2] == lses[0, 0, 2]
    for rank in range(ranks):
        scaled, total = scale_partial(to_torch(outs[rank], device), to_torch(lses, device), rank)
        assert not from_torch(scaled)[nothing[rank]].any()
        np.testing.assert_array_equal(from_torch(total), lse)


@RANKS
@pytest.mark.parametrize("empty", EMPTY)
def test_where_all_are_empty_the_output_is_zero(device: str, ranks: int, empty: float) -> None:
    outs, lses = states(ranks)
    outs[:], lses[:] = np.nan, empty
    out, lse = combined(outs, lses, device)
    assert not out.any()
    assert (lse == -np.inf).all()
    scaled, total = scale_partial(to_torch(outs[0], device), to_torch(lses, device), 0)
    assert not scaled.any()
    assert (from_torch(total) == -np.inf).all()


@RANKS
@WIDTHS
def test_scaled_partials_sum_up_to_the_whole(device: str, ranks: int, width: int) -> None:
    outs, lses = states(ranks, width, spread=5.0)
    out, lse = combined(outs, lses, device)
    total = np.zeros_like(out)
    for rank in range(ranks):
        scaled, same = scale_partial(to_torch(outs[rank], device), to_torch(lses, device), rank)
        total += from_torch(scaled)
        np.testing.assert_array_equal(from_torch(same), lse)
    # The same products, added up in the same order.
    np.testing.assert_array_equal(total, out)


def test_a_merge_is_a_combination_of_two(device: str) -> None:
    outs, lses = states(2, 80, spread=5.0)
    lses[0, 0], lses[1, 1], lses[:, 2] = -np.inf, np.inf, np.nan
    outs[0, 0], outs[1, 1], outs[:, 2] = np.nan, np.inf, np.nan
    pair = [to_torch(x, device) for x in (outs[0], lses[0], outs[1], lses[1])]
    for ours, theirs in zip(merge_states(*pair), combined(outs, lses, device), strict=True):
        np.testing.assert_array_equal(from_torch(ours), theirs)


@NARROW
def test_16_bit_states_are_combined_in_32_bits_and_rounded_once(device: str, dtype: str) -> None:
    outs, lses = (to_torch(x, device) for x in states(4, spread=2.0))
    narrow = outs.to(getattr(torch, dtype))
    out, lse = combine_states(narrow, lses)
    wide, wide_lse = combine_states(narrow.float(), lses)
    assert (out.dtype, lse.dtype) == (narrow.dtype, torch.float32)
    assert torch.equal(out, wide.to(narrow.dtype))
    assert torch.equal(lse, wide_lse)
    scaled, _ = scale_partial(narrow[1], lses, 1)
    wide, _ = scale_partial(narrow[1].float(), lses, 1)
    assert torch.equal(scaled, wide.to(narrow.dtype))


def test_views_of_any_strides_will_do(device: str) -> None:
    outs, lses = (to_torch(x, device) for x in states(3, 32))
    by_width = outs.transpose(1, 3).contiguous().transpose(1, 3)
    by_head = lses.transpose(1, 2).contiguous().transpose(1, 2)
    some = (slice(None), slice(1, 4), slice(8, 16))
    for ours, theirs in zip(
        combine_states(by_width[some], by_head[some]),
        combine_states(outs[some].contiguous(), lses[some].contiguous()),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        scale_partial(by_width[some][2], by_head[some], 2),
        scale_partial(outs[some][2].contiguous(), lses[some].contiguous(), 2),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        merge_states(by_width[0], by_head[0], outs[1], lses[1]),
        merge_states(outs[0], lses[0], outs[1], lses[1]),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_no_rows_are_no_work(device: str) -> None:
    outs, lses = torch.empty((2, 0, 4, 8), device=device), torch.empty((2, 0, 4), device=device)
    assert [list(x.shape) for x in combine_states(outs, lses)] == [[0, 4, 8], [0, 4]]
    assert [list(x.shape) for x in scale_partial(outs[0], lses, 1)] == [[0, 4, 8], [0, 4]]
    packed = pack_partial(outs[0], lses[0], 2)
    assert list(packed.shape) == [2, 0, 2, 9]
    assert [list(x.shape) for x in unpack_partial(packed)] == [[2, 0, 2, 8], [2, 0, 2]]


def test_the_inputs_stay_as_they_are(device: str) -> None:
    outs, lses = states(3)
    lses[1], outs[1] = np.nan, np.nan
    given = [to_torch(x, device) for x in (outs, lses)]
    combine_states(*given)
    scale_partial(given[0][0], given[1], 0)
    unpack_partial(pack_partial(given[0][0], given[1][0], 2))
    for tensor, was in zip(given, (outs, lses), strict=True):
        np.testing.assert_array_equal(from_torch(tensor), was)


def test_gradients_are_the_weights(device: str) -> None:
    outs, lses = (to_torch(x, device) for x in states(3))
    outs.requires_grad_()
    out, lse = combine_states(outs, lses)
    out.sum().backward()
    assert outs.grad is not None
    weights = torch.exp(lses - lse).unsqueeze(-1).expand_as(outs)
    torch.testing.assert_close(outs.grad, weights)


@RANKS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_packing_is_undone_to_the_last_bit(device: str, ranks: int, dtype: str, width: int) -> None:
    heads = 3 * ranks
    rng = np.random.default_rng(3)
    # All bits as they come, among them many NaNs, and LSEs whose halves are each 16-bit number.
    integer = np.uint32 if dtype == "float32" else np.uint16
    out_bits = rng.integers(0, np.iinfo(integer).max, (TOKENS, heads, width), integer, True)
    lse_bits = rng.integers(0, 2**32, (TOKENS, heads), np.uint32)
    lse_bits[0] = np.float32(-np.inf).view(np.uint32)
    lse_bits[1] = np.float32(np.nan).view(np.uint32) + 5
    signed = np.int32 if dtype == "float32" else np.int16
    out = torch.from_numpy(out_bits.view(signed)).view(getattr(torch, dtype)).to(device)
    lse = torch.from_numpy(lse_bits.view(np.int32)).view(torch.float32).to(device)
    packed = pack_partial(out, lse, ranks)
    words = 1 if dtype == "float32" else 2
    assert list(packed.shape) == [ranks, TOKENS, 3, width + words]
    assert packed.dtype == out.dtype
    assert packed.is_contiguous()
    # The bytes on the wire: each rank's heads, and behind each row its LSE, lower half first.
    message = bits(from_torch(packed)).view(integer)
    for rank in range(ranks):
        of_rank = slice(3 * rank, 3 * rank + 3)
        np.testing.assert_array_equal(message[rank][..., :width], out_bits[:, of_rank])
        np.testing.assert_array_equal(
            message[rank][..., width], lse_bits[:, of_rank].astype(integer)
        )
        if words == 2:
            high = (lse_bits[:, of_rank] >> 16).astype(integer)
            np.testing.assert_array_equal(message[rank][..., width + 1], high)
    outs, lses = unpack_partial(packed)
    by_rank = (ranks, TOKENS, 3)
    assert (list(outs.shape), list(lses.shape)) == ([*by_rank, width], list(by_rank))
    for got, whole in ((outs, out_bits), (lses, lse_bits)):
        array = bits(np.ascontiguousarray(from_torch(got.contiguous()))).view(whole.dtype)
        np.testing.assert_array_equal(np.concatenate(list(array), axis=1), whole)


@NARROW
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_messages_sent_to_all_combine_to_each_ranks_heads(
    device: str, ranks: int, dtype: str
) -> None:
    outs, lses = (to_torch(x, device) for x in states(ranks, 64, spread=10.0))
    lses[0, 1], outs[0, 1] = -torch.inf, torch.nan
    outs = outs.to(getattr(torch, dtype))
    whole_out, whole_lse = combine_states(outs, lses)
    packed = [pack_partial(outs[rank], lses[rank], ranks) for rank in range(ranks)]
    heads = HEADS // ranks
    for rank in range(ranks):
        received = torch.stack([message[rank] for message in packed])
        out, lse = combine_states(*unpack_partial(received))
        own = slice(rank * heads, (rank + 1) * heads)
        assert torch.equal(out, whole_out[:, own])
        assert torch.equal(lse, whole_lse[:, own])


def test_arguments_that_do_not_fit() -> None:
    outs, lses = map(torch.from_numpy, states(2))
    out, lse = outs[0], lses[0]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: combine_states(out, lses), ShapeError, r"^outs: .*\[ranks, tokens, heads, head"),
        (lambda: combine_states(outs, lse), ShapeError, r"^lses: .*want \[2, 5, 24\], to fit outs"),
        (lambda: combine_states(outs[:0], lses[:0]), ShapeError, "^outs: .*at least one rank"),
        (lambda: combine_states(outs.double(), lses), DTypeError, "^outs: got float64"),
        (lambda: combine_states(outs, lses.half()), DTypeError, "^lses: .*want float32"),
        (lambda: combine_states(outs.numpy(), lses), FrameworkError, r"^outs: .*a torch\.Tensor"),
        (lambda: combine_states(outs, lses.to("meta")), DeviceError, "^lses: got meta, want cpu"),
        (lambda: scale_partial(out, lse, 0), ShapeError, r"^lses: .*\[ranks, 5, 24\], to fit out"),
        (lambda: scale_partial(out, lses, 2), ArgumentError, "^rank: got 2, want .* 0 to 1"),
        (lambda: scale_partial(out, lses, -1), ArgumentError, "^rank: got -1"),
        (lambda: pack_partial(out, lse, 5), ShapeError, "^out: got 24 heads for 5 ranks"),
        (lambda: pack_partial(out, lse, 0), ShapeError, "^out: got 24 heads for 0 ranks"),
        (lambda: pack_partial(out.double(), lse, 2), DTypeError, "^out: got float64, want one of"),
        (
            lambda: pack_partial(out.to(torch.float8_e4m3fn), lse, 2),
            DTypeError,
            "^out: got float8_e4m3fn, want one of float32, float16, bfloat16",
        ),
        (lambda: unpack_partial(outs.double()), DTypeError, "^packed: got float64"),
        (lambda: unpack_partial(outs[..., :1]), ShapeError, r"^packed: .*head_dim_v \+ 1\]"),
        (lambda: unpack_partial(outs[0]), ShapeError, "^packed: "),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()


# TRITON_INTERPRET has to be set before Triton is imported, hence a process of its own.
SCRIPT = """
import itertools
import torch
from torch_backend import merging, triton_merging

def compare(ours, theirs, case):
    for got, want in zip(ours, theirs):
        assert got.dtype == want.dtype and got.shape == want.shape, case
        # exp and log are of two libraries: their last bits may differ.
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=str(case))

torch.manual_seed(0)
dtypes = torch.float32, torch.float16, torch.bfloat16
widths = itertools.cycle((16, 80, 7, 128, 1, 1500))
for ranks, dtype in itertools.product((1, 2, 3, 4, 8), dtypes):
    width = next(widths)
    tokens, heads = 3, 5
    # Rows with their LSE behind them, as messages of an all-to-all are.
    outs = torch.randn(ranks, tokens, heads, width + 2).to(dtype)[..., :width]
    lses = (20 * torch.randn(ranks, heads, tokens)).transpose(1, 2)
    lses[torch.rand(lses.shape) < 0.4] = -torch.inf
    lses[0, 0, 0], lses[-1, 0, 1], lses[:, 0, 2] = torch.inf, torch.nan, -torch.inf
    outs[~torch.isfinite(lses)] = torch.nan
    case = ranks, dtype, width
    compare(triton_merging.combine(outs, lses), merging.combine_states(outs, lses), case)
    for rank in range(ranks):
        compare(
            triton_merging.scale(outs[rank], lses, rank),
            merging.scale_partial(outs[rank], lses, rank),
            case,
        )
    pair = outs[0], lses[0], outs[-1].flip(0), lses[-1].flip(0)
    compare(triton_merging.merge(*pair), merging.merge_states(*pair), case)
print("same numbers")
"""


def test_interpreted_kernels_compute_what_torch_computes() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same numbers"
