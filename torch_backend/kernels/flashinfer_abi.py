"""FlashInfer's private names: this module and `flashinfer_signatures` are all that know them.

FlashInfer's public objects keep a plan's schedule to themselves, so its compiled modules are called
directly. Which modules there are and how they are built was read from version 0.7.2.post1.
Importing this module does not import FlashInfer.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from interop.errors import UnsupportedError, VersionError

from .flashinfer_signatures import (
    CUSTOM_MASK,
    LAYOUTS,
    MASK_MODES,
    RUNS,
    SIGNATURES,
    TRTLLM_GEN_UNUSED,
    arrange,
)

__all__ = [
    "BUILD_SECONDS",
    "CUSTOM_MASK",
    "LAYOUTS",
    "MASK_MODES",
    "SIGNATURES",
    "TRTLLM_GEN_UNUSED",
    "ModuleKey",
    "arrange",
    "build",
    "check_version",
    "is_built",
    "jit_spec",
    "load",
    "why_missing",
    "why_no_cubins",
]

DISTRIBUTION = "flashinfer-python"
AT_LEAST, BELOW = (0, 7, 2), (0, 7, 3)
REMEDY = f"Install it with: pip install '{DISTRIBUTION}>=0.7.2,<0.7.3'"

# Seconds that compiling one module took on a machine with 16 cores; of XQA, its longest job on two.
# TRTLLM-GEN's was never compiled.
BUILD_SECONDS = {"fa2": 26, "fa3": 75, "xqa": 9}

log = logging.getLogger("isthmus")


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
        ``"fa2"``, ``"fa3"``, ``"xqa"`` or ``"trtllm_gen"``, of which there is one module for all.
    dtype
        Element type of query and output: ``"float16"`` or ``"bfloat16"``.
    head_dim
        Width of query, key and value heads.
    window, soft_cap
        Whether the kernels have a sliding window, and a soft cap on the logits, which XQA has not.
    kv_dtype
        Element type of key and value: `dtype`, which it is when left out, or an 8-bit one
        (``"float8_e4m3fn"``; with FA2 also ``"float8_e5m2"``).
    page_size, group_size
        Of XQA: tokens in a page, and query heads that share a key head.
    drafts
        Of XQA: whether it is the module for several query tokens a request.
    """

    backend: str
    dtype: str
    head_dim: int
    window: bool = False
    soft_cap: bool = False
    kv_dtype: str = ""
    page_size: int = 0
    group_size: int = 0
    drafts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)

    def __str__(self) -> str:
        features = (
            (f"keys of {self.kv_dtype}", self.kv_dtype != self.dtype),
            (f"pages of {self.page_size}, groups of {self.group_size}", self.backend == "xqa"),
            ("several query tokens", self.drafts),
            ("window", self.window),
            ("soft cap", self.soft_cap),
        )
        text = "".join(f", {feature}" for feature, has in features if has)
        if self.backend == "trtllm_gen":
            return self.backend
        return f"{self.backend} {self.dtype} head_dim {self.head_dim}{text}"


_importing = threading.Lock()


