"""One request's keys and values out of a cache, and into another.

A saved request is rows of tokens, layer by layer, and knows nothing of pages: it fits a cache of
another page size, layout or device. What it cannot do is change its numbers: heads, widths, element
type and scales must be those of the cache that takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from interop.errors import (
    ArgumentError,
    DTypeError,
    FrameworkError,
    LengthError,
    PageError,
    ShapeError,
)
from interop.host import IntArray, count_of, host_ints
from interop.spec import NVFP4_DTYPES, CacheSpec

from .cache import PagedKVCache
from .quantising import nvfp4_regions
from .saved import SavedPages
from .writing import token_major

__all__ = ["copy_request", "restore_pages", "save_pages"]


class _Tokens(NamedTuple):
    """Where the tokens of a request lie in each layer of a cache."""

    cache: PagedKVCache
    pages: IntArray  # those that hold tokens
    kv_len: int

    def places(self) -> tuple[Tensor, Tensor]:
        """Page and offset in it of each token, int64 ``[kv_len]`` on the cache's device."""
        device, page_size = self.cache.device, self.cache.spec.page_size
        pages = torch.from_numpy(self.pages.astype(np.int64))
        if device.type == "cuda":
            # From pinned memory, since other copies wait for the device.
            pages = pages.pin_memory().to(device, non_blocking=True)
        token = torch.arange(self.kv_len, device=device)
        return pages[token // page_size], token % page_size


@overload
def save_pages(cache: PagedKVCache, pages: object, kv_len: int) -> SavedPages: ...
@overload
def save_pages(
    cache: PagedKVCache, pages: object, kv_len: Sequence[int] | IntArray
) -> list[SavedPages]: ...
def save_pages(
    cache: PagedKVCache, pages: object, kv_len: int | Sequence[int] | IntArray
) -> SavedPages | list[SavedPages]:
    """Copy the keys and values of chosen requests to host memory, all layers of them.

    From a GPU the copies go to pinned memory and are queued on the current stream; the host does
    not wait. Work queued on that stream later may reuse the pages at once.

    Parameters
    ----------
    cache
        Any `PagedKVCache`. Where JAX writes it, call `jax_frontend.torch_after_jax` first.
    pages
        The request's page ids in order, ``[n]`` integers on the host; those past its last token are
        not read. For several requests ``[requests, n]`` or a list of such.
    kv_len
        Its tokens; for several requests a list.

    Returns
    -------
    SavedPages or list of SavedPages
        A list where `kv_len` is one.

    Raises
    ------
    FrameworkError, LengthError, PageError, ShapeError
        For what is no cache, too few pages, and pages outside of the cache.
    """
    if np.ndim(kv_len) == 0:
        return _save(_tokens_of(cache, "cache", pages, "pages", kv_len))
    # All are checked before the first is copied.
    requests = [
        _tokens_of(cache, "cache", ids, f"pages[{i}]", length)
        for i, (ids, length) in enumerate(_paired(pages, kv_len))
    ]
    return [_save(tokens) for tokens in requests]


def restore_pages(
    saved: SavedPages | Sequence[SavedPages], cache: PagedKVCache, pages: object
) -> None:
    """Write saved requests into pages of a cache, and no other byte.

    On a GPU the copies are queued on the current stream. Where the cache is quantised its scales
    are compared on the host, which waits for the device.

    Parameters
    ----------
    saved
        From `save_pages` or `saved.read_file`; one request or several.
    cache
        One of the same layers, heads, widths, element type and scales; its page size, layout and
        device may differ. Where JAX reads it, call `jax_frontend.jax_after_torch` afterwards.
    pages
        Page ids ``[n]`` on the host that the request owns from now on; for several requests
        ``[requests, n]`` or a list of such. Pages past its last token are not written.

    Raises
    ------
    ArgumentError, DTypeError, FrameworkError, LengthError, PageError, ShapeError
        For a cache that would read other numbers from the same bytes, and for pages that are too
        few, outside of the cache or used twice. Nothing is written then.
    """
    one = isinstance(saved, SavedPages)
    requests = [(pages, saved)] if one else _paired(pages, saved)
    targets = []
    for i, (ids, request) in enumerate(requests):
        if not isinstance(request, SavedPages):
            raise ArgumentError("saved", given=type(request).__name__, wanted="SavedPages")
        name = "pages" if one else f"pages[{i}]"
        tokens = _tokens_of(cache, "cache", ids, name, request.kv_len)
        _check_fits(request.spec, request.scales, cache)
        targets.append((request, tokens))
    if targets:
        _check_distinct("pages", np.concatenate([tokens.pages for _, tokens in targets]))
    for request, tokens in targets:
        places = tokens.places()
        for layer in range(cache.spec.num_layers):
            _write(cache, layer, places, request.rows_on(cache.device, layer))


def copy_request(
    source: PagedKVCache,
    source_pages: object,
    target: PagedKVCache,
    target_pages: object,
    kv_len: int,
) -> None:
    """Copy one request from a cache to another, or to other pages of the same one.

    Parameters
    ----------
    source, source_pages
        As `cache` and `pages` of `save_pages`.
    target, target_pages
        As those of `restore_pages`.
    kv_len
        Tokens of the request.

    Raises
    ------
    ArgumentError, DTypeError, FrameworkError, LengthError, PageError, ShapeError
        As for `restore_pages`.
    """
    read = _tokens_of(source, "source", source_pages, "source_pages", kv_len)
    write = _tokens_of(target, "target", target_pages, "target_pages", kv_len)
    _check_fits(source.spec, source.scales, target, "target")
    there, here = read.places(), write.places()
    # Only a copy to a GPU may be unfinished when this returns: on the host nobody would wait.
    later = target.device.type == "cuda"
    for layer in range(source.spec.num_layers):
        key, value = (
            rows.to(target.device, non_blocking=later) for rows in _read(source, layer, there)
        )
        _write(target, layer, here, (key, value))


def _save(tokens: _Tokens) -> SavedPages:
    cache, spec = tokens.cache, tokens.cache.spec
    gpu = cache.device.type == "cuda"
    dtype = getattr(torch, spec.storage_dtype)
    key, value = (
        torch.empty(
            (spec.num_layers, tokens.kv_len, spec.num_kv_heads, shape[3]),
            dtype=dtype,
            pin_memory=gpu,
        )
        for shape in (spec.key_shape, spec.value_shape)
    )
    places = tokens.places()
    for layer in range(spec.num_layers):
        for rows, found in zip((key, value), _read(cache, layer, places), strict=True):
            rows[layer].copy_(found, non_blocking=True)
    scales = None
    if cache.scales is not None:
        scales = torch.empty(spec.scales_shape, dtype=torch.float32, pin_memory=gpu)
        scales.copy_(cache.scales, non_blocking=True)
    arrived = None
    if gpu:
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(cache.device))
    return SavedPages(key, value, scales, spec, arrived)


