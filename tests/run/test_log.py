import importlib
import json
import math
import re
import shutil
import struct
import sys
import time

import pytest

from sslpipe.data.reader import Quarantined
from sslpipe.files import parse_object
from sslpipe.run.description import write_description
from sslpipe.run.lock import RunLock
from sslpipe.run.log import read_metrics
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.reporter import Reporter, RunLog
from sslpipe.run.trackers import log_evaluation, run_id

SECRET = "f00d-7391-not-to-be-written"
VALUES = {"loss": 1.5, "images_per_s": 100.0, "data_wait_percent": 1.0}


def a_log(run_dir, **settings):
    arguments = {"name": "tiny", "config": {"wandb_api_key": SECRET, "a": {"b": 1}}, "steps": 10}
    return RunLog(run_dir, **{"first_step": 0, **arguments, **settings})


def test_of_a_step_logged_twice_the_later_line_counts(tmp_path):
    for loss in (1.0, 2.0):
        log = a_log(tmp_path)
        log.event(0, "start")
        log.train(5, {**VALUES, "loss": loss})
        log.close()
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["loss"], line["restart"]) for line in lines] == [(5, 2.0, 1)]


@pytest.mark.parametrize(
    ("steps", "change", "seconds", "every", "settings", "expected"),
    [
        # the first one warms up; after step 204: 796 others of 2 s
        (range(200, 1000), 201, (60.0, 2.0), 2, {}, {0: "100 images/s", 1: "26:32 left"}),
        # longer than the estimate's window
        (range(20), 0, (None, 700.0), 1, {}, {9: "1:56:40 left"}),
        # other programs end
        (range(500), 50, (8.0, 2.0), 1, {}, {49: "1:00:00 left", 399: "3:20 left"}),
        # of cheaper ones the others take at least as much
        (
            range(40),
            10,
            (1.0, 3.0),
            5,
            {"cheaper_steps": 10},
            {0: "at least 0:35 left", 1: "100 images/s", 2: "1:15 left"},
        ),
    ],
)
def test_the_time_to_go_is_told(
    tmp_path, monkeypatch, capsys, steps, change, seconds, every, settings, expected
):
    """Steps take other seconds from `change` on; number of a line -> its end."""
    now = 100.0
    monkeypatch.setattr("sslpipe.run.reporter.time.monotonic", lambda: now)
    log = a_log(tmp_path, steps=steps.stop, first_step=steps.start, **settings)
    for step in range(steps.start + 1, steps.stop + 1):
        now += seconds[step > change]
        log.step_done(step)
        if step % every == 0:
            log.train(step, VALUES)
    log.close()
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("step ")]
    for number, end in expected.items():
        assert lines[number].endswith(f"  {end}")


def test_a_step_is_one_line_on_the_console_and_all_its_numbers_are_in_the_file(tmp_path, capsys):
    """Loss, the score that weights are chosen by, its change since the last one, and the speed."""
    first = {"holdout_knn": 0.5, "holdout_map_at_r": 0.25, "holdout_rankme": 7.5}
    later = {**first, "holdout_map_at_r": 0.3125}
    log = a_log(tmp_path, evaluated_every=2)
    for step, score in ((1, None), (2, first), (3, None), (4, later)):
        log.train(step, {**VALUES, "grad_norm": 3.0})
        if score is not None:
            log.evals(step, score)
    log.evals(5, later)  # of a step that is not logged: no loss
    log.close()
    resumed = a_log(tmp_path, first_step=4, evaluated_every=2)
    resumed.train(5, {**VALUES, "data_wait_percent": 40.0})
    resumed.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in said] == [f"step {k}/10" for k in (1, 2, 3, 4, 5, 5)]
    loss = ["loss" in line for line in said]
    assert loss == [True, True, True, True, False, True]
    score = [re.findall(r"MAP@R ([0-9.]+) %(?: [(]([^)]+)[)])?", line) for line in said]
    at_25 = ("25.0", "")
    at_31 = ("31.2", "+6.2")
    # where it was measured, not again beside the losses that follow
    assert score == [[], [at_25], [], [at_31], [("31.2", "+0.0")], []]
    assert all("100 images/s" in line for line in said)
    assert ["40 %" in line for line in said] == [False] * 5 + [True]  # it waits for data
    assert not any("rankme" in line or "3.0" in line for line in said)
    lines = read_metrics(tmp_path, "eval")
    assert [line["holdout_rankme"] for line in lines] == [7.5] * 3
    assert read_metrics(tmp_path)[0]["grad_norm"] == 3.0


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"validation_map_at_r": 0.5, "validation_recall_at_1": 0.75}, "MAP@R 50.0 %"),
        ({"holdout_view_recall": 0.5, "holdout_rankme": 3.0}, "view recall 50.0 %"),
        ({"holdout_map_at_r": math.nan}, "step 3/10  "),
        ({"holdout_rankme": 3.0}, "step 3/10  "),
        ({}, "step 3/10  "),
    ],
)
def test_the_score_on_the_console_is_what_the_run_is_compared_by(tmp_path, capsys, values, shown):
    log = a_log(tmp_path)
    log.evals(3, values)
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(shown)


