"""A serving engine's layer on a GPU, from both front ends: its memory, and steps, recorded too."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
from engine_step import Layer
from families import FA2_8BIT, VARIANTS, XQA, need, this_gpu
from torch import Tensor

import jax_frontend
import jax_frontend.backend as by_jax
from interop import AttentionSpec, CacheSpec
from interop.dlpack import to_jax
from torch_backend import PagedKVCache
from torch_backend.backend import (
    AttentionImpl,
    EngineBatch,
    Group,
    MetadataBuilder,
    Platform,
    Step,
)
from torch_backend.layouts import ORDERS

pytestmark = pytest.mark.gpu

QO, KV, WIDTH, PAGE, BLOCKS = 8, 2, 128, 16, 80
SCALE = WIDTH**-0.5
BATCHES = {
    "decode": ([1, 1, 1, 1], [17, 300, 16, 1]),
    "mixed": ([1, 1, 40, 7], [17, 300, 40, 70]),
    "prefill": ([40, 7, 130], [40, 70, 130]),
}
MODULES = {"auto": (VARIANTS[0], XQA[2]), "fp8": (FA2_8BIT[0], XQA[0])}


class Case:
    """An engine's cache in one order of memory, and a step's rows and numbers."""

    def __init__(
        self,
        batch: str,
        order: str = "LBNHC",
        kv_cache_dtype: str = "auto",
        window: int | None = None,
    ) -> None:
        for key in MODULES[kv_cache_dtype]:
            need(key)
        self.query_lens, self.kv_lens = BATCHES[batch]
        self.order, self.kv_cache_dtype = order, kv_cache_dtype
        generator = torch.Generator().manual_seed(len(order) + len(batch))
        sizes = {"L": 3, "B": BLOCKS, "H": KV, "N": PAGE, "C": 2 * WIDTH}
        whole = torch.randn([sizes[axis] for axis in order], generator=generator).bfloat16()
        self.dtype = "bfloat16"
        if kv_cache_dtype == "fp8":
            self.dtype = "float8_e4m3fn"
            whole = whole.to(torch.float8_e4m3fn).view(torch.uint8)
        self.cache = whole.cuda().permute([order.index(axis) for axis in "LBHNC"])[1]
        rows = sum(self.query_lens)
        self.query, self.key, self.value = (
            torch.randn(rows, heads, WIDTH, generator=generator).bfloat16().cuda()
            for heads in (QO, KV, KV)
        )
        counts = [-(-n // PAGE) for n in self.kv_lens]
        ids = 1 + np.random.default_rng(0).permutation(BLOCKS - 1)
        self.table = np.zeros((len(counts), max(counts)), np.int32)
        for row, pages in zip(self.table, np.split(ids, np.cumsum(counts))[:-1], strict=True):
            row[: len(pages)] = pages
        slots = oracle.slot_mapping(self.query_lens, self.kv_lens, self.table, PAGE)
        self.slots = torch.tensor(slots, device="cuda")
        self.layer = Layer(1.0, 0.5, 2.0) if kv_cache_dtype == "fp8" else Layer()
        self.settings: dict[str, Any] = {
            "model_dtype": "bfloat16",
            "kv_cache_dtype": kv_cache_dtype,
            "order": order,
            "sliding_window": window,
        }
        self.spec = AttentionSpec(QO, KV, WIDTH, sm_scale=SCALE, sliding_window=window)
        self.features = {"sm_scale": SCALE, "sliding_window": window}

    def impl(self, kind: Any = AttentionImpl) -> Any:
        return kind(QO, WIDTH, SCALE, KV, **self.settings)

    @property
    def group(self) -> Group:
        shape = CacheSpec.of(
            self.spec,
            num_layers=1,
            num_pages=BLOCKS,
            page_size=PAGE,
            dtype=self.dtype,
            layout=ORDERS[self.order],
            device="cuda",
        )
        return Group((self.spec,), shape, "bfloat16", kv_cache_dtype=self.kv_cache_dtype)

    @property
    def batch(self) -> EngineBatch:
        starts = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
        return EngineBatch(starts, np.array(self.kv_lens, np.int32), self.table)

    def step(self, kind: Any = MetadataBuilder, **more: Any) -> Step:
        return kind(Platform(this_gpu()), self.group, fallback="raise", **more).build(self.batch)

    def solve(self) -> Tensor:
        impl, output = self.impl(), torch.empty_like(self.query)
        impl.do_kv_cache_update(self.layer, self.key, self.value, self.cache, self.slots)
        impl.forward(self.layer, self.query, None, None, self.cache, self.step(), output)
        return output

    def want(self) -> np.ndarray[Any, Any]:
        """The oracle's output over what the cache holds."""
        stored = self.cache
        if self.kv_cache_dtype == "fp8":
            stored = stored.view(torch.float8_e4m3fn)
        pages = stored.float().double().cpu().transpose(1, 2).numpy()
        key, value = pages[..., :WIDTH], pages[..., WIDTH:]
        if self.kv_cache_dtype == "fp8":
            key, value = 0.5 * key, 2.0 * value
        query = self.query.double().cpu().numpy()
        out, _ = oracle.paged_attention(
            query, key, value, self.query_lens, self.kv_lens, self.table, **self.features
        )
        return out


