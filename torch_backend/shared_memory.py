"""A cache on the CPU in memory that several processes see.

The memory is a file, best on a file system in memory such as ``/dev/shm``, that each process maps.
It begins with a header of one block that says what follows: the pool of keys, the pool of values
and, of a quantised cache, the scales, each from a multiple of 4096 bytes on.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from interop.errors import ArgumentError, DeviceError, PlanError
from interop.spec import CacheSpec

__all__ = ["SharedPools", "attach_shared", "create_shared"]

# Pages of memory, so that every pool has the alignment that XLA shares memory by.
BLOCK = 4096
MAGIC = b"isthmus shared cache 1\n"


class SharedPools(NamedTuple):
    """Pools in shared memory.

    Parameters
    ----------
    key, value
        The flat pools, contiguous; shapes in `interop.CacheSpec`.
    scales
        ``[num_layers, 2, num_kv_heads]`` float32 of a quantised cache, else `None`. Shared, too.
    spec
        Shape of the cache.
    """

    key: Tensor
    value: Tensor
    scales: Tensor | None
    spec: CacheSpec


def create_shared(
    path: str | os.PathLike[str], spec: CacheSpec, scales: Tensor | None = None
) -> SharedPools:
    """Make pools of zeros in a new file, for other processes to attach.

    The memory is taken at once, so that no later write finds the file system full. It lives until
    the file is deleted and no process maps it; deleting the file is left to the caller, and takes
    nothing from the processes that have it.

    Parameters
    ----------
    path
        A file that is not there yet, such as ``/dev/shm/cache``.
    spec
        Shape of the cache, on the CPU, with all layers in one pool.
    scales
        ``[num_layers, 2, num_kv_heads]`` of a quantised cache; all 1 when left out.

    Raises
    ------
    ArgumentError
        If there is such a file, or not enough space for it; there is none afterwards.
    DeviceError
        If `spec` is of another device.
    OSError
        As the file system has it otherwise.
    """
    if spec.device != "cpu":
        raise DeviceError("spec.device", given=spec.device, wanted="cpu")
    if spec.layers_apart:
        raise ArgumentError("spec.layers_apart", given=True, wanted="all layers in one pool")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ArgumentError(
            "path",
            given=f"{os.fspath(path)}, which is there already",
            wanted="a new file",
            remedy="Attach it, or delete it if no process uses it.",
        ) from error
    try:
        size = _places(spec)[-1]
        _reserve(path, file, size)
        pools = _pools(mmap.mmap(file, size), spec)
        if pools.scales is not None:
            pools.scales.copy_(torch.ones(()) if scales is None else scales)
        header = json.dumps(asdict(spec)).encode()
        os.pwrite(file, header, len(MAGIC))
        # Last, since it says that all the rest is there.
        os.pwrite(file, MAGIC, 0)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return pools


def _reserve(path: str | os.PathLike[str], file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        found = os.fstatvfs(file)
        raise ArgumentError(
            "path",
            given=f"{os.fspath(path)}, where {found.f_bavail * found.f_frsize} bytes are free",
            wanted=f"{size} bytes",
            remedy="Use fewer pages, or give the file system more (of a container: --shm-size).",
        ) from error


def attach_shared(path: str | os.PathLike[str], expected: CacheSpec | None = None) -> SharedPools:
    """Map pools that another process made.

    Nothing orders what the processes write and read: they have to tell one another, by a pipe, a
    queue or a lock, when a write is finished.

    Parameters
    ----------
    path
        The file.
    expected
        Shape that the cache must have; any when left out.

    Raises
    ------
    ArgumentError
        For a file that is none of these, or that is not finished.
    PlanError
        If the cache has another shape than expected.
    OSError
        As the file system has it.
    """
    file = os.open(path, os.O_RDWR)
    try:
        header = os.pread(file, BLOCK, 0)
        spec = _spec_of(path, header)
        if expected is not None and spec != expected:
            raise PlanError("path", given=f"{os.fspath(path)}, of {spec}", wanted=str(expected))
        size = _places(spec)[-1]
        if os.fstat(file).st_size != size:
            raise _unreadable(path, f"{os.fstat(file).st_size} bytes where {spec} takes {size}")
        memory = mmap.mmap(file, size)
    finally:
        os.close(file)
    return _pools(memory, spec)


def _spec_of(path: str | os.PathLike[str], header: bytes) -> CacheSpec:
    if not header.startswith(MAGIC):
        raise _unreadable(path, "a file of something else, or one that is still being made")
    try:
        return CacheSpec(**json.loads(header[len(MAGIC) :].rstrip(b"\0")))
    except (TypeError, ValueError) as error:
        raise _unreadable(path, f"no shape of a cache in its header ({error})") from error


def _unreadable(path: str | os.PathLike[str], what: str) -> ArgumentError:
    return ArgumentError(
        "path", given=f"{os.fspath(path)}, {what}", wanted="a file that create_shared has made"
    )


def _places(spec: CacheSpec) -> tuple[int, int, int, int]:
    """Where keys, values and scales begin, and where the file ends, in bytes."""
    places = [BLOCK]
    item = getattr(torch, spec.storage_dtype).itemsize
    scales = 4 * torch.Size(spec.scales_shape).numel() if spec.quantized else 0
    for size in (
        item * torch.Size(spec.key_shape).numel(),
        item * torch.Size(spec.value_shape).numel(),
        scales,
    ):
        places.append(places[-1] + -(-size // BLOCK) * BLOCK)
    return places[0], places[1], places[2], places[3]


def _pools(memory: mmap.mmap, spec: CacheSpec) -> SharedPools:
    """View mapped memory; it stays mapped as long as any of the views lives."""
    at = _places(spec)

    def view(start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)

    storage = getattr(torch, spec.storage_dtype)
    # Tensors made in inference mode could be written in that mode only.
    with torch.inference_mode(False):
        key = view(at[0], storage, spec.key_shape)
        value = view(at[1], storage, spec.value_shape)
        scales = view(at[2], torch.float32, spec.scales_shape) if spec.quantized else None
    return SharedPools(key, value, scales, spec)
