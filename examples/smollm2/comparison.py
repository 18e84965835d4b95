"""Gradients beside those of the reference: relative error and cosine, group by group, layer by layer."""

import torch

Gradients = dict[str, list[torch.Tensor]]  # by group, one a layer


def compared(mine: Gradients, reference: Gradients) -> dict[str, dict[str, list[float]]]:
    """By group, for each layer: the relative L2 error and the cosine against the reference."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, layers in mine.items():
        pairs = list(zip(layers, reference[name], strict=True))
        found[name] = {
            "relative": [relative(x, y) for x, y in pairs],
            "cosine": [cosine(x, y) for x, y in pairs],
        }
    return found


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """The length of x - y over that of y, in float64."""
    x, y = x.double(), y.double()
    return float((x - y).norm() / y.norm())


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    """The cosine of the angle between two vectors, in float64."""
    x, y = x.double(), y.double()
    return float((x @ y) / (x.norm() * y.norm()))
