"""Make a data set from images: webdataset tars (shards) beside an index, for everyone with images.

A source gives encoded images with names, labels and columns (`sources`, `image_folder`,
`csv_table`, `parquet_table`, `tars`, `idx`, `torchvision_datasets`, `in_memory`; `arrays` where
they are not 8-bit RGB, whose range `measure` finds). `writer` cuts them into splits, plans and
writes the shards, of what `members` makes of an image; `gather` reads columns from images and from
shards, `columns` writes them; `record` remembers what is done and writes the index, dataset.json,
which `sslpipe.data` reads. Tars made by others are indexed as they are (`scan`, `index_tars`);
`show` and `verify` look at the result. `dataset` is all of it in one call. Start reading at
`readers.SOURCES`, then at `build.write_shards`. Nothing is imported here: a loaded backbone needs
`members` alone.
"""
