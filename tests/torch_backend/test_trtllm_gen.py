"""TRTLLM-GEN without a GPU: signatures against the installed FlashInfer, refusals, and dispatch.

Who serves which architecture is asked of all of them here; nothing but 9.0 was ever run.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interop import AttentionSpec, Bucket, CacheSpec
from interop.errors import UnsupportedError
from torch_backend.dispatch import choose, works_of
from torch_backend.kernels import FAMILIES, Device, Work
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels import trtllm_gen_scratch as scratch
from torch_backend.kernels.flashinfer_abi import SIGNATURES
from torch_backend.kernels.trtllm_gen import MODULE

B200, B300 = Device("cuda", (10, 0), 148), Device("cuda", (10, 3), 148)
SPEC = AttentionSpec(8, 2, 128, dtype="bfloat16")
CACHE = CacheSpec(2, 64, 16, 2, 128, layout="HND", device="cuda")
EIGHT = replace(CACHE, dtype="float8_e4m3fn")
DECODE, PREFILL = Bucket(4, 4, 64, 1), Bucket(4, 400, 64, 100)
CALLS = {
    "trtllm_paged_attention_decode": ("decode.py", "trtllm_batch_decode_with_kv_cache"),
    "trtllm_paged_attention_context": ("prefill.py", "trtllm_batch_context_with_kv_cache"),
}


@pytest.fixture(autouse=True)
def _cubins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "why_no_cubins", lambda: None)


def _installed(*parts: str) -> str:
    spec = find_spec("flashinfer")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], *parts).read_text()


@pytest.mark.parametrize("name", CALLS)
def test_signatures_are_those_of_the_source(name: str) -> None:
    source = _installed("data", "csrc", "trtllm_fmha_kernel_launcher.cu")
    assert f"EXPORT_TYPED_FUNC({name}, {name})" in source
    declared = re.search(rf"void {name}\(([^)]*)\) {{", source)
    assert declared is not None
    # Types such as Variant<double, ffi::Tensor> have commas of their own.
    parameters = re.sub(r"<[^>]*>", "", declared[1]).split(",")
    assert tuple(part.split()[-1] for part in parameters) == SIGNATURES["trtllm_gen"][name]


# What FlashInfer's Python calls some of its own parameters.
ALIASES = {
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "max_seq_len": "max_kv_len",
    "o_sf_scale or -1.0": "o_sf_scale",
    "o_sf_vec_size or -1": "o_sf_vec_size",
    "workspace_buffer.numel() * workspace_buffer.element_size()": "workspace_size",
    "sinks": "attention_sinks",
    "k_block_scales": "key_block_scales",
    "v_block_scales": "value_block_scales",
    "causal": "is_causal",
    "bf16q_fp8kv_transform_mode_value": "bf16q_fp8kv_transform_mode",
}
# What it passes for these, whatever it is asked for.
FIXED = {
    "sparse_mla_top_k": "0",
    "lse_scale": "1.0",
    "sparse_mla_top_k_lens": "None",
    "use_fp16_softmax": "None",
}


@pytest.mark.parametrize("name", CALLS)
def test_flashinfers_own_calls_pass_the_same_things(name: str) -> None:
    """Names say what a parameter means only if the caller agrees."""
    file, function = CALLS[name]
    caller = next(
        node
        for node in ast.walk(ast.parse(_installed(file)))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    # The list is made, and then what one of its back ends does not take is appended.
    added: list[tuple[int, list[ast.expr]]] = []
    for node in ast.walk(caller):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "run_args":
            assert isinstance(node.value, ast.List)
            added.append((node.lineno, node.value.elts))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "run_args.append":
            added.append((node.lineno, node.args))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "run_args.extend":
            (values,) = node.args
            assert isinstance(values, (ast.List, ast.Tuple))
            added.append((node.lineno, values.elts))
    passed = [
        ast.unparse(part) for _, parts in sorted(added, key=lambda at: at[0]) for part in parts
    ]
    names = SIGNATURES["trtllm_gen"][name]
    assert len(passed) == len(names)
    for theirs, ours in zip(passed, names, strict=True):
        if theirs != FIXED.get(ours):
            assert ALIASES.get(theirs, theirs) == ours


def test_what_is_unused_says_so_as_flashinfer_does() -> None:
    """Nothing in the table is a name that no function has; all others are given by the family."""
    known = {name for names in SIGNATURES["trtllm_gen"].values() for name in names}
    assert set(abi.TRTLLM_GEN_UNUSED) < known
    unused = abi.TRTLLM_GEN_UNUSED
    assert (unused["o_sf_scale"], unused["o_sf_vec_size"], unused["o_sf_start_index"]) == (
        -1,
        -1,
        0,
    )


def test_base_2_is_converted_where_the_kernel_writes_it() -> None:
    source = _installed("data", "include", "flashinfer", "trtllm", "fmha", "lse.cuh")
    assert "lse_scale * (math::log2e * m + math::ptx_log2(d))" in source


def test_its_lse_counts_sinks() -> None:
    """They are in the sum before it is stored; maxima are scaled, and sums free of e4m3's 448."""
    source = _installed("data", "csrc", "fmhaReduction.cu")
    stored = source.index("float2 stats{maxVal * softmaxScale, sumVal * sumScale}")
    assert source.index("sumVal += IsE4m3Bmm ? attentionSinkVal * 448.f") < stored
    assert "exp2f(attentionSinksPtr[localHeadIdxO] * M_LOG2E - maxVal" in source


