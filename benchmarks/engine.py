"""Host time of what a serving engine asks for in each step: its batch split, its kernels chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from interop import CacheSpec, RaggedBatch
from torch_backend.backend import EngineBatch, Group, MetadataBuilder, Platform, StepBuilder
from torch_backend.dispatch import device_facts
from torch_backend.engine.builder import Step

from .workload import SPEC

__all__ = ["step_calls"]


def step_calls(cache: CacheSpec, batch: RaggedBatch, device: str) -> dict[str, Callable[[], Step]]:
    """Calls to measure: the dispatch of a batch, and the same with the batch's plan for PyTorch."""
    import torch

    platform = Platform(device_facts(torch.device(device)))
    group = Group((SPEC,), cache, cache.dtype)
    starts, lens, table = batch.qo_indptr, batch.kv_lens, batch.page_table
    given = partial(EngineBatch, starts, lens, table)
    alone = StepBuilder(platform, group)
    planned = MetadataBuilder(platform, group, device=device)
    return {
        "engine batch, dispatch": lambda: alone.build(given()),
        "engine batch, dispatch + plan": lambda: planned.build(given()),
    }
