"""FA2 and FA3 without a GPU: refusals, plans, and what the compiled functions are handed.

The compiled modules are replaced by recorders; what a GPU computes is in tests/gpu.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi
from families import only
from hypothesis import given
from hypothesis import strategies as st

from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.attributes import ATTRIBUTES, Call, decode, encode
from interop.plan import PlanStatic
from torch_backend.dispatch import choose
from torch_backend.kernels import FAMILIES, Device, Lengths, Operands, Work
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels import flashinfer_fa2 as fa2
from torch_backend.kernels import flashinfer_fa3 as fa3
from torch_backend.planning import host_plan

RECORDED = Path(__file__).parents[1] / "data" / "flashinfer_plans_h200.json.gz"

H200 = Device("cuda", (9, 0), 132)
A100 = Device("cuda", (8, 0), 108)
SPEC = AttentionSpec(8, 2, 64)
CACHE = CacheSpec(2, 64, 4, 2, 64, dtype="float16", device="cuda")
SPEC_8BIT = AttentionSpec(8, 2, 64, dtype="float16")
CACHE_8BIT = replace(CACHE, dtype="float8_e5m2", scales_per_head=True)

TABLE = np.arange(40).reshape(4, 10)
MIXED = RaggedBatch([1, 3, 0, 2], [6, 30, 5, 9], TABLE)
FIRST = RaggedBatch([5, 3, 7], [5, 3, 7], TABLE[:3])


class Recorder:
    """Stands for a compiled function: keeps its arguments, writes an LSE of 1 in base 2."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        assert len(arguments) == len(self.names)
        call = dict(zip(self.names, arguments, strict=True))
        self.calls.append(call)
        if call["maybe_lse"] is not None:
            torch.from_dlpack(call["maybe_lse"]).fill_(1.0)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Recorders by module key, for as long as a test runs."""
    loaded: dict[abi.ModuleKey, dict[str, Recorder]] = {}

    def load(key: abi.ModuleKey) -> dict[str, Recorder]:
        names = abi.SIGNATURES[key.backend]
        functions = {name: Recorder(names[name]) for name in ("paged_run", "ragged_run")}
        return loaded.setdefault(key, functions)

    def forget() -> None:
        fa2._ready_fa2.cache_clear()
        fa3._ready_fa3.cache_clear()

    monkeypatch.setattr(abi, "load", load)
    forget()
    yield loaded
    forget()


def _plan(
    family: str,
    batch: RaggedBatch,
    *,
    spec: AttentionSpec = SPEC,
    cache: CacheSpec | None = CACHE,
    bucket: Bucket | None = None,
    device: Device = H200,
) -> tuple[PlanStatic, dict[str, torch.Tensor]]:
    with only(family):
        static, words = host_plan(
            spec, cache, batch, bucket, device, "raise", None, lambda n: np.full(n, -7, np.int32)
        )
    return static, static.layout.views(torch.from_numpy(words))


def _operands(static: PlanStatic, source: str, fields: Any, *, bridge: bool = False) -> Operands:
    """Buffers of a call, as torch tensors or as a custom call gets them."""
    dtype = getattr(torch, static.query_dtype)
    spec, cache, bucket = static.spec, static.cache, static.bucket
    launch = static.main[0] if source == static.main[0].source else static.own
    assert launch is not None
    kv_dtype, scales = dtype, {}
    if source == "pages":
        assert cache is not None
        shapes = cache.key_shape, cache.value_shape
        kv_dtype = getattr(torch, cache.dtype)
        if cache.quantized:
            scales["scale_table"] = torch.rand(cache.scales_shape) + 0.5
            scales["scale_layer"] = torch.tensor([1], dtype=torch.int32)
    else:
        rows = bucket.num_tokens if cache is not None else bucket.num_pages
        shapes = (rows, spec.num_kv_heads, spec.head_dim), (rows, spec.num_kv_heads, spec.head_dim)
    key, value = (torch.randn(shape).to(kv_dtype) for shape in shapes)
    operands = Operands(
        query=torch.randn(static.query_shape).to(dtype),
        key=key,
        value=value,
        metadata={name: fields[name] for name in FAMILIES[launch.family].fields(launch)},
        out=torch.empty(static.out_shape, dtype=dtype),
        lse=torch.empty(static.out_shape[:2]),
        scratch=torch.empty(launch.scratch_bytes, dtype=torch.uint8)
        if launch.scratch_bytes
        else None,
        **scales,
    )
    if not bridge:
        return operands
    buffers = {
        name: None if buffer is None else tvm_ffi.from_dlpack(buffer)
        for name, buffer in operands._asdict().items()
        if name != "metadata"
    }
    metadata = {name: tvm_ffi.from_dlpack(field) for name, field in operands.metadata.items()}
    return Operands(**buffers, metadata=metadata)


def _run(launch: Any, operands: Operands, modules: Any) -> dict[str, Any]:
    """Run a launch; what the compiled function got, by name."""
    FAMILIES[launch.family].run(launch, operands)
    (module,) = modules.values()
    (function,) = (function for function in module.values() if function.calls)
    call: dict[str, Any] = function.calls.pop()
    return call


OPTIONS = {
    "mask_mode_code": 1,
    "layout": 0,
    "window_left": -1,
    "logits_soft_cap": 0.0,
    "sm_scale": 0.125,
    "token_pos_in_items_len": 0,
}


def _options(call: dict[str, Any], **changed: Any) -> None:
    """Check what is no tensor: the kind of attention, and nothing beyond it."""
    for name, value in (OPTIONS | changed).items():
        assert call[name] == value, name
    optional = [name for name in call if name.startswith("maybe_") and name != "maybe_lse"]
    assert optional
    assert all(call[name] is None for name in optional)


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("family", ["fa2", "fa2_flashinfer"])
def test_fa2_over_pages(modules: Any, family: str, bridge: bool) -> None:
    """Every buffer is handed on as it came, in its place."""
    static, fields = _plan(family, MIXED)
    operands = _operands(static, "pages", fields, bridge=bridge)
    call = _run(static.main[0], operands, modules)
    assert list(modules) == [abi.ModuleKey("fa2", "float16", 64)]
    scratch = operands.scratch if operands.scratch is not None else operands.out
    handed = {
        "float_workspace_buffer": scratch,
        "int_workspace_buffer": operands.metadata["fa2_schedule"],
        "q": operands.query,
        "paged_k_cache": operands.key,
        "paged_v_cache": operands.value,
        "qo_indptr": operands.metadata["qo_indptr"],
        "paged_kv_indptr": operands.metadata["kv_indptr"],
        "paged_kv_indices": operands.metadata["page_indices"],
        "paged_kv_last_page_len": operands.metadata["kv_last_page_len"],
        "o": operands.out,
        "maybe_lse": operands.lse,
    }
    for name, buffer in handed.items():
        assert call[name] is buffer, name
    assert tuple(call["plan_info_vec"]) == static.main[0].constants[:15]
    _options(call, enable_pdl=True, rope_rcp_scale=1.0, rope_rcp_theta=1.0)
    assert torch.from_dlpack(operands.lse).unique().tolist() == pytest.approx([math.log(2)])


def test_fa2_over_own_rows(modules: Any) -> None:
    """The offsets of keys are the plan's own: those of the cache count pages."""
    bucket = Bucket(4, 20, 30, without_context=True)
    static, fields = _plan("fa2", FIRST, bucket=bucket, device=A100)
    assert static.own is not None
    operands = _operands(static, "tokens", fields)
    call = _run(static.own, operands, modules)
    assert call["int_workspace_buffer"] is operands.metadata["fa2_own_schedule"]
    assert call["qo_indptr"].tolist() == [0, 5, 8, 15, 15, 20]
    assert call["kv_indptr"].tolist() == [0, 5, 8, 15, 15, 15]  # padding rows have no keys
    assert call["k"] is operands.key
    assert call["v"] is operands.value
    assert call["o"] is operands.out
    _options(call, enable_pdl=False)


