"""Attention in two launches without a GPU: what is planned, and what the kernels are handed.

The compiled functions and the Triton kernels are replaced; tests/test_equivalence.py computes the
same on the CPU, and what a GPU computes is in tests/gpu/test_two_levels_gpu.py.
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
from hypothesis import given
from hypothesis import strategies as st

import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.errors import ArgumentError, UnsupportedError
from interop.plan import PlanStatic
from interop.sharding import LocalBatch, TokenShards, check_dcp
from torch_backend import planning
from torch_backend.dispatch import run
from torch_backend.engine.batches import EngineRequests
from torch_backend.kernels import FAMILIES, Device, Operands, two_levels
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.planning import host_plan

H200, A100 = Device("cuda", (9, 0), 132), Device("cuda", (8, 0), 108)
SPEC = AttentionSpec(8, 2, 128)
CACHE = CacheSpec(2, 2048, 4, 2, 128, dtype="bfloat16", device="cuda")

# Three requests that share two pages of 4 tokens, and one without query rows.
SHARED = RaggedBatch(
    [1, 2, 0, 1],
    [11, 14, 3, 9],
    [[7, 3, 5, 0], [7, 3, 9, 8], [4, 0, 0, 0], [7, 3, 6, 0]],
)


class Compiled:
    """Stands for a compiled function: keeps its arguments; writes 2 and 3, and an LSE of 1."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(dict(zip(self.names, arguments, strict=True)))
        torch.from_dlpack(self.calls[-1]["o"]).fill_(1.0 + len(self.calls))
        torch.from_dlpack(self.calls[-1]["maybe_lse"]).fill_(1.0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """FA2 over pages, and torch in the place of Triton."""
    function = Compiled(abi.SIGNATURES["fa2"]["paged_run"])
    monkeypatch.setattr(abi, "load", lambda key, device=0: {"paged_run": function})

    def merge_into(
        out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, merged: Any, lse: Any, factor: float
    ) -> None:
        result, log = torch_backend.merge_states(out_a, lse_a * factor, out_b, lse_b * factor)
        merged.copy_(result)
        lse.copy_(log)

    from types import ModuleType

    module = ModuleType("torch_backend.triton_merging")
    module.__dict__["merge_into"] = merge_into
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    two_levels._ready_levels.cache_clear()
    yield function
    two_levels._ready_levels.cache_clear()


def planned(
    batch: RaggedBatch,
    *,
    kernel: str | None = "cascade",
    spec: AttentionSpec = SPEC,
    cache: CacheSpec = CACHE,
    bucket: Bucket | None = None,
    device: Device = H200,
) -> tuple[PlanStatic, dict[str, torch.Tensor]]:
    static, words = host_plan(
        spec, cache, batch, bucket, device, "raise", kernel, lambda n: np.full(n, -7, np.int32)
    )
    return static, static.layout.views(torch.from_numpy(words))


def solved(static: PlanStatic, fields: dict[str, torch.Tensor], wrap: Any, **more: Any) -> Any:
    """Run the plan's one launch on buffers of its sizes; returns them."""
    (launch,) = static.main
    assert static.cache is not None
    out = torch.full(static.out_shape, math.nan, dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], math.nan)
    operands = Operands(
        wrap(torch.randn(static.query_shape).bfloat16()),
        *(wrap(torch.zeros(static.cache.key_shape).bfloat16()) for _ in range(2)),
        {name: wrap(fields[name]) for name in FAMILIES[launch.family].fields(launch)},
        wrap(out),
        wrap(lse),
        wrap(torch.zeros(launch.scratch_bytes, dtype=torch.uint8)),
        **more,
    )
    run(launch, operands)
    return operands, out, lse


WRAPS = pytest.mark.parametrize("wrap", [lambda x: x, tvm_ffi.from_dlpack], ids=["torch", "JAX"])


def listed(array: Any) -> list[int]:
    numbers: list[int] = torch.from_dlpack(array).tolist()
    return numbers


