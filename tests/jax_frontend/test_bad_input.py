"""Calls that do not fit: refused while the program is traced, so nothing runs or is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from small import (
    BATCH,
    SIZES,
    SPEC,
    TOKENS,
    jax_rows,
    new_cache,
    rows,
    snapshot,
    torch_rows,
    unchanged,
)

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from interop.errors import (
    ArgumentError,
    CacheNotFoundError,
    DeviceError,
    DTypeError,
    FrameworkError,
    PageError,
    PlanError,
    ShapeError,
    SlotError,
    TransformError,
)
from jax_frontend import CacheArrays, CacheHandle
from torch_backend import PagedKVCache

RAGGED = AttentionSpec(4, 2, 8, dtype="float32")
NAME = "bad input"


@dataclass(frozen=True)
class Step:
    """Everything that one call takes."""

    query: Any
    key: Any
    value: Any
    cache: Any
    plan: Any
    layer: Any = 1


@pytest.fixture
def owned() -> Iterator[PagedKVCache]:
    """The torch-owned cache that the steps of a test name."""
    cache = new_cache(seed=1)
    jax_frontend.cache_handle(cache, name=NAME)
    yield cache
    jax_frontend.release_cache(NAME)


@pytest.fixture(params=["handle", "arrays"])
def step(request: pytest.FixtureRequest, owned: PagedKVCache) -> Step:
    """A step in which nothing is wrong, on either kind of cache."""
    cache: Any = jax_frontend.init_cache(SPEC, **SIZES)
    if request.param == "handle":
        cache = jax_frontend.cache_handle(owned, name=NAME)
    return Step(*jax_rows(2), cache, jax_frontend.plan(SPEC, cache.spec, BATCH))


def attend(step: Step) -> Any:
    return jax_frontend.attend(step.query, step.cache, step.plan, step.layer)


def append(step: Step) -> Any:
    return jax_frontend.append(step.key, step.value, step.cache, step.plan, step.layer)


def paged_attention(step: Step) -> Any:
    return jax_frontend.paged_attention(
        step.query, step.key, step.value, step.cache, step.plan, step.layer
    )


CALLS: dict[str, Callable[[Step], Any]] = {
    "attend": attend,
    "append": append,
    "paged_attention": paged_attention,
}
READS, WRITES = ("attend", "paged_attention"), ("append", "paged_attention")
ROWS = [
    *((call, "query") for call in READS),
    *((call, name) for call in WRITES for name in ("key", "value")),
]


def trace(call: str, step: Step) -> None:
    """Trace the call and run nothing; what is no JAX value is no argument of the program."""
    jax.eval_shape(lambda: CALLS[call](step))


@pytest.fixture(autouse=True)
def _nothing_is_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test of this module tries, the torch-owned cache stays as it was."""
    if "owned" not in request.fixturenames:
        yield
        return
    cache = request.getfixturevalue("owned")
    before = snapshot(cache)
    yield
    assert unchanged(cache, before)


