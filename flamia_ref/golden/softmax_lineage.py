"""Where the numbers between the products come from: the softmax, delta, dS, and what is returned."""

import numpy as np
from ml_dtypes import bfloat16

from flamia_ref.golden.elements import Elements
from flamia_ref.golden.lineage import Index, Lineage, largest
from flamia_ref.golden.stage import Place


def _pairs_of_row(of: Elements, name: str, index: Index) -> tuple[int, int, str]:
    document, row = of.document(index[1])
    return document, row, f"{name}.{document}"


def _row_max(of: Elements, place: Place, index: Index) -> Lineage:
    document, row, name = _pairs_of_row(of, "s", index)
    scores = of.numbers(name, (index[0], row))
    seen = of.spec.visible(document)[row]
    words = f"the row maximum of visible S, {of.recipe.softmax.base.replace('_', ' ')}"
    parents: tuple[tuple[str, Index], ...] = ()
    if seen.any():
        at = int(np.argmax(np.where(seen, np.nan_to_num(scores, nan=np.inf), -np.inf)))
        parents = ((name, (index[0], row, at)),)
    return Lineage(how=words, part="softmax.base", parents=parents)


def _p(of: Elements, place: Place, index: Index) -> Lineage:
    document, (head, query, key) = place.document or 0, index
    if not of.spec.visible(document)[query, key]:
        return Lineage(how="0: the pair is masked", parents=((f"s.{document}", index),))
    offset, p_scale = of.recipe.softmax.p_offset, of.recipe.softmax.p_scale
    scale = "" if p_scale == 1 else f" + log2 {p_scale}"
    token = of.spec.starts[document] + query
    if of.recipe.softmax.base == "natural_max":
        return Lineage(
            how=f"e^(S' - base) by {of.recipe.softmax.exp2}, relative to the base when its key tile was computed",
            part="softmax.exp2",
            parents=((f"s.{document}", index), ("row_max", (head, token))),
        )
    return Lineage(
        how=(
            f"2^(S c - base{f' + {offset}' if offset else ''}{scale}) by {of.recipe.softmax.exp2}, relative to the "
            "maximum when its key tile was computed"
        ),
        part="softmax.exp2",
        parents=(
            (f"s.{document}", index),
            *_descales(of, document, head),
            ("row_max", (head, token)),
        ),
    )


def _descales(of: Elements, document: int, head: int) -> tuple[tuple[str, Index], ...]:
    """The descales of q and k in c."""
    of_s = (copy for copy in of.copies if copy.descaled and "s" in copy.products)
    return tuple((copy.scales, (document, of.kv_head(head))) for copy in of_s)


def _row_sum(of: Elements, place: Place, index: Index) -> Lineage:
    _, row, name = _pairs_of_row(of, "p", index)
    p = of.numbers(name, (index[0], row))
    terms, total = largest(p, lambda at: f"key {at}")
    order = int(np.argmax(np.nan_to_num(p, nan=np.inf))) if len(p) else 0
    parents = ((name, (index[0], row, order)),) if len(p) else ()
    what = "P" if of.recipe.softmax.row_sum_of == "p" else "the codes of P"
    return Lineage(
        how=f"the sum of {what} over the row, {of.recipe.softmax.row_sum.replace('_', ' ')}",
        part="softmax.row_sum",
        parents=(*parents, ("row_max", index)),
        terms=terms,
        count=len(p),
        total=total,
    )


def _out(of: Elements, place: Place, index: Index) -> Lineage:
    return Lineage(
        how="o, rounded to bfloat16",
        part="output",
        parents=(("o", index),),
        before=of.value("o", index),
    )


