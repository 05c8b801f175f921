"""TRTLLM-GEN without a GPU: calls replayed by what its sources document, against the oracle.

The compiled functions were never run. Triton's part is replaced by plain PyTorch here, and compared
with it below.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import trtllm
import tvm_ffi

import jax_frontend
from interop import AttentionPlan, AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.attributes import ATTRIBUTES, Call, decode, encode
from interop.errors import UnsupportedError
from interop.plan import PlanStatic
from torch_backend import dispatch
from torch_backend.host_planning import host_plan
from torch_backend.kernels import FAMILIES, Device, Operands, trtllm_gen
from torch_backend.kernels import flashinfer_abi as abi

B200 = Device("cuda", (10, 0), 148)
HERE = Path(__file__).parents[2], Path(__file__).parents[1], Path(__file__).parent
LAYERS, PAGES, LAYER = 3, 24, 1

DECODE = [1, 1, 0, 1], [20, 1, 33, 50]
DRAFTS = [3, 1, 0, 2], [20, 1, 33, 50]
PREFILL = [20, 0, 9, 1, 12], [20, 40, 50, 18, 33]

# Name: family, (query lengths, kv lengths), dtype of query, dtype of cache.
STEPS = {
    "decode": ("trtllm_gen", DECODE, "bfloat16", "bfloat16"),
    "decode, fp16": ("trtllm_gen", DECODE, "float16", "float16"),
    "decode, 8-bit": ("trtllm_gen", DECODE, "bfloat16", "float8_e4m3fn"),
    "decode, 8-bit, fp16": ("trtllm_gen", DECODE, "float16", "float8_e4m3fn"),
    "drafts": ("trtllm_gen", DRAFTS, "bfloat16", "bfloat16"),
    "drafts, 8-bit": ("trtllm_gen", DRAFTS, "bfloat16", "float8_e4m3fn"),
    "prefill": ("trtllm_gen_context", PREFILL, "bfloat16", "bfloat16"),
    "prefill, fp16": ("trtllm_gen_context", PREFILL, "float16", "float16"),
    "prefill, e4m3": ("trtllm_gen_8bit", PREFILL, "bfloat16", "float8_e4m3fn"),
    "prefill, e5m2": ("trtllm_gen_8bit", PREFILL, "float16", "float8_e5m2"),
}
TOLERANCES = {"bfloat16": 5e-3, "float16": 1e-3}  # of rounding the output


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[trtllm.Module]:
    """The stand-in, in place of the compiled module and of Triton."""
    stand_in = trtllm.Module()
    monkeypatch.setattr(abi, "load", stand_in.load)
    monkeypatch.setattr(abi, "why_no_cubins", lambda: None)
    for name, functions in (
        ("triton_trtllm", {"prepare_trtllm": trtllm.prepare}),
        ("triton_ops", {"gather": trtllm.gather}),
    ):
        replaced = ModuleType(f"torch_backend.{name}")
        replaced.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, f"torch_backend.{name}", replaced)
    trtllm_gen._ready.cache_clear()
    yield stand_in
    trtllm_gen._ready.cache_clear()


@contextmanager
def only(*names: str) -> Iterator[None]:
    """Within this context no other families serve."""
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES.values():
            if family.name not in names:
                patch.setattr(family, "refuse", lambda work: "another family is under test")
        dispatch.serve.cache_clear()
        yield
    dispatch.serve.cache_clear()


class Step:
    """One step's plan and buffers, and the right answer."""

    def __init__(
        self,
        name: str,
        *,
        window: int | None = None,
        padded: bool = False,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        page_size: int = 16,
        per_head: bool = False,
        lse: bool = True,
        sm_scale: float | None = 0.2,
        families: tuple[str, ...] = (),
        lens: Any = None,
        bucket: Bucket | None = None,
        sinks: bool = False,
    ) -> None:
        self.family, lengths, dtype, cache_dtype = STEPS[name]
        self.query_lens, self.kv_lens = lens or lengths
        self.spec = AttentionSpec(
            *heads,
            head_dim,
            dtype=dtype,
            sliding_window=window,
            sm_scale=sm_scale,
            sinks=sinks,
        )
        self.cache = CacheSpec.of(
            self.spec,
            num_layers=LAYERS,
            num_pages=PAGES,
            page_size=page_size,
            dtype=cache_dtype,
            layout="HND",
            device="cuda",
            scales_per_head=per_head,
        )
        rng = np.random.default_rng(len(name))
        most = -(-max(self.kv_lens) // page_size)
        count = len(self.query_lens)
        # Page 0 is nobody's, so that what padding reads shows.
        self.table = 1 + rng.permutation(PAGES - 1)[: count * most].reshape(count, most)
        self.table = self.table.astype(np.int32)
        batch = RaggedBatch(self.query_lens, self.kv_lens, self.table)
        if padded:
            pages = int(batch.pages(page_size).indptr[-1])
            longest = batch.max_query_len
            bucket = Bucket(count + 2, batch.num_tokens + 3, pages + 5, longest)
        with only(*(families or (self.family,))):
            self.static, words = host_plan(
                self.spec,
                self.cache,
                batch,
                bucket,
                B200,
                "raise",
                None,
                lambda n: np.full(n, -7, np.int32),
                return_lse=lse,
            )
        self.fields = self.static.layout.views(torch.from_numpy(words))
        self._fill(rng, lse)

    def _fill(self, rng: Any, lse: bool) -> None:
        cache, dtype = self.cache, getattr(torch, self.static.query_dtype)
        self.query = torch.from_numpy(rng.standard_normal(self.static.query_shape)).to(dtype)
        used = np.zeros(LAYERS * PAGES, bool)
        for request, kv_len in enumerate(self.kv_lens):
            count = -(-kv_len // cache.page_size)
            used[LAYER * PAGES + self.table[request, :count]] = True
        self.scales = None
        if cache.quantized:
            self.scales = torch.from_numpy(rng.uniform(0.5, 2.0, cache.scales_shape)).float()
            if not cache.scales_per_head:
                self.scales[:] = self.scales[:, :, :1]
        self.pools, self.real = [], []
        for side, shape in enumerate((cache.key_shape, cache.value_shape)):
            stored = torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, cache.dtype))
            real = stored.float()
            if self.scales is not None:
                real = real * self.scales[LAYER, side][None, :, None, None]
            if self.family == "trtllm_gen_8bit":
                real = real.to(dtype).float()  # as copies are
            # What no request reads is NaN.
            stored.view(torch.uint8)[~torch.from_numpy(used)] = 0xFF
            self.pools.append(stored)
            self.real.append(real[LAYER * PAGES : (LAYER + 1) * PAGES].transpose(1, 2).numpy())
        self.out = torch.full(self.static.out_shape, math.nan, dtype=dtype)
        self.lse = torch.from_numpy(rng.standard_normal(self.static.out_shape[:2])).float()
        if not lse:
            self.lse = None  # type: ignore[assignment]
        heads = self.spec.num_qo_heads
        self.sinks = torch.linspace(-1.0, 3.0, heads) if self.spec.sinks else None

    def operands(self, launch: Any, *, whole_pool: bool) -> Operands:
        """Buffers as PyTorch hands them on, one layer's pages, or as JAX does, with an offset."""
        family, pools = FAMILIES[launch.family], self.pools
        metadata = {name: self.fields[name].clone() for name in family.fields(launch)}
        if whole_pool:
            for name in family.page_fields(launch):
                metadata[name] += LAYER * PAGES
        else:
            pools = [pool[LAYER * PAGES : (LAYER + 1) * PAGES] for pool in pools]
        scratch = torch.randint(0, 256, (launch.scratch_bytes,), dtype=torch.uint8)
        layer = None if self.scales is None else torch.tensor([LAYER], dtype=torch.int32)
        buffers = (
            self.query,
            *pools,
            metadata,
            self.out,
            self.lse,
            scratch,
            self.scales,
            layer,
            self.sinks,
        )
        return Operands(*buffers)

    def run(self, *, whole_pool: bool = False) -> None:
        """Run all launches."""
        for launch in self.static.main:
            FAMILIES[launch.family].run(launch, self.operands(launch, whole_pool=whole_pool))

    def check(self) -> None:
        """Compare with the oracle; rows that are padding are 0, and -inf."""
        rows, dtype = sum(self.query_lens), self.static.query_dtype
        query = self.query[:rows].float()
        if dtype == "float16" and self.family == "trtllm_gen" and self.cache.quantized:
            query = query.to(torch.float8_e4m3fn).float()
        out, lse = oracle.paged_attention(
            query.numpy(),
            *self.real,
            self.query_lens,
            self.kv_lens,
            self.table,
            sm_scale=self.spec.sm_scale,
            sliding_window=self.spec.sliding_window,
            sinks=None if self.sinks is None else self.sinks.numpy(),
        )
        tolerance = TOLERANCES[dtype]
        np.testing.assert_allclose(self.out[:rows].float(), out, atol=tolerance, rtol=tolerance)
        assert (self.out[rows:] == 0).all()
        if self.lse is not None:
            np.testing.assert_allclose(self.lse[:rows], lse, atol=1e-4, rtol=1e-4)
            assert torch.isneginf(self.lse[rows:]).all()


