"""One attention problem, and its answer by the oracle, by PyTorch and by JAX.

All arrays are NumPy in the problem's own dtype (bfloat16 through ml_dtypes), so that the three
runners start from the same bytes and answers can be compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import jax
import ml_dtypes
import numpy as np
import oracle
import torch

import jax_frontend
import jax_frontend.cache as handles
import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from torch_backend.kernels.flashinfer_abi import ModuleKey

Array = np.ndarray[Any, np.dtype[Any]]
Layout = Literal["NHD", "HND"]
CacheKind = Literal["handle", "arrays"]
Call = Literal["append_then_attend", "paged_attention"]

NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Tolerance:
    """Largest error of output and LSE, relative to the larger of 1 and the right value."""

    out: float
    lse: float


# Problems have values of unit size, so these are errors relative to the data. The reference
# computes in float32 and rounds its output to the dtype. The kernels round the softmax weights to
# it as well: their sum, and so the LSE, can be off by half a unit in the last place of the dtype
# (2**-9 in bfloat16). With a soft cap they take the hardware's tanh, good to 11 bits of each logit.
TOLERANCES = {
    ("reference", "float32"): Tolerance(out=2e-5, lse=2e-5),
    ("reference", "float16"): Tolerance(out=2e-3, lse=2e-3),
    ("reference", "bfloat16"): Tolerance(out=1.5e-2, lse=2e-3),
    ("kernel", "float16"): Tolerance(out=4e-3, lse=5e-3),
    ("kernel", "bfloat16"): Tolerance(out=2e-2, lse=5e-3),
    ("kernel with soft cap", "bfloat16"): Tolerance(out=3e-2, lse=1e-2),
}


def tolerance_of(dtype: str, key: ModuleKey | None = None) -> Tolerance:
    """Tolerance of the reference family, or of the compiled module of this key."""
    if key is None:
        return TOLERANCES["reference", dtype]
    return TOLERANCES["kernel with soft cap" if key.soft_cap else "kernel", dtype]


class _Readable:
    """Repr of a dataclass with large arrays as dtype and shape: their numbers come from a seed."""

    def __repr__(self) -> str:
        parts = []
        for item in fields(cast(Any, self)):
            content = getattr(self, item.name)
            if isinstance(content, np.ndarray) and content.ndim > 2:
                content = f"{content.dtype}{list(content.shape)}"
            parts.append(f"{item.name}={content}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis prints every field of a dataclass, and refuses where that gets too long.
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Pages(_Readable):
    """The paged side of a problem: where the tokens lie, and the pool before the step."""

    num_layers: int
    layer: int  # the one that the problem attends to
    page_size: int
    layout: Layout
    table: Array  # int32 [requests, columns]; entries past a request's pages are arbitrary
    key_pool: Array  # [num_layers * num_pages, page_size, heads, head_dim]
    value_pool: Array  # the same with head_dim_v; NHD whatever `layout` says

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return len(self.key_pool) // self.num_layers

    @property
    def of_layer(self) -> slice:
        """Pages of the problem's layer in the flat pool."""
        return slice(self.layer * self.num_pages, (self.layer + 1) * self.num_pages)


@dataclass(frozen=True, repr=False)
class Problem(_Readable):
    """What to compute. `key` and `value` are the step's new tokens, or all of them if not paged.

    `features` are the keyword arguments of `AttentionSpec` that are no shapes: scale, masks, cap.
    With a bucket, query, key and value have its number of rows; the rows to spare hold NaN.
    """

    dtype: str
    features: dict[str, Any]
    query_lens: list[int]
    kv_lens: list[int]
    query: Array  # [tokens, num_qo_heads, head_dim]
    key: Array  # [tokens, num_kv_heads, head_dim]
    value: Array  # [tokens, num_kv_heads, head_dim_v]
    bucket: Bucket | None = None
    pages: Pages | None = None
    sinks: Array | None = None  # float32 [num_qo_heads]
    draft_masks: Array | None = None  # bool [tokens, columns]

    @property
    def spec(self) -> AttentionSpec:
        """The arithmetic; without a cache it says the dtype, with one the cache does."""
        return AttentionSpec(
            self.query.shape[1],
            self.key.shape[1],
            self.query.shape[2],
            head_dim_v=self.value.shape[2],
            dtype=self.dtype if self.pages is None else None,
            sinks=self.sinks is not None,
            **self.features,
        )

    @property
    def batch(self) -> RaggedBatch:
        """The requests as the packages take them."""
        table = None if self.pages is None else self.pages.table
        return RaggedBatch(self.query_lens, self.kv_lens, table, draft_masks=self.draft_masks)


@dataclass(frozen=True)
class Answer:
    """Output and LSE, and the whole pools after the step in NHD (`None` without a cache)."""

    out: Array
    lse: Array
    key_pool: Array | None = None
    value_pool: Array | None = None


