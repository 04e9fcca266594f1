"""The best checkpoint is kept whatever happens, and a run that no longer improves ends."""

import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file

import sslpipe.api
from sslpipe.data.index import load_index
from sslpipe.errors import CheckpointError, RecipeError, UserError
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.evaluation.verdict import unfinished
from sslpipe.export.load import load_backbone, load_run
from sslpipe.export.named import open_init
from sslpipe.export.start import Start
from sslpipe.files import json_text, parse_json, read_lines
from sslpipe.planning.watch import check_choice
from sslpipe.recipe.reading import load_recipe
from sslpipe.recipe.sections import RunConfig
from sslpipe.run.best import Best
from sslpipe.run.checkpoint_files import (
    BestEntry,
    checkpoint_names,
    choose_checkpoint,
    latest,
    read_state,
)
from sslpipe.run.contract import Scores
from sslpipe.run.log import MetricLine, read_metrics
from sslpipe.run.monitoring import Monitor
from sslpipe.run.status import status
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes
from tests.helpers.runs import assert_same_weights, command_line, final_weights, write_recipe
from tests.run.test_checkpoint import a_checkpointer, cut_in_half, some_parts

pytestmark = pytest.mark.usefixtures("proved_here")

KEEP = RunConfig(keep="best", monitor_steps=1)


def after(best: Best, *scores: float | None, every: int = 2, written: bool = True) -> Best:
    for number, score in enumerate(scores, 1):
        best.read(every * number, {} if score is None else {"holdout_map_at_r": score})
        best.saved(written)
    return best


def again(best: Best, config: RunConfig) -> Best:
    """The same, as a resumed run has it from state.json."""
    state = best.state()
    return Best(config, parse_json(json_text(state["best"]), BestEntry) if state else None)


def test_the_best_is_the_first_of_the_highest_scores():
    rng = np.random.default_rng(0)
    for _ in range(40):
        scores = rng.integers(0, 4, 10)
        best, since = Best(KEEP), []
        for row, score in enumerate(scores.tolist()):
            best.read(2 * row + 2, {"holdout_map_at_r": score})
            best.saved(True)
            since.append(best.entry.since)
            best = again(best, KEEP)
        assert best.entry.step == 2 * int(np.argmax(scores)) + 2
        assert best.state()["best"]["name"] == f"step-{best.entry.step:08d}"
        highest = [int(np.argmax(scores[: at + 1])) for at in range(len(scores))]
        assert since == [at - first for at, first in enumerate(highest)]


def test_what_was_not_written_is_not_the_best_and_the_next_one_may_be():
    best = after(Best(KEEP), 0.5)
    best.read(4, {"holdout_map_at_r": 0.9})
    assert (best.entry.step, best.wants_checkpoint) == (4, True)
    best.saved(False)
    assert (best.entry.step, best.entry.value, best.entry.since) == (2, 0.5, 1)
    best.read(6, {"holdout_map_at_r": 0.6})
    assert best.wants_checkpoint


def test_a_run_whose_start_could_not_be_written_and_was_best_names_no_checkpoint():
    best = Best(KEEP)
    best.read_start({"holdout_map_at_r": 0.9, "holdout_recall_at_1": 0.9})
    best.saved(False)
    best.read(2, {"holdout_map_at_r": 0.95, "holdout_recall_at_1": 0.8})  # below it in one
    best.saved(True)
    assert (best.entry.step, best.state(), best.choice) == (None, {}, "")
    best.read(4, {"holdout_map_at_r": 0.95, "holdout_recall_at_1": 0.9})
    assert best.choice.startswith("commands take step-00000004, ")


def test_a_score_that_is_no_number_is_never_the_best():
    best = after(Best(KEEP), float("nan"), 0.2, float("nan"), None)
    assert (best.entry.step, best.entry.since) == (4, 2)
    none = after(Best(KEEP), float("nan"), float("nan"))
    assert (none.entry.step, none.wants_checkpoint, none.state()) == (None, False, {})
    assert str(none) == "none of 2 evaluations had a number to choose by"


