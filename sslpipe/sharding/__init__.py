"""Make a data set from images: webdataset tars (shards) beside an index, for everyone with images.

In the order in which a folder, table or tar becomes shards; `dataset` is all of it in one call:

    readers                what `--source NAME` reads; a source is a function of `SourceOptions`
    sources                what it takes and gives: `SourceOptions`, `Images` of each split
    walk, split_names      which files there are, which names mean a split
    image_folder           which folders are splits and classes; `folder_doubts`: what looks odd
    csv_table, tables      a row an image; parquet_table: as Hugging Face has them
    listed_files           the files that a folder or table names, and what is not there
    tars, idx, in_memory, torchvision_datasets    other sources; `tar_doubts`: what looks odd
    gather, columns        what is known of each image: its values, their kinds, their file
    build                  `read_samples`, then `write_shards`: cut, write, index and report
    samples                what is built: the samples of all splits, and how splits are cut
    writer, members        shards planned and written; what an image is in them
    arrays, measure        images that are not 8-bit RGB, and the range of their values
    record                 how far a build has come, and dataset.json, which `sslpipe.data` reads
    build_report, copies   what is said of it all; images that are twice

Tars made by others are used as they are: `scan` finds their samples, `index_tars` writes the index,
`join_tars` brings folders together. `show`, `stats` and `verify` look at the result. Nothing is
imported here: a loaded backbone needs `members` alone.
"""
