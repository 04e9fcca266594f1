"""A whole run: what it leaves behind, and what it does with bad data."""

import json
import os
import shutil

import numpy as np
import pytest
import torch

from sslpipe.data import holdout
from sslpipe.data.holdout import bank_ids, holdout_ids, plan_order, untrained_ids
from sslpipe.data.index import load_index
from sslpipe.data.subsets import held_out
from sslpipe.errors import DataError, RecipeError
from sslpipe.recipe.identity import identity
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.lock import RunLock
from sslpipe.run.log import read_metrics
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import (
    command_line,
    final_weights,
    kill_over,
    train_over,
    train_words,
    write_recipe,
)

BROKEN = {5: b"", 17: b"<html>", 40: b"\x89PNG\r\n\x1a\n" + b"\0" * 40}


def test_a_run_leaves_its_settings_numbers_and_marker(data, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    train_over(1, recipe, data, run_dir, "run.monitor_steps=6", "run.log_steps=5")
    assert (run_dir / "DONE").read_text() == "step 12\n"
    assert not (run_dir / "lock").exists()
    assert json.loads((run_dir / "recipe.json").read_text())["steps"] == 12
    facts = json.loads((run_dir / "data.json").read_text())
    assert facts["samples"] == {"train": 128}
    assert facts["classes"] == [f"class {c}" for c in range(4)]
    assert "init" not in json.loads((run_dir / "run.json").read_text())
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [5, 10, 12]
    expected = {"loss", "lr", "grad_norm", "epoch", "images_per_s", "data_wait_percent"}
    expected |= {"alignment", "uniformity", "embedding_std", "effective_rank"}
    expected |= {"positive_similarity", "negative_similarity", "negatives_per_anchor"}
    expected |= {"skipped_steps", "overflows", "quarantined", "step", "kind", "wall", "restart"}
    assert set(lines[0]) == expected
    assert lines[0]["epoch"] == pytest.approx(5 / 7)  # (128 - 16 held out) / 16 steps an epoch
    evals = read_metrics(run_dir, "eval")
    assert [line["step"] for line in evals] == [6, 12]
    assert all(0 <= line["holdout_knn"] <= 1 for line in evals)


@pytest.mark.promise(6)
def test_the_held_out_samples_are_never_trained_on(data, tmp_path):
    [(_, seen)] = train_over(1, write_recipe(tmp_path), data, tmp_path / "run", "steps=21")
    served = {int(i) for ids, _ in seen for i in ids}
    aside = set(held_out(load_index(data).split("train").labels, 16).tolist())
    assert len(aside) == 16
    assert served == set(range(128)) - aside


@pytest.mark.promise(11)
def test_a_holdout_by_a_column_shares_no_group_with_training(tmp_path):
    data = write_dataset(tmp_path / "data")
    patients = [f"p{k * 7 % 128 // 4}" if k % 9 else None for k in range(128)]
    add_columns(data, patient=patients)
    changes = ("steps=24", "data.holdout_by=patient")
    [(_, seen)] = train_over(1, write_recipe(tmp_path), data, tmp_path / "run", *changes)
    served = {int(i) for ids, _ in seen for i in ids}
    aside = set(range(128)) - served
    assert 12 <= len(aside) <= 20  # 16, up to half of a group; an epoch may drop less than a batch
    assert {patients[k] for k in served} & {patients[k] for k in aside} <= {None}


def doubled(folder):
    """A data set in which samples 112 to 127 are duplicates of 0 to 15."""
    manifest = write_dataset(folder)
    return add_columns(
        manifest, duplicate_group=[k % 112 if k % 112 < 16 else None for k in range(128)]
    )


def test_of_each_group_the_first_is_trained_on_alone_also_after_a_resume(tmp_path):
    data, file = doubled(tmp_path / "data"), write_recipe(tmp_path)
    changes = ("data.holdout=0", "steps=14", "data.keep=duplicate_group first")
    [(_, whole)] = train_over(1, file, data.folder, tmp_path / "whole", *changes)
    served = [[int(i) for i in ids] for ids, _ in whole]
    for epoch in (served[:7], served[7:]):
        assert sorted(i for ids in epoch for i in ids) == list(range(112))
    ranks = train_over(2, file, data.folder, tmp_path / "two", *changes)
    together = [sorted(int(i) for _, own in ranks for i in own[step][0]) for step in range(14)]
    assert together == list(map(sorted, served)), "the same over processes"
    kill_over(1, "train.step:10", file, data.folder, tmp_path / "run", *changes)
    [(_, rest)] = train_over(1, file, data.folder, tmp_path / "run", *changes)
    assert [[int(i) for i in ids] for ids, _ in rest] == served[5:], "saved at step 5 of 7"


def test_held_out_images_of_a_run_from_weights_search_trained_ones_too(tmp_path, monkeypatch):
    split = load_index(write_dataset(tmp_path / "data")).split("train")
    random = load_recipe(write_recipe(tmp_path), ["data.holdout=16"])
    recipe = random.model_copy(update={"init": "0" * 64})
    trained = np.setdiff1d(np.arange(len(split)), holdout_ids(recipe, split))
    assert bank_ids(recipe, split).tolist() == trained.tolist()
    monkeypatch.setattr(holdout, "MOST_BANK", 30)
    assert len(bank_ids(recipe, split)) == 30
    assert set(bank_ids(recipe, split)) < set(trained)
    assert bank_ids(random, split) is None
    unlabelled = load_index(write_dataset(tmp_path / "none", labelled=False)).split("train")
    every = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"holdout_from": "all"})}
    )
    assert len(holdout_ids(every, unlabelled))
    assert bank_ids(every, unlabelled) is None


