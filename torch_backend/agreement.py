"""Whether all ranks of a group were given the same, found out before any of them computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch

from interop.errors import PlanError

from .collectives import Group, all_gather, backend_of

__all__ = ["agreed"]

Made = TypeVar("Made")


def agreed(
    make: Callable[[], Made],
    given: dict[str, bytes],
    group: Group,
    device: torch.device | str | None,
) -> Made:
    """Return ``make()`` where all ranks were given the same; raise on all of them where not.

    Every rank of the group calls this, and none leaves it before the others have come.

    Parameters
    ----------
    make
        What to do with the arguments; an exception of it is raised here, and makes this raise on
        the other ranks.
    given
        Arguments by name, the same names in the same order on every rank.
    group
        The ranks.
    device
        Of this rank, for a group that moves nothing but memory of GPUs.

    Raises
    ------
    PlanError
        Naming the first argument that differs, or the rank that raised.
    CollectiveError
        If another rank is gone.
    """
    made, error = None, None
    try:
        made = make()
    except Exception as refused:  # whatever it is, the others have to hear of it
        error = refused
    words = [int(error is not None), *map(_digest, given.values())]
    mine = torch.tensor(words, dtype=torch.int64, device=_meeting_place(group, device))
    everyone = all_gather(mine, group).cpu()
    if error is not None:
        raise error
    assert made is not None
    refused_by = torch.nonzero(everyone[:, 0]).flatten().tolist()
    if refused_by:
        raise PlanError(
            "plan",
            given=f"arguments that rank {refused_by[0]} refused",
            wanted="arguments that every rank can plan with",
            remedy="That rank's own error says what it is.",
        )
    for number, name in enumerate(given, start=1):
        column = everyone[:, number]
        if bool((column != column[0]).any()):
            other = int(torch.nonzero(column != column[0]).flatten()[0])
            raise PlanError(
                name,
                given=f"different ones on rank 0 and rank {other}",
                wanted="the same on every rank of the group",
            )
    return made


def _digest(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)


def _meeting_place(group: Group, device: torch.device | str | None) -> torch.device:
    """Where ranks compare what they have: in host memory if the group can, which waits for no GPU.

    Whatever else is wrong with `device`, this rank has to come, so that the others need not wait.
    """
    if backend_of(group, "cpu") is not None:
        return torch.device("cpu")
    try:
        where = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        return torch.device("cuda")
    count = torch.cuda.device_count()
    there = where.type == "cuda" and (where.index is None or where.index < count)
    return where if there else torch.device("cuda")
