"""The contract between the PyTorch core and its front ends: specs, batches, plans, errors.

Importing this package imports neither PyTorch nor JAX.
"""

from __future__ import annotations

from .batch import Bucket, RaggedBatch
from .dcp import DCPPlan
from .device_status import PlanStatus
from .errors import IsthmusError
from .layer_plans import LayerPlans
from .plan import AttentionPlan, Launch, MetadataLayout, PlanStatic
from .sharding import TokenShards
from .spec import AttentionSpec, CacheSpec

__all__ = [
    "AttentionPlan",
    "AttentionSpec",
    "Bucket",
    "CacheSpec",
    "DCPPlan",
    "IsthmusError",
    "Launch",
    "LayerPlans",
    "MetadataLayout",
    "PlanStatic",
    "PlanStatus",
    "RaggedBatch",
    "TokenShards",
]
