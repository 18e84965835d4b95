"""When which tile is computed where: work, policies, a simulation of them, and what it costs by a fitted model."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.schedule.comparison import Comparison as Comparison
    from flamia_ref.schedule.comparison import compare as compare
    from flamia_ref.schedule.cost import Constants as Constants
    from flamia_ref.schedule.cost import Terms as Terms
    from flamia_ref.schedule.cost import terms_of as terms_of
    from flamia_ref.schedule.deterministic import DETERMINISTIC as DETERMINISTIC
    from flamia_ref.schedule.deterministic import recipe_in_order as recipe_in_order
    from flamia_ref.schedule.hardware import GPU as GPU
    from flamia_ref.schedule.hardware import GPUS as GPUS
    from flamia_ref.schedule.kernel import Kernel as Kernel
    from flamia_ref.schedule.kernel import kernel_of as kernel_of
    from flamia_ref.schedule.launches import Launch as Launch
    from flamia_ref.schedule.launches import Simulation as Simulation
    from flamia_ref.schedule.launches import simulate as simulate
    from flamia_ref.schedule.libraries import LIBRARIES as LIBRARIES
    from flamia_ref.schedule.libraries import Library as Library
    from flamia_ref.schedule.measured import Cell as Cell
    from flamia_ref.schedule.measured import published as published
    from flamia_ref.schedule.order import Order as Order
    from flamia_ref.schedule.policies import POLICIES as POLICIES
    from flamia_ref.schedule.policies import Policy as Policy
    from flamia_ref.schedule.simulation import Timeline as Timeline
    from flamia_ref.schedule.simulation import run as run
    from flamia_ref.schedule.turns import Turns as Turns
    from flamia_ref.schedule.turns import turns_of as turns_of
    from flamia_ref.schedule.validation import Validation as Validation
    from flamia_ref.schedule.validation import validate as validate
    from flamia_ref.schedule.work import Pass as Pass
    from flamia_ref.schedule.work import Problem as Problem
    from flamia_ref.schedule.work import Size as Size
    from flamia_ref.schedule.work import Work as Work
    from flamia_ref.schedule.work import work_of as work_of
    from flamia_ref.schedule.workloads import WORKLOADS as WORKLOADS
    from flamia_ref.schedule.workloads import cu_seqlens_of as cu_seqlens_of
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "comparison": ["Comparison", "compare"],
            "cost": ["Constants", "Terms", "terms_of"],
            "deterministic": ["DETERMINISTIC", "recipe_in_order"],
            "hardware": ["GPU", "GPUS"],
            "kernel": ["Kernel", "kernel_of"],
            "launches": ["Launch", "Simulation", "simulate"],
            "libraries": ["LIBRARIES", "Library"],
            "measured": ["Cell", "published"],
            "order": ["Order"],
            "policies": ["POLICIES", "Policy"],
            "simulation": ["Timeline", "run"],
            "turns": ["Turns", "turns_of"],
            "validation": ["Validation", "validate"],
            "work": ["Pass", "Problem", "Size", "Work", "work_of"],
            "workloads": ["WORKLOADS", "cu_seqlens_of"],
        },
    )
