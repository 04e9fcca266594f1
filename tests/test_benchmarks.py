"""The benchmarks that check what they show: they must not break unseen."""

import json
import platform
import subprocess
import sys
import time
import zipfile
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import evaluation, nt_xent, step, views
from benchmarks.common import MEASURED, compare
from benchmarks.gpu import wheels
from benchmarks.gpu.__main__ import PARTS, main, measure
from benchmarks.gpu.accuracy import DIET, NT_XENT, SUPERVISED
from benchmarks.gpu.common import Bench, SkippedError, check
from benchmarks.graded import adapt as graded_adapt
from benchmarks.graded import choice as graded_choice
from benchmarks.graded import chosen as graded_chosen
from benchmarks.graded import data as graded
from benchmarks.graded import jobs
from benchmarks.graded import table as graded_table
from benchmarks.graded import training as graded_training
from benchmarks.trainings import Found, embedded, percent
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_rows
from tests.helpers.dataset import write_dataset

# parts that a CPU cannot try
NETWORKS = (NT_XENT, DIET, SUPERVISED)
CUDA_ONLY = {"waits", "several_gpus", *(name for name in PARTS if name.endswith("_variants"))}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nt_xent, "nt_xent.json"),
        (step, "step_speed.json"),
        (views, "views_speed.json"),
        (evaluation, "evaluation.json"),
    ],
)
def test_a_benchmark_prints_the_docs_figures_and_their_quotients(module, name, capsys) -> None:
    documented = json.loads((MEASURED / name).read_text())
    expected = module.ratios(documented)
    assert any(ratio > 1 for ratio in expected.values())
    compare(name, documented, module.ratios)
    lines = capsys.readouterr().out.splitlines()
    assert documented["machine"]["cpu"] in lines[1]
    rows = [line.rsplit(maxsplit=3) for line in lines[2:]]
    shown = {key: [float(text) for text in figures] for key, *figures in rows}
    for key, (now, before, quotient) in shown.items():
        assert now == before == pytest.approx(expected[key], abs=0.005)
        assert quotient == 1
    assert shown.keys() == expected.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-data")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_small_on_a_cpu(name: str, folder: Path) -> None:
    outcome = measure(PARTS[name], Bench(torch.device("cpu"), True, folder))
    if name in CUDA_ONLY:
        assert outcome["skipped"] == "no CUDA device"
        return
    assert "error" not in outcome, outcome
    if name == "labels":  # its images and weights are not in the clone
        assert "benchmarks.graded.data" in outcome["skipped"]
        return
    figures = outcome["figures"]
    assert all(isinstance(value, str) or value >= 0 for value in figures.values())
    expected = {  # what a reader of the table looks for
        "resnet50": {"images/s", "waiting for data %", "of the bare encoder's speed %"},
        "views": {"kornia, slice: ms", "ours, kernels = torch: images/s"},
        "batchnorm": {"float32: gradient: error", "bfloat16: ms"},
        "peers": {"ours: images/s", "kornia: images/s", "lightly: images/s"},
        "speedrun": {f"{name}: {what}" for name in NETWORKS for what in ("kNN %", "linear %")}
        | {"NT-Xent: kNN of the held out, by seconds"},
    }
    assert expected.get(name, set()) <= figures.keys()


def test_a_part_that_fails_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys) -> None:
    def fails(bench: Bench) -> dict[str, float]:
        raise RuntimeError("CUDA error:\n  out of patience")

    def absent(bench: Bench) -> dict[str, float]:
        raise SkippedError("no such library")

    made = {
        "fails": fails,
        "wrong": lambda bench: check("values", float("nan"), 1.0),
        "absent": absent,
        "works": lambda bench: {"images/s": 1234.5},
    }
    monkeypatch.setattr("benchmarks.gpu.__main__.PARTS", made)
    path = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    if not torch.cuda.is_available():
        assert main(["works"]) == 0
        assert "works: 0.0 s skipped: no CUDA device" in capsys.readouterr().out
    assert main([*words, "works"]) == 0
    assert main([*words, "fails", "wrong", "absent"]) == 1  # beside what the first call measured
    report = json.loads(path.read_text())
    parts = {name: {**part, "seconds": 0} for name, part in report["parts"].items()}
    assert parts == {
        "works": {"seconds": 0, "figures": {"images/s": 1234.5}},
        "fails": {"seconds": 0, "error": "RuntimeError: CUDA error: out of patience"},
        "wrong": {"seconds": 0, "error": "WrongError: values: off by nan, allowed 1"},
        "absent": {"seconds": 0, "skipped": "no such library"},
    }
    shown = capsys.readouterr().out
    assert "| works | images/s | 1,234 |" in shown
    assert "| absent | skipped | no such library |" in shown

    path.write_text(json.dumps(report | {"machine": {"torch": "another"}}))
    assert main([*words, "works"]) == 0
    assert list(json.loads(path.read_text())["parts"]) == ["works"]


