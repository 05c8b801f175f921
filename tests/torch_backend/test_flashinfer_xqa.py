"""XQA without a GPU: refusals, plans, and what the compiled function is handed.

The compiled module is replaced by a recorder; what a GPU computes is in tests/gpu.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
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
from torch_backend import prebuild
from torch_backend.dispatch import choose
from torch_backend.host_planning import host_plan, host_plans
from torch_backend.kernels import FAMILIES, Device, Lengths, Operands, Work
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels import flashinfer_xqa as xqa
from torch_backend.kernels import flashinfer_xqa_scratch as scratch

H200 = Device("cuda", (9, 0), 132)
SPEC = AttentionSpec(8, 2, 128, dtype="bfloat16")
CACHE = CacheSpec(2, 64, 16, 2, 128, dtype="float8_e4m3fn", device="cuda")
CACHES = {
    "8-bit": CACHE,
    "8-bit, scales per head": replace(CACHE, scales_per_head=True),
    "16-bit": replace(CACHE, dtype="bfloat16"),
}
KEYS = {
    name: abi.ModuleKey("xqa", "bfloat16", 128, kv_dtype=cache.dtype, page_size=16, group_size=4)
    for name, cache in CACHES.items()
}

TABLE = np.arange(40, dtype=np.int32).reshape(4, 10) + 20
# The third request sits this step out.
DECODE = RaggedBatch([1, 1, 0, 1], [20, 1, 33, 150], TABLE)


class Recorder:
    """Stands for the compiled function: keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        names = abi.SIGNATURES["xqa"]["xqa_wrapper"]
        self.calls.append(dict(zip(names, arguments, strict=True)))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Recorders by module key, for as long as a test runs."""
    loaded: dict[abi.ModuleKey, dict[str, Recorder]] = {}

    def load(key: abi.ModuleKey, device: int) -> dict[str, Recorder]:
        assert device == 0
        return loaded.setdefault(key, {"xqa_wrapper": Recorder()})

    monkeypatch.setattr(abi, "load", load)
    xqa._ready.cache_clear()
    yield loaded
    xqa._ready.cache_clear()


def _name(cache: CacheSpec) -> str:
    return "xqa" if cache.quantized else "xqa_16bit"


def _plan(
    batch: RaggedBatch,
    *,
    spec: AttentionSpec = SPEC,
    cache: CacheSpec = CACHE,
    bucket: Bucket | None = None,
    device: Device = H200,
) -> tuple[PlanStatic, dict[str, torch.Tensor]]:
    with only(_name(cache)):
        static, words = host_plan(
            spec,
            cache,
            batch,
            bucket,
            device,
            "raise",
            None,
            lambda n: np.full(n, -7, np.int32),
            return_lse=False,
        )
    return static, static.layout.views(torch.from_numpy(words))


def _operands(static: PlanStatic, fields: Any, *, bridge: bool = False) -> Operands:
    """Buffers of a call, as torch tensors or as a custom call gets them."""
    (launch,) = static.main
    cache = static.cache
    assert cache is not None
    dtype = getattr(torch, static.query_dtype)
    key, value = (torch.randn(cache.key_shape).to(getattr(torch, cache.dtype)) for _ in "kv")
    scratch = torch.randint(0, 256, (launch.scratch_bytes,), dtype=torch.uint8)
    operands = Operands(
        query=torch.randn(static.query_shape).to(dtype),
        key=key,
        value=value,
        metadata={name: fields[name] for name in FAMILIES[launch.family].fields(launch)},
        out=torch.full(static.out_shape, math.nan, dtype=dtype),
        lse=None,
        scratch=scratch if launch.scratch_bytes else None,
        scale_table=torch.rand(cache.scales_shape) + 0.5 if cache.quantized else None,
        scale_layer=torch.tensor([1], dtype=torch.int32) if cache.quantized else None,
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


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the Triton kernel before the call is handed; it writes factors 3 and 4, and 0."""
    calls: list[dict[str, Any]] = []

    def prepare_xqa(*arguments: Any) -> None:
        names = ("query", "scaled", "factors", "semaphores", "table", "layer", "factor")
        call = dict(zip(names, arguments, strict=True))
        calls.append(call)
        call["factors"].copy_(torch.tensor([3.0, 4.0]))
        if call["semaphores"] is not None:
            call["semaphores"].zero_()
        if call["scaled"] is not None:
            call["scaled"].copy_(call["query"] * 2)

    def scale_output(out: torch.Tensor, table: torch.Tensor, layer: torch.Tensor) -> None:
        out.copy_(out * table[int(layer), 1].repeat_interleave(4)[:, None])

    for name, function in (("triton_xqa", prepare_xqa), ("triton_ops", scale_output)):
        module = ModuleType(f"torch_backend.{name}")
        module.__dict__[function.__name__] = function
        monkeypatch.setitem(sys.modules, f"torch_backend.{name}", module)
    return calls