# Error, what is put in the argument's place (a function of what was there), and the message.
BAD_ROWS: dict[str, tuple[type[ArgumentError], Callable[[Any], Any], str]] = {
    "from torch": (
        FrameworkError,
        lambda x: torch.zeros(x.shape),
        r"got torch\.Tensor, want a jax\.Array.*dlpack\.to_jax",
    ),
    "from NumPy": (FrameworkError, np.asarray, r"got numpy\.ndarray, want a jax\.Array"),
    "nothing": (FrameworkError, lambda x: None, r"got .*NoneType, want a jax\.Array"),
    "rows": (ShapeError, lambda x: x[:-1], rf"got \[{TOKENS - 1}, .*want \[{TOKENS}, "),
    "head ratio": (ShapeError, lambda x: x[:, :1], rf"got \[{TOKENS}, 1, 8\], want"),
    "width": (ShapeError, lambda x: x[..., :4], r"got \[6, \d, 4\], want \[6, \d, 8\]"),
    "rank": (ShapeError, lambda x: x.reshape(6, -1), r"got \[6, \d+\], want \[6, \d, 8\]"),
    "dtype": (DTypeError, lambda x: x.astype("float16"), "got float16, want float32"),
    "integers": (DTypeError, lambda x: x.astype("int32"), "got int32, want float32"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize(("call", "argument"), ROWS)
def test_rows_that_do_not_fit(step: Step, call: str, argument: str, bad: str) -> None:
    kind, spoil, text = BAD_ROWS[bad]
    with pytest.raises(kind, match=f"^{argument}: {text}") as error:
        trace(call, replace(step, **{argument: spoil(getattr(step, argument))}))
    assert error.value.argument == argument


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "layer",
    [-1, 3, 10**10, 0.0, "0", None, np.float32(0), jnp.float32(0), jnp.zeros(1, jnp.int32)],
    ids=repr,
)
def test_layers_that_the_cache_lacks(step: Step, call: str, layer: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^layer: got .*, want (a layer from|an integer)"):
        trace(call, replace(step, layer=layer))


@pytest.mark.parametrize("layer", [3, -1, 2**30])
def test_a_traced_layer_that_the_cache_lacks(owned: PagedKVCache, layer: int) -> None:
    # Its value is known at run time only. As JAX's own indexing does: writes are dropped (the
    # fixture looks), and reads are of the nearest layer.
    cache = jax_frontend.cache_handle(owned, name=NAME)
    step_plan = jax_frontend.plan(SPEC, cache.spec, BATCH)
    query, key, value = jax_rows(2)
    jax.block_until_ready(jax.jit(jax_frontend.append)(key, value, cache, step_plan, layer))
    got = jax.jit(jax_frontend.attend)(query, cache, step_plan, layer)
    want = jax_frontend.attend(query, cache, step_plan, min(max(layer, 0), 2))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("call", CALLS)
def test_a_layer_may_be_any_integer(call: str) -> None:
    cache = jax_frontend.init_cache(SPEC, **SIZES)
    step = Step(*jax_rows(2), cache, jax_frontend.plan(SPEC, cache.spec, BATCH))
    for layer in (2, np.int64(2), jnp.int32(2), jnp.uint8(2)):
        trace(call, replace(step, layer=layer))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("other", [None, new_cache(), torch.zeros(1)], ids=["none", "core", "pool"])
def test_caches_of_another_kind(step: Step, call: str, other: Any) -> None:
    text = "^cache: got .*, want a CacheHandle or CacheArrays.*cache_handle.*init_cache"
    with pytest.raises(FrameworkError, match=text):
        trace(call, replace(step, cache=other))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "sizes", [{"layout": "HND"}, {"num_pages": 11}, {"page_size": 8}, {"dtype": "float16"}], ids=str
)
def test_caches_that_the_plan_was_not_made_for(
    step: Step, call: str, sizes: dict[str, Any]
) -> None:
    other = replace(step.cache, spec=replace(step.cache.spec, **sizes))
    with pytest.raises(PlanError, match=r"^cache: got .*, want the cache that the plan was made"):
        trace(call, replace(step, cache=other))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pool", ["k", "v"])
@pytest.mark.parametrize(
    ("kind", "spoil", "text"),
    [
        (ShapeError, lambda x: x[1:], r"got \[35, 4, 2, 8\], want \[36, 4, 2, 8\].*whole"),
        (DTypeError, lambda x: x.astype("float16"), "got float16, want float32"),
        (FrameworkError, lambda x: torch.zeros(x.shape), r"got torch\.Tensor, want a jax\.Array"),
    ],
    ids=["shape", "dtype", "framework"],
)
def test_pools_that_are_not_what_the_spec_says(
    call: str, pool: str, kind: type[ArgumentError], spoil: Callable[[Any], Any], text: str
) -> None:
    cache = jax_frontend.init_cache(SPEC, **SIZES)
    step = Step(*jax_rows(2), cache, jax_frontend.plan(SPEC, cache.spec, BATCH))
    other = replace(cache, **{pool: spoil(getattr(cache, pool))})
    with pytest.raises(kind, match=rf"^cache\.{pool}: {text}"):
        trace(call, replace(step, cache=other))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "plan",
    [None, BATCH, torch_backend.plan(SPEC, new_cache().spec, BATCH)],
    ids=["none", "batch", "torch"],
)
def test_plans_of_another_kind(step: Step, call: str, plan: Any) -> None:
    with pytest.raises(FrameworkError, match=r"^plan: got .*, want a plan from jax_frontend\.plan"):
        trace(call, replace(step, plan=plan))