def test_patience_counts_over_a_resume_and_waits_for_all_its_evaluations():
    config = RunConfig(patience=3, monitor_steps=1)
    best = Best(config)
    for done, score in enumerate([0.1, 0.4, 0.4, 0.2, 0.3], 1):
        assert not best.exhausted
        best.read(done, {"holdout_map_at_r": score})
        stored = BestEntry(**best.state()["best"])
        assert stored.name is None  # no checkpoint is promised
        best = again(best, config)
    assert best.exhausted
    assert not Best(RunConfig(patience=5, monitor_steps=1), stored).exhausted
    kept = Best(RunConfig(keep="best", patience=3, monitor_steps=1), stored)
    assert (kept.entry.step, kept.state()) == (None, {})  # nobody has kept that checkpoint
    # nothing is followed by default
    none = after(Best(RunConfig()), 0.5, 0.1)
    assert (none.state(), none.exhausted, none.wants_checkpoint) == ({}, False, False)


def test_patience_does_not_count_evaluations_of_half_size_steps():
    """They see whole views, which the run has not trained on yet; the best may be one of them."""
    config = RunConfig(keep="best", patience=2, monitor_steps=2)
    best = Best(config, half_size_steps=8)
    ended = []
    for done, score in zip(range(2, 18, 2), [0.5, 0.3, 0.2, 0.1, 0.4, 0.6, 0.5, 0.6], strict=True):
        best.read(done, {"holdout_map_at_r": score})
        best.saved(True)
        ended.append(best.exhausted)
    assert (best.entry.step, best.entry.value) == (12, 0.6)
    assert ended == [False] * 7 + [True]


def test_without_labels_the_recall_of_the_other_view_decides_to_the_last():
    rng, best, tried = np.random.default_rng(0), Best(KEEP), []
    best.read_start({})  # nothing was measured: nothing is decided
    for step in range(1, 7):
        tried.append(rng.random())
        best.read(step, {"holdout_rankme": rng.random(), "holdout_view_recall": tried[-1]})
        best.saved(True)
        best = again(best, KEEP)
    best.read(7, {"holdout_map_at_r": 1e9})  # another measure does not compete
    assert best.entry.step == 1 + int(np.argmax(tried))
    assert best.state()["best"]["measure"] == "holdout_view_recall"


@pytest.mark.parametrize(
    ("settings", "views", "labels", "expected"),
    [
        ({"keep": "best", "monitor_steps": 0}, True, [0, 0, 1], "run.keep = 'best' needs"),
        ({"patience": 2, "monitor_steps": 0}, True, [0, 0, 1], "run.patience needs evaluations"),
        ({"keep": "best", "monitor_steps": 5}, True, [], "run.keep = 'best' has no.*set it"),
        ({"patience": 5, "monitor_steps": 5}, False, [0, 0, -1], "run.patience has no.*set it"),
        ({"patience": 5, "monitor_steps": 5}, False, [0, 1, 2], "run.patience has no.*set it"),
    ],
)
def test_what_no_evaluation_could_decide_is_refused(settings, views, labels, expected):
    config, labels = RunConfig(**settings), np.array(labels)
    with pytest.raises(RecipeError, match=expected):
        check_choice(config, labels, views=views, remedy="set it")
    check_choice(RunConfig(monitor_steps=0), np.zeros(0, np.int64), views=False, remedy="")
    for labels in ([-1, -1], [0, 0, 0], [0, 1, 2]):  # the recall of other views decides
        check_choice(KEEP, np.array(labels), views=True, remedy="")


