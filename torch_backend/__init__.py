"""The core: paged attention for PyTorch, and the kernels that the JAX front end calls, too."""

from __future__ import annotations

from .attention import append, attend, paged_attention, ragged_attention
from .cache import PageAllocator, PagedKVCache
from .merging import merge_states
from .planning import explain, plan

__all__ = [
    "PageAllocator",
    "PagedKVCache",
    "append",
    "attend",
    "explain",
    "merge_states",
    "paged_attention",
    "plan",
    "ragged_attention",
]