def _run(static: PlanStatic, operands: Operands, modules: Any) -> dict[str, Any]:
    """Run the launch; what the compiled function got, by name."""
    (launch,) = static.main
    FAMILIES[launch.family].run(launch, operands)
    (module,) = modules.values()
    call: dict[str, Any] = module["xqa_wrapper"].calls.pop()
    return call


def _at(tensor: Any) -> int:
    """Where a tensor begins."""
    return torch.from_dlpack(tensor).data_ptr()


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_what_the_kernel_is_handed(
    modules: Any, prepared: list[dict[str, Any]], name: str, bridge: bool
) -> None:
    """Every buffer in its place, and nothing of what this library does not use."""
    cache = CACHES[name]
    static, fields = _plan(DECODE, cache=cache)
    operands = _operands(static, fields, bridge=bridge)
    call = _run(static, operands, modules)
    assert list(modules) == [KEYS[name]]
    for parameter, value in {
        "run_sm90_fp8_mha": cache.quantized,
        "multiProcessorCount": 132,
        "nbKHeads": 2,
        "slidingWinSize": 0,
        "rcpOutScale": 1.0,
        "maxSeqLen": 256,
        "batchSize": 3,
        "qSeqLen": 1,
        "enable_pdl": False,
    }.items():
        assert call[parameter] == value, parameter
    for parameter, buffer in {
        "output": operands.out,
        "kCacheVLLM": operands.key,
        "vCacheVLLM": operands.value,
        "kvCachePageList": operands.metadata["xqa_page_table"],
        "seqLen": operands.metadata["xqa_rows"],
    }.items():
        assert call[parameter] is buffer, parameter
    for parameter in ("attentionSinks", "kSfCacheVLLM", "vSfCacheVLLM", "qCuSeqLens", "mask"):
        assert call[parameter] is None, parameter
    # q.k is divided by sqrt(head_dim) in the kernel.
    assert call["qScale"] == pytest.approx(1.0)
    if not cache.quantized:
        assert call["qScaleTensor"] is call["kvScaleTensor"] is None
        assert call["q"] is operands.query
        assert not prepared
        return
    (before,) = prepared
    assert call["qScaleTensor"].tolist() == [3.0, 4.0]
    assert call["kvScaleTensor"].tolist() == [4.0]
    assert before["factor"] == pytest.approx(1.0)
    assert before["layer"].tolist() == [1]
    assert torch.equal(before["table"], torch.from_dlpack(operands.scale_table))
    if cache.scales_per_head:
        assert torch.equal(call["q"], torch.from_dlpack(operands.query) * 2)
    else:
        assert call["q"] is operands.query
        assert before["scaled"] is None


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("name", CACHES)
def test_on_12_it_is_the_kernel_for_16_bit_pages(
    modules: Any, prepared: list[dict[str, Any]], name: str, minor: int, layout: str
) -> None:
    """Never run on hardware: its parts are those of that kernel, its scales those of 8 bits."""
    lens = [200, 1, 700]
    batch = RaggedBatch([1] * 3, lens, np.arange(132).reshape(3, 44))
    cache = replace(CACHES[name], num_pages=132, layout=layout)
    card = Device("cuda", (12, minor), 170)
    static, fields = _plan(batch, cache=cache, bucket=Bucket(4, 5, 160, 1), device=card)
    operands = _operands(static, fields, bridge=True)
    call = _run(static, operands, modules)
    assert call["run_sm90_fp8_mha"] is False
    assert (call["multiProcessorCount"], call["batchSize"], call["maxSeqLen"]) == (170, 5, 1024)
    # Five rows of two heads, each in as many parts as 1024 keys have tiles of 256.
    assert call["semaphores"].tolist() == [0] * 10
    room = operands.scratch.shape[0] - (_at(call["scratch"]) - _at(operands.scratch))
    if cache.scales_per_head:
        room -= 2 * 5 * 8 * 128
    assert room >= 4 * 10 * (4 * 128 * 2 + 2 * 32 * 4)
    assert (call["qScaleTensor"] is None) == (not cache.quantized)
    assert (call["kvScaleTensor"] is None) == (not cache.quantized)
    assert call["kCacheVLLM"].shape == (264, 16, 2, 128)
    out = torch.from_dlpack(operands.out)
    assert out[:3].isnan().all() and (out[3:] == 0).all()


