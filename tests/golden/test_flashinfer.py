"""The export for flashinfer-bench: its own models read it, and its reference gives the bits of the pack."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.golden import making
from tests.golden.packs import RECIPE, spec

CASES = (
    spec(),
    spec(name="other", lengths=(4, 3), causal=False),
    spec(name="keys", key_lengths=(5, 3, 40), alignment="top_left"),
    spec(name="masked", sinks=(1.0, -0.5), window=(None, 0), softcap=20.0),
)
NAMES = [RECIPE, f"{RECIPE}-keys-top_left", f"{RECIPE}-window-softcap-sink"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> golden.Pack:
    folder = tmp_path_factory.mktemp("flashinfer") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", Registry("suite", [("few", CASES)]))
        golden.make(folder, [RECIPE], suite="few")
    return golden.load(folder)


@pytest.fixture(scope="module")
def exported(pack: golden.Pack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "set"
    golden.export_flashinfer(pack, folder)
    return folder


def definitions(folder: Path) -> dict[str, Any]:
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("definitions/*/*.json")))
    return {one["name"]: one for one in found}


def workloads(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"workloads/*/{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_is_a_definition_for_each_recipe_and_set_of_inputs(exported: Path) -> None:
    found = definitions(exported)
    assert sorted(found) == sorted(NAMES)
    found = {name: found[name] for name in NAMES}
    assert [len(workloads(exported, name)) for name in found] == [2, 1, 1]
    inputs = [list(one["inputs"]) for one in found.values()]
    plain = ["q", "k", "v", "cu_seqlens"]
    assert inputs == [
        [*plain, "causal", "softmax_scale"],
        [*plain, "cu_seqlens_k", "causal", "softmax_scale"],
        [*plain, "sink", "causal", "softmax_scale", "window_left", "window_right", "softcap"],
    ]
    for name, one in found.items():
        tree = ast.parse(one["reference"])
        (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        assert run.name == "run"
        assert [argument.arg for argument in run.args.args] == list(one["inputs"]), name
        for tensor in (*one["inputs"].values(), *one["outputs"].values()):
            assert set(tensor["shape"] or ()) <= set(one["axes"])


def test_inputs_are_those_of_the_pack(exported: Path, pack: golden.Pack) -> None:
    seen = set()
    for name, definition in definitions(exported).items():
        for line in workloads(exported, name):
            assert (line["definition"], line["solution"]) == (name, None)
            workload = line["workload"]
            assert list(workload["inputs"]) == list(definition["inputs"])
            case = pack[workload["uuid"].rpartition("-")[0]]
            seen.add(case.name)
            for key, one in workload["inputs"].items():
                if one["type"] == "scalar":
                    continue
                axes = definition["inputs"][key]["shape"]
                expected = case.tensors[key]
                assert [workload["axes"][axis] for axis in axes] == list(expected.shape)
                header, data = raw(exported / one["path"])
                entry = header[one["tensor_key"]]
                assert entry["dtype"] == {"q": "BF16", "k": "BF16", "v": "BF16"}.get(
                    key, "F32" if key == "sink" else "I32"
                )
                assert entry["shape"] == list(expected.shape)
                start, end = entry["data_offsets"]
                assert data[start:end] == expected.tobytes()
    assert seen == {case.name for case in pack}


def raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read a safetensors file by its definition."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_the_same_pack_gives_the_same_bytes(
    exported: Path, pack: golden.Pack, tmp_path: Path
) -> None:
    golden.export_flashinfer(pack.folder, tmp_path)
    files = [path.relative_to(exported) for path in exported.rglob("*") if path.is_file()]
    assert len(files) == 3 + 3 + 4
    for file in files:
        assert (tmp_path / file).read_bytes() == (exported / file).read_bytes(), file


def test_a_folder_that_cannot_be_written(pack: golden.Pack, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file: Not a directory"):
        golden.export_flashinfer(pack, tmp_path / "file")


def test_the_reference_gives_the_bits_of_the_pack(exported: Path, pack: golden.Pack) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    for name, definition in definitions(exported).items():
        scope: dict[str, Any] = {}
        exec(definition["reference"], scope)
        for line in workloads(exported, name):
            given = line["workload"]["inputs"].values()
            arguments = [
                safetensors.load_file(exported / one["path"])[one["tensor_key"]]
                if one["type"] == "safetensors"
                else one["value"]
                for one in given
            ]
            results = scope["run"](*arguments)
            case = pack[line["workload"]["uuid"].rpartition("-")[0]]
            out = results["out"].view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(out, case.tensors["out"])
            assert np.array_equal(results["lse"].numpy(), case.tensors["lse"], equal_nan=True)


def test_flashinfer_bench_reads_it(exported: Path) -> None:
    """Release 0.1.2 was read so; where it is not installed nothing is checked."""
    data = pytest.importorskip("flashinfer_bench.data", reason="NOT CHECKED: not installed")
    utils = pytest.importorskip("flashinfer_bench.bench.utils")
    found = data.TraceSet.from_path(str(exported))
    assert sorted(found.definitions) == sorted(NAMES)
    for name, traces in found.workloads.items():
        definition = found.definitions[name]
        for trace in traces:
            tensors = utils.load_safetensors(definition, trace.workload, exported)
            assert list(tensors) == [
                key for key, one in definition.inputs.items() if one.shape is not None
            ]
