"""`fused_dot` and `matmul` against recorded fused sums: a simulator's, and devices' where at hand."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot, matmul, matmul_bits
from tests.independent import codes, machine, tensor_cores
from tests.independent.oracles import COMMITTED, load

MX = "sm100.tcgen05.mxf8f6f4"
NVFP4 = "sm100.tcgen05.mxf4nvf4"


class Recorded(NamedTuple):
    """A file of recorded rows, and other instructions that are said to have the same rules."""

    folder: str
    name: str
    instruction: str
    a_format: str
    b_format: str
    scale_format: str | None = None
    block: int = 32
    chained: bool = False
    also: tuple[str, ...] = ()

    @property
    def rules(self) -> machine.Rules:
        return tensor_cores.INSTRUCTIONS[self.instruction].rules


def _simulated(name: str, *given: Any, **named: Any) -> list[Recorded]:
    """A file of single steps and its companion of K = 128."""
    chain = f"{name}_chain128"
    single = Recorded("mma", name, *given, **named)
    return [single, single._replace(name=chain, chained=True)]


_WARP_BF16 = ("sm90.mma.bf16", "sm100.mma.bf16", "sm120.mma.bf16")
_WARP_F16 = ("sm90.mma.f16", "sm100.mma.f16", "sm120.mma.f16")
_WARP_TF32 = ("sm90.mma.tf32", "sm100.mma.tf32", "sm120.mma.tf32", "sm100.tcgen05.tf32")
SIMULATED = [
    *_simulated("hopper_wgmma_bf16_bf16_f32", "sm90.wgmma.bf16", "bf16", "bf16", also=_WARP_BF16),
    *_simulated("hopper_wgmma_f16_f16_f32", "sm90.wgmma.f16", "fp16", "fp16", also=_WARP_F16),
    *_simulated("hopper_wgmma_e4m3_e4m3_f32", "sm90.wgmma.fp8", "e4m3", "e4m3"),
    *_simulated("hopper_wgmma_e5m2_e4m3_f32", "sm90.wgmma.fp8", "e5m2", "e4m3"),
    *_simulated("tcgen05_f16kind_bf16_bf16_f32", "sm100.tcgen05.f16", "bf16", "bf16"),
    *(
        file
        for a in ("e4m3", "e5m2")
        for file in _simulated(
            f"tcgen05_f8f6f4_{a}_e4m3_f32",
            "sm100.tcgen05.f8f6f4",
            a,
            "e4m3",
            also=("sm120.mma.f8f6f4", "sm120.mma.fp8"),
        )
    ),
    *(
        file
        for a in ("e4m3", "e5m2", "e2m1")
        for file in _simulated(
            f"tcgen05_mxf8f6f4_{a}_e4m3_ue8m0", MX, a, "e4m3", "e8m0", also=("sm120.mma.mxf8f6f4",)
        )
    ),
    *_simulated(
        "tcgen05_mxf4_block32_ue8m0",
        "sm100.tcgen05.mxf4",
        *("e2m1", "e2m1", "e8m0"),
        also=("sm120.mma.mxf4", NVFP4, "sm120.mma.mxf4nvf4"),
    ),
    *(
        file
        for scale in ("e8m0", "ue4m3")
        for file in _simulated(
            f"tcgen05_mxf4nvf4_block16_u{scale.removeprefix('u')}",
            NVFP4,
            *("e2m1", "e2m1", scale, 16),
            also=("sm120.mma.mxf4nvf4",),
        )
    ),
]
MEASURED = [  # an H200
    Recorded("wgmma-h200", f"{a}_{b}_k{k}", instruction, *pair, chained=k == long)
    for instruction, pair, a, b, short, long in (
        ("sm90.wgmma.bf16", ("bf16", "bf16"), "bf16", "bf16", 16, 64),
        ("sm90.wgmma.f16", ("fp16", "fp16"), "f16", "f16", 16, 64),
        ("sm90.wgmma.tf32", ("tf32", "tf32"), "tf32", "tf32", 8, 32),
        *(
            ("sm90.wgmma.fp8", (x, y), x, y, 32, 128)
            for x in ("e4m3", "e5m2")
            for y in ("e4m3", "e5m2")
        ),
    )
    for k in (short, long)
]
MEASURED += [
    Recorded("wgmma-h200", "bf16_bf16_k16_floor", "sm90.wgmma.bf16", "bf16", "bf16"),
    Recorded("wgmma-h200", "tf32_tf32_k8_floor", "sm90.wgmma.tf32", "tf32", "tf32"),
]
MEASURED = [
    file._replace(also={"bf16": ("sm100.tcgen05.f16",), "tf32": _WARP_TF32}.get(file.a_format, ()))
    for file in MEASURED
]
ALL = SIMULATED + MEASURED
# Recorded by others, on an H100 and a B200; not in the repository.
ELSEWHERE = [
    *(Recorded("mma", f"hw_h100_wgmma_{a}_f32", "sm90.wgmma.fp8", a, a) for a in ("e4m3", "e5m2")),
    *(
        Recorded("mma", f"hw_{device}_wmma_{name}_f32", f"{arch}.mma.{kind}", a, a, also=also)
        for device, arch in (("h100", "sm90"), ("b200", "sm100"))
        for name, kind, a, also in (
            ("bf16", "bf16", "bf16", ("sm100.tcgen05.f16",)),
            ("f16", "f16", "fp16", ("sm100.tcgen05.f16",)),
            ("tf32k4", "tf32", "tf32", ("sm100.tcgen05.tf32", f"{arch}.mma.tf32.k4")),
        )
    ),
]
IN_JAX = [
    file
    for file in ALL
    if file.name
    in (
        "hopper_wgmma_e5m2_e4m3_f32_chain128",
        "tcgen05_mxf8f6f4_e4m3_e4m3_ue8m0_chain128",
        "tcgen05_mxf4_block32_ue8m0_chain128",
        "tf32_tf32_k32",
    )
]

Arrays = dict[str, Any]


def identify(x: Any) -> str | None:
    return f"{x.folder}-{x.name}" if isinstance(x, Recorded) else None


@functools.cache
def rows(file: Recorded) -> tuple[Arrays, npt.NDArray[np.uint32]]:
    """What `fused_dot` takes and, a column a step that was recorded, the results."""
    stored = load(file.folder, file.name)
    given = {"a": stored["a_codes"], "b": stored["b_codes"], "c_bits": stored["c_bits"]}
    if file.scale_format:
        given |= {"a_scales": stored["a_scale_codes"], "b_scales": stored["b_scale_codes"]}
    padding = ((0, 0), (0, -given["a"].shape[1] % file.rules.terms))
    if padding[1][1]:  # an instruction recorded with fewer products
        given |= {side: np.pad(given[side], padding) for side in "ab"}
    return given, stored["d_bits"].reshape(len(given["a"]), -1)


def formats(file: Recorded, instruction: str | None = None) -> Arrays:
    found: Arrays = {
        "instruction": instruction or file.instruction,
        "a_format": file.a_format,
        "b_format": file.b_format,
    }
    return found | ({"scale_format": file.scale_format} if file.scale_format else {})


def steps(file: Recorded, given: Arrays, count: int) -> Arrays:
    """The first `count` steps of rows."""
    k = count * file.rules.terms
    cut = {"a": k, "b": k, "a_scales": k // file.block, "b_scales": k // file.block}
    return {name: x[:, : cut[name]] if name in cut else x for name, x in given.items()}


def in_jax(given: Arrays) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in given.items()}


def check(got: Any, wanted: npt.NDArray[np.uint32]) -> None:
    assert got.dtype == np.uint32
    differ = np.flatnonzero(np.asarray(got) != wanted)
    assert not differ.size, f"{differ.size} of {wanted.size} rows differ, the first is {differ[0]}"


@pytest.mark.parametrize("file", ALL, ids=identify)
def test_numpy(file: Recorded) -> None:
    """Every row, and every step of a chain that was recorded."""
    given, recorded = rows(file)
    assert recorded.size >= 960
    count = given["a"].shape[1] // file.rules.terms
    assert (count > 1) == file.chained
    for step in range(recorded.shape[1]):
        part = steps(file, given, step + 1 if recorded.shape[1] > 1 else count)
        got = fused_dot(**part, **formats(file))
        assert isinstance(got, np.ndarray)
        check(got, recorded[:, step])
    for instruction in file.also:
        check(fused_dot(**given, **formats(file, instruction)), recorded[:, -1])


@pytest.mark.parametrize("file", IN_JAX, ids=identify)
def test_jax(file: Recorded) -> None:
    given, recorded = rows(file)
    got = fused_dot(**in_jax(given), **formats(file))
    assert isinstance(got, jax.Array)
    check(got, recorded[:, -1])


@pytest.mark.nightly
@pytest.mark.parametrize("file", ALL, ids=identify)
def test_every_file_in_jax(file: Recorded) -> None:
    given, recorded = rows(file)
    check(fused_dot(**in_jax(given), **formats(file)), recorded[:, -1])


@pytest.mark.parametrize("file", [IN_JAX[1]], ids=identify)
def test_jax_inside_a_users_jit_and_vmap(file: Recorded) -> None:
    given, recorded = rows(file)
    batched = {name: x.reshape(20, len(x) // 20, *x.shape[1:]) for name, x in in_jax(given).items()}
    got = jax.jit(jax.vmap(lambda x: fused_dot(**x, **formats(file))))(batched)
    check(got.reshape(-1), recorded[:, -1])


@pytest.mark.parametrize("file", [file for file in ALL if file.chained], ids=identify)
def test_matmul_is_fused_dot_of_rows_and_columns(file: Recorded) -> None:
    given, recorded = rows(file)
    m, n = 24, 20
    i, j = (index.ravel() for index in np.indices((m, n)))
    c = np.random.default_rng(0).choice(given["c_bits"], (m, n))
    c[np.arange(n), np.arange(n)] = given["c_bits"][:n]
    lanes = {name: x[i] if name.startswith("a") else x[j] for name, x in given.items()}
    expected = fused_dot(**lanes | {"c_bits": c.ravel()}, **formats(file)).reshape(m, n)
    operands = {
        name: x[:m] if name.startswith("a") else x[:n].T
        for name, x in given.items()
        if name != "c_bits"
    }
    got = matmul_bits(**operands, c=c, **formats(file))
    check(got, expected)
    check(got.diagonal(), recorded[:n, -1])
    values = matmul(**operands, c=c.view(np.float32), **formats(file))
    assert values.dtype == np.float32
    check(values.view(np.uint32), expected)
    nothing = fused_dot(**lanes | {"c_bits": np.zeros(m * n, np.uint32)}, **formats(file))
    check(matmul_bits(**operands, **formats(file)), nothing.reshape(m, n))
    if file in IN_JAX[1:3]:  # compiling is slow
        got = matmul(**in_jax(operands), c=jnp.asarray(c.view(np.float32)), **formats(file))
        assert isinstance(got, jax.Array)
        check(np.asarray(got).view(np.uint32), expected)


# Recordings that the repository does not hold.


@pytest.mark.parametrize("file", ELSEWHERE, ids=identify)
def test_other_devices(file: Recorded) -> None:
    """H100 through wgmma and wmma, B200 through wmma, which tcgen05 is believed to share."""
    given, recorded = rows(file)
    assert len(recorded) == 5000
    for instruction in (file.instruction, *file.also):
        part = given
        if instruction.endswith(".k4"):
            part = given | {side: given[side][:, :4] for side in "ab"}
        check(fused_dot(**part, **formats(file, instruction)), recorded[:, 0])


@pytest.mark.parametrize(("element", "contradict"), [("e4m3", 1793), ("e5m2", 1764)])
def test_fp8_mma_sync_of_sm_100_is_no_fused_sum(element: str, contradict: int) -> None:
    """Why there is no sm100.mma.fp8: a B200's rows are not those of L = 32, F = 25, nor of F = 13.

    They are c plus the float32 sum of the products, rounded to nearest, in all rows but one.
    """
    file = Recorded("mma", f"hw_b200_mmasync_{element}_f32", "sm120.mma.fp8", element, element)
    given, recorded = rows(file)
    assert len(recorded) == 5000
    got = fused_dot(**given, **formats(file))
    assert (got != recorded[:, 0]).sum() == contradict
    hopper = fused_dot(**given, **formats(file, "sm90.wgmma.fp8"))
    assert (hopper != recorded[:, 0]).sum() > 1000
    table = np.array([float(codes.decode(x, codes.ELEMENTS[element])) if m else np.nan
                      for x, (kind, *_) in enumerate(machine.element_operands(codes.ELEMENTS[element]))
                      for m in [kind == machine.FINITE]])  # fmt: skip
    sums = (table[given["a"]] * table[given["b"]]).sum(axis=1).astype(np.float32)
    twice = sums + given["c_bits"].view(np.float32)
    assert (twice.view(np.uint32) != recorded[:, 0]).sum() == (0 if element == "e4m3" else 1)
    with pytest.raises(ValueError, match="contradict one"):
        INSTRUCTIONS["sm100.mma.fp8"]


def test_no_recording_of_others_is_in_the_repository() -> None:
    assert not list(COMMITTED.rglob("hw_*"))


def test_every_committed_file_is_read_here() -> None:
    for folder in ("mma", "wgmma-h200"):
        committed = {path.stem for path in (COMMITTED / folder).glob("*.npz")}
        assert committed == {file.name for file in ALL if file.folder == folder}
