"""Who owns which page of a cache: NumPy on the host, no tensor and no device."""

from __future__ import annotations

from .allocator import PageAllocator
from .page_copies import CopyPages
from .page_pool import AllocatorStats

__all__ = ["AllocatorStats", "CopyPages", "PageAllocator"]
