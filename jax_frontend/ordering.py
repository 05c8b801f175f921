"""PyTorch steps and JAX steps on one torch-owned cache, in order and without stopping the device.

PyTorch and XLA put their work on streams of their own. Between two steps of JAX the token of a
`CacheHandle` keeps the order, between two of PyTorch its stream does; these two functions carry the
order from one to the other, as an event that the other stream waits for.
"""

from __future__ import annotations

import dataclasses

import jax
import torch

from interop.dlpack import to_jax
from interop.errors import FrameworkError
from torch_backend import PagedKVCache

from .cache import CacheHandle, find_cache

__all__ = ["jax_after_torch", "torch_after_jax"]


def _shards(cache: object) -> tuple[PagedKVCache, ...]:
    """Shards of the cache whose handle `cache` is, outside of any program."""
    if isinstance(cache, CacheHandle) and not isinstance(cache.token, jax.core.Tracer):
        return find_cache(cache.name)
    raise FrameworkError(
        "cache",
        given="a traced handle" if isinstance(cache, CacheHandle) else type(cache).__name__,
        wanted="the handle of a torch-owned cache",
        remedy="Order the work of both frameworks between jitted steps, with what cache_handle and "
        "the steps return.",
    )


def torch_after_jax(cache: CacheHandle) -> None:
    """Let PyTorch work on the cache that is queued from now on wait for JAX steps queued before.

    Parameters
    ----------
    cache
        The handle that the last JAX step returned.

    On a GPU the current stream of each of the cache's devices waits and the host does not. The CPU
    has no streams, so there the host waits.

    Raises
    ------
    FrameworkError, CacheNotFoundError
        If `cache` is no concrete handle, or that of no cache.
    """
    for shard, part in zip(_shards(cache), cache.token.addressable_shards, strict=True):
        if shard.device.type == "cpu":
            part.data.block_until_ready()
        else:
            # The import makes torch's current stream wait for the buffer; that is all it is for.
            with torch.cuda.device(shard.device):
                torch.utils.dlpack.from_dlpack(part.data)


def jax_after_torch(cache: CacheHandle) -> CacheHandle:
    """Return a handle whose JAX steps wait for PyTorch work on the cache that was queued before.

    Parameters
    ----------
    cache
        Any handle of the cache.

    On a GPU XLA waits for the current stream of each of the cache's devices and the host does not;
    on the CPU PyTorch has finished when its calls return.

    Raises
    ------
    FrameworkError, CacheNotFoundError
        As `torch_after_jax` does.
    """
    shards = _shards(cache)
    if shards[0].device.type == "cpu":
        return cache
    tokens = [
        to_jax(torch.full((1,), number, dtype=torch.int32, device=shard.device))
        for number, shard in enumerate(shards)
    ]
    token = jax.make_array_from_single_device_arrays(
        cache.token.shape, cache.token.sharding, tokens
    )
    return dataclasses.replace(cache, token=token)
