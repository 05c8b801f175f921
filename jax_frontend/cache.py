"""The two ways in which JAX holds a paged cache.

`CacheHandle`: torch owns the memory. JAX carries a name, which is static, and a token of 4 bytes.
`append` returns a new token and `attend` consumes it, so XLA orders a read after the writes before
it; XLA never sees the pool and cannot copy it.

A write must also come after the reads before it. From step to step that holds because a program
starts only when the program that made its token has ended. Inside one program, the slots that a
plan writes are no slots that an earlier plan of it reads, unless pages change hands in between; who
does that asks `attend` for the token it hands on (``return_cache=True``), as `paged_attention`
does always.

`CacheArrays`: JAX owns the pools. A step donates them and gets them back, updated in place.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
import torch

from interop.errors import (
    ArgumentError,
    CacheNotFoundError,
    DeviceError,
    FrameworkError,
    PlanError,
)
from interop.spec import AttentionSpec, CacheSpec
from torch_backend import PagedKVCache
from torch_backend.cache import checked_scales
from torch_backend.writing import warm

from .arranged import ArrangedArrays

__all__ = [
    "CacheArrays",
    "CacheHandle",
    "cache_handle",
    "find_cache",
    "init_cache",
    "release_cache",
]


@final
@dataclass(frozen=True)
class CacheHandle:
    """A torch-owned cache as JAX sees it; make one with `cache_handle`.

    Parameters
    ----------
    token
        ``[shards]`` int32, the order token. Its value is the number of the shard, by which a CPU
        device that holds one of several shards finds its own.
    name, spec
        Name in this process's list of caches, and shape of one shard.
    """

    token: jax.Array
    name: str
    spec: CacheSpec
    _in_program: bool = field(default=False, init=False, repr=False, compare=False)


@final
@dataclass(frozen=True)
class CacheArrays:
    """A JAX-owned cache; make one with `init_cache`.

    Parameters
    ----------
    k, v
        The flat pools; shapes in `interop.CacheSpec`. Donate them to every step that appends.
    spec
        Shape of the cache (of one shard, under ``shard_map``).
    scales
        ``[num_layers, 2, num_kv_heads]`` float32, scales of keys and values of a quantised cache.
    """

    k: jax.Array
    v: jax.Array
    spec: CacheSpec
    scales: jax.Array | None = None
    arrangement: ClassVar[str] = ""

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The arrays that calls take, in order."""
        return self.k, self.v

    def with_pools(self, pools: Sequence[jax.Array]) -> CacheArrays:
        """Return the cache with the pools that a call made."""
        return replace(self, k=pools[0], v=pools[1])


def owned_token(cache: CacheHandle) -> jax.Array:
    """Token in memory of the program's own, for a recorded call to take.

    What crosses a program's edge moves from step to step, and a recorded call whose operands move
    has to be recorded again. A token is 0 or more, so the maximum changes nothing on the CPU, where
    its value counts, and XLA, which does not know that, makes a result of it.
    """
    if cache._in_program or cache.spec.device == "cpu":
        return cache.token
    return jnp.maximum(cache.token, 0)


def owned_scales(cache: CacheHandle | CacheArrays | ArrangedArrays) -> tuple[jax.Array, ...]:
    """Scales that are operands, in memory of the program's own as `owned_token` has the token.

    Those of a torch-owned cache are found with its pools. The others are no smaller than the
    smallest normal number, so the maximum changes none of them.
    """
    if isinstance(cache, CacheHandle) or cache.scales is None:
        return ()
    if cache.spec.device == "cpu":
        return (cache.scales,)
    return (jnp.maximum(cache.scales, np.finfo(np.float32).tiny),)


def handle_in_program(cache: CacheHandle, token: jax.Array) -> CacheHandle:
    """Return the handle with the token that a call of this program made."""
    handle = CacheHandle(token, cache.name, cache.spec)
    object.__setattr__(handle, "_in_program", True)
    return handle


