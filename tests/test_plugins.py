"""A package and a module that add a part of each kind, by the real command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sslpipe.errors import ExportError, UserError
from sslpipe.export.load import load_backbone
from sslpipe.registry import plugins
from sslpipe.run.checkpoint_files import latest
from sslpipe.run.log import read_metrics
from sslpipe.run.status import status
from tests.helpers import finetunes
from tests.helpers.runs import (
    RECIPE,
    ROOT,
    assert_same_weights,
    command_line,
    launched,
    python,
    write_recipe,
)

PACKAGE = ROOT / "tests" / "helpers" / "plugin_package"
PLUGGED = (
    RECIPE.replace("steps = 12", "steps = 6")
    .replace('kind = "small_resnet"\nwidths = [8, 16, 16]', 'kind = "two_layers"\nwidth = 12')
    .replace('kind = "nt_xent"\ntemperature = 0.2', 'kind = "alignment"\nweight = 0.5')
    .replace("crop_px = 16\n[backbone]", "crop_px = 16\ninvert_prob = 0.5\n[backbone]")
    .replace("save_steps = 5", 'save_steps = 2\ntrackers = ["lines"]')
)


def run_program(*words: object, path: Path | None = None, code: int = 0, **options: object) -> str:
    """Run `sslpipe WORDS` with a folder of packages; returns what it said, in one line."""
    where = os.pathsep.join(map(str, filter(None, (ROOT, path))))
    done = command_line(*map(str, words), PYTHONPATH=where, COLUMNS="200", **options, status=code)
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder where pip has installed the package."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    words = ["--no-build-isolation", "--target", folder / "site", folder / "source"]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def data(site, tmp_path_factory) -> Path:
    """What the package's source gives."""
    folder = tmp_path_factory.mktemp("data")
    run_program("shards", "build", folder, "--source", "stripes", path=site)
    return folder / "dataset.json"


@pytest.fixture(scope="module")
def trained(site, data, tmp_path_factory) -> tuple[list[object], Path]:
    """(the words of a training but for its directory, the directory of a whole run)."""
    folder = tmp_path_factory.mktemp("run")
    words = ["train", write_recipe(folder, PLUGGED), "--data", data, "--run-dir"]
    run_program(*words, folder / "run", path=site)
    return words, folder / "run"


def test_a_package_source_makes_shards(data):
    manifest = json.loads(data.read_text())
    assert manifest["classes"] == ["upright", "level"]
    counts = {k: sum(s["samples"] for s in v) for k, v in manifest["splits"].items()}
    assert counts == {"train": 96, "test": 16}


@pytest.mark.promise(13)
def test_a_run_of_a_packages_parts_is_whole(trained, site, data):
    _, run = trained
    assert all(line["view_distance"] > 0 for line in read_metrics(run))
    lines = [json.loads(text) for text in (run / "lines.txt").read_text().splitlines()]
    assert lines[0] == {"loss": "alignment"}
    assert lines[-1] == {"finished": True}
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    # its state needs no plug-in
    assert "photo_parts" not in sys.modules
    assert status(run)["step"] == 6


def test_check_gives_the_digest_of_the_training(trained, site, data):
    words, run = trained
    shown = run_program("check", *words[1:-1], path=site)
    identity = json.loads((latest(run) / "state.json").read_text())["identity"]
    assert identity["digest"] in shown
    assert identity["plugins"] == {"photo-parts": "1.0"}
    assert "none (the objective uses no negatives)" in shown


