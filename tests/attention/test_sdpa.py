"""float64 attention against PyTorch's on the CPU: masks, alignments, windows, grouped heads, and its own gradients."""

import itertools
import math

import numpy as np
import pytest

from flamia_ref.attention import float64
from flamia_ref.packing import Mask
from tests.attention.masks import DOCUMENTS, MASKS, PAIRS, offsets, packed, visible

torch = pytest.importorskip("torch")
sdpa = torch.nn.functional.scaled_dot_product_attention

HEAD_DIM, V_HEAD_DIM = 16, 24
GROUPS = {"multi-head": (3, 3), "grouped": (6, 2), "multi-query": (4, 1)}
SINK = np.float32([0.5, -np.inf, 3.0, -2.0, 20.0, 0.0])


def inputs(heads: int, kv_heads: int, documents=DOCUMENTS):
    """q, k, v and dout in float64."""
    rng = np.random.default_rng(0)
    tokens, keys = (sum(column) for column in zip(*documents, strict=True))
    shapes = (
        (tokens, heads, HEAD_DIM),
        (keys, kv_heads, HEAD_DIM),
        (keys, kv_heads, V_HEAD_DIM),
        (tokens, heads, V_HEAD_DIM),
    )
    return [rng.standard_normal(shape) * 1.5 for shape in shapes]


def by_torch(q, k, v, dout, documents, attention):
    """out and gradients, `attention(q, k, v, document)` of each document on [1, heads, tokens, channels]."""
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    parts, start, first = [], 0, 0
    for document, (queries, keys) in enumerate(documents):
        rows, columns = slice(start, start + queries), slice(first, first + keys)
        start, first = start + queries, first + keys
        given = [
            x[part].movedim(0, 1)[None]
            for x, part in zip(tensors, (rows, columns, columns), strict=True)
        ]
        if queries and keys:
            parts.append(attention(*given, document)[0].movedim(1, 0))
        else:
            parts.append(torch.zeros((queries, *dout.shape[1:]), dtype=torch.float64))
    out = torch.cat(parts)
    out.backward(torch.tensor(dout))
    return [x.detach().numpy() for x in (out, *(x.grad for x in tensors))]


def compare(found, expected) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() < 1e-12 * np.abs(b).max(), name


def run(given, documents=DOCUMENTS, **options):
    """out, dq, dk and dv of this package."""
    lengths = zip(*documents, strict=True)
    keywords = dict(zip(("cu_seqlens", "cu_seqlens_k"), map(offsets, lengths), strict=True))
    out = float64.forward(*given[:3], **keywords, **options).out
    return [out, *float64.backward(*given, **keywords, **options)[:3]]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_written_out(mask: str, groups: str) -> None:
    given, settings = inputs(*GROUPS[groups]), MASKS[mask]

    def attention(q, k, v, document):
        seen = torch.tensor(visible(*DOCUMENTS[document], **settings))
        return sdpa(q, k, v, attn_mask=seen, enable_gqa=True)

    compare(run(given, **settings), by_torch(*given, DOCUMENTS, attention))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_masks_of_torch(alignment: str) -> None:
    from torch.nn.attention import bias

    given = inputs(6, 2)
    corner = {"top_left": bias.causal_upper_left, "bottom_right": bias.causal_lower_right}

    def attention(q, k, v, document):
        seen = corner[alignment](*DOCUMENTS[document])
        return sdpa(q, k, v, attn_mask=seen, enable_gqa=True, scale=0.2)

    expected = by_torch(*given, DOCUMENTS, attention)
    compare(run(given, alignment=alignment, softmax_scale=0.2), expected)


def test_no_mask_and_the_causal_flag_of_torch() -> None:
    given = inputs(6, 2)
    for causal in (True, False):
        expected = by_torch(
            *given,
            DOCUMENTS,
            lambda q, k, v, _, causal=causal: sdpa(q, k, v, is_causal=causal, enable_gqa=True),
        )
        compare(run(given, causal=causal, alignment="top_left"), expected)


