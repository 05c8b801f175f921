"""What importing each package brings in, seen from a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Arguments: the modules to import, and those that cannot be imported.
PROGRAM = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print("\\n".join({name.split(".")[0] for name in sys.modules}))
"""


def imported(modules: str, missing: str) -> set[str]:
    """Top-level names that a fresh process holds after importing `modules` without `missing`."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, modules, missing],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_interop_needs_no_framework() -> None:
    modules = "interop,interop.attributes,interop.batch,interop.plan,interop.schedule,interop.spec"
    found = imported(modules, "torch,jax,jaxlib,jax_tvm_ffi,tvm_ffi,flashinfer,triton")
    assert "numpy" in found


def test_torch_backend_needs_no_jax() -> None:
    found = imported("torch_backend", "jax,jaxlib,jax_tvm_ffi,flashinfer,triton")
    assert "torch" in found


@pytest.mark.parametrize("modules", ["jax_frontend", "torch_backend,jax_frontend"])
def test_jax_frontend_needs_no_flashinfer(modules: str) -> None:
    found = imported(modules, "flashinfer,triton,jax_triton")
    assert {"torch", "jax", "torch_backend"} <= found
