"""XQA for several query tokens without a GPU: refusals, plans, and what its function is handed.

The compiled function is replaced by a recorder; what a GPU computes is in tests/gpu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi
from families import XQA_DRAFTS

from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.attributes import Call, decode, encode
from interop.errors import UnsupportedError
from interop.plan import PlanStatic
from torch_backend.dispatch import run
from torch_backend.kernels import FAMILIES, Device, Operands
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels import flashinfer_xqa_drafts as drafts
from torch_backend.kernels.flashinfer_xqa_scratch import Prepared, drafts_scratch_of
from torch_backend.planning import host_plan

H200, RTX = Device("cuda", (9, 0), 132), Device("cuda", (12, 0), 188)
SPEC = AttentionSpec(8, 2, 128, dtype="bfloat16")
CACHE = CacheSpec(2, 64, 16, 2, 128, dtype="bfloat16", device="cuda")
CACHES = {"16-bit": CACHE, "8-bit": replace(CACHE, dtype="float8_e4m3fn")}
MASKS = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)
# The third request sits this step out.
TABLE = np.arange(40).reshape(4, 10) + 20
LENGTHS = ([3, 2, 0, 1], [20, 17, 33, 150], TABLE)
CHAIN = RaggedBatch(*LENGTHS)
TREE = RaggedBatch(*LENGTHS, draft_masks=MASKS)


class Recorder:
    """Stands for the compiled function: keeps its arguments, and writes 1 everywhere."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        names = abi.SIGNATURES["xqa"]["xqa_wrapper"]
        self.calls.append(dict(zip(names, arguments, strict=True)))
        torch.from_dlpack(self.calls[-1]["output"]).fill_(1.0)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[abi.ModuleKey, Recorder]]:
    """Recorders by module key, and nothing prepared on a GPU."""
    found: dict[abi.ModuleKey, Recorder] = {}

    def load(key: abi.ModuleKey, device: int) -> dict[str, Recorder]:
        return {"xqa_wrapper": found.setdefault(key, Recorder())}

    def prepare(launch: Any, places: Any, operands: Operands, unused: Any) -> Prepared:
        factors = torch.tensor([0.5, 2.0])
        if launch.cache.quantized:
            return Prepared(operands.query, factors, factors[1:], "semaphores", "partials")
        return Prepared(operands.query, None, None, "semaphores", "partials")

    monkeypatch.setattr(abi, "load", load)
    monkeypatch.setattr(drafts, "prepare", prepare)
    drafts._ready_drafts.cache_clear()
    yield found
    drafts._ready_drafts.cache_clear()


def planned(
    batch: RaggedBatch,
    *,
    spec: AttentionSpec = SPEC,
    cache: CacheSpec = CACHE,
    bucket: Bucket | None = None,
    device: Device = H200,
    lse: bool = False,
) -> tuple[PlanStatic, dict[str, torch.Tensor]]:
    static, words = host_plan(
        spec,
        cache,
        batch,
        bucket,
        device,
        "raise",
        "xqa_drafts",
        lambda n: np.full(n, -7, np.int32),
        lse,
    )
    return static, static.layout.views(torch.from_numpy(words))


def handed(
    static: PlanStatic, fields: Any, loaded: Any, wrap: Any, sinks: Any = None
) -> tuple[dict[str, Any], Operands, torch.Tensor]:
    (launch,) = static.main
    assert static.cache is not None
    dtype = getattr(torch, static.cache.dtype)
    out = torch.full(static.out_shape, math.nan, dtype=torch.bfloat16)
    operands = Operands(
        wrap(torch.randn(static.query_shape).bfloat16()),
        *(wrap(torch.randn(static.cache.key_shape).to(dtype)) for _ in range(2)),
        {name: wrap(fields[name]) for name in FAMILIES[launch.family].fields(launch)},
        wrap(out),
        None,
        None,
        sinks=sinks,
    )
    run(launch, operands)
    (recorder,) = loaded.values()
    return recorder.calls.pop(), operands, out


WRAPS = pytest.mark.parametrize("wrap", [lambda x: x, tvm_ffi.from_dlpack], ids=["torch", "JAX"])


