"""Write tests/adapters/signatures.json: the parameters that published packages give the functions that adapters call.

    python tests/adapters/signatures.py FOLDER

FOLDER holds the unpacked wheels. Only their source is read, and of cuDNN's front end the signatures that its compiled
module tells of itself, which needs no device.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")

# Package, file, functions; a method as Class.method.
SOURCES = {
    "flash-attn-4": {
        "flash_attn/cute/interface.py": ("flash_attn_varlen_func", "_flash_attn_fwd"),
    },
    "transformer_engine": {
        "transformer_engine/pytorch/cpp_extensions/fused_attn.py": (
            "fused_attn_fwd",
            "fused_attn_bwd",
        ),
        "transformer_engine/pytorch/tensor/mxfp8_tensor.py": (
            "MXFP8Quantizer.__init__",
            "MXFP8Tensor.__new__",
        ),
    },
    "flashinfer-python": {
        "flashinfer/prefill.py": (
            "BatchPrefillWithRaggedKVCacheWrapper.__init__",
            "BatchPrefillWithRaggedKVCacheWrapper.plan",
            "BatchPrefillWithRaggedKVCacheWrapper.run",
        ),
        "flashinfer/nvfp4_attention_sm120.py": (
            "nvfp4_attention_sm120_quantize_qkv",
            "nvfp4_attention_sm120_fwd",
        ),
    },
}
CUDNN = "nvidia-cudnn-frontend"
GRAPH = (
    "sdpa",
    "sdpa_backward",
    "sdpa_fp8",
    "sdpa_fp8_backward",
    "sdpa_mxfp8",
    "sdpa_mxfp8_backward",
)


def read(folder: Path, packages: Iterable[str]) -> dict:
    """Package -> version and functions, each the names of its parameters, "*" before keywords only, "**" if any."""
    found = {}
    for package in packages:
        functions = _compiled(folder) if package == CUDNN else {}
        for file, names in SOURCES.get(package, {}).items():
            tree = ast.parse((folder / file).read_text())
            functions |= {name: _parameters(tree, name) for name in names}
        found[package] = {"version": _version(folder, package), "functions": functions}
    return found


def _version(folder: Path, package: str) -> str:
    (info,) = folder.glob(f"{package.replace('-', '_')}-*.dist-info")
    return info.name.removesuffix(".dist-info").split("-", 1)[1]


def _parameters(tree: ast.AST, name: str) -> list[str]:
    *owner, function = name.split(".")
    if owner:
        tree = next(x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == owner[0])
    # The last of overloads is the function.
    args = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == function][
        -1
    ].args
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    if owner:
        names = names[1:]
    if args.kwonlyargs or args.vararg:
        names += ["*", *(one.arg for one in args.kwonlyargs)]
    return names + (["**"] if args.kwarg else [])


def _compiled(folder: Path) -> dict[str, list[str]]:
    """Signatures that the compiled module tells, in a process of its own: a second copy of it would end this one."""
    (file,) = folder.glob("cudnn/_compiled_module*.so")
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('_compiled_module', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps({x: getattr(module.backend_graph, x).__doc__ for x in sys.argv[2:]}))"
    )
    command = [sys.executable, "-c", code, str(file), *GRAPH]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return {name: re.findall(r"(\w+): ", text.split(" -> ")[0]) for name, text in told.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(read(Path(sys.argv[1]), [*SOURCES, CUDNN]), indent=1) + "\n")
