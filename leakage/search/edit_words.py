"""An edit in words, where it is not one element."""

from __future__ import annotations

from flamia_ref.leakage.search.edits import Action, Edit
from flamia_ref.leakage.search.setting import Setting


def edit_in_words(edit: Edit, setting: Setting) -> str:
    """What an edit does: "q[20, channels 0, 1] with the other sign"."""
    return f"{edit.operand}[{_tokens(edit)}{_part(edit, setting)}] {_action(edit)}"


def _tokens(edit: Edit) -> str:
    tokens = edit.changed_tokens
    if len(tokens) == 1:
        return str(tokens[0])
    if tokens == tuple(range(tokens[0], tokens[-1] + 1)):
        return f"{tokens[0]} to {tokens[-1]}"
    return f"{len(tokens)} tokens from {tokens[0]} on"


def _part(edit: Edit, setting: Setting) -> str:
    words = ""
    _, heads, channels = setting.shape("q" if edit.operand == "dout" else edit.operand)
    for name, some, count in (("head", edit.heads, heads), ("channel", edit.channels, channels)):
        if some is not None and len(some) < count:
            words += f", {name}{'s' * (len(some) != 1)} {', '.join(map(str, some[:8]))}"
            words += ", ..." if len(some) > 8 else ""
    return words


def _action(edit: Edit) -> str:
    match edit.action:
        case Action.TIMES:
            return f"times 2^{edit.amount}"
        case Action.ZERO:
            return "set to 0"
        case Action.NEGATE:
            return "with the other sign"
        case Action.RESAMPLE:
            return "with other values"
        case Action.SWAP:
            return "swapped"
        case Action.NAN:
            return "set to NaN"
        case Action.INFINITY:
            return "set to infinity"
    return f"set to bits {edit.amount:#06x}"
