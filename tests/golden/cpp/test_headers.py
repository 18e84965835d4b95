"""pack.hpp and inputs.hpp against the package, under the sanitizers; packs are untrusted input."""

import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.inputs import TENSORS, Distribution, hashed
from flamia_ref.golden.manifest import SCHEMA_VERSION
from tests.golden.cpp.conftest import ROOT, Run
from tests.golden.packs import FIRST, SECOND, flip, forge, offset, read_safetensors
from tests.golden.packs import write_safetensors as write
from tests.golden.test_inputs import bfloat16

HASHED = [one for one in Distribution if one is not Distribution.RECORDED]
FILE = f"{FIRST}.safetensors"


def results_of(pack: Path, folder: Path) -> Path:
    """What a perfect kernel gives, in files."""
    shutil.copytree(pack, folder)
    (folder / "manifest.json").unlink()
    return folder


def test_the_headers_read_the_packs_of_this_version() -> None:
    text = (ROOT / "flamia_ref/golden/include/flamia_ref/pack.hpp").read_text()
    assert f"schema_version = {SCHEMA_VERSION};" in text


def test_sha256_of_every_length_of_a_block(harness: Run, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(200)
    files = [tmp_path / str(length) for length in range(200)]
    for length, file in enumerate(files):
        file.write_bytes(data[:length])
    found = harness("digest", *files).stdout.split()
    assert found == [hashlib.sha256(data[:length]).hexdigest() for length in range(200)]


def late(name: str) -> Recipe:
    """A recipe whose delta is made from P and dP, and so comes after them; without a backward as it is."""
    recipe = RECIPES[name]
    if not recipe.has_backward:
        return recipe
    gradient = replace(recipe.backward.gradient, delta_source="p_dp")
    return replace(recipe, name=f"{name}-late", gradient=gradient)


def test_every_recipe_is_in_the_order_of_its_dataflow(harness: Run) -> None:
    early, delayed = (harness("order", flag).stdout.split() for flag in (0, 1))
    for name, recipe in RECIPES.items():
        for order, one in ((early, recipe), (delayed, late(name))):
            stages = list(dataflow(one).stages)
            assert sorted(stages, key=order.index) == stages
    names = {name for recipe in RECIPES.values() for name in dataflow(recipe).stages}
    assert names <= set(early) == set(delayed)
    assert len(early) == len(set(early))


def test_a_pack_is_read_in_the_order_of_its_dataflow(
    harness: Run, tiny_suite: None, tmp_path: Path
) -> None:
    golden.make(tmp_path / "pack", ["cudnn-mxfp8", late("cudnn-mxfp8")], suite="tiny")
    pack = golden.load(tmp_path / "pack")
    result = harness("list", pack.folder)
    assert result.returncode == 0, result.stderr
    expected = [" ".join((str(case), case.spec.why, *case.places)) for case in pack]
    assert result.stdout.splitlines() == expected
    places = [
        " ".join(case.places).index("delta") > " ".join(case.places).index("dp.0") for case in pack
    ]
    assert places == [False, False, True, True]


@pytest.fixture(scope="module")
def others(tiny_suite: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An O of high precision, descales in float32, blocks of 16 tokens, no backward."""
    folder = tmp_path_factory.mktemp("others") / "pack"
    golden.make(folder, ["attn-qat-nvfp4", "fp8-fa4", "sage3-nvfp4"], suite="tiny")
    return folder


def test_packs_with_other_stages_are_read(harness: Run, others: Path) -> None:
    pack = golden.load(others)
    result = harness("list", pack.folder)
    assert result.returncode == 0, result.stderr
    expected = [" ".join((str(case), case.spec.why, *case.places)) for case in pack]
    assert result.stdout.splitlines() == expected


@pytest.mark.parametrize("how", HASHED)
def test_the_generators_agree_bit_for_bit(harness: Run, how: Distribution) -> None:
    number = ["bell", "outliers", "wide", "ladder", "integers"].index(how)
    shapes = [(7, 3, 32), (1, 1, 64), (33, 2, 128), (0, 1, 32)]
    seeds = [0, 5, 2**63 + 11, 2**64 - 1]
    lines, expected = [], []
    for (tensor, name), shape, seed in itertools.product(enumerate(TENSORS), shapes, seeds):
        exponent = (seed + tensor * 31) % 129 - 64
        lines.append(f"{tensor} {number} {seed} {exponent} {' '.join(map(str, shape))}")
        bits = hashed(name, shape, seed=seed, distribution=how, exponent=exponent)
        expected.append(hashlib.sha256(bits.astype("<u2").tobytes()).hexdigest())
    result = harness("generate", text="\n".join(lines))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == expected


def test_rounding_is_exact(harness: Run) -> None:
    # Lengths of 1 to 16 bits, ties of both kinds, and carries into the next binade.
    numbers = [0, *range(1, 260), *range(505, 520), *range(1016, 1030), 65407, 65408, 65409, 65535]
    numbers += [-n for n in numbers]
    text = " ".join(f"{n} {exponent}" for exponent in (-64, 64) for n in numbers)
    found = list(map(int, harness("round", text=text).stdout.split()))
    assert found == [
        bfloat16(n * Fraction(2) ** exponent) for exponent in (-64, 64) for n in numbers
    ]


def seen(i: int, j: int, case: tuple[int, ...]) -> bool:
    """Whether query i sees key j, by the definition of a mask. A side of -1 is none."""
    queries, keys, causal, top_left, left, right = case
    stands = i if top_left else i + keys - queries
    near = (left < 0 or stands - j <= left) and (right < 0 or j - stands <= right)
    return near and not (causal and j > stands)


def test_masks(harness: Run) -> None:
    sizes = [(0, 3), (3, 0), (1, 1), (4, 4), (3, 6), (6, 3)]
    flags = list(itertools.product([False, True], repeat=2))
    sides = list(itertools.product([-1, 0, 2], repeat=2))
    cases = [(*size, *flag, *side) for size in sizes for flag in flags for side in sides]
    text = "\n".join(" ".join(str(int(one)) for one in case) for case in cases)
    found = harness("masks", text=text).stdout.split()
    expected = [
        "." + "".join(str(int(seen(i, j, case))) for i in range(case[0]) for j in range(case[1]))
        for case in cases
    ]
    assert found == expected


def test_a_perfect_kernel_passes(harness: Run, made: Path, tmp_path: Path) -> None:
    result = harness("check", made, results_of(made, tmp_path / "results"))
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        f"PASS {FIRST}",
        f"PASS {SECOND}",
    ]


def changed(
    folder: Path, change: Callable[[dict[str, tuple[str, Any]]], None], file: str = FILE
) -> None:
    names = {"uint8": "U8", "uint16": "U16", "int32": "I32", "float32": "F32"}
    tensors = {
        name: (names[str(array.dtype)], array)
        for name, array in read_safetensors(folder / file).items()
    }
    change(tensors)
    write(folder / file, tensors)


def _as_float32(tensors: dict[str, tuple[str, Any]]) -> None:
    bits = tensors["out"][1].astype(np.uint32) << 16
    tensors["out"] = ("F32", bits.view(np.float32))


def _other_nan(tensors: dict[str, tuple[str, Any]]) -> None:
    assert np.isnan(tensors["lse"][1]).any()
    for _, array in tensors.values():
        if array.dtype == np.float32:
            array[np.isnan(array)] = np.array(0xFFC00001, np.uint32).view(np.float32)


def _masked_left_out(tensors: dict[str, tuple[str, Any]]) -> None:
    scores = tensors["s.2"][1]
    scores[:, ~np.tri(35, dtype=bool)] = -np.inf


def _wide_starts(tensors: dict[str, tuple[str, Any]]) -> None:
    tensors["cu_seqlens"] = ("I64", tensors["cu_seqlens"][1].astype(np.int64))


@pytest.mark.parametrize("change", [_as_float32, _other_nan, _masked_left_out, _wide_starts])
def test_what_is_equal_in_another_form(
    harness: Run, made: Path, tmp_path: Path, change: Callable[..., None]
) -> None:
    folder = results_of(made, tmp_path / "results")
    file = f"{SECOND}.safetensors" if change is _other_nan else FILE
    changed(folder, change, file)
    assert harness("check", made, folder).returncode == 0
    assert golden.check(made, folder).passed


def _short(tensors: dict[str, tuple[str, Any]]) -> None:
    tensors["out"] = ("U16", tensors["out"][1][:-1])


def _halves(tensors: dict[str, tuple[str, Any]]) -> None:
    tensors["lse"] = ("U16", tensors["lse"][1].astype(np.uint16))


def _seen_left_out(tensors: dict[str, tuple[str, Any]]) -> None:
    tensors["s.2"][1][1, 34, 34] = -np.inf


def _no_lse(tensors: dict[str, tuple[str, Any]]) -> None:
    del tensors["lse"]


def _another(tensors: dict[str, tuple[str, Any]]) -> None:
    tensors["output"] = tensors["out"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _short,
            "first departs at out: shape mismatch in 'out', given as [36, 2, 32], expected [37",
        ),
        (_halves, "first departs at lse: dtype mismatch in 'lse', given as 'U16'"),
        (
            _seen_left_out,
            "departs at s: bit mismatch in 's.2', 1 of 2450 elements, first at [1, 34, 34]",
        ),
        (_no_lse, ": missing in 'lse', every kernel gives it"),
        (_another, ": unknown tensor in 'output', the case has no such tensor"),
    ],
)
def test_what_is_not_equal(
    harness: Run, made: Path, tmp_path: Path, change: Callable[..., None], words: str
) -> None:
    folder = results_of(made, tmp_path / "results")
    changed(folder, change)
    result = harness("check", made, folder)
    assert result.returncode == 1, result.stderr
    assert words in result.stdout.splitlines()[0]
    assert not golden.check(made, folder).passed


def test_a_case_without_results_is_missing(harness: Run, made: Path, tmp_path: Path) -> None:
    folder = results_of(made, tmp_path / "results")
    (folder / FILE).unlink()
    result = harness("check", made, folder)
    assert (result.returncode, result.stdout.splitlines()[0]) == (1, f"FAIL {FIRST}: missing")


def test_a_forward_alone_owes_what_its_kernels_give(
    harness: Run, others: Path, tmp_path: Path
) -> None:
    """As the package has it: no gradients to compare, and no lse of smoothed scores asked for."""
    alone = [case for case in golden.load(others) if "qat" not in case.name]
    for case in alone:
        out = ("U16", case.tensors["out"])
        write(tmp_path / f"{case.name}.safetensors", {"out": out, "dq": out})
    result = harness("check", others, tmp_path)
    assert result.returncode == 1, result.stderr
    found = result.stdout.splitlines()
    cases = {one.name: one for one in golden.check(others, tmp_path).cases}
    for case in alone:
        smoothed = "sage3" in case.name
        at = next(n for n, line in enumerate(found) if case.name in line)
        start = f"PASS {case.name}: 1 tensors, bit for bit" if smoothed else f"FAIL {case.name}"
        assert found[at].startswith(start)
        assert ("missing in 'lse', every kernel gives it" in found[at]) is not smoothed
        note = "forward alone: this recipe has no backward; given and not compared: dq"
        if smoothed:
            note += "; lse not given: this recipe's is that of the smoothed scores, which a kernel need not return"
        assert found[at + 1] == f"     {note}"
        assert (cases[case.name].passed, cases[case.name].note) == (smoothed, note)


def test_stages_before_it_that_were_not_given_are_named(
    harness: Run, made: Path, tmp_path: Path
) -> None:
    folder = results_of(made, tmp_path / "results")

    def change(tensors: dict[str, tuple[str, Any]]) -> None:
        for name in set(tensors) - {"out", "lse", "row_sum"}:
            del tensors[name]
        tensors["out"][1][0, 0, 0] ^= 1

    changed(folder, change)
    first, second = harness("check", made, folder).stdout.splitlines()[:2]
    assert "first departs at out" in first
    assert "an inference: not given before it: q.scales q.codes" in second
    assert "row_sum" not in second
    assert second.endswith(" o")


def refused(harness: Run, pack: Path, words: str) -> None:
    result = harness("list", pack)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_changed_byte_is_found(harness: Run, pack: Path) -> None:
    rng = random.Random(4)
    for name in ("manifest.json", FILE):
        data = (pack / name).read_bytes()
        for at in [0, 7, 8, 9, len(data) - 1, *rng.sample(range(len(data)), 3)]:
            flip(pack / name, at, rng.randrange(8))
            refused(harness, pack, name)
            (pack / name).write_bytes(data)


def test_a_tensor_is_covered_by_its_digest(harness: Run, pack: Path) -> None:
    flip(pack / FILE, offset(pack / FILE, "v.scales"))
    refused(harness, pack, f"{FILE}: tensor v.scales was changed since it was written")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ((1 << 60).to_bytes(8, "little"), "its header is longer than the file"),
        (b"\xff" * 8, "its header is longer than the file"),
        (bytes(8), "it lacks a value|has no value"),
    ],
)
def test_a_header_that_claims_more_than_there_is(
    harness: Run, made: Path, tmp_path: Path, start: bytes, words: str
) -> None:
    folder = results_of(made, tmp_path / "results")
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(start + data[8:])
    result = harness("check", made, folder)
    assert result.returncode == 2
    assert any(one in result.stderr for one in words.split("|"))


@pytest.mark.parametrize(
    "header",
    [
        '{"out":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}',
        '{"out":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        '{"out":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
        '{"out":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,4]}}',
        '{"out":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"lse":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"out":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        '{"out":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
        "[" * 100000,
        '{"out":' * 100000,
        "{}",
        "[]",
        "",
    ],
)
def test_hostile_headers(harness: Run, made: Path, tmp_path: Path, header: str) -> None:
    folder = results_of(made, tmp_path / "results")
    data = header.encode()
    (folder / FILE).write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    result = harness("check", made, folder)
    assert result.returncode == 2, result.stdout + result.stderr
    assert FILE in result.stderr


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("file",), "../../etc/passwd", "they must be DATA.RECIPE"),
        (("file",), "/etc/passwd", "they must be DATA.RECIPE"),
        (("name",), "../tiny", "they must be DATA.RECIPE"),
        (("recipe",), "another", "they must be DATA.RECIPE"),
        (("size",), 10**20, "no whole number of at most 64 bits"),
        (("size",), 1 << 60, "the manifest says 1152921504606846976"),
        (("size",), 1 << 64, "at most 18446744073709551615"),
        (("spec", "lengths"), [1 << 24, 1 << 24], "fewer documents, or shorter ones"),
        (("spec", "lengths"), [2, 0, 36], "tensor"),
        (("spec", "heads"), 3, "tensor"),
        (("spec", "kv_heads"), 0, "that no case can have"),
        (("spec", "exponent"), 65, "at most 64 from 0"),
        (("spec", "exponent"), -(1 << 63), "at most 64 from 0"),
        (("spec", "window"), [1], "a list of 2"),
        (("spec", "softmax_scale"), 0.125, "that is not whole"),
        (("spec", "softmax_scale"), {"bits": "0x7ff0000000000000", "repr": "inf"}, "above 0"),
        (("spec", "key_lengths"), [2, 0], "a list of one length a document"),
        (("spec", "key_lengths"), [2, 0, 35], "lists no cu_seqlens_k"),
        (
            ("spec", "plants"),
            [{"tensor": "k", "token": 37, "head": 0, "channel": 0, "bits": 0}],
            "a part of",
        ),
        (("tensors", "out", "shape"), [37, 2, 1 << 60], "2^48 elements"),
        (("tensors", "out", "shape"), [37, 2, 31], "in this case it is [37, 2, 32]"),
        (("tensors", "s.0", "shape"), [2, 2, 3], "in this case it is [2, 2, 2]"),
        (("tensors", "out", "dtype"), "U8", "has view 'BF16' in dtype 'U8'"),
        (("tensors", "out", "view"), "F64", "has view 'F64'"),
        (("tensors", "out", "sha256"), "0" * 63, "64 hexadecimal digits"),
        (("tensors", "out"), None, "must be an object"),
    ],
)
def test_forged_manifests(
    harness: Run, pack: Path, place: tuple[str, ...], value: object, words: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        *path, last = place
        inside = document["cases"][0]
        for name in path:
            inside = inside[name]
        inside[last] = value

    forge(pack, change)
    refused(harness, pack, words)


def test_a_tensor_of_another_document_or_stage(harness: Run, pack: Path) -> None:
    for name, words in (
        ("s.3", "a document that the case has not"),
        ("s.00", "a document that"),
        ("z", "no tensor that"),
    ):

        def change(document: dict[str, Any], name: str = name) -> None:
            tensors = document["cases"][0]["tensors"]
            tensors[name] = tensors["out"]

        shutil.copy(pack / "manifest.json", pack / "kept")
        forge(pack, change)
        refused(harness, pack, words)
        shutil.move(pack / "kept", pack / "manifest.json")


def test_another_version_says_so(harness: Run, pack: Path) -> None:
    forge(pack, lambda document: document.update(schema_version=2))
    refused(harness, pack, "has schema version 2, this header reads 3; make the pack again")


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_links_pipes_and_folders_are_refused(
    harness: Run, pack: Path, tmp_path: Path, name: str
) -> None:
    kept = (pack / name).rename(tmp_path / "elsewhere")
    refused(harness, pack, name)
    (pack / name).symlink_to(kept)
    refused(harness, pack, name)
    (pack / name).unlink()
    os.mkfifo(pack / name)
    refused(harness, pack, name)
    (pack / name).unlink()
    (pack / name).mkdir()
    refused(harness, pack, name)


def test_results_of_the_pack_itself_and_none(harness: Run, pack: Path, tmp_path: Path) -> None:
    result = harness("check", pack, pack)
    assert (result.returncode, "is the pack's own file" in result.stderr) == (2, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = harness("check", pack, empty)
    assert (result.returncode, "holds no results of this pack" in result.stderr) == (2, True)


def fuzzed(harness: Run, made: Path, folder: Path, count: int, seed: int) -> None:
    result = harness("fuzz", made, folder, count, seed)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert [accepted + left for accepted, left in counts] == [count // 3] * 3
    # Some of each kind reach what lies behind the readers, or nothing is tested there.
    assert all(accepted > 0 and left > 0 for accepted, left in counts)


def test_mutated_packs_give_an_error_or_a_result(harness: Run, made: Path, tmp_path: Path) -> None:
    fuzzed(harness, made, tmp_path, 240, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_mutated_packs(harness: Run, made: Path, tmp_path: Path, seed: int) -> None:
    fuzzed(harness, made, tmp_path, 3000, seed)
