"""The batch scripts in a real SLURM of this machine (helpers/slurm/up.sh), which needs root."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.run.batch_script import batch_script, template
from sslpipe.run.log import read_metrics
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import write_recipe as write_finetune_recipe
from tests.helpers.photos import write_photos
from tests.helpers.record import record
from tests.helpers.runs import (
    ROOT,
    assert_same_weights,
    command_line,
    train_over,
    train_words,
    write_recipe,
)

LIMIT_S = 240  # a loaded machine takes a minute to start two ranks
SETTINGS = ("steps=60", "run.save_steps=10", "run.log_steps=1")
LONG = ("steps=240", "run.save_steps=240", "run.log_steps=1")  # does not end within its minute
SLOW = {"SSLPIPE_FAULT": "train.step:*=slow"}  # five steps a second: time for SLURM to act
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment in which sbatch and its kin talk to a cluster of two nodes."""
    absent = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if os.geteuid() != 0 or absent:
        pytest.skip(f"needs root and {', '.join(absent) or 'nothing else'} (Debian: slurm-wlm)")
    folder = tmp_path_factory.mktemp("cluster")
    folder.chmod(0o755)
    for parent in folder.parents:  # munge refuses a socket below a folder that others may write
        if parent.name.startswith("pytest-"):
            parent.chmod(0o755)
    up = subprocess.run(
        [ROOT / "tests/helpers/slurm/up.sh", folder], capture_output=True, text=True, timeout=120
    )
    try:
        assert up.returncode == 0, up.stderr
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PET_"))}
        yield {
            **kept,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "SSLPIPE_ROOT": str(ROOT),
            "SSLPIPE_VENV": sys.prefix,
            "GLOO_SOCKET_IFNAME": "lo",
        }
    finally:
        subprocess.run([ROOT / "tests/helpers/slurm/down.sh", folder], timeout=120)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """World -> a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    recipe = write_recipe(folder)
    for world, settings in ((1, LONG), (2, SETTINGS)):
        train_over(world, recipe, data, folder / str(world), *settings)
    return {world: folder / str(world) for world in (1, 2)}


class Job:
    """A batch job and what the controller says of it."""

    def __init__(self, cluster: dict[str, str], *sbatch: str, **environment: str) -> None:
        self.cluster = cluster
        said = self._run("sbatch", *sbatch, **environment)
        self.number = re.search(r"Submitted batch job (\d+)", said)[1]

    def facts(self) -> dict[str, str]:
        said = self._run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.partition("=")[::2] for word in said.splitlines()[0].split())

    def wait(self, *states: str) -> dict[str, str]:
        return until(lambda: (f := self.facts())["JobState"] in states and f, f"{states}", 0.5)

    def requeued(self, times: int) -> None:
        """Wait until it was requeued so often; before its first start it is PENDING, too."""
        wanted = {"JobState": "PENDING", "Restarts": str(times)}
        until(lambda: wanted.items() <= self.facts().items(), f"requeued {times} times", 0.5)

    def restart_now(self, times: int = 1) -> None:
        """A requeued job waits for two minutes; this one does not."""
        self.requeued(times)
        self._run("scontrol", "update", f"JobId={self.number}", "StartTime=now+1")
        self.wait("RUNNING", "COMPLETED", "FAILED")

    def cancel(self) -> None:
        self._run("scancel", self.number)

    def _run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command,
            env={**self.cluster, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout


def until(condition, what: str, pause_s: float = 0.1):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if actual := condition():
            return actual
        time.sleep(pause_s)
    raise AssertionError(f"not within {LIMIT_S} s: {what}")


def steps_done(run_dir: Path) -> int:
    lines = read_metrics(run_dir)
    return lines[-1]["step"] if lines else 0


def pretrain(cluster, tmp_path, data, *, options=(), settings=SETTINGS, **environment) -> Job:
    command = ["--partition=low", f"--output={tmp_path}/job.log", *options]
    arguments = [str(write_recipe(tmp_path)), "--data", str(data), f"--run-dir={tmp_path / 'run'}"]
    script = "slurm/train.sbatch"
    return Job(cluster, *command, script, *arguments, *settings, **environment)


def starts(run_dir: Path) -> list[int]:
    """The step at which each start of a run began."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "start"]


