"""The data of a case in a manifest, read without trust."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from flamia_ref._errors import unknown_name
from flamia_ref.golden.canonical import Reader
from flamia_ref.golden.case_fields import Fill, Plant, Rows, Twin
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution

T = TypeVar("T")


def read_case(reader: Reader) -> CaseSpec:
    """Return a case from JSON data. Raises ValueError where it is none."""
    reader.fields(*CaseSpec.__slots__)
    distribution = reader["distribution"].text()
    if distribution not in set(Distribution):
        raise unknown_name(f"distribution in {reader.path}", distribution, Distribution)
    plants = []
    for plant in reader["plants"].entries():
        plant.fields(*Plant.__slots__)
        plants.append(
            Plant(
                tensor=plant["tensor"].text(),
                token=plant["token"].integer(),
                head=plant["head"].integer(),
                channel=plant["channel"].integer(),
                bits=plant["bits"].integer(),
            )
        )
    return CaseSpec(
        name=reader["name"].text(),
        why=reader["why"].text(),
        lengths=tuple(length.integer() for length in reader["lengths"].entries()),
        heads=reader["heads"].integer(),
        kv_heads=reader["kv_heads"].integer(),
        head_dim=reader["head_dim"].integer(),
        causal=reader["causal"].boolean(),
        softmax_scale=reader["softmax_scale"].number(),
        distribution=Distribution(distribution),
        seed=reader["seed"].integer(),
        exponent=reader["exponent"].signed(),
        plants=tuple(plants),
        flags=tuple(flag.text() for flag in reader["flags"].entries()),
        fills=tuple(_fill(fill) for fill in reader["fills"].entries()),
        key_lengths=_or_none(reader["key_lengths"], lambda x: tuple(_integers(x))),
        alignment=reader["alignment"].text(),
        window=_or_none(reader["window"], _window),
        softcap=_or_none(reader["softcap"], Reader.number),
        sinks=tuple(sink.number() for sink in reader["sinks"].entries()),
        scale_padding=reader["scale_padding"].integer(),
        twin=_or_none(reader["twin"], _twin),
    )


def _or_none(reader: Reader, read: Callable[[Reader], T]) -> T | None:
    return None if reader.data is None else read(reader)


def _integers(reader: Reader) -> Iterator[int]:
    return (one.integer() for one in reader.entries())


def _window(reader: Reader) -> tuple[int | None, int | None]:
    left, right = _exactly(reader, 2)
    return _or_none(left, Reader.integer), _or_none(right, Reader.integer)


def _exactly(reader: Reader, count: int) -> tuple[Reader, ...]:
    entries = tuple(reader.entries())
    if len(entries) != count:
        raise ValueError(f"{reader.path} has {len(entries)} entries; it must have {count}")
    return entries


def _pair(reader: Reader) -> tuple[int, int]:
    first, end = _exactly(reader, 2)
    return first.integer(), end.integer()


def _fill(reader: Reader) -> Fill:
    reader.fields(*Fill.__slots__)
    token, head, block = _exactly(reader["steps"], 3)
    return Fill(
        tensor=reader["tensor"].text(),
        tokens=_pair(reader["tokens"]),
        heads=_pair(reader["heads"]),
        channels=_pair(reader["channels"]),
        bits=reader["bits"].integer(),
        steps=(token.signed(), head.signed(), block.signed()),
    )


def _rows(reader: Reader) -> Rows:
    reader.fields(*Rows.__slots__)
    return Rows(
        tensor=reader["tensor"].text(),
        first=reader["first"].integer(),
        end=reader["end"].integer(),
    )


def _twin(reader: Reader) -> Twin:
    reader.fields(*Twin.__slots__)
    return Twin(
        case=reader["case"].text(),
        changed=_rows(reader["changed"]),
        equal=tuple(_rows(rows) for rows in reader["equal"].entries()),
    )