def test_counters_are_as_many_as_flashinfer_reckons() -> None:
    """Its Python's formula, and the launcher's; the launcher refuses fewer."""
    utils = _installed("utils.py")
    assert "num_semaphores = round_up(max(batch_size * num_qo_heads, sm_count), 8)" in utils
    assert "return num_semaphores * 4" in utils
    for requests, want in ((1, 608), (19, 608), (20, 640), (4097, 131104)):
        sizes = scratch.Sizes(148, requests, requests, 8, 1, 0, 0)
        places = scratch.scratch_of(SPEC, CACHE, sizes, context=False, rounds=False)
        assert places.counters == want
        assert places.factors % 256 == 0 and places.factors >= want


def test_scratch_holds_what_the_launcher_takes_from_it() -> None:
    source = _installed("data", "csrc", "trtllm_fmha_kernel_launcher.cu")
    assert "round_up(max_q_len, int64_t{256})" in source
    assert "kTrtllmGenSoftmaxStatsGuardBytes = 1 * 1024 * 1024" in source
    kernel = _installed("data", "include", "flashinfer", "trtllm", "fmha", "kernelParams.h")
    assert "options.mMultiProcessorCount * kernelMeta.mStepQ" in kernel
    sizes = scratch.Sizes(148, 7, 900, 8, 300, 0, 1)
    places = scratch.scratch_of(SPEC, CACHE, sizes, context=True, rounds=False)
    assert places.total - places.workspace >= 8 * 8 * 7 * 512 + (1 << 20)
    assert not (places.workspace - places.value) and places.total % 2 == 0
    without = scratch.scratch_of(
        SPEC, CACHE, sizes._replace(lse=0, pages=5), context=True, rounds=False
    )
    # Keys and values of six pages of 16 tokens, 2 heads of 128 numbers of 16 bits.
    assert without.value - without.key == without.workspace - without.value == 6 * 16 * 2 * 128 * 2
    assert without.total - without.workspace == 256
    rounded = scratch.scratch_of(SPEC, EIGHT, sizes, context=False, rounds=True)
    assert rounded.key - rounded.query == 900 * 8 * 128


def _work(
    *,
    spec: AttentionSpec = SPEC,
    cache: CacheSpec | None = CACHE,
    bucket: Bucket = DECODE,
    device: Device = B200,
    **changes: Any,
) -> Work:
    arguments = (spec, cache, device, "bfloat16", bucket.num_requests, bucket, "pages")
    return replace(Work(*arguments), **changes)


