"""Reads come after the writes before them, however the work is cut into programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from small import BATCH, SIZES, SPEC, jax_rows, new_cache, rows, torch_rows

import jax_frontend
import torch_backend
from interop import Bucket, RaggedBatch
from jax_frontend import handlers
from torch_backend import PageAllocator, PagedKVCache

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "order"

one_append = jax.jit(jax_frontend.append, static_argnums=4, donate_argnums=2)
one_attend = jax.jit(jax_frontend.attend, static_argnums=3)


@pytest.fixture(params=["handle", "arrays"])
def new_kv(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes a cache of zeros of either kind."""
    made = []

    def make(**sizes: Any) -> Any:
        if request.param == "arrays":
            return jax_frontend.init_cache(SPEC, **(SIZES | sizes))
        made.append(f"{NAME}{len(made)}")
        return jax_frontend.cache_handle(new_cache(**sizes), name=made[-1])

    yield make
    for name in made:
        jax_frontend.release_cache(name)


def by_torch(seeds: list[int], layer: int = 1) -> list[torch.Tensor]:
    """Outputs of steps that each append and attend, by the core."""
    cache, outs = new_cache(), []
    plan = torch_backend.plan(SPEC, cache.spec, BATCH)
    for seed in seeds:
        query, key, value = torch_rows(seed)
        out = torch_backend.paged_attention(query, key, value, cache, plan, layer)
        assert isinstance(out, torch.Tensor)
        outs.append(out)
    return outs


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


SEEDS = list(range(20))


