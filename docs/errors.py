"""Write docs/errors.md: the error of every recipe on the attention of a real model.

Run from the root of the checkout, some minutes: python docs/errors.py
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES, AttentionError, Recipe, error  # noqa: E402

FILE = ROOT / "docs" / "errors.md"
DATA = ROOT / "tests" / "oracles" / "smollm2" / "layer14-group0.npz"

RESULTS = {"out": "O", "lse": "lse", "dq": "dQ", "dk": "dK", "dv": "dV"}

HEAD = """# Errors

Made by `python docs/errors.py`: the real simulator of every recipe against float64 attention of the same bfloat16
inputs, `attention.error`. The inputs are those of a real layer: SmolLM2-135M-Instruct, layer 14, {tokens} tokens in
documents of {lengths}, {heads} query heads over {kv_heads} key/value head, {channels} channels, softmax_scale
{scale:g}, causal; Apache-2.0, provenance in `tests/oracles/README.md`. dO is the gradient of each document's next-token
loss.
Recipes without a public backward have no gradients. What makes these errors, and what they become in long documents:
[04_attention_error.ipynb](../notebooks/04_attention_error.ipynb), with these pictures: each quantizer alone (bars) and
all but that one (dots), and the error of the last 32 queries against the number of keys.

![relative error by one quantizer alone and by all but one](pictures/error-attribution.png)

![relative error of O, and P mass lost, against length](pictures/error-length.png)

## Relative error

Euclidean norm of the difference over that of the exact result. Documents this short flatter recipes with guarded
blocks, which compute the diagonal in BF16: the share of all multiply-accumulates that leaves low precision, in these
documents and in one of 8192 tokens, is in [overview.md](overview.md).
The lse of `sage3-nvfp4`, which no kernel returns, is that of its smoothed scores, and so is what it is compared with
here: the float64 lse of k less its mean over the document.

"""

BIAS = """
## Bias

What is not random: the slope, <error, exact> / <exact, exact> in percent, by how much of itself a result is too large.
In brackets its standard error, rows taken as independent of each other. They are not quite: most of the weight is on
the first key of each document here, and the rounding of that key is one for all of its queries.

"""

WORST = """
## The largest error of an element

Relative to the root mean square of the exact result's row: one head of one token.

"""

ROWS = """
## Rows

P mass lost: 1 less the sum of P as O takes it, over the row sum l. Row sums of dS: relative to the sum of the row's
magnitudes, before dS is quantized, in rows that see two keys or more; the exact ones are 0.

| recipe | P mass lost: mean | rms | largest | sums of dS: mean | rms | largest |
|---|---|---|---|---|---|---|
"""

SPLIT = """
## Where it comes from

The parts of O's error and of dQ's, of the first document and head: the share of each product's quantizers in the sum of
squares, each quantizer measured alone, all else in float64; and what arithmetic adds (orders of sums, special
functions, rounding of results), relative to the exact result.

| recipe | O: S | PV | arithmetic | dQ: S | PV | dP | dS K | arithmetic |
|---|---|---|---|---|---|---|---|---|
"""


def inputs() -> tuple[list[Any], dict[str, Any]]:
    """q, k, v and dout in bfloat16, and the keywords they are attended with."""
    with np.load(DATA, allow_pickle=False) as stored:
        names = ("q_bits", "k_bits", "v_bits", "dout_bits")
        arrays = [stored[name].view(ml_dtypes.bfloat16) for name in names]
        return arrays, {
            "cu_seqlens": stored["cu_seqlens"],
            "softmax_scale": float(stored["softmax_scale"]),
        }


def measured(recipe: Recipe | str) -> AttentionError:
    """The error of a recipe on all of it."""
    (q, k, v, dout), options = inputs()
    return error(q, k, v, recipe, dout=dout, **options)


def attributed(recipe: Recipe | str) -> AttentionError:
    """The error of a recipe, and its attribution, on the first document and head."""
    arrays, options = inputs()
    length = int(options["cu_seqlens"][1])
    q, k, v, dout = (x[:length, :1] for x in arrays)
    scale = options["softmax_scale"]
    return error(q, k, v, recipe, dout=dout, softmax_scale=scale, attribution=True)


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def of_results(found: AttentionError, form: str, figure: Any) -> list[str]:
    """A cell for each result, "-" where there is none; how many elements are lost where any are."""
    return [
        "-" if one is None else _lost(one) or form.format(*figure(one))
        for one in map(found.total.get, RESULTS)
    ]


def _lost(one: Any) -> str:
    return f"lost {one.lost:.0f} of {one.lost + one.elements:.0f}" if one.lost else ""


def of_rows(rows: Any) -> list[str]:
    """Mean, root mean square and largest magnitude of figures of rows."""
    if rows is None:
        return ["-"] * 3
    rows = rows[~np.isnan(rows)]  # such rows are none
    if not rows.size:
        return ["-"] * 3
    figures = (np.mean(rows), np.sqrt(np.mean(rows**2)), np.max(np.abs(rows)))
    return [f"{short(100 * x)}%" for x in figures]


def short(x: float) -> str:
    """Two digits, and all of a larger number."""
    return f"{x:.0f}" if abs(x) >= 99.5 else f"{x:.2g}"


def split_row(found: AttentionError) -> list[str]:
    """The parts of O's error and of dQ's."""
    told, cells = found.attribution, []
    if told is None:
        raise ValueError(f"the error of {found.recipe} was measured without its attribution")
    for result, products in {"out": ("s", "o"), "dq": ("s", "o", "dp", "dq")}.items():
        if result not in told.total:
            cells += ["-"] * (len(products) + 1)
            continue
        squares = {use: x * x for use, x in told.only[result].items()}
        whole = sum(squares.values())
        for product in products:
            mine = sum(x for use, x in squares.items() if use.split(".")[0] == product)
            cells.append(f"{mine / whole:.0%}")
        cells.append(f"{told.arithmetic[result]:.2g}")
    return cells


def page(found: Mapping[str, AttentionError], parts: Mapping[str, AttentionError]) -> str:
    """The whole page."""
    (q, k, *_), options = inputs()
    lengths = [str(x) for x in np.diff(options["cu_seqlens"])]
    names = ("recipe", *RESULTS.values())
    head = row(names) + "|" + "---|" * len(names) + "\n"
    text = HEAD.format(
        tokens=len(q),
        lengths=f"{', '.join(lengths[:-1])} and {lengths[-1]}",
        heads=q.shape[1],
        kv_heads=k.shape[1],
        channels=q.shape[2],
        scale=options["softmax_scale"],
    )
    for title, form, figure in (
        ("", "{:.3g}", lambda total: (total.relative_l2,)),
        (BIAS, "{:+.2g} ({:.1g})", lambda total: (100 * total.slope, 100 * total.slope_error)),
        (WORST, "{}", lambda total: (short(total.largest_of_row),)),
    ):
        text += title + head
        for name, one in found.items():
            text += row([f"`{name}`", *of_results(one, form, figure)])
    text += ROWS
    for name, one in found.items():
        text += row([f"`{name}`", *of_rows(one.mass_lost), *of_rows(one.ds_sums)])
    text += SPLIT
    for name, one in parts.items():
        text += row([f"`{name}`", *split_row(one)])
    return text


if __name__ == "__main__":
    FILE.write_text(
        page(
            {name: measured(name) for name in RECIPES},
            {name: attributed(name) for name in RECIPES},
        ),
        encoding="utf-8",
    )
