"""Classes of named fields, like those that ``dataclasses`` makes, for a program that must start at once.

``import dataclasses`` takes 9 ms, for the sake of ``inspect``; ``typing`` takes 5; and each class made with them another quarter
of a millisecond or more. A whole start of rallypoint has 20. So its classes of fields are made here, from plain annotations:

- a `Record` can be changed, and runs ``__post_init__``, if it has one, once its fields are set;
- a `Value` cannot be changed, and can be a key.

A type checker sees dataclasses (PEP 681). So does whoever asks at run time: ``dataclasses.fields``, ``replace`` and ``asdict``,
subclassing as a dataclass, and ``inspect.signature`` all work, at the price of that import.
"""

from __future__ import annotations

from types import MappingProxyType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, ClassVar

    from typing_extensions import Self, dataclass_transform

    Factory = Callable[[], Any] | None
    Check = Callable[[str, Any], None] | None
else:

    def dataclass_transform(**_):
        return lambda cls: cls


__all__ = ["Field", "Record", "Value", "field"]

_MISSING = object()


class Field:
    """How one field gets its value when the caller gives none, and what its value must be."""

    __slots__ = ("check", "default", "factory", "init", "kw_only")

    def __init__(
        self, default: object = _MISSING, factory: Factory = None, kw_only: bool = False, init: bool = True, check: Check = None
    ) -> None:
        self.default = default
        self.factory = factory
        self.kw_only = kw_only
        self.init = init
        self.check = check


def field(
    *, default: Any = _MISSING, factory: Factory = None, kw_only: bool = False, init: bool = True, check: Check = None
) -> Any:
    """A field that is made anew for each object, or must be given by its name, or is set by ``__post_init__`` alone (`init`).

    `check` refuses a bad value of the field of that name; it is for ``__post_init__`` to call.
    """
    return Field(default, factory, kw_only, init, check)


class _WhenAsked:
    """An attribute of a class that is made when somebody looks at it."""

    def __init__(self, make: Callable[[type[_Fields]], object]) -> None:
        self._make = make

    def __get__(self, instance: object, owner: type[_Fields]) -> object:
        return self._make(owner)


def _own_fields(cls: type) -> dict[str, Field]:
    """The fields that this class adds, in the order in which they stand."""
    found: dict[str, Field] = {}
    for name, kind in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063  # it would need inspect
        if kind.startswith("ClassVar"):
            continue
        default = cls.__dict__.get(name, _MISSING)
        found[name] = default if isinstance(default, Field) else Field(default)
        if isinstance(default, Field):
            delattr(cls, name)
    return found


def _twin(cls: type[_Fields]) -> type:
    """A dataclass with the same fields."""
    import dataclasses

    described = []
    for name, one in cls._fields.items():
        settings: dict[str, Any] = {"kw_only": one.kw_only, "init": one.init}
        if one.default is not _MISSING:
            settings["default"] = one.default
        if one.factory is not None:
            settings["default_factory"] = one.factory
        described.append((name, _annotation(cls, name), dataclasses.field(**settings)))
    return dataclasses.make_dataclass(cls.__name__, described, frozen=issubclass(cls, Value))


def _annotation(cls: type, name: str) -> str:
    import inspect

    return str(next(own[name] for own in map(inspect.get_annotations, cls.__mro__) if name in own))


def _signature(cls: type[_Fields]) -> object:
    """The signature that inspect shows."""
    import inspect

    parameters = []
    for name, one in sorted(cls._given.items(), key=lambda item: item[1].kw_only):
        kind = inspect.Parameter.KEYWORD_ONLY if one.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = one.default if one.default is not _MISSING else one.factory or inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=_annotation(cls, name)))
    return inspect.Signature(parameters, return_annotation=None)


_ASKED_FOR = {
    "__signature__": _WhenAsked(_signature),
    "__dataclass_fields__": _WhenAsked(lambda cls: _twin(cls).__dict__["__dataclass_fields__"]),
    "__dataclass_params__": _WhenAsked(lambda cls: _twin(cls).__dict__["__dataclass_params__"]),
}


class _Fields:  # noqa: PLW1641  # Value defines it; a Record is no key
    """What records and values share."""

    _fields: ClassVar[MappingProxyType[str, Field]] = MappingProxyType({})
    _given: ClassVar[dict[str, Field]] = {}  # those that a caller gives
    _positional: ClassVar[tuple[str, ...]] = ()
    _constants: ClassVar[dict[str, object]] = {}
    _plain_count: ClassVar[int] = -1  # how many there are, where all may be given by place

    def __init_subclass__(cls) -> None:
        fields = {**cls._fields, **_own_fields(cls)}
        cls._fields = MappingProxyType(fields)
        cls._given = {name: one for name, one in fields.items() if one.init}
        cls._positional = tuple(name for name, one in cls._given.items() if not one.kw_only)
        cls._constants = {name: one.default for name, one in cls._given.items() if one.default is not _MISSING}
        cls._plain_count = len(fields) if len(cls._positional) == len(fields) else -1
        for name, value in {**_ASKED_FOR, "__match_args__": cls._positional}.items():
            setattr(cls, name, value)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) == self._plain_count and not kwargs:  # the usual way, a third of the time
            self.__dict__.update(zip(self._positional, args))  # noqa: B905  # as many: asking for it costs
            return
        values = {**self._constants, **dict(zip(self._positional, args, strict=False)), **kwargs}
        for name, one in self._given.items():
            if name not in values and one.factory is not None:
                values[name] = one.factory()
        if values.keys() != self._given.keys() or len(args) > len(self._positional) or (args and kwargs):
            self._check_arguments(args, kwargs, values)
        self.__dict__.update({name: values[name] for name in self._given})

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]) -> None:
        name, positional = type(self).__name__, self._positional
        if len(args) > len(positional):
            raise TypeError(f"{name}() takes {len(positional)} positional arguments, but {len(args)} were given")
        if twice := [one for one in positional[: len(args)] if one in kwargs]:
            raise TypeError(f"{name}() got {', '.join(twice)} twice, by place and by name")
        if unknown := kwargs.keys() - self._given.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {', '.join(map(repr, sorted(unknown)))}")
        if missing := [one for one in self._given if one not in values]:
            raise TypeError(f"{name}() misses {', '.join(map(repr, missing))}")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__qualname__}({shown})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__


@dataclass_transform(field_specifiers=(field,))
class Record(_Fields):
    """Fields that can be changed; so it is no key."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__post_init__()

    def __post_init__(self) -> None:
        """For subclasses: check or complete what was given."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value(_Fields):
    """Fields that stay as they are."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name} cannot be deleted")

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in self._fields)))

    def __iter__(self) -> Iterator[Any]:
        """The fields in their order, to be unpacked."""
        return iter([getattr(self, name) for name in self._fields])

    def replace(self, **changes: Any) -> Self:
        """The same with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})
