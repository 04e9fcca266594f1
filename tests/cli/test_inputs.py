"""A mistake in the words of a command is told before torch is imported."""

import json
import os
import re
import subprocess
import sys

import pytest
import typer

from sslpipe.cli import shards
from sslpipe.cli.inputs import check_file, check_folder, find_images, find_named_images
from sslpipe.data.image_type import RGB8
from sslpipe.errors import UserError
from sslpipe.sharding.readers import SOURCES
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import ROOT, write_recipe
from tests.helpers.shards import grey

# {r}: a good recipe, {d}: a good data set, {s}: its folder, {t}: a shard of it, {m}: a folder that
# passes for a model or a run, {n}: nothing there, {f}: a file
MISTAKES = """
check {n}.toml -> no recipe at
check {s}/.. -> no recipe at {s}/..; recipes in {s}/..: tiny
check {s}/../tinny.toml -> did you mean '{s}/../tiny.toml'?; recipes in {s}/..: tiny
check --explain -> '--explain' requires an argument (sslpipe check --help)
check {r} optm.kind=sgd -> unknown key optm; did you mean 'optim'?
check {r} optim.peak_lr=fast -> optim.peak_lr = 'fast'
check {r} data.batch_size=0 -> data.batch_size = 0
check {r} --data {n}.json -> cannot read
check {r} --data {d} data.split=tset -> has no split 'tset'
check {r} --init={n} -> neither an export nor a run
check {r} --init {n} -> neither an export nor a run
check {r} --init {s} -> {s} is a data set of shards (it has dataset.json), not weights; --data
check {r} --init {d} -> {d} is of a data set of shards, not weights
check {r} --init timm/resnet18@{t} -> {t} is of a data set of shards, not weights
train {n}.toml --data {d} --run-dir {n} -> no recipe at
train {r} --data {d} --run-dir {n} rnu.seed=1 -> unknown key rnu
train {r} --data {n} --run-dir {n} -> cannot read {n}/dataset.json: there is no such file; name
train {r} --data {d} --run-dir -> '--run-dir' requires an argument (sslpipe train --help)
train {r} --data {d} --run-dir {n} --steps 3 -> a setting has no dashes: steps=VALUE
train {r} --data {d} --run-dir {n} --batch-size=3 -> no dashes: data.batch_size=VALUE
train {r} --data {r} --run-dir {n} -> is a file, and no data set
train {r} --data https:/x/d.json --run-dir {n} -> was given with one slash behind 'https:'
train {r} --data ftp://x/dataset.json --run-dir {n} -> scheme 'ftp' is
train {r} --data {d} --run-dir {n} data.split=tset -> no split 'tset'
train {r} --data {lost} --run-dir {n} -> train-000000.tar is missing
train {r} --data {d} --run-dir {f} -> is a file
train {r} --data {d} --run-dir {n} --init {n} -> neither an export nor a run
train {r} --data {d} -> Missing option
preview {r} --data {n} -> cannot read
preview {r} --data {d} --out {n}.xyz -> a picture is named .jpg
slurm {r} data.batchsize=8 --data {d} --run-dir {n} -> did you mean 'batch_size'
slurm {r} --data {d} --run-dir {n} --nodes 3 -> does not divide over 3
slurm {r} --data {d} --run-dir {n} --option job-name=a;b -> job-name
status {n} -> holds no run
status s3://bucket/run -> s3://bucket/run holds no run
runs gs://bucket/runs -> gs://bucket/runs is not a folder
report https://host/run --data {d} -> https://host/run holds no run
check s3://bucket/tiny.toml -> no recipe at s3://bucket/tiny.toml
embed s3://bucket/run --data {d} --out {n}.npz -> there is no s3://bucket/run
search s3://b/a.npz {f} -> cannot read embeddings from s3://b/a.npz
shards build {n} --root hf://datasets/a -> --root='hf://datasets/a' is not a folder
shards build s3://bucket/out --root {s} -> 's3://bucket/out' is a URL
shards build {n} --source csv --csv https://host/a.csv -> cannot read https://host/a.csv
export {n} --out {n} -> neither an export nor a run
export {m} --out {f} -> {f} is a file; name another folder
embed {n} --data {d} --out {n}.npz -> neither an export nor a run
embed {m} --data {n} --out {n}.npz -> cannot read
embed {m} --data {d} --split tset --out {n}.npz -> no split 'tset'
embed {m} --data {d} --out {m} -> --out {m} is a folder; name a file
embed {m} --data {d} --out x.csv -> --out x.csv: features are written to .safetensors or .npz
embed {m} --data {d} --out {f}/x.npz -> {f} is a file
whiten {n} {f} -> holds no config.json
whiten {m} {n}.npz -> cannot read embeddings
evaluate suite {n} --data {d} -> neither an export nor a run
evaluate suite {m} --data {n} -> cannot read
evaluate suite {m} --data {d} --out {m} -> --out {m} is a folder
evaluate suite {m} --data {d} --out={m} -> --out {m} is a folder
evaluate suite {m} --dta {d} -> No such option: --dta
evaluate knn {r} {n} --k -> '--k' requires an argument (sslpipe evaluate knn --help)
evaluate knn {r} {n} --k ten -> Invalid value 'ten' for '--k'
embed {m} --batch-size 0 -> Invalid value '0' for '--batch-size'
report {n} -> holds no run
report {m} --data {n} -> cannot read
report {m} --out {f}/x.html -> {f} is a file; name another folder
gallery enrol {n} {m} --model {n} -> neither an export nor a run
gallery enrol {n} {n} --model {m} -> has no folders
gallery list {n} -> holds no gallery
gallery verify {n}.jpg {f} --model {m} --threshold 0 -> cannot read the image
shards build {n} --root {n} -> {n}
shards build {n} --source fodler --root {m} -> did you mean 'folder'
shards verify {n} -> cannot read
shards index {n} -> {n}
shards stats ftp://x/data -> scheme 'ftp' is
shards show {d} --out {n}.xyz -> a picture is named .jpg
shards build {n} --rot {m} -> No such option
shards build {n} --test-fraction 10 -> Invalid value '10' for '--test-fraction'
shards build {n} --source csv --csv {n} -> {n}: No such file or directory; name the table with --csv
curate duplicates {d} --out {f} -> {f} is a file; name another
curate outliers {f} --data {d} --out {f}/x -> {f} is a file; name
curate clusters {f} --data {d} --out {f} -> {f} is a file; name
curate select {f} --data {d} --count 1 --out {f} -> {f} is a file; name
trian {r} -> No such command
--plugin no.such.module train {r} -> cannot be imported
""".strip().splitlines()