@pytest.mark.slurm
def test_preempted_on_two_nodes_it_saves_is_requeued_and_ends_with_the_same_weights(
    cluster, data, straight, tmp_path
):
    run_dir = tmp_path / "run"
    words = ("slurm", *train_words(tmp_path, data)[1:], "--nodes", "2", "--submit", *SETTINGS)
    options = ("--option", "partition=low", "--option", f"output={tmp_path}/job.log")
    words += (*options, "run.save_steps=1000")
    submitted = command_line(*words, status=0, **cluster, **SLOW)
    low = Job.__new__(Job)
    low.cluster, low.number = cluster, re.search(r"(\d+)", submitted.stdout)[1]
    until(lambda: steps_done(run_dir) >= 5, "5 steps")
    high = Job(
        cluster,
        *("--partition=high", "--nodes=2", f"--output={tmp_path}/high.log", "--wrap=sleep 1"),
    )
    low.requeued(1)
    said = log_of(tmp_path)  # the second start begins it anew
    assert "requeued" in said
    assert "not requeued" not in said
    high.wait("COMPLETED")
    marker = (run_dir / "PREEMPTED").read_text()
    low.restart_now()
    assert low.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", log_of(tmp_path)
    assert low.facts()["Restarts"] == "1"
    first, second = starts(run_dir)
    assert (first, marker) == (0, f"step {second}\n")
    assert 5 <= second < 60, "no save was due: it stopped at a step of its own"
    assert (run_dir / "DONE").exists()
    assert_same_weights(straight[2], run_dir)
    log = (tmp_path / "job.log").read_text()
    record("slurm_preemption", {"log": re.findall(r"^(?:slurm: .*|.*stopped at.*)$", log, re.M)})


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "job.log").read_text()[-4000:]


@pytest.mark.slurm
def test_killed_in_a_save_when_the_grace_is_over_it_resumes_from_the_save_before(
    cluster, data, straight, tmp_path
):
    """The fourth save hangs; SLURM kills everything 20 s after asking, and requeues by itself.

    The second start makes three saves.
    """
    run_dir = tmp_path / "run"
    fault = "checkpoint.before_rename:4=hang"
    low = pretrain(cluster, tmp_path, data, options=["--nodes=2"], SSLPIPE_FAULT=fault)
    until(lambda: steps_done(run_dir) == 40, "40 steps")
    Job(cluster, "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    low.restart_now()
    assert low.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", log_of(tmp_path)
    assert low.facts()["Restarts"] == "1"
    assert starts(run_dir) == [0, 30]
    assert_same_weights(straight[2], run_dir)


@pytest.mark.slurm
def test_at_the_time_limit_it_saves_and_resumes_and_a_cancelled_job_stays_cancelled(
    cluster, data, straight, tmp_path
):
    run_dir = tmp_path / "run"
    options = ["--time=1", "--signal=B:USR1@10"]  # 10 to 40 s before the end
    job = pretrain(cluster, tmp_path, data, options=options, settings=LONG, **SLOW)
    job.requeued(1)
    assert "requeued" in log_of(tmp_path)
    (step,) = [int(s) for s in re.findall(r"step (\d+)", (run_dir / "PREEMPTED").read_text())]
    assert 0 < step < 240
    job.restart_now()
    until(lambda: steps_done(run_dir) > step, "a step of the second start")
    job.cancel()
    job.wait("CANCELLED")
    time.sleep(15)  # KillWait and more: nothing may bring it back
    assert job.facts()["JobState"] == "CANCELLED"
    again = pretrain(cluster, tmp_path, data, settings=LONG)
    assert again.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", log_of(tmp_path)
    assert_same_weights(straight[1], run_dir)


@pytest.mark.slurm
def test_requeueing_stops_after_three_starts_without_a_new_checkpoint(cluster, data, tmp_path):
    settings = ("steps=12", "run.save_steps=5")
    job = pretrain(cluster, tmp_path, data, settings=settings, SSLPIPE_FAULT="train.step:2")
    for times in (1, 2):
        job.restart_now(times)
    assert job.wait("FAILED", "COMPLETED")["JobState"] == "FAILED"
    assert job.facts()["Restarts"] == "2"
    text = (tmp_path / "run" / "FAILED").read_text()
    assert "3 starts" in text
    assert "no new checkpoint" in text


@pytest.mark.slurm
def test_a_mistake_in_the_input_ends_the_job_at_once(cluster, data, tmp_path):
    wrong = ("data.num_stream=4",)
    unsplit = ("data.batch_size=15", "data.num_streams=5", "steps=2")
    processes = {"SSLPIPE_CPU_PROCESSES": "2"}
    for k, (settings, environment) in enumerate([(wrong, {}), (unsplit, processes)]):
        folder = tmp_path / str(k)
        folder.mkdir()
        job = pretrain(cluster, folder, data, settings=settings, **environment)
        assert job.wait("FAILED", "COMPLETED", "PENDING")["JobState"] in ("FAILED", "PENDING")
        facts = job.wait("FAILED", "COMPLETED")
        assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), log_of(folder)
        assert "Traceback" not in log_of(folder) or k == 1  # the launcher adds its own
    assert "did you mean 'num_streams'" in log_of(tmp_path / "0")
    assert "does not divide over 2 processes" in log_of(tmp_path / "1")


