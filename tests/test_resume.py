"""A run that was stopped anywhere resumes exactly."""

import os
import signal
import time

import pytest
import torch

from sslpipe.run.log import read_metrics
from tests.helpers.processes import start_python
from tests.helpers.runs import (
    RECIPE,
    ROOT,
    assert_same_weights,
    at_each_step,
    command_line,
    kill_over,
    train_in_rank,
    train_on_equal_views,
    train_over,
    train_words,
    user_environment,
    write_recipe,
)


# at other points of a save: run/test_checkpoint.py
@pytest.mark.promise(2)
@pytest.mark.parametrize(
    ("world", "points"),
    [
        # before the first save, in it, on the last step of an epoch, in mid-epoch (step 9)
        (2, ("train.step:3", "checkpoint.before_rename:1", "train.step:7", "train.step:4")),
        (1, ("checkpoint.before_prune:2",)),
    ],
)
def test_a_killed_and_resumed_run_ends_with_bitwise_the_same_weights(
    data, straight, tmp_path, points, world
):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    for point in points:
        kill_over(world, point, recipe, data, run_dir)
        assert not (run_dir / "DONE").exists()
    assert [last for last, _ in train_over(world, recipe, data, run_dir)] == [12] * world
    assert_same_weights(straight / str(world), run_dir)
    expected = {m["step"]: m["loss"] for m in read_metrics(straight / str(world))}
    assert {m["step"]: m["loss"] for m in read_metrics(run_dir)} == expected


MOCO = ("momentum.start=0.9", "loss.kind=moco", "loss.queue_rows=24")


@pytest.mark.promise(2)
def test_micro_batches_dropout_momentum_encoder_and_queue_resume_bitwise(data, tmp_path):
    """Dropout is drawn twice a step, alike, and again alike after the resume."""
    drop = 'kind = "timm/test_resnet"\ndrop_path_rate = 0.2\n[projector]'
    text = RECIPE.replace('kind = "small_resnet"\nwidths = [8, 16, 16]\n[projector]', drop)
    assert "drop_path" in text
    recipe = write_recipe(tmp_path, text)
    settings = ("data.micro_batch=8", *MOCO, "steps=4", "run.save_steps=2")
    kill_over(1, "train.step:3", recipe, data, tmp_path / "run", *settings)
    for name in ("run", "straight"):
        train_over(1, recipe, data, tmp_path / name, *settings)
    assert_same_weights(tmp_path / "straight", tmp_path / "run")


@pytest.mark.promise(2)
def test_views_of_half_the_size_resume_before_and_after_the_step_at_which_they_grow(data, tmp_path):
    recipe = write_recipe(tmp_path)
    settings = ("augment.half_size_share=0.5", "steps=6", "run.save_steps=2")  # whole from step 3
    for step in (3, 2):  # saved at 2, then at 4
        kill_over(1, f"train.step:{step}", recipe, data, tmp_path / "run", *settings)
    for name in ("run", "straight"):
        train_over(1, recipe, data, tmp_path / name, *settings)
    assert_same_weights(tmp_path / "straight", tmp_path / "run")