def test_a_part_that_takes_too_long_is_ended_and_what_has_no_time_left_is_skipped() -> None:
    def slow(bench: Bench) -> dict[str, float]:
        bench.keep({"the first: images/s": 12.0})
        try:
            time.sleep(60)
        except TimeoutError:  # a clean-up that hangs, too
            time.sleep(60)
        return {}

    bench = Bench(torch.device("cpu"), True, Path("."))
    with patch("benchmarks.gpu.__main__.AGAIN_S", 0.05):
        outcome = measure(slow, bench, 0.05)
    assert outcome["error"] == "TimeoutError: took more than 0.05 s"
    assert outcome["figures"] == {"the first: images/s": 12.0}
    assert outcome["seconds"] < 30
    assert measure(slow, bench, 0.0)["skipped"] == "the 17 minutes of a call are over"
    assert measure(lambda bench: {}, bench)["figures"] == {}
    assert "figures" not in measure(lambda bench: check("values", 2.0, 1.0), bench)


def test_wheels_for_this_python_are_unpacked_into_an_empty_site(tmp_path) -> None:
    own, linux = f"cp3{sys.version_info.minor}", f"manylinux2014_{platform.machine()}"
    for name, tag in {
        "pure": "py3-none-any",
        "own": f"{own}-{own}-{linux}",
        "stable": f"cp39-abi3-{linux}",
        "older": f"cp39-cp39-{linux}",
    }.items():
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-{tag}.whl", "w") as file:
            file.writestr(f"{name}/__init__.py", "")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "left_over").touch()
    (skipped,) = wheels.unpack(tmp_path, tmp_path / "site")
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"pure", "own", "stable"}
    assert skipped.startswith("skipped older-1.0-cp39")
    assert f"make gpu-wheels PYTHON_VERSION=3.{sys.version_info.minor}" in skipped


def test_what_is_missing_is_named_with_what_goes_without(monkeypatch) -> None:
    needs = wheels.required()
    assert needs["torch"] == ">=2.11"
    assert {"pytest", "pytest-timeout", "wandb"} <= needs.keys()
    there = {name: bound[2:] for name, bound in needs.items()} | {"torch": "2.9.1"}
    del there["wandb"], there["kornia"]
    monkeypatch.setattr(wheels, "installed", there.get)
    stops, without = wheels.missing()
    assert stops == ["torch>=2.11 (2.9.1 is there)", f"kornia{needs['kornia']}"]
    assert without == [f"without wandb{needs['wandb']}: the tracker is not tried"]
    assert wheels.met("==1.0", "1.0")
    assert not wheels.met("==1.0", "1.1")


