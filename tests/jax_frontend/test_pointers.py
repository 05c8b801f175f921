"""The core works on the very buffers of the program: addresses that are kept, pools that stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from small import BATCH, BUCKET, SIZES, SPEC, jax_rows, new_cache, torch_rows

import jax_frontend
from interop.attributes import Call
from interop.dlpack import to_jax, to_torch
from interop.plan import Launch
from jax_frontend import CacheArrays, handlers
from torch_backend import PagedKVCache
from torch_backend.kernels import Operands

NAME = "pointers"


class Spy:
    """Notes what the core is handed, and then lets it work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.attended: list[dict[str, int]] = []
        self.written: list[tuple[int, ...]] = []
        run, write_rows = handlers.run, handlers.write_rows

        def spied_run(launch: Launch, operands: Operands) -> None:
            seen = operands.as_torch()
            self.launches.append(launch)
            self.attended.append(
                {
                    name: getattr(seen, name).data_ptr()
                    for name in ("query", "key", "value", "out", "lse")
                    if getattr(seen, name) is not None
                }
            )
            run(launch, operands)

        def spied_write(key: Any, value: Any, key_pool: Any, value_pool: Any, *rest: Any) -> None:
            self.written.append(tuple(x.data_ptr() for x in (key, value, key_pool, value_pool)))
            write_rows(key, value, key_pool, value_pool, *rest)

        monkeypatch.setattr(handlers, "run", spied_run)
        monkeypatch.setattr(handlers, "write_rows", spied_write)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture
def owned() -> Iterator[PagedKVCache]:
    cache = new_cache(seed=1)
    jax_frontend.cache_handle(cache, name=NAME)
    yield cache
    jax_frontend.release_cache(NAME)


def pointer(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


@partial(jax.jit, static_argnames="layer", donate_argnames="kv")
def step(query: jax.Array, key: jax.Array, value: jax.Array, kv: Any, plan: Any, layer: int) -> Any:
    kv = jax_frontend.append(key, value, kv, plan, layer)
    return *jax_frontend.attend(query, kv, plan, layer, return_lse=True), kv


def test_rows_and_results_are_the_programs_own(spy: Spy, owned: PagedKVCache) -> None:
    kv = jax_frontend.cache_handle(owned, name=NAME)
    query, key, value = jax_rows(2)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    out, lse, _ = jax.block_until_ready(step(query, key, value, kv, plan, layer=2))
    keys, values = owned.pools(2)
    assert spy.written == [(pointer(key), pointer(value), keys.data_ptr(), values.data_ptr())]
    assert spy.attended == [
        {
            "query": pointer(query),
            "key": keys.data_ptr(),
            "value": values.data_ptr(),
            "out": pointer(out),
            "lse": pointer(lse),
        }
    ]


def test_the_core_is_asked_for_what_was_planned(spy: Spy, owned: PagedKVCache) -> None:
    kv = jax_frontend.cache_handle(owned, name=NAME)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    jax.block_until_ready(step(*jax_rows(2), kv, plan, layer=0))
    # Numbers and text, floats to their last bit, came through XLA's attributes and back.
    assert spy.launches == list(plan.static.main)


def test_a_call_says_completely_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Call] = []

    def spied(target: str, call: Call, *rest: Any, **more: Any) -> Any:
        seen.append(call)
        return foreign_call(target, call, *rest, **more)

    foreign_call = jax_frontend.attention.foreign_call
    for module in (jax_frontend.attention, jax_frontend.writing):
        monkeypatch.setattr(module, "foreign_call", spied)
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    step.lower(*jax_rows(2), kv, plan, layer=1).as_text()
    write, read = seen
    assert (write.launch.family, write.cache, write.layer, write.lse) == ("append", "", 1, False)
    assert read == Call(plan.static.main[0], "", 1, True)


