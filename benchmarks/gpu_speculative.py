"""Steps that verify drafts: several query tokens a request, in a chain or in a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from interop import RaggedBatch

from .gpu_steps import FRONT_ENDS, layers_for, new_cache, random_query, release
from .recording import Run
from .workload import SPEC, bucket_of, decode_shape, kv_bytes, make_batch, pages_for

__all__ = ["speculative"]

# Requests and context.
SHAPES = ((32, 4096), (8, 32768), (128, 2048), (32, 1024), (8, 1024), (8, 256))
DRAFTS = 8
SCALES = (0.02, 0.03)


def tree_of(drafts: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which tokens of a binary tree each one sees: itself and those above it."""
    mask = np.eye(drafts, dtype=np.bool_)
    for token in range(1, drafts):
        mask[token] |= mask[(token - 1) // 2]
    return mask


def speculative(run: Run) -> None:
    """A step of eight tokens a request against one of one token, at the same contexts."""
    for requests, context in SHAPES[:1] if run.quick else SHAPES:
        lengths = [context] * requests
        layers = layers_for(kv_bytes(lengths))
        shape = decode_shape(requests, context, layers=layers)
        one = make_batch([1] * requests, lengths)
        chain = RaggedBatch([DRAFTS] * requests, lengths, one.page_table)
        masks = np.tile(tree_of(DRAFTS), (requests, 1))
        tree = RaggedBatch([DRAFTS] * requests, lengths, one.page_table, draft_masks=masks)
        for dtype, scales, name in (
            ("bfloat16", None, ""),
            ("float8_e4m3fn", SCALES, ", fp8"),
        ):
            cache = new_cache(layers, pages_for(lengths), dtype, scales)
            model = replace(SPEC, dtype="bfloat16")
            for what, batch, options in (
                ("one token", one, {}),
                (f"{DRAFTS} in a chain", chain, {}),
                (f"{DRAFTS} in a tree", tree, {}),
                (f"{DRAFTS} in a tree, one launch", tree, {"kernel": "fa2"}),
                (f"{DRAFTS} in a chain, XQA", chain, {"kernel": "xqa_drafts"}),
                (f"{DRAFTS} in a tree, XQA", tree, {"kernel": "xqa_drafts"}),
            ):
                bucket = replace(bucket_of(batch), draft_masks=batch.draft_masks is not None)
                _measure(run, what + name, shape, model, cache, batch, bucket, options)
            del cache
            release()


def _measure(
    run: Run,
    what: str,
    shape: dict[str, Any],
    spec: Any,
    cache: Any,
    batch: RaggedBatch,
    bucket: Any,
    options: dict[str, Any],
) -> None:
    query, layers = random_query(batch.num_tokens), shape["layers"]
    for front_end, measure in FRONT_ENDS.items():
        case = f"{what}, {front_end}"
        with run.attempt(case, shape):
            timing, family = measure(
                run, spec, cache, batch, query, layers, bucket=bucket, return_lse=False, **options
            )
            run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", family=family)
    torch.cuda.synchronize()
