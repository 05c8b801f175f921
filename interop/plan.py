"""A plan is a value: static numbers that a compiled program may hold, and one int32 array.

`PlanStatic` says completely what is computed; it is hashable and equal by value. The metadata array
holds what changes from step to step, at offsets that are static too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

from .batch import Bucket
from .spec import AttentionSpec, CacheSpec

__all__ = ["AttentionPlan", "Launch", "MetadataLayout", "PlanStatic"]

# Kernels read schedules with 16-byte loads, so every field starts on a multiple of 4 words.
ALIGN_WORDS = 4

Metadata = TypeVar("Metadata")


@dataclass(frozen=True)
class MetadataLayout:
    """Names and places of the fields in a plan's metadata array.

    Parameters
    ----------
    fields
        ``(name, offset, length)`` of each field in int32 words, in order.

    The first field is ``qo_indptr``, so word 0 is always 0: a zero that a compiler cannot know.
    """

    fields: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, sizes: dict[str, int]) -> MetadataLayout:
        """Lay out fields of the given lengths (words) one after another, aligned to 16 bytes."""
        fields, offset = [], 0
        for name, length in sizes.items():
            fields.append((name, offset, length))
            offset += -(-length // ALIGN_WORDS) * ALIGN_WORDS
        return cls(tuple(fields))

    @cached_property
    def words(self) -> int:
        """Length of the whole array in int32 words."""
        _, offset, length = self.fields[-1]
        return offset + -(-length // ALIGN_WORDS) * ALIGN_WORDS

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each field."""
        return {name: slice(start, start + length) for name, start, length in self.fields}

    def views(self, array: Any) -> dict[str, Any]:
        """Each field of `array`, as views of whatever kind of array it is."""
        return {name: array[place] for name, place in self.slices.items()}


@dataclass(frozen=True)
class Launch:
    """One kernel launch, described so completely that any process can repeat it.

    Parameters
    ----------
    family
        Name of the kernel family in ``torch_backend.kernels``.
    source
        ``"pages"`` to read keys and values from the cache, ``"tokens"`` from rows of the call.
    spec, cache
        Arithmetic and cache; `cache` is `None` for attention without one.
    constants
        The family's own static numbers (for FlashInfer the plan's integers).
    scratch_bytes
        Scratch memory that the launch needs.
    draft_masks
        Whether query tokens see those of their own request by masks, see `RaggedBatch`.
    """

    family: str
    source: str
    spec: AttentionSpec
    cache: CacheSpec | None
    constants: tuple[int, ...] = ()
    scratch_bytes: int = 0
    draft_masks: bool = False


@dataclass(frozen=True)
class PlanStatic:
    """Everything of a plan that is the same for all batches of a bucket.

    Parameters
    ----------
    spec, cache
        Arithmetic and cache; `cache` is `None` for attention without one.
    query_dtype
        Element type of query and output.
    bucket
        Sizes that the metadata is padded to.
    layout
        Places of the metadata fields.
    main
        The launches that attend through the cache (without a cache, over the call's rows), one
        after another; each writes the output rows of its own requests.
    own
        The launch that attends over this step's own keys and values instead, where every request of
        the bucket starts without context; else `None`.
    lse
        Whether calls may ask for the LSE.
    batch_invariant
        Whether a request's bits depend on nothing but the request.
    layers
        The layers of the cache that it is for, where others have plans of their own
        (`interop.layer_plans`); else none is named, and it is for all.
    """

    spec: AttentionSpec
    cache: CacheSpec | None
    query_dtype: str
    bucket: Bucket
    layout: MetadataLayout
    main: tuple[Launch, ...]
    own: Launch | None
    lse: bool = True
    batch_invariant: bool = False
    layers: tuple[int, ...] = ()

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """``[tokens, num_qo_heads, head_dim]``."""
        return (self.bucket.num_tokens, self.spec.num_qo_heads, self.spec.head_dim)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """``[tokens, num_qo_heads, head_dim_v]``."""
        return (self.bucket.num_tokens, self.spec.num_qo_heads, self.spec.head_dim_v)

    @cached_property
    def _hash(self) -> int:
        return hash((self.spec, self.cache, self.bucket, self.layout, self.main, self.own))

    def __hash__(self) -> int:
        # Asked for on every call under jit, and the fields nest deeply: kept once computed.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Another process hashes text differently, so what is kept of it stays here.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def to_json(self) -> str:
        """Write this value as JSON, for plans that are part of an exported program's signature."""
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> PlanStatic:
        """Read what `to_json` wrote."""
        return _from_json(text)


@lru_cache(maxsize=1024)
def _to_json(static: PlanStatic) -> str:
    return json.dumps(asdict(static), separators=(",", ":"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


@lru_cache(maxsize=1024)
def _from_json(text: str) -> PlanStatic:
    raw = json.loads(text)
    spec = AttentionSpec(**raw["spec"])
    cache = None if raw["cache"] is None else CacheSpec(**raw["cache"])

    def launch(item: dict[str, Any]) -> Launch:
        constants = tuple(item["constants"])
        return Launch(**(item | {"spec": spec, "cache": cache, "constants": constants}))

    return PlanStatic(
        spec=spec,
        cache=cache,
        query_dtype=raw["query_dtype"],
        bucket=Bucket(**raw["bucket"]),
        layout=MetadataLayout(_tuples(raw["layout"]["fields"])),
        main=tuple(launch(item) for item in raw["main"]),
        own=None if raw["own"] is None else launch(raw["own"]),
        lse=raw["lse"],
        # Left out by programs that were exported before there was such a thing.
        batch_invariant=raw.get("batch_invariant", False),
        layers=tuple(raw.get("layers", ())),
    )


@dataclass(frozen=True, eq=False)
class AttentionPlan(Generic[Metadata]):
    """How one step's attention is computed: the same class for PyTorch and JAX.

    Parameters
    ----------
    static
        What a compiled program may depend on; two steps of one bucket have equal static parts.
    metadata
        ``[static.layout.words]`` int32 on the device, or more where layers share it: a torch
        tensor, or a JAX array (for JAX the plan is a pytree whose only leaf this is).
    """

    static: PlanStatic
    metadata: Metadata

    def __getstate__(self) -> dict[str, Any]:
        # The views would arrive as copies that share nothing with the metadata.
        return {name: value for name, value in self.__dict__.items() if name != "views"}

    @property
    def spec(self) -> AttentionSpec:
        """The arithmetic planned for."""
        return self.static.spec

    @property
    def cache_spec(self) -> CacheSpec | None:
        """The cache planned for."""
        return self.static.cache

    @property
    def bucket(self) -> Bucket:
        """The sizes planned for."""
        return self.static.bucket

    @cached_property
    def views(self) -> dict[str, Any]:
        """Metadata field by field; cached, so that a step's layers share the views."""
        return self.static.layout.views(self.metadata)
