"""What a user may set: `Settings` of a section, `KindSettings` where its `kind` names a part.

A recipe declares such a section as `Annotated[KindSettings, Kinds("sslpipe.losses:LOSSES")]`: its
`kind` is looked up in the table, and the settings class of that entry reads the other keys. The
help, the docs' table, the nearest valid key and the JSON schema come from the same classes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    ValidationError,
    core_schema,
)

from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.portable import memory_is_short
from sslpipe.registry import REFUSALS, Table, alternatives
from sslpipe.registry.plugins import describe_error, plugin_hint

_FIRST_WORD = re.compile("[A-Za-z]+")


class Settings(BaseModel):
    """A table of a recipe: unknown keys are errors, values never change.

    The string under each field documents it: `sslpipe check --explain KEY` prints it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for numbers; pydantic takes them for 1 and 0."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if holds_section(annotation):  # which checks its own
            return value
        kinds = alternatives(annotation)
        named = any(get_origin(kind) is Literal for kind in kinds)  # pydantic lists the values
        if isinstance(value, bool) and not {bool, Any, object} & {*kinds} and not named:
            raise ValueError(f"{str(value).lower()} is no value of this setting")
        takes_bool = any(name in str(annotation) for name in ("bool", "Any"))
        listed = isinstance(value, list) and any(isinstance(each, bool) for each in value)
        if listed and not takes_bool:
            raise ValueError(f"{shown(value)}: true and false are no numbers")
        return value


class KindSettings(Settings):
    """The settings of a part, and `kind`, which part: `build` makes it."""

    kind: Annotated[str, Field(max_length=200)]
    """Which part; the other keys are its settings."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """Names of further arguments of the part, which other settings or the data decide."""
    example: ClassVar[str] = ""
    """Of a kind that is written with an architecture: KIND/NAME."""

    def build(self, **known: Any) -> Any:
        """Build the part.

        Args:
            known: All that the caller can derive, by name; a part takes what is in its `derived`.

        Raises:
            ValueError: The settings do not go together, or not with what is derived.
        """
        raise NotImplementedError


class SparseSettings(KindSettings):
    """Settings that are recorded only where they were set: weights or data decide the others."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that were set, without `kind`."""
        return {name: value for name, value in self if name in self.model_fields_set - {"kind"}}

    @model_serializer(mode="wrap")
    def _those_that_were_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = write(self)
        return {key: tree[key] for key in tree if key == "kind" or key in self.model_fields_set}


class UnknownKind(SparseSettings):
    """A kind of a recorded run that this process does not know: it is read, and cannot be built."""

    model_config = ConfigDict(extra="allow")
    _near: str = PrivateAttr("")  # "; did you mean ..."

    def build(self, **known: Any) -> Any:
        """Refuse. Raises: UnknownPart: What the kind may be of."""
        raise UnknownPart(f"kind = {self.kind!r} is unknown{self._near}{plugin_hint()}")


class UnknownPart(RecipeError):
    """A part of a recorded run is of a kind that this process does not know."""


