"""What others wrote is data: it names no file, runs no code, and learns no secret."""

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.errors import RecipeError, UserError
from sslpipe.plan import Pretraining
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.accelerator import _without_secrets
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.runs import RECIPE, ROOT, command_line, write_recipe

HOSTILE = ("../../outside.png", "/tmp/sslpipe-outside.png", "a/../../b.png", "$(touch x).png")


def test_names_in_a_shard_lead_nowhere(tmp_path):
    """Regular members under such names are samples like others; links and devices are none."""
    folder = tmp_path / "data"
    folder.mkdir()
    with tarfile.open(folder / "train.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for k, name in enumerate(HOSTILE):
            raw = png(picture(k))
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    written = write_own_index(folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    bad: list[object] = []
    seen = list(one_pass(load_index(written).split("train"), on_bad=bad.append))
    assert sum(len(batch.ids) for batch in seen) + len(bad) == len(HOSTILE)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not Path("/tmp/sslpipe-outside.png").exists()
    assert not Path("x").exists()


def write_own_index(folder: Path) -> Path:
    """An index of the regular members, written with tarfile alone."""
    with tarfile.open(folder / "train.tar") as tar:
        members = [member for member in tar.getmembers() if member.isreg()]
    rows = [[m.offset, m.offset_data + -(-m.size // 512) * 512, -1] for m in members]
    sidecar = io.BytesIO()
    np.save(sidecar, np.array(rows, np.int64))
    (folder / "train.offsets.npy").write_bytes(sidecar.getvalue())
    raw = (folder / "train.tar").read_bytes()
    sha256 = [hashlib.sha256(each).hexdigest() for each in (raw, sidecar.getvalue())]
    entry = {
        "file": "train.tar", "samples": len(rows), "bytes": len(raw), "sha256": sha256[0],
        "offsets": "train.offsets.npy", "offsets_sha256": sha256[1],
    }  # fmt: skip
    tree = {"schema_version": 1, "name": "x", "splits": {"train": [entry]}}
    (folder / "dataset.json").write_text(json.dumps(tree))
    return folder / "dataset.json"


@pytest.mark.promise(13)
@pytest.mark.parametrize(
    "override",
    [
        "loss.kind=os.system",
        "augment.kind=__import__('os').system('touch canary')",
        "backbone.kind=builtins/exec",
        "loss.kind=sslpipe.faults:fault",
        "loss.kind=hostile:Loss",
        "loss.kind=hostile.Loss",
        "backbone.kind=hostile",
        "backbone.kind=timm/hf-hub:someone/else",
        "backbone.kind=torchvision/get_weight",
        "loss.__class__=x",
    ],
)
def test_a_recipe_names_entries_of_tables_and_nothing_else(override, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a module that could be imported
    (tmp_path / "hostile.py").write_text("open('canary', 'w')\n")
    data = write_dataset(tmp_path / "data")
    path = write_recipe(tmp_path)
    with pytest.raises(UserError) as raised:
        check_pretraining(Pretraining.make(load_recipe(path, [override]), load_index(data)))
    assert "\n" not in str(raised.value).strip()
    assert not (tmp_path / "canary").exists()


@pytest.mark.promise(13)
def test_a_recipe_reads_neither_the_environment_nor_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_PLACE", "gotcha")
    text = RECIPE.replace('name = "tiny"', 'name = "${SECRET_PLACE} $SECRET_PLACE {{x}} @x"')
    name = load_recipe(write_recipe(tmp_path, text)).name
    assert name == "${SECRET_PLACE} $SECRET_PLACE {{x}} @x"
    with pytest.raises(RecipeError, match="include"):
        load_recipe(write_recipe(tmp_path, 'include = "/etc/passwd"\n' + RECIPE))


def test_secrets_of_the_environment_are_in_no_file_of_a_run(tmp_path):
    data = write_dataset(tmp_path / "data")
    secret = "4a1f" * 10
    names = ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD")
    command = ("train", str(write_recipe(tmp_path)), "--data", str(data))
    result = command_line(
        *command,
        *("--run-dir", str(tmp_path / "run"), "steps=2", 'run.trackers=["wandb", "tensorboard"]'),
        **dict.fromkeys(names, secret),
        WANDB_MODE="offline",
    )
    assert result.returncode == 0, result.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    assert secret not in result.stdout + result.stderr


PYTHON = [path for folder in ("sslpipe", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"shell\s*=\s*True|os\.system|os\.popen", "a shell"),
        (r"^\s*(import|from) (pickle|cPickle|dill|joblib|shelve|marshal|yaml)\b", "it runs code"),
        (r"(?<![\w.])(eval|exec|__import__)\(", "text that is run"),
        (r"allow_pickle\s*=\s*True|weights_only\s*=\s*False", "unpickling"),
        (r"torch\.load\((?![^)]*weights_only=True)", "unpickling"),
        (r"SLURM_", "a scheduler's variable: launch/ has those"),
        (r"extractall|\.extract\(", "files written under a tar's names"),
        (r"verify\s*=\s*False|ssl\._create_unverified|CERT_NONE", "unchecked certificates"),
        (r"\.decode\(\s*\)\s*\.to_tuple|wds\.WebDataset\(", "webdataset's own decoding"),
    ],
)  # fmt: skip
def test_no_program_file_uses(pattern, why):
    for path in PYTHON:
        actual = re.search(pattern, path.read_text(), re.MULTILINE)
        assert not actual, f"{path.relative_to(ROOT)}: {actual[0]!r} is {why}"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--data=https://me:4a1f@host/d.json?sig=4a1f", "--data=https://...@host/d.json?..."),
        ("https://host/a@b/dataset.json", "https://host/a@b/dataset.json"),
        ("optim.peak_lr=0.1", "optim.peak_lr=0.1"),
    ],
)
def test_a_recorded_command_has_no_secret_of_a_url(given, kept):
    assert _without_secrets(given) == kept