def test_features_of_a_training_are_embedded_once_and_then_read(tmp_path) -> None:
    split = load_index(write_dataset(tmp_path / "data")).split("train")
    backbone = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    loaded = []

    def load():
        loaded.append(True)
        return SimpleNamespace(backbone=backbone, view=EvalView(16, 18))

    facts = {"row": "grey"}
    first, again = (
        embedded(tmp_path / "x.safetensors", split, load, facts, canvas_px=32) for _ in range(2)
    )
    assert len(loaded) == 1
    assert first.ids.tolist() == list(range(len(split)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_classes_of_the_graded_sets_are_cut_in_half_and_each_picture_counts_once(tmp_path) -> None:
    folders: dict[str, list[Path]] = {}
    for unit, frames in {"elf": 5, "orc-x": 4, "ghost": 30, "rare": 3}.items():
        for frame in range(frames):
            path = tmp_path / f"{unit}-{frame}.png"
            Image.new("RGB", (2, 2), (len(folders.get("units", ())), len(unit), 0)).save(path)
            folders.setdefault("units", []).append(path)
    copy = tmp_path / "elf-copy.png"  # other bytes, the same pixels
    Image.open(tmp_path / "elf-0.png").save(copy, compress_level=0)
    assert copy.read_bytes() != (tmp_path / "elf-0.png").read_bytes()
    folders["units"].append(copy)
    classes = graded.by_first_word(folders)
    assert {name: len(files) for name, files in classes.items()} == {
        **{"units/elf": 6, "units/orc": 4},
        **{"units/ghost": 30, "units/rare": 3},
    }
    rows = graded.rows_of(classes)
    splits = {label: {split for _, name, split in rows if name == label} for _, label, _ in rows}
    assert set(splits) == {"units/elf", "units/orc", "units/ghost"}  # of the rare one are too few
    assert all(len(found) == 1 for found in splits.values())
    assert {len([1 for row in rows if row[1] == name]) for name in splits} == {4, 5, graded.MOST}


def test_graded_sets_without_their_packages_are_named_and_the_others_are_built(
    tmp_path, monkeypatch, capsys
) -> None:
    """As with the packages of `--help` alone, without those of names."""
    for group in range(4):
        folder = tmp_path / f"debian/usr/share/openclipart/png/group{group}"
        folder.mkdir(parents=True)
        for k in range(4):
            Image.new("RGB", (8, 8), (60 * group, 60 * k, 9)).save(folder / f"{k}.png")
    words = ["data", str(tmp_path / "debian"), str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*words, "--sets", "names", "drawings", "parts"])
    with pytest.raises(SystemExit, match="1"):
        graded.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "is left out" in line]
    assert [line.split()[0] for line in said] == ["names", "parts"]
    assert "suru-icon-theme" in said[0]
    assert "nexuiz-textures, ufoai-textures" in said[1]
    assert len(load_index(tmp_path / "out" / "drawings").manifest.classes) == 4


def test_slices_of_the_graded_head_show_the_region_in_their_middle(tmp_path) -> None:
    head = np.random.default_rng(0).integers(0, 255, (60, 70, 80), np.uint8)
    atlas = np.zeros_like(head)
    atlas[5:25, 10:60, 30:33], atlas[40:44, 30:34, 2:6] = 1, 2
    for name, volume in (("ch2", head), ("aal", atlas)):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / f"{name}.nii.gz")
    (tmp_path / "aal.nii.txt").write_text("1 Insula_L 9\n2 Insula_R 10\n")
    ((name, files),) = graded.brain_regions(tmp_path, tmp_path / "out").items()
    assert name == "region Insula"
    middles = {}  # side -> points
    for path in files:
        *point, plane = path.stem.split("-")
        x, y, z = map(int, point)
        middles.setdefault(path.parent.name, set()).add((x, y, z))
        with Image.open(path) as image:
            seen = np.asarray(image)
        assert seen.shape == (48, 48)
        offsets = {"x": (0, 7, 9), "y": (7, 0, 9), "z": (7, 9, 0)}[plane]  # of a voxel beside it
        across, up = [offset for offset in offsets if offset]
        beside = tuple(np.add((x, y, z), offsets))
        if all(at < side for at, side in zip(beside, head.shape, strict=True)):
            assert seen[23 - up, 24 + across] == head[beside]
        assert seen[23, 24] == head[x, y, z]
        assert atlas[x, y, z] == 1 + ["Insula_L", "Insula_R"].index(path.parent.name)
    assert len(files) == 3 * sum(map(len, middles.values()))
    assert len(middles["Insula_R"]) == 1  # the region is smaller than the distance
    left = np.array(sorted(middles["Insula_L"]))
    assert len(left) >= 2
    apart = np.linalg.norm(left[:, None] - left, axis=2)[~np.eye(len(left), dtype=bool)]
    assert apart.min() >= 24


