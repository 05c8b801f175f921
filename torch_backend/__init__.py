"""The core: paged attention for PyTorch, and the kernels that the JAX front end calls, too."""

from __future__ import annotations

from .attention import append, attend, paged_attention, ragged_attention
from .cache import PageAllocator, PagedKVCache
from .merging import merge_states
from .planning import plan

__all__ = [
    "PageAllocator",
    "PagedKVCache",
    "append",
    "attend",
    "merge_states",
    "paged_attention",
    "plan",
    "ragged_attention",
]