@pytest.mark.parametrize("whole_pool", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "window"),
    # Of queries of several rows over 8-bit pages windows are refused.
    [(name, window) for name in STEPS for window in (None, 7) if not (window and "s, 8" in name)],
)
def test_against_the_oracle(
    module: trtllm.Module, name: str, window: int | None, padded: bool, whole_pool: bool
) -> None:
    """Tables with a layer's offset, scales once, base 2, windows, and rows of nobody."""
    step = Step(name, window=window, padded=padded)
    step.run(whole_pool=whole_pool)
    step.check()
    ((function, _),) = module.calls
    assert function.endswith("decode" if step.family == "trtllm_gen" else "context")


@pytest.mark.parametrize("window", [1, 7, 16, 17, 40])
def test_drafts_of_8_with_a_window(window: int) -> None:
    step = Step("drafts", window=window, lens=([8, 8, 8], [40, 8, 57]), padded=window % 2 == 0)
    step.run()
    step.check()


@pytest.mark.parametrize("seed", range(12))
def test_any_lengths(seed: int) -> None:
    """Idle requests, pages that are full, padding or none."""
    rng = np.random.default_rng(seed)
    name = ("decode", "drafts", "prefill", "prefill, e4m3")[seed % 4]
    most = {"decode": 1, "drafts": 8}.get(name, 20)
    query = rng.integers(0, most + 1, rng.integers(1, 6))
    query[0] = most
    kv = query + rng.choice([0, 1, 15, 16, 17, 32, 40], query.size)
    lens = query.tolist(), np.maximum(kv, 1).tolist()
    window = int(rng.integers(1, 50)) if seed % 3 else None
    step = Step(name, lens=lens, padded=bool(rng.integers(2)), window=window)
    step.run(whole_pool=bool(rng.integers(2)))
    step.check()


