"""The Triton kernels against PyTorch, under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

# TRITON_INTERPRET has to be set before Triton is imported, hence a process of its own.
SCRIPT = """
import itertools
import torch
from torch_backend import triton_ops
from torch_backend.writing import token_major, write_rows

torch.manual_seed(0)
cases = itertools.product(("NHD", "HND"), ((2, 16, 16), (3, 5, 7), (9, 128, 128)), (1, 4))
for layout, (heads, width, width_v), page_size in cases:
    shapes = [
        (6, page_size, heads, w) if layout == "NHD" else (6, heads, page_size, w)
        for w in (width, width_v)
    ]
    # Every other page of a larger pool: the page stride is twice a page.
    pools = [torch.randn(12, *shape[1:])[::2] for shape in shapes]
    rows = [torch.randn(5, heads, w) for w in (width, width_v)]
    slots = torch.randperm(6 * page_size)[:4].int()
    slots[1] = -1
    expected = [pool.clone() for pool in pools]
    write_rows(*rows, *expected, layout, slots)
    triton_ops.append(*rows, *(token_major(pool, layout) for pool in pools), slots)
    for got, want in zip(pools, expected):
        assert torch.equal(got, want), (layout, heads, width, page_size)
    before = [pool.clone() for pool in pools]
    triton_ops.warm_append(*(token_major(pool, layout) for pool in pools))
    assert all(torch.equal(a, b) for a, b in zip(pools, before))

    indices = torch.tensor([3, 0, 5, 2], dtype=torch.int32)
    valid = torch.tensor([page_size, page_size - 1, -1, 0], dtype=torch.int32)
    rows = [torch.full((4 * page_size, heads, w), 7.0) for w in (width, width_v)]
    views = [token_major(pool, layout) for pool in pools]
    # What is not valid may hold anything.
    for view in views:
        view[0, page_size - 1] = torch.nan
        view[2] = torch.nan
    triton_ops.gather(*views, indices, valid, *rows)
    for view, got in zip(views, rows):
        want = torch.full_like(got, 7.0).view(4, page_size, heads, -1)
        want[0] = view[3]
        want[1] = view[0]
        want[1, page_size - 1] = 0.0
        want[3] = 0.0
        assert torch.equal(got.view(want.shape), want), (layout, heads, width, page_size)
    triton_ops.warm_gather(*views)
print("same bytes")
"""


def test_interpreted_kernels_leave_the_bytes_that_torch_leaves() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bytes"
