"""``python -m benchmarks``: runs all that this machine can run, prints tables, writes JSON."""

from __future__ import annotations

import argparse
import importlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from .recording import Run, machine


class Benchmark(NamedTuple):
    """Where a benchmark is, and whether it needs a GPU."""

    module: str
    function: str
    gpu: bool


BENCHMARKS = {
    "cpu_overhead": Benchmark("cpu", "overhead", gpu=False),
    "cpu_decode": Benchmark("cpu", "decode", gpu=False),
    "cpu_planning": Benchmark("cpu", "planning", gpu=False),
    "cpu_dcp": Benchmark("cpu_dcp", "combine", gpu=False),
    "cpu_allocator": Benchmark("allocator", "allocator", gpu=False),
    "decode_step": Benchmark("gpu_decode", "step", gpu=True),
    "decode_bandwidth": Benchmark("gpu_decode", "bandwidth", gpu=True),
    "uneven": Benchmark("gpu_uneven", "uneven", gpu=True),
    "mixed": Benchmark("gpu_prefill", "mixed", gpu=True),
    "append": Benchmark("gpu_caches", "append", gpu=True),
    "quantised": Benchmark("gpu_caches", "quantised", gpu=True),
    "cascade": Benchmark("gpu_cascade", "cascade", gpu=True),
    "speculative": Benchmark("gpu_speculative", "speculative", gpu=True),
    "dcp_partials": Benchmark("gpu_dcp", "partials", gpu=True),
    "dcp_combine": Benchmark("gpu_dcp", "combine", gpu=True),
    "planning": Benchmark("gpu_planning", "planning", gpu=True),
    "device_planning": Benchmark("gpu_device_plans", "planning", gpu=True),
    "device_loop": Benchmark("gpu_device_plans", "loop", gpu=True),
    # Other libraries' kernels last: one that breaks the card's context spoils what comes after.
    "prefill": Benchmark("gpu_prefill", "prefill", gpu=True),
    "decode_peers": Benchmark("gpu_peers", "decode", gpu=True),
}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for the JSON file (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        metavar="NAME",
        help=f"run these alone: {', '.join(BENCHMARKS)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats and shapes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks; returns 0 unless one of them could not run at all."""
    arguments = _arguments(argv)
    # JAX reads this once. By default it takes most of the card, and torch's pools do not fit.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch
    from rich.console import Console

    from .report import print_report

    console = Console()
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        # Peers set allocator options at their import; those must come too late for JAX.
        import jax

        jax.devices()
    chosen = arguments.only or [
        name for name, benchmark in BENCHMARKS.items() if has_gpu or not benchmark.gpu
    ]
    run = Run(quick=arguments.quick)
    now = datetime.now(UTC)
    path = arguments.out / f"{machine()['kind']}-{now:%Y-%m-%d-%H%M}.json"
    date = now.isoformat(timespec="seconds")
    for number, name in enumerate(chosen, 1):
        benchmark = BENCHMARKS[name]
        with console.status(f"[{number}/{len(chosen)}] {name}"), run.timed(name):
            if benchmark.gpu and not has_gpu:
                raise RuntimeError("needs a GPU that PyTorch can use")
            module = importlib.import_module(f".{benchmark.module}", __package__)
            getattr(module, benchmark.function)(run)
        console.print(f"[{number}/{len(chosen)}] {name}: {run.wall_seconds[name]:.1f} s")
        # After each one, so that a crash of the process loses nothing.
        document = run.write(path, date)
    print_report(document, console)
    console.print(f"written to {path}")
    return int(any(error["case"] == "whole benchmark" for error in run.errors))


if __name__ == "__main__":
    raise SystemExit(main())