def test_quarantine_lists_a_sample_once_also_after_a_restart(tmp_path):
    record = Quarantined(7, "train-000000.tar", "a/b", "truncated")
    for _ in range(2):
        log = a_log(tmp_path)
        quarantine = Quarantine(log, tmp_path, samples=2, max_fraction=0.5)
        quarantine.add(record)
        quarantine.add(record)
        assert quarantine.collect() == 1
        log.close()
    lines = (tmp_path / "quarantine.jsonl").read_bytes().splitlines()
    assert [parse_object(line) for line in lines] == [record._asdict()]


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = a_log(tmp_path, trackers=("tensorboard",))
    log.train(3, VALUES)
    log.close()
    folder = next((tmp_path / "tensorboard").rglob("events*")).parent
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 1.5)]


def wandb_records(path):
    """Wandb's own messages in the file that `wandb sync` uploads: a log as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, message = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while place < len(raw):
        if (left := -place % 32768) and left < 7:  # a header does not fit into the block
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        message += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(message)
            message = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_works_offline_and_no_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = a_log(tmp_path, trackers=("wandb",))
    try:
        assert list(log._trackers.started) == ["wandb"]
        log.train(3, VALUES)
    finally:
        log.close()
        importlib.import_module("wandb").teardown()  # its service outlives the run, as it may
    run = next((tmp_path / "wandb").glob("offline-run-*"))
    items = [record.history.item for record in wandb_records(next(run.glob("*.wandb")))]
    logged = [
        {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in each} for each in items
    ]
    (line,) = [each for each in logged if "train/loss" in each]
    assert (line["step"], line["train/loss"]) == (3, 1.5)
    config = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    assert SECRET.encode() not in config


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_retry_a_resume_and_an_evaluation_are_one_run_of_each_tracker(tmp_path, monkeypatch):
    """Real wandb and TensorBoard; another run directory is another run of wandb."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    monkeypatch.setenv("WANDB_SILENT", "true")
    kinds = ("wandb", "tensorboard")
    recipe = {"name": "tiny", "steps": 2, "run": {"trackers": kinds}}
    ids = []
    try:
        for run_dir, starts in ((tmp_path / "a", (1, 2)), (tmp_path / "b", (1,))):
            run_dir.mkdir()
            for step in starts:
                log = a_log(run_dir, trackers=kinds)
                assert [*log._trackers.started] == [*kinds]
                log.train(step, VALUES)
                log.close()
            write_description(run_dir, {"recipe.json": recipe, "data.json": {}, "run.json": {}})
            log_evaluation(run_dir, {"ssl/kNN": 0.75}, step=2, warn=pytest.fail)
            folders = (run_dir / "wandb").glob("offline-run-*")
            ids.append([folder.name.split("-")[3] for folder in folders])
    finally:
        importlib.import_module("wandb").teardown()
    assert [len(each) for each in ids] == [3, 2]
    assert [len({*each}) for each in ids] == [1, 1]
    assert ids[0][0] != ids[1][0]

    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "a/tensorboard")).Reload()
    assert list(shown.Runs()) == ["tiny"]
    assert [e.step for e in shown.Scalars("tiny", "train/loss")] == [1, 2]
    assert [(e.step, e.value) for e in shown.Scalars("tiny", "test/ssl/kNN")] == [(2, 0.75)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_repeated_steps_once(tmp_path):
    """A killed run resumes at its checkpoint; before it, and of an evaluation, nothing goes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        time.sleep(1.1)  # files are read in the order of their names, which begin with the second
        log = a_log(tmp_path, trackers=("tensorboard",))
        if steps[0] == 1:
            log.evals(0, {"knn_top1": 0.5})
        for step in steps:
            log.train(step, VALUES)
        log.close()
    folder = next((tmp_path / "tensorboard").rglob("events*")).parent
    shown = EventAccumulator(str(folder)).Reload()
    assert [each.step for each in shown.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [each.step for each in shown.Scalars("eval/knn_top1")] == [0]


def test_a_copied_run_is_the_same_one_in_trackers_until_its_id_is_removed(tmp_path):
    (tmp_path / "run").mkdir()
    first = run_id(tmp_path / "run")
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert run_id(copy) == first
    (copy / "tracker_id").unlink()
    assert run_id(copy) not in ("", first)
    assert run_id(tmp_path / "run") == first


def test_an_evaluation_leaves_the_trackers_of_a_run_in_use_to_it(tmp_path):
    recipe = {"name": "tiny", "steps": 2, "run": {"trackers": ["tensorboard"]}}
    write_description(tmp_path, {"recipe.json": recipe, "data.json": {}, "run.json": {}})
    said = []
    lock = RunLock(tmp_path)
    log_evaluation(tmp_path, {"ssl/kNN": 0.75}, step=2, warn=said.append)
    lock.release()
    assert "tensorboard: not written" in said[0]
    assert not (tmp_path / "tensorboard").exists()


def test_a_tracker_that_cannot_start_is_named_and_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = a_log(tmp_path, trackers=("wandb", "tensorboard"))
    log.train(1, VALUES)
    log.close()
    assert "'wandb' did not start" in capsys.readouterr().err.replace("\n", " ")
    assert read_metrics(tmp_path)[0]["loss"] == 1.5


def test_a_tracker_that_fails_later_is_dropped_and_the_run_continues(tmp_path, capsys):
    class Broken:
        def log(self, values, step):
            raise ConnectionError("server is gone")

    log = a_log(tmp_path)
    log._trackers.started["broken"] = Broken()
    log.train(1, VALUES)
    log.train(2, VALUES)
    log.close()
    assert capsys.readouterr().err.count("broken failed and is now switched off") == 1
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_other_ranks_write_nothing(tmp_path, capsys):
    log = Reporter()
    log.train(1, VALUES)
    log.warn("of each rank")
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
