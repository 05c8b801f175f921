"""One step as a serving engine has it: a packed cache in some order, block tables, slot mappings.

Decodes come first, a request of the tail is a graph's padding, and block 0 is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from torch import Tensor

from interop import AttentionSpec, CacheSpec
from torch_backend.backend import EngineBatch, Group, Platform
from torch_backend.kernels import Device
from torch_backend.layouts import ORDERS

CPU = Platform(Device("cpu"))
SM80, SM89 = (Platform(Device("cuda", (8, minor), 108)) for minor in (0, 9))
SM90 = Platform(Device("cuda", (9, 0), 132))
SM100, SM103 = (Platform(Device("cuda", (10, minor), 148)) for minor in (0, 3))
SM120 = Platform(Device("cuda", (12, 0), 170))

QO, KV, WIDTH, PAGE, BLOCKS = 4, 2, 16, 4, 14
SCALE = 0.31
QUERY_LENS, KV_LENS = [1, 1, 3, 6, 0], [6, 9, 7, 6, 0]
TABLE = [[7, 2, 0], [9, 4, 1], [10, 3, 0], [5, 12, 0], [0, 0, 0]]
ROWS = sum(QUERY_LENS)
PADDED = ROWS + 3


@dataclass
class Layer:
    """What an engine hands its backend in the place of the layer."""

    _q_scale_float: float = 1.0
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0


def group_of(**more: Any) -> Group:
    """A group of one kind of layer of these sizes."""
    spec = {name: more.pop(name) for name in SPEC_FIELDS if name in more}
    sizes = {name: more.pop(name) for name in CACHE_FIELDS if name in more}
    model_dtype = more.pop("model_dtype", "float32")
    kv_heads, width = sizes.get("num_kv_heads", KV), sizes.get("head_dim", WIDTH)
    heads = more.pop("num_qo_heads", 2 * kv_heads)
    specs = more.pop("specs", None) or (
        AttentionSpec(heads, kv_heads, width, sm_scale=SCALE, **spec),
    )
    shape = {"num_layers": 1, "num_pages": BLOCKS, "page_size": PAGE, "num_kv_heads": KV}
    shape |= {"head_dim": WIDTH, "dtype": model_dtype} | sizes
    return Group(specs, CacheSpec(**shape), model_dtype, **more)


SPEC_FIELDS = ("sliding_window", "logits_soft_cap", "causal")
CACHE_FIELDS = ("num_kv_heads", "head_dim", "dtype", "layout", "page_size", "num_pages", "device")


def batch_of(**more: Any) -> EngineBatch:
    """This module's batch."""
    given = {
        "query_start_loc": np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32),
        "seq_lens": np.array(KV_LENS, np.int32),
        "block_table": np.array(TABLE, np.int32),
        "num_padded_tokens": PADDED,
    }
    return EngineBatch(**(given | more))


def slots() -> list[int]:
    return oracle.slot_mapping(QUERY_LENS, KV_LENS, np.array(TABLE), PAGE)


@dataclass
class EngineStep:
    """A cache in an engine's memory, with normal numbers in it, and rows.

    `cache` has axes ``[blocks, heads, page, contents]`` whatever its order in memory, as layer 1 of
    3 that lie in one allocation.
    """

    order: str = "LBNHC"
    dtype: str = "float32"
    kv_heads: int = KV
    seed: int = 0
    device: str = "cpu"
    cache: Tensor = field(init=False)
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        sizes = {"L": 3, "B": BLOCKS, "H": self.kv_heads, "N": PAGE, "C": 2 * WIDTH}
        whole = torch.randn([sizes[axis] for axis in self.order], generator=generator)
        whole = whole.to(getattr(torch, self.dtype)).to(self.device)
        axes = [self.order.index(axis) for axis in "LBHNC"]
        self.cache = whole.permute(axes)[1]
        heads = (2 * self.kv_heads, self.kv_heads, self.kv_heads)
        rows = (torch.randn(PADDED, count, WIDTH, generator=generator) for count in heads)
        self.query, self.key, self.value = (row.to(self.device) for row in rows)

    @property
    def layout(self) -> str:
        return ORDERS[self.order]

    def want(self, **features: Any) -> np.ndarray[Any, Any]:
        """The oracle's output over the cache as it is, ``[ROWS, heads, width]``."""
        pages = self.cache.double().cpu().transpose(1, 2).numpy()
        out, _ = oracle.paged_attention(
            self.query[:ROWS].double().cpu().numpy(),
            pages[..., :WIDTH],
            pages[..., WIDTH:],
            QUERY_LENS,
            KV_LENS,
            np.array(TABLE),
            **({"sm_scale": SCALE} | features),
        )
        return out
