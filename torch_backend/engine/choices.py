"""Which kernel serves which phase of a step on which architecture, and with which query dtype.

`ARCHITECTURES` is the table; `decode_kernel` and `prefill_kernel` are its rules, with a reason for
every choice. They say what the architecture is best served by. Which of this library's kernel
families then runs is `dispatch`'s choice, which `Step.plan` records; on a machine that lacks a
kernel the choice here stands for what would run on one that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from interop.errors import ArgumentError, UnsupportedError
from interop.spec import AttentionSpec, CacheSpec, dtype_name

from .capabilities import (
    YES,
    Answer,
    Platform,
    cache_dtype_of,
    is_quantised,
    no,
    supports_sinks,
    trtllm,
)

__all__ = [
    "ARCHITECTURES",
    "NATIVE",
    "TRTLLM_GEN",
    "XQA",
    "Group",
    "KernelChoice",
    "decode_kernel",
    "graph_support",
    "native_backend",
    "prefill_kernel",
    "query_dtypes",
    "reorder_threshold",
    "workspace_bytes",
]

NATIVE, XQA, TRTLLM_GEN = "native", "xqa", "trtllm-gen"

ARCHITECTURES = (
    # compute capability, prefill, decode
    ("8.x", "native (FA2)", "native (FA2); queries of one length, of several tokens too"),
    ("9.0", "native (FA3 where dtypes allow, else FA2)", "XQA; native if head or DCP forbid it"),
    ("10.x", "TRTLLM-GEN, or native", "TRTLLM-GEN; native when forced off"),
    ("12.x", "native (FA2)", "XQA; native if head or DCP forbid it"),
    ("cpu", "native (reference)", "native (reference)"),
)
"""What serves prefills and decodes, by compute capability, where nothing forbids it."""

XQA_HEADS, XQA_HEAD_STEP = (16, 256), 16
DYNAMIC_PAGE = 128
MIB = 1 << 20
LEAST_WORKSPACE = 394 * MIB
INVARIANT_WORKSPACE = 2048 * MIB
# One row of partial results: 16 bytes for an element of the query.
WORKSPACE_ELEMENT_BYTES = 16


@dataclass(frozen=True)
class KernelChoice:
    """A kernel for one phase, and why it was chosen.

    Parameters
    ----------
    kernel
        ``"native"``, ``"xqa"`` or ``"trtllm-gen"``.
    why
        The rule that decided.
    """

    kernel: str
    why: str


@dataclass(frozen=True)
class Group:
    """Layers that share one cache shape and one plan.

    Parameters
    ----------
    specs
        The attention of each kind of layer in the group; heads and widths must agree.
    cache
        Shape of one layer's cache.
    model_dtype
        ``"float16"`` or ``"bfloat16"`` (``"float32"`` on the CPU).
    kv_cache_dtype
        The engine's name of the *group's* format: ``"auto"`` for layers that are left unquantised,
        whatever the engine's global setting says.
    sinks
        Whether layers have attention sinks.
    dcp_size, dcp_interleave
        Ranks that share the cache by token, and how many tokens in a row one of them owns.
    quantise_query
        Whether 8-bit queries are allowed.
    num_speculative_tokens, parallel_drafting
        Of speculative decoding.
    """

    specs: tuple[AttentionSpec, ...]
    cache: CacheSpec
    model_dtype: str
    kv_cache_dtype: str = "auto"
    sinks: bool = False
    dcp_size: int = 1
    dcp_interleave: int = 1
    quantise_query: bool = True
    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    spec: AttentionSpec = field(init=False)

    def __post_init__(self) -> None:
        if not self.specs:
            raise ArgumentError("specs", given="no layer", wanted="at least one AttentionSpec")
        object.__setattr__(self, "model_dtype", dtype_name(self.model_dtype))
        # Dtype and sinks are part of a plan's key, so that layers and plans agree on them.
        specs = tuple(
            replace(spec, dtype=self.model_dtype, sinks=self.sinks) for spec in self.specs
        )
        object.__setattr__(self, "specs", specs)
        object.__setattr__(self, "spec", specs[0])
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            values = sorted({getattr(spec, name) for spec in self.specs})
            if len(values) > 1:
                raise ArgumentError(
                    f"specs.{name}",
                    given=values,
                    wanted="one value in all layers of a group",
                    remedy="Put layers of other shapes into a group of their own.",
                )
        wanted = cache_dtype_of(self.kv_cache_dtype, self.model_dtype)
        if self.cache.dtype != wanted:
            raise ArgumentError(
                "cache.dtype",
                given=f"{self.cache.dtype} with kv_cache_dtype = {self.kv_cache_dtype!r} and a "
                f"model of {self.model_dtype}",
                wanted=wanted,
                remedy="Give the format of this group's own layers, not the engine's global one.",
            )

    @property
    def num_qo_heads(self) -> int:
        """Query heads of one rank."""
        return self.spec.num_qo_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of one rank."""
        return self.spec.num_kv_heads

    @property
    def nvfp4(self) -> bool:
        """Whether the cache is of a 4-bit format."""
        return self.kv_cache_dtype.startswith("nvfp4")

    @property
    def fp8(self) -> bool:
        """Whether the cache is of an 8-bit format."""
        return is_quantised(self.kv_cache_dtype) and not self.nvfp4

    @property
    def same_window(self) -> bool:
        """Whether all layers have one sliding window."""
        return len({spec.window_left for spec in self.specs}) == 1

    @property
    def same_arithmetic(self) -> bool:
        """Whether all layers compute the same."""
        return len(set(self.specs)) == 1


