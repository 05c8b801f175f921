"""The face of this library towards a serving engine, in PyTorch.

What a backend of an engine is asked, step after step: what it supports (`capabilities`), which
kernel serves what (`choices`), metadata of a batch (`MetadataBuilder`), and one layer's attention
(`AttentionImpl`). `jax_frontend.backend` has the same from JAX.
"""

from __future__ import annotations

from .engine import capabilities, choices
from .engine.batches import (
    EngineBatch,
    Split,
    cumulative_pages,
    decode_lengths,
    draft_mask,
    split_batch,
)
from .engine.builder import MetadataBuilder, Step, StepBuilder
from .engine.capabilities import Answer, Platform
from .engine.choices import ARCHITECTURES, Group, KernelChoice
from .engine.layer import AttentionImpl, maybe_quant_query
from .engine.settings import Scales, bmm1_scale, bmm2_scale

__all__ = [
    "ARCHITECTURES",
    "Answer",
    "AttentionImpl",
    "EngineBatch",
    "Group",
    "KernelChoice",
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
