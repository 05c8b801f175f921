"""Whether all processes of a mesh were given the same, found out before any of them computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interop.batch import RaggedBatch
from interop.errors import PlanError

__all__ = ["agreed", "batch_bytes"]

Made = TypeVar("Made")
Words = npt.NDArray[np.uint32]

WORDS = 2  # of each argument's digest


def batch_bytes(batch: object) -> bytes:
    """All that a batch says, as bytes; of another kind of argument its name."""
    if not isinstance(batch, RaggedBatch):
        return type(batch).__name__.encode()
    table = b"" if batch.page_table is None else batch.page_table.tobytes()
    return b"|".join((batch.query_lens.tobytes(), batch.kv_lens.tobytes(), table))


def agreed(make: Callable[[], Made], given: dict[str, bytes], mesh: Mesh) -> Made:
    """Return ``make()`` where all processes were given the same; raise in all of them where not.

    Every process of the mesh calls this, and none leaves it before the others have come.

    Parameters
    ----------
    make
        What to do with the arguments; an exception of it is raised here, and makes this raise in
        the other processes.
    given
        Arguments by name, the same names in the same order in every process.
    mesh
        Its devices' processes are meant.

    Raises
    ------
    PlanError
        Naming the first argument that differs, or the process that raised.
    """
    made, error = None, None
    try:
        made = make()
    except Exception as refused:  # whatever it is, the others have to hear of it
        error = refused
    digests = (hashlib.blake2b(each, digest_size=4 * WORDS).digest() for each in given.values())
    words = np.frombuffer(b"".join(digests), np.uint32)
    rows = _of_all_devices(np.append(np.uint32(error is not None), words), mesh)
    if error is not None:
        raise error
    assert made is not None
    processes = [device.process_index for device in mesh.devices.flat]
    if rows[:, 0].any():
        raise PlanError(
            "plan",
            given=f"arguments that process {processes[rows[:, 0].argmax()]} refused",
            wanted="arguments that every process can plan with",
            remedy="That process's own error says what it is.",
        )
    differ = (rows[:, 1:] != rows[0, 1:]).reshape(len(rows), len(given), WORDS).any(2)
    for name, column in zip(given, differ.T, strict=True):
        if column.any():
            raise PlanError(
                name,
                given=f"different ones in process {processes[0]} and process "
                f"{processes[column.argmax()]}",
                wanted="the same in every process of the mesh",
            )
    return made


def _of_all_devices(row: Words, mesh: Mesh) -> Words:
    """Rows that the processes of a mesh gave, one for each of its devices."""
    line, gather = _line(mesh)
    rows = jax.make_array_from_callback(
        (mesh.size, row.size), NamedSharding(line, PartitionSpec("device")), lambda _: row[None]
    )
    return np.asarray(gather(rows))


@lru_cache
def _line(mesh: Mesh) -> tuple[Mesh, Any]:
    """The devices of a mesh one after another, and a program that gives all of them an array."""
    line = Mesh(mesh.devices.reshape(-1), ("device",))
    return line, jax.jit(lambda rows: rows, out_shardings=NamedSharding(line, PartitionSpec()))