def decode_kernel(platform: Platform, group: Group) -> KernelChoice:
    """Which kernel decodes; the same for every batch, since graphs need a fixed choice."""
    if platform.device.kind == "cpu":
        return KernelChoice(NATIVE, "the CPU has the reference family alone")
    if platform.use_trtllm is False:
        return KernelChoice(NATIVE, "XQA and TRTLLM-GEN were forced off")
    if platform.family(10):
        usable = trtllm(platform)
        if not usable:
            return KernelChoice(NATIVE, usable.why)
        return KernelChoice(TRTLLM_GEN, "it decodes fastest on compute capability 10.x")
    if not (platform.sm90 or platform.family(12)):
        return KernelChoice(NATIVE, f"{platform.name} has neither XQA nor TRTLLM-GEN")
    if platform.batch_invariant:
        return KernelChoice(NATIVE, "XQA is not batch invariant")
    if group.nvfp4 and not platform.family(12):
        return KernelChoice(NATIVE, "XQA reads 4-bit caches on compute capability 12.x alone")
    least, most = XQA_HEADS
    width = group.spec.head_dim
    if not least <= width <= most or width % XQA_HEAD_STEP:
        return KernelChoice(NATIVE, f"XQA reads heads of {least} to {most} in steps of 16")
    if group.dcp_size > 1:
        return KernelChoice(NATIVE, "XQA gives no LSE, which ranks need to combine")
    return KernelChoice(XQA, f"it decodes fastest on {platform.name}")


def query_dtypes(platform: Platform, group: Group) -> tuple[str, str]:
    """Element types of the query that prefills and decodes are best served by.

    This library's own kernels take queries of the model's dtype; `layer` brings 8-bit ones back to
    it before they are used.
    """
    model = group.model_dtype
    if not group.quantise_query:
        return model, model
    prefill = decode = model
    if group.fp8:
        if platform.sm90 or platform.family(10):
            prefill = decode = group.cache.dtype
        if (platform.sm90 or platform.family(12)) and platform.use_trtllm is not False:
            decode = model  # XQA takes 16-bit queries
    elif group.nvfp4 and trtllm(platform):
        prefill = decode = "float8_e4m3fn"
    return prefill, decode


