"""What a serving engine is told about devices, most of which are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_step import CPU, SM80, SM89, SM90, SM100, SM103, SM120, group_of

from interop import AttentionSpec
from interop.errors import ArgumentError, UnsupportedError
from torch_backend.backend import (
    ARCHITECTURES,
    Group,
    Platform,
    StepBuilder,
    capabilities,
    choices,
)
from torch_backend.engine.capabilities import PackedRows
from torch_backend.kernels import Device

FORCED_OFF = replace(SM100, use_trtllm=False)
ALL = {
    "cpu": CPU,
    "8.0": SM80,
    "8.9": SM89,
    "9.0": SM90,
    "10.0": SM100,
    "10.3": SM103,
    "12.0": SM120,
    "10.0, off": FORCED_OFF,
    "10.0, no cubins": replace(SM100, cubins=False),
    "10.0, invariant": replace(SM100, batch_invariant=True),
    "9.0, off": replace(SM90, use_trtllm=False),
}
TRTLLM = ("10.0", "10.3")


def yes_on(ask: Any) -> set[str]:
    """Platforms on which the answer is yes; a no has its reason."""
    answers = {name: ask(platform) for name, platform in ALL.items()}
    assert all(answer.ok == (not answer.why) == bool(answer) for answer in answers.values())
    return {name for name, answer in answers.items() if answer}


def test_names_and_dtypes() -> None:
    assert capabilities.NAME == "FLASHINFER"
    assert not capabilities.FORWARD_INCLUDES_KV_CACHE_UPDATE
    assert capabilities.supports_activation_dtype("float16")
    assert capabilities.supports_activation_dtype(np.dtype("float16"))
    answer = capabilities.supports_activation_dtype("float32")
    assert answer.why == "activations are float16 or bfloat16, not float32"


def test_formats_of_the_cache() -> None:
    for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        assert yes_on(lambda p, n=name: capabilities.supports_kv_cache_dtype(p, n)) == set(ALL)
    for name in ("nvfp4", "nvfp4_4over6"):
        found = yes_on(lambda p, n=name: capabilities.supports_kv_cache_dtype(p, n))
        assert found == {"cpu", *TRTLLM}
    answer = capabilities.supports_kv_cache_dtype(SM90, "nvfp4")
    assert (
        "TRTLLM-GEN runs on compute capability 10.x, and this is compute capability 9.0"
        in answer.why
    )
    assert "none of auto" in capabilities.supports_kv_cache_dtype(CPU, "int8").why
    answer = capabilities.supports_kv_cache_dtype(SM90, "float16", "bfloat16")
    assert answer.why == "a cache of float16 needs a model of it, and this one is bfloat16"
    assert capabilities.supports_kv_cache_dtype(SM90, "float16", "float16")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("nvfp4_4over6", "nvfp4_4over6"),
    ],
)
def test_what_names_of_formats_mean(name: str, want: str) -> None:
    assert capabilities.cache_dtype_of(name, "bfloat16") == want


@pytest.mark.parametrize("name", ["int8", "float16"])
def test_names_that_are_no_format(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"kv_cache_dtype: got '{name}'"):
        capabilities.cache_dtype_of(name, "bfloat16")


def test_page_sizes() -> None:
    plain, dynamic = (16, 32, 64), (16, 32, 64, 128, 256, 512, 1024)
    for name, platform in ALL.items():
        assert capabilities.page_sizes(platform, 8, 8) == plain
        found = capabilities.page_sizes(platform, 8, 2)
        assert found == (dynamic if name in TRTLLM else plain), name
    assert capabilities.page_sizes(SM100, 8, 0) == plain
    assert capabilities.supports_page_size(SM90, 48, 8, 2)
    answer = capabilities.supports_page_size(SM90, 24, 8, 2)
    assert answer.why == "pages are multiples of one of 16, 32, 64 tokens, and 24 is not"
    assert not capabilities.supports_page_size(SM90, 0, 8, 2)


def test_head_sizes() -> None:
    assert [n for n in range(1, 1025) if capabilities.supports_head_size(n)] == [64, 128, 256, 512]
    assert capabilities.supports_head_size(96).why == "heads are 64, 128, 256, 512 wide, not 96"


@pytest.mark.parametrize(
    ("capability", "ok"),
    [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True), ((12, 2), False)],
)
def test_compute_capabilities(capability: tuple[int, int], ok: bool) -> None:
    answer = capabilities.supports_capability(Platform(Device("cuda", capability, 1)))
    assert answer.ok == ok
    assert capabilities.supports_capability(CPU)


def test_windows_masks_and_types() -> None:
    assert capabilities.supports_sliding_window()
    assert capabilities.supports_non_causal()
    assert not capabilities.supports_non_causal(dcp_size=2)
    assert not capabilities.supports_non_causal("nvfp4")
    assert capabilities.supports_attention_type("decoder")
    answer = capabilities.supports_attention_type("encoder")
    assert answer.why == "attention is of decoders, not 'encoder'"


def test_who_has_sinks() -> None:
    assert yes_on(capabilities.supports_sinks) == {"cpu", "9.0", "12.0", *TRTLLM}
    why = capabilities.supports_sinks(FORCED_OFF).why
    assert why == "sinks are added by XQA and TRTLLM-GEN, which were forced off"


def test_lengths_on_the_host() -> None:
    assert yes_on(capabilities.supports_query_lens_mismatch) == set(TRTLLM)
    assert not capabilities.supports_query_lens_mismatch(SM100, dcp_size=2)


def test_orders_in_memory() -> None:
    assert capabilities.kv_layouts(SM100) == ("LBHNC", "BLHNC")
    assert capabilities.kv_layouts(SM90)[0] == "LBNHC"
    assert yes_on(lambda p: capabilities.supports_layout(p, "NHD")) == {
        name for name in ALL if not name.startswith("10")
    }
    assert yes_on(lambda p: capabilities.supports_layout(p, "HND")) == set(ALL)
    assert not yes_on(lambda p: capabilities.supports_layout(p, "LHBNC"))


def test_rows_of_4_bit_caches() -> None:
    assert capabilities.customize_spec("fp8", 2, 128) is None
    for name in ("nvfp4", "nvfp4_4over6"):
        assert capabilities.customize_spec(name, 2, 128) == PackedRows(4, 72)
    with pytest.raises(ArgumentError, match="head_size_v: got 64 with head_size = 128"):
        capabilities.customize_spec("nvfp4", 2, 128, 64)
    with pytest.raises(ArgumentError, match="head_size: got 24, want a multiple of 16"):
        capabilities.customize_spec("nvfp4", 2, 24)


def test_fused_outputs_and_queries() -> None:
    for output in ("fp8_static_tensor_sym", "nvfp4_dynamic"):
        found = yes_on(lambda p, o=output: capabilities.fused_output_quant(p, "fp8", o))
        assert found == set(TRTLLM)
        assert not yes_on(lambda p, o=output: capabilities.fused_output_quant(p, "auto", o))
    assert not yes_on(lambda p: capabilities.fused_output_quant(p, "fp8", "int8"))
    assert yes_on(lambda p: capabilities.supports_quantised_query(p, "fp8", True)) == set(TRTLLM)
    assert not yes_on(lambda p: capabilities.supports_quantised_query(p, "fp8", False))


E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"


def fp8_group(**more: Any) -> Group:
    name = more.pop("kv_cache_dtype", "fp8")
    dtype = E5M2 if name == "fp8_e5m2" else E4M3
    return group_of(kv_cache_dtype=name, dtype=dtype, model_dtype=BF16, **more)


QUERIES = [
    # platform, group, prefill, decode
    ("cpu", {}, BF16, BF16),
    ("8.0", {}, BF16, BF16),
    ("8.9", {}, BF16, BF16),
    ("9.0", {}, E4M3, BF16),
    ("9.0, off", {}, E4M3, E4M3),
    ("9.0", {"kv_cache_dtype": "fp8_e5m2"}, E5M2, BF16),
    ("10.0", {}, E4M3, E4M3),
    ("10.3", {"kv_cache_dtype": "fp8_e5m2"}, E5M2, E5M2),
    ("12.0", {}, BF16, BF16),
    ("10.0", {"quantise_query": False}, BF16, BF16),
]


@pytest.mark.parametrize(("name", "more", "prefill", "decode"), QUERIES)
def test_dtypes_of_the_query(name: str, more: Any, prefill: str, decode: str) -> None:
    """I13: by architecture and phase, and of the group's own format."""
    platform = ALL[name]
    assert choices.query_dtypes(platform, fp8_group(**more)) == (prefill, decode)
    plain = group_of(model_dtype=BF16)
    assert choices.query_dtypes(platform, plain) == (BF16, BF16)