@pytest.mark.promise(2)
def test_a_real_sigkill_in_the_middle_of_an_epoch_loses_only_the_steps_since_the_save(
    data, straight, tmp_path
):
    command, run_dir = train_words(tmp_path, data), tmp_path / "run"
    process = start_python(("-m", "sslpipe", *command), ROOT, user_environment({}))
    deadline = time.monotonic() + 120
    while not (run_dir / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.join()
    last = read_metrics(run_dir)[-1]["step"]
    result = command_line(*command, status=0)
    assert "resumed at step 5" in result.stderr or last >= 10
    assert_same_weights(straight / "1", run_dir)


@pytest.mark.promise(2)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_with_another_process_count_it_sees_the_same_samples(data, tmp_path, before, after):
    recipe, fp64, equal = write_recipe(tmp_path), "optim.precision=fp64", train_on_equal_views
    reference = tmp_path / "reference"
    [(_, whole)] = train_over(1, recipe, data, reference, fp64, by=equal)
    run_dir = tmp_path / "run"
    kill_over(before, "train.step:6", recipe, data, run_dir, fp64, by=equal)
    ranks = train_over(after, recipe, data, run_dir, fp64, by=equal)
    assert len(ranks[0][1]) == 7  # steps 5 to 11: the save was after 5
    for step in range(7):
        ids = torch.cat([seen[step][0] for _, seen in ranks])
        assert torch.equal(ids, whole[5 + step][0])
    assert_same_weights(reference, run_dir, rtol=1e-9, atol=1e-11)


def signalled_in_rank(process, *arguments):
    """Rank 1 alone is signalled, at its third step."""

    def signal_at_the_third(step, batch):
        if step == 2 and process.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    at_each_step(signal_at_the_third)
    return train_in_rank(process, *arguments)[0]


# SIGTERM: test_faults.py
@pytest.mark.promise(2)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_continues(
    data, straight, tmp_path
):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    assert train_over(2, recipe, data, run_dir, by=signalled_in_rank) == [3, 3]
    assert (run_dir / "PREEMPTED").read_text() == "step 3\n"
    assert [last for last, _ in train_over(2, recipe, data, run_dir)] == [12, 12]
    assert not (run_dir / "PREEMPTED").exists()
    assert (run_dir / "DONE").exists()
    assert_same_weights(straight / "2", run_dir)


@pytest.mark.parametrize(
    ("number", "marker"),
    [
        (signal.SIGINT, "STOPPED"),
        (signal.SIGTERM, "PREEMPTED"),
        (signal.SIGALRM, "PREEMPTED"),  # any other: test_portable.py
        ("a stop file", "PREEMPTED"),
    ],
)
def test_the_exit_status_of_a_stopped_run_names_the_signal(data, tmp_path, number, marker):
    run_dir, stop = tmp_path / "run", tmp_path / "STOP"
    command = ("train", str(write_recipe(tmp_path)), "--data", str(data), "--run-dir", str(run_dir))
    how, step = {"SSLPIPE_STOP_FILE": str(stop)}, 1
    if isinstance(number, signal.Signals):
        how, step = {"SSLPIPE_FAULT": f"train.step:2={number.name.lower()}"}, 2
    else:
        stop.touch()
        number = signal.SIGTERM
    command_line(*command, "steps=3", **how, status=128 + number)
    assert (run_dir / marker).read_text() == f"step {step}\n"
    shown = command_line("status", str(run_dir)).stdout
    assert f"{marker.lower()}: step {step}" in shown
    assert "resumes" in shown
    assert "never restarted" not in shown
    command_line(*command, "steps=3", status=0)
    assert (run_dir / "DONE").exists()
    assert not (run_dir / marker).exists()


def test_a_run_with_another_recipe_is_refused_with_the_keys_that_differ(data, tmp_path):
    command = train_words(tmp_path, data)
    command_line(*command, "steps=5", status=0)

    def contents():
        found = (tmp_path / "run").rglob("*")
        return {path: path.read_bytes() for path in found if path.is_file()}

    before = contents()
    refused = tmp_path / "REFUSED.77"
    job = {"SSLPIPE_REFUSED_FILE": str(refused)}  # as a batch job has it
    settings = "loss.temperature=0.5", "optim.weight_decay=0.1"
    result = command_line(*command, "steps=5", *settings, **job, status=2)
    assert contents() == before  # the run that it holds is as it was
    assert refused.read_text().startswith("rank 0: CheckpointError: ")
    assert "loss.temperature = 0.2 when it began, 0.5 now" in result.stderr
    assert "optim.weight_decay = 1e-06 when it began, 0.1 now" in result.stderr
    assert "add loss.temperature=0.2 optim.weight_decay=1e-06" in result.stderr
    assert "Traceback" not in result.stderr
    command_line(*command, "steps=5", "run.log_steps=2", status=0)
