"""What a serving engine may ask before it builds a model: pure functions of facts of a device.

Each answer says yes, or no and why. None of them needs the device to be there: `Platform` holds all
that they look at, so they can be asked about an SM100 on a laptop.

The CPU is served by the reference family, which has every format and every shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from interop.errors import ArgumentError
from interop.spec import CACHE_DTYPE_ALIASES, NVFP4_BLOCK, dtype_name

from ..kernels import Device

__all__ = [
    "ACTIVATION_DTYPES",
    "FORWARD_INCLUDES_KV_CACHE_UPDATE",
    "HEAD_SIZES",
    "KV_CACHE_DTYPES",
    "NAME",
    "PAGE_SIZES",
    "PAGE_SIZES_DYNAMIC",
    "YES",
    "Answer",
    "PackedRows",
    "Platform",
    "cache_dtype_of",
    "customize_spec",
    "fused_output_quant",
    "is_quantised",
    "kv_layouts",
    "page_sizes",
    "supports_activation_dtype",
    "supports_attention_type",
    "supports_capability",
    "supports_head_size",
    "supports_kv_cache_dtype",
    "supports_layout",
    "supports_non_causal",
    "supports_page_size",
    "supports_quantised_query",
    "supports_query_lens_mismatch",
    "supports_sinks",
    "supports_sliding_window",
    "trtllm",
]

NAME = "FLASHINFER"
"""Name by which engines select this backend."""

FORWARD_INCLUDES_KV_CACHE_UPDATE = False
"""`forward` reads the cache; whoever calls it has called `do_kv_cache_update` before."""

ACTIVATION_DTYPES = ("float16", "bfloat16")
KV_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "nvfp4",
    "nvfp4_4over6",
)
HEAD_SIZES = (64, 128, 256, 512)
PAGE_SIZES = (16, 32, 64)
PAGE_SIZES_DYNAMIC = (128, 256, 512, 1024)
LEAST_CAPABILITY, MOST_CAPABILITY = (8, 0), (12, 1)
# Orders in memory, best first; in these a page is head-major inside.
HEAD_MAJOR = ("LBHNC", "BLHNC")
ALL_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
FUSED_OUTPUTS = ("fp8_static_tensor_sym", "nvfp4_dynamic")


@dataclass(frozen=True)
class Answer:
    """Yes, or no and the reason; true in a condition if it is yes.

    Parameters
    ----------
    ok
        Whether it can be done.
    why
        Why not; empty for yes.
    """

    ok: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Answer(True)


def no(why: str) -> Answer:
    """Return a refusal with its reason."""
    return Answer(False, why)


@dataclass(frozen=True)
class Platform:
    """A device, and what an operator decided about it.

    Parameters
    ----------
    device
        Facts, as dispatch has them.
    use_trtllm
        Whether TRTLLM-GEN and XQA are forced on or off; `None` leaves it to the rules.
    cubins
        Whether the binaries of TRTLLM-GEN can be had.
    batch_invariant
        Whether results may not depend on what else is in a batch.
    """

    device: Device
    use_trtllm: bool | None = None
    cubins: bool = True
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """What messages call the device."""
        if self.device.kind != "cuda":
            return f"a {self.device.kind} device"
        return "compute capability {}.{}".format(*self.device.capability)

    def family(self, major: int) -> bool:
        """Whether it is a GPU whose compute capability has this major number."""
        return self.device.kind == "cuda" and self.device.capability[0] == major

    @property
    def sm90(self) -> bool:
        """Whether it is of compute capability 9.0 exactly."""
        return self.device.kind == "cuda" and self.device.capability == (9, 0)


def trtllm(platform: Platform) -> Answer:
    """Whether TRTLLM-GEN, for prefill and decode, can run: row 15's and 22's condition."""
    if platform.use_trtllm is False:
        return no("TRTLLM-GEN was forced off")
    if not platform.family(10):
        return no(f"TRTLLM-GEN runs on compute capability 10.x, and this is {platform.name}")
    if platform.batch_invariant:
        return no("TRTLLM-GEN is not batch invariant")
    if not platform.cubins:
        return no("the binaries of TRTLLM-GEN cannot be had")
    return YES


def supports_activation_dtype(dtype: object) -> Answer:
    """Row 13: element types of query, key, value and output."""
    name = dtype_name(dtype)
    if name in ACTIVATION_DTYPES:
        return YES
    return no(f"activations are {' or '.join(ACTIVATION_DTYPES)}, not {name}")


def is_quantised(kv_cache_dtype: str) -> bool:
    """Whether an engine's name of a format means fewer than 16 bits."""
    return kv_cache_dtype.startswith(("fp8", "nvfp4"))


