"""`sslpipe curate duplicates`: what it finds, and the table, the sheet and the column it writes."""

import csv
import io
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import curate
from sslpipe.curate import cli as curate_tool
from sslpipe.curate import duplicate_files, duplicates
from sslpipe.curate.duplicate_files import doubt_sheet, write_column
from sslpipe.curate.duplicates import (
    LEAST_SCORE,
    Doubt,
    candidates,
    compare,
    exact_duplicates,
    find_duplicates,
)
from sslpipe.curate.grouping import group
from sslpipe.curate.image_scan import decoded, scan, scan_pictures
from sslpipe.curate.thumbnails import STARTS, resampling, whole_and_crops
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.sharding.show import CELL_PX, GAP_PX, MARGIN_PX
from tests.cli.test_evaluate import call
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.runs import python


def smooth(number, px=64):
    """(px, px, 3) uint8: a picture with large forms, of which every number has others."""
    rng = np.random.default_rng(1000 + number)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((px, px), Image.Resampling.BICUBIC))


def saved(pixels, quality):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(io.BytesIO(file.getvalue())))


def resized(pixels, px):
    return np.asarray(Image.fromarray(pixels).resize((px, px), Image.Resampling.BILINEAR))


def other_png(pixels):
    """The same pixels in other bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def found_in(pictures, **options):
    """What the search finds in pictures in memory, and their groups."""
    samples = scan_pictures(map(np.ascontiguousarray, pictures))
    found = find_duplicates(samples, **options)
    return found, group(found.pairs, len(samples)).group


def as_sets(numbers):
    return {frozenset(np.flatnonzero(numbers == k).tolist()) for k in range(max(numbers) + 1)}


def read_rows(folder):
    with open(folder / "groups.csv", newline="") as file:
        return list(csv.DictReader(file))


def shown_of(rows):
    names = ("split", "id", "key", "group", "score", "nearest")
    return [tuple(str(row[name]) for name in names) for row in rows]


def run(manifest, out, *words):
    return call(curate_tool, "duplicates", manifest, "--out", out, *words)


def column_of(manifest, split="train"):
    return load_index(manifest).split(split).column("duplicate_group")


def files_of_columns(manifest):
    """Which files a data set names for its columns, and which are there."""
    named = {file.file for file in load_index(manifest).manifest.metadata.values()}
    there = {path.name for path in manifest.parent.iterdir() if ".metadata-" in path.name}
    return named, there


@pytest.fixture
def planted(tmp_path):
    """Train: 3 is 9 in bytes, 5 is 11 in pixels; test: 2 is train's 5 in bytes, 4 is bad."""
    plants = {9: png(picture(3)), 11: other_png(picture(5))}
    manifest = write_dataset(tmp_path / "data", (8, 8), broken=plants)
    others = {k: png(picture(100 + k)) for k in range(8)}
    others |= {2: png(picture(5)), 4: b"no image"}
    write_dataset(tmp_path / "data", (8,), split="test", broken=others)
    return manifest


def test_a_test_split_that_is_all_in_train_is_100_percent(tmp_path):
    manifest = write_dataset(tmp_path / "data", (4,))
    write_dataset(tmp_path / "data", (4,), split="test")
    said = run(manifest, tmp_path / "out")
    assert "4 of 4 test images are also in train (100 %)" in said


