"""A strict reader of HTML pages: it refuses what browsers would mend in silence."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"input", "link", "meta"}

# What our pages may be made of. None of these attributes runs a script or carries a style.
ALLOWED = {
    "a": {"class", "href"},
    "body": set(),
    "button": {"type", "id", "hidden", "data-script"},
    "caption": set(),
    "code": set(),
    "dd": set(),
    "details": {"class", "id", "open", "data-failed"},
    "div": {"class", "role", "aria-label", "tabindex"},
    "dl": set(),
    "dt": set(),
    "figcaption": set(),
    "figure": {"class"},
    "form": {"class", "id", "role", "aria-label", "hidden", "data-script"},
    "h1": set(),
    "h2": {"id"},
    "h3": set(),
    "h4": set(),
    "head": set(),
    "header": set(),
    "html": {"lang"},
    "input": {"type", "id", "autocomplete", "spellcheck"},
    "label": set(),
    "li": set(),
    "link": {"rel", "href"},
    "main": set(),
    "meta": {"charset", "http-equiv", "content", "name"},
    "option": {"value"},
    "p": {"class", "id", "role"},
    "path": {"class", "stroke-width", "stroke-dasharray", "d"},
    "pre": set(),
    "rect": {"width", "height"},
    "script": set(),
    "section": {"id", "aria-labelledby", "tabindex"},
    "select": {"id"},
    "span": {"class", "aria-hidden"},
    "strong": set(),
    "style": set(),
    "summary": set(),
    "svg": {"class", "role", "aria-label", "aria-hidden", "width", "height", "viewbox"},
    "table": {"class", "id"},
    "tbody": set(),
    "td": {"class", "colspan", "data-key"},
    "th": {"class", "scope", "data-key"},
    "thead": set(),
    "title": set(),
    "tr": {"data-case", "data-verdict", "data-failed", "data-also"},
    "ul": set(),
}


@dataclass
class Node:
    """An element: its name, attributes, and children, which are texts and nodes."""

    name: str
    attributes: dict[str, str | None]
    children: list["Node | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(one if isinstance(one, str) else one.text for one in self.children)

    def all(self, name: str) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                if child.name == name:
                    yield child
                yield from child.all(name)

    def one(self, name: str) -> "Node":
        (found,) = self.all(name)
        return found

    def by_id(self, wanted: str) -> "Node":
        (found,) = (
            one for name in ALLOWED for one in self.all(name) if one.attributes.get("id") == wanted
        )
        return found

    def cells(self) -> list[str]:
        """The texts of a row."""
        return [one.text for one in self.children if isinstance(one, Node)]


class Strict(HTMLParser):
    """Reads a page and raises AssertionError for what is not in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.top = Node("", {})
        self._open = [self.top]
        self._ids: set[str] = set()
        self._wanted: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert tag in ALLOWED, f"<{tag}>"
        assert len(attributes) == len(attrs), f"an attribute of <{tag}> comes twice"
        extra = attributes.keys() - ALLOWED[tag]
        assert not extra, f"<{tag} {extra}>"
        if attributes.get("id"):
            assert attributes["id"] not in self._ids, f"id {attributes['id']} comes twice"
            self._ids.add(str(attributes["id"]))
        reference = attributes.get("href") or ""
        assert reference.startswith(("#", "data:,")) or "href" not in attributes, reference
        self._wanted |= {reference[1:]} if reference.startswith("#") else set()
        self._wanted |= set((attributes.get("aria-labelledby") or "").split())
        node = Node(tag, attributes)
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"<{tag}/>")

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if not data.isspace():
            assert self._open[-1].name not in {"table", "tr", "tbody", "thead", "ul", "dl", ""}, (
                data
            )
        self._open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"comment {data!r}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"instruction {data!r}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"declaration {data!r}")

    def close(self) -> None:
        super().close()
        assert len(self._open) == 1, f"<{self._open[-1].name}> is not closed"
        assert self._wanted <= self._ids, f"nothing has the id {self._wanted - self._ids}"


def parse(page: str) -> Node:
    """Return the <html> element of a page in which all is in order."""
    assert page.startswith("<!DOCTYPE html>\n")
    assert all(c.isprintable() or c == "\n" for c in page), "a character that is not printable"
    reader = Strict()
    reader.feed(page)
    reader.close()
    (html,) = (one for one in reader.top.children if isinstance(one, Node))
    return html