@pytest.mark.slurm
def test_a_sweep_trains_one_run_a_line_and_evaluation_follows(cluster, tmp_path):
    data = write_dataset(tmp_path / "data")
    write_dataset(tmp_path / "data", (40,), split="test")
    (tmp_path / "settings").write_text("seed=1\nseed=2 optim.peak_lr=0.01\n")
    job = Job(
        cluster,
        *("--array=0-1", f"--output={tmp_path}/%a.log", "slurm/sweep.sbatch"),
        *(f"{tmp_path}/settings", str(write_recipe(tmp_path)), "--data", str(data)),
        *("--run-dir", f"{tmp_path}/runs", "steps=4"),
    )
    after = Job(
        cluster,
        *(f"--dependency=afterok:{job.number}", f"--output={tmp_path}/evaluate.log"),
        *("slurm/evaluate.sbatch", f"{tmp_path}/runs/1", "--data", str(data)),
    )
    state = after.wait("COMPLETED", "FAILED", "CANCELLED")["JobState"]
    assert state == "COMPLETED", (tmp_path / "evaluate.log").read_text()[-3000:]
    stored = [json.loads((tmp_path / f"runs/{k}/recipe.json").read_text()) for k in (0, 1)]
    assert [recipe["seed"] for recipe in stored] == [1, 2]
    assert stored[1]["optim"]["peak_lr"] == 0.01
    assert (tmp_path / "runs/1/eval.json").exists()
    assert (tmp_path / "runs/1/report.html").exists()


@pytest.mark.slurm
def test_an_array_builds_a_folder_a_line_and_a_job_after_it_indexes_them(cluster, tmp_path):
    out, lines = tmp_path / "set", tmp_path / "lines"
    for k in range(2):
        write_photos(tmp_path / f"photos{k}")
    lines.write_text("".join(f"--root {tmp_path}/photos{k}\n" for k in range(2)))
    job = Job(
        cluster,
        *("--array=0-1", f"--output={tmp_path}/%a.log", "slurm/shards.sbatch", str(lines)),
        *(str(out), "--test-fraction", "0.25"),
    )
    after = Job(
        cluster,
        *(f"--dependency=afterok:{job.number}", f"--output={tmp_path}/index.log"),
        *("slurm/shards.sbatch", "index", f"{out}/0", f"{out}/1", "--out", str(out)),
    )
    state = after.wait("COMPLETED", "FAILED", "CANCELLED")["JobState"]
    logs = [path.read_text()[-2000:] for path in tmp_path.glob("*.log")]
    assert state == "COMPLETED", logs
    whole, own = load_index(out), [load_index(out / str(k)) for k in range(2)]
    for split in ("train", "test"):
        assert len(whole.split(split)) == sum(len(each.split(split)) for each in own)


