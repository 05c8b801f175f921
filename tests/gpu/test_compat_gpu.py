"""Signatures of other libraries on a GPU: what the reference computes on the CPU, in place."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import FA2, FA2_8BIT, need
from problem import Array, assert_within, tolerance_of
from tpu_step import padded

from interop.ffi import python_calls
from jax_frontend.compat import paged_attention, ragged_paged_attention

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, WIDTH, PAGES, PAGE_SIZE = 8, 2, 128, 96, 16
SINK = np.linspace(-1.0, 4.0, HEADS, dtype=np.float32)
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
WARM_UP, STEADY = 10, 30

# Query and KV lengths of decodes, of prefills, and of requests of all kinds.
BATCHES = {
    "decodes": ([1] * 7, [1, 16, 17, 100, 33, 250, 5]),
    "prefills": ([130, 64, 256], [130, 64, 256]),
    "mixed": ([1, 1, 3, 0, 150, 20], [40, 257, 90, 33, 150, 77]),
}


@dataclass(frozen=True)
class Step:
    """Arguments of `ragged_paged_attention`, in NumPy, with room for two more requests."""

    q: Array
    k: Array
    v: Array
    kv_cache: Array
    kv_lens: Array
    page_indices: Array
    cu_q_lens: Array
    distribution: Array

    def on(self, device: str) -> list[jax.Array]:
        """All of them on a device."""
        there = jax.devices(device)[0]
        return [jax.device_put(getattr(self, field.name).copy(), there) for field in fields(self)]

    def run(self, device: str, **options: Any) -> list[Array]:
        """Output and cache of a jitted call there."""
        step = jax.jit(partial(ragged_paged_attention, **options), donate_argnums=3)
        with jax.default_device(jax.devices(device)[0]):
            return [np.asarray(x) for x in jax.block_until_ready(step(*self.on(device)))]


def new_step(query_lens: list[int], kv_lens: list[int], seed: int = 0) -> Step:
    rng = np.random.default_rng(seed)
    requests, tokens = len(kv_lens), sum(query_lens) + 5

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(BF16)

    counts = -(-np.array(kv_lens) // PAGE_SIZE)
    table = np.zeros((requests, counts.max() + 1), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = rng.permutation(PAGES)[: counts.sum()]
    return Step(
        normal(tokens, HEADS, WIDTH),
        normal(tokens, KV_HEADS, WIDTH),
        normal(tokens, KV_HEADS, WIDTH),
        normal(PAGES, PAGE_SIZE, 2 * KV_HEADS, WIDTH),
        padded(kv_lens, requests + 2),
        padded(table, requests + 2).ravel(),
        padded(np.cumsum([0, *query_lens]), requests + 3),
        np.array([0, 0, requests], np.int32),
    )


def assert_alike(got: list[Array], want: list[Array]) -> None:
    """Outputs within what the kernels round, caches bit for bit."""
    (out, cache), (right, cache_right) = got, want
    assert np.abs(right.astype(np.float32)).max() > 0.1
    assert_within("out", out, right.astype(np.float64), 2 * tolerance_of("bfloat16", FA2[0]).out)
    np.testing.assert_array_equal(cache.view(np.uint8), cache_right.view(np.uint8))


@pytest.fixture(autouse=True, scope="module")
def _modules() -> None:
    need(FA2[0])


@pytest.mark.parametrize("sink", [None, SINK], ids=["no sink", "sink"])
@pytest.mark.parametrize("batch", BATCHES)
def test_it_computes_what_the_reference_computes(batch: str, sink: Array | None) -> None:
    options: dict[str, Any] = {"sm_scale": 0.1, "attention_sink": sink}
    if sink is not None:
        options["attention_sink"] = jnp.asarray(sink)
    if batch == "decodes":
        options["max_query_len"] = 1
    step = new_step(*BATCHES[batch])
    assert_alike(step.run("cuda", **options), step.run("cpu", **options))


@pytest.mark.parametrize("options", [{"sliding_window": 33}, {"soft_cap": 3.0}], ids=str)
def test_windows_and_caps(options: dict[str, Any]) -> None:
    need(FA2[1])
    need(FA2[2])
    step = new_step(*BATCHES["mixed"])
    options = options | {"sm_scale": 0.1}
    assert_alike(step.run("cuda", **options), step.run("cpu", **options))


@pytest.mark.parametrize("shape", [(2, 2, 128), (2 * KV_HEADS, 128)], ids=str)
def test_without_an_update(shape: tuple[int, ...]) -> None:
    step = new_step(*BATCHES["mixed"])
    step = replace(step, kv_cache=step.kv_cache.reshape(PAGES, PAGE_SIZE, *shape))
    options = {"sm_scale": 0.1, "update_kv_cache": False}
    assert_alike(step.run("cuda", **options), step.run("cpu", **options))


def test_packed_words() -> None:
    step = new_step(*BATCHES["mixed"])
    packed = replace(step, kv_cache=step.kv_cache.reshape(PAGES, PAGE_SIZE, 2, 2, WIDTH))
    got, want = (it.run("cuda", sm_scale=0.1) for it in (packed, step))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs)


@pytest.mark.parametrize("batch", ["decodes", "mixed"])
@pytest.mark.parametrize("as_stored", [True, False], ids=["stored", "rounded"])
def test_8_bits(batch: str, as_stored: bool) -> None:
    need(FA2_8BIT[0])
    step = new_step(*BATCHES[batch])
    step = replace(step, kv_cache=step.kv_cache.astype(FP8))
    if as_stored:
        step = replace(step, k=step.k.astype(FP8), v=step.v.astype(FP8))
    options = {"sm_scale": 0.1, "k_scale": 0.5, "v_scale": 2.0, "attention_sink": jnp.asarray(SINK)}
    assert_alike(step.run("cuda", **options), step.run("cpu", **options))


def test_a_steady_loop_is_replayed_in_place() -> None:
    """No Python, no copy, the same memory."""
    step = new_step(*BATCHES["decodes"])

    def model(x: Any, k: Any, v: Any, caches: Any, lens: Any, *rest: Any) -> Any:
        for layer in range(len(caches)):
            out, caches[layer] = ragged_paged_attention(
                jnp.tanh(x), jnp.tanh(k), jnp.tanh(v), caches[layer], lens, *rest,
                sm_scale=0.1, max_query_len=1,
            )  # fmt: skip
            x = x + out
        return x, caches

    program = jax.jit(model, donate_argnums=3)
    q, k, v, cache, lens, *rest = step.on("cuda")
    caches = [cache, jnp.copy(cache)]
    where = [it.unsafe_buffer_pointer() for it in caches]
    text = program.lower(q, k, v, caches, lens, *rest).compile().as_text()
    makers = [line for line in text.splitlines() if f"[{PAGES},{PAGE_SIZE}," in line]
    assert not [line for line in makers if " copy(" in line or "fusion(" in line]
    for number in range(WARM_UP + STEADY):
        if number == WARM_UP:
            jax.block_until_ready(caches)
            before = python_calls.total()
        _, caches = program(q, k, v, caches, lens, *rest)
    jax.block_until_ready(caches)
    assert python_calls.total() == before
    assert [it.unsafe_buffer_pointer() for it in caches] == where


@pytest.mark.parametrize("cap", [None, 3.0])
def test_one_query_each_over_pages_of_each_head(cap: float | None) -> None:
    if cap is not None:
        need(FA2[2])
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(BF16)

    q = normal(5, HEADS, WIDTH) * BF16(0.1)
    pools = normal(KV_HEADS, PAGES, PAGE_SIZE, WIDTH), normal(KV_HEADS, PAGES, PAGE_SIZE, WIDTH)
    table = rng.permutation(PAGES)[:60].reshape(5, 12).astype(np.int32)
    given = q, *pools, table, np.array([1, 192, 100, 0, 33], np.int32)
    outs = []
    for device in ("cuda", "cpu"):
        there = jax.devices(device)[0]
        with jax.default_device(there):
            call = jax.jit(partial(paged_attention, attn_logits_soft_cap=cap))
            outs.append(np.asarray(call(*(jax.device_put(x, there) for x in given))))
    tolerance = tolerance_of("bfloat16", FA2[2] if cap else FA2[0]).out
    assert_within("out", outs[0], outs[1].astype(np.float64), 2 * tolerance)
    assert not outs[0][3].any()
