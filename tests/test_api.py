"""What a notebook does in one line each: the names of the package, and whole runs from Python."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from PIL import Image

import sslpipe
from sslpipe.errors import UserError
from sslpipe.models.state import torch_as_it_starts
from sslpipe.run.accelerator import join_processes
from tests.helpers import finetunes, runs
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.exports import trained
from tests.helpers.runs import ROOT, assert_same_weights, final_weights, python, write_recipe

BROUGHT = {  # folder -> names that it brings; without it this test is not run
    "curate": (
        "cluster",
        "find_duplicates",
        "find_outliers",
        "select_to_label",
    ),
    "sensors": ("SensorFiles",),
    "search": ("Gallery", "ImageSearch", "browse", "choose", "rank_features"),
}
SATELLITES = [name for names in BROUGHT.values() for name in names]


def test_the_packages_names_are_imported_at_their_first_use():
    """In a process without torch: below, in `AGAIN`."""
    for name in (*sslpipe.__all__, *SATELLITES):
        assert callable(getattr(sslpipe, name)), name
    assert not hasattr(sslpipe, "trian")
    assert dir(sslpipe) == sorted([*sslpipe.__all__, *SATELLITES])
    starred = {}
    exec("from sslpipe import *", starred)
    assert {*starred} - {"__builtins__"} == {*sslpipe.__all__} >= {"train", "load_backbone", "knn"}


def test_train_runs_both_kinds_from_paths_and_what_it_trained_loads(tmp_path):
    data = write_dataset(tmp_path / "data", (40, 60, 72), classes=8)
    recipe = write_recipe(tmp_path)
    (tmp_path / "metric").mkdir()
    metric = finetunes.write_recipe(tmp_path / "metric")
    folder = str(tmp_path)
    assert sslpipe.train(str(recipe), str(data), folder + "/ssl", overrides=["steps=2"]) == 2
    index = sslpipe.load_index(data)
    tuned = sslpipe.load_recipe(metric, ["steps=2", "backbone.widths=[8, 16, 16]"])
    assert sslpipe.train(tuned, index, folder + "/tuned", init=folder + "/ssl") == 2
    assert sslpipe.load_backbone(folder + "/tuned").num_features == 8
    assert (tmp_path / "ssl" / "DONE").exists()
    ssl, tuned = final_weights(tmp_path / "ssl"), final_weights(tmp_path / "tuned")
    key = "backbone.network.0.weight"
    assert ssl[key].shape == tuned[key].shape
    assert not torch.equal(ssl[key], tuned[key])
    torch.testing.assert_close(tuned[key], ssl[key], rtol=0, atol=0.1)  # it started from there


def test_a_run_in_another_thread_trains_the_same_weights_and_leaves_signals_alone(tmp_path, capfd):
    data = write_dataset(tmp_path / "data", (40, 60, 72))
    recipe = write_recipe(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        words = (recipe, data, tmp_path / "a")
        trained = pool.submit(sslpipe.train, *words, overrides=["steps=2"])
    assert trained.result() == 2
    assert "not the main thread" in capfd.readouterr().err
    assert sslpipe.train(recipe, data, tmp_path / "b", overrides=["steps=2"]) == 2
    assert "main thread" not in capfd.readouterr().err
    runs.assert_same_weights(final_weights(tmp_path / "a"), final_weights(tmp_path / "b"))


def test_trainings_of_two_threads_are_those_of_one_after_the_other(tmp_path, capfd):
    """As of a search over settings with n_jobs=2: torch's generators are the process's."""
    data = write_dataset(tmp_path / "data")
    recipe = write_recipe(tmp_path)

    def train(name, seed):
        settings = {"steps": 8, "seed": seed, "run.device": "cpu"}
        return sslpipe.train(recipe, data, tmp_path / name, overrides=settings)

    for seed in (1, 2):
        train(f"alone-{seed}", seed)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, ("a-1", "a-2"), (1, 2))) == [8, 8]
    assert capfd.readouterr().err.count("another thread of this process trains: waiting") == 1
    for seed in (1, 2):
        assert_same_weights(tmp_path / f"alone-{seed}", tmp_path / f"a-{seed}")


def test_the_accelerators_of_a_notebook_stay_as_they_are(tmp_path):
    """Accelerate's state is the process's: one that is made afterwards would be refused."""
    data = write_dataset(tmp_path / "data")
    recipe = write_recipe(tmp_path)
    settings = {"steps": 2, "run.device": "cpu", "optim.precision": "fp32"}
    mine = {"cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    states = (PartialState, AcceleratorState, GradientState)
    try:
        for state in states:
            state._reset_state()
        sslpipe.train(recipe, data, tmp_path / "before", overrides=settings)
        accelerator = Accelerator(**mine)
        sslpipe.train(recipe, data, tmp_path / "beside", overrides=settings)
        assert accelerator.mixed_precision == "bf16"
        assert accelerator.gradient_accumulation_steps == 4
        assert_same_weights(tmp_path / "before", tmp_path / "beside")
    finally:
        for state in states:
            state._reset_state()


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "notebook",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(default_dtype, torch.float64),
        partial(default_dtype, torch.bfloat16),
        partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        partial(torch.device, "meta"),  # as torch.set_default_device("cuda")
    ],
    ids=["no grad", "inference mode", "float64", "bfloat16", "autocast", "default device"],
)
def test_what_a_notebook_set_in_torch_changes_no_training(notebook, tmp_path):
    data = write_dataset(tmp_path / "data")
    recipe = write_recipe(tmp_path)
    settings = ["steps=2", "optim.precision=fp32"]
    sslpipe.train(recipe, data, tmp_path / "fresh", overrides=settings)
    with notebook():
        before = torch.is_grad_enabled(), torch.get_default_dtype()
        sslpipe.train(recipe, data, tmp_path / "run", overrides=settings)
        assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before
    assert_same_weights(tmp_path / "fresh", tmp_path / "run")


@pytest.mark.parametrize("around", [nullcontext, partial(torch.autocast, "cpu")])
def test_a_step_of_bf16_computes_with_the_weights_of_the_step_before(around):
    """Torch keeps the weights that an autocast has cast until the outermost one ends."""
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with around(), torch_as_it_starts():
        assert layer(x).dtype == torch.float32
        outputs = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(layer(x).detach())
            torch.nn.init.zeros_(layer.weight)
        assert torch.equal(outputs[1], layer.bias.detach().bfloat16()[None])
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    "notebook",
    [
        partial(default_dtype, torch.float64),
        partial(default_dtype, torch.bfloat16),
        partial(torch.device, "meta"),
    ],
    ids=["float64", "bfloat16", "default device"],
)
def test_another_default_of_torch_changes_no_call(notebook, tmp_path):
    data = write_dataset(tmp_path / "data")
    recipe = write_recipe(tmp_path)
    backbone = trained()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 8)).astype(np.float32)
    labels = np.arange(40) % 4
    images = [picture(number % 6, px=40) for number in range(8)]
    calls = {
        "knn": lambda: sslpipe.knn(rows[:30], labels[:30], rows[30:], labels[30:]),
        "retrieval": lambda: sslpipe.retrieval(rows, labels)["MAP@R"],
        "linear_probe": lambda: sslpipe.linear_probe(rows, labels, 2 * rows, labels),
        "views": lambda: sslpipe.TwoViews("simclr", crop_px=32)(images)[0].numpy().tobytes(),
        "duplicates": lambda: repr(sslpipe.find_duplicates(images)),
        "encode": lambda: backbone.encode(images).numpy().tobytes(),
        "embed": lambda: sslpipe.embed(backbone, data, "train").features.numpy().tobytes(),
        "preview": lambda: sslpipe.preview(recipe, data, images=2).tobytes(),
        "check": lambda: sslpipe.check_recipe(recipe, data, overrides=["steps=2"]).warnings,
    }
    expected = {name: call() for name, call in calls.items()}
    with notebook():
        assert {name: call() for name, call in calls.items()} == expected


def test_runs_of_one_process_have_their_own_precision(tmp_path):
    """As in a notebook."""
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    precisions = {"first": "fp32", "half": "bf16", "again": "fp32"}
    for run, precision in precisions.items():
        settings = ["steps=2", f"optim.precision={precision}"]
        assert sslpipe.train(recipe, data, tmp_path / run, overrides=settings) == 2
    alone = ["train", str(recipe), "--data", str(data), "--run-dir", str(tmp_path / "alone")]
    python("-m", "sslpipe", *alone, "steps=2", "optim.precision=bf16", status=0)
    assert same_weights(tmp_path / "half", tmp_path / "alone")
    assert same_weights(tmp_path / "again", tmp_path / "first")
    assert not same_weights(tmp_path / "half", tmp_path / "first")


# in a process of its own: this one has imported much already
AGAIN = """
import sys, sslpipe
assert "torch" not in sys.modules
from sslpipe.api import train
data, *words = sys.argv[1:]
for recipe, run in zip(words[::2], words[1::2]):  # [run] makes no other run
    assert train(recipe, data, run, overrides=["steps=2", "run.log_steps=3"]) == 2
