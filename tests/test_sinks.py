"""Attention sinks: a logit of each query head that takes part in the softmax and has no value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from dcp_problem import Shared, Sizes, shared
from dcp_ranks import cache_of, rows_of
from dcp_threads import threads
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
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
    bits,
    from_torch,
    run_jax,
    run_torch,
    tolerance_of,
)
from small import BATCH, BUCKET, SIZES, SPEC, jax_rows, new_cache, snapshot, torch_rows, unchanged
from strategies import paged_problems, ragged_problems, seeds

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.attributes import ATTRIBUTES, decode, encode
from interop.attributes import Call as ForeignCall
from interop.dcp import COMBINES
from interop.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FrameworkError,
    IsthmusError,
    PlanError,
    ShapeError,
    TransformError,
)
from interop.plan import PlanStatic
from jax_frontend import dcp, spec_of_shard
from torch_backend import PagedKVCache, merge_states
from torch_backend import dcp as torch_dcp

WITH = replace(SPEC, sinks=True)
# Of 8, 4 and 2 heads; one takes nearly all, one nothing, the others some.
SINKS = np.array([0.5, 6.0, -np.inf, 2.0, -1.0, 3.0, 0.0, 9.0], np.float32)

calls = pytest.mark.parametrize("call", get_args(Call))
kinds = pytest.mark.parametrize("kind", get_args(CacheKind))


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_the_oracle_has_a_sink_as_one_more_key_of_value_0() -> None:
    """Two keys of logit 0 and a sink of logit ln 2: a half of the weight is left for the values."""
    query, key = np.zeros((1, 1, 4)), np.ones((2, 1, 4))
    value = np.array([[[1.0, 0.0]], [[0.0, 3.0]]])
    out, lse = oracle.attend_request(query, key, value, sinks=np.log([2.0]))
    np.testing.assert_allclose(out, [[[0.25, 0.75]]])
    np.testing.assert_allclose(lse, [[np.log(2)]])
    # Neither the scale nor the cap changes it.
    features: dict[str, Any] = {"sm_scale": 7.0, "logits_soft_cap": 0.01}
    again, _ = oracle.attend_request(query, key, value, sinks=np.log([2.0]), **features)
    np.testing.assert_allclose(again, out)


@st.composite
def with_sinks(draw: st.DrawFn, problems: st.SearchStrategy[Problem]) -> Problem:
    """Problems of any kind, with sinks around their logits, and some at the ends."""
    problem = draw(problems)
    heads = problem.query.shape[1]
    sinks = np.random.default_rng(draw(seeds)).normal(1.0, 3.0, heads)
    for head in draw(st.sets(st.integers(0, heads - 1), max_size=2)):
        sinks[head] = draw(st.sampled_from((-np.inf, np.inf, 200.0, -200.0, 0.0)))
    return replace(problem, sinks=sinks.astype(np.float32))


@settings(max_examples=60)
@given(with_sinks(paged_problems()), st.sampled_from(get_args(Call)))
def test_torch_over_pages(problem: Problem, call: Call) -> None:
    assert_close(run_torch(problem, "cpu", call), problem)


@settings(max_examples=40)
@given(with_sinks(ragged_problems()))
def test_torch_without_cache(problem: Problem) -> None:
    assert_close(run_torch(problem, "cpu"), problem)


@kinds
def test_jax_over_pages(kind: CacheKind) -> None:
    """The same bits as PyTorch's; each example is compiled."""

    @settings(max_examples=8)
    @given(with_sinks(paged_problems()), st.sampled_from(get_args(Call)), st.booleans())
    def check(problem: Problem, call: Call, traced: bool) -> None:
        got = run_jax(problem, "cpu", kind, call, traced_layer=traced)
        assert_close(got, problem)
        assert_identical(got, run_torch(problem, "cpu", call))

    check()


@settings(max_examples=8)
@given(with_sinks(ragged_problems()))
def test_jax_without_cache(problem: Problem) -> None:
    got = run_jax(problem, "cpu")
    assert_close(got, problem)
    assert_identical(got, run_torch(problem, "cpu"))