def run_oracle(problem: Problem) -> Answer:
    """Return the right answer: output and LSE in float64, the pools in their own dtype."""
    query, new = problem.query, (problem.key, problem.value)
    lens = (problem.query_lens, problem.kv_lens)
    pages = problem.pages
    features = problem.features | {"sinks": problem.sinks, "draft_masks": problem.draft_masks}
    if pages is None:
        return Answer(*oracle.ragged_attention(query, *new, *lens, **features))
    key_pool, value_pool = appended_pools(problem)
    keys, values = key_pool[pages.of_layer], value_pool[pages.of_layer]
    attended = oracle.paged_attention(query, keys, values, *lens, pages.table, **features)
    return Answer(*attended, key_pool, value_pool)


def appended_pools(problem: Problem) -> tuple[Array, Array]:
    """Return the oracle's pools after the step's keys and values are appended."""
    pages = problem.pages
    assert pages is not None
    slots = oracle.slot_mapping(problem.query_lens, problem.kv_lens, pages.table, pages.page_size)
    key_pool, value_pool = pages.key_pool.copy(), pages.value_pool.copy()
    key_pool[pages.of_layer], value_pool[pages.of_layer] = oracle.append(
        problem.key, problem.value, key_pool[pages.of_layer], value_pool[pages.of_layer], slots
    )
    return key_pool, value_pool


def run_torch(problem: Problem, device: str, call: Call = "append_then_attend") -> Answer:
    """Solve with the PyTorch core, by either way of calling it."""
    spec, pages = problem.spec, problem.pages
    query, key, value = (to_torch(x, device) for x in (problem.query, problem.key, problem.value))
    cache = None if pages is None else torch_cache(problem, device)
    sinks = None if problem.sinks is None else to_torch(problem.sinks, device)
    asked: dict[str, Any] = {"return_lse": True, "sinks": sinks}
    plan = torch_backend.plan(
        spec, cache.spec if cache else None, problem.batch, bucket=problem.bucket, device=device
    )
    if pages is None or cache is None:
        out, lse = torch_backend.ragged_attention(query, key, value, plan, **asked)
        return Answer(from_torch(out), from_torch(lse))
    if call == "paged_attention":
        out, lse = torch_backend.paged_attention(
            query, key, value, cache, plan, pages.layer, **asked
        )
    else:
        torch_backend.append(key, value, cache, plan, pages.layer)
        out, lse = torch_backend.attend(query, cache, plan, pages.layer, **asked)
    pools = (in_layout(from_torch(pool), pages.layout) for pool in (cache.k, cache.v))
    return Answer(from_torch(out), from_torch(lse), *pools)


def run_jax(
    problem: Problem,
    device: str,
    kind: CacheKind = "handle",
    call: Call = "append_then_attend",
    *,
    traced_layer: bool = True,
) -> Answer:
    """Solve with the JAX front end in one `jax.jit`, on a cache that torch or that JAX owns."""
    target = jax.devices(device)[0]
    sharding = jax.sharding.SingleDeviceSharding(target)
    spec, pages = problem.spec, problem.pages
    rows = [jax.device_put(x, target) for x in (problem.query, problem.key, problem.value)]
    sinks = None if problem.sinks is None else jax.device_put(problem.sinks, target)
    if pages is None:
        plan = jax_frontend.plan(spec, None, problem.batch, bucket=problem.bucket, device=target)
        out, lse = _jax_ragged(*rows, plan, sinks)
        return Answer(np.asarray(out), np.asarray(lse))

    cache = torch_cache(problem, device)
    kv: Any
    if kind == "handle":
        # One name for all problems: it is part of the jit cache's key.
        kv = jax_frontend.cache_handle(cache, name="problem", sharding=sharding)
        # The pools were filled on torch's stream, which XLA knows nothing of.
        kv = jax_frontend.jax_after_torch(kv)
    else:
        kv = jax_frontend.init_cache(
            spec,
            num_layers=pages.num_layers,
            num_pages=pages.num_pages,
            page_size=pages.page_size,
            dtype=problem.dtype,
            layout=pages.layout,
            sharding=sharding,
        )
        # Copies: these are donated, and device_put may share the memory of a NumPy array.
        k, v = (
            jax.device_put(in_layout(pool, pages.layout).copy(), target)
            for pool in (pages.key_pool, pages.value_pool)
        )
        kv = replace(kv, k=k, v=v)
    plan = jax_frontend.plan(spec, kv.spec, problem.batch, bucket=problem.bucket, device=target)
    try:
        step, layer = (_traced, np.int32(pages.layer)) if traced_layer else (_fixed, pages.layer)
        out, lse, kv = jax.block_until_ready(step(*rows, kv, plan, layer, call, sinks))
    finally:
        if kind == "handle":
            jax_frontend.release_cache("problem")
            # A program runs once here, which is before XLA records it.
            handles._retired.discard("problem")
    if kind == "handle":
        after = [from_torch(cache.k), from_torch(cache.v)]
    else:
        after = [np.asarray(kv.k), np.asarray(kv.v)]
    pools = (in_layout(pool, pages.layout) for pool in after)
    return Answer(np.asarray(out), np.asarray(lse), *pools)


