"""The JAX front end: the PyTorch core's paged attention, called from inside ``jax.jit``."""

from __future__ import annotations

from interop.ffi import TARGETS as FFI_TARGETS

from . import dcp, handlers, pytrees
from .attention import append, attend, paged_attention, ragged_attention
from .cache import CacheArrays, CacheHandle, cache_handle, init_cache, release_cache
from .compat import ragged_paged_attention
from .device_planning import plan_on_device
from .generation import Generated, StopReason, generate
from .inspection import assert_no_cache_copies
from .layer_planning import plan_layers
from .merging import combine_states, merge_states
from .ordering import jax_after_torch, torch_after_jax
from .partitioning import spec_of_shard
from .planning import plan
from .sinks import apply_sinks

__all__ = [
    "FFI_TARGETS",
    "CacheArrays",
    "CacheHandle",
    "Generated",
    "StopReason",
    "append",
    "apply_sinks",
    "assert_no_cache_copies",
    "attend",
    "cache_handle",
    "combine_states",
    "dcp",
    "generate",
    "init_cache",
    "jax_after_torch",
    "merge_states",
    "paged_attention",
    "plan",
    "plan_layers",
    "plan_on_device",
    "ragged_attention",
    "ragged_paged_attention",
    "release_cache",
    "spec_of_shard",
    "torch_after_jax",
]

# Imported for what they register with XLA and with JAX's trees.
del handlers, pytrees
