"""Packs are untrusted input: whatever is wrong is one line that names the file and the tensor."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden
from tests.golden.packs import (
    FIRST,
    RECIPE,
    SECOND,
    canonical,
    flip,
    forge,
    offset,
    read_safetensors,
    typed,
    write_safetensors,
)

FILE = f"{FIRST}.safetensors"


def read_all(folder: Path) -> None:
    """Read everything that a pack holds."""
    for case in golden.load(folder):
        case.verify()


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)


def test_a_pack_is_a_collection_of_cases(made: Path) -> None:
    pack = golden.load(made)
    assert [str(case) for case in pack] == [FIRST, SECOND]
    assert len(pack) == 2
    assert pack[FIRST] in pack
    assert FIRST not in pack
    assert repr(pack[FIRST]) == f"Case({FIRST!r})"
    assert pack["tiny"] is pack[FIRST]
    with pytest.raises(ValueError, match=f"unknown case 'tin'.*{FIRST}"):
        pack["tin"]


def test_the_tensors_are_those_of_the_file(made: Path) -> None:
    case = golden.load(made)[FIRST]
    by_hand = read_safetensors(made / FILE)
    assert set(case.tensors) == set(by_hand)
    for name, tensor in case.tensors.items():
        assert tensor.dtype == by_hand[name].dtype
        assert tensor.tobytes() == by_hand[name].tobytes()
        assert not tensor.flags.writeable
    inputs = case.inputs()
    assert inputs["q"].dtype == ml_dtypes.bfloat16
    assert inputs["q"].flags.writeable
    inputs["q"][:] = 0
    assert case.inputs()["q"].view(np.uint16).any()


def test_no_folder_and_no_pack(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "there is no folder")
    refused(tmp_path, "is no golden pack: it has no manifest.json")


def test_every_changed_byte_is_found(made: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    for name in ("manifest.json", FILE):
        data = (made / name).read_bytes()
        places = [*range(80), len(data) - 1, *rng.sample(range(len(data)), 60)]
        folder = Path(shutil.copytree(made, tmp_path / name.replace(".", "-")))
        for at in places:
            damaged = bytearray(data)
            damaged[at] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(damaged)
            refused(folder, name.replace(".", r"\."))


def test_every_tensor_is_covered_by_its_digest(pack: Path) -> None:
    data = (pack / FILE).read_bytes()
    for name, tensor in read_safetensors(pack / FILE).items():
        if tensor.size:
            flip(pack / FILE, offset(pack / FILE, name) + tensor.nbytes // 2)
            refused(pack, rf"{FILE}: tensor {name} was changed since it was written")
            (pack / FILE).write_bytes(data)


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file(pack: Path, name: str, keep: int) -> None:
    (pack / name).write_bytes((pack / name).read_bytes()[:keep])
    refused(pack, name)


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_a_file_that_is_too_long(pack: Path, name: str) -> None:
    with (pack / name).open("ab") as file:
        file.write(b"\n")
    refused(pack, name)


def test_a_missing_file(pack: Path) -> None:
    (pack / FILE).unlink()
    refused(pack, f"{FILE} is missing; the manifest lists it with")


def test_a_folder_or_a_pipe_in_place_of_a_file(pack: Path) -> None:
    (pack / FILE).unlink()
    (pack / FILE).mkdir()
    refused(pack, FILE)
    (pack / FILE).rmdir()
    os.mkfifo(pack / FILE)
    refused(pack, FILE)
    (pack / "manifest.json").unlink()
    os.mkfifo(pack / "manifest.json")
    refused(pack, r"manifest.json is not a regular file")


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_links_are_not_followed(pack: Path, name: str) -> None:
    outside = pack.parent / "outside"
    (pack / name).rename(outside)
    (pack / name).symlink_to(outside)
    refused(pack, f"{name} is a symbolic link")


def test_a_link_that_appears_after_the_pack_was_opened(pack: Path) -> None:
    case = golden.load(pack)[FIRST]
    (pack / FILE).rename(pack.parent / "outside")
    (pack / FILE).symlink_to(pack.parent / "outside")
    with pytest.raises(ValueError, match="symbolic link"):
        case.verify()


def test_a_pickle_is_not_opened(pack: Path) -> None:
    class Mine:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(pack / "pwned"),))

    size = (pack / FILE).stat().st_size
    (pack / FILE).write_bytes(pickle.dumps(Mine()).ljust(size, b"\0"))
    refused(pack, f"{FILE} is no whole safetensors file")
    assert not (pack / "pwned").exists()


def case_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["cases"][0]
    return found


def replaced(pack: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Put other tensors in the file of a case, and make size and digest of the file fit."""
    write_safetensors(pack / FILE, tensors)
    data = (pack / FILE).read_bytes()

    def change(document: dict[str, Any]) -> None:
        case_of(document)["size"] = len(data)
        case_of(document)["sha256"] = hashlib.sha256(data).hexdigest()

    forge(pack, change)


