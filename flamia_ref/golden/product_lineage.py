"""Where the products come from: S and dP over channels, O, dQ, dK and dV over tokens."""

import numpy as np
from ml_dtypes import bfloat16

from flamia_ref.golden.copies import Copy
from flamia_ref.golden.elements import Elements
from flamia_ref.golden.lineage import Index, Lineage, largest
from flamia_ref.golden.stage import Place

_PRODUCTS = {"s": "S", "o": "O", "dp": "dP", "dv": "dV", "dq": "dQ", "dk": "dK"}


def channels(of: Elements, place: Place, index: Index) -> Lineage:
    """S and dP: sums over channels."""
    product = place.stage.name
    left, right = ("q", "k") if product == "s" else ("do", "v")
    document, (head, query, key) = place.document or 0, index
    copy_left, copy_right = of.copy(product, left), of.copy(product, right)
    a = of.input_values(copy_left, product, document, head)[query]
    b = of.input_values(copy_right, product, document, of.kv_head(head))[key]
    rows, columns = of.rows(left, document), of.rows(right, document)
    chosen, guard = getattr(of.recipe, product), ""
    if of.guarded(product, document)[query, key]:
        guard = ", a guarded block"
        high_a = of.high_values(copy_left, document, head)
        high_b = of.high_values(copy_right, document, of.kv_head(head))
        if high_a is None or high_b is None:
            token = rows.start + query
            source = "dout" if left == "do" else left
            return Lineage(
                how=f"{_PRODUCTS[product]} of bfloat16 by {chosen.guard_instruction}{guard}",
                part=f"{product}.guard_instruction",
                parents=(
                    (source, (token, head, 0)),
                    (right, (columns.start + key, of.kv_head(head), 0)),
                ),
            )
        a, b = high_a[query], high_b[key]
    terms, total = largest(a * b, lambda at: f"channel {at}: {a[at]:g} x {b[at]:g}")
    start = ""
    if chosen.corrected:
        start = f", onto the mean's product by {chosen.correction_instruction}, which the parts leave out"
    where = (rows.start + query, head), (columns.start + key, of.kv_head(head))
    channel = int(terms[0].which.split(":")[0].split()[1]) if terms else 0
    parents = (
        _operand(of, copy_left, (*where[0], channel)),
        _operand(of, copy_right, (*where[1], channel)),
    )
    return Lineage(
        how=(
            f"{_PRODUCTS[product]} by {chosen.guard_instruction if guard else chosen.instruction}, "
            f"channels {chosen.k_order}{guard}{start}"
        ),
        part=f"{product}.instruction",
        parents=parents,
        terms=terms,
        count=len(a),
        total=total,
    )


def _operand(of: Elements, copy: Copy, index: Index) -> tuple[str, Index]:
    if copy.coded:
        return copy.codes, index
    return ("dout" if copy.tensor == "do" else copy.tensor), index


def over_tokens(of: Elements, place: Place, index: Index) -> Lineage:
    """O, dQ, dK and dV: sums over keys, or over the queries of a group's heads."""
    product = place.stage.name
    pair, tensor = {"o": ("p", "v"), "dq": ("ds", "k"), "dk": ("ds", "q"), "dv": ("p", "do")}[
        product
    ]
    left, right = of.copy(product, pair), of.copy(product, tensor)
    of_keys = product in ("dk", "dv")
    token, head, channel = index
    document, row = of.document(token, keys=of_keys)
    group = of.spec.heads // of.spec.kv_heads
    heads = range(head * group, (head + 1) * group) if of_keys else (head,)
    parts, labels, sources = [], [], []
    for one in heads:
        weights = of.pair_values(left, product, document, one)
        weights = weights[:, row] if of_keys else weights[row]
        other = one if tensor in ("q", "do") else of.kv_head(one)
        column = of.input_values(right, product, document, other)[:, channel]
        high = of.high_values(right, document, other)
        if high is not None and not of_keys:
            cut = of.guarded(product, document)[row]
            values_of = of.numbers(f"{'p' if product == 'o' else 'ds'}.{document}", (one, row))
            weights = np.where(cut, values_of.astype(bfloat16).astype(np.float64), weights)
            column = np.where(cut, high[:, channel], column)
        parts.append(weights * column)
        what = "query" if of_keys else "key"
        labels += [
            f"{what} {at}{f' of head {one}' if len(heads) > 1 else ''}: {w:g} x {c:g}"
            for at, (w, c) in enumerate(zip(weights, column, strict=True))
        ]
        sources += [(one, at) for at in range(len(weights))]
    every = np.concatenate(parts) if parts else np.zeros(0)
    factor, more, end = _epilogue(of, product, document, token, head)
    every = every * factor
    terms, total = largest(every, lambda at: labels[at])
    order = np.argsort(-np.nan_to_num(np.abs(every), nan=np.inf), kind="stable")
    parents: tuple[tuple[str, Index], ...] = ()
    if len(order):
        one, at = sources[int(order[0])]
        pair_index = (one, at, row) if of_keys else (one, row, at)
        start = of.rows(tensor, document).start
        other = one if tensor in ("q", "do") else of.kv_head(one)
        parents = (
            (f"{left.codes}.{document}", pair_index),
            _operand(of, right, (start + at, other, channel)),
        )
    chosen = getattr(of.recipe, product)
    return Lineage(
        how=f"{_PRODUCTS[product]} by {chosen.instruction}, tiles {chosen.tile_order.value.replace('_', ' ')}{end}",
        part=f"{product}.instruction",
        parents=(*parents, *more),
        terms=terms,
        count=len(every),
        total=total,
    )


def _epilogue(
    of: Elements, product: str, document: int, token: int, head: int
) -> tuple[float, tuple[tuple[str, Index], ...], str]:
    """What a product is multiplied by at the end."""
    if product == "o":
        total = of.value("row_sum", (head, token))
        return (
            (1 / total if total else 0.0),
            (("row_sum", (head, token)),),
            ", over the row sum",
        )
    if product == "dv" or of.recipe.backward.gradient.softmax_scale != "epilogue":
        return 1.0, (), ", to bfloat16"
    return of.spec.softmax_scale, (), ", times the softmax scale, to bfloat16"
