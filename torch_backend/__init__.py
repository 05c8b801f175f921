"""The core: paged attention for PyTorch, and the kernels that the JAX front end calls, too."""

from __future__ import annotations

from .allocator import PageAllocator
from .attention import append, attend, paged_attention, ragged_attention
from .cache import PagedKVCache, largest_num_pages
from .merging import merge_states
from .planning import explain, plan

__all__ = [
    "PageAllocator",
    "PagedKVCache",
    "append",
    "attend",
    "explain",
    "largest_num_pages",
    "merge_states",
    "paged_attention",
    "plan",
    "ragged_attention",
]