def test_a_stopped_run_resumes_with_its_code_and_is_refused_with_another(trained, site, tmp_path):
    words, run = trained
    stopped = tmp_path / "run"
    run_program(*words, stopped, path=site, code=9, SSLPIPE_FAULT="train.step:5")
    # another version of the package
    other = tmp_path / "site"
    shutil.copytree(site, other)
    (metadata,) = other.glob("photo_parts-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    said = run_program(*words, stopped, path=other, code=2)
    assert "the plug-in photo-parts is another version: 1.0 when it began, 1.1 now" in said
    assert not (stopped / "FAILED").exists()  # the run itself has not failed
    # the same one
    said = run_program(*words, stopped, path=site)
    assert "resumed at step 4" in said
    assert_same_weights(run, stopped)


def test_two_processes_train_a_packages_parts(trained, site, tmp_path):
    words, run = trained
    where = f"{ROOT}{os.pathsep}{site}"
    arguments = (*map(str, words), str(tmp_path / "run"), "run.device=cpu")
    for done in launched(2, *arguments, PYTHONPATH=where):
        assert done.returncode == 0, done.stderr
    assert_same_weights(run, tmp_path / "run", atol=1e-4)


def test_a_packages_backbone_is_exported_embedded_and_evaluated(trained, site, data, tmp_path):
    _, run = trained
    assert "proved" in run_program("export", run, "--out", tmp_path / "backbone", path=site)
    rows, out = tmp_path / "test.safetensors", tmp_path / "eval.json"
    run_program("embed", tmp_path / "backbone", "--data", data, "--out", rows, path=site)
    run_program("evaluate", "nearest", rows, rows, "--power", "1", "--out", out, path=site)
    (result,) = json.loads(out.read_text())
    assert (result["protocol"], result["queries"], result["value"]) == ("nearest p=1", 16, 1.0)
    # without the package its backbone is missing, and not the run's tracker
    with pytest.raises(ExportError, match=r"backbone\.kind = 'two_layers' is unknown"):
        load_backbone(tmp_path / "backbone")
    with pytest.raises(UserError, match=r"augment\.invert_prob is not a setting"):
        load_backbone(run)


@pytest.mark.promise(13)
def test_a_package_adds_a_metric_loss_a_head_and_a_miner(site, data, tmp_path):
    recipe = finetunes.RECIPE.replace("validation_classes = 2", "validation_classes = 0")
    recipe = recipe.replace("classes_per_batch = 4", "classes_per_batch = 2").replace(
        'kind = "arcface"\nscale = 8.0',
        'kind = "cosine_pairs"\nmargin = 0.8\n[miner]\nkind = "near"\n'
        '[[also]]\nweight = 0.5\nloss = {kind = "linear"}',
    )
    words = ["train", finetunes.write_recipe(tmp_path, recipe), "--data", data, "--run-dir"]
    run_program(*words, tmp_path / "run", path=site)
    assert (tmp_path / "run" / "DONE").is_file()
    # its version is in the digest; a name of a package is a name that may be meant
    digested = json.loads((latest(tmp_path / "run") / "state.json").read_text())["identity"]
    assert digested["plugins"] == {"photo-parts": "1.0"}
    said = run_program(*words, tmp_path / "b", "loss.kind=cosine_pair", path=site, code=2)
    assert "loss.kind = 'cosine_pair' is unknown; did you mean 'cosine_pairs'?" in said
    said = run_program("check", "--explain", "miner.kind", path=site)
    assert re.search(r"miner: all, .*triplets, near ", said)


def test_a_broken_evaluation_of_a_package_is_a_warning_in_the_list(site):
    said = run_program("evaluate", "--help", path=site)
    assert "Score the class of the nearest training sample" in said
    assert said.count("warning: photo-parts's photo_parts.missing:nothing") == 1
    assert "cannot be loaded: ModuleNotFoundError" in said


MODULE = """
from sslpipe.augment.ops import register_op
from sslpipe.evaluation.evals import EVALS
from sslpipe.losses import LOSSES
from sslpipe.models.backbones import BACKBONES
from sslpipe.run.trackers import TRACKERS
from sslpipe.sharding.readers import SOURCES
from photo_parts.other import Lines, nearest, read_stripes
from photo_parts.training import INVERT, AlignmentLoss, TwoLayers

register_op(INVERT)
LOSSES["alignment"], BACKBONES["two_layers"], TRACKERS["lines"] = AlignmentLoss, TwoLayers, Lines
SOURCES["stripes"], EVALS["nearest"] = read_stripes, nearest
"""


@pytest.mark.promise(13)
def test_a_module_of_the_option_plugin_adds_the_same(data, tmp_path):
    # the same parts, not installed: no entry points
    shutil.copytree(PACKAGE / "photo_parts", tmp_path / "photo_parts")
    (tmp_path / "my_parts.py").write_text(MODULE)
    recipe, run = write_recipe(tmp_path, PLUGGED), tmp_path / "run"
    train = ("train", recipe, "--data", data, "--run-dir", run)
    here = {"path": tmp_path, "cwd": tmp_path}
    plugin = ("--plugin", "my_parts.py")
    run_program(*train, *plugin, code=9, SSLPIPE_FAULT="train.step:3", **here)
    run_program(*train, *plugin, **here)
    assert (run / "lines.txt").is_file()
    # the clean process of the proof has it from this one
    shown = run_program("export", run, "--out", tmp_path / "backbone", *plugin, **here)
    assert "proved equal" in shown
    # the batch script hands it on
    script = run_program("slurm", *train[1:], *plugin, **here)
    assert f"--plugin {tmp_path / 'my_parts.py'}" in script
    # without the option, the run and its export name it
    for words, named in (
        (("embed", tmp_path / "backbone", "--data", data, "--out", "x.safetensors"), "my_parts.py"),
        (("export", run, "--out", tmp_path / "again"), tmp_path / "my_parts.py"),
        (train, tmp_path / "my_parts.py"),
    ):
        said = run_program(*words, code=2, **here)
        hint = f"the run was made with parts of your own: add --plugin={named}"
        assert hint in said
    assert said.startswith(f"error: {hint}")
    # what the message says in Python does load it, and resumes the same run
    resume = f"sslpipe.train({str(recipe)!r}, {str(data)!r}, {str(run)!r})"
    said = python("-c", f"import sslpipe; {resume}", cwd=tmp_path, status=1).stderr
    first = re.search(r"add (sslpipe\.load_plugins\(.*?\))", said)[1]
    lines = f"""{first}
assert {resume} == 6
print(sslpipe.load_backbone({str(run)!r}).num_features)
"""
    shown = python("-c", f"import sslpipe\n{lines}", cwd=tmp_path, status=0).stdout
    assert shown.endswith("12\n")
    # another file is another run
    (tmp_path / "my_parts.py").write_text(MODULE + "# changed\n")
    said = run_program(*train, "--plugin", "my_parts", code=2, **here)
    assert "the plug-in my_parts is another version: sha256:" in said


FAULTY = """
import torch
from sslpipe.losses import LOSSES, InBatchLoss

class Faulty(InBatchLoss):
    def row_loss(self, v, sums, anchors):
        return self.twice(v)

    def twice(self, rows):
        return rows + torch.ones(3, 5, 7)  # line 10

LOSSES["faulty"] = Faulty
"""


def test_a_plugin_that_was_edited_after_its_import_is_refused(tmp_path, monkeypatch):
    """As in a notebook: the old code would run, and the digest would have the new file."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.syspath_prepend(tmp_path)
    for table in (plugins._versions, plugins._loaded, sys.modules):
        monkeypatch.setitem(table, "edited_parts", None)
        monkeypatch.delitem(table, "edited_parts")
    file = tmp_path / "edited_parts.py"
    file.write_text("NUMBER = 1\n")
    for _ in range(2):
        plugins.load_plugins(str(file))
    before = plugins.versions()["edited_parts"]
    file.write_text("NUMBER = 22\n")
    with pytest.raises(UserError, match=r"edited_parts\.py was changed after its import.*restart"):
        plugins.load_plugins(str(file))
    assert plugins.versions()["edited_parts"] == before
    del sys.modules["edited_parts"]  # what has not run yet is another module
    plugins.load_plugins(str(file))
    assert plugins.versions()["edited_parts"] != before


def test_an_error_inside_a_plugin_is_shown_with_its_line(data, tmp_path):
    (tmp_path / "faulty_parts.py").write_text(FAULTY)
    recipe = write_recipe(tmp_path, RECIPE.replace('"nt_xent"', '"faulty"'))
    words = ["train", recipe, "--data", data, "--run-dir", tmp_path / "run"]
    words += ["--plugin", "faulty_parts.py"]
    here = {"path": tmp_path, "cwd": tmp_path}
    said = run_program(*words, **here, code=1)
    assert "RuntimeError: The size of tensor" in said
    assert f'"{tmp_path / "faulty_parts.py"}", line 10, in twice' in said
    assert "RuntimeError: The size of tensor" in (tmp_path / "run" / "FAILED").read_text()
    # while it is imported
    (tmp_path / "faulty_parts.py").write_text("import torch\n\nLOSSES['x'] = 1\n")
    said = run_program(*words, **here, code=2)
    place = f"({tmp_path / 'faulty_parts.py'}, line 3)"
    assert f"cannot be imported: NameError: name 'LOSSES' is not defined {place}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("place", ["import", "loss"])
def test_a_plugin_that_exits_is_an_error_and_nothing_is_done(data, tmp_path, place):
    text = "import sys\nsys.exit(0)\n"
    if place == "loss":
        text = FAULTY.replace("return self.twice(v)", "raise SystemExit(0)")
    (tmp_path / "leaving_parts.py").write_text(text)
    recipe = write_recipe(tmp_path, RECIPE.replace('"nt_xent"', '"faulty"'))
    run = tmp_path / "run"
    words = ("train", recipe, "--data", data, "--run-dir", run, "--plugin", "leaving_parts.py")
    said = run_program(*words, path=tmp_path, cwd=tmp_path, code=2)
    assert "sys.exit(0)" in said
    assert "Traceback" not in said
    assert not (run / "DONE").exists()
