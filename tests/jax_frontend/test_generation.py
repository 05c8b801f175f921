"""The decode loop on the device: the tokens of a loop on the host, and how requests stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from decoding import CPU, VOCAB, Seats, new_cache, seats, step_by_step
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_frontend
from interop import Bucket, IsthmusError, PlanStatus
from jax_frontend import Generated, StopReason
from torch_backend import PagedKVCache

LENS = [5, 1, 11, 0, 8]
STEPS = 9


def run(cache: PagedKVCache, given: Seats, steps: int = STEPS, **options: Any) -> Generated:
    """The loop in one program, on a torch-owned cache."""

    @jax.jit
    def loop(weights: Any, kv: Any, limits: Any, *arrays: jax.Array) -> Generated:
        tokens, kv_lens, page_table = arrays
        return jax_frontend.generate(
            lambda *rest: CPU(weights, *rest),
            tokens,
            kv,
            kv_lens,
            page_table,
            spec=CPU.spec,
            max_new_tokens=steps,
            limits=limits,
            **options,
        )

    limits = options.pop("limits", None)
    kv = jax_frontend.cache_handle(cache)
    made = loop(CPU.weights(), kv, limits, *given.arrays())
    return jax.tree.map(np.asarray, made._replace(cache=None))


def pools(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.k.clone(), cache.v.clone()


@pytest.fixture(scope="module")
def given() -> tuple[Seats, int]:
    return seats(LENS, STEPS)


@pytest.fixture(scope="module")
def wanted(given: tuple[Seats, int]) -> tuple[Any, Any]:
    """Tokens of the loop on the host, and what it leaves in the pools."""
    cache = new_cache(CPU, given[1])
    tokens, sure = step_by_step(CPU, CPU.weights(), cache, CPU.spec, given[0], STEPS, rounding=1e-4)
    assert sure.all()
    return tokens, pools(cache)


def test_tokens_and_pages_are_those_of_a_loop_on_the_host(
    given: tuple[Seats, int], wanted: tuple[Any, Any]
) -> None:
    cache = new_cache(CPU, given[1])
    made = run(cache, given[0])
    np.testing.assert_array_equal(made.tokens, wanted[0])
    assert made.num_tokens.tolist() == [STEPS] * 5
    np.testing.assert_array_equal(made.kv_lens, np.array(LENS) + STEPS)
    assert made.stop_reason.tolist() == [StopReason.MAX_NEW_TOKENS] * 5
    assert made.status.tolist() == [PlanStatus.OK] * 5
    for ours, theirs in zip(pools(cache), wanted[1], strict=True):
        assert torch.equal(ours, theirs)
    # The comparison is worth something only if tokens differ from step to step.
    assert len(np.unique(made.tokens)) > 5


def test_one_loop_after_another_is_one_loop(
    given: tuple[Seats, int], wanted: tuple[Any, Any]
) -> None:
    cache = new_cache(CPU, given[1])
    first = run(cache, given[0], 4)
    rest = Seats(first.tokens[:, -1], first.kv_lens, given[0].page_table)
    second = run(cache, rest, STEPS - 4)
    np.testing.assert_array_equal(np.hstack([first.tokens, second.tokens]), wanted[0])


def test_arrays_of_jax_are_updated_in_place(
    given: tuple[Seats, int], wanted: tuple[Any, Any]
) -> None:
    spec = new_cache(CPU, given[1]).spec
    source = new_cache(CPU, given[1])
    kv = jax_frontend.init_cache(
        CPU.spec,
        num_layers=decoding.LAYERS,
        num_pages=given[1],
        page_size=decoding.PAGE_SIZE,
        dtype="float32",
    )
    kv = kv.with_pools([jnp.array(pool.numpy()) for pool in pools(source)])
    assert kv.spec == spec
    places = [pool.unsafe_buffer_pointer() for pool in kv.pools]

    def loop(kv: Any, weights: Any, *arrays: jax.Array) -> Generated:
        tokens, kv_lens, page_table = arrays
        return jax_frontend.generate(
            lambda *rest: CPU(weights, *rest),
            tokens,
            kv,
            kv_lens,
            page_table,
            spec=CPU.spec,
            max_new_tokens=STEPS,
        )

    compiled = jax.jit(loop, donate_argnums=0).lower(kv, CPU.weights(), *given[0].arrays())
    compiled = compiled.compile()
    jax_frontend.assert_no_cache_copies(compiled, kv)
    made = compiled(kv, CPU.weights(), *given[0].arrays())
    np.testing.assert_array_equal(made.tokens, wanted[0])
    assert [pool.unsafe_buffer_pointer() for pool in made.cache.pools] == places
    for ours, theirs in zip(made.cache.pools, wanted[1], strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())


def test_requests_stop_at_the_end_of_their_text_and_others_go_on(
    given: tuple[Seats, int], wanted: tuple[Any, Any]
) -> None:
    # Two tokens that come early in some answers and not in others.
    ends = [int(wanted[0][0, 2]), int(wanted[0][2, 5])]
    cache = new_cache(CPU, given[1])
    made = run(cache, given[0], end_tokens=ends)
    for request, row in enumerate(wanted[0]):
        hits = np.flatnonzero(np.isin(row, ends))
        count = int(hits[0]) + 1 if hits.size else STEPS
        reason = StopReason.END_OF_TEXT if hits.size else StopReason.MAX_NEW_TOKENS
        assert made.num_tokens[request] == count
        assert made.kv_lens[request] == LENS[request] + count
        assert made.stop_reason[request] == reason
        assert made.tokens[request].tolist() == [*row[:count], *[0] * (STEPS - count)]
    assert set(made.stop_reason.tolist()) == {StopReason.END_OF_TEXT, StopReason.MAX_NEW_TOKENS}
    # Nothing was written for a request after its end.
    before, untouched = pools(new_cache(CPU, given[1])), 0
    for request, length in enumerate(made.kv_lens.tolist()):
        for position in range(length, LENS[request] + STEPS):
            page, offset = divmod(position, decoding.PAGE_SIZE)
            page = given[0].page_table[request, page]
            for ours, theirs in zip(pools(cache), before, strict=True):
                for layer in range(decoding.LAYERS):
                    place = layer * given[1] + page, offset
                    assert torch.equal(ours[place], theirs[place])
            untouched += 1
    assert untouched


def test_a_request_that_begins_with_an_end_has_stopped(given: tuple[Seats, int]) -> None:
    cache = new_cache(CPU, given[1])
    tokens = given[0].tokens.copy()
    tokens[1] = 3
    tokens[[0, 2, 3, 4]] = 4
    made = run(cache, replace(given[0], tokens=tokens), end_tokens=[3])
    assert made.num_tokens[1] == 0
    assert made.kv_lens[1] == LENS[1]
    assert made.stop_reason[1] == StopReason.END_OF_TEXT
    assert (made.num_tokens[[0, 2, 3, 4]] > 0).all()


def test_limits_of_each_request(given: tuple[Seats, int], wanted: tuple[Any, Any]) -> None:
    limits = jnp.array([2, 0, STEPS, 1, 50], jnp.int32)
    made = run(new_cache(CPU, given[1]), given[0], limits=limits)
    assert made.num_tokens.tolist() == [2, 0, STEPS, 1, STEPS]
    assert made.kv_lens.tolist() == [7, 1, 11 + STEPS, 1, 8 + STEPS]
    assert made.stop_reason.tolist() == [StopReason.MAX_NEW_TOKENS] * 5
    for row, other, count in zip(made.tokens, wanted[0], made.num_tokens, strict=True):
        assert row.tolist() == [*other[:count], *[0] * (STEPS - count)]


def test_all_seats_may_be_empty(given: tuple[Seats, int]) -> None:
    cache = new_cache(CPU, given[1])
    before = pools(cache)
    made = run(cache, given[0], limits=jnp.zeros(5, jnp.int32))
    assert not made.num_tokens.any()
    assert all(torch.equal(a, b) for a, b in zip(pools(cache), before, strict=True))


def lacking(given: Seats, what: str) -> tuple[Seats, dict[str, Any], int, list[int]]:
    """Room that ends too early for some: seats, options, status, tokens that each gets."""
    table, size = given.page_table.copy(), decoding.PAGE_SIZE
    everyone = [STEPS] * 5
    if what == "unreserved":
        table[2, 3:] = -1  # 12 tokens have room, 11 are there
        everyone[2] = 1
        return replace(given, page_table=table), {}, PlanStatus.PAGE_OUTSIDE_POOL, everyone
    if what == "outside":
        table[0, 2] = 10**6
        everyone[0] = 3
        return replace(given, page_table=table), {}, PlanStatus.PAGE_OUTSIDE_POOL, everyone
    if what == "narrow":
        # The longest may have 16 tokens, 5 more than it has.
        lens = [min(STEPS, 4 * size - length) for length in LENS]
        given = replace(given, page_table=table[:, :4])
        return given, {}, PlanStatus.TABLE_TOO_NARROW, lens
    # Pages of a step are counted in order: the last requests are those that lack some. Those of
    # the 5 requests are [2, 1, 3, 1, 3] in the first step, 10 in all.
    bucket = Bucket(5, 5, 10, 1)
    return given, {"bucket": bucket}, PlanStatus.TOO_MANY_PAGES, _served(bucket.num_pages)


def _served(num_pages: int) -> list[int]:
    """Tokens of each request, if a step has `num_pages` pages at most."""
    lens, found = list(LENS), [0] * 5
    active = [True] * 5
    for _ in range(STEPS):
        taken = 0
        for i in range(5):
            if active[i]:
                taken += -(-(lens[i] + 1) // decoding.PAGE_SIZE)
                active[i] = taken <= num_pages
            if active[i]:
                lens[i] += 1
                found[i] += 1
    return found


@pytest.mark.parametrize("what", ["unreserved", "outside", "narrow", "bucket"])
def test_a_request_without_room_stops_and_the_others_go_on(
    given: tuple[Seats, int], wanted: tuple[Any, Any], what: str
) -> None:
    changed, options, status, counts = lacking(given[0], what)
    assert min(counts) < STEPS == max(counts)
    cache = new_cache(CPU, given[1])
    made = run(cache, changed, **options)
    assert made.num_tokens.tolist() == counts
    np.testing.assert_array_equal(made.kv_lens, np.add(LENS, counts))
    for row, other, count in zip(made.tokens, wanted[0], counts, strict=True):
        assert row.tolist() == [*other[:count], *[0] * (STEPS - count)]
    for i, count in enumerate(counts):
        full = count == STEPS
        assert made.stop_reason[i] == (StopReason.MAX_NEW_TOKENS if full else StopReason.NO_ROOM)
        assert made.status[i] == (PlanStatus.OK if full else status)
    # Only slots of tokens that were counted differ from what was there.
    allowed = np.zeros((given[1], decoding.PAGE_SIZE), bool)
    for i, count in enumerate(counts):
        for position in range(LENS[i], LENS[i] + count):
            page, offset = divmod(position, decoding.PAGE_SIZE)
            allowed[given[0].page_table[i, page], offset] = True
    for ours, theirs in zip(pools(cache), pools(new_cache(CPU, given[1])), strict=True):
        differs = (ours != theirs).flatten(2).any(-1).reshape(decoding.LAYERS, given[1], -1)
        np.testing.assert_array_equal(differs.any(0).numpy(), allowed)


def test_tokens_are_sampled_as_asked(given: tuple[Seats, int], wanted: tuple[Any, Any]) -> None:
    def sample(logits: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(5), step)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    made = [run(new_cache(CPU, given[1]), given[0], sample=sample).tokens for _ in range(2)]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != wanted[0]).any()


def test_shards_of_a_mesh_decode_their_own_requests(
    given: tuple[Seats, int], wanted: tuple[Any, Any]
) -> None:
    """Each device has a cache, and a loop that ends when its own requests have stopped."""
    mesh = Mesh(jax.devices()[:2], ("data",))
    caches = [new_cache(CPU, given[1]) for _ in range(2)]
    whole = PartitionSpec("data")
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, whole))
    weights = CPU.weights()

    def loop(kv: Any, limits: Any, *arrays: jax.Array) -> Any:
        tokens, kv_lens, page_table = (array[0] for array in arrays)
        made = jax_frontend.generate(
            lambda *rest: CPU(weights, *rest),
            tokens,
            kv,
            kv_lens,
            page_table,
            spec=CPU.spec,
            max_new_tokens=STEPS,
            limits=limits[0],
        )
        return jax.tree.map(lambda x: x[None], made._replace(cache=made.cache.token[0]))

    limits = jnp.array([[STEPS] * 5, [2, 1, 1, 0, 2]], jnp.int32)
    stacked = [jnp.stack([array, array]) for array in given[0].arrays()]
    sharded = jax.shard_map(loop, mesh=mesh, in_specs=(whole,) * 5, out_specs=whole)
    made = jax.jit(sharded)(kv, limits, *stacked)
    np.testing.assert_array_equal(made.tokens[0], wanted[0])
    for row, other, count in zip(made.tokens[1], wanted[0], limits[1].tolist(), strict=True):
        assert row.tolist() == [*other[:count], *[0] * (STEPS - count)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int64 lengths": (
        {"kv_lens": np.zeros(2, np.float32)},
        r"kv_lens: got float32, want int32",
    ),
    "lengths of others": (
        {"kv_lens": np.zeros(3, np.int32)},
        r"kv_lens: got \[3\], want \[2\], as tokens has",
    ),
    "numpy": ({"tokens": None}, r"tokens: got builtins.NoneType, want a jax.Array"),
    "a flat table": (
        {"page_table": np.zeros(4, np.int32)},
        r"page_table: got \[4\], want \[2, width\]",
    ),
    "no new tokens": ({"max_new_tokens": 0}, r"max_new_tokens: got 0, want 1 or more"),
    "negative tokens": ({"max_new_tokens": -1}, r"max_new_tokens: got -1"),
    "end tokens": ({"end_tokens": [2, -1]}, r"end_tokens: got -1"),
    "rows": (
        {"bucket": Bucket(2, 3, 4)},
        r"bucket.num_tokens: got 3, want 2, one row for each request",
    ),
    "seats": ({"bucket": Bucket(1, 2, 4)}, r"kv_lens: got \[2\], want \[requests\], 1 to 1"),
    "cache": ({"cache": 3}, r"cache: got int, want a CacheHandle or CacheArrays"),
    "sample": (
        {"sample": lambda logits, step: logits},
        rf"sample: got a result of float32 \[2, {VOCAB}\], want int32 \[2\]",
    ),
    "limits": ({"limits": np.zeros((2, 1), np.int32)}, r"limits: got \[2, 1\], want \[2\]"),
    "kernel": ({"kernel": "fa3"}, r"kernel: got 'fa3', want None, or one of reference"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_traced(name: str) -> None:
    changes, message = REFUSED[name]
    cache = new_cache(CPU, 4)
    before = pools(cache)
    arguments: dict[str, Any] = {
        "tokens": np.zeros(2, np.int32),
        "cache": jax_frontend.cache_handle(cache),
        "kv_lens": np.zeros(2, np.int32),
        "page_table": np.arange(4, dtype=np.int32).reshape(2, 2),
        "spec": CPU.spec,
        "max_new_tokens": 3,
    }
    arguments |= changes
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    weights = CPU.weights()

    @jax.jit
    def loop(arrays: dict[str, jax.Array]) -> Any:
        return jax_frontend.generate(lambda *rest: CPU(weights, *rest), **arguments | arrays).tokens

    with pytest.raises(IsthmusError, match=message):
        loop(arrays)
    assert all(torch.equal(a, b) for a, b in zip(pools(cache), before, strict=True))