@pytest.mark.parametrize("name", ["decode", "prefill", "prefill, e4m3"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": (8, 1), "head_dim": 128},
        {"heads": (2, 2), "head_dim": 256, "page_size": 32},
        {"heads": (4, 1), "page_size": 128},
        {"heads": (6, 2), "page_size": 64, "lse": False},
    ],
    ids=str,
)
def test_sizes(name: str, sizes: dict[str, Any]) -> None:
    step = Step(name, padded=True, **sizes)
    step.run()
    step.check()


@pytest.mark.parametrize("name", STEPS)
def test_sinks_are_handed_over(module: trtllm.Module, name: str) -> None:
    step = Step(name, padded=True, sinks=True, lse=False)
    step.run()
    step.check()
    ((_, call),) = module.calls
    assert call["attention_sinks"] is step.sinks


def test_a_scale_for_each_head_is_applied_by_the_copy() -> None:
    step = Step("prefill, e4m3", per_head=True)
    step.run()
    step.check()


def test_scales_are_applied_once(module: trtllm.Module) -> None:
    """By the kernel where it reads 8-bit pages, and by the copy where it reads copies."""
    for name in ("decode, 8-bit", "prefill, e4m3", "decode"):
        step = Step(name)
        step.run()
        _, call = module.calls[-1]
        if name == "decode, 8-bit":
            assert step.scales is not None
            key_scale, value_scale = step.scales[LAYER, :, 0].tolist()
            assert float(call["bmm1_scale"]) == pytest.approx(0.2 * math.log2(math.e) * key_scale)
            assert float(call["bmm2_scale"]) == pytest.approx(value_scale)
            assert call["bmm1_scale"].shape == call["bmm2_scale"].shape == (1,)
        else:
            assert (call["bmm1_scale"], call["bmm2_scale"]) == (0.2, 1.0)


