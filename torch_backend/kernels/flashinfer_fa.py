"""What FlashInfer's FA2 and FA3 kernels share: refusals, and how a compiled module is called.

Nothing here allocates device memory while it runs, so all calls can be recorded in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import tvm_ffi

from interop.plan import Launch
from interop.spec import NVFP4_DTYPES

from ..sinks import scale_rows, warm
from . import flashinfer_abi as abi
from .flashinfer_refusals import refuse_dtype, refuse_machine, refuse_widths
from .protocol import Operands, Work, torch_view

__all__ = ["Call", "finish", "load_early", "ready", "refuse_any", "to_natural"]

HEAD_DIMS = (64, 128, 256)
# FA2 counts elements of query, key and value, and the stride of a page, in 32 unsigned bits.
MAX_ELEMENTS = 2**32

LN2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class Call:
    """A launch made ready: the compiled function, and the arguments that are no tensors."""

    function: Any
    plan_info: Any
    options: tuple[Any, ...]


def _module_key(backend: str, launch: Launch, pages: bool) -> abi.ModuleKey:
    spec, cache = launch.spec, launch.cache
    dtype = spec.dtype or (cache.dtype if cache is not None else "")
    return abi.ModuleKey(
        backend,
        dtype,
        spec.head_dim,
        window=spec.window_left >= 0,
        soft_cap=spec.logits_soft_cap is not None,
        # Rows of a call have the query's type, and so have copies of pages.
        kv_dtype=cache.dtype if cache is not None and pages else dtype,
    )


def ready(
    backend: str, launch: Launch, plan_info: tuple[int, ...], *, pages: bool, pdl: bool
) -> Call:
    """Load the module of a launch and arrange what does not change from call to call.

    `pages` says whether the kernel reads pages, or rows that follow one another.
    """
    spec = launch.spec
    module = abi.load(_module_key(backend, launch, pages))
    function = "paged_run" if pages else "ragged_run"
    names = abi.SIGNATURES[backend][function]
    values = {
        "mask_mode_code": abi.CUSTOM_MASK if launch.draft_masks else abi.MASK_MODES[spec.causal],
        # Rows of a call are token-major, whatever the cache is.
        "layout": abi.LAYOUTS[launch.cache.layout if launch.cache and pages else "NHD"],
        "window_left": spec.window_left,
        "enable_pdl": pdl,
        "logits_soft_cap": spec.logits_soft_cap or 0.0,
        "sm_scale": spec.sm_scale,
    }
    options = abi.arrange(names[names.index("maybe_lse") + 1 :], values)
    return Call(module[function], tvm_ffi.convert(list(plan_info)), options)


def to_natural(lse: Any) -> None:
    """Turn logarithms of base 2, which these kernels write, into natural ones, in place."""
    if lse is not None:
        torch_view(lse).mul_(LN2)


def finish(operands: Operands) -> None:
    """Make the LSE natural, and give the output the sinks that these kernels know nothing of.

    FlashInfer compiles both with a sink in them, too, but then there is no soft cap and the LSE
    merges wrong, and several configurations of such modules share one name and one library.
    """
    if operands.sinks is None:
        to_natural(operands.lse)
    else:
        out, lse = torch_view(operands.out), torch_view(operands.lse)
        scale_rows(out, lse, torch_view(operands.sinks), LN2)


def load_early(backend: str, launch: Launch, *, pages: bool) -> None:
    """Compile and load while a plan is made, not inside a custom call or a graph's recording."""
    if torch.cuda.is_available():
        key = _module_key(backend, launch, pages)
        abi.load(key)
        if launch.spec.sinks:
            spec = launch.spec
            warm(spec.num_qo_heads, spec.head_dim_v, key.dtype, LN2, torch.cuda.current_device())


def refuse_any(work: Work) -> str | None:
    """What neither FA2 nor FA3 does."""
    spec, bucket = work.spec, work.bucket
    if (reason := refuse_machine(work) or refuse_dtype(work)) is not None:
        return reason
    if work.source == "pages" and work.cache is not None and work.cache.dtype in NVFP4_DTYPES:
        return f"it reads pages of 16 and of 8 bits, not of {work.cache.dtype}; reference does"
    if spec.head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"it is compiled for head_dim {dims}, not for {spec.head_dim}"
    if (reason := refuse_widths(spec)) is not None:
        return reason
    if spec.sm_scale < 0:
        return f"it looks for the largest logit before it scales, and sm_scale is {spec.sm_scale}"
    if bucket.num_tokens == 0:
        return "there are no query rows to launch it for"
    rows = max(bucket.num_tokens, bucket.num_pages if work.source == "tokens" else 0)
    if rows * spec.num_qo_heads * spec.head_dim >= MAX_ELEMENTS:
        return (
            f"{rows} rows of {spec.num_qo_heads} heads x {spec.head_dim} are 2**32 elements or "
            "more, which it cannot count"
        )
    return None