@pytest.mark.promise(15)
def test_the_start_competes_and_stays_the_best_until_something_is_better():
    best = Best(KEEP)
    best.read_start({"holdout_map_at_r": 0.4})
    assert (best.entry.step, best.entry.start, best.entry.since, best.wants_checkpoint) == (
        0,
        0.4,
        0,
        True,
    )
    best.saved(True)
    entry = {"step": 0, "value": 0.4, "since": 2, "name": "step-00000000"}
    entry |= {"start": 0.4, "measure": "holdout_map_at_r"}
    assert after(best, 0.4, 0.3).state()["best"] == entry
    best = again(best, KEEP)
    best.read(6, {"holdout_map_at_r": 0.5})
    assert (best.entry.step, best.entry.value, best.entry.start) == (6, 0.5, 0.4)
    assert (
        best.choice
        == "commands take step-00000006, the best by holdout_map_at_r: 0.5, the start 0.4"
    )
    # without a number, or where none is kept, it is no candidate
    none = Best(KEEP)
    none.read_start({})
    patient = Best(RunConfig(patience=2))
    patient.read_start({"holdout_map_at_r": 0.9})
    for one in (none, patient):
        assert (one.entry.start, one.entry.step, one.entry.since, one.choice) == (None, None, 0, "")
    assert "start" not in after(none, 0.1).state()["best"]


@pytest.mark.promise(15)
@pytest.mark.parametrize("of", ["holdout", "validation"])
def test_an_evaluation_below_the_starts_recall_is_not_the_best(of):
    def numbers(map_at_r, recall):
        more = {"holdout_knn": 0.99} if of == "holdout" else {}
        return {**more, f"{of}_map_at_r": map_at_r, f"{of}_recall_at_1": recall}

    best = Best(KEEP)
    best.read_start(numbers(0.4, 0.7))
    best.saved(True)
    steps = []
    for step, (map_at_r, recall) in enumerate([(0.9, 0.69), (0.3, 0.9), (0.5, 0.7), (0.6, 0.6)], 1):
        best = again(best, KEEP)  # its state is all that a resumed run has
        best.read(step, numbers(map_at_r, recall))
        best.saved(True)
        steps.append(best.entry.step)
    assert steps == [0, 0, 3, 3]
    assert f"the best by {of}_map_at_r: 0.5, the start 0.4" in best.choice


@pytest.mark.promise(15)
def test_an_evaluation_that_is_not_clearly_above_the_start_is_not_the_best():
    """By scipy's paired t-test, at a tenth of 5 %: the best of ten evaluations is partly luck."""
    draw = np.random.default_rng(0)
    start = dict(enumerate(draw.uniform(0.2, 0.4, 100).tolist(), 10))
    noise = draw.normal(0, 0.1, 100)
    noise -= noise.mean()
    error = noise.std(ddof=1) / 10
    rises = {
        1: noise + 2.4 * error,  # clear were it the only evaluation
        2: [0.9, *[0] * 99],  # one sample
        3: noise + 3.2 * error,
        4: noise + 2.7 * error,
        5: noise - 5 * error,  # clearly less
        6: [0.2] * 100,  # the same in all
    }
    best, steps, clear = Best(KEEP), [], []
    best.read_start({"holdout_map_at_r": 0.3}, start)
    best.saved(True)
    for step, rise in rises.items():
        best = again(best, KEEP)  # its state is all that a resumed run has
        later = {sample: start[sample] + more for sample, more in zip(start, rise, strict=True)}
        best.read(step, {"holdout_map_at_r": 0.3 + np.mean(rise)}, later)
        best.saved(True)
        steps.append(best.entry.step)
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            test = scipy.stats.ttest_rel([*later.values()], [*start.values()])
        clear.append(bool(test.pvalue < 0.05 / 10 and np.mean(rise) > 0))
    assert clear == [False, False, True, False, False, True]
    assert steps == [0, 0, 3, 3, 3, 6]
    never = after(Best(KEEP))
    never.read_start({"holdout_map_at_r": 0.3}, start)
    assert "the start: no evaluation was clearly better" in never.choice
    never.read(1, {"holdout_map_at_r": 0.4}, {**start, 10: start[10] + 10})  # by one sample
    assert "since step 0 was clearly better" in str(never), "0.4 is better than 0.3"


def saved(checkpoints, step, best=None):
    entry = (
        {} if best is None else {"best": {"name": f"step-{best:08d}", "step": best, "value": 0.5}}
    )
    checkpoints.save(step, some_parts(), entry)


