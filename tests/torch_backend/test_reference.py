"""The reference family: bounded memory, deaf to what no query may see, sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from small import SPEC, new_cache
from torch.autograd.profiler import profile

import torch_backend
from interop import AttentionSpec, RaggedBatch
from torch_backend.kernels.reference import EXTRA_BYTES


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes of tensors that were alive at once during `work`, beyond those before it.

    The profiler sees each allocation of PyTorch's allocator, those inside operators included.
    """
    with profile(profile_memory=True) as profiled:
        work()
    events = profiled.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    alive = most = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        alive += size
        most = max(most, alive)
    return most


def test_the_measure_itself() -> None:
    def work() -> None:
        for _ in range(3):
            torch.empty(1 << 20)
        torch.empty(1 << 20).sum() + torch.empty(1 << 21).sum()

    assert 8 << 20 <= peak_bytes(work) < 13 << 20


@dataclass(frozen=True)
class Load:
    """Requests of one length; the context is one set of pages that they all share."""

    requests: int
    query_len: int
    kv_len: int
    spec: AttentionSpec = AttentionSpec(8, 2, 64)  # noqa: RUF009 - immutable
    page_size: int = 16
    dtype: str = "float32"

    def bytes_to_gather(self) -> int:
        """Keys and values of all requests in float32, which is what must not be held at once."""
        width = self.spec.num_kv_heads * (self.spec.head_dim + self.spec.head_dim_v)
        return 4 * self.requests * self.kv_len * width


LOADS = {
    "few long": Load(2, 1, 60_000),
    "many": Load(64, 1, 4096),
    "three times as many": Load(192, 1, 4096),
    "pages of one token": Load(8, 1, 16384, page_size=1),
    "huge pages of 16 bits": Load(64, 1, 4096, page_size=1024, dtype="bfloat16"),
    "long prefill": Load(1, 2000, 2000),
    "many prefills, one KV head": Load(128, 64, 64, AttentionSpec(32, 1, 128)),
    "thousands of tiny requests": Load(4096, 1, 1, AttentionSpec(32, 1, 128)),
    "drafts": Load(32, 4, 2048, AttentionSpec(32, 8, 64, logits_soft_cap=20.0)),
    "a window": Load(64, 1, 8192, AttentionSpec(8, 2, 64, sliding_window=2048)),
}


