"""A custom call's attributes: there and back, always all of them, never too long."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from small import SPEC, new_cache

from interop import AttentionSpec, CacheSpec, Launch
from interop.attributes import ATTRIBUTES, MAX_CONSTANTS, Call, decode, encode
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
        tuple(draw(st.lists(int64, max_size=MAX_CONSTANTS))),
        draw(st.integers(0, 2**40)),
    )
    names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
    return Call(launch, draw(names), draw(st.integers(-1, 99)), draw(st.booleans()))


@given(calls())
def test_what_is_written_can_be_read_back(call: Call) -> None:
    attributes = encode(call)
    assert decode(*(attributes[name] for name in ATTRIBUTES)) == call


@given(calls())
def test_every_call_has_every_attribute_and_no_other(call: Call) -> None:
    # A handler that misses one of the attributes it was registered with ends the process.
    attributes = encode(call)
    assert set(attributes) == set(ATTRIBUTES)
    assert {type(value) for value in attributes.values()} <= {np.int64, float}


def test_no_attribute_is_there_twice() -> None:
    assert len(set(ATTRIBUTES)) == len(ATTRIBUTES)


@pytest.mark.parametrize("name", ["x" * 32, "ü" * 16, "cache-of-the-second-replica.3"])
def test_names_of_up_to_32_bytes(name: str) -> None:
    attributes = encode(Call(LAUNCH, name, 0, False))
    assert decode(*(attributes[key] for key in ATTRIBUTES)).cache == name


@pytest.mark.parametrize("name", ["x" * 33, "ü" * 16 + "x"])
def test_longer_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"cache: got '{name}', want at most 32 bytes"):
        encode(Call(LAUNCH, name, 0, False))


def test_a_longer_family_or_schedule_is_refused() -> None:
    launch = Launch("a_family_of_17_by", "pages", SPEC, None)
    with pytest.raises(ArgumentError, match="family: got 'a_family_of_17_by', want at most 16"):
        encode(Call(launch, "", 0, False))
    launch = Launch("reference", "pages", SPEC, None, tuple(range(MAX_CONSTANTS + 1)))
    with pytest.raises(ArgumentError, match=f"constants: got {MAX_CONSTANTS + 1} numbers"):
        encode(Call(launch, "", 0, False))
