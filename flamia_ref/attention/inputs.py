"""The boundary of attention: what callers gave, checked and brought to bits before work starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from decimal import Decimal, localcontext
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import InputRounded, shown, type_of
from flamia_ref.attention.knobs import ScoreFactor, Softmax
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes import RECIPES
from flamia_ref.attention.softmax import LOG2_E, Factors
from flamia_ref.formats import BF16, Overflow, encode_bits
from flamia_ref.packing import Documents, Mask

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_FLOAT32 = np.dtype(np.float32)
_LARGEST_SIZE = 2**31 - 1
_ROUNDINGS: tuple[ScoreFactor, ...] = ("exact_product", "float64_product", "float32_product")
_LOG2_E_DIGITS = 80
_NO_GRADIENT = (
    "attention.forward and attention.backward round their inputs to codes and have no gradient; use"
    " attention.attention under jax.grad, or give them inputs under jax.lax.stop_gradient"
)


class Shape(NamedTuple):
    """What arguments other than arrays say: the mask, the softmax scale, the soft cap."""

    mask: Mask
    softmax_scale: float
    softcap: float | None


class Inputs(NamedTuple):
    """Checked inputs of a forward: q, k, v as float32 bits of values in the recipe's input format, and the sink.

    They are numpy arrays wherever their values are on the host; `namespace` and `device` are the caller's.
    """

    q: Array
    k: Array
    v: Array
    namespace: ModuleType
    device: object | None
    shape: Shape


def chosen_recipe(recipe: Recipe | str) -> Recipe:
    """The recipe that a `recipe` argument means: a `Recipe`, or a name in `RECIPES`."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return RECIPES[recipe]
    raise TypeError(f"recipe is {shown(recipe)}; it must be a Recipe or a name in RECIPES")


def check(q: Any, k: Any, v: Any, **arguments: Any) -> Inputs:
    """Check the arguments of a forward, and bring q, k, v to bits. Raises ValueError or TypeError of one line.

    `arguments` are the keywords of `check_shapes` but for the dtypes.
    """
    shape = check_shapes(q, k, v, dtypes=DTYPES, **arguments)
    check_sink_range(arguments["sink"])
    check_range(shape)
    namespace, device = _backend.namespace(q), _backend.device(q)
    bits = rounded_bits({"q": q, "k": k, "v": v})
    return Inputs(**bits, namespace=namespace, device=device, shape=shape)


def rounded_bits(arrays: dict[str, Any]) -> dict[str, Array]:
    """float32 bits of arrays rounded to bfloat16, on the host where all their values are."""
    if _backend.on_host(*arrays.values()):
        arrays = {name: native(_backend.host(x)) for name, x in arrays.items()}
    return {name: _input_bits(name, no_gradient(x)) for name, x in arrays.items()}


def no_gradient(x: Array) -> Array:
    """`x`, whose gradient would silently be zero: JAX is refused it."""
    return _backend.without_gradient(x, _NO_GRADIENT)


def check_shapes(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    softmax_scale: Any,
    softcap: Any,
    sink: Any,
    dtypes: Iterable[np.dtype[Any]],
) -> Shape:
    """Check everything about the arguments but a recipe."""
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        check_values(name, x, tuple(dtypes))
    check_one_library(arrays if sink is None else arrays | {"sink": checked_array("sink", sink)})
    check_extents(q, k, v, other_keys=cu_seqlens_k is not None)
    (tokens, heads, head_dim), keys = q.shape, k.shape[0]
    mask = checked_mask(
        tokens, keys, cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment
    )
    check_sink(sink, heads)
    return Shape(mask, checked_scale(softmax_scale, head_dim), checked_softcap(softcap))


def check_extents(q: Any, k: Any, v: Any, *, other_keys: bool) -> None:
    """Refuse arrays with three axes, or their codes, whose tokens, heads and channels do not go together.

    `other_keys`: whether keys may be other tokens than queries.
    """
    tokens, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    if tuple(v.shape[:2]) != tuple(k.shape[:2]):
        raise ValueError(
            f"k has shape {k.shape} and v {v.shape}; both have the same tokens and kv_heads"
        )
    if not other_keys and keys != tokens:
        raise ValueError(
            f"q has {tokens} tokens and k {keys}; give cu_seqlens_k where keys are other tokens than queries"
        )
    if k.shape[2] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k {k.shape[2]}; they must be equal")
    if 0 in (heads, kv_heads, head_dim, v.shape[2]):
        raise ValueError(
            f"q has shape {q.shape}, k {k.shape} and v {v.shape}; heads and head_dim must be at least 1"
        )
    if heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; the first must be a multiple of the second"
        )