print(*sorted({"accelerate", "torch._dynamo"} & {*sys.modules}))
"""


def test_a_finished_run_started_again_changes_nothing_and_imports_little(tmp_path):
    data = str(write_dataset(tmp_path / "data", (40, 60, 72), classes=8))
    words = []
    for kind in (runs, finetunes):
        (tmp_path / kind.__name__).mkdir()
        run = tmp_path / kind.__name__ / "run"
        words += [str(kind.write_recipe(run.parent)), str(run)]
        sslpipe.train(words[-2], data, run, overrides=["steps=2"])

    def files():
        found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return {path: each for path, each in found.items() if path.parent.name != "heartbeat"}

    assert {"accelerate", "torch._dynamo"} <= {*sys.modules}  # a training does
    before = files()
    command = [sys.executable, "-c", AGAIN, data, *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
    assert files() == before
    # what is not surely this run's end is the training's to judge
    for recipe, run in zip(words[::2], words[1::2], strict=True):
        with pytest.raises(UserError, match="holds a run with other settings: seed"):
            sslpipe.train(recipe, data, run, overrides=["steps=2", "seed=1"])
        weights = Path(run, "checkpoints", "step-00000002", "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1])
        with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
            sslpipe.train(recipe, data, run, overrides=["steps=2"])


def test_of_other_data_on_a_started_run_the_data_are_named_not_what_follows(tmp_path):
    data = write_dataset(tmp_path / "data", (40, 60))
    few = write_dataset(tmp_path / "few", (3, 4))
    recipe = runs.write_recipe(tmp_path)
    sslpipe.train(recipe, data, tmp_path / "run", overrides=["steps=1"])
    with pytest.raises(UserError, match=r"data\.batch_size") as of_itself:
        sslpipe.train(recipe, few, tmp_path / "new", overrides=["steps=1"])
    for again in (data, few):
        with pytest.raises(UserError) as refused:
            sslpipe.train(recipe, again, tmp_path / "run", overrides=["steps=1", "data.holdout=90"])
        named = "the data set is not the one that the run began with" in str(refused.value)
        assert named == (again == few)
    assert "began with" not in str(of_itself.value)


def same_weights(run: Path, other: Path) -> bool:
    theirs = final_weights(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in final_weights(run).items())


def test_a_process_second_run_gets_its_own_device():
    state = PartialState(cpu=True)
    state.device = torch.device("cuda")  # as if the first run had been on a GPU
    join_processes(cpu=True, timeout_s=10)
    assert PartialState().device == torch.device("cpu")


def test_a_url_names_no_place_to_write(tmp_path):
    """Of s3://bucket/run a folder "s3:" would be made here, and lost with a container."""
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    for url in ("s3://bucket/run", "file:///run"):
        with pytest.raises(UserError, match=r"run_dir = '\w+:/.*is a URL.*name a folder"):
            sslpipe.train(recipe, data, url)
    words = ["sslpipe", "train", recipe, "--data", data, "--run-dir", "s3://bucket/run"]
    ended = python("-m", *map(str, words), cwd=tmp_path)
    assert ended.returncode == 2
    assert "--run-dir = 's3://bucket/run' is a URL" in ended.stderr
    assert not (tmp_path / "s3:").exists()


