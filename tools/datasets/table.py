"""Write the table that `shards build --source csv` reads, for the scripts beside this one."""

import argparse
import csv
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

Rows = Callable[[Path], Iterable[tuple[str, ...]]]  # of the folder as its owners unpack it


def write_table(
    description: str | None,
    columns: tuple[str, ...],
    rows: Rows,
    arguments: list[str] | None = None,
) -> None:
    """Write the rows of a folder, and print the command that builds the data set of them.

    Args:
        description: What the script is for.
        columns: path, label, split, then what else is known of an image.
        rows: Lists the images of the folder; paths are relative to it.
        arguments: Those of the command line; None: as given.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("root", type=Path, help="the folder as its owners unpack it")
    parser.add_argument("csv", type=Path, help="the table to write")
    options = parser.parse_args(arguments)
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(rows(options.root))
    words = ["--source", "csv", "--csv", str(options.csv), "--root", str(options.root)]
    words += ["--split-column", "split"]
    if len(columns) > 3:
        words += ["--columns", ",".join(columns[3:])]
    print(shlex.join(["sslpipe", "shards", "build", "OUT", *words]))


def words_of(path: Path) -> list[list[str]]:
    """Read the words of each line of a text file that is not blank."""
    return [line.split() for line in path.read_text().splitlines() if line.strip()]
