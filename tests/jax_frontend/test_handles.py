"""Names of caches: given once, to one cache, and to none by a call that fails."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from small import BATCH, SIZES, SPEC, jax_rows, new_cache, torch_rows

import jax_frontend
import torch_backend
from interop.errors import ArgumentError, CacheNotFoundError, DeviceError, FrameworkError
from jax_frontend import CacheHandle
from torch_backend import PagedKVCache

step = jax.jit(jax_frontend.paged_attention, static_argnums=5)


@pytest.fixture
def handle() -> Iterator[CacheHandle]:
    made = jax_frontend.cache_handle(new_cache(), name="handles")
    yield made
    jax_frontend.release_cache("handles")


def test_threads_that_need_a_name_at_once_get_different_ones() -> None:
    handles: list[CacheHandle] = []
    failed: list[BaseException] = []
    start = threading.Barrier(8)

    def make(caches: list[PagedKVCache]) -> None:
        try:
            start.wait()
            handles.extend(jax_frontend.cache_handle(cache) for cache in caches)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=make, args=([new_cache() for _ in range(30)],))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        for made in {made.name for made in handles}:
            jax_frontend.release_cache(made)
    assert not failed
    assert len({made.name for made in handles}) == 240


def test_a_refused_call_gives_no_name_and_keeps_no_cache() -> None:
    cache = new_cache()
    with pytest.raises(DeviceError, match=r"sharding: got 3, want a jax\.sharding\.Sharding"):
        jax_frontend.cache_handle(cache, name="refused", sharding=3)  # type: ignore[arg-type]
    with pytest.raises(CacheNotFoundError):
        jax_frontend.release_cache("refused")
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_released_cache_is_let_go_of() -> None:
    cache = new_cache()
    kv = jax_frontend.cache_handle(cache, name="let go")
    out, kv = step(*jax_rows(0), kv, jax_frontend.plan(SPEC, cache.spec, BATCH), 1)
    jax.block_until_ready((out, kv.token))
    jax_frontend.release_cache("let go")
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_cache_is_released_by_name(handle: CacheHandle) -> None:
    with pytest.raises(ArgumentError, match=r"^name: got a CacheHandle, want a handle's name"):
        jax_frontend.release_cache(handle)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [jax_frontend.jax_after_torch, jax_frontend.torch_after_jax])
@pytest.mark.parametrize("other", [None, new_cache(), jax_frontend.init_cache(SPEC, **SIZES)])
def test_what_has_no_order_to_carry(order: Any, other: Any) -> None:
    with pytest.raises(FrameworkError, match=r"^cache: got .*, want the handle of a torch-owned"):
        order(other)


@pytest.mark.parametrize("order", [jax_frontend.jax_after_torch, jax_frontend.torch_after_jax])
def test_order_is_carried_between_programs(order: Any, handle: CacheHandle) -> None:
    with pytest.raises(FrameworkError, match=r"^cache: got a traced handle, .*between jitted"):
        jax.jit(order)(handle)


def test_pools_lie_where_a_sharding_says() -> None:
    with pytest.raises(DeviceError, match=r"^sharding: got .*, want a jax\.sharding\.Sharding"):
        jax_frontend.init_cache(SPEC, **SIZES, sharding=jax.devices()[0])  # type: ignore[arg-type]


def test_a_cache_made_in_inference_mode_can_be_written_by_jax() -> None:
    with torch.inference_mode():
        cache = new_cache()
    kv = jax_frontend.cache_handle(cache, name="inference")
    try:
        plan = jax_frontend.plan(SPEC, cache.spec, BATCH)
        out, _ = step(*jax_rows(0), kv, plan, 1)
        by_torch = new_cache()
        wanted = torch_backend.paged_attention(
            *torch_rows(0), by_torch, torch_backend.plan(SPEC, by_torch.spec, BATCH), 1
        )
        np.testing.assert_array_equal(np.asarray(out), wanted)
    finally:
        jax_frontend.release_cache("inference")
