"""Graphs of cuDNN's front end: their shapes, strides and masks, and the arguments that its published module takes."""

import itertools

import pytest

from flamia_ref.adapters.cudnn_graphs import Number, Problem, backward, forward
from tests.adapters import fake_cudnn

WHOLE = {"queries": 129, "keys": 160, "heads": 4, "kv_heads": 2, "channels": 192, "scale": 0.125}


def problem(**changes):
    settings = {
        "causal": True,
        "window": (None, None),
        "alignment": "bottom_right",
        **WHOLE,
        **changes,
    }
    return Problem(**settings)


@pytest.mark.parametrize(("number", "sink"), [*itertools.product(Number, (False, True))])
@pytest.mark.parametrize("make", [forward, backward])
def test_published_signatures_take_every_argument(make, number, sink):
    one = make(fake_cudnn.module, number, problem(sink=sink))
    assert all(tensor.is_output for tensor in one.outputs.values())
    assert ("dSink_token" in one.outputs) == (sink and make is backward)


def test_tensors_lie_as_in_a_pack():
    """Shape [1, heads, rows, channels] and strides of [rows, heads, channels], by hand."""
    made = forward(fake_cudnn.module, Number.MXFP8, problem())
    q, k = made.inputs["q"], made.inputs["k"]
    assert (q.dim, q.stride) == ((1, 4, 129, 192), (129 * 768, 192, 768, 1))
    assert (k.dim, k.stride) == ((1, 2, 160, 192), (160 * 384, 192, 384, 1))
    assert made.outputs["o"].stride == q.stride
    assert made.outputs["stats"].dim == (1, 4, 129, 1)
    assert made.outputs["stats"].stride == (516, 129, 1, 1)
    # 129 rows are filled up to 256, 6 blocks of channels to 8; 160 tokens are 5 blocks, filled up to 8.
    assert made.inputs["descale_q"].dim == (1, 4, 256, 8)
    assert made.inputs["descale_k"].dim == (1, 2, 256, 8)
    assert made.inputs["descale_v"].dim == (1, 2, 8, 256)


# Window, causal, alignment -> cuDNN's left bound, which counts the own key, right bound, and alignment.
MASKS = [
    ((None, None), True, "bottom_right", (None, 0, "BOTTOM_RIGHT")),
    ((None, None), False, "top_left", (None, None, "TOP_LEFT")),
    ((0, None), True, "top_left", (1, 0, "TOP_LEFT")),
    ((7, 0), True, "bottom_right", (8, 0, "BOTTOM_RIGHT")),
    ((7, 3), False, "bottom_right", (8, 3, "BOTTOM_RIGHT")),
]


@pytest.mark.parametrize(("window", "causal", "alignment", "expected"), MASKS)
@pytest.mark.parametrize("number", Number)
@pytest.mark.parametrize("make", [forward, backward])
def test_masks(make, number, window, causal, alignment, expected):
    one = make(
        fake_cudnn.module, number, problem(window=window, causal=causal, alignment=alignment)
    )
    given = one.graph.given
    left = given.get("diagonal_band_left_bound", given.get("left_bound"))
    right = given.get("diagonal_band_right_bound", given.get("right_bound"))
    assert (left, right, given["diagonal_alignment"].name) == expected


@pytest.mark.parametrize(("make", "number"), [*itertools.product((forward, backward), Number)])
def test_the_front_end_itself_accepts_them(make, number):
    """Where the package is installed: its own validation, which needs no device."""
    pytest.importorskip("torch")
    cudnn = pytest.importorskip("cudnn")
    for sink, (window, causal, alignment, _) in itertools.product((False, True), MASKS):
        changes = {"window": window, "causal": causal, "alignment": alignment, "sink": sink}
        make(cudnn, number, problem(**changes)).graph.validate()