@pytest.mark.parametrize("name", CACHES)
def test_parts_of_scratch_do_not_overlap(
    modules: Any, prepared: list[dict[str, Any]], name: str
) -> None:
    """Factors, semaphores that are 0, room for partial results, and the scaled query."""
    batch = RaggedBatch([1] * 3, [20, 1, 700], np.arange(132).reshape(3, 44))
    static, fields = _plan(batch, cache=replace(CACHES[name], num_pages=132))
    (launch,) = static.main
    operands = _operands(static, fields)
    call = _run(static, operands, modules)
    begin, end = _at(operands.scratch), _at(operands.scratch) + launch.scratch_bytes
    semaphores, partials = call["semaphores"], call["scratch"]
    # Three rows of two heads, in as many parts as 1024 keys have tiles of 64 or of 256.
    assert semaphores.tolist() == [0] * 6
    assert _at(semaphores) >= begin + 8
    assert _at(partials) >= _at(semaphores) + semaphores.nbytes
    assert _at(partials) % 16 == 0
    last = end
    if call["q"] is not operands.query:
        assert _at(call["q"]) + call["q"].nbytes == end
        last = _at(call["q"])
    parts = 6 * (16 if CACHES[name].quantized else 4)
    assert last - _at(partials) >= parts * (4 * 8 + 4 * 128 * 2)


def test_scratch_of_real_sizes() -> None:
    """As the kernels' sources count it: what 132 multiprocessors are filled with, and no more."""
    spec = AttentionSpec(32, 8, 128, dtype="bfloat16")
    cache = CacheSpec(1, 4096, 16, 8, 128, dtype="float8_e4m3fn", device="cuda")
    wide = replace(cache, dtype="bfloat16")
    # (rows, width) to parts: a quarter of the blocks that 396 // (rows * 8) is, rounded half up.
    for rows, width, parts, parts_16bit in (
        (1, 2048, 12, 16),
        (1, 4, 1, 1),
        (1, 8, 2, 1),
        (8, 512, 2, 2),
        (9, 512, 1, 1),
        (128, 128, 1, 1),
    ):
        sizes = spec, cache, 132, rows, width
        assert scratch.splits_of(*sizes) == parts
        assert scratch.splits_of(spec, wide, 132, rows, width) == parts_16bit
        assert scratch.scratch_of(*sizes).semaphores == (rows * 8 if parts > 1 else 0)
    # 16 parts of 8 heads: 4 rows of 128 16-bit numbers each, after two lists of 32 float32 each.
    assert scratch._bytes_of_partials(spec, wide, 128) == 128 * (1024 + 256)
    assert scratch._bytes_of_partials(spec, cache, 128) == 128 * (1024 + 32)
    # Heads of 80 are padded to 128 in one kernel, and not in the other.
    odd = AttentionSpec(6, 2, 80)
    narrow = CacheSpec(1, 64, 16, 2, 80, device="cuda")
    assert scratch._bytes_of_partials(odd, narrow, 10) == 2560 + 512 + 10 * 768
    narrow = replace(narrow, dtype="float8_e4m3fn")
    assert scratch._bytes_of_partials(odd, narrow, 21) == 960 + 21 * 480
    assert scratch.scratch_of(spec, cache, 132, 128, 128).total == 256
    assert scratch.scratch_of(spec, wide, 132, 128, 128).total == 0


def test_head_major_pools_are_handed_on_with_their_strides(
    modules: Any, prepared: list[dict[str, Any]]
) -> None:
    for cache in CACHES.values():
        modules.clear()
        static, fields = _plan(DECODE, cache=replace(cache, layout="HND"))
        operands = _operands(static, fields, bridge=True)
        call = _run(static, operands, modules)
        for name, pool in (("kCacheVLLM", operands.key), ("vCacheVLLM", operands.value)):
            assert call[name].shape == (128, 16, 2, 128)
            assert call[name].stride() == (4096, 128, 2048, 1)
            assert _at(call[name]) == _at(pool)


