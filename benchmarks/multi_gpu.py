"""``python -m benchmarks.multi_gpu``: one step over several GPUs of a host, checked and timed.

PyTorch runs a process for each rank (NCCL), JAX one process with all devices (``shard_map``); both
against the answer of one GPU. ``--device cpu`` is a dry run over gloo and virtual CPU devices,
whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from .multi_ranks import CASES, DRY_CASES, Problem, Way, ways_for
from .recording import Run, machine
from .timing import summary

__all__ = ["main"]

# Steps of one measurement, the same on all ranks, and repeats of it.
STEPS, REPEATS, WARM_UP = 20, 5, 5
LINK_BYTES = 64 << 20
# Between bfloat16 outputs that are rounded at other places.
MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
GROUP_SECONDS = 60
ROOT = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run both frameworks, print a line for each result, write JSON and a plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="2 or more; all GPUs when left out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--role", choices=("torch", "jax", "fail"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 4)
    if ranks < 2 or ranks & (ranks - 1) or ranks > 8:
        parser.error(f"--ranks is {ranks}; want 2, 4 or 8, and as many GPUs")
    if given.device == "cuda" and torch.cuda.device_count() < ranks:
        parser.error(f"PyTorch sees {torch.cuda.device_count()} GPUs; want {ranks}")
    if given.role:
        roles = {"torch": _torch_rank, "jax": _jax_process, "fail": _failing_rank}
        roles[given.role](given.device, ranks, given.rank, Path(given.store))
        return 0
    return _lead(given.device, ranks, given.out)


def _lead(device: str, ranks: int, out: Path) -> int:
    run = Run(benchmark="multi_gpu")
    with tempfile.TemporaryDirectory() as folder, run.timed("multi_gpu"):
        store = Path(folder)
        with run.attempt("PyTorch"):
            _wait([_start("torch", device, ranks, rank, store) for rank in range(ranks)], 240)
        with run.attempt("JAX"):
            _wait([_start("jax", device, ranks, 0, store)], 240)
        with run.attempt("a rank raises"):
            start = time.perf_counter()
            _wait([_start("fail", device, ranks, rank, store) for rank in range(ranks)], 120)
            seconds = summary([time.perf_counter() - start])
            run.add("all ranks end after one raised", {"ranks": ranks}, seconds, "s")
        for file in sorted(store.glob("*.json")):
            found = json.loads(file.read_text())
            run.results += found["results"]
            run.errors += found["errors"]
    now = datetime.now(UTC)
    path = out / f"{machine()['kind']}-x{ranks}-{now:%Y-%m-%d-%H%M}.json"
    document = run.write(path, now.isoformat(timespec="seconds"))
    for result in document["results"]:
        shape, more = result["shape"], result.get("over_bound")
        bound = f", {more:.3f} x the bound" if more else ""
        print(f"{shape}: {result['case']}: {result['median']:.4g} {result['unit']}{bound}")
    for error in document["errors"]:
        print("failed:", error["case"], error["shape"], error["error"])
    if device == "cuda":
        _plot(document, path.with_suffix(".png"))
    print(f"written to {path}")
    return int(bool(document["errors"]))


def _start(role: str, device: str, ranks: int, rank: int, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--device", device]
    command += ["--ranks", str(ranks), "--role", role, "--rank", str(rank), "--store", str(store)]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if device == "cpu":
        flag = f"--xla_force_host_platform_device_count={ranks}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, bufsize=1 << 20
    )


def _wait(processes: list[subprocess.Popen[str]], seconds: float) -> None:
    """Wait for all; raises with the text of the first that failed, or did not end in time."""
    end, failures = time.monotonic() + seconds, []
    for process in processes:
        try:
            _, text = process.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"did not end within {seconds} s"
            process.wait()
        if process.returncode:
            failures.append(text[-1500:])
    if failures:
        raise RuntimeError(failures[0])


def _times(step: Callable[[], Any], wait: Callable[[], None]) -> list[float]:
    """Seconds of a step, `REPEATS` times the mean of `STEPS`: no rank takes more than others."""
    for _ in range(WARM_UP):
        step()
    wait()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        samples.append((time.perf_counter() - start) / STEPS)
    return samples


def _cases(device: str) -> tuple[Any, torch.dtype]:
    return (CASES, torch.bfloat16) if device == "cuda" else (DRY_CASES, torch.float32)


def _add(
    run: Run,
    framework: str,
    problem: Problem,
    way: Way,
    samples: list[float],
    local: list[float],
    wire: dict[str, float],
    rates: dict[str, float],
    difference: float,
) -> None:
    """Write one step down, beside the bound: its kernels alone and what the wire takes."""
    if difference > MOST_DIFFERENCE[problem.dtype]:
        raise RuntimeError(f"differs by {difference:.3g} from the answer of one device")
    timing, alone = summary(samples, STEPS), summary(local, STEPS)
    kinds = {"query": "all_gather", "lse": "all_gather", "out": _collective(way)}
    seconds = sum(count / rates[kinds[what]] for what, count in wire.items() if count)
    run.add(
        f"{framework}, {way.name}",
        {"case": problem.case.name, "ranks": way.ranks},
        timing.scaled(1e6),
        "us",
        local_us=alone.median * 1e6,
        wire_bytes=wire,
        wire_us=seconds * 1e6,
        over_bound=timing.median / (alone.median + seconds),
        largest_difference=difference,
    )


def _collective(way: Way) -> str:
    return "all_to_all" if way.combine == "a2a" else "reduce_scatter"


# PyTorch: one process a rank


def _torch_rank(device: str, ranks: int, rank: int, store: Path) -> None:
    import torch.distributed as dist

    where = _join(device, ranks, rank, store / "torch")
    run = Run(benchmark="multi_gpu")
    rates = _link_rates(where, ranks, dist.group.WORLD)
    for name, rate in rates.items():
        shape = {"ranks": ranks, "bytes": _link_bytes(device)}
        run.add(f"PyTorch, {name}", shape, summary([rate * 1e-9]), "GB/s received")
    cases, dtype = _cases(device)
    for way in ways_for(ranks):
        groups = [
            dist.new_group(list(range(g * way.dcp, (g + 1) * way.dcp))) for g in range(way.tp)
        ]
        group = groups[rank // way.dcp]
        for case in cases:
            problem = Problem(case, where, dtype)
            with run.attempt(f"PyTorch, {way.name}", {"case": case.name, "ranks": ranks}):
                _torch_step(run, problem, way, rank, group, rates)
    dist.barrier()
    if rank == 0:
        _save(run, store / "torch.json")
    dist.destroy_process_group()


def _join(device: str, ranks: int, rank: int, store: Path) -> str:
    import torch.distributed as dist

    meet = dist.FileStore(str(store), ranks)
    wait = timedelta(seconds=GROUP_SECONDS)
    backend = "nccl" if device == "cuda" else "gloo"
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, store=meet, rank=rank, world_size=ranks, timeout=wait)
    return where


def _wait_torch() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _link_bytes(device: str) -> int:
    return 1 << 16 if device == "cpu" else LINK_BYTES


def _link_rates(device: str, ranks: int, group: Any) -> dict[str, float]:
    """Bytes a second that a rank receives, by collective, with large messages."""
    from torch_backend import collectives

    size = _link_bytes(device)
    rows = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    parts = rows.view(ranks, -1)
    ways = {
        "all_gather": (lambda: collectives.all_gather(parts[0], group), (ranks - 1) / ranks),
        "reduce_scatter": (lambda: collectives.reduce_scatter(parts, group), (ranks - 1) / ranks),
        "all_to_all": (lambda: collectives.all_to_all(parts, group), (ranks - 1) / ranks),
    }
    rates = {}
    for name, (step, share) in ways.items():
        seconds = summary(_times(step, _wait_torch)).median
        rates[name] = size * share / seconds
    return rates


def _torch_step(
    run: Run, problem: Problem, way: Way, rank: int, group: Any, rates: dict[str, float]
) -> None:
    import torch_backend
    from interop.dcp import wire_bytes
    from torch_backend import dcp

    cache = problem.cache(way, rank)
    heads, kv_heads = problem.heads_of(way, rank), problem.kv_heads_of(way, rank)
    query = problem.query[:, heads].contiguous()
    key, value = (rows[:, kv_heads].contiguous() for rows in problem.new_rows)
    batch, bucket = problem.batch(way.dcp), problem.bucket(way.dcp)
    wire: dict[str, int] = {}
    if way.combine is None:
        plan = torch_backend.plan(way.spec, cache.spec, batch, bucket=bucket, device=problem.device)

        def step() -> Any:
            return torch_backend.paged_attention(query, key, value, cache, plan, 0)

        local = step
    else:
        shared = dcp.plan(way.spec, cache.spec, batch, group, bucket=bucket, device=problem.device)
        wire = wire_bytes(shared, way.combine)
        group_heads = slice(
            rank // way.dcp * way.spec.num_qo_heads, (rank // way.dcp + 1) * way.spec.num_qo_heads
        )
        gathered = problem.query[:, group_heads].contiguous()
        own_heads = shared.own.static.spec.num_kv_heads if shared.own is not None else 0
        own_rows = [rows[:, :own_heads].contiguous() for rows in (key, value)]

        def step() -> Any:
            return dcp.paged_attention(
                query, key, value, cache, shared, 0, group, combine=way.combine or ""
            )

        def local() -> Any:
            torch_backend.append(key, value, cache, shared.context, 0)
            torch_backend.attend(gathered, cache, shared.context, 0, return_lse=True)
            if shared.own is not None:
                torch_backend.ragged_attention(query, *own_rows, shared.own)

    out = step()
    difference = problem.difference(out, heads)
    samples, alone = _times(step, _wait_torch), _times(local, _wait_torch)
    _add(run, "PyTorch", problem, way, samples, alone, wire, rates, difference)


# JAX: one process, all devices


def _jax_process(device: str, ranks: int, rank: int, store: Path) -> None:
    import jax

    run = Run(benchmark="multi_gpu")
    rates = {
        result["case"].removeprefix("PyTorch, "): result["median"] * 1e9
        for result in json.loads((store / "torch.json").read_text())["results"]
        if result["unit"] == "GB/s received"
    }
    devices = jax.devices("gpu" if device == "cuda" else "cpu")[:ranks]
    cases, dtype = _cases(device)
    for way in ways_for(ranks):
        for case in cases:
            with run.attempt(f"JAX, {way.name}", {"case": case.name, "ranks": ranks}):
                _jax_step(run, case, dtype, way, devices, rates)
    _save(run, store / "jax.json")


def _jax_step(
    run: Run, case: Any, dtype: torch.dtype, way: Way, devices: Any, rates: dict[str, float]
) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_frontend
    from interop.dcp import wire_bytes
    from jax_frontend import dcp

    on_gpu = devices[0].platform == "gpu"
    places = [f"cuda:{i}" if on_gpu else "cpu" for i in range(way.ranks)]
    problems = [Problem(case, place, dtype) for place in places]
    mesh = Mesh(np.array(devices).reshape(way.tp, way.dcp), ("tp", "dcp"))
    both = P(("tp", "dcp"))
    caches = [problem.cache(way, rank) for rank, problem in enumerate(problems)]
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, both))
    wide = jnp.bfloat16 if dtype == torch.bfloat16 else jnp.float32

    def on(rows: torch.Tensor, part: P) -> jax.Array:
        array: jax.Array = jax.device_put(
            rows.float().cpu().numpy().astype(wide), NamedSharding(mesh, part)
        )
        return array

    query = on(problems[0].query, P(None, ("tp", "dcp")))
    key, value = (on(rows, P(None, "tp")) for rows in problems[0].new_rows)
    batch, bucket = problems[0].batch(way.dcp), problems[0].bucket(way.dcp)
    wire: dict[str, int] = {}
    if way.combine is None:
        plan: Any = jax_frontend.plan(
            way.spec, kv.spec, batch, bucket=bucket, device=NamedSharding(mesh, P())
        )
        plan_part = P()

        def one(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
            return jax_frontend.paged_attention(query, key, value, kv, plan, 0)

    else:
        plan = dcp.plan(way.spec, kv.spec, batch, mesh, "dcp", bucket=bucket)
        plan_part, wire = P("dcp"), wire_bytes(plan, way.combine)

        def one(query: Any, key: Any, value: Any, kv: Any, plan: Any) -> Any:
            return dcp.paged_attention(
                query, key, value, kv, plan, 0, axis_name="dcp", combine=way.combine
            )

    heads = P(None, ("tp", "dcp"))
    step = jax.jit(
        jax.shard_map(
            one,
            mesh=mesh,
            in_specs=(heads, P(None, "tp"), P(None, "tp"), both, plan_part),
            out_specs=(heads, both),
            check_vma=False,
        )
    )
    state = [kv]

    def run_one() -> Any:
        out, state[0] = step(query, key, value, state[0], plan)
        return out

    last: list[Any] = [run_one()]

    def again() -> None:
        last[0] = run_one()

    out = torch.from_numpy(np.asarray(last[0]).astype(np.float32)).to(places[0])
    difference = problems[0].difference(out, slice(None))
    samples = _times(again, lambda: jax.block_until_ready(last[0]))
    local = _local_of(way, problems, caches)
    _add(run, "JAX", problems[0], way, samples, local, wire, rates, difference)
    jax_frontend.release_cache(kv.name)


def _local_of(way: Way, problems: list[Problem], caches: list[Any]) -> list[float]:
    """Attention of the first rank over what it has, alone, from PyTorch."""
    import torch_backend
    from interop.dcp import context_bucket, context_spec
    from interop.sharding import LocalBatch, TokenShards

    problem, cache = problems[0], caches[0]
    batch, bucket = problem.batch(way.dcp), problem.bucket(way.dcp)
    spec = way.spec
    if way.combine is not None:
        longer = problem.case.query > 1
        batch = LocalBatch.of(batch, TokenShards(way.dcp), 0, context_only=longer)
        bucket, spec = context_bucket(bucket, batch) or bucket, context_spec(spec)
    plan = torch_backend.plan(spec, cache.spec, batch, bucket=bucket, device=problem.device)
    query = problem.query[:, : spec.num_qo_heads].contiguous()
    return _times(lambda: torch_backend.attend(query, cache, plan, 0, return_lse=True), _wait_torch)


# One rank raises


def _failing_rank(device: str, ranks: int, rank: int, store: Path) -> None:
    """The last rank plans for another batch; every rank has to hear of it, and none waits."""
    import torch.distributed as dist

    from interop import IsthmusError
    from torch_backend import dcp

    where = _join(device, ranks, rank, store / "fail")
    cases, dtype = _cases(device)
    problem, way = Problem(cases[0], where, dtype), Way(ranks, 1, "ag_rs")
    cache = problem.cache(way, rank)
    batch = problem.batch(ranks if rank < ranks - 1 else 1)
    try:
        dcp.plan(way.spec, cache.spec, batch, dist.group.WORLD, device=where)
    except IsthmusError:
        dist.destroy_process_group()
        return
    raise RuntimeError(f"rank {rank} did not hear that the last one has another batch")


def _save(run: Run, path: Path) -> None:
    path.write_text(json.dumps({"results": run.results, "errors": run.errors}))


def _plot(document: dict[str, Any], path: Path) -> None:
    """Steps over their bounds, a bar for each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [result for result in document["results"] if "over_bound" in result]
    figure, axes = plt.subplots(figsize=(9, 0.35 * len(rows) + 1.5), layout="constrained")
    labels = [f"{row['shape']['case']}: {row['case']}" for row in rows]
    axes.barh(labels, [row["over_bound"] for row in rows])
    axes.axvline(1.15, linestyle="--", color="black", label="target")
    axes.set_xlabel("time of a step / (kernels of one rank alone + bytes at the measured rate)")
    axes.legend()
    axes.invert_yaxis()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