def test_what_the_decode_kernel_is_handed(module: trtllm.Module) -> None:
    step = Step("decode", padded=True, window=9)
    step.run()
    ((function, call),) = module.calls
    assert function == "trtllm_paged_attention_decode"
    for name, value in {
        "max_q_len": 1,
        "max_kv_len": 64,
        "batch_size": 6,
        "window_left": 8,
        "sm_count": 148,
        "cum_seq_lens_q": None,
        "lse_scale": math.log(2.0),
        "use_fp16_softmax": None,
        "sparse_mla_top_k_lens": None,
        "skip_softmax_threshold_scale_factor": None,
    }.items():
        assert call[name] == value, name
    # Padding rows read one key of page 0, and so does the end of no table.
    assert call["seq_lens"].tolist() == [20, 1, 50, 1, 1, 1]
    want = np.zeros((6, 4), int)
    for row, request, count in ((0, 0, 2), (1, 1, 1), (2, 3, 4)):
        want[row, :count] = step.table[request, :count]
    assert call["block_tables"].tolist() == want.tolist()
    assert call["query"].data_ptr() == step.query.data_ptr()
    assert call["out"].data_ptr() == step.out.data_ptr()
    offset = LAYER * step.pools[0][:PAGES].nbytes
    assert call["key_cache"].data_ptr() == step.pools[0].data_ptr() + offset
    assert call["value_cache"].data_ptr() == step.pools[1].data_ptr() + offset


def test_what_the_prefill_kernel_is_handed(module: trtllm.Module) -> None:
    """Offsets of rows in tokens and of keys in pages; padding is no request of its own."""
    step = Step("prefill", padded=True)
    step.run()
    ((function, call),) = module.calls
    assert function == "trtllm_paged_attention_context"
    assert (call["batch_size"], call["max_q_len"], call["max_kv_len"]) == (7, 20, 64)
    assert call["cum_seq_lens_q"].tolist() == [0, 20, 29, 30, 42, 42, 42, 42]
    assert call["seq_lens"].tolist() == [20, 50, 18, 33, 1, 1, 1]
    assert call["cum_seq_lens_kv"].tolist() == [0, 2, 6, 8, 11, 12, 13, 14]
    assert call["block_tables"][:, 3].tolist() == [0, step.table[2, 3], 0, 0, 0, 0, 0]


def test_copies_begin_with_a_page_of_nobody(module: trtllm.Module) -> None:
    step = Step("prefill, e4m3")
    step.run()
    ((_, call),) = module.calls
    # 2 + 3 + 4 + 2 + 3 pages; the second request has no rows, and its pages no table.
    assert call["key_cache"].shape == (15, 2, 16, 64)
    assert call["block_tables"].tolist() == [
        [1, 2, 0, 0],
        [6, 7, 8, 9],
        [10, 11, 0, 0],
        [12, 13, 14, 0],
        [0, 0, 0, 0],
    ]
    assert not call["key_cache"][0].any() and not call["value_cache"][0].any()
    # Past the end of a request there is no NaN, whatever the page held.
    assert not call["key_cache"].isnan().any() and not call["key_cache"][2, :, 4:].any()


def test_mixed_batches_of_two_launches() -> None:
    """Decodes first; without LSE, which one launch would write into the rows of the other."""
    names = ("trtllm_gen", "trtllm_gen_context")
    lens = [1, 1, 0, 1, 30, 9], [20, 1, 33, 34, 40, 33]
    for bucket in (None, Bucket(8, 256, 40, 200), Bucket(6, 128, 15, 128)):
        step = Step("prefill", families=names, lens=lens, bucket=bucket, lse=False)
        launches = [launch.family for launch in step.static.main]
        # A batch that is its own bucket has no query of 128 rows, and is one launch.
        assert launches == (["trtllm_gen_context"] if bucket is None else list(names))
        step.run(whole_pool=True)
        step.check()