def test_windows_count_the_query(modules: Any, prepared: list[dict[str, Any]]) -> None:
    """As this library's own do; the module is another one."""
    spec = AttentionSpec(8, 2, 128, dtype="bfloat16", sliding_window=5, sm_scale=0.3)
    static, fields = _plan(DECODE, spec=spec)
    call = _run(static, _operands(static, fields), modules)
    assert call["slidingWinSize"] == 5
    assert call["qScale"] == prepared[0]["factor"] == pytest.approx(0.3 * math.sqrt(128))
    assert list(modules) == [replace(KEYS["8-bit"], window=True)]


def test_scales_per_head_end_in_the_output(modules: Any, prepared: list[dict[str, Any]]) -> None:
    static, fields = _plan(DECODE, cache=CACHES["8-bit, scales per head"])
    operands = _operands(static, fields)
    operands.out.fill_(2.0)
    _run(static, operands, modules)
    want = (2.0 * operands.scale_table[1, 1].repeat_interleave(4)).bfloat16()
    assert torch.equal(operands.out, want[:, None].expand(3, 8, 128))


def test_metadata_is_by_row() -> None:
    """Requests without a query have no row; a table is as wide as the widest request needs."""
    static, fields = _plan(DECODE)
    assert static.main[0].constants == (132, 3, 16, 0)
    table = fields["xqa_page_table"].view(3, 16).tolist()
    assert table[0] == [20, 21] + [0] * 14
    assert table[1] == [30] + [0] * 15
    assert table[2] == [*range(50, 60)] + [0] * 6
    assert fields["xqa_rows"].tolist() == [20, 1, 150]


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_padding_rows_read_one_key_and_become_0(
    modules: Any, prepared: list[dict[str, Any]], name: str, bridge: bool
) -> None:
    """Even where what they read is NaN."""
    static, fields = _plan(DECODE, cache=CACHES[name], bucket=Bucket(6, 7, 40, 1))
    (launch,) = static.main
    assert launch.constants == (132, 7, 16, 1)
    assert fields["xqa_page_table"].view(7, 16)[3:].unique().tolist() == [0]
    assert fields["xqa_rows"][:7].tolist() == [20, 1, 150, 1, 1, 1, 1]
    operands = _operands(static, fields, bridge=bridge)
    call = _run(static, operands, modules)
    assert call["batchSize"] == 7
    out = torch.from_dlpack(operands.out)
    assert out[:3].isnan().all()
    assert (out[3:] == 0).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[RaggedBatch, Bucket | None]:
    """Decodes among idle requests, and a bucket with any room to spare, or none."""
    requests = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 300)), min_size=1))
    # With a context, as first tokens of all requests would be attended to without pages.
    requests[0] = (1, max(1, requests[0][1]))
    query, context = (list(column) for column in zip(*requests, strict=True))
    kv = [q + c for q, c in zip(query, context, strict=True)]
    table = np.random.default_rng(len(kv)).permutation(20 * len(kv)).reshape(-1, 20)
    batch = RaggedBatch(query, kv, table)
    if draw(st.booleans()):
        return batch, None
    spare = st.integers(0, 5)
    rows = len(query) + draw(spare)
    pages = int(batch.pages(16).indptr[-1]) + draw(spare)
    return batch, Bucket(rows, batch.num_tokens + draw(spare), pages, 1)