def _parts(pool: Tensor, spec: CacheSpec) -> list[Tensor]:
    """View a layer's pool as ``[pages, page_size, heads, width]``, NVFP4 as data and scales."""
    parts = nvfp4_regions(pool) if spec.dtype in NVFP4_DTYPES else (pool,)
    return [token_major(_plain(part), spec.layout) for part in parts]


def _plain(tensor: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since not all of torch's operations know them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _read(cache: PagedKVCache, layer: int, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Gather keys and values ``[kv_len, heads, width]`` of one layer."""
    dtype = getattr(torch, cache.spec.storage_dtype)
    found = []
    for pool in cache.pools(layer):
        rows = [part[places] for part in _parts(pool, cache.spec)]
        found.append((rows[0] if len(rows) == 1 else torch.cat(rows, -1)).view(dtype))
    return found[0], found[1]


def _write(
    cache: PagedKVCache,
    layer: int,
    places: tuple[Tensor, Tensor],
    sides: tuple[Tensor, Tensor],
) -> None:
    """Scatter keys and values ``[kv_len, heads, width]`` into one layer."""
    for pool, rows in zip(cache.pools(layer), sides, strict=True):
        parts = _parts(pool, cache.spec)
        widths = [part.shape[3] for part in parts]
        for part, columns in zip(parts, _plain(rows).split(widths, -1), strict=True):
            part.index_put_(places, columns)


def _paired(pages: object, requests: object) -> list[tuple[Any, Any]]:
    """Pair each request with its pages."""
    try:
        ids, listed = list(pages), list(requests)  # type: ignore[call-overload]
    except TypeError as error:
        raise ShapeError(
            "pages",
            given=f"{type(pages).__name__} for {type(requests).__name__}",
            wanted="a list of pages for each of a list of requests",
        ) from error
    if len(ids) != len(listed):
        raise LengthError(
            "pages", given=f"those of {len(ids)} requests", wanted=f"those of {len(listed)}"
        )
    return list(zip(ids, listed, strict=True))


def _tokens_of(cache: object, cache_name: str, pages: object, name: str, kv_len: object) -> _Tokens:
    """Check a request's pages against its length and the cache."""
    if not isinstance(cache, PagedKVCache):
        raise FrameworkError(
            cache_name,
            given=type(cache).__name__,
            wanted="a torch_backend.PagedKVCache",
            remedy="Of a JAX handle, pass the cache that it was made from.",
        )
    spec, length = cache.spec, count_of("kv_len", kv_len)
    ids = host_ints(name, pages, 1)
    need = -(-length // spec.page_size)
    if len(ids) < need:
        raise PageError(
            name,
            given=f"{len(ids)} pages of {spec.page_size} tokens",
            wanted=f"at least {need}, for {length} tokens",
        )
    used = ids[:need]
    outside = np.flatnonzero((used < 0) | (used >= spec.num_pages))
    if outside.size:
        raise PageError(
            f"{name}[{outside[0]}]",
            given=int(used[outside[0]]),
            wanted=f"a page from 0 to {spec.num_pages - 1}",
        )
    _check_distinct(name, used)
    return _Tokens(cache, used, length)


def _check_distinct(name: str, pages: IntArray) -> None:
    found, counts = np.unique(pages, return_counts=True)
    if found.size < pages.size:
        raise PageError(
            name,
            given=f"page {found[counts.argmax()]} {counts.max()} times",
            wanted="each page once",
        )


def _check_fits(
    spec: CacheSpec, scales: Tensor | None, cache: PagedKVCache, name: str = "cache"
) -> None:
    """Raise unless the same bytes mean the same numbers in `cache`."""
    for field in ("num_layers", "num_kv_heads", "head_dim", "head_dim_v"):
        if getattr(cache.spec, field) != getattr(spec, field):
            raise ShapeError(
                f"{name}.spec.{field}",
                given=getattr(cache.spec, field),
                wanted=f"{getattr(spec, field)}, as the request has",
            )
    # The two kinds of NVFP4 differ in how they choose their block scales, not in how they are read.
    read_alike = {spec.dtype, cache.spec.dtype} <= set(NVFP4_DTYPES)
    if cache.spec.dtype != spec.dtype and not read_alike:
        raise DTypeError(
            f"{name}.spec.dtype",
            given=cache.spec.dtype,
            wanted=f"{spec.dtype}, as the request has",
            remedy="Nothing is converted: take a cache of that dtype, or compute the request anew.",
        )
    if scales is None or cache.scales is None:
        return
    wanted, given = scales.cpu(), cache.scales.cpu()
    if not torch.equal(wanted, given):
        layer, side, head = (int(i) for i in torch.argwhere(wanted != given)[0])
        raise ArgumentError(
            f"{name}.scales[{layer}, {side}, {head}]",
            given=f"{given[layer, side, head]:g}",
            wanted=f"{wanted[layer, side, head]:g}, with which the request was stored",
            remedy="Make the cache with the scales of the one that the request comes from.",
        )