def _spec(**changes: Any) -> AttentionSpec:
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"} | changes
    return AttentionSpec(**sizes)


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "cpu": ("", {"device": Device("cpu")}, "it needs an NVIDIA GPU, and this is a cpu device"),
    "H200": ("", {"device": Device("cuda", (9, 0), 132)}, "10.0 or 10.3, and this one has 9.0"),
    "Thor": ("", {"device": Device("cuda", (11, 0), 20)}, "10.0 or 10.3, and this one has 11.0"),
    "RTX": ("", {"device": Device("cuda", (12, 0), 170)}, "10.0 or 10.3, and this one has 12.0"),
    "own rows": ("", {"source": "tokens"}, "it reads pages, not rows of the call"),
    "no rows": ("", {"bucket": Bucket(4, 0, 64)}, "no query rows"),
    "NHD": ("", {"cache": replace(CACHE, layout="NHD")}, "pages of layout HND, not NHD"),
    "float32": ("", {"query_dtype": "float32"}, "in float16 and bfloat16, not in float32"),
    "mixed": ("", {"role": "decodes"}, "its LSE would cover the rows of the other launch, too"),
    "mixed, 8-bit": (
        "",
        {"role": "decodes", "lse": False, "cache": EIGHT},
        "it leaves mixed batches over 8-bit pages to one launch",
    ),
    "sinks, LSE": ("", {"spec": _spec(sinks=True)}, "its LSE counts attention sinks"),
    "sinks, mixed": (
        "",
        {"spec": _spec(sinks=True), "role": "decodes", "lse": False},
        "it leaves mixed batches with attention sinks to one launch",
    ),
    "nvfp4": ("", {"cache": replace(CACHE, dtype="nvfp4")}, "for nvfp4 it wants an 8-bit query"),
    "width": ("", {"spec": _spec(head_dim=80)}, "(64, 128, 256), not for 80"),
    "value width": ("", {"spec": _spec(head_dim_v=64)}, "head_dim_v = 64 with head_dim = 128"),
    "cap": ("", {"spec": _spec(logits_soft_cap=30.0)}, "it has no soft cap on the logits"),
    "scale": ("", {"spec": _spec(sm_scale=-1.0)}, "a negative sm_scale, here -1.0, was never"),
    "pages of 8": ("", {"cache": replace(CACHE, page_size=8)}, "512, 1024 tokens, not of 8"),
    "long": ("", {"bucket": PREFILL}, "up to 8 tokens a request, and the bucket admits queries"),
    "short": ("_context", {}, "queries of 1 rows are too short for the kernel for prefill"),
    "other pages": ("", {"query_dtype": "float16"}, "float16 and float8_e4m3fn, not of bfloat16"),
    "e5m2": ("", {"cache": replace(EIGHT, dtype="float8_e5m2")}, "not of float8_e5m2"),
    "8-bit prefill": (
        "_context",
        {"bucket": PREFILL, "cache": EIGHT},
        "it reads pages of bfloat16, not of float8_e4m3fn",
    ),
    "16-bit copies": (
        "_8bit",
        {"bucket": PREFILL},
        "it reads pages of float8_e4m3fn and float8_e5m2, not of bfloat16",
    ),
    "scales": (
        "",
        {"cache": replace(EIGHT, scales_per_head=True)},
        "it takes one scale for all heads, and this cache has one for each",
    ),
    "window of drafts": (
        "",
        {"cache": EIGHT, "spec": _spec(sliding_window=9), "bucket": Bucket(4, 32, 64, 8)},
        "flashinfer-ai/flashinfer issue 3864",
    ),
    "not causal": (
        "_context",
        {"bucket": PREFILL, "spec": _spec(causal=False)},
        "it masks keys after each query",
    ),
    "requests": ("", {"bucket": Bucket(70000, 70000, 64, 1)}, "a grid of 70000 requests"),
    "page": (
        "",
        {
            "spec": _spec(num_qo_heads=1 << 15, num_kv_heads=1 << 14),
            "cache": replace(CACHE, page_size=1024, num_kv_heads=1 << 14),
        },
        "a page of 2147483648 elements is 2**31 or more",
    ),
    "statistics": (
        "_context",
        {"bucket": Bucket(4000, 8192, 8192, 8192)},
        "bytes of scratch, more than 1073741824",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_does_not_do_is_refused_in_words(name: str) -> None:
    family, changes, reason = REFUSALS[name]
    refusal = FAMILIES[f"trtllm_gen{family}"].refuse(_work(**changes))
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("group", [1, 4])
def test_large_pages_are_for_grouped_heads(page_size: int, group: int) -> None:
    spec = _spec(num_qo_heads=2 * group)
    refusal = FAMILIES["trtllm_gen"].refuse(
        _work(spec=spec, cache=replace(CACHE, page_size=page_size))
    )
    assert (refusal is None) == (page_size <= 64 or group > 1)
    if refusal is not None:
        assert "only where several query heads share a key head" in refusal


@pytest.mark.parametrize("device", [B200, B300], ids=["10.0", "10.3"])
def test_what_it_does(device: Device) -> None:
    decode, context, copied = (FAMILIES[f"trtllm_gen{end}"] for end in ("", "_context", "_8bit"))
    for changes in (
        {},
        {"spec": _spec(causal=False)},
        {"spec": _spec(sliding_window=9)},
        {"bucket": Bucket(4, 32, 64, 8)},
        {"spec": _spec(sinks=True), "lse": False},
        {"cache": EIGHT},
        {"cache": EIGHT, "query_dtype": "float16"},
        {"cache": EIGHT, "spec": _spec(sliding_window=9)},
        {"lse": False, "role": "decodes"},
    ):
        assert decode.refuse(_work(device=device, **changes)) is None, changes
    assert context.refuse(_work(device=device, bucket=PREFILL)) is None
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        cache = replace(EIGHT, dtype=dtype, scales_per_head=True)
        assert copied.refuse(_work(device=device, bucket=PREFILL, cache=cache)) is None


# The families that serve decode of one token and prefill, over 16-bit and over 8-bit pages.
ARCHITECTURES = {
    (8, 0): ("fa2", "fa2", "fa2", "fa2"),
    (8, 6): ("fa2", "fa2", "fa2", "fa2"),
    (8, 9): ("fa2", "fa2", "fa2", "fa2"),
    (9, 0): ("fa2", "fa3", "xqa", "fa3"),
    (10, 0): ("trtllm_gen", "trtllm_gen_context", "trtllm_gen", "fa2"),
    (10, 3): ("trtllm_gen", "trtllm_gen_context", "trtllm_gen", "fa2"),
    (12, 0): ("fa2", "fa2", "xqa", "fa2"),
    (12, 1): ("fa2", "fa2", "xqa", "fa2"),
}


def _served(device: Device, cache: CacheSpec, lse: bool) -> list[str | None]:
    buckets = Bucket(4, 4, 64, 1), Bucket(4, 2048, 64, 1024)
    return [
        choose(works_of(SPEC, cache, "bfloat16", bucket, 5, device, lse)[0]).family
        for bucket in buckets
    ]


# And why others do not, by their name and a part of the reason.
REASONS: dict[tuple[int, int], dict[str, str]] = {
    (8, 0): {"fa3": "9.0, and this one has 8.0", "xqa": "12.1, and this one has 8.0"},
    (9, 0): {"trtllm_gen": "10.0 or 10.3, and this one has 9.0"},
    (10, 0): {"fa3": "9.0, and this one has 10.0", "xqa": "12.1, and this one has 10.0"},
    (12, 0): {"fa3": "9.0, and", "trtllm_gen": "10.0 or 10.3, and this one has 12.0"},
    (7, 5): dict.fromkeys(("fa2", "fa3", "xqa", "trtllm_gen"), "and this one has 7.5"),
}


@pytest.mark.parametrize("capability", REASONS)
def test_why_others_do_not(capability: tuple[int, int]) -> None:
    choice = choose(_work(device=Device("cuda", capability, 100), lse=False, cache=EIGHT))
    for name, reason in REASONS[capability].items():
        assert reason in dict(choice.refusals)[name]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_who_serves_an_architecture(capability: tuple[int, int], layout: str) -> None:
    """Without LSE, which XQA does not give; TRTLLM-GEN reads head-major pages only."""
    device = Device("cuda", capability, 100)
    want = list(ARCHITECTURES[capability])
    if capability[0] == 10 and layout == "NHD":
        want = ["fa2"] * 4
    caches = (replace(cache, layout=layout) for cache in (CACHE, EIGHT))
    served = [name for cache in caches for name in _served(device, cache, False)]
    assert served == want
    # Where calls may ask for the LSE, as ranks of DCP do, FA2 decodes instead of XQA.
    eight = replace(EIGHT, layout=layout)
    want = ["fa2" if name == "xqa" else name for name in want]
    assert _served(device, eight, True) == want[2:]
    # And the fp4 formats have no kernel anywhere.
    assert _served(device, replace(eight, dtype="nvfp4"), False) == ["reference"] * 2


def test_without_kernels_on_disk_fa2_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "why_no_cubins", lambda: "its compiled kernels are not in /x")
    assert _served(B200, CACHE, True) == ["fa2", "fa2"]
    (reason,) = (reason for name, reason in choose(_work()).refusals if name == "trtllm_gen")
    assert reason == "its compiled kernels are not in /x"


