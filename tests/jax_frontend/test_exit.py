"""A process that ends while steps are in flight ends well."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np
import jax_frontend
import torch_backend
from interop import AttentionSpec, RaggedBatch

spec = AttentionSpec(8, 2, 64)
cache = torch_backend.PagedKVCache(spec, num_layers=1, num_pages=256, dtype="float32")
batch = RaggedBatch([1] * 8, [400] * 8, np.arange(200).reshape(8, 25))
plan = jax_frontend.plan(spec, cache.spec, batch)
kv = jax_frontend.cache_handle(cache)
step = jax.jit(lambda q, k, kv, plan: jax_frontend.paged_attention(q, k, k, kv, plan, 0))
for _ in range(20):
    out, kv = step(jnp.ones((8, 8, 64)), jnp.ones((8, 2, 64)), kv, plan)
"""


def test_steps_in_flight_do_not_break_the_end_of_a_process() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr.decode()


FAILING = (
    SCRIPT
    + """
big = jnp.ones((800, 800))


@jax.jit
def later(q, k, kv, plan, big):
    for _ in range(4):
        big = big @ big / 800
    return jax_frontend.paged_attention(q + big[0, 0], k, k, kv, plan, 0)


arguments = jnp.ones((8, 8, 64)), jnp.ones((8, 2, 64))
for _ in range(2):
    jax.block_until_ready(out)
    out, kv = later(*arguments, kv, plan, big)
jax_frontend.release_cache(kv.name)
"""
)


def test_a_step_that_fails_does_not_either() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", FAILING], env=environment, capture_output=True, timeout=300
    )
    assert done.returncode == 0
    assert b"_finish_steps" not in done.stderr
