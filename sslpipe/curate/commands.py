"""The command that this folder brings."""

COMMANDS = {
    "curate": (
        "sslpipe.curate.cli",
        "Find duplicates, outliers, clusters and samples to label.",
    ),
}

NEXT = {
    "curate": "sslpipe train RECIPE --data DIR/dataset.json --run-dir RUN",
    "curate select": "sslpipe shards build DIR --source csv --csv FOLDER/chosen.csv",
}
