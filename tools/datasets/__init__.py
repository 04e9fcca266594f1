"""A script a data set: its files as their owners publish them -> what `sslpipe shards build` reads.

For those who have the clone: `python -m tools.datasets.NAME --help`.
"""