def _high_precision_out(of: Elements, place: Place, index: Index) -> Lineage:
    token, head, channel = index
    document, row = of.document(token)
    name = f"p.{document}"
    p = of.numbers(name, (head, row)).astype(bfloat16).astype(np.float64)
    v = of.input_values(of.copy("o", "v"), "o", document, of.kv_head(head))[:, channel]
    total = of.value("row_sum", (head, token))
    products = p * v * (1 / total if total else 0.0)
    terms, found = largest(products, lambda at: f"key {at}: {p[at]:g} x {v[at]:g}")
    key = int(np.argmax(np.nan_to_num(np.abs(products), nan=np.inf))) if len(p) else 0
    parents = ((name, (head, row, key)),) if len(p) else ()
    return Lineage(
        how="O of P in bfloat16, over the row sum, to bfloat16",
        part="gradient.delta_source",
        parents=(*parents, ("row_sum", (head, token))),
        terms=terms,
        count=len(products),
        total=found,
    )


def _lse(of: Elements, place: Place, index: Index) -> Lineage:
    return Lineage(
        how=f"row maximum and logarithm of the row sum, {of.recipe.softmax.lse.replace('_', ' ')}",
        part="softmax.lse",
        parents=(
            ("row_sum", index),
            ("row_max", index),
            *_descales(of, of.document(index[1])[0], index[0]),
        ),
    )


def _delta(of: Elements, place: Place, index: Index) -> Lineage:
    head, token = index
    gradient = of.recipe.backward.gradient
    if gradient.delta_source == "p_dp":
        _, row, name = _pairs_of_row(of, "dp", index)
        return Lineage(
            how="the sum of P dP over the row",
            part="gradient.delta_source",
            parents=((name, (head, row, 0)),),
        )
    sources = {"unrounded_out": "o", "high_precision_out": "high_precision_out"}
    source = sources.get(gradient.delta_source, "out")
    products = of.numbers("dout", (token, head)) * of.numbers(source, (token, head))
    folded = gradient.normalisation == "fold_into_dout"
    terms, total = largest(products, lambda at: f"channel {at}")
    channel = int(np.argmax(np.nan_to_num(np.abs(products), nan=np.inf)))
    parents = ((source, (token, head, channel)), ("dout", (token, head, channel)))
    words = "dO' times O, dO' with the rest of lse in it; below with dO" if folded else "dO times O"
    return Lineage(
        how=f"the sum of {words}, {gradient.delta.value.replace('_', ' ')}",
        part="gradient.delta",
        parents=(*parents, *((("lse", index),) if folded else ())),
        terms=terms,
        count=len(products),
        total=total,
    )


def _p_dv(of: Elements, place: Place, index: Index) -> Lineage:
    document, (head, query, _) = place.document or 0, index
    token = of.spec.starts[document] + query
    if of.recipe.softmax.base == "natural_max":
        own = of.recipe.backward.gradient.normalisation == "row_softmax"
        what = "by a softmax of the whole row" if own else "again: e^(S' - lse)"
        return Lineage(
            how=f"P {what} by {of.recipe.softmax.exp2}, 0 where masked",
            part="gradient.normalisation",
            parents=((f"s.{document}", index), *(() if own else (("lse", (head, token)),))),
        )
    base = (
        "floor(lse log2 e)"
        if of.recipe.backward.gradient.normalisation == "fold_into_dout"
        else "lse log2 e"
    )
    return Lineage(
        how=f"P again: 2^(S c - {base}) by {of.recipe.softmax.exp2}, 0 where masked",
        part="gradient.normalisation",
        parents=((f"s.{document}", index), ("lse", (head, token))),
    )


def _ds(of: Elements, place: Place, index: Index) -> Lineage:
    document, (head, query, _) = place.document or 0, index
    token = of.spec.starts[document] + query
    return Lineage(
        how="P (dP - delta), 0 where masked",
        part="gradient",
        parents=(
            (f"dp.{document}", index),
            (f"p.dv.{document}", index),
            ("delta", (head, token)),
        ),
    )


def _dsink(of: Elements, place: Place, index: Index) -> Lineage:
    return Lineage(
        how="the sum of P of the sink times delta over all rows, negated",
        parents=(("sink", index),),
    )


BETWEEN = {
    "row_max": _row_max,
    "p": _p,
    "row_sum": _row_sum,
    "high_precision_out": _high_precision_out,
    "out": _out,
    "lse": _lse,
    "delta": _delta,
    "p.dv": _p_dv,
    "ds": _ds,
    "dsink": _dsink,
}
"""The stages between the products, by name."""