@pytest.mark.parametrize("call", CALLS)
def test_a_plan_without_a_cache_reads_none(step: Step, call: str) -> None:
    plan = jax_frontend.plan(RAGGED, None, BATCH)
    with pytest.raises(PlanError, match=r"^(cache|plan): "):
        trace(call, replace(step, plan=plan))


def ragged(**changes: Any) -> None:
    """Trace attention without a cache over two requests of 4 and 3 keys."""
    batch = RaggedBatch([2, 3], [4, 3])
    step: dict[str, Any] = {"query": jnp.zeros((5, 4, 8)), "key": jnp.zeros((7, 2, 8))}
    step |= {"value": jnp.zeros((7, 2, 8)), "plan": jax_frontend.plan(RAGGED, None, batch)}
    jax.eval_shape(lambda: jax_frontend.ragged_attention(**(step | changes)))


def test_ragged_attention_checks_its_rows_and_its_plan(step: Step) -> None:
    ragged()
    with pytest.raises(ShapeError, match=r"^query: got \[7, 4, 8\], want \[5, 4, 8\]"):
        ragged(query=jnp.zeros((7, 4, 8)))
    with pytest.raises(ShapeError, match=r"^key: got \[5, 2, 8\], want \[7, 2, 8\]"):
        ragged(key=jnp.zeros((5, 2, 8)))
    with pytest.raises(ShapeError, match=r"^value: got \[7, 4, 8\], want \[7, 2, 8\]"):
        ragged(value=jnp.zeros((7, 4, 8)))
    with pytest.raises(DTypeError, match=r"^value: got bfloat16, want float32"):
        ragged(value=jnp.zeros((7, 2, 8), "bfloat16"))
    with pytest.raises(PlanError, match=r"^plan: got a plan for a cache.*Use attend"):
        ragged(plan=step.plan)
    with pytest.raises(FrameworkError, match=r"^plan: got .*, want a plan from jax_frontend"):
        ragged(plan=torch_backend.plan(RAGGED, None, RaggedBatch([2, 3], [4, 3])))


def plan(**changes: Any) -> AttentionPlan[jax.Array]:
    """A plan of the small step with something changed."""
    step: dict[str, Any] = {"spec": SPEC, "cache_spec": new_cache().spec, "batch": BATCH}
    return jax_frontend.plan(**(step | changes))