def test_a_sink_is_one_more_key_with_a_value_of_zero() -> None:
    given, settings = inputs(6, 2), MASKS["window, bottom-right"]
    logits = torch.tensor(SINK.astype(np.float64), requires_grad=True)

    def attention(q, k, v, document):
        queries, keys = DOCUMENTS[document]
        seen = torch.tensor(visible(queries, keys, **settings))
        mask = torch.where(seen, 0.0, -math.inf).double().expand(6, queries, keys)
        mask = torch.cat([logits[:, None, None].expand(6, queries, 1), mask], dim=2)
        k, v = (torch.cat([torch.zeros_like(x[:, :, :1]), x], dim=2) for x in (k, v))
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    compare(run(given, sink=SINK, **settings), by_torch(*given, DOCUMENTS, attention))
    lengths = [offsets(column) for column in zip(*DOCUMENTS, strict=True)]
    found = float64.backward(
        *given, cu_seqlens=lengths[0], cu_seqlens_k=lengths[1], sink=SINK, **settings
    )
    assert np.abs(found.dsink - logits.grad.numpy()).max() < 1e-12 * np.abs(found.dsink).max()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_a_soft_cap_as_a_score_modification() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this version gives no lse")
    given, settings = inputs(6, 2), MASKS["window, bottom-right"]
    q, k, v, _ = given
    lengths = [packed(column) for column in zip(*DOCUMENTS, strict=True)]
    keywords = {"cu_seqlens": offsets([a for a, _ in DOCUMENTS])}
    keywords["cu_seqlens_k"] = offsets([b for _, b in DOCUMENTS])
    found = float64.forward(q, k, v, softcap=1.5, **keywords, **settings)
    for document, (rows, columns) in enumerate(zip(*lengths, strict=True)):
        if rows.start == rows.stop or columns.start == columns.stop:
            continue
        seen = torch.tensor(visible(*DOCUMENTS[document], **settings))
        alive = seen.any(dim=1).numpy()

        def score(s, batch, head, i, j, seen=seen):
            return torch.where(seen[i, j], 1.5 * torch.tanh(s / 1.5), -math.inf)

        arrays = [
            torch.tensor(x[part]).movedim(0, 1)[None]
            for x, part in ((q, rows), (k, columns), (v, columns))
        ]
        out, rest = flex.flex_attention(
            *arrays, score_mod=score, enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
        )
        pairs = (
            (found.out[rows][alive], out[0].movedim(1, 0).numpy()[alive]),
            (found.lse[:, rows][:, alive], rest.lse[0].numpy()[:, alive]),
        )
        for a, b in pairs:
            assert np.abs(a - b).max() < 1e-12 * np.abs(b).max()


WRONG = {
    "left side of the window off by one": lambda window: (window[0] + 1, window[1]),
    "right side of the window off by one": lambda window: (window[0], window[1] + 1),
    "sides of the window swapped": lambda window: window[::-1],
}


@pytest.mark.parametrize("what", [*WRONG, "alignment swapped", "a key too few"])
def test_a_wrong_mask_is_seen(what: str, monkeypatch) -> None:
    given, settings = inputs(6, 2), MASKS["window, bottom-right"]

    def attention(q, k, v, document):
        seen = torch.tensor(visible(*DOCUMENTS[document], **settings))
        return sdpa(q, k, v, attn_mask=seen, enable_gqa=True)

    expected = by_torch(*given, DOCUMENTS, attention)
    compare(run(given, **settings), expected)
    right = Mask.bounds

    def wrong(self, document, place):
        if what in WRONG:
            self = Mask(self.queries, self.keys, self.causal, WRONG[what](self.window))
        elif what == "alignment swapped":
            self = Mask(self.queries, self.keys, self.causal, self.window, "top_left")
        first, last = right(self, document, place)
        if what == "a key too few":
            last = np.where(last > first, last - 1, last).astype(np.int32)
        return first, last

    monkeypatch.setattr(Mask, "bounds", wrong)
    with pytest.raises(AssertionError, match="out"):
        compare(run(given, **settings), expected)


def test_the_pairs_written_out_are_those_of_the_mask() -> None:
    for settings, (queries, keys) in itertools.product(MASKS.values(), PAIRS):
        mask = Mask.of(packed([queries]), packed([keys]), **settings)
        assert (mask.visible(0) == visible(queries, keys, **settings)).all()
