"""The steps that several devices share: one problem, cut up for each rank, and its whole answer.

Every rank makes the whole problem from one seed and keeps its own part, so nothing has to be sent
before the measurement, and what one device answers is known everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import torch_backend
from interop import AttentionSpec, Bucket, RaggedBatch
from interop.sharding import TokenShards
from torch_backend import PagedKVCache

from .workload import PAGE_SIZE, SPEC

__all__ = ["CASES", "DRY_CASES", "Case", "Problem", "Way", "ways_for"]


@dataclass(frozen=True)
class Case:
    """One step: `requests` with `context` tokens each, `query` of them new.

    Parameters
    ----------
    name
        For the results.
    requests, context, query
        Counts; the context has the new tokens in it.
    """

    name: str
    requests: int
    context: int
    query: int = 1


CASES = (
    Case("decode 8 x 32k", 8, 32768),
    Case("decode 1 x 128k", 1, 131072),
    Case("chunk of 4096 after 28k", 1, 32768, 4096),
)
DRY_CASES = (Case("decode 3 x 160", 3, 160), Case("chunk of 24 after 104", 1, 128, 24))


@dataclass(frozen=True)
class Way:
    """How ranks share a step: heads over `tp` groups, tokens over the ranks of each.

    Parameters
    ----------
    ranks, tp
        Ranks in all, and groups of them.
    combine
        As for `torch_backend.dcp.attend`; `None` where each rank has all tokens of its heads.
    """

    ranks: int
    tp: int
    combine: str | None

    @property
    def dcp(self) -> int:
        """Ranks that share the tokens of a head."""
        return self.ranks // self.tp

    @property
    def name(self) -> str:
        """For the results."""
        if self.combine is None:
            return f"tp {self.tp}"
        return f"tp {self.tp} x dcp {self.dcp}, {self.combine}"

    @property
    def spec(self) -> AttentionSpec:
        """Attention of the heads of one group."""
        heads, kv_heads = SPEC.num_qo_heads // self.tp, SPEC.num_kv_heads // self.tp
        return replace(SPEC, num_qo_heads=heads, num_kv_heads=kv_heads)


def ways_for(ranks: int) -> list[Way]:
    """All ways of sharing that a number of ranks has here."""
    ways = [Way(ranks, 1, "ag_rs"), Way(ranks, 1, "a2a"), Way(ranks, ranks, None)]
    if ranks >= 4:
        ways += [Way(ranks, ranks // 2, "ag_rs"), Way(ranks, ranks // 2, "a2a")]
    return ways


@dataclass(frozen=True)
class Problem:
    """Numbers of a case on one device, the same on every device of a kind.

    Parameters
    ----------
    case, device, dtype
        What, where, and in which element type.
    """

    case: Case
    device: str
    dtype: torch.dtype

    @cached_property
    def batch_lens(self) -> tuple[np.ndarray, np.ndarray]:
        """Query and KV lengths, ``[requests]`` int32."""
        case = self.case
        query = np.full(case.requests, case.query, np.int32)
        return query, np.full(case.requests, case.context, np.int32)

    def batch(self, ranks: int) -> RaggedBatch:
        """The step where an entry of the page table stands for a page on each of `ranks`."""
        pages = -(-self.case.context // (PAGE_SIZE * ranks))
        order = np.random.default_rng(1).permutation(pages * self.case.requests)
        table = order.reshape(self.case.requests, pages).astype(np.int32)
        return RaggedBatch(*self.batch_lens, table)

    def bucket(self, ranks: int) -> Bucket:
        """Sizes of the step on one rank."""
        case = self.case
        pages = case.requests * -(-case.context // (PAGE_SIZE * ranks))
        return Bucket(case.requests, case.requests * case.query, pages, case.query)

    def _numbers(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return numbers.to(self.dtype)

    @cached_property
    def query(self) -> Tensor:
        """``[tokens, num_qo_heads, head_dim]``."""
        tokens = self.case.requests * self.case.query
        return self._numbers(0, tokens, SPEC.num_qo_heads, SPEC.head_dim)

    def stored(self, request: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a request, ``[context, num_kv_heads, head_dim]``."""
        shape = (self.case.context, SPEC.num_kv_heads, SPEC.head_dim)
        return self._numbers(2 * request + 1, *shape), self._numbers(2 * request + 2, *shape)

    @cached_property
    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens, ``[tokens, num_kv_heads, head_dim]``."""
        first = self.case.context - self.case.query
        rows = [[part[first:] for part in self.stored(i)] for i in range(self.case.requests)]
        key, value = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return key, value

    def cache(self, way: Way, rank: int) -> PagedKVCache:
        """What a rank has in its cache: its own tokens of its group's heads."""
        spec, (group, place) = way.spec, divmod(rank, way.dcp)
        batch = self.batch(way.dcp)
        assert batch.page_table is not None
        cache = PagedKVCache(
            spec,
            num_layers=1,
            num_pages=batch.page_table.size,
            page_size=PAGE_SIZE,
            dtype=self.dtype,
            device=self.device,
        )
        heads = slice(group * spec.num_kv_heads, (group + 1) * spec.num_kv_heads)
        positions = np.arange(self.case.context, dtype=np.int32)
        own = positions[TokenShards(way.dcp).owner(positions) == place]
        order = torch.arange(own.size, device=self.device)
        for request, pages in enumerate(batch.page_table):
            page = torch.from_numpy(pages).to(self.device).long()[order // PAGE_SIZE]
            there = torch.from_numpy(own).to(self.device).long()
            for pool, numbers in zip(cache.pools(0), self.stored(request), strict=True):
                pool[page, order % PAGE_SIZE] = numbers[there][:, heads]
        return cache

    def heads_of(self, way: Way, rank: int) -> slice:
        """Query heads of a rank."""
        count = SPEC.num_qo_heads // way.ranks
        return slice(rank * count, (rank + 1) * count)

    def kv_heads_of(self, way: Way, rank: int) -> slice:
        """Key and value heads of a rank's group."""
        count, group = SPEC.num_kv_heads // way.tp, rank // way.dcp
        return slice(group * count, (group + 1) * count)

    @cached_property
    def answer(self) -> Tensor:
        """What one device computes of the whole, ``[tokens, num_qo_heads, head_dim]``."""
        whole = Way(1, 1, None)
        cache = self.cache(whole, 0)
        plan = torch_backend.plan(
            SPEC, cache.spec, self.batch(1), bucket=self.bucket(1), device=self.device
        )
        out = torch_backend.paged_attention(self.query, *self.new_rows, cache, plan, 0)
        assert isinstance(out, Tensor)
        return out

    def difference(self, out: Tensor, heads: slice) -> float:
        """Largest difference between `out` and the whole answer's `heads`."""
        return float((out.float() - self.answer[:, heads].float()).abs().max())