def test_fa2_without_a_cache(modules: Any) -> None:
    """Keys of a request may be more than its queries."""
    spec = AttentionSpec(8, 2, 64, dtype="bfloat16", causal=False)
    static, fields = _plan("fa2", RaggedBatch([2, 1], [4, 9]), spec=spec, cache=None)
    operands = _operands(static, "tokens", fields)
    call = _run(static.main[0], operands, modules)
    assert list(modules) == [abi.ModuleKey("fa2", "bfloat16", 64)]
    assert call["qo_indptr"].tolist() == [0, 2, 3]
    assert call["kv_indptr"].tolist() == [0, 4, 13]
    _options(call, mask_mode_code=0)


@pytest.mark.parametrize("bridge", [False, True])
def test_fa3_over_pages(modules: Any, bridge: bool) -> None:
    """Lengths and offsets are in the schedule, which stands in for arrays that nothing reads."""
    static, fields = _plan("fa3", MIXED)
    operands = _operands(static, "pages", fields, bridge=bridge)
    call = _run(static.main[0], operands, modules)
    assert list(modules) == [abi.ModuleKey("fa3", "float16", 64)]
    schedule = operands.metadata["fa3_schedule"]
    handed = {
        "float_workspace_buffer": operands.out,
        "int_workspace_buffer": schedule,
        "q": operands.query,
        "paged_k_cache": operands.key,
        "paged_v_cache": operands.value,
        "qo_indptr": schedule,
        "paged_kv_indptr": schedule,
        "paged_kv_indices": operands.metadata["page_indices"],
        "paged_kv_last_page_len": schedule,
        "o": operands.out,
        "maybe_lse": operands.lse,
    }
    for name, buffer in handed.items():
        assert call[name] is buffer, name
    assert tuple(call["plan_info_vec"]) == static.main[0].constants[:9]
    assert static.main[0].scratch_bytes == 0
    _options(call, scale_v_scalar=1.0)
    assert torch.from_dlpack(operands.lse).unique().tolist() == pytest.approx([math.log(2)])


