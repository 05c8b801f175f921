"""Combining attention over disjoint sets of keys: parts of one process, or shards of several ranks.

Formulas are those by which attention states combine in Ye et al., "FlashInfer" (2025). With
``m = max_r lse_r`` and ``e_r = exp(lse_r - m)``, state ``r`` has the weight
``w_r = e_r / sum(e)``; the union has the output ``sum_r w_r * out_r`` and the LSE
``m + ln(sum(e))``. A state whose LSE is infinite or NaN counts as empty, as some kernels mark one
that saw no key; its weight is 0, and its output is not read, whatever it holds. Where all are
empty, the output is 0 and the LSE -inf.

Everything is computed in float32 and summed in the order of states, so that all ranks, and both
front ends, do the same operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from interop.errors import DeviceError, DTypeError, FrameworkError, ShapeError
from interop.sharding import check_rank
from interop.spec import ELEMENT_BYTES, FLOAT_DTYPES, dtype_name

__all__ = ["combine_states", "merge_states", "pack_partial", "scale_partial", "unpack_partial"]

# Axes of the arguments, as `check_states` reads them.
ROWS = "tokens heads head_dim_v"
LSE_ROWS = "tokens heads"
STACKED_ROWS = f"ranks {ROWS}"
STACKED_LSE_ROWS = f"ranks {LSE_ROWS}"
PACKED_ROWS = "ranks tokens heads head_dim_v+k"


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    Parameters
    ----------
    out_a, out_b
        ``[tokens, heads, head_dim_v]``, one dtype.
    lse_a, lse_b
        ``[tokens, heads]`` float32, natural logarithm.

    Returns
    -------
    (Tensor, Tensor)
        Output in the inputs' dtype, LSE float32.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError
        Naming the first argument that does not fit the others.
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    axes = (ROWS, LSE_ROWS, ROWS, LSE_ROWS)
    check_states(Tensor, "torch.Tensor", states, axes)
    _check_devices(states)
    if _on_triton(states):
        from .triton_merging import merge

        return merge(out_a, lse_a, out_b, lse_b)
    weights, lse = _weights(torch.stack((lse_a, lse_b)))
    return _sum((out_a, out_b), weights).to(out_a.dtype), lse


def combine_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of the keys of all ranks, from attention over those of each.

    Parameters
    ----------
    outs
        ``[ranks, tokens, heads, head_dim_v]``, of any strides.
    lses
        ``[ranks, tokens, heads]`` float32, natural logarithm, of any strides.

    Returns
    -------
    (Tensor, Tensor)
        Output ``[tokens, heads, head_dim_v]`` in the dtype of `outs`, LSE ``[tokens, heads]``
        float32.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError
        Naming the first argument that does not fit.
    """
    states = {"outs": outs, "lses": lses}
    check_states(Tensor, "torch.Tensor", states, (STACKED_ROWS, STACKED_LSE_ROWS))
    _check_devices(states)
    if _on_triton(states):
        from .triton_merging import combine

        return combine(outs, lses)
    weights, lse = _weights(lses)
    return _sum(outs, weights).to(outs.dtype), lse


def scale_partial(out: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's term of the sum that `combine_states` computes, for a sum over ranks.

    Parameters
    ----------
    out
        ``[tokens, heads, head_dim_v]``, attention over this rank's keys.
    lses
        ``[ranks, tokens, heads]`` float32, those of all ranks.
    rank
        Which of `lses` belongs to `out`.

    Returns
    -------
    (Tensor, Tensor)
        ``w_rank * out`` in the dtype of `out`, 0 where the rank saw no key, and the LSE of the
        union, ``[tokens, heads]`` float32. Each term is rounded to the dtype before the sum.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError, ArgumentError
        Naming the first argument that does not fit.
    """
    states = {"out": out, "lses": lses}
    check_states(Tensor, "torch.Tensor", states, (ROWS, STACKED_LSE_ROWS))
    rank = check_rank(rank, lses.shape[0])
    _check_devices(states)
    if _on_triton(states):
        from .triton_merging import scale

        return scale(out, lses, rank)
    weights, lse = _weights(lses)
    return _weighted(out, weights[rank]).to(out.dtype), lse


def pack_partial(out: Tensor, lse: Tensor, size: int) -> Tensor:
    """Put output and LSE of each rank's heads into one message for that rank.

    The bits of the float32 LSE follow the output: as one float32 element, or as two elements of 16
    bits, lower half first. They are no numbers of that type and travel as they are.

    Parameters
    ----------
    out
        ``[tokens, heads, head_dim_v]``, heads in the order of ranks.
    lse
        ``[tokens, heads]`` float32.
    size
        Ranks; has to divide the heads.

    Returns
    -------
    Tensor
        ``[size, tokens, heads / size, head_dim_v + k]`` in the dtype of `out`, contiguous, with
        ``k = 1`` for float32 and 2 for 16 bits: what to send to each rank. An all-to-all of it
        gives what `unpack_partial` reads.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError, DeviceError
        Naming the first argument that does not fit.
    """
    states = {"out": out, "lse": lse}
    check_states(Tensor, "torch.Tensor", states, (ROWS, LSE_ROWS))
    check_heads(out, size)
    _check_devices(states)
    tokens, heads, width = out.shape
    words = _words(out)
    # As integers, since copying a NaN may change its bits.
    halves = lse.contiguous().unsqueeze(-1).view(words)
    packed = out.new_empty((size, tokens, heads // size, width + halves.shape[-1]))
    by_rank = packed.view(words).movedim(0, 1)
    by_rank[..., :width] = out.view(words).unflatten(1, (size, heads // size))
    by_rank[..., width:] = halves.unflatten(1, (size, heads // size))
    return packed


def unpack_partial(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Read the messages of all ranks about one rank's heads.

    Parameters
    ----------
    packed
        ``[ranks, tokens, heads, head_dim_v + k]`` as `pack_partial` makes it.

    Returns
    -------
    (Tensor, Tensor)
        Output ``[ranks, tokens, heads, head_dim_v]``, a view, and LSE ``[ranks, tokens, heads]``
        float32, as `combine_states` takes them.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError
        If it is no such message.
    """
    check_states(Tensor, "torch.Tensor", {"packed": packed}, (PACKED_ROWS,))
    width = packed_width(packed, packed.dtype)
    packed = packed.contiguous()
    halves = packed.view(_words(packed))[..., width:]
    if width % halves.shape[-1]:
        halves = halves.clone(memory_format=torch.contiguous_format)  # float32 has to be aligned
    return packed[..., :width], halves.view(torch.float32).squeeze(-1)


def _words(out: Tensor) -> torch.dtype:
    """Integers as wide as the elements of `out`."""
    return torch.int32 if out.element_size() == 4 else torch.int16


def _on_triton(states: dict[str, Tensor]) -> bool:
    """Whether the Triton kernels can compute this: they run on GPUs, and have no gradient."""
    if not next(iter(states.values())).is_cuda:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in states.values()))


