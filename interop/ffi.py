"""The XLA custom calls: a handful of targets, registered through jax-tvm-ffi.

This module knows buffers and streams, but no kernels: each target hands its buffers to a runner
that a front end registers. What a call does stands in its attributes (`interop.attributes`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax_tvm_ffi
import torch
import tvm_ffi

from .attributes import ATTRIBUTES, Call, decode, encode
from .errors import TransformError

__all__ = [
    "TARGETS",
    "bare_call",
    "bind",
    "foreign_call",
    "guard",
    "name_of",
    "python_calls",
    "xla_stream",
]

TARGETS = ("isthmus_attend", "isthmus_attend_waiting", "isthmus_append", "isthmus_plan")
# Calls of this target wait for the device or allocate, so XLA may not record them.
NOT_RECORDABLE = ("isthmus_attend_waiting",)

# How often Python ran for each target since the process started. XLA replays recorded calls without
# Python, so on a GPU this stands still in a steady step.
python_calls: Counter[str] = Counter()

Runner = Callable[[Call, Sequence[Any]], None]


def bind(target: str, runner: Runner) -> None:
    """Register `runner` as the handler of `target` on every platform; once per process.

    The runner is called as ``runner(call, buffers)`` with operands and results in one sequence of
    `tvm_ffi.Tensor`, on the stream that XLA gave. It must not keep them.
    """
    arg_spec = [f"attrs.{name}" for name in ATTRIBUTES] + ["args", "rets"]
    split = len(ATTRIBUTES)

    def handle(*values: Any) -> None:
        python_calls[target] += 1
        runner(decode("".join(values[:split])), values[split:])

    function = tvm_ffi.convert(handle)
    for platform in ("cpu", "gpu"):
        jax_tvm_ffi.register_ffi_target(
            target,
            function,
            arg_spec,
            platform=platform,
            allow_cuda_graph=target not in NOT_RECORDABLE,
            pass_owned_tensor=True,
        )


def foreign_call(
    target: str,
    call: Call,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Put a custom call into the program that is being traced.

    Parameters
    ----------
    target
        One of `TARGETS`.
    call
        Its attributes.
    operands, results
        Its buffers, and the shapes of those it makes.
    aliases
        Operand index to result index, for operands that are updated in place.

    A call whose results nobody uses is removed by XLA, as any unused value is. No call is declared
    to have a side effect: JAX runs programs with effects through its slow Python dispatch (0.2 to
    0.4 ms a call of the jitted function), and a write's token or pools are used by whoever reads
    what it wrote.

    Raises
    ------
    TransformError
        Under ``vmap`` and differentiation.
    """
    return bare_call(target, call, guard(name_of(target), *operands), results, aliases=aliases)


def bare_call(
    target: str,
    call: Call,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """As `foreign_call`, for operands that went through `guard` before.

    Under ``shard_map`` all operands and results vary over the axes over which any operand does.
    """
    ffi = jax.ffi.ffi_call(target, tuple(results), input_output_aliases=aliases or {})
    axes = frozenset().union(*(_varying(value) for value in operands))
    made = ffi(*(_vary(value, axes) for value in operands), **encode(call))
    return tuple(_vary(value, axes) for value in made)


def _varying(value: jax.Array) -> frozenset[str]:
    """Axes of ``shard_map`` over which `value` is known to vary."""
    kind = jax.typeof(value)
    # JAX renamed this, and put more beside it.
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def _vary(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `value` as one that varies over `axes`, which costs nothing when it runs."""
    missing = tuple(sorted(axes - _varying(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def name_of(target: str) -> str:
    """What a target does, as messages call it: ``"attend"`` or ``"append"``."""
    return target.removeprefix("isthmus_").removesuffix("_waiting")


def guard(name: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return `arrays` as they are, in such a way that transformations of them raise.

    Parameters
    ----------
    name
        What has neither a batching rule nor a gradient, for the message.

    Raises
    ------
    TransformError
        When the result is transformed by ``vmap`` or differentiated.
    """

    @jax.custom_batching.custom_vmap
    def plain(*values: jax.Array) -> tuple[jax.Array, ...]:
        return values

    @plain.def_vmap
    def _no_vmap(axis_size: int, batched: Any, *values: jax.Array) -> Any:
        raise TransformError(
            f"{name} has no vmap over {axis_size} examples: a ragged batch is the batch axis. "
            "Put the examples into one RaggedBatch and call it once."
        )

    @jax.custom_jvp
    def guarded(*values: jax.Array) -> tuple[jax.Array, ...]:
        return plain(*values)

    @guarded.defjvp
    def _no_gradient(primals: Any, tangents: Any) -> Any:
        raise TransformError(
            f"{name} has no gradient: attention over a paged cache is for inference. Use "
            "jax.lax.stop_gradient on its arguments, or jax.nn.dot_product_attention to train."
        )

    return tuple(guarded(*arrays))


def xla_stream(buffer: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the stream that XLA runs this call on torch's current stream.

    Without it torch would put its work on its own stream, beside the step that it belongs to.
    """
    device = buffer.device
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = tvm_ffi.get_raw_stream(device)
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, f"cuda:{device.index}"))
