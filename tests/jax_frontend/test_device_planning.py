"""Plans made inside compiled programs: NumPy's metadata, loops, shards, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from device_plans import (
    CASES,
    EDGES,
    Case,
    hostile,
    judged,
    outside,
    random_lengths,
    seeds,
    spoiled,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
import torch_backend
from interop import AttentionSpec, Bucket, IsthmusError, PlanStatus, RaggedBatch
from interop.attributes import ATTRIBUTES, decode
from interop.device_arithmetic import NumPyArithmetic
from interop.device_metadata import metadata_of
from jax_frontend import device_planning
from torch_backend import PagedKVCache
from torch_backend.device_planning import shape_of

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cache
def program(case: Case) -> Any:
    """Metadata of a case as a compiled program writes them; only shapes are compiled for."""
    return jax.jit(partial(metadata_of, device_planning._ARITHMETIC, case.static[1]))


def equal_to_numpy(case: Case, lengths: Any) -> Any:
    """Status of each request, which is NumPy's as all metadata are."""
    words, status = metadata_of(NumPyArithmetic(), case.static[1], *lengths.arrays)
    ours, verdict = program(case)(*lengths.arrays)
    assert ours.dtype == verdict.dtype == np.int32
    np.testing.assert_array_equal(verdict, status)
    np.testing.assert_array_equal(ours, words)
    assert outside(case, words) == []
    return status


@by_case
@settings(max_examples=80)
@given(seed=seeds, full=st.booleans())
def test_metadata_are_those_of_numpy(case: Case, seed: int, full: bool) -> None:
    # Two numbers of requests, so that few programs are compiled.
    count = case.bucket.num_requests if full else max(case.bucket.num_requests // 2, 1)
    assert not equal_to_numpy(case, random_lengths(case, seed, count)).any()


@by_case
@settings(max_examples=60)
@given(seed=seeds)
def test_what_does_not_fit_is_left_out(case: Case, seed: int) -> None:
    lengths = random_lengths(case, seed, case.bucket.num_requests)
    lengths = spoiled(case, lengths, seed)
    assert equal_to_numpy(case, lengths).tolist() == judged(case, lengths)


@pytest.mark.parametrize("case", CASES + EDGES, ids=lambda case: case.name)
@settings(max_examples=40)
@given(seed=seeds)
def test_no_numbers_lead_outside_the_pool(case: Case, seed: int) -> None:
    lengths = hostile(case, seed, case.bucket.num_requests)
    assert equal_to_numpy(case, lengths).tolist() == judged(case, lengths)


# Attention after it, on the CPU

SPEC = AttentionSpec(4, 2, 8)
BUCKET = Bucket(4, 8, 12)
LENS = np.array([6, 3, 5, 9], np.int32)
OFFSETS = np.array([0, 1, 4, 4, 6], np.int32)
TABLE = np.array([[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]], np.int32)


def new_cache() -> PagedKVCache:
    cache = PagedKVCache(SPEC, num_layers=2, num_pages=12, page_size=4, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)
    return cache


def rows() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((8, heads, 8), np.float32)) for heads in (4, 2, 2)]


def step(kv: Any, query: Any, key: Any, value: Any, *arrays: Any, layer: Any = 1) -> Any:
    plan, status = jax_frontend.plan_on_device(SPEC, kv.spec, *arrays, bucket=BUCKET)
    out, lse, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer, return_lse=True)
    return out, lse, status, kv


def host_answer(cache: PagedKVCache, lens: Any = LENS) -> Any:
    """Output and LSE with a plan of the host, whose step is also written to `cache`."""
    batch = RaggedBatch(np.diff(OFFSETS), lens, TABLE)
    plan = jax_frontend.plan(SPEC, cache.spec, batch, bucket=BUCKET)
    kv = jax_frontend.cache_handle(cache)
    run = jax.jit(partial(jax_frontend.paged_attention, return_lse=True))
    out, lse, kv = run(*rows(), kv, plan, 1)
    jax.block_until_ready(kv)
    return out, lse


def test_attends_and_writes_as_with_a_plan_of_the_host() -> None:
    ours, theirs = new_cache(), new_cache()
    wanted = host_answer(theirs)
    run = jax.jit(step)
    *found, status, kv = run(jax_frontend.cache_handle(ours), *rows(), LENS, OFFSETS, TABLE)
    jax.block_until_ready(kv)
    assert status.tolist() == [PlanStatus.OK] * 4
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


