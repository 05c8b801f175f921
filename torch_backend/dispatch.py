"""Which kernel serves what: a choice made once per bucket, with a reason for every refusal."""

from __future__ import annotations

from functools import lru_cache

import torch
from interop.batch import Bucket
from interop.errors import UnsupportedError
from interop.plan import Launch, MetadataLayout, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .kernels import FAMILIES, Device, Operands, Work

__all__ = ["device_facts", "run", "static_plan"]


@lru_cache(maxsize=None)
def device_facts(device: torch.device) -> Device:
    """What dispatch needs to know of a torch device."""
    if device.type != "cuda":
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        "cuda", (properties.major, properties.minor), properties.multi_processor_count
    )


def choose(work: Work) -> tuple[Launch, dict[str, int]]:
    """First family in `FAMILIES` that can do `work`, with the sizes of its metadata fields."""
    refusals = []
    for family in FAMILIES.values():
        reason = family.refuse(work)
        if reason is None:
            return family.shape(work)
        refusals.append(f"{family.name}: {reason}")
    raise UnsupportedError("no kernel can serve this call: " + "; ".join(refusals))


@lru_cache(maxsize=4096)
def static_plan(
    spec: AttentionSpec,
    cache: CacheSpec | None,
    query_dtype: str,
    bucket: Bucket,
    num_requests: int,
    device: Device,
) -> tuple[PlanStatic, tuple[Work, ...]]:
    """Static part of a plan, and the work of its launches: ``main`` and, where there is one, ``own``."""
    sizes = {
        "qo_indptr": num_requests + 1,
        "kv_indptr": num_requests + 1,
        "kv_lens": num_requests,
        "kv_last_page_len": num_requests,
    }
    sources = ["tokens"]
    if cache is not None:
        sizes["slot_mapping"] = max(bucket.num_tokens, 1)
        sizes["page_indices"] = max(bucket.num_pages, 1)
        sources = ["pages", "tokens"] if bucket.without_context else ["pages"]
    works = tuple(
        Work(spec, cache, device, query_dtype, num_requests, bucket, source) for source in sources
    )
    launches = []
    for work in works:
        launch, own_sizes = choose(work)
        launches.append(launch)
        sizes |= own_sizes
    static = PlanStatic(
        spec=spec,
        cache=cache,
        query_dtype=query_dtype,
        bucket=bucket,
        layout=MetadataLayout.of(sizes),
        main=launches[0],
        own=launches[1] if len(launches) > 1 else None,
    )
    return static, works


def run(launch: Launch, operands: Operands) -> None:
    """Run a launch on its operands: the place where both front ends meet."""
    FAMILIES[launch.family].run(launch, operands)