def test_a_graded_training_is_compared_with_its_own_start_and_the_line_seed_by_seed() -> None:
    classes = np.repeat(np.arange(12), 3)

    def found(value: float) -> dict[str, Found]:
        values = dict.fromkeys(graded_table.METRICS, np.full(36, value))
        return dict.fromkeys(jobs.FORMS, Found(classes, values, 0))

    values = {
        **{("random weights", 0): 0.1, ("random weights", 1): 0.2, ("ImageNet weights", 0): 0.5},
        **{("NT-Xent", 0): 0.4, ("NT-Xent", 1): 0.3, ("DCL", 1): 0.8},
        **{("continued", 0): 0.6, ("continued", 1): 0.8},
        **{(jobs.JOIN, 0): 0.9, (jobs.TAUGHT, 1): 0.7},
    }
    scratch = ("NT-Xent", "DCL")
    found_by = {
        jobs.Job(method, "icons", seed, 9, 60.0 * (method in scratch)): found(value)
        for (method, seed), value in values.items()
    }
    longer = jobs.Job("NT-Xent", "icons", 0, 90, 600.0)  # in no comparison with others
    tree = graded_training.summary({**found_by, longer: found(0.9)})
    rows = {row.removesuffix(", 60 s"): cells for row, cells in tree.items()}
    cells = {row: rows[row]["icons"]["flattened, MAP@R"] for row in rows}
    assert cells["continued"]["value"] == pytest.approx(0.7)
    more = {
        (method, what): cell[f"more than its {what}"]["value"]
        for method, cell in cells.items()
        for what in ("start", "line", "teacher")
        if f"more than its {what}" in cell
    }
    assert more == pytest.approx(
        {
            **{("NT-Xent", "start"): 0.2, ("DCL", "start"): 0.6, ("DCL", "line"): 0.5},
            **{("continued", "start"): 0.2, ("NT-Xent, 600 s", "start"): 0.8},
            **{(jobs.JOIN, "start"): 0.4, (jobs.TAUGHT, "start"): 0.2},
            (jobs.TAUGHT, "teacher"): -0.2,
        }
    )


def test_a_graded_method_keeps_the_setting_that_was_best_on_all_tuning_sets() -> None:
    def found(recall: float, map_at_r: float) -> dict[str, Found]:
        values = {"Recall@1": np.full(4, recall), "MAP@R": np.full(4, map_at_r)}
        return dict.fromkeys(jobs.FORMS, Found(np.arange(4), values, 0))

    values = {  # setting, set -> both metrics
        **{("a", "drawings"): (0.6, 0.2), ("a", "stamps"): (0.2, 0.2)},
        **{("b", "drawings"): (0.4, 0.1), ("b", "stamps"): (0.5, 0.4)},
        ("c", "drawings"): (0.9, 0.9),  # the call was cut before it saw the other set
    }
    tried = {
        jobs.Job("DCL", name, 0, 9, 60.0, setting): found(*both)
        for (setting, name), both in values.items()
    }
    assert graded_training.best_settings(tried) == {"DCL": "b"}


