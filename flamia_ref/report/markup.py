"""HTML as text that is known to be safe: what comes from outside gets in escaped, or not at all."""

import html
from collections.abc import Iterable
from typing import NewType

from flamia_ref._errors import printable

Html = NewType("Html", str)
"""Markup that may go into a page as it is. Only this module makes it."""

Attribute = str | int | float | None

LONGEST = 500
"""Characters of a text from outside that a page shows."""

_VOID = {"input", "link", "meta"}
_NOTHING = Html("")


def short(value: object, most: int = LONGEST) -> str:
    """Return a text without control characters, of at most `most` characters, cut in the middle."""
    # Longer texts are cut before they are escaped: they may be very long.
    whole = str(value)
    if len(whole) > 4 * most:
        whole = whole[: 2 * most] + whole[-2 * most :]
    shown = printable(whole)
    if len(shown) <= most:
        return shown
    head = (most - 1) * 2 // 3
    return f"{shown[:head]}…{shown[head + 1 - most :]}"


def text(value: object, most: int = LONGEST) -> Html:
    """Return a text, escaped and cut as `short` does."""
    return Html(html.escape(short(value, most), quote=False))


def raw(name: str, content: str, /, **attributes: Attribute) -> Html:
    """Return an element whose content browsers do not parse: `script` or `style`, text of our own.

    Raises ValueError where the content could end the element or begin a comment.
    """
    if "</" in content or "<!--" in content:
        raise ValueError(f"the content of <{name}> has '</' or '<!--'; write it in another way")
    return Html(f"<{name}{_attributes(attributes)}>{content}</{name}>\n")


def element(name: str, /, *content: Html, **attributes: Attribute) -> Html:
    """Return an element. `class_` is class, `for_` is for, `aria_label` is aria-label; None: left out.

    An attribute of which the value is "" is written by its name alone.
    """
    opened = f"<{name}{_attributes(attributes)}>"
    return Html(opened if name in _VOID else f"{opened}{''.join(content)}</{name}>")


def joined(parts: Iterable[Html], by: Html = _NOTHING) -> Html:
    """Return parts one after another."""
    return Html(by.join(parts))


def lines(parts: Iterable[Html]) -> Html:
    """Return parts, each on a line of its own."""
    return Html("".join(f"{part}\n" for part in parts))


def document(language: str, content: Html) -> Html:
    """Return a whole page."""
    return Html(f'<!DOCTYPE html>\n<html lang="{language}">\n{content}</html>\n')


def _attributes(attributes: dict[str, Attribute]) -> str:
    parts = []
    for name, value in attributes.items():
        if value is None:
            continue
        key = name.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value == "" else f' {key}="{html.escape(printable(str(value)))}"')
    return "".join(parts)
