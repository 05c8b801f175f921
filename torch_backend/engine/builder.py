"""From an engine's batch to a step: its split, its kernels, and a plan that layers run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from interop.batch import Bucket, RaggedBatch
from interop.draft_masks import Mask
from interop.errors import ArgumentError, UnsupportedError
from interop.host import IntArray, power_of_two
from interop.plan import AttentionPlan
from interop.spec import AttentionSpec

from ..kernels import CASCADE
from ..planning import plan
from .batches import (
    DecodeLengths,
    EngineBatch,
    HostBatch,
    Split,
    cumulative_pages,
    decode_lengths,
    draft_mask,
    read_batch,
    split_batch,
)
from .capabilities import YES, Answer, Platform, no, supports_non_causal
from .choices import (
    NATIVE,
    XQA,
    Group,
    KernelChoice,
    check_group,
    decode_kernel,
    graph_support,
    prefill_kernel,
    query_dtypes,
    reorder_threshold,
)
from .settings import plan_among

__all__ = ["Decodes", "MetadataBuilder", "PlanningBuilder", "Prefills", "Step", "StepBuilder"]


@dataclass(frozen=True, eq=False)
class Decodes:
    """The decodes of a step.

    Parameters
    ----------
    kernel
        What serves them on this architecture.
    query_dtype
        Element type of query that it is best served by.
    lengths
        Rows a request.
    max_seq_len
        Tokens of the longest request.
    mask
        For XQA where requests have several rows, see `draft_mask`; else `None`.
    """

    kernel: KernelChoice
    query_dtype: str
    lengths: DecodeLengths
    max_seq_len: int
    mask: npt.NDArray[np.uint16] | None = None


@dataclass(frozen=True, eq=False)
class Prefills:
    """The prefills of a step.

    Parameters
    ----------
    kernel, query_dtype, max_seq_len
        As `Decodes` has them.
    max_query_len
        Rows of the longest request.
    cum_seq_lens_q
        ``[num_prefills + 1]`` int32 offsets of their rows, from 0.
    cum_pages
        ``[num_prefills + 1]`` int32 offsets of their pages, from 0, which TRTLLM-GEN reads.
    """

    kernel: KernelChoice
    query_dtype: str
    max_seq_len: int
    max_query_len: int
    cum_seq_lens_q: IntArray
    cum_pages: IntArray


@dataclass(frozen=True, eq=False)
class Step:
    """What layers need of one step; the same class for PyTorch and JAX.

    Parameters
    ----------
    split
        Decodes first, then prefills.
    decodes, prefills
        Of each phase that the step has.
    num_actual_tokens
        Rows that count; layers leave those beyond untouched.
    causal
        Whether attention is causal.
    requests, bucket
        What the plan is made from.
    slot_mapping
        The engine's.
    plans
        A plan for each kind of layer in the group.
    """

    split: Split
    decodes: Decodes | None
    prefills: Prefills | None
    num_actual_tokens: int
    causal: bool
    requests: RaggedBatch
    bucket: Bucket
    slot_mapping: Any = None
    plans: dict[AttentionSpec, AttentionPlan[Any]] = field(default_factory=dict)

    @property
    def use_cascade(self) -> bool:
        """Whether pages that all requests begin with are read once for all."""
        launches = (launch for plan in self.plans.values() for launch in plan.static.main)
        return any(launch.family == CASCADE for launch in launches)

    @property
    def all_trtllm(self) -> bool:
        """Whether no request of the step is served natively."""
        phases = [phase for phase in (self.decodes, self.prefills) if phase is not None]
        return self.causal and all(phase.kernel.kernel != NATIVE for phase in phases)

    def plan_for(self, spec: AttentionSpec) -> AttentionPlan[Any]:
        """Return the plan of a layer that computes `spec`, causal or not as the step is.

        Raises
        ------
        PlanError
            If none was made: a layer of another window, cap or scale than the group's.
        """
        return plan_among(self.plans, spec, self.causal)


class StepBuilder:
    """Splits an engine's batches and chooses kernels for them; knows of no framework's plans.

    Parameters
    ----------
    platform
        The device, which need not be there.
    group
        Layers to plan for.
    max_model_len
        Most tokens of a request.
    graph_sizes
        Rows of the batches that graphs are recorded for. Such a batch has one bucket, unless its
        requests share so many pages that they are more than the cache has.

    Raises
    ------
    UnsupportedError
        For a group that the platform cannot serve.
    """

    def __init__(
        self,
        platform: Platform,
        group: Group,
        *,
        max_model_len: int = 131072,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        check_group(platform, group)
        self.platform = platform
        self.group = group
        self.max_pages_per_req = -(-max_model_len // group.cache.page_size)
        self.graph_sizes = tuple(sorted(graph_sizes))
        self.decode_choice = decode_kernel(platform, group)
        self.prefill_choice = prefill_kernel(platform, group)
        self.query_dtypes = query_dtypes(platform, group)
        self.threshold = reorder_threshold(platform, group)
        self.graphs = graph_support(platform, [group])
        # XQA takes decodes of unequal lengths; so does TRTLLM-GEN, with offsets.
        self._uniform = self.decode_choice.kernel == NATIVE

    def needs_host_lengths(self, *, causal: bool = True, prefills: bool = True) -> Answer:
        """Whether batches need `seq_lens` on the host, which costs a wait for the device.

        Plans of this library always do; this says what the architecture's kernels ask for.
        """
        if self.group.dcp_size > 1 or not causal or self.decode_choice.kernel == NATIVE:
            return YES
        if prefills and self.prefill_choice.kernel == NATIVE:
            return YES
        return no("every request is served by kernels that read the lengths on the device")

    def build(self, batch: EngineBatch) -> Step:
        """Split a batch, choose its kernels, and size its plan.

        Raises
        ------
        ShapeError, LengthError, PlanError
            For a batch that does not fit together, or exceeds the builder's sizes.
        UnsupportedError, ArgumentError
            For combinations that nothing serves.
        """
        host = read_batch(batch)
        causal = bool(batch.causal)
        split = self._split(host, causal)
        decodes = self._decodes(host, split, causal)
        prefills = self._prefills(host, split, causal)
        step = Step(
            split=split,
            decodes=decodes,
            prefills=prefills,
            num_actual_tokens=host.num_actual_tokens,
            causal=causal,
            requests=host.requests,
            bucket=self._bucket(host, split),
            slot_mapping=batch.slot_mapping,
        )
        self._check(step)
        return step

    def specs(self, step: Step) -> tuple[AttentionSpec, ...]:
        """Each kind of layer's attention in this step, which need not be causal."""
        specs = dict.fromkeys(self.group.specs)
        if step.causal:
            return tuple(specs)
        return tuple(dict.fromkeys(replace(spec, causal=False) for spec in specs))

    def _split(self, host: HostBatch, causal: bool) -> Split:
        if causal or self.decode_choice.kernel == XQA:
            starts = host.query_start_loc
            return split_batch(host.query_lens, starts, self.threshold, self._uniform)
        return Split(0, host.query_lens.shape[0], 0, int(host.query_start_loc[-1]))

    def _decodes(self, host: HostBatch, split: Split, causal: bool) -> Decodes | None:
        count = split.num_decodes
        if not count:
            return None
        masks, lens = host.requests.draft_masks, host.requests.kv_lens[:count]
        choice = _reading(masks, self.decode_choice)
        rows, xqa = host.query_lens[:count], choice.kernel == XQA
        lengths = decode_lengths(rows, xqa=xqa)
        return Decodes(
            kernel=choice,
            query_dtype=self.query_dtypes[1],
            lengths=lengths,
            max_seq_len=int(lens[lens.argmax()]),
            mask=draft_mask(rows, causal, masks) if xqa and lengths.q_len_per_req > 1 else None,
        )

    def _prefills(self, host: HostBatch, split: Split, causal: bool) -> Prefills | None:
        first = split.num_decodes
        if not split.num_prefills:
            return None
        choice = self.prefill_choice
        if not causal:
            choice = prefill_kernel(self.platform, self.group, causal)
        choice = _reading(host.requests.draft_masks, choice)
        starts, lens = host.query_start_loc, host.requests.kv_lens[first:]
        rows = host.query_lens[first:]
        return Prefills(
            kernel=choice,
            query_dtype=self.query_dtypes[0],
            max_seq_len=int(lens[lens.argmax()]),
            max_query_len=int(rows[rows.argmax()]),
            cum_seq_lens_q=starts[first:] - starts[first],
            cum_pages=cumulative_pages(lens, self.group.cache.page_size),
        )

    def _check(self, step: Step) -> None:
        """Raise for combinations of a step and its group that nothing serves."""
        group = self.group
        if not step.causal:
            answer = supports_non_causal(group.kv_cache_dtype, group.dcp_size)
            if not answer:
                raise UnsupportedError(f"this batch is not causal: {answer.why}.")
        if group.sinks and group.dcp_size > 1:
            raise UnsupportedError(
                f"layers of this group have sinks, and {group.dcp_size} ranks would each count "
                "them: a sink belongs into the combined result once."
            )
        if step.all_trtllm:
            return
        if not group.same_window:
            windows = sorted({spec.window_left for spec in group.specs})
            raise ArgumentError(
                "group.specs",
                given=f"layers with window_left of {windows}",
                wanted="one window in a group that is served natively, since its layers share a "
                "plan",
                remedy="Put layers of each window into a group of their own.",
            )
        if not group.same_arithmetic:
            raise ArgumentError(
                "group.specs",
                given="layers that differ in soft cap, scale or mask",
                wanted="one arithmetic in a group that is served natively",
                remedy="Put layers that differ into groups of their own.",
            )

    def _bucket(self, host: HostBatch, split: Split) -> Bucket:
        """Sizes to pad the plan to: a recorded graph's, or else the step's rows.

        Steps with masks of drafts have buckets, and so recordings, of their own.
        """
        requests, longest = host.requests, host.requests.max_query_len
        masked = requests.draft_masks is not None
        rows = host.num_padded_tokens
        pages = int(requests.pages(self.group.cache.page_size).indptr[-1])
        if longest and not split.num_prefills and rows in self.graph_sizes:
            # The same for every step of so many rows, whatever its requests, and so one recording.
            count = max(rows // longest, requests.num_requests)
            most = min(count * self.max_pages_per_req, self.group.cache.num_pages)
            if pages <= most:
                return Bucket(count, rows, most, longest, draft_masks=masked)
        return Bucket(
            power_of_two(requests.num_requests),
            rows,
            power_of_two(pages),
            power_of_two(longest),
            draft_masks=masked,
        )


def _reading(masks: Mask | None, choice: KernelChoice) -> KernelChoice:
    """Return the kernel that reads masks of drafts, where there are any."""
    if masks is None or choice.kernel in (NATIVE, XQA):
        return choice
    return KernelChoice(NATIVE, "TRTLLM-GEN reads no masks of drafts")


class PlanningBuilder(StepBuilder):
    """A `StepBuilder` whose steps come with plans of a front end.

    Parameters
    ----------
    platform, group, max_model_len, graph_sizes
        As for `StepBuilder`. The platform of a builder that plans is the machine's own.
    device, fallback
        As for the front end's `plan`.
    """

    _plan: Callable[..., AttentionPlan[Any]]
    """The front end's own."""

    def __init__(
        self,
        platform: Platform,
        group: Group,
        *,
        device: Any = None,
        fallback: str = "warn",
        **sizes: Any,
    ) -> None:
        super().__init__(platform, group, **sizes)
        self.device = device
        self.fallback = fallback

    def build(self, batch: EngineBatch) -> Step:
        """As `StepBuilder.build`, with a plan for each kind of layer."""
        step = super().build(batch)
        if self.group.dcp_size > 1:
            raise UnsupportedError(
                f"a step of {self.group.dcp_size} ranks has a plan of its own: call dcp.plan with "
                "step.requests and step.bucket."
            )
        for spec in self.specs(step):
            step.plans[spec] = self._plan(
                spec,
                self.group.cache,
                step.requests,
                bucket=step.bucket,
                device=self.device,
                fallback=self.fallback,
                return_lse=False,
            )
        return step


class MetadataBuilder(PlanningBuilder):
    """A `PlanningBuilder` for PyTorch; parameters are its own."""

    _plan = staticmethod(plan)
