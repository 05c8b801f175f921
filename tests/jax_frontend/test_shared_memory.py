"""Two processes, two frameworks, one cache: PyTorch writes in one, JAX reads in the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small import BATCH, SIZES, SPEC, rows, torch_rows

import torch_backend
from interop import AttentionSpec
from torch_backend import PagedKVCache

# Attends in a jitted step to what the parent wrote, then writes the same rows to another layer.
CHILD = """
import sys
import jax
import numpy as np
from small import BATCH, SPEC
import jax_frontend
from interop import AttentionSpec
from torch_backend import PagedKVCache

path, folder, dtype = sys.argv[1:]
spec = AttentionSpec(4, 2, 8, dtype="float32") if dtype.startswith("float8") else SPEC
cache = PagedKVCache.attach(path)
kv = jax_frontend.cache_handle(cache)
plan = jax_frontend.plan(spec, cache.spec, BATCH)
query, key, value = (np.load(f"{folder}/{name}.npy") for name in ("query", "key", "value"))


@jax.jit
def step(query, key, value, kv, plan):
    out, lse, kv = jax_frontend.attend(query, kv, plan, 1, return_lse=True, return_cache=True)
    return out, lse, jax_frontend.append(key, value, kv, plan, 2)


out, lse, kv = jax.block_until_ready(step(query, key, value, kv, plan))
np.save(f"{folder}/out.npy", out)
np.save(f"{folder}/lse.npy", lse)
"""


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_jax_reads_what_another_process_writes_with_torch(dtype: str, tmp_path: Path) -> None:
    quantised = dtype.startswith("float8")
    spec = AttentionSpec(4, 2, 8, dtype="float32") if quantised else SPEC
    scales = torch.arange(1.0, 13.0).view(3, 2, 2) / 8 if quantised else None
    path = Path("/dev/shm") / f"isthmus-test-{os.getpid()}"
    cache = PagedKVCache.create_shared(path, spec, scales=scales, **(SIZES | {"dtype": dtype}))
    try:
        plan = torch_backend.plan(spec, cache.spec, BATCH)
        query, key, value = torch_rows(seed=4)
        for layer in range(2):
            torch_backend.append(key, value, cache, plan, layer)
        for name, array in zip(("query", "key", "value"), rows(seed=4), strict=True):
            np.save(tmp_path / f"{name}.npy", array)
        tests = Path(__file__).parents[1]
        found = os.pathsep.join([str(tests.parent), str(tests)])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, str(path), str(tmp_path), dtype],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": found},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    finally:
        path.unlink()
    out, lse = torch_backend.attend(query, cache, plan, 1, return_lse=True)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), out.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "lse.npy"), lse.numpy())
    # And this process has the child's writes.
    own = PagedKVCache(spec, scales=scales, **(SIZES | {"dtype": dtype}))
    torch_backend.append(key, value, own, plan, 2)
    for theirs, ours in zip(cache.pools(2), own.pools(2), strict=True):
        assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))
