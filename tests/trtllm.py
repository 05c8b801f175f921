"""TRTLLM-GEN without a GPU: a stand-in for its compiled functions, by what their sources document.

It reads nothing but the arguments of a call, by their strides, and checks what the launcher and the
kernels ask of them. Rows that belong to no request keep what they held.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_backend.kernels import flashinfer_abi as abi

GUARD_BYTES = 1 << 20


class Module:
    """Stands for the compiled module: keeps calls, by name of argument, and computes them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def load(self, key: abi.ModuleKey, device: int) -> dict[str, Any]:
        """As `flashinfer_abi.load`."""
        assert (key.backend, device) == ("trtllm_gen", 0)
        return {name: self._function(name) for name in abi.RUNS["trtllm_gen"]}

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            names = abi.SIGNATURES["trtllm_gen"][name]
            named = dict(zip(names, arguments, strict=True))
            self.calls.append((name, named))
            compute(named, context=name.endswith("context"))

        return call


def _check_rows(name: str, tensor: Tensor, *, dense: bool) -> None:
    """Strides that a descriptor of the copy engine takes, of dimensions of size 1 as well."""
    inner = 1
    for axis in reversed(range(tensor.ndim)):
        stride, size = tensor.stride(axis), tensor.shape[axis]
        if size == 1 or dense:
            assert stride == inner, (name, tensor.shape, tensor.stride())
        inner = stride * size
    assert tensor.stride(-1) == 1, name
    for stride in tensor.stride()[:-1]:
        assert stride * tensor.element_size() % 16 == 0, name


