"""Commands of the pages do what the pages say: they are run, on made-up data."""

import csv
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from sslpipe.cli import app
from sslpipe.data.index import load_index
from sslpipe.sharding.idx import cut_idx
from tests.helpers.dataset import picture
from tests.helpers.runs import ROOT, write_recipe
from tests.test_docs import TEXTS, command_lines, inline

pytestmark = pytest.mark.usefixtures("proved_here")

UNSEEN = ("cub", "torchvision", "pngs")  # data of others, and the plug-in of a page


def pages_builds() -> list[str]:
    found = set()
    for text in TEXTS.values():
        builds = [code for code in inline(text) if code.startswith("sslpipe shards build ")]
        for words in [*command_lines(text), *map(shlex.split, builds)]:
            if words[:3] == ["sslpipe", "shards", "build"]:
                found.add(shlex.join(words))
    return sorted(found)


def option(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def make_up(folder: Path, words: list[str], images: int = 24) -> None:
    """Write the files that a `shards build` names: some images of 4 classes."""
    source = option(words, "--source", "folder")
    if source == "idx":
        cut_idx(ROOT / "assets" / "fashion-mnist-10k", folder / option(words, "--root"), 5)
        return
    rows = []
    for number in range(images):
        path = folder / option(words, "--root", "pictures") / f"c{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 20)).save(path)
        rows.append((path, f"c{number % 4}", number))
    if source == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = {"image": [row[0].read_bytes() for row in rows], "labels": [r[1] for r in rows]}
        parquet.write_table(pa.table(table), folder / option(words, "--root") / "train.parquet")
    if source == "csv" and "--csv" in words:
        file = folder / option(words, "--csv")
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = [each.partition(":") for each in option(words, "--columns").split(",") if each]
        with open(file, "w", newline="") as out:
            table = csv.writer(out)
            names = [name for name, _, _ in columns]
            label_column = option(words, "--label-column", "label")
            labelled = [label_column] if label_column not in names else []
            table.writerow([option(words, "--image-column", "path"), *labelled, *names])
            for path, label, k in rows:
                cells = [
                    f"2024-05-01T12:{k // 60:02d}:{k % 60:02d}"
                    if kind == "time"
                    else f"{name}{value}"
                    for (name, _, kind), value in zip(columns, (k // 4, k % 3), strict=False)
                ]
                table.writerow([path, *([label] if labelled else []), *cells])


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        app.run()
    assert not ended.value.code, shlex.join(words)


@pytest.mark.parametrize(
    "command",
    [each for each in pages_builds() if option(shlex.split(each), "--source") not in UNSEEN],
)
def test_the_builds_of_the_pages_build(command, tmp_path, monkeypatch):
    words = shlex.split(command)
    make_up(tmp_path, words)
    monkeypatch.chdir(tmp_path)
    run(words, monkeypatch)
    index = load_index(tmp_path / words[3])
    assert ("test" in index.manifest.splits) == ("--test-fraction" in words)
    columns = [each.partition(":")[0] for each in option(words, "--columns").split(",") if each]
    assert list(index.manifest.columns) == columns


@pytest.mark.parametrize("name", ["docs/pairs.md", "docs/quickstart.md"])
def test_the_commands_of_a_page_run_as_they_stand(name, tmp_path, monkeypatch):
    """With a tiny recipe under the name that the page has."""
    commands = [words for words in command_lines(TEXTS[name]) if words[:1] == ["sslpipe"]]
    if name == "docs/quickstart.md":  # those for one's own images, up to the export
        builds = [k for k, words in enumerate(commands) if "MY_PHOTOS" in words]
        commands = commands[builds[0] : builds[0] + 7]
    assert {"shards", "check", "train", "export"} <= {words[1] for words in commands}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path).rename(tmp_path / "recipes" / "my_images_small.toml")
    for words in commands:
        if words[1:3] == ["shards", "build"]:
            make_up(tmp_path, words, images=96)
        run(words, monkeypatch)
