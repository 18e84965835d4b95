"""The list of adapters, what the page says of them, and what is said where a library or a device is missing."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flamia_ref import kernels
from flamia_ref.adapters import LIBRARIES, Adapter, Run, adapters
from flamia_ref.adapters.refusal import Refused, cuda, library
from flamia_ref.attention import RECIPES
from tests.adapters import cases

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {one.kernel: one for one in adapters()}
HELPERS = {
    "__init__",
    "adapter",
    "catalogue",
    "cudnn_graphs",
    "cudnn_session",
    "documents",
    "operands",
    "refusal",
    "tensors",
    "whole",
}


def kernels_page():
    spec = importlib.util.spec_from_file_location("docs_kernels", ROOT / "docs" / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_is_a_library_or_a_helper():
    files = {file.stem for file in (ROOT / "flamia_ref" / "adapters").glob("*.py")}
    assert files == {*LIBRARIES, *HELPERS}


def test_every_kernel_of_a_module_is_listed():
    for name in LIBRARIES:
        module = importlib.import_module(f"flamia_ref.adapters.{name}")
        own = {
            f"{module.__name__}:{key}"
            for key, value in vars(module).items()
            if not key.startswith("_")
            and (isinstance(value, kernels.Staged) or "softmax_scale" in parameters(value))
        }
        assert own == {one.kernel for one in module.ADAPTERS}


def parameters(value):
    return inspect.signature(value).parameters if inspect.isfunction(value) else ()


@pytest.mark.parametrize("one", adapters(), ids=lambda one: one.kernel.rpartition(".")[2])
def test_a_kernel_is_what_its_entry_says(one):
    kernel = kernels.load(one.kernel)
    assert kernels.name_of(kernel) == one.kernel
    assert all(name in RECIPES for name in one.recipes)
    if isinstance(kernel, kernels.Staged):
        assert one.backward == (kernel.backward is not None)
    else:
        assert one.backward == ("dout" in parameters(kernel))
    assert one.backward == ("dq" in one.gives)


def test_the_page_is_what_the_script_writes():
    page = kernels_page()
    text = page.FILE.read_text(encoding="utf-8")
    assert page.page(text) == text
    assert all(f"`{name.removeprefix('flamia_ref.adapters.')}`" in text for name in KERNELS)


def test_the_page_keeps_other_sections():
    page = kernels_page()
    text = f"# Kernels\n\n## Triton\n\n{page.FIRST}of before\n{page.LAST}\n## After\n"
    made = page.page(text)
    assert made.startswith("# Kernels\n\n## Triton\n\n")
    assert made.endswith("\n## After\n")
    assert "of before" not in made
    assert page.page("# Kernels\n").startswith("# Kernels\n\n<!-- adapters")


def test_evidence_says_what_ran():
    entry = KERNELS["flamia_ref.adapters.sage_attention_3:nvfp4"]
    assert entry.evidence == "never run"
    ran = Run(device="B200", date="2027-01-01", versions="sageattn3 3.0", seen="smoke passes")
    fields = {name: getattr(entry, name) for name in Adapter.__dataclass_fields__}
    one = Adapter(**{**fields, "ran": (ran,)})
    assert one.evidence == "run on B200, 2027-01-01, sageattn3 3.0: smoke passes"


def test_importing_every_adapter_imports_no_library():
    code = (
        "import sys; from flamia_ref.adapters import adapters; adapters();"
        "print(sorted({x.partition('.')[0] for x in sys.modules} & {'jax', 'torch', 'cudnn', 'flash_attn'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_missing_library_skips_the_case():
    with pytest.raises(Refused) as refused:
        library("no_such_library", kernel="k", install="pip install it")
    assert isinstance(refused.value, kernels.Unsupported)
    assert refused.value.note == (
        "needs no_such_library, which cannot be imported here (No module named 'no_such_library'); "
        "install it with `pip install it`"
    )


@pytest.mark.parametrize(
    "kernel", [x for x in KERNELS if "xla" not in x and x[-15:] != "torch_sdpa:bf16"]
)
def test_every_kernel_says_what_it_lacks_here(kernel):
    """Called through the protocol: a note for the report, not a failure. On a GPU this may run instead."""
    found = kernels.load(kernel)
    inputs, dout, keywords = cases.made("twins")
    if isinstance(found, kernels.Staged):
        inputs, found = [{}], found.forward
    note = None
    try:
        kernels.call(found, *inputs, case="twins", dout=dout, **keywords)
    except kernels.Unsupported as refused:
        note = refused.note
    if note is None:
        pytest.skip("it runs here")
    assert "needs" in note
    assert "\n" not in note


class Device:
    """A torch that sees one device."""

    def __init__(self, capability):
        self.cuda = self
        self.capability = capability

    def is_available(self):
        return True

    def get_device_capability(self):
        return self.capability

    def get_device_name(self):
        return "NVIDIA H200"

    def current_device(self):
        return 0

    def device(self, kind, index):
        return (kind, index)


def test_devices_are_refused_by_capability():
    assert cuda(Device((10, 3)), kernel="k", least=(10, 0), most=(10, 9)) == ("cuda", 0)
    with pytest.raises(
        Refused, match=r"needs compute capability 10.0 to 10.9; this is NVIDIA H200, 12.0"
    ):
        cuda(Device((12, 0)), kernel="k", least=(10, 0), most=(10, 9))
    with pytest.raises(Refused) as refused:
        cuda(Device((9, 0)), kernel="k", least=(10, 0), most=(10, 9))
    assert refused.value.note == "needs compute capability 10.0 to 10.9; this is NVIDIA H200, 9.0"
    with pytest.raises(
        Refused, match=r"needs compute capability 9.0 or more; this is NVIDIA H200, 8.0"
    ):
        cuda(Device((8, 0)), kernel="k", least=(9, 0))


def test_empty_documents_owe_zeros_and_minus_infinity():
    from flamia_ref.adapters.documents import by_document, mask_of

    mask = mask_of([0, 0, 3, 5], [0, 2, 2, 3], causal=False)
    q, k = np.ones((5, 4, 8), np.float32), np.ones((3, 2, 8), np.float32)

    def run(document):
        assert (document.index, document.queries, document.keys) == (2, 2, 1)
        whole = {"out": document["q"], "lse": np.zeros((4, 2), np.float32), "dk": document["k"]}
        return {**whole, "dsink": np.full(4, 3, np.float32)}

    found = by_document(
        mask, {"q": q, "k": k, "v": k, "dout": None}, run, gives=("out", "lse", "dk", "dsink")
    )
    assert found["out"][:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    assert found["lse"][0].tolist() == [-np.inf, -np.inf, -np.inf, 0, 0]
    assert found["dk"][:, 0, 0].tolist() == [0, 0, 1]
    assert found["dsink"].tolist() == [3, 3, 3, 3]
