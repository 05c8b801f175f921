"""XQA on a GPU: against the oracle and the reference, and the same bits by PyTorch and by JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import FA2_8BIT, XQA, need
from problem import CacheKind, assert_within
from stored_steps import StoredStep, new_stored_step, spoil
from torch import Tensor

import jax_frontend
import torch_backend
from interop import Bucket, RaggedBatch
from interop.dlpack import to_jax
from interop.errors import PlanError
from interop.ffi import python_calls
from torch_backend.kernels import FAMILIES, Operands
from torch_backend.kernels.flashinfer_abi import ModuleKey

pytestmark = pytest.mark.gpu

FORMATS: dict[str, tuple[ModuleKey, dict[str, Any]]] = {
    "8-bit": (XQA[0], {"dtype": "float8_e4m3fn"}),
    "8-bit, scales per head": (XQA[0], {"dtype": "float8_e4m3fn", "scales": "per head"}),
    "16-bit": (XQA[2], {"dtype": "bfloat16"}),
}
formats = pytest.mark.parametrize("name", FORMATS)

# Around pages of 16 and tiles of 64 and 256 keys; one request sits out, and one has nothing.
LENS = [1, 15, 16, 17, 64, 65, 300, 256, 257, 40, 0]
QUERIES = [1] * 9 + [0, 0]

CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "padded": {"bucket": Bucket(16, 14, 100, 1)},
    "HND": {"layout": "HND"},
    "many heads": {"heads": (32, 8)},
    "one key head": {"heads": (4, 1), "bucket": Bucket(16, 14, 100, 1)},
    "scaled": {"sm_scale": 0.3},
    "not causal": {"causal": False},
}


def family_of(name: str) -> str:
    return "xqa_16bit" if name == "16-bit" else "xqa"


def step_of(
    name: str, lens: list[int], queries: list[int] | None = None, **kind: Any
) -> StoredStep:
    key, options = FORMATS[name]
    need(key)
    return new_stored_step(
        query_lens=[1] * len(lens) if queries is None else queries, kv_lens=lens, **options, **kind
    )


def assert_right(out: Tensor, step: StoredStep) -> None:
    """Compare with the oracle.

    Over 8-bit pages the kernel rounds softmax weights to e4m3, which changes none of them by more
    than a sixteenth. All other rounding is to 16 bits.
    """
    want, _, sizes = step.want()
    got = out.float().cpu().numpy()
    if step.cache.scales is None:
        assert_within("out", got, want, 2e-2)
    else:
        error = np.abs(got - want)
        limit = sizes / 16 + 0.01 * np.maximum(1.0, np.abs(want))
        assert (error <= limit).all(), float((error - limit).max())
    assert not got[sizes == 0].any(), "rows that see no key are not zero"


@pytest.mark.parametrize("case", CASES)
@formats
def test_small_problems_against_the_oracle(name: str, case: str) -> None:
    step = step_of(name, LENS, QUERIES, **CASES[case])
    out, lse = step.solve(family_of(name), lse=False)
    assert lse is None
    assert_right(out, step)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 300, 2000])
@formats
def test_one_request_in_many_parts(name: str, length: int) -> None:
    step = step_of(name, [length])
    assert_right(step.solve(family_of(name), lse=False)[0], step)


@pytest.mark.parametrize("window", [1, 16, 33, 64, 100, 10000])
@pytest.mark.parametrize("scales", ["one", "per head"])
def test_windows(scales: Any, window: int) -> None:
    need(XQA[1])
    options: dict[str, Any] = {"scales": scales, "sliding_window": window}
    step = new_stored_step("float8_e4m3fn", QUERIES, LENS, **options)
    assert_right(step.solve("xqa", lse=False)[0], step)


@pytest.mark.parametrize("kind", get_args(CacheKind))
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", ["exact", "padded", "HND"])
@formats
def test_jax_computes_the_same_bits(name: str, case: str, traced: bool, kind: CacheKind) -> None:
    step = step_of(name, LENS, QUERIES, **CASES[case])
    out, _ = step.solve(family_of(name), lse=False)
    by_jax, _ = step.solve_by_jax(family_of(name), kind, lse=False, traced=traced)
    assert torch.equal(by_jax, out)


LARGE = {
    "even": [1024] * 64,
    "few": [8192] * 8,
    "one": [20000],
    "random": np.random.default_rng(0).integers(1, 4096, 48).tolist(),
    "wide": [2048] * 128,
}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root of the mean square of the error, in units of that of what is right."""
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("lens", LARGE.values(), ids=LARGE)
@formats
def test_real_sizes_against_the_reference(name: str, lens: list[int]) -> None:
    """Queries of 16 bits, which the kernel rounds to 8 over 8-bit pages."""
    step = step_of(name, lens, heads=(32, 8))
    step = replace(step, query=torch.randn_like(step.query))
    want, _ = step.solve("reference")
    got, _ = step.solve(family_of(name), lse=False)
    # e4m3 has steps of an eighth, so the query and the weights are each off by 0.026 on average; an
    # error of the query counts for more where keys are larger than 1.
    assert relative_error(got, want) < (0.01 if name == "16-bit" else 0.12)


