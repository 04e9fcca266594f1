"""`sslpipe curate duplicates`: what it finds, and the table, the sheet and the column it writes."""

import csv
import errno
import io
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest
from PIL import Image

from benchmarks import curate
from sslpipe.cli import curate as curate_tool
from sslpipe.curate import candidates, results
from sslpipe.curate.candidates import ByDescriptors
from sslpipe.curate.duplicates import (
    LEAST_SCORE,
    Doubt,
    compare_all,
    exact_duplicates,
    find_duplicates,
)
from sslpipe.curate.groups import group
from sslpipe.curate.results import COLUMN, by_split, doubt_sheet, write_column
from sslpipe.curate.scan import scan, scan_pictures
from sslpipe.curate.thumbnails import COARSE, ThumbFile, describe, thumbnail
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
    with closing(samples.thumbs):
        found = find_duplicates(samples, num_workers=0, **options)
    return found, group(found.pairs, len(samples), found.apart).group


def as_sets(numbers):
    return {frozenset(np.flatnonzero(numbers == k).tolist()) for k in range(max(numbers) + 1)}


def read_rows(folder):
    with open(folder / "groups.csv", newline="") as file:
        return list(csv.DictReader(file))


def shown_of(rows):
    names = ("split", "id", "key", "group", "kind", "nearest")
    return [tuple(str(row[name]) for name in names) for row in rows]


def run(manifest, out, *words):
    return call(curate_tool, "duplicates", manifest, "--out", out, *words)


def column_of(manifest, split="train"):
    return load_index(manifest).split(split).column("duplicate_group")


def files_of_columns(manifest):
    """Which files a data set names for its column, and which are there."""
    named = {file.file for file in load_index(manifest).manifest.columns["duplicate_group"].files()}
    folder = manifest.parent
    there = (folder / "columns" / "duplicate_group").iterdir()
    return named, {path.relative_to(folder).as_posix() for path in there}