@pytest.mark.parametrize("name", LOADS)
def test_extra_memory_is_bounded_whatever_the_batch(name: str) -> None:
    load = LOADS[name]
    shared = (load.kv_len - load.query_len) // load.page_size
    own = -(-load.kv_len // load.page_size) - shared
    table = np.empty((load.requests, shared + own), np.int32)
    table[:, :shared] = np.arange(shared)
    table[:, shared:] = shared + np.arange(load.requests * own).reshape(load.requests, own)
    sizes = {"num_layers": 1, "num_pages": shared + load.requests * own}
    sizes |= {"page_size": load.page_size}
    cache = torch_backend.PagedKVCache(load.spec, dtype=load.dtype, **sizes)  # type: ignore[arg-type]
    batch = RaggedBatch([load.query_len] * load.requests, [load.kv_len] * load.requests, table)
    plan = torch_backend.plan(load.spec, cache.spec, batch)
    query = torch.zeros(plan.static.query_shape, dtype=cache.k.dtype)
    results: list[Any] = []
    most = peak_bytes(
        lambda: results.extend(torch_backend.attend(query, cache, plan, 0, return_lse=True))
    )
    most -= sum(result.nbytes for result in results)
    assert most <= EXTRA_BYTES, f"{most / 2**20:.0f} of {EXTRA_BYTES / 2**20:.0f} MiB"


def test_some_of_these_loads_would_not_fit_at_once() -> None:
    assert LOADS["many"].bytes_to_gather() > 2 * EXTRA_BYTES
    assert LOADS["three times as many"].bytes_to_gather() > 6 * EXTRA_BYTES


POISON = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "spec",
    [SPEC, AttentionSpec(4, 2, 8, causal=False), AttentionSpec(4, 2, 8, logits_soft_cap=5.0)],
    ids=["causal", "not causal", "cap"],
)
def test_nothing_outside_of_a_request_is_read(
    poison: float, layout: str, spec: AttentionSpec
) -> None:
    batch = RaggedBatch([1, 3, 0, 2], [6, 3, 5, 9], [[7, 2, 0], [10, 0, 0], [4, 11, 0], [5, 1, 8]])
    clean = new_cache(seed=5, layout=layout)
    dirty = new_cache(layout=layout)
    dirty.k.fill_(poison)
    dirty.v.fill_(poison)
    # Only the tokens of the requests that ask, in the layer that they ask.
    for pool, other in zip(clean.pools(1), dirty.pools(1), strict=True):
        for request in (0, 1, 3):
            assert batch.page_table is not None
            for token in range(int(batch.kv_lens[request])):
                page = int(batch.page_table[request, token // 4])
                place = (page, token % 4) if layout == "NHD" else (page, slice(None), token % 4)
                other[place] = pool[place]
    query = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(6))
    plan = torch_backend.plan(spec, clean.spec, batch)
    want = torch_backend.attend(query, clean, plan, 1, return_lse=True)
    got = torch_backend.attend(query, dirty, plan, 1, return_lse=True)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("query_len", [1, 3])
def test_pages_that_left_the_window_may_be_anybodys(poison: float, query_len: int) -> None:
    spec = AttentionSpec(4, 2, 8, sliding_window=5)
    # 18 tokens in pages of 4; the first query sees back to token 18 - 3 - 4 = 11, in page 2.
    batch = RaggedBatch([query_len], [18], [[0, 1, 2, 3, 4]])
    cache = new_cache(seed=7)
    query = torch.randn(query_len, 4, 8, generator=torch.Generator().manual_seed(8))
    plan = torch_backend.plan(spec, cache.spec, batch)
    want = torch_backend.attend(query, cache, plan, 0)
    for pool in cache.pools(0):
        pool[:2] = poison
        pool[2, :3] = poison
    got = torch_backend.attend(query, cache, plan, 0)
    assert isinstance(got, torch.Tensor)
    assert isinstance(want, torch.Tensor)
    assert torch.isfinite(got).all()
    assert torch.equal(got, want)


@pytest.mark.parametrize("poison", POISON)
def test_padding_rows_of_a_step_may_hold_anything(poison: float) -> None:
    cache = new_cache(seed=9)
    batch = RaggedBatch([2], [2], [[3]])
    bucket = torch_backend.plan(SPEC, cache.spec, batch).bucket
    plan = torch_backend.plan(
        SPEC,
        cache.spec,
        batch,
        bucket=type(bucket)(2, 5, 4, without_context=True),
    )
    query, key, value = (torch.full((5, heads, 8), poison) for heads in (4, 2, 2))
    for array in (query, key, value):
        array[:2] = 1.0
    out, lse = torch_backend.paged_attention(query, key, value, cache, plan, 0, return_lse=True)
    assert torch.isfinite(out).all()
    assert not out[2:].any()
    assert (lse[2:] == -torch.inf).all()
    assert all(torch.isfinite(pool).all() for pool in (cache.k, cache.v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bit_values_are_kept_in_32_bits(dtype: str) -> None:
    # A running sum of ones in bfloat16 stops at 256, in float16 at 2048: past that, the mean of
    # alternating 1 and 2 over 6000 keys is wrong, and so is the count that the LSE tells.
    spec = AttentionSpec(2, 1, 8)
    cache = torch_backend.PagedKVCache(spec, num_layers=1, num_pages=375, dtype=dtype)
    cache.v[:, ::2] = 1.0
    cache.v[:, 1::2] = 2.0
    batch = RaggedBatch([1], [6000], np.arange(375)[None])
    plan = torch_backend.plan(spec, cache.spec, batch)
    query = torch.zeros(1, 2, 8, dtype=cache.k.dtype)
    out, lse = torch_backend.attend(query, cache, plan, 0, return_lse=True)
    assert out.dtype == cache.k.dtype
    assert (out == 1.5).all()
    assert lse.dtype == torch.float32
    np.testing.assert_allclose(lse.numpy(), np.log(6000), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_16_bit_values_are_kept_in_32_bits(dtype: str) -> None:
    # Logits of about 300, which 16 bits know to 0.25 or 2 only: a rounded one moves the LSE.
    rng = np.random.default_rng(10)
    spec = AttentionSpec(2, 2, 64, sm_scale=1.0)
    cache = torch_backend.PagedKVCache(spec, num_layers=1, num_pages=4, dtype=dtype)
    for pool in (cache.k, cache.v):
        pool.copy_(torch.from_numpy(rng.standard_normal(pool.shape)))
    query = torch.from_numpy(40 * rng.standard_normal((3, 2, 64))).to(cache.k.dtype)
    batch = RaggedBatch([3], [64], [[0, 1, 2, 3]])
    plan = torch_backend.plan(spec, cache.spec, batch)
    _, lse = torch_backend.attend(query, cache, plan, 0, return_lse=True)
    wide = [x.double().numpy() for x in (query, cache.k.flatten(0, 1), cache.v.flatten(0, 1))]
    _, want = oracle.attend_request(*wide, sm_scale=1.0)
    assert np.abs(want).max() > 300
    np.testing.assert_allclose(lse.numpy(), want, rtol=1e-6)
