"""A custom call's attributes: there and back, always all of them, never too long."""

from __future__ import annotations

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given
from small import SPEC, new_cache

from interop import AttentionSpec, CacheSpec, Launch
from interop.attributes import ATTRIBUTES, Call, decode, encode
from interop.errors import ArgumentError
from interop.spec import FLOAT_DTYPES

LAUNCH = Launch("reference", "pages", SPEC, new_cache().spec)
CALL = Call(LAUNCH, "cache0", 2, True)

int64 = st.integers(-(2**63), 2**63 - 1)
sizes = st.integers(1, 100)
dtypes = st.sampled_from(FLOAT_DTYPES)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any call that the front end can make."""
    kv_heads = draw(sizes)
    spec = AttentionSpec(
        kv_heads * draw(sizes),
        kv_heads,
        draw(sizes),
        head_dim_v=draw(sizes),
        sm_scale=draw(st.floats(1e-300, 1e300)),
        causal=draw(st.booleans()),
        sliding_window=draw(st.none() | sizes),
        logits_soft_cap=draw(st.none() | st.floats(1e-300, 1e300)),
        dtype=draw(st.none() | dtypes),
    )
    cache = None
    if draw(st.booleans()):
        cache = CacheSpec(
            num_layers=draw(sizes),
            num_pages=draw(sizes),
            page_size=draw(sizes),
            num_kv_heads=kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            dtype=draw(dtypes),
            layout=draw(st.sampled_from(("NHD", "HND"))),
            device=draw(st.sampled_from(("cpu", "cuda"))),
        )
    launch = Launch(
        draw(st.sampled_from(("reference", "append", "flashinfer_fa2"))),
        draw(st.sampled_from(("pages", "tokens", "rows"))),
        spec,
        cache,
        tuple(draw(st.lists(int64, max_size=2))),
        draw(st.integers(0, 2**40)),
    )
    names = st.text("abcXYZ019._-", max_size=8)
    return Call(launch, draw(names), draw(st.integers(-1, 99)), draw(st.booleans()))


def read(attributes: dict[str, str]) -> Call:
    return decode("".join(attributes[name] for name in ATTRIBUTES))


@given(calls())
def test_what_is_written_can_be_read_back(call: Call) -> None:
    assert read(encode(call)) == call


@given(calls())
def test_every_call_has_every_attribute_and_no_other(call: Call) -> None:
    # A handler that misses one of the attributes it was registered with ends the process.
    attributes = encode(call)
    assert set(attributes) == set(ATTRIBUTES)
    # Longer strings are freed before the handler reads them, and all else leaks.
    assert all(type(piece) is str and len(piece.encode()) <= 7 for piece in attributes.values())


def test_no_attribute_is_there_twice() -> None:
    assert len(set(ATTRIBUTES)) == len(ATTRIBUTES)


@pytest.mark.parametrize("name", ["x" * 64, "cache-of-the-second-replica.3"])
def test_long_names(name: str) -> None:
    assert read(encode(Call(LAUNCH, name, 0, False))).cache == name


def test_a_call_that_does_not_fit_is_refused() -> None:
    launch = Launch("reference", "pages", SPEC, None, tuple(range(1000)))
    with pytest.raises(ArgumentError, match=r"call: got [0-9]+ bytes.*want up to 364"):
        encode(Call(launch, "", 0, False))


LEAK = """
import resource
import jax
import jax.numpy as jnp
import torch_backend
import jax_frontend
from interop import AttentionSpec, RaggedBatch

spec = AttentionSpec(1, 1, 2)
cache = torch_backend.PagedKVCache(
    spec, num_layers=1, num_pages=1, page_size=1, dtype="float32"
)
plan = jax_frontend.plan(spec, cache.spec, RaggedBatch([1], [1], [[0]]))
kv = jax_frontend.cache_handle(cache)
rows = jnp.ones((1, 1, 2))
write = jax.jit(lambda rows, kv, plan: jax_frontend.append(rows, rows, kv, plan, 0))

def peak(calls):
    global kv
    for _ in range(calls):
        kv = write(rows, kv, plan)
    kv.token.block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

first = peak(4000)
print(peak(12000) - first)
"""


def test_calls_leave_no_memory_behind() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LEAK], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # As numbers, the attributes of a call left about 700 bytes each time: 8 MB here.
    assert int(done.stdout) < 2_000_000
