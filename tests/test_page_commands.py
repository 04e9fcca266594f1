"""Commands of the pages do what the pages say: they are run, on made-up data."""

import csv
import glob
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from sslpipe.cli import app
from sslpipe.data.index import PATH_COLUMN, load_index
from tests.helpers import finetunes
from tests.helpers.dataset import picture, png
from tests.helpers.runs import RECIPE, ROOT, write_recipe
from tests.helpers.shards import write_tar
from tests.test_docs import TEXTS, command_lines, inline
from tools.datasets import scattered_idx

pytestmark = pytest.mark.usefixtures("proved_here", "few_resamples")

OWN_TESTS = {"docs/sensors.md": "tests/sensors/test_readers.py"}


def option(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def make_up(folder: Path, words: list[str]) -> None:
    """Write the files that a `shards build` names: 96 images of 4 classes."""
    source = option(words, "--source", "folder")
    if source == "idx":
        images = ROOT / "assets" / "fashion-mnist-10k"
        scattered_idx.main([str(images), str(folder / option(words, "--root")), "--per-class=5"])
        return
    if source == "tars":
        tar = folder / option(words, "--root") / "train-0.tar"
        texts = [(f"{k}.txt", b"c%d" % (k % 4)) for k in range(96)]
        images = [(f"{k}.png", png(picture(k, 20))) for k in range(96)]
        write_tar(tar, *(each for pair in zip(images, texts, strict=True) for each in pair))
        return
    rows = []
    for number in range(96):
        name = f"c{number % 4}/{number}.png"
        if "(?P<label>" in option(words, "--name-pattern"):
            name = f"c{number % 4}_{number}.jpg"
        path = folder / option(words, "--root", "pictures") / name
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


# what a page calls its reader's own things -> what stands there here
NAMES = {
    "DIR": "out/photos",
    "photos/dataset.json": "out/photos/dataset.json",
    "out/birds/data": "out/photos",
    "RUN": "runs/photos",
    "FOLDER": "out/exported",
    "PHOTOS": "MY_PHOTOS",
    "STRANGERS": "strangers",
    **dict.fromkeys(("SOURCE", "WEIGHTS", "WEIGHTS1", "timm/NAME@FILE.pth"), "out/backbone"),
    "WEIGHTS2": "runs/other",
    "A+B": "out/backbone+runs/other",
}
NOT_HERE = {  # commands that cannot run here, and why
    r"timm:|timm/resnet50@": "weights that are downloaded",
    r" \.\.\.": "a part of a command",
    r"^sslpipe slurm": "tests/test_slurm.py",
    r"my_parts|runs/mine": "tests/test_plugins.py",
    r"loss.kind=distill": "two networks of known widths",
    r"RUN_A": "two runs",
    r"^sslpipe browse": "tests/report/test_browse.py",
    r"--source (torchvision|pngs)": "data of others, and the plug-in of a page",
    r"onnx-int8": "a network of a usual size: tests/export/test_lower.py",
    r"curate select .*--labels": "a table that is filled in by hand: tests/curate",
}


def commands_of(name: str) -> list[str]:
    builds = [code for code in inline(TEXTS[name]) if code.startswith("sslpipe shards build ")]
    words = [*command_lines(TEXTS[name]), *map(shlex.split, builds)]
    lines = [shlex.join(each) for each in words if each[:1] == ["sslpipe"]]
    return [line for line in lines if not any(re.search(reason, line) for reason in NOT_HERE)]


def test_each_kind_of_command_that_is_not_run_is_on_a_page():
    texts = "\n".join(TEXTS.values()).replace("\\\n", " ")
    assert all(re.search(reason, texts, re.MULTILINE) for reason in NOT_HERE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of what pages start from: photographs, shards, a run, an export, features."""
    folder = tmp_path_factory.mktemp("world")
    small = RECIPE.replace("steps = 12", "steps = 2").replace("16, 16]", "16, 64]")
    for name in ("my_images_diet", "my_images_small", "demo", "adapt_mobile"):
        write_recipe(folder, small.replace("tiny", name)).rename(folder / f"{name}.toml")
    (folder / "recipes" / "metric").mkdir(parents=True)
    finetunes.write_recipe(folder).rename(folder / "recipes/metric/my_images_mobile.toml")
    for file in folder.glob("*.toml"):
        file.rename(folder / "recipes" / file.name)
    for number in range(620):
        kind = f"MY_PHOTOS/c{number % 8}" if number < 600 else "strangers"
        path = folder / kind / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 20)).save(path)
    shutil.copytree(folder / "MY_PHOTOS" / "c1", folder / "ada")
    for name in ("A", "a", "b", "query", "new"):
        shutil.copy(folder / "ada" / "1.jpg", folder / f"{name}.jpg")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in (
            "shards build out/photos --root MY_PHOTOS --test-fraction 0.1",
            "train recipes/demo.toml --data out/photos/dataset.json --run-dir runs/photos",
            "train recipes/my_images_small.toml --data out/photos --run-dir runs/other seed=1",
            "evaluate suite runs/photos --data out/photos --out runs/photos/eval.json",
            "embed runs/photos --data out/photos --split train --out train.safetensors",
            "embed runs/photos --data out/photos --split train --out out/new.safetensors",
            "export runs/photos --out out/backbone",
        ):
            run(["sslpipe", *line.split()], patch)
    for name in ("birds", "a", "b"):
        shutil.copytree(folder / "runs/photos", folder / f"runs/{name}")
    shutil.copytree(folder / "out/photos", folder / "out/new")
    return folder


SUITES = set[str]()  # lines that were run


@pytest.mark.parametrize("name", [n for n in TEXTS if commands_of(n) and n not in OWN_TESTS])
def test_the_commands_of_a_page_run_as_they_stand(name, world, tmp_path, monkeypatch):
    """With tiny recipes under the names that the page has."""
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for line in commands_of(name):
        words = shlex.split(line)
        if words[1:3] == ["shards", "build"]:
            build(words, tmp_path, monkeypatch)
            continue
        words = [here for word in words for here in found(word)]
        for key in {"train": ["--run-dir"], "export": ["--out"]}.get(words[1], []):
            shutil.rmtree(option(words, key), ignore_errors=True)
        if words[1:3] == ["evaluate", "suite"]:  # of seconds, and the same on several pages
            if line in SUITES:
                continue
            SUITES.add(line)
        if words[1:3] == ["curate", "select"] and "--labels" not in words:
            words.append("--ignore-labels")  # all photographs have one here
        run(words, monkeypatch)


def build(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(option(words, "--csv") or option(words, "--root"))
    if source.name not in ("MY_PHOTOS", "chosen.csv"):  # which are there
        shutil.rmtree(source, ignore_errors=True)
        make_up(folder, words)
    shutil.rmtree(words[3], ignore_errors=True)
    run(words, monkeypatch)
    manifest = load_index(words[3]).manifest
    assert ("test" in manifest.splits) == ("--test-fraction" in words)
    columns = [each.partition(":")[0] for each in option(words, "--columns").split(",") if each]
    columns += re.compile(option(words, "--name-pattern")).groupindex
    assert [name for name in manifest.columns if name != PATH_COLUMN] == columns


def found(word: str) -> list[str]:
    """What a word of a page is here; a pattern is expanded, as a shell does."""
    for theirs, ours in NAMES.items():
        word = re.sub(rf"^{re.escape(theirs)}(?=/|$)", ours, word)
    return (sorted(glob.glob(word)) if "*" in word else []) or [word]