def test_a_group_has_a_format_of_its_own() -> None:
    """I13: layers that are left unquantised say so, whatever is set for the others."""
    with pytest.raises(ArgumentError, match=r"cache\.dtype: got bfloat16 with kv_cache_dtype"):
        group_of(model_dtype=BF16, kv_cache_dtype="fp8")
    with pytest.raises(ArgumentError, match=r"cache\.dtype: got float8_e4m3fn with kv_cache_dtype"):
        group_of(model_dtype=BF16, dtype=E4M3)


def test_4_bit_queries() -> None:
    nvfp4 = group_of(model_dtype=BF16, dtype="nvfp4", kv_cache_dtype="nvfp4")
    assert choices.query_dtypes(SM100, nvfp4) == (E4M3, E4M3)
    assert choices.query_dtypes(SM120, nvfp4) == (BF16, BF16)
    assert choices.native_backend(SM100, nvfp4) == "trtllm-gen"


KERNELS = [
    # platform, group, prefill, decode
    ("cpu", {}, "native", "native"),
    ("8.0", {}, "native", "native"),
    ("9.0", {}, "native", "xqa"),
    ("9.0, off", {}, "native", "native"),
    ("9.0", {"head_dim": 512}, "native", "native"),
    ("9.0", {"head_dim": 24}, "native", "native"),
    ("9.0", {"dcp_size": 2}, "native", "native"),
    ("10.0", {}, "trtllm-gen", "trtllm-gen"),
    ("10.3", {}, "trtllm-gen", "trtllm-gen"),
    ("10.0, off", {}, "native", "native"),
    ("10.0, no cubins", {}, "native", "native"),
    ("10.0, invariant", {}, "native", "native"),
    ("10.0", {"dcp_size": 2}, "native", "trtllm-gen"),
    ("12.0", {}, "native", "xqa"),
    ("12.0", {"dcp_size": 2}, "native", "native"),
]


