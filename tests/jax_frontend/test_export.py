"""A program that was traced here and runs in another process, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import BATCH, BUCKET, SIZES, SPEC, jax_rows, new_cache

import jax_frontend

HERE = Path(__file__).parent


def step(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
    """One layer that is known, then all layers in a scan."""
    query, kv = jax_frontend.paged_attention(query, key, value, kv, plan, 2)

    def block(carry: Any, layer: jax.Array) -> Any:
        query, kv = carry
        kv = jax_frontend.append(key, value, kv, plan, layer)
        out, lse = jax_frontend.attend(query, kv, plan, layer, return_lse=True)
        return (out, kv), lse

    (out, kv), lse = jax.lax.scan(block, (query, kv), jax.numpy.arange(3))
    return out, lse, kv


def in_another_process(folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Run exported_program.py on the files in `folder`."""
    files = [str(folder / name) for name in ("program", "arrays.npz", "results.npz")]
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])
    return subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "exported_program.py"), *files, kind],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def export(folder: Path, kind: str) -> dict[str, Any]:
    """Write program and arrays to `folder`, and return the results of running it here."""
    cache = new_cache(seed=1)
    arrays = dict(zip(("query", "key", "value"), jax_rows(2, BUCKET.num_tokens), strict=True))
    np.savez(folder / "arrays.npz", **arrays, k=cache.k.numpy(), v=cache.v.numpy())
    kv: Any = jax_frontend.init_cache(SPEC, **SIZES)
    if kind == "arrays":
        pools = (jax.numpy.array(pool.numpy()) for pool in (cache.k, cache.v))
        kv = jax_frontend.CacheArrays(*pools, kv.spec)
    else:
        kv = jax_frontend.cache_handle(cache, name="exported")
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH, bucket=BUCKET)
    program = jax.jit(step, donate_argnums=3)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_frontend.FFI_TARGETS]
    exported = jax.export.export(program, disabled_checks=checks)(*arrays.values(), kv, plan)
    (folder / "program").write_bytes(exported.serialize())
    out, lse, kv = jax.block_until_ready(program(*arrays.values(), kv, plan))
    k, v = (kv.k, kv.v) if kind == "arrays" else (cache.k, cache.v)
    if kind == "handle":
        jax_frontend.release_cache("exported")
    return {name: np.asarray(x) for name, x in (("out", out), ("lse", lse), ("k", k), ("v", v))}


@pytest.mark.parametrize("kind", ["handle", "arrays"])
def test_a_fresh_process_computes_the_same_bits(tmp_path: Path, kind: str) -> None:
    want = export(tmp_path, kind)
    process = in_another_process(tmp_path, kind)
    assert process.returncode == 0, process.stderr
    got = np.load(tmp_path / "results.npz")
    assert want["out"].any()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_a_process_without_the_cache_says_so(tmp_path: Path) -> None:
    export(tmp_path, "handle")
    process = in_another_process(tmp_path, "lost")
    assert process.returncode == 1
    assert "this process has no cache named 'exported' (it has: none)" in process.stderr
    assert "jax_frontend.cache_handle(cache, name='exported')" in process.stderr
    assert not (tmp_path / "results.npz").exists()


def test_the_targets_to_be_named_are_those_that_a_program_calls() -> None:
    kv = jax_frontend.init_cache(SPEC, **SIZES)
    plan = jax_frontend.plan(SPEC, kv.spec, BATCH)
    text = jax.jit(step).lower(*jax_rows(0), kv, plan).as_text()
    called = {word.strip('"@(') for word in text.split() if word.startswith("@isthmus")}
    called = {name.split("(")[0] for name in called}
    assert called
    assert called <= set(jax_frontend.FFI_TARGETS)