BATCHES: dict[str, tuple[list[int], list[int], Bucket | None]] = {
    "prefill": ([9, 17], [9, 17], None),
    "prefill of the call's own rows": ([9, 17], [9, 17], Bucket(2, 26, 16, without_context=True)),
    "chunks": ([9, 4], [30, 21], None),
    "decode": ([1, 1, 1], [30, 1, 17], None),
    "decode with rows to spare": ([1, 1, 0], [30, 1, 17], Bucket(5, 6, 20, 1)),
    "mixed": ([1, 1, 12, 0, 3], [30, 8, 12, 5, 21], None),
    "mixed, padded": ([1, 12, 1], [30, 12, 8], Bucket(6, 20, 30)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "soft cap": {"logits_soft_cap": 2.0},
    "scaled, no mask": {"sm_scale": 0.9, "causal": False},
}


def problem_of(batch: str, feature: str, dtype: str, sinks: Array | None, seed: int = 0) -> Problem:
    query_lens, kv_lens, bucket = BATCHES[batch]
    rng = np.random.default_rng(seed)
    heads, kv_heads, width, page_size, num_pages = 8, 2, 16, 4, 40
    counts = [-(-n // page_size) for n in kv_lens]
    table = np.zeros((len(kv_lens), max(counts)), np.int32)
    order = rng.permutation(num_pages)
    for row, ids in zip(table, np.split(order, np.cumsum(counts)), strict=False):
        row[: len(ids)] = ids[: len(row)]

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])

    rows = sum(query_lens) if bucket is None else bucket.num_tokens
    pools = [normal(2 * num_pages, page_size, kv_heads, width) for _ in "kv"]
    return Problem(
        dtype,
        FEATURES[feature],
        query_lens,
        kv_lens,
        *(normal(rows, count, width) for count in (heads, kv_heads, kv_heads)),
        bucket=bucket,
        pages=Pages(2, 1, page_size, "NHD", table, *pools),
        sinks=sinks,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", BATCHES)
def test_sinks_are_not_ignored(batch: str, feature: str, dtype: str) -> None:
    """A kernel that knows nothing of sinks would be far off, of whatever kind a batch is."""
    problem = problem_of(batch, feature, dtype, SINKS)
    got = run_torch(problem, "cpu", "paged_attention")
    assert_close(got, problem)
    without = run_torch(replace(problem, sinks=None), "cpu", "paged_attention")
    rows = sum(problem.query_lens)
    off = np.abs(got.out.astype(np.float64) - without.out.astype(np.float64))[:rows]
    assert off.max() > 20 * tolerance_of(dtype).out
    # Every row of the head whose sink is large, and none of that whose sink is none.
    assert (off[:, 7].max(-1) > 0).all()
    np.testing.assert_array_equal(bits(got.out[:, 2]), bits(without.out[:, 2]))
    np.testing.assert_array_equal(got.lse, without.lse)


@calls
@kinds
@pytest.mark.parametrize("batch", BATCHES)
def test_both_front_ends_compute_the_same_bits(batch: str, kind: CacheKind, call: Call) -> None:
    problem = problem_of(batch, "window", "bfloat16", SINKS)
    assert_identical(run_jax(problem, "cpu", kind, call), run_torch(problem, "cpu", call))


@pytest.mark.parametrize("batch", BATCHES)
def test_none_is_none(batch: str) -> None:
    """Without sinks, as ever; and sinks of -inf leave every bit as it is."""
    problem = problem_of(batch, "plain", "float32", None)
    none = run_torch(problem, "cpu")
    assert_close(none, problem)
    silent = np.full(8, -np.inf, np.float32)
    assert_identical(run_torch(replace(problem, sinks=silent), "cpu"), none)


def cache_and_rows(spec: AttentionSpec = WITH) -> tuple[PagedKVCache, Any]:
    cache = new_cache(seed=1)
    return cache, torch_backend.plan(spec, cache.spec, BATCH)


def test_parts_are_merged_before_the_sink_counts() -> None:
    """The LSE that comes with sinks is that of the keys alone; `apply_sinks` is the last step."""
    query, key, value = torch_rows(2, 16)
    query, sinks = query[:4], torch.from_numpy(SINKS[:4])
    batch = RaggedBatch([2, 2], [8, 8])
    plain = replace(SPEC, dtype="float32", causal=False)
    whole = torch_backend.plan(replace(plain, sinks=True), None, batch)
    want, lse = torch_backend.ragged_attention(
        query, key, value, whole, return_lse=True, sinks=sinks
    )
    halves = []
    for half in (slice(0, 3), slice(3, 8)):
        rows = [torch.cat([x[:8][half], x[8:][half]]) for x in (key, value)]
        count = half.stop - half.start
        plan = torch_backend.plan(plain, None, RaggedBatch([2, 2], [count, count]))
        halves += torch_backend.ragged_attention(query, *rows, plan, return_lse=True)
    out, log = merge_states(*halves)
    torch.testing.assert_close(log, lse)
    torch.testing.assert_close(torch_backend.apply_sinks(out, log, sinks), want)
    by_jax = jax_frontend.apply_sinks(*(jnp.asarray(x.numpy()) for x in (out, log, sinks)))
    np.testing.assert_allclose(by_jax, want, rtol=1e-5, atol=1e-6)


def test_rows_without_keys_and_sinks_at_the_ends() -> None:
    lse = torch.tensor([[-torch.inf, 0.5, 3.0, 1.0, -torch.inf, 100.0]])
    sinks = torch.tensor([2.0, -torch.inf, torch.inf, 1.0, -torch.inf, -100.0])
    out = torch.ones((1, 6, 3), dtype=torch.bfloat16)
    share = torch_backend.apply_sinks(out, lse, sinks)[0, :, 0]
    assert share.tolist() == [0.0, 1.0, 0.0, 0.5, 0.0, 1.0]
    by_jax = jax_frontend.apply_sinks(
        jnp.ones((1, 6, 3), jnp.bfloat16), jnp.asarray(lse.numpy()), jnp.asarray(sinks.numpy())
    )
    assert by_jax[0, :, 0].tolist() == share.tolist()


@dataclass(frozen=True)
class Bad:
    """Sinks that do not fit, made of those that do."""

    error: type[IsthmusError]
    change: Callable[[Any], Any]
    text: str


EITHER = {
    "too few": Bad(ShapeError, lambda x: x[:3], r"sinks: got \[3\], want \[4\]"),
    "a column": Bad(ShapeError, lambda x: x[:, None], r"sinks: got \[4, 1\], want \[4\]"),
    "none": Bad(PlanError, lambda x: None, r"sinks: got None, with a plan made with .*sinks=True"),
    "NumPy": Bad(FrameworkError, np.asarray, r"sinks: got numpy\.ndarray, want a "),
    "a list": Bad(FrameworkError, lambda x: [0.0] * 4, r"sinks: got builtins\.list, want a "),
}
BAD_TORCH = EITHER | {
    "bfloat16": Bad(DTypeError, lambda x: x.bfloat16(), "sinks: got bfloat16, want float32.*once"),
    "float64": Bad(DTypeError, lambda x: x.double(), "sinks: got float64, want float32"),
    "elsewhere": Bad(DeviceError, lambda x: x.to("meta"), "sinks: got meta, want cpu"),
    "of JAX": Bad(FrameworkError, lambda x: jnp.ones(4), r"sinks: got jax.*want a torch\.Tensor"),
    "strided": Bad(
        ShapeError, lambda x: torch.stack([x, x], 1)[:, 0], r"sinks: got strides \(2,\), want a con"
    ),
    "in training": Bad(
        TransformError, lambda x: x.clone().requires_grad_(), "sinks are transformed.*no gradient"
    ),
}
BAD_JAX = EITHER | {
    "bfloat16": Bad(DTypeError, lambda x: x.astype(jnp.bfloat16), "sinks: got bfloat16, want"),
    "integers": Bad(DTypeError, lambda x: jnp.ones(4, int), "sinks: got int32, want float32"),
    "of torch": Bad(FrameworkError, lambda x: torch.ones(4), "sinks: got torch.*want a jax.Array"),
}


@calls
@pytest.mark.parametrize("bad", BAD_TORCH.values(), ids=BAD_TORCH)
def test_torch_refuses(bad: Bad, call: Call) -> None:
    cache, plan = cache_and_rows()
    before, (query, key, value) = snapshot(cache), torch_rows(2)
    sinks = bad.change(torch.zeros(4))
    with pytest.raises(bad.error, match=bad.text):
        if call == "paged_attention":
            torch_backend.paged_attention(query, key, value, cache, plan, 1, sinks=sinks)
        else:
            torch_backend.attend(query, cache, plan, 1, sinks=sinks)
    assert unchanged(cache, before)


@calls
@pytest.mark.parametrize("bad", BAD_JAX.values(), ids=BAD_JAX)
def test_jax_refuses_while_it_traces(bad: Bad, call: Call) -> None:
    kv = jax_frontend.init_cache(WITH, **SIZES)
    plan = jax_frontend.plan(WITH, kv.spec, BATCH)
    query, key, value = jax_rows(2)
    sinks = bad.change(jnp.zeros(4))

    def step() -> Any:
        if call == "paged_attention":
            return jax_frontend.paged_attention(query, key, value, kv, plan, 1, sinks=sinks)
        return jax_frontend.attend(query, kv, plan, 1, sinks=sinks)

    with pytest.raises(bad.error, match=bad.text):
        jax.eval_shape(step)


def test_sinks_that_a_plan_knows_nothing_of() -> None:
    """The same words from both front ends, with a cache and without."""
    text = r"sinks: got logits, with a plan made without, want None\. Plan with AttentionSpec\(.*"
    cache, plan = cache_and_rows(SPEC)
    query, key, value = torch_rows(2)
    bare = replace(SPEC, dtype="float32")
    alone = torch_backend.plan(bare, None, RaggedBatch([6], [6]))
    with pytest.raises(PlanError, match=text):
        torch_backend.attend(query, cache, plan, 1, sinks=torch.zeros(4))
    with pytest.raises(PlanError, match=text):
        torch_backend.ragged_attention(query, key, value, alone, sinks=torch.zeros(4))
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    of_jax = jax_frontend.plan(SPEC, kv.spec, BATCH)
    alone_of_jax = jax_frontend.plan(bare, None, RaggedBatch([6], [6]))
    with pytest.raises(PlanError, match=text):
        jax_frontend.attend(jax_rows(2)[0], kv, of_jax, 1, sinks=jnp.zeros(4))
    with pytest.raises(PlanError, match=text):
        jax_frontend.ragged_attention(*jax_rows(2), alone_of_jax, sinks=jnp.zeros(4))


@pytest.mark.parametrize("given", [None, "yes", 2, [0.0], torch.zeros(4), np.zeros(4)])
def test_the_spec_says_whether_and_not_which(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"sinks: got \w+, want True or False\. The logits"):
        AttentionSpec(4, 2, 8, sinks=given)


def test_no_vmap_and_no_gradient() -> None:
    kv = jax_frontend.init_cache(WITH, **SIZES)
    plan = jax_frontend.plan(WITH, kv.spec, BATCH)
    query, key, value = jax_rows(2)

    def out(sinks: jax.Array) -> jax.Array:
        return jax_frontend.paged_attention(query, key, value, kv, plan, 0, sinks=sinks)[0]

    with pytest.raises(TransformError, match="no vmap"):
        jax.vmap(out)(jnp.zeros((3, 4)))
    with pytest.raises(TransformError, match="no gradient"):
        jax.grad(lambda sinks: out(sinks).sum())(jnp.zeros(4))


def test_new_weights_keep_their_address() -> None:
    """float32 is used as it is, all else converted once; later weights go to the same place."""
    first = torch.tensor([0.5, -1.0, 3.0, 0.25])
    sinks = torch_backend.refresh_sinks(None, first)
    assert sinks.data_ptr() == first.data_ptr()
    for source in (first * 2, (first * 3).bfloat16(), sinks):
        again = torch_backend.refresh_sinks(sinks, source)
        assert again is sinks
        assert again.data_ptr() == first.data_ptr()
        assert torch.equal(sinks, source.float())
    weights = torch.nn.Parameter(first.bfloat16())
    kept = torch_backend.refresh_sinks(None, weights)
    assert kept.dtype == torch.float32
    assert not kept.requires_grad
    address = kept.data_ptr()
    with torch.no_grad():
        weights.mul_(4.0)
    assert torch_backend.refresh_sinks(kept, weights).data_ptr() == address
    assert torch.equal(kept, first * 4)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (torch.zeros(3), ShapeError, r"source: got \[3\], want \[4\]"),
        (torch.zeros(4, 1), ShapeError, r"source: got \[4, 1\], want \[4\]"),
        (torch.zeros(4, dtype=torch.int32), DTypeError, "source: got int32, want one of"),
        (np.zeros(4), FrameworkError, "source: got ndarray, want a torch"),
    ],
)
def test_weights_that_do_not_fit(source: Any, error: type[ArgumentError], text: str) -> None:
    sinks = torch.ones(4)
    with pytest.raises(error, match=text):
        torch_backend.refresh_sinks(sinks, source)
    assert (sinks == 1.0).all()


