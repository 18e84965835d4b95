"""docs/quality.md is what docs/quality.py makes of the results in docs/evidence, and what it makes is right."""

import importlib.util
import json
import re
from copy import deepcopy

import pytest

from tests.repository.layout import ROOT

PAGE = ROOT / "docs" / "quality.md"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("quality_page", ROOT / "docs" / "quality.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss(nll, difference):
    mean = {"mean": nll, "low": nll - 0.1, "high": nll + 0.1}
    return {
        "date": "2026-11-30",
        "flamia-ref": "0.1.0",
        "seconds": 12.4,
        "cpu_seconds": 20.1,
        "document_nll": [nll, nll],
        "nll": mean,
        "perplexity": 9.78,
        "difference": {"mean": difference, "low": difference - 0.001, "high": difference + 0.001},
    }


GROUP = {"relative": [0.5, 0.25, 0.125], "cosine": [0.9, 0.95, 0.875]}
ONE = {"relative": [0.0625], "cosine": [0.999]}
GROUPS = {
    **dict.fromkeys(("dq", "dk", "dv", "dout"), GROUP),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norms"), GROUP),
    "embedding": ONE,
    "all parameters": ONE,
}
RESULTS = {
    "device": "CPU, 2 cores",
    "versions": {"torch": "2.13.0"},
    "text": {"from": "Django==5.2.8 of PyPI"},
    "perplexity": {
        "documents": {"documents": 2, "length": 8, "tokens": 16, "sha256_of_tokens": "ab" * 32},
        "intervals": {"level": 0.95},
        "attentions": {
            "mine": {
                "date": "2026-11-30",
                "flamia-ref": "0.1.0",
                "seconds": 1.0,
                "cpu_seconds": 2.0,
                "documents_without_a_loss": 2,
            },
            "cudnn-mxfp8": loss(2.3, 0.02),
            "bf16-fa4": loss(2.28, 0.0),
            "transformers-sdpa": loss(2.2802, 0.0),
            "transformers-eager": loss(2.2801, 0.0),
            "float32": loss(2.28, 0.0),
        },
    },
    "gradients": {
        "documents": {"documents": 2, "length": 8},
        "attentions": {
            "float32": {"loss": 2.0, "seconds": 3.0, "cpu_seconds": 6.0},
            "sage": {"left_out": "left out, it has no backward"},
            "bf16-fa4": {"loss": 2.0, "seconds": 3.0, "cpu_seconds": 6.0, "groups": GROUPS},
        },
    },
}


def test_the_page_is_up_to_date(made):
    assert PAGE.read_text(encoding="utf-8") == made.page(made.read()), "run python docs/quality.py"


def test_rows_are_in_the_order_of_the_registry(made):
    names = [name for name, _ in made.in_order(RESULTS["perplexity"]["attentions"])]
    assert names == [
        *("float32", "transformers-eager", "transformers-sdpa"),
        *("bf16-fa4", "cudnn-mxfp8", "mine"),
    ]


def test_rows_hold_the_figures(made):
    page = made.page([RESULTS])
    for row in (
        "| `float32` | 2.2800 [2.1800, 2.3800] | 9.780 | - | - | 12 | 20 |",
        "| `cudnn-mxfp8` | 2.3000 [2.2000, 2.4000] | 9.780 | +0.02000 [+0.01900, +0.02100] | 0% | 12 | 20 |",
        "| `mine` | NaN or infinite in 2 documents | - | - | - | 1 | 2 |",
        "- `transformers-sdpa`: 0.0002 nats",
        "| `bf16-fa4` |" + " 0.25 [0.5] |" * 10 + " 0.062 | 0.062 | 100% | 3 | 6 |",
        "| `bf16-fa4` |" + " 0.87500 |" * 10 + " 0.99900 | 0.99900 |",
    ):
        assert f"{row}\n" in page, row


def test_recipes_without_a_row_are_named_with_the_reason(made):
    page = made.page([RESULTS])
    (alone,) = re.findall(r"^Forward only, so without gradients: (.*)\.$", page, re.M)
    assert {"`cutlass-fp8`", "`sage3-nvfp4`", "`sage`"} <= set(alone.split(", "))
    assert "`cudnn-mxfp8`" not in alone
    losses, gradients = re.findall(
        r"^Not run on this device, so not in the table: (.*)\.$", page, re.M
    )
    assert {"`cutlass-fp8`", "`flamia-mxfp8`"} <= set(losses.split(", "))
    assert {"`cudnn-mxfp8`", "`flamia-mxfp8`"} <= set(gradients.split(", "))
    assert not {"`cutlass-fp8`", "`bf16-fa4`"} & set(gradients.split(", "))
    assert "smollm2 gradients --device cpu --missing --json FILE`" in page
    some = {name: one for name, one in RESULTS.items() if name != "gradients"}
    assert made.page([some]).endswith("### Gradients of one step\n\nNot run on this device.\n")


def test_the_share_of_work_is_that_of_documents_of_this_length(made):
    # 512 tokens are 16 blocks: 16 of the 136 that are seen are on the diagonal. dV and dK are not guarded.
    assert made.share("flamia-mxfp8", 512, made.FORWARD) == pytest.approx(16 / 136)
    assert made.share("flamia-mxfp8", 512, made.BOTH) == pytest.approx(16 / 136 * 4 / 6)
    assert made.share("flamia-mxfp8", 8192, made.FORWARD) == pytest.approx(256 / (256 * 257 / 2))
    assert made.work("flamia-mxfp8", 512, made.FORWARD) == "12%"
    assert made.work("flamia-mxfp8", 512, made.BOTH) == "7.8%"
    assert made.work("cudnn-mxfp8-pv-bf16", 512, made.FORWARD) == "50%"
    assert made.work("transformers-sdpa", 512, made.FORWARD) == "-"
    assert made.guarded(512) == "12% of the forward of `flamia-mxfp8` at 512 tokens, 0.78% at 8192"


def test_a_gradient_that_is_no_number_shows(made):
    assert made.middle_and_most({"relative": [0.5, None]}) == "NaN in 1 layers"
    assert made.least_cosine({"cosine": [0.5, None]}) == "NaN"


def test_float32_attention_off_transformers_is_an_error(made):
    wrong = deepcopy(RESULTS)
    wrong["perplexity"]["attentions"]["float32"]["document_nll"][1] += 0.0015
    with pytest.raises(
        ValueError, match=r"transformers-eager differs from float32 by 0\.0014 nats"
    ):
        made.page([wrong])


def test_results_name_the_pinned_files():
    from examples.smollm2 import sources

    for path in (ROOT / "docs" / "evidence").glob("quality-*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert data["weights"]["sha256"] == sources.WEIGHTS.sha256
        assert data["text"]["sha256"] == sources.TEXT.sha256
        assert data["perplexity"]["attentions"]["float32"]["document_nll"]