def test_a_gpu_plans_in_a_custom_call() -> None:
    """Here only traced; its attributes say all that the handler needs."""
    case = next(case for case in CASES if case.name == "decode-split")

    @jax.jit
    def planned(*arrays: Any) -> Any:
        return jax_frontend.plan_on_device(
            case.spec, case.cache, *arrays, bucket=case.bucket, split=case.split
        )

    with mock.patch.object(device_planning, "device_facts", lambda device: case.device):
        arrays = random_lengths(case, 0).arrays
        traced = planned.trace(*arrays)
    (call,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "ffi_call"]
    assert call.params["target_name"] == "isthmus_plan"
    attributes = dict(call.params["attributes"])
    launch = decode("".join(attributes[name] for name in ATTRIBUTES)).launch
    assert shape_of(launch, case.device) == case.static[1]
    # No operand is an argument, whose memory moves.
    assert not set(call.invars) & set(traced.jaxpr.jaxpr.invars)


def test_static_parts_are_those_of_the_host_and_traced_once() -> None:
    cache, traces = new_cache(), 0

    @jax.jit
    def planned(*arrays: Any) -> Any:
        nonlocal traces
        traces += 1
        return jax_frontend.plan_on_device(SPEC, cache.spec, *arrays, bucket=BUCKET)

    batch = RaggedBatch(np.diff(OFFSETS), LENS, TABLE)
    host = jax_frontend.plan(SPEC, cache.spec, batch, bucket=BUCKET)
    for lens in (LENS, LENS + 1, LENS[::-1].copy()):
        plan, _ = planned(lens, OFFSETS, TABLE)
        assert plan.static == host.static
    assert traces == 1
    text = planned.lower(LENS, OFFSETS, TABLE).as_text()
    assert "callback" not in text
    assert "custom_call" not in text


