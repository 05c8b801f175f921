"""Whether zero-copy, donation and recorded graphs work here: ``python -m jax_frontend.doctor``.

Prints what ``python -m torch_backend.doctor`` prints, and then tries each promise of this front end
on each kind of device with a cache of a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from interop.batch import Bucket, RaggedBatch
from interop.dlpack import to_jax, to_torch
from interop.ffi import python_calls
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec
from torch_backend import PagedKVCache
from torch_backend.doctor import report as core_report

from .attention import append, paged_attention
from .cache import CacheArrays, CacheHandle, cache_handle, release_cache
from .ordering import jax_after_torch, torch_after_jax
from .planning import plan

__all__ = ["main", "report"]

# Of a width that models have, so that the kernels which a model needs serve here, too.
SPEC = AttentionSpec(8, 2, 128)
REQUESTS, LAYERS, PAGES, PAGE_SIZE = 4, 2, 8, 16
# XLA records a step in its first runs and replays it from then on.
STEPS_BEFORE_STEADY, STEADY_STEPS = 6, 4


def report() -> str:
    """Return the core's report and one line for each promise and kind of device."""
    lines = [core_report(), ""]
    for platform in dict.fromkeys(device.platform for device in jax.devices()):
        device = jax.devices(platform)[0]
        lines.append(f"JAX on {platform} ({device.device_kind}):")
        lines += [f"  {name}: {_try(check, device)}" for name, check in CHECKS.items()]
    return "\n".join(lines)


def _try(check: Callable[[jax.Device], str], device: jax.Device) -> str:
    try:
        with jax.default_device(device):
            return check(device)
    except Exception as error:  # a doctor reports what is broken, whatever it is
        return f"FAILS: {type(error).__name__}: {error}"


def _torch_device(device: jax.Device) -> torch.device:
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id)


def _dtype(device: jax.Device) -> str:
    return "float32" if device.platform == "cpu" else "bfloat16"


def _cache(device: jax.Device) -> PagedKVCache:
    return PagedKVCache(
        SPEC,
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        dtype=_dtype(device),
        device=_torch_device(device),
    )


def _plan(device: jax.Device, cache: PagedKVCache, step: int) -> AttentionPlan[jax.Array]:
    pages = np.arange(REQUESTS)[:, None]
    batch = RaggedBatch([1] * REQUESTS, [step + 1] * REQUESTS, pages)
    return plan(SPEC, cache.spec, batch, bucket=Bucket(REQUESTS, REQUESTS, PAGES, 1), device=device)


def _rows(device: jax.Device, heads: int) -> jax.Array:
    return jnp.ones((REQUESTS, heads, SPEC.head_dim), _dtype(device))


def _zero_copy(device: jax.Device) -> str:
    tensor = torch.zeros(64, device=_torch_device(device))
    array = to_jax(tensor)
    assert to_torch(array).data_ptr() == tensor.data_ptr()
    return "works: a tensor and the array made of it share one address"


def _shared_cache(device: jax.Device) -> str:
    cache = _cache(device)
    handle = cache_handle(cache)
    try:
        write = jax.jit(append, static_argnums=4)
        rows = _rows(device, SPEC.num_kv_heads)
        handle = write(rows, rows, jax_after_torch(handle), _plan(device, cache, 0), 0)
        torch_after_jax(handle)
        written = float(cache.k[:REQUESTS, 0].sum())
    finally:
        release_cache(handle.name)
    wanted = REQUESTS * SPEC.num_kv_heads * SPEC.head_dim
    assert written == wanted, f"PyTorch sees a sum of {written}, not {wanted}"
    return "works: PyTorch sees what JAX wrote, in order"


def _donation(device: jax.Device) -> str:
    cache = _cache(device)
    pools = [jax.device_put(jnp.zeros(p.shape, _dtype(device)), device) for p in (cache.k, cache.v)]
    arrays = CacheArrays(pools[0], pools[1], cache.spec)
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    del pools
    write = jax.jit(append, static_argnums=4, donate_argnums=2)
    rows = _rows(device, SPEC.num_kv_heads)
    arrays = write(rows, rows, arrays, _plan(device, cache, 0), 0)
    after = [pool.unsafe_buffer_pointer() for pool in (arrays.k, arrays.v)]
    assert after == addresses, "the pools moved: XLA copied them"
    return "works: donated pools are updated where they lie"


def _recorded(device: jax.Device) -> str:
    if device.platform == "cpu":
        return "not on a CPU: every step runs its calls"
    cache = _cache(device)
    handle = cache_handle(cache)
    before = 0

    @jax.jit
    def step(
        query: jax.Array, rows: jax.Array, cache: CacheHandle, plan: AttentionPlan[jax.Array]
    ) -> tuple[jax.Array, CacheHandle]:
        for layer in range(LAYERS):
            query, cache = paged_attention(query, rows * 2, rows * 3, cache, plan, layer)
        return query, cache

    try:
        query, rows = _rows(device, SPEC.num_qo_heads), _rows(device, SPEC.num_kv_heads)
        for number in range(STEPS_BEFORE_STEADY + STEADY_STEPS):
            if number == STEPS_BEFORE_STEADY:
                before = python_calls.total()
            out, handle = step(query, rows, handle, _plan(device, cache, number))
            out.block_until_ready()
    finally:
        release_cache(handle.name)
    if (calls := python_calls.total() - before) > 0:
        return f"NO: Python ran {calls / STEADY_STEPS:g} times in a steady step, not 0"
    return "work: a steady step with new metadata runs no Python"


CHECKS = {
    "zero-copy views": _zero_copy,
    "torch-owned cache": _shared_cache,
    "donated cache": _donation,
    "recorded graphs": _recorded,
}


def main() -> None:
    """Print the report."""
    print(report())


if __name__ == "__main__":
    main()
