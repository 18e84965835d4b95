"""The property suites on a kernel: ``pytest --pyargs flamia_ref.properties --flamia-kernel module:function``.

The fixtures are those of `flamia_ref.pytest_plugin`, which is there wherever the package is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Hold = Callable[[str], None]


@pytest.mark.flamia_property("determinism")
def test_determinism(flamia_hold: Hold) -> None:
    """The same inputs give the same bits."""
    flamia_hold("determinism")


@pytest.mark.flamia_property("causality")
def test_causality(flamia_hold: Hold) -> None:
    """Forward results do not depend on later tokens."""
    flamia_hold("causality")


@pytest.mark.flamia_property("locality")
def test_locality(flamia_hold: Hold) -> None:
    """Forward results do not depend on earlier tokens that are not theirs."""
    flamia_hold("locality")


@pytest.mark.flamia_property("prefix_parity")
def test_prefix_parity(flamia_hold: Hold) -> None:
    """The first rows are those of the first tokens."""
    flamia_hold("prefix_parity")


@pytest.mark.flamia_property("document_isolation")
def test_document_isolation(flamia_hold: Hold) -> None:
    """No document depends on another."""
    flamia_hold("document_isolation")


@pytest.mark.flamia_property("packing_invariance")
def test_packing_invariance(flamia_hold: Hold) -> None:
    """Packed equals alone."""
    flamia_hold("packing_invariance")


@pytest.mark.flamia_property("backward_legality")
def test_backward_legality(flamia_hold: Hold) -> None:
    """Gradients depend on what the exact gradients depend on."""
    flamia_hold("backward_legality")


@pytest.mark.flamia_property("nan_poison")
def test_nan_poison(flamia_hold: Hold) -> None:
    """NaN and infinity stay where they may be."""
    flamia_hold("nan_poison")


@pytest.mark.flamia_property("padding_garbage")
def test_padding_garbage(flamia_hold: Hold) -> None:
    """Garbage in all other documents changes nothing."""
    flamia_hold("padding_garbage")


@pytest.mark.flamia_property("scale_invariance")
def test_scale_invariance(flamia_hold: Hold) -> None:
    """Powers of two come out exactly."""
    flamia_hold("scale_invariance")


@pytest.mark.flamia_property("zero_length_documents")
def test_zero_length_documents(flamia_hold: Hold) -> None:
    """Empty documents change nothing."""
    flamia_hold("zero_length_documents")


@pytest.mark.flamia_property("grouped_heads")
def test_grouped_heads(flamia_hold: Hold) -> None:
    """Shared key/value heads equal repeated ones."""
    flamia_hold("grouped_heads")
