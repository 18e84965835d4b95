"""Cases with NaN and infinity in data, and where the mask hides them."""

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.suites.synthetic import INFINITY, NAN, box, synthetic

POISON: tuple[CaseSpec, ...] = (
    synthetic(
        "nan-next-document",
        "33 tokens before a document of NaN: a tile of the first holds rows of the second, and zero "
        "times NaN is NaN; all results of the first are finite",
        lengths=(33, 31),
        seed=81,
        fills=tuple(box(tensor, NAN, tokens=(33, 64)) for tensor in ("q", "k", "v", "dout")),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "infinity-previous-document",
        "infinity in K and V of the document before",
        lengths=(31, 40),
        seed=82,
        fills=tuple(box(tensor, INFINITY, tokens=(30, 31)) for tensor in ("k", "v")),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "nan-in-future-key",
        "NaN in K of the last token, which no earlier query sees: out and lse of the rows before are "
        "finite where no scale is shared with the future",
        lengths=(40,),
        seed=83,
        fills=(box("k", NAN, tokens=(39, 40), channels=(5, 6)),),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "infinity-in-future-value",
        "infinity in V of the last token, times weights that are zero by the mask: out, lse and dQ of the "
        "rows before are finite where no scale is shared with the future",
        lengths=(40,),
        seed=84,
        fills=(box("v", INFINITY, tokens=(39, 40), channels=(5, 6)),),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "nan-outside-window",
        "NaN in V of the first token, which a window of three hides from all rows but four; a recipe "
        "that multiplies masked pairs has zero times NaN in the others",
        lengths=(40,),
        seed=85,
        window=(3, 0),
        fills=(box("v", NAN, tokens=(0, 1), channels=(5, 6)),),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "nan-unseen-keys",
        "NaN in keys that no query sees, behind those of its document, in the same tile: more keys than "
        "queries, aligned at the top left",
        lengths=(5,),
        key_lengths=(33,),
        alignment="top_left",
        seed=86,
        fills=tuple(box(tensor, NAN, tokens=(5, 33)) for tensor in ("k", "v")),
        flags=("nan", "masked-poison"),
    ),
    synthetic(
        "nan-gradient",
        "NaN in the gradient of one token: out and lse are finite, and so is dQ of the other tokens",
        lengths=(40,),
        seed=87,
        fills=(box("dout", NAN, tokens=(20, 21), channels=(0, 1)),),
        flags=("nan",),
    ),
)
