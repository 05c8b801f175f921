"""Attention sinks on a GPU, of every kernel: against the oracle, and the same bits by JAX."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import FA2, FA2_8BIT, FA3, XQA, need, only
from problem import (
    NUMPY_DTYPES,
    Array,
    CacheKind,
    Call,
    Pages,
    Problem,
    assert_close,
    assert_identical,
    assert_within,
    run_jax,
    run_torch,
)
from steps import SPEC, Decoding, new_step
from stored_steps import StoredStep, new_stored_step
from torch import Tensor

import jax_frontend
import torch_backend
from interop import AttentionPlan, Bucket
from interop.dlpack import to_jax, to_torch
from interop.ffi import python_calls
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

# One takes nearly all, one nothing, the others some.
SINKS = np.array([0.5, 6.0, -np.inf, 2.0, -1.0, 3.0, 0.0, 9.0], np.float32)

BATCHES: dict[str, tuple[list[int], list[int], Bucket | None]] = {
    "prefill": ([9, 40], [9, 40], None),
    "rows of the call": ([9, 40], [9, 40], Bucket(2, 49, 16, without_context=True)),
    "chunks": ([17, 4], [60, 130], None),
    "decode": ([1, 1, 1, 0], [300, 1, 17, 5], None),
    "padded decode": ([1, 1, 0], [300, 1, 17], Bucket(5, 6, 40, 1)),
    "long decode": ([1], [3000], None),
    "padded": ([1, 12, 1], [30, 12, 80], Bucket(6, 20, 30)),
}
calls = pytest.mark.parametrize("call", get_args(Call))
keys = pytest.mark.parametrize("key", [*FA2[:4], *FA3], ids=str)


def on_gpu(sinks: Array = SINKS) -> Tensor:
    return torch.from_numpy(sinks).cuda()


def problem_of(
    key: ModuleKey,
    query_lens: list[int],
    kv_lens: list[int],
    bucket: Bucket | None = None,
    sinks: Array | None = SINKS,
) -> Problem:
    """Normal numbers of eight query heads over pages in random order."""
    rng = np.random.default_rng(0)
    page_size, counts = 16, [-(-n // 16) for n in kv_lens]
    num_pages = sum(counts) + 2
    table = np.zeros((len(kv_lens), max(counts)), np.int32)
    order = np.split(rng.permutation(num_pages)[: sum(counts)], np.cumsum(counts)[:-1])
    for row, ids in zip(table, order, strict=True):
        row[: len(ids)] = ids

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[key.dtype])

    rows = sum(query_lens) if bucket is None else bucket.num_tokens
    pools = [normal(2 * num_pages, page_size, 2, key.head_dim) for _ in "kv"]
    return Problem(
        key.dtype,
        {
            "sliding_window": 33 if key.window else None,
            "logits_soft_cap": 3.0 if key.soft_cap else None,
        },
        query_lens,
        kv_lens,
        *(normal(rows, count, key.head_dim) for count in (8, 2, 2)),
        bucket=bucket,
        pages=Pages(2, 1, page_size, "NHD", table, *pools),
        sinks=sinks,
    )


@keys
@pytest.mark.parametrize("batch", BATCHES)
def test_fa2_and_fa3_against_the_oracle(key: ModuleKey, batch: str) -> None:
    """Kernels that know nothing of sinks, and the launch after them."""
    need(key)
    problem = problem_of(key, *BATCHES[batch])
    with only(key.backend):
        for call in get_args(Call):
            got = run_torch(problem, "cuda", call)
            assert_close(got, problem, key)
        without = run_torch(replace(problem, sinks=None), "cuda", call)
    rows = sum(problem.query_lens)
    ours, theirs = (x.out[:rows, 7].astype(np.float64) for x in (got, without))
    assert np.linalg.norm(ours - theirs) > 0.3 * np.linalg.norm(theirs)
    # Sinks of -inf leave every bit as it is, and none changes the LSE.
    np.testing.assert_array_equal(got.out[:, 2].view(np.int16), without.out[:, 2].view(np.int16))
    np.testing.assert_array_equal(got.lse, without.lse)


@pytest.mark.parametrize("key", [FA2[0], FA2[2], FA3[1]], ids=str)
@pytest.mark.parametrize("batch", ["rows of the call", "padded"])
def test_jax_computes_the_same_bits(key: ModuleKey, batch: str) -> None:
    need(key)
    problem = problem_of(key, *BATCHES[batch])
    with only(key.backend):
        for kind, call in zip(get_args(CacheKind), get_args(Call), strict=True):
            want = run_torch(problem, "cuda", call)
            assert_identical(run_jax(problem, "cuda", kind, call), want)


@calls
def test_a_mixed_batch_of_two_launches(call: Call) -> None:
    """Decodes by FA2, then prefills by FA3, which gives the rows of both their sinks."""
    need(FA3[0])
    key = FA2[0]
    problem = problem_of(key, [1, 1, 0, 1, 200], [40, 300, 9, 1, 200])
    spec = problem.spec
    pages = problem.pages
    assert pages is not None
    shape = torch_backend.PagedKVCache(
        spec, num_layers=2, num_pages=pages.num_pages, page_size=16, device="cuda"
    ).spec
    plan = torch_backend.plan(spec, shape, problem.batch)
    assert [launch.family for launch in plan.static.main] == ["fa2", "fa3"]
    got = run_torch(problem, "cuda", call)
    assert_close(got, problem, key)
    for kind in get_args(CacheKind):
        assert_identical(run_jax(problem, "cuda", kind, call), got)


def test_the_lse_that_nobody_asked_for() -> None:
    """It has a place of its own, and the output is the same without it."""
    need(FA2[0])
    step = new_step(FA2[0], [1] * 6, [700, 3, 90, 1, 16, 17], heads=(8, 2), sinks=True)
    outs = []
    for lse in (True, False):
        plan = torch_backend.plan(
            step.spec, step.cache.spec, step.batch, device="cuda", return_lse=lse
        )
        got = torch_backend.attend(step.query, step.cache, plan, 0, return_lse=lse, sinks=on_gpu())
        outs.append(got[0] if isinstance(got, tuple) else got)
    assert torch.equal(*outs)


@pytest.mark.parametrize("lens", [[1024] * 64, [8192] * 4, [30] * 300], ids=["even", "few", "many"])
def test_real_sizes_against_the_reference(lens: list[int]) -> None:
    need(FA2[0])
    sinks = torch.linspace(-2.0, 9.0, 32, device="cuda")
    step = new_step(FA2[0], [1] * len(lens), lens, sinks=True)
    outs = []
    for family in ("fa2", "reference"):
        got = torch_backend.attend(step.query, step.cache, step.plan(family), 0, sinks=sinks)
        assert isinstance(got, Tensor)
        outs.append(got.float())
    assert (outs[0] - outs[1]).norm() / outs[1].norm() < 1e-2


@pytest.mark.parametrize(
    "lens", [([1] * 5, [700, 3, 90, 1, 5000]), ([1, 1, 3, 200], [40, 5000, 9, 200])]
)
def test_batch_invariant_plans_have_them(lens: tuple[list[int], list[int]]) -> None:
    """Two launches, of which the last one gives all rows their sinks, once."""
    need(FA2[0])
    sinks = torch.linspace(-2.0, 9.0, 32, device="cuda")
    step = new_step(FA2[0], *lens, sinks=True)
    plain = torch_backend.plan(step.spec, step.cache.spec, step.batch, device="cuda")
    invariant = torch_backend.plan(
        step.spec, step.cache.spec, step.batch, device="cuda", batch_invariant=True
    )
    assert {launch.family for launch in invariant.static.main} == {"fa2_invariant"}
    want, want_lse = torch_backend.attend(
        step.query, step.cache, plain, 0, sinks=sinks, return_lse=True
    )
    got, lse = torch_backend.attend(
        step.query, step.cache, invariant, 0, sinks=sinks, return_lse=True
    )
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=5e-3, atol=5e-3)


def test_no_row_is_scaled_by_an_lse_that_was_converted_already() -> None:
    """Every row of many runs: warps of one program share the LSEs that it converts in place."""
    need(FA2[0])
    sinks = torch.linspace(-2.0, 9.0, 32, device="cuda")
    step = new_step(FA2[0], [1] * 300, [30] * 300, sinks=True)
    plan = step.plan("fa2")
    first = torch_backend.attend(step.query, step.cache, plan, 0, sinks=sinks)
    for _ in range(300):
        again = torch_backend.attend(step.query, step.cache, plan, 0, sinks=sinks)
        assert torch.equal(first, again)


# Caches whose pages hold known numbers: 8 bits, and XQA, which has sinks of its own.

LENS = [1, 15, 16, 17, 64, 65, 300, 256, 257, 40, 0]
QUERIES = [1] * 9 + [0, 0]
STORED: dict[str, tuple[ModuleKey, str, dict[str, Any]]] = {
    "fa2, e4m3": (FA2_8BIT[0], "fa2", {"dtype": "float8_e4m3fn"}),
    "fa2, e5m2, scales per head": (
        FA2_8BIT[1], "fa2", {"dtype": "float8_e5m2", "scales": "per head"},
    ),
    "xqa": (XQA[0], "xqa", {"dtype": "float8_e4m3fn"}),
    "xqa, scales per head": (XQA[0], "xqa", {"dtype": "float8_e4m3fn", "scales": "per head"}),
    "xqa, window": (XQA[1], "xqa", {"dtype": "float8_e4m3fn", "sliding_window": 33}),
    "xqa, 16-bit": (XQA[2], "xqa_16bit", {"dtype": "bfloat16"}),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    # Few rows are cut into many parts, whose merge adds the sink; many rows into one.
    "few rows": {"query_lens": QUERIES, "kv_lens": LENS},
    "padded": {"query_lens": QUERIES, "kv_lens": LENS, "bucket": Bucket(16, 14, 100, 1)},
    "one long": {"query_lens": [1], "kv_lens": [2000]},
    "many rows": {"query_lens": [1] * 250, "kv_lens": [33] * 250},
}
stored = pytest.mark.parametrize("name", STORED)


def stored_step(name: str, shape: str) -> tuple[StoredStep, str]:
    key, family, options = STORED[name]
    need(key)
    return new_stored_step(**options, **SHAPES[shape], sinks=True), family


def attended(step: StoredStep, family: str, sinks: Tensor) -> Tensor:
    plan = step.plan(family, lse=False)
    got = torch_backend.attend(step.query, step.cache, plan, step.layer, sinks=sinks)
    assert isinstance(got, Tensor)
    return got


@stored
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_caches_and_xqa_against_the_oracle(name: str, shape: str) -> None:
    step, family = stored_step(name, shape)
    out, lse, sizes = step.want()
    with np.errstate(invalid="ignore"):
        share = np.exp(lse - np.logaddexp(lse, SINKS))
    share = np.where(np.isneginf(lse), 0.0, share)[..., None]
    got = attended(step, family, on_gpu()).float().cpu().numpy()
    want = out * share
    if name == "xqa, 16-bit":
        assert_within("out", got, want, 2e-2)
    else:
        # XQA rounds softmax weights to e4m3, see test_xqa_gpu.py.
        limit = sizes * share / 16 + 0.02 * np.maximum(1.0, np.abs(want))
        assert (np.abs(got - want) <= limit).all(), float((np.abs(got - want) - limit).max())
    assert not got[sizes == 0].any(), "rows that see no key are not zero"
    # Of sinks that were ignored, or counted for another head, that would not be true.
    assert np.linalg.norm(got - want) < 0.3 * np.linalg.norm(out - want)


@stored
@pytest.mark.parametrize("kind", get_args(CacheKind))
def test_jax_on_quantised_caches_and_xqa(name: str, kind: CacheKind) -> None:
    step, family = stored_step(name, "padded")
    want = attended(step, family, on_gpu())
    with only(family), step.jax_cache(kind) as kv:
        plan = jax_frontend.plan(
            step.spec, kv.spec, step.batch, bucket=step.bucket, return_lse=False
        )

        @jax.jit
        def solve(query: Any, kv: Any, plan: Any, layer: Any, sinks: Any) -> Any:
            return jax_frontend.attend(query, kv, plan, layer, sinks=sinks)

        sinks = jnp.asarray(SINKS)
        got = jax.block_until_ready(solve(to_jax(step.query), kv, plan, step.layer, sinks))
    assert torch.equal(to_torch(got), want)


def test_xqa_serves_what_is_announced_without_lse() -> None:
    """The choice stays as it is without sinks."""
    need(XQA[0])
    step, _ = stored_step("xqa", "few rows")
    families = [step.plan(None, lse=lse).static.main[0].family for lse in (False, True)]
    assert families == ["xqa", "fa2"]


@pytest.mark.parametrize("family", ["fa2", "xqa"])
def test_a_recorded_graph_reads_new_weights(family: str) -> None:
    """They are copied to where the old ones are. What a plan loads is enough to record a graph."""
    need(XQA[0] if family == "xqa" else FA2_8BIT[0])
    step = new_stored_step("float8_e4m3fn", [1] * 5, [300, 2, 17, 64, 900], sinks=True)
    plan = step.plan(family, lse=False)
    # CUDA loads FlashInfer's own kernels when they are launched for the first time.
    plain = replace(step, spec=replace(step.spec, sinks=False))
    plain.solve(family, lse=False)
    sinks = torch_backend.refresh_sinks(None, on_gpu().bfloat16())
    address = sinks.data_ptr()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_backend.attend(step.query, step.cache, plan, step.layer, sinks=sinks)
    assert isinstance(out, Tensor)
    seen = []
    for weights in (on_gpu(), on_gpu().flip(0), torch.zeros(8, device="cuda")):
        assert torch_backend.refresh_sinks(sinks, weights.bfloat16()).data_ptr() == address
        graph.replay()
        seen.append(out.clone())
        eager = torch_backend.attend(step.query, step.cache, plan, step.layer, sinks=sinks)
        assert torch.equal(seen[-1], eager)
    assert not torch.equal(seen[0], seen[1])


def test_rows_of_a_merge() -> None:
    """`apply_sinks` by Triton, on rows of any strides, and on the CPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.randn((8, 7, 96), device="cuda", generator=generator).to(dtype).transpose(0, 1)
        lse = 5 * torch.randn((8, 7), device="cuda", generator=generator).t()
        got = torch_backend.apply_sinks(out, lse, on_gpu())
        want = torch_backend.apply_sinks(out.cpu(), lse.cpu(), torch.from_numpy(SINKS))
        torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=1e-6)


