"""Part: a module whose annotated fields are its settings, declared once.

    class MyLoss(Objective):
        margin: Annotated[float, Field(gt=0)] = 0.2  # a bound stands in the type
        '''What --explain, the docs and an editor say of it.'''
        dim: Dim  # `Derived`: the run decides it, and no recipe has the key

        def setup(self) -> None: ...  # weights and buffers; in place of __init__

In Python `MyLoss(margin=0.3, dim=128)` checks its arguments (`Part` makes a pydantic dataclass of
each subclass). A recipe's `kind = "mine"`, `margin = 0.3` are read by `settings_class("mine")`, a
pydantic model of the same fields without the derived ones; `PartSettings.build(dim=128)` then makes
the same `MyLoss(margin=0.3, dim=128)`.
"""

import inspect
from copy import copy
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from sslpipe.errors import did_you_mean, shown
from sslpipe.registry.schema import KindSettings


class Derived:
    """Marks a field that other settings or the data decide: `dim: Annotated[int, Derived()]`.

    It is an argument of the constructor, and no key of a recipe.
    """


Dim = Annotated[int, Field(ge=1), Derived()]


class PartSettings(KindSettings):
    """The settings of a `Part`: its fields, but not the derived ones."""

    part: ClassVar[type["Part"]]

    def build(self, **known: Any) -> Any:
        """Build the part; see `KindSettings.build`."""
        arguments = {name: value for name, value in self if name != "kind"}
        arguments |= {name: value for name, value in known.items() if name in self.derived}
        return self.part(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a pickle is read: the class has no name in a module."""
        return _empty_settings, (self.part, self.kind), self.__getstate__()


def _empty_settings(part: type["Part"], kind: str) -> PartSettings:
    settings = part.settings_class(kind)
    return settings.__new__(settings)


class _PartType(type):
    """Says in one line what a constructor refuses."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # by place, too, as torch's losses are called: in the order of the fields
        fields: dict[str, FieldInfo] = cls.fields  # type: ignore[attr-defined]
        named = dict(zip(fields, args, strict=False))
        for name, value in named.items():  # 0.2, a margin, would be a switch
            if fields[name].annotation is bool and not isinstance(value, bool):
                raise TypeError(
                    f"{cls.__name__} got {name} = {shown(value)} by place; give arguments by "
                    f"name: {', '.join(fields)}"
                )
        rest = args[len(named) :]  # too many: refused below
        if both := named.keys() & kwargs.keys():
            raise TypeError(f"{cls.__name__} got {min(both)} by place and by name")
        for name, value in {**named, **kwargs}.items():
            if isinstance(value, Tensor) and value.requires_grad:  # it would become a number
                raise TypeError(
                    f"{cls.__name__} does not train its {name}; give a number, as in {name}="
                    f"{shown(value.tolist())}"
                )
        try:
            return super().__call__(*rest, **named, **kwargs)
        except ValidationError as error:
            raise _readable(cls, error) from None


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(Field,))
class Part(nn.Module, metaclass=_PartType):
    """A module whose annotated fields are its settings; a subclass makes its state in `setup`.

    Raises:
        TypeError: The constructor does not take a name, which it gives with the nearest, or lacks
            one.
        ValueError: A value is not of its field's type or range.
    """

    fields: ClassVar[dict[str, FieldInfo]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        """Make the constructor of the fields, those of the bases first."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            raise TypeError(
                f"{cls.__name__} is a Part: declare its settings as fields, margin: float = 0.1, "
                "and make its state in `setup` instead of `__init__`"
            )
        config = ConfigDict(
            extra="forbid",
            use_attribute_docstrings=True,
            arbitrary_types_allowed=True,
            allow_inf_nan=False,
        )
        inherited = getattr(super(cls, cls), "fields", {})
        validated: Any = dataclass(cls, eq=False, repr=False, kw_only=True, config=config)  # is cls
        cls.fields = {}
        for name, field in validated.__pydantic_fields__.items():
            if field.description is None and name in inherited:  # redefined without a docstring
                field = copy(field)
                field.description = inherited[name].description
            cls.fields[name] = field
        cls.__signature__ = _signature(cls.fields)

    def __post_init__(self) -> None:
        """Begin as a module."""
        super().__init__()
        self.setup()

    def setup(self) -> None:
        """Make weights, buffers and whatever else follows from the settings.

        Raises:
            ValueError: They do not go together.
        """

    def __repr__(self) -> str:
        shown = (name for name, field in self.fields.items() if field.repr)
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__name__}({arguments})"

    @classmethod
    @cache
    def settings_class(cls, kind: str) -> type[PartSettings]:
        """Return the settings of a recipe's section whose `kind` is this part."""
        derived = frozenset(name for name, field in cls.fields.items() if _is_derived(field))
        settings: dict[str, Any] = {
            name: (field.annotation, field)
            for name, field in cls.fields.items()
            if name not in derived
        }
        kind_type: Any = Literal[kind]
        settings_type: type[PartSettings] = create_model(
            f"{cls.__name__}Settings",
            __base__=PartSettings,
            __doc__=cls.__doc__,
            kind=(kind_type, kind),
            **settings,
        )
        settings_type.part = cls
        settings_type.derived = derived
        return settings_type


def _signature(fields: dict[str, FieldInfo]) -> inspect.Signature:
    """Return a constructor's signature as help shows it, without the bounds of its types."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.is_required() else field.get_default(),
            annotation=_without_bounds(field.annotation),
        )
        for name, field in fields.items()
    ]
    return inspect.Signature(parameters)


def _without_bounds(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _without_bounds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_without_bounds(each) for each in get_args(hint))]  # noqa: UP007
    return hint


def _is_derived(field: FieldInfo) -> bool:
    return any(isinstance(mark, Derived) for mark in field.metadata)


def _readable(part: Any, error: ValidationError) -> Exception:
    """Return the first mistake as one line."""
    unexpected = ("unexpected_positional_argument", "unexpected_keyword_argument")
    first = min(error.errors(), key=lambda each: each["type"] not in unexpected)
    name = str(first["loc"][-1]) if first["loc"] else ""
    fields: dict[str, FieldInfo] = part.fields
    match first["type"]:
        case "unexpected_keyword_argument":
            return TypeError(
                f"{part.__name__} takes no {name}{did_you_mean(name, fields)}; "
                f"it takes: {', '.join(fields) or 'nothing'}"
            )
        case "missing":
            lacks = [str(each["loc"][-1]) for each in error.errors() if each["type"] == "missing"]
            return TypeError(f"{part.__name__} needs {', '.join(lacks)}")
        case "unexpected_positional_argument":
            return TypeError(f"{part.__name__} takes arguments by name: {', '.join(fields)}")
        case "value_error":
            wrong: Exception = first["ctx"]["error"]
            return wrong
    key = ".".join(map(str, first["loc"]))
    return ValueError(f"{key} = {shown(first['input'])}: {first['msg'].lower()}")
