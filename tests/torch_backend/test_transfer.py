"""A request leaves a cache and comes back, anywhere: the same bytes, and no others are touched."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_backend
from interop import AttentionSpec, RaggedBatch
from interop.errors import (
    ArgumentError,
    DTypeError,
    FrameworkError,
    LengthError,
    PageError,
    ShapeError,
)
from torch_backend import PagedKVCache
from torch_backend.saved import VERSION_KEY, read_file, write_file
from torch_backend.transfer import copy_request, restore_pages, save_pages

# 32 wide, since NVFP4 shares a scale among 16.
SPEC = AttentionSpec(4, 2, 32, head_dim_v=48, dtype="float32")
FLOATS = ["float32", "float16", "bfloat16"]
QUANTISED = ["float8_e4m3fn", "float8_e5m2", "nvfp4", "nvfp4_4over6"]
SCALES = torch.arange(2.0, 14.0).view(3, 2, 2) / 4
LAYERS, PAGES, PAGE_SIZE, KV_LEN = 3, 9, 4, 10
HERE, THERE = [7, 2, 5], [8, 0, 3, 6]


def new_cache(
    dtype: str = "float32", spec: AttentionSpec = SPEC, seed: int = 1, **sizes: Any
) -> PagedKVCache:
    """A cache full of noise, in which all bytes are possible."""
    default = {"num_layers": LAYERS, "num_pages": PAGES, "page_size": PAGE_SIZE, "dtype": dtype}
    scales = SCALES if dtype in QUANTISED else None
    cache = PagedKVCache(spec, **({"scales": scales} | default | sizes))
    generator = torch.Generator().manual_seed(seed)
    for pool in (cache.k, cache.v):
        noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8, generator=generator)
        pool.copy_(noise.view(pool.dtype).view(pool.shape))
    return cache


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))


def expected_rows(cache: PagedKVCache, pages: list[int], kv_len: int) -> tuple[Tensor, Tensor]:
    """Rows of a request, token by token, as bytes ``[layers, kv_len, heads, bytes]``."""
    spec = cache.spec
    sides = []
    for pool in (cache.k, cache.v):
        width = as_bytes(pool[:1]).shape[3]
        rows = torch.zeros(LAYERS, kv_len, spec.num_kv_heads, width, dtype=torch.uint8)
        for layer in range(LAYERS):
            for token in range(kv_len):
                page = as_bytes(pool[layer * spec.num_pages + pages[token // spec.page_size]])
                offset = token % spec.page_size
                for head in range(spec.num_kv_heads):
                    at = (offset, head) if spec.layout == "NHD" else (head, offset)
                    rows[layer, token, head] = row_of(page, at, spec.dtype)
        sides.append(rows)
    return sides[0], sides[1]


def row_of(page: Tensor, at: tuple[int, int], dtype: str) -> Tensor:
    """The bytes of one token and head of a page ``[d1, d2, bytes]``."""
    if not dtype.startswith("nvfp4"):
        return page[at]
    # All data of the page, then all block scales: 8 bytes of the one for each of the other.
    d1, d2, width = page.shape
    blocks = width // 9
    data = page.flatten()[: d1 * d2 * 8 * blocks].view(d1, d2, -1)
    scales = page.flatten()[d1 * d2 * 8 * blocks :].view(d1, d2, -1)
    return torch.cat([data[at], scales[at]])


def owned_bytes(cache: PagedKVCache, pages: list[int], kv_len: int) -> tuple[Tensor, Tensor]:
    """True for each byte of the pools that belongs to a token of the request."""
    marks = []
    for pool in (cache.k, cache.v):
        mark = torch.zeros_like(as_bytes(pool), dtype=torch.bool)
        for layer in range(LAYERS):
            for token in range(kv_len):
                page = mark[layer * cache.spec.num_pages + pages[token // cache.spec.page_size]]
                offset = token % cache.spec.page_size
                for head in range(cache.spec.num_kv_heads):
                    at = (offset, head) if cache.spec.layout == "NHD" else (head, offset)
                    row_of(page, at, "plain")[:] = True
        marks.append(mark)
    return marks[0], marks[1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", FLOATS + QUANTISED)
def test_saved_rows_are_those_of_the_tokens(dtype: str, layout: str) -> None:
    cache = new_cache(dtype=dtype, layout=layout)
    before = as_bytes(cache.k), as_bytes(cache.v)
    saved = save_pages(cache, [*HERE, 99], KV_LEN)  # nothing reads the page past the last token
    for rows, wanted in zip(
        (saved.key, saved.value), expected_rows(cache, HERE, KV_LEN), strict=True
    ):
        assert torch.equal(as_bytes(rows), wanted)
    assert saved.spec == cache.spec
    assert saved.kv_len == KV_LEN
    assert saved.num_bytes == saved.key.nbytes + saved.value.nbytes
    assert saved.ready
    assert (saved.scales is None) == (dtype in FLOATS)
    assert saved.scales is None or torch.equal(saved.scales, SCALES)
    assert torch.equal(as_bytes(cache.k), before[0])
    assert torch.equal(as_bytes(cache.v), before[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", FLOATS + QUANTISED)
def test_it_comes_back_into_pages_of_another_size(dtype: str, layout: str) -> None:
    source = new_cache(dtype=dtype)
    target = new_cache(dtype=dtype, layout=layout, page_size=3)
    before = as_bytes(target.k), as_bytes(target.v)
    restore_pages(save_pages(source, HERE, KV_LEN), target, [*THERE, 1])
    for got, wanted in zip(
        expected_rows(target, THERE, KV_LEN), expected_rows(source, HERE, KV_LEN), strict=True
    ):
        assert torch.equal(got, wanted)
    if dtype.startswith("nvfp4"):
        return  # which bytes belong to a token is what the rows above are found by
    for pool, old, owned in zip(
        (target.k, target.v), before, owned_bytes(target, THERE, KV_LEN), strict=True
    ):
        assert torch.equal(as_bytes(pool)[~owned], old[~owned])


@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_leaves_the_rest_of_its_pages_alone(dtype: str) -> None:
    target = new_cache(dtype=dtype, page_size=3)
    everything = [list(range(PAGES)), 3 * PAGES]
    before = expected_rows(target, *everything)
    restore_pages(save_pages(new_cache(dtype="nvfp4"), HERE, KV_LEN), target, THERE)
    mine = torch.zeros(3 * PAGES, dtype=torch.bool)
    mine[[3 * THERE[token // 3] + token % 3 for token in range(KV_LEN)]] = True
    for old, new in zip(before, expected_rows(target, *everything), strict=True):
        assert torch.equal(old[:, ~mine], new[:, ~mine])
        assert not torch.equal(old[:, mine], new[:, mine])


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "nvfp4"])
def test_attention_over_it_is_the_same(dtype: str) -> None:
    source = new_cache(dtype=dtype)
    # Noise that is NaN would be no test of anything.
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(KV_LEN, 2, n, generator=generator) for n in (32, 48))
    fill = torch_backend.plan(SPEC, source.spec, RaggedBatch([KV_LEN], [KV_LEN], [HERE]))
    for layer in range(LAYERS):
        torch_backend.append(key, value, source, fill, layer)
    target = new_cache(dtype=dtype, layout="HND", page_size=3)
    restore_pages(save_pages(source, HERE, KV_LEN), target, THERE)
    other = new_cache(dtype=dtype, page_size=16)
    copy_request(target, THERE, other, [4], KV_LEN)
    query = torch.randn(2, 4, 32, generator=generator)
    answers = []
    for cache, pages in ((source, HERE), (target, THERE), (other, [4])):
        plan = torch_backend.plan(SPEC, cache.spec, RaggedBatch([2], [KV_LEN], [pages]))
        answers.append(torch_backend.attend(query, cache, plan, 1))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert answers[0].isfinite().all()


@given(st.data())
def test_from_any_pages_to_any_others(data: st.DataObject) -> None:
    spec = AttentionSpec(2, 2, 4)
    kv_len = data.draw(st.integers(0, 20), "kv_len")
    caches, places = [], []
    for name in ("source", "target"):
        page_size = data.draw(st.integers(1, 7), f"{name} page size")
        layout = data.draw(st.sampled_from(["NHD", "HND"]), f"{name} layout")
        order = data.draw(st.permutations(range(-(-kv_len // page_size) + 2)), f"{name} pages")
        sizes: dict[str, Any] = {
            "num_pages": len(order),
            "page_size": page_size,
            "layout": layout,
            "seed": len(caches),
        }
        caches.append(new_cache(spec=spec, **sizes))
        places.append(order[: len(order) - 2])
    source, target = caches
    wanted = save_pages(source, places[0], kv_len)
    restored = new_cache(spec=spec, **sizes)
    restore_pages(wanted, restored, places[1])
    copy_request(source, places[0], target, places[1], kv_len)
    for cache in (restored, target):
        got = save_pages(cache, places[1], kv_len)
        assert same(got.key, wanted.key)
        assert same(got.value, wanted.value)
    # Both began alike, and whatever else was written would have to be written alike.
    assert same(restored.k, target.k)


def test_several_requests_at_once() -> None:
    cache = new_cache()
    table, kv_lens = np.array([[7, 2, 5], [1, 0, 0], [3, 8, 0]]), [10, 4, 0]
    several = save_pages(cache, table, kv_lens)
    assert [saved.kv_len for saved in several] == kv_lens
    for saved, row, kv_len in zip(several, table, kv_lens, strict=True):
        alone = save_pages(cache, row, kv_len)
        assert same(saved.key, alone.key)
    target = new_cache(page_size=8)
    restore_pages(several, target, [[5, 1], [0], []])
    for saved, pages in zip(several, ([5, 1], [0], []), strict=True):
        back = save_pages(target, np.array(pages, np.int64), saved.kv_len)
        assert same(back.key, saved.key)
        assert same(back.value, saved.value)
    assert save_pages(cache, [], []) == []
    restore_pages([], target, [])


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC", "LBNHC"])
def test_caches_of_other_engines(order: str) -> None:
    """Their rows lie far apart, and so may their layers."""
    sizes = {"L": LAYERS, "B": PAGES, "H": 2, "N": PAGE_SIZE, "C": 80}
    whole = torch.randn([sizes[letter] for letter in order])
    imported = PagedKVCache.from_packed(whole, spec=SPEC, order=order)
    own = new_cache(page_size=3)
    saved = save_pages(imported, HERE, KV_LEN)
    restore_pages(saved, own, THERE)
    assert same(save_pages(own, THERE, KV_LEN).key, saved.key)
    before = whole.clone()
    copy_request(own, THERE, imported, [0, 1, 3], KV_LEN)
    assert same(save_pages(imported, [0, 1, 3], KV_LEN).value, saved.value)
    blocks = order.index("B")
    untouched = torch.tensor([2, 4, 5, 6, 7, 8])
    assert torch.equal(
        whole.index_select(blocks, untouched), before.index_select(blocks, untouched)
    )


def test_pages_of_the_same_cache() -> None:
    cache = new_cache()
    wanted = save_pages(cache, HERE, KV_LEN)
    copy_request(cache, HERE, cache, [2, 7, 0], KV_LEN)  # two of them trade places
    assert same(save_pages(cache, [2, 7, 0], KV_LEN).key, wanted.key)


def test_what_was_saved_does_not_change_with_the_cache() -> None:
    cache = new_cache(dtype="float8_e4m3fn")
    saved = save_pages(cache, HERE, KV_LEN)
    key, scales = saved.key.clone(), SCALES.clone()
    cache.k.zero_()
    cache.set_scales(2 * SCALES)
    assert same(saved.key, key)
    assert saved.scales is not None
    assert torch.equal(saved.scales, scales)
    assert torch.equal(SCALES, scales), "the cache has kept the tensor that it was given"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "nvfp4"])
def test_it_can_be_sent_to_another_process(dtype: str) -> None:
    saved = save_pages(new_cache(dtype=dtype), HERE, KV_LEN)
    received = pickle.loads(pickle.dumps(saved))
    for one, other in ((received.key, saved.key), (received.value, saved.value)):
        assert same(one, other)
    assert saved.scales is None or torch.equal(received.scales, saved.scales)
    assert received.spec == saved.spec


Refusal = tuple[dict[str, Any], type[ArgumentError], str]
REFUSED_TARGETS: list[Refusal] = [
    ({"num_layers": 2, "scales": None}, ShapeError, "cache.spec.num_layers: got 2, want 3"),
    (
        {"spec": AttentionSpec(4, 4, 32, head_dim_v=48), "scales": None},
        ShapeError,
        "cache.spec.num_kv_heads: got 4, want 2",
    ),
    ({"spec": AttentionSpec(4, 2, 16, head_dim_v=48)}, ShapeError, "head_dim: got 16, want 32"),
    ({"spec": AttentionSpec(4, 2, 32)}, ShapeError, "head_dim_v: got 32, want 48"),
    ({"dtype": "float16", "scales": None}, DTypeError, "dtype: got float16, want float8_e4m3fn"),
    ({"dtype": "float8_e5m2"}, DTypeError, "Nothing is converted"),
    ({"scales": None}, ArgumentError, r"cache.scales\[0, 0, 0\]: got 1, want 0.5, with which"),
    ({"scales": SCALES.flip(2)}, ArgumentError, r"cache.scales\[0, 0, 0\]: got 0.75, want 0.5"),
]


@pytest.mark.parametrize(("changes", "error", "match"), REFUSED_TARGETS)
def test_a_cache_that_would_read_other_numbers_is_refused(
    changes: dict[str, Any], error: type[ArgumentError], match: str
) -> None:
    source = new_cache(dtype="float8_e4m3fn")
    target = new_cache(**({"dtype": "float8_e4m3fn"} | changes))
    before = as_bytes(target.k), as_bytes(target.v)
    with pytest.raises(error, match=match):
        restore_pages(save_pages(source, HERE, KV_LEN), target, HERE)
    with pytest.raises(error, match=match.replace("cache", "target")):
        copy_request(source, HERE, target, HERE, KV_LEN)
    assert torch.equal(as_bytes(target.k), before[0])
    assert torch.equal(as_bytes(target.v), before[1])


REFUSED_PAGES: list[tuple[Any, Any, type[ArgumentError], str]] = [
    ([7, 2], 10, PageError, "2 pages of 4 tokens, want at least 3, for 10 tokens"),
    ([7, 2, 9], 10, PageError, r"pages\[2\]: got 9, want a page from 0 to 8"),
    ([7, -1, 5], 10, PageError, r"pages\[1\]: got -1"),
    ([7, 2, 7], 10, PageError, "page 7 2 times, want each page once"),
    ([[7, 2, 5]], 10, ShapeError, "1 dimension"),
    ([7.5, 2, 5], 10, ShapeError, "want integers"),
    ([7, 2, 5], -1, LengthError, "kv_len: got -1"),
    ([7, 2, 5], 2.5, LengthError, "kv_len"),
    ([7, 2, 5], None, LengthError, "kv_len"),
]


@pytest.mark.parametrize(("pages", "kv_len", "error", "match"), REFUSED_PAGES)
def test_pages_that_do_not_fit_are_refused(
    pages: Any, kv_len: Any, error: type[ArgumentError], match: str
) -> None:
    cache, target = new_cache(), new_cache(page_size=3)
    with pytest.raises(error, match=match):
        save_pages(cache, pages, kv_len)
    with pytest.raises(error):
        copy_request(cache, pages, target, THERE, kv_len)
    with pytest.raises(error):
        copy_request(target, THERE, cache, pages, kv_len)
    if kv_len == 10:
        before = as_bytes(cache.k)
        with pytest.raises(error, match=match):
            restore_pages(save_pages(target, THERE, 10), cache, pages)
        assert torch.equal(as_bytes(cache.k), before)


def test_of_several_requests_none_is_written_where_one_is_refused() -> None:
    cache, target = new_cache(), new_cache(seed=2)
    saved = save_pages(cache, [[7, 2, 5], [1, 3, 4]], [10, 9])
    before = as_bytes(target.k)
    for pages, error, match in (
        ([[0, 1, 2], [3, 4]], PageError, r"pages\[1\]: got 2 pages"),
        ([[0, 1, 2], [3, 4, 9]], PageError, r"pages\[1\]\[2\]: got 9"),
        ([[0, 1, 2], [3, 4, 1]], PageError, "pages: got page 1 2 times"),
        ([[0, 1, 2]], LengthError, "those of 1 requests, want those of 2"),
        (7, ShapeError, "want a list of pages"),
    ):
        with pytest.raises(error, match=match):
            restore_pages(saved, target, pages)
    with pytest.raises(ArgumentError, match="saved: got Tensor"):
        restore_pages([saved[0], cache.k], target, [[0, 1, 2], [3, 4, 5]])  # type: ignore[list-item]
    assert torch.equal(as_bytes(target.k), before)
    with pytest.raises(PageError, match=r"pages\[1\]"):
        save_pages(cache, [[0, 1, 2], [3]], [10, 9])


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(FrameworkError, match="cache: got Tensor"):
        save_pages(torch.zeros(3), [0], 1)  # type: ignore[call-overload]
    with pytest.raises(FrameworkError, match="target: got str"):
        copy_request(new_cache(), [0], "cache", [0], 1)  # type: ignore[arg-type]


# Files


@pytest.mark.parametrize("dtype", FLOATS + QUANTISED)
@pytest.mark.parametrize("kv_len", [0, KV_LEN])
def test_a_file_holds_all_of_it(dtype: str, kv_len: int, tmp_path: Path) -> None:
    saved = save_pages(new_cache(dtype=dtype), HERE, kv_len)
    path = tmp_path / "request.safetensors"
    path.write_text("something older")
    write_file(path, saved)
    read = read_file(str(path))
    assert same(read.key, saved.key)
    assert same(read.value, saved.value)
    assert read.spec == saved.spec
    assert (read.scales is None) == (saved.scales is None)
    assert read.scales is None or torch.equal(read.scales, SCALES)
    write_file(path, read)
    assert same(read_file(path).value, saved.value)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    target = new_cache(dtype=dtype, layout="HND")
    restore_pages(read, target, HERE)
    assert same(save_pages(target, HERE, kv_len).value, saved.value)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "request"
    write_file(path, save_pages(new_cache(), HERE, KV_LEN))
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArgumentError, match="request, no whole safetensors file"):
            read_file(path)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "request"
    saved = save_pages(new_cache(dtype="float8_e4m3fn"), HERE, KV_LEN)
    write_file(path, saved)
    tensors = load_file(path)
    meta = {VERSION_KEY: "1", "cache": json.dumps(asdict(saved.spec))}
    save_file(tensors, path, meta)
    assert same(read_file(path).key, saved.key)
    unknown = json.dumps(asdict(saved.spec) | {"pages": 3})
    wrong = json.dumps(asdict(saved.spec) | {"num_layers": 0})
    for changed, match in (
        ((tensors, None), "a safetensors file of something else, want a saved request"),
        ((tensors, meta | {VERSION_KEY: "2"}), "version 2 of a saved request.*of version 1"),
        ((tensors, {VERSION_KEY: "1"}), "no shape of a cache"),
        ((tensors, meta | {"cache": "{"}), "no shape of a cache"),
        ((tensors, meta | {"cache": unknown}), "no shape of a cache"),
        ((tensors, meta | {"cache": wrong}), "num_layers"),
        (({"key": tensors["key"]}, meta), r"where its cache has key float8_e4m3fn\[3, 10, 2, 32\]"),
        (({"value": tensors["value"]}, meta), "where its cache has key"),
        (
            (tensors | {"key": tensors["value"].clone()}, meta),
            r"got .*key float8_e4m3fn\[3, 10, 2, 48\]",
        ),
        ((tensors | {"key": tensors["key"].view(torch.uint8)}, meta), "key uint8"),
        ((tensors | {"key": tensors["key"][:, 1:].contiguous()}, meta), "value"),
        ((tensors | {"more": torch.zeros(1)}, meta), "more float32"),
        (({n: tensors[n] for n in ("key", "value")}, meta), "where its cache has .*scales"),
    ):
        save_file(changed[0], path, changed[1])
        with pytest.raises(ArgumentError, match=match):
            read_file(path)


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "request"
    saved = save_pages(new_cache(), HERE, KV_LEN)
    write_file(path, saved)
    before = path.read_bytes()

    def half(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half of")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no space"):
        write_file(path, saved)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ArgumentError, match="saved: got dict"):
        write_file(path, {})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "nvfp4"])
def test_to_host_memory_and_back_without_waiting(dtype: str) -> None:
    cache = new_cache(dtype=dtype, device="cuda")
    host = new_cache(dtype=dtype)
    target = new_cache(dtype=dtype, device="cuda", page_size=3, layout="HND")
    assert same(cache.k, host.k)
    wanted = save_pages(host, HERE, KV_LEN)
    save_pages(cache, HERE, KV_LEN)  # new pinned memory may wait; the next call finds this
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    busy.record()
    saved = save_pages(cache, HERE, KV_LEN)
    cache.k.zero_()  # queued after the copies, so it does not matter
    assert not busy.query(), "saving waited for the device"
    assert not saved.ready
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        restore_pages(saved, target, THERE)
        back = save_pages(target, THERE, KV_LEN)
    for rows in (saved, back):
        assert same(rows.key, wanted.key)
        assert same(rows.value, wanted.value)
        assert rows.ready
    assert saved.key.is_pinned()
    # To the host and from there, whatever the stream.
    onto = new_cache(dtype=dtype, page_size=8)
    copy_request(target, THERE, onto, [1, 5], KV_LEN)
    assert same(save_pages(onto, [1, 5], KV_LEN).key, wanted.key)
    copy_request(onto, [1, 5], cache, HERE, KV_LEN)
    assert same(save_pages(cache, HERE, KV_LEN).value, wanted.value)
    restore_pages(pickle.loads(pickle.dumps(saved)), target, THERE)
    assert same(save_pages(target, THERE, KV_LEN).key, wanted.key)


@pytest.mark.gpu
def test_a_request_of_no_tokens_on_a_gpu() -> None:
    cache = new_cache(device="cuda")
    saved = save_pages(cache, [], 0)
    assert saved.kv_len == 0
    before = as_bytes(cache.k)
    restore_pages(saved, cache, [])
    assert torch.equal(as_bytes(cache.k), before)