ALL = """
import contextlib, io, json, sys
if sys.argv[1] == "without torch":
    sys.modules["torch"] = None  # an import of it fails with a trace
from sslpipe.__main__ import main
answers = {}
for line, words in json.load(sys.stdin).items():
    sys.argv, said = ["sslpipe", *words], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    answers[line] = code, said.getvalue()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Line -> exit status, stderr; without torch, but where a recipe is read. And the places."""
    folder = tmp_path_factory.mktemp("inputs")
    good, lost = write_dataset(folder / "data", (40,)), write_dataset(folder / "lost", (4,))
    (folder / "lost" / "train-000000.tar").unlink()
    model = folder / "model"
    model.mkdir()
    for name in ("config.json", "recipe.json"):
        (model / name).write_text("{}")
    file = folder / "file.npz"
    file.touch()
    places = {"r": write_recipe(folder), "d": good, "lost": lost, "m": model, "f": file}
    places |= {"n": folder / "nothing", "s": folder / "data"}
    places["t"] = folder / "data" / "train-000000.tar"
    answers = {}
    for how in (
        "with torch",
        "without torch",
    ):  # a recipe's parts bring the settings that they have
        words = {
            line: [word.format(**places) for word in line.split(" -> ")[0].split()]
            for line in MISTAKES
            if ("{r}" in line) == (how == "with torch")
        }
        result = subprocess.run(
            [sys.executable, "-c", ALL, how],
            input=json.dumps(words),
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        answers |= json.loads(result.stdout)
    assert not places["n"].exists(), "something was written"
    return answers, places


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_before_anything_is_computed(answers, mistake):
    code, said = answers[0][mistake]
    assert code == 2, said
    assert mistake.split(" -> ")[1].format(**answers[1]) in said
    if said.startswith("error: "):
        assert said.count("\n") == 1


def test_a_folder_that_is_read_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match=f"out .*: {tmp_path} is read-only"):
        check_file(tmp_path / "new" / "eval.json", (".json",))


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path):
    """As one to a scratch disk that was purged; making it says "File exists"."""
    (tmp_path / "runs").symlink_to(tmp_path / "purged")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "runs", tmp_path / "runs" / "photos", tmp_path / "loop"):
        with pytest.raises(UserError, match=r"run.dir .* is a link to .*, which is not there"):
            check_folder(folder, "--run-dir")
    (tmp_path / "purged").mkdir()
    check_folder(tmp_path / "runs" / "photos")