@pytest.mark.slow  # processes of their own that import torch
def test_a_graded_run_that_fails_is_one_line_and_the_others_go_on(tmp_path) -> None:
    for name in ("fashion", "stamps"):
        for split in ("train", "test"):
            write_dataset(tmp_path / name, (20,), split=split)
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--seconds", "0.01", "--seeds", "0", "--workers", "2"]
    words += ["--methods", "NT-Xent", "DCL", "--sets", "fashion", "stamps", "--json", str(out)]
    words += ["--set", "backbone.widths=[4]", "data.batch_size=8", "data.num_streams=4"]
    (tmp_path / "stamps" / "test-000000.tar").unlink()
    command = [sys.executable, "-m", "benchmarks.graded.training", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert {run["name"] for run in report["runs"] if "error" in run} == {"stamps"}
    assert report["rows"].keys() == {"random weights", "NT-Xent, 0.01 s", "DCL, 0.01 s"}
    assert "| DCL, 0.01 s: more than its line |" in done.stdout


def test_few_labels_of_the_graded_table_name_the_rest_by_the_nearest() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 4
    features = torch.randn(4, 6, generator=draw)[labels] + torch.randn(24, 6, generator=draw)
    rows = Embeddings(features, labels, torch.arange(24) * 3)
    units = (features / features.norm(dim=1, keepdim=True)).double().numpy()
    right: list[list[bool]] = [[] for _ in labels]
    for number in range(graded_table.DRAWS):
        known = few_rows(rows, 2, 0, number).tolist()
        assert Counter(labels[known].tolist()) == dict.fromkeys(range(4), 2)
        for query in {*range(24)} - {*known}:
            nearest = max(known, key=lambda one: units[query] @ units[one])
            right[query].append(bool(labels[query] == labels[nearest]))
    found = graded_table.few_labels(rows)
    np.testing.assert_allclose(found.values, [np.mean(each) for each in right])
    assert found.classes.tolist() == labels.tolist()
    assert 0.3 < found.values.mean() < 0.95  # neither all nor none: the case tells them apart


def test_the_regret_of_a_choice_is_what_the_best_row_has_more(tmp_path, monkeypatch) -> None:
    labels = torch.arange(12).repeat_interleave(6)
    centres = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    noises = {"lite0@96": 9.0, "lite0@128": 2.0, "lite0@160": 2.0, "lite1@128": 0.2}

    def made(folder, name, split, row):
        parts = []
        for number, candidate in enumerate(row.split("+")):
            draw = torch.Generator().manual_seed(number + 2 * (split == "test"))
            noise = torch.randn(72, 8, generator=draw)
            parts.append(centres[labels] + noises[candidate] * noise)
        return Embeddings(torch.cat(parts, dim=1), labels, torch.arange(72))

    def corners(folder, name, candidate):
        rows = made(folder, name, "train", candidate)
        return rows._replace(features=torch.cat([rows.features, rows.features], dim=1))

    monkeypatch.setattr(graded_choice, "joined", made)
    monkeypatch.setattr(graded_choice, "corner_features", corners)
    found = graded_choice.regrets(tmp_path, "toy")
    for how in ("with labels", "with labels of 2 images a class"):
        assert found[how]["MAP@R"] < 1  # lite1 is by far the best
    assert found["always two sizes, power 0.25"]["MAP@R"] > 20
    assert found["lite0@128, as it is"]["MAP@R"] > 5
    assert all(value >= 0 for row in found.values() for value in row.values())
    few = graded_choice.with_few_labels({"a": made(tmp_path, "toy", "train", "lite1@128")}, 1)["a"]
    assert Counter(few.labels.tolist()) == {-1: 72 - 24, **dict.fromkeys(range(12), 2)}
    assert torch.equal(few.labels[few.labels >= 0], labels[few.labels >= 0])


def test_among_all_classes_an_image_of_train_may_be_the_nearest(monkeypatch) -> None:
    rows = {
        "test": ([0.0, 0.1, 1.0, 1.1], [0, 0, 1, 1]),  # angles: every image finds its class
        "train": ([0.04, 2.0, 2.1], [2, 2, 2]),  # the first one is nearest to both of class 0
    }

    def embed(source, data, split, device):
        angles, labels = (torch.tensor(each) for each in rows[split])
        features = torch.stack([angles.cos(), angles.sin()], dim=1)
        return Embeddings(features, labels, torch.arange(len(labels)))

    monkeypatch.setattr(graded_chosen, "embed", embed)
    found = graded_chosen.score("a", Path("b"))
    assert found["Recall@1"].values.tolist() == [1, 1, 1, 1]
    assert found[graded_chosen.ALL].values.tolist() == [0, 0, 1, 1]
    assert found[graded_chosen.ALL].classes.tolist() == [0, 0, 1, 1]


def test_what_a_run_keeps_is_compared_with_its_start_class_by_class() -> None:
    classes = np.repeat(np.arange(10), 4)
    start, kept = np.tile([0.0, 0.0, 1.0, 1.0], 10), np.tile([0.0, 1.0, 1.0, 1.0], 10)
    found = [Found(classes, {"MAP@R": values}, 0) for values in (kept, start)]
    row = graded_adapt.compared(*found, "MAP@R")
    assert (row["value"], row["start"]) == (0.75, 0.5)
    assert row["more than its start"]["value"] == pytest.approx(0.25)
    assert row["more than its start"]["interval95"] == pytest.approx([0.25, 0.25])  # equal in each


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The cells of a page's tables by the heading above them, lines of the tables alone."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            tables.setdefault(heading, []).append(cells)
    return tables


def figures_of(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / f"{name}.json").read_text())


GRADED_PAGE = tables_of((MEASURED.parent / "graded.md").read_text())


