"""Which kernel serves what: a choice made once per bucket, with a reason for every refusal.

The table is the order of `kernels.FAMILIES`: the first family that does not refuse serves. What a
family refuses, and where it gives way to a faster one, stands in its own ``refuse``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

import torch

from interop.batch import Bucket
from interop.draft_masks import mask_words
from interop.errors import ArgumentError, UnsupportedError
from interop.plan import Launch, MetadataLayout, PlanStatic
from interop.spec import AttentionSpec, CacheSpec

from .choice_files import TWO_LAUNCHES, note_on, recorded
from .kernels import CASCADE, DRAFT_MASKS, FAMILIES, INVARIANT, Device, KernelFamily, Operands, Work
from .kernels.cascade import MOST_PACKED_ROWS
from .kernels.sinks import refuse

__all__ = [
    "Choice",
    "Served",
    "Way",
    "cascade_of",
    "device_facts",
    "refusal",
    "run",
    "serve",
    "works_of",
]

FALLBACKS = ("warn", "raise")

# A mixed batch is served by two launches, decodes first, where the bucket admits queries as long as
# this. Measured on one H200, us a layer, one launch against two, for 32 decodes at 1024 tokens and
# a prefill of 512: 84 against 56; of 2048 after 2048 tokens of context: 442 against 231.
MIXED_LEAST_QUERY_LEN = 128


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
    source, role
        What it reads and which requests it is for; see `kernels.Work`.
    family
        Name of the family that serves; `None` if none does.
    refusals
        ``(family, reason)`` of each that does not.
    note
        What a file of measured kernels says of it, where one is in use (`measuring`).
    """

    source: str
    role: str
    family: str | None
    refusals: tuple[tuple[str, str], ...]
    note: str = ""

    def __str__(self) -> str:
        """One line for the kernel that serves, one for each that does not."""
        lines = [f"{self.role} over {self.source}: {self.family or 'no kernel'}"]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refusals])


def refusal(family: KernelFamily, work: Work) -> str | None:
    """Why a family does not serve `work`; `None` if it can."""
    if work.invariant and family.name not in INVARIANT:
        return "what it computes for a request depends on the rest of the batch"
    if work.bucket.draft_masks and family.name not in DRAFT_MASKS:
        return "it reads no masks of drafts"
    return refuse(family, work)


def choose(work: Work) -> Choice:
    """The family that was measured fastest, or the first in `FAMILIES`, that does not refuse."""
    family, refusals = None, []
    measured = recorded(work)
    for name, candidate in FAMILIES.items():
        chosen = measured is not None and measured.family == name
        reason = refusal(candidate, replace(work, any_speed=True) if chosen else work)
        if reason is not None:
            refusals.append((name, reason))
        elif family is None or chosen:
            family = name
    return Choice(work.source, work.role, family, tuple(refusals), note_on(work))


def _family_named(work: Work, kernel: str) -> KernelFamily:
    """Return the family that was asked for by name, or say why it can't serve `work`."""
    family = FAMILIES.get(kernel)
    if family is None:
        raise ArgumentError(
            "kernel", given=repr(kernel), wanted=f"None, or one of {', '.join(FAMILIES)}"
        )
    # Asked for by name, a family serves what it can, however slowly.
    work = replace(work, any_speed=True)
    if (reason := refusal(family, work)) is not None:
        able = [name for name, other in FAMILIES.items() if refusal(other, work) is None]
        raise UnsupportedError(
            f"kernel {kernel!r} cannot serve attention over {work.source}: {reason}. "
            f"These can: {', '.join(able) or 'none'}. Leave kernel out to have one chosen."
        )
    return family


def _family_for(work: Work, fallback: str, kernel: str | None) -> KernelFamily:
    """Return the family that serves `work`, or say why none does."""
    if kernel is not None:
        return _family_named(work, kernel)
    choice = choose(work)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals)
    falls_back = choice.family == "reference" and work.device.kind != "cpu"
    if (measured := recorded(work)) is not None and measured.family == "reference":
        falls_back = False
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
    lse: bool = True,
    invariant: bool = False,
) -> tuple[Work, ...]:
    """Pieces of work that a bucket may ask for: all requests at once, then its other ways.

    A bucket without context has its own rows as another source. One with long queries may come as
    a mixed batch, whose decodes and prefills are then a piece of work each. Where bits must not
    depend on the batch, there are no choices: decodes and others are always apart, since others
    may join them in another step, and what is in a cache is always read from its pages.
    """
    whole = Work(
        spec=spec,
        cache=cache_spec,
        device=device,
        query_dtype=query_dtype,
        num_requests=num_requests,
        bucket=bucket,
        source="tokens" if cache_spec is None else "pages",
        lse=lse,
        invariant=invariant,
    )
    if invariant:
        if device.kind == "cpu" or bucket.max_query_len <= 1:
            return (whole,)
        one_each = replace(bucket, max_query_len=1, without_context=False, draft_masks=False)
        return (
            whole,
            replace(whole, role="decodes", bucket=one_each),
            replace(whole, role="prefills"),
        )
    if cache_spec is None:
        return (whole,)
    if bucket.without_context:
        return (whole, replace(whole, source="tokens"))
    if device.kind == "cpu" or bucket.max_query_len < MIXED_LEAST_QUERY_LEN:
        return (whole,)
    rows = min(bucket.num_requests, bucket.num_tokens)
    one_token = Bucket(bucket.num_requests, rows, bucket.num_pages, 1)
    decodes = replace(whole, role="decodes", bucket=one_token)
    return (whole, decodes, replace(whole, role="prefills"))