def _triton_ops(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let these stand for the Triton kernels, which cannot run here."""
    module = ModuleType("torch_backend.triton_ops")
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, "torch_backend.triton_ops", module)


def _recorded_gather(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    copied: dict[str, torch.Tensor] = {}

    def gather(*arguments: torch.Tensor, **scales: torch.Tensor) -> None:
        names = ("key_pool", "value_pool", "indices", "valid", "key", "value")
        copied.update(zip(names, arguments, strict=True), **scales)

    _triton_ops(monkeypatch, gather=gather)
    return copied


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_fa3_copies_pages_into_rows(
    modules: Any, monkeypatch: pytest.MonkeyPatch, bridge: bool, padded: bool
) -> None:
    """Long queries: the kernel gets rows, a request's where its first page is in the indices."""
    monkeypatch.setattr(fa3, "COPY_LEAST_QUERY_LEN", 0)
    monkeypatch.setattr(fa3, "MOST_TILE_KEYS", 8)
    copied = _recorded_gather(monkeypatch)
    static, fields = _plan("fa3", MIXED, bucket=Bucket(6, 20, 30) if padded else None)
    operands = _operands(static, "pages", fields, bridge=bridge)
    call = _run(static.main[0], operands, modules)
    entries = 30 if padded else 15
    assert call["k"].shape == call["v"].shape == (4 * entries, 2, 64)
    assert call["k"].data_ptr() == torch.from_dlpack(operands.scratch).data_ptr()
    assert call["v"].data_ptr() == call["k"].data_ptr() + call["k"].nbytes
    assert static.main[0].scratch_bytes == call["k"].nbytes + call["v"].nbytes
    assert copied["key"] is call["k"] and copied["value"] is call["v"]
    # 6, 30, 5 and 9 tokens in pages of 4; then two pages that become 0, and what nobody reads.
    valid = [4, 2, *[4] * 7, 2, 4, 1, 4, 4, 1]
    assert copied["valid"].tolist() == valid + ([0, 0, *[-1] * 13] if padded else [])
    assert copied["indices"].tolist() == fields["page_indices"].tolist()
    starts = fields["fa3_schedule"][static.main[0].constants[2] // 4 :]
    assert set(starts[: 3 * 8].tolist()) <= {0, 8, 40, 48, 60}


@pytest.mark.parametrize("bridge", [False, True])
def test_fa3_reads_8_bit_pages_as_copies(
    modules: Any, monkeypatch: pytest.MonkeyPatch, bridge: bool
) -> None:
    """However short the queries are; rows and module have the query's type."""
    copied = _recorded_gather(monkeypatch)
    static, fields = _plan("fa3", MIXED, spec=SPEC_8BIT, cache=replace(CACHE_8BIT, layout="HND"))
    operands = _operands(static, "pages", fields, bridge=bridge)
    call = _run(static.main[0], operands, modules)
    assert list(modules) == [abi.ModuleKey("fa3", "float16", 64)]
    assert call["k"].dtype == call["v"].dtype == torch.float16
    assert call["k"].shape == call["v"].shape == (4 * 15, 2, 64)
    assert static.main[0].scratch_bytes == call["k"].nbytes + call["v"].nbytes
    assert copied["key_pool"].dtype == torch.float8_e5m2
    assert copied["key_pool"].shape == (128, 4, 2, 64)
    assert torch.equal(copied["scale_table"], torch.from_dlpack(operands.scale_table))
    assert copied["scale_layer"].tolist() == [1]


def _scaling(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """What Triton does on a GPU, by torch."""

    def multiply(rows: torch.Tensor, table: torch.Tensor, layer: torch.Tensor, side: int) -> Any:
        scale = table[int(layer), side].repeat_interleave(group)
        return (rows.float() * scale[:, None]).to(rows.dtype)

    def scale_query(
        query: torch.Tensor, scaled: torch.Tensor, table: torch.Tensor, layer: torch.Tensor
    ) -> None:
        scaled.copy_(multiply(query, table, layer, 0))

    def scale_output(out: torch.Tensor, table: torch.Tensor, layer: torch.Tensor) -> None:
        out.copy_(multiply(out, table, layer, 1))

    _triton_ops(monkeypatch, scale_query=scale_query, scale_output=scale_output)


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_fa2_over_8_bit_pages(
    modules: Any, monkeypatch: pytest.MonkeyPatch, bridge: bool, long: bool
) -> None:
    """The kernel gets a query that was multiplied by the keys' scale; the output is afterwards."""
    _scaling(monkeypatch, group=4)
    # A long cache is split, and then partial results are in scratch as well.
    batch = RaggedBatch([1], [4000], np.arange(1000)[None]) if long else MIXED
    cache = replace(CACHE_8BIT, num_pages=1000)
    static, fields = _plan("fa2", batch, spec=SPEC_8BIT, cache=cache)
    plain, _ = _plan("fa2", batch, cache=replace(CACHE, num_pages=1000))
    partials = plain.main[0].scratch_bytes
    assert bool(partials) == long
    (launch,) = static.main
    operands = _operands(static, "pages", fields, bridge=bridge)
    out, scratch = torch.from_dlpack(operands.out), torch.from_dlpack(operands.scratch)
    out.fill_(2.0)
    call = _run(launch, operands, modules)
    assert list(modules) == [abi.ModuleKey("fa2", "float16", 64, kv_dtype="float8_e5m2")]
    query, table = torch.from_dlpack(operands.query), torch.from_dlpack(operands.scale_table)
    want = query.float() * table[1, 0].repeat_interleave(4)[:, None]
    assert torch.equal(call["q"], want.half())
    assert call["q"].data_ptr() - scratch.data_ptr() == -(-partials // 16) * 16
    assert scratch[-1].data_ptr() - call["q"].data_ptr() == call["q"].nbytes - 1
    assert torch.equal(out, (2.0 * table[1, 1]).half().repeat_interleave(4)[:, None].expand_as(out))
    assert call["paged_k_cache"] is operands.key
    assert torch.from_dlpack(operands.lse).unique().tolist() == pytest.approx([math.log(2)])


def test_fa2_scales_the_rows_of_its_own_requests_alone(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixed batch the launch after it writes the others."""
    _scaling(monkeypatch, group=4)
    batch = RaggedBatch([1, 1, 200], [60, 7, 200], np.arange(150).reshape(3, 50))
    cache = replace(CACHE_8BIT, num_pages=150)
    static, words = host_plan(
        SPEC_8BIT, cache, batch, None, H200, "raise", None, lambda n: np.full(n, -7, np.int32)
    )
    assert [launch.family for launch in static.main] == ["fa2", "fa3"]
    fields = static.layout.views(torch.from_numpy(words))
    operands = _operands(static, "pages", fields)
    operands.out.fill_(2.0)
    call = _run(static.main[0], operands, modules)
    assert call["q"].shape == (3, 8, 64)
    # FlashInfer compares the two.
    assert call["maybe_lse"].shape == (3, 8)
    assert call["maybe_lse"].data_ptr() == operands.lse.data_ptr()
    assert (operands.out[3:] == 2.0).all()
    assert not (operands.out[:3] == 2.0).any()


def test_rows_of_a_call_are_not_scaled(modules: Any) -> None:
    """A first prefill beside a quantised cache reads them as they came."""
    for family in ("fa2", "fa3"):
        modules.clear()
        static, fields = _plan(family, FIRST, spec=SPEC_8BIT, cache=CACHE_8BIT)
        assert static.own is not None
        operands = _operands(static, "tokens", fields)
        call = _run(static.own, operands, modules)
        assert call["q"] is operands.query
        assert list(modules) == [abi.ModuleKey(family, "float16", 64)]


@pytest.mark.parametrize("bridge", [False, True])
def test_fa3_reads_values_without_their_padding(modules: Any, bridge: bool) -> None:
    """It would multiply them by 0; the caller's own rows stay as they are."""
    bucket = Bucket(4, 20, 30, without_context=True)
    static, fields = _plan("fa3", FIRST, bucket=bucket)
    assert static.own is not None
    operands = _operands(static, "tokens", fields, bridge=bridge)
    value = torch.from_dlpack(operands.value)
    value[15:] = math.nan
    before = value.clone()
    call = _run(static.own, operands, modules)
    assert torch.equal(call["v"][:15], before[:15])
    assert not call["v"][15:].any()
    assert torch.equal(value[:15], before[:15])
    assert value[15:].isnan().all()
    assert call["v"].data_ptr() == torch.from_dlpack(operands.scratch).data_ptr()
    assert call["k"] is operands.key


def test_fa3_copies_nothing_where_there_is_no_padding(modules: Any) -> None:
    static, fields = _plan("fa3", FIRST)
    assert static.own is not None
    assert static.own.scratch_bytes == 0
    operands = _operands(static, "tokens", fields)
    assert _run(static.own, operands, modules)["v"] is operands.value


def test_fa3_padding_without_a_cache_is_that_of_the_keys(modules: Any) -> None:
    spec = AttentionSpec(8, 2, 64, dtype="bfloat16")
    batch, bucket = RaggedBatch([2, 1], [4, 9]), Bucket(3, 5, 21)
    static, fields = _plan("fa3", batch, spec=spec, cache=None, bucket=bucket)
    operands = _operands(static, "tokens", fields)
    operands.value[13:] = math.nan
    call = _run(static.main[0], operands, modules)
    assert torch.equal(call["v"][:13], operands.value[:13])
    assert not call["v"][13:].any()


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_features_reach_the_kernel(modules: Any, family: str) -> None:
    """What is compiled in chooses the module, the rest travels as numbers."""
    spec = AttentionSpec(
        8, 2, 64, causal=False, sliding_window=5, logits_soft_cap=30.0, sm_scale=0.3
    )
    cache = replace(CACHE, layout="HND")
    static, fields = _plan(family, MIXED, spec=spec, cache=cache)
    call = _run(static.main[0], _operands(static, "pages", fields), modules)
    assert list(modules) == [abi.ModuleKey(family, "float16", 64, window=True, soft_cap=True)]
    _options(call, mask_mode_code=0, layout=1, window_left=4, logits_soft_cap=30.0, sm_scale=0.3)
    # Rows of a call are token-major whatever the cache is.
    static, fields = _plan(family, FIRST, spec=spec, cache=cache)
    assert static.own is not None
    call = _run(static.own, _operands(static, "tokens", fields), modules)
    assert call["layout"] == 0


def test_no_lse_is_passed_on_as_none(modules: Any) -> None:
    for family in ("fa2", "fa3"):
        static, fields = _plan(family, MIXED)
        operands = _operands(static, "pages", fields)._replace(lse=None)
        FAMILIES[family].run(static.main[0], operands)
    calls = [module["paged_run"].calls[0] for module in modules.values()]
    assert [call["maybe_lse"] for call in calls] == [None, None]


@pytest.mark.parametrize("family", ["fa2", "fa2_flashinfer", "fa3"])
def test_launches_survive_as_attributes_and_as_json(family: str) -> None:
    """A compiled program holds them as numbers."""
    static, _ = _plan(family, FIRST, bucket=Bucket(4, 20, 30, without_context=True))
    assert PlanStatic.from_json(static.to_json()) == static
    for launch in (static.main[0], static.own):
        assert launch is not None
        call = Call(launch, "", 0, True)
        attributes = encode(call)
        assert decode("".join(attributes[name] for name in ATTRIBUTES)) == call


with gzip.open(RECORDED, "rt") as file:
    GRAPH_CASES = [case for case in json.load(file)["cases"] if case["graph"]]


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in GRAPH_CASES
        if case["family"] == "fa3"
        or (case["fixed_split_size"] <= 0 and not case["disable_split_kv"])
    ],
)
def test_plans_equal_those_recorded_on_a_gpu(case: dict[str, Any]) -> None:
    """FlashInfer's integers, and for FA2 its schedule to the last byte."""
    family = FAMILIES["fa3" if case["family"] == "fa3" else "fa2_flashinfer"]
    window = case["window_left"]
    spec = AttentionSpec(
        case["num_qo_heads"],
        case["num_kv_heads"],
        case["head_dim"],
        causal=case["causal"],
        sliding_window=window + 1 if window >= 0 else None,
    )
    heads = spec.num_kv_heads
    cache = CacheSpec(1, 2**16, case["page_size"], heads, spec.head_dim, device="cuda")
    bucket = Bucket(case["batch"], case["total_num_rows"], case["kv_indptr"][-1])
    work = Work(spec, cache, H200, "bfloat16", case["batch"], bucket, "pages")
    qo_indptr, kv_indptr, kv_lens = (
        np.array(case[name], np.int32) for name in ("qo_indptr", "kv_indptr", "kv_lens")
    )
    lengths = Lengths(np.diff(qo_indptr), kv_lens, np.diff(kv_indptr), qo_indptr, kv_indptr)
    decision = family.decide(work, lengths)
    launch, sizes = family.shape(work, decision.variant)
    assert list(launch.constants[: len(case["plan_info"])]) == case["plan_info"]
    fields = {name: np.full(size, -7, np.int32) for name, size in sizes.items()}
    family.write(work, launch, lengths, decision, fields)
    if case["family"] == "fa2":
        assert [launch.scratch_bytes] == case["workspace"][:1]
        assert fields["fa2_schedule"].tolist() == case["int_workspace_i32"]


@st.composite
def buckets(draw: st.DrawFn) -> tuple[RaggedBatch, Bucket]:
    """A batch, and a bucket that leaves any number of rows to the padding request."""
    query_lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    contexts = draw(st.lists(st.integers(0, 40), min_size=len(query_lens), max_size=5))
    kv_lens = [q + c for q, c in zip(query_lens, contexts, strict=False)]
    table = np.arange(20 * len(query_lens)).reshape(-1, 20)
    batch = RaggedBatch(query_lens, kv_lens, table)
    spare = st.sampled_from([0, 0, 1, 7, 200, 5000])
    bucket = Bucket(
        num_requests=len(query_lens) + draw(st.sampled_from([0, 1, 30])),
        num_tokens=max(1, batch.num_tokens + draw(spare)),
        num_pages=sum(-(-n // CACHE.page_size) for n in kv_lens) + draw(spare),
        max_query_len=draw(st.sampled_from([0, max(query_lens)])),
        without_context=batch.without_context,
    )
    return batch, bucket


@given(buckets(), st.sampled_from(["fa2", "fa2_flashinfer", "fa3"]), st.sampled_from([1, 4, 8]))
def test_any_batch_of_a_bucket_fits_its_plan(
    drawn: tuple[RaggedBatch, Bucket], family: str, group: int
) -> None:
    """However many rows the padding has: all are written, so there is work for each of them."""
    batch, bucket = drawn
    spec = AttentionSpec(2 * group, 2, 64)
    cache = replace(CACHE, num_pages=128)
    static, fields = _plan(family, batch, spec=spec, cache=cache, bucket=bucket)
    if family == "fa3":
        starts = [offset // 4 for offset in static.main[0].constants[:8]]
        schedule = fields["fa3_schedule"]
        count = int(schedule[starts[6] + 132])
        request, tile = (schedule[starts[i] :][:count].tolist() for i in (7, 0))
        tile_rows, copies = 192, spec.num_qo_heads
    else:
        capacity, _, _, tile_rows, *starts = static.main[0].constants
        schedule = fields["fa2_schedule"]
        flags = schedule.view(torch.uint8)[static.main[0].constants[12] :][:capacity]
        count = int(flags.sum())
        request, tile = (schedule[starts[i] // 4 :][:count].tolist() for i in (0, 1))
        tile_rows, copies = tile_rows // group if tile_rows > group else tile_rows / group, 1
    query_lens = fields["qo_indptr"].diff().tolist()
    assert sum(query_lens) == bucket.num_tokens
    wanted = {(r, t) for r, n in enumerate(query_lens) for t in range(math.ceil(n / tile_rows))}
    found = list(zip(request, tile, strict=True))
    assert set(found) == wanted
    assert len(found) >= copies * len(wanted)


def _work(
    source: str = "pages",
    *,
    device: Device = H200,
    bucket: Bucket | None = None,
    dtype: str = "float16",
    **spec: Any,
) -> Work:
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64} | spec
    attention = AttentionSpec(**sizes)
    cache = replace(
        CACHE,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        head_dim_v=attention.head_dim_v,
        dtype=dtype,
    )
    bucket = bucket or Bucket(4, 4096, 64)
    return Work(attention, cache, device, dtype, bucket.num_requests, bucket, source)


CPU, TURING, HOPPER = Device("cpu"), Device("cuda", (7, 5), 40), H200

REFUSALS = {
    "cpu": ({"device": CPU}, "it needs an NVIDIA GPU, and this is a cpu device"),
    "float32": ({"dtype": "float32"}, "computes in float16 and bfloat16, not in float32"),
    "width": ({"head_dim": 80}, "compiled for head_dim 64, 128, 256, not for 80"),
    "value width": ({"head_dim": 128, "head_dim_v": 64}, "not head_dim_v = 64 with head_dim = 128"),
    "scale": ({"sm_scale": -0.1}, "before it scales, and sm_scale is -0.1"),
    "no rows": ({"bucket": Bucket(4, 0, 64)}, "no query rows"),
    "many rows": ({"bucket": Bucket(1, 2**23, 64)}, "8388608 rows of 8 heads x 64 are 2**32"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("family", ["fa2", "fa2_flashinfer", "fa3"])
def test_what_no_kernel_does_is_refused_in_words(family: str, name: str) -> None:
    changes, reason = REFUSALS[name]
    refusal = FAMILIES[family].refuse(_work(**changes))
    assert refusal is not None
    assert reason in refusal
    assert FAMILIES[family].refuse(_work()) is None


def test_missing_flashinfer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "why_missing", lambda: "FlashInfer is not installed.")
    for family in ("fa2", "fa3"):
        assert FAMILIES[family].refuse(_work()) == "FlashInfer is not installed."


@pytest.mark.parametrize(
    ("family", "work", "reason"),
    [
        ("fa2", _work(device=TURING), "compute capability 8.0 or later, and this one has 7.5"),
        ("fa3", _work(device=A100), "compute capability 9.0, and this one has 8.0"),
        ("fa3", _work(device=Device("cuda", (10, 0), 148)), "9.0, and this one has 10.0"),
        ("fa3", _work(bucket=Bucket(64, 64, 64, 1)), "1 query rows a request, and below 128"),
        ("fa3", _work(bucket=Bucket(64, 4096, 64)), "64 query rows a request, and below 128"),
    ],
)
def test_each_kernel_names_what_it_is_not_for(family: str, work: Work, reason: str) -> None:
    refusal = FAMILIES[family].refuse(work)
    assert refusal is not None
    assert reason in refusal


def _over(dtype: str, source: str = "pages", **changes: Any) -> Work:
    """Work with a query of 16 bits on a cache of another type."""
    work = _work(source, **changes)
    assert work.cache is not None
    return replace(work, cache=replace(work.cache, dtype=dtype))


@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_pages_are_left_to_the_reference(dtype: str) -> None:
    for family in ("fa2", "fa2_flashinfer", "fa3"):
        refusal = FAMILIES[family].refuse(_over(dtype))
        assert refusal == f"it reads pages of 16 and of 8 bits, not of {dtype}; reference does"
        # Their own rows are of 16 bits.
        assert FAMILIES[family].refuse(_over(dtype, "tokens")) is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("device", [H200, A100])
def test_8_bit_pages_are_read_wherever_16_bit_ones_are(dtype: str, device: Device) -> None:
    assert FAMILIES["fa2"].refuse(_over(dtype, device=device)) is None
    assert (FAMILIES["fa3"].refuse(_over(dtype, device=device)) is None) == (device == H200)


@pytest.mark.parametrize(("pages", "given"), [(0, 0), (2**17 + 1, 2**28 + 2048)])
def test_fa3_copies_no_more_than_fits(pages: int, given: int) -> None:
    """Of 16-bit pages it would read those where they lie."""
    bucket = Bucket(1, 4096, pages)
    refusal = FAMILIES["fa3"].refuse(_over("float8_e4m3fn", bucket=bucket))
    assert refusal is not None
    assert f"the bucket's pages have {given} bytes, not 1 to 268435456" in refusal
    assert FAMILIES["fa3"].refuse(_over("float16", bucket=bucket)) is None


def test_fa2_cannot_count_huge_pages() -> None:
    work = _work()
    assert work.cache is not None
    huge = replace(work, cache=replace(work.cache, num_layers=1, num_pages=1, page_size=2**25))
    refusal = FAMILIES["fa2"].refuse(huge)
    assert refusal == "a page of 4294967296 elements is 2**32 or more, which it cannot count"
    assert FAMILIES["fa3"].refuse(huge) is None


@pytest.mark.parametrize(("rows", "variant"), [(1, fa2.SPLIT), (2**22, fa2.NEVER_SPLIT)])
def test_fa2_does_not_split_what_it_could_not_merge(rows: int, variant: int) -> None:
    """One request of one row and many keys is split, unless the bucket has too many rows."""
    one, pages = np.ones(1, np.int32), np.full(1, 9000, np.int32)
    lengths = Lengths(one, 4 * pages, pages, np.array([0, 1]), np.array([0, 9000]))
    work = _work(bucket=Bucket(1, rows, 9000))
    assert FAMILIES["fa2"].refuse(work) is None
    assert FAMILIES["fa2"].decide(work, lengths).variant == variant


def test_fa3_needs_keys_to_point_at() -> None:
    work = replace(_work("tokens", bucket=Bucket(1, 256, 0)), cache=None)
    refusal = FAMILIES["fa3"].refuse(work)
    assert refusal is not None
    assert "no rows of key and value" in refusal
    assert FAMILIES["fa2"].refuse(work) is None


@pytest.mark.parametrize(
    ("device", "bucket", "family"),
    [
        (HOPPER, Bucket(32, 32, 2048, 1), "fa2"),
        (HOPPER, Bucket(8, 32, 2048, 4), "fa2"),
        (HOPPER, Bucket(1, 16384, 2048), "fa3"),
        (HOPPER, Bucket(8, 1024, 2048), "fa3"),
        (HOPPER, Bucket(8, 1023, 2048), "fa2"),
        (A100, Bucket(1, 16384, 2048), "fa2"),
        (TURING, Bucket(32, 32, 2048, 1), "reference"),
        (CPU, Bucket(32, 32, 2048, 1), "reference"),
    ],
)
def test_dispatch_table(device: Device, bucket: Bucket, family: str) -> None:
    """FA3 for prefill on Hopper, FA2 for the rest of what has a kernel, else the reference."""
    assert choose(_work(device=device, bucket=bucket)).family == family
