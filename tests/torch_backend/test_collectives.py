"""The collectives of a process group, under one name and with one error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_ranks import run_ranks

from interop.errors import ArgumentError, PlanError, ShapeError
from torch_backend import agreement, collectives


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def given_by(rank: int, size: int) -> torch.Tensor:
    return 100 * rank + torch.arange(float(size * 6)).view(size, 2, 3)


def test_over_processes(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, "collect", 3)
    for name, members in (("all", [0, 1, 2]), ("pair", [0, 2])):
        size = len(members)
        every = [given_by(rank, size) for rank in members]
        for place, rank in enumerate(members):
            each = found[rank][name]
            assert each["place"] == (place, size)
            assert torch.equal(each["all_gather"], torch.stack([rows[0].T for rows in every]))
            assert torch.equal(each["reduce_scatter"], sum(rows[place].T for rows in every))
            exchanged = torch.stack([rows[place].T for rows in every])
            assert torch.equal(each["all_to_all"], exchanged)
            assert torch.equal(each["of 16 bits"], exchanged.bfloat16())
            assert each["of none"] == [(size, size, 0, 3), (0, 3), (size, 0, 3)]
    # A process that is in no group of that kind gets no group from torch, but a number.
    assert found[1]["outside"].startswith("ArgumentError: group: got a int, want a process group")


def test_a_group_of_one(alone: Any) -> None:
    rows = torch.arange(6.0).view(1, 2, 3)
    assert collectives.check_group(alone) == (0, 1)
    assert torch.equal(collectives.all_gather(rows, alone), rows[None])
    assert torch.equal(collectives.reduce_scatter(rows, alone), rows[0])
    assert torch.equal(collectives.all_to_all(rows, alone), rows)
    with pytest.raises(ShapeError, match=r"rows: got \[2, 3\], want \[1, \.\.\.\]"):
        collectives.reduce_scatter(rows[0], alone)


@pytest.mark.parametrize(
    ("made_with", "cpu", "cuda"),
    [
        ("gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", None),
        (None, "gloo", None),  # the default of a machine without a GPU
    ],
)
def test_backend_of_a_group(made_with: str | None, cpu: str, cuda: str | None) -> None:
    if made_with is None and torch.cuda.is_available():
        pytest.skip("the default is another where there is a GPU")
    dist.init_process_group(made_with, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert collectives.backend_of(world, "cpu") == cpu
        assert collectives.backend_of(world, "cuda") == cuda
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "kind", "backend"),
    [
        ("cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
    ],
)
def test_backend_of_groups_of_gpus(
    config: str, kind: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert collectives.backend_of(None, kind) == backend


@pytest.mark.parametrize(
    ("config", "device", "place"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu"),  # no GPU is waited for
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", None, "cuda"),
        # What planning refuses keeps no rank away from the others.
        ("cuda:nccl", "cpu", "cuda"),
        ("cuda:nccl", "cuda:2", "cuda"),
        ("cuda:nccl", "no device", "cuda"),
        ("cuda:nccl", [], "cuda"),
    ],
)
def test_where_ranks_compare_what_they_have(
    config: str, device: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert agreement._meeting_place(None, device) == torch.device(place)


def test_without_a_group() -> None:
    with pytest.raises(ArgumentError, match=r"not initialised.*init_process_group"):
        collectives.check_group(None)


def test_an_error_is_raised_after_the_others_have_heard(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []

    def all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
        heard.append(rows)
        return torch.stack([rows, rows])

    monkeypatch.setattr(agreement, "all_gather", all_gather)

    def refuse() -> None:
        raise KeyError("anything")

    with pytest.raises(KeyError, match="anything"):
        agreement.agreed(refuse, {"spec": b"one"}, alone, None)
    assert agreement.agreed(lambda: 3, {"spec": b"one"}, alone, None) == 3
    assert [int(rows[0]) for rows in heard] == [1, 0]

    monkeypatch.setattr(agreement, "all_gather", lambda rows, group: torch.stack([rows, heard[0]]))
    with pytest.raises(PlanError, match="plan: got arguments that rank 1 refused"):
        agreement.agreed(lambda: 3, {"spec": b"one"}, alone, None)
    monkeypatch.setattr(agreement, "all_gather", lambda rows, group: torch.stack([rows, heard[1]]))
    with pytest.raises(PlanError, match="spec: got different ones on rank 0 and rank 1"):
        agreement.agreed(lambda: 3, {"spec": b"another"}, alone, None)