def test_donated_pools_are_updated_where_they_lie(spy: Spy) -> None:
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    first = (pointer(kv.k), pointer(kv.v))
    layer_bytes = kv.k.nbytes // SIZES["num_layers"]
    for number in range(3):
        before = kv
        query, key, value = jax_rows(number)
        _, _, kv = jax.block_until_ready(step(query, key, value, kv, plan, layer=1))
        assert before.k.is_deleted()
        assert before.v.is_deleted()
        assert (pointer(kv.k), pointer(kv.v)) == first
        pools = tuple(address + layer_bytes for address in first)
        assert spy.written[-1][2:] == pools
        assert (spy.attended[-1]["key"], spy.attended[-1]["value"]) == pools


def test_pools_that_are_not_donated_stay_as_they_were() -> None:
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    _, key, value = jax_rows(2)
    after = jax.jit(jax_frontend.append, static_argnums=4)(key, value, kv, plan, 1)
    assert not np.asarray(kv.k).any()
    assert np.asarray(after.k).any()
    assert pointer(after.k) != pointer(kv.k)


def test_rows_from_torch_are_the_rows_that_the_core_reads(spy: Spy, owned: PagedKVCache) -> None:
    # Memory of torch's own: NumPy's, which from_numpy shares, may be misaligned.
    tensors = [tensor.clone() for tensor in torch_rows(2)]
    kv = jax_frontend.cache_handle(owned, name=NAME)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    out, _, _ = jax.block_until_ready(step(*map(to_jax, tensors), kv, plan, layer=0))
    query, key, value = (tensor.data_ptr() for tensor in tensors)
    assert spy.attended[0]["query"] == query
    assert spy.written[0][:2] == (key, value)
    assert to_torch(out).data_ptr() == spy.attended[0]["out"]


def unrolled(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """Three layers, each of whose keys come from the layer before, as in a model."""
    for layer in range(3):
        key = key + query[:, :2]
        query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, layer)
    return query, kv


def scanned(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """The same in a scan over a traced layer."""

    def block(carry: Any, layer: jax.Array) -> Any:
        query, kv = carry
        keys = key + query[:, :2]
        return jax_frontend.paged_attention(query, keys, value, kv, plan, layer), None

    return jax.lax.scan(block, (query, kv), jax.numpy.arange(3))[0]


@pytest.mark.parametrize("model", [unrolled, scanned])
@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_no_program_copies_a_pool(
    model: Callable[..., Any], kind: str, owned: PagedKVCache
) -> None:
    # A size that nothing else in the program has.
    sizes = SIZES | {"num_pages": 1009}
    kv: Any = jax_frontend.init_cache(SPEC, **sizes)
    if kind == "handle":
        kv = jax_frontend.cache_handle(new_cache(**sizes), name="large")
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH, bucket=BUCKET)
    rows = jax_rows(2, BUCKET.num_tokens)
    text = jax.jit(model, donate_argnums=3).lower(*rows, kv, plan).compile().as_text()
    if kind == "handle":
        jax_frontend.release_cache("large")
        assert "3027," not in text, "XLA sees a pool that torch owns"
        return
    assert isinstance(kv, CacheArrays)
    assert "f32[3027,4,2,8]" in text
    makers = re.findall(r"= f32\[3027,4,2,8\][^ ]* ([a-z-]+)\(", text)
    makers += re.findall(r"= f32\[(?:\d+,)*3027[^ ]* (copy|fusion|dynamic-slice|transpose)", text)
    assert set(makers) <= {"parameter", "get-tuple-element", "bitcast"}, makers
    aliased = re.search(r"input_output_alias=\{(.*?)\}, ", text)
    assert aliased is not None, "no pool is donated"


def test_the_check_for_copies_finds_one() -> None:
    def copying(key: Any, value: Any, kv: Any, plan: Any) -> Any:
        return jax_frontend.append(key, value, kv, plan, 0), kv.k

    kv = jax_frontend.init_cache(SPEC, **(SIZES | {"num_pages": 1009}))
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    _, key, value = jax_rows(2)
    text = jax.jit(copying, donate_argnums=2).lower(key, value, kv, plan).compile().as_text()
    assert re.search(r"= f32\[3027,4,2,8\][^ ]* copy\(", text)