def checked_mask(
    tokens: int,
    keys: int | None,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    *,
    causal: Any,
    window: Any,
    alignment: Any,
) -> Mask:
    """The mask of `tokens` queries and `keys` keys, None for as many as `cu_seqlens_k` says."""
    queries = Documents.from_cu_seqlens(cu_seqlens, tokens)
    documents = queries
    if cu_seqlens_k is not None:
        documents = Documents.from_cu_seqlens(cu_seqlens_k, keys, "cu_seqlens_k")
        if cu_seqlens is None and len(documents) != 1:
            raise ValueError(
                f"cu_seqlens is None, which is 1 document, and cu_seqlens_k has {len(documents)}; give cu_seqlens with"
                " equally many"
            )
    return Mask.of(queries, documents, causal=causal, window=window, alignment=alignment)


def checked_softcap(softcap: Any) -> float | None:
    """The soft cap as a float, a normal float32 as such."""
    if softcap is None:
        return None
    cap = _checked_float("softcap", softcap, ", or None")
    if not _is_normal(_narrowed(cap)):
        raise ValueError(
            f"softcap is {shown(softcap)}; it must be finite and above 0, a normal float32"
        )
    return cap


def checked_scale(softmax_scale: Any, head_dim: int) -> float:
    """The softmax scale as a float, 1 / sqrt(head_dim) for None."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    scale = _checked_float("softmax_scale", softmax_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax_scale is {scale!r}; it must be finite and above 0")
    return scale


def _checked_float(name: str, x: Any, otherwise: str = "") -> float:
    """A number as a float, infinite if it is too large."""
    if _backend.is_traced(x):
        raise TypeError(
            f"{name} is traced; it is part of the program's constants, pass a Python float"
        )
    if isinstance(x, np.ndarray) or _backend.is_jax(x):
        library = "JAX" if _backend.is_jax(x) else "numpy"
        raise TypeError(
            f"{name} is a {library} array; it must be a float{otherwise}: of a single number, float(...) makes one"
        )
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {shown(x)}; it must be a float{otherwise}")
    try:
        return float(x)
    except OverflowError:
        return math.inf


def checked_size(name: str, x: Any) -> int:
    """A number of heads or channels."""
    if _backend.is_traced(x):
        raise TypeError(f"{name} is traced; it selects shapes, pass a Python int")
    whole = isinstance(x, (int, np.integer)) and not isinstance(x, bool)
    if not whole or not 1 <= x <= _LARGEST_SIZE:
        kind = ValueError if whole else TypeError
        raise kind(f"{name} is {shown(x)}; it must be a whole number from 1 on, below 2^31")
    return int(x)


def _narrowed(x: float) -> np.float32:
    """`x` in float32, infinite if it is too large."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(x)


def _is_normal(x: np.float32) -> bool:
    return bool(np.finfo(np.float32).tiny <= x < np.inf)


def checked_array(name: str, x: Any) -> Any:
    """`x`, if it is a numpy or JAX array."""
    if getattr(x, "dtype", None) is None or not (isinstance(x, np.ndarray) or _backend.is_jax(x)):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a numpy or JAX array")
    return _backend.plain(name, x)


def array_of(
    name: str, x: Any, dtype: Any, shape: tuple[int, ...] | None = None, wanted: str = ""
) -> Array:
    """`x` in the byte order of this machine, if it is an array of one dtype and shape.

    `wanted` is what a message says of the shape, such as "it must be (heads,) =".
    """
    x = checked_array(name, x)
    if np.dtype(x.dtype).newbyteorder("=") != np.dtype(dtype):
        raise TypeError(f"{name} holds {type_of(x)}; it must be {np.dtype(dtype).name}")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {shown(tuple(x.shape))}; {wanted} {shape}")
    return native(x)


