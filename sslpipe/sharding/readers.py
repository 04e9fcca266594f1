"""The table of sources that a data set is built from: `shards build --source NAME`.

Others, such as CUB-200 or Market-1501, have a script each in tools/datasets, which writes a table.
"""

from sslpipe.registry import Table
from sslpipe.sharding.csv_table import read_csv
from sslpipe.sharding.idx import read_idx
from sslpipe.sharding.image_folder import read_folder
from sslpipe.sharding.parquet_table import read_parquet
from sslpipe.sharding.sources import SourceReader
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