@given(batches())
def test_rows_of_any_batch_read_the_pages_of_their_requests(
    drawn: tuple[RaggedBatch, Bucket | None],
) -> None:
    batch, bucket = drawn
    cache = replace(CACHE, num_pages=20 * batch.num_requests)
    static, fields = _plan(batch, cache=cache, bucket=bucket)
    _, rows, width, empty = static.main[0].constants
    assert rows == static.bucket.num_tokens
    assert empty == (bucket is not None)
    busy = np.flatnonzero(batch.query_lens)
    table = fields["xqa_page_table"].view(rows, width).numpy()
    lens = fields["xqa_rows"].numpy()
    assert batch.page_table is not None
    for row, request in enumerate(busy):
        count = -(-int(batch.kv_lens[request]) // 16)
        assert table[row, :count].tolist() == batch.page_table[request, :count].tolist()
        assert not table[row, count:].any()
    assert lens[: busy.size].tolist() == batch.kv_lens[busy].tolist()
    assert not table[busy.size :].any()
    assert (lens[busy.size : rows] == 1).all()
    widest = max(1, *(-(-batch.kv_lens[busy] // 16)))
    assert width / 2 < widest <= width


def test_launches_survive_as_attributes_and_as_json() -> None:
    """A compiled program holds them as numbers."""
    for cache in CACHES.values():
        static, _ = _plan(DECODE, cache=cache, bucket=Bucket(6, 7, 40, 1))
        assert PlanStatic.from_json(static.to_json()) == static
        call = Call(static.main[0], "", 0, False)
        attributes = encode(call)
        assert decode("".join(attributes[name] for name in ATTRIBUTES)) == call


BIG = CacheSpec(1, 1 << 14, 16, 8, 128, dtype="float8_e4m3fn", device="cuda")
BIG_SPEC = AttentionSpec(32, 8, 128, dtype="bfloat16")


def _long_batch(lens: list[int]) -> RaggedBatch:
    counts = -(-np.array(lens) // 16)
    return RaggedBatch([1] * len(lens), lens, np.zeros((len(lens), counts.max()), np.int32))


def _plans(*batches: RaggedBatch) -> list[str]:
    """Families of a plan that all these batches share."""
    for batch in batches:
        # Which pages they have does not matter here.
        assert batch.page_table is not None
        batch.page_table[:] = np.arange(batch.page_table.size).reshape(batch.page_table.shape)
    cache = replace(BIG, num_pages=1 << 20)
    static, buffers = host_plans(
        BIG_SPEC,
        cache,
        batches,
        None,
        H200,
        "raise",
        None,
        lambda n: np.full(n, -7, np.int32),
        return_lse=False,
    )
    assert len(buffers) == len(batches)
    return [launch.family for launch in static.main]


EVEN, UNEVEN = [2048] * 64, [32768, *([512] * 63)]


@pytest.mark.parametrize(
    ("lens", "family"),
    [
        (EVEN, "xqa"),
        ([32768], "xqa"),
        ([100], "xqa"),
        ([1500, *([10] * 63)], "xqa"),
        (UNEVEN, "fa2"),
        ([65536, *([1024] * 127)], "fa2"),
    ],
)
def test_very_uneven_batches_are_left_to_fa2(lens: list[int], family: str) -> None:
    """XQA cuts all rows into as many parts, so that the longest keeps everything waiting."""
    assert _plans(_long_batch(lens)) == [family]


def test_a_window_makes_batches_even() -> None:
    spec = replace_window(BIG_SPEC, 1024)
    work = _work(spec=spec, cache=BIG, bucket=Bucket(64, 64, 6000, 1))
    lens = np.array(UNEVEN, np.int32)
    ones = np.ones(64, np.int32)
    pages = -(-lens // 16)
    lengths = Lengths(ones, lens, pages, np.arange(65), np.append(0, pages.cumsum()))
    assert FAMILIES["xqa"].decide(work, lengths).variant == 11
    plain = replace(work, spec=BIG_SPEC)
    assert FAMILIES["xqa"].decide(plain, lengths).variant >= xqa.OTHERS


def replace_window(spec: AttentionSpec, window: int) -> AttentionSpec:
    return AttentionSpec(
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        dtype=spec.dtype,
        sliding_window=window,
    )


def test_batches_of_one_plan_take_the_way_that_serves_all() -> None:
    """The widest table; and FA2 as soon as one of them asks for it, which chooses their chunks."""
    even, longer = _long_batch(EVEN), _long_batch([4000] * 64)
    assert _plans(even, longer) == _plans(longer, even) == ["xqa"]
    uneven = _long_batch(UNEVEN)
    assert _plans(even, uneven) == _plans(uneven, even) == ["fa2"]


def _work(
    *,
    spec: AttentionSpec = SPEC,
    cache: CacheSpec = CACHE,
    bucket: Bucket | None = None,
    device: Device = H200,
    **changes: Any,
) -> Work:
    bucket = bucket or Bucket(4, 4, 64, 1)
    arguments = (spec, cache, device, "bfloat16", bucket.num_requests, bucket, "pages")
    return replace(Work(*arguments, lse=False), **changes)


def _spec(**changes: Any) -> AttentionSpec:
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"} | changes
    return AttentionSpec(**sizes)


REFUSALS: dict[str, tuple[Work, str]] = {
    "cpu": (_work(device=Device("cpu")), "it needs an NVIDIA GPU, and this is a cpu device"),
    "A100": (
        _work(device=Device("cuda", (8, 0), 108)),
        "12.0 or 12.1, and this one has 8.0",
    ),
    "B200": (_work(device=Device("cuda", (10, 0), 148)), "12.0 or 12.1, and this one has 10.0"),
    "own rows": (_work(source="tokens"), "it reads pages, not rows of the call"),
    "no rows": (_work(bucket=Bucket(4, 0, 64)), "no query rows"),
    "drafts": (_work(bucket=Bucket(4, 12, 64, 3)), "the bucket admits queries of 3 rows"),
    "mixed": (_work(role="decodes"), "it leaves the decodes of mixed batches to a family"),
    "float32": (_work(query_dtype="float32"), "in float16 and bfloat16, not in float32"),
    "LSE": (_work(lse=True), "gives no LSE, and calls may ask for it: plan with return_lse=False"),
    "width": (_work(spec=_spec(head_dim=72)), "head_dim up to 256 in steps of 16, not for 72"),
    "wide": (_work(spec=_spec(head_dim=272)), "head_dim up to 256 in steps of 16, not for 272"),
    "value width": (_work(spec=_spec(head_dim_v=64)), "not head_dim_v = 64 with head_dim = 128"),
    "group": (_work(spec=_spec(num_qo_heads=66)), "32 query heads for a key head, not 33"),
    "cap": (_work(spec=_spec(logits_soft_cap=30.0)), "it has no soft cap on the logits"),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_does_not_do_is_refused_in_words(name: str, cache: CacheSpec) -> None:
    work, reason = REFUSALS[name]
    family = FAMILIES[_name(cache)]
    if name == "float32" and not cache.quantized:
        cache = replace(cache, dtype="float32")
    refusal = family.refuse(replace(work, cache=cache))
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 48, 64, 128, 256])
def test_it_says_which_pages_it_reads(page_size: int) -> None:
    for cache in CACHES.values():
        refusal = FAMILIES[_name(cache)].refuse(_work(cache=replace(cache, page_size=page_size)))
        if page_size in (16, 32, 64, 128):
            assert refusal is None
        else:
            assert refusal == f"it reads pages of 16, 32, 64, 128 tokens, not of {page_size}"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("xqa", "float8_e5m2", "it reads pages of float8_e4m3fn, not of float8_e5m2"),
        ("xqa", "nvfp4", "it reads pages of float8_e4m3fn, not of nvfp4"),
        ("xqa", "bfloat16", "it reads pages of float8_e4m3fn, not of bfloat16"),
        ("xqa_16bit", "float8_e4m3fn", "it reads pages of bfloat16, not of float8_e4m3fn"),
        ("xqa_16bit", "float16", "it reads pages of bfloat16, not of float16"),
    ],
)
def test_other_types_of_pages_are_refused(name: str, dtype: str, reason: str) -> None:
    assert FAMILIES[name].refuse(_work(cache=replace(CACHE, dtype=dtype))) == reason


def test_what_cannot_be_counted_is_refused() -> None:
    many = Bucket(40000, 40000, 40000, 1)
    refusal = FAMILIES["xqa"].refuse(_work(bucket=many))
    assert refusal == "a grid of 80000 blocks is more than the 65535 that a card launches"
    # The other kernel's grid has heads in another dimension.
    assert FAMILIES["xqa_16bit"].refuse(_work(bucket=many, cache=CACHES["16-bit"])) is None
    huge = replace(CACHE, num_layers=1, num_pages=2**20, page_size=128, num_kv_heads=32)
    spec = _spec(num_qo_heads=32, num_kv_heads=32)
    assert FAMILIES["xqa"].refuse(_work(spec=spec, cache=huge)) is None
    refusal = FAMILIES["xqa_16bit"].refuse(_work(spec=spec, cache=replace(huge, dtype="bfloat16")))
    assert refusal == "a pool of 4294967296 heads has 2**32 or more, which it cannot count"


def test_missing_flashinfer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "why_missing", lambda: "FlashInfer is not installed.")
    assert FAMILIES["xqa"].refuse(_work()) == "FlashInfer is not installed."


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "xqa"),
        ({"lse": True}, "fa2"),
        ({"cache": replace(CACHE, dtype="float8_e5m2")}, "fa2"),
        ({"cache": replace(CACHE, page_size=8)}, "fa2"),
        ({"cache": replace(CACHE, dtype="nvfp4")}, "reference"),
        ({"bucket": Bucket(4, 8, 64, 2)}, "fa2"),
        ({"cache": CACHES["16-bit"]}, "fa2"),
        ({"device": Device("cuda", (8, 9), 128)}, "fa2"),
        ({"spec": _spec(head_dim=80), "cache": replace(CACHE, head_dim=80, head_dim_v=80)}, "xqa"),
        (
            {
                "spec": _spec(head_dim=80),
                "cache": replace(CACHES["16-bit"], head_dim=80, head_dim_v=80),
            },
            "xqa_16bit",
        ),
    ],
)
def test_dispatch_table(changes: dict[str, Any], family: str) -> None:
    """XQA for 8-bit pages; for 16-bit ones FA2, and XQA where FA2 is not compiled for the width."""
    assert choose(_work(**changes)).family == family


