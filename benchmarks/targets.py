"""The promises of this project about speed and memory, and whether a run keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .workload import EJKERNEL, FLASH_ATTN3, OURS, PALLAS

__all__ = ["TARGETS", "Figures", "Target"]

Document = dict[str, Any]


class Figures:
    """Finds results in a run's document."""

    def __init__(self, document: Document) -> None:
        self.results: list[dict[str, Any]] = document["results"]

    def all(self, benchmark: str, case: str, **shape: Any) -> list[dict[str, Any]]:
        """Results of a case whose shape has these values."""
        return [
            result
            for result in self.results
            if result["benchmark"] == benchmark
            and result["case"] == case
            and all(result["shape"].get(name) == value for name, value in shape.items())
        ]

    def best(self, benchmark: str, case: str, field: str = "median", **shape: Any) -> float:
        """Lowest value among them, highest for a rate; `LookupError` where there is none."""
        found = [result[field] for result in self.all(benchmark, case, **shape)]
        if not found:
            raise LookupError(f"{benchmark}, {case}, {shape}: not measured")
        return float(min(found) if field == "median" else max(found))


class Target(NamedTuple):
    """A promise and how to find out whether it holds.

    Parameters
    ----------
    benchmark
        The one that measures it.
    what, wanted
        For the table.
    measure
        Value in a run; raises `LookupError` where the run lacks what it takes.
    limit
        The bound on that value.
    at_most
        Whether the bound is an upper one.
    unit
        How the value is written.
    """

    benchmark: str
    what: str
    wanted: str
    measure: Callable[[Figures], float]
    limit: float
    at_most: bool = True
    unit: str = ""

    def met(self, value: float) -> bool:
        """Whether `value` keeps the promise."""
        return value <= self.limit if self.at_most else value >= self.limit


def _ratio(
    over: tuple[str, str], under: tuple[str, str], field: str = "median", **shape: Any
) -> Callable[[Figures], float]:
    def measure(figures: Figures) -> float:
        return figures.best(*over, field=field, **shape) / figures.best(
            *under, field=field, **shape
        )

    return measure


def _plain(
    benchmark: str, case: str, field: str = "median", **shape: Any
) -> Callable[[Figures], float]:
    return lambda figures: figures.best(benchmark, case, field=field, **shape)


def _worst_overhead(figures: Figures) -> float:
    """Largest difference over the numbers of threads that were tried."""
    found = figures.all("cpu_overhead", "difference", context=16)
    if not found:
        raise LookupError("overhead on the CPU: not measured")
    return float(max(result["median"] for result in found))


def _worst_uneven(figures: Figures) -> float:
    """Largest excess of our planner over the best planner, over all batches, in percent."""
    worst = -100.0
    batches = {
        result["shape"]["batch"] for result in figures.results if result["benchmark"] == "uneven"
    }
    if not batches:
        raise LookupError("uneven batches: not measured")
    for batch in batches:
        ours = figures.best("uneven", "our planner", batch=batch)
        best = min(
            result["median"]
            for result in figures.results
            if result["benchmark"] == "uneven" and result["shape"]["batch"] == batch
        )
        worst = max(worst, 100.0 * (ours / best - 1.0))
    return worst


def _peer_targets() -> Iterable[Target]:
    for requests, context in ((32, 1024), (8, 8192), (128, 2048)):
        for peer, factor in (
            (FLASH_ATTN3, 1.1),
            (EJKERNEL, 1.1),
            (PALLAS, 2.0),
        ):
            if peer == PALLAS and (requests, context) != (32, 1024):
                continue
            yield Target(
                "decode_peers",
                f"decode from JAX, {requests} x {context}: {peer} / ours",
                f">= {factor}",
                _ratio(
                    ("decode_peers", peer),
                    ("decode_peers", OURS),
                    requests=requests,
                    context=context,
                ),
                factor,
                at_most=False,
            )


def _step_targets() -> Iterable[Target]:
    limits = {"JAX unrolled": 1.05, "JAX scan": 1.10, "JAX scan, unroll 4": 1.10}
    for writes in ("", " and writes"):
        for case, limit in limits.items():
            yield Target(
                "decode_step",
                f"decode step 32 x 1024, 32 layers{writes}: {case} / PyTorch graph",
                f"<= {limit}",
                _ratio(
                    ("decode_step", case + writes),
                    ("decode_step", f"PyTorch graph{writes}"),
                    layers=32,
                ),
                limit,
            )
    steps = [case + writes for writes in ("", " and writes") for case in limits]
    for case in steps:
        yield Target(
            "decode_step",
            f"handler calls in a steady step: {case}",
            "<= 0.1",
            _plain("decode_step", f"{case}, handler calls"),
            0.1,
        )
    for case in ("PyTorch graph", *steps):
        yield Target(
            "decode_step",
            f"device memory allocated by a steady step: {case}",
            "0",
            _plain("decode_step", f"{case}, memory"),
            0.0,
            unit="bytes",
        )


