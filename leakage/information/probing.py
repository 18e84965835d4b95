"""A probe: how well a small model that sees legal outputs predicts the next token, which no causal one can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.information.simulating import simulate
from flamia_ref.leakage.search.bases import Draws, rounded
from flamia_ref.leakage.search.setting import Setting

VOCABULARY = 16
"""Tokens are one of so many, each as likely, each by itself."""

FIRST = 64
"""Sequences that are looked at before the others are made."""

_HIDDEN, _STEPS, _EVERY, _BATCH = 48, 1200, 25, 128
_RATE, _RIDGE = 3e-3, 3e-4

Features = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many bits of a token a model gains over the uniform guess, on samples that it has not seen.

    Attributes:
        bits: log2(classes) less its cross entropy, on average; a lower bound of what the features say, within its
            error. 0 where the model that did best beside its training was the uniform one.
        error: the standard error of that.
        trained, held_out: samples that it was made from, and judged by.
    """

    bits: float
    error: float
    trained: int
    held_out: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeFigure:
    """What a row of out says of the token after it.

    Attributes:
        row: the row, in a block of `block` tokens.
        block: tokens of the document.
        samples: sequences.
        differing: in how many of them the row's bits are not those of its causal recomputation: each is a proof.
        gain: what a model gets out of the difference.
    """

    row: int
    block: int
    samples: int
    differing: int
    gain: Gain


def probe(
    recipe: Recipe,
    *,
    head_dim: int,
    block: int,
    rows: Sequence[int],
    samples: int,
    seed: int,
) -> list[ProbeFigure]:
    """What some rows of a block say of the next token, beyond what the tokens up to them do.

    Tokens are independent and uniform. q = k = 1, so that a row weighs alike all that it sees; V of a token is a
    bell-shaped vector of its own. A row's features are its out less the out of the same tokens without those after it.

    Args:
        recipe: the recipe.
        head_dim: channels.
        block: tokens of each sequence.
        rows: which rows, below block - 1.
        samples: sequences; no more than `FIRST` where none of so many differs in any row.
        seed: of tokens, vectors and model.
    """
    draws = Draws(seed, 4)
    few = min(samples, FIRST)
    vectors = rounded(draws.bell((VOCABULARY, head_dim)))
    tokens = draws.integers(0, VOCABULARY - 1, (block, samples))
    v = vectors[tokens][:, :, None]
    alone = {row: _out(recipe, v[: row + 1, :few])[:, row] for row in rows}
    whole = _out(recipe, v[:, :few])
    if few < samples and any((whole[:, row] != alone[row]).any() for row in rows):
        more = v[:, few:]
        whole = np.concatenate([whole, _out(recipe, more)])
        alone = {
            row: np.concatenate([one, _out(recipe, more[: row + 1])[:, row]])
            for row, one in alone.items()
        }
    found = []
    for row in rows:
        actual, causal = whole[:, row], alone[row]
        differing = int((actual != causal).any(axis=1).sum())
        features = _float(actual) - _float(causal)
        found.append(
            ProbeFigure(
                row=row,
                block=block,
                samples=len(actual),
                differing=differing,
                gain=gain(features, tokens[row + 1, : len(actual)], classes=VOCABULARY, seed=seed),
            )
        )
    return found


def _out(recipe: Recipe, v: NDArray[Any]) -> NDArray[Any]:
    """Bits of out [samples, tokens, channels] of V [tokens, samples, 1, channels] with q = k = 1."""
    setting = Setting.of(
        lengths=[len(v)],
        head_dim=v.shape[-1],
        heads=1,
        kv_heads=1,
        causal=True,
        window=None,
        alignment="bottom_right",
        softmax_scale=None,
        backward=False,
    )
    ones = np.ones_like(v)
    return simulate(recipe, setting, {"q": ones, "k": ones, "v": v})["out"][:, :, 0]


def _float(bits: NDArray[Any]) -> Features:
    return np.nan_to_num(bits.view(np.float32).astype(np.float64))


