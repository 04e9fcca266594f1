"""On a device without float64, as Apple's MPS: trains, embeds, evaluates as on the CPU."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import sslpipe.cli.embed
import sslpipe.cli.evaluate
import sslpipe.cli.search
import sslpipe.train
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.recipe import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.fakemps import fakemps
from tests.helpers.runs import write_recipe

STATISTICS = ("loss", "grad_norm", "effective_rank", "alignment", "uniformity")


def test_the_stand_in_refuses_what_a_mac_refuses():
    with fakemps():
        x = torch.arange(3.0).to("mps")
        assert (x.device.type, (2 * x).tolist()) == ("mps", [0, 2, 4])
        for wrong, error in (
            (lambda: x.double(), TypeError),
            (lambda: torch.zeros(2, dtype=torch.float64, device="mps"), TypeError),
            (lambda: x + torch.ones(3), RuntimeError),
            (x.numpy, TypeError),
        ):
            with pytest.raises(error):
                wrong()
        assert x.cpu().double().numpy().tolist() == [0, 1, 2]


def invoke(command, words):
    return CliRunner().invoke(command.app, words, catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same training, features and evaluation on the CPU and on the stand-in."""
    folder = tmp_path_factory.mktemp("mps")
    data = write_dataset(folder / "data")
    write_dataset(folder / "data", (20, 20), split="test")
    recipe = write_recipe(folder)

    def on(device):
        run, words = folder / device, ["--data", str(data), "--num-workers", "0"]
        options = ["steps=4", "run.monitor_steps=2", "run.log_steps=1", f"run.device={device}"]
        sslpipe.train.train(load_recipe(recipe, options), load_index(data), run)
        own = [str(folder / "cpu"), *words, "--device", device]
        invoke(sslpipe.cli.embed, [*own, "--split", "test", "--out", f"{run}.safetensors"])
        invoke(
            sslpipe.cli.evaluate, ["suite", *own, "--no-baselines", "--out", str(run / "eval.json")]
        )
        return run

    cpu = on("cpu")
    with fakemps():
        return cpu, on("mps")


def test_training_there_logs_the_numbers_of_the_cpu(made):
    ours, theirs = ([line for line in read_metrics(run, "train")] for run in reversed(made))
    assert [line["step"] for line in ours] == [1, 2, 3, 4]
    for one, other in zip(ours, theirs, strict=True):
        for key in STATISTICS:
            assert one[key] == pytest.approx(other[key], rel=1e-3), key


def test_features_and_evaluations_there_are_those_of_the_cpu(made):
    (own, _), (other, _) = (load_embeddings(f"{run}.safetensors") for run in made)
    torch.testing.assert_close(own.features, other.features)
    ours, theirs = (json.loads((run / "eval.json").read_text())["rows"] for run in made)
    assert ours
    assert [row["value"] for row in ours] == pytest.approx([row["value"] for row in theirs])


def test_a_search_by_its_features_finds_what_one_on_the_cpu_finds(made, tmp_path):
    Image.fromarray(picture(3)).save(tmp_path / "query.png")
    query = [f"{made[0]}.safetensors", str(tmp_path / "query.png")]
    words = ["search", *query, "--model", str(made[0])]
    words += ["--data", str(made[0].parent / "data"), "--json"]
    with fakemps():
        found = invoke(sslpipe.cli.search, [*words, "--device", "mps"])
    assert found == invoke(sslpipe.cli.search, words)
    assert len(json.loads(found)) == 10


def test_arrays_on_it_are_scored_as_on_the_cpu():
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 3
    expected = sslpipe.knn(rows[:40], labels[:40], rows[40:], labels[40:], k=5)
    with fakemps():
        there = rows.to("mps")
        assert sslpipe.knn(there[:40], labels[:40], there[40:], labels[40:], k=5) == expected
