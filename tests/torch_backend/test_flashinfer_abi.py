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

FA_KEYS = {
    "fa2": ModuleKey("fa2", "bfloat16", 128, window=True),
    "fa2, 8-bit": ModuleKey("fa2", "float16", 64, kv_dtype="float8_e5m2"),
    "fa3": ModuleKey("fa3", "float16", 64, soft_cap=True),
}
XQA_KEYS = {
    "xqa": ModuleKey("xqa", "float16", 80, kv_dtype="float16", page_size=64, group_size=5),
    "xqa, 8-bit": ModuleKey(
        "xqa", "bfloat16", 128, True, kv_dtype="float8_e4m3fn", page_size=16, group_size=4
    ),
}
KEYS = FA_KEYS | XQA_KEYS

# For each key: name and sources of the module that we ask for, and the name of the module that
# FlashInfer's own Python would load.
GENERATE = """
import inspect, json, sys
import torch
from flashinfer.jit import core
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.xqa import get_xqa_module
from torch_backend.kernels import flashinfer_abi as abi

class Loaded(Exception):
    pass

def record(spec):
    raise Loaded(spec.name)

core.JitSpec.build_and_load = record
modules = {}
for name, fields in json.loads(sys.argv[1]).items():
    key = abi.ModuleKey(**fields)
    spec = abi.jit_spec(key)
    dtype, kv, d = getattr(torch, key.dtype), getattr(torch, key.kv_dtype), key.head_dim
    try:
        if key.backend == "xqa":
            get_xqa_module(dtype, kv, key.page_size, d, key.group_size, key.window, dtype, 1)
        get_batch_prefill_module(
            key.backend, dtype, kv, dtype, torch.int32, d, d, 0, key.window, key.soft_cap, False
        )
    except Loaded as loaded:
        modules[name] = {
            "name": spec.name,
            "loaded": str(loaded),
            "sources": [str(path) for path in spec.sources],
            "path": str(spec.get_library_path()),
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
        [sys.executable, "-c", GENERATE, json.dumps({k: vars(key) for k, key in KEYS.items()})],
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


@pytest.mark.parametrize("name", FA_KEYS)
def test_signatures_are_those_of_the_sources(modules: dict[str, Any], name: str) -> None:
    """All functions that a module exports, with all their parameters in order."""
    assert _exported(modules[name]["sources"]) == SIGNATURES[KEYS[name].backend]


@pytest.mark.parametrize("name", XQA_KEYS)
def test_signature_of_xqa_is_that_of_its_source(modules: dict[str, Any], name: str) -> None:
    """The binding declares the function that the wrapper's source defines, with its parameters."""
    texts = {Path(path).name: Path(path).read_text() for path in modules[name]["sources"]}
    assert "EXPORT_TYPED_FUNC(xqa_wrapper, xqa_wrapper)" in texts["flashinfer_xqa_binding.cu"]
    for source in ("flashinfer_xqa_binding.cu", "xqa_wrapper.cu"):
        declared = re.search(r"void xqa_wrapper\((bool [^)]*)\)", texts[source])
        assert declared is not None
        assert {"xqa_wrapper": tuple(_split(declared[1]))} == SIGNATURES["xqa"]
    # For 8-bit pages it is this kernel that is called.
    assert "mha_sm90.cu" in texts