def test_layers_have_sinks_of_their_own_in_a_scan() -> None:
    """A layer's sinks are a slice of the model's, and the result is that of separate calls."""
    cache, plan = cache_and_rows()
    sinks = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    want = [
        torch_backend.attend(torch_rows(2)[0], cache, plan, layer, sinks=torch.from_numpy(row))
        for layer, row in enumerate(sinks)
    ]
    kv = jax_frontend.cache_handle(cache)
    try:

        @jax.jit
        def step(query: Any, kv: Any, plan: Any, sinks: Any) -> Any:
            def body(kv: Any, layer: Any) -> Any:
                row, number = layer
                out, kv = jax_frontend.attend(query, kv, plan, number, return_cache=True, sinks=row)
                return kv, out

            return jax.lax.scan(body, kv, (sinks, jnp.arange(3)))[1]

        of_jax = jax_frontend.plan(WITH, kv.spec, BATCH)
        outs = step(jax_rows(2)[0], kv, of_jax, jnp.asarray(sinks))
    finally:
        jax_frontend.release_cache(kv.name)
    np.testing.assert_array_equal(outs, torch.stack(want).numpy())


def test_plans_made_on_the_device() -> None:
    cache = new_cache(seed=1)
    table = torch.tensor([[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]], dtype=torch.int32)
    lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([6, 3, 5, 9], [0, 1, 4, 4, 6]))
    plan, status = torch_backend.plan_on_device(
        WITH, cache.spec, lens, starts, table, bucket=BUCKET
    )
    assert not status.any()
    query, sinks = torch_rows(2, BUCKET.num_tokens)[0], torch.from_numpy(SINKS[:4])
    host = torch_backend.plan(WITH, cache.spec, BATCH, bucket=BUCKET)
    assert plan.static == host.static
    got = torch_backend.attend(query, cache, plan, 0, sinks=sinks)
    assert torch.equal(got, torch_backend.attend(query, cache, host, 0, sinks=sinks))