def test_strides_of_axes_of_size_1_are_made_canonical(module: trtllm.Module) -> None:
    """What DLPack brings may have any there; pages may lie apart."""
    step = Step("decode", heads=(4, 1))
    apart = []
    for pool in step.pools:
        wide = torch.zeros(pool.shape[0], 2 * 16 * 64, dtype=pool.dtype)
        view = wide.as_strided(pool.shape, (2 * 16 * 64, 7, 64, 1))
        view.copy_(pool)
        apart.append(view)
    step.pools = apart
    step.run()
    step.check()
    ((_, call),) = module.calls
    assert call["key_cache"].stride() == (2048, 1024, 64, 1)


def test_a_single_row_has_a_stride_too(module: trtllm.Module) -> None:
    step = Step("decode", lens=([1], [20]))
    step.query = step.query.as_strided(step.query.shape, (7, 64, 1))
    step.out = step.out.as_strided(step.out.shape, (3, 64, 1))
    step.run()
    step.check()
    ((_, call),) = module.calls
    assert call["query"].stride() == call["out"].stride() == (256, 64, 1)
    assert call["query"].data_ptr() == step.query.data_ptr()


def test_bridge_tensors_are_handed_on(module: trtllm.Module) -> None:
    """A custom call's buffers are no torch tensors; their memory is the same."""
    step = Step("decode, 8-bit", padded=True)
    (launch,) = step.static.main
    operands = step.operands(launch, whole_pool=False)
    buffers = {
        name: None if buffer is None else tvm_ffi.from_dlpack(buffer)
        for name, buffer in operands._asdict().items()
        if name != "metadata"
    }
    metadata = {name: tvm_ffi.from_dlpack(field) for name, field in operands.metadata.items()}
    FAMILIES[launch.family].run(launch, Operands(**buffers, metadata=metadata))
    step.check()


def test_launches_survive_as_attributes_and_as_json() -> None:
    """A compiled program holds them as numbers."""
    for name in STEPS:
        static = Step(name, padded=True).static
        assert PlanStatic.from_json(static.to_json()) == static
        call = Call(static.main[0], "", 0, True)
        attributes = encode(call)
        assert decode("".join(attributes[part] for part in ATTRIBUTES)) == call


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_plan_runs_its_kernel_once_before(
    module: trtllm.Module, monkeypatch: pytest.MonkeyPatch, name: str, padded: bool
) -> None:
    """The stand-in refuses what the launcher would; errors become this library's own."""
    step = Step(name, padded=padded)
    (launch,) = step.static.main
    family, cpu = FAMILIES[launch.family], torch.device("cpu")
    trtllm_gen._warm.cache_clear()
    trtllm_gen._warm(family, launch, step.static.query_dtype, cpu)
    trtllm_gen._warm(family, launch, step.static.query_dtype, cpu)
    ((_, call),) = module.calls
    step.run()
    _, later = module.calls[-1]
    # What a kernel is chosen by.
    for key in ("max_q_len", "max_kv_len", "batch_size", "window_left", "sm_count"):
        assert call[key] == later[key]
    for key in ("query", "out", "block_tables", "workspace_buffer"):
        assert (call[key].shape, call[key].dtype) == (later[key].shape, later[key].dtype)
    monkeypatch.setattr(type(family), "run", lambda *arguments: 1 / 0)
    trtllm_gen._warm.cache_clear()
    with pytest.raises(UnsupportedError, match=r"cannot load or run a kernel.*kernel='fa2'"):
        trtllm_gen._warm(family, launch, step.static.query_dtype, cpu)