def test_flashinfers_own_call_of_xqa_passes_the_same_things() -> None:
    """Each parameter by the name that it has there; scales come as a number beside a tensor."""
    makers = (
        node
        for node in ast.walk(_flashinfer_source("xqa.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "_get_xqa_module_cached"
    )
    (call,) = (
        node
        for node in ast.walk(next(makers))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "module.xqa_wrapper"
    )
    passed = [ast.unparse(argument) for argument in call.args]
    names = SIGNATURES["xqa"]["xqa_wrapper"]
    assert len(passed) == len(names)
    for theirs, ours in zip(passed, names, strict=True):
        if " if " in theirs:
            scale = "q_scale" if ours.startswith("q") else "kv_scale"
            assert scale in theirs
            assert theirs.startswith("None if" if ours.endswith("Tensor") else "1.0 if")
        else:
            assert XQA_NAMES.get(ours, ours) == theirs


@pytest.mark.parametrize("name", KEYS)
def test_module_is_the_one_that_flashinfers_python_loads(
    modules: dict[str, Any], name: str
) -> None:
    module = modules[name]
    assert module["name"] == module["loaded"]
    assert module["path"].endswith(f"/{module['name']}.so")
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


# What its Python calls XQA's parameters.
XQA_NAMES = {
    "multiProcessorCount": "sm_count",
    "nbKHeads": "num_kv_heads",
    "slidingWinSize": "sliding_win_size",
    "rcpOutScale": "rcp_out_scale",
    "attentionSinks": "sinks",
    "kCacheVLLM": "k_cache",
    "vCacheVLLM": "v_cache",
    "kSfCacheVLLM": "k_sf_cache",
    "vSfCacheVLLM": "v_sf_cache",
    "kvCachePageList": "page_table",
    "maxSeqLen": "max_seq_len",
    "seqLen": "seq_lens",
    "batchSize": "batch_size",
    "qSeqLen": "q_seq_len",
    "qCuSeqLens": "q_cu_seq_lens",
    "scratch": "workspace_buffer",
}


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
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
    functions = abi.load(key)
    assert functions == {"paged_run": "paged", "ragged_run": "ragged"}
    assert abi.load(key, 3) is functions
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


@pytest.mark.parametrize("compiled", [False, True])
def test_each_device_has_a_copy_of_xqa(
    spec: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool
) -> None:
    """Loading sets the kernel's limits for the device that is current."""
    library = tmp_path / "xqa.so"
    library.write_text("a library")
    fake = spec(_Spec(is_compiled=compiled))
    fake.get_library_path = lambda: library
    current, loaded = [-1], []

    class OnDevice:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            current[0] = self.device

        def __exit__(self, *error: object) -> None:
            current[0] = -1

    def load_module(path: str) -> Any:
        assert Path(path).read_text() == "a library"
        loaded.append((path, current[0]))
        return SimpleNamespace(xqa_wrapper=path)

    monkeypatch.setattr(abi.torch.cuda, "device", OnDevice)
    monkeypatch.setattr(abi.tvm_ffi, "load_module", load_module)
    key = KEYS["xqa, 8-bit"]
    first, second = abi.load(key), abi.load(key, 1)
    assert abi.load(key, 0) is first and abi.load(key, 1) is second
    assert [device for _, device in loaded] == [0, 1]
    assert len({str(library), *(path for path, _ in loaded)}) == 3
    assert first == {"xqa_wrapper": loaded[0][0]}
    assert fake.calls == ([] if compiled else ["build", "build"])


def test_keys_say_what_is_compiled_in() -> None:
    """As they stand in messages; key and value have the query's type unless another is named."""
    assert str(KEYS["fa2"]) == "fa2 bfloat16 head_dim 128, window"
    assert str(KEYS["fa2, 8-bit"]) == "fa2 float16 head_dim 64, keys of float8_e5m2"
    assert str(KEYS["xqa"]) == "xqa float16 head_dim 80, pages of 64, groups of 5"
    assert str(KEYS["xqa, 8-bit"]) == (
        "xqa bfloat16 head_dim 128, keys of float8_e4m3fn, pages of 16, groups of 4, window"
    )
    assert ModuleKey("fa2", "float16", 64, kv_dtype="float16") == ModuleKey("fa2", "float16", 64)


@pytest.mark.parametrize("call", [abi.load, abi.build])
def test_what_cannot_be_compiled_is_an_error_with_a_remedy(spec: Any, call: Any) -> None:
    spec(_Spec(is_compiled=False, error=RuntimeError("nvcc: not found")))
    with pytest.raises(UnsupportedError, match=r"fa2 float16 head_dim 64, soft cap .*nvcc: not f"):
        call(ModuleKey("fa2", "float16", 64, soft_cap=True))
