"""Tests of one kernel family: dispatch is made to choose it, whatever it would prefer.

`MODULES` is every compiled module that the tests on a GPU use, so that a machine where these are
compiled ahead runs all of them without compiling.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

from torch_backend import dispatch, prebuild
from torch_backend.kernels import FAMILIES, Device, flashinfer_fa3
from torch_backend.kernels.flashinfer_abi import ModuleKey

FA2 = (
    ModuleKey("fa2", "bfloat16", 128),
    ModuleKey("fa2", "bfloat16", 128, window=True),
    ModuleKey("fa2", "bfloat16", 128, soft_cap=True),
    ModuleKey("fa2", "float16", 64),
    ModuleKey("fa2", "bfloat16", 256),
)
FA3 = (
    ModuleKey("fa3", "bfloat16", 128),
    ModuleKey("fa3", "bfloat16", 128, window=True),
    ModuleKey("fa3", "bfloat16", 128, soft_cap=True),
    ModuleKey("fa3", "float16", 64),
)
VARIANTS = FA2 + FA3
"""What reads keys and values of the query's type, in queries of any length."""

FA2_8BIT = (
    ModuleKey("fa2", "bfloat16", 128, kv_dtype="float8_e4m3fn"),
    ModuleKey("fa2", "bfloat16", 128, kv_dtype="float8_e5m2"),
)


def _xqa(kv_dtype: str, *, window: bool = False) -> ModuleKey:
    return ModuleKey("xqa", "bfloat16", 128, window, kv_dtype=kv_dtype, page_size=16, group_size=4)


XQA = (_xqa("float8_e4m3fn"), _xqa("float8_e4m3fn", window=True), _xqa("bfloat16"))
XQA_DRAFTS = tuple(replace(key, drafts=True) for key in XQA)
MODULES = VARIANTS + FA2_8BIT + XQA + XQA_DRAFTS


@contextmanager
def only(name: str) -> Iterator[None]:
    """Within this context plans are served by the family of this name or refused."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for family in FAMILIES.values():
            if family.name != name:
                patch.setattr(family, "refuse", lambda work: "another family is under test")
        # Small problems do as well: it is the results that are looked at here.
        able = FAMILIES[name].refuse
        patch.setattr(FAMILIES[name], "refuse", lambda work: able(replace(work, any_speed=True)))
        # Asked for by name, the reference is no surprise on a GPU either.
        warnings.filterwarnings("ignore", ".* falls back to the reference", RuntimeWarning)
        dispatch.serve.cache_clear()
        try:
            yield
        finally:
            dispatch.serve.cache_clear()


def this_gpu() -> Device:
    """What dispatch knows of the current GPU."""
    return dispatch.device_facts(torch.device("cuda", torch.cuda.current_device()))


def need(key: ModuleKey) -> None:
    """Skip the test if this GPU cannot run the module; compile all modules if one is missing."""
    if key not in _usable():
        pytest.skip(
            f"{key.backend} runs on compute capability 9.0 only, not on {this_gpu().capability}"
        )


@cache
def _usable() -> tuple[ModuleKey, ...]:
    """The modules that this GPU can run, compiled side by side."""
    usable = MODULES
    if this_gpu().capability != flashinfer_fa3.FA3_CAPABILITY:
        usable = FA2 + FA2_8BIT
    failed = prebuild.build(usable)
    assert not failed, failed
    return usable
