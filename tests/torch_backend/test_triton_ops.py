"""The Triton write kernel against the PyTorch one, under Triton's interpreter on the CPU."""

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
print("same bytes")
"""


def test_interpreted_append_leaves_the_bytes_that_torch_leaves() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bytes"
