"""Steps in flight on a GPU: no step waits for another on the host, and all come out right.

What is right is what PyTorch computes when it waits for the device after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from families import FA2, need
from steps import Decoding
from torch import Tensor

import jax_frontend
from interop.dlpack import to_jax, to_torch
from interop.ffi import python_calls
from jax_frontend import doctor
from torch_backend import PagedKVCache

pytestmark = pytest.mark.gpu

DECODING = Decoding(200)
# XLA records a step in its first runs and replays it from then on.
WARM_UP, STEADY = 20, 50

unrolled = jax.jit(DECODING.jax_step)
scanned = jax.jit(DECODING.jax_scan)
donating = jax.jit(DECODING.jax_step, donate_argnums=1)


def busy(milliseconds: int = 3) -> None:
    """Keep torch's stream from going on for a while."""
    if DECODING.device == "cuda":
        torch.cuda._sleep(milliseconds * 1_500_000)


@pytest.fixture(scope="module")
def right() -> tuple[list[Tensor], PagedKVCache]:
    """Output of each step and the cache after all, one step at a time."""
    need(FA2[0])
    cache, outs = DECODING.new_cache(), []
    for step, query in enumerate(DECODING.queries):
        outs.append(DECODING.torch_step(query, cache, DECODING.torch_plan(cache, step)))
        torch.cuda.synchronize()
    rows = DECODING.requests
    assert all(out[:rows].isfinite().all() and out[:rows].any() for out in outs)
    assert not any(torch.equal(out, outs[0]) for out in outs[1:])
    return outs, cache


@pytest.fixture
def shared() -> Iterator[tuple[PagedKVCache, jax_frontend.CacheHandle]]:
    """A cache, and the handle by which JAX works on it after torch has filled it."""
    cache = DECODING.new_cache()
    handle = jax_frontend.cache_handle(cache)
    yield cache, jax_frontend.jax_after_torch(handle)
    jax_frontend.release_cache(handle.name)


def assert_right(outs: list[Tensor], pools: Any, right: tuple[list[Tensor], PagedKVCache]) -> None:
    wrong = [i for i, out in enumerate(outs) if not torch.equal(out, right[0][i])]
    assert not wrong, f"steps {wrong} of {len(outs)} differ from the step-by-step run"
    if len(outs) == len(right[0]):
        assert torch.equal(pools[0], right[1].k)
        assert torch.equal(pools[1], right[1].v)


def test_torch_steps_in_flight(right: tuple[list[Tensor], PagedKVCache]) -> None:
    cache, outs = DECODING.new_cache(), []
    busy(100)
    for step, query in enumerate(DECODING.queries):
        outs.append(DECODING.torch_step(query, cache, DECODING.torch_plan(cache, step)))
    assert_right(outs, (cache.k, cache.v), right)


def test_jax_steps_in_flight_on_a_cache_of_torch(
    right: tuple[list[Tensor], PagedKVCache], shared: Any
) -> None:
    cache, handle = shared
    queries = [to_jax(query) for query in DECODING.queries]
    busy(100)
    handle = jax_frontend.jax_after_torch(handle)
    outs = []
    for step, query in enumerate(queries):
        out, handle = unrolled(query, handle, DECODING.jax_plan(handle, step))
        outs.append(out)
    jax_frontend.torch_after_jax(handle)
    assert_right([to_torch(out) for out in outs], (cache.k, cache.v), right)


def test_jax_steps_in_flight_on_donated_arrays(right: tuple[list[Tensor], PagedKVCache]) -> None:
    arrays, outs = DECODING.new_arrays(), []
    address = arrays.k.unsafe_buffer_pointer()
    for step, query in enumerate([to_jax(query) for query in DECODING.queries]):
        out, arrays = donating(query, arrays, DECODING.jax_plan(arrays, step))
        outs.append(out)
    assert arrays.k.unsafe_buffer_pointer() == address
    pools = to_torch(arrays.k), to_torch(arrays.v)
    assert_right([to_torch(out) for out in outs], pools, right)


