"""Probes of a GPU: its instructions on hard operands, beside the models of this package."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.device.architectures import ARCHITECTURES as ARCHITECTURES
    from flamia_ref.device.outcomes import Outcome as Outcome
    from flamia_ref.device.outcomes import ProbeReport as ProbeReport
    from flamia_ref.device.outcomes import Status as Status
    from flamia_ref.device.plans import Plan as Plan
    from flamia_ref.device.probing import probe as probe
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "architectures": ["ARCHITECTURES"],
            "outcomes": ["Outcome", "ProbeReport", "Status"],
            "plans": ["Plan"],
            "probing": ["probe"],
        },
    )
