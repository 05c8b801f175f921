"""Requests outside of a cache: in host memory, and in files of the format ``safetensors``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from interop.errors import ArgumentError
from interop.spec import CacheSpec

__all__ = ["SavedPages", "read_file", "write_file"]

VERSION = "1"
VERSION_KEY = "isthmus_saved_pages"
CACHE_KEY = "cache"


class SavedPages:
    """Keys and values of one request in host memory; `save_pages` makes them.

    From a GPU they arrive while the host goes on. Reading `key`, `value` or `scales` waits for
    them, and so does pickling. What `restore_pages` does with them waits by itself.

    Parameters
    ----------
    key, value
        ``[num_layers, kv_len, num_kv_heads, width]`` in the element type of the pools, which for
        NVFP4 is bytes: those of a row's data, then those of its block scales.
    scales
        ``[num_layers, 2, num_kv_heads]`` float32 of a quantised cache, else `None`.
    spec
        Shape of the cache that they come from.
    arrived
        Event after the last copy to the host; `None` where there is nothing to wait for.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        scales: Tensor | None,
        spec: CacheSpec,
        arrived: torch.cuda.Event | None = None,
    ) -> None:
        self._key, self._value, self._scales = key, value, scales
        self._arrived = arrived
        self.spec = spec

    @property
    def kv_len(self) -> int:
        """Tokens of the request."""
        return int(self._key.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of key and value."""
        return self._key.nbytes + self._value.nbytes

    @property
    def ready(self) -> bool:
        """Whether all rows have arrived."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> None:
        """Block until all rows have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()

    @property
    def key(self) -> Tensor:
        """``[num_layers, kv_len, num_kv_heads, width]`` on the host."""
        self.wait()
        return self._key

    @property
    def value(self) -> Tensor:
        """``[num_layers, kv_len, num_kv_heads, width]`` on the host."""
        self.wait()
        return self._value

    @property
    def scales(self) -> Tensor | None:
        """``[num_layers, 2, num_kv_heads]`` float32 on the host, of a quantised cache."""
        if self._scales is not None:
            self.wait()
        return self._scales

    def rows_on(self, device: torch.device, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_len, num_kv_heads, width]`` of one layer on a device.

        On a GPU they are there for work that is queued on its current stream from now on.
        """
        if device.type == "cpu":
            return self.key[layer], self.value[layer]
        if self._arrived is not None:
            torch.cuda.current_stream(device).wait_event(self._arrived)
        key, value = (
            rows[layer].to(device, non_blocking=True) for rows in (self._key, self._value)
        )
        return key, value

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, since torch's pickles of 8-bit floats do not load.
        sides = self.key.view(torch.uint8), self.value.view(torch.uint8)
        return _from_bytes, (*sides, self.scales, self.spec)

    def __repr__(self) -> str:
        return f"SavedPages(kv_len={self.kv_len}, spec={self.spec})"


def _from_bytes(key: Tensor, value: Tensor, scales: Tensor | None, spec: CacheSpec) -> SavedPages:
    dtype = getattr(torch, spec.storage_dtype)
    return SavedPages(key.view(dtype), value.view(dtype), scales, spec)


def write_file(path: str | os.PathLike[str], saved: SavedPages) -> None:
    """Write a saved request to a file, whole or not at all.

    The file holds ``key``, ``value`` and, of a quantised cache, ``scales``, as `SavedPages` has
    them; and in its metadata the version of this form and, as JSON, the shape of the cache.

    Parameters
    ----------
    path
        File to make, or to replace.
    saved
        From `transfer.save_pages`; waited for.

    Raises
    ------
    ArgumentError
        If `saved` is something else.
    OSError
        As the file system has it; `path` is then as it was.
    """
    from safetensors.torch import save_file

    if not isinstance(saved, SavedPages):
        raise ArgumentError("saved", given=type(saved).__name__, wanted="SavedPages")
    tensors = {"key": saved.key, "value": saved.value}
    if saved.scales is not None:
        tensors["scales"] = saved.scales
    metadata = {VERSION_KEY: VERSION, CACHE_KEY: json.dumps(asdict(saved.spec))}
    target = Path(path)
    # Under another name until it is whole: a process that stops halfway leaves no half of a file.
    part = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        save_file(tensors, part, metadata)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> SavedPages:
    """Read what `write_file` wrote.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    ArgumentError
        For a file that was cut short, or is of another kind or version.
    OSError
        As the file system has it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _unreadable(path, f"no whole safetensors file ({error})") from error
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise _unreadable(path, "a safetensors file of something else")
    if version != VERSION:
        raise _unreadable(path, f"version {version} of a saved request")
    try:
        spec = CacheSpec(**json.loads(metadata[CACHE_KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"no shape of a cache in its metadata ({error})") from error
    _check_tensors(path, tensors, spec)
    return SavedPages(tensors["key"], tensors["value"], tensors.get("scales"), spec)


def _check_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], spec: CacheSpec
) -> None:
    """Raise unless a file has the tensors that a request of this cache has."""
    rows = tensors["key"].shape[1] if "key" in tensors and tensors["key"].ndim == 4 else 0
    storage = getattr(torch, spec.storage_dtype)
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (storage, (spec.num_layers, rows, spec.num_kv_heads, shape[3]))
        for name, shape in (("key", spec.key_shape), ("value", spec.value_shape))
    }
    if spec.quantized:
        wanted["scales"] = torch.float32, spec.scales_shape
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != wanted:
        raise _unreadable(path, f"{_listed(found)} where its cache has {_listed(wanted)}")


def _listed(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(shape)}"
        for name, (dtype, shape) in sorted(tensors.items())
    )


def _unreadable(path: str | os.PathLike[str], what: str) -> ArgumentError:
    return ArgumentError(
        "path",
        given=f"{os.fspath(path)}, {what}",
        wanted=f"a saved request of version {VERSION}",
        remedy="Save the request again with write_file, or compute it anew.",
    )