def test_torch_and_jax_take_turns(right: tuple[list[Tensor], PagedKVCache], shared: Any) -> None:
    """The order is kept by events alone, with slow work in each stream to run ahead of."""
    cache, handle = shared
    zeros = jnp.zeros((2048, 2048), jnp.bfloat16)

    @jax.jit
    def slow_step(query: jax.Array, zeros: jax.Array, handle: Any, plan: Any) -> Any:
        product = zeros
        for _ in range(30):
            product = product @ zeros
        # A step that cannot write before the products are done; they add nothing.
        return DECODING.jax_step(query + product[0, 0], handle, plan)

    queries = [to_jax(query) for query in DECODING.queries]
    outs: list[Any] = []
    for step in range(40):
        if step % 2:
            handle = jax_frontend.jax_after_torch(handle)
            plan = DECODING.jax_plan(handle, step)
            out, handle = slow_step(queries[step], zeros, handle, plan)
            jax_frontend.torch_after_jax(handle)
        else:
            busy()
            plan = DECODING.torch_plan(cache, step)
            out = DECODING.torch_step(DECODING.queries[step], cache, plan)
        outs.append(out)
    assert_right([o if isinstance(o, Tensor) else to_torch(o) for o in outs], None, right)


def test_two_jax_programs_share_a_cache(
    right: tuple[list[Tensor], PagedKVCache], shared: Any
) -> None:
    cache, handle = shared
    outs = []
    for step, query in enumerate([to_jax(query) for query in DECODING.queries]):
        program = scanned if step % 3 else unrolled
        out, handle = program(query, handle, DECODING.jax_plan(handle, step))
        outs.append(out)
    jax_frontend.torch_after_jax(handle)
    assert_right([to_torch(out) for out in outs], (cache.k, cache.v), right)


def test_replaying_a_graph_equals_eager(right: tuple[list[Tensor], PagedKVCache]) -> None:
    """New plans are copied into the memory that the graph was recorded with."""
    cache, outs = DECODING.new_cache(), []
    plans = [DECODING.torch_plan(cache, step) for step in range(DECODING.num_steps)]
    assert len({plan.static for plan in plans}) == 1
    query = DECODING.queries[0].clone()
    held = replace(plans[0], metadata=plans[0].metadata.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = DECODING.torch_step(query, cache, held)
    for step, plan in enumerate(plans):
        query.copy_(DECODING.queries[step])
        held.metadata.copy_(plan.metadata)
        graph.replay()
        outs.append(out.clone())
    assert_right(outs, (cache.k, cache.v), right)


def attends(query: jax.Array, cache: Any, plan: Any) -> Any:
    out = query
    for layer in range(DECODING.num_layers):
        out = jax_frontend.attend(out + query, cache, plan, layer)
    # A result of the program itself moves from step to step, and a call that writes it is recorded
    # again: what is returned comes from an operation after it, as in a model.
    return out * 2, cache


def scanned_attends(query: jax.Array, cache: Any, plan: Any) -> Any:
    def body(out: jax.Array, layer: jax.Array) -> Any:
        return jax_frontend.attend(out + query, cache, plan, layer), None

    out, _ = jax.lax.scan(body, query, jnp.arange(DECODING.num_layers))
    return out * 2, cache


PROGRAMS: dict[str, Callable[..., Any]] = {
    "attends, unrolled": attends,
    "attends, in a scan": scanned_attends,
    "writes and attends, unrolled": DECODING.jax_step,
    "writes and attends, in a scan": DECODING.jax_scan,
}


@pytest.mark.parametrize("kind", ["handle", "arrays"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_steady_step_runs_no_python(name: str, kind: str, shared: Any) -> None:
    """XLA replays what it recorded, though each step has new metadata and a query of its own."""
    need(FA2[0])
    cache: Any = shared[1] if kind == "handle" else DECODING.new_arrays()
    program = jax.jit(PROGRAMS[name], donate_argnums=1 if kind == "arrays" else ())
    queries = [to_jax(query) for query in DECODING.queries]
    start = before = python_calls.total()
    for step in range(WARM_UP + STEADY):
        if step == WARM_UP:
            jax.block_until_ready(cache)
            before = python_calls.total()
        _, cache = program(queries[step], cache, DECODING.jax_plan(cache, step))
    jax.block_until_ready(cache)
    assert before > start
    assert python_calls.total() - before <= 0.1 * STEADY


@pytest.mark.parametrize("name", doctor.CHECKS)
def test_all_that_the_doctor_checks_works(name: str) -> None:
    need(FA2[0])
    gpu = jax.devices("gpu")[0]
    with jax.default_device(gpu):
        assert doctor.CHECKS[name](gpu).startswith("work")