def test_the_first_of_a_group_is_the_first_that_is_not_held_out(tmp_path):
    data = doubled(tmp_path / "data")
    split, file = data.split("train"), write_recipe(tmp_path)
    recipe = load_recipe(file, ["data.holdout=40", "data.keep=duplicate_group first"])
    aside = set(held_out(split.labels, 40).tolist())
    first = {k % 112: k for k in reversed(range(128)) if k not in aside}
    assert set(range(128)) - set(untrained_ids(recipe, split).tolist()) == {*first.values()}
    # it is in the digest, where it is used, and refused where it makes no sense
    plain = load_recipe(file, ["data.holdout=40"])
    assert identity(recipe, "0" * 64, 1)["digest"] != identity(plain, "0" * 64, 1)["digest"]
    with pytest.raises(DataError, match=r"data.keep: .*no column 'duplicates'"):
        plan_order(load_recipe(file, ["data.keep=duplicates first"]), data)
    with pytest.raises(RecipeError, match=r"data.keep: 'duplicate_group last' is no COLUMN first"):
        load_recipe(file, ["data.keep=duplicate_group last"])


@pytest.mark.promise(8)
def test_bad_images_are_quarantined_by_shard_and_key_and_the_run_continues(tmp_path):
    data = write_dataset(tmp_path / "data", broken=BROKEN)
    run_dir = tmp_path / "run"
    recipe = write_recipe(tmp_path)
    ranks = train_over(2, recipe, data, run_dir, "data.holdout=0", "steps=8")
    assert [done for done, _ in ranks] == [8, 8]
    lines = [json.loads(line) for line in (run_dir / "quarantine.jsonl").read_text().splitlines()]
    assert sorted((line["id"], line["shard"], line["key"]) for line in lines) == [
        (5, "train-000000.tar", "train000005"),
        (17, "train-000001.tar", "train000017"),
        (40, "train-000002.tar", "train000040"),
    ]
    assert read_metrics(run_dir)[-1]["quarantined"] == 3


@pytest.mark.promise(8)
def test_too_many_bad_images_end_the_run_with_what_to_do(tmp_path):
    data = write_dataset(tmp_path / "data", broken=dict.fromkeys(range(0, 128, 4), b"junk"))
    with pytest.raises(AssertionError, match=r"more than run.max_bad_fraction = 0.05; see quara"):
        train_over(1, write_recipe(tmp_path), data, tmp_path / "run", "data.holdout=0")
    assert "rank 0: DataError" in (tmp_path / "run" / "FAILED").read_text()