@WRAPS
def test_what_a_cascade_hands_over(compiled: Compiled, wrap: Any) -> None:
    static, fields = planned(SHARED)
    operands, out, lse = solved(static, fields, wrap)
    prefix, rest = compiled.calls
    for call in (prefix, rest):
        assert call["q"] is operands.query
        assert call["paged_k_cache"] is operands.key and call["paged_v_cache"] is operands.value
        assert call["paged_kv_indices"] is operands.metadata["page_indices"]
        assert call["float_workspace_buffer"].data_ptr() % 16 == 0
        optional = [call[name] for name in call if name.startswith("maybe_") and "lse" not in name]
        assert optional and not any(each is not None for each in optional)
    assert listed(prefix["paged_kv_indices"]) == [7, 3, 5, 7, 3, 9, 8, 4, 7, 3, 6]
    # All rows are one request, whose two pages are the first request's.
    assert listed(prefix["qo_indptr"]) == [0, 4, 4]
    assert listed(prefix["paged_kv_indptr"]) == [0, 2, 2]
    assert listed(prefix["paged_kv_last_page_len"]) == [4, 0]
    assert prefix["mask_mode_code"] == 0
    # Of each request the shared pages, which nobody reads again, and then its own.
    assert listed(rest["qo_indptr"]) == [0, 0, 1, 1, 3, 3, 3, 3, 4]
    assert listed(rest["paged_kv_indptr"]) == [0, 2, 3, 5, 7, 7, 8, 10, 11]
    assert listed(rest["paged_kv_last_page_len"]) == [4, 3, 4, 2, 0, 3, 4, 1]
    assert rest["mask_mode_code"] == 1
    assert rest["o"] is operands.out
    assert prefix["o"].data_ptr() != out.data_ptr()
    # Both LSE are 1 in base 2, so the outputs of 2 and 3 have equal weights.
    assert torch.equal(out, torch.full_like(out, 2.5))
    torch.testing.assert_close(lse, torch.full_like(lse, 2 * math.log(2.0)))


def test_the_rest_never_reads_the_prefix_again() -> None:
    """FlashInfer's callers once took the rest from the whole table: every request read it twice."""
    _static, fields = planned(SHARED)
    starts = fields["second_kv_indptr"].tolist()
    rows = fields["second_qo_indptr"].tolist()
    read = [
        fields["page_indices"][starts[i] : starts[i + 1]].tolist()
        for i in range(len(rows) - 1)
        if rows[i + 1] > rows[i]
    ]
    assert read == [[5], [9, 8], [6]]


def test_rows_that_pad_a_bucket_are_a_request_without_keys(compiled: Compiled) -> None:
    _static, fields = planned(SHARED, bucket=Bucket(5, 7, 20, 2))
    assert fields["first_qo_indptr"].tolist() == [0, 4, 7]
    assert fields["first_kv_lens"].tolist() == [8, 0]
    assert fields["second_qo_indptr"].tolist() == [0, 0, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4, 7]
    assert fields["second_kv_lens"].tolist() == [8, 3, 8, 6, 0, 3, 8, 1, 0, 0, 0, 0]


def test_the_static_part_does_not_know_the_prefix() -> None:
    """Steps of one bucket share a program, however long what they share is, and if nothing is."""
    table = np.arange(48).reshape(3, 16)
    statics = []
    for shared in (0, 1, 5):
        table[:, :shared] = table[0, :shared]
        batch = RaggedBatch([1] * 3, [60, 33, 50], table)
        assert batch.shared_pages(4) == shared
        statics.append(planned(batch, bucket=Bucket(4, 4, 64, 1))[0])
    assert statics[0] == statics[1] == statics[2]


def many(requests: int, prefix: int, own: int, query: int = 1) -> RaggedBatch:
    """Requests with so many pages in common and so many of their own."""
    table = np.empty((requests, prefix + own), np.int32)
    table[:, :prefix] = np.arange(prefix)
    table[:, prefix:] = prefix + np.arange(requests * own).reshape(requests, own)
    return RaggedBatch([query] * requests, [4 * (prefix + own)] * requests, table)


SERVER = AttentionSpec(32, 8, 128)
LARGE = CacheSpec(1, 1 << 17, 16, 8, 128, dtype="bfloat16", device="cuda")


def chosen(batch: RaggedBatch, **options: Any) -> str:
    options = {"spec": SERVER, "cache": LARGE, "kernel": None} | options
    return planned(batch, **options)[0].main[0].family


