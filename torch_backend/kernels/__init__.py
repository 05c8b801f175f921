"""Kernel families, in the order in which dispatch prefers them.

| family | serves | gives way |
| --- | --- | --- |
| ``fa3`` | prefill on compute capability 9.0 | to ``fa2`` where the bucket has fewer than \
`flashinfer_fa3.FA3_LEAST_MEAN_QUERY_LEN` query rows a request |
| ``fa2`` | decode, short queries, and all else since capability 8.0 | |
| ``fa2_flashinfer`` | nothing by itself: ``fa2`` on FlashInfer's own schedule, to compare with | |
| ``reference`` | everything, on any device | |

Each refuses what its kernels do not do, with the reason. A mixed batch, decodes before prefills, is
two launches where ``fa2`` and ``fa3`` would each serve one kind (`dispatch.MIXED_LEAST_QUERY_LEN`).
"""

from __future__ import annotations

from .flashinfer_fa2 import FA2Family, FlashInferPlannedFamily
from .flashinfer_fa3 import FA3Family
from .protocol import Decision, Device, KernelFamily, Lengths, Operands, Work, torch_view
from .reference import ReferenceFamily

__all__ = [
    "FAMILIES",
    "Decision",
    "Device",
    "KernelFamily",
    "Lengths",
    "Operands",
    "Work",
    "torch_view",
]

_IN_ORDER: tuple[KernelFamily, ...] = (
    FA3Family(),
    FA2Family(),
    FlashInferPlannedFamily(),
    ReferenceFamily(),
)
FAMILIES: dict[str, KernelFamily] = {family.name: family for family in _IN_ORDER}
