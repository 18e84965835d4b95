"""An adapter as data: what it runs, on which devices, which packs it fits, and whether it ever ran."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A kernel that ran: on which device, when, with which versions, and what was seen."""

    device: str
    date: str
    versions: str
    seen: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A kernel of a library behind the kernel protocol.

    Attributes:
        kernel: what `--kernel` takes.
        runs: what the kernel is.
        devices: the devices that the library supports for it.
        recipes: recipes whose packs it fits: its operands are those of the pack, and it is meant to compute what the
            recipe says. None: no recipe of ours, only its outputs can be compared.
        backward: whether it has one.
        gives: what it returns beside "out".
        package: the package, as its index or repository names it.
        checked: the version whose published signatures the calls were compared with; "" where none was.
        limits: what it refuses, or does otherwise than others.
        ran: where it ran. Empty: never run.
    """

    kernel: str
    runs: str
    devices: str
    recipes: tuple[str, ...]
    backward: bool
    gives: tuple[str, ...]
    package: str
    checked: str
    limits: str
    ran: tuple[Run, ...] = ()

    @property
    def evidence(self) -> str:
        """Where it ran, or "never run"."""
        if not self.ran:
            return "never run"
        return "; ".join(
            f"run on {one.device}, {one.date}, {one.versions}: {one.seen}" for one in self.ran
        )
