"""FlashInfer's private names: the one place that knows them.

FlashInfer's public objects keep a plan's schedule to themselves, so its compiled modules are called
directly. Which modules there are, how they are built and in which order their functions take their
arguments was read from version 0.7.2.post1; a test compares every list below with the sources that
the installed package compiles. Importing this module does not import FlashInfer.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from interop.errors import UnsupportedError, VersionError

__all__ = [
    "BUILD_SECONDS",
    "SIGNATURES",
    "CompiledModule",
    "ModuleKey",
    "arrange",
    "build",
    "check_version",
    "is_built",
    "jit_spec",
    "load",
    "why_missing",
]

DISTRIBUTION = "flashinfer-python"
AT_LEAST, BELOW = (0, 7, 2), (0, 7, 3)
REMEDY = f"Install it with: pip install '{DISTRIBUTION}>=0.7.2,<0.7.3'"

# Seconds that compiling one module took on a machine with 16 cores.
BUILD_SECONDS = {"fa2": 26, "fa3": 75}

log = logging.getLogger("isthmus")

_PLAN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "page_locked_int_workspace_buffer",
    "qo_indptr",
    "kv_indptr",
    "kv_len_arr",
    "total_num_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "enable_cuda_graph",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "window_left",
)
_FA2_PLAN = (
    *_PLAN,
    "fixed_split_size",
    "disable_split_kv",
    "num_colocated_ctas",
    "uniform_q_len",
)
_OPTIONS = ("mask_mode_code", "layout", "window_left", "enable_pdl")
_PAGED_RUN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "plan_info_vec",
    "q",
    "paged_k_cache",
    "paged_v_cache",
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "o",
    "maybe_lse",
    *_OPTIONS,
)
_RAGGED_RUN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "plan_info_vec",
    "q",
    "k",
    "v",
    "qo_indptr",
    "kv_indptr",
    "o",
    "maybe_lse",
    *_OPTIONS,
)
_FA2_EXTRAS = (
    "maybe_custom_mask",
    "maybe_mask_indptr",
    "maybe_alibi_slopes",
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "maybe_k_cache_sf",
    "maybe_v_cache_sf",
    "logits_soft_cap",
    "sm_scale",
    "rope_rcp_scale",
    "rope_rcp_theta",
    "token_pos_in_items_len",
)
_FA3_EXTRAS = (
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "maybe_scale_v",
    "logits_soft_cap",
    "sm_scale",
    "scale_v_scalar",
    "token_pos_in_items_len",
)

# The compiled functions' parameters by name and in order; names are those of FlashInfer's sources.
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "fa2": {
        "plan": _FA2_PLAN,
        "workspace_size": ("device_buffer", *_FA2_PLAN[3:]),
        "paged_run": _PAGED_RUN + _FA2_EXTRAS,
        "ragged_run": _RAGGED_RUN + _FA2_EXTRAS,
    },
    "fa3": {
        "plan": _PLAN,
        "paged_run": _PAGED_RUN + _FA3_EXTRAS,
        "ragged_run": _RAGGED_RUN + _FA3_EXTRAS,
    },
}

MASK_MODES = {False: 0, True: 1}  # by `AttentionSpec.causal`
LAYOUTS = {"NHD": 0, "HND": 1}

# What these kernels are told about features that this library does not use.
_UNUSED = {
    "rope_rcp_scale": 1.0,
    "rope_rcp_theta": 1.0,
    "scale_v_scalar": 1.0,
    "token_pos_in_items_len": 0,
}


def arrange(names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Put `values` in the order of `names`; optional tensors without a value are `None`.

    Raises
    ------
    KeyError
        For a name that is not optional and has no value.
    """
    known = _UNUSED | dict(values)
    return tuple(known.get(name) if name.startswith("maybe_") else known[name] for name in names)


@cache
def why_missing() -> str | None:
    """Why FlashInfer cannot be used here, in words with a remedy; `None` if it can.

    Looks at the installed distribution's version, without importing it.
    """
    try:
        found = version(DISTRIBUTION)
    except PackageNotFoundError:
        return f"FlashInfer is not installed. {REMEDY}"
    # A release or a later build of one; a pre-release may have any signature.
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+.*)?", found)
    if match is None or not AT_LEAST <= tuple(map(int, match.groups()[:3])) < BELOW:
        return (
            f"FlashInfer {found} is installed, and the compiled modules' arguments were checked "
            f"for versions >=0.7.2,<0.7.3 only. {REMEDY}"
        )
    return None