@formats
def test_what_nobody_reads_changes_no_bit(name: str) -> None:
    """NaN; but over 8-bit pages past a request's end, which the kernel does read: numbers there."""
    step = step_of(name, LENS, QUERIES, bucket=Bucket(16, 14, 100, 1))
    want, _ = step.solve(family_of(name), lse=False)
    spoil(step, torch.nan, torch.nan if name == "16-bit" else 448.0)
    assert step.cache.k.isnan().any()
    got, _ = step.solve(family_of(name), lse=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("lens", [[3000], [700, 5, 90]])
@formats
def test_streams_do_not_meet(name: str, lens: list[int]) -> None:
    """Calls that count their blocks in semaphores, side by side; each has its own."""
    step = step_of(name, lens)
    plan = step.plan(family_of(name), lse=False)
    want = torch_backend.attend(step.query, step.cache, plan, step.layer)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(torch_backend.attend(step.query, step.cache, plan, step.layer))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@formats
def test_a_recorded_call_sees_new_numbers(name: str) -> None:
    """In a CUDA graph of PyTorch's; scales are changed in place."""
    step = step_of(name, [700, 5, 90], bucket=Bucket(4, 4, 64, 1))
    plan = step.plan(family_of(name), lse=False)
    torch_backend.attend(step.query, step.cache, plan, step.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_backend.attend(step.query, step.cache, plan, step.layer)
    step.query[:3] = step.query[:3].flip(0)
    if step.cache.scales is not None:
        step.cache.set_scales(step.cache.scales * 2.0)
    graph.replay()
    want = torch_backend.attend(step.query, step.cache, plan, step.layer)
    assert torch.equal(out, want)
    assert_right(out, step)


@pytest.mark.parametrize("lens", [[3000], [40] * 30])
@formats
def test_running_allocates_nothing(name: str, lens: list[int]) -> None:
    """So that it can be recorded; output and scratch are the caller's."""
    step = step_of(name, lens)
    plan = step.plan(family_of(name), lse=False)
    (launch,) = plan.static.main
    scratch = torch.empty(max(launch.scratch_bytes, 1), dtype=torch.uint8, device="cuda")
    operands = Operands(
        step.query,
        *step.cache.pools(step.layer),
        plan.views,
        torch.empty(plan.static.out_shape, dtype=step.query.dtype, device="cuda"),
        None,
        scratch,
        *step.cache.scale_operands(step.layer),
    )
    family = FAMILIES[launch.family]
    family.run(launch, operands)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    family.run(launch, operands)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@formats
def test_steady_steps_of_jax_run_no_python(name: str) -> None:
    """XLA replays what it recorded, although each step has a new plan and a new query."""
    lens = np.array([30, 300, 77, 1])
    step = step_of(name, (lens + 40).tolist(), bucket=Bucket(6, 6, 64, 1))

    @jax.jit
    def layers(query: jax.Array, kv: Any, plan: Any) -> jax.Array:
        def body(out: jax.Array, layer: jax.Array) -> Any:
            return jax_frontend.attend(out + query, kv, plan, layer), None

        out, _ = jax.lax.scan(body, query, jnp.arange(3))
        return out

    calls = []
    with step.jax_cache("handle") as kv:
        for i in range(40):
            batch = RaggedBatch([1] * 4, lens + i, step.batch.page_table)
            kernel = family_of(name)
            plan = jax_frontend.plan(
                step.spec, kv.spec, batch, bucket=step.bucket, kernel=kernel, return_lse=False
            )
            query = torch.zeros_like(step.query).normal_()
            jax.block_until_ready(layers(to_jax(query), kv, plan))
            calls.append(python_calls["isthmus_attend"])
    assert calls[-1] == calls[-20]


def test_dispatch_chooses_it_where_no_lse_is_asked_for() -> None:
    step = step_of("8-bit", LENS, QUERIES)
    need(FA2_8BIT[0])
    assert [launch.family for launch in step.plan(None, lse=False).static.main] == ["xqa"]
    assert [launch.family for launch in step.plan(None).static.main] == ["fa2"]
    plan = step.plan(None, lse=False)
    with pytest.raises(PlanError, match="return_lse"):
        torch_backend.attend(step.query, step.cache, plan, step.layer, return_lse=True)


def test_very_uneven_batches_go_to_fa2_and_come_out_right() -> None:
    need(FA2_8BIT[0])
    step = step_of("8-bit", [32768, *([512] * 63)], heads=(32, 8))
    assert [launch.family for launch in step.plan(None, lse=False).static.main] == ["fa2"]
    want, _ = step.solve("reference")
    got, _ = step.solve(None, lse=False)
    assert relative_error(got, want) < 0.01
    by_jax, _ = step.solve_by_jax(None, "handle", lse=False)
    assert torch.equal(by_jax, got)


def test_numbers_beyond_8_bits_are_cut_off() -> None:
    """Of a query, which the kernel rounds to e4m3; the scale of the logits keeps them apart."""
    step = step_of("8-bit", [40], sm_scale=1e-4)
    step.query[0, 0] = 1000.0
    cut = replace(step, query=step.query.clamp(max=448.0))
    got, want = (each.solve("xqa", lse=False)[0] for each in (step, cut))
    assert torch.equal(got, want)