def test_what_a_kind_would_ignore_is_refused(tmp_path):
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    with pytest.raises(UserError, match="overrides are for the path of a recipe"):
        sslpipe.train(sslpipe.load_recipe(recipe), data, tmp_path / "run", overrides=["steps=1"])
    with pytest.raises(UserError, match=r"run\.cache: 'device' is for pretraining; use 'none'"):
        sslpipe.load_recipe(finetunes.write_recipe(tmp_path), ["run.cache=device"])
    assert not (tmp_path / "run").exists()


def test_features_of_a_split_are_those_of_encode(tmp_path):
    data = write_dataset(tmp_path / "data", (6, 5), classes=3, broken={4: b"no picture"})
    backbone = trained()
    with pytest.warns(UserWarning, match="train000004"):
        rows = sslpipe.embed(backbone, str(data), "train", device="cpu", batch_size=4)
    assert rows.ids.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert rows.labels.tolist() == [number % 3 for number in rows.ids.tolist()]
    expected = backbone.encode([picture(number) for number in rows.ids.tolist()])
    torch.testing.assert_close(rows.features, expected)


def test_images_are_embedded_in_one_call_whatever_holds_them(tmp_path):
    backbone = trained()
    images = [png(picture(number)) for number in range(5)]
    (tmp_path / "sub dir").mkdir()
    paths = [tmp_path / "sub dir" / f"{number}.png" for number in range(5)]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(image)
    opened = [Image.open(path).convert("RGB") for path in paths]
    arrays = [np.asarray(image) for image in opened]
    expected = torch.cat([backbone.encode(image) for image in images])
    for same in (paths, [str(path) for path in paths], images, opened, arrays, tuple(paths)):
        rows = sslpipe.embed(backbone, same, device="cpu")
        torch.testing.assert_close(rows.features, expected)
        assert rows.labels.tolist() == [-1] * 5
        assert rows.ids.tolist() == [0, 1, 2, 3, 4]
    alone = sslpipe.embed(backbone, images[2], device="cpu")
    torch.testing.assert_close(alone.features, expected[2:3])
    # what cannot be decoded is warned of, and the others keep their numbers
    paths[1].write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"images\[1\].*1\.png"):
        rows = sslpipe.embed(backbone, paths, device="cpu")
    assert rows.ids.tolist() == [0, 2, 3, 4]
    torch.testing.assert_close(rows.features, expected[rows.ids])
    with pytest.raises(UserError, match=r"split = .train. .*omit it"):
        sslpipe.embed(backbone, paths, "train")