@pytest.mark.parametrize(("name", "more", "prefill", "decode"), KERNELS)
def test_kernels_by_architecture(name: str, more: Any, prefill: str, decode: str) -> None:
    group = group_of(model_dtype=BF16, **more)
    chosen = choices.prefill_kernel(ALL[name], group), choices.decode_kernel(ALL[name], group)
    assert [choice.kernel for choice in chosen] == [prefill, decode]
    assert all(choice.why for choice in chosen)


def test_rules_of_trtllm_prefill() -> None:
    def kernel(group: Group, causal: bool = True, platform: Platform = SM100) -> tuple[str, str]:
        choice = choices.prefill_kernel(platform, group, causal)
        return choice.kernel, choice.why

    plain = group_of(model_dtype=BF16)
    assert kernel(plain) == ("trtllm-gen", "cache and query have the model's dtype")
    assert kernel(plain, causal=False) == ("native", "TRTLLM-GEN prefills causally")
    assert kernel(fp8_group()) == ("trtllm-gen", "queries are of 8 bits")
    wide = fp8_group(quantise_query=False)
    assert kernel(wide) == ("native", "16-bit queries over a cache of fp8")
    assert kernel(wide, platform=replace(SM100, use_trtllm=True))[0] == "trtllm-gen"
    assert kernel(replace(wide, sinks=True)) == ("trtllm-gen", "there are sinks")
    pages = fp8_group(quantise_query=False, page_size=128)
    assert kernel(pages) == ("trtllm-gen", "it alone reads pages of 128 tokens")


