"""Kernel families, in the order in which dispatch prefers them.

| family | serves | gives way |
| --- | --- | --- |
| ``fa3`` | prefill on compute capability 9.0 | to ``fa2`` where the bucket has fewer than \
`flashinfer_fa3.FA3_LEAST_MEAN_QUERY_LEN` query rows a request |
| ``xqa`` | decode of one token a request from ``float8_e4m3fn`` pages on 9.0, without LSE | to \
``fa2`` for batches of very uneven lengths (`flashinfer_xqa.UNEVEN`) |
| ``trtllm_gen`` | decode on 10.0 and 10.3, never run on hardware | |
| ``trtllm_gen_context`` | prefill from 16-bit pages there, never run on hardware | |
| ``fa2_drafts`` | masks of drafts, in two launches | to ``fa2`` for fewer than \
`flashinfer_fa2_drafts.LEAST_TOKENS` tokens |
| ``fa2`` | decode, short queries, and all else since capability 8.0 | |
| ``fa2_flashinfer`` | nothing by itself: ``fa2`` on FlashInfer's own schedule, to compare with | |
| ``cascade`` | batches whose requests begin with the same pages, where that pays \
(`cascade.cascade_pays`) | |
| ``fa2_invariant`` | batch-invariant plans, and nothing else | |
| ``xqa_16bit`` | the same as ``xqa`` from 16-bit pages, which ``fa2`` reads faster: head widths \
that ``fa2`` is not compiled for | |
| ``xqa_drafts`` | several query tokens a request, without LSE, where it is measured or named | |
| ``trtllm_gen_8bit`` | prefill from 8-bit pages on 10.0 and 10.3, by a copy, where it is named; \
never run on hardware | |
| ``reference`` | everything, on any device | |

Each refuses what its kernels do not do, with the reason. A mixed batch, decodes before prefills, is
two launches where ``fa2`` and ``fa3`` would each serve one kind (`dispatch.MIXED_LEAST_QUERY_LEN`).
"""

from __future__ import annotations

from .cascade import CascadeFamily
from .flashinfer_fa2 import FA2Family, FlashInferPlannedFamily
from .flashinfer_fa2_drafts import DraftsFA2Family
from .flashinfer_fa2_invariant import InvariantFA2Family
from .flashinfer_fa3 import FA3Family
from .flashinfer_xqa import XQAFamily
from .flashinfer_xqa_drafts import XQADraftsFamily
from .protocol import Decision, Device, KernelFamily, Lengths, Operands, Work, torch_view
from .reference import ReferenceFamily
from .trtllm_gen import TrtllmGenFamily

__all__ = [
    "CASCADE",
    "DRAFT_MASKS",
    "FAMILIES",
    "INVARIANT",
    "Decision",
    "Device",
    "KernelFamily",
    "Lengths",
    "Operands",
    "Work",
    "torch_view",
]

_FA2 = FA2Family()
_IN_ORDER: tuple[KernelFamily, ...] = (
    FA3Family(),
    XQAFamily("xqa", quantized=True, instead=_FA2),
    TrtllmGenFamily("trtllm_gen", context=False),
    TrtllmGenFamily("trtllm_gen_context", context=True),
    DraftsFA2Family(),
    _FA2,
    FlashInferPlannedFamily(),
    CascadeFamily(),
    InvariantFA2Family(),
    XQAFamily("xqa_16bit", quantized=False),
    XQADraftsFamily(),
    TrtllmGenFamily("trtllm_gen_8bit", context=True, copied=True),
    ReferenceFamily(),
)
FAMILIES: dict[str, KernelFamily] = {family.name: family for family in _IN_ORDER}

CASCADE = CascadeFamily.name
"""The family that reads pages once that all requests begin with."""

INVARIANT = ("fa2_invariant", "reference")
"""Families that can leave what they compute for a request independent of all others."""

DRAFT_MASKS = (
    "fa2_drafts",
    "fa2",
    "fa2_flashinfer",
    "fa2_invariant",
    "xqa_drafts",
    "reference",
)
"""Families that read masks of drafts; others would leave them out silently."""
