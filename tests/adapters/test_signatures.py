"""What adapters pass to libraries, beside the signatures of the published packages."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

import flamia_ref.adapters
from flamia_ref.adapters import adapters
from tests.adapters import signatures

RECORDED = json.loads(signatures.FILE.read_text())
FOLDER = Path(flamia_ref.adapters.__file__).parent

# Module -> package and what the module calls the functions of signatures.json.
CALLS = {
    "flash_attention_4": (
        "flash-attn-4",
        {"flash_attn_varlen_func": None, "_flash_attn_fwd": None},
    ),
    "transformer_engine": (
        "transformer_engine",
        {
            "fused_attn_fwd": None,
            "fused_attn_bwd": None,
            "MXFP8Quantizer": "MXFP8Quantizer.__init__",
            "MXFP8Tensor": "MXFP8Tensor.__new__",
        },
    ),
    "flashinfer": (
        "flashinfer-python",
        {
            "BatchPrefillWithRaggedKVCacheWrapper": "BatchPrefillWithRaggedKVCacheWrapper.__init__",
            "plan": "BatchPrefillWithRaggedKVCacheWrapper.plan",
            "run": "BatchPrefillWithRaggedKVCacheWrapper.run",
            "nvfp4_attention_sm120_quantize_qkv": None,
            "nvfp4_attention_sm120_fwd": None,
        },
    ),
}
CASES = [
    (module, package, called, recorded or called)
    for module, (package, names) in CALLS.items()
    for called, recorded in names.items()
]


def passed(module: str, called: str) -> list[set[str]]:
    """The keywords of every call of a function or method, those of dictionaries that are spread among them."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == called
        ):
            names = {one.arg for one in node.keywords if one.arg}
            for one in node.keywords:
                if one.arg is None:
                    names |= spread(tree, one.value)
            found.append(names)
    return found


def spread(tree: ast.AST, value: ast.expr) -> set[str]:
    """The keys of `**name` or of `**function(...)`, from the one dictionary that is written there."""
    if isinstance(value, ast.Name):
        made = [
            x.value
            for x in ast.walk(tree)
            if isinstance(x, ast.AnnAssign)
            and isinstance(x.target, ast.Name)
            and x.target.id == value.id
        ]
    else:
        name = value.func.attr if isinstance(value.func, ast.Attribute) else value.func.id
        made = [
            x.value
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name == name
            for x in ast.walk(function)
            if isinstance(x, ast.Return)
        ]
    (one,) = made
    assert isinstance(one, ast.Dict)
    return {key.value for key in one.keys}


@pytest.mark.parametrize(("module", "package", "called", "recorded"), CASES)
def test_every_keyword_is_a_parameter(module, package, called, recorded):
    parameters = RECORDED[package]["functions"][recorded]
    calls = passed(module, called)
    assert calls, f"{module} does not call {called}"
    for keywords in calls:
        # MXFP8Tensor hands shape, dtype and requires_grad on to the class of PyTorch.
        known = (
            {*parameters, "shape", "dtype", "requires_grad"}
            if "**" in parameters
            else {*parameters}
        )
        assert keywords <= known


def test_what_a_spread_dictionary_has_is_seen():
    first, second = passed("transformer_engine", "fused_attn_bwd")
    assert {"attn_scale", "qkv_layout", "do_format"} <= first & second
    assert "qkv_scale_inv_format" in second - first


def test_versions_are_those_that_the_adapters_name():
    named = {one.package: one.checked for one in adapters() if one.package in RECORDED}
    assert named == {package: one["version"] for package, one in RECORDED.items()}


@pytest.mark.parametrize("package", RECORDED)
def test_installed_packages_have_these_signatures(package):
    """Where a package is installed: the recorded signatures are still its own."""
    name = {"nvidia-cudnn-frontend": "cudnn", "flash-attn-4": "flash_attn"}.get(
        package, package.removesuffix("-python")
    )
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    assert signatures.read(folder, [package]) == {package: RECORDED[package]}


TORCH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


@pytest.mark.parametrize("operator", TORCH)
def test_operators_of_torch(operator):
    """Positional arguments and keywords of the operators, by the schema of the installed PyTorch."""
    torch = pytest.importorskip("torch")
    schema = getattr(torch.ops.aten, operator).default._schema
    positional = [one.name for one in schema.arguments if not one.kwarg_only]
    keywords = {one.name for one in schema.arguments if one.kwarg_only}
    tree = ast.parse((FOLDER / "torch_sdpa.py").read_text())
    (call,) = (
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr == operator
    )
    assert len(call.args) <= len(positional)
    assert {one.arg for one in call.keywords} <= keywords
    assert positional[:3] == ["query", "key", "value"]
    causal = positional.index("is_causal")
    assert ast.unparse(call.args[causal]).startswith("mask.causal")
    assert [one.name for one in schema.returns][:2] in (
        ["output", "logsumexp"],
        ["output", "log_sumexp"],
    )
