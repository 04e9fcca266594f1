"""What of this folder is `sslpipe.NAME`, too."""

NAMES = dict.fromkeys(
    ("cluster", "find_duplicates", "find_outliers", "select_to_label"),
    "sslpipe.curate.calls",
)
