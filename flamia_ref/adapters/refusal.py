"""What an adapter cannot do, said in one line: the case is skipped, not failed."""

import importlib
from types import ModuleType
from typing import Any

from flamia_ref._errors import line
from flamia_ref.kernels import KernelError, Unsupported
from flamia_ref.packing import Mask


class Refused(Unsupported):
    """An adapter cannot run a case: no library, no device, or an input that the kernel cannot take.

    `note` is what the report says of the skipped case.
    """

    def __init__(self, kernel: str, note: str) -> None:
        KernelError.__init__(self, f"{kernel} {note}")
        self.note = note


def library(name: str, *, kernel: str, install: str) -> ModuleType:
    """Import a library. Raises Refused where it, or something that it needs, is missing."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Not only ImportError: a loader misses a shared library, Transformer Engine its core, others a driver.
        why = line(str(error))
        raise Refused(
            kernel,
            f"needs {name}, which cannot be imported here ({why}); install it with `{install}`",
        ) from error


def cuda(
    torch: ModuleType, *, kernel: str, least: tuple[int, int], most: tuple[int, int] = (99, 9)
) -> Any:
    """Return the current CUDA device. Raises Refused where there is none of these compute capabilities."""
    if not torch.cuda.is_available():
        raise Refused(kernel, "needs a CUDA device, and torch sees none")
    found = tuple(torch.cuda.get_device_capability())
    if not least <= found <= most:
        needs = f"compute capability {_dotted(least)}"
        needs += " or more" if most == (99, 9) else f" to {_dotted(most)}"
        raise Refused(
            kernel, f"needs {needs}; this is {torch.cuda.get_device_name()}, {_dotted(found)}"
        )
    return torch.device("cuda", torch.cuda.current_device())


def plain(mask: Mask, *, kernel: str) -> None:
    """Refuse a mask that is more than causal, bottom right where queries and keys differ, or full."""
    if mask.window != (None, None):
        raise Refused(kernel, f"takes no window, and the case has {mask.window}")
    if mask.causal and mask.alignment == "top_left" and not mask.same_tokens:
        raise Refused(
            kernel, "aligns its causal mask at the bottom right, the case at the top left"
        )


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