def test_8_bit_prefill_is_served_where_it_is_named() -> None:
    choice = choose(_work(bucket=PREFILL, cache=EIGHT))
    assert choice.family == "fa2"
    assert "trtllm_gen_8bit" not in dict(choice.refusals)


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_xqa_on_12_widens_8_bit_pages(capability: tuple[int, int]) -> None:
    """The kernel that multiplies in 8 bits is for 9.0; both layouts, no LSE, no fp4."""
    device = Device("cuda", capability, 170)
    family = FAMILIES["xqa"]
    for layout in ("NHD", "HND"):
        work = _work(device=device, cache=replace(EIGHT, layout=layout), lse=False)
        assert family.refuse(work) is None
        launch, _ = family.shape(work, 4)
        assert launch.constants == (170, 4, 16, 0, 1)
        hopper, _ = family.shape(replace(work, device=Device("cuda", (9, 0), 170)), 4)
        assert hopper.constants == (170, 4, 16, 0)
        # 256 keys are one tile of the one kernel and four of the other.
        assert launch.scratch_bytes == 256 < hopper.scratch_bytes
    assert family.refuse(replace(work, lse=True)) is not None
    fp4 = replace(EIGHT, dtype="nvfp4")
    assert family.refuse(replace(work, cache=fp4)) == (
        "it reads pages of float8_e4m3fn, not of nvfp4"
    )
    assert family.refuse(replace(work, bucket=Bucket(4, 8, 64, 2))) is not None
    # Heads are another dimension of that kernel's grid.
    many = replace(work, bucket=Bucket(40000, 40000, 40000, 1))
    assert family.refuse(many) is None
    sixteen = FAMILIES["xqa_16bit"]
    assert sixteen.refuse(replace(work, cache=CACHE)) is None