def test_exact_duplicates_are_grouped_across_splits(planted, tmp_path):
    add_columns(planted, camera=["a", "b"] * 8)
    before = {p: p.read_bytes() for p in planted.parent.glob("*.tar")}
    shown = run(planted, tmp_path / "out")
    assert "23 samples: 5 are in 2 groups of duplicates" in shown
    summary = shown.splitlines().index("1 of 7 test images are also in train (14 %)")
    assert "5 are in 2 groups" in shown.splitlines()[summary + 1]
    (tmp_path / "out" / "doubt.png").write_bytes(b"of pairs that are none now")
    told = "duplicate_group has other values than before"
    assert told not in shown
    assert told not in run(planted, tmp_path / "again")  # the same column again
    manifest = planted.read_bytes()
    assert told not in run(planted, tmp_path / "again")  # in its place among the others
    assert planted.read_bytes() == manifest
    assert told in run(planted, tmp_path / "test", "--split", "test")
    run(planted, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["groups.csv"]
    assert shown_of(read_rows(tmp_path / "out")) == [
        ("train", "3", "train000003", "0", "1.0", "train:9"),
        ("train", "9", "train000009", "0", "1.0", "train:3"),
        ("train", "5", "train000005", "1", "1.0", "train:11"),
        ("train", "11", "train000011", "1", "1.0", "train:5"),
        ("test", "2", "test000002", "1", "1.0", "train:5"),
    ]
    # the column, beside what was there
    column = column_of(planted)
    assert [k for k in column.show(np.arange(16)) if k is not None] == ["0", "1", "0", "1"]
    assert column_of(planted, "test").show([2, 4]) == ["1", None]
    assert load_index(planted).split("train").column("camera").show([0, 1]) == ["a", "b"]
    assert before == {p: p.read_bytes() for p in planted.parent.glob("*.tar")}


def test_splits_that_are_not_searched_together_share_no_numbers(planted, tmp_path):
    add_columns(planted, "test", camera=["a"] * 8)
    before = planted.read_bytes()
    run(planted, tmp_path / "out", "--split", "train", "--no-column")
    assert {row["split"] for row in read_rows(tmp_path / "out")} == {"train"}
    assert planted.read_bytes() == before
    run(planted, tmp_path / "out")
    for _ in range(2):
        run(planted, tmp_path / "out", "--split", "train")
        assert column_of(planted, "test").show([2]) == [None]
        assert load_index(planted).split("test").column("camera").show([2]) == ["a"]


@pytest.mark.parametrize("word", ["remote", "read-only", "kind text, which would be lost"])
def test_a_column_that_cannot_be_written_is_refused_before_the_search(
    planted, tmp_path, monkeypatch, word
):
    if word == "remote":
        monkeypatch.setattr("sslpipe.curate.duplicate_files.scheme", lambda folder: "https")
    elif word == "read-only":  # root may write anywhere
        monkeypatch.setattr("os.access", lambda path, mode: path != str(planted.parent))
    else:
        add_columns(planted, duplicate_group=["a"] * 16)
    before = planted.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("sslpipe.curate.image_scan.scan", None)
        with pytest.raises(UserError, match=f"{word}.*column.* --no-column"):
            run(planted, tmp_path / "out")
    assert "5 are in 2 groups" in run(planted, tmp_path / "out", "--no-column")
    assert planted.read_bytes() == before


@pytest.mark.parametrize("name", ["../train", "a/b", "a\\b", "a\n", ""])
def test_a_split_whose_files_would_lie_elsewhere_is_refused(planted, name):
    planted.write_text(planted.read_text().replace('"train": [', f"{json.dumps(name)}: [", 1))
    with pytest.raises(UserError, match="a split's name begins names of files, and has no slash"):
        load_index(planted)


def test_no_split_and_one_twice_are_refused(planted, tmp_path):
    with pytest.raises(UserError, match=r"^splits = \['train', 'train'\] names a split twice"):
        run(planted, tmp_path / "out", "--split", "train", "--split", "train")
    manifest = write_dataset(tmp_path / "none", ())
    manifest.write_text(manifest.read_text().replace('{"train": []}', "{}"))
    with pytest.raises(UserError, match="has no split; build one"):
        run(manifest, tmp_path / "out")


def test_a_copy_of_a_copy_is_in_the_group_too(tmp_path):
    """0 is the centre, 1 equals it; 2 was saved again, and test's 3, which equals 2, is a leak."""
    pixels = smooth(1)
    plants = {0: png(pixels), 1: other_png(pixels), 2: png(saved(pixels, 80))}
    manifest = write_dataset(tmp_path / "data", (8,), broken=plants)
    write_dataset(tmp_path / "data", (4,), split="test", broken={3: other_png(saved(pixels, 80))})
    assert "12 samples: 4 are in 1 group of duplicates" in run(manifest, tmp_path / "out")
    rows = shown_of(read_rows(tmp_path / "out"))
    assert [row[:2] for row in rows] == [*(("train", str(k)) for k in range(3)), ("test", "3")]
    assert rows[-1][4:] == ("1.0", "train:2")


MADE = {
    "jpeg": lambda p: saved(p, 60),
    "half": lambda p: resized(p, 32),
    "double": lambda p: resized(p, 128),
    "crop": lambda p: p[3:61, 3:61],
    "corner": lambda p: p[6:, :58],
    "mirror": lambda p: p[:, ::-1],
    "mirrored crop": lambda p: p[:58, 6:, :][:, ::-1],
}


def test_every_kind_of_near_duplicate_is_grouped_with_its_source(tmp_path):
    pictures = {k: smooth(k) for k in range(40)}
    plants = {40 + k: make(smooth(k)) for k, make in enumerate(MADE.values())}
    raw = {k: png(np.ascontiguousarray(p)) for k, p in {**pictures, **plants}.items()}
    manifest = write_dataset(tmp_path / "data", (len(raw),), broken=raw)
    run(manifest, tmp_path / "out", "--num-workers", "0")
    found = {int(row["id"]): row for row in read_rows(tmp_path / "out")}
    for k, name in enumerate(MADE):
        assert found[40 + k]["nearest"] == f"train:{k}", name
        assert found[40 + k]["group"] == found[k]["group"], name
    assert len(found) == 2 * len(MADE), "no other picture is called a duplicate"


def test_copies_of_small_garments_are_found_at_the_measured_recall_and_precision():
    pictures = curate.fashion_mnist(300)
    counts = curate.measure(pictures, 60, curate.found_pairs(pictures))["kinds"]
    least = {"saved again, JPEG 60-95": 0.95, "mirrored": 0.95, "cropped to 90 %": 0.4}
    for kind, share in least.items():
        assert counts[kind]["found"] >= share * counts[kind]["planted"], kind
    for kind, own in counts.items():
        assert own["found"] >= 0.98 * (own["found"] + own["wrong"]), kind


def copies_of(number, count, rng):
    """As many near copies of a picture, each made otherwise."""
    whole, made = smooth(number), []
    for k in range(count):
        copy = resized(saved(whole, int(rng.integers(40, 95))), int(rng.integers(40, 100)))
        made.append(copy[:, ::-1] if k % 3 == 0 else copy)
    return made


def test_a_picture_with_more_copies_than_neighbours_is_one_group():
    rng = np.random.default_rng(0)
    pictures, owner = [smooth(k) for k in range(30)], [-1] * 30
    for number, count in enumerate((3, 6, 12, 40)):
        pictures += copies_of(100 + number, count, rng)
        owner += [number] * count
    assert as_sets(found_in(pictures)[1]) == as_sets(np.array(owner))


@pytest.mark.parametrize(
    "rows",
    [
        [np.linspace(low, low + 90, 64) for low in (20, 60, 100)],
        [np.full(16 + k, 250 - k) for k in range(4)],
    ],
    ids=["ramps of one direction", "constant"],
)
def test_pictures_without_detail_are_no_near_duplicates(rows):
    wide = [np.uint8(np.broadcast_to(row[:, None, None], (len(row), 64, 3))) for row in rows]
    assert len(found_in(wide)[0].pairs) == 0


def test_a_look_alike_of_another_shape_or_colour_is_another_picture():
    one, rng = smooth(1), np.random.default_rng(0)
    squares = (rng.random((8, 8, 1)) > 0.5).repeat(8, 0).repeat(8, 1)
    tinted = np.uint8(np.clip(one + np.array([0, 40, -40]) * squares, 0, 255))
    wide = np.asarray(Image.fromarray(one).resize((96, 64)))
    samples = scan_pictures([one, 255 - one, tinted, np.ascontiguousarray(one[:, :48]), wide])
    score = compare(samples, np.array([(0, k) for k in range(1, 5)]))
    assert score.max() < LEAST_SCORE


def test_the_score_is_that_of_loops_over_views_and_windows():
    """Of a crop on the grid of the views, and of another picture; in float64."""
    one = smooth(3)
    samples = scan_pictures([one, np.ascontiguousarray(one[:58, 6:][:, ::-1]), smooth(4)])
    thumbs = torch.from_numpy(samples.thumbs).permute(0, 3, 1, 2).double()

    def view(picture, down, right, size):
        axes = [resampling(start, size, 16).double() for start in (down, right)]
        return axes[0] @ picture @ axes[1].T

    def score(cropped, target):
        best = []
        for wanted in (view(target, 0, 0, 1), view(target, 0, 0, 1).flip(2)):
            views = [view(cropped, 0, 0, 1)]
            views += [view(cropped, down, right, 0.9) for down in STARTS for right in STARTS]
            alike = [
                float(torch.corrcoef(torch.stack([v.ravel(), wanted.ravel()]))[0, 1]) for v in views
            ]
            shown, worst = views[int(np.argmax(alike))], 0.0
            variance = float(wanted.var((1, 2), correction=0).sum())
            for y in range(13):
                for x in range(13):
                    here = (slice(None), slice(y, y + 4), slice(x, x + 4))
                    error = float((shown[here] - wanted[here]).square().sum()) / 16
                    own = float(wanted[here].var((1, 2), correction=0).sum())
                    worst = max(worst, error / (own + 0.15 * variance + 1))
            best.append(max(0.0, 1 - worst))
        return max(best)

    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = [max(score(thumbs[a], thumbs[b]), score(thumbs[b], thumbs[a])) for a, b in pairs]
    np.testing.assert_allclose(compare(samples, np.array(pairs)), expected, atol=1e-4)
    assert expected[0] > LEAST_SCORE > max(expected[1:])


def test_candidates_are_those_that_brute_force_names(monkeypatch):
    shown = [smooth(k) for k in range(30)]
    shown += [saved(np.ascontiguousarray(smooth(k)[:58, 6:, :][:, ::-1]), 50) for k in range(10)]
    samples = scan_pictures(shown)
    luma = torch.from_numpy(samples.thumbs).permute(0, 3, 1, 2).float().mean(1, keepdim=True)
    views = whole_and_crops(luma, 8)[:, [0, 1, 5, 13, 21, 25], 0].double().numpy()  # (n, 6, 8, 8)
    expected = set()
    for a in range(40):
        alike = np.full(40, -1.0)
        for b in set(range(40)) - {a}:
            for view in (*views[a], *views[a][:, :, ::-1]):
                alike[b] = max(alike[b], np.corrcoef(view.ravel(), views[b, 0].ravel())[0, 1])
        best = np.argsort(-alike, kind="stable")[:5]
        expected |= {(min(a, int(b)), max(a, int(b))) for b in best if alike[b] >= 0.6}
    monkeypatch.setattr(duplicates, "LEAST_SIMILAR", 0.6)
    assert set(map(tuple, candidates(samples, np.arange(40)).tolist())) == expected
    assert {(k, 30 + k) for k in range(10)} <= expected
    assert candidates(samples, np.arange(1)).shape == (0, 2)


def test_bars_of_search_and_comparison_end_where_the_work_does():
    planned, done = [], []

    @contextmanager
    def bar(title, total):
        counts = []
        planned.append((title, total))
        yield counts.append
        done.append(sum(counts))

    found_in([*map(smooth, range(50)), smooth(4), saved(smooth(3), 60)], progress=bar)
    assert planned[0] == ("search", 51)  # of two with equal pixels, one
    assert planned[1][0] == "compare"
    assert [total for _, total in planned] == done


# the column and the sheet


def test_two_searches_at_once_leave_one_whole_column(planted):
    index = load_index(planted)
    found = []
    for names in (("train", "test"), ("train",)):
        samples = scan([index.split(name) for name in names], num_workers=0)
        found.append((samples, group(exact_duplicates(samples), len(samples))))

    def write(number):
        for turn in range(8):
            samples, groups = found[(number + turn) % 2]
            write_column(index.folder, samples, groups)

    with ThreadPoolExecutor(2) as pool:  # each opens the folder: the lock holds threads apart, too
        list(pool.map(write, range(2)))
    for name in load_index(planted).manifest.columns["duplicate_group"].splits:
        column_of(planted, name).groups.whole_split()
    named, there = files_of_columns(planted)
    assert named == there


KILLS = {
    "before the column is named": "columns.save_manifest = lambda folder, manifest: die()",
    "while its values are written": "columns.write_atomically = lambda path, *_, **__: die("
    "portable.replacing(path).__enter__()) if path.suffix == '.parquet' else None",
}


@pytest.mark.parametrize("when", KILLS)
def test_a_kill_before_the_new_column_is_named_leaves_the_old_one_as_it_was(
    planted, tmp_path, when
):
    add_columns(planted, "train", duplicate_group=list(range(16)))
    before = planted.read_bytes()
    program = (
        "import os, signal; from sslpipe import portable; from sslpipe.sharding import columns;"
        "from sslpipe.curate import cli; die = lambda _=0: os.kill(os.getpid(), signal.SIGKILL);"
        f"{KILLS[when]};"
        f"cli.app(['duplicates', {str(planted)!r}, '--out', {str(tmp_path / 'out')!r}])"
    )
    python("-c", program, status=-signal.SIGKILL)
    assert planted.read_bytes() == before
    assert column_of(planted).values.tolist() == list(range(16))
    # the same command again does what the first one would have done
    run(planted, tmp_path / "out")
    assert column_of(planted).show([3, 5, 9]) == ["0", "1", "0"]
    named, there = files_of_columns(planted)
    assert named == there  # nothing is left over
    again = planted.read_bytes()
    run(planted, tmp_path / "out")
    assert planted.read_bytes() == again


def test_the_sheet_shows_accepted_pairs_then_refused_ones_in_red(tmp_path, monkeypatch):
    plants = {k: png(np.full((32, 32, 3), 40 * k, np.uint8)) for k in range(5)}
    split = load_index(write_dataset(tmp_path, (5,), broken=plants)).split("train")
    samples = scan([split], num_workers=0)

    def sheet(*accepted):  # of pairs 0-1, 1-2 ...
        pairs = np.array([(k, k + 1) for k in range(len(accepted))], np.int64).reshape(-1, 2)
        scores = np.full(len(accepted), 0.8, np.float32)
        doubt = Doubt(pairs, scores, np.array(accepted, bool))
        return doubt_sheet(samples, doubt, lambda rows: decoded(split, rows))

    one, both = sheet(False), sheet(False, True)
    assert sheet() is None
    monkeypatch.setattr(duplicate_files, "MOST_EACH", 1)
    assert sheet(False, True, False, True).size == both.size
    assert both.size[0] == 2 * (2 * CELL_PX + 2) + GAP_PX + 2 * MARGIN_PX
    assert one.size[0] == 2 * CELL_PX + 2 + 2 * MARGIN_PX
    middle = MARGIN_PX + CELL_PX // 2
    # the accepted pair, 1-2, stands first
    assert [one.getpixel((middle + side, middle))[0] for side in (0, CELL_PX)] == [0, 40]
    assert [both.getpixel((middle + side, middle))[0] for side in (0, CELL_PX)] == [40, 80]

    def is_red(sheet):
        words = np.asarray(sheet)[MARGIN_PX + CELL_PX + 1 :, : 2 * CELL_PX].astype(int)
        return bool((words[..., 0] - words[..., 1] > 100).any())

    assert (is_red(one), is_red(both)) == (True, False)


def test_doubtful_pairs_are_those_near_the_least_score():
    copies = [saved(smooth(k), 2 + k) for k in range(20)]
    found, _ = found_in([*map(smooth, range(20)), *copies])
    doubt = found.doubt
    assert doubt.accepted.any()
    accepted, refused = doubt.score[doubt.accepted], doubt.score[~doubt.accepted]
    assert not np.diff(doubt.accepted.astype(int)).max(initial=-1) > 0  # accepted ones first
    assert (np.diff(accepted) >= 0).all()
    assert (np.diff(refused) <= 0).all()
    assert accepted.min() >= LEAST_SCORE > refused.max(initial=0)