def test_a_plan_made_on_the_device() -> None:
    need(FA2[0])
    step = new_step(FA2[0], [1] * 4, [700, 3, 90, 1], heads=(8, 2), sinks=True)
    table = step.batch.page_table
    assert table is not None
    arrays = [step.batch.kv_lens, step.batch.qo_indptr, table]
    lens, starts, pages = (torch.from_numpy(np.asarray(x, np.int32)).cuda() for x in arrays)
    plan, status = torch_backend.plan_on_device(
        step.spec, step.cache.spec, lens, starts, pages, bucket=Bucket(4, 4, 60, 1)
    )
    assert not status.any()
    outs = [
        torch_backend.attend(step.query, step.cache, each, 0, sinks=on_gpu())
        for each in (plan, step.plan("fa2"))
    ]
    assert isinstance(outs[0], Tensor)
    assert isinstance(outs[1], Tensor)
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)


# XLA records a step in its first runs and replays it from then on.
WARM_UP, STEADY = 20, 40
DECODING = Decoding(WARM_UP + STEADY, spec=replace(SPEC, sinks=True))


def unrolled(query: Any, cache: Any, plan: AttentionPlan[Any], sinks: Any) -> Any:
    out = query
    for layer in range(DECODING.num_layers):
        out = jax_frontend.attend(out + query, cache, plan, layer, sinks=sinks[layer])
    return out * 2


