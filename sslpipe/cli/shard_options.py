"""What `sslpipe shards` is told: options with their help, and how their texts are read."""

from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import ImageColor

from sslpipe.errors import DataError
from sslpipe.sharding.cells import parse_columns
from sslpipe.sharding.columns import check_name
from sslpipe.sharding.gather import TarColumns, parse_pattern

OutFolder = Annotated[Path, typer.Argument(help="The data set's folder.", show_default=False)]
DataSet = Annotated[
    str,
    typer.Argument(
        help="The data set's dataset.json or its folder: a path or a URL.", show_default=False
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        "--num-workers", "--workers", min=1, help="Threads; the files do not depend on them."
    ),
]
ClassFile = Annotated[Path | None, typer.Option(help="Text file, one class name a line, by label.")]


JsonFields = Annotated[
    str | None,
    typer.Option(help="Columns: keys of KEY.json, as sku,shot_at:time or sku=product.id:text."),
]
NamePattern = Annotated[
    str | None,
    typer.Option(help="Columns: a regular expression of the image's name with named groups."),
]


def read_option(help: str, *names: str) -> Any:
    """An option of `build` about what is read."""
    return typer.Option(*names, help=help, rich_help_panel="What to read")


def write_option(help: str, *names: str, **range: float) -> Any:
    """An option of `build` about what is written."""
    return typer.Option(*names, help=help, rich_help_panel="How to write", **range)  # type: ignore[arg-type]


CLASS_DISJOINT = (
    "cub, cars: train on the first half of the classes and test on the others, or split as for "
    "classification."
)
UNSEEN = (
    "Names, separated by commas: their images go to splits of their own, such as test_unseen "
    "beside test."
)
COLUMNS = (
    "Columns: what else is known of an image, as patient,age:integer,shot_at:time; "
    "NAME=THEIRS:KIND renames; kinds: text, integer, float, time; else inferred."
)
LEVELS = "Columns: names of the folders an image is in, as theme,size; - skips one."
PATTERN = "Columns: named groups of a pattern of the file name, `'(?P<theme>[^/]+)/.*'`"
SPLIT_BY = "Column whose groups --test-fraction does not cut, such as patient."
GROUP_BY = "Column whose groups lie side by side, so that partners are read together."
SCATTER = (
    "Place each image once at random in its frame: 55-100 % of its size, shifted, rotated by up to "
    "20 degrees, 50-100 % as bright."
)
RESIZE = (
    "Reduce images whose shorter side is longer than this many px; JPEGs are written again with "
    "quality 95, all others as PNG."
)
BACKGROUND = (
    "Colour under transparent parts, such as white or '#ffffff'; else transparency is dropped, "
    "which often leaves black."
)


def parse_colour(text: str | None) -> tuple[int, int, int] | None:
    """Read a colour by its name or hexadecimal digits. Raises DataError."""
    try:
        if text is None:
            return None
        red, green, blue = ImageColor.getrgb(text)[:3]
        return red, green, blue
    except ValueError:
        raise DataError(
            f"--background {text!r} is no colour; for example white, '#ffffff'"
        ) from None


def parse_names(text: str) -> list[str]:
    """Read names separated by commas."""
    return [name.strip() for name in text.split(",")]


def parse_levels(text: str | None) -> tuple[str, ...]:
    """Read --folder-levels. Raises DataError for what is no name of a column, or comes twice."""
    levels = () if text is None else tuple(parse_names(text))
    for name in set(levels) - {"-"}:
        check_name(name)
        if levels.count(name) > 1:
            raise DataError(f"--folder-levels {text!r} names {name!r} twice")
    return levels


def tar_columns(json_fields: str | None, name_pattern: str | None) -> TarColumns:
    """Read --json-fields and --name-pattern. Raises DataError as their parsers."""
    return TarColumns(
        () if json_fields is None else parse_columns(json_fields, "--json-fields"),
        None if name_pattern is None else parse_pattern(name_pattern),
    )
