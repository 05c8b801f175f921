"""What Triton kernels over items share: how they load and store them, and how many a program has.

An item is one head of one token, ``width`` elements that lie side by side. Shapes and strides are
constants of a compiled kernel, which lets the compiler prove accesses of 16 bytes aligned; only the
number of tokens varies. Places are 64 bits wide, since pools pass 2**31 elements easily.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "OPTIONS",
    "PROGRAM_BYTES",
    "WARPS",
    "load_items",
    "none_of",
    "scales_of_one",
    "store_items",
    "tile",
]

# jax-triton sets it to nothing when it is imported, and then Triton has no place for its kernels.
if os.environ.get("TRITON_CACHE_DIR") == "":
    del os.environ["TRITON_CACHE_DIR"]

WARPS = 4
# A fused multiplication and addition would round once where the CPU rounds twice.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
# What a program writes to keys, and again to values: one access of 16 bytes a thread.
PROGRAM_BYTES = WARPS * 32 * 16


@triton.jit
def load_items(source, place, live, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load items ``[ITEMS, COLUMNS]`` that begin at ``place``; anything where not ``live``."""
    column = tl.arange(0, COLUMNS)[None, :]
    return tl.load(source + place[:, None] + column, mask=live[:, None] & (column < WIDTH))


@triton.jit
def store_items(target, place, items, live, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Store items to ``place`` where ``live``."""
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(target + place[:, None] + column, items, mask=live[:, None] & (column < WIDTH))


def tile(width: int, dtype: torch.dtype) -> int:
    """Items of up to `width` elements of `dtype` that a program stores."""
    return max(1, PROGRAM_BYTES // dtype.itemsize // triton.next_power_of_2(width))


def none_of(tensor: Tensor) -> Tensor:
    """Return the one slot, page or count that makes a kernel write nothing, to warm it up with."""
    return torch.full((1,), -1, dtype=torch.int32, device=tensor.device)


def scales_of_one(tensor: Tensor, heads: int) -> dict[str, Tensor]:
    """Return the arguments of a kernel for one layer's scales, all 1, to warm it up with."""
    return {
        "scale_table": torch.ones((1, 2, heads), device=tensor.device),
        "scale_layer": torch.zeros((1,), dtype=torch.int32, device=tensor.device),
    }