def test_unlabelled_images_train_without_the_monitor_and_it_says_so(tmp_path):
    data = write_dataset(tmp_path / "data", labelled=False)
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    result = command_line(
        *command, "steps=2", "run.monitor_steps=1", "loss.mask_labels=true", status=0
    )
    assert "no image has a label" in result.stderr
    assert "data.holdout_from=all" in result.stderr
    assert "loss.mask_labels = true, but the split 'train' has no labels" in result.stderr
    assert read_metrics(run_dir, "eval") == []


def test_shards_that_are_commands_end_each_command_and_run_nothing(tmp_path):
    data = write_dataset(tmp_path / "data")
    canary, recipe = tmp_path / "canary", str(write_recipe(tmp_path))
    text = data.read_text().replace(
        '"file": "train', f'"file": "pipe:touch {canary}; cat {data.parent}/train'
    )
    data.write_text(text)
    for words in (
        ("check", recipe),
        ("preview", recipe, "--out", str(tmp_path / "views.png")),
        ("train", recipe, "--run-dir", str(tmp_path / "run"), "steps=1"),
    ):
        done = command_line(*words, "--data", str(data), status=2)
        assert "would run a shell command" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not canary.exists(), words


def test_bf16_trains_as_fp32_does_and_keeps_float32_weights(data, tmp_path):
    recipe = write_recipe(tmp_path)
    losses = {}
    for precision in ("fp32", "bf16"):
        settings = (f"optim.precision={precision}", "optim.peak_lr=0.001", "steps=4")
        train_over(1, recipe, data, tmp_path / precision, *settings)
        losses[precision] = [line["loss"] for line in read_metrics(tmp_path / precision)]
        weights = final_weights(tmp_path / precision)
        assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}
    # bfloat16 rounds by up to 0.4 %; at temperature 0.2 a few roundings of a cosine move the loss
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


@pytest.mark.slow  # to compile takes minutes
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_compiled_model_trains_as_the_eager_one_does(data, tmp_path):
    """In both modes of torch.compile; CUDA graphs are for GPUs alone."""
    recipe, weights = write_recipe(tmp_path), {}
    for mode in ("off", "default", "reduce-overhead"):
        settings = (f"run.compile={mode}", "steps=2", "optim.precision=fp32", "run.num_workers=0")
        train_over(1, recipe, data, tmp_path / mode, *settings)
        weights[mode] = final_weights(tmp_path / mode)
    for mode in ("default", "reduce-overhead"):
        assert weights[mode].keys() == weights["off"].keys()
        for name, value in weights["off"].items():
            torch.testing.assert_close(weights[mode][name], value, rtol=1e-4, atol=1e-5)


def test_a_collapse_is_an_event_in_the_log_and_a_warning_on_the_console(data, tmp_path):
    """Weights decay to nothing here, and what stays is the projector's bias: one point."""
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    settings = ("optim.peak_lr=0.5", "optim.weight_decay=1", "projector.batchnorm=false")
    result = command_line(*command, *settings, status=0)
    alarms = read_metrics(run_dir, "alarm")
    raised = {name for line in alarms for name in line["raised"]}
    assert raised >= {"embedding_collapse", "rank_collapse"}
    (line,) = (line for line in alarms if "embedding_collapse" in line["raised"])
    assert line["value"]["embedding_collapse"] > line["threshold"]["embedding_collapse"] == 0.95
    said = f"warning: step {line['step']}: embedding_collapse: the mean cosine of two images is"
    assert said in result.stderr
    assert result.stderr.count("embedding_collapse") == 1  # it lasts, and is reported once


def test_a_second_job_on_the_run_directory_is_refused(data, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    lock = RunLock(run_dir)
    with pytest.raises(AssertionError, match=f"in use by process {os.getpid()}"):
        train_over(2, recipe, data, run_dir)
    assert lock.path.exists()
    assert not (run_dir / "FAILED").exists()  # the other job is well
    lock.release()
