"""Serve chat prompts with SmolLM2-135M-Instruct from PyTorch and from JAX, and compare.

Run it with ``python -m examples.demo``; ``--help`` lists what can be chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.engine import Engine, Request, Step, StepReport
from examples.smollm2 import (
    ChatTokenizer,
    LlamaConfig,
    Weights,
    find_gguf,
    load_weights,
    open_gguf,
)
from interop import AttentionSpec
from torch_backend import PagedKVCache

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a page of memory.",
    "Name three fruits.",
    "I have a bag with three red marbles, two blue marbles and one green marble. I take out a red "
    "one, put it on the table, and then add two more blue ones to the bag. Which colours are in "
    "the bag now, and which colour is there most of? Please think about it step by step, and end "
    "with one short sentence that gives the answer.",
    "Translate 'good morning' into Spanish.",
    "What does a web browser do? Answer for a child of six years.",
)
MAX_REQUESTS = 4
TOKEN_BUDGET = 64
PAGE_SIZE = 16


@dataclass(frozen=True)
class Run:
    """What one side did with all prompts."""

    name: str
    requests: list[Request]
    reports: list[StepReport]
    warm_up_seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, serve the prompts on each side, print text, speed and agreement."""
    arguments = _parse(argv)
    console = Console()
    with console.status("Reading SmolLM2-135M-Instruct and its tokenizer ..."):
        path = find_gguf()
        reader = open_gguf(path)
        config = LlamaConfig.from_gguf(reader)
        tokenizer = ChatTokenizer(reader)
        weights = load_weights(path)

    prompts = [tokenizer.encode_chat(text) for text in arguments.prompts]
    longest = max(len(prompt) for prompt in prompts) + arguments.max_new_tokens
    num_pages = MAX_REQUESTS * -(-longest // PAGE_SIZE)
    spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
    cache = PagedKVCache(
        spec,
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype="float32",
        device="cpu",
    )
    console.print(
        f"[bold]{path.name}[/]: {len(prompts)} prompts, {MAX_REQUESTS} seats, at most "
        f"{TOKEN_BUDGET} tokens a step, one pool of {num_pages} pages of {PAGE_SIZE} tokens"
    )

    runs = []
    for name in ("torch", "jax") if arguments.side == "both" else (arguments.side,):
        engine = Engine(
            _model_step(name, config, weights, spec, cache),
            cache.spec,
            max_requests=MAX_REQUESTS,
            token_budget=TOKEN_BUDGET,
            stop_token=tokenizer.end_of_turn,
        )
        runs.append(_serve(console, name, engine, prompts, arguments.max_new_tokens))

    _print_texts(console, tokenizer, arguments.prompts, runs)
    _print_speed(console, runs)
    if len(runs) == 2:
        for line in compare(tokenizer, runs[0], runs[1]):
            console.print(line)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="user messages to answer")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="longest answer, in tokens")
    parser.add_argument("--side", choices=("torch", "jax", "both"), default="both")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}; want 1 or more")
    return arguments


def _model_step(
    name: str,
    config: LlamaConfig,
    weights: Weights[npt.NDArray[np.float32]],
    spec: AttentionSpec,
    cache: PagedKVCache,
) -> Step:
    """The model of one side. Only here is its framework imported: the torch side needs no JAX."""
    if name == "torch":
        from examples.smollm2.torch_model import TorchStep

        return TorchStep(config, weights, spec, cache)
    from examples.smollm2.jax_model import JaxStep

    return JaxStep(config, weights, spec, cache)


def _serve(
    console: Console,
    name: str,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> Run:
    """Serve all prompts through ``engine`` and show how far it is."""
    with console.status(f"{name}: compiling and warming up ..."):
        warm_up_seconds = engine.warm_up()
    requests = [engine.add(prompt, max_new_tokens) for prompt in prompts]
    columns = (
        TextColumn("{task.description:<5}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, {task.fields[running]} in the batch"),
        TimeElapsedColumn(),
    )
    # Answers may stop early, so the total shrinks to what was really needed as requests finish.
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, running=0)

        def show(report: StepReport) -> None:
            done = sum(request.num_cached for request in requests)
            left = sum(
                len(request.prompt) + max_new_tokens - 1 - request.num_cached
                for request in requests
                if not request.finished
            )
            progress.update(task, completed=done, total=done + left, running=report.num_running)

        reports = engine.run(show)
    return Run(name, requests, reports, warm_up_seconds)


def _print_texts(
    console: Console, tokenizer: ChatTokenizer, prompts: Sequence[str], runs: Sequence[Run]
) -> None:
    for index, prompt in enumerate(prompts):
        answers: dict[str, list[str]] = {}
        for run in runs:
            text = tokenizer.decode(run.requests[index].generated).strip()
            answers.setdefault(text, []).append(run.name)
        for text, names in answers.items():
            body = f"[dim]{escape(prompt)}[/]\n{escape(text)}"
            console.print(Panel(body, title=" = ".join(names), title_align="left"))


def _print_speed(console: Console, runs: Sequence[Run]) -> None:
    """Rates of the steps with prompt tokens in them and of the steps that only decode."""
    table = Table(title="tokens per second, without compiling")
    table.add_column("side")
    for column in ("prefill, mixed steps", "decode-only steps", "steps (mixed)", "warm-up"):
        table.add_column(column, justify="right")
    for run in runs:
        prefill = [report for report in run.reports if report.num_prefill_tokens]
        decode = [report for report in run.reports if not report.num_prefill_tokens]
        mixed = sum(report.num_decode_tokens > 0 for report in prefill)
        table.add_row(
            run.name,
            _rate(prefill),
            _rate(decode),
            f"{len(run.reports)} ({mixed})",
            f"{run.warm_up_seconds:.1f} s",
        )
    console.print(table)


def _rate(reports: Sequence[StepReport]) -> str:
    if not reports:
        return "none ran"
    tokens = sum(report.num_prefill_tokens + report.num_decode_tokens for report in reports)
    seconds = sum(report.seconds for report in reports)
    return f"{tokens / seconds:.1f} ({tokens} / {seconds:.1f} s)"


def compare(tokenizer: ChatTokenizer, one: Run, other: Run) -> list[str]:
    """Say for each prompt whether two runs chose the same tokens, and if not, how near it was."""
    lines = []
    num_equal = 0
    for index, (a, b) in enumerate(zip(one.requests, other.requests, strict=True)):
        pairs = zip(a.choices, b.choices, strict=False)
        parted = next(
            ((at, x, y) for at, (x, y) in enumerate(pairs) if x.tokens[0] != y.tokens[0]), None
        )
        if parted is None:
            num_equal += 1
            continue
        at, *choices = parted
        lines.append(f"prompt {index}: the answers part at generated token {at}:")
        for run, choice in zip((one, other), choices, strict=True):
            first, second = (
                f"{escape(repr(tokenizer.decode([token], skip_special_tokens=False)))} {logit:.5f}"
                for token, logit in zip(choice.tokens, choice.logits, strict=True)
            )
            gap = choice.logits[0] - choice.logits[1]
            lines.append(f"  {run.name:<5} {first}, then {second} (gap {gap:.2e})")
    verdict = "agree" if num_equal == len(one.requests) else "differ"
    total = f"{num_equal} of {len(one.requests)} answers are the same, token by token"
    return [f"greedy tokens of {one.name} and {other.name} [bold]{verdict}[/]: {total}", *lines]


if __name__ == "__main__":
    main()
