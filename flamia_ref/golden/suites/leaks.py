"""Pairs of cases that differ in one token: results that may not see it must be equal bit for bit."""

from collections.abc import Iterator
from dataclasses import replace

from flamia_ref.golden.case_fields import Fill, Rows
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import TENSORS, Distribution
from flamia_ref.golden.suites.synthetic import box, synthetic
from flamia_ref.golden.twins import twin

# bfloat16 bits
_P30, _P49, _P45, _P90 = 0x3E9A, 0x3EFB, 0x3EE6, 0x3F66
_MILLION = 0x4974
_TWO_20, _1_64, _1_5, _1 = 0x4980, 0x3C80, 0x3FC0, 0x3F80


def _pair(first: CaseSpec, changed: Fill) -> Iterator[CaseSpec]:
    """Yield a case and its twin, which has one box more."""
    yield first
    rows = Rows(tensor=changed.tensor, first=changed.tokens[0], end=changed.tokens[1])
    yield replace(
        first,
        name=f"{first.name}-twin",
        why=f"{first.name} with another {changed.tensor} in token {rows.first}",
        fills=(*first.fills, changed),
        twin=twin(first, first.name, rows),
    )


def _zeros(*tensors: str, tokens: int) -> tuple[Fill, ...]:
    return tuple(box(tensor, 0, tokens=(0, tokens)) for tensor in tensors)


def _one(tensor: str, bits: int, token: int, channel: int = 0) -> Fill:
    return box(tensor, bits, tokens=(token, token + 1), channels=(channel, channel + 1))


def _witness(name: str, why: str, seed: int, *fills: Fill, tokens: int = 32) -> CaseSpec:
    return synthetic(name, why, lengths=(tokens,), seed=seed, fills=fills, flags=("leak-witness",))


def _found_by_chance(tensor: str, seed: int) -> Iterator[CaseSpec]:
    """Yield twins of two documents that differ in one token of a tensor, by a factor that scales see."""
    first = synthetic(
        f"leak-{tensor}",
        f"exponents over many binades, two documents; the twin has 2^20 throughout token 20 of {tensor}",
        lengths=(45, 30),
        seed=seed,
        heads=(2, 1),
        distribution=Distribution.WIDE,
        exponent=-8,
        flags=("leak-witness",),
    )
    heads = (0, 2) if tensor in ("q", "dout") else (0, 1)
    yield from _pair(first, box(tensor, _TWO_20, tokens=(20, 21), heads=heads))


LEAKS: tuple[CaseSpec, ...] = (
    *_pair(
        _witness(
            "leak-future-value",
            "weights are equal and V is zero but for 0.3 in tokens 0 and 31; the twin has a million in "
            "token 31: with one scale for 32 tokens, rounded up, row 0 of out becomes 0",
            101,
            *_zeros("q", "k", "v", tokens=32),
            _one("v", _P30, 0),
            _one("v", _P30, 31),
        ),
        _one("v", _MILLION, 31),
    ),
    *_pair(
        _witness(
            "leak-future-value-floor",
            "0.49 in token 0, 0.45 in token 31, 0.9 there in the twin: a scale that is rounded down "
            "saturates the first in one of them",
            102,
            *_zeros("q", "k", "v", tokens=32),
            _one("v", _P49, 0),
            _one("v", _P45, 31),
        ),
        _one("v", _P90, 31),
    ),
    *_pair(
        replace(
            _witness(
                "leak-control",
                "the change is in token 32, the first of the next block: kernels that leak within "
                "blocks pass, and a check that fails here is wrong",
                103,
                *_zeros("q", "k", "v", tokens=64),
                _one("v", _P30, 0),
                _one("v", _P30, 32),
                tokens=64,
            ),
            flags=("leak-control",),
        ),
        _one("v", _MILLION, 32),
    ),
    *_pair(
        _witness(
            "leak-whole-tensor",
            "V is 1/64 in token 0 and 1 in token 1, 1.5 in the twin: a largest magnitude of the whole "
            "tensor moves the scale of token 0",
            104,
            *_zeros("q", "k", "v", tokens=2),
            *(
                box(tensor, bits, tokens=(token, token + 1))
                for tensor in ("k", "v")
                for token, bits in enumerate((_1_64, _1))
            ),
            tokens=2,
        ),
        box("v", _1_5, tokens=(1, 2)),
    ),
    *_pair(
        _witness(
            "leak-past-gradient",
            "dO is zero but for 0.3 in tokens 0 and 31; the twin has a million in token 0: with one "
            "scale for 32 tokens dV and dK of key 31 change with a query that does not see it",
            105,
            *_zeros("dout", tokens=32),
            _one("dout", _P30, 0),
            _one("dout", _P30, 31),
        ),
        _one("dout", _MILLION, 0),
    ),
    *(
        case
        for seed, tensor in enumerate(TENSORS, start=106)
        for case in _found_by_chance(tensor, seed)
    ),
)
