"""Arguments of public functions: a wrong name or type is one line before anything is done."""

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.arguments import checked
from sslpipe.cli.app import COMMANDS, load_command
from sslpipe.errors import FLAGS, UserError, for_caller, naming_options
from sslpipe.export.load import FrozenBackbone
from tests.helpers.exports import trained
from tests.helpers.runs import ROOT
from tests.helpers.shards import run

LABELS = np.arange(12) % 3
PICTURE = Image.new("RGB", (8, 8))
ROWS = np.eye(3)[LABELS]


@pytest.mark.parametrize("name", dir(sslpipe))
def test_help_shows_each_argument_and_its_type_in_a_few_words(name):
    """Neither an expanded union of numpy's, nor a bound, nor the address of a function."""
    value = getattr(sslpipe, name)
    assert inspect.getdoc(value)
    for parameter in inspect.signature(value).parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
        assert len(str(parameter)) <= 100, parameter
        assert " at 0x" not in str(parameter), parameter


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k=2.5), "k = 2.5 .* whole number"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k="5"), "k = '5' .* whole number"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, k=True), "k = True .* whole number"),
        (lambda: sslpipe.build_dataset("out", root="in", skip_bad="no"), "skip_bad = 'no' .*True"),
        (lambda: sslpipe.preview("r.toml", "data", epoch=-1), "epoch = -1 .* 0 or more"),
        (lambda: sslpipe.index_tars([]), r"folders = \[\] .*give the folder"),
        (
            lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, labels_per_class=0),
            "labels_per_class = 0 .*1 or more",
        ),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="both"), "vote = 'both' .*weighted"),
        (lambda: sslpipe.knn(ROWS, LABELS, ROWS, LABELS, vote="majorty"), "mean 'majority'"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=5), r"k = 5 .*give \[5\]"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=[1, "b"]), r"k\[1\] = 'b' .* whole number"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=[1, True]), r"k\[1\] = True .* whole number"),
        (lambda: sslpipe.retrieval(ROWS, LABELS, k=["1"]), r"k\[0\] = '1' .* whole number"),
        (lambda: sslpipe.verification(ROWS, LABELS, far=["a"]), r"far\[0\] = 'a' .* a number"),
        (lambda: sslpipe.build_dataset("out", root="in", test_fraction="a"), "test_fraction = 'a'"),
        (lambda: sslpipe.build_dataset("out", root="in", resize_px="wide"), "resize_px = 'wide'"),
        (lambda: sslpipe.build_dataset("out", root="in", background=(255, 0, 0)), "background = "),
        (lambda: sslpipe.build_dataset("out", root="in", labels=0.3), "labels = 0.3 .*True"),
        (lambda: sslpipe.build_dataset("out", root="in", unseen_classes="bee"), r"\['bee'\]"),
        (lambda: sslpipe.build_dataset("out", root=5), "root = 5 .* a path"),
        (lambda: sslpipe.load_backbone("x", crop_px="wide"), "crop_px = 'wide' .* whole number"),
        (lambda: sslpipe.export_backbone("x", "out", "onnx"), r"formats = 'onnx' .*\['onnx'\]"),
        (lambda: sslpipe.suite("x", "data", against="timm:a"), r"against = .*\['timm:a'\]"),
        (lambda: sslpipe.ImageDataset("data", split=3), "split = 3 .* a text"),
        (lambda: sslpipe.build_dataset(1, name=2, split=3, origin=4), "out = 1 .* a path"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_taken(call, words):
    with pytest.raises(UserError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "given", "nearest"),
    [
        (sslpipe.build_dataset, "roots", "root"),
        (sslpipe.train, "override", "overrides"),
        (sslpipe.embed, "batchsize", "batch_size"),
        (sslpipe.ImageDataset, "transfrom", "transform"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(function, given, nearest):
    with pytest.raises(TypeError, match=f"takes no {given}; did you mean '{nearest}'"):
        function(**{given: "x"})


def test_a_missing_argument_is_named_with_its_function():
    with pytest.raises(TypeError, match=r"knn: .*test_features"):
        sslpipe.knn(ROWS, LABELS)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple])
def test_arrays_of_one_dimension_are_lists(make):
    found = sslpipe.retrieval(ROWS, LABELS, k=make([1, 3]))
    assert {"Recall@1", "Recall@3"} <= {*found}
    with pytest.raises(UserError, match="k"):
        sslpipe.retrieval(ROWS, LABELS, k=make([0.5, 1.5]))
    with pytest.raises(UserError, match="k"):
        sslpipe.retrieval(ROWS, LABELS, k=np.array([[1, 3]]))


def test_a_tilde_is_the_users_folder_in_python_and_in_options_that_a_shell_leaves(
    tmp_path, monkeypatch
):
    (tmp_path / "photos").mkdir()
    PICTURE.save(tmp_path / "photos" / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sslpipe.build_dataset("~/python", root=Path("~/photos"))
    assert run("build", "~/terminal", "--root=~/photos") == 0
    folders = {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("dataset.json")}
    assert folders == {Path("python"), Path("terminal")}
    (tmp_path / "python" / "dataset.json").unlink()
    sslpipe.index_tars(["~/python"])
    assert (tmp_path / "python" / "dataset.json").exists()


def test_numbers_of_numpy_are_numbers_and_what_is_given_arrives():
    @checked
    def given(
        a: int,
        b: float | None = None,
        *,
        c: list[str | Path] | None = None,
        d: Literal["x", "y"] = "x",
        e: re.Pattern[str] | int = 5,
    ) -> list[object]:
        return [a, b, c, d, e]

    assert given(np.int64(3), np.float32(0.5)) == [3, 0.5, None, "x", 5]
    assert type(given(np.uint8(3))[0]) is int
    assert given(a=3, c=["n", Path("m")], d="y", e="any") == [3, None, ["n", Path("m")], "y", "any"]


Z = torch.arange(32.0).sin().view(8, 4)
Y = torch.arange(8) // 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=Y * 0.5), "labels must be integers.*float32"),
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=Y > 1), "labels must be integers.*bool"),
        (lambda: sslpipe.SupConLoss()(Z, Z, labels=[0] * 8), r"torch.tensor\(labels\)"),
        (lambda: sslpipe.NTXentLoss()(Z, Z.to("meta")), "z_b is on meta and z_a on cpu; move"),
        (lambda: sslpipe.NTXentLoss()(Z, Z, ids=Y.to("meta")), "ids is on meta and z_a on cpu"),
        (lambda: trained()(torch.zeros(1, 3, 16, 16).byte()), r"uint8 \(1, 3, 16, 16\).*encode"),
        (lambda: trained()(torch.zeros(3, 16, 16)), r"\(B, C, S, S\).*float32 \(3, 16, 16\)"),
        (lambda: trained()(["a.jpg"]), r"not a list; backbone.encode\(images\)"),
        (lambda: sslpipe.TwoViews()(Z), r"one image alone is \[image\]"),
        (lambda: sslpipe.TwoViews()(["a.jpg"]), r"images\[0\] is a str.*PIL images"),
        (lambda: sslpipe.TwoViews()([np.zeros((8, 8, 3))]), "images are float64.*give uint8"),
    ],
)
def test_a_part_in_a_loop_of_ones_own_names_what_does_not_fit(call, words):
    with pytest.raises(ValueError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_views_take_the_statistics_of_a_backbone_and_show_what_they_were_made_of():
    view = trained().view
    views = sslpipe.TwoViews("simclr", crop_px=8, mean=view.mean, std=view.std)
    plain = sslpipe.TwoViews("simclr", crop_px=8)
    images = torch.arange(2 * 3 * 20 * 20, dtype=torch.int64).view(2, 3, 20, 20).byte()
    for normalised, raw in zip(views(images, ids=[0, 1]), plain(images, ids=[0, 1]), strict=True):
        assert 0 <= raw.min() <= raw.max() <= 1
        expected = (raw - view.mean[:, None, None]) / view.std[:, None, None]
        torch.testing.assert_close(normalised, expected, rtol=1e-4, atol=1e-4)
    arrays = [image.permute(1, 2, 0).numpy() for image in images]
    pictures = [Image.fromarray(array) for array in arrays]
    for same in (list(images), arrays, np.stack(arrays), pictures, tuple(pictures)):
        for ours, expected in zip(plain(same, ids=[0, 1]), plain(images, ids=[0, 1]), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert repr(plain) == "TwoViews('simclr', crop_px=8)"
    assert f"crop_px={view.crop_px}" in repr(view)


def messages():
    """Yield (place, text) of the library, but of commands: those that name an option."""
    for file in sorted((ROOT / "sslpipe").rglob("*.py")):
        place = file.relative_to(ROOT / "sslpipe").as_posix()
        if re.search(r"(^|/)(cli/|cli\.py|commands\.py)", place):
            continue
        tree = ast.parse(file.read_text())
        others = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):  # a text comes before its parts
            if isinstance(node, ast.JoinedStr):
                others |= {id(part) for part in node.values}
                parts = (part.value for part in node.values if isinstance(part, ast.Constant))
                text = "x".join(map(str, parts))
            elif isinstance(node, ast.Constant) and id(node) not in others:
                text = node.value
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in others:
                yield f"{place}:{node.lineno}", str(text)


def arguments_of_calls():
    """Return the arguments of the public functions, and of the methods of public classes."""
    names = set()
    for value in [*(getattr(sslpipe, name) for name in dir(sslpipe)), FrozenBackbone]:
        for each in [value, *dict(inspect.getmembers(value, inspect.isfunction)).values()]:
            names |= {*inspect.signature(each).parameters}
    return names


# options of other programs, of commands that print what only a terminal has, of tars, and of a
# satellite that may be gone
WITHOUT_CALL = {"host", "image", "nan", "neighbors", "nproc", "site", "standalone"}


def test_each_option_in_a_message_is_an_argument_of_a_call():
    """But between backticks, where a command stands as it is typed."""
    known = {name.replace("_", "-") for name in arguments_of_calls()} | {"format", "plugin"}
    named = set()
    for place, text in messages():
        outside = " ".join(text.split("`")[::2])
        for option in re.findall(r"(?<![\w(-])--(?:no-)?([a-z][a-z-]*[a-z])", outside):
            named.add(option)
            assert option in known | WITHOUT_CALL, (place, text)
    assert {"root", "skip-bad", "against", "init", "checkpoint"} <= named


def test_a_value_behind_an_option_in_a_message_is_quoted():
    """In Python a name with a blank or a comma would else end there."""
    ours = {"checkpoint={older[-1]}", "ids={wrong[0]}", "test-fraction={fraction}"}
    found = set()
    for file in (ROOT / "sslpipe").rglob("*.py"):
        if "cli" not in file.as_posix():
            found |= set(re.findall(r"--([a-z-]+=\{[^}]*\})", file.read_text()))
    found -= {each for each in found if "!r}" in each or "shlex.quote" in each or ":." in each}
    assert found == {*ours, "site={path}"}  # the last is of a command alone


def test_options_without_a_value_are_those_of_the_commands():
    options = set()
    for name in COMMANDS:
        command = load_command(name)
        for each in [command, *getattr(command, "commands", {}).values()]:
            options |= {opt for p in each.params if getattr(p, "is_flag", False) for opt in p.opts}
    assert {f"--{name.replace('_', '-')}" for name in FLAGS} <= options


@pytest.mark.parametrize(
    ("typed", "argument"),
    [
        ("--root=photos/a is", "root='photos/a' is"),
        ("--root='a b' is", "root='a b' is"),
        ("by --checkpoint=step-00000012.", "by checkpoint='step-00000012'."),
        ("give --split NAME, or --k 5", "give split=NAME, or k=5"),
        ("mend it, or give --skip-bad", "mend it, or give skip_bad=True"),
        ("give --no-labels to use all", "give labels=False to use all"),
        ("leave --init out (--data, --split)", "leave init out (data, split)"),
        ("add a format (--format=onnx), or", "add a format (formats=['onnx']), or"),
        ("--ids=-1 is", "ids=-1 is"),
        ("--root=2024_photos is", "root='2024_photos' is"),
        ("add --plugin=mine.py", "add sslpipe.load_plugins('mine.py')"),
        ("of a--b.png, '--root' and /--x/", "of a--b.png, '--root' and /--x/"),
        ("`sslpipe embed --split test` and --out", "`sslpipe embed --split test` and out"),
    ],
)
def test_a_message_has_arguments_in_python_and_options_in_the_terminal(typed, argument):
    assert str(UserError(typed)) == argument == for_caller(typed)
    with naming_options():
        assert str(UserError(typed)) == typed


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Folders of images, one of them bad, and a data set of others."""
    root = tmp_path_factory.mktemp("photos")
    for name in ("bee/0.png", "bee/1.png", "ant/0.png", "ant/1.png"):
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        PICTURE.save(root / "images" / name)
        (root / "bad" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "bad" / name).write_bytes(b"no image")
    (root / "list.csv").write_text("path,label\nimages/bee/0.png,bee\nnowhere.png,ant\n")
    sslpipe.build_dataset(root / "data", root=root / "images")
    sslpipe.export_backbone(trained(), root / "export")
    return root


# a public call, the command line that does the same, and the argument that the error names
MISTAKES = [
    ("build_dataset('x', root='nowhere')", "shards build x --root nowhere", "root"),
    ("build_dataset('x')", "shards build x", "root"),
    (
        "build_dataset('x', root='my photos')",
        "shards build x --root 'my photos'",
        "root='my photos'",
    ),
    ("build_dataset('x', root='bad')", "shards build x --root bad", "skip_bad=True"),
    ("build_dataset('x', 'csv')", "shards build x --source csv", "csv"),
    ("build_dataset('x', csv='list.csv')", "shards build x --csv list.csv", "csv"),
    (
        "build_dataset('x', 'csv', csv='list.csv')",
        "shards build x --source csv --csv list.csv",
        "skip_missing=True",
    ),
    (
        "build_dataset('x', 'csv', csv='list.csv', label_column='kind')",
        "shards build x --source csv --csv list.csv --label-column kind",
        "labels=False",
    ),
    (
        "build_dataset('x', root='images', unseen_classes=['cow'])",
        "shards build x --root images --unseen-classes cow",
        "unseen_classes",
    ),
    (
        "build_dataset('x', root='images', background='no')",
        "shards build x --root images --background no",
        "background='no'",
    ),
    (
        "build_dataset('data', root='images', resize_px=4)",
        "shards build data --root images --resize-px 4",
        "overwrite=True",
    ),
    ("load_index('data').split('tset')", "shards show data --split tset", "split"),
    (
        "embed('export', 'data', 'tset')",
        "embed export --data data --split tset --out x.npz",
        "split",
    ),
    (
        "load_backbone('export', checkpoint='best')",
        "embed export --data data --split train --out x.npz --checkpoint best",
        "checkpoint='best'",
    ),
    ("export_backbone('export', 'data')", "export export --out data", "overwrite=True"),
    (
        "export_backbone('export', 'x', ['onnx-int8'])",
        "export export --out x --format onnx-int8",
        "(data, split)",
    ),
    (
        "suite('export', 'data', 'train')",
        "evaluate suite export --data data --split train",
        "split",
    ),
    ("load_plugins('no_such_module')", "--plugin no_such_module shards stats data", "load_plugins"),
]


@pytest.mark.parametrize(("python", "words", "argument"), MISTAKES, ids=str)
def test_a_mistake_names_the_argument_of_who_made_it(
    photos, monkeypatch, call, python, words, argument
):
    monkeypatch.chdir(photos)
    with pytest.raises(UserError) as refused:
        eval(f"sslpipe.{python}")
    outside = " ".join(str(refused.value).split("`")[::2])
    assert argument in outside
    assert "--" not in outside
    option = re.sub(r"^.*?(\w+)(=.*)?$", r"\1", argument.strip("()").split(",")[0])
    option = {"labels": "no-labels", "load_plugins": "plugin"}.get(option, option)
    _, printed = call(*shlex.split(words), status=2)
    assert f"--{option.replace('_', '-')}" in printed
