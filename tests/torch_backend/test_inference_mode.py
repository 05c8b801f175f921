"""Caches, plans and rows may be made inside of inference mode and used outside of it."""

from __future__ import annotations

import pytest
import torch
from small import BATCH, SPEC, new_cache, torch_rows

import torch_backend


@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("used_in", [False, True])
def test_inference_mode_changes_nothing(made_in: bool, used_in: bool) -> None:
    outs, pools = [], []
    for inside in ((made_in, used_in), (False, False)):
        with torch.inference_mode(inside[0]):
            cache = new_cache()
            plan = torch_backend.plan(SPEC, cache.spec, BATCH)
            rows = [row.clone() for row in torch_rows(0)]
        with torch.inference_mode(inside[1]):
            outs.append(torch_backend.paged_attention(*rows, cache, plan, 1))
        pools.append(cache.k)
    assert torch.equal(*outs)
    assert torch.equal(*pools)
    assert pools[0].any()
