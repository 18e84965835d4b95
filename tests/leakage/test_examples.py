"""examples/leakage: what its kernels compute, where they leak, and what the program that runs them writes."""

import json
import math
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax")

from examples.leakage import kernels, run
from examples.leakage.packed import needed, visible
from flamia_ref import _backend
from flamia_ref.attention import backward, float64, forward
from flamia_ref.leakage import hunt, prove
from tests.repository.layout import ROOT

BF16 = np.dtype(ml_dtypes.bfloat16)
PACK = {"cu_seqlens": np.array([0, 150, 150, 151, 200], dtype=np.int32), "causal": True}
FP8 = ("flash_fp8_leaky", "flash_fp8_leaky_128", "flash_fp8_repaired")
HERE = [name for name, example in kernels.KERNELS.items() if not kernels.missing(example)]


def inputs(tokens: int = 200, heads: int = 2, kv_heads: int = 1, channels: int = 32):
    rng = np.random.default_rng(1)
    shapes = [(tokens, count, channels) for count in (heads, kv_heads, kv_heads, heads)]
    return [rng.standard_normal(shape).astype(BF16) for shape in shapes]


def values(x) -> np.ndarray:
    x = np.asarray(x)
    return (x.view(BF16) if x.dtype == np.uint16 else x).astype(np.float64)


def off(found, wanted) -> float:
    """The relative L2 distance."""
    wanted = np.asarray(wanted, dtype=np.float64)
    return float(np.linalg.norm(values(found) - wanted) / np.linalg.norm(wanted))


def called(name, q, k, v, dout, **settings):
    example = kernels.KERNELS[name]
    gradient = {"dout": dout} if example.backward else {}
    return example.kernel(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **settings, **gradient)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", HERE)
def test_a_kernel_computes_attention(name: str, causal: bool) -> None:
    q, k, v, dout = inputs()
    settings = PACK | {"causal": causal}
    exact = float64.forward(q, k, v, **settings)
    slopes = float64.backward(q, k, v, dout, **settings)
    found = called(name, q, k, v, dout, **settings)
    # bfloat16 has 8 significant bits, e4m3 has 4, and two of them meet in a product.
    allowed = 0.08 if "fp8" in name else 0.01
    assert set(found) >= (
        {"out", "dq", "dk", "dv"} if kernels.KERNELS[name].backward else {"out", "lse"}
    )
    for output in found:
        wanted = getattr(exact if output in ("out", "lse") else slopes, output)
        assert off(found[output], wanted) < allowed, output


def test_the_reference_computes_what_the_recipe_of_the_kernels_does() -> None:
    # The same blocks, fixed scales and uses; other sums and exponentials, and the softmax scale before dS is quantized:
    # with 64 channels it is a power of two, which moves no code.
    q, k, v, dout = inputs(channels=64)
    first = forward(q, k, v, "cudnn-mxfp8", **PACK)
    second = backward(q, k, v, dout, first)
    found = called("cudnn_mxfp8_reference", q, k, v, dout, **PACK)
    assert off(found["lse"], first.lse) < 1e-5
    assert off(found["out"], first.out) < 1e-3
    assert off(found["dv"], second.dv) < 1e-3
    assert off(found["dq"], second.dq) < 0.02
    assert off(found["dk"], second.dk) < 0.02


def two_scores(tokens: int, last: float, v_token: int, dout_token: int):
    """Every key has the score 0 but the last, which has `last`: 8 bits of it, as two values of 4."""
    q, k, v, dout = (np.zeros((tokens, 1, 32), BF16) for _ in range(4))
    q[:, 0, :2] = 1
    k[-1, 0, :2] = np.floor(last), last - np.floor(last)
    v[v_token], dout[dout_token] = 1, 1
    settings = {"cu_seqlens": [0, tokens], "causal": True, "softmax_scale": 1}
    found = kernels.cudnn_mxfp8_reference(q, k, v, dout=dout, **settings)
    return {name: values(x)[..., 0] for name, x in found.items()}


def test_the_fixed_scales_of_p_in_the_reference() -> None:
    """P times 16 in the forward, times 256 in the backward: what is below 2^-10 then is 0, half of e4m3's smallest."""
    assert 16 * math.exp(-9.75) < 2.0**-10 < 16 * math.exp(-9.625)
    assert two_scores(2, 9.75, 0, 1)["out"][1] == 0
    assert two_scores(2, 9.625, 0, 1)["out"][1] == pytest.approx(2.0**-9 / 16, rel=2.0**-8)
    assert 256 * math.exp(-12.5) < 2.0**-10 < 256 * math.exp(-12.375)
    assert two_scores(2, 12.5, 0, 1)["dv"][0] == 0
    assert two_scores(2, 12.375, 0, 1)["dv"][0] == pytest.approx(2.0**-9 / 256, rel=2.0**-8)