def test_features_are_written_as_the_command_writes_them(tmp_path, call):
    data = write_dataset(tmp_path / "data", (6, 5), classes=3, broken={4: b"no picture"})
    sslpipe.export_backbone(trained(), tmp_path / "export")
    file = tmp_path / "new folder" / "rows.safetensors"
    with pytest.warns(UserWarning, match="train000004"):
        rows = sslpipe.embed(tmp_path / "export", data, "train", out=file)
    words = ("embed", tmp_path / "export", "--data", data, "--split", "train")
    call(*words, "--out", tmp_path / "same.safetensors")
    assert file.read_bytes() == (tmp_path / "same.safetensors").read_bytes()
    assert rows.ids.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    with pytest.raises(UserError, match=r"out='.*\.csv'.*\.safetensors or \.npz"):
        sslpipe.embed(tmp_path / "export", data, "train", out=tmp_path / "rows.csv")
    with pytest.raises(UserError, match=r"out = .*omit it"):
        sslpipe.embed(tmp_path / "export", [picture(1)], out=file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": [1, 4], "epoch": 3}, ("--ids", "1,4", "--epoch", "3")),
        ({"overrides": ["seed=3"]}, ("seed=3",)),
    ],
)
def test_a_preview_is_the_commands(tmp_path, call, arguments, words):
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    drawn = sslpipe.preview(recipe, data, **arguments)
    call("preview", recipe, *words, "--data", data, "--out", tmp_path / "views.png")
    with Image.open(tmp_path / "views.png") as same:
        assert drawn.tobytes() == same.tobytes()


def test_a_preview_shows_as_many_images_as_are_asked_for_and_no_others(tmp_path):
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    few, more = (sslpipe.preview(recipe, data, images=count).height for count in (2, 3))
    assert few < more
    with pytest.raises(UserError, match="images = 0"):
        sslpipe.preview(recipe, data, images=0)
    with pytest.raises(UserError, match=r"ids=99\d* is not in the split"):
        sslpipe.preview(recipe, data, ids=[1, 99999])


