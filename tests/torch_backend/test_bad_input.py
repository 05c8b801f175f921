"""Calls that do not fit: an error that names the argument, and a cache that stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from small import (
    BATCH,
    KV_LENS,
    PAGE_TABLE,
    QUERY_LENS,
    SPEC,
    TOKENS,
    jax_rows,
    new_cache,
    snapshot,
    torch_rows,
    unchanged,
)

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from interop.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FrameworkError,
    LengthError,
    PageError,
    PlanError,
    ShapeError,
    SlotError,
    TransformError,
)
from torch_backend import PagedKVCache

RAGGED = AttentionSpec(4, 2, 8, dtype="float32")


@dataclass(frozen=True)
class Step:
    """Everything that one call takes."""

    query: Any
    key: Any
    value: Any
    cache: Any
    plan: Any
    layer: Any = 1


def a_step() -> Step:
    """A step in which nothing is wrong."""
    cache = new_cache(seed=1)
    return Step(*torch_rows(2), cache, torch_backend.plan(SPEC, cache.spec, BATCH))


def attend(step: Step) -> None:
    torch_backend.attend(step.query, step.cache, step.plan, step.layer)


def append(step: Step) -> None:
    torch_backend.append(step.key, step.value, step.cache, step.plan, step.layer)


def paged_attention(step: Step) -> None:
    torch_backend.paged_attention(
        step.query, step.key, step.value, step.cache, step.plan, step.layer
    )


CALLS: dict[str, Callable[[Step], None]] = {
    "attend": attend,
    "append": append,
    "paged_attention": paged_attention,
}
READS, WRITES = ("attend", "paged_attention"), ("append", "paged_attention")

# Error, argument, what is put in its place (a function of what was there), and the message.
BAD_ROWS: dict[str, tuple[type[ArgumentError], Callable[[Any], Any], str]] = {
    "from JAX": (
        FrameworkError,
        lambda x: jax_rows(0)[0],
        r"got jax.*ArrayImpl, want a torch\.Tensor.*dlpack\.to_torch",
    ),
    "from NumPy": (FrameworkError, lambda x: x.numpy(), r"got numpy\.ndarray, want a torch"),
    "nothing": (FrameworkError, lambda x: None, "got .*NoneType, want a torch"),
    "rows": (ShapeError, lambda x: x[:-1], rf"got \[{TOKENS - 1}, .*want \[{TOKENS}, "),
    "head ratio": (ShapeError, lambda x: x[:, :1], rf"got \[{TOKENS}, 1, 8\], want"),
    "width": (ShapeError, lambda x: x[..., :4], r"got \[6, \d, 4\], want \[6, \d, 8\]"),
    "rank": (ShapeError, lambda x: x.flatten(1), r"got \[6, \d+\], want \[6, \d, 8\]"),
    "dtype": (DTypeError, lambda x: x.half(), "got float16, want float32"),
    "wide dtype": (DTypeError, lambda x: x.double(), "got float64, want float32"),
    "device": (DeviceError, lambda x: x.to("meta"), "got meta, want cpu, where the plan lies"),
    "layout": (
        ShapeError,
        lambda x: x.mT.contiguous().mT,
        r"got strides \(.*want a contiguous tensor.*\.contiguous\(\); nothing is copied silently",
    ),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        *((call, "query") for call in READS),
        *((call, name) for call in WRITES for name in ("key", "value")),
    ],
)
def test_rows_that_do_not_fit(call: str, argument: str, bad: str) -> None:
    kind, spoil, text = BAD_ROWS[bad]
    step = a_step()
    before = snapshot(step.cache)
    with pytest.raises(kind, match=f"^{argument}: {text}") as error:
        CALLS[call](replace(step, **{argument: spoil(getattr(step, argument))}))
    assert error.value.argument == argument
    assert unchanged(step.cache, before)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "layer", [-1, 3, 10**10, 0.0, "0", None, torch.tensor(0), np.zeros(1, np.int32)], ids=repr
)
def test_layers_that_the_cache_lacks(call: str, layer: Any) -> None:
    step = a_step()
    before = snapshot(step.cache)
    with pytest.raises(ArgumentError, match=r"^layer: got .*, want a layer from 0 to 2"):
        CALLS[call](replace(step, layer=layer))
    assert unchanged(step.cache, before)


@pytest.mark.parametrize("call", CALLS)
def test_a_layer_may_be_any_integer(call: str) -> None:
    CALLS[call](replace(a_step(), layer=np.int64(2)))


def handle() -> Any:
    """A cache as JAX sees it."""
    return jax_frontend.init_cache(SPEC, num_layers=3, num_pages=12, page_size=4, dtype="float32")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "other", [lambda: None, handle, lambda: new_cache().k], ids=["none", "JAX", "tensor"]
)
def test_caches_of_another_kind(call: str, other: Callable[[], Any]) -> None:
    with pytest.raises(FrameworkError, match=r"^cache: got .*, want a .*PagedKVCache"):
        CALLS[call](replace(a_step(), cache=other()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "sizes",
    [{"layout": "HND"}, {"num_pages": 11}, {"page_size": 8}, {"dtype": "float16"}],
    ids=str,
)
def test_caches_that_the_plan_was_not_made_for(call: str, sizes: dict[str, Any]) -> None:
    cache = new_cache(seed=3, **sizes)
    before = snapshot(cache)
    with pytest.raises(PlanError, match=r"^cache: got .*, want the cache that the plan was made"):
        CALLS[call](replace(a_step(), cache=cache))
    assert unchanged(cache, before)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "plan",
    [lambda: None, lambda: jax_frontend.plan(SPEC, new_cache().spec, BATCH), lambda: BATCH],
    ids=["none", "JAX", "batch"],
)
def test_plans_of_another_kind(call: str, plan: Callable[[], Any]) -> None:
    step = a_step()
    before = snapshot(step.cache)
    with pytest.raises(FrameworkError, match=r"^plan: got .*, want a plan from torch_backend\.pl"):
        CALLS[call](replace(step, plan=plan()))
    assert unchanged(step.cache, before)


@pytest.mark.parametrize("call", CALLS)
def test_a_plan_without_a_cache_reads_none(call: str) -> None:
    plan = torch_backend.plan(RAGGED, None, BATCH)
    with pytest.raises(PlanError, match=r"^(cache|plan): "):
        CALLS[call](replace(a_step(), plan=plan))


def ragged(**changes: Any) -> None:
    """Attention without a cache over two requests of 4 and 3 keys."""
    batch = RaggedBatch([2, 3], [4, 3])
    step: dict[str, Any] = {"query": torch.zeros(5, 4, 8), "key": torch.zeros(7, 2, 8)}
    step |= {"value": torch.zeros(7, 2, 8), "plan": torch_backend.plan(RAGGED, None, batch)}
    torch_backend.ragged_attention(**(step | changes))


def test_ragged_attention_checks_its_rows_and_its_plan() -> None:
    ragged()
    with pytest.raises(ShapeError, match=r"^query: got \[7, 4, 8\], want \[5, 4, 8\]"):
        ragged(query=torch.zeros(7, 4, 8))
    with pytest.raises(ShapeError, match=r"^key: got \[5, 2, 8\], want \[7, 2, 8\]"):
        ragged(key=torch.zeros(5, 2, 8))
    with pytest.raises(ShapeError, match=r"^value: got \[7, 4, 8\], want \[7, 2, 8\]"):
        ragged(value=torch.zeros(7, 4, 8))
    with pytest.raises(DTypeError, match=r"^value: got bfloat16, want float32"):
        ragged(value=torch.zeros(7, 2, 8, dtype=torch.bfloat16))
    with pytest.raises(PlanError, match=r"^plan: got a plan for a cache.*Use attend"):
        ragged(plan=a_step().plan)
    with pytest.raises(FrameworkError, match=r"^plan: got .*, want a plan from torch_backend"):
        ragged(plan=jax_frontend.plan(RAGGED, None, RaggedBatch([2, 3], [4, 3])))


def plan(**changes: Any) -> AttentionPlan[torch.Tensor]:
    """A plan of the small step with something changed."""
    step: dict[str, Any] = {"spec": SPEC, "cache_spec": new_cache().spec, "batch": BATCH}
    return torch_backend.plan(**(step | changes))


BAD_PLANS: dict[str, tuple[type[ArgumentError], dict[str, Any], str]] = {
    "no spec": (ArgumentError, {"spec": None}, "^spec: got NoneType, want an AttentionSpec"),
    "a cache, not its spec": (
        ArgumentError,
        {"cache_spec": new_cache()},
        r"^cache_spec: got PagedKVCache, want a CacheSpec.*cache\.spec",
    ),
    "no batch": (ArgumentError, {"batch": [1]}, "^batch: got list, want a RaggedBatch"),
    "no bucket": (ArgumentError, {"bucket": 64}, "^bucket: got int, want a Bucket"),
    "KV heads": (
        PlanError,
        {"spec": AttentionSpec(4, 4, 8)},
        r"^cache_spec\.num_kv_heads: got 2, want 4, as spec has it",
    ),
    "head width": (
        PlanError,
        {"spec": AttentionSpec(4, 2, 16, head_dim_v=8)},
        r"^cache_spec\.head_dim: got 8, want 16",
    ),
    "value width": (
        PlanError,
        {"spec": AttentionSpec(4, 2, 8, head_dim_v=4)},
        r"^cache_spec\.head_dim_v: got 8, want 4",
    ),
    "dtype": (
        PlanError,
        {"spec": AttentionSpec(4, 2, 8, dtype="float16")},
        r"^spec\.dtype: got float16 with a cache of float32",
    ),
    "no dtype": (PlanError, {"cache_spec": None}, r"^spec\.dtype: got none, and no cache"),
    "device": (DeviceError, {"device": "cuda"}, "^device: got cuda, want a cpu device"),
    "no device": (ArgumentError, {"device": "abacus"}, "^device: got '?abacus"),
    "meta device": (
        DeviceError,
        {"spec": RAGGED, "cache_spec": None, "device": "meta"},
        "^device: got 'meta', want .*cpu",
    ),
    "no page table": (
        PageError,
        {"batch": RaggedBatch([1], [1])},
        "^page_table: got none.*Pass page_table to RaggedBatch",
    ),
    "narrow page table": (
        PageError,
        {"batch": RaggedBatch([1, 1], [4, 9], [[0, 1], [2, 3]])},
        r"^page_table\[1\]: got 2 entries, want 3",
    ),
    "page outside": (
        PageError,
        {"batch": RaggedBatch(QUERY_LENS, KV_LENS, [*PAGE_TABLE[:-1], [5, 1, 12]])},
        r"^page_table\[3, 2\]: got 12, want a page id from 0 to 11",
    ),
    "negative page": (
        PageError,
        {"batch": RaggedBatch([1], [1], [[-1]])},
        r"^page_table\[0, 0\]: got -1, want a page id from 0 to 11",
    ),
    "one slot for two": (
        SlotError,
        {"batch": RaggedBatch([1, 1], [2, 2], [[3], [3]])},
        "^page_table: got slot 13 for tokens of requests 0 and 1",
    ),
    "small bucket": (
        PlanError,
        {"bucket": Bucket(3, 9, 16)},
        r"^bucket\.num_requests: got 3 for a batch that needs 4, want at least 4",
    ),
    "context in spite of a promise": (
        PlanError,
        {"bucket": Bucket(6, 9, 16, without_context=True)},
        r"^bucket\.without_context: got True for a batch whose request \d",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_that_cannot_be_made(name: str) -> None:
    kind, changes, text = BAD_PLANS[name]
    with pytest.raises(kind, match=text):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float64}, "^dtype: got float64, want one of"),
        ({"layout": "nhd"}, "^layout: got 'nhd', want 'NHD' or 'HND'"),
        ({"device": "meta"}, "^device: got 'meta', want 'cpu' or 'cuda'"),
        ({"device": "abacus"}, "^device: got 'abacus', want 'cpu' or 'cuda'"),
        ({"num_pages": 0}, "^num_pages: got 0, want a positive integer"),
        ({"spec": None}, "^spec: got NoneType, want an AttentionSpec"),
    ],
)
def test_caches_that_cannot_be_made(changes: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"spec": SPEC, "num_layers": 1, "num_pages": 2}
    with pytest.raises(ArgumentError, match=text):
        PagedKVCache(**(given | changes))


@pytest.mark.parametrize(
    ("call", "argument"),
    [*((call, "query") for call in READS), *((call, "key") for call in WRITES)],
)
def test_there_is_no_gradient(call: str, argument: str) -> None:
    step = a_step()
    before = snapshot(step.cache)
    wants = replace(step, **{argument: getattr(step, argument).requires_grad_()})
    with pytest.raises(TransformError, match=rf"{argument}.*no gradient.*torch\.no_grad"):
        CALLS[call](wants)
    assert not step.cache.k.requires_grad
    assert unchanged(step.cache, before)
    with torch.no_grad():
        CALLS[call](wants)
    assert not step.cache.k.requires_grad


@pytest.mark.parametrize("call", CALLS)
def test_there_is_no_vmap(call: str) -> None:
    step = a_step()
    before = snapshot(step.cache)

    def one(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        CALLS[call](replace(step, query=query, key=key))
        return query

    with pytest.raises(TransformError, match=r"no vmap.*one RaggedBatch"):
        torch.func.vmap(one)(step.query[None], step.key[None])
    assert unchanged(step.cache, before)


def test_a_negative_length_never_reaches_a_plan() -> None:
    with pytest.raises(LengthError, match=r"^kv_lens\[0\]: got -1"):
        plan(batch=RaggedBatch([0], [-1], [[0]]))
