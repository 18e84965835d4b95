"""The kernel protocol: what a kernel under test is called with, and what it gives back.

A kernel is a callable::

    kernel(q, k, v, *, cu_seqlens, causal, softmax_scale, window=None, softcap=None, dout=None,
           **extra) -> dict

- q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]: numpy bfloat16
  (`ml_dtypes.bfloat16`), documents one after another; `cu_seqlens` int32 [documents + 1]; `causal`
  bool; `softmax_scale` float. They are copies, which the kernel may change.
- The dict holds "out" [tokens, heads, head_dim] and "lse" [heads, tokens], and any stage of a pack
  by its name. Stages that are lists come as a list with an array a document, or as "s.0", "s.1", ...
- Arrays are numpy arrays or what `numpy.asarray` reads. 8-bit codes and scales are uint8. "out" is
  bfloat16, its bits as uint16, or float32 that holds bfloat16 values.
- `extra` are keywords that only a kernel gets whose parameters name them, or which takes
  ``**extra``: `recipe` (the name), `recipe_json` (the recipe in full), `trace` (names of stages).
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flamia_ref._errors import shown, unknown_name

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
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise KernelError(
                f"kernel {name}: there is no module {error.name!r} here or installed"
            ) from error
        raise KernelError(f"kernel {name}: importing it failed: {reason(error)}") from error
    except (Exception, SystemExit) as error:  # the code is the user's
        raise KernelError(f"kernel {name}: importing it failed: {reason(error)}") from error
    found: Any = module
    for part in function.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(module).items() if callable(value)]
            raise KernelError(str(unknown_name(f"function in {module_name}", function, known)))
        found = getattr(found, part)
    if not callable(found):
        raise KernelError(f"kernel {name} is {shown(found)}, which cannot be called")
    kernel: Kernel = found
    return kernel


def call(kernel: Kernel, *tensors: Any, case: str, **keywords: Any) -> Mapping[str, Any]:
    """Call a kernel with q, k and v, and with those of the keywords that it takes.

    `case` names the case in errors. Raises KernelError where the kernel cannot take the keywords of
    the protocol, fails, or does not return a dict.
    """
    name = getattr(kernel, "__qualname__", repr(kernel))
    taken = _taken(kernel, keywords, name=name, positional=len(tensors))
    try:
        results = kernel(*tensors, **taken)
    except (Exception, SystemExit) as error:  # the code is the user's
        raise KernelError(f"kernel {name} failed in case {case}: {reason(error)}") from error
    if not isinstance(results, Mapping) or not all(isinstance(key, str) for key in results):
        raise KernelError(
            f"kernel {name} returned {shown(type(results).__name__)} in case {case}; it must "
            'return a dict with "out", "lse" and any stages, by name'
        )
    return results


def reason(error: BaseException) -> str:
    """Return an exception as one line, with the innermost line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


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
            f"kernel {name} cannot be called with (q, k, v, *, {', '.join(always)}): {error}"
        ) from error
    return taken