def test_a_call_and_a_plan_say_that_there_are_sinks() -> None:
    cache, plan = cache_and_rows()
    (launch,) = plan.static.main
    attributes = encode(ForeignCall(launch, "cache", 1, False))
    assert decode("".join(attributes[name] for name in ATTRIBUTES)).launch.spec.sinks
    assert PlanStatic.from_json(plan.static.to_json()) == plan.static
    assert plan.static != torch_backend.plan(SPEC, cache.spec, BATCH).static


# Heads over devices.

WHOLE = AttentionSpec(8, 4, 8, dtype="float32", sinks=True)
MESH_KINDS = pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit], ids=str)


@pytest.fixture
def _devices() -> None:
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs 2 virtual devices")


def sharded(mesh: Mesh, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs over pages and over the call's rows, of heads that are split over the mesh."""
    rng = np.random.default_rng(0)
    heads = NamedSharding(mesh, P(None, "kv"))
    rows = [rng.standard_normal((6, count, 8), np.float32) for count in (8, 4, 4)]
    query, key, value = (jax.device_put(x, heads) for x in rows)
    shards = mesh.size
    local = spec_of_shard(WHOLE, shards)
    kv = jax_frontend.init_cache(WHOLE, **SIZES, sharding=NamedSharding(mesh, P(None, None, "kv")))
    place = NamedSharding(mesh, P())
    plan = jax_frontend.plan(local, spec_of_shard(kv.spec, shards), BATCH, device=place)
    alone = jax_frontend.plan(local, None, RaggedBatch([2, 4], [2, 4]), device=place)

    @jax.jit
    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any, alone: Any, sinks: Any) -> Any:
        out, _ = jax_frontend.paged_attention(query, key, value, kv, plan, 1, sinks=sinks)
        return out, jax_frontend.ragged_attention(query, key, value, alone, sinks=sinks)

    return step(query, key, value, kv, plan, alone, sinks)