@pytest.mark.parametrize("loop", ["scan", "while", "fori"])
def test_inside_loops(loop: str) -> None:
    """Lengths grow from turn to turn; each turn attends as a host plan of its lengths does."""
    lens = np.array([3, 3, 5, 7], np.int32)
    turns = 3
    cache, wanted = new_cache(), []
    other = new_cache()
    for turn in range(turns):
        wanted.append(host_answer(other, lens + turn))

    @jax.jit
    def run(kv: Any, lens: Any, offsets: Any, table: Any, *given: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            kv, lens = carry
            out, lse, status, kv = step(kv, *given, lens, offsets, table)
            return (kv, lens + 1 + status), (out, lse)

        if loop == "scan":
            (kv, _), found = lax.scan(turn, (kv, lens), length=turns)
            return kv, found
        shapes = jax.eval_shape(lambda: turn((kv, lens), None)[1])
        kept = [jnp.zeros((turns, *shape.shape), shape.dtype) for shape in shapes]

        def body(state: Any) -> Any:
            i, carry, kept = state
            carry, found = turn(carry, None)
            return i + 1, carry, [k.at[i].set(f) for k, f in zip(kept, found, strict=True)]

        start = jnp.int32(0), (kv, lens), kept
        if loop == "while":
            _, carry, kept = lax.while_loop(lambda state: state[0] < turns, body, start)
        else:
            _, carry, kept = lax.fori_loop(0, turns, lambda _, state: body(state), start)
        return carry[0], kept

    kv, found = run(jax_frontend.cache_handle(cache), lens, OFFSETS, TABLE, *rows())
    jax.block_until_ready(kv)
    for turn in range(turns):
        for a, b in zip(found, wanted[turn], strict=True):
            np.testing.assert_array_equal(a[turn], b)
    assert torch.equal(cache.k, other.k)


def test_inside_shard_map() -> None:
    """Each device plans for its own requests, with its own cache."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    caches = [new_cache(), new_cache()]
    other = new_cache()
    wanted = host_answer(other, LENS), host_answer(new_cache(), LENS + 1)
    part = P("data")
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, part))

    def local(kv: Any, *stacked: Any) -> Any:
        *found, kv = step(kv, *(array[0] for array in stacked))
        return [x[None] for x in found], kv

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(part,) * 7, out_specs=part))
    stacked = [jnp.stack([x, x]) for x in rows()]
    lens = np.stack([LENS, LENS + 1])
    arrays = [lens, np.stack([OFFSETS] * 2), np.stack([TABLE] * 2)]
    (out, lse, status), kv = run(kv, *stacked, *arrays)
    jax.block_until_ready(kv)
    assert not np.asarray(status).any()
    for i, (a, b) in enumerate(wanted):
        np.testing.assert_array_equal(out[i], a)
        np.testing.assert_array_equal(lse[i], b)
    assert torch.equal(caches[0].k, other.k)


def test_requests_that_fit_are_served_and_others_left_alone() -> None:
    cache, before = new_cache(), new_cache()
    lens, table = LENS.copy(), TABLE.copy()
    lens[0], table[3, 1] = 2**31 - 1, 12
    kv = jax_frontend.cache_handle(cache)
    out, lse, status, kv = jax.jit(step)(kv, *rows(), lens, OFFSETS, table)
    jax.block_until_ready(kv)
    assert status.tolist() == [PlanStatus.TABLE_TOO_NARROW, 0, 0, PlanStatus.PAGE_OUTSIDE_POOL]
    whole, _ = host_answer(new_cache())
    np.testing.assert_array_equal(out[1:4], whole[1:4])
    others = np.array([0, 4, 5, 6, 7])
    assert not np.asarray(out)[others].any()
    assert np.isneginf(np.asarray(lse)[others]).all()
    changed = (cache.k != before.k).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[22, 0], [22, 1], [22, 2]]


def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    two = np.zeros((2, 3), np.int32)
    return {
        "uint32": ({"kv_lens": LENS.astype(np.uint32)}, "kv_lens: got uint32, want int32"),
        "float": ({"page_table": TABLE.astype(np.float32)}, "page_table: got float32, want int32"),
        "offsets": ({"cu_q_lens": OFFSETS[1:]}, r"cu_q_lens: got \[4\], want \[5\]"),
        "seats": ({"bucket": Bucket(3, 8, 12)}, r"kv_lens: got \[4\], want \[requests\], 1 to 3"),
        "rank": ({"kv_lens": two}, r"kv_lens: got \[2, 3\], want \[requests\]"),
        "table": ({"page_table": TABLE[:2]}, r"page_table: got \[2, 3\], want \[4, width\]"),
        "promise": (
            {"bucket": replace(BUCKET, without_context=True)},
            "bucket.without_context: got True .*lengths are not known",
        ),
        "no bucket": ({"bucket": None}, "bucket: got NoneType, want a Bucket"),
        "no cache": ({"cache_spec": None}, "cache_spec: got NoneType, want a CacheSpec"),
        "kernel": ({"kernel": "fa3"}, "kernel: got 'fa3', want None, or one of reference"),
        "heads": ({"spec": AttentionSpec(4, 4, 8)}, "cache_spec.num_kv_heads: got 2, want 4"),
    }


@pytest.mark.parametrize("name", refusals())
def test_both_front_ends_refuse_with_the_same_words(name: str) -> None:
    changes, message = refusals()[name]
    arguments: dict[str, Any] = {
        "spec": SPEC,
        "cache_spec": new_cache().spec,
        "kv_lens": LENS,
        "cu_q_lens": OFFSETS,
        "page_table": TABLE,
        "bucket": BUCKET,
    } | changes
    arrays = {key: x for key, x in arguments.items() if isinstance(x, np.ndarray)}
    rest = {key: x for key, x in arguments.items() if key not in arrays}

    @jax.jit
    def planned(arrays: Any) -> Any:
        return jax_frontend.plan_on_device(**rest, **arrays)[1]

    with pytest.raises(IsthmusError, match=message) as ours:
        planned(arrays)
    tensors = {key: torch.from_numpy(x.copy()) for key, x in arrays.items()}
    with pytest.raises(IsthmusError) as theirs:
        torch_backend.plan_on_device(**rest, **tensors)
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("given", [LENS, [6, 3, 5, 9], torch.from_numpy(LENS)], ids=type)
def test_arrays_of_others_are_refused(given: Any) -> None:
    with pytest.raises(IsthmusError, match=r"kv_lens: got .*, want a jax.Array\. For lengths on"):
        jax_frontend.plan_on_device(SPEC, new_cache().spec, given, OFFSETS, TABLE, bucket=BUCKET)


def test_lengths_of_64_bits_are_refused_by_name() -> None:
    with jax.enable_x64(True), pytest.raises(IsthmusError, match=re.escape("kv_lens: got int64")):
        jax_frontend.plan_on_device(
            SPEC,
            new_cache().spec,
            jnp.asarray(LENS.astype(np.int64)),
            jnp.asarray(OFFSETS),
            jnp.asarray(TABLE),
            bucket=BUCKET,
        )