def test_the_threshold_of_the_reference_is_of_natural_scores_and_lets_p_saturate() -> None:
    """A second tile whose maximum is larger by no more than 4 keeps the base: 16 P = 16 e^3.5 = 530 becomes 448."""
    kept = two_scores(129, 3.5, 128, 0)["out"][128]
    assert kept == pytest.approx((448 / 16) / (128 + math.exp(3.5)), rel=2.0**-8)
    replaced = two_scores(129, 4.5, 128, 0)["out"][128]
    assert replaced == pytest.approx(1 / (1 + 128 * math.exp(-4.5)), rel=2.0**-8)


@pytest.mark.parametrize(
    "name",
    [
        "flash_fp8_repaired",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("cudnn_mxfp8_reference", "flash_fp8_leaky", "flash_fp8_leaky_128")
        ),
    ],
)
def test_numpy_and_jax_are_one_source(name: str) -> None:
    tensors = inputs(tokens=40)
    settings = {"cu_seqlens": [0, 40], "causal": True}

    def run_in_jax(*tensors):
        return called(name, *tensors, **settings)

    ours, theirs = run_in_jax(*tensors), _backend.jit(run_in_jax)(*tensors)
    for output, x in ours.items():
        assert isinstance(x, np.ndarray)
        # Their exponentials differ in the last place, and that can move a code of P, rarely.
        assert off(theirs[output], values(x)) < 1e-4