def test_the_best_of_every_checkpoint_that_stays_stays(tmp_path):
    checkpoints, folder = a_checkpointer(tmp_path), tmp_path / "checkpoints"
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5)):
        saved(checkpoints, step, best)
        assert f"step-{best:08d}" in checkpoint_names(folder)
        assert choose_checkpoint(tmp_path, "best").folder.name == f"step-{best:08d}"
        assert (folder / "best").read_text() == f"step-{best:08d}"
    assert checkpoint_names(folder) == ["step-00000005", "step-00000006"]


def test_a_resume_from_an_older_checkpoint_has_the_best_of_then(tmp_path):
    checkpoints, folder = a_checkpointer(tmp_path), tmp_path / "checkpoints"
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4)):
        saved(checkpoints, step, best)
    cut_in_half(folder / "step-00000004" / "model.safetensors")
    again = a_checkpointer(tmp_path)
    assert again.restore(some_parts()) == 3
    assert again.best.name == "step-00000001"
    assert (folder / "step-00000001").is_dir()


def test_a_best_checkpoint_that_somebody_removed_is_said_and_forgotten(tmp_path):
    warnings, checkpoints = [], a_checkpointer(tmp_path)
    for step in (1, 2, 3):
        saved(checkpoints, step, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    again = a_checkpointer(tmp_path, warnings)
    assert again.restore(some_parts()) == 3
    assert again.best is None
    assert "step-00000001, the best checkpoint so far, is gone" in warnings[0]
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-00000001'"):
        choose_checkpoint(tmp_path, "best")
    saved(again, 4)
    with pytest.raises(CheckpointError, match=r"run.keep = 'last', or no .*step-00000004$"):
        choose_checkpoint(tmp_path, "best")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder)
    return write_dataset(folder, (16,), split="test")


SCRIPT = {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.4, 10: 0.2, 12: 0.3}  # steps done -> held-out kNN
EVERY = ("run.monitor_steps=2", "run.save_steps=3", "run.log_steps=2")


def scripted_in_rank(process, fault, init, start, recipe, data, run_dir, *overrides):
    """Train with held-out kNN by SCRIPT, and by `start` at step 0 of a run from the weights `init`.

    `fault`: as in SSLPIPE_FAULT, or ''.
    """
    os.environ["SSLPIPE_FAULT"] = fault

    def scores(monitor, done):
        score = ({0: start} | SCRIPT)[done]
        return Scores({"holdout_map_at_r": score} if process.rank == 0 else {})

    Monitor.measure = scores
    loaded = load_recipe(recipe, overrides)
    weights = open_init(loaded, init) if init else None
    return sslpipe.api.train(loaded, load_index(data), Path(run_dir), init=weights)


def scripted(world, data, run_dir, *overrides, fault="", init="", start=0.0):
    arguments = (str(write_recipe(run_dir.parent)), str(data), str(run_dir), *EVERY, *overrides)
    return run_processes(scripted_in_rank, world, fault, str(init), start, *arguments)


