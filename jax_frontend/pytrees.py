"""What JAX needs to know of our values: their leaves, and how to write the rest to a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jax

from interop.plan import AttentionPlan, PlanStatic
from interop.spec import CacheSpec

from .cache import CacheArrays, CacheHandle

__all__: list[str] = []


def _register(kind: type, leaves: list[str], static: list[str], write: Any, read: Any) -> None:
    jax.tree_util.register_dataclass(kind, data_fields=leaves, meta_fields=static)
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"isthmus.{kind.__name__}",
        serialize_auxdata=write,
        deserialize_auxdata=read,
    )


def _write_spec(spec: CacheSpec) -> bytes:
    return json.dumps(asdict(spec)).encode()


def _read_spec(data: bytes) -> CacheSpec:
    return CacheSpec(**json.loads(data))


_register(
    AttentionPlan,
    ["metadata"],
    ["static"],
    lambda aux: aux[0].to_json().encode(),
    lambda data: (PlanStatic.from_json(bytes(data).decode()),),
)
_register(
    CacheHandle,
    ["token"],
    ["name", "spec"],
    lambda aux: json.dumps([aux[0], asdict(aux[1])]).encode(),
    lambda data: (json.loads(data)[0], CacheSpec(**json.loads(data)[1])),
)
_register(
    CacheArrays,
    ["k", "v"],
    ["spec"],
    lambda aux: _write_spec(aux[0]),
    lambda data: (_read_spec(data),),
)