def test_a_file_of_another_kind_is_not_written_whether_one_is_there_or_not(tmp_path):
    for name in ("cat.jpg", "photos.safetensors", "dataset.json", "page.txt"):
        for _ in range(2):
            with pytest.raises(UserError, match=rf"{name}: .* ends in \.html or \.htm"):
                check_file(tmp_path / name, (".html", ".htm"))
            (tmp_path / name).touch()
    for name in ("page.html", "page.HTM", "page"):
        for _ in range(2):
            check_file(tmp_path / name, (".html", ".htm"))
            (tmp_path / name).touch()


def test_the_defaults_of_the_help_are_those_of_the_functions():
    (source,) = (
        p for p in typer.main.get_command(shards.app).commands["build"].params if p.name == "source"
    )
    assert {*re.findall(r"[a-z-]+", source.help)} >= {*SOURCES}


def test_folders_of_images_hold_no_thumbnails_and_no_image_twice(tmp_path):
    for name in ("ann/1.jpg", "ann/2.JFIF", "bob/1.png", "bob/@eaDir/1.png/THUMB.jpg"):
        grey(tmp_path / name, 1)
    for name in ("@eaDir/x.jpg", "__MACOSX/y.jpg", "ann/.hidden.jpg", "ann/._1.jpg"):
        grey(tmp_path / name, 2)
    grey(tmp_path / "bob/2.tif", 3)  # of a format that builds of 8-bit RGB read, too
    (tmp_path / "ann/a.npy").write_bytes(b"an array")
    (tmp_path / "bob" / "up").symlink_to("..")
    images = [tmp_path / name for name in ("ann/1.jpg", "ann/2.JFIF", "bob/1.png", "bob/2.tif")]
    assert find_images(tmp_path, RGB8) == images
    assert find_named_images(tmp_path, RGB8) == list(
        zip(["ann", "ann", "bob", "bob"], images, strict=True)
    )


def test_folders_of_names_without_an_image_and_images_without_a_name_are_reported(tmp_path):
    for name in ("ann/album/1.jpg", "bob/2.png", "loose.jpg"):
        grey(tmp_path / name, 1)
    (tmp_path / "cy" / "empty").mkdir(parents=True)
    said: list[str] = []
    named = find_named_images(tmp_path, RGB8, said.append)
    paths = [tmp_path / name for name in ("ann/album/1.jpg", "bob/2.png")]
    assert named == [("ann", paths[0]), ("bob", paths[1])]
    assert [sum(name in line for line in said) for name in ("cy", "loose.jpg")] == [1, 1]
    (slip,) = (line for line in said if line.startswith("look at this"))
    assert str(tmp_path / "ann" / "album") in slip  # who is in ann/album, ann or album?
    for path in paths:
        path.unlink()
    with pytest.raises(UserError, match="hold no image"):
        find_named_images(tmp_path, RGB8)


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("names", "is_slip"),
    [
        ("2023 2024-05", True),
        ("100APPLE 101APPLE", True),
        ("Train test_images", True),
        ("ann 2024", False),
        ("Val Ann", False),  # a person's name
        ("1001 1002", False),
    ],
)
def test_years_and_splits_that_became_names_are_reported(tmp_path, names, is_slip):
    for name in names.split():
        grey(tmp_path / name / "1.png", 1)
    said: list[str] = []
    assert len(find_named_images(tmp_path, RGB8, said.append)) == 2
    assert ["became names" in line for line in said] == [True] * is_slip