BAD_PLANS: dict[str, tuple[type[ArgumentError], dict[str, Any], str]] = {
    "no spec": (ArgumentError, {"spec": None}, "^spec: got NoneType, want an AttentionSpec"),
    "a cache, not its spec": (
        ArgumentError,
        {"cache_spec": new_cache()},
        r"^cache_spec: got PagedKVCache, want a CacheSpec.*cache\.spec",
    ),
    "no batch": (ArgumentError, {"batch": [1]}, "^batch: got list, want a RaggedBatch"),
    "no bucket": (ArgumentError, {"bucket": 64}, "^bucket: got int, want a Bucket"),
    "no device": (ArgumentError, {"device": "cpu"}, "^device: got '?cpu.*want a jax"),
    "device": (
        DeviceError,
        {"cache_spec": replace(new_cache().spec, device="cuda")},
        "^device: got cpu.*want a cuda device, where the cache lies",
    ),
    "KV heads": (PlanError, {"spec": AttentionSpec(4, 4, 8)}, r"^cache_spec\.num_kv_heads: got 2"),
    "page outside": (
        PageError,
        {"batch": RaggedBatch([1], [5], [[0, 12]])},
        r"^page_table\[0, 1\]: got 12, want a page id from 0 to 11",
    ),
    "one slot for two": (
        SlotError,
        {"batch": RaggedBatch([1, 1], [2, 2], [[3], [3]])},
        "^page_table: got slot 13 for tokens of requests 0 and 1",
    ),
    "small bucket": (
        PlanError,
        {"bucket": Bucket(4, 5, 16)},
        r"^bucket\.num_tokens: got 5 for a batch that needs 6",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_that_cannot_be_made(name: str) -> None:
    kind, changes, text = BAD_PLANS[name]
    with pytest.raises(kind, match=text):
        plan(**changes)


def test_lengths_that_are_traced_cannot_be_planned() -> None:
    with pytest.raises(
        FrameworkError, match=r"^query_lens: got a traced array.*outside of jax\.jit"
    ):
        jax.eval_shape(lambda lens: RaggedBatch(lens, [3, 6]).num_pages(4), jnp.array([1, 2]))


@pytest.mark.parametrize("call", CALLS)
def test_there_is_no_vmap(step: Step, call: str) -> None:
    def one(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return CALLS[call](replace(step, query=query, key=key, value=value))

    stacked = [x[None] for x in (step.query, step.key, step.value)]
    text = r"^[a-z_]+ has no vmap.*one RaggedBatch and call it once"
    for transformed in (jax.vmap(one), jax.jit(jax.vmap(one)), jax.vmap(jax.jit(one))):
        with pytest.raises(TransformError, match=text):
            transformed(*stacked)


@pytest.mark.parametrize(("call", "argument"), ROWS)
def test_there_is_no_vmap_over_one_argument(step: Step, call: str, argument: str) -> None:
    with pytest.raises(TransformError, match=r"^[a-z_]+ has no vmap"):
        jax.vmap(lambda x: CALLS[call](replace(step, **{argument: x})))(
            getattr(step, argument)[None]
        )


@pytest.mark.parametrize("call", CALLS)
def test_there_is_no_vmap_over_layers(step: Step, call: str) -> None:
    with pytest.raises(TransformError, match=r"^[a-z_]+ has no vmap over 3 examples"):
        jax.vmap(lambda layer: CALLS[call](replace(step, layer=layer)))(jnp.arange(3))


@pytest.mark.parametrize(("call", "argument"), ROWS)
@pytest.mark.parametrize("how", ["grad", "jit of grad", "grad of jit", "jvp", "linearize"])
def test_there_is_no_gradient(step: Step, call: str, argument: str, how: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        result = CALLS[call](replace(step, **{argument: x}))
        leaves = jax.tree.leaves(result)
        return sum(leaf.astype(jnp.float32).sum() for leaf in leaves)

    x = getattr(step, argument)
    differentiate: dict[str, Callable[[], Any]] = {
        "grad": partial(jax.grad(loss), x),
        "jit of grad": partial(jax.jit(jax.grad(loss)), x),
        "grad of jit": partial(jax.grad(jax.jit(loss)), x),
        "jvp": partial(jax.jvp, loss, (x,), (x,)),
        "linearize": partial(jax.linearize, loss, x),
    }
    text = r"^[a-z_]+ has no gradient.*stop_gradient.*dot_product_attention to train"
    with pytest.raises(TransformError, match=text):
        differentiate[how]()


def test_the_remedy_against_gradients_helps() -> None:
    cache = jax_frontend.init_cache(SPEC, **SIZES)
    query, key, value = jax_rows(2)
    step_plan = jax_frontend.plan(SPEC, cache.spec, BATCH)

    @jax.grad
    def gradient(query: jax.Array) -> jax.Array:
        constant = jax.lax.stop_gradient(query)
        out, _ = jax_frontend.paged_attention(constant, key, value, cache, step_plan, 1)
        return (out * query).sum()

    out, _ = jax_frontend.paged_attention(query, key, value, cache, step_plan, 1)
    np.testing.assert_array_equal(gradient(query), out)


@pytest.mark.parametrize("call", CALLS)
def test_a_cache_that_this_process_lacks(call: str) -> None:
    lost = new_cache()
    step = Step(
        *jax_rows(2),
        jax_frontend.cache_handle(lost, name="lost"),
        jax_frontend.plan(SPEC, lost.spec, BATCH),
    )
    jitted = jax.jit(lambda step: CALLS[call](Step(*step, layer=1)))
    arguments = (step.query, step.key, step.value, step.cache, step.plan)
    jax.block_until_ready(jitted(arguments))
    before = snapshot(lost)
    jax_frontend.release_cache("lost")
    # The program is compiled already: the name is looked up where it runs.
    text = (
        r"this process has no cache named 'lost'.*jax_frontend\.cache_handle\(cache, name='lost'\)"
    )
    # JAX gives the error another class, and which one depends on when it notices; the text stays.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text):
        jax.block_until_ready(jitted(arguments))
    assert unchanged(lost, before)
    jax_frontend.cache_handle(lost, name="lost")
    jax.block_until_ready(jitted(arguments))
    jax_frontend.release_cache("lost")


def test_names_of_caches(owned: PagedKVCache) -> None:
    with pytest.raises(ArgumentError, match=f"^name: got '{NAME}', which another cache has"):
        jax_frontend.cache_handle(new_cache(), name=NAME)
    assert jax_frontend.cache_handle(owned).name == NAME
    for name in ("", "x" * 65, "ü" * 33, "nul\0", 7):
        with pytest.raises(ArgumentError, match=r"^name: got .*, want .*1 to 64 bytes"):
            jax_frontend.cache_handle(new_cache(), name=name)  # type: ignore[arg-type]
    with pytest.raises(CacheNotFoundError, match=rf"no cache named 'x' \(it has: .*'{NAME}'"):
        jax_frontend.release_cache("x")


@pytest.mark.parametrize(
    "other",
    [None, 5, [], [new_cache(), None], torch.zeros(2), jax_frontend.init_cache(SPEC, **SIZES)],
    ids=["none", "number", "no shards", "shard", "pool", "JAX's own"],
)
def test_what_has_no_handle(other: Any) -> None:
    with pytest.raises(FrameworkError, match=r"^cache: got .*, want .*PagedKVCache.*init_cache"):
        jax_frontend.cache_handle(other, name="never made")


def test_shards_of_different_shapes_have_no_handle() -> None:
    with pytest.raises(PlanError, match=r"^cache: got .*layout='HND'.*, want shards of"):
        jax_frontend.cache_handle([new_cache(), new_cache(layout="HND")], name="never made")


@pytest.mark.parametrize("call", CALLS)
def test_a_sharded_cache_outside_of_shard_map_is_no_single_cache(call: str) -> None:
    shards = [new_cache(seed=4), new_cache(seed=5)]
    cache = jax_frontend.cache_handle(shards, name="two")
    before = [snapshot(shard) for shard in shards]
    step = Step(*jax_rows(2), cache, jax_frontend.plan(SPEC, cache.spec, BATCH))
    try:
        with pytest.raises(PlanError, match=r"^cache: got a handle of 2 shards.*shard_map"):
            jax.block_until_ready(jax.jit(lambda: CALLS[call](step))())
    finally:
        jax_frontend.release_cache("two")
    assert all(unchanged(shard, was) for shard, was in zip(shards, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float64"}, "^dtype: got float64, want one of"),
        ({"layout": "nhd"}, "^layout: got 'nhd', want 'NHD' or 'HND'"),
        ({"num_pages": 0}, "^num_pages: got 0, want a positive integer"),
        ({"spec": None}, "^spec: got NoneType, want an AttentionSpec"),
    ],
)
def test_caches_that_cannot_be_made(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        jax_frontend.init_cache(**({"spec": SPEC} | SIZES | changes))


def test_arguments_of_a_jit_may_not_be_torch_tensors(step: Step) -> None:
    # JAX refuses them by itself, before the program is traced.
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        jax.jit(jax_frontend.attend, static_argnums=3)(torch_rows(2)[0], step.cache, step.plan, 1)


def test_after_a_refusal_the_step_can_be_done_right(owned: PagedKVCache) -> None:
    kv: CacheHandle | CacheArrays = jax_frontend.init_cache(SPEC, **SIZES)
    query, key, value = rows(2)
    step_plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    run = jax.jit(jax_frontend.paged_attention, static_argnums=5, donate_argnums=3)
    with pytest.raises(ShapeError, match=r"^value: "):
        run(query, key, value[:, :1], kv, step_plan, 1)
    # A refused call has taken nothing, donated arrays included.
    out, kv = run(query, key, value, kv, step_plan, 1)
    assert isinstance(kv, CacheArrays)
    assert np.asarray(out).any()
    assert np.asarray(kv.k).any()
