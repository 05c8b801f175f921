"""Sinks of the compiled kernels without a GPU: who serves them, and what each of them is handed.

The compiled functions are replaced; what a GPU computes is in tests/gpu/test_sinks_gpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi
from families import only

import torch_backend
from interop import AttentionSpec, Bucket, CacheSpec, RaggedBatch
from interop.errors import UnsupportedError
from interop.plan import PlanStatic
from torch_backend.dispatch import choose, run, works_of
from torch_backend.kernels import FAMILIES, Device, Operands
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels import flashinfer_fa2 as fa2
from torch_backend.kernels import flashinfer_fa3 as fa3
from torch_backend.kernels import flashinfer_xqa as xqa
from torch_backend.kernels.sinks import BY_KERNEL, BY_LSE, needs_lse
from torch_backend.planning import host_plan

H200 = Device("cuda", (9, 0), 132)
SPEC = AttentionSpec(8, 2, 128, sinks=True)
CACHE = CacheSpec(2, 64, 16, 2, 128, dtype="bfloat16", device="cuda")
SINKS = torch.tensor([0.5, -torch.inf, 3.0, 0.0, -1.0, 2.0, torch.inf, 1.0])
TABLE = np.arange(64).reshape(4, 16)
DECODES, MIXED = RaggedBatch([1] * 3, [60, 1, 33], TABLE[:3]), [1, 1, 200]


class Compiled:
    """Stands for a compiled function: writes 2 and an LSE of 1, in base 2, to some rows."""

    def __init__(self, names: tuple[str, ...], rows: slice) -> None:
        self.names, self.rows = names, rows
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        call = dict(zip(self.names, arguments, strict=True))
        self.calls.append(call)
        if "o" in call:
            torch.from_dlpack(call["o"])[self.rows] = 2.0
            torch.from_dlpack(call["maybe_lse"])[self.rows] = 1.0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Compiled]]:
    """The functions by name, as they are loaded."""
    loaded: dict[str, Compiled] = {}

    def load(key: abi.ModuleKey, device: int = 0) -> dict[str, Compiled]:
        rows = {"fa2": slice(0, 2), "fa3": slice(2, None), "xqa": slice(0)}[key.backend]
        names = abi.SIGNATURES[key.backend]
        functions = {name: Compiled(names[name], rows) for name in abi.RUNS[key.backend]}
        loaded.update({f"{key.backend} {name}": each for name, each in functions.items()})
        return functions

    def forget() -> None:
        for cached in (fa2._ready_fa2, fa3._ready_fa3, xqa._ready):
            cached.cache_clear()

    monkeypatch.setattr(abi, "load", load)
    forget()
    yield loaded
    forget()


def planned(
    batch: RaggedBatch,
    spec: AttentionSpec = SPEC,
    *,
    bucket: Bucket | None = None,
    kernel: str | None = None,
    lse: bool = True,
    cache: CacheSpec = CACHE,
) -> tuple[PlanStatic, dict[str, torch.Tensor]]:
    static, words = host_plan(
        spec, cache, batch, bucket, H200, "raise", kernel, lambda n: np.zeros(n, np.int32), lse
    )
    return static, static.layout.views(torch.from_numpy(words))


def solved(
    static: PlanStatic, fields: dict[str, torch.Tensor], wrap: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a plan's launches one after another on buffers of its sizes."""
    assert static.cache is not None
    out = torch.full(static.out_shape, math.nan, dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], math.nan) if static.lse or needs_lse(static.main) else None
    scratch = max(launch.scratch_bytes for launch in static.main)
    operands = Operands(
        wrap(torch.randn(static.query_shape).bfloat16()),
        *(wrap(torch.zeros(shape).bfloat16()) for shape in (static.cache.key_shape,) * 2),
        {name: wrap(field) for name, field in fields.items()},
        wrap(out),
        None if lse is None else wrap(lse),
        wrap(torch.zeros(scratch, dtype=torch.uint8)) if scratch else None,
        sinks=wrap(SINKS),
    )
    for launch in static.main:
        run(launch, operands)
    return out, lse


WRAPS = pytest.mark.parametrize("wrap", [lambda x: x, tvm_ffi.from_dlpack], ids=["torch", "JAX"])