@WRAPS
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("batch", [CHAIN, TREE], ids=["chain", "tree"])
def test_what_the_kernel_is_handed(loaded: Any, batch: RaggedBatch, name: str, wrap: Any) -> None:
    sinks = torch.linspace(-1.0, 1.0, 8)
    spec = replace(SPEC, sinks=True, sm_scale=0.25)
    static, fields = planned(batch, spec=spec, cache=CACHES[name])
    call, operands, out = handed(static, fields, loaded, wrap, wrap(sinks))
    assert list(loaded) == [XQA_DRAFTS[0 if name == "8-bit" else 2]]
    assert call["run_sm90_fp8_mha"] is False
    assert (call["multiProcessorCount"], call["nbKHeads"], call["batchSize"]) == (132, 2, 4)
    assert call["slidingWinSize"] == 0
    assert call["qScale"] == pytest.approx(0.25 * math.sqrt(128))
    for argument, buffer in (
        ("q", operands.query),
        ("output", operands.out),
        ("kCacheVLLM", operands.key),
        ("vCacheVLLM", operands.value),
        ("attentionSinks", operands.sinks),
        ("kvCachePageList", operands.metadata["xqa_page_table"]),
        ("seqLen", operands.metadata["xqa_kv_lens"]),
        ("qCuSeqLens", operands.metadata["xqa_qo_indptr"]),
    ):
        assert call[argument] is buffer, argument
    assert call["maxSeqLen"] == 16 * 16 and call["qSeqLen"] == 3
    assert (call["semaphores"], call["scratch"]) == ("semaphores", "partials")
    assert call["enable_pdl"] is False and call["rcpOutScale"] == 1.0
    assert fields["xqa_qo_indptr"].tolist() == [0, 3, 5, 5, 6]
    assert fields["xqa_kv_lens"].tolist() == [20, 17, 33, 150]
    table = fields["xqa_page_table"].view(4, 16).numpy()
    assert (table[0, :2] == TABLE[0, :2]).all() and not table[0, 2:].any()
    assert not table[2].any()
    assert (table[3, :10] == TABLE[3]).all()
    bits = torch.from_dlpack(call["mask"]).numpy().view(np.uint16).reshape(6, 2)
    want = [[1, 0], [3, 0], [7, 0], [1, 0], [3, 0], [1, 0]]
    if batch is TREE:
        want = [[1, 0], [3, 0], [5, 0], [1, 0], [2, 0], [1, 0]]
    assert bits.tolist() == want
    assert (out == 1.0).all()


@WRAPS
def test_rows_that_pad_a_bucket_become_0(loaded: Any, wrap: Any) -> None:
    """They are no request's: the request that is padding has more rows than any query."""
    bucket = Bucket(6, 20, 40, 5, draft_masks=True)
    static, fields = planned(TREE, bucket=bucket)
    call, _, out = handed(static, fields, loaded, wrap)
    assert call["batchSize"] == 6 and call["qSeqLen"] == 5
    assert fields["xqa_qo_indptr"].tolist() == [0, 3, 5, 5, 6, 6, 6]
    assert fields["xqa_kv_lens"].tolist() == [20, 17, 33, 150, 1, 1]
    assert (out[:6] == 1.0).all() and not out[6:].any()
    # A batch without masks is a chain there.
    static_chain, chain = planned(CHAIN, bucket=bucket)
    assert static_chain == static
    assert chain["draft_masks"][:6].tolist() == [1, 3, 7, 1, 3, 1]
    assert not chain["draft_masks"][6:].any()


def test_masks_of_more_than_32_tokens() -> None:
    """Two words a row, the low half of each first."""
    static, fields = planned(RaggedBatch([33], [40], np.arange(3)[None]))
    words = fields["xqa_masks"].numpy().view(np.uint16).reshape(33, 4)
    assert words[32].tolist() == [65535, 65535, 1, 0]
    assert words[0].tolist() == [1, 0, 0, 0]
    full, fields = planned(
        RaggedBatch([4], [5], np.arange(1)[None]), spec=replace(SPEC, causal=False)
    )
    assert fields["xqa_masks"].tolist() == [15] * 4
    assert static.main[0].constants != full.main[0].constants