def supports_kv_cache_dtype(
    platform: Platform, kv_cache_dtype: str, model_dtype: object | None = None
) -> Answer:
    """Rows 14 and 15: formats of the cache on a device, and beside a model's dtype."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        return no(f"{kv_cache_dtype!r} is none of {', '.join(KV_CACHE_DTYPES)}")
    if kv_cache_dtype in ACTIVATION_DTYPES and model_dtype is not None:
        name = dtype_name(model_dtype)
        if name != kv_cache_dtype:
            return no(f"a cache of {kv_cache_dtype} needs a model of it, and this one is {name}")
    if not kv_cache_dtype.startswith("nvfp4") or platform.device.kind == "cpu":
        return YES
    usable = trtllm(platform)
    return usable or no(f"{kv_cache_dtype} is read by TRTLLM-GEN alone: {usable.why}")


def cache_dtype_of(kv_cache_dtype: str, model_dtype: object) -> str:
    """Return what `interop.CacheSpec` calls an engine's format of the cache (row 16).

    Raises
    ------
    ArgumentError
        For a name that is none, and a 16-bit format that is not the model's.
    """
    name = dtype_name(model_dtype)
    if kv_cache_dtype == "auto":
        return name
    # Asked about a CPU, which has every format: here it is about names alone.
    answer = supports_kv_cache_dtype(Platform(Device("cpu")), kv_cache_dtype, model_dtype)
    if not answer:
        raise ArgumentError(
            "kv_cache_dtype",
            given=repr(kv_cache_dtype),
            wanted="a format of the cache",
            remedy=f"{answer.why}.",
        )
    return CACHE_DTYPE_ALIASES.get(kv_cache_dtype, kv_cache_dtype)


def page_sizes(platform: Platform, num_qo_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Row 17: page sizes that kernels read."""
    dynamic = _dynamic_pages(platform, num_qo_heads, num_kv_heads)
    return (*PAGE_SIZES, *PAGE_SIZES_DYNAMIC) if dynamic else PAGE_SIZES


def _dynamic_pages(platform: Platform, num_qo_heads: int, num_kv_heads: int) -> Answer:
    if num_kv_heads <= 0 or num_qo_heads // num_kv_heads <= 1:
        return no("several query heads must share a key/value head")
    return trtllm(platform)


def supports_page_size(
    platform: Platform, page_size: int, num_qo_heads: int, num_kv_heads: int
) -> Answer:
    """Row 17: a page is a whole number of pages that kernels read."""
    known = page_sizes(platform, num_qo_heads, num_kv_heads)
    if page_size > 0 and any(page_size % size == 0 for size in known):
        return YES
    sizes = ", ".join(map(str, known))
    return no(f"pages are multiples of one of {sizes} tokens, and {page_size} is not")


def supports_head_size(head_size: int) -> Answer:
    """Row 18."""
    if head_size in HEAD_SIZES:
        return YES
    return no(f"heads are {', '.join(map(str, HEAD_SIZES))} wide, not {head_size}")


def supports_capability(platform: Platform) -> Answer:
    """Row 19: 8.0 to 12.1; the CPU has the reference family."""
    if platform.device.kind == "cpu":
        return YES
    if LEAST_CAPABILITY <= platform.device.capability <= MOST_CAPABILITY:
        return YES
    return no(f"GPUs of compute capability 8.0 to 12.1 are served, and this is {platform.name}")


def supports_sliding_window() -> Answer:
    """Row 20: always; `builder` says where layers of a group must share it."""
    return YES


def supports_non_causal(kv_cache_dtype: str = "auto", dcp_size: int = 1) -> Answer:
    """Row 21: for draft models, on one rank, of any format but NVFP4."""
    if dcp_size > 1:
        return no("under decode context parallelism attention is causal")
    if kv_cache_dtype.startswith("nvfp4"):
        return no(f"attention over {kv_cache_dtype} is causal")
    return YES


