"""The JAX front end: the PyTorch core's paged attention, called from inside ``jax.jit``."""

from __future__ import annotations

from interop.ffi import TARGETS as FFI_TARGETS

from . import dcp, handlers, pytrees
from .attention import append, attend, paged_attention, ragged_attention
from .cache import CacheArrays, CacheHandle, cache_handle, init_cache, release_cache
from .merging import combine_states, merge_states
from .ordering import jax_after_torch, torch_after_jax
from .planning import plan

__all__ = [
    "FFI_TARGETS",
    "CacheArrays",
    "CacheHandle",
    "append",
    "attend",
    "cache_handle",
    "combine_states",
    "dcp",
    "init_cache",
    "jax_after_torch",
    "merge_states",
    "paged_attention",
    "plan",
    "ragged_attention",
    "release_cache",
    "torch_after_jax",
]

# Imported for what they register with XLA and with JAX's trees.
del handlers, pytrees