def test_settings_are_a_dict_or_the_texts_of_a_command(tmp_path):
    path = write_recipe(tmp_path)
    texts = ["steps=3", "data.batch_size=16", "optim.peak_lr=1e-05"]
    values = {"steps": np.int64(3), "data.batch_size": 16, "optim.peak_lr": 1e-5}
    assert sslpipe.load_recipe(path, texts) == sslpipe.load_recipe(path, values)
    nested = {"steps": 3, "data": {"batch_size": 16}, "optim": {"peak_lr": 1e-5}}
    assert sslpipe.load_recipe(path, nested) == sslpipe.load_recipe(path, values)
    with pytest.raises(UserError, match="unknown key stepz; did you mean 'steps'"):
        sslpipe.load_recipe(path, {"stepz": 3})
    with pytest.raises(UserError, match=r"steps\.x=3.*steps is a value"):
        sslpipe.load_recipe(path, {"steps.x": 3})
    with pytest.raises(UserError, match=r"overrides = 'steps=3' is not a list; give \['steps=3'\]"):
        sslpipe.load_recipe(path, "steps=3")
    for widths in ([8, 16, 16], (8, 16, 16), np.array([8, 16, 16])):
        named = sslpipe.load_recipe(path, {"backbone.widths": widths})
        assert named.backbone.widths == [8, 16, 16]
        assert named._backbone_overrides == {"widths"}
    for wrong in ({3: 1}, [("steps", 3)]):
        with pytest.raises(UserError, match=r"\b3\b"):
            sslpipe.load_recipe(path, wrong)


class Images(torch.utils.data.Dataset):
    """What a notebook may hold."""


