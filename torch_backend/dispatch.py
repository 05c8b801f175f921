"""Which kernel serves what: a choice made once per bucket, with a reason for every refusal.

The table is the order of `kernels.FAMILIES`: the first family that does not refuse serves. What a
family refuses, and where it gives way to a faster one, stands in its own ``refuse``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from interop.batch import Bucket
from interop.errors import ArgumentError, UnsupportedError
from interop.plan import Launch, MetadataLayout, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .kernels import FAMILIES, Device, KernelFamily, Operands, Work

__all__ = ["Choice", "Served", "device_facts", "run", "serve", "works_of"]

FALLBACKS = ("warn", "raise")


@cache
def device_facts(device: torch.device) -> Device:
    """What dispatch needs to know of a torch device."""
    if device.type != "cuda":
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Device("cuda", capability, properties.multi_processor_count)


@dataclass(frozen=True)
class Choice:
    """Which kernel family serves a piece of work, and why the ones before it do not.

    Parameters
    ----------
    source
        ``"pages"``, or ``"tokens"`` for attention over the step's own rows.
    family
        Name of the family that serves; `None` if none does.
    refusals
        ``(family, reason)`` of each that does not.
    """

    source: str
    family: str | None
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """One line for the kernel that serves, one for each that does not."""
        lines = [f"{self.source}: {self.family or 'no kernel'}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refusals])


def choose(work: Work) -> Choice:
    """First family in `FAMILIES` that does not refuse `work`."""
    family, refusals = None, []
    for name, candidate in FAMILIES.items():
        reason = candidate.refuse(work)
        if reason is not None:
            refusals.append((name, reason))
        elif family is None:
            family = name
    return Choice(work.source, family, tuple(refusals))


def _family_for(work: Work, fallback: str) -> KernelFamily:
    """Return the family that serves `work`, or say why none does."""
    choice = choose(work)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals)
    falls_back = choice.family == "reference" and work.device.kind != "cpu"
    if choice.family is None or (falls_back and fallback == "raise"):
        raise UnsupportedError(f"no kernel can serve attention over {work.source}. {reasons}")
    if falls_back:
        warnings.warn(
            f"attention over {work.source} falls back to the reference family, which is slow and "
            f"waits for the device on every call. {reasons}. Pass fallback='raise' to refuse.",
            RuntimeWarning,
            stacklevel=5,
        )
    return FAMILIES[choice.family]


def works_of(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    query_dtype: str,
    bucket: Bucket,
    num_requests: int,
    device: Device,
) -> tuple[Work, ...]:
    """Pieces of work that a plan has: ``main`` and, if there is one, ``own`` (see `PlanStatic`)."""
    sources = ["tokens"] if cache_spec is None else ["pages"]
    if cache_spec is not None and bucket.without_context:
        sources.append("tokens")
    return tuple(
        Work(spec, cache_spec, device, query_dtype, num_requests, bucket, source)
        for source in sources
    )


class Served:
    """Pieces of work of a plan, each with the family that serves it, and their static parts.

    Parameters
    ----------
    parts
        ``(work, family)`` of `works_of`, in its order.
    """

    def __init__(self, parts: tuple[tuple[Work, KernelFamily], ...]) -> None:
        self.parts = parts
        self._statics: dict[tuple[int, ...], PlanStatic] = {}

    def static(self, variants: tuple[int, ...]) -> PlanStatic:
        """Static part of plans whose families chose these variants; one object for equal ones."""
        static = self._statics.get(variants)
        if static is None:
            static = self._statics[variants] = self._assemble(variants)
        return static

    def _assemble(self, variants: tuple[int, ...]) -> PlanStatic:
        work = self.parts[0][0]
        sizes = {
            "qo_indptr": work.num_requests + 1,
            "kv_indptr": work.num_requests + 1,
            "kv_lens": work.num_requests,
            "kv_last_page_len": work.num_requests,
        }
        if work.cache is not None:
            # No field is empty: XLA may hand on a null pointer for one.
            sizes["slot_mapping"] = max(work.bucket.num_tokens, 1)
            sizes["page_indices"] = max(work.bucket.num_pages, 1)
        launches = []
        for (part, family), variant in zip(self.parts, variants, strict=True):
            launch, own_sizes = family.shape(part, variant)
            launches.append(launch)
            sizes |= own_sizes
        return PlanStatic(
            spec=work.spec,
            cache=work.cache,
            query_dtype=work.query_dtype,
            bucket=work.bucket,
            layout=MetadataLayout.of(sizes),
            main=launches[0],
            own=launches[1] if len(launches) > 1 else None,
        )


@lru_cache(maxsize=4096)
def serve(
    spec: AttentionSpec,
    cache_spec: CacheSpec | None,
    query_dtype: str,
    bucket: Bucket,
    num_requests: int,
    device: Device,
    fallback: str,
) -> Served:
    """Choose a family for each piece of work of a bucket; raises `UnsupportedError`."""
    if fallback not in FALLBACKS:
        raise ArgumentError("fallback", given=repr(fallback), wanted="'warn' or 'raise'")
    works = works_of(spec, cache_spec, query_dtype, bucket, num_requests, device)
    return Served(tuple((work, _family_for(work, fallback)) for work in works))


def run(launch: Launch, operands: Operands) -> None:
    """Run a launch on its operands: the place where both front ends meet."""
    FAMILIES[launch.family].run(launch, operands)