def test_the_page_of_the_graded_sets_shows_the_rows_and_the_choice_as_measured() -> None:
    sets, choice = (figures_of(name)["sets"] for name in ("graded", "graded_choice"))
    lines = GRADED_PAGE["Without training"]
    at = [cells[0].partition(",")[0] for cells in lines].index("MAP@R", 1)  # the second table
    columns = lines[0][1:]
    assert columns == list(graded_table.SETS)
    for cells in lines[1:at]:
        row = cells[0].replace("flattened (power 1)", "power 1")
        assert cells[1:] == [f"{100 * sets[name][row]['MAP@R']['value']:.1f}" for name in columns]
    for shown, mean, most in lines[at + 1 :]:
        how = shown.replace("without labels: two sizes", "always two sizes")
        regrets = [choice[name][how]["MAP@R"] for name in columns]
        assert (mean, most) == (f"{np.mean(regrets):.1f}", f"{max(regrets):.1f}")
    assert (at - 1, len(lines) - at - 1) == (6, 4)


def test_the_page_of_the_graded_sets_shows_the_trainings_as_measured() -> None:
    rows = figures_of("graded_training")["rows"]
    named = {
        "NT-Xent": "NT-Xent, 600 s",
        "DIET": "DIET, 600 s",
        "Lite0 at 96 px, ImageNet weights": "ImageNet weights",
        "Lite0 at 96 and 160 px, ImageNet weights": jobs.JOIN,
    }
    differences = {"DIET, 600 s": "line", jobs.TAUGHT: "start"}
    (metric, *columns), *lines = GRADED_PAGE["Without labels, at equal seconds"]
    small = {  # the recipe's own settings, the first seed, by set
        row["set"]: f"{row[f'as it is, {metric}']:.1f}"
        for row in figures_of("small_network")["rows"]
        if "augment.half_size_share=0.85" in row["settings"] and row["seed"] == 0
    }
    for shown, *values in lines:
        row = named.get(shown, shown)
        if row == "`my_images_diet`":
            assert values == [small[name] for name in columns]
            continue
        for name, value in zip(columns, values, strict=True):
            figures = rows[row][name][f"as it is, {metric}"]
            expected = f"{100 * figures['value']:.1f}"
            if what := differences.get(row):
                low, high = figures[f"more than its {what}"]["interval95"]
                expected = f"**{expected}**" if low > 0 else expected
                assert high >= 0  # the page has no word for clearly less
            assert value == expected, (row, name)
    assert len(lines) == 7


def test_the_page_of_the_graded_sets_shows_what_adapt_mobile_brought_as_measured() -> None:
    page = " ".join((MEASURED.parent / "graded.md").read_text().split())
    measured = figures_of("graded_adapt")["rows"]
    rows = [row for row in measured if row["labels"]]
    assert f"[{len(rows)} runs]" in page
    between = (
        "over its start in",
        "with `tune.backbone_lr=0.1`",
        "Without labels the other view's",
    )
    starts = [page.index(words) for words in between]
    said = {"0.01": page[starts[0] : starts[1]], "0.1": page[starts[1] : starts[2]]}
    sets = {row["set"] for row in rows}
    assert len(sets) == 12
    for (rate, gains), name in product(said.items(), sets):
        settings = f"tune.backbone_lr={rate}"
        own = [row for row in rows if row["set"] == name and settings in row["settings"]]
        assert sorted(row["seed"] for row in own) == [0, 1, 2], name
        recall, map_at_r = (
            np.mean([100 * (row[metric]["value"] - row[metric]["start"]) for row in own])
            for metric in ("Recall@1", "MAP@R")
        )
        trained = any(row["kept_step"] for row in own)
        assert (f"{name} {recall:+.1f} ({map_at_r:+.1f})" in gains) == trained, name
        assert (f"{name} " in gains) == trained, name
        for row in own:  # none ended clearly below its start
            for metric in ("Recall@1", "MAP@R"):
                assert row[metric]["more than its start"]["interval95"][1] >= 0, name
    for row in measured:
        if row["labels"]:
            continue
        shown = ", ".join(
            f"{100 * (row[metric]['value'] - row[metric]['start']):+.1f}"
            for metric in ("Recall@1", "MAP@R")
        )
        (rate,) = row["settings"]
        rate = rate.removeprefix("tune.backbone_lr=")
        assert f"{rate} {row['set']} {shown.replace(', ', ' (')})" in page


