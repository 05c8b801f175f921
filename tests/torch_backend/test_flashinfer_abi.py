"""What we know of FlashInfer's private names, against the package that is installed.

Compiling a module takes minutes, so nothing is compiled: the sources that would be are generated in
a fresh process, and the parameters of their exported functions read from them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interop.errors import UnsupportedError, VersionError
from torch_backend.kernels import flashinfer_abi as abi
from torch_backend.kernels.flashinfer_abi import SIGNATURES, ModuleKey

KEYS = {
    "fa2": ModuleKey("fa2", "bfloat16", 128, window=True),
    "fa3": ModuleKey("fa3", "float16", 64, soft_cap=True),
}

# For each backend: name and sources of the module that we ask for, and the name of the module that
# FlashInfer's own wrapper objects would load.
GENERATE = """
import inspect, json, sys
import torch
from flashinfer.jit import core
from flashinfer.prefill import get_batch_prefill_module
from torch_backend.kernels import flashinfer_abi as abi

class Loaded(Exception):
    pass

def record(spec):
    raise Loaded(spec.name)

core.JitSpec.build_and_load = record
modules = {}
for fields in json.loads(sys.argv[1]):
    key = abi.ModuleKey(**fields)
    spec = abi.jit_spec(key)
    dtype, d = getattr(torch, key.dtype), key.head_dim
    try:
        get_batch_prefill_module(
            key.backend, dtype, dtype, dtype, torch.int32, d, d, 0, key.window, key.soft_cap, False
        )
    except Loaded as loaded:
        modules[key.backend] = {
            "name": spec.name,
            "loaded": str(loaded),
            "sources": [str(path) for path in spec.sources],
            "attributes": [hasattr(spec, "is_compiled"), *inspect.signature(spec.build).parameters],
        }
print(json.dumps(modules))
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("flashinfer")
    environment = os.environ | {
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",  # so that no GPU is needed
    }
    found = subprocess.run(
        [sys.executable, "-c", GENERATE, json.dumps([vars(key) for key in KEYS.values()])],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    generated: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return generated


def _split(parameters: str) -> list[str]:
    """Names in a C++ parameter list."""
    return [part.split("=")[0].split()[-1] for part in parameters.split(",") if part.strip()]


def _exported(sources: list[str]) -> dict[str, tuple[str, ...]]:
    """Parameters of the functions that a module's sources export, by the exported name."""
    texts = {Path(path).name: Path(path).read_text() for path in sources}
    binding = next(text for name, text in texts.items() if name.endswith("_binding.cu"))
    config = next(Path(sources[0]).parent.glob("*_config.inc")).read_text()
    match = re.search(r"#define ADDITIONAL_FUNC_PARAMS(.*)", config)
    assert match is not None
    extras = _split(match[1])
    exported = {}
    for name, function in re.findall(r"EXPORT_TYPED_FUNC\((\w+), (\w+)\)", binding):
        declared = re.search(rf"{function}\(([^;]*?)\)\s*;", binding)
        assert declared is not None
        names = _split(declared[1].replace("ADDITIONAL_FUNC_PARAMS", ""))
        exported[name] = (*names, *extras) if "ADDITIONAL" in declared[1] else tuple(names)
    return exported


@pytest.mark.parametrize("backend", KEYS)
def test_signatures_are_those_of_the_sources(modules: dict[str, Any], backend: str) -> None:
    """All functions that a module exports, with all their parameters in order."""
    assert _exported(modules[backend]["sources"]) == SIGNATURES[backend]


@pytest.mark.parametrize("backend", KEYS)
def test_module_is_the_one_that_flashinfers_wrappers_load(
    modules: dict[str, Any], backend: str
) -> None:
    module = modules[backend]
    assert module["name"] == module["loaded"]
    assert module["attributes"] == [True, "verbose", "need_lock"]


def _flashinfer_source(name: str) -> ast.Module:
    spec = find_spec("flashinfer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse((Path(spec.submodule_search_locations[0]) / name).read_text())


# What FlashInfer's Python calls some of its own parameters.
ALIASES = {
    "mask_mode": "mask_mode_code",
    "key_block_scales": "maybe_k_cache_sf",
    "value_block_scales": "maybe_v_cache_sf",
    "scale_v_tensor": "maybe_scale_v",
    "1.0 / rope_scale": "rope_rcp_scale",
    "1.0 / rope_theta": "rope_rcp_theta",
}


@pytest.mark.parametrize("backend", KEYS)
@pytest.mark.parametrize("function", ["paged_run", "ragged_run"])
def test_flashinfers_own_calls_pass_the_same_things(backend: str, function: str) -> None:
    """Names say what a parameter means only if the caller agrees."""
    tree = _flashinfer_source("prefill.py")
    maker = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "get_batch_prefill_module"
    )
    calls = [
        tuple(ALIASES.get(text, text) for text in map(ast.unparse, node.args))
        for node in ast.walk(maker)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f"{function}_func")
    ]
    assert SIGNATURES[backend][function] in calls