def stands_in(folder: Path, name: str, script: str) -> str:
    """Write a program of this name; the PATH on which it comes first."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def started_by(*words: str | Path, **environment: str) -> list[str]:
    """What bash has srun start, of a stand-in that prints its words."""
    environment = {**os.environ, **environment}
    done = subprocess.run(["bash", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    return said[said.index("python") :]


def test_each_task_of_an_array_builds_the_folder_of_its_line(tmp_path):
    path = stands_in(tmp_path, "srun", 'printf "%s\\n" "$@"')
    lines = tmp_path / "my lines"
    lines.write_bytes(b"\xef\xbb\xbf--root '/a b'\r\n--source csv --csv b.csv\n--root it's\n")
    common = {"SSLPIPE_ROOT": str(ROOT), "SSLPIPE_VENV": "/none", "PATH": path}
    index = ["index", "my out/0", "my out/1", "--out", "my out"]
    task = [str(lines), "my out", "--seed", "3"]
    for variables, words, started in (
        ({}, index, index),
        ({"SLURM_ARRAY_TASK_ID": "0"}, task, ["build", "my out/0", "--root", "/a b"]),
        (
            {"SLURM_ARRAY_TASK_ID": "1"},
            task,
            ["build", "my out/1", "--source", "csv", "--csv", "b.csv"],
        ),
    ):
        said = started_by(ROOT / "slurm" / "shards.sbatch", *words, **common, **variables)
        more = task[2:] if variables else []
        assert said == ["python", "-m", "sslpipe", "shards", *started, *more]
    script = ["bash", ROOT / "slurm" / "shards.sbatch", *task]
    for number, said in (("3", "my lines has an open quote"), ("4", "my lines has no line 4")):
        none = {**os.environ, **common, "SLURM_ARRAY_TASK_ID": str(int(number) - 1)}
        done = subprocess.run(script, env=none, capture_output=True, text=True)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_finished_script_needs_no_arguments_and_is_valid_bash(data, tmp_path):
    recipe = write_recipe(tmp_path)
    result = command_line(
        *("slurm", str(recipe), "--data", str(data), "--run-dir", "runs/it's 1"),
        *("--nodes", "2", "--gpus-per-node", "2", "--time", "1-00:00:00"),
        *("--option", "signal=B:USR1@300"),
        *("--option", "partition=gpu", "optim.peak_lr=0.1", "run.num_workers=3"),
        status=0,
    )
    head = [line for line in result.stdout.splitlines() if line.startswith("#SBATCH")]
    wanted = ("nodes=2", "gpus-per-node=2", "signal=B:USR1@300", "partition=gpu")
    wanted += ("cpus-per-task=8",)  # two processes, each with three threads that decode
    assert {f"#SBATCH --{option}" for option in wanted} <= set(head)
    assert "8 cores a node, 4 a GPU" in result.stderr
    assert "--option cpus-per-task=CORES" in result.stderr
    assert len({line.split("=")[0] for line in head}) == len(head)  # each option once
    assert "slurm/site.sh" not in result.stdout.replace("# ", "")
    checked = subprocess.run(["bash", "-n"], input=result.stdout, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    lines = result.stdout.splitlines()
    given = next(line for line in lines if line.startswith("set -- "))
    words = subprocess.run(
        ["bash", "-c", f'{given}; printf "%s\\n" "$@"'], capture_output=True, text=True
    )
    assert words.stdout.splitlines()[1:] == [
        *("optim.peak_lr=0.1", "run.num_workers=3", "--data", str(data), "--run-dir", "runs/it's 1")
    ]


@pytest.mark.parametrize("given", [(), ("--option", "cpus-per-task=5")])
def test_cores_that_no_node_has_are_named_with_what_to_give(data, tmp_path, monkeypatch, given):
    refusal = "sbatch: error: Requested node configuration is not available"
    path = stands_in(tmp_path, "sbatch", f"echo '{refusal}' >&2; exit 1")
    monkeypatch.setenv("PATH", path)
    recipe = str(write_recipe(tmp_path))
    words = ("slurm", recipe, "--data", str(data), "--run-dir", "runs/a", "--gpus-per-node", "2")
    refused = command_line(*words, *given, "--submit", status=2).stderr
    printed = command_line(*words, *given, status=0)
    assert refusal in refused
    assert f"#SBATCH --cpus-per-task={5 if given else 6}" in printed.stdout.splitlines()
    for text in (refused, printed.stderr):
        assert ("6 cores a node, 3 a GPU (1 + run.num_workers)" in text) == (not given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job-name", "a b"),
        ("job-name", "x\n#SBATCH --uid=0"),
        ("partition", "gpu; rm -rf /"),
        ("time", "$(id)"),
        ("output", "../$HOME"),
        ("wrap", "id"),
    ],
)
def test_an_options_value_cannot_become_another_line_or_command(name, value):
    with pytest.raises(UserError, match=r"is not of the form|give others to sbatch"):
        batch_script({name: value}, [])


def test_every_users_error_is_known_to_the_script_that_must_not_requeue_it():
    import sslpipe.errors

    pattern = re.search(r"grep -qE '(.*)'", template("train.sh"))[1]
    for name, value in vars(sslpipe.errors).items():
        if isinstance(value, type) and issubclass(value, UserError):
            assert re.match(pattern, f"rank 0: {name}: text"), name


@pytest.mark.parametrize(
    ("state", "restarts", "count", "said"),
    [
        ("COMPLETING", 1, "0", "requeued by SLURM"),  # preempted, a node lost
        ("PENDING", 3, "2", "requeued by SLURM"),
        ("COMPLETING", 0, "", "is COMPLETING, not requeued"),  # cancelled
        ("CANCELLED", 2, "2", "is CANCELLED, not requeued"),
        ("RUNNING", 1, "1", "ended with status 7 at step-1; requeued"),
    ],
)
def test_the_log_says_who_requeues_a_job_that_has_ended(tmp_path, state, restarts, count, said):
    """The end of the job's script, beside a `scontrol` that only answers."""
    scontrol = tmp_path / "scontrol"
    record = f"JobId=5 JobName=train JobState={state} Requeue=1 Restarts={restarts} BatchFlag=1"
    scontrol.write_text(f"#!/bin/sh\n[ $1 = requeue ] && echo $* || echo '{record}'\n")
    scontrol.chmod(0o755)
    end = template("train.sh").partition("# A cancelled job")[2].replace("sleep 120", "")
    done = subprocess.run(
        ["bash", "-eu", "-c", f"newest() {{ echo step-1; }}\njob=5 code=7\n#{end}"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": count},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said in done.stdout, done
    assert ("requeue 5" in done.stdout) == (state == "RUNNING")


def test_the_check_before_a_training_runs_in_the_sites_container(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("inside=(apptainer exec image.sif)\n")
    calls = tmp_path / "calls"
    run_dir = tmp_path / "run"
    stands_in(tmp_path, "python", "exit 9")  # the node has no sslpipe
    stands_in(tmp_path, "scontrol", "echo n1")
    cores = "${SRUN_CPUS_PER_TASK:-one}"  # a step's, which are not those of the job
    path = stands_in(tmp_path, "srun", f'echo "{cores} cores: $*" >>{calls}; touch {run_dir}/DONE')
    words = ["a.toml", "--data", "d", "--run-dir=~/run"]  # no shell replaces this ~
    script = batch_script({}, words, site)
    script = script.replace(f"export PATH={sys.prefix}/bin:$PATH", "")
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
    environment = {**os.environ, **variables, "SLURM_CPUS_PER_TASK": "8", "PATH": path}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().count("8 cores: ") == 2
    check, train = calls.read_text().split("--kill-on-bad-exit=1 ")[1:]
    assert check.startswith("apptainer exec image.sif python -m sslpipe check a.toml --data d\n")
    assert train.startswith("apptainer exec image.sif bash -c")


def test_the_scripts_are_valid_bash():
    folders = [ROOT / name for name in ("slurm", "sslpipe/run/batch", "tests/helpers/slurm")]
    paths = [p for folder in folders for p in folder.iterdir() if p.suffix in (".sbatch", ".sh")]
    assert len(paths) == 12
    for path in paths:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_clones_script_has_the_body_and_the_options_of_the_printed_one():
    clone = (ROOT / "slurm/train.sbatch").read_text().splitlines()
    printed = batch_script({}, [])
    # it is sourced, with the script's own arguments
    assert clone[-1] == '. "$SSLPIPE_ROOT/sslpipe/run/batch/train.sh"'
    assert '. "$SSLPIPE_ROOT/sslpipe/run/batch/site.sh"' in (ROOT / "slurm/site.sh").read_text()
    assert template("train.sh").rstrip() in printed
    assert template("site.sh") in printed
    options = [k for k in clone if k.startswith("#SBATCH")]
    assert options == [k for k in printed.splitlines() if k.startswith("#SBATCH")]


def test_a_sites_file_and_the_weights_of_the_start_are_in_the_script(data, tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("module load cuda/13.0 # @SITE $HOME\n")
    recipe = str(write_finetune_recipe(tmp_path))
    words = ("slurm", recipe, "--data", str(data), "--run-dir", "runs/tuned")
    result = command_line(*words, "--init", "runs/a", "--site", str(site), "--nodes", "3", status=0)
    lines = result.stdout.splitlines()
    assert "module load cuda/13.0 # @SITE $HOME" in lines
    assert f"set -- {recipe} --data {data} --init runs/a --run-dir runs/tuned" in lines


@pytest.mark.slurm
def test_a_printed_fine_tuning_needs_no_clone_is_requeued_and_ends(cluster, tmp_path):
    """From a folder that is no clone; requeued by hand in the middle, resumed, and `status`."""
    data = write_dataset(tmp_path / "data", (40, 60, 72), classes=8)
    words = ("--data", str(data), "--run-dir", "pretrained", "steps=4", "backbone.widths=[8,16]")
    pretraining = write_recipe(tmp_path).rename(tmp_path / "pretraining.toml")
    command_line("train", str(pretraining), *words, cwd=tmp_path, status=0)
    recipe = write_finetune_recipe(tmp_path)
    words = ("--data", str(data), "--run-dir", "tuned", "--init", "pretrained", "steps=60")
    options = ("--option", "partition=low", "--option", f"output={tmp_path}/job.log")
    script = command_line("slurm", str(recipe), *words, *options, cwd=tmp_path, status=0)
    (tmp_path / "job.sbatch").write_text(script.stdout)
    alone = {k: v for k, v in cluster.items() if k not in ("SSLPIPE_ROOT", "SSLPIPE_VENV")}
    job = Job(alone, f"--chdir={tmp_path}", f"{tmp_path}/job.sbatch", PYTHONPATH=str(ROOT), **SLOW)
    run_dir = tmp_path / "tuned"
    until(lambda: steps_done(run_dir) >= 5 or job.facts()["JobState"] == "FAILED", "5 steps")
    assert job.facts()["JobState"] == "RUNNING", log_of(tmp_path)
    job._run("scontrol", "requeue", job.number)
    job.restart_now()
    assert job.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", log_of(tmp_path)
    first, second = starts(run_dir)
    assert first == 0 < second
    shown = json.loads(command_line("status", str(run_dir), "--json").stdout)
    assert (shown["state"], shown["step"], shown["restarts"]) == ("done", 60, 1)
