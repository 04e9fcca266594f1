"""What people look at in a tracker: views, nearest neighbours, numbers, in one run of it."""

import importlib
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings, EmbedOptions
from sslpipe.evaluation.monitor import Watched
from sslpipe.planning.pictures import nearest_ids, neighbours_picture
from sslpipe.run.log import read_metrics
from sslpipe.run.monitoring import MOST_SHEETS, shows_neighbours
from sslpipe.run.reporter import Reporter
from sslpipe.run.trackers import log_evaluation
from tests.helpers import finetunes, runs
from tests.helpers.processes import run_processes
from tests.helpers.runs import assert_same_weights
from tests.run.test_log import a_log, wandb_records

SETTINGS = ("steps=6", "run.save_steps=2", "run.monitor_steps=2")
TRACKED = 'run.trackers=["wandb", "tensorboard"]'


def wandb_history(run_dir):
    """Folder name -> rows of what `wandb sync` would upload."""
    folders = sorted((run_dir / "wandb").glob("offline-run-*"))
    return {
        folder.name: [
            {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for record in wandb_records(next(folder.glob("*.wandb")))
            if record.history.item
        ]
        for folder in folders
    }


def stopped_and_resumed(arguments, by):
    """Train in one process up to a SIGTERM in the fifth step, then in two."""
    given = [str(each) for each in arguments[:3]]
    run_processes(runs.faulty_in_rank, 1, "train.step:5=term", by, *given, *arguments[3:])
    runs.train_over(2, *arguments, by=by)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [runs, finetunes], ids=["pretraining", "fine-tuning"])