@pytest.fixture
def planted(tmp_path):
    """Train: 3 is 9 in bytes, 5 is 11 in pixels; test: 2 is train's 5 in bytes, 4 is bad."""
    plants = {9: png(picture(3)), 11: other_png(picture(5))}
    manifest = write_dataset(tmp_path / "data", (8, 8), broken=plants)
    others = {k: png(picture(100 + k)) for k in range(8)}
    others |= {2: png(picture(5)), 4: b"no image"}
    write_dataset(tmp_path / "data", (8,), split="test", broken=others)
    return manifest


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
    assert told in run(planted, tmp_path / "test", "--split", "test")
    run(planted, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["groups.csv"]
    assert shown_of(read_rows(tmp_path / "out")) == [
        ("train", "3", "train000003", "0", "bytes", "train:9"),
        ("train", "9", "train000009", "0", "bytes", "train:3"),
        ("train", "5", "train000005", "1", "bytes", "test:2"),
        ("train", "11", "train000011", "1", "pixels", "train:5"),
        ("test", "2", "test000002", "1", "bytes", "train:5"),
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
        monkeypatch.setattr("sslpipe.curate.results.scheme", lambda folder: "https")
    elif word == "read-only":  # root may write anywhere
        monkeypatch.setattr("os.access", lambda path, mode: path != str(planted.parent))
    else:
        add_columns(planted, duplicate_group=["a"] * 16)
    before = planted.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("sslpipe.curate.scan.scan", None)
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
    with pytest.raises(UserError, match="names a split twice"):
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
    assert rows[-1][4:] == ("pixels", "train:2")


def test_without_room_for_thumbnails_the_folder_and_the_remedy_are_named(
    planted, tmp_path, monkeypatch
):
    def full(self, thumbs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ThumbFile, "append", full)
    told = f"12 KiB each, cannot be written to {re.escape(str(tmp_path))}.*"
    for folder, why in ((tmp_path, ""), (tmp_path / "absent", "absent: No such file.*")):
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(UserError, match=f"{told}{why}set TMPDIR"):
            run(planted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MADE = {
    "jpeg": (lambda p: saved(p, 60), "near"),
    "jpeg 30": (lambda p: saved(p, 30), "near"),
    "half": (lambda p: resized(p, 32), "near"),
    "double": (lambda p: resized(p, 128), "near"),
    "crop": (lambda p: p[4:62, 2:60], "cropped"),
    "corner": (lambda p: p[6:, :58], "cropped"),
    "mirror": (lambda p: p[:, ::-1], "mirrored"),
    "mirrored crop": (lambda p: p[:58, 6:, :][:, ::-1], "mirrored and cropped"),
    "darker": (lambda p: np.uint8(p * 0.9), "near"),
    "brighter": (lambda p: np.uint8(np.minimum(p * 1.1, 255)), "near"),
}


def test_every_kind_of_near_duplicate_is_grouped_with_its_source(tmp_path):
    pictures = {k: smooth(k) for k in range(40)}
    plants = {40 + k: make(smooth(k)) for k, (make, _) in enumerate(MADE.values())}
    raw = {k: png(np.ascontiguousarray(p)) for k, p in {**pictures, **plants}.items()}
    manifest = write_dataset(tmp_path / "data", (len(raw),), broken=raw)
    run(manifest, tmp_path / "out", "--num-workers", "0")
    found = {int(row["id"]): row for row in read_rows(tmp_path / "out")}
    for k, (name, (_, kind)) in enumerate(MADE.items()):
        assert (found[40 + k]["nearest"], found[40 + k]["kind"]) == (f"train:{k}", kind), name
        assert found[40 + k]["group"] == found[k]["group"], name
    assert len(found) == 2 * len(MADE), "no other picture is called a duplicate"


PROMISED = dict(list(curate.KINDS.items())[:4])


def test_copies_of_small_garments_are_found_at_the_promised_recall_and_precision(monkeypatch):
    pictures = curate.fashion_mnist(300)
    monkeypatch.setattr(curate, "KINDS", PROMISED)
    for kind, counts in curate.measure(pictures, 60, curate.found_pairs(pictures))["kinds"].items():
        assert counts["found"] >= 0.95 * counts["planted"], kind
        assert counts["found"] >= 0.98 * (counts["found"] + counts["wrong"]), kind


def copies_of(number, count, rng):
    """As many near copies of a picture, each made otherwise."""
    whole, made = smooth(number), []
    for k in range(count):
        copy = resized(saved(whole, int(rng.integers(40, 95))), int(rng.integers(40, 100)))
        copy = np.uint8(np.clip(copy * rng.uniform(0.92, 1.08), 0, 255))
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
    with closing(samples.thumbs):
        verdicts = compare_all(samples, np.array([(0, k) for k in range(1, 5)]), num_workers=0)
    assert verdicts.score.max() < LEAST_SCORE


# the search for candidates

SIGN = np.where(np.arange(64) % 8 % 2 == 0, 1, -1)  # of the frequencies of a mirror image


def test_descriptors_name_the_pairs_that_brute_force_names():
    rng = np.random.default_rng(0)
    thumbs = [thumbnail(smooth(k)) for k in range(30)]
    thumbs += [thumbnail(saved(smooth(k)[rng.integers(7) :, ::-1], 50)) for k in range(10)]
    descriptors = describe(np.stack(thumbs))
    expected = set()
    for a, views in enumerate(descriptors.astype(np.int64)):
        both = np.concatenate([views, views * SIGN])
        alike = (both @ descriptors[:, 0].T.astype(np.int64)).max(0)
        alike[a] = 0
        best = np.argsort(-alike, kind="stable")[:5]
        expected |= {tuple(sorted((a, int(b)))) for b in best if alike[b] >= 0.6 * 127**2}
    found = ByDescriptors(descriptors, np.arange(40)).pairs(np.arange(40), 5)
    assert set(map(tuple, found.tolist())) == expected
    assert {(k, 30 + k) for k in range(10)} <= expected
    alone = ByDescriptors(descriptors, np.arange(1))
    assert alone.pairs(np.arange(1), 5).shape == (0, 2)


def test_tiles_and_threads_do_not_change_a_pair(monkeypatch):
    rng = np.random.default_rng(0)
    descriptors = describe(rng.integers(0, 256, (700, 64, 64, 3), np.uint8))
    every = np.arange(700)
    monkeypatch.setattr(candidates, "LEAST_SIMILAR", 0.1)
    whole = ByDescriptors(descriptors, every).pairs(every, 5)
    assert len(whole) > 700
    monkeypatch.setattr(candidates, "TILE_ROWS", 7)
    monkeypatch.setattr(candidates, "TILE_COLUMNS", 11)
    tiled = ByDescriptors(descriptors, every, num_workers=0)
    assert np.array_equal(tiled.pairs(every, 5), whole)
    # of some samples only: their pairs, and no others
    some = tiled.pairs(every[::9], 5)
    assert set(map(tuple, some.tolist())) <= set(map(tuple, whole.tolist()))
    assert np.isin(some, every[::9]).any(1).all()


def test_few_views_leave_those_of_many_that_brute_force_finds_by_them(monkeypatch):
    """Of 700 pictures 64, or a few more, are looked at with all views: those nearest by few."""
    monkeypatch.setattr(candidates, "WIDER", 64)
    monkeypatch.setattr(candidates, "LEAST_SIMILAR", 0.0)
    rng = np.random.default_rng(0)
    descriptors = describe(np.stack([thumbnail(smooth(k)) for k in range(700)]))
    low = [8 * y + x for y in range(5) for x in range(5) if x or y]
    units = descriptors[:, :, low].astype(np.float32)
    units = np.rint(127 * units / np.linalg.norm(units, axis=2, keepdims=True))
    wholes = descriptors[:, 0].astype(np.float64)
    wholes /= np.maximum(np.linalg.norm(wholes, axis=1, keepdims=True), 1)
    search = ByDescriptors(descriptors, np.arange(700))
    for row in rng.choice(700, 20, replace=False).tolist():
        few = np.concatenate([units[row, COARSE], units[row, COARSE] * SIGN[low]])
        alike = (few @ units[:, 0].T).max(0)
        views = np.concatenate([descriptors[row], descriptors[row] * SIGN]).astype(np.float64)
        views /= np.maximum(np.linalg.norm(views, axis=1, keepdims=True), 1)
        fine = (views @ wholes.T).max(0)
        near = np.argsort(-alike)
        near = near[near != row][:64]
        found = search.pairs(np.array([row]), 5)
        others = found[found != row]
        assert len(others) == 5
        assert (np.sort(fine[others]) >= np.sort(fine[near])[-5:] - 1e-6).all()
        assert alike[others].min() >= np.sort(alike)[-160]


def test_crops_of_one_side_are_named_among_hundreds_that_are_alike():
    """None of the few views is such a crop, and among many that are alike others are nearer."""
    rng = np.random.default_rng(0)

    def forms(cells):
        small = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
        return np.asarray(small.resize((64, 64), Image.Resampling.BICUBIC))

    common = 120 + 60 * forms(7)
    greys = [np.clip(common + 16 * forms(5), 0, 255) for _ in range(900)]
    shown = [np.uint8(grey)[..., None].repeat(3, 2) for grey in greys]
    cuts = [each[6:] if row % 2 else each[:, :-6] for row, each in enumerate(shown[:100])]
    descriptors = describe(np.stack([thumbnail(each) for each in (*shown, *cuts)]))
    found = ByDescriptors(descriptors, np.arange(1000)).pairs(np.arange(100), 5)
    assert {(row, 900 + row) for row in range(100)} <= set(map(tuple, found.tolist()))


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
        samples.thumbs.close()
        found.append((samples, group(exact_duplicates(samples), len(samples))))

    def write(number):
        for turn in range(8):
            values = by_split(*found[(number + turn) % 2])
            write_column(index.folder, COLUMN, values, alone=True)

    with ThreadPoolExecutor(2) as pool:  # each opens the folder: the lock holds threads apart, too
        list(pool.map(write, range(2)))
    for name in load_index(planted).manifest.columns["duplicate_group"].splits:
        column_of(planted, name).groups.whole_split()
    named, there = files_of_columns(planted)
    assert named == there


KILLS = {
    "before the column is named": "columns.save_manifest = lambda folder, manifest: die()",
    "while its values are written": "columns.write_atomically = lambda path, *_, **__: die("
    "portable.replacing(path).__enter__()) if path.suffix == '.npy' else None",
}


@pytest.mark.parametrize("when", KILLS)
def test_a_kill_before_the_new_column_is_named_leaves_the_old_one_as_it_was(
    planted, tmp_path, when
):
    add_columns(planted, "train", duplicate_group=list(range(16)))
    before = planted.read_bytes()
    program = (
        "import os, signal; from sslpipe import portable; from sslpipe.sharding import columns;"
        "from sslpipe.cli import curate; die = lambda _=0: os.kill(os.getpid(), signal.SIGKILL);"
        f"{KILLS[when]};"
        f"curate.app(['duplicates', {str(planted)!r}, '--out', {str(tmp_path / 'out')!r}])"
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


def test_the_sheet_shows_doubtful_pairs_in_their_order_red_where_refused(monkeypatch):
    samples = scan_pictures([np.full((32, 32, 3), 40 * k, np.uint8) for k in range(5)])

    def sheet(count):  # of pairs 0-1, 1-2 ..., each second one accepted
        pairs = np.array([(k, k + 1) for k in range(count)], np.int64).reshape(-1, 2)
        scores = np.full(count, 0.8, np.float32)
        return doubt_sheet(samples, Doubt(pairs, scores, np.arange(count) % 2 == 1))

    with closing(samples.thumbs):
        one, both = sheet(1), sheet(2)
        assert sheet(0) is None
        monkeypatch.setattr(results, "MOST_PAIRS", 1)
        assert sheet(2).size == one.size
    assert both.size[0] == 2 * (2 * CELL_PX + 2) + GAP_PX + 2 * MARGIN_PX
    assert one.size[0] == 2 * CELL_PX + 2 + 2 * MARGIN_PX
    middle = MARGIN_PX + CELL_PX // 2
    assert [one.getpixel((middle + side, middle))[0] for side in (0, CELL_PX)] == [0, 40]
    words = np.asarray(one)[MARGIN_PX + CELL_PX + 1 :]
    assert (words[..., 0].astype(int) - words[..., 1] > 100).any()