def flatten_handle(handle: CacheHandle) -> tuple[tuple[jax.Array], tuple[str, CacheSpec]]:
    """Leaves and static part, as JAX asks for at a program's edges (and at a loop's).

    There a traced token goes through an operation, too. One that a call made has its reason in
    `owned_token`. One that merely passes through would be copied by XLA, and CUDA does not let a
    recorded copy change from torch's memory to XLA's, which is where the next step's token lies.
    """
    traced = isinstance(handle.token, jax.core.Tracer)
    token = jnp.maximum(handle.token, 0) if traced else handle.token
    return (token,), (handle.name, handle.spec)


def unflatten_handle(static: tuple[str, CacheSpec], leaves: Sequence[jax.Array]) -> CacheHandle:
    """Undo `flatten_handle`."""
    return CacheHandle(leaves[0], *static)


CACHE_NAME_BYTES = 64
CACHE_NAME = re.compile(r"[A-Za-z0-9 ._-]+")

_caches: dict[str, tuple[PagedKVCache, ...]] = {}
# Names that caches on a GPU had. XLA replays recorded calls without asking for a name again, so a
# program that was compiled for one of them would go on in the memory of the cache that is gone.
_retired: set[str] = set()
_naming = threading.Lock()


def cache_handle(
    cache: PagedKVCache | Sequence[PagedKVCache],
    *,
    name: str | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> CacheHandle:
    """Let compiled programs use a torch-owned cache.

    The process keeps the cache alive until `release_cache`. Calling this again for a cache returns
    a handle of the same name with a fresh token.

    Parameters
    ----------
    cache
        The cache, or one shard of it per device, all of one shape, in the order of the mesh axis.
    name
        Name by which compiled programs find the cache; programs that are exported, or cached on
        disk, need the same name where they run. ``"cache0"``, ``"cache1"``, ... when left out.
    sharding
        For several shards: how the token lies over the devices, one element each. Where these are
        of several processes, each process lists the shards of its own devices.

    Raises
    ------
    FrameworkError, PlanError
        If these are no torch-owned caches, or not of one shape.
    ArgumentError
        If another cache has the name.
    """
    listed = cache if isinstance(cache, (list, tuple)) else [cache]
    shards = tuple(shard for shard in listed if isinstance(shard, PagedKVCache))
    if not shards or len(shards) < len(listed):
        raise FrameworkError(
            "cache",
            given=f"{type(cache).__name__} of {[type(shard).__name__ for shard in listed]}",
            wanted="a torch_backend.PagedKVCache, or a list of its shards",
            remedy="For pools that JAX owns use init_cache.",
        )
    for shard in shards:
        if shard.spec != shards[0].spec:
            raise PlanError("cache", given=str(shard.spec), wanted=f"shards of {shards[0].spec}")
    if name is not None:
        _check_name(name)
    if sharding is None:
        sharding = _where(shards[0].device)
    # Committed to its device as the tokens that come out of a step are, or else the first step of a
    # program would be compiled apart from the others. Before the name is given, since this can
    # fail, and a name keeps its cache alive.
    token = _token(len(shards), sharding)
    return CacheHandle(token, _registered(shards, name), shards[0].spec)


def _check_sharding(sharding: object) -> None:
    if not isinstance(sharding, jax.sharding.Sharding):
        raise DeviceError(
            "sharding",
            given=repr(sharding),
            wanted="a jax.sharding.Sharding",
            remedy="For one device pass jax.sharding.SingleDeviceSharding(device).",
        )


def _token(count: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """Order token of a process's shards, whose elements number them within the process."""
    _check_sharding(sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(np.arange(count, dtype=np.int32), sharding)
    total = (len(sharding.device_set),)
    places = sharding.addressable_devices_indices_map(total).values()
    starts = sorted((index[0].start if index else None) or 0 for index in places)
    if len(starts) != count:
        raise PlanError(
            "cache",
            given=f"{count} shards in a process with {len(starts)} of the sharding's devices",
            wanted="a shard for each of them",
        )

    def number(index: tuple[slice, ...] | None) -> Any:
        start = (index[0].start if index else None) or 0
        return np.array([starts.index(start)], np.int32)

    return jax.make_array_from_callback(total, sharding, number)


def _registered(shards: tuple[PagedKVCache, ...], name: str | None) -> str:
    """Name of a cache from now on: `name`, or else the one that it has, or else a free one."""
    with _naming:
        if name is None:
            known = (key for key, value in _caches.items() if value == shards)
            numbered = (f"cache{i}" for i in itertools.count())
            free = (it for it in numbered if it not in _caches and it not in _retired)
            name = next(known, None) or next(free)
        if name in _retired and shards[0].device.type != "cpu":
            raise ArgumentError(
                "name",
                given=f"{name!r}, which a cache on a GPU had that was released",
                wanted="a name that no cache of this process had",
                remedy="Programs that were compiled for that cache may have recorded its memory.",
            )
        if _caches.setdefault(name, shards) != shards:
            raise ArgumentError(
                "name",
                given=f"{name!r}, which another cache has",
                wanted="a name of its own for each cache",
                remedy="Call release_cache first if the other is no longer in use.",
            )
    return name


def default_device() -> jax.Device:
    """Return the device that ``jax.default_device`` names, else the first."""
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen


def _check_name(name: object) -> None:
    wanted = f"1 to {CACHE_NAME_BYTES} bytes of letters, digits, spaces, '.', '_' and '-'"
    if not isinstance(name, str):
        raise ArgumentError("name", given=f"a {type(name).__name__}", wanted=wanted)
    # Others would be escaped where a call's attributes are written, and might not fit.
    if not CACHE_NAME.fullmatch(name) or len(name) > CACHE_NAME_BYTES:
        raise ArgumentError("name", given=repr(name), wanted=wanted)


def _where(device: torch.device) -> jax.sharding.Sharding:
    if device.type == "cpu":
        return jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.sharding.SingleDeviceSharding(jax.devices("gpu")[device.index])


def release_cache(name: str) -> None:
    """Forget a cache; programs that name it raise `CacheNotFoundError` until another has the name.

    On the CPU `cache_handle` gives a name that it chose to the next cache without one, so let go of
    handles. The name of a cache on a GPU is not given again, since XLA may have recorded programs
    together with the cache's memory; do not call these any more.

    Wait for steps in flight first: they would lose the memory that they work on.

    Raises
    ------
    CacheNotFoundError
        If no cache has the name.
    ArgumentError
        If `name` is no text.
    """
    if not isinstance(name, str):
        raise ArgumentError("name", given=f"a {type(name).__name__}", wanted="a handle's name")
    with _naming:
        shards = _caches.pop(name, None)
        if shards is None:
            raise _unknown(name)
        if shards[0].device.type != "cpu":
            _retired.add(name)


def find_cache(name: str) -> tuple[PagedKVCache, ...]:
    """Return the shards of the cache of that name in this process."""
    shards = _caches.get(name)
    if shards is None:
        raise _unknown(name)
    return shards


def _unknown(name: str) -> CacheNotFoundError:
    known = ", ".join(map(repr, _caches)) or "none"
    return CacheNotFoundError(
        f"this process has no cache named {name!r} (it has: {known}). Call "
        f"jax_frontend.cache_handle(cache, name={name!r}) before the program runs."
    )


def init_cache(
    spec: AttentionSpec,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int = 16,
    dtype: object = "bfloat16",
    layout: str = "NHD",
    sharding: jax.sharding.Sharding | None = None,
    scales: object | None = None,
) -> CacheArrays:
    """Make a cache of zeros that JAX owns.

    Parameters
    ----------
    spec, num_layers, num_pages, page_size, dtype, layout, scales
        As for `torch_backend.PagedKVCache`.
    sharding
        Where the pools lie; JAX's default device when left out.

    Raises
    ------
    ArgumentError, DTypeError
        For sizes out of range, and another element type.
    DeviceError
        If `sharding` is none.
    """
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(default_device())
    _check_sharding(sharding)
    device: jax.Device = next(iter(sharding.device_set))
    shape = CacheSpec.of(
        spec,
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        layout=layout,
        device="cpu" if device.platform == "cpu" else "cuda",
    )
    shape, table = checked_scales(shape, scales)
    if shape.device == "cuda":
        warm(shape, torch.device("cuda", device.local_hardware_id))

    def zeros(size: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(size, shape.storage_dtype, device=sharding)

    # A few numbers, which every device of a mesh gets whole.
    factors = None if table is None else jax.device_put(table.numpy(), _everywhere(sharding))
    return CacheArrays(zeros(shape.key_shape), zeros(shape.value_shape), shape, factors)


def _everywhere(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding
