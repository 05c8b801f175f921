"""Two plots of a run: ``python -m benchmarks.plots RESULT.json --out docs/images``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

__all__ = ["bandwidth_plot", "layers_plot", "main"]

Document = dict[str, Any]

STEP_CASES = {
    "PyTorch graph": "o-",
    "JAX unrolled": "s-",
    "JAX scan": "^-",
    "JAX scan, unroll 4": "v-",
}


def _best(
    document: Document, benchmark: str, field: str
) -> dict[str, dict[tuple[int, int], float]]:
    """Highest `field` by case and (context, requests), over the settings of a case."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for result in document["results"]:
        if result["benchmark"] == benchmark and field in result:
            where = (result["shape"]["context"], result["shape"]["requests"])
            values = found.setdefault(result["case"], {})
            values[where] = max(values.get(where, 0.0), result[field])
    return found


def bandwidth_plot(document: Document) -> Figure | None:
    """Decode bandwidth over context length, each kernel and peer, with the card's limit."""
    series = _best(document, "decode_bandwidth", "gb_per_s")
    for case, values in _best(document, "decode_peers", "gb_per_s").items():
        series[f"{case} (side by side)"] = values
    shapes = sorted({shape for values in series.values() for shape in values})
    if not shapes:
        return None
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for number, (case, values) in enumerate(series.items()):
        known = [shape for shape in shapes if shape in values]
        axes.plot(
            [shapes.index(shape) for shape in known],
            [values[shape] for shape in known],
            marker="osv^D*PX"[number % 8],
            label=case,
        )
    limits = [result["median"] for result in document["results"] if result["case"] == "device read"]
    if limits:
        axes.axhline(max(limits), color="black", linestyle="--", label="device read, measured")
    axes.set_xticks(
        range(len(shapes)), [f"{context}\n{requests} requests" for context, requests in shapes]
    )
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("keys and values read, GB/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Decode bandwidth, 32/8 heads x 128, bf16, page 16, {_card(document)}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def layers_plot(document: Document) -> Figure | None:
    """Time of a decode step over its number of layers: PyTorch graph, JAX unrolled, JAX scan."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drawn = False
    for case, style in STEP_CASES.items():
        points = sorted(
            (result["shape"]["layers"], result["step_us"], result["min"], result["max"])
            for result in document["results"]
            if result["benchmark"] == "decode_step" and result["case"] == case
        )
        if points:
            drawn = True
            layers = [point[0] for point in points]
            axes.plot(layers, [point[1] for point in points], style, label=case)
            low = [point[2] * point[0] for point in points]
            axes.fill_between(layers, low, [point[3] * point[0] for point in points], alpha=0.2)
    if not drawn:
        plt.close(figure)
        return None
    axes.set_xlabel("layers in one step")
    axes.set_ylabel("time of a step, µs")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Decode 32 x 1024, new metadata every step, {_card(document)}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _card(document: Document) -> str:
    return str(document["machine"]["card"] or document["machine"]["kind"])


def main(argv: list[str] | None = None) -> int:
    """Draw what the run has figures for; returns 1 where that is nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON file that python -m benchmarks wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the PNGs")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.result.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    plots = {
        "decode-bandwidth.png": bandwidth_plot(document),
        "step-time-over-layers.png": layers_plot(document),
    }
    written = 0
    for name, figure in plots.items():
        if figure is None:
            print(f"{name}: the run has no figures for it")
            continue
        figure.savefig(arguments.out / name, dpi=150)
        plt.close(figure)
        print(f"{arguments.out / name}")
        written += 1
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