def sixteen(requests: int, prefix: int, own: int, query: int = 1) -> RaggedBatch:
    batch = many(requests, prefix // 16, own // 16, query)
    return RaggedBatch(batch.query_lens, 4 * batch.kv_lens, batch.page_table)


@pytest.mark.parametrize(
    ("requests", "prefix", "family"),
    [
        # What was the faster one on an H200, with 256 tokens of each one's own.
        (64, 16384, "cascade"),
        (64, 2048, "cascade"),
        (64, 512, "fa2"),
        (8, 16384, "cascade"),
        (8, 2048, "fa2"),
        (1, 16384, "fa2"),
    ],
)
def test_the_faster_one_is_chosen(requests: int, prefix: int, family: str) -> None:
    assert chosen(sixteen(requests, prefix, 256)) == family


def test_who_is_asked_to_share() -> None:
    batch = sixteen(64, 16384, 256)
    assert chosen(batch, kernel="fa2") == "fa2"
    assert chosen(batch, spec=replace(SERVER, sliding_window=4096)) == "fa2"
    assert chosen(batch, spec=replace(SERVER, sinks=True)) == "fa2"
    assert chosen(batch, spec=replace(SERVER, logits_soft_cap=30.0)) == "cascade"
    assert chosen(batch, device=A100) == "cascade"
    # Long queries wait for arithmetic; reading less does not help them.
    assert chosen(sixteen(64, 16384, 256, query=40)) != "cascade"


def test_explain_names_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "device_facts", lambda device: H200)
    monkeypatch.setattr(planning, "device_for", lambda device, cache: torch.device("cuda", 0))
    (choice,) = torch_backend.explain(SERVER, LARGE, sixteen(64, 16384, 256))
    text = str(choice).splitlines()
    assert text[0] == "all over pages: cascade"
    assert text[1] == "  all requests begin with the same 1024 pages"
    (choice,) = torch_backend.explain(SERVER, LARGE, sixteen(64, 32, 256))
    assert choice.family == "fa2" and not choice.note


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"spec": replace(SPEC, sinks=True)}, "it has no attention sinks"),
        ({"spec": replace(SPEC, sliding_window=9)}, "a sliding window leaves the shared prefix"),
        ({"bucket": Bucket(4, 4, 20, 2, draft_masks=True)}, "it reads no masks of drafts"),
        ({"cache": replace(CACHE, dtype="nvfp4")}, "it reads pages of 16 and of 8 bits"),
        ({"device": Device("cuda", (7, 5), 40)}, "needs a GPU of compute capability 8.0 or later"),
    ],
)
def test_what_a_cascade_does_not_do_is_refused_by_name(
    options: dict[str, Any], reason: str
) -> None:
    if options.get("cache"):
        options["spec"] = replace(SPEC, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=f"kernel 'cascade' cannot serve.*{reason}.*These"):
        planned(SHARED, **options)


def test_a_cascade_of_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kernel: got 'cascade' with decode context parallel"):
        check_dcp(SPEC, CACHE, TokenShards(2, 1), "cascade")


def test_what_counts_as_shared() -> None:
    table = np.array([[7, 3, 5], [7, 3, 9]])
    assert RaggedBatch([1, 1], [9, 9], table).shared_pages(4) == 2
    # The last token of a prefix of two pages is this step's own.
    assert RaggedBatch([1, 1], [9, 8], table).shared_pages(4) == 1
    assert RaggedBatch([1, 0], [9, 9], table).shared_pages(4) == 0
    assert RaggedBatch([1, 1], [1, 1], table).shared_pages(4) == 0
    # A rank's share, and an engine's steps that warm up.
    batch = RaggedBatch([1, 1], [9, 9], table)
    local = LocalBatch.of(batch, TokenShards(2, 1), 0, context_only=False)
    assert local.shared_pages(2) == 0
    assert EngineRequests([1, 1], [9, 9], table).shared_pages(4) == 2
    assert EngineRequests([1, 1], [9, 9], np.zeros((2, 3), int)).shared_pages(4) == 0


@given(st.data())
def test_shared_pages_against_a_loop(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    page_size = data.draw(st.integers(1, 4))
    context = [data.draw(st.integers(0, 12)) for _ in range(count)]
    query = [data.draw(st.integers(0, 3)) for _ in range(count)]
    # Few ids, so that tables agree often.
    table = data.draw(
        st.lists(
            st.lists(st.integers(0, 1), min_size=15, max_size=15), min_size=count, max_size=count
        )
    )
    kv_lens = [before + own for before, own in zip(context, query, strict=True)]
    found = RaggedBatch(query, kv_lens, table).shared_pages(page_size)
    busy = [i for i in range(count) if query[i]]
    want = 0
    while len(busy) > 1 and all(
        context[i] >= (want + 1) * page_size and table[i][want] == table[busy[0]][want]
        for i in busy
    ):
        want += 1
    assert found == want


# Masks of drafts.

MASKS = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 1, 0]], bool)
DRAFTS = RaggedBatch(
    [3, 2, 0], [13, 6, 5], [[7, 3, 5, 1], [9, 8, 0, 0], [4, 2, 0, 0]], draft_masks=MASKS
)