def native(x: Array) -> Array:
    """`x` in the byte order of this machine."""
    return x.astype(x.dtype.newbyteorder("="), copy=False) if isinstance(x, np.ndarray) else x


def check_sink(sink: Any, heads: int) -> None:
    """Refuse a sink that is not one float32 logit a query head, NaN or +inf."""
    if sink is None:
        return
    array_of("sink", sink, _FLOAT32, (heads,), "it must be (heads,) =")
    if not _backend.is_traced(sink):
        values = _backend.host(sink)
        bad = np.isnan(values) | (values == np.inf)
        if bad.any():
            head = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"sink[{head}] is {values[head]}; a logit is finite, or -inf for a head without a sink"
            )


def check_sink_range(sink: Any) -> None:
    """Refuse a checked sink that is finite, and infinite in float32 once it is multiplied by log2(e)."""
    if sink is None or _backend.is_traced(sink):
        return
    values = native(_backend.host(sink))
    with np.errstate(over="ignore"):
        scaled = values * LOG2_E.view(np.float32)
    bad = np.isfinite(values) & np.isinf(scaled)
    if bad.any():
        head = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"sink[{head}] is {values[head]:.9g}; times log2(e) it must be a finite float32, so at most about 2.3586e38"
            " either way; -inf is a head without a sink"
        )


def sink_bits(sink: Any) -> Array | None:
    """float32 bits of a sink, on the host where its values are."""
    if sink is None:
        return None
    if _backend.on_host(sink):
        sink = native(_backend.host(sink))
    return float32_bits(no_gradient(sink))


def check_dout(dout: Any, q: Any, v: Any, dtypes: Iterable[np.dtype[Any]]) -> None:
    """Refuse a gradient of out that is no array of the shape of out."""
    check_values("dout", dout, tuple(dtypes))
    wanted = (*q.shape[:2], v.shape[2])
    if tuple(dout.shape) != wanted:
        raise ValueError(
            f"dout has shape {tuple(dout.shape)}; for these q and v it must be (tokens, heads, v's head_dim) = {wanted}"
        )


def check_range(shape: Shape) -> None:
    """Refuse scales whose float32 constants no recipe could compute with, before any work."""
    scale, softcap = shape.softmax_scale, shape.softcap
    if softcap is not None:
        _checked_quotient(scale, softcap)
    if not _is_normal(_narrowed(scale)):
        raise _bad_score_factor(scale)
    if softcap is None:
        for rounding in _ROUNDINGS:
            score_factor(scale, rounding)


def factors(shape: Shape, softmax: Softmax, rounding: ScoreFactor) -> Factors:
    """The constants between S and the exponent as float32 bits, c rounded as `rounding` says."""
    if shape.softcap is not None and softmax.softcap == "folded":
        quotient = float(_narrowed(shape.softmax_scale) / _narrowed(shape.softcap))
        before = _checked_quotient(quotient, 1.0)
        return Factors(score_factor(shape.softcap, rounding), _word(before), _word(np.float32(1)))
    if shape.softcap is not None:
        before = _checked_quotient(shape.softmax_scale, shape.softcap)
        return Factors(LOG2_E, _word(before), _word(np.float32(shape.softcap)))
    if softmax.score == "scaled":
        before = _narrowed(shape.softmax_scale)
        if not _is_normal(before):
            raise _bad_score_factor(shape.softmax_scale)
        return Factors(LOG2_E, _word(before))
    natural = _word(_narrowed(shape.softmax_scale)) if softmax.lse == "scale_fma" else None
    return Factors(score_factor(shape.softmax_scale, rounding), natural=natural)


def _checked_quotient(softmax_scale: float, softcap: float) -> np.float32:
    quotient = _narrowed(softmax_scale / softcap)
    if not _is_normal(quotient):
        raise ValueError(
            f"softmax_scale is {softmax_scale!r} and softcap {softcap!r}; their quotient must be a normal float32"
        )
    return quotient


def _word(x: np.float32) -> np.uint32:
    return np.uint32(x.view(np.uint32))


