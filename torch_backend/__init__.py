"""The core: paged attention for PyTorch, and the kernels that the JAX front end calls, too."""

from __future__ import annotations

from . import dcp
from .attention import append, attend, paged_attention, ragged_attention
from .cache import PagedKVCache, largest_num_pages
from .device_planning import plan_on_device
from .layer_planning import plan_layers
from .measuring import measure_kernels, use_measured_choices
from .merging import combine_states, merge_states
from .paging import PageAllocator
from .planning import explain, plan
from .quantising import ScaleCalibrator, calibrate_scales
from .saved import SavedPages
from .sinks import apply_sinks, refresh_sinks
from .transfer import copy_request, restore_pages, save_pages

__all__ = [
    "PageAllocator",
    "PagedKVCache",
    "SavedPages",
    "ScaleCalibrator",
    "append",
    "apply_sinks",
    "attend",
    "calibrate_scales",
    "combine_states",
    "copy_request",
    "dcp",
    "explain",
    "largest_num_pages",
    "measure_kernels",
    "merge_states",
    "paged_attention",
    "plan",
    "plan_layers",
    "plan_on_device",
    "ragged_attention",
    "refresh_sinks",
    "restore_pages",
    "save_pages",
    "use_measured_choices",
]