def _planning_targets() -> Iterable[Target]:
    for requests, limit in ((32, 60.0), (256, 250.0)):
        for case in ("PyTorch", "JAX"):
            yield Target(
                "planning",
                f"plan with upload, {requests} x 8192: {case}",
                f"<= {limit:.0f} us",
                _plain("planning", case, requests=requests),
                limit,
                unit="us",
            )
    yield Target(
        "planning",
        "an engine's batch split and its kernels chosen, 256 x 8192",
        "<= 150 us",
        _plain("planning", "engine batch, dispatch", requests=256),
        150.0,
        unit="us",
    )


def _device_plan_targets() -> Iterable[Target]:
    for requests, limit in ((32, 30.0), (256, 60.0)):
        for framework in ("JAX", "PyTorch graph"):
            for way in ("split", "unsplit"):
                yield Target(
                    "device_planning",
                    f"plan on the device, {requests} x 8192, {way}: {framework}",
                    f"<= {limit:.0f} us",
                    _plain("device_planning", f"{framework}, {way}", requests=requests),
                    limit,
                    unit="us",
                )
    for way in ("split", "unsplit"):
        yield Target(
            "device_loop",
            f"loop of 128 tokens at 32 x 1024, 32 layers, {way}: JAX / kernels alone",
            "<= 1.03",
            _ratio(("device_loop", f"JAX loop, {way}"), ("device_loop", f"kernels alone, {way}")),
            1.03,
        )
        yield Target(
            "device_loop",
            f"handler calls for a token of the loop, {way}",
            "0",
            _plain("device_loop", f"JAX loop, {way}, handler calls"),
            0.0,
        )
        yield Target(
            "device_loop",
            f"copies to the device for a token of the loop, {way}",
            "0",
            _plain("device_loop", f"JAX loop, {way}, copies to the device"),
            0.0,
        )


def _reuse_targets() -> Iterable[Target]:
    for front_end in ("PyTorch graph", "JAX unrolled"):
        yield Target(
            "cascade",
            f"64 requests that share 16384 tokens: plain decode / cascade, {front_end}",
            ">= 3",
            _ratio(
                ("cascade", f"plain, {front_end}"),
                ("cascade", f"chosen, {front_end}"),
                requests=64,
                prefix=16384,
            ),
            3.0,
            at_most=False,
        )
        for what in ("chain", "tree"):
            yield Target(
                "speculative",
                f"32 x 4096: eight drafts in a {what} / one token, {front_end}",
                "<= 1.5",
                _ratio(
                    ("speculative", f"8 in a {what}, {front_end}"),
                    ("speculative", f"one token, {front_end}"),
                    requests=32,
                    context=4096,
                ),
                1.5,
            )


def _share_of_step(way: str) -> Callable[[Figures], float]:
    return lambda figures: 100.0 * figures.best("cpu_dcp", f"{way}, combine", field="of_step")


def _dcp_targets() -> Iterable[Target]:
    for way in ("ag_rs", "a2a"):
        yield Target(
            "cpu_dcp",
            f"CPU decode of 8192 tokens over 4 ranks: {way} combine / step",
            "<= 15 %",
            _share_of_step(way),
            15.0,
            unit="%",
        )
    yield Target(
        "dcp_partials",
        "decode 4 x 32768: four ranks in turn / one cache, PyTorch graph",
        "<= 1.1",
        _ratio(
            ("dcp_partials", "ranks in turn, PyTorch graph"),
            ("dcp_partials", "one cache, PyTorch graph"),
        ),
        1.1,
    )
    yield Target(
        "dcp_partials",
        "decode 4 x 32768 over 4 ranks: bandwidth of a rank / of the plain kernel on its share",
        ">= 0.9",
        _ratio(
            ("dcp_partials", "ranks in turn, PyTorch graph"),
            ("dcp_partials", "a cache of one share, PyTorch graph"),
            field="gb_per_s",
        ),
        0.9,
        at_most=False,
    )


