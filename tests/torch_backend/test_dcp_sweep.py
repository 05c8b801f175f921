"""A cache spread over ranks, for many sizes; the ranks are threads (tests/dcp_threads.py)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from dcp_problem import Shared, Sizes, assert_dealt, shared
from dcp_ranks import cache_of, rows_of
from dcp_threads import Threads, threads
from hypothesis import given
from hypothesis import strategies as st
from problem import NUMPY_DTYPES, Array, assert_within, from_torch, to_torch, tolerance_of

from interop import AttentionSpec, Bucket, RaggedBatch
from interop.dcp import COMBINES
from torch_backend import PagedKVCache, attention, dcp
from torch_backend.quantising import dequantise_fp8, dequantise_nvfp4, nvfp4_regions

# Of 3 ranks each has 2 query heads, and a key/value head serves 3: the two do not nest.
HEADS = {1: (4, 2), 2: (4, 1), 3: (6, 2), 4: (4, 4), 8: (8, 2)}


def solve(problem: Shared, group: Threads) -> None:
    """Compare all ranks' results of a step, combined in both ways, with the oracle."""
    want, want_lse = problem.answer()
    tolerance = tolerance_of(problem.dtype)
    whole = problem.pools_after()
    for combine in COMBINES:

        def rank_of(rank: int, combine: str = combine) -> Any:
            cache = cache_of(problem, rank)
            plan = dcp.plan(
                problem.spec, cache.spec, problem.batch, group, verify=False,
                interleave=problem.sizes.interleave, bucket=problem.bucket,
            )  # fmt: skip
            rows = rows_of(problem, rank)
            state = dcp.paged_attention(
                *rows, cache, plan, 0, group, combine=combine, return_lse=True
            )
            return [from_torch(x) for x in (*state, cache.k, cache.v)]

        found = group.run(rank_of)
        out, lse = (np.concatenate([each[i] for each in found], 1) for i in (0, 1))
        assert_within(f"out of {combine}", out, want, 2 * tolerance.out)
        assert_within(f"lse of {combine}", lse, want_lse, 2 * tolerance.lse)
        for rank, each in enumerate(found):
            assert_dealt(problem, rank, each[2:], whole)


