"""The kernel protocol: what a kernel under test is called with, and what it gives back.

A kernel is a callable::

    kernel(q, k, v, *, cu_seqlens, causal, softmax_scale, window=None, softcap=None, dout=None,
           **extra) -> dict

- q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]: numpy bfloat16
  (`ml_dtypes.bfloat16`), documents one after another; `cu_seqlens` int32 [documents + 1]; `causal`
  bool; `softmax_scale` float. They are copies, which the kernel may change.
- `dout` [tokens, heads, head_dim], bfloat16, is the gradient of "out". Only a kernel gets it whose
  parameters name it, or which takes ``**extra``. One that has no backward leaves it alone.
- The dict holds "out" [tokens, heads, head_dim] and "lse" [heads, tokens], with a backward "dq", "dk"
  and "dv", shaped like q, k and v, or some of them, and any stage of a pack by its name. Stages that
  are lists come as a list with an array a document, or as "s.0", "s.1", ...
- Arrays are numpy arrays, tensors of PyTorch, JAX and CuPy on a CPU or a GPU, or what `numpy.asarray`
  reads. 8-bit codes and scales are uint8, or of the library's own type (float8_e4m3fn,
  float8_e8m0fnu). "out", the gradients and bfloat16 codes are bfloat16, its bits as uint16, or float32
  that holds bfloat16 values; the property suites, which compare a kernel with itself, take any
  float32. "lse" is float32. Nothing is float64: its bits are those of no kernel, and a change that
  rounding to float32 takes away would count. A kernel that computes in float64 rounds what it
  returns, `x.astype(numpy.float32)`.
- Where a recipe has no backward `dout` is not given, and gradients that come all the same are not compared: the
  report names them. Where it smooths the keys, its lse is that of the smoothed scores, and "lse" need not be there.
- `extra` are keywords that only a kernel gets whose parameters name them, or which takes
  ``**extra``: `recipe` (the name), `recipe_json` (the recipe in full), `trace` (names of stages).
- Some cases have more: other keys than queries, `cu_seqlens_k` int32 [documents + 1], and where the
  keys begin for them, `alignment` "top_left"; `window` (left, right); `softcap`, a float; `sink`
  float32 [heads]. A case passes those that it has and no others. A kernel that does not name one of
  them, nor takes ``**extra``, is skipped on that case: it would compute something else.
- Whatever a kernel raises is reported as its failure. A kernel that ends the process, by `os._exit`
  or by a crash of its own, ends the check too: nothing can report that but the exit status.

A kernel that works in stages is a `Staged`, or any object with one or more of its three attributes: a
module, a class, an instance::

    quantize(q, k, v, *, cu_seqlens, dout=None, **extra) -> dict
    forward(operands, *, cu_seqlens, causal, softmax_scale, **extra) -> dict
    backward(operands, *, cu_seqlens, causal, softmax_scale, out, lse, dout, **extra) -> dict

- Each is given the pack's own bytes, not what the one before it gave, so that a mistake in one does
  not hide the next. Together they give what one kernel gives, by the same names; a name comes from one
  of them. Only what they are for is missed where it is not given: "out" and "lse" of `forward`.
- `operands` are the tensors of the pack that the contractions take, copies, by name: "q.codes",
  "q.scales", what a recipe has besides ("q.token_scales", "k.s.codes"), scales in the order that tensor
  cores load as a list with an array a document ("q.scales.tiled", "k.scales.tiled_transposed"), and
  "q", "k", "v" in bfloat16, which a recipe may take as they are. `backward` gets those of q, k, v and
  dO, and "dout" among them. Codes and scales are uint8 (bfloat16 codes uint16), FP4 one code a byte.
- `extra` as above, and to `forward` and `backward`, where they name it, `layouts`: payloads and
  scales with every document filled up to 128 rows, by use ("s.q", "o.v", "dk.q", ...), each a
  `KernelLayout` of `flamia_ref.attention.kernel_layouts`.
- `out` bfloat16 and `lse` float32 are the pack's. `backward` may name `row_max` and `delta`
  [heads, tokens] and `o` [tokens, heads, head_dim] float32 too, and `quantize`, for recipes that scale
  dO, `lse` and `row_max`.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from flamia_ref._errors import line, shown, unknown_name

Kernel = Callable[..., Any]

_ALWAYS = ("cu_seqlens", "causal", "softmax_scale")
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class KernelError(ValueError):
    """A kernel could not be found, could not be called, or failed."""


class KernelFailed(KernelError):
    """A kernel raised on a case, or returned no dict."""


class Unsupported(KernelError):
    """A case has an input that the kernel does not take. `note` says which: "takes no sink"."""

    def __init__(self, kernel: str, note: str, case: str) -> None:
        super().__init__(f"kernel {kernel} {note}, which case {case} has")
        self.note = note


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A kernel that works in stages, codes in and codes out; the protocol says what each is given.

    `name` is what reports call it. Raises KernelError where it has none of them, or one that cannot
    be called.
    """

    quantize: Kernel | None = None
    forward: Kernel | None = None
    backward: Kernel | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise KernelError(f"a staged kernel has {' or '.join(_PARTS)}; give at least one")
        for part, function in self.parts.items():
            if not callable(function):
                raise KernelError(f"{part} is {shown(function)}, which cannot be called")
        if not self.name:
            object.__setattr__(self, "name", ", ".join(map(name_of, self.parts.values())))

    @property
    def parts(self) -> Mapping[str, Kernel]:
        """The stages that it has, in the order of the dataflow."""
        return {part: getattr(self, part) for part in _PARTS if getattr(self, part) is not None}

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be called as a whole: its stages take the operands of a pack."""
        raise KernelError(
            f"kernel {self.name} works in stages, on the operands of a pack; check it with "
            "`flamia-ref golden check`"
        )


_PARTS = tuple(one.name for one in fields(Staged) if one.name != "name")


def staged(kernel: object) -> Staged | None:
    """Return a kernel as stages, if it is a `Staged` or an object with its attributes; else None.

    An instance that can be called is a kernel as a whole, whatever else it has.
    """
    if isinstance(kernel, Staged):
        return kernel
    with guarded("a kernel cannot be read"):
        if callable(kernel) and not isinstance(kernel, type):
            return None
        parts = {part: getattr(kernel, part, None) for part in _PARTS}
        if all(function is None for function in parts.values()):
            return None
        name = getattr(kernel, "__name__", type(kernel).__name__)
        return Staged(**parts, name=line(str(name)))


def load(name: str) -> Kernel:
    """Import a kernel named "module:object", a function or a staged kernel, which becomes a `Staged`.

    Modules of the current directory are found too.

    Raises KernelError where the name has another form, the module is missing or fails, or it has no
    such function.
    """
    module_name, colon, function = name.partition(":")
    if not (colon and module_name and function):
        raise KernelError(f"kernel {shown(name)} must have the form module:function")
    if "" not in sys.path:
        # The installed command does not look in the current directory; `python -m` does.
        sys.path.insert(0, "")
    with guarded(f"kernel {line(name)}: importing it failed"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise KernelError(
                f"kernel {line(name)}: there is no module {error.name!r} here or installed"
            ) from error
        found: Any = module
        for part in function.split("."):
            if not hasattr(found, part):
                known = [key for key, value in vars(module).items() if callable(value)]
                raise KernelError(str(unknown_name(f"function in {module_name}", function, known)))
            found = getattr(found, part)
        in_stages = staged(found)
        if in_stages is not None:
            return in_stages
        if not callable(found):
            raise KernelError(f"kernel {line(name)} is {shown(found)}, which cannot be called")
    kernel: Kernel = found
    return kernel


def call(
    kernel: Kernel,
    *tensors: Any,
    case: str,
    needed: Collection[str] = (),
    always: Collection[str] = _ALWAYS,
    **keywords: Any,
) -> dict[str, Any]:
    """Call a kernel with tensors, q, k and v, and with those of the keywords that it takes.

    `case` names the case in errors. The kernel gets `always` whether it names them or not, and must
    take what is `needed`.

    Raises KernelError where the kernel cannot take the keywords of the protocol, its subclass
    KernelFailed where it fails or does not return a dict, and Unsupported where it does not take what is
    needed.
    """
    name = name_of(kernel)
    with guarded(f"kernel {name} failed in case {case}", KernelFailed):
        taken = _taken(kernel, keywords, name=name, positional=len(tensors), always=tuple(always))
        for keyword in needed:
            if keyword not in taken:
                raise Unsupported(name, f"takes no {keyword}", case)
        results = kernel(*tensors, **taken)
        if not isinstance(results, Mapping) or not all(isinstance(key, str) for key in results):
            raise KernelFailed(
                f"kernel {name} returned {shown(type(results).__name__)} in case {case}; it must "
                'return a dict with "out", "lse" and any stages, by name'
            )
        return dict(results)


def names(kernel: Kernel, keyword: str) -> bool:
    """Return whether a parameter of a kernel has this name. One of ``**extra`` has not."""
    try:
        found = inspect.signature(kernel).parameters.get(keyword)
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in _BY_NAME


def name_of(kernel: Kernel) -> str:
    """Return what a kernel calls itself, as "module:function" where it says so."""
    if isinstance(kernel, Staged):
        return kernel.name
    with guarded("a kernel cannot be named"):
        name = getattr(kernel, "__qualname__", type(kernel).__name__)
        module = getattr(kernel, "__module__", None)
        return line(f"{module}:{name}" if module else str(name))


@contextmanager
def guarded(failure: str, kind: Callable[[str], Exception] = KernelError) -> Iterator[None]:
    """Raise whatever code of the user raises in the block as one error of `kind`, on one line.

    Exceptions that mean to end something are no exception: a kernel must not end a check with a
    status that looks like a verdict. KernelErrors and Ctrl-C pass.
    """
    try:
        yield
    except (KernelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise kind(f"{failure}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an exception as one line, with the innermost line of code that raised it."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  the code is the user's
        message = "its message cannot be read"
    text = line(f"{type(error).__name__}: {message}")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({line(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _taken(
    kernel: Kernel,
    keywords: Mapping[str, Any],
    *,
    name: str,
    positional: int,
    always: tuple[str, ...],
) -> dict[str, Any]:
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return {
            key: keywords[key] for key in always
        }  # a compiled function that tells nothing of itself
    parameters = signature.parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    named = {one.name for one in parameters if one.kind in _BY_NAME}
    taken = {
        key: value for key, value in keywords.items() if key in always or takes_all or key in named
    }
    try:
        signature.bind(*[None] * positional, **taken)
    except TypeError as error:
        first = "q, k, v" if positional > 1 else "operands"
        raise KernelError(
            f"kernel {name} cannot be called with ({first}, *, {', '.join(always)}): {line(str(error))}"
        ) from error
    return taken
