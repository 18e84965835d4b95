"""Documents as a command line says them: every form, seeds, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from flamia_ref.schedule.workloads import WORKLOADS, cu_seqlens_of


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0,512,2048", [0, 512, 2048]),
        ("0, 512, 2048", [0, 512, 2048]),
        ("0,0,5", [0, 0, 5]),
        ("lengths:512,1536", [0, 512, 2048]),
        ("lengths:3x2,1", [0, 2, 4, 6, 7]),
        ("lengths:0", [0, 0]),
        ("lengths:0x5,7", [0, 7]),
        ("equal:tokens=100,length=30", [0, 30, 60, 90]),
        ("one-long:tokens=10,long=4,short=3", [0, 3, 6, 10]),
    ],
)
def test_forms(text: str, wanted: list[int]) -> None:
    assert cu_seqlens_of(text) == wanted


def test_files(tmp_path: Path) -> None:
    wanted = [0, 3, 10]
    for name, content in (
        ("a.json", json.dumps(wanted)),
        ("a.txt", "0\n3\n10\n"),
        ("b.txt", "0 3 10"),
    ):
        (tmp_path / name).write_text(content)
        assert cu_seqlens_of(str(tmp_path / name)) == wanted
    np.save(tmp_path / "a.npy", np.array(wanted, np.int32))
    assert cu_seqlens_of(str(tmp_path / "a.npy")) == wanted


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str) -> None:
    found = np.array(cu_seqlens_of(f"{name}:tokens=40000"))
    assert found[0] == 0
    assert found[-1] <= 40000
    assert (np.diff(found) > 0).all()
    assert cu_seqlens_of(f"{name}:tokens=40000") == found.tolist()
    if name not in ("one-long", "equal"):
        assert found[-1] == 40000
        assert cu_seqlens_of(f"{name}:tokens=40000,seed=1") != found.tolist()


def test_draws_are_what_they_say() -> None:
    uniform = np.diff(cu_seqlens_of("uniform:tokens=4000000,least=100,most=300"))[:-1]
    assert (uniform.min(), uniform.max()) == (100, 300)
    assert uniform.mean() == pytest.approx(200, rel=0.02)
    logs = np.log(np.diff(cu_seqlens_of("lognormal:tokens=4000000,median=500,sigma=0.5"))[:-1])
    # A length is cut to a whole number, half a token of 500.
    assert np.median(np.exp(logs)) == pytest.approx(500, rel=0.03)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    zipf = np.diff(cu_seqlens_of("zipf:tokens=2000000,unit=64,exponent=3"))[:-1]
    assert (zipf % 64 == 0).all()
    # 1 / zeta(3) of them are one unit long, an eighth as many two.
    assert (zipf == 64).mean() == pytest.approx(0.8319, abs=0.01)
    assert (zipf == 128).mean() == pytest.approx(0.8319 / 8, abs=0.01)
    assert np.diff(cu_seqlens_of("zipf:tokens=2000000,exponent=1.1,most=5000")).max() <= 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512,2048", "begins with 512"),
        ("0,5,3", "must not decrease"),
        ("0,-5", "no such file, and no list"),
        ("", "no such file, and no list"),
        ("0", "at least two entries"),
        (",", "holds no list of integers|no such file"),
        ("lengths:", "no length like 512"),
        ("lengths:-5", "no length like 512"),
        ("lengths:2x", "no length like 512"),
        ("lengths:x2", "no length like 512"),
        ("lengths:99999999x1", "more than 10000000 documents"),
        ("lengths:99999999", "99999999 tokens; at most 10000000"),
        ("lengths:10x9000000", "90000000 tokens; at most 10000000"),
        ("0,99999999", "99999999 tokens; at most 10000000"),
        ("0,99999999999999999999999", "at most 10000000"),
        ("lognorma:tokens=5", "lognormal"),
        ("lognormal:token=5", "has no option 'token'; .*tokens"),
        ("lognormal:tokens", "tokens is ''"),
        ("lognormal:tokens=x", "tokens is 'x'; it must be a number like 65536"),
        ("lognormal:tokens=0", "tokens is '0'; it must be positive"),
        ("lognormal:tokens=-1", "must be positive"),
        ("lognormal:tokens=99999999", "at most 10000000"),
        ("lognormal:sigma=nan", "sigma is 'nan'"),
        ("lognormal:sigma=inf", "sigma is 'inf'"),
        ("lognormal:seed=-1", "must not be negative|must be positive"),
        ("zipf:exponent=1", r"exponent is 1\.0"),
        ("uniform:least=9,most=5", "least"),
        ("one-long:tokens=10,long=20", "long"),
        ("equal:tokens=10,length=20", "length"),
    ],
)
def test_bad_input(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        cu_seqlens_of(text)
    assert "\n" not in str(found.value)


def test_bad_files(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.json", "[0, 1.5]", "holds no list of integers"),
        ("b.json", "[0, true]", "holds no list of integers"),
        ("c.json", "[0, ", "cannot read"),
        ("d.txt", "zero one", "cannot read"),
        ("e.txt", "", "holds no list of integers"),
        ("f.npy", "[0]", "cannot read"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message) as found:
            cu_seqlens_of(str(tmp_path / name))
        assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match="cannot read"):
        cu_seqlens_of(str(tmp_path))