def test_modules_of_a_spec_with_an_8_bit_cache() -> None:
    spec = AttentionSpec(32, 8, 128, sliding_window=4096)
    plain = prebuild.modules_for(spec, "bfloat16", (9, 0))
    assert [key.backend for key in plain] == ["fa2", "fa3"]
    over = replace(plain[0], kv_dtype="float8_e4m3fn")
    one_token = replace(KEYS["8-bit"], window=True, page_size=64)
    keys = prebuild.modules_for(spec, "bfloat16", (9, 0), cache_dtype="float8_e4m3fn", page_size=64)
    assert keys == (*plain, over, one_token)
    for changes in (
        {"cache_dtype": "float8_e5m2"},
        {"capability": (8, 9)},
        {"page_size": 8},
        {"spec": AttentionSpec(32, 8, 128, logits_soft_cap=3.0)},
    ):
        arguments: dict[str, Any] = {
            "spec": spec,
            "dtype": "bfloat16",
            "capability": (9, 0),
            "cache_dtype": "float8_e4m3fn",
        } | changes
        keys = prebuild.modules_for(**arguments)
        assert not [key for key in keys if key.backend == "xqa"]
        assert [key for key in keys if key.kv_dtype == arguments["cache_dtype"]]


def test_modules_of_an_8_bit_cache_are_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[abi.ModuleKey] = []
    monkeypatch.setattr(abi, "build", asked.append)
    arguments = "--cache-dtype float8_e4m3fn --group-size 4 --page-size 16 --capability 9.0"
    assert prebuild.main(arguments.split()) == 0
    fa2 = abi.ModuleKey("fa2", "bfloat16", 128)
    assert set(asked) == {
        fa2,
        replace(fa2, kv_dtype="float8_e4m3fn"),
        abi.ModuleKey("fa3", "bfloat16", 128),
        KEYS["8-bit"],
    }


