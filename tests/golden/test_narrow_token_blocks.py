"""A pack whose v has scales for 16 tokens: the simulator passes it, and a departure is put at the tokens it is at."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flamia_ref import golden
from flamia_ref.golden.envelope.judging import check_supported
from flamia_ref.golden.simulator import numpy_kernel

CASE = "lengths-around-32.sage3-nvfp4"  # documents of 1, 0, 32, 33 and 31 tokens


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "pack"
    golden.make(folder, recipes=("sage3-nvfp4",), suite="smoke")
    return folder


def test_the_simulator_passes(pack: Path) -> None:
    assert golden.check(golden.load(pack), numpy_kernel).passed


@pytest.mark.parametrize(
    ("tensor", "index", "words"),
    [
        # The document of 1 token has block 0, that of 32 has the next two, that of 33 the three after them.
        ("v.scales", (2, 0, 3), "tokens 17 to 32, tile 0, token block 1"),
        ("v.scales", (5, 1, 3), "tokens 65 to 65, tile 0, token block 2"),
        ("v.codes", (20, 1, 3), "position 19"),
        ("p.o.scales.4", (0, 30, 1), "keys 16 to 30"),
    ],
)
def test_where_it_departs(pack: Path, tmp_path: Path, tensor, index, words) -> None:
    tensors = load_file(pack / f"{CASE}.safetensors")
    changed = tensors[tensor].copy()
    changed[index] ^= 1
    save_file({**tensors, tensor: changed}, tmp_path / f"{CASE}.safetensors")
    report = str(golden.check(golden.load(pack), tmp_path))
    assert f"first departs at {tensor.removesuffix('.4')}" in report
    assert words in report
    assert "Traceback" not in report
    if tensor == "v.codes":  # under the scale of the second 16 tokens of its document
        stored = int(tensors["v.scales"][2, 1, 3])
        assert f"scale: expected {stored:#04x}" in report


def test_there_is_no_envelope() -> None:
    from flamia_ref.attention import RECIPES

    with pytest.raises(ValueError, match="envelopes"):
        check_supported(RECIPES["sage3-nvfp4"])


def test_lengths_of_the_case(pack: Path) -> None:
    lengths = golden.load(pack)[CASE].spec.lengths
    assert lengths == (1, 0, 32, 33, 31)
    scales = load_file(pack / f"{CASE}.safetensors")["v.scales"]
    assert len(scales) == sum(-(-length // 16) for length in lengths)
    assert np.unique(scales).size > 8
