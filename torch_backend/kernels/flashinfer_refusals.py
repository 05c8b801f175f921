"""What no kernel of FlashInfer does, whichever family it is of, in the words of a refusal."""

from __future__ import annotations

from interop.spec import AttentionSpec

from . import flashinfer_abi as abi
from .protocol import Work

__all__ = ["DTYPES", "needs_capability", "refuse_dtype", "refuse_machine", "refuse_widths"]

DTYPES = ("float16", "bfloat16")


def refuse_machine(work: Work) -> str | None:
    """Why none of FlashInfer's kernels can run here."""
    if work.device.kind != "cuda":
        return f"it needs an NVIDIA GPU, and this is a {work.device.kind} device"
    return abi.why_missing()


def refuse_dtype(work: Work) -> str | None:
    """Which element types of the query none of FlashInfer's kernels has."""
    if work.query_dtype not in DTYPES:
        return f"it computes in {' and '.join(DTYPES)}, not in {work.query_dtype}"
    return None


def refuse_widths(spec: AttentionSpec) -> str | None:
    """Which widths of values none of FlashInfer's kernels has."""
    if spec.head_dim_v != spec.head_dim:
        return (
            f"it needs values as wide as keys, not head_dim_v = {spec.head_dim_v} with "
            f"head_dim = {spec.head_dim}"
        )
    return None


def needs_capability(work: Work, wanted: str) -> str:
    """Why a device of another compute capability than `wanted` is refused."""
    major, minor = work.device.capability
    return f"it needs a GPU of compute capability {wanted}, and this one has {major}.{minor}"
