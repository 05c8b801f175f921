"""The benchmarks that need no GPU run and write what their readers expect."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jax
import pytest
import torch
from rich.console import Console

import jax_frontend
import torch_backend
from benchmarks import docs
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.gpu_steps import jax_step, torch_layers
from benchmarks.recording import Run
from benchmarks.targets import TARGETS, Figures
from benchmarks.timing import WARM_UP_STEPS, Timing, measure, measure_pair, summary
from benchmarks.workload import SPEC, causal_flops, kv_bytes, make_batch
from interop.dlpack import to_jax, to_torch
from interop.ffi import python_calls
from torch_backend import PagedKVCache


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("results")
    names = [name for name, benchmark in BENCHMARKS.items() if not benchmark.gpu]
    assert main(["--quick", "--only", *names, "--out", str(folder)]) == 0
    (path,) = folder.iterdir()
    found: dict[str, object] = json.loads(path.read_text())
    kind = found["machine"]["kind"]  # type: ignore[index]
    assert path.name.startswith(f"{kind}-{str(found['date'])[:10]}")
    return found


def test_quick_run_measures_every_cpu_benchmark(document) -> None:
    assert document["errors"] == []
    assert document["quick"] is True
    assert document["versions"]["torch"] and document["versions"]["jax"]
    for result in document["results"]:
        assert result["repeats"] > 0
        assert result["min"] <= result["median"] <= result["max"], result
    measured = {result["benchmark"] for result in document["results"]}
    assert measured == set(document["wall_seconds"]) == {n for n in BENCHMARKS if n[:3] == "cpu"}


def test_every_cpu_target_is_found_in_the_results(document) -> None:
    figures = Figures(document)
    checked = [target for target in TARGETS if target.benchmark.startswith("cpu")]
    assert len(checked) == 8
    for target in checked:
        target.measure(figures)  # a LookupError here is a renamed case


def test_reference_gives_what_sdpa_gives(document) -> None:
    (result,) = Figures(document).all("cpu_decode", "reference")
    assert result["largest_difference"] < 1e-4


def test_targets_belong_to_benchmarks() -> None:
    assert {target.benchmark for target in TARGETS} <= set(BENCHMARKS)


def test_a_failing_case_is_written_down_and_the_rest_goes_on(tmp_path: Path) -> None:
    run = Run()
    with run.timed("first"), run.attempt("broken", {"requests": 2}):
        raise ValueError("no such kernel")
    with run.timed("second"):
        run.add("fine", {}, summary([1.0, 3.0, 2.0]), "us")
    found = run.write(tmp_path / "out" / "run.json", "2026-01-01")
    (error,) = found["errors"]
    assert error["benchmark"] == "first" and error["case"] == "broken"
    assert error["error"] == "ValueError: no such kernel"
    assert [result["median"] for result in found["results"]] == [2.0]
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == found


def test_targets_that_a_run_could_not_measure_are_shown_as_such() -> None:
    from benchmarks.report import print_report

    document = Run().document("2026-01-01") | {"wall_seconds": {"decode_peers": 1.0}}
    console = Console(record=True, width=160, file=io.StringIO())
    print_report(document, console)
    text = console.export_text()
    assert text.count("not measured") == len(
        [target for target in TARGETS if target.benchmark == "decode_peers"]
    )


def test_measure_waits_once_a_repeat_for_the_last_step() -> None:
    waited = []
    steps = iter(range(10**6))
    timing = measure(lambda: next(steps), waited.append, repeats=4, seconds=0.0)
    assert (timing.repeats, timing.steps) == (4, 1)
    # Warm-up steps with a wait each, as many more with one, four repeats.
    warm = WARM_UP_STEPS
    assert waited == [*range(warm), 2 * warm - 1, *range(2 * warm, 2 * warm + 4)]


def test_pairs_are_compared_pair_by_pair() -> None:
    order: list[str] = []
    first, second, difference = measure_pair(
        lambda: order.append("a"), lambda: order.append("b"), calls=5
    )
    assert order == ["a", "b"] * (WARM_UP_STEPS + 5)
    assert first.repeats == second.repeats == difference.repeats == 5


def test_scaling_keeps_the_number_of_repeats() -> None:
    assert Timing(2.0, 1.0, 3.0, 7, 5).scaled(10) == Timing(20.0, 10.0, 30.0, 7, 5)


def test_workload_counts_bytes_operations_and_pages() -> None:
    assert kv_bytes([1024] * 32) == 134_217_728
    assert causal_flops([16384]) == pytest.approx(2.199e12, rel=1e-3)
    batch = make_batch([1, 1], [17, 40])
    pages = batch.page_indices(16, 5)
    assert sorted(pages.tolist()) == [0, 1, 2, 3, 4]


def test_plots_are_drawn_from_a_run(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    run = Run(benchmark="decode_step")
    for case in ("PyTorch graph", "JAX unrolled", "JAX scan"):
        for layers in (4, 32):
            shape = {"requests": 32, "context": 1024, "layers": layers}
            run.add(case, shape, summary([40.0]), "us/layer", step_us=40.0 * layers)
    run.benchmark = "decode_peers"
    shape = {"requests": 32, "context": 1024, "layers": 4}
    run.add("this project", shape, summary([40.0]), "us/layer", gb_per_s=3300.0)
    run.write(tmp_path / "run.json", "2026-01-01")
    assert plots.main([str(tmp_path / "run.json"), "--out", str(tmp_path / "images")]) == 0
    images = sorted((tmp_path / "images").iterdir())
    assert [image.name for image in images] == [
        "decode-bandwidth.png",
        "step-time-over-layers.png",
    ]
    assert all(image.read_bytes()[:4] == b"\x89PNG" for image in images)


def test_a_run_without_such_figures_draws_nothing(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    Run().write(tmp_path / "run.json", "2026-01-01")
    assert plots.main([str(tmp_path / "run.json"), "--out", str(tmp_path / "images")]) == 1


@pytest.mark.parametrize("scan", [0, 1, 4])
def test_jax_and_torch_steps_are_the_same_work_and_handler_calls_are_counted(scan: int) -> None:
    requests, layers = 2, 3
    cache = PagedKVCache(SPEC, num_layers=layers, num_pages=4, dtype="bfloat16", device="cpu")
    cache.k.normal_()
    cache.v.normal_()
    batch = make_batch([1] * requests, [20, 30])
    query = torch.randn(requests, SPEC.num_qo_heads, SPEC.head_dim, dtype=torch.bfloat16)
    plan = torch_backend.plan(SPEC, cache.spec, batch)
    expected = 2 * torch_layers(2 * query, cache, plan, layers, write=True)

    cpu = jax.devices("cpu")[0]
    kv = jax_frontend.cache_handle(cache, sharding=jax.sharding.SingleDeviceSharding(cpu))
    jax_plan = jax_frontend.plan(SPEC, cache.spec, batch, device=cpu)
    before = python_calls.total()
    out, _ = jax_step(layers, scan=scan, write=True)(to_jax(query), kv, jax_plan)
    out.block_until_ready()
    # Each layer writes and attends.
    assert python_calls.total() - before == 2 * layers
    assert torch.equal(to_torch(out), expected)
    jax_frontend.release_cache(kv.name)


def test_documents_are_filled_from_results(tmp_path: Path) -> None:
    document = {
        "machine": {"processor": "a processor", "cores": 2},
        "versions": {"torch": "2.0", "cupy": None},
        "wall_seconds": {"cpu_planning": 1.0},
        "results": [
            {
                "benchmark": "cpu_planning",
                "case": "RaggedBatch",
                "shape": {"requests": 256},
                "median": 0.125,
                "unit": "ms",
            }
        ],
    }
    text = "a\n<!-- performance: cpu -->\nold\n<!-- /performance -->\nb\n"
    untouched = "<!-- performance: uneven -->\nold\n<!-- /performance -->\n"
    filled = docs.fill(text + untouched, [(Path("results/run.json"), document)])
    assert filled.endswith("b\n" + untouched)
    assert "| requests 256 | RaggedBatch | 0.125 ms |  |" in filled
    assert "a processor, 2 cores; torch 2.0; `results/run.json`." in filled
    assert "old" not in filled.removesuffix(untouched)
    # Filling again changes nothing.
    assert docs.fill(filled, [(Path("results/run.json"), document)]) == filled
