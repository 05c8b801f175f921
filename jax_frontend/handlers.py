"""What runs when XLA reaches one of our custom calls: the buffers go to the core as they are."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from interop.attributes import Call
from interop.ffi import TARGETS, bind, xla_stream
from torch_backend import PagedKVCache
from torch_backend.cache import WHOLE_POOL, layer_pools
from torch_backend.device_planning import shape_of
from torch_backend.dispatch import device_facts, run
from torch_backend.kernels import FAMILIES, Operands, torch_view
from torch_backend.writing import write_rows

from .arranged import NUM_POOLS, pool_views
from .cache import find_cache

__all__: list[str] = []


def _own_cache(name: str, token: Any) -> PagedKVCache:
    """The shard of a torch-owned cache that belongs to the device of this call."""
    shards = find_cache(name)
    if len(shards) == 1:
        return shards[0]
    if token.device.type == "cpu":
        # Virtual CPU devices share one memory, so the token says which shard this one has.
        return shards[int(torch_view(token)[0])]
    return next(shard for shard in shards if shard.device.index == token.device.index)


def _pass_on(token: Any, result: Any) -> None:
    # A token's value matters on the CPU alone (see `_own_cache`).
    if token.device.type == "cpu":
        torch_view(result).copy_(torch_view(token))


def _attend(call: Call, buffers: Sequence[Any]) -> None:
    """Run a launch; `buffers` are what `jax_frontend.attention` hands on, in its order."""
    launch = call.launch
    with xla_stream(buffers[0]):
        rest = iter(buffers)
        query = next(rest)
        sinks = next(rest) if launch.spec.sinks else None
        token = next(rest) if call.cache else None
        scales: tuple[Any, Any] = (None, None)
        scaled = launch.source == "pages" and launch.cache is not None and launch.cache.quantized
        if token is not None:
            own = _own_cache(call.cache, token)
            key, value = own.pools(call.layer)
            if scaled:
                scales = own.scales, next(rest)
        else:
            pools = [next(rest) for _ in range(NUM_POOLS[call.arrangement])]
            if launch.source == "pages":
                assert launch.cache is not None
                key, value = pool_views(call.arrangement, pools, launch.cache)
                if call.layer != WHOLE_POOL:
                    views = torch_view(key), torch_view(value)
                    key, value = layer_pools(*views, launch.cache, call.layer)
            else:
                key, value = pools
            if scaled:
                scales = next(rest), next(rest)
        metadata = {name: next(rest) for name in FAMILIES[launch.family].fields(launch)}
        if call.continues:
            # Operands at the addresses of the results, for XLA to keep what they hold.
            next(rest)
            if call.lse:
                next(rest)
        out = next(rest)
        lse = next(rest) if call.lse else None
        scratch = next(rest) if launch.scratch_bytes else None
        run(launch, Operands(query, key, value, metadata, out, lse, scratch, *scales, sinks))
        if (result := next(rest, None)) is not None:
            _pass_on(token, result)


def _append(call: Call, buffers: Sequence[Any]) -> None:
    """Operands: key, value, slots, token or pools, of a quantised cache its scales and the layer.

    The scales are left out where torch owns the cache. Results: the token, or the pools, which
    are aliased to the operands.
    """
    cache = call.launch.cache
    assert cache is not None
    with xla_stream(buffers[0]):
        key, value, slots = (torch_view(buffer) for buffer in buffers[:3])
        scales: tuple[Any, Any] = (None, None)
        if call.cache:
            token, result = buffers[3], buffers[-1]
            own = _own_cache(call.cache, token)
            pools = own.pools(call.layer)
            if cache.quantized:
                scales = own.scales, torch_view(buffers[4])
            _pass_on(token, result)
        else:
            count = NUM_POOLS[call.arrangement]
            views = pool_views(call.arrangement, buffers[-count:], cache)
            pools = layer_pools(torch_view(views[0]), torch_view(views[1]), cache, call.layer)
            if cache.quantized:
                scales = torch_view(buffers[3 + count]), torch_view(buffers[4 + count])
        write_rows(key, value, *pools, cache, slots, *scales)


def _plan(call: Call, buffers: Sequence[Any]) -> None:
    """Operands: lengths, offsets, page table. Results: metadata, status, scratch; on a GPU only."""
    from torch_backend.triton_planning import write_metadata

    with xla_stream(buffers[0]):
        tensors = [torch_view(buffer) for buffer in buffers]
        write_metadata(shape_of(call.launch, device_facts(tensors[0].device)), *tensors)


def _finish_steps() -> None:
    """Wait for steps in flight: a handler that runs while Python shuts down ends the process."""
    for array in jax.live_arrays():
        # A step that failed is done, too, and its error must not keep others from being waited for.
        with contextlib.suppress(Exception):
            if not array.is_deleted():
                array.block_until_ready()


atexit.register(_finish_steps)

RUNNERS = {"isthmus_append": _append, "isthmus_plan": _plan}

for _target in TARGETS:
    bind(_target, RUNNERS.get(_target, _attend))