def assert_close(case: Case, output: Tensor) -> None:
    """Within what 16-bit rounding, or XQA's 8-bit softmax weights, may change."""
    error = np.abs(output.float().cpu().numpy() - case.want()).max()
    assert error < (0.35 if case.kv_cache_dtype == "fp8" else 0.03), error


@pytest.mark.parametrize("kv_cache_dtype", MODULES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_order_against_the_oracle(batch: str, order: str, kv_cache_dtype: str) -> None:
    """I7, I8: packed keys and values in place, pages further apart than a page is long."""
    case = Case(batch, order, kv_cache_dtype)
    address = case.cache.data_ptr()
    assert_close(case, case.solve())
    assert case.cache.data_ptr() == address


def test_windows() -> None:
    need(VARIANTS[1])
    case = Case("mixed", window=33)
    assert_close(case, case.solve())


def test_decodes_are_served_by_xqa_on_9_0() -> None:
    case = Case("decode", kv_cache_dtype="fp8")
    step = case.step()
    (plan,) = step.plans.values()
    if this_gpu().capability == (9, 0):
        assert step.decodes is not None
        assert step.decodes.kernel.kernel == "xqa"
        assert [launch.family for launch in plan.static.main] == ["xqa"]


@pytest.mark.parametrize("kind", ["handle", "packed"])
@pytest.mark.parametrize("kv_cache_dtype", MODULES)
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("batch", BATCHES)
def test_jax_computes_the_same_bits(batch: str, order: str, kv_cache_dtype: str, kind: str) -> None:
    case, other = Case(batch, order, kv_cache_dtype), Case(batch, order, kv_cache_dtype)
    want = case.solve()
    impl = other.impl(by_jax.AttentionImpl)
    inputs = by_jax.LayerInputs.of(other.step(by_jax.MetadataBuilder))
    axes = (0, 1, 2, 3) if ORDERS[order] == "HND" else (0, 2, 1, 3)
    stored = other.cache.view(getattr(torch, other.dtype))
    if kind == "handle":
        scales = (0.5, 2.0) if kv_cache_dtype == "fp8" else None
        cache: Any = jax_frontend.cache_handle(
            PagedKVCache.from_packed(
                [stored], spec=impl.spec, dtype=other.dtype, order=order, scales=scales
            )
        )
    else:
        memory = stored.permute(axes).contiguous()
        raw = to_jax(memory.view(torch.uint8) if memory.itemsize == 1 else memory)
        cache = jax.lax.bitcast_convert_type(raw, other.dtype)

    def program(rows: Any, cache: Any, inputs: Any, slots: Any) -> Any:
        query, key, value = rows
        cache = impl.do_kv_cache_update(other.layer, key, value, cache, slots)
        out = impl.forward(other.layer, query, key, value, cache, inputs, jnp.zeros_like(query))
        return out, cache

    rows = tuple(to_jax(row) for row in (other.query, other.key, other.value))
    slots = to_jax(other.slots.int())
    out, after = jax.jit(program, donate_argnums=1)(rows, cache, inputs, slots)
    jax.block_until_ready((out, after))
    torch.testing.assert_close(torch.from_dlpack(out), want, rtol=0, atol=0)
    if kind == "handle":
        assert torch.equal(case.cache.view(torch.uint8), other.cache.view(torch.uint8))
        jax_frontend.release_cache(after.name)


@pytest.mark.parametrize("kv_cache_dtype", MODULES)
def test_a_recorded_step_serves_every_batch_of_its_size(kv_cache_dtype: str) -> None:
    """One recording, metadata replaced in place, padding requests among the decodes."""
    case = Case("decode", kv_cache_dtype=kv_cache_dtype)
    impl = case.impl()
    builder = MetadataBuilder(
        Platform(this_gpu()), case.group, fallback="raise", max_model_len=512, graph_sizes=[4]
    )
    step = builder.build(case.batch)
    output = torch.empty_like(case.query)
    given = (case.layer, case.query, None, None, case.cache, step, output)
    impl.do_kv_cache_update(case.layer, case.key, case.value, case.cache, case.slots)
    impl.forward(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(*given)
    (plan,) = step.plans.values()
    for lens in ([17, 300, 16, 1], [10, 290, 5, 0]):
        count = sum(length > 0 for length in lens)
        starts = np.minimum(np.arange(5), count).astype(np.int32)
        batch = EngineBatch(starts, lens, case.table, num_actual_tokens=4)
        (new,) = builder.build(batch).plans.values()
        if new.static != plan.static:
            continue  # a batch that is split otherwise has a recording of its own
        plan.metadata.copy_(new.metadata)
        graph.replay()
        torch.cuda.synchronize()
        case.query_lens, case.kv_lens = [int(length > 0) for length in lens], lens
        error = np.abs(output.float().cpu().numpy() - case.want()).max()
        assert error < (0.35 if kv_cache_dtype == "fp8" else 0.03)


def test_plans_behind_a_blocked_stream() -> None:
    """I17: the metadata of a step in flight is not overwritten by that of the next."""
    case = Case("mixed")
    builder = MetadataBuilder(Platform(this_gpu()), case.group, fallback="raise")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    made = []
    for context in range(20):
        lens = np.array(case.kv_lens) - context % 2
        lens = np.maximum(lens, case.query_lens).astype(np.int32)
        made.append(
            (lens, builder.build(EngineBatch(case.batch.query_start_loc, lens, case.table)))
        )
        gc.collect()
    torch.cuda.synchronize()
    for lens, step in made:
        (plan,) = step.plans.values()
        assert plan.views["kv_lens"][: len(lens)].tolist() == lens.tolist()


def test_wide_heads_have_scratch_enough() -> None:
    """I18: 64 heads of 256 over 8192 rows, with scratch that the plan counts."""
    need(VARIANTS[4])
    spec = AttentionSpec(64, 8, 256, sm_scale=1 / 16)
    pages = 8192 // PAGE + 1
    shape = CacheSpec.of(
        spec, num_layers=1, num_pages=pages, page_size=PAGE, dtype="bfloat16", device="cuda"
    )
    table = 1 + np.arange(pages - 1, dtype=np.int32)[None]
    builder = MetadataBuilder(
        Platform(this_gpu()), Group((spec,), shape, "bfloat16"), fallback="raise"
    )
    step = builder.build(EngineBatch([0, 8192], [8192], table))
    cache = torch.randn(pages, PAGE, 8, 512, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    impl = AttentionImpl(64, 256, 1 / 16, 8, model_dtype="bfloat16")
    query = torch.randn(8192, 64, 256, dtype=torch.bfloat16, device="cuda")
    output = torch.empty_like(query)
    impl.forward(Layer(), query, None, None, cache, step, output)
    assert bool(output.isfinite().all())
    first = cache.transpose(1, 2)[1, 0, :, 256:].repeat_interleave(8, 0)
    torch.testing.assert_close(output[0], first, rtol=0, atol=0)


def test_outputs_of_8_bits_are_recorded_after_a_first_call() -> None:
    case = Case("decode")
    impl, step = case.impl(), case.step()
    output = torch.zeros(case.query.shape, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.tensor(0.25, device="cuda")
    given = (case.layer, case.query, None, None, case.cache, step, output, scale)
    impl.forward(*given)
    want = output.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(*given)
    output.view(torch.uint8).zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output.view(torch.uint8), want.view(torch.uint8))
    assert want.float().abs().max() > 0


def test_padding_slots_change_no_byte() -> None:
    """I14."""
    case = Case("decode")
    impl, before = case.impl(), case.cache.clone()
    impl.do_kv_cache_update(
        case.layer, case.key, case.value, case.cache, torch.full_like(case.slots, -1)
    )
    assert torch.equal(case.cache, before)
