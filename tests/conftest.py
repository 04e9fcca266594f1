"""What every test shares: one thread, CUDA tests only where there is CUDA, long files first."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from sslpipe.data.index import DatasetIndex, load_index
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import fakecuda  # noqa: F401  (a fixture)

torch.set_num_threads(1)  # tests run beside others; a thread pool per process only gets in the way

LONGEST = ("test_slurm.py", "test_families.py")  # of the slow tests: minutes; SLURM waits
# what a module that starts processes imports: its tests take seconds, those of others mostly not
STARTS = {
    *("finetune_over", "python", "run_on_cuda", "run_processes", "run_python", "subprocess"),
    "train_over",
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset.json of uneven shards that whole trainings read; no test changes it."""
    return write_dataset(tmp_path_factory.mktemp("data"), (40, 3, 60, 25))


@pytest.fixture(scope="session")
def index(data: Path) -> DatasetIndex:
    """The index of `data`: images of red, green and blue; no test changes it."""
    return load_index(data)


@pytest.fixture(scope="session")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that nothing stopped, "1" and "2" by processes: 12 steps, 7 an epoch."""
    from tests.helpers.runs import train_over, write_recipe  # seconds that most tests do not need

    folder = tmp_path_factory.mktemp("straight")
    for world in (1, 2):
        train_over(world, write_recipe(folder), data, folder / str(world))
    return folder


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed, see `make_killed_run`; no test changes it."""
    from tests.helpers.killed import make_killed_run

    return make_killed_run(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="session", autouse=True)
def _no_flushes() -> Iterator[None]:
    """Nobody pulls the plug here, and to wait for the disk takes a third of a small build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def proved_here() -> Iterator[None]:
    """Exported formats are read in this process, for a module that is not about the clean one."""
    from sslpipe.export import write
    from tests.helpers.exports import read_here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "read_outputs", read_here)
        yield


@pytest.fixture(scope="module")
def few_resamples() -> Iterator[None]:
    """Intervals of few resamples, for a module whose claims are not about them."""
    from sslpipe.evaluation.intervals import bootstrap95, bootstrap_means95

    verification = import_module("sslpipe.evaluation.verification")  # a function has its name, too
    with pytest.MonkeyPatch.context() as patch:
        for interval in (bootstrap95, bootstrap_means95):
            patch.setitem(interval.__kwdefaults__, "resamples", 40)
        patch.setattr(verification, "RESAMPLES", 40)
        yield


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command line in this process, which ends with a status: what it printed on each stream.

    A mistake, of status 2, leaves no trace.
    """
    from sslpipe.cli.app import run

    def call(*words, status=0):
        monkeypatch.setattr("sys.argv", ["sslpipe", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run()
        shown = capsys.readouterr()
        assert (end.value.code or 0) == status, shown.err
        assert "Traceback" not in shown.err
        return shown.out, shown.err

    return call


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two processes of a test cannot share one GPU
    config.option.loadscopereorder = False  # xdist would begin with the files of the most tests


def pytest_itemcollected(item: pytest.Item) -> None:
    for marker in item.iter_markers("promise"):
        item.extra_keyword_matches.add(f"promise_{marker.args[0]:02d}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # a long file at the end would have one process at work and the others idle
    items.sort(key=_place)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a folder of that name is a keyword, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _place(item: pytest.Item) -> tuple[bool, bool]:
    module = item.getparent(pytest.Module)
    return item.path.name not in LONGEST, STARTS.isdisjoint(vars(module.obj))
