"""Kernels that people run, behind the kernel protocol: one thin module a library, imported only when named.

``flamia-ref golden check PACK --kernel flamia_ref.adapters.cudnn:mxfp8``. A module needs its library only when one of
its kernels is called; where the library or the device is missing, or a case has what the kernel cannot do, the case is
skipped and the report says why.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.adapters.adapter import Adapter as Adapter
    from flamia_ref.adapters.adapter import Run as Run
    from flamia_ref.adapters.catalogue import LIBRARIES as LIBRARIES
    from flamia_ref.adapters.catalogue import adapters as adapters
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "adapter": ["Adapter", "Run"],
            "catalogue": ["LIBRARIES", "adapters"],
        },
    )
