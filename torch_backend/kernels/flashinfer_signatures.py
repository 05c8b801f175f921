"""In which order the functions of FlashInfer's compiled modules take their arguments.

Read from version 0.7.2.post1; a test compares every list below with the sources that the installed
package compiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CUSTOM_MASK",
    "LAYOUTS",
    "MASK_MODES",
    "RUNS",
    "SIGNATURES",
    "TRTLLM_GEN_UNUSED",
    "arrange",
]

LN2 = math.log(2.0)

_PLAN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "page_locked_int_workspace_buffer",
    "qo_indptr",
    "kv_indptr",
    "kv_len_arr",
    "total_num_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "enable_cuda_graph",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "window_left",
)
_FA2_PLAN = (
    *_PLAN,
    "fixed_split_size",
    "disable_split_kv",
    "num_colocated_ctas",
    "uniform_q_len",
)
_OPTIONS = ("mask_mode_code", "layout", "window_left", "enable_pdl")
_PAGED_RUN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "plan_info_vec",
    "q",
    "paged_k_cache",
    "paged_v_cache",
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "o",
    "maybe_lse",
    *_OPTIONS,
)
_RAGGED_RUN = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "plan_info_vec",
    "q",
    "k",
    "v",
    "qo_indptr",
    "kv_indptr",
    "o",
    "maybe_lse",
    *_OPTIONS,
)
_FA2_EXTRAS = (
    "maybe_custom_mask",
    "maybe_mask_indptr",
    "maybe_alibi_slopes",
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "maybe_k_cache_sf",
    "maybe_v_cache_sf",
    "logits_soft_cap",
    "sm_scale",
    "rope_rcp_scale",
    "rope_rcp_theta",
    "token_pos_in_items_len",
)
_FA3_EXTRAS = (
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "maybe_scale_v",
    "logits_soft_cap",
    "sm_scale",
    "scale_v_scalar",
    "token_pos_in_items_len",
)

_TRTLLM_GEN = (
    "out",
    "out_scale_factor",
    "query",
    "key_cache",
    "value_cache",
    "workspace_buffer",
    "multi_ctas_kv_counter_buffer",
    "block_tables",
    "seq_lens",
    "max_q_len",
    "max_kv_len",
    "bmm1_scale",
    "bmm2_scale",
    "o_sf_scale",
    "o_sf_vec_size",
    "o_sf_start_index",
    "batch_size",
    "window_left",
)

# The compiled functions' parameters by name and in order; names are those of FlashInfer's sources.
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "fa2": {
        "plan": _FA2_PLAN,
        "workspace_size": ("device_buffer", *_FA2_PLAN[3:]),
        "paged_run": _PAGED_RUN + _FA2_EXTRAS,
        "ragged_run": _RAGGED_RUN + _FA2_EXTRAS,
    },
    "fa3": {
        "plan": _PLAN,
        "paged_run": _PAGED_RUN + _FA3_EXTRAS,
        "ragged_run": _RAGGED_RUN + _FA3_EXTRAS,
    },
    "xqa": {
        "xqa_wrapper": (
            "run_sm90_fp8_mha",
            "multiProcessorCount",
            "nbKHeads",
            "slidingWinSize",
            "qScale",
            "qScaleTensor",
            "output",
            "rcpOutScale",
            "q",
            "attentionSinks",
            "kCacheVLLM",
            "vCacheVLLM",
            "kSfCacheVLLM",
            "vSfCacheVLLM",
            "kvCachePageList",
            "maxSeqLen",
            "seqLen",
            "batchSize",
            "kvCacheScale",
            "kvScaleTensor",
            "qSeqLen",
            "qCuSeqLens",
            "mask",
            "semaphores",
            "scratch",
            "enable_pdl",
        ),
    },
    "trtllm_gen": {
        "trtllm_paged_attention_decode": (
            *_TRTLLM_GEN,
            "sparse_mla_top_k",
            "sm_count",
            "enable_pdl",
            "workspace_size",
            "attention_sinks",
            "cum_seq_lens_q",
            "key_block_scales",
            "value_block_scales",
            "skip_softmax_threshold_scale_factor",
            "uses_shared_paged_kv_idx",
            "lse",
            "lse_scale",
            "lse_stride_tokens",
            "lse_stride_heads",
            "enable_block_sparse_attention",
            "sparse_mla_top_k_lens",
            "bf16q_fp8kv_transform_mode",
            "use_fp16_softmax",
        ),
        "trtllm_paged_attention_context": (
            *_TRTLLM_GEN,
            "cum_seq_lens_q",
            "cum_seq_lens_kv",
            "sm_count",
            "enable_pdl",
            "workspace_size",
            "attention_sinks",
            "key_block_scales",
            "value_block_scales",
            "skip_softmax_threshold_scale_factor",
            "uses_shared_paged_kv_idx",
            "use_fp16_softmax",
            "uses_spcompress",
            "is_causal",
            "lse",
            "lse_scale",
            "lse_stride_tokens",
            "lse_stride_heads",
        ),
    },
}
# Those of them that compute attention; the others make plans, which this library does itself.
RUNS = {
    "fa2": ("paged_run", "ragged_run"),
    "fa3": ("paged_run", "ragged_run"),
    "xqa": ("xqa_wrapper",),
    "trtllm_gen": ("trtllm_paged_attention_decode", "trtllm_paged_attention_context"),
}

MASK_MODES = {False: 0, True: 1}  # by `AttentionSpec.causal`
CUSTOM_MASK = 2
LAYOUTS = {"NHD": 0, "HND": 1}

# What these kernels are told about features that this library does not use.
_UNUSED = {
    "rope_rcp_scale": 1.0,
    "rope_rcp_theta": 1.0,
    "scale_v_scalar": 1.0,
    "token_pos_in_items_len": 0,
}

# What TRTLLM-GEN is told about features that this library does not use.
TRTLLM_GEN_UNUSED: dict[str, Any] = {
    "out_scale_factor": None,
    "o_sf_scale": -1.0,
    "o_sf_vec_size": -1,
    "o_sf_start_index": 0,
    "sparse_mla_top_k": 0,
    # Launched early, a kernel would read lengths and pages before what writes them has finished.
    "enable_pdl": False,
    "key_block_scales": None,
    "value_block_scales": None,
    "skip_softmax_threshold_scale_factor": None,
    "uses_shared_paged_kv_idx": True,
    "use_fp16_softmax": None,
    "uses_spcompress": None,
    "is_causal": True,
    "enable_block_sparse_attention": False,
    "sparse_mla_top_k_lens": None,
    # The kernel's LSE is of base 2 and multiplied by this.
    "lse_scale": LN2,
}


def arrange(names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Put `values` in the order of `names`; optional tensors without a value are `None`.

    Raises
    ------
    KeyError
        For a name that is not optional and has no value.
    """
    known = _UNUSED | dict(values)
    return tuple(known.get(name) if name.startswith("maybe_") else known[name] for name in names)