def prefill_kernel(platform: Platform, group: Group, causal: bool = True) -> KernelChoice:
    """Which kernel serves prefills; the first rule that decides has its reason given."""
    if not causal:
        return KernelChoice(NATIVE, "TRTLLM-GEN prefills causally")
    if platform.use_trtllm is False:
        return KernelChoice(NATIVE, "TRTLLM-GEN was forced off")
    if group.dcp_size > 1:
        return KernelChoice(NATIVE, "context parallel prefills attend in two parts")
    if not (usable := trtllm(platform)):
        return KernelChoice(NATIVE, usable.why)
    query = query_dtypes(platform, group)[0]
    if query.startswith("float8"):
        return KernelChoice(TRTLLM_GEN, "queries are of 8 bits")
    if group.sinks:
        return KernelChoice(TRTLLM_GEN, "there are sinks")
    if group.cache.page_size >= DYNAMIC_PAGE:
        return KernelChoice(TRTLLM_GEN, f"it alone reads pages of {group.cache.page_size} tokens")
    if platform.use_trtllm:
        return KernelChoice(TRTLLM_GEN, "it was forced on")
    if group.kv_cache_dtype == "auto":
        return KernelChoice(TRTLLM_GEN, "cache and query have the model's dtype")
    return KernelChoice(NATIVE, f"16-bit queries over a cache of {group.kv_cache_dtype}")


def native_backend(platform: Platform, group: Group) -> str:
    """Which of FlashInfer's native backends a decode of this group would pin."""
    if group.nvfp4 and trtllm(platform):
        return TRTLLM_GEN
    return (
        "fa2" if platform.device.kind == "cuda" and platform.device.capability < (9, 0) else "auto"
    )


def reorder_threshold(platform: Platform, group: Group) -> int:
    """Longest query that counts as a decode."""
    if group.dcp_size > 1:
        return 1
    several = decode_kernel(platform, group).kernel != NATIVE
    if not several and native_backend(platform, group) != "fa2":
        return 1
    tokens = group.num_speculative_tokens
    return 1 + tokens * (2 if group.parallel_drafting else 1)


def workspace_bytes(platform: Platform, group: Group, max_num_batched_tokens: int) -> int:
    """Bytes that FlashInfer's own native wrappers would need (our plans count their scratch)."""
    if platform.batch_invariant:
        return INVARIANT_WORKSPACE
    heads = group.num_qo_heads * group.spec.head_dim
    return max(LEAST_WORKSPACE, max_num_batched_tokens * heads * WORKSPACE_ELEMENT_BYTES)


def graph_support(platform: Platform, groups: Sequence[Group], causal_only: bool = True) -> Answer:
    """Whether batches of queries of one length may be recorded; if not, one-token decodes may."""
    if any(group.dcp_size > 1 for group in groups):
        return no("context parallel decodes are recorded for one token a request")
    kernels = [decode_kernel(platform, group).kernel for group in groups]
    if platform.device.kind == "cpu":
        return no("there are no graphs on a CPU")
    if platform.device.capability < (9, 0):
        return YES if causal_only else no("drafts that are not causal decode as prefills")
    if NATIVE in kernels:
        return no(f"one of the groups decodes natively on {platform.name}")
    if causal_only or all(kernel == XQA for kernel in kernels):
        return YES
    return no("drafts that are not causal decode as prefills")


def check_group(platform: Platform, group: Group) -> None:
    """Raise for groups that no batch of can be served.

    Raises
    ------
    UnsupportedError
        For sinks that the platform has no kernel for, and for formats that exclude each other.
    """
    if group.sinks and not (answer := supports_sinks(platform)):
        raise UnsupportedError(f"layers of this group have sinks: {answer.why}.")
    if group.nvfp4 and platform.device.kind != "cpu" and not (usable := trtllm(platform)):
        raise UnsupportedError(f"a cache of {group.kv_cache_dtype}: {usable.why}.")
    if group.nvfp4 and group.dcp_size > 1:
        raise UnsupportedError(
            f"a cache of {group.kv_cache_dtype} cannot be spread over {group.dcp_size} ranks: its "
            "kernels give 8-bit partial results."
        )
    if group.dcp_size > 1 and group.num_speculative_tokens and group.dcp_interleave > 1:
        raise UnsupportedError(
            "speculative decoding over several ranks needs dcp_interleave = 1, not "
            f"{group.dcp_interleave}."
        )
