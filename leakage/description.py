"""The text of the demonstration: a table, and a sentence for each trial that shows something."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from flamia_ref.leakage.demo import Demo, Trial, Verdict
from flamia_ref.leakage.witness import Witness

_WORDS = {
    Verdict.LEAK: "LEAK",
    Verdict.NONE_FOUND: "none",
    Verdict.INCONCLUSIVE: "inconclusive",
}


def describe(demo: Demo) -> str:
    """Return the demonstration as lines of text, without a newline at the end."""
    return "\n".join([*_setting(demo), "", *_table(demo), "", *_findings(demo)])


def change(witness: Witness) -> str:
    """What is changed: "v[16] = 1"."""
    return f"v[{witness.token}] = {number(witness.value)}"


def number(x: float) -> str:
    """A value as text, a power of two below 1 as such."""
    mantissa, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if mantissa == 0.5 and x < 1 else f"{x:.6g}"


def tokens(numbers: Sequence[int]) -> str:
    """Ascending tokens as runs: "tokens 0 to 15, 20"."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [value for _, value in group]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return f"token{'s' * (len(numbers) != 1)} {', '.join(parts)}"


def sentence(trial: Trial) -> str:
    """What one trial shows, in one sentence."""
    what = f"{trial.recipe}: {change(trial.witness)}"
    out, lse = trial.leaked
    parts = []
    if out.any():
        token, channel = np.argwhere(out)[0].tolist()
        before, after = (number(float(x.out[token, channel])) for x in (trial.before, trial.after))
        parts.append(
            f"out of {tokens(np.flatnonzero(out.any(axis=1)).tolist())} ({out.sum()} of"
            f" {trial.forbidden[0].sum()} values before it; out[{token}, {channel}] from {before} to {after})"
        )
    if lse.any():
        parts.append(f"lse of {tokens(np.flatnonzero(lse).tolist())}")
    text = f"{what} changes {' and '.join(parts)}" if parts else f"{what} changes nothing before it"
    if trial.doubts:
        text += f", but the run proves nothing: {'; '.join(trial.doubts)}"
    return text


def _setting(demo: Demo) -> Iterator[str]:
    shapes = dict.fromkeys((one.tokens, one.head_dim) for one in demo.witnesses)
    of = " or ".join(f"{tokens} tokens, {channels} channels" for tokens, channels in shapes)
    yield f"Causal attention, {of}. q = k = 1; v is 0 but for v[0], alike in all channels."
    yield "One later token of v is changed too. No output before it may change, and no lse; compared bit for bit."
    for source in dict.fromkeys(one.source for one in demo.witnesses):
        yield f"Witnesses: {source}"


def _table(demo: Demo) -> Iterator[str]:
    rows = [
        ["", *(f"v[0] = {number(one.first)}" for one in demo.witnesses), ""],
        ["recipe", *(change(one) for one in demo.witnesses), "evidence"],
        ["", *(one.name for one in demo.witnesses), ""],
    ]
    for recipe, evidence in demo.evidence.items():
        found = [_cell(trial) for trial in demo.trials if trial.recipe == recipe]
        rows.append([recipe, *found, evidence])
    widths = [max(len(entry) for entry in column) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (entry.ljust(width) for entry, width in zip(row, widths, strict=True))
        yield "   ".join(padded).rstrip()


def _cell(trial: Trial) -> str:
    out, lse = (int(leaked.sum()) for leaked in trial.leaked)
    text = f"{_WORDS[trial.verdict]}, {out} of {trial.forbidden[0].sum()}"
    return f"{text}, {lse} lse" if lse else text


def _findings(demo: Demo) -> Iterator[str]:
    for trial in demo.trials:
        if trial.verdict is not Verdict.NONE_FOUND:
            yield sentence(trial)
    if all(not trial.doubts for trial in demo.trials):
        yield "In every run all outputs that see the changed token moved."
    known = [trial.recipe for trial in demo.trials if trial.expected is Verdict.LEAK]
    if demo.as_expected:
        yield f"As expected: {', '.join(dict.fromkeys(known)) or 'none'} leaks, and nothing else does."
    for trial in demo.trials:
        if not trial.as_expected:
            yield (
                f"NOT AS EXPECTED: {trial.recipe} with {trial.witness.name}: expected"
                f" {trial.expected}, found {trial.verdict}"
            )
