"""Run by test_export.py in a process of its own: load a program and run it on a cache.

Arguments: the program's file, an npz file of its arrays, the file to write the results to, and
``handle``, ``arrays`` or ``lost`` (a handle whose cache this process does not make).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import torch
from small import BATCH, BUCKET, SIZES, SPEC, new_cache

import jax_frontend


def main(program: str, arrays: str, results: str, kind: str) -> None:
    """Load, run, write."""
    exported = jax.export.deserialize(bytearray(Path(program).read_bytes()))
    given = np.load(arrays)
    query, key, value = (jax.numpy.asarray(given[name]) for name in ("query", "key", "value"))
    kv: jax_frontend.CacheHandle | jax_frontend.CacheArrays
    if kind == "arrays":
        kv = jax_frontend.init_cache(SPEC, **SIZES)
        kv = jax_frontend.CacheArrays(
            jax.numpy.asarray(given["k"]), jax.numpy.asarray(given["v"]), kv.spec
        )
    else:
        cache = new_cache()
        cache.k.copy_(torch.from_numpy(given["k"]))
        cache.v.copy_(torch.from_numpy(given["v"]))
        kv = jax_frontend.cache_handle(cache, name="exported")
        if kind == "lost":
            jax_frontend.release_cache("exported")
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH, bucket=BUCKET)
    out, lse, kv = jax.block_until_ready(exported.call(query, key, value, kv, plan))
    k, v = (kv.k, kv.v) if isinstance(kv, jax_frontend.CacheArrays) else (cache.k, cache.v)
    np.savez(results, out=out, lse=lse, k=np.asarray(k), v=np.asarray(v))


if __name__ == "__main__":
    main(*sys.argv[1:])