@WRAPS
def test_a_mixed_batch_gets_its_sinks_once(compiled: Any, wrap: Any) -> None:
    """The decodes' launch leaves them to the one after it, which makes all LSE natural as well."""
    batch = RaggedBatch(MIXED, [60, 7, 200], TABLE[:3])
    static, fields = planned(batch)
    assert [launch.family for launch in static.main] == ["fa2", "fa3"]
    out, lse = solved(static, fields, wrap)
    share = torch.sigmoid(math.log(2.0) - SINKS)
    want = (2.0 * share).bfloat16()[None, :, None].expand_as(out)
    assert torch.equal(out, want)
    assert lse is not None
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2.0)))


# These serve other plans; their launches are those of fa2, and are run on a GPU.
OTHER_PLANS = ("fa2_invariant", "fa2_drafts")


@pytest.mark.parametrize("kernel", [name for name in BY_LSE if name not in OTHER_PLANS])
def test_kernels_without_sinks_are_handed_none(compiled: Any, kernel: str) -> None:
    """No argument of theirs differs from a call without sinks: only the rows after it do."""
    batch = RaggedBatch([2, 2], [60, 7], TABLE[:2])
    found = {}
    for spec in (SPEC, replace(SPEC, sinks=False)):
        with only(kernel):
            static, fields = planned(batch, spec)
        found[spec.sinks] = static.main[0]
    assert replace(found[True], spec=found[False].spec) == found[False]
    with only(kernel):
        static, fields = planned(batch, lse=False)
    # Nobody asked for the LSE, and there is room for it.
    assert not static.lse
    _, lse = solved(static, fields, lambda x: x)
    assert lse is not None


@WRAPS
@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit", "8-bit"])
def test_xqa_is_handed_the_sinks(
    compiled: Any, wrap: Any, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Natural logarithms, as it expects them, and no LSE to make."""
    monkeypatch.setattr(xqa, "prepare", lambda *a: xqa_prepared(a[2]))
    cache = replace(CACHE, dtype="float8_e4m3fn") if quantized else CACHE
    spec = replace(SPEC, dtype="bfloat16")
    with only("xqa" if quantized else "xqa_16bit"):
        static, fields = planned(DECODES, spec, cache=cache, lse=False)
    assert not needs_lse(static.main)
    solved(static, fields, wrap)
    (call,) = compiled["xqa xqa_wrapper"].calls
    assert torch.equal(torch.from_dlpack(call["attentionSinks"]), SINKS)


def xqa_prepared(operands: Operands) -> Any:
    from torch_backend.kernels.flashinfer_xqa_scratch import Prepared

    return Prepared(operands.query, None, None, operands.out, operands.out)


@pytest.mark.parametrize(
    ("lse", "cache", "changes", "family"),
    [
        (True, CACHE, {}, "fa2"),
        (False, CACHE, {}, "fa2"),
        (False, replace(CACHE, dtype="float8_e4m3fn"), {}, "xqa"),
        (True, replace(CACHE, dtype="float8_e4m3fn"), {}, "fa2"),
        # XQA has sinks, and no soft cap.
        (False, replace(CACHE, dtype="float8_e4m3fn"), {"logits_soft_cap": 30.0}, "fa2"),
        (False, replace(CACHE, dtype="float8_e4m3fn"), {"sliding_window": 8}, "xqa"),
    ],
)
def test_who_serves_decode(
    lse: bool, cache: CacheSpec, changes: dict[str, Any], family: str
) -> None:
    spec = replace(SPEC, dtype="bfloat16", **changes)
    bucket = Bucket(8, 8, 64, 1)
    (work,) = works_of(spec, cache, "bfloat16", bucket, 9, H200, lse)
    assert choose(work).family == family


def test_a_family_that_says_nothing_of_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels would leave them out."""

    class Unaware(fa2.FA2Family):
        name = "unaware"

    monkeypatch.setitem(FAMILIES, "unaware", Unaware())
    with pytest.raises(
        UnsupportedError, match=r"'unaware' cannot serve.*it has no attention sinks"
    ):
        planned(DECODES, kernel="unaware", bucket=Bucket(8, 8, 64, 1))
    static, _ = planned(DECODES, replace(SPEC, sinks=False), kernel="unaware")
    assert static.main[0].family == "unaware"
    (work,) = works_of(SPEC, CACHE, "bfloat16", Bucket(8, 8, 64, 1), 9, H200)
    assert ("unaware", "it has no attention sinks") in choose(work).refusals


def test_the_table_names_families() -> None:
    assert set(BY_KERNEL + BY_LSE) <= set(FAMILIES)


def test_explain_says_who() -> None:
    cache = replace(CACHE, device="cpu")
    (choice,) = torch_backend.explain(SPEC, cache, DECODES)
    assert choice.family == "reference"