def check(a: dict[str, Any], *, context: bool) -> None:
    """What the launcher would refuse, or read beyond the end of."""
    query, key, value, lse = a["query"], a["key_cache"], a["value_cache"], a["lse"]
    tokens, heads, width = query.shape
    _, kv_heads, page_size, _ = key.shape
    requests, max_q_len = a["batch_size"], a["max_q_len"]
    assert key.shape == value.shape and key.stride() == value.stride()
    assert key.shape[3] == width and a["out"].shape == query.shape and heads % kv_heads == 0
    assert page_size & (page_size - 1) == 0
    for name, dense in (("query", True), ("out", True), ("key_cache", False)):
        _check_rows(name, a[name], dense=dense)
    for name, shape in (("block_tables", (requests, a["max_kv_len"] // page_size)),):
        assert a[name].shape == shape and a[name].is_contiguous() and a[name].dtype == torch.int32
    assert a["seq_lens"].shape == (requests,) and a["seq_lens"].dtype == torch.int32
    assert int(a["seq_lens"].min()) >= 1 and int(a["seq_lens"].max()) <= a["max_kv_len"]
    counters = a["multi_ctas_kv_counter_buffer"]
    slots = -(-max(requests * heads, a["sm_count"]) // 8) * 8
    assert counters.nbytes >= 4 * slots and not counters.any()
    workspace = a["workspace_buffer"]
    assert a["workspace_size"] == workspace.nbytes
    tiled = -(-max_q_len // 256) * 256
    needed = 0 if lse is None else 8 * heads * requests * tiled + GUARD_BYTES + 16
    if not context:
        needed += a["sm_count"] * 256 * (8 + 4 * width)
    assert workspace.nbytes >= needed
    if lse is not None:
        assert lse.shape == (tokens, heads) and lse.dtype == torch.float32
        assert lse.stride() == (a["lse_stride_tokens"], a["lse_stride_heads"])
    assert (a["o_sf_scale"], a["o_sf_vec_size"], a["o_sf_start_index"]) == (-1.0, -1, 0)
    assert a["enable_pdl"] is False and a["uses_shared_paged_kv_idx"] is True
    for name in ("out_scale_factor", "key_block_scales", "value_block_scales"):
        assert a[name] is None
    if a["attention_sinks"] is not None:
        assert a["attention_sinks"].dtype == torch.float32
        assert a["attention_sinks"].shape == (heads,) and a["attention_sinks"].is_contiguous()
        # The sums that it is made of count sinks.
        assert lse is None
    eight = key.dtype == torch.float8_e4m3fn
    if context:
        assert a["is_causal"] is True and query.dtype == key.dtype
        counts = -(-a["seq_lens"] // page_size)
        assert a["cum_seq_lens_kv"].diff().tolist() == counts.tolist()
        assert a["cum_seq_lens_kv"][0] == 0
    else:
        assert (a["bf16q_fp8kv_transform_mode"] == 2) == (eight and query.dtype == torch.bfloat16)
        assert a["sparse_mla_top_k"] == 0 and a["enable_block_sparse_attention"] is False
        assert query.dtype == key.dtype or (eight and query.dtype == torch.bfloat16)


def compute(a: dict[str, Any], *, context: bool) -> None:
    """Compute a call in float64."""
    check(a, context=context)
    query, key, value = (a[name].double().numpy() for name in ("query", "key_cache", "value_cache"))
    table, offsets = a["block_tables"].numpy(), a["cum_seq_lens_q"]
    group, page_size = query.shape[1] // key.shape[1], key.shape[2]
    # A number is multiplied by log2(e) in the launcher, a tensor is taken to be so already.
    bmm1, bmm2 = a["bmm1_scale"], a["bmm2_scale"]
    scale = float(bmm1) if isinstance(bmm1, Tensor) else bmm1 * math.log2(math.e)
    for request in range(a["batch_size"]):
        if offsets is None:
            start, end = (n * a["max_q_len"] for n in (request, request + 1))
        else:
            start, end = (int(n) for n in offsets[request : request + 2])
        assert 0 <= end - start <= a["max_q_len"]
        kv_len = int(a["seq_lens"][request])
        pages = table[request, : -(-kv_len // page_size)]
        assert pages.min() >= 0 and pages.max() < len(key)
        keys, values = (
            pool[pages].transpose(0, 2, 1, 3).reshape(-1, *pool.shape[1::2])
            for pool in (key, value)
        )
        for row in range(start, end):
            last = kv_len - (end - start) + row - start
            first = max(0, last - a["window_left"]) if a["window_left"] >= 0 else 0
            seen = slice(first, last + 1)
            for head in range(query.shape[1]):
                logits = scale * (keys[seen, head // group] @ query[row, head])
                largest = logits.max()
                weights = np.exp2(logits - largest)
                total = weights.sum()
                if a["attention_sinks"] is not None:
                    total += np.exp2(float(a["attention_sinks"][head]) * np.log2(np.e) - largest)
                out = weights @ values[seen, head // group] / total * float(bmm2)
                a["out"][row, head] = torch.from_numpy(out).to(a["out"].dtype)
                if a["lse"] is not None:
                    a["lse"][row, head] = a["lse_scale"] * (largest + np.log2(weights.sum()))


def prepare(
    query: Tensor,
    rounded: Tensor | None,
    factors: Tensor,
    scale_table: Tensor,
    scale_layer: Tensor,
    sm_scale: float,
) -> None:
    """`triton_trtllm.prepare_trtllm` in plain PyTorch."""
    scales = scale_table[int(scale_layer)]
    factors[0] = sm_scale / math.log(2.0) * scales[0, 0]
    factors[1] = scales[1, 0]
    if rounded is not None:
        rounded.copy_(query.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn))


def gather(
    key_pool: Tensor,
    value_pool: Tensor,
    page_indices: Tensor,
    valid_tokens: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    scale_table: Tensor,
    scale_layer: Tensor,
) -> None:
    """`triton_ops.gather` in plain PyTorch."""
    size = key_pool.shape[1]
    sides = ((key_pool, key_rows), (value_pool, value_rows))
    for entry, valid in enumerate(valid_tokens.tolist()):
        if valid < 0:
            continue
        for side, (pool, rows) in enumerate(sides):
            place = rows[entry * size : (entry + 1) * size]
            scale = scale_table[int(scale_layer), side][:, None]
            place.copy_(pool[int(page_indices[entry])].float() * scale)
            place[valid:] = 0
