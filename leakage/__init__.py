"""Whether an output can depend on a token that it must not see, how many bits get through, and what safeguards cost."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.leakage import demo as demo
    from flamia_ref.leakage.certificate import Certificate as Certificate
    from flamia_ref.leakage.information.capacities import capacity as capacity
    from flamia_ref.leakage.information.replacing import ReplacedSuffix as ReplacedSuffix
    from flamia_ref.leakage.information.replacing import replaced_suffix as replaced_suffix
    from flamia_ref.leakage.information.report import CapacityReport as CapacityReport
    from flamia_ref.leakage.legal import LEGAL as LEGAL
    from flamia_ref.leakage.legal import Severity as Severity
    from flamia_ref.leakage.proof import prove as prove
    from flamia_ref.leakage.safeguarding.alternatives import Alternative as Alternative
    from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy as SafeguardsStudy
    from flamia_ref.leakage.safeguarding.study_samples import StudySample as StudySample
    from flamia_ref.leakage.safeguarding.studying import safeguards_study as safeguards_study
    from flamia_ref.leakage.search.hunt_report import HuntReport as HuntReport
    from flamia_ref.leakage.search.hunt_report import HuntVerdict as HuntVerdict
    from flamia_ref.leakage.search.hunting import hunt as hunt
    from flamia_ref.leakage.search.witnesses import FoundWitness as FoundWitness
    from flamia_ref.leakage.sharing.structures import Structure as Structure
    from flamia_ref.leakage.sharing.structures import structure as structure
    from flamia_ref.leakage.verification import verify as verify
    from flamia_ref.leakage.witness import WITNESSES as WITNESSES
    from flamia_ref.leakage.witness import Witness as Witness
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "demo": [],
            "certificate": ["Certificate"],
            "information.capacities": ["capacity"],
            "information.replacing": ["ReplacedSuffix", "replaced_suffix"],
            "information.report": ["CapacityReport"],
            "legal": ["LEGAL", "Severity"],
            "proof": ["prove"],
            "safeguarding.alternatives": ["Alternative"],
            "safeguarding.study_report": ["SafeguardsStudy"],
            "safeguarding.study_samples": ["StudySample"],
            "safeguarding.studying": ["safeguards_study"],
            "search.hunt_report": ["HuntReport", "HuntVerdict"],
            "search.hunting": ["hunt"],
            "search.witnesses": ["FoundWitness"],
            "sharing.structures": ["Structure", "structure"],
            "verification": ["verify"],
            "witness": ["WITNESSES", "Witness"],
        },
    )