def test_a_run_and_its_resume_show_views_and_neighbours_and_train_the_same(
    data, tmp_path, monkeypatch, kind
):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    monkeypatch.setenv("WANDB_SILENT", "true")
    small = () if kind is runs else ("sampler.classes_per_batch=2",)
    recipe = kind.write_recipe(tmp_path)
    by, given = runs.train_in_rank, ()
    if kind is finetunes:
        by, given = finetunes.finetune_in_rank, (None,)
    arguments = (recipe, data, tmp_path / "run", *given, *SETTINGS, *small, TRACKED)
    stopped_and_resumed(arguments, by)
    log_evaluation(tmp_path / "run", {"ssl/kNN": 0.75}, step=4, warn=pytest.fail)  # of the best
    importlib.import_module("wandb").teardown()  # its service has written all
    history = wandb_history(tmp_path / "run")
    # one run of wandb: of the start, the resume and the evaluation
    (name,) = {folder.split("-")[3] for folder in history}
    assert name == (tmp_path / "run" / "tracker_id").read_text().strip()
    assert len(history) == 3
    first, resumed, measured = history.values()
    assert [row["step"] for row in first if "views._type" in row] == [0]
    assert [row["step"] for row in first if "neighbours._type" in row] == [2, 4]
    assert [row["step"] for row in resumed if "neighbours._type" in row] == [6]
    assert not any("views._type" in row for row in resumed)
    assert [(row["step"], row["test/ssl/kNN"]) for row in measured] == [(4, 0.75)]
    pictures = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/images/*.png"))
    assert len(pictures) == 4
    assert all(path.stat().st_size < 2**20 for path in pictures)
    # the same in TensorBoard
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "run/tensorboard")).Reload()
    (name,) = shown.Runs()
    assert [each.step for each in shown.Images(name, "views")] == [0]
    sheets = shown.Images(name, "neighbours")
    assert [each.step for each in sheets] == [2, 4, 6]
    sheet = Image.open(io.BytesIO(sheets[0].encoded_image_string))
    assert sheet.size == (sheets[0].width, sheets[0].height)
    assert [each.step for each in shown.Scalars(name, "test/ssl/kNN")] == [4]
    # and the weights of a run that nobody looks at
    plain = (recipe, data, tmp_path / "plain", *given, *SETTINGS, *small)
    stopped_and_resumed(plain, by)
    assert_same_weights(tmp_path / "plain", tmp_path / "run")


def test_the_nearest_are_those_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(30, 4, generator=generator)
    ids = torch.arange(100, 130)
    rows = Embeddings(features, torch.zeros(30, dtype=torch.int64), ids)
    found = nearest_ids(rows.rows(torch.arange(10)), rows)
    assert found.shape == (8, 6)
    assert found[0, 0] == 100
    assert found[-1, 0] == 109
    for query, *nearest in found.tolist():
        place = query - 100
        cosines = torch.nn.functional.cosine_similarity(features[place], features)
        order = [int(i) + 100 for i in cosines.argsort(descending=True) if int(i) != place]
        assert nearest == order[:5]
    diverged = rows._replace(features=features.clone().fill_(torch.nan))
    with pytest.raises(DataError, match="not finite"):
        nearest_ids(diverged, diverged)
    two = rows.rows(torch.arange(2))
    assert nearest_ids(two, two).tolist() == [[100, 101], [101, 100]]


def test_a_sheet_names_the_class_of_neighbours_in_its_colour(data):
    split = load_index(data).split("train")
    labels = split.labels
    same = int(np.flatnonzero(labels == labels[0])[1])
    other = int(np.flatnonzero(labels != labels[0])[0])
    sheet = neighbours_picture(
        Watched(split, labels, options=EmbedOptions(canvas_px=16)), np.array([[0, same, other]])
    )
    inks = []
    for left in (160, 300):  # below the two neighbours
        letters = np.asarray(sheet.crop((left, 149, left + 128, 165))).reshape(-1, 3).astype(int)
        inks.append(letters[letters.sum(1).argmin()].tolist())
    assert inks[0][1] > inks[0][0]  # green
    assert inks[1][0] > inks[1][1]  # red
    # the query itself, enlarged
    query = np.asarray(sheet.crop((20, 20, 148, 148)))
    (batch,) = sslpipe.data.loader.one_pass(split, ids=[0], canvas_px=16, num_workers=0)
    image = Image.fromarray(batch.images[0].permute(1, 2, 0).numpy())
    assert np.array_equal(query, image.resize((128, 128), Image.Resampling.NEAREST))


def test_a_long_run_has_few_sheets_and_one_of_its_end():
    for total, interval in ((100_000, 10), (37, 5), (5, 5), (3, 7)):
        evaluated = {*range(interval, total + 1, interval), total}
        shown = [done for done in sorted(evaluated) if shows_neighbours(done, interval, total)]
        assert len(shown) <= MOST_SHEETS + 1
        assert shown[-1] == total
        assert len(evaluated) > MOST_SHEETS or len(shown) == len(evaluated)


def test_a_picture_that_cannot_be_drawn_is_the_last_and_stops_nothing(tmp_path, capsys):
    log = a_log(tmp_path, trackers=("tensorboard",))
    drawn = []

    def draw():
        drawn.append(torch.rand(1))
        raise DataError("a sample is damaged")

    before = torch.random.get_rng_state()
    for step in range(3):
        log.picture(step, "views", draw)
    assert torch.equal(torch.random.get_rng_state(), before)
    log.picture(3, "neighbours", lambda: Image.new("RGB", (5, 5)))  # another one is shown
    log.event(3, "end")
    log.close()
    assert len(drawn) == 1
    assert "views, which could not be drawn: a sample is damaged" in " ".join(
        capsys.readouterr().err.split()
    )
    assert read_metrics(tmp_path, "end")
    (file,) = (tmp_path / "tensorboard").rglob("events*")
    assert b"neighbours" in file.read_bytes()
    assert b"views" not in file.read_bytes()


@pytest.mark.parametrize("reporter", ["none", "rank"])
def test_nothing_is_drawn_without_a_tracker_that_shows_it(tmp_path, reporter):
    log = a_log(tmp_path) if reporter == "none" else Reporter()
    log.picture(0, "views", lambda: pytest.fail("drawn"))
    log.close()