def score_factor(softmax_scale: float, rounding: ScoreFactor) -> np.uint32:
    """float32 bits of softmax_scale * log2(e), rounded as `ScoreFactor` says.

    Raises ValueError where that is 0, subnormal or infinite.
    """
    match rounding:
        case "exact_product":
            return _exact_score_factor(softmax_scale)
        case "float64_product":
            factor = np.float32(softmax_scale * math.log2(math.e))
        case "float32_product":
            with np.errstate(all="ignore"):
                factor = np.float32(softmax_scale) * np.float32(math.log2(math.e))
        case "float32_scale":
            with np.errstate(all="ignore"):
                factor = np.float32(float(np.float32(softmax_scale)) * math.log2(math.e))
    if not np.finfo(np.float32).tiny <= factor < np.inf:
        raise _bad_score_factor(softmax_scale)
    return np.uint32(factor.view(np.uint32))


def _bad_score_factor(softmax_scale: float) -> ValueError:
    return ValueError(
        f"softmax_scale is {softmax_scale!r}; alone and times log2(e) it must be a normal float32, about 1.2e-38 to"
        " 2.3e38"
    )


def _exact_score_factor(softmax_scale: float) -> np.uint32:
    with localcontext(prec=_LOG2_E_DIGITS):
        log2_e = Fraction(1 / Decimal(2).ln())
    exact = Fraction(softmax_scale) * log2_e
    exponent = math.frexp(softmax_scale)[1] + 1
    while exact < Fraction(2) ** exponent:
        exponent -= 1
    significand = round(
        exact / Fraction(2) ** (exponent - 23)
    )  # of a tie, round() takes the even one
    if significand == 1 << 24:
        significand, exponent = 1 << 23, exponent + 1
    if not -126 <= exponent <= 127:
        raise _bad_score_factor(softmax_scale)
    return np.uint32((exponent + 126 << 23) + significand)


def check_values(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...]) -> None:
    """Refuse what is no array [tokens, heads, head_dim] of one of `dtypes`."""
    checked_array(name, x)
    if np.dtype(x.dtype).newbyteorder("=") not in dtypes:
        allowed = " or ".join(dtype.name for dtype in dtypes)
        raise TypeError(f"{name} holds {type_of(x)}; it must be {allowed}")
    if x.ndim != 3:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, heads, head_dim)")


def check_one_library(arrays: dict[str, Any]) -> None:
    """Refuse arrays of two libraries, or bound to different devices."""
    jax_names = [name for name, x in arrays.items() if _backend.is_jax(x)]
    if jax_names and len(jax_names) < len(arrays):
        are = "is a JAX array" if len(jax_names) == 1 else "are JAX arrays"
        raise TypeError(f"{', '.join(jax_names)} {are} and the rest numpy; pass all of one library")
    devices = {name: _backend.device(x) for name, x in arrays.items()}
    placed = {devices[name] for name, x in arrays.items() if _backend.is_committed(x)}
    if len(placed) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"inputs are on different devices ({where}); move them to one")


def _input_bits(name: str, x: Array) -> Array:
    """float32 bits of `x` rounded to bfloat16."""
    if np.dtype(x.dtype) == np.dtype(ml_dtypes.bfloat16):
        return _from_bfloat16(x)
    given = _backend.bits(x)
    rounded = _to_bfloat16(given)
    if not _backend.is_traced(rounded):
        old, new = _backend.host(given), _backend.host(rounded)
        finite_or_infinite = (old & 0x7FFFFFFF) <= 0x7F800000
        changed = int(((old != new) & finite_or_infinite).sum())
        if changed:
            warnings.warn(
                f"{changed} of {old.size} values of {name} are not bfloat16 and were rounded to nearest even",
                InputRounded,
                stacklevel=6,
            )
    return rounded


@_backend.jit
def float32_bits(x: Array) -> Array:
    """The bits of a float32 array."""
    return _backend.bits(x)


@_backend.jit
def _from_bfloat16(x: Array) -> Array:
    return _backend.bits(x).astype(np.uint32) << np.uint32(16)


@_backend.jit
def _to_bfloat16(x: Array) -> Array:
    return encode_bits(x, BF16, overflow=Overflow.NATIVE).astype(np.uint32) << np.uint32(16)
