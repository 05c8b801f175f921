"""Signatures of other libraries, for code that was written for them."""

from __future__ import annotations

from ..sinks import apply_sinks as apply_attention_sink
from .paged_attention import paged_attention
from .ragged_paged_attention import ragged_paged_attention

__all__ = ["apply_attention_sink", "paged_attention", "ragged_paged_attention"]