@MESH_KINDS
@pytest.mark.parametrize("split", [P("kv"), P()], ids=str)
@pytest.mark.usefixtures("_devices")
def test_sinks_are_split_like_the_heads_of_the_query(mesh_kind: AxisType, split: P) -> None:
    """Those that every device has whole are cut in place."""
    devices = np.array(jax.devices("cpu"))
    one = Mesh(devices[:1], ("kv",), axis_types=(mesh_kind,))
    two = Mesh(devices[:2], ("kv",), axis_types=(mesh_kind,))
    want = sharded(one, jax.device_put(SINKS, NamedSharding(one, P())))
    got = sharded(two, jax.device_put(SINKS, NamedSharding(two, split)))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.usefixtures("_devices")
def test_sinks_of_one_shard_are_too_few_for_all() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("kv",))
    with pytest.raises(ShapeError, match=r"sinks: got \[4\], want \[8\]"):
        sharded(mesh, jax.device_put(SINKS[:4], NamedSharding(mesh, P())))


# A cache that is spread over ranks by token.

RANKS = 4
DCP_SPEC = AttentionSpec(8, 2, 8)
PROBLEMS = {
    "decode": shared(
        DCP_SPEC, Sizes(RANKS), [1, 1, 0, 1], [9, 40, 3, 1], bucket=Bucket(5, 5, 20, 1)
    ),
    "mixed": shared(DCP_SPEC, Sizes(RANKS, 2), [1, 5, 0, 7], [30, 5, 8, 24]),
    "bfloat16": shared(DCP_SPEC, Sizes(RANKS), [1, 5, 3], [30, 5, 24], dtype="bfloat16"),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
combines = pytest.mark.parametrize("combine", COMBINES)


def check_dcp(problem: Shared, out: Array, lse: Array) -> None:
    """Compare with the oracle, in which a sink counts once."""
    want, want_lse = problem.answer()
    with np.errstate(invalid="ignore"):
        share = np.exp(want_lse - np.logaddexp(want_lse, SINKS))
    want = want * np.where(np.isneginf(want_lse), 0.0, share)[..., None]
    tolerance = tolerance_of(problem.dtype)
    assert_within("out", out, want, 2 * tolerance.out)
    assert_within("lse", lse, want_lse, 2 * tolerance.lse)
    assert not out[np.isneginf(want_lse)].any()


@problems
@combines
def test_torch_ranks_count_a_sink_once(problem: Shared, combine: str) -> None:
    spec = replace(problem.spec, sinks=True)
    with threads(RANKS) as group:

        def rank_of(rank: int) -> Any:
            cache = cache_of(problem, rank)
            plan = torch_dcp.plan(
                spec, cache.spec, problem.batch, group, verify=False,
                interleave=problem.sizes.interleave, bucket=problem.bucket,
            )  # fmt: skip
            own = torch.from_numpy(np.split(SINKS, RANKS)[rank])
            return torch_dcp.paged_attention(
                *rows_of(problem, rank), cache, plan, 0, group,
                combine=combine, return_lse=True, sinks=own,
            )  # fmt: skip

        found = group.run(rank_of)
    out, lse = (np.concatenate([from_torch(each[i]) for each in found], 1) for i in (0, 1))
    check_dcp(problem, out, lse)


def over_ranks(problem: Shared, spec: AttentionSpec, combine: str, sinks: Any) -> Any:
    """Output and LSE by JAX, of a cache that it owns."""
    sizes = problem.sizes
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("dcp",))
    spread = NamedSharding(mesh, P("dcp"))
    kv = jax_frontend.init_cache(
        spec, num_layers=1, num_pages=sizes.num_pages * RANKS, page_size=sizes.page_size,
        dtype=problem.dtype, sharding=spread,
    )  # fmt: skip
    k, v = (
        jax.device_put(np.concatenate([sizes.dealt(pool, r) for r in range(RANKS)]), spread)
        for pool in (problem.key_pool, problem.value_pool)
    )
    kv = replace(kv, k=k, v=v, spec=replace(kv.spec, num_pages=sizes.num_pages))
    plan = dcp.plan(
        spec, kv.spec, problem.batch, mesh, "dcp",
        interleave=sizes.interleave, bucket=problem.bucket,
    )  # fmt: skip

    def step(query: Any, key: Any, value: Any, kv: Any, plan: Any, sinks: Any) -> Any:
        return dcp.paged_attention(
            query, key, value, kv, plan, 0,
            axis_name="dcp", combine=combine, return_lse=True, sinks=sinks,
        )[:2]  # fmt: skip

    rows = P(None, "dcp")
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(rows, P(), P(), P("dcp"), P("dcp"), P("dcp")),
        out_specs=rows,
        check_vma=False,
    )
    return jax.jit(run)(problem.query, problem.key, problem.value, kv, plan, sinks)