def check_version() -> None:
    """Raise `VersionError`, with the range and a remedy, if FlashInfer cannot be used here."""
    reason = why_missing()
    if reason is not None:
        raise VersionError(reason)


@dataclass(frozen=True)
class ModuleKey:
    """Which compiled module: the values that FlashInfer compiles in.

    Parameters
    ----------
    backend
        ``"fa2"`` or ``"fa3"``.
    dtype
        Element type of query, key, value and output: ``"float16"`` or ``"bfloat16"``.
    head_dim
        Width of query, key and value heads.
    window, soft_cap
        Whether the kernels have a sliding window, and a soft cap on the logits.
    """

    backend: str
    dtype: str
    head_dim: int
    window: bool = False
    soft_cap: bool = False

    def __str__(self) -> str:
        features = "".join(
            f", {name}" for name, on in (("window", self.window), ("soft cap", self.soft_cap)) if on
        )
        return f"{self.backend} {self.dtype} head_dim {self.head_dim}{features}"


@dataclass(frozen=True)
class CompiledModule:
    """The functions of a loaded module that compute attention; see `SIGNATURES`."""

    paged_run: Any
    ragged_run: Any


def jit_spec(key: ModuleKey) -> Any:
    """FlashInfer's description of a module: ``name``, ``is_compiled``, ``build``, ``load``.

    The module is the one that FlashInfer's own wrapper objects load, so a build serves both.

    Raises
    ------
    VersionError
        If FlashInfer is missing or outside the range.
    """
    check_version()
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    generate = {
        # Keys and values lie in pools of equal strides, which halves the module.
        "fa2": modules._gen_batch_prefill_primary_module,
        "fa3": modules.gen_batch_prefill_module,
    }[key.backend]
    dtype = getattr(torch, key.dtype)
    no_position_encoding, no_half_precision_logits = 0, False
    return generate(
        key.backend,
        dtype,
        dtype,
        dtype,
        torch.int32,
        key.head_dim,
        key.head_dim,
        no_position_encoding,
        key.window,
        key.soft_cap,
        no_half_precision_logits,
    )


def is_built(key: ModuleKey) -> bool:
    """Whether `load` finds the module compiled."""
    return bool(jit_spec(key).is_compiled)


def build(key: ModuleKey) -> None:
    """Compile a module, without loading it; safe beside other threads and processes.

    Raises
    ------
    VersionError
        If FlashInfer is missing or outside the range.
    UnsupportedError
        If the module cannot be compiled here.
    """
    check_version()
    try:
        spec = jit_spec(key)
        if not spec.is_compiled:
            spec.build(need_lock=True)
    except Exception as error:
        raise _cannot_build(key, error) from error


_loaded: dict[ModuleKey, CompiledModule] = {}
_loading = threading.Lock()


def load(key: ModuleKey) -> CompiledModule:
    """Load a compiled module, compiling it first where no build of it is found.

    A library in FlashInfer's folder of ready-made modules (``flashinfer/data/aot``) is taken as it
    is; else FlashInfer's build cache is used.

    Raises
    ------
    VersionError
        If FlashInfer is missing or outside the range.
    UnsupportedError
        If the module cannot be compiled or loaded here.
    """
    module = _loaded.get(key)
    if module is not None:
        return module
    with _loading:
        if key not in _loaded:
            _loaded[key] = _build_and_load(key)
        return _loaded[key]


def _build_and_load(key: ModuleKey) -> CompiledModule:
    check_version()
    try:
        spec = jit_spec(key)
        if not spec.is_compiled:
            log.warning(
                "compiling the kernels of FlashInfer's %s module on first use, which takes a "
                "minute or more (%d s on 16 cores); python -m torch_backend.prebuild does it ahead",
                key,
                BUILD_SECONDS[key.backend],
            )
        module = spec.build_and_load()
        return CompiledModule(module.paged_run, module.ragged_run)
    except Exception as error:
        raise _cannot_build(key, error) from error


def _cannot_build(key: ModuleKey, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"FlashInfer's {key} module cannot be compiled or loaded: {error}. Compiling needs nvcc "
        "and ninja (CUDA_HOME names the CUDA folder); where there are none, put a module compiled "
        "elsewhere into flashinfer/data/aot."
    )
