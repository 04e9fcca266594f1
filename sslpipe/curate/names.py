"""What of this folder is `sslpipe.NAME`, too."""

NAMES = dict.fromkeys(
    ("cluster", "find_duplicates", "find_outliers", "mutual_neighbours", "select_to_label"),
    "sslpipe.curate.calls",
)
