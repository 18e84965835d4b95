"""Packed documents to schedule: lengths by a rule and a seed, or from a file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref._errors import Registry, shown
from flamia_ref.packing import Documents

Lengths = list[int]

_MOST_TOKENS = 10_000_000


def uniform(*, tokens: int = 65536, least: int = 64, most: int = 8192, seed: int = 0) -> Lengths:
    """Every length from `least` to `most` alike."""
    if least > most:
        raise ValueError(f"least is {least} and most {most}; the first must not be more")
    rng = np.random.default_rng(seed)
    return _filled(lambda count: rng.integers(least, most + 1, count), tokens)


def lognormal(
    *, tokens: int = 65536, median: int = 1024, sigma: float = 1.2, most: int = 32768, seed: int = 0
) -> Lengths:
    """The logarithm of a length is normal, of standard deviation `sigma`."""
    rng = np.random.default_rng(seed)
    return _filled(
        lambda count: np.minimum(np.exp(rng.normal(np.log(median), sigma, count)), most), tokens
    )


def zipf(
    *, tokens: int = 65536, exponent: float = 1.5, unit: int = 64, most: int = 32768, seed: int = 0
) -> Lengths:
    """`unit` times a number with the probability of its power -`exponent`: many short documents, few long ones."""
    if exponent <= 1:
        raise ValueError(f"exponent is {shown(exponent)}; it must be more than 1")
    rng = np.random.default_rng(seed)
    return _filled(lambda count: np.minimum(unit * rng.zipf(exponent, count), most), tokens)


def one_long(*, tokens: int = 65536, long: int = 32768, short: int = 512) -> Lengths:
    """One document of `long` tokens and as many of `short` as fit, the long one last."""
    if long > tokens:
        raise ValueError(f"long is {long} and tokens {tokens}; the first must not be more")
    return [short] * ((tokens - long) // short) + [long]


def equal(*, tokens: int = 65536, length: int = 8192) -> Lengths:
    """Documents of one length."""
    if length > tokens:
        raise ValueError(f"length is {length} and tokens {tokens}; the first must not be more")
    return [length] * (tokens // length)


def corpus(*, tokens: int = 65536, seed: int = 0) -> Lengths:
    """Files of Django's documentation and code, drawn with repetition: lengths of SmolLM2's tokenizer."""
    file = resources.files("flamia_ref.schedule") / "published" / "lengths-django.csv"
    lines = file.read_text("utf-8").splitlines()
    lengths = np.array([int(line) for line in lines if line and not line.startswith("#")])
    rng = np.random.default_rng(seed)
    return _filled(lambda count: rng.choice(lengths, count), tokens)


WORKLOADS = Registry[Callable[..., Lengths]](
    "workload",
    (
        ("uniform", uniform),
        ("lognormal", lognormal),
        ("zipf", zipf),
        ("one-long", one_long),
        ("equal", equal),
        ("corpus", corpus),
    ),
)


def _filled(draw: Callable[[int], Any], tokens: int) -> Lengths:
    """Draws until there are `tokens`, the last document cut."""
    lengths: Lengths = []
    left = tokens
    while left > 0:
        for length in np.asarray(draw(256), dtype=np.int64).tolist():
            taken = min(max(length, 1), left)
            lengths.append(taken)
            left -= taken
            if not left:
                break
    return lengths


def cu_seqlens_of(text: str) -> list[int]:
    """Cumulative lengths as a command line says them.

    `text`: a file (.npy, or JSON or text with a list of them), "0,512,2048" itself, "lengths:512,3x1536" with
    repetitions, or a workload with its options, "lognormal:tokens=65536,median=1024".

    Raises: ValueError of one line.
    """
    kind, _, rest = text.partition(":")
    if kind == "lengths":
        return _cumulated(_lengths(rest))
    if kind in WORKLOADS:
        return _cumulated(_drawn(kind, rest))
    if text.replace(",", "").replace(" ", "").isdecimal():
        return _checked([int(one) for one in text.split(",") if one.strip()], text)
    if text and Path(text).exists():
        return _checked(_read(Path(text)), text)
    raise ValueError(
        f"cu_seqlens is {shown(text)}: no such file, and no list like 0,512,2048, lengths:512,3x1536 or"
        f" {', '.join(WORKLOADS)} with options like lognormal:tokens=65536"
    )


def _lengths(text: str) -> Lengths:
    found: Lengths = []
    for one in text.split(","):
        count, times, length = one.strip().rpartition("x")
        if not length.isdecimal() or (times and not count.isdecimal()):
            raise ValueError(f"{shown(one)} in lengths is no length like 512, nor 3x1536")
        many = int(count) if times else 1
        if many > _MOST_TOKENS:
            raise ValueError(f"{shown(one)} in lengths is more than {_MOST_TOKENS} documents")
        found += [int(length)] * many
    return found


def _drawn(kind: str, text: str) -> Lengths:
    make = WORKLOADS[kind]
    allowed = {
        name: type(parameter.default)
        for name, parameter in inspect.signature(make).parameters.items()
    }
    given: dict[str, Any] = {}
    for one in (x for x in text.split(",") if x):
        name, _, value = one.partition("=")
        if name not in allowed:
            raise ValueError(f"{kind} has no option {shown(name)}; it has {', '.join(allowed)}")
        try:
            given[name] = allowed[name](value)
        except ValueError:
            raise ValueError(
                f"{kind}: {name} is {shown(value)}; it must be a number like"
                f" {inspect.signature(make).parameters[name].default}"
            ) from None
        if not (-1 if name == "seed" else 0) < given[name] < float("inf"):
            raise ValueError(f"{kind}: {name} is {shown(value)}; it must be positive and finite")
    if given.get("tokens", 0) > _MOST_TOKENS:
        raise ValueError(f"{kind}: tokens is {given['tokens']}; at most {_MOST_TOKENS} are drawn")
    return make(**given)


def _read(path: Path) -> list[int]:
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False).tolist()
        else:
            text = path.read_text("utf-8").strip()
            values = json.loads(text if text.startswith("[") else f"[{','.join(text.split())}]")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read cumulative lengths from {path}: {error}") from None
    return values if isinstance(values, list) else [values]


def _checked(values: Sequence[Any], source: str) -> list[int]:
    if not values or any(isinstance(one, bool) or not isinstance(one, int) for one in values):
        raise ValueError(f"{source} holds no list of integers like 0,512,2048")
    if values[0] != 0:
        raise ValueError(
            f"{shown(source)} begins with {values[0]}; cumulative lengths begin with 0, and lengths are written"
            " lengths:512,1536"
        )
    if max(values) > _MOST_TOKENS:
        raise ValueError(f"{max(values)} tokens; at most {_MOST_TOKENS}")
    if min(values) < 0:
        raise ValueError(
            f"{shown(source)} holds {min(values)}; cumulative lengths are not negative"
        )
    return list(Documents.from_cu_seqlens(np.array(values, dtype=np.int64), None).offsets)


def _cumulated(lengths: Lengths) -> list[int]:
    total = [0, *np.cumsum(np.array(lengths, dtype=np.int64)).tolist()]
    if total[-1] > _MOST_TOKENS:
        raise ValueError(f"{total[-1]} tokens; at most {_MOST_TOKENS}")
    return total
