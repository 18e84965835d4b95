"""`attention.error`: figures against plain numpy, rows of a sample against the whole, what it refuses."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref._errors import InputRounded
from flamia_ref.attention import RECIPES, float64, samples
from flamia_ref.attention.measures import traced
from tests.attention.masks import PLAIN

LENGTHS = (150, 1, 45)
SINK = np.float32([1.5, -0.25])
OTHER = {"causal": False, "window": (40, 10), "softcap": 5.0, "sink": SINK}

DAILY = ("flamia-mxfp8", "sage3-nvfp4")
EVERY = [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in RECIPES]


@pytest.fixture(scope="module")
def sample():
    return samples.bell(LENGTHS, 2, 1, 64)


def offsets(sample):
    return np.array(sample.documents.offsets, dtype=np.int32)


def measured(sample, recipe, *, v=None, **options):
    v = sample.v if v is None else v
    return attention.error(
        sample.q, sample.k, v, recipe, cu_seqlens=offsets(sample), **(PLAIN | options)
    )


@functools.cache
def both(name):
    """The error of a recipe on the sample, and its traced run."""
    sample = samples.bell(LENGTHS, 2, 1, 64)
    found = measured(sample, name, dout=sample.dout)
    return found, traced(RECIPES[name], sample, causal=True) if found.ds_sums is not None else None


def norm(x, y):
    x, y = (np.asarray(a, dtype=np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


@pytest.mark.parametrize("name", EVERY)
def test_relative_errors_are_those_of_the_passes(sample, name):
    recipe, (found, run) = RECIPES[name], both(name)
    options = {"cu_seqlens": offsets(sample)}
    ahead = run and run.forward
    if ahead is None:
        ahead = attention.forward(sample.q, sample.k, sample.v, recipe, **options)
    exact = float64.forward(sample.q, sample.k, sample.v, **options)
    lse = exact.lse
    if name == "sage3-nvfp4":  # less softmax_scale q . mean k, as its text says
        k = sample.k.astype(np.float64)[:, 0]
        mean = np.concatenate(
            [np.repeat(k[d].mean(0)[None], len(k[d]), 0) for d in sample.documents]
        )
        lse = lse - np.einsum("thc,tc->ht", sample.q.astype(np.float64), mean) / 8
    wanted = {"out": norm(ahead.out, exact.out), "lse": norm(ahead.lse, lse)}
    if recipe.has_backward:
        other = float64.backward(sample.q, sample.k, sample.v, sample.dout, **options)
        for one in ("dq", "dk", "dv"):
            wanted[one] = norm(getattr(run.backward, one), getattr(other, one))
    assert dict(found.relative_l2) == pytest.approx(wanted, rel=1e-12)
    assert list(found.results) == list(wanted)
    assert (found.ds_sums is not None) == recipe.has_backward


@pytest.mark.parametrize("name", EVERY)
def test_the_mass_of_p_is_what_o_has_of_equal_values(sample, name):
    """With the same value everywhere in v, one that every format has, O is that times the sum of P over l."""
    v = np.full_like(sample.v, 6)
    lost = measured(sample, name, v=v).mass_lost
    options = {"cu_seqlens": offsets(sample), "trace": ("o", "p.o.codes", "row_sum")}
    trace = attention.forward(sample.q, sample.k, v, name, **options).trace
    kept = trace["o"][:, :, 0].T.astype(np.float64) / 6
    if (
        name == "fp8-fa3"
    ):  # its products keep 13 bits; a document here has one key tile, and so one base
        codes = (x.view(ml_dtypes.float8_e4m3fn) for x in trace["p.o.codes"])
        sums = [x.astype(np.float64).sum(axis=2) for x in codes]
        kept = np.concatenate(sums, axis=1) / trace["row_sum"]
    assert np.abs(1 - lost - kept).max() < 3e-6
    assert np.abs(lost).max() > 1e-4


def test_the_mass_of_p_beside_a_sink_a_window_and_a_soft_cap(sample):
    v = np.full_like(sample.v, 6)
    found = measured(sample, "flamia-mxfp8-folded", v=v, **OTHER)
    options = {"cu_seqlens": offsets(sample), "trace": ("o",), **OTHER}
    ahead = attention.forward(sample.q, sample.k, v, "flamia-mxfp8-folded", **options)
    kept = ahead.trace["o"][:, :, 0].T.astype(np.float64) / 6
    of_sink = np.exp(SINK[:, None].astype(np.float64) - ahead.lse)
    assert np.abs(1 - of_sink - kept - found.mass_lost).max() < 3e-6


@pytest.mark.parametrize("name", EVERY)
def test_the_sums_of_ds_are_those_of_its_trace(sample, name):
    if not RECIPES[name].has_backward:
        pytest.skip("the recipe has no backward")
    found, run = both(name)
    found = found.ds_sums
    for index, document in enumerate(sample.documents):
        ds = run.backward.trace["ds"][index].astype(np.float64)
        sums, sizes = ds.sum(axis=2), np.abs(ds).sum(axis=2)
        assert np.isnan(found[:, document.start]).all()  # it sees itself alone
        mine = found[:, document.start + 1 : document.stop]
        assert mine == pytest.approx(sums[:, 1:] / sizes[:, 1:], abs=1e-12)


@pytest.mark.parametrize(
    "name", ["flamia-mxfp8", pytest.param("bf16-fa4", marks=pytest.mark.nightly)]
)
def test_a_sample_of_queries_has_the_rows_of_the_whole(sample, name):
    queries = [149, 3, 130, 131, 150, 3]
    whole = measured(sample, name, positions=range(150), **OTHER)
    some = measured(sample, name, positions=range(150), queries=queries, **OTHER)
    rows = sorted(set(queries))
    assert some.queries.tolist() == rows
    assert (some.mass_lost == whole.mass_lost[:, rows]).all()
    for result in ("out", "lse"):
        for place, document in ((3, 0), (131, 0), (149, 0), (0, 1)):
            cell = (document, slice(None), place)
            for figure in ("elements", "noise", "signal", "largest"):
                one, other = (getattr(x.results[result][cell], figure) for x in (some, whole))
                assert other == pytest.approx(one, rel=1e-9), (result, figure)
    assert some.results["out"].over().rows == len(rows) * 2


def test_buckets_of_positions(sample):
    found = measured(sample, "bf16-fa4")
    assert found.positions == (0, 32, 64, 128)
    assert found.results["out"].rows[:, 0].tolist() == [
        [32, 32, 64, 22],
        [1, 0, 0, 0],
        [32, 13, 0, 0],
    ]
    finer = measured(sample, "bf16-fa4", positions=[0, 100]).results["out"]
    assert finer.rows[:, 1].tolist() == [[100, 50], [1, 0], [45, 0]]
    assert finer.over().noise == pytest.approx(found.results["out"].over().noise, rel=1e-12)


def test_keys_of_their_own(sample):
    keys = samples.bell((45, 0, 150), 2, 1, 64)
    found = attention.error(
        sample.q,
        keys.k,
        keys.v,
        "cudnn-mxfp8",
        dout=sample.dout,
        cu_seqlens=offsets(sample),
        cu_seqlens_k=offsets(keys),
    )
    assert (found.lengths, found.key_lengths) == (LENGTHS, (45, 0, 150))
    assert found.results["dk"].rows.sum() == 195
    assert np.isnan(found.mass_lost[:, 150]).all()  # no key, and nothing to lose
    assert found.mass_lost.shape == found.ds_sums.shape == (2, 196)


def test_inputs_are_rounded_before_both(sample):
    q = sample.q.astype(np.float32) * np.float32(1 + 2.0**-12)
    with pytest.warns(InputRounded):
        found = attention.error(
            q, *(x.astype(np.float32) for x in (sample.k, sample.v)), "bf16-fa4"
        )
    assert (
        found.relative_l2["out"]
        == attention.error(q.astype(sample.q.dtype), sample.k, sample.v, "bf16-fa4").relative_l2[
            "out"
        ]
    )


def test_text_and_json():
    found, _ = both("flamia-mxfp8")
    text = str(found)
    assert text.startswith("recipe flamia-mxfp8: evidence assumed; 196 tokens in 3 documents")
    assert [line.split()[0] for line in text.splitlines()[2:]] == [
        *("out", "lse", "dq", "dk", "dv", "P", "sums")
    ]
    document = json.loads(found.to_json())
    assert document["schema"] == "flamia-ref attention error"
    assert document["results"]["dq"]["all"]["relative_l2"] == found.relative_l2["dq"]
    assert len(document["results"]["out"]["heads"]) == 2
    assert len(document["results"]["dk"]["heads"]) == 1
    assert len(document["results"]["out"]["positions"]) == len(document["positions"]) == 4
    assert document["attribution"] is None
    first = document["results"]["out"]["positions"][1]["relative_l2"]
    assert first == found.results["out"].over("documents", "heads")[1].relative_l2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": [0], "dout": True}, "queries is given with dout"),
        ({"queries": [0], "attribution": True}, "queries is given with attribution"),
        ({"queries": [196]}, "queries are from 196 to 196; there are 0 to 195"),
        ({"queries": []}, "it must be whole numbers"),
        ({"queries": [0.5]}, "it must be whole numbers"),
        ({"positions": [1, 2]}, "ascending from 0"),
        ({"positions": [0, 2, 2]}, "ascending from 0"),
        ({"dout": np.zeros((3, 2, 64), dtype=np.float32)}, "dout has shape"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
        ({"sink": np.float32([0, np.nan])}, "a logit is finite, or -inf"),
    ],
)
def test_what_is_refused(sample, options, message):
    if options.get("dout") is True:
        options = options | {"dout": sample.dout}
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        measured(sample, "bf16-fa4", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3.4e38])  # the last is infinite in bfloat16
@pytest.mark.filterwarnings("ignore::flamia_ref._errors.InputRounded")
def test_inputs_without_an_error_are_refused(name, value):
    arrays = {x: np.ones((3, 1, 32), np.float32) for x in ("q", "k", "v", "dout")}
    arrays[name][1, 0, 2:4] = value
    with pytest.raises(ValueError, match=f"^{name} has 2 of 96 elements that are NaN or infinite"):
        attention.error(**arrays, recipe="fp8-fa4")


def test_no_tokens_are_refused_and_no_keys_are_no_error_of_0():
    x = np.ones((3, 1, 32), np.float32)
    with pytest.raises(ValueError, match="q has no tokens; there is no error to measure"):
        attention.error(x[:0], x[:0], x[:0], "bf16-fa4")
    found = attention.error(
        x,
        x[:0],
        x[:0],
        "bf16-fa4",
        dout=x,
        cu_seqlens=[0, 3],
        cu_seqlens_k=[0, 0],
        attribution=True,
    )
    lines = {line.split()[0]: line for line in str(found).splitlines()}
    for name in ("lse", "dk", "dv", "P", "sums"):
        assert "nothing to measure" in lines[name]
        assert "0" not in lines[name].replace("float64", "")
    assert found.relative_l2["out"] == 0
    assert np.isnan([found.relative_l2["lse"], found.total["lse"].largest]).all()
    assert json.loads(found.to_json())["mass_lost"]["mean"] == "nan"


def test_lost_elements_are_in_every_form():
    """Scores beyond float32 from the second token on: there bf16-fa4 gives NaN and float64 attention numbers."""
    x = np.ones((3, 1, 32), np.float32)
    x[1:, 0, 0] = 2.0**80
    found = attention.error(
        x, x, np.ones_like(x), "bf16-fa4", dout=np.ones_like(x), attribution=True
    )
    text = str(found).splitlines()
    document = json.loads(found.to_json())
    for line, name, count in zip(text[2:4], ("out", "lse"), ("64 of 96", "2 of 3"), strict=True):
        assert line.startswith(name)
        assert line.endswith(f"lost {count}")
        assert found.relative_l2[name] == np.inf
        assert document["results"][name]["all"]["relative_l2"] == "inf"
        assert document["results"][name]["all"]["lost"] == int(count.split()[0])
    assert found.attribution.total["out"] == found.attribution.arithmetic["out"] == np.inf
    assert document["attribution"]["total"]["out"] == "inf"
    assert text[-1] == "inf: elements of that result are lost, NaN or infinite in place of a number"
    assert any(line.endswith("lost 2 of 3 rows") for line in text)
    assert document["mass_lost"]["lost"] == 2
    assert document["mass_lost"]["mean"] == "nan"


@pytest.mark.nightly
def test_a_long_document_takes_little_memory():
    """Pairs of 8192 tokens in float64 alone would be half a GB."""
    import tracemalloc

    long = samples.bell((8192,), 1, 1, 64)
    tracemalloc.start()
    found = attention.error(long.q, long.k, long.v, "cudnn-mxfp8", queries=np.arange(8160, 8192))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e8
    assert 0.03 < found.relative_l2["out"] < 0.2
