"""Dataclasses as plain JSON types and back, by the types of their fields: what a measurement is stored as."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


def to_plain(value: Any) -> Any:
    """Plain JSON types. A mapping becomes a list of its pairs, since its keys may be tuples."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(one)] for key, one in value.items()]
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: type[Value], plain: Any) -> Value:
    """The value of type `kind` that `to_plain` gave; TypeError or ValueError where it is none."""
    made: Value = _made(kind, plain)
    return made


def _made(kind: Any, plain: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _one_of(arguments, plain)
    if origin is tuple:
        kinds = [arguments[0]] * len(plain) if arguments[-1] is Ellipsis else arguments
        return tuple(_made(one, part) for one, part in zip(kinds, _list(plain), strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {_made(arguments[0], key): _made(arguments[1], one) for key, one in _list(plain)}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        types: dict[str, Any] = _fields(kind)
        if not isinstance(plain, dict) or plain.keys() != types.keys():
            raise TypeError(f"expected the fields {', '.join(types)}, got {plain!r:.80}")
        return kind(**{name: _made(types[name], plain[name]) for name in types})
    if issubclass(kind, Enum):
        return kind(plain)
    if type(plain) is not kind and not (kind is float and type(plain) is int):
        raise TypeError(f"expected {kind.__name__}, got {plain!r:.80}")
    return kind(plain) if plain is not None else None


def _one_of(kinds: Sequence[Any], plain: Any) -> Any:
    """Of a union: None, or the one other type that it has."""
    [other] = [kind for kind in kinds if kind is not NoneType]
    return None if plain is None else _made(other, plain)


def _list(plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise TypeError(f"expected a list, got {plain!r:.80}")
    return plain


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
