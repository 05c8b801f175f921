"""Tests of one kernel family: dispatch is made to choose it, whatever it would prefer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torch_backend import dispatch
from torch_backend.kernels import FAMILIES, flashinfer_fa3


@contextmanager
def only(name: str) -> Iterator[None]:
    """Within this context plans are served by the family of this name or refused."""
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES.values():
            if family.name != name:
                patch.setattr(family, "refuse", lambda work: "another family is under test")
        # Small problems do as well: it is the results that are looked at here.
        patch.setattr(flashinfer_fa3, "FA3_LEAST_MEAN_QUERY_LEN", 0)
        dispatch.serve.cache_clear()
        yield
    dispatch.serve.cache_clear()
