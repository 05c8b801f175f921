"""What a kernel family is: it says what it refuses, prepares, and runs.

A family never keeps state between calls. `decide`, `shape` and `write` run on the host when a plan
is made; `run` works on the tensors it is handed, on the stream that is current, and neither
allocates device memory nor waits (the reference family on a GPU does both, and says so).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from interop.batch import Bucket
from interop.plan import Launch
from interop.spec import AttentionSpec, CacheSpec

__all__ = [
    "Decision",
    "Device",
    "KernelFamily",
    "Lengths",
    "Operands",
    "Work",
    "host_array",
    "torch_view",
]

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Device:
    """What a choice of kernel needs to know about a device.

    Parameters
    ----------
    kind
        ``"cpu"`` or ``"cuda"``.
    capability
        Compute capability, e.g. ``(9, 0)``; ``(0, 0)`` on the CPU.
    num_sms
        Streaming multiprocessors; 0 on the CPU.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0


@dataclass(frozen=True)
class Work:
    """What one launch is asked to do, as far as it is static.

    Parameters
    ----------
    spec, cache, device
        Arithmetic, cache (`None` without one) and device.
    query_dtype
        Element type of query and output.
    num_requests
        Rows of the request arrays, padding requests included.
    bucket
        Sizes of the step.
    source
        ``"pages"`` or ``"tokens"``; see `interop.plan.Launch`.
    role
        Which requests it is for: ``"all"``, or of a mixed batch ``"decodes"`` (up to one query row
        each) or ``"prefills"``.
    lse
        Whether calls may ask for the LSE.
    invariant
        Whether a request's bits must not depend on the rest of the batch, nor on the bucket.
    any_speed
        Whether a family is asked for what it can do, and not for where it is the fastest.
    """

    spec: AttentionSpec
    cache: CacheSpec | None
    device: Device
    query_dtype: str
    num_requests: int
    bucket: Bucket
    source: str
    role: str = "all"
    lse: bool = True
    invariant: bool = False
    any_speed: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.spec, self.cache, self.bucket, self.num_requests, self.source, self.role))

    def __hash__(self) -> int:
        # Families look up by it what they computed for a bucket, several times a plan.
        return self._hash


@dataclass(frozen=True)
class Lengths:
    """A step's lengths on the host, padded to the rows of its plan; all int32.

    Parameters
    ----------
    query_lens, kv_lens
        ``[num_requests]`` tokens. Of a bucket the last request is the padding: it has all padding
        rows of the query and no keys.
    kv_units
        ``[num_requests]`` pages, or tokens for source ``"tokens"``.
    qo_indptr, kv_indptr
        ``[num_requests + 1]`` offsets of the requests' rows and units.
    first
        Requests before this one belong to another launch; their `query_lens` are 0 here.
    shared_units
        Units with which all requests that have query rows begin, and which have none of this step's
        tokens; counted only for families that read them once for all.
    """

    query_lens: IntArray
    kv_lens: IntArray
    kv_units: IntArray
    qo_indptr: IntArray
    kv_indptr: IntArray
    first: int = 0
    shared_units: int = 0


class Decision(NamedTuple):
    """What a family decides for one batch.

    Parameters
    ----------
    variant
        Which of the family's static variants for a bucket serves the batch; plans of one variant
        have equal static parts, so there should be few.
    detail
        A number of the family's own that `KernelFamily.write` needs, e.g. a chunk size.
    """

    variant: int = 0
    detail: int = 0


class Operands(NamedTuple):
    """The buffers of one call, in torch or as bridge tensors of a custom call.

    Parameters
    ----------
    query
        ``[tokens, num_qo_heads, head_dim]``.
    key, value
        Source ``"pages"``: one layer's part of the flat pools. Source ``"tokens"``: the rows
        ``[kv_tokens, num_kv_heads, head_dim]`` and ``[kv_tokens, num_kv_heads, head_dim_v]``.
    metadata
        The plan's fields by name, int32.
    out
        ``[tokens, num_qo_heads, head_dim_v]``, written whole.
    lse
        ``[tokens, num_qo_heads]`` float32 or `None`, written whole, natural logarithm.
    scratch
        ``[scratch_bytes]`` uint8, or `None` where the launch needs none.
    scale_table
        ``[layers, 2, num_kv_heads]`` float32, scales of keys and of values, where `key` and `value`
        are pages of a quantised cache; else `None`.
    scale_layer
        ``[1]`` int32, the layer whose scales are meant.
    sinks
        ``[num_qo_heads]`` float32 where the spec says that there are sinks, else `None`.
    """

    query: Any
    key: Any
    value: Any
    metadata: Mapping[str, Any]
    out: Any
    lse: Any
    scratch: Any
    scale_table: Any = None
    scale_layer: Any = None
    sinks: Any = None

    def as_torch(self) -> Operands:
        """Return these operands with every buffer but the metadata as a torch tensor of it."""
        views: dict[str, Any] = {
            name: torch_view(value)
            for name, value in self._asdict().items()
            if name != "metadata" and value is not None
        }
        return self._replace(**views)


def torch_view(buffer: Any) -> Tensor:
    """View a torch tensor or a bridge tensor as a torch tensor, without waiting for any stream."""
    if isinstance(buffer, Tensor):
        return buffer
    # Straight from the capsule: torch.from_dlpack would ask for the other side's stream.
    tensor: Tensor = from_dlpack(buffer.__dlpack__())
    return tensor


def host_array(field: Any) -> IntArray:
    """Read a metadata field on the host; on the CPU a view of it, from a GPU a copy that waits."""
    if not isinstance(field, Tensor):
        if field.device.type == "cpu":
            # A sixth of the time that the way over torch takes.
            view: IntArray = np.from_dlpack(field)  # type: ignore[assignment]
            return view
        field = torch_view(field)
    array: IntArray = field.cpu().numpy()
    return array


class KernelFamily(Protocol):
    """One way to compute attention."""

    name: str
    """Name in plans and messages."""

    recordable: bool
    """Whether `run` may be recorded in a CUDA graph: it neither waits nor allocates."""

    def fields(self, launch: Launch) -> tuple[str, ...]:
        """Names of the metadata fields that `run` reads for a launch, in order."""

    def page_fields(self, launch: Launch) -> tuple[str, ...]:
        """Names of those among `fields` that hold page numbers, to which a layer is added."""

    def refuse(self, work: Work) -> str | None:
        """Why this family cannot do `work`; `None` if it can."""

    def decide(self, work: Work, lengths: Lengths) -> Decision:
        """Choose what depends on the batch and not only on its bucket."""

    def shape(self, work: Work, variant: int) -> tuple[Launch, dict[str, int]]:
        """Return a variant's launch for `work` and the lengths (words) of its metadata fields."""

    def write(
        self,
        work: Work,
        launch: Launch,
        lengths: Lengths,
        decision: Decision,
        fields: Mapping[str, IntArray],
    ) -> None:
        """Fill the launch's own metadata fields, given as views of the host buffer."""

    def run(self, launch: Launch, operands: Operands) -> None:
        """Compute `operands.out` (and `lse`)."""