@pytest.fixture(scope="module")
def kept(data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    assert scripted(1, data, run_dir, "run.keep=best") == [12]
    return run_dir


def test_a_run_keeps_its_best_checkpoint_beside_the_last_ones(data, kept, tmp_path):
    plain = tmp_path / "plain"  # every step's checkpoint, of which none is called the best
    scripted(1, data, plain, "run.save_steps=1", "run.keep_checkpoints=20")
    names = checkpoint_names(kept / "checkpoints")
    assert names == ["step-00000004", "step-00000009", "step-00000012"]
    best, last = load_run(kept, checkpoint="best"), load_run(kept)
    assert (best.config.facts["step"], best.config.facts["checkpoint"]) == (4, "step-00000004")
    assert last.config.facts["step"] == 12
    assert_same_weights(plain, kept)  # to keep it changes no weight
    theirs = load_run(plain, checkpoint="4").backbone.state_dict()
    assert_same_weights(theirs, best.backbone.state_dict())


def test_the_best_evaluation_is_what_best_means(kept):
    best = {"step": 4, "value": 0.5, "since": 4, "name": "step-00000004"}
    assert read_state(latest(kept)).best == BestEntry(**best, measure="holdout_map_at_r")
    # the tensors of the file, bit for bit
    file = load_file(kept / "checkpoints" / "step-00000004" / "model.safetensors")
    weights = {key.removeprefix("backbone."): t for key, t in file.items() if "backbone." in key}
    assert_same_weights(weights, load_run(kept, checkpoint="best").backbone.state_dict())


def test_the_commands_take_the_best_and_say_so(kept, data, tmp_path):
    run_dir = Path(shutil.copytree(kept, tmp_path / "run"))
    sha256 = load_run(run_dir, checkpoint="best").config.weights_sha256
    said = "weights: step-00000004 of tiny"

    def command(*words):
        done = command_line(*map(str, words), status=0)
        return [" ".join(text.split()) for text in (done.stdout, done.stderr)]

    def assert_best(facts):
        assert facts["checkpoint"] == "step-00000004"
        assert facts.get("backbone_sha256", sha256) == sha256

    # the export is of these weights, and so is what is loaded from it
    best = ["--checkpoint", "best"]
    assert said in command("export", run_dir, "--out", tmp_path / "out", *best)[1]
    assert_best(load_backbone(tmp_path / "out").config.facts)
    # features
    on = ["--data", data, "--device", "cpu", "--num-workers", "0"]
    embed = ["embed", run_dir, *on, "--out", file := tmp_path / "x.safetensors", *best]
    assert said in command(*embed)[1]
    assert_best(load_embeddings(file)[1])
    # results, and the report of them
    suite = ["evaluate", "suite", run_dir, *on, *best]
    shown, err = command(*suite, "--out", run_dir / "eval.json")
    assert said in err
    assert_best(json.loads((run_dir / "eval.json").read_text())["facts"])
    command("report", run_dir)
    page = (run_dir / "report.html").read_text()
    assert "<dt>best checkpoint</dt><dd>step-00000004</dd>" in page
    for text in (shown, page):
        assert "Evaluated at step 4 of 12." in text
    # how the run stands, and a run that starts from it
    assert "best step-00000004" in command("status", run_dir)[0]
    recipe = load_recipe(write_recipe(tmp_path))
    start = open_init(recipe, run_dir, checkpoint="best")
    assert start.config.weights_sha256 == sha256
    assert Start("named", start).describe(recipe.tune).startswith("weights of ")
    with pytest.raises(UserError, match="checkpoint='best' is for a run directory"):  # no export
        load_backbone(tmp_path / "out", checkpoint="best")


def test_a_kill_around_the_best_checkpoint_loses_nothing(data, kept, tmp_path):
    """Saved are steps 2, 3, 4 (the best), 6, 9 and 12; killed around 4."""
    run_dir = tmp_path / "run"
    # each start counts its own saves and steps
    for fault in ("checkpoint.before_rename:3", "checkpoint.before_prune:1", "train.step:1"):
        with pytest.raises(AssertionError, match="without a word"):
            scripted(1, data, run_dir, "run.keep=best", fault=fault)
    assert scripted(1, data, run_dir, "run.keep=best") == [12]
    names = checkpoint_names(run_dir / "checkpoints")
    assert names == checkpoint_names(kept / "checkpoints")
    assert choose_checkpoint(run_dir, "best").folder.name == names[0]
    for name in names:
        ours, theirs = (read_state(run / "checkpoints" / name) for run in (run_dir, kept))
        assert ours.best == theirs.best
    assert_same_weights(kept, run_dir)
    ours, theirs = (load_run(run, checkpoint="best").config for run in (run_dir, kept))
    assert ours.weights_sha256 == theirs.weights_sha256


def test_a_run_that_no_longer_improves_is_done_with_its_reason(data, tmp_path):
    run_dir = tmp_path / "run"
    assert scripted(2, data, run_dir, "run.patience=2") == [8, 8]
    assert (run_dir / "DONE").read_text() == "step 8\n"
    assert checkpoint_names(run_dir / "checkpoints")[-1] == "step-00000008"
    lines, _ = read_lines(run_dir / "metrics.jsonl", MetricLine)
    assert lines[-1].kind == "end"
    assert lines[-1].reason == "no evaluation since step 4 was better by holdout_map_at_r"
    before = final_weights(run_dir)
    assert scripted(1, data, run_dir, "run.patience=2") == [8]  # nothing more
    assert_same_weights(before, run_dir)
    assert (run_dir / "DONE").exists()
    assert len(read_metrics(run_dir, "eval")) == 4
    # with more of it the same run goes on
    assert scripted(1, data, run_dir, "run.patience=9") == [12]
    assert [line["step"] for line in read_metrics(run_dir, "eval")] == list(SCRIPT)


def test_a_disk_that_is_full_at_the_best_step_leaves_the_older_best(data, tmp_path):
    run_dir = tmp_path / "run"
    assert scripted(1, data, run_dir, "run.keep=best", fault="checkpoint.model:3=full") == [12]
    assert (
        choose_checkpoint(run_dir, "best").folder.name == "step-00000008"
    )  # 0.4, after 0.3 and 0.1
    best = read_state(latest(run_dir)).best
    assert (best.value, best.since) == (0.4, 2)


FAULTS = ("checkpoint.model:1", "checkpoint.before_rename:1", "train.step:1", "train.step:5")


@pytest.mark.promise(15)
@pytest.mark.parametrize(("start", "expected"), [(0.45, 4), (0.5, 0)])
def test_a_run_from_weights_ends_with_its_best_ones_the_start_included(
    data, kept, tmp_path, start, expected
):
    run_dir, script = tmp_path / "run", {"init": kept, "start": start}
    for fault in FAULTS if expected else FAULTS[-1:]:
        with pytest.raises(AssertionError):
            scripted(1, data, run_dir, "run.keep=best", fault=fault, **script)
    assert scripted(1, data, run_dir, "run.keep=best", **script) == [12]
    name = f"step-{expected:08d}"
    # what loads a run takes it
    model, last = load_backbone(run_dir), load_run(run_dir, checkpoint="last").config.facts
    facts = model.config.facts
    assert (facts["step"], facts["checkpoint"]) == (expected, name)
    assert (last["step"], last.get("checkpoint")) == (12, None)
    because = {4: "the best by holdout_map_at_r: 0.5, the start 0.45"}
    because[0] = "the start: no evaluation was better (holdout_map_at_r 0.5)"
    assert facts["checkpoint_reason"] == because[expected]
    unchanged = load_backbone(run_dir / "init").backbone.state_dict()
    same = [torch.equal(unchanged[k], t) for k, t in model.backbone.state_dict().items()]
    assert all(same) == (expected == 0)
    assert status(run_dir)["checkpoint"]["best"] == name
    note = f"Evaluated at step {expected} of 12, {facts['checkpoint_reason']}."
    assert unfinished({**facts, "steps": 12}) == note


@pytest.mark.promise(15)
def test_a_run_from_weights_without_labels_keeps_by_the_recall_of_other_views(kept, tmp_path):
    """Real evaluations, in two processes: the number that the documentation names."""
    index = write_dataset(tmp_path, labelled=False)
    words = ("run.keep=best", "data.holdout_from=all", "run.monitor_steps=4", "steps=8")
    run_dir = tmp_path / "run"
    paths = map(str, (write_recipe(tmp_path), index, run_dir, kept))
    run_processes(unlabelled_in_rank, 2, *paths, *words)
    lines = read_metrics(run_dir, "eval")
    assert [line["step"] for line in lines] == [0, 4, 8]
    scores = [line["holdout_view_recall"] for line in lines]
    best = read_state(latest(run_dir)).best
    assert best.measure == "holdout_view_recall"
    assert (best.start, best.value) == pytest.approx((scores[0], max(scores)))
    assert load_backbone(run_dir).config.facts["step"] == 4 * int(np.argmax(scores))


def unlabelled_in_rank(process, recipe, data, run_dir, init, *overrides):
    loaded = load_recipe(recipe, overrides)
    sslpipe.api.train(loaded, load_index(data), Path(run_dir), init=init)