def _weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of states and LSE of their union, from their LSEs; states are the first axis."""
    lses = torch.where(lses < torch.inf, lses, -torch.inf)
    # Lowest and not -inf, which cannot be subtracted from itself, where all are empty.
    floor = lses.amax(0).clamp_min(torch.finfo(torch.float32).min)
    terms = torch.exp(lses - floor)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    # The largest term is 1, so a sum below it is 0: that of empty states.
    return terms / total.clamp_min(1.0), floor + torch.log(total)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    """Output times its weight in float32; where that is 0, the output may hold anything."""
    weight = weight.unsqueeze(-1)
    return (out.float() * weight).masked_fill_(weight == 0.0, 0.0)


def _sum(outs: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Weighted sum of outputs in float32."""
    total: Any = 0.0
    for out, weight in zip(outs, weights, strict=True):
        total += _weighted(out, weight)
    return total


def _check_devices(states: dict[str, Tensor]) -> None:
    """Raise `DeviceError` naming the first tensor that does not lie with the first one."""
    leader, *others = states
    for name in others:
        if states[name].device != states[leader].device:
            raise DeviceError(
                name,
                given=str(states[name].device),
                wanted=f"{states[leader].device}, where {leader} lies",
            )


def check_states(kind: type, kind_name: str, states: dict[str, Any], axes: tuple[str, ...]) -> None:
    """Check states of attention, given to a function of either framework.

    Parameters
    ----------
    kind, kind_name
        Array class of the framework, and its name for people.
    states
        Arguments by name. The others have to fit the first, an output: those whose names begin with
        ``lse`` are float32, and the others of its dtype.
    axes
        Names of the axes of each, with blanks between; one name stands for one size throughout.

    Raises
    ------
    FrameworkError, ShapeError, DTypeError
        Naming the first argument that does not fit.
    """
    for name, array in states.items():
        if not isinstance(array, kind):
            given = f"{type(array).__module__}.{type(array).__name__}"
            raise FrameworkError(name, given=given, wanted=f"a {kind_name}")
    leader, first = next(iter(states.items()))
    sizes: dict[str, int] = {}
    for (name, array), text in zip(states.items(), axes, strict=True):
        labels = text.split()
        wanted = [sizes.get(label, label) for label in labels]
        shape = tuple(array.shape)
        if len(shape) != len(labels) or any(
            size != sizes.get(label, size) for label, size in zip(labels, shape, strict=True)
        ):
            fits = "" if name == leader else f", to fit {leader}"
            raise ShapeError(
                name, given=list(shape), wanted=f"[{', '.join(map(str, wanted))}]{fits}"
            )
        sizes |= dict(zip(labels, shape, strict=True))
        if sizes.get("ranks") == 0:
            raise ShapeError(name, given=list(shape), wanted="at least one rank")
        dtype, first_dtype = dtype_name(array.dtype), dtype_name(first.dtype)
        if first_dtype not in FLOAT_DTYPES:
            raise DTypeError(leader, given=dtype, wanted=f"one of {', '.join(FLOAT_DTYPES)}")
        wanted_dtype = "float32" if name.startswith("lse") else first_dtype
        if dtype != wanted_dtype:
            raise DTypeError(name, given=dtype, wanted=wanted_dtype)


def check_heads(out: Any, size: int) -> None:
    """Raise `ShapeError` unless the heads of `out` can be dealt to `size` ranks."""
    if size < 1 or out.shape[1] % size:
        raise ShapeError(
            "out",
            given=f"{out.shape[1]} heads for {size} ranks",
            wanted="a multiple of the ranks",
        )


def packed_width(packed: Any, dtype: object) -> int:
    """Width of the outputs in packed messages about outputs of `dtype`."""
    words = 4 // ELEMENT_BYTES[dtype_name(dtype)]
    if len(packed.shape) != 4 or packed.shape[3] <= words:
        raise ShapeError(
            "packed",
            given=list(packed.shape),
            wanted=f"[ranks, tokens, heads, head_dim_v + {words}]",
        )
    return int(packed.shape[3]) - words