def jit_spec(key: ModuleKey) -> Any:
    """FlashInfer's description of a module: ``name``, ``is_compiled``, ``build``, ``load``.

    The module is the one that FlashInfer's own Python loads, so a build serves both.

    Raises
    ------
    VersionError
        If FlashInfer is missing or outside the range.
    """
    check_version()
    with _importing:
        # FlashInfer's modules import one another in a circle, which threads must not enter from
        # two sides at once.
        xqa = importlib.import_module("flashinfer.jit.xqa")
        modules = importlib.import_module("flashinfer.jit.attention.modules")
    if key.backend == "trtllm_gen":
        return modules.gen_trtllm_gen_fmha_module()
    dtype, kv_dtype = getattr(torch, key.dtype), getattr(torch, key.kv_dtype)
    if key.backend == "xqa":
        # The module for queries of unequal lengths takes all of them, so any number above 1 does.
        query_len = 2 if key.drafts else 1
        return xqa.gen_xqa_module(
            dtype,
            kv_dtype,
            key.page_size,
            key.head_dim,
            key.group_size,
            key.window,
            dtype,
            query_len,
            use_ragged_q=key.drafts,
        )
    generate = {
        # Keys and values lie in pools of equal strides, which halves the module.
        "fa2": modules._gen_batch_prefill_primary_module,
        "fa3": modules.gen_batch_prefill_module,
    }[key.backend]
    no_position_encoding, no_half_precision_logits = 0, False
    return generate(
        key.backend,
        dtype,
        kv_dtype,
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


# Functions by name, as `load` returns them, by module and device.
_loaded: dict[tuple[ModuleKey, int], dict[str, Any]] = {}
_loading = threading.Lock()


def load(key: ModuleKey, device: int = 0) -> dict[str, Any]:
    """Load a compiled module, compiling it first where no build of it is found.

    A library in FlashInfer's folder of ready-made modules (``flashinfer/data/aot``) is taken as it
    is; else FlashInfer's build cache is used.

    Parameters
    ----------
    key
        The module.
    device
        Index of the CUDA device that it will run on. Where kernels set their limits at each launch,
        which FA2 and FA3 do, one module serves all devices.

    Returns
    -------
    dict
        The functions that compute attention, by name; see `SIGNATURES`.

    Raises
    ------
    VersionError
        If FlashInfer is missing or outside the range.
    UnsupportedError
        If the module cannot be compiled or loaded here.
    """
    place = (key, device if key.backend in ("xqa", "trtllm_gen") else 0)
    functions = _loaded.get(place)
    if functions is not None:
        return functions
    with _loading:
        if place not in _loaded:
            _loaded[place] = _build_and_load(*place)
        return _loaded[place]


def _build_and_load(key: ModuleKey, device: int) -> dict[str, Any]:
    check_version()
    try:
        spec = jit_spec(key)
        if not spec.is_compiled:
            seconds = BUILD_SECONDS.get(key.backend)
            log.warning(
                "compiling the kernels of FlashInfer's %s module on first use, which takes %s on "
                "16 cores and longer on fewer; python -m torch_backend.prebuild does it ahead",
                key,
                f"{seconds} s" if seconds else "a time that was not measured",
            )
        module = _load_for(spec, device) if key.backend == "xqa" else spec.build_and_load()
        if key.backend == "trtllm_gen":
            _let_load_cubins(spec, device)
        return {name: getattr(module, name) for name in RUNS[key.backend]}
    except Exception as error:
        raise _cannot_build(key, error) from error


def _load_for(spec: Any, device: int) -> Any:
    """Load XQA for one device.

    Its library raises the kernel's limit on shared memory while it is loaded, for the device that
    is current then. A library is loaded once, so each device gets a copy of it.
    """
    if not spec.is_compiled:
        spec.build(need_lock=True)
    with tempfile.TemporaryDirectory() as folder, torch.cuda.device(device):
        return tvm_ffi.load_module(shutil.copy(spec.get_library_path(), folder))


def _let_load_cubins(spec: Any, device: int) -> None:
    """Give TRTLLM-GEN's library the function by which it finds compiled kernels.

    It keeps the kernels of the device that it first launched them on, and hands these to others.
    """
    others = {place[1] for place in _loaded if place[0].backend == "trtllm_gen"} - {device}
    if others:
        raise RuntimeError(
            f"its kernels were loaded for GPU {others.pop()} and serve one GPU a process, not GPU "
            f"{device} as well. Use a process for each GPU, or plan with kernel='fa2'"
        )
    loader = importlib.import_module("flashinfer.jit.cubin_loader")
    for path in spec.get_library_paths():
        loader.setup_cubin_loader(path)


def why_no_cubins() -> str | None:
    """Why TRTLLM-GEN's kernels, which come compiled, are not here; `None` if they are.

    FlashInfer would fetch them from the network in the middle of a plan, so they have to be there.
    """
    root = os.environ.get("FLASHINFER_CUBIN_DIR")
    package = importlib.util.find_spec("flashinfer_cubin")
    if root:
        folder = Path(root)
    elif package is not None and package.submodule_search_locations:
        folder = Path(package.submodule_search_locations[0]) / "cubins"
    else:
        base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
        folder = (Path(base) if base else Path.home()) / ".cache" / "flashinfer" / "cubins"
    if any(folder.glob("*/fmha/trtllm-gen/checksums.txt")):
        return None
    return (
        f"its compiled kernels are not in {folder}: install flashinfer-cubin of FlashInfer's "
        "version, or name their folder in FLASHINFER_CUBIN_DIR"
    )


def _cannot_build(key: ModuleKey, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"FlashInfer's {key} module cannot be compiled or loaded: {error}. Compiling needs nvcc "
        "and ninja (CUDA_HOME names the CUDA folder); where there are none, put a module compiled "
        "elsewhere into flashinfer/data/aot."
    )