def test_jax_lowers_to_calls_of_the_same_launch() -> None:
    """Not only PyTorch's plans: the program for CUDA names the launch, its fields and scratch."""
    for name in ("decode", "prefill"):
        step = Step(name, padded=True)
        kv = jax_frontend.init_cache(
            step.spec,
            num_layers=LAYERS,
            num_pages=PAGES,
            page_size=16,
            dtype=step.cache.dtype,
            layout="HND",
        )
        kv = replace(kv, spec=step.cache)
        plan = AttentionPlan(step.static, jnp.zeros(step.static.layout.words, jnp.int32))
        query = jnp.zeros(step.static.query_shape, step.static.query_dtype)

        def attend(query: Any, kv: Any, plan: Any, layer: Any) -> Any:
            return jax_frontend.attend(query, kv, plan, layer, return_lse=True)

        traced = jax.jit(attend).trace(query, kv, plan, jnp.int32(LAYER))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (launch,) = step.static.main
        assert "@isthmus_attend(" in text
        pieces = re.findall(r'call_(\d\d) = "([^"]*)"', text)
        told = decode("".join(piece for _, piece in sorted(pieces)).replace("\\22", '"'))
        assert told.launch == launch and told.lse
        assert f"tensor<{launch.scratch_bytes}xui8>" in text
        for field in FAMILIES[launch.family].fields(launch):
            (length,) = (size for other, _, size in step.static.layout.fields if other == field)
            assert f"tensor<{length}xi32>" in text


def test_plans_of_a_bucket_are_alike() -> None:
    """Batches of one bucket whose tables are as wide share a static part."""
    statics = [
        Step("decode", lens=lens, bucket=Bucket(6, 6, 20, 1)).static
        for lens in (DECODE, ([1, 1], [60, 55]), ([1, 0, 1], [49, 1, 2]))
    ]
    assert statics[0] == statics[1] == statics[2]
    other = replace(statics[0].main[0], constants=(148, 6, 6, 8, 1, 0, 1))
    assert statics[0].main[0] != other


# TRITON_INTERPRET has to be set before Triton is imported, hence a process of its own.
SCRIPT = """
import torch
import trtllm
from test_triton_ops import convert_exactly
from triton.runtime import interpreter
from torch_backend.triton_ops import gather
from torch_backend.triton_trtllm import prepare_trtllm, warm_prepare_trtllm

interpreter._convert_float = convert_exactly
torch.manual_seed(0)
for heads, kv_heads, width in ((8, 2, 128), (6, 3, 64), (5, 1, 256)):
    query = (300 * torch.randn(7, heads, width)).half()
    query[0, 0, :3] = torch.tensor([600.0, -600.0, float("nan")])
    table, layer = torch.rand(3, 2, kv_heads) + 0.01, torch.tensor([2], dtype=torch.int32)
    for rounds in (False, True):
        got, want = (
            (torch.zeros(query.shape).to(torch.float8_e4m3fn) if rounds else None, torch.zeros(2))
            for _ in range(2)
        )
        prepare_trtllm(query, *got, table, layer, 0.3)
        trtllm.prepare(query, *want, table, layer, 0.3)
        torch.testing.assert_close(got[1], want[1])
        if rounds:
            codes = [each[0].float().nan_to_num(-9.0) for each in (got, want)]
            assert torch.equal(*codes)
            assert got[0].isnan().sum() == 1
            assert got[0][0, 0, :2].tolist() == [448.0, -448.0]
        warm_prepare_trtllm(query, kv_heads, rounds=rounds)

    pools = [torch.randn(9, kv_heads, 16, width).to(torch.float8_e4m3fn) for _ in "kv"]
    pools = [pool.transpose(1, 2) for pool in pools]
    pages = torch.tensor([3, 0, 8, 5], dtype=torch.int32)
    valid = torch.tensor([16, 5, -1, 1], dtype=torch.int32)
    sides = [[torch.full((64, kv_heads, width), 9.0).half() for _ in "kv"] for _ in range(2)]
    for function, rows in zip((gather, trtllm.gather), sides):
        function(*pools, pages, valid, *rows, scale_table=table, scale_layer=layer)
    for got, want in zip(*sides):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
print("prepared")
"""


def test_interpreted_kernels_do_what_the_stand_ins_do() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, HERE))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "prepared\n", done.stderr