def test_the_page_of_the_graded_sets_shows_what_labels_brought_as_measured() -> None:
    by_set: dict[str, list[Any]] = {}
    for row in figures_of("graded_chosen")["rows"]:
        by_set.setdefault(row["set"], []).append(row)
    (_, _, *columns), *lines = GRADED_PAGE["With labels"]
    assert columns[:4] == ["start", "chosen", "trained", "trained + chosen"]
    steps = (graded_chosen.START, graded_chosen.CHOSEN, graded_chosen.TRAINED, graded_chosen.JOINED)
    for name, seeds, *values in lines:
        runs = {what: [row for row in by_set[name] if row["what"] == what] for what in steps}
        assert all(len({row["seed"] for row in own}) == int(seeds) for own in runs.values()), name
        expected = []
        for own in runs.values():
            recall, map_at_r = (
                np.mean([100 * row[metric]["score"] for row in own])
                for metric in ("Recall@1", "MAP@R")
            )
            expected.append(f"{recall:.1f} ({map_at_r:.1f})")
        last = runs[graded_chosen.JOINED]
        brought = [row["Recall@1"]["more than the choice"] for row in last]
        worst = min(brought, key=lambda difference: difference["value"])
        cpu_s = np.mean([row["cpu_s"] for row in last])
        assert values == [*expected, percent(worst, "+"), f"{cpu_s:.0f}"], name
        # no seed of a set ends below its start; the page names what the choice has less
        for row in (*runs[graded_chosen.TRAINED], *last):
            for metric in ("Recall@1", "MAP@R"):
                assert row[metric]["more than the start"]["interval95"][1] >= 0, name
        for row in runs[graded_chosen.CHOSEN]:
            assert row["MAP@R"]["more than the start"]["interval95"][1] >= 0, name
    assert {name for name, *_ in lines} == {*by_set}


def test_the_page_of_objectives_shows_what_a_third_of_the_seconds_reached() -> None:
    page = tables_of((MEASURED.parent / "objectives.md").read_text())["DIET"]
    rows = {(row["set"], row["steps"]): row for row in figures_of("small_network")["rows"]}
    at = [cells[0] for cells in page].index("DIET, 493 steps of 256")
    names = page[at - 1][1:]
    assert {*names} == {*graded_table.SETS}
    of_fewer = {"icons": 350, "fashion": 330}
    old = [rows[name, 493] for name in names]
    new = [rows[name, of_fewer.get(name, 700)] for name in names]
    for cells, own in zip(page[at : at + 2], (old, new), strict=True):
        assert cells[1:] == [
            f"{row['as it is, Recall@1']} ({row['as it is, MAP@R']})" for row in own
        ]
    for metric, count in (("MAP@R", 8), ("Recall@1", 5)):
        key = f"as it is, {metric}"
        assert sum(short[key] > long[key] for long, short in zip(old, new, strict=True)) == count
    for long, short in zip(old, new, strict=True):
        assert 0.275 < short["cpu_s"] / long["cpu_s"] < 0.335


def test_the_page_of_sensors_shows_what_was_measured() -> None:
    measured = json.loads((MEASURED / "sensors.json").read_text())
    page = (MEASURED.parent / "sensors.md").read_text().replace("**", "")
    for name in ("surfaces", "brain", "scans"):
        for row, found in measured[name].items():
            values = (f"{100 * found[metric]['value']:.1f}" for metric in ("Recall@1", "MAP@R"))
            seconds = ", ".join(f"{each:.0f}" for each in found["cpu_s"])
            table = page[page.index(f"| {name} |") :]
            assert table.index(f"\n| {row} | {' | '.join(values)} | {seconds} |\n") < 500, row
    for name, row in (("surfaces", "colour alone"), ("brain", "8-bit RGB"), ("scans", "8-bit RGB")):
        less = measured[name][row]["Recall@1"]["less than the first"]
        ends = sorted((f"{abs(100 * end):.1f}" for end in less["interval95"]), key=float)
        assert f"{abs(100 * less['value']):.1f} points" in page
        assert all(end in page for end in ends)
