"""A kernel that only reads: what the card's memory can deliver. Imported where Triton is."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

__all__ = ["reader"]

BLOCK = 8192
BLOCKS_PER_PROGRAM = 16


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sums, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCK * BLOCKS)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(BLOCKS):
        total += tl.load(source + start + block * BLOCK + offsets)
    tl.store(sums + program, tl.sum(total, 0))


def reader(numbers: torch.Tensor) -> Callable[[], None]:
    """Return a call that reads all of `numbers` (float32, a multiple of 131072 elements)."""
    programs = numbers.numel() // (BLOCK * BLOCKS_PER_PROGRAM)
    sums = torch.empty(programs, dtype=torch.float32, device=numbers.device)

    def read() -> None:
        _read[(programs,)](numbers, sums, BLOCK, BLOCKS_PER_PROGRAM, num_warps=8)

    return read