def test_a_file_with_other_tensors_than_the_manifest_says(pack: Path) -> None:
    tensors = typed(read_safetensors(pack / FILE))
    lacking = {name: tensor for name, tensor in tensors.items() if name != "row_sum"}
    replaced(pack, lacking)
    refused(pack, f"{FILE} lacks tensor row_sum")
    replaced(pack, tensors | {"extra": ("U8", np.zeros(3, np.uint8))})
    refused(pack, f"{FILE} holds tensor 'extra', which the manifest does not list")
    dtype, array = tensors["lse"]
    replaced(pack, tensors | {"lse": (dtype, array.T)})
    refused(pack, r"tensor lse is F32 \[37, 2\]; the manifest says F32 \[2, 37\]")
    replaced(pack, tensors | {"lse": ("U32", array)})
    refused(pack, r"tensor lse is U32 \[2, 37\]; the manifest says F32 \[2, 37\]")
    replaced(pack, tensors | {"lse": (dtype, array + 1)})
    refused(pack, "tensor lse was changed since it was written")


def test_a_rewritten_file_with_equal_tensors_is_noticed(pack: Path) -> None:
    tensors = typed(read_safetensors(pack / FILE))
    write_safetensors(pack / FILE, dict(reversed(tensors.items())))
    size = (pack / FILE).stat().st_size
    forge(pack, lambda document: case_of(document).update(size=size))
    refused(pack, "was changed since it was written, outside its tensors")


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return the change that puts a value at a path in the manifest."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    """Return the change that takes away what is at a path in the manifest."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


