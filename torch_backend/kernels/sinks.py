"""How each kernel family serves attention sinks.

A kernel that knows nothing of sinks would leave them out silently, so a family that is not in the
table here is refused for a spec that has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from interop.plan import Launch

from .protocol import KernelFamily, Work

__all__ = ["BY_KERNEL", "BY_LSE", "needs_lse", "refuse"]

BY_KERNEL = (
    "reference",
    "xqa",
    "xqa_16bit",
    "xqa_drafts",
    "trtllm_gen",
    "trtllm_gen_context",
    "trtllm_gen_8bit",
)
"""Their kernels add the sink to the softmax denominator."""

BY_LSE = ("fa3", "fa2_drafts", "fa2", "fa2_flashinfer", "fa2_invariant")
"""Their output is multiplied, in the same `run`, by what the sink leaves of it: from the LSE."""


def refuse(family: KernelFamily, work: Work) -> str | None:
    """Why a family cannot do `work`, its sinks included; `None` if it can."""
    if work.spec.sinks and family.name not in BY_KERNEL + BY_LSE:
        return "it has no attention sinks"
    return family.refuse(work)


def needs_lse(launches: Iterable[Launch]) -> bool:
    """Whether launches need room for the LSE, which all of one plan write and the last one uses."""
    return any(launch.spec.sinks and launch.family in BY_LSE for launch in launches)