@pytest.mark.parametrize(
    ("name", "block"), [("cudnn_mxfp8_reference", 32), ("flash_fp8_leaky", 64)]
)
def test_the_public_witness(name: str, block: int) -> None:
    """q = k = 1, v[0] = 2^-20: rows before a token of 1 in the same block become 0, none moves for the next block."""
    tokens = 128
    q = np.ones((tokens, 1, 32), BF16)
    v = np.zeros_like(q)
    v[0] = 2.0**-20
    rows = {}
    for token in (None, block // 2, block):
        changed = v.copy()
        if token is not None:
            changed[token] = 1
        found = called(name, q, q, changed, q, cu_seqlens=[0, tokens], causal=True)
        rows[token] = values(found["out"])[: block // 2 - 1, 0]
    means = np.array([2.0**-20 / (row + 1) for row in range(block // 2 - 1)])
    # All keys weigh alike. v is a power of two, so quantizing it rounds nothing but in the scale of float32.
    assert np.allclose(rows[None], means[:, None], rtol=2.0**-7, atol=0)
    assert (rows[block // 2] == 0).all()
    assert (rows[block] == rows[None]).all()


def test_the_repaired_kernel_keeps_what_the_public_witness_takes() -> None:
    q = np.ones((64, 1, 32), BF16)
    v = np.zeros_like(q)
    v[0] = 2.0**-20
    for value in (0, 1):
        v[16] = value
        found = values(
            called("flash_fp8_repaired", q, q, v, q, cu_seqlens=[0, 64], causal=True)["out"]
        )
        assert (found[7] == 2.0**-23).all()  # the mean of eight tokens


def pairs(certificate, tokens: int) -> dict[tuple[str, str], np.ndarray]:
    found: dict[tuple[str, str], np.ndarray] = {}
    for output, out_token, source, in_token in certificate.illegal:
        matrix = found.setdefault((output, source), np.zeros((tokens, tokens), dtype=bool))
        matrix[out_token, in_token] = True
    return found


def later(tokens: int, block: int) -> np.ndarray:
    """Pairs of an output's token and a later one of its block."""
    token = np.arange(tokens)
    return (token[:, None] // block == token // block) & (token > token[:, None])


def test_where_the_reference_leaks() -> None:
    """v and k along tokens reach earlier rows; q and dO along tokens later keys: by hand from the dataflow."""
    found = pairs(prove(kernels.cudnn_mxfp8_reference, lengths=[64], head_dim=32), 64)
    wanted = {("out", "v"), ("dq", "v"), ("dq", "k"), ("dk", "q"), ("dv", "dout")}
    assert set(found) == wanted
    for (output, source), matrix in found.items():
        expected = later(64, 32)
        assert (matrix == (expected.T if output in ("dk", "dv") else expected)).all(), source


@pytest.mark.parametrize(("name", "block"), [("flash_fp8_leaky", 64), ("flash_fp8_leaky_128", 128)])
def test_where_a_leaky_kernel_leaks(name: str, block: int) -> None:
    kernel = kernels.KERNELS[name].kernel
    found = pairs(prove(kernel, lengths=[100], head_dim=32, backward=False), 100)
    assert set(found) == {("out", "v")}
    # The query tile of rows 0 to 63 does not load keys from 64 on.
    assert (found["out", "v"] == (later(100, block) & later(100, 64))).all()


def test_the_repaired_kernel_is_proved_and_nothing_is_found_in_it() -> None:
    kernel = kernels.flash_fp8_repaired
    certificate = prove(kernel, lengths=[40, 24], head_dim=32, backward=False)
    assert certificate.legal
    assert certificate.exact
    report = hunt(kernel, lengths=[40, 24], head_dim=32, backward=False, calls=180)
    assert report.verdict == "none_found", str(report)


def test_the_leak_of_the_leaky_kernel_is_found_soon() -> None:
    report = hunt(
        kernels.flash_fp8_leaky, lengths=[40, 24], head_dim=32, backward=False, calls=200, enough=1
    )
    assert report.leaks
    (witness,) = report.witnesses
    assert (witness.operand, witness.output, witness.severity) == ("v", "out", "forward")
    assert witness.reproduce(kernels.flash_fp8_leaky)
    assert not witness.reproduce(kernels.flash_fp8_repaired)


def test_a_mask_of_a_finite_number_leaks_and_a_proof_says_on_what_it_rests() -> None:
    """Scores of -2^128.5 overflow to -inf, below the mask's number: the masked keys get all the weight."""
    q = np.full((4, 1, 32), 2.0**63, BF16)
    v = np.ones_like(q)
    settings = {"cu_seqlens": [0, 4], "causal": True, "softmax_scale": 32**-0.5}
    before = values(kernels.jax_sdpa(q, -q, v, **settings)["out"])[0]
    v[3] = 5
    after = values(kernels.jax_sdpa(q, -q, v, **settings)["out"])[0]
    assert before == pytest.approx(1, rel=2.0**-7)
    # Tokens 1, 2 and 3 weigh alike in row 0, which may see none of them.
    assert after == pytest.approx((1 + 1 + 5) / 3, rel=2.0**-7)
    certificate = prove(kernels.jax_sdpa, lengths=[64], head_dim=32, backward=False)
    if certificate.legal:
        # Row i adds a score to the mask's number for each of the 63 - i keys after it, in two places.
        assert certificate.assumptions["huge_plus_moderate"] >= 64 * 63 // 2
    else:
        assert (pairs(certificate, 64)["out", "v"] == later(64, 64)).all()
    strict = prove(kernels.jax_sdpa, lengths=[64], head_dim=32, backward=False, strict=True)
    assert (pairs(strict, 64)["out", "v"] == later(64, 64)).all()


def test_documents_and_causality_in_a_mask() -> None:
    expected = [
        "1 0 0 0 0",
        "1 1 0 0 0",
        "0 0 1 0 0",
        "0 0 1 1 0",
        "0 0 1 1 1",
    ]
    assert [" ".join(map(str, row)) for row in visible([0, 2, 2, 5], True).astype(int)] == expected
    assert visible([0, 2, 5], False).sum() == 4 + 9


def test_a_package_that_is_not_there_is_named_in_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"^this kernel needs no_such_package, .*$"):
        needed("no_such_package")
    example = kernels.Example(kernel=needed, packages=("json", "no_such_package"))
    assert kernels.missing(example) == "no_such_package not installed"


def test_the_program_writes_what_it_found(tmp_path, capsys) -> None:
    file = tmp_path / "new" / "found.json"
    arguments = ["--kernels", "flash_fp8_leaky", "--seconds", "3"]
    assert run.main([*arguments, "--json", str(file), "--date", "2026-11-30"]) == 0
    found = json.loads(file.read_text())
    (one,) = found["kernels"]
    assert found["schema"] == "flamia-ref leak examples"
    assert found["date"] == "2026-11-30"
    assert found["command"].endswith("--json found.json --date 2026-11-30")
    assert found["versions"]["numpy"] == np.__version__
    assert one["hunt"]["verdict"] == "leak"
    assert one["proof"]["finite"]["verdict"] == "not_proved"
    assert one["hunt"]["witnesses"][0]["sentence"] in capsys.readouterr().out


def test_a_kernel_that_fails_is_a_row_and_does_not_end_the_run(monkeypatch) -> None:
    def failing(*_, **__):
        raise ValueError("no kernel image\nfor this device")

    record = run.look("failing", kernels.Example(kernel=failing), (40, 24), seconds=1)
    assert record["failed"] == "ValueError: no kernel image"
    assert "failed: ValueError" in run.row(record)
    assert "not run: no GPU" in run.row({"kernel": "one", "missing": "no GPU"})


def test_a_name_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(["--kernels", "flash_fp8_leaky,flash"])
    assert stopped.value.code == 2
    assert "no kernel 'flash'; there are torch_sdpa, " in capsys.readouterr().err


INTERPRETED = """
import numpy as np, ml_dtypes
from examples.leakage import kernels
q = np.ones((64, 1, 32), ml_dtypes.bfloat16)
v = np.zeros_like(q)
v[0] = 2.0**-20
for name in ("triton_flash_fp8_leaky", "triton_flash_fp8_repaired"):
    for value in (0, 1):
        v[16] = value
        settings = {"cu_seqlens": [0, 64], "causal": True, "softmax_scale": 32**-0.5}
        out = kernels.KERNELS[name].kernel(q, q, v, **settings)["out"].view(ml_dtypes.bfloat16)
        print(float(out[7, 0, 0]) * 2**23)
"""


def test_the_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    # Row 7 is the mean of eight tokens, 2^-23; it vanishes with a token of 1 in its tile where that decides its scale.
    assert [float(line) for line in printed.stdout.split()] == [1, 0, 1, 1]