def _cache_targets() -> Iterable[Target]:
    yield Target(
        "cpu_allocator",
        "allocator: a page handed out or taken back, one request at a time",
        "<= 1000 ns",
        _plain("cpu_allocator", "allocate, extend, free"),
        1000.0,
        unit="ns",
    )
    yield Target(
        "cpu_allocator",
        "allocator: prefix lookup of a prompt of 32768 tokens, all found",
        "<= 1000 us",
        _plain("cpu_allocator", "lookup, all found"),
        1000.0,
        unit="us",
    )
    yield Target(
        "append",
        "append of 8192 tokens, bf16: bandwidth / that of a copy",
        ">= 0.85",
        _ratio(
            ("append", "append, bfloat16, PyTorch graph"),
            ("append", "copy"),
            field="gb_per_s",
            tokens=8192,
        ),
        0.85,
        at_most=False,
    )
    for kind in ("torch owns", "JAX owns"):
        yield Target(
            "append",
            f"append of 32 tokens in a jitted step, {kind} the cache",
            "<= 5 us",
            _plain("append", f"append, bfloat16, JAX unrolled, {kind} the cache", tokens=32),
            5.0,
            unit="us",
        )
    for front_end in ("PyTorch graph", "JAX unrolled"):
        yield Target(
            "quantised",
            f"decode 128 x 2048: bf16 / fp8, {front_end}",
            ">= 1.7",
            _ratio(
                ("quantised", f"bf16, {front_end}"),
                ("quantised", f"fp8, {front_end}"),
                requests=128,
                context=2048,
            ),
            1.7,
            at_most=False,
        )


_CUDNN = "cuDNN dense, JAX"
_FLASH_PREFILL = "flash-attn3-jax, pages of 16", "flash-attn3-jax, pages of 128"


def _prefill_against_flash(case: str) -> Callable[[Figures], float]:
    def measure(figures: Figures) -> float:
        theirs = [
            result["tflops"]
            for name in _FLASH_PREFILL
            for result in figures.all("prefill", name, requests=1, length=16384)
        ]
        if not theirs:
            raise LookupError("flash-attn3-jax over pages: not measured")
        ours: float = figures.best("prefill", case, field="tflops", requests=1, length=16384)
        return ours / float(max(theirs))

    return measure


TARGETS: tuple[Target, ...] = (
    Target(
        "cpu_overhead",
        "CPU: attend from jax.jit less the same from PyTorch, 8 x 16",
        "<= 50 us",
        _worst_overhead,
        50.0,
        unit="us",
    ),
    Target(
        "cpu_decode",
        "CPU decode 8 x 2048: reference / (gather + SDPA)",
        "<= 1.3",
        _ratio(("cpu_decode", "reference"), ("cpu_decode", "gather + SDPA")),
        1.3,
    ),
    Target(
        "cpu_planning",
        "CPU: RaggedBatch + plan, 256 x 8192",
        "<= 2 ms",
        _plain("cpu_planning", "RaggedBatch + plan, PyTorch"),
        2.0,
        unit="ms",
    ),
    Target(
        "cpu_planning",
        "CPU: an engine's batch split and its kernels chosen, 256 x 8192",
        "<= 0.15 ms",
        _plain("cpu_planning", "engine batch, dispatch"),
        0.15,
        unit="ms",
    ),
    *_step_targets(),
    Target(
        "decode_bandwidth",
        "decode bandwidth 128 x 2048 / device read, PyTorch graph",
        ">= 0.9",
        _plain("decode_bandwidth", "PyTorch graph", "of_limit", requests=128, context=2048),
        0.9,
        at_most=False,
    ),
    *_peer_targets(),
    Target(
        "uneven",
        "decode, 64: one of 32k, rest 512",
        "<= 85 us",
        _plain("uneven", "our planner", batch="64: one of 32k, rest 512"),
        85.0,
        unit="us",
    ),
    Target(
        "uneven",
        "decode, 128: one of 64k, rest 1024",
        "<= 215 us",
        _plain("uneven", "our planner", batch="128: one of 64k, rest 1024"),
        215.0,
        unit="us",
    ),
    Target(
        "uneven",
        "uneven batches: worst excess over the best column",
        "<= 3 %",
        _worst_uneven,
        3.0,
        unit="%",
    ),
    Target(
        "prefill",
        "prefill 1 x 16384: through pages / cuDNN dense, JAX",
        ">= 1.15",
        _ratio(
            ("prefill", "through pages, JAX"),
            ("prefill", _CUDNN),
            field="tflops",
            requests=1,
            length=16384,
        ),
        1.15,
        at_most=False,
    ),
    Target(
        "prefill",
        "prefill 1 x 16384: own rows / flash-attn3-jax over pages",
        ">= 1.0",
        _prefill_against_flash("own rows alone, JAX"),
        1.0,
        at_most=False,
    ),
    Target(
        "prefill",
        "prefill 1 x 16384: through pages / flash-attn3-jax over pages",
        ">= 1.0",
        _prefill_against_flash("through pages, JAX"),
        1.0,
        at_most=False,
    ),
    *_planning_targets(),
    *_device_plan_targets(),
    *_reuse_targets(),
    *_cache_targets(),
    *_dcp_targets(),
)
