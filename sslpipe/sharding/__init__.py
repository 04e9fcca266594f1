"""Make a data set from images: webdataset tars (shards) beside an index, for everyone with images.

A source gives encoded images with names, labels and columns (`sources`, `tables`, `layouts`;
`arrays` where they are not 8-bit RGB). `writer` cuts them into splits, plans and
writes the shards, of what `members` makes of an image; `gather` reads columns from images and from
shards, `columns` writes them; `record` remembers what is done and writes the index, dataset.json,
which `sslpipe.data` reads. Tars made by others are indexed as they are (`scan`, `index`); `show`
looks at the result. Start reading at SOURCES below, then at `build.build_dataset`.
"""

from sslpipe.registry import Table
from sslpipe.sharding import layouts
from sslpipe.sharding.folder import read_folder
from sslpipe.sharding.sources import SourceReader
from sslpipe.sharding.tables import read_csv, read_parquet

# `--source NAME`; a source of one's own: a function of SourceOptions, and a line here
_BUILT_IN: dict[str, SourceReader] = {
    "folder": read_folder,
    "torchvision": layouts.read_torchvision,
    "csv": read_csv,
    "idx": layouts.read_idx,
    "parquet": read_parquet,
    "huggingface": read_parquet,
}
SOURCES = Table("source", _BUILT_IN, "sslpipe.sources")
# sources that read a list of files, some of which may be missing
LISTS = ("csv", "parquet", "huggingface")
