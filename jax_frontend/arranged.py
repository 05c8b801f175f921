"""Pools that JAX owns as other libraries arrange them, read and written where they lie.

`CacheArrays` has one pool for keys and one for values, in a layout that a `CacheSpec` can name.
Here are arrays in which keys and values lie otherwise. A call hands them on as they are, and its
handler looks at them through views: no arrangement costs a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

import jax
import torch

from interop.spec import CacheSpec
from torch_backend.kernels import torch_view
from torch_backend.writing import warm

__all__ = ["HEADS_FIRST", "INTERLEAVED", "NUM_POOLS", "ArrangedArrays", "pool_views", "warm_writes"]

INTERLEAVED, HEADS_FIRST = "interleaved", "heads_first"
# Arrays of each arrangement; that without a name is `CacheArrays`'.
NUM_POOLS = {"": 2, INTERLEAVED: 1, HEADS_FIRST: 2}


@final
@dataclass(frozen=True)
class ArrangedArrays:
    """A cache in arrays of another library's arrangement; it lives within one traced function.

    Parameters
    ----------
    pools
        ``"interleaved"``: one array ``[num_layers * num_pages, page_size, rows, width]``. Row
        ``2 * h`` has the key of head ``h`` and row ``2 * h + 1`` its value, from the first column
        on; further rows and columns are padding.
        ``"heads_first"``: keys and values, ``[num_kv_heads, num_layers * num_pages, page_size,
        width]``.
    arrangement
        Which of these.
    spec
        Shape of the cache, in layout ``"NHD"``, as a plan is made for it.
    scales
        As `CacheArrays` has them.
    """

    pools: tuple[jax.Array, ...]
    arrangement: str
    spec: CacheSpec
    scales: jax.Array | None = None

    def with_pools(self, pools: Sequence[jax.Array]) -> ArrangedArrays:
        """Return the cache with the pools that a call made."""
        return replace(self, pools=tuple(pools))


def pool_views(arrangement: str, buffers: Sequence[Any], spec: CacheSpec) -> tuple[Any, Any]:
    """View the pools of a call as keys and values ``[pages, page_size, num_kv_heads, width]``.

    Parameters
    ----------
    arrangement, spec
        As `ArrangedArrays` has them; without an arrangement, the buffers are returned as they are.
    buffers
        The pools, as many as `NUM_POOLS` says.
    """
    if arrangement == INTERLEAVED:
        both, rows = torch_view(buffers[0]), 2 * spec.num_kv_heads
        return both[:, :, 0:rows:2, : spec.head_dim], both[:, :, 1:rows:2, : spec.head_dim_v]
    key, value = buffers
    if arrangement == HEADS_FIRST:
        return torch_view(key).permute(1, 2, 0, 3), torch_view(value).permute(1, 2, 0, 3)
    return key, value


@cache
def warm_writes(spec: CacheSpec, page: tuple[int, int, int], device: int) -> None:
    """Load on a GPU what writes to an interleaved array whose pages are ``[page_size, ...]``."""
    where = torch.device("cuda", device)
    pool = torch.empty((1, *page), dtype=getattr(torch, spec.storage_dtype), device=where)
    warm(spec, where, [pool_views(INTERLEAVED, [pool], spec)])
