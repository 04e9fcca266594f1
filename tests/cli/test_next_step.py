"""What each command says to type next works as it stands, and leads from images to an export."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import sslpipe
from sslpipe.api import plan_from
from sslpipe.cli import next_step
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.export.write import export_backbone
from sslpipe.recipe.reading import labelled_recipes, load_recipe
from tests.helpers.dataset import write_dataset
from tests.helpers.exports import trained
from tests.helpers.photos import write_photos
from tests.helpers.runs import RECIPE, ROOT, parsed
from tests.helpers.shards import grey as write_grey

STEPS = "steps = 4"
pytestmark = pytest.mark.usefixtures("proved_here", "few_resamples")


@pytest.fixture
def follow(call, tmp_path, monkeypatch):
    """Run a command line in a folder of its own; returns the one that it says to type next."""
    monkeypatch.chdir(tmp_path)

    def follow(line):
        out, err = call(*shlex.split(line)[1:])
        assert "Next: sslpipe" not in out  # what is piped stays as it is
        lines = [each for each in err.splitlines() if each.startswith("Next")]
        assert len(lines) <= 1, lines
        return lines[0].partition(": ")[2] if lines else None

    return follow


def follow_all(follow, line, last):
    """Every command from `line` on, up to and without the first that begins with `last`."""
    seen = []
    while line is not None and not line.startswith(last):
        assert line not in seen
        seen.append(line)
        line = follow(line)
    return [" ".join(shlex.split(each)[1:3]) for each in seen], line


def test_a_beginner_is_led_from_photographs_to_an_export(follow, tmp_path):
    write_photos(tmp_path / "my photos")
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / next_step.FIRST_RECIPE
    recipe.write_text(RECIPE.replace("steps = 12", STEPS))

    build = "sslpipe shards build 'out/my data' --root 'my photos' --test-fraction 0.3"
    commands, line = follow_all(follow, build, "cat ")
    assert [command.split()[0] for command in commands] == [
        "shards", "shards", "check", "preview", "train", "evaluate", "report", "export"
    ]  # fmt: skip
    assert line == "cat runs/tiny/backbone/README.md"
    assert (tmp_path / "runs/tiny/report.html").stat().st_size > 10_000
    assert (tmp_path / "runs/tiny/backbone/README.md").is_file()
    assert "runs/tiny-2" in follow(
        f"sslpipe preview {next_step.FIRST_RECIPE} --data 'out/my data'"
    )  # runs/tiny is taken

    # what is in the data set, and which of it to label
    data = "--data 'out/my data/dataset.json'"
    line = follow(f"sslpipe embed runs/tiny {data} --split train --out f.safetensors")
    assert line == "sslpipe evaluate retrieval f.safetensors f.safetensors --exclude-same-id"
    assert follow(line) is None
    out = "--split test --split train --out '{split}.safetensors'"
    line = follow(f"sslpipe embed runs/tiny/backbone {data} {out}")
    assert line == "sslpipe evaluate knn train.safetensors test.safetensors"
    assert follow(line) is None
    curate = f"sslpipe curate outliers f.safetensors {data} --out look/outliers"
    commands, line = follow_all(follow, curate, "sslpipe shards")
    assert commands == ["curate outliers", "curate clusters", "curate select"]
    parsed(*shlex.split(line)[1:])  # it wants the labels that nobody has filled in
    line = follow("sslpipe curate duplicates 'out/my data' --out look/duplicates")
    assert "data.keep" not in line  # there are none
    cats = tmp_path / "my photos/cats"
    shutil.copy(cats / "0.png", cats / "copy.png")
    follow("sslpipe shards build twice --root 'my photos'")
    line = follow("sslpipe curate duplicates twice --out look/twice")
    assert "'data.keep=duplicate_group first'" in line
    follow(line)


def test_outside_of_a_clone_the_recipes_of_the_package_are_named(follow, tmp_path):
    write_photos(tmp_path / "photos")
    line = follow("sslpipe shards build data --root photos")
    assert line == "sslpipe shards show data --out samples.png"
    recipe = shlex.split(follow(line))[2]
    assert Path(recipe).samefile(ROOT / next_step.FIRST_RECIPE)
    with pytest.raises(UserError, match=re.escape(repr(recipe))):  # of a page, as it stands there
        load_recipe(next_step.FIRST_RECIPE)


def test_a_data_set_may_be_named_by_its_file(follow, tmp_path):
    write_photos(tmp_path / "photos")
    (tmp_path / "recipes").mkdir()
    (tmp_path / next_step.FIRST_RECIPE).write_text(RECIPE)
    follow("sslpipe shards build data --root photos")
    wanted = f"sslpipe check {next_step.FIRST_RECIPE} --data data/dataset.json"
    for command in ("shards show", "shards stats", "shards verify"):
        for name in ("data", "data/dataset.json"):
            assert follow(f"sslpipe {command} {name}") == wanted, (command, name)
    assert follow("sslpipe shards show data --ids 1,4") is None  # in the middle of something else
    for name in ("data", "data/dataset.json"):
        line = follow(f"sslpipe curate duplicates {name} --no-column --out look")
        assert line == wanted, name


def test_existing_weights_are_the_other_way(call, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    call("shards", "build", "my data", "--root", "photos")
    (tmp_path / "recipes").mkdir()
    for path in (next_step.FIRST_RECIPE, next_step.ADAPTING):
        shutil.copy(ROOT / path, path)  # a clone has it
    next_step.after_a_look("my data", "data.keep=duplicate_group first")
    lines = capsys.readouterr().err.splitlines()
    titles, commands = zip(*(line.split(": ", 1) for line in lines), strict=True)
    assert titles == ("Next", "Or, from pretrained weights")
    start = "--init timm/NAME@WEIGHTS.pth --data 'my data/dataset.json'"
    assert commands[1].startswith(f"sslpipe check {next_step.ADAPTING} {start} 'data.keep=")
    parsed(*shlex.split(commands[1])[1:])
    monkeypatch.setenv("SSLPIPE_NEXT", "0")
    next_step.after_a_look("my data")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "classes"),
    [(12, 2), (40, 0), (135, 6), (160, 5), (160, 0), (160, 60), (117, 39), (700, 7)],
)
def test_the_check_of_a_small_data_set_has_the_settings_that_fit_it(
    monkeypatch, tmp_path, capsys, images, classes
):
    """As it is printed, with weights in place of a placeholder, it plans a watched training."""
    data = write_dataset(
        tmp_path / "data", (images,), px=8, classes=classes or 1, labelled=classes > 0
    )
    start = trained()
    monkeypatch.chdir(ROOT)
    next_step.after_a_look(data)
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 2 + (classes >= 4)  # a fine-tuning, where there are enough labels
    for line in lines:
        words = shlex.split(line.replace(next_step.ANY_WEIGHTS, "START"))
        recipe = load_recipe(words[2], [word for word in words[3:] if "=" in word])
        plan = plan_from(recipe, load_index(data), start if "START" in words else None)
        assert len(plan.watched)


@pytest.mark.parametrize("images", [60, 700])
def test_the_check_of_data_without_a_train_split_names_one_that_is_there(
    monkeypatch, tmp_path, capsys, images
):
    data = write_dataset(tmp_path / "data", (images,), px=8, classes=6, split="holiday pictures")
    start = trained()
    monkeypatch.chdir(ROOT)
    next_step.after_a_look(data)
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 2 + len(labelled_recipes())  # which a satellite brings
    for line in lines:
        words = shlex.split(line.replace(next_step.ANY_WEIGHTS, "START"))
        recipe = load_recipe(words[2], [word for word in words[3:] if "=" in word])
        plan = plan_from(recipe, load_index(data), start if "START" in words else None)
        assert plan.recipe.data.split == "holiday pictures"


def test_labels_are_the_other_way_where_no_setting_is_lost(call, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("ant", "bee", "cat", "dog"):
        write_grey(tmp_path / "photos" / name / "a.png", 60)
        write_grey(tmp_path / "photos" / name / "b.png", 90)
    call("shards", "build", "my data", "--root", "photos")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")

    def labelled(data, *overrides):
        next_step.after_a_look(data, *overrides)
        lines = capsys.readouterr().err.splitlines()
        return [line.split(": ", 1)[1] for line in lines if "labels of 4 classes" in line]

    (line,) = labelled("my data")
    assert labelled("my data/dataset.json") == [line]
    assert " --data 'my data/dataset.json' sampler." in line  # 16 classes are more than there are
    parsed(*shlex.split(line)[1:])
    # a fine-tuning takes no data.keep, so it would train on the duplicates that were just found
    assert not labelled("my data", "data.keep=duplicate_group first")


def test_features_of_new_classes_are_searched_in_themselves(follow, tmp_path):
    write_photos(tmp_path / "photos")
    follow("sslpipe shards build data --root photos --split-by class --test-fraction 0.5")
    export_backbone(trained(), tmp_path / "own")
    out = "--split train --split test --out '{split}.safetensors'"
    line = follow(f"sslpipe embed own --data data {out}")
    assert line == "sslpipe evaluate retrieval test.safetensors test.safetensors --exclude-same-id"
    assert follow(line) is None


def test_images_without_a_label_are_no_class_that_splits_share(tmp_path, capsys):
    """kNN would find no neighbour of a test image's class."""
    rows = {"train": ["ant", "ant", "", ""], "test": ["bee", "bee", "", ""]}
    lines = ["path,label,split"]
    for split, labels in rows.items():
        for place, label in enumerate(labels):
            write_grey(tmp_path / f"{split}{place}.png", 9 * len(lines))
            lines.append(f"{split}{place}.png,{label},{split}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    data = tmp_path / "data"
    table = tmp_path / "list.csv"
    sslpipe.build_dataset(data, "csv", csv=table, split_column="split")
    files = {split: Path(f"{split}.npz") for split in rows}
    next_step.after_embed(files, Path("own"), str(data), load_index(data))
    line = "Next: sslpipe evaluate retrieval test.npz test.npz --exclude-same-id\n"
    assert capsys.readouterr().err == line


def test_a_training_without_labelled_test_images_is_shown(follow, tmp_path):
    write_photos(tmp_path / "photos")
    follow("sslpipe shards build data --root photos --no-labels")
    (tmp_path / "own.toml").write_text(RECIPE.replace("steps = 12", STEPS))
    line = follow("sslpipe check own.toml data.holdout=0 --data data")
    assert line == "sslpipe preview own.toml data.holdout=0 --data data --out views.png"
    line = follow("sslpipe train own.toml data.holdout=0 --data data --run-dir here")
    assert line == "sslpipe report here --data data"
    line = follow("sslpipe embed here --data data --split train --out f.safetensors")
    assert line == "sslpipe search f.safetensors QUERY.jpg --model here --data data"
    follow("sslpipe shards build two --root photos --no-labels --test-fraction 0.3")
    line = follow("sslpipe train own.toml data.holdout=0 --data two --run-dir there")
    features = "there/features/test.safetensors"
    assert line == f"sslpipe embed there --data two --split test --out {features}"
    assert follow(line) == "sslpipe report there --data two"


def test_only_the_first_of_several_processes_says_it_and_no_script(monkeypatch, capsys):
    monkeypatch.setenv("SSLPIPE_NEXT", "0")
    next_step.say_next(["status", "a run"])
    monkeypatch.delenv("SSLPIPE_NEXT")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        next_step.say_next(["status", "a run"])
    assert capsys.readouterr().err == "Next: sslpipe status 'a run'\n"
