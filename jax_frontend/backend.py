"""The face of this library towards a serving engine, in JAX.

Names and arguments are those of `torch_backend.backend`: capabilities, choices and the split of a
batch are the same functions, and `MetadataBuilder` and `AttentionImpl` are this front end's.
"""

from __future__ import annotations

from torch_backend.backend import (
    ARCHITECTURES,
    Answer,
    EngineBatch,
    Group,
    KernelChoice,
    Platform,
    Scales,
    Split,
    Step,
    StepBuilder,
    bmm1_scale,
    bmm2_scale,
    capabilities,
    choices,
    cumulative_pages,
    decode_lengths,
    draft_mask,
    split_batch,
)

from .engine import AttentionImpl, LayerInputs, MetadataBuilder, maybe_quant_query

__all__ = [
    "ARCHITECTURES",
    "Answer",
    "AttentionImpl",
    "EngineBatch",
    "Group",
    "KernelChoice",
    "LayerInputs",
    "MetadataBuilder",
    "Platform",
    "Scales",
    "Split",
    "Step",
    "StepBuilder",
    "bmm1_scale",
    "bmm2_scale",
    "capabilities",
    "choices",
    "cumulative_pages",
    "decode_lengths",
    "draft_mask",
    "maybe_quant_query",
    "split_batch",
]