def supports_sinks(platform: Platform) -> Answer:
    """Row 22: whether both phases of a group may have attention sinks."""
    if platform.device.kind == "cpu":
        return YES
    if platform.use_trtllm is False:
        return no("sinks are added by XQA and TRTLLM-GEN, which were forced off")
    if platform.sm90 or platform.family(12):
        return YES
    usable = trtllm(platform)
    return usable or no(f"sinks are added by XQA (9.0, 12.x) and TRTLLM-GEN: {usable.why}")


def supports_query_lens_mismatch(platform: Platform, dcp_size: int = 1) -> Answer:
    """Row 23: whether query lengths on the device may be shorter than those on the host."""
    usable = trtllm(platform)
    if usable and dcp_size == 1:
        return YES
    why = "ranks split them by the host's" if usable else usable.why
    return no(f"plans are made from the lengths on the host: {why}")


def kv_layouts(platform: Platform) -> tuple[str, ...]:
    """Row 24: orders of a cache in memory, best first (`layouts.ORDERS` has what they mean)."""
    return HEAD_MAJOR if platform.family(10) else ALL_LAYOUTS


def supports_layout(platform: Platform, order: str) -> Answer:
    """Rows 24 and 30: whether kernels read a cache in this order."""
    if order == "LHBNC":
        return no("in LHBNC a page's heads lie in as many places")
    order = {"HND": "LBHNC", "NHD": "LBNHC"}.get(order, order)
    known = kv_layouts(platform)
    return YES if order in known else no(f"on {platform.name} the orders are {', '.join(known)}")


@dataclass(frozen=True)
class PackedRows:
    """What customised formats make of a cache's last axes (row 25).

    Parameters
    ----------
    head_slots
        Heads of the cache's tensor, those of keys first.
    row_bytes
        Bytes of a token in a head slot.
    """

    head_slots: int
    row_bytes: int


def customize_spec(
    kv_cache_dtype: str, num_kv_heads: int, head_size: int, head_size_v: int | None = None
) -> PackedRows | None:
    """Row 25: head slots and bytes of an NVFP4 cache; `None` for formats that need nothing.

    Raises
    ------
    ArgumentError
        Where keys and values would need rows of different sizes, or a head is no multiple of 16.
    """
    if not kv_cache_dtype.startswith("nvfp4"):
        return None
    sizes = []
    for name, width in (("head_size", head_size), ("head_size_v", head_size_v or head_size)):
        if width % NVFP4_BLOCK:
            wanted = f"a multiple of {NVFP4_BLOCK}, the values that share a block scale"
            raise ArgumentError(name, given=width, wanted=wanted)
        sizes.append(width // 2 + width // NVFP4_BLOCK)
    if sizes[0] != sizes[1]:
        raise ArgumentError(
            "head_size_v",
            given=f"{head_size_v} with head_size = {head_size}",
            wanted="head_size, since heads of keys and values share one axis in NVFP4",
        )
    return PackedRows(2 * num_kv_heads, sizes[0])


def supports_attention_type(attn_type: str) -> Answer:
    """Rows 27 and 42."""
    if attn_type == "decoder":
        return YES
    return no(f"attention is of decoders, not {attn_type!r}")


def supports_quantised_query(platform: Platform, kv_cache_dtype: str, enabled: bool) -> Answer:
    """Row 45: whether callers should quantise the whole query before `forward`."""
    if not enabled:
        return no("quantised queries are disabled")
    return _quantised_on_trtllm(platform, kv_cache_dtype)


def fused_output_quant(platform: Platform, kv_cache_dtype: str, output: str) -> Answer:
    """Row 49: whether a kernel writes `output` itself; `forward` rounds to fp8 afterwards if not.

    Parameters
    ----------
    output
        ``"fp8_static_tensor_sym"`` or ``"nvfp4_dynamic"``.
    """
    if output not in FUSED_OUTPUTS:
        return no(f"{output!r} is none of {', '.join(FUSED_OUTPUTS)}")
    return _quantised_on_trtllm(platform, kv_cache_dtype)


def _quantised_on_trtllm(platform: Platform, kv_cache_dtype: str) -> Answer:
    if not is_quantised(kv_cache_dtype):
        return no(f"the cache is not quantised ({kv_cache_dtype})")
    return trtllm(platform)