@WRAPS
def test_what_drafts_hand_over(compiled: Compiled, wrap: Any) -> None:
    """10 tokens of context are two whole pages and two tokens, 4 are one page."""
    static, fields = planned(DRAFTS, kernel="fa2_drafts")
    operands, out, _lse = solved(static, fields, wrap)
    context, rest = compiled.calls
    assert listed(context["qo_indptr"]) == [0, 3, 3, 5, 5, 5, 5]
    assert listed(rest["qo_indptr"]) == [0, 0, 3, 3, 5, 5, 5]
    for call in (context, rest):
        assert call["paged_kv_indices"] is operands.metadata["page_indices"]
        assert listed(call["paged_kv_indptr"]) == [0, 2, 4, 5, 6, 7, 8]
        assert listed(call["paged_kv_last_page_len"]) == [4, 1, 4, 2, 4, 1]
    assert context["mask_mode_code"] == 0 and context["maybe_custom_mask"] is None
    assert rest["mask_mode_code"] == 2
    offsets = listed(rest["maybe_mask_indptr"])
    # Three rows over 5 keys and two rows over 2.
    assert offsets == [0, 0, 2, 2, 3, 3, 3]
    data = torch.from_dlpack(rest["maybe_custom_mask"]).numpy().view(np.uint8)
    first = np.unpackbits(data[:2], bitorder="little")[:15].reshape(3, 5)
    second = np.unpackbits(data[2:3], bitorder="little")[:4].reshape(2, 2)
    assert (first == np.hstack([np.ones((3, 2)), MASKS[:3]])).all()
    assert (second == MASKS[3:, :2]).all()
    assert torch.equal(out, torch.full_like(out, 2.5))


def test_sinks_of_drafts_come_after_the_merge(compiled: Compiled) -> None:
    sinks = torch.linspace(-1.0, 2.0, 8)
    static, fields = planned(DRAFTS, kernel="fa2_drafts", spec=replace(SPEC, sinks=True))
    _, out, lse = solved(static, fields, lambda x: x, sinks=sinks)
    torch.testing.assert_close(lse, torch.full_like(lse, 2 * math.log(2.0)))
    share = torch.sigmoid(2 * math.log(2.0) - sinks)
    assert torch.equal(out, (2.5 * share).bfloat16()[None, :, None].expand_as(out))


def test_who_reads_masks() -> None:
    """Two launches from a number of tokens on, and always one with a window."""
    few = Bucket(8, 64, 64, 8, draft_masks=True)
    lots = replace(few, num_pages=4096)
    options = {"spec": SERVER, "cache": LARGE}
    batch = RaggedBatch([8] * 4, [100] * 4, np.arange(28).reshape(4, 7))
    assert chosen(batch, bucket=few, **options) == "fa2"
    assert chosen(batch, bucket=lots, **options) == "fa2_drafts"
    assert chosen(batch, bucket=few, kernel="fa2_drafts", **options) == "fa2_drafts"
    window = replace(SERVER, sliding_window=64)
    assert chosen(batch, bucket=lots, spec=window) == "fa2"
    assert chosen(batch, bucket=replace(lots, draft_masks=False), **options) == "fa2"
    with pytest.raises(UnsupportedError, match="it serves plans of a bucket with draft_masks=True"):
        planned(batch, bucket=replace(few, draft_masks=False), kernel="fa2_drafts", **options)
    with pytest.raises(UnsupportedError, match="a window counts from a request's end"):
        planned(batch, bucket=few, kernel="fa2_drafts", spec=window, cache=LARGE)


@given(st.data())
def test_bits_fit_where_they_are_written(data: st.DataObject) -> None:
    """The bound holds for whatever fits the bucket, and what is not used is 0."""
    count = data.draw(st.integers(1, 5))
    query = [data.draw(st.integers(0, 9)) for _ in range(count)]
    kv_lens = [each + data.draw(st.integers(0, 40)) for each in query]
    pages = [-(-length // 4) for length in kv_lens]
    table = np.zeros((count, max(max(pages), 1)), int)
    for i in range(count):
        table[i, : pages[i]] = sum(pages[:i]) + np.arange(pages[i])
    tokens = sum(query)
    if not tokens:
        return
    batch = RaggedBatch(query, kv_lens, table, draft_masks=np.ones((tokens, max(query)), bool))
    bucket = Bucket(count, tokens, sum(pages), max(query), draft_masks=True)
    _, fields = planned(batch, kernel="fa2_drafts", bucket=bucket)
    used = int(fields["fa2_mask_indptr"][-1])
    data_bytes = fields["fa2_masks"].numpy().view(np.uint8)
    assert used <= data_bytes.size
    assert (data_bytes[:used] == 255).all() and not data_bytes[used:].any()