@pytest.fixture
def _ranks() -> Iterator[None]:
    if len(jax.devices("cpu")) < RANKS:
        pytest.skip(f"needs {RANKS} virtual devices")
    yield


@problems
@combines
@pytest.mark.usefixtures("_ranks")
def test_jax_ranks_count_a_sink_once(problem: Shared, combine: str) -> None:
    spec = replace(problem.spec, sinks=True)
    out, lse = over_ranks(problem, spec, combine, jnp.asarray(SINKS))
    check_dcp(problem, np.asarray(out), np.asarray(lse))


@pytest.mark.usefixtures("_ranks")
def test_ranks_refuse_what_does_not_fit() -> None:
    problem, spec = PROBLEMS["decode"], replace(DCP_SPEC, sinks=True)
    with pytest.raises(ShapeError, match=r"sinks: got \[1\], want \[2\]"):
        over_ranks(problem, spec, "a2a", jnp.zeros(RANKS))
    with pytest.raises(PlanError, match="sinks: got logits, with a plan made without"):
        over_ranks(problem, DCP_SPEC, "a2a", jnp.zeros(8))
    with threads(1) as group:

        def one(rank: int) -> None:
            single = shared(DCP_SPEC, Sizes(1), [1], [5])
            cache = cache_of(single, 0)
            plan = torch_dcp.plan(spec, cache.spec, single.batch, group, verify=False)
            before, rows = snapshot(cache), rows_of(single, 0)
            for sinks, error in ((None, PlanError), (torch.zeros(4), ShapeError)):
                with pytest.raises(error, match="sinks: got"):
                    torch_dcp.paged_attention(*rows, cache, plan, 0, group, sinks=sinks)
            assert torch.equal(cache.k.nan_to_num(), before[0].nan_to_num())

        group.run(one)
