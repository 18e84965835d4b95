"""The reader of recorded quantizers gives back what was recorded (tests/oracles/quantizers)."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from tests.formats import stored

EVERYTHING = ("inputs", *stored.oracle_names())


def digest(arrays: stored.Arrays) -> str:
    """SHA-256 over the keys in sorted order: "key dtype shape", a line feed, the array's bytes."""
    total = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        total.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def test_every_recording_has_its_digest() -> None:
    wanted = stored.digests()
    wrong = [name for name in EVERYTHING if digest(stored.oracle(name)) != wanted[name]]
    assert wrong == []


def test_a_digest_shows_one_bit_one_key_one_shape_and_one_dtype() -> None:
    arrays = stored.oracle("mx-qwix-0.1.8-mxfp8")
    scales = arrays["scale_codes_f32"]
    flipped = scales.copy()
    flipped[-1, 0] ^= 1
    others = [
        arrays | {"scale_codes_f32": changed}
        for changed in (flipped, scales.ravel(), scales.view(np.int8))
    ]
    others.append({key: array for key, array in arrays.items() if key != "scale_codes_f32"})
    digests = {digest(changed) for changed in (arrays, *others)}
    assert len(digests) == 5


def test_every_array_is_that_of_the_original() -> None:
    if "FLAMIA_ORACLES" not in os.environ:
        pytest.skip("NOT CHECKED: set FLAMIA_ORACLES to the folder of the original recordings")
    folder = Path(os.environ["FLAMIA_ORACLES"]) / "quantizers"
    if not folder.is_dir():
        pytest.skip(f"NOT CHECKED: no folder {folder} of original recordings")
    assert sorted(path.stem for path in folder.glob("*.npz")) == sorted(EVERYTHING)
    for name in EVERYTHING:
        arrays = stored.oracle(name)
        with np.load(folder / f"{name}.npz", allow_pickle=False) as original:
            assert sorted(arrays) == sorted(original.files), name
            for key, array in arrays.items():
                wanted = original[key]
                assert isinstance(array, np.ndarray), (name, key)  # a scalar has a dtype as well
                assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), (name, key)
                assert array.tobytes() == wanted.tobytes(), (name, key)
    assert (folder / "presets.csv").read_text() == (stored.QUANTIZERS / "presets.csv").read_text()


def test_every_quantizer_has_a_preset_of_its_own() -> None:
    presets = stored.presets()
    quantizers = [name for name in stored.oracle_names() if not name.startswith("cast-")]
    assert sorted(presets) == sorted(quantizers)
    assert len(set(presets.values())) == len(presets)


def test_every_row_of_every_pack_is_used_once() -> None:
    """No recording lies in a pack that the table does not send its readers to."""
    wanted = dict.fromkeys(EVERYTHING, 0)
    for path in sorted(stored.QUANTIZERS.glob("*.npz")):
        for member, rows in stored.read(f"quantizers/{path.stem}").items():
            if member.endswith(".rows"):
                assert len(set(rows.tolist())) == len(rows), (path.stem, member)
                for label in rows.tolist():
                    wanted[label.split("/")[0]] += 1
    derived = {"inputs": 2}  # the bfloat16 inputs
    for name, count in wanted.items():
        assert len(stored.oracle(name)) == count + derived.get(name, 0), name


def test_recordings_are_read_only() -> None:
    codes = stored.oracle("nvfp4-vllm_ref-055e47c2")["element_codes_f32"]
    with pytest.raises(ValueError, match="read-only"):
        codes[0, 0, 0] = 0


def test_an_unknown_recording_is_refused() -> None:
    with pytest.raises(KeyError, match="no recording 'mx-nobody'"):
        stored.oracle("mx-nobody")
