"""What a notebook does in one line each: the names of the package, and whole runs from Python."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate import PartialState

import sslpipe
from sslpipe.errors import UserError
from sslpipe.run.accelerator import join_processes
from tests.helpers import finetunes, runs
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.exports import trained
from tests.helpers.runs import ROOT, final_weights, python, write_recipe


def test_the_packages_names_are_imported_at_their_first_use():
    """In a process without torch: below, in `AGAIN`."""
    for name in (*sslpipe.__all__, "ImageSearch"):
        assert callable(getattr(sslpipe, name)), name
    assert not hasattr(sslpipe, "trian")
    assert dir(sslpipe) == sorted([*sslpipe.__all__, "ImageSearch"])  # a satellite brings it


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


def same_weights(run: Path, other: Path) -> bool:
    theirs = final_weights(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in final_weights(run).items())


def test_a_process_second_run_gets_its_own_device():
    state = PartialState(cpu=True)
    state.device = torch.device("cuda")  # as if the first run had been on a GPU
    join_processes(cpu=True, timeout_s=10)
    assert PartialState().device == torch.device("cpu")


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