# TRITON_INTERPRET has to be set before Triton is imported, hence a process of its own. The
# interpreter cuts bfloat16 off where a GPU rounds, so queries have 16 bits of another kind here.
SCRIPT = """
import torch
from torch_backend.triton_xqa import prepare_xqa, warm_prepare_xqa

torch.manual_seed(0)
cases = (8, 2, 128, 0), (6, 3, 80, 5), (32, 8, 128, 64), (5, 1, 16, 1)
for heads, kv_heads, width, count in cases:
    query = torch.randn(7, heads, width).half()
    table, layer = torch.rand(3, 2, kv_heads) + 0.01, torch.tensor([2], dtype=torch.int32)
    key_scales, value_scales = table[2]
    factors = torch.full((2,), -9.0)
    semaphores = torch.full((count,), -9, dtype=torch.int32) if count else None
    prepare_xqa(query, None, factors, semaphores, table, layer, 1.5)
    want = torch.stack((1.5 * key_scales[0] / value_scales[0], value_scales[0]))
    torch.testing.assert_close(factors, want)
    assert semaphores is None or not semaphores.any()
    scaled = torch.empty_like(query)
    prepare_xqa(query, scaled, factors, semaphores, table, layer, 1.5)
    torch.testing.assert_close(factors, torch.stack((1.5 * key_scales.max(), torch.tensor(1.0))))
    relative = (key_scales / key_scales.max()).repeat_interleave(heads // kv_heads)
    assert torch.equal(scaled, (query.float() * relative[:, None]).half())
    for per_head in (False, True):
        warm_prepare_xqa(query, kv_heads, count, per_head)
print("prepared")
"""


def test_interpreted_kernel_prepares_what_xqa_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "prepared\n", done.stderr