def test_append_then_attend_in_one_program(new_kv: Callable[[], Any]) -> None:
    @partial(jax.jit, donate_argnums=3)
    def program(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        outs = []
        for scale in (1.0, 2.0, 3.0):
            kv = jax_frontend.append(scale * key, value, kv, plan, 1)
            outs.append(jax_frontend.attend(query, kv, plan, 1))
        return outs, kv

    kv = new_kv()
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    outs, _ = program(*jax_rows(0), kv, plan)
    cache, want = new_cache(), []
    query, key, value = torch_rows(0)
    torch_plan = torch_backend.plan(SPEC, cache.spec, BATCH)
    for scale in (1.0, 2.0, 3.0):
        want.append(torch_backend.paged_attention(query, scale * key, value, cache, torch_plan, 1))
    assert not torch.equal(want[0], want[1])  # type: ignore[arg-type]
    same(outs, want)


def test_append_and_attend_in_two_programs_without_waiting(new_kv: Callable[[], Any]) -> None:
    kv = new_kv()
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    # The next append overwrites what attend reads, so it takes the cache that attend hands on.
    attend = jax.jit(
        partial(jax_frontend.attend, return_cache=True), static_argnums=3, donate_argnums=1
    )
    outs = []
    for seed in SEEDS:
        query, key, value = jax_rows(seed)
        kv = one_append(key, value, kv, plan, 1)
        out, kv = attend(query, kv, plan, 1)
        outs.append(out)
    same(outs, by_torch(SEEDS))


def test_a_slow_write_is_waited_for(
    new_kv: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows = handlers.write_rows

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        write_rows(*arguments)

    monkeypatch.setattr(handlers, "write_rows", slowly)
    kv = new_kv()
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    query, key, value = jax_rows(0)
    kv = one_append(key, value, kv, plan, 1)
    same([one_attend(query, kv, plan, 1)], by_torch([0]))


def test_a_slow_read_is_waited_for_by_who_takes_its_cache(
    new_kv: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = handlers.run

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        run(*arguments)

    monkeypatch.setattr(handlers, "run", slowly)

    @partial(jax.jit, donate_argnums=3)
    def program(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        kv = jax_frontend.append(key, value, kv, plan, 1)
        out, kv = jax_frontend.attend(query, kv, plan, 1, return_cache=True)
        # Other tokens for the same slots, as if the pages had changed hands.
        kv = jax_frontend.append(7 * key, 7 * value, kv, plan, 1)
        return out, kv

    kv = new_kv()
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    out, _ = program(*jax_rows(0), kv, plan)
    same([out], by_torch([0]))


@pytest.mark.parametrize("call", ["append_then_attend", "paged_attention"])
def test_layers_in_a_scan_unrolled_and_in_torch(new_kv: Callable[[], Any], call: str) -> None:
    weights = np.random.default_rng(3).standard_normal((3, 4, 8), np.float32)

    def block(query: Any, key: Any, value: Any, kv: Any, plan: Any, layer: Any, weight: Any) -> Any:
        # The rows of a layer depend on the layer before, as in a model.
        key = key + query[:, :2] * weight[:2]
        if call == "paged_attention":
            return jax_frontend.paged_attention(query * weight, key, value, kv, plan, layer)
        kv = jax_frontend.append(key, value, kv, plan, layer)
        return jax_frontend.attend(query * weight, kv, plan, layer), kv

    @partial(jax.jit, donate_argnums=3)
    def scanned(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        def body(carry: Any, weight_and_layer: Any) -> Any:
            query, kv = carry
            weight, layer = weight_and_layer
            return block(query, key, value, kv, plan, layer, weight), None

        (query, kv), _ = jax.lax.scan(body, (query, kv), (jnp.asarray(weights), jnp.arange(3)))
        return query, kv

    @partial(jax.jit, donate_argnums=3)
    def unrolled(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
        for layer in range(3):
            query, kv = block(query, key, value, kv, plan, layer, weights[layer])
        return query, kv

    cache = new_cache()
    torch_plan = torch_backend.plan(SPEC, cache.spec, BATCH)
    query, key, value = torch_rows(0)
    for layer, weight in enumerate(torch.from_numpy(weights)):
        keys = key + query[:, :2] * weight[:2]
        result = torch_backend.paged_attention(
            (query * weight).contiguous(), keys, value, cache, torch_plan, layer
        )
        assert isinstance(result, torch.Tensor)
        query = result
    for program in (scanned, unrolled):
        kv = new_kv()
        plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
        out, _ = program(*jax_rows(0), kv, plan)
        np.testing.assert_allclose(out, query.numpy(), rtol=1e-5, atol=1e-6)


def served_batches(steps: int) -> list[tuple[RaggedBatch, Array]]:
    """Steps of an engine: requests come, decode for a while, and leave their pages to others."""
    allocator, rng = PageAllocator(40, 4), np.random.default_rng(4)
    lens: dict[int, int] = {}
    left: dict[int, int] = {}
    batches, born = [], 0
    for _ in range(steps):
        for request in [request for request, count in left.items() if count == 0]:
            allocator.free(request)
            del lens[request], left[request]
        query_lens = dict.fromkeys(lens, 1)
        if len(lens) < 4:
            prompt = int(rng.integers(1, 9))
            lens[born], left[born], query_lens[born] = 0, int(rng.integers(1, 12)), prompt
            allocator.allocate(born, 0)
            born += 1
        for request, query_len in query_lens.items():
            lens[request] += query_len
            left[request] -= 1
            allocator.extend(request, lens[request])
        requests = list(lens)
        batch = RaggedBatch(
            [query_lens[r] for r in requests],
            [lens[r] for r in requests],
            allocator.page_table(requests),
        )
        batches.append((batch, np.asarray(requests)))
    return batches


SERVED = Bucket(num_requests=4, num_tokens=12, num_pages=40)


@partial(jax.jit, donate_argnums=3)
def serving_step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """Two layers, the second of which depends on the first."""
    query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, 0)
    return jax_frontend.paged_attention(query, query[:, :2], value, kv, plan, 2)


def test_a_hundred_steps_in_flight_are_as_good_as_one_by_one(new_kv: Callable[..., Any]) -> None:
    batches = served_batches(100)
    results = []
    for wait in (True, False):
        kv = new_kv(num_pages=40)
        outs = []
        for number, (batch, _) in enumerate(batches):
            plan = jax_frontend.plan(SPEC, kv.spec, batch, bucket=SERVED)
            out, kv = serving_step(*jax_rows(number, SERVED.num_tokens), kv, plan)
            outs.append(jax.block_until_ready(out) if wait else out)
        results.append(outs)
    same(*results)
    cache, want = new_cache(num_pages=40), []
    for number, (batch, _) in enumerate(batches):
        torch_plan = torch_backend.plan(SPEC, cache.spec, batch, bucket=SERVED)
        query, key, value = torch_rows(number, SERVED.num_tokens)
        middle = torch_backend.paged_attention(query, key, value, cache, torch_plan, 0)
        assert isinstance(middle, torch.Tensor)
        keys = middle[:, :2].contiguous()
        want.append(torch_backend.paged_attention(middle, keys, value, cache, torch_plan, 2))
    same(results[0], want)


def test_torch_and_jax_take_turns_on_one_cache() -> None:
    cache, alone = new_cache(num_pages=40), new_cache(num_pages=40)
    kv = jax_frontend.cache_handle(cache, name=NAME)
    try:
        for number, (batch, _) in enumerate(served_batches(12)):
            query, key, value = torch_rows(number, SERVED.num_tokens)
            plan = torch_backend.plan(SPEC, cache.spec, batch, bucket=SERVED)
            want = torch_backend.paged_attention(query, key, value, alone, plan, 1)
            if number % 2:
                got: Any = torch_backend.paged_attention(query, key, value, cache, plan, 1)
            else:
                jax_plan = jax_frontend.plan(SPEC, kv.spec, batch, bucket=SERVED)
                arrays = map(jnp.asarray, rows(number, SERVED.num_tokens))
                got, kv = jax.jit(jax_frontend.paged_attention, static_argnums=5)(
                    *arrays, kv, jax_plan, 1
                )
                # torch does not know of JAX's queue.
                jax.block_until_ready(kv)
            same([got], [want])
            for ours, theirs in ((cache.k, alone.k), (cache.v, alone.v)):
                assert torch.equal(ours, theirs)
    finally:
        jax_frontend.release_cache(NAME)


def test_a_handle_sees_the_memory_and_no_copy_of_it() -> None:
    cache: PagedKVCache = new_cache()
    kv = jax_frontend.cache_handle(cache, name=NAME)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    query = jax_rows(0)[0]
    try:
        assert not np.asarray(one_attend(query, kv, plan, 1)).any()
        # Written by torch, outside of anything that JAX knows of.
        cache.v.fill_(2.0)
        np.testing.assert_allclose(one_attend(query, kv, plan, 1)[:1], 2.0, rtol=1e-6)
    finally:
        jax_frontend.release_cache(NAME)