def test_numbers_for_masks_and_layouts() -> None:
    """As FlashInfer's enumerations have them."""
    enums = {
        node.name: {
            assign.targets[0].id: ast.literal_eval(assign.value)
            for assign in node.body
            if isinstance(assign, ast.Assign) and isinstance(assign.targets[0], ast.Name)
        }
        for node in ast.walk(_flashinfer_source("utils.py"))
        if isinstance(node, ast.ClassDef) and node.name in ("MaskMode", "TensorLayout")
    }
    assert enums["TensorLayout"] == abi.LAYOUTS
    modes = enums["MaskMode"]
    assert (abi.MASK_MODES[False], abi.MASK_MODES[True]) == (modes["NON_CAUSAL"], modes["CAUSAL"])


def test_arguments_are_arranged_by_name() -> None:
    """Optional tensors are left out, what is unused has a neutral value, nothing is guessed."""
    names = SIGNATURES["fa2"]["paged_run"][12:]
    values = {
        "mask_mode_code": 1,
        "layout": 0,
        "window_left": -1,
        "enable_pdl": True,
        "logits_soft_cap": 0.0,
        "sm_scale": 0.5,
    }
    assert abi.arrange(names, values) == (1, 0, -1, True, *[None] * 8, 0.0, 0.5, 1.0, 1.0, 0)
    del values["sm_scale"]
    with pytest.raises(KeyError, match="sm_scale"):
        abi.arrange(names, values)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that another version is installed."""

    def pretend(found: str) -> None:
        monkeypatch.setattr(abi, "version", lambda name: found)
        abi.why_missing.cache_clear()

    yield pretend
    abi.why_missing.cache_clear()


@pytest.mark.parametrize("found", ["0.7.2", "0.7.2.post1", "0.7.2+cu130", "0.7.2.post2+local"])
def test_versions_in_range(installed: Any, found: str) -> None:
    installed(found)
    abi.check_version()


@pytest.mark.parametrize("found", ["0.6.18", "0.7.1", "0.7.2rc1", "0.7.3", "0.8.0", "1.0", "dev"])
def test_versions_out_of_range_are_refused_with_the_range(installed: Any, found: str) -> None:
    installed(found)
    with pytest.raises(VersionError, match=re.escape(f"FlashInfer {found} is installed")) as error:
        abi.check_version()
    assert ">=0.7.2,<0.7.3 only. Install it with: pip install" in str(error.value)
    for call in (abi.jit_spec, abi.build, abi.load):
        with pytest.raises(VersionError, match=re.escape(found)):
            call(ModuleKey("fa2", "float16", 256))


def test_missing_flashinfer_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "DISTRIBUTION", "no-such-distribution")
    abi.why_missing.cache_clear()
    with pytest.raises(VersionError, match=r"not installed\. Install it with: pip install 'flash"):
        abi.check_version()
    abi.why_missing.cache_clear()


def test_importing_does_not_import_flashinfer() -> None:
    """It takes seconds, and is not needed to make plans."""
    code = """
        import sys
        import torch_backend.kernels.flashinfer_abi as abi
        assert abi.why_missing() is None
        assert "flashinfer" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


class _Spec:
    """Stands for FlashInfer's description of a module."""

    def __init__(self, *, is_compiled: bool, error: Exception | None = None) -> None:
        self.is_compiled = is_compiled
        self.error = error
        self.calls: list[str] = []

    def build(self, *, need_lock: bool) -> None:
        assert need_lock
        self._call("build")

    def build_and_load(self) -> Any:
        self._call("build_and_load")
        return SimpleNamespace(paged_run="paged", ragged_run="ragged")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(spec: _Spec) -> _Spec:
        monkeypatch.setattr(abi, "jit_spec", lambda key: spec)
        monkeypatch.setattr(abi, "_loaded", {})
        return spec

    return use


def test_first_use_says_that_it_compiles(spec: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake, key = spec(_Spec(is_compiled=False)), ModuleKey("fa3", "bfloat16", 128, window=True)
    module = abi.load(key)
    assert (module.paged_run, module.ragged_run) == ("paged", "ragged")
    assert abi.load(key) is module
    assert fake.calls == ["build_and_load"]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("isthmus", "WARNING")
    assert "FlashInfer's fa3 bfloat16 head_dim 128, window module" in record.getMessage()
    assert "python -m torch_backend.prebuild" in record.getMessage()


def test_compiled_modules_are_loaded_silently(spec: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake = spec(_Spec(is_compiled=True))
    abi.load(ModuleKey("fa2", "bfloat16", 128))
    abi.build(ModuleKey("fa2", "bfloat16", 128))
    assert fake.calls == ["build_and_load"]
    assert not caplog.records


@pytest.mark.parametrize("call", [abi.load, abi.build])
def test_what_cannot_be_compiled_is_an_error_with_a_remedy(spec: Any, call: Any) -> None:
    spec(_Spec(is_compiled=False, error=RuntimeError("nvcc: not found")))
    with pytest.raises(UnsupportedError, match=r"fa2 float16 head_dim 64, soft cap .*nvcc: not f"):
        call(ModuleKey("fa2", "float16", 64, soft_cap=True))
