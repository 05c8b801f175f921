"""A cache that several processes see: one file, whole or not at all, and what is not one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import AttentionSpec, CacheSpec
from interop.dlpack import to_jax
from interop.errors import ArgumentError, DeviceError, PlanError
from torch_backend import PagedKVCache
from torch_backend.shared_memory import BLOCK, MAGIC, attach_shared, create_shared

SPEC = CacheSpec(2, 5, 4, 2, 32, 48, dtype="float32")
FORMATS = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "nvfp4"]
SCALES = torch.arange(1.0, 9.0).view(2, 2, 2)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_see_one_memory(dtype: str, layout: str, tmp_path: Path) -> None:
    spec = replace(SPEC, dtype=dtype, layout=layout)
    made = create_shared(tmp_path / "cache", spec, SCALES if spec.quantized else None)
    seen = attach_shared(str(tmp_path / "cache"), expected=spec)
    assert seen.spec == made.spec == spec
    for one, other, shape in (
        (made.key, seen.key, spec.key_shape),
        (made.value, seen.value, spec.value_shape),
    ):
        assert one.shape == other.shape == shape
        assert one.dtype == getattr(torch, spec.storage_dtype)
        assert one.is_contiguous()
        assert not other.view(torch.uint8).any()
        one.view(torch.uint8).random_(0, 256)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert one.data_ptr() != other.data_ptr()
        # As XLA wants it where it shares memory.
        assert other.data_ptr() % 64 == 0
    assert (seen.scales is None) == (made.scales is None) == (not spec.quantized)
    if made.scales is not None and seen.scales is not None:
        assert torch.equal(seen.scales, SCALES)
        made.scales.mul_(2)
        assert torch.equal(seen.scales, 2 * SCALES)
    if spec.storage_dtype != "uint8":
        assert to_jax(seen.value).unsafe_buffer_pointer() == seen.value.data_ptr()


def test_scales_left_out_are_1(tmp_path: Path) -> None:
    create_shared(tmp_path / "cache", replace(SPEC, dtype="float8_e4m3fn"))
    scales = attach_shared(tmp_path / "cache").scales
    assert scales is not None
    assert torch.equal(scales, torch.ones(2, 2, 2))


def test_pools_do_not_overlap(tmp_path: Path) -> None:
    spec = CacheSpec(1, 3, 5, 1, 16, 32, dtype="nvfp4")  # sizes that fill no block
    pools = create_shared(tmp_path / "cache", spec)
    assert pools.scales is not None
    for value, pool in enumerate((pools.key, pools.value, pools.scales), 1):
        pool.fill_(value)
    for value, pool in enumerate((pools.key, pools.value, pools.scales), 1):
        assert (pool == value).all()
    assert attach_shared(tmp_path / "cache").spec == spec


def test_memory_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    made = create_shared(path, SPEC)
    seen = attach_shared(path)
    path.unlink()
    made.key.fill_(3)
    del made
    assert (seen.key == 3).all()
    again = create_shared(path, SPEC)
    assert not again.key.any()


def test_memory_made_in_inference_mode_can_be_written(tmp_path: Path) -> None:
    with torch.inference_mode():
        made = create_shared(tmp_path / "cache", SPEC)
        seen = attach_shared(tmp_path / "cache")
    for pool in (made.key, seen.value):
        assert not pool.is_inference()
        pool.add_(1)


def test_only_its_user_may_open_it(tmp_path: Path) -> None:
    create_shared(tmp_path / "cache", SPEC)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    create_shared(path, SPEC).key.fill_(1)
    with pytest.raises(ArgumentError, match="cache, which is there already, want a new file"):
        create_shared(path, SPEC)
    assert (attach_shared(path).key == 1).all()


def test_no_file_is_left_where_none_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    with pytest.raises(DeviceError, match="device: got cuda, want cpu"):
        create_shared(path, replace(SPEC, device="cuda"))
    with pytest.raises(ArgumentError, match="want all layers in one pool"):
        create_shared(path, replace(SPEC, layers_apart=True))
    with pytest.raises(FileNotFoundError):
        create_shared(tmp_path / "none" / "cache", SPEC)
    with pytest.raises(RuntimeError):
        create_shared(path, replace(SPEC, dtype="fp8"), torch.ones(3))

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArgumentError, match=r"bytes are free, want \d+ bytes. Use fewer pages"):
        create_shared(path, SPEC)

    def broken(file: int, offset: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output"):
        create_shared(path, SPEC)
    assert not list(tmp_path.iterdir())


def test_a_full_file_system_is_found_at_once() -> None:
    """Later would be a signal that ends the process."""
    path = Path("/dev/shm") / f"isthmus-test-{os.getpid()}"
    with pytest.raises(ArgumentError, match="are free, want"):
        create_shared(path, replace(SPEC, num_layers=64, num_pages=2**20, head_dim=4096))
    assert not path.exists()


def header(spec: dict[str, Any], magic: bytes = MAGIC) -> bytes:
    return (magic + json.dumps(spec).encode()).ljust(BLOCK, b"\0")


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    create_shared(path, SPEC)
    other = replace(SPEC, layout="HND")
    with pytest.raises(PlanError, match=r"layout='NHD'.*want CacheSpec.*layout='HND'"):
        attach_shared(path, expected=other)
    whole = path.read_bytes()
    fields = asdict(SPEC)
    for content, match in (
        (b"", "cache, a file of something else, or one that is still being made"),
        (b"\0" * len(whole), "still being made, want a file that create_shared has made"),
        (whole.replace(b"cache 1", b"cache 2"), "something else"),
        (whole[:-1], f"{len(whole) - 1} bytes where CacheSpec"),
        (whole + b"\0", f"{len(whole) + 1} bytes where"),
        (header(fields | {"num_layers": 3}) + whole[BLOCK:], "bytes where"),
        (header(fields | {"num_layers": 0}) + whole[BLOCK:], "no shape of a cache"),
        (header(fields | {"more": 0}) + whole[BLOCK:], "no shape of a cache"),
        (header({}, MAGIC + b"{") + whole[BLOCK:], "no shape of a cache"),
    ):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=match):
            attach_shared(path)
        # Attaching has not grown it either.
        assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError):
        attach_shared(tmp_path / "none")


CHILD = """
import sys
from torch_backend import PagedKVCache
cache = PagedKVCache.attach(sys.argv[1])
assert cache.k.view(-1)[5] == 7
cache.v.view(-1)[3] = 2
"""


def test_another_process_writes_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = PagedKVCache.create_shared(
        path, AttentionSpec(4, 2, 32), num_layers=2, num_pages=5, page_size=4, dtype="float32"
    )
    assert cache.spec == replace(SPEC, head_dim_v=32)
    cache.k.view(-1)[5] = 7
    for _ in range(2):
        cache.v.zero_()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        assert cache.v.view(-1)[3] == 2
        # The end of one process takes nothing from the others.
        assert path.exists()