class Kinds:
    """The tables that the `kind` of a section is looked up in; see the module's docstring.

    Args:
        tables: "module:NAME" of each, imported when the section is read: parts need torch.
        recorded: The section is of a file that a run has written: a kind that this process does not
            know is read, as an `UnknownKind`.
    """

    def __init__(self, *tables: str, recorded: bool = False) -> None:
        self.names_of_tables = tables
        self.recorded = recorded

    @property
    def tables(self) -> list[Table[Any]]:
        """Import the tables."""
        parts = (name.partition(":") for name in self.names_of_tables)
        return [getattr(import_module(module), name) for module, _, name in parts]

    def names(self) -> list[str]:
        """List the kinds, those of installed packages too."""
        return [name for table in self.tables for name in table.names()]

    def find(self, kind: object) -> type[KindSettings] | None:
        """Return the settings class of a kind; None: no table has it."""
        if not isinstance(kind, str):
            return None
        table = next((t for t in self.tables if kind.partition("/")[0] in t), None)
        return None if table is None else settings_class(table, kind)

    def classes(self) -> Iterator[type[KindSettings]]:
        """Yield the settings class of each kind."""
        for table in self.tables:
            yield from (settings_class(table, name) for name in table.names())

    def read(self, value: Any, info: core_schema.ValidationInfo) -> KindSettings:
        """Validate a section, by the class of its kind."""
        if isinstance(value, KindSettings):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("no_section", "is no section")
        kind = value.get("kind")
        settings_type = self.find(kind)
        recorded = self.recorded or info.context == "recorded"
        if settings_type is None and isinstance(kind, str) and recorded:
            unknown = UnknownKind.model_validate(dict(value), context=info.context)
            unknown._near = did_you_mean(kind, self.names())
            return unknown
        if settings_type is None:
            missing = PydanticCustomError("missing", "is missing")
            error = missing if kind is None else self._unknown_kind(kind)
            detail = InitErrorDetails(type=error, loc=("kind",), input=kind)
            raise ValidationError.from_exception_data("kind", [detail])
        return settings_type.model_validate(dict(value), context=info.context)

    def _unknown_kind(self, kind: object) -> PydanticCustomError:
        known = [
            settings.example or name
            for name, settings in zip(self.names(), self.classes(), strict=True)
        ]
        near = _whole_kind(kind, known) if isinstance(kind, str) else ""
        text = f"is unknown{near}{plugin_hint()}; known: {', '.join(sorted(known))}"
        return PydanticCustomError("unknown_kind", "{text}", {"text": text})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Read by `read`; written as the class that it was read by."""
        return core_schema.with_info_plain_validator_function(
            self.read, serialization=core_schema.simple_ser_schema("any")
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return one schema a kind."""
        schemas = [
            each.__get_pydantic_json_schema__(each.__pydantic_core_schema__, handler)
            for each in self.classes()
        ]
        return {"oneOf": schemas}


def _whole_kind(kind: str, known: Sequence[str]) -> str:
    """Return '; did you mean X?'; of an architecture alone, "resnet50", that its family is lacking.

    The example is one that begins with the same word, as "torchvision/resnet18" does.
    """
    word = _FIRST_WORD.match(kind.lower())
    for example in known:
        architecture = example.partition("/")[2]
        first = _FIRST_WORD.match(architecture)
        if architecture == kind:
            return f"; did you mean {example!r}?"
        if word and first and word[0] == first[0]:
            return f"; an architecture follows its family, as in {example!r}"
    return did_you_mean(kind, known)


def settings_class(table: Table[Any], kind: str) -> type[KindSettings]:
    """Return the settings class of an entry of a table: itself, or that of a `Part`.

    Raises:
        RecipeError: The entry is neither.
    """
    name = kind.partition("/")[0]
    entry = table[name]
    if isinstance(entry, type) and issubclass(entry, KindSettings):
        return entry
    if hasattr(entry, "settings_class"):
        of_part: type[KindSettings] = entry.settings_class(name)
        return of_part
    raise RecipeError(
        f"the {table.what} {name!r} is {shown(entry)}; give a class on sslpipe.registry.part.Part, "
        "or a class of settings with `build` (sslpipe.registry.schema.KindSettings)"
    )


def holds_section(annotation: Any) -> bool:
    """Whether a type is a section of settings, or holds some: Momentum | None, tuple[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(holds_section(each) for each in get_args(annotation))


def kinds_of(field: FieldInfo) -> Kinds | None:
    """Return the tables of a field that is a section with a `kind`; None of others."""
    annotated = [arg for each in alternatives(field.annotation) for arg in get_args(each)[1:]]
    return next((each for each in [*field.metadata, *annotated] if isinstance(each, Kinds)), None)


@contextmanager
def refusals(section: str, kind: str) -> Iterator[None]:
    """Let what a part refuses name section and kind. Raises: RecipeError."""
    try:
        yield
    except UnknownPart as error:
        raise RecipeError(f"{section}.{error}") from None
    except RecipeError:
        raise
    except REFUSALS as error:
        if memory_is_short(error):  # no fault of these settings
            raise
        is_plain = isinstance(error, TypeError | ValueError)
        what = str(error) if is_plain else describe_error(error)
        raise RecipeError(f"[{section}] kind = {kind!r}: {what}") from error