def test_windows_and_other_layouts(loaded: Any) -> None:
    spec, cache = replace(SPEC, sliding_window=33), replace(CACHES["8-bit"], layout="HND")
    static, fields = planned(CHAIN, spec=spec, cache=cache)
    call, _, _ = handed(static, fields, loaded, lambda x: x)
    assert list(loaded) == [XQA_DRAFTS[1]]
    assert call["slidingWinSize"] == 33
    # Seen token by token, with the strides of the pages as they lie.
    assert call["kCacheVLLM"].shape == (128, 16, 2, 128)
    assert call["kCacheVLLM"].stride() == (4096, 128, 2048, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lse": True}, "it gives no LSE"),
        ({"batch": RaggedBatch([1], [9], np.arange(1)[None])}, "the bucket admits one"),
        ({"bucket": Bucket(4, 200, 40, 128)}, "up to 127 query tokens a request, and the bucket a"),
        ({"device": Device("cuda", (10, 0), 148)}, "compute capability 9.0, 12.0 or 12.1"),
        ({"spec": replace(SPEC, logits_soft_cap=30.0)}, "it has no soft cap"),
        ({"cache": replace(CACHE, page_size=8)}, "it reads pages of 16, 32, 64, 128 tokens"),
        ({"cache": replace(CACHE, dtype="float8_e5m2")}, "it reads pages of float8_e4m3fn or bfl"),
        (
            {
                "spec": replace(SPEC, num_kv_heads=8),
                "cache": replace(CACHE, num_pages=1 << 25, num_kv_heads=8),
            },
            "a pool of 8589934592 heads",
        ),
        ({"bucket": Bucket(1 << 16, 1 << 17, 1 << 17, 4)}, "a grid of 65537 blocks is more"),
    ],
)
def test_what_it_does_not_do_is_refused_in_words(options: dict[str, Any], reason: str) -> None:
    batch = options.pop("batch", CHAIN)
    with pytest.raises(UnsupportedError, match=f"kernel 'xqa_drafts' cannot serve.*{reason}"):
        planned(batch, **options)


def test_it_is_never_chosen_unasked() -> None:
    static, _ = host_plan(
        SPEC, CACHE, CHAIN, None, H200, "raise", None, lambda n: np.zeros(n, np.int32), False
    )
    assert [launch.family for launch in static.main] == ["fa2"]


def test_scratch_by_the_rules_of_the_launch() -> None:
    """132 multiprocessors: 4 requests x 2 heads are cut into 16 parts, of 8 x 4 rows in 32s."""
    scratch = drafts_scratch_of(SPEC, CACHE, 132, 4, 32, 512, 8)
    parts = 16 * 4 * 2
    assert scratch.semaphores == 4 * 2
    rows = 32 * 128 * 2
    assert scratch.query - scratch.partials == -(-2 * 128 * parts // rows) * rows + rows * parts
    # Nine tokens are two blocks of rows.
    assert drafts_scratch_of(SPEC, CACHE, 132, 4, 36, 512, 9).semaphores == 4 * 2 * 2
    # One part where the table has room for no more keys than a tile.
    assert drafts_scratch_of(SPEC, CACHE, 132, 4, 32, 16, 8) == (0, 0, 0, 0)
    assert drafts_scratch_of(SPEC, CACHE, 132, 70, 560, 512, 8).semaphores == 0
    per_head = replace(CACHES["8-bit"], scales_per_head=True)
    scratch = drafts_scratch_of(SPEC, per_head, 132, 70, 560, 512, 8)
    assert scratch.total - scratch.query == 2 * 560 * 8 * 128


def test_a_call_survives_its_attributes() -> None:
    static, _ = planned(TREE, bucket=Bucket(1024, 8192, 1 << 16, 8, draft_masks=True), device=RTX)
    call = Call(static.main[0], "x" * 64, -1, False)
    attributes = encode(call)
    assert decode("".join(attributes.values())) == call
    assert PlanStatic.from_json(static.to_json()) == static
