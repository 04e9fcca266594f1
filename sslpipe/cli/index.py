"""`sslpipe index`: add images to an index for `sslpipe search`, and remove some."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_features, check_file, open_data, parse_ids
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import Data, Ids, argument
from sslpipe.cli.terminal import new_app, say
from sslpipe.errors import UserError

app = new_app(
    help="Grow an index for `search`: add features files, remove images.",
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

    say(f"{index}: {add_to_index(index, features, data):,} images")
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

    say(f"{index}: {remove_from_index(index, features, chosen):,} images")
