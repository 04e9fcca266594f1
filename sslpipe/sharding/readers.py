"""The table of sources that a data set is built from: `shards build --source NAME`.

Others, such as CUB-200 or Market-1501, have a script each in tools/datasets, which writes a table.
"""

from sslpipe.errors import DataError, did_you_mean
from sslpipe.registry import Table
from sslpipe.sharding.csv_table import read_csv
from sslpipe.sharding.idx import read_idx
from sslpipe.sharding.image_folder import read_folder
from sslpipe.sharding.parquet_table import read_parquet
from sslpipe.sharding.sources import SourceOptions, SourceReader
from sslpipe.sharding.tars import read_tars
from sslpipe.sharding.torchvision_datasets import read_torchvision

# `--source NAME`; a source of one's own: a function of SourceOptions, and a line here
BUILT_IN: dict[str, SourceReader] = {
    "folder": read_folder,
    "torchvision": read_torchvision,
    "csv": read_csv,
    "idx": read_idx,
    "parquet": read_parquet,
    "huggingface": read_parquet,
    "tars": read_tars,
}
SOURCES = Table("source", BUILT_IN, "sslpipe.sources")
# options that only some of the built-in ones read; given with another of these, they are refused
OPTIONS: dict[str, tuple[str, ...]] = {
    "csv": ("csv",),
    "image_column": ("csv", "parquet", "huggingface"),
    "label_column": ("csv", "parquet", "huggingface", "tars", "folder"),
    "split_column": ("csv",),
    "download": ("torchvision",),
    "skip_missing": ("folder", "csv", "parquet", "huggingface"),  # of lists of files
}


def find_reader(source: str, options: SourceOptions) -> SourceReader:
    """Look up --source. Raises: DataError for an unknown one, or an option that it would ignore."""
    if source not in SOURCES:
        known = SOURCES.names()
        raise DataError(
            f"--source={source!r} is unknown{did_you_mean(source, known)}; known: "
            f"{', '.join(known)}; tars are used as they are by `sslpipe shards index`"
        )
    for option, owners in OPTIONS.items():
        is_given = getattr(options, option) != getattr(SourceOptions, option)
        if is_given and source in BUILT_IN and source not in owners:  # a package's own may read any
            named = f"--{option.replace('_', '-')}"
            raise DataError(
                f"{named} is for the source {' or '.join(owners)}; here --source is {source}"
            )
    return SOURCES[source]
