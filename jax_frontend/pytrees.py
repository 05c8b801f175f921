"""What JAX needs to know of our values: their leaves, and how to write the rest to a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jax

from interop.dcp import DCPPlan
from interop.layer_plans import LayerPlans
from interop.plan import AttentionPlan, PlanStatic
from interop.sharding import TokenShards
from interop.spec import AttentionSpec, CacheSpec

from .cache import CacheArrays, CacheHandle, flatten_handle, unflatten_handle

__all__: list[str] = []


def _serialize(kind: type, write: Any, read: Any) -> None:
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


jax.tree_util.register_dataclass(AttentionPlan, data_fields=["metadata"], meta_fields=["static"])
_serialize(
    AttentionPlan,
    lambda aux: aux[0].to_json().encode(),
    lambda data: (PlanStatic.from_json(bytes(data).decode()),),
)

jax.tree_util.register_dataclass(
    LayerPlans, data_fields=["metadata"], meta_fields=["statics", "kinds"]
)
_serialize(
    LayerPlans,
    lambda aux: json.dumps([[static.to_json() for static in aux[0]], aux[1]]).encode(),
    lambda data: (
        tuple(PlanStatic.from_json(text) for text in json.loads(data)[0]),
        tuple(json.loads(data)[1]),
    ),
)

jax.tree_util.register_dataclass(
    DCPPlan, data_fields=["context", "own"], meta_fields=["spec", "shards"]
)
_serialize(
    DCPPlan,
    lambda aux: json.dumps([asdict(part) for part in aux]).encode(),
    lambda data: (AttentionSpec(**json.loads(data)[0]), TokenShards(**json.loads(data)[1])),
)

jax.tree_util.register_pytree_node(CacheHandle, flatten_handle, unflatten_handle)
_serialize(
    CacheHandle,
    lambda aux: json.dumps([aux[0], asdict(aux[1])]).encode(),
    lambda data: (json.loads(data)[0], CacheSpec(**json.loads(data)[1])),
)

jax.tree_util.register_dataclass(
    CacheArrays, data_fields=["k", "v", "scales"], meta_fields=["spec"]
)
_serialize(CacheArrays, lambda aux: _write_spec(aux[0]), lambda data: (_read_spec(data),))
