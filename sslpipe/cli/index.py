"""`sslpipe index`: an index for `sslpipe search`: add images, remove some, build, verify."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_features, check_file, open_data, parse_ids
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import Data, Ids, argument, option
from sslpipe.cli.terminal import new_app, say
from sslpipe.errors import UserError

app = new_app(
    help="Grow an index for `search`: add features files, remove images; build it for speed.",
    no_args_is_help=True,
    epilog="Example: sslpipe index add photos.json out/photos.safetensors --data out/photos",
)

Index = Annotated[Path, argument("The index, a small file such as photos.json.")]
Features = Annotated[Path, argument("A file of `sslpipe embed`; it stays where and as it is.")]


@app.command(
    epilog="Example: sslpipe index add photos.json out/photos.safetensors --data out/photos"
)
def add(index: Index, features: Features, data: Data) -> None:
    """Add the images of a features file to an index, or begin one with them."""
    check_features([features])
    check_file(index, "INDEX")
    open_data(data)

    from sslpipe.evaluation.search_index import add_to_index

    say(f"{index}: {add_to_index(index, features, data, say):,} images")
    say_next("search", index, "QUERY.jpg", "--model", "MODEL")


@app.command(
    epilog="Example: sslpipe index remove photos.json out/photos.safetensors --ids 469,523"
)
def remove(index: Index, features: Features, ids: Ids = None) -> None:
    """Remove images of a features file from an index; their ids are those that search prints."""
    check_features([features])
    chosen = parse_ids(ids)
    if chosen is None:
        raise UserError("name the images to remove, as in --ids 469,523")

    from sslpipe.evaluation.search_index import remove_from_index

    say(f"{index}: {remove_from_index(index, features, chosen, say):,} images")


@app.command(epilog="Example: sslpipe index build photos.json")
def build(
    index: Index,
    flatten: Annotated[
        bool, option("Flatten the features' spectrum, as `sslpipe whiten` does.")
    ] = True,
    approximate: Annotated[
        bool,
        option(
            "Search features files of 100,000 images or more approximately (faiss); the recall "
            "against exact search is measured and shown."
        ),
    ] = False,
) -> None:
    """Write the rows as they are searched beside an index: a search then starts at once.

    They take as much disk as the features. Files that are added later are written alike.
    """
    _check_index(index)

    from sslpipe.evaluation.search_index import build_index

    search = build_index(index, flatten=flatten, approximate=approximate, say=say)
    say(f"{index}: {len(search):,} images, features {search.form}")
    say_next("search", index, "QUERY.jpg", "--model", "MODEL")


@app.command(epilog="Example: sslpipe index verify photos.json")
def verify(index: Index) -> None:
    """Read all that an index names, and compare it with its sha256; a search reads only a part."""
    _check_index(index)

    from sslpipe.evaluation.search_index import check_index

    say(f"{index}: {check_index(index):,} images, undamaged")


def _check_index(index: Path) -> None:
    if not index.is_file():
        raise UserError(f"there is no index {index}; begin one with `sslpipe index add`")