CASE = ("cases", 0)
Q_OPERAND = ("recipes", RECIPE, "recipe", "s", "left")
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("schema", value="other"), "is not the manifest of"),
        (
            put("schema_version", value=1),
            "has schema version 1, this version reads 3; try `flamia-ref golden migrate`, make the pack",
        ),
        (put("schema_version", value="2"), "has schema version '2'"),
        (put("numerics_version", value=-1), "numerics_version is -1"),
        (put("numerics_version", value=True), "numerics_version is True"),
        (put("nan", value="whatever"), "NaN policy"),
        (put("surprise", value=1), "field 'surprise', which is unknown"),
        (drop("suite"), "no field 'suite'"),
        (put("suite", value=[]), "suite is \\[\\]; it must be a string"),
        (put("suite", value="\x1b[2J"), "suite name .* is not plain"),
        (put("cases", value=[]), "lists no case"),
        (put("cases", value={}), "cases is {}; it must be a list"),
        (lambda document: document["cases"].append(document["cases"][0]), "lists a case twice"),
        (put("recipes", value={}), "recipe 'flamia-mxfp8-folded', which is not in the manifest"),
        (put("recipes", RECIPE, "evidence", value="proved"), "evidence 'proved'; its data are"),
        (put("recipes", RECIPE, "evidence", value="specified"), "evidence 'specified'; its data"),
        (put("recipes", RECIPE, "recipe", value=3), "recipe has no field 'name'"),
        (put("recipes", RECIPE, "recipe", value={}), "recipe has no field 'name'"),
        (put("recipes", RECIPE, "recipe", "name", value="other"), "its data are those of other"),
        (put("recipes", RECIPE, "recipe", "name", value="../up"), "recipe name '../up' is not"),
        (put("recipes", RECIPE, "recipe", "steps", value={}), "has no evidence for s.left.format"),
        (put("recipes", RECIPE, "recipe", "steps", "o", value={}), "has no evidence, source"),
        (
            put("recipes", RECIPE, "recipe", "steps", "o", "evidence", value="proved"),
            "evidence is 'proved'; allowed: specified",
        ),
        (drop("recipes", RECIPE, "recipe", "softmax"), "recipe has no softmax"),
        (put("recipes", RECIPE, "recipe", "tiles", "key", value=0), "tiles.key is 0; allowed"),
        (
            put("recipes", RECIPE, "recipe", "tiles", "key", value="128"),
            "it must be a whole number",
        ),
        (put("recipes", RECIPE, "recipe", "surprise", value=1), "unknown field of recipe"),
        (put("recipes", RECIPE, "recipe", "input", value="fp16"), "packs hold bf16"),
        (put(*Q_OPERAND, "block", value=[1, HUGE]), r"recipe: .*\(1, 4611686018427387904\)"),
        (put(*Q_OPERAND, "block", value=["all", 1]), "has the codes of s.q, but another format or"),
        (put(*Q_OPERAND, "block", value=[[]]), "recipe.s.left.block"),
        (put(*Q_OPERAND, "format", value="te-mx-e4m4"), "unknown operand format 'te-mx-e4m4'"),
        (put(*Q_OPERAND, "same_codes_as", value="o.v"), "s.q has the codes of o.v"),
        (put(*Q_OPERAND, "same_codes_as", value="s.q\n"), "same_codes_as"),
        (put("recipes", value={"../up": {"recipe": {}, "evidence": "assumed"}}), "is not plain"),
        (put(*CASE, "file", value="../../secret.safetensors"), f"a case of this data is {FIRST}"),
        (put(*CASE, "file", value="/etc/passwd"), f"a case of this data is {FIRST}"),
        (put(*CASE, "file", value=f"{SECOND}.safetensors"), f"a case of this data is {FIRST}"),
        (put(*CASE, "name", value="other"), f"a case of this data is {FIRST}"),
        (put(*CASE, "spec", "name", value="../tiny"), "is not plain"),
        (put(*CASE, "spec", "name", value=7), "it must be a string"),
        (put(*CASE, "spec", "heads", value=0), "heads is 0"),
        (put(*CASE, "spec", "heads", value=HUGE), f"heads is {HUGE}"),
        (put(*CASE, "spec", "heads", value=2.0), "its form is not canonical"),
        (
            put(*CASE, "spec", "heads", value={"bits": "0x4000000000000000", "repr": "2.0"}),
            "heads is 2.0; it must be an integer",
        ),
        (put(*CASE, "spec", "lengths", value=[HUGE]), "every length"),
        (put(*CASE, "spec", "lengths", value=[1 << 24]), "unknown tensor"),
        (put(*CASE, "spec", "lengths", value=[1 << 24, 0, 0]), "shape is"),
        (put(*CASE, "spec", "lengths", value="abc"), "it must be a list"),
        (put(*CASE, "spec", "causal", value=1), "it must be true or false"),
        (put(*CASE, "spec", "softmax_scale", value=1), "it must be a float"),
        (
            put(*CASE, "spec", "softmax_scale", value={"bits": "0x0", "repr": "0.0"}),
            "'0x0' are no float64 bits",
        ),
        (
            put(
                *CASE, "spec", "softmax_scale", value={"bits": "0x3ff0000000000000", "repr": "2.0"}
            ),
            "bits 0x3ff0000000000000 are not '2.0'",
        ),
        (
            put(
                *CASE, "spec", "softmax_scale", value={"bits": "0x7ff8000000000000", "repr": "nan"}
            ),
            "nan is no JSON number",
        ),
        (put(*CASE, "spec", "distribution", value="gauss"), "unknown distribution"),
        (put(*CASE, "spec", "plants", value=[{}]), "no field 'tensor'"),
        (put(*CASE, "spec", "extra", value=1), "field 'extra', which is unknown"),
        (put(*CASE, "size", value=10), "10 bytes do not fit tensors of"),
        (put(*CASE, "size", value=HUGE), "bytes do not fit tensors of"),
        (put(*CASE, "sha256", value="0" * 63), "64 hexadecimal digits"),
        (put(*CASE, "tensors", value={}), "lists no cu_seqlens"),
        (drop(*CASE, "tensors", "lse"), "lists no lse; every case has inputs and outputs"),
        (drop(*CASE, "tensors", "dout"), "lists no dout; every case has inputs and outputs"),
        (drop(*CASE, "tensors", "dv"), "lists no dv; every case has inputs and outputs"),
        (put(*CASE, "tensors", "q.s.codes", value={}), "unknown tensor .* 'q.s.codes'"),
        (drop(*CASE, "tensors", "row_sum"), "holds tensor 'row_sum', which the manifest does not"),
        (put(*CASE, "tensors", "s.9", value={}), "unknown tensor .* 's.9'"),
        (put(*CASE, "tensors", "lse", "shape", value=[2, 38]), "shape is .2, 38."),
        (put(*CASE, "tensors", "lse", "shape", value=[HUGE, HUGE]), "shape is"),
        (put(*CASE, "tensors", "lse", "shape", value=[-1]), "not negative"),
        (put(*CASE, "tensors", "lse", "dtype", value="F64"), "dtype is 'F64'"),
        (put(*CASE, "tensors", "lse", "view", value="I32"), "view is 'I32'"),
        (put(*CASE, "tensors", "lse", "layout", value="column-major"), "layout is 'column-major'"),
        (put(*CASE, "tensors", "lse", "sha256", value="0" * 64), "lse was changed since"),
    ],
)
def test_a_forged_manifest(
    pack: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    forge(pack, change)
    refused(pack, message)


ODD: tuple[Any, ...] = (
    None,
    0,
    -1,
    HUGE,
    "",
    "all",
    "x\n\x1b",
    [],
    [1, 32],
    [[[]]],
    {},
    True,
    "bf16",
    "s.q",
    "o.v",
)


def test_a_forged_recipe_is_refused_in_one_line_or_read(made: Path, tmp_path: Path) -> None:
    text = (made / "manifest.json").read_text()
    folder = Path(shutil.copytree(made, tmp_path / "pack"))
    recipe = json.loads(text)["recipes"][RECIPE]["recipe"]
    paths: list[tuple[str, ...]] = [(part,) for part in recipe]
    for part, value in recipe.items():
        if isinstance(value, dict) and part != "steps":
            paths += [(part, key) for key in value]
            paths += [(part, key, name) for key in ("left", "right") for name in value.get(key, ())]
    rng = random.Random(5)
    refusals = []
    for _ in range(80):
        (folder / "manifest.json").write_text(text)
        path = ("recipes", RECIPE, "recipe", *rng.choice(paths))
        forge(folder, rng.choice((put(*path, value=rng.choice(ODD)), drop(*path))))
        try:
            read_all(folder)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert all(refusal.isprintable() for refusal in refusals)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]\n", "holds no JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"schema": NaN}', "no JSON"),
        ('{"schema": 1e999}', "no JSON"),
        ('{"schema": 1, "schema": 2}', "a key comes twice"),
        ('{"schema": ' + "9" * 5000 + "}", "no JSON"),
        ("{}", "its form is not canonical"),
    ],
)
def test_a_manifest_that_is_none(pack: Path, text: str, message: str) -> None:
    (pack / "manifest.json").write_text(text)
    refused(pack, message)


def test_an_innocent_reformatting_is_noticed(pack: Path) -> None:
    path = pack / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    refused(pack, "its form is not canonical")
    document = json.loads(path.read_text())
    document["suite"] = "other"
    path.write_text(canonical(document))
    refused(pack, "was changed since it was written: its digest differs")


def test_a_manifest_of_absurd_size_is_not_read(pack: Path) -> None:
    with (pack / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    refused(pack, "at most 67108864 are expected")


def test_other_files_beside_a_pack_do_no_harm(pack: Path) -> None:
    (pack / "README.md").write_text("my pack")
    read_all(pack)