@pytest.mark.parametrize("interleave", [1, 2, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_lengths_around_every_page(ranks: int, interleave: int) -> None:
    """Lengths next to each multiple of what a page of all ranks, or a round of runs, holds."""
    query_heads, kv_heads = HEADS[ranks]
    spec = AttentionSpec(query_heads, kv_heads, 4)
    with threads(ranks) as group:
        for page_size in (interleave, 2 * interleave):
            sizes = Sizes(ranks, interleave, page_size, num_pages=48)
            around = {sizes.round, 2 * sizes.round, 3 * sizes.round, ranks * interleave, ranks, 1}
            lens = sorted({max(at + by, 0) for at in around for by in (-1, 0, 1)})
            ones = [min(length, 1) for length in lens]
            # A one-token query among longer ones is served in two parts, among its like in one.
            longer = [min(length, (1, 4, 0, 2)[i % 4]) for i, length in enumerate(lens)]
            solve(shared(spec, sizes, ones, lens), group)
            solve(shared(spec, sizes, longer, lens), group)


def test_what_an_empty_share_holds_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may leave anything in the output of a row that saw no key."""
    attend, empty = attention.attend, []

    def careless(*args: Any, **options: Any) -> Any:
        out, lse = attend(*args, **options)
        out[torch.isneginf(lse)] = torch.nan
        empty.append(int(torch.isneginf(lse).sum()))
        return out, lse

    monkeypatch.setattr(attention, "attend", careless)
    spec = AttentionSpec(8, 2, 4)
    with threads(4) as group:
        solve(shared(spec, Sizes(4), [1, 1, 0, 1], [1, 3, 0, 9]), group)
        solve(shared(spec, Sizes(4, 2), [3, 1, 0, 5], [3, 3, 4, 7]), group)
    assert sum(empty) > 0


@dataclass(frozen=True)
class Story:
    """Requests that grow from step to step, over one set of caches."""

    ranks: int
    interleave: int
    page_size: int
    layout: str
    dtype: str
    spec: AttentionSpec
    steps: list[list[int]]  # new tokens of each request
    spare: tuple[int, int, int]  # requests, tokens and pages of the buckets that nobody uses
    seed: int


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Chunked prefills, decodes, pauses and mixtures of them."""
    ranks = draw(st.sampled_from((1, 2, 3, 4, 8)))
    heads = ranks * draw(st.sampled_from((1, 2, 3)))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
    width, width_v = draw(st.sampled_from(((4, 4), (8, 6), (5, 3))))
    cap = draw(st.sampled_from((None, None, 2.0)))
    interleave = draw(st.sampled_from((1, 2, 4)))
    requests = draw(st.integers(1, 3))
    one = st.lists(st.sampled_from((0, 1, 1, 2, 3, 7, 19)), min_size=requests, max_size=requests)
    return Story(
        ranks,
        interleave,
        interleave * draw(st.sampled_from((1, 2, 3))),
        draw(st.sampled_from(("NHD", "HND"))),
        draw(st.sampled_from(("float32", "float32", "float16", "bfloat16"))),
        AttentionSpec(
            heads, kv_heads, width, head_dim_v=width_v, logits_soft_cap=cap, sm_scale=0.6
        ),
        draw(st.lists(one, min_size=1, max_size=4)),
        draw(st.sampled_from(((0, 0, 0), (1, 2, 5)))),
        draw(st.integers(0, 1000)),
    )


class Told:
    """The numbers of a story: every request's rows from its first token on."""

    def __init__(self, story: Story) -> None:
        self.story = story
        spec, rng = story.spec, np.random.default_rng(story.seed)
        self.lens = np.cumsum(story.steps, 0)
        shapes = (
            (spec.num_qo_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim_v),
        )
        self.rows = [
            [
                rng.standard_normal((int(most), *shape), np.float32).astype(
                    NUMPY_DTYPES[story.dtype]
                )
                for shape in shapes
            ]
            for most in self.lens[-1]
        ]
        counts = -(-self.lens[-1] // (story.page_size * story.ranks))
        self.num_pages = int(counts.sum()) + 2
        pages = rng.permutation(self.num_pages)[: counts.sum()].astype(np.int32)
        self.table = np.full((len(counts), max(1, *counts)), -1, np.int32)
        for row, mine in zip(self.table, np.split(pages, np.cumsum(counts)[:-1]), strict=True):
            row[: len(mine)] = mine

    def batch(self, step: int) -> tuple[RaggedBatch, Bucket]:
        batch = RaggedBatch(self.story.steps[step], self.lens[step], self.table)
        more = self.story.spare
        bucket = Bucket(
            batch.num_requests + more[0],
            batch.num_tokens + more[1],
            self.num_pages + more[2],
            batch.max_query_len if batch.num_tokens else 1,
        )
        return batch, bucket

    def of_step(self, step: int) -> list[Array]:
        """Query of all heads, key and value; rows to spare hold NaN."""
        lens, query_lens = self.lens[step], self.story.steps[step]
        parts = []
        for kind in range(3):
            rows = [
                mine[kind][length - count : length]
                for mine, length, count in zip(self.rows, lens, query_lens, strict=True)
            ]
            spare = np.full((self.story.spare[1], *rows[0].shape[1:]), np.nan, rows[0].dtype)
            parts.append(np.concatenate([*rows, spare]))
        return parts

    def answer(self, step: int) -> tuple[Array, Array]:
        spec = self.story.spec
        states = [
            oracle.attend_request(
                mine[0][length - count : length], mine[1][:length], mine[2][:length],
                sm_scale=spec.sm_scale, logits_soft_cap=spec.logits_soft_cap,
            )
            for mine, length, count in zip(
                self.rows, self.lens[step], self.story.steps[step], strict=True
            )
        ]  # fmt: skip
        spare = self.story.spare[1]
        out = np.zeros((spare, spec.num_qo_heads, spec.head_dim_v))
        lse = np.full(out.shape[:2], -np.inf)
        return (
            np.concatenate([*(state[0] for state in states), out]),
            np.concatenate([*(state[1] for state in states), lse]),
        )


def new_cache(story: Story, num_pages: int, **options: Any) -> PagedKVCache:
    """One rank's cache of two layers."""
    return PagedKVCache(
        story.spec, num_layers=2, num_pages=num_pages, page_size=story.page_size,
        layout=story.layout, **({"dtype": story.dtype} | options),
    )  # fmt: skip


def tell(
    told: Told,
    group: Threads,
    caches: list[PagedKVCache],
    step: int,
    combine: str,
    *,
    write: bool = True,
) -> Any:
    """One step of all ranks on the second layer: output and LSE of all heads."""
    story, (batch, bucket) = told.story, told.batch(step)
    heads = story.spec.num_qo_heads // story.ranks
    query, key, value = (to_torch(x, "cpu") for x in told.of_step(step))

    def rank_of(rank: int) -> Any:
        cache = caches[rank]
        plan = dcp.plan(
            story.spec, cache.spec, batch, group,
            interleave=story.interleave, bucket=bucket, verify=False,
        )  # fmt: skip
        mine = query[:, rank * heads : (rank + 1) * heads].contiguous()
        call = dcp.paged_attention if write else dcp.attend
        return call(mine, key, value, cache, plan, 1, group, combine=combine, return_lse=True)

    found = group.run(rank_of)
    return [torch.cat([each[i] for each in found], 1) for i in (0, 1)]


@given(stories())
def test_steps_over_one_set_of_caches(story: Story) -> None:
    """Whatever the chunks, each step sees all that came before it, and nothing else."""
    told = Told(story)
    tolerance = tolerance_of(story.dtype)
    with threads(story.ranks) as group:
        caches = [new_cache(story, told.num_pages) for _ in range(story.ranks)]
        for cache in caches:
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)
        for step, combine in zip(range(len(story.steps)), itertools.cycle(COMBINES), strict=False):
            out, lse = tell(told, group, caches, step, combine)
            want, want_lse = told.answer(step)
            assert_within(f"out of step {step}", from_torch(out), want, 2 * tolerance.out)
            assert_within(f"lse of step {step}", lse.numpy(), want_lse, 2 * tolerance.lse)


def dequantised(story: Story, cache: PagedKVCache) -> PagedKVCache:
    """A cache of float32 that holds the same numbers."""
    plain = new_cache(story, cache.spec.num_pages)
    by_head = cache.spec.layout == "HND"
    for side, target in enumerate(plain.pools(1)):
        pool, scale = cache.pools(1)[side], cache.scales[1, side]
        if cache.spec.dtype.startswith("nvfp4"):
            parts = nvfp4_regions(pool)
            real = dequantise_nvfp4(*(x.transpose(1, 2) if by_head else x for x in parts), scale)
        else:
            real = dequantise_fp8(pool.transpose(1, 2) if by_head else pool, scale)
        target.copy_(real.transpose(1, 2) if by_head else real)
    return plain


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 2), (3, 1), (4, 2)])
def test_quantised_pages(ranks: int, interleave: int, dtype: str, layout: str) -> None:
    """A rank reads its pages as pages of float32 that hold the same numbers.

    The step's own rows are attended to before they are rounded where a query of the step has more
    than one, and from the pages where each has one; both caches have them in both places.
    """
    spec = AttentionSpec(12, 2, 16, dtype="float32")
    steps = [[21, 3, 0], [1, 1, 0], [6, 1, 2], [1, 1, 1]]
    story = Story(ranks, interleave, 4, layout, "float32", spec, steps, (1, 3, 2), seed=3)
    told = Told(story)
    scale = (0.004, 0.006) if dtype.startswith("nvfp4") else (0.02, 0.03)
    caches = [new_cache(story, told.num_pages, dtype=dtype, scales=scale) for _ in range(ranks)]
    with threads(ranks) as group:
        for step, combine in zip(range(len(steps)), itertools.cycle(COMBINES), strict=False):
            out, lse = tell(told, group, caches, step, combine)
            plain = [dequantised(story, cache) for cache in caches]
            want, want_lse = tell(told, group, plain, step, combine, write=False)
            assert_within("out", out.numpy(), want.numpy(), 1e-5)
            assert_within("lse", lse.numpy(), want_lse.numpy(), 1e-5)
            exact, _ = told.answer(step)
            error = np.abs(out.numpy() - exact).max()
            # The first step has no context, so nothing that it reads is rounded.
            assert error < 1e-5 if step == 0 else 1e-4 < error < 0.6
