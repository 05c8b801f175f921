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

__all__ = [
    "HEADS_FIRST",
    "IN_TURN",
    "NUM_POOLS",
    "SIDE_BY_SIDE",
    "ArrangedArrays",
    "pool_views",
    "warm_writes",
]

IN_TURN, SIDE_BY_SIDE, HEADS_FIRST = "in_turn", "side_by_side", "heads_first"
# Arrays of each arrangement; that without a name is `CacheArrays`'.
NUM_POOLS = {"": 2, IN_TURN: 1, SIDE_BY_SIDE: 1, HEADS_FIRST: 2}


@final
@dataclass(frozen=True)
class ArrangedArrays:
    """A cache in arrays of another library's arrangement; it lives within one traced function.

    Parameters
    ----------
    pools
        ``"in_turn"``: one array ``[num_layers * num_pages, page_size, *rows, width]``, where rows
        may be several dimensions. Row ``2 * h`` has the key of head ``h`` and row ``2 * h + 1`` its
        value. Further rows, and columns beyond a head's, are padding.
        ``"side_by_side"``: the same, but row ``h`` has the key of head ``h`` and then its value;
        with a spec of layout ``"HND"`` it is ``[.., num_kv_heads, page_size, width]``.
        ``"heads_first"``: keys and values, ``[num_kv_heads, num_layers * num_pages, page_size,
        width]`` each.
    arrangement
        Which of these.
    spec
        Shape of the cache as a plan is made for it, in layout ``"NHD"`` where not said otherwise.
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
    """View the pools of a call as keys and values, in the layout of `spec`.

    Parameters
    ----------
    arrangement, spec
        As `ArrangedArrays` has them; without an arrangement, the buffers are returned as they are.
    buffers
        The pools, as many as `NUM_POOLS` says.
    """
    heads, width, end = spec.num_kv_heads, spec.head_dim, spec.head_dim + spec.head_dim_v
    if arrangement == IN_TURN:
        rows = torch_view(buffers[0]).flatten(2, -2)[:, :, : 2 * heads]
        return rows[:, :, 0::2, :width], rows[:, :, 1::2, : spec.head_dim_v]
    if arrangement == SIDE_BY_SIDE:
        rows = torch_view(buffers[0])
        if spec.layout == "NHD":
            rows = rows.flatten(2, -2)[:, :, :heads]
        return rows[..., :width], rows[..., width:end]
    key, value = buffers
    if arrangement == HEADS_FIRST:
        return torch_view(key).permute(1, 2, 0, 3), torch_view(value).permute(1, 2, 0, 3)
    return key, value


@cache
def warm_writes(spec: CacheSpec, arrangement: str, page: tuple[int, ...], device: int) -> None:
    """Load on a GPU what writes to one array whose pages have the shape `page`."""
    where = torch.device("cuda", device)
    pool = torch.empty((1, *page), dtype=getattr(torch, spec.storage_dtype), device=where)
    warm(spec, where, [pool_views(arrangement, [pool], spec)])
