"""The same requests in different company: batches, buckets and orders for invariant plans.

A request is a number: its lengths, its pages and its rows of query, key and value follow from it,
so that wherever it turns up it asks the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torch_backend
from interop import AttentionPlan, AttentionSpec, Bucket, RaggedBatch
from torch_backend import PagedKVCache

Answers = dict[int, tuple[Tensor, Tensor]]
"""Output and LSE of each request."""


@dataclass(frozen=True)
class Company:
    """Who is in a batch, in which order, and the bucket that it is planned for."""

    requests: tuple[int, ...]
    bucket: Bucket | None = None


@dataclass(frozen=True)
class World:
    """All requests there are, over pools of random numbers.

    `lens` has query and KV length of each; pages of 16 tokens lie in random order.
    """

    spec: AttentionSpec
    lens: tuple[tuple[int, int], ...]
    cache: PagedKVCache
    table: Tensor
    rows: tuple[Tensor, ...]  # query, key, value of all requests, one after another

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        lens: list[tuple[int, int]],
        dtype: str,
        device: str,
        cache_dtype: str | None = None,
    ) -> World:
        """Make one; always the same for the same arguments."""
        counts = [-(-kv // 16) for _, kv in lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3))
        table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for row, pages in zip(table, order.split(counts), strict=True):
            row[: len(pages)] = pages
        if cache_dtype is not None:
            spec = replace_dtype(spec, dtype)
        cache = PagedKVCache(
            spec,
            num_layers=1,
            num_pages=len(order),
            page_size=16,
            dtype=cache_dtype or dtype,
            device=device,
            scales=None if cache_dtype is None else (0.5, 0.75),
        )
        generator = torch.Generator(device).manual_seed(4)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

        for pool in (cache.k, cache.v):
            pool.copy_(normal(*pool.shape).to(pool.dtype))
        tokens = sum(query for query, _ in lens)
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        rows = [normal(tokens, n, spec.head_dim).to(getattr(torch, dtype)) for n in heads]
        return cls(spec, tuple(lens), cache, table, tuple(rows))

    def batch(self, company: Company) -> RaggedBatch:
        """The step of these requests."""
        chosen = list(company.requests)
        query_lens, kv_lens = zip(*(self.lens[i] for i in chosen), strict=True)
        return RaggedBatch(query_lens, kv_lens, self.table[chosen])

    def operands(self, company: Company) -> tuple[Tensor, ...]:
        """Rows of the step, padded with NaN up to the bucket's."""
        per_request = [rows.split([query for query, _ in self.lens]) for rows in self.rows]
        made = []
        for pieces in per_request:
            rows = torch.cat([pieces[i] for i in company.requests])
            if company.bucket is not None:
                spare = company.bucket.num_tokens - len(rows)
                rows = torch.cat([rows, rows.new_full((spare, *rows.shape[1:]), torch.nan)])
            made.append(rows.contiguous())
        return tuple(made)

    def plan(self, company: Company, **options: Any) -> AttentionPlan[Tensor]:
        """An invariant plan of the step."""
        return torch_backend.plan(
            self.spec,
            self.cache.spec,
            self.batch(company),
            bucket=company.bucket,
            batch_invariant=True,
            **options,
        )

    def solve(self, company: Company, **options: Any) -> Answers:
        """Write and attend."""
        plan = self.plan(company, **options)
        rows = self.operands(company)
        answer = torch_backend.paged_attention(*rows, self.cache, plan, 0, return_lse=True)
        return self.by_request(company, *answer)

    def by_request(self, company: Company, out: Tensor, lse: Tensor) -> Answers:
        """Cut a step's rows apart."""
        lens = [self.lens[i][0] for i in company.requests]
        spare = len(out) - sum(lens)
        assert not out[sum(lens) :].any() and lse[sum(lens) :].isneginf().all()
        pieces = zip(out.split([*lens, spare]), lse.split([*lens, spare]), strict=True)
        return dict(zip(company.requests, list(pieces)[: len(lens)], strict=True))


def replace_dtype(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    """The same arithmetic on rows of a dtype."""
    given = {name: getattr(spec, name) for name in ("sliding_window", "logits_soft_cap", "causal")}
    return AttentionSpec(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, dtype=dtype, **given)


def assert_same_bits(got: Answers, want: Answers) -> None:
    """Compare the answers of the requests that both have."""
    for request, answer in got.items():
        for name, ours, theirs in zip(("out", "lse"), answer, want[request], strict=True):
            assert torch.equal(ours, theirs), f"{name} of request {request}"


def companies(lens: list[tuple[int, int]], few: tuple[int, ...]) -> dict[str, Company]:
    """All requests together, four ways, and a few of them, in company and alone."""
    everyone = tuple(range(len(lens)))
    tokens, pages = sum(query for query, _ in lens), sum(-(-kv // 16) for _, kv in lens)
    longest = max(query for query, _ in lens)
    bucket = Bucket(len(lens) + 3, tokens + 7, pages + 50, longest)
    made = {
        "all": Company(everyone),
        "all, padded": Company(everyone, bucket),
        "all, turned round": Company(everyone[::-1], bucket),
        "shuffled": Company((*everyone[1::2], *everyone[::2])),
        "few": Company(few),
        "few in the bucket of all": Company(few, bucket),
        "few in a larger bucket": Company(few[::-1], replace(bucket, num_tokens=2 * tokens + 9)),
    }
    return made | {f"{i} alone": Company((i,)) for i in few}