Part = tuple[Work, KernelFamily]


class Way(Enum):
    """In which pieces a batch of a bucket is served."""

    WHOLE = "all requests in one launch"
    MIXED = "decodes, and then prefills"
    CASCADE = "what all requests begin with once, and then the rest of each"


class Served:
    """Who serves the pieces of work of a bucket, and the static parts that plans of it have.

    Parameters
    ----------
    whole
        Work and family for all requests in one launch.
    mixed
        The same for decodes and for prefills, where two launches are faster than one.
    own
        The same for attention over the step's own rows, where there is such.
    by_length
        Whether all batches come as the two pieces of `mixed`, each request by its own length;
        else those do whose first requests are decodes.
    cascade
        As `whole`, for batches whose requests begin with the same pages, where that may pay.
    """

    def __init__(
        self,
        whole: Part,
        mixed: tuple[Part, Part] | None = None,
        own: Part | None = None,
        by_length: bool = False,
        cascade: Part | None = None,
    ) -> None:
        self.whole = whole
        self.mixed = mixed
        self.own = own
        self.by_length = by_length
        self.cascade = cascade
        self._statics: dict[tuple[Way, tuple[int, ...]], PlanStatic] = {}

    @property
    def counts_shared(self) -> bool:
        """Whether it matters how many pages requests share."""
        return self.cascade is not None or self.whole[1].name == CASCADE

    def parts(self, way: Way) -> tuple[Part, ...]:
        """Return the parts of a plan: those of `PlanStatic.main` and then its `own`."""
        main: tuple[Part, ...] = (self.whole,)
        if way is Way.MIXED and self.mixed is not None:
            main = self.mixed
        elif way is Way.CASCADE and self.cascade is not None:
            main = (self.cascade,)
        return main if self.own is None else (*main, self.own)

    def static(self, way: Way, variants: tuple[int, ...]) -> PlanStatic:
        """Static part of plans whose families chose these variants; one object for equal ones."""
        key = (way, variants)
        static = self._statics.get(key)
        if static is None:
            static = self._statics[key] = self._assemble(way, variants)
        return static

    def _assemble(self, way: Way, variants: tuple[int, ...]) -> PlanStatic:
        work = self.whole[0]
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
        if work.bucket.draft_masks:
            rows, words = work.bucket.num_tokens, mask_words(work.bucket.max_query_len)
            sizes["draft_masks"] = max(rows * words, 1)
        launches = []
        for (part, family), variant in zip(self.parts(way), variants, strict=True):
            launch, own_sizes = family.shape(part, variant)
            launches.append(launch)
            sizes |= own_sizes
        own = launches.pop() if self.own is not None else None
        return PlanStatic(
            spec=work.spec,
            cache=work.cache,
            query_dtype=work.query_dtype,
            bucket=work.bucket,
            layout=MetadataLayout.of(sizes),
            main=tuple(launches),
            own=own,
            lse=work.lse,
            batch_invariant=work.invariant,
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
    kernel: str | None,
    lse: bool,
    invariant: bool = False,
) -> Served:
    """Choose a family for each piece of work of a bucket; raises `UnsupportedError`."""
    if fallback not in FALLBACKS:
        raise ArgumentError("fallback", given=repr(fallback), wanted="'warn' or 'raise'")
    whole, *others = works_of(
        spec, cache_spec, query_dtype, bucket, num_requests, device, lse, invariant
    )
    served = whole, _family_for(whole, fallback, kernel)
    if invariant:
        if not others or served[1].name == "reference":
            return Served(served)
        return Served(
            served, mixed=((others[0], served[1]), (others[1], served[1])), by_length=True
        )
    if bucket.without_context and others:
        return Served(served, own=(others[0], _family_for(others[0], fallback, kernel)))
    measured = recorded(whole)
    one_launch = measured is not None and measured.family != TWO_LAUNCHES
    if others and kernel is None and served[1].name != "reference" and not one_launch:
        decodes, prefills = ((work, _family_for(work, fallback, None)) for work in others)
        # One family does both as well in one launch.
        if decodes[1] is not prefills[1]:
            return Served(served, mixed=(decodes, prefills))
    return Served(served, cascade=cascade_of(whole) if kernel is None else None)


def cascade_of(work: Work) -> Part | None:
    """Who serves batches that share pages, where reading them once may be faster."""
    packed = work.bucket.max_query_len * work.spec.group_size
    if work.device.kind == "cpu" or packed > MOST_PACKED_ROWS:
        return None
    family = FAMILIES[CASCADE]
    if refusal(family, replace(work, any_speed=True)) is not None:
        return None
    return work, family


def run(launch: Launch, operands: Operands) -> None:
    """Run a launch on its operands: the place where both front ends meet."""
    FAMILIES[launch.family].run(launch, operands)
