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
- Arrays are numpy arrays or what `numpy.asarray` reads. 8-bit codes and scales are uint8. "out", the
  gradients and bfloat16 codes are bfloat16, its bits as uint16, or float32 that holds bfloat16 values;
  the property suites, which compare a kernel with itself, take any float32. "lse" is float32.
  Nothing is float64: its bits are those of no kernel, and a change that rounding to float32 takes away
  would count. A kernel that computes in float64 rounds what it returns, `x.astype(numpy.float32)`.
- `extra` are keywords that only a kernel gets whose parameters name them, or which takes
  ``**extra``: `recipe` (the name), `recipe_json` (the recipe in full), `trace` (names of stages).
- Whatever a kernel raises is reported as its failure. A kernel that ends the process, by `os._exit`
  or by a crash of its own, ends the check too: nothing can report that but the exit status.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flamia_ref._errors import line, shown, unknown_name

Kernel = Callable[..., Any]

_ALWAYS = ("cu_seqlens", "causal", "softmax_scale")


class KernelError(ValueError):
    """A kernel could not be found, could not be called, or failed."""


def load(name: str) -> Kernel:
    """Import a kernel named "module:function". Modules of the current directory are found too.

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
        if not callable(found):
            raise KernelError(f"kernel {line(name)} is {shown(found)}, which cannot be called")
    kernel: Kernel = found
    return kernel


def call(kernel: Kernel, *tensors: Any, case: str, **keywords: Any) -> dict[str, Any]:
    """Call a kernel with q, k and v, and with those of the keywords that it takes.

    `case` names the case in errors. Raises KernelError where the kernel cannot take the keywords of
    the protocol, fails, or does not return a dict.
    """
    name = name_of(kernel)
    with guarded(f"kernel {name} failed in case {case}"):
        taken = _taken(kernel, keywords, name=name, positional=len(tensors))
        results = kernel(*tensors, **taken)
        if not isinstance(results, Mapping) or not all(isinstance(key, str) for key in results):
            raise KernelError(
                f"kernel {name} returned {shown(type(results).__name__)} in case {case}; it must "
                'return a dict with "out", "lse" and any stages, by name'
            )
        return dict(results)


def name_of(kernel: Kernel) -> str:
    """Return what a kernel calls itself, as "module:function" where it says so."""
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
    kernel: Kernel, keywords: Mapping[str, Any], *, name: str, positional: int
) -> dict[str, Any]:
    always = {key: keywords[key] for key in _ALWAYS}
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return always  # a compiled function that tells nothing of itself
    parameters = signature.parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    named = {
        one.name
        for one in parameters
        if one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    taken = {
        key: value for key, value in keywords.items() if key in always or takes_all or key in named
    }
    try:
        signature.bind(*[None] * positional, **taken)
    except TypeError as error:
        raise KernelError(
            f"kernel {name} cannot be called with (q, k, v, *, {', '.join(always)}): {line(str(error))}"
        ) from error
    return taken
