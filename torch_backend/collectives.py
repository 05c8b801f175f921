"""The collectives of `torch.distributed` that decode context parallelism needs.

Each is differently named in different versions of torch, and fails with an error that says nothing
of ranks; here they have one name and one error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interop.errors import ArgumentError, CollectiveError, ShapeError

__all__ = ["all_gather", "all_to_all", "backend_of", "check_group", "reduce_scatter"]

Group = Any  # torch.distributed.ProcessGroup, which builds without distributed lack


def check_group(group: Group) -> tuple[int, int]:
    """Rank of this process in a group, and the group's size.

    Raises
    ------
    ArgumentError
        If there is no such group, or this process is not in it.
    """
    remedy = "Call torch.distributed.init_process_group, and pass dist.group.WORLD or a new_group."
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group", given="none: torch.distributed is not initialised", wanted="a process group",
            remedy=remedy,
        )  # fmt: skip
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            "group", given=f"a {type(group).__name__}", wanted="a process group that this process "
            "is in", remedy=remedy,
        )  # fmt: skip
    return dist.get_rank(group), dist.get_world_size(group)


def backend_of(group: Group, kind: str) -> str | None:
    """Name of the backend by which a group moves tensors of a kind of device, `None` if of none.

    A group may have one for each kind, and a group made without a name has the default ones, so
    the name that it was made with does not say.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs).get(kind)


def _named(new: str, old: str) -> Callable[..., Any]:
    """Return a collective under the newer of its two names that this torch has."""
    return getattr(dist, new, None) or getattr(dist, old)


def _run(name: str, collective: Callable[..., Any], *args: Tensor, group: Group) -> None:
    try:
        collective(*args, group=group)
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise CollectiveError(
            f"{name} over {size} ranks failed on rank {rank}: another rank has ended, raised an "
            f"error before it, or does not answer. Look at the other ranks' output; this group is "
            f"of no more use. ({error})"
        ) from error


def all_gather(rows: Tensor, group: Group) -> Tensor:
    """Rows of all ranks, ``[ranks, *rows.shape]``."""
    size = dist.get_world_size(group)
    out = rows.new_empty((size, *rows.shape))
    collective = _named("all_gather_single", "all_gather_into_tensor")
    _run("all_gather", collective, out.view(-1), rows.contiguous().view(-1), group=group)
    return out


def reduce_scatter(rows: Tensor, group: Group) -> Tensor:
    """Sum over ranks of ``rows[rank]``, for this rank; `rows` is ``[ranks, ...]``."""
    size = dist.get_world_size(group)
    if rows.shape[0] != size:
        raise ShapeError("rows", given=list(rows.shape), wanted=f"[{size}, ...]")
    out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    collective = _named("reduce_scatter_single", "reduce_scatter_tensor")
    # A strided input is summed wrongly by some backends.
    _run("reduce_scatter", collective, out.view(-1), rows.contiguous().view(-1), group=group)
    return out


def all_to_all(rows: Tensor, group: Group) -> Tensor:
    """``out[s]`` is what rank ``s`` has for this rank in ``rows[rank]``; both ``[ranks, ...]``."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _run(
        "all_to_all", dist.all_to_all_single, out.view(-1), rows.contiguous().view(-1), group=group
    )
    return out