WRONG = {
    "backbone 3": (lambda t: sslpipe.load_backbone(3), r"3 \(int\).*give a path"),
    "backbone None": (lambda t: sslpipe.load_backbone(None), "give a path"),
    "backbone of no text": (lambda t: sslpipe.load_backbone(""), "give a path"),
    "state dict": (lambda t: sslpipe.load_backbone({"a": torch.ones(1)}), "goes into its network"),
    "export 3": (lambda t: sslpipe.export_backbone(3, t / "out"), "give a path"),
    "export to 3": (lambda t: sslpipe.export_backbone(trained(), 3), "out = 3"),
    "one format": (lambda t: sslpipe.export_backbone(trained(), t, "onnx"), r"formats = .*\['onnx"),
    "index 3": (lambda t: sslpipe.load_index(3), r"not by 3 \(int\)"),
    "index None": (lambda t: sslpipe.load_index(None), "dataset.json, not by None"),
    "index of images": (lambda t: sslpipe.load_index(t), "--root .*build_dataset"),
    "index of a picture": (lambda t: sslpipe.load_index(t / "a.png"), r"a\.png is a file.*list"),
    "embed a folder": (lambda t: sslpipe.embed(trained(), str(t)), "--root .*build_dataset"),
    "embed None": (lambda t: sslpipe.embed(trained(), None), "takes a data set .* not a NoneType"),
    "embed a Dataset": (lambda t: sslpipe.embed(trained(), Images()), "a Images; of a torch Datas"),
    "no batch": (lambda t: sslpipe.embed(trained(), t, batch_size=0), "batch_size = 0"),
    "no worker": (lambda t: sslpipe.embed(trained(), t, num_workers=-1), "num_workers = -1"),
    "half a batch": (lambda t: sslpipe.suite(trained(), t, batch_size=0.5), "batch_size = 0.5"),
    "index into a URL": (lambda t: sslpipe.index_tars(t, "s3://b/tars"), "out = .*URL"),
    "suite into a URL": (lambda t: sslpipe.suite(trained(), t, out="s3://b/e.json"), "out = .*URL"),
    "suite of a folder": (lambda t: sslpipe.suite(trained(), t), "build_dataset"),
    "suite of 3": (lambda t: sslpipe.suite(trained(), 3), "dataset.json, not by 3"),
    "train None": (lambda t: sslpipe.train(None, t, t), "a recipe is .* not None"),
    "train a dict": (lambda t: sslpipe.train({}, t, t), "load_recipe"),
    "train into 3": (lambda t: sslpipe.train("a.toml", t, 3), "run_dir = 3"),
    "check None": (lambda t: sslpipe.check_recipe(None, t), "recipe = None"),
    "recipe 3": (lambda t: sslpipe.load_recipe(3), r"not 3 \(int\)"),
    "no architecture": (
        lambda t: sslpipe.load_backbone(torch.nn.Flatten()),
        "a Flatten does not say .*architecture=.*sslpipe.knn",
    ),
    "half an architecture": (
        lambda t: sslpipe.load_backbone(torch.nn.Flatten(), architecture="resnet18"),
        "architecture = 'resnet18' .*'torchvision/resnet18' or 'timm/resnet18'",
    ),
    "a bare name": (
        lambda t: sslpipe.load_backbone("resnet50"),
        "timm:resnet50 or torchvision:resnet50",
    ),
    "report 3": (lambda t: sslpipe.write_report(3), "run_dirs = 3"),
    "build into 3": (lambda t: sslpipe.build_dataset(3, root=t), "out = 3"),
    "build of a folder": (lambda t: sslpipe.build_dataset(t / "out", t), "root="),
    "build from": (lambda t: sslpipe.build_dataset(t / "out", str(t)), "source = .*folder.*root="),
    "build of 3": (lambda t: sslpipe.build_dataset(t / "out", root=3), "root = 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_one_line_that_names_it_and_the_remedy(case, tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture(0)))
    call, message = WRONG[case]
    with pytest.raises(UserError, match=message) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"a.png", "tiny.toml"}


def test_what_a_notebook_shows_says_what_it_is(tmp_path):
    data = write_dataset(tmp_path / "data", (6, 5), classes=3)
    index = sslpipe.load_index(data)
    assert sslpipe.load_index(index) is index
    images = sslpipe.ImageDataset(index, "train")
    assert "'train': 11" in repr(index)
    assert "classes=3" in repr(index)
    assert "images=11, classes=3" in repr(images)
    assert "samples=11" in repr(images.split)
    backbone = trained()
    assert f"-> {backbone.num_features} features" in repr(backbone)
    assert len(repr(backbone).splitlines()) == 2
    rows = sslpipe.embed(backbone, index, "train", device="cpu")
    assert f"(11, {backbone.num_features})" in repr(rows)
    assert "11 in 3 classes" in repr(rows)
    assert "11 images" in repr(sslpipe.ImageSearch(rows))
    result = sslpipe.linear_probe(rows.features, rows.labels, 2 * rows.features, rows.labels)
    assert "confusion" not in repr(result)
    for path in (tmp_path / "photos" / "a", tmp_path / "photos" / "b"):
        path.mkdir(parents=True)
        (path / "0.png").write_bytes(png(picture(ord(path.name))))
    built = sslpipe.build_dataset(tmp_path / "out", root=tmp_path / "photos")
    assert built.report.lines()[0] in repr(built)


def test_a_run_starts_from_a_network_in_memory(tmp_path):
    data, recipe = write_dataset(tmp_path / "data"), write_recipe(tmp_path)
    recipe.write_text(re.sub(r"\[backbone\]\n.*\n.*\n", "", recipe.read_text()))
    network = timm.create_model("test_resnet", num_classes=0)
    settings = ["steps=1", "optim.peak_lr=1e-9"]
    assert sslpipe.train(recipe, data, tmp_path / "run", init=network, overrides=settings) == 1
    kept = sslpipe.load_backbone(tmp_path / "run" / "init")
    assert kept.config.weights_sha256 == sslpipe.load_backbone(network).config.weights_sha256
    with pytest.raises(UserError, match="give a path"):
        sslpipe.train(recipe, data, tmp_path / "other", init=3, overrides=settings)


def test_a_warning_of_an_image_without_a_row_points_at_the_callers_line(tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture(0)))
    (tmp_path / "b.png").write_bytes(b"text")
    with pytest.warns(UserWarning, match=r"images\[1\] has no row") as said:
        sslpipe.embed(trained(), [tmp_path / "a.png", tmp_path / "b.png"], device="cpu")
    assert [each.filename for each in said] == [__file__]