def _jax_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kv: Any,
    plan: AttentionPlan[jax.Array],
    layer: int | jax.Array,
    call: Call,
    sinks: jax.Array | None,
) -> Any:
    """Output, LSE and cache after the step."""
    asked: dict[str, Any] = {"return_lse": True, "sinks": sinks}
    if call == "paged_attention":
        return jax_frontend.paged_attention(query, key, value, kv, plan, layer, **asked)
    kv = jax_frontend.append(key, value, kv, plan, layer)
    return *jax_frontend.attend(query, kv, plan, layer, **asked), kv


_fixed = jax.jit(_jax_step, static_argnames=("layer", "call"), donate_argnames="kv")
_traced = jax.jit(_jax_step, static_argnames="call", donate_argnames="kv")


@jax.jit
def _jax_ragged(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    plan: AttentionPlan[jax.Array],
    sinks: jax.Array | None,
) -> Any:
    return jax_frontend.ragged_attention(query, key, value, plan, return_lse=True, sinks=sinks)


def torch_cache(problem: Problem, device: str) -> torch_backend.PagedKVCache:
    """Make a torch-owned cache that holds the problem's pools."""
    pages = problem.pages
    assert pages is not None
    cache = torch_backend.PagedKVCache(
        problem.spec,
        num_layers=pages.num_layers,
        num_pages=pages.num_pages,
        page_size=pages.page_size,
        dtype=problem.dtype,
        layout=pages.layout,
        device=device,
    )
    cache.k.copy_(to_torch(in_layout(pages.key_pool, pages.layout), device))
    cache.v.copy_(to_torch(in_layout(pages.value_pool, pages.layout), device))
    return cache


def in_layout(pool: Array, layout: Layout) -> Array:
    """An NHD pool in `layout`, or a pool in `layout` as NHD: a contiguous array."""
    return np.ascontiguousarray(pool if layout == "NHD" else pool.swapaxes(1, 2))


def bits(array: Array) -> Array:
    """The array's bytes as integers of its element size, which compare equal for equal NaNs."""
    return array.view(np.dtype(f"int{8 * array.itemsize}"))


def to_torch(array: Array, device: str) -> torch.Tensor:
    """The same bytes as a torch tensor; NumPy and torch share no bfloat16, so they go as bits."""
    return torch.from_numpy(bits(array)).view(getattr(torch, array.dtype.name)).to(device)


def from_torch(tensor: torch.Tensor) -> Array:
    """The same bytes as a NumPy array."""
    integer = torch.int16 if tensor.itemsize == 2 else torch.int32
    dtype = NUMPY_DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return tensor.cpu().view(integer).numpy().view(dtype)


def assert_close(got: Answer, problem: Problem, key: ModuleKey | None = None) -> None:
    """Compare with the oracle: the numbers within tolerance, the pools byte for byte.

    `key` is the compiled module that computed the answer; `None` says the reference family.
    """
    want, tolerance = run_oracle(problem), tolerance_of(problem.dtype, key)
    assert got.out.dtype == NUMPY_DTYPES[problem.dtype]
    assert got.lse.dtype == np.float32
    assert_within("out", got.out, want.out, tolerance.out)
    assert_within("lse", got.lse, want.lse, tolerance.lse)
    # A row that sees no key is exactly 0, which the tolerance would not insist on.
    unseeing = np.isneginf(want.lse)
    assert not got.out[unseeing].any(), "rows that see no key are not zero"
    assert_same_pools(got, want.key_pool, want.value_pool)


def assert_identical(got: Answer, want: Answer) -> None:
    """Compare two answers bit for bit."""
    np.testing.assert_array_equal(bits(got.out), bits(want.out), err_msg="out")
    np.testing.assert_array_equal(bits(got.lse), bits(want.lse), err_msg="lse")
    assert_same_pools(got, want.key_pool, want.value_pool)


def assert_within(name: str, got: Array, want: Array, tolerance: float) -> None:
    """Compare numbers; the error may be `tolerance` times the larger of 1 and the right value."""
    assert got.shape == want.shape, name
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):  # -inf less -inf, where both say that no key was seen
        error = np.where(got == want, 0.0, np.abs(got - want)) / np.maximum(1.0, np.abs(want))
    # NaN compares false, so this catches it as well.
    bad = ~(error <= tolerance)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} differ by more than {tolerance}; first at {where}: "
            f"got {got[where]}, want {want[where]}; largest finite error "
            f"{error[np.isfinite(error)].max(initial=0.0)}"
        )


def assert_same_pools(got: Answer, key_pool: Array | None, value_pool: Array | None) -> None:
    """Compare the pools after the step byte for byte, all layers and unused pages included."""
    for name, ours, theirs in (
        ("key_pool", got.key_pool, key_pool),
        ("value_pool", got.value_pool, value_pool),
    ):
        if ours is None or theirs is None:
            assert ours is theirs, f"{name}: one answer has none"
        else:
            np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