def gain(features: Features, targets: NDArray[np.int64], *, classes: int, seed: int) -> Gain:
    """What a small network gains of `targets` [samples], uniform over classes, from `features` [samples, features].

    Half of the samples train it, a sixth say when to stop, a third judge it. It begins as the uniform guess, so that
    it gains 0, not less, where there is nothing to learn.
    """
    count = len(targets)
    trained, stopped = count // 2, count // 2 + count // 6
    parts = slice(0, trained), slice(trained, stopped), slice(stopped, count)
    if trained < 2 or not features.any():
        return Gain(bits=0.0, error=0.0, trained=trained, held_out=count - stopped)
    x = _standardized(features, parts[0])
    model = _Network(x.shape[1], classes, seed)
    best, kept = 0.0, None
    source = np.random.Generator(np.random.PCG64([seed, 5]))
    for step in range(_STEPS):
        chosen = source.integers(0, trained, min(_BATCH, trained))
        model.learn(x[chosen], targets[chosen])
        if step % _EVERY == _EVERY - 1:
            won = _won(model, x[parts[1]], targets[parts[1]]).mean()
            if won > best:
                best, kept = won, [one.copy() for one in model.weights]
    if kept is None:
        return Gain(bits=0.0, error=0.0, trained=trained, held_out=count - stopped)
    model.weights = kept
    won = _won(model, x[parts[2]], targets[parts[2]])
    return Gain(
        bits=float(won.mean()),
        error=float(won.std(ddof=1) / math.sqrt(len(won))),
        trained=trained,
        held_out=len(won),
    )


def _standardized(features: Features, of: slice) -> Features:
    """Features of unit size, and whether each is 0: a scale that did not move says something too."""
    size = np.sqrt((features[of] ** 2).mean(axis=0))
    scaled = np.clip(features / np.where(size > 0, size, 1), -8, 8)
    moved = (features != 0).astype(np.float64)
    return np.concatenate([scaled, moved - moved[of].mean(axis=0)], axis=1)


def _won(model: _Network, x: Features, targets: NDArray[np.int64]) -> Features:
    """Bits of each sample over the uniform guess."""
    logits = model.logits(x)
    logs = logits - logits.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    picked: Features = logs[np.arange(len(targets)), targets] / math.log(2)
    return picked + math.log2(logits.shape[1])


class _Network:
    """One hidden layer beside a linear path, trained by Adam with a ridge; its first guess is the uniform one."""

    def __init__(self, features: int, classes: int, seed: int) -> None:
        source = np.random.Generator(np.random.PCG64([seed, 6]))
        self.weights = [
            source.standard_normal((features, _HIDDEN)) / math.sqrt(features),
            np.zeros(_HIDDEN),
            np.zeros((_HIDDEN, classes)),
            np.zeros((features, classes)),
            np.zeros(classes),
        ]
        self._first = [np.zeros_like(one) for one in self.weights]
        self._second = [np.zeros_like(one) for one in self.weights]
        self._step = 0

    def logits(self, x: Features) -> Features:
        into, bias, out, straight, last = self.weights
        return np.asarray(np.tanh(x @ into + bias) @ out + x @ straight + last)

    def learn(self, x: Features, targets: NDArray[np.int64]) -> None:
        into, bias, out, straight, last = self.weights
        hidden = np.tanh(x @ into + bias)
        logits = hidden @ out + x @ straight + last
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(len(targets)), targets] -= 1
        shares /= len(targets)
        back = (shares @ out.T) * (1 - hidden**2)
        gradients = [x.T @ back, back.sum(axis=0), hidden.T @ shares, x.T @ shares]
        gradients.append(shares.sum(axis=0))
        self._step += 1
        for index, gradient in enumerate(gradients):
            gradient = gradient + _RIDGE * self.weights[index]
            first = self._first[index] = 0.9 * self._first[index] + 0.1 * gradient
            second = self._second[index] = 0.999 * self._second[index] + 0.001 * gradient**2
            size = np.sqrt(second / (1 - 0.999**self._step)) + 1e-8
            rate = _RATE / (1 - 0.9**self._step)
            self.weights[index] = self.weights[index] - rate * first / size
