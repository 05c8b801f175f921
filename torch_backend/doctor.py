"""What works here and why the rest does not: ``python -m torch_backend.doctor``."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from interop.batch import Bucket
from interop.spec import AttentionSpec, CacheSpec

from .dispatch import choose, device_facts
from .kernels import Device, Work
from .kernels import flashinfer_abi as abi
from .prebuild import modules_for

__all__ = ["main", "report"]

PACKAGES = ("torch", "flashinfer-python", "apache-tvm-ffi", "jax-tvm-ffi", "jax", "triton", "numpy")

# What is asked of the kernels: a common model's attention, in a decode step and in two prefills.
SPEC = AttentionSpec(32, 8, 128)
PAGE_SIZE, NUM_PAGES = 16, 1 << 14
STEPS = {
    "decode, 32 requests": (Bucket(32, 32, 1 << 13, 1), "pages"),
    "prefill, 4 x 2048, over pages": (Bucket(4, 8192, 1 << 13), "pages"),
    "first prefill, 4 x 2048": (Bucket(4, 8192, 1 << 13, without_context=True), "tokens"),
}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def report() -> str:
    """Versions, devices, and which kernels serve what on each device, in one screen of text."""
    lines = [f"python {platform.python_version()}"]
    lines += [f"{package} {_installed(package)}" for package in PACKAGES]
    lines = [", ".join(lines), f"CUDA of torch: {torch.version.cuda or 'none'}; {_compiler()}"]
    missing = abi.why_missing()
    lines.append(f"FlashInfer: {missing or 'in the range that was checked, >=0.7.2,<0.7.3'}")
    if not torch.cuda.is_available():
        lines.append("GPU: none that PyTorch can use")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices or [torch.device("cpu")]:
        lines += ["", _describe(device), *_kernels(device_facts(device))]
    return "\n".join(lines)


def _compiler() -> str:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    return f"nvcc: {found or 'not found, so no kernels can be compiled here'}"


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu: {os.cpu_count()} cores"
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{device}: {facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.multi_processor_count} multiprocessors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def _kernels(device: Device) -> list[str]:
    cache = CacheSpec(1, NUM_PAGES, PAGE_SIZE, SPEC.num_kv_heads, SPEC.head_dim, device=device.kind)
    lines = [f"  for bfloat16, 32/8 heads of {SPEC.head_dim}, pages of {PAGE_SIZE}:"]
    for step, (bucket, source) in STEPS.items():
        work = Work(SPEC, cache, device, cache.dtype, bucket.num_requests + 1, bucket, source)
        choice = choose(work)
        lines.append(f"  {step}: {choice.family}{_state(choice.family, device)}")
        lines += [f"    not {family}: {reason}" for family, reason in choice.refusals]
    return lines


def _state(family: str | None, device: Device) -> str:
    """Whether the family's modules are compiled."""
    for key in modules_for(SPEC, "bfloat16", device.capability):
        if key.backend == family:
            seconds = abi.BUILD_SECONDS[key.backend]
            if abi.is_built(key):
                return " (compiled)"
            return f" (to be compiled at first use, {seconds} s on 16 cores; see prebuild)"
    return ""


def main() -> None:
    """Print the report."""
    print(report())


if __name__ == "__main__":
    main()