def scanned(query: Any, cache: Any, plan: AttentionPlan[Any], sinks: Any) -> Any:
    def body(out: Any, layer: Any) -> Any:
        number, own = layer
        return jax_frontend.attend(out + query, cache, plan, number, sinks=own), None

    return jax.lax.scan(body, query, (jnp.arange(DECODING.num_layers), sinks))[0] * 2


@pytest.mark.parametrize("moves", [False, True], ids=["the same weights", "weights that move"])
@pytest.mark.parametrize("program", [unrolled, scanned])
def test_a_steady_step_runs_no_python(program: Any, moves: bool) -> None:
    """Sinks are slices of the model's weights, which may even lie elsewhere in each step."""
    need(FA2[0])
    cache = DECODING.new_cache()
    handle = jax_frontend.cache_handle(cache)
    try:
        kv = jax_frontend.jax_after_torch(handle)
        layers = np.stack([SINKS + layer for layer in range(DECODING.num_layers)])
        weights = [jnp.asarray(layers) for _ in range(3)]
        jitted = jax.jit(program)
        start = before = python_calls.total()
        out: Any = None
        for step, query in enumerate([to_jax(query) for query in DECODING.queries]):
            if step == WARM_UP:
                jax.block_until_ready(out)
                before = python_calls.total()
            sinks = weights[step % 3 if moves else 0]
            out = jitted(query, kv, DECODING.jax_plan(kv, step), sinks)
        jax.block_until_ready(out)
        # An earlier test's program of the same function may have been recorded already.
        assert start or before > start
        assert python_calls.total() - before <= 0.1 * STEADY
        # The last step once more, by PyTorch.
        plan = DECODING.torch_plan(cache, DECODING.num_steps - 1)
        query = want = DECODING.queries[-1]
        for layer in range(DECODING.num_layers):
            own = torch.from_numpy(layers[layer]).cuda()
            got = torch_backend.attend(want + query, cache, plan, layer, sinks=own)
            assert isinstance(got, Tensor)
            want = got
        assert torch.equal(to_torch(out), want * 2)
    finally:
        jax_frontend.release_cache(handle.name)


@pytest.mark.parametrize("family", [None, "reference"])
def test_without_a_cache(family: str | None) -> None:
    need(FA2[0])
    problem = replace(problem_of(FA2[0], [9, 30], [9, 30]), pages=None)
    with nullcontext() if family is None else only(family):
        got = run_torch(problem, "cuda")
        assert_close(got, problem, FA2[0])
        assert_identical(run_jax(problem, "cuda"), got)


def test_none_is_none() -> None:
    """Rows without sinks are no business of theirs."""
    need(FA2[0])
    problem = problem_of(FA2[0], *BATCHES["chunks"], sinks=None)
    with only("fa2"):
        assert_close(run_torch(problem, "cuda"), problem, FA2[0])
        silent = replace(problem, sinks=np.full(8, -np.inf, np.float32))
        assert_identical(run_torch(silent, "cuda"), run_torch(problem, "cuda"))