def test_where_kernels_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path))
    reason = abi.why_no_cubins()
    assert reason is not None and str(tmp_path) in reason and "flashinfer-cubin" in reason
    folder = tmp_path / "0123" / "fmha" / "trtllm-gen"
    folder.mkdir(parents=True)
    (folder / "checksums.txt").touch()
    assert abi.why_no_cubins() is None
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    monkeypatch.setattr(abi.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    reason = abi.why_no_cubins()
    assert reason is not None and str(tmp_path / ".cache" / "flashinfer" / "cubins") in reason
    artifacts = _installed("artifacts.py")
    assert re.search(r'TRTLLM_GEN_FMHA: str = "\w+/fmha/trtllm-gen/"', artifacts)


def test_the_module_is_loaded_as_flashinfer_loads_it() -> None:
    """Generated without arguments; each library is told where compiled kernels are."""
    names = {
        node.name: ast.unparse(node.args)
        for node in ast.walk(ast.parse(_installed("jit", "attention", "modules.py")))
        if isinstance(node, ast.FunctionDef)
    }
    assert names["gen_trtllm_gen_fmha_module"] == ""
    (body,) = (
        ast.unparse(node)
        for node in ast.walk(ast.parse(_installed("prefill.py")))
        if isinstance(node, ast.FunctionDef) and node.name == "get_trtllm_gen_fmha_module"
    )
    for step in (
        "mod = gen_trtllm_gen_fmha_module()",
        "op = mod.build_and_load()",
        "for library_path in mod.get_library_paths():",
        "setup_cubin_loader(library_path)",
    ):
        assert step in body
    # The library's own table of loaded kernels has types for a key, and no device.
    source = _installed("data", "csrc", "trtllm_fmha_kernel_launcher.cu")
    assert "using Key = std::tuple<Data_type, Data_type, Data_type, Data_type, int, int," in source


def test_the_module_gets_a_loader_and_serves_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library keeps kernels of the device that launched them first."""
    handed: list[str] = []
    functions = dict.fromkeys(SIGNATURES["trtllm_gen"])
    spec = SimpleNamespace(
        is_compiled=True,
        build_and_load=lambda: SimpleNamespace(**functions),
        get_library_paths=lambda: ("/a.so",),
    )
    monkeypatch.setattr(abi, "jit_spec", lambda key: spec)
    monkeypatch.setattr(abi, "_loaded", {})
    loader = SimpleNamespace(setup_cubin_loader=handed.append)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.cubin_loader", loader)
    found = abi.load(MODULE, 1)
    assert found == functions and abi.load(MODULE, 1) is found
    assert handed == ["/a.so"]
    with pytest.raises(UnsupportedError, match=r"trtllm_gen module.*loaded for GPU 1.*not GPU 0"):
        abi.load(MODULE, 0)
