"""Lists of pairs, as LFW's pairs.txt and as tables: read, scored, refused."""

import json

import numpy as np
import pytest

import sslpipe
from sslpipe.errors import DataError
from sslpipe.evaluation.pair_list import read_pairs
from tests.helpers.photos import write_photos
from tests.helpers.shards import run

LFW = "2\t1\nAnn Lee\t1\t2\nAnn Lee\t2\tBo\t1\nBo\t1\t3\nBo\t3\tAnn Lee\t1\n"
FACES = ["Ann Lee/Ann Lee_0001.jpg", "Ann Lee/Ann Lee_0002.jpg", "Bo/Bo_0001.jpg", "Bo/Bo_0003.jpg"]
OF_LFW = [(0, 1, True), (2, 3, True), (1, 2, False), (3, 0, False)]


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        (LFW, FACES, OF_LFW),
        (LFW, [f"lfw/{name.removesuffix('jpg')}png" for name in FACES], OF_LFW),
        ("a,b,same\nx/1.jpg,y/1.jpg,0\n x/1.jpg,y/2.jpg,1\n", ["x/1.jpg", "y/1.jpg", "y/2.jpg"], 0),
        ("1 x/1.jpg y/2.jpg\n0 x/1.jpg y/1.jpg\n", ["x/1.jpg", "y/1.jpg", "y/2.jpg"], 0),
        ("/d/x/1.jpg;/d/y/2.png;True\n./x/1;y\\1;false\n", ["x/1.jpg", "y/1.jpg", "y/2.jpg"], 0),
        ('"a, b.jpg",c.jpg,1\nc.jpg,v1.5.jpg,0\n', ["a, b.jpg", "v1.5.jpg", "in/c.jpg"], 1),
    ],
)
def test_a_list_names_rows_of_features_by_the_paths_of_their_images(
    text, names, expected, tmp_path
):
    tables = ([(0, 2, True), (0, 1, False)], [(0, 2, True), (2, 1, False)])
    expected = expected if isinstance(expected, list) else tables[expected]
    path = tmp_path / "pairs.txt"
    path.write_text(text, encoding="utf-8")
    pairs = read_pairs(path, names)
    assert [*zip(*(each.tolist() for each in pairs), strict=True)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a.jpg b.jpg 1\na.jpg c.jpg 0\n",
            "line 2: none of the 4 images .* 'c.jpg'; embed the split that has all images",
        ),
        ("a.jpg b.jpg 1\na.jpg 1.jpg 0\n", "'1.jpg' is the end of the names of 2 images"),
        ("a.jpg b.jpg 1\nother/a.jpg in/x/1.jpg 0\nu/1.jpg b.jpg 0\n", "'u/1.jpg'"),
        ("a.jpg b.jpg 1\na.jpg b.jpg yes\n", "line 2: 'a.jpg b.jpg yes' is no pair"),
        ("a.jpg b.jpg same\na.jpg b.jpg 1\n", "line 1: 'a.jpg b.jpg same' is no pair"),
        ("a.jpg b.jpg 1\n", "has none of one kind"),
        ("", "has none of one kind"),
    ],
)
def test_what_a_list_cannot_mean_is_named(text, message, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_pairs(path, ["a.jpg", "b.jpg", "x/1.jpg", "in/y/1.jpg"])
    with pytest.raises(DataError, match="nothing"):
        read_pairs(tmp_path / "nothing", ["a.jpg"])


@pytest.mark.promise(6)
def test_listed_pairs_are_scored_in_their_own_ten_parts_as_lfw_has_them(tmp_path):
    """Against loops: in each part the threshold is the best of the nine others."""
    rng = np.random.default_rng(0)
    people = np.repeat(np.arange(12), 5)
    names = [f"p{person}/p{person}_{k % 5 + 1:04d}" for k, person in enumerate(people)]
    features = (np.eye(12)[people] + 0.5 * rng.normal(size=(60, 12))).astype(np.float32)
    lines = []
    pairs = []
    for part in range(10):
        for same in (True, False):
            for _ in range(4):
                one = int(rng.integers(60))
                others = np.flatnonzero((people == people[one]) == same)
                two = int(rng.choice(others[others != one]))
                first = f"p{people[one]}\t{one % 5 + 1}"
                second = f"{two % 5 + 1}" if same else f"p{people[two]}\t{two % 5 + 1}"
                lines.append(f"{first}\t{second}")
                pairs.append((part, one, two, same))
    (tmp_path / "pairs.txt").write_text("10\t4\n" + "\n".join(lines) + "\n")
    np.savez(tmp_path / "faces.npz", features=features, ids=np.array(names))

    out = tmp_path / "out.json"
    words = ["verification", *[str(tmp_path / "faces.npz")] * 2]
    assert (
        run(*words, "--pairs", str(tmp_path / "pairs.txt"), "--out", str(out), group="evaluate")
        == 0
    )

    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    scored = [(part, float(unit[one] @ unit[two]), same) for part, one, two, same in pairs]
    accuracies = []
    for part in range(10):
        others = [(score, same) for number, score, same in scored if number != part]
        best = max((sum((score >= t) == same for score, same in others), t) for t, _ in others)[1]
        held = [(score >= best - 1e-6) == same for number, score, same in scored if number == part]
        accuracies.append(np.mean(held))
    accuracy = json.loads(out.read_text())[-1]
    assert accuracy["details"]["folds"] == pytest.approx(accuracies)
    assert accuracy["value"] == pytest.approx(np.mean(accuracies))
    assert accuracy["protocol"] == "verification cosine pairs=40+40 listed"


def test_images_of_a_data_set_are_found_by_the_paths_that_it_was_built_from(tmp_path, capsys):
    write_photos(tmp_path / "photos")
    data = tmp_path / "data"
    sslpipe.build_dataset(data, "folder", root=tmp_path / "photos", labels=False)
    features = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    np.savez(tmp_path / "all.npz", features=features, ids=np.arange(80), split="train")
    lines = [f"cats/{k}.png,cats/{k + 20}.png,1" for k in range(20)]
    lines += [f"cats/{k}.png,my dogs/{k}.png,0" for k in range(20)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    words = ["verification", *[str(tmp_path / "all.npz")] * 2]
    words += ["--pairs", str(tmp_path / "pairs.csv")]
    assert run(*words, group="evaluate") == 2
    assert "--data" in capsys.readouterr().err
    assert run(*words, "--data", str(data / "dataset.json"), group="evaluate") == 0
    assert "pairs=20+20 listed" in capsys.readouterr().out