def test_the_table_names_every_architecture() -> None:
    assert [row[0] for row in ARCHITECTURES] == ["8.x", "9.0", "10.x", "12.x", "cpu"]


def test_longest_queries_that_decode() -> None:
    drafts = group_of(num_speculative_tokens=3)
    for platform, want in ((SM80, 4), (SM90, 4), (SM100, 4), (SM120, 4), (FORCED_OFF, 1), (CPU, 1)):
        assert choices.reorder_threshold(platform, drafts) == want
        assert choices.reorder_threshold(platform, group_of()) == 1
    assert choices.reorder_threshold(SM90, replace(drafts, parallel_drafting=True)) == 7
    assert choices.reorder_threshold(SM100, replace(drafts, dcp_size=2)) == 1


def test_workspaces_grow_with_heads() -> None:
    """I18: of FlashInfer's own wrappers. Plans of this library count theirs exactly."""
    wide = group_of(num_qo_heads=64, num_kv_heads=8, head_dim=256)
    assert choices.workspace_bytes(SM90, wide, 8192) == 8192 * 64 * 256 * 16
    assert choices.workspace_bytes(SM90, group_of(), 8192) == 394 << 20
    invariant = replace(SM90, batch_invariant=True)
    assert choices.workspace_bytes(invariant, wide, 8192) == 2048 << 20


def test_what_may_be_recorded() -> None:
    plain, drafts = group_of(), group_of(num_speculative_tokens=1)

    def graphs(platform: Platform, *groups: Group, causal_only: bool = True) -> bool:
        return choices.graph_support(platform, groups, causal_only).ok

    assert graphs(SM80, plain)
    assert not graphs(SM80, plain, causal_only=False)
    assert graphs(SM90, plain, drafts, causal_only=False)
    assert graphs(SM100, plain)
    assert not graphs(SM100, plain, causal_only=False)
    assert not graphs(SM90, plain, group_of(head_dim=512))
    assert not graphs(FORCED_OFF, plain)
    assert not graphs(SM100, replace(plain, dcp_size=2))
    assert not graphs(CPU, plain)


REFUSED = [
    (SM80, {"sinks": True}, "layers of this group have sinks: sinks are added by XQA"),
    (SM90, {"dtype": "nvfp4", "kv_cache_dtype": "nvfp4"}, "a cache of nvfp4: TRTLLM-GEN runs on"),
    (
        SM100,
        {"dtype": "nvfp4", "kv_cache_dtype": "nvfp4", "dcp_size": 2},
        "a cache of nvfp4 cannot be spread over 2 ranks",
    ),
    (
        SM100,
        {"dcp_size": 2, "dcp_interleave": 4, "num_speculative_tokens": 1},
        "needs dcp_interleave = 1, not 4",
    ),
]


@pytest.mark.parametrize(("platform", "more", "text"), REFUSED)
def test_groups_that_are_refused(platform: Platform, more: Any, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        StepBuilder(platform, group_of(model_dtype=BF16, **more))


def test_layers_of_a_group_have_one_shape() -> None:
    specs = (AttentionSpec(4, 2, 16), AttentionSpec(8, 2, 16))
    with pytest.raises(ArgumentError, match=r"specs\.num_qo_heads: got \[4, 8\]"):
        group_of(specs=specs)
    with pytest.raises(ArgumentError, match="specs: got no layer"):
        Group((), group_of().cache, "float32")
