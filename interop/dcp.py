"""The plan of a step whose cache is spread by token over several ranks.

Decode context parallelism (DCP): every rank holds all key/value heads of its share of the tokens,
and a slice of the query heads. A step gathers the queries of all ranks, lets each rank attend over
the tokens it has, and combines the partial results; new tokens of longer queries are attended to
from the step's own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from .batch import Bucket, RaggedBatch
from .errors import ArgumentError
from .plan import AttentionPlan
from .sharding import TokenShards, own_kv_heads
from .spec import ELEMENT_BYTES, AttentionSpec

__all__ = [
    "COMBINES",
    "DCPPlan",
    "batch_bytes",
    "check_combine",
    "context_bucket",
    "context_spec",
    "own_batch",
    "own_bucket",
    "own_spec",
    "wire_bytes",
]

COMBINES = ("ag_rs", "a2a")

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, eq=False)
class DCPPlan(Generic[Metadata]):
    """How one step's attention is computed on every rank; for JAX a pytree of arrays.

    Parameters
    ----------
    context
        Attention of all query heads over the rank's own tokens of the cache, without a mask: where
        queries are one token long these are all tokens up to the query's own, else the context.
    own
        Causal attention of the rank's query heads over this step's own rows; `None` where no query
        of the bucket is longer than one token.
    spec
        The attention of the whole group of ranks.
    shards
        How tokens are spread over ranks.
    """

    context: AttentionPlan[Metadata]
    own: AttentionPlan[Metadata] | None
    spec: AttentionSpec
    shards: TokenShards

    @property
    def num_tokens(self) -> int:
        """Rows of query, key, value and output."""
        return self.context.bucket.num_tokens

    @property
    def num_local_heads(self) -> int:
        """Query heads of a rank."""
        return self.spec.num_qo_heads // self.shards.size


def context_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the attention of all query heads over a rank's tokens.

    A rank's tokens all lie before the query, so no mask is needed, and between them lie others'
    tokens, so none by position would be right. Sinks count once, after all is combined.
    """
    return replace(spec, causal=False, sinks=False)


def own_spec(spec: AttentionSpec, shards: TokenShards, query_dtype: str) -> AttentionSpec:
    """Return the attention of a rank's query heads over the step's own rows, without sinks."""
    kv_heads = own_kv_heads(spec, shards).shape[1]
    return replace(
        spec,
        num_qo_heads=spec.num_qo_heads // shards.size,
        num_kv_heads=kv_heads,
        dtype=query_dtype,
        sinks=False,
    )


def context_bucket(bucket: Bucket | None, batch: RaggedBatch) -> Bucket | None:
    """Return the bucket of attention over a rank's tokens.

    That requests bring no context is a promise about the whole batch, which is kept here; what a
    rank holds of one says nothing of it. Masks of drafts are among a step's own rows.
    """
    if bucket is None or not (bucket.without_context or bucket.draft_masks):
        return bucket
    bucket.check(batch, 0)
    return replace(bucket, without_context=False, draft_masks=False)


def own_bucket(bucket: Bucket | None) -> Bucket | None:
    """Return the bucket of attention over a step's own rows, of which there is one a token."""
    if bucket is None:
        return None
    return Bucket(
        bucket.num_requests,
        bucket.num_tokens,
        bucket.num_tokens,
        bucket.max_query_len,
        draft_masks=bucket.draft_masks,
    )


def own_batch(batch: RaggedBatch) -> RaggedBatch:
    """Return a step's own rows as requests without context."""
    return RaggedBatch(batch.query_lens, batch.query_lens, draft_masks=batch.draft_masks)


def batch_bytes(batch: object) -> bytes:
    """All that a batch says, as bytes to compare between ranks; of another kind its name."""
    if not isinstance(batch, RaggedBatch):
        return type(batch).__name__.encode()
    table = b"" if batch.page_table is None else batch.page_table.tobytes()
    masks = b"" if batch.draft_masks is None else batch.draft_masks.tobytes()
    return b"|".join((batch.query_lens.tobytes(), batch.kv_lens.tobytes(), table, masks))


def check_combine(combine: object) -> None:
    """Raise `ArgumentError` for a way of combining that there is not."""
    if combine not in COMBINES:
        raise ArgumentError(
            "combine",
            given=repr(combine),
            wanted="'ag_rs' (all-gather of LSE, then reduce-scatter) or 'a2a' (one all-to-all)",
        )


def wire_bytes(plan: DCPPlan[Any], combine: str) -> dict[str, int]:
    """Bytes that a rank receives for one layer of a step, by what they are.

    For a token, with ``H`` query heads over ``R`` ranks and elements of ``b`` bytes, these are:
    queries ``(R - 1) * H / R * head_dim * b``; and with ``"ag_rs"`` LSE ``(R - 1) * H * 4`` and
    outputs ``(R - 1) * H / R * head_dim_v * b``, with ``"a2a"`` outputs that hold their LSE,
    ``(R - 1) * H / R * (head_dim_v * b + 4)``.

    Parameters
    ----------
    plan
        The step's plan, of either front end.
    combine
        ``"ag_rs"`` or ``"a2a"``.

    Returns
    -------
    dict
        ``"query"``, ``"lse"`` and ``"out"``; for ``"a2a"`` the LSE is a part of ``"out"``.
    """
    check_combine(combine)
    size, element = plan.shards.size, ELEMENT_BYTES[plan.context.static.query_dtype]
    rows = (size - 1) * plan.num_tokens * plan.num_local_heads
    packed = combine == "a2a"
    return {
        "query": rows * plan.spec.head_dim * element,
        "lse": 0 if packed else rows * size * 4,
        "out": rows * (plan.spec.head_dim_v * element + (4 if packed else 0)),
    }
