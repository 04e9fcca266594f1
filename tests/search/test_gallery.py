"""The gallery against loops over every enrolled embedding; adding and removing disturbs nobody."""

import json
import math
import os
import re
import unicodedata

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import CHECKSUM, checksum_of
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.search.gallery import (
    Gallery,
    different_pairs,
    similarity,
    threshold_at,
)

DIM = 16


def some(count, seed=0):
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def filled(people=30):
    """Names with 1 to 4 embeddings each, scattered over the order of enrolment."""
    gallery = Gallery(DIM)
    names = [f"person {n % people}" for n in range(people)]
    names += [f"person {n}" for n in range(people) for _ in range(n % 4)]
    gallery.enrol(names, some(len(names)))
    return gallery


def content(path):
    """Tensors and text of a file, without its checksum."""
    with safe_open(path, framework="pt") as file:
        text = file.metadata()["gallery"]
    return {name: x for name, x in load_file(path).items() if name != CHECKSUM}, text


def write(path, tensors, text):
    seal = checksum_of(tensors, text)
    save_file({**tensors, CHECKSUM: seal}, path, metadata={"gallery": text})


def loops(gallery, query):
    """Name -> the highest cosine of its embeddings, in float64."""
    best = {}
    for name in gallery.names:
        for row in gallery.embeddings(name).double():
            score = float(row @ query.double() / row.norm() / query.double().norm())
            best[name] = max(best.get(name, -2.0), score)
    return best


@pytest.mark.parametrize("top", [1, 3, 30])
def test_ranks_are_those_of_loops_over_every_embedding(top):
    gallery = filled()
    for query, matches in zip(some(20, 1), gallery.rank(some(20, 1), top), strict=True):
        expected = sorted(loops(gallery, query).items(), key=lambda item: -item[1])[:top]
        assert [match.name for match in matches] == [name for name, _ in expected]
        for match, (_, score) in zip(matches, expected, strict=True):
            assert match.score == pytest.approx(score, abs=1e-6)


def test_adding_and_removing_a_name_changes_no_bit_of_anothers_score():
    gallery, queries = filled(), some(40, 3)

    def scores():
        ranked = gallery.rank(queries, len(gallery))
        return [{match.name: match.score for match in matches} for matches in ranked]

    before = scores()
    gallery.add("newcomer", some(5, 4))
    after = scores()
    for old, new in zip(before, after, strict=True):
        assert {**old, "newcomer": new["newcomer"]} == new
    gallery.remove("newcomer")
    gallery.remove("person 7")
    for old, new in zip(before, scores(), strict=True):
        assert {name: score for name, score in old.items() if name != "person 7"} == new
    assert "person 7" not in gallery
    assert len(gallery) == 29


def test_a_flattened_gallery_scores_flattened_cosines_and_keeps_its_space(tmp_path):
    space = fit_whitening(Embeddings(some(200) ** 3, *[torch.arange(200)] * 2), power=0.5)
    raw, flat = some(60, 1) + 1, Gallery(DIM, flattening=space)
    flat.enrol([f"{n % 20}" for n in range(60)], raw)
    expected = Gallery(DIM)  # of rows that were flattened before
    expected.enrol([f"{n % 20}" for n in range(60)], space.apply(raw))
    queries = some(10, 2)
    ranked = flat.rank(queries, 5)
    assert ranked == expected.rank(space.apply(queries), 5)
    assert ranked != filled().rank(queries, 5)
    flat.save(tmp_path / "flat.safetensors")
    loaded = Gallery.load(tmp_path / "flat.safetensors")
    assert loaded.rank(queries, 5) == ranked
    # another name, however different, changes no bit
    loaded.add("other", 100 * some(50, 3))
    loaded.remove("other")
    loaded.save(tmp_path / "again.safetensors")
    assert Gallery.load(tmp_path / "again.safetensors").rank(queries, 5) == ranked


def test_a_query_below_the_threshold_is_nobody():
    gallery = filled()
    gallery.threshold = 0.9
    known, stranger = gallery.embeddings("person 5")[0], some(1, 99)[0]
    actual = gallery.identify(torch.stack([10 * known, stranger]))  # length means nothing
    assert actual[0].name == "person 5"
    assert actual[0].score == pytest.approx(1)
    assert actual[1] is None
    gallery.threshold = -1.0
    with pytest.warns(UserWarning, match="no threshold is set"):
        assert gallery.identify(stranger)[0] is not None


@pytest.mark.parametrize("far", [0.0, 0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_the_threshold_is_the_lowest_that_at_most_a_share_far_reaches(far, ties):
    scores = some(1000, 5)[:, 0]
    scores = (scores * 4).round() / 4 if ties else scores
    threshold = threshold_at(scores, far)
    assert float((scores >= threshold).double().mean()) <= far
    lower = scores[scores < threshold]
    if len(lower):  # the next score down would let in too many
        assert float((scores >= lower.max()).double().mean()) > far


def test_calibration_refuses_strangers_at_the_rate_asked_for():
    gallery, strangers = filled(), some(400, 6)
    gallery.calibrate(strangers, far=0.02)
    taken = sum(match is not None for match in gallery.identify(strangers))
    assert taken == 8  # no ties among random scores


def test_two_images_are_scored_as_the_gallery_does():
    gallery, query = Gallery(DIM), some(1, 7)[0]
    gallery.add("one", some(1, 8))
    score = gallery.rank(query)[0][0].score
    assert similarity(query, some(1, 8)[0]) == score


def test_rows_are_held_under_the_names_that_they_were_enrolled_with():
    gallery, rows = filled(), some(73)
    accent = unicodedata.normalize("NFD", "Zoë")
    gallery.add(accent, some(1, 3))
    asked = torch.cat([rows[:3], rows[:1] * (1 + 1e-5), some(2, 3)])
    names = ["person 0", "person 1", "person 3", "person 0", unicodedata.normalize("NFC", accent)]
    names.append("nobody")
    assert gallery.holds(names, asked).tolist() == [True, True, False, True, True, False]


def test_no_score_is_more_than_that_of_an_image_with_itself():
    """Of rows in fixed point some have 1.0000001, and their opposites less than -1."""
    rows = some(400, 12)
    gallery = Gallery(DIM)
    names = [str(number) for number in range(len(rows))]
    gallery.enrol(names, rows)
    ranked = gallery.rank(rows)
    assert [match.name for (match,) in ranked] == names
    scores = [match.score for (match,) in ranked]
    scores += [similarity(row, row) for row in rows]
    assert max(scores) == 1
    assert min(scores) > 1 - 1e-6
    assert min(similarity(row, -row) for row in rows) == -1
    twice = torch.cat([rows, rows])
    others = gallery.nearest_others(names, rows)
    assert all(match.name != name for match, name in zip(others, names, strict=True))
    assert different_pairs(twice, range(len(twice))).max() == 1


def test_different_pairs_are_all_pairs_of_two_labels():
    rows, labels = some(12, 11), [0, 0, 1, 2, 2, 2, 3, 0, 1, 1, 3, 3]
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    expected = [
        float(unit[i] @ unit[j])
        for i in range(12)
        for j in range(i + 1, 12)
        if labels[i] != labels[j]
    ]
    torch.testing.assert_close(
        different_pairs(rows, labels).double(), torch.tensor(expected).double(), rtol=0, atol=1e-6
    )


def test_a_flipped_bit_in_a_file_is_one_line_or_changes_nothing(tmp_path):
    path, gallery = tmp_path / "people.safetensors", filled(people=3)
    gallery.save(path)
    raw, said = path.read_bytes(), []
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            loaded = Gallery.load(path)
        except DataError as error:
            said.append(str(error))
            continue
        assert loaded.names == gallery.names
        assert loaded.threshold == gallery.threshold
        assert all(torch.equal(loaded.embeddings(n), gallery.embeddings(n)) for n in gallery.names)
    assert len(said) > 0.9 * len(raw)
    assert all(str(path) in line and "\n" not in line for line in said)


@pytest.mark.parametrize("name", ["", " \t"])
def test_a_blank_name_is_refused(name):
    gallery = filled()
    with pytest.raises(UserError, match="blank"):
        gallery.enrol(["Ann", name], some(2))
    assert "Ann" not in gallery


def test_two_unicode_forms_of_a_name_are_one(tmp_path):
    """A folder on a Mac is named with its accents apart, and a keyboard types them composed."""
    composed, apart = (unicodedata.normalize(form, "Jos\u00e9") for form in ("NFC", "NFD"))
    gallery = Gallery(DIM)
    gallery.enrol([apart, composed, "Ann"], some(3))
    gallery.add(apart, some(1, seed=1))
    assert gallery.names == (composed, "Ann")
    assert apart in gallery
    assert len(gallery.embeddings(apart)) == 3
    gallery.save(tmp_path / "book")
    loaded = Gallery.load(tmp_path / "book")
    loaded.remove(apart)
    assert loaded.names == ("Ann",)
    assert torch.equal(loaded.embeddings("Ann"), gallery.embeddings("Ann"))


def test_the_nearest_other_is_the_best_of_all_other_names():
    gallery = Gallery(DIM)
    rows = some(9)
    names = ["a", "b", "c"] * 3
    gallery.enrol(names, rows)
    for name, query, found in zip(names, rows, gallery.nearest_others(names, rows), strict=True):
        assert found == next(m for m in gallery.rank(query, top=3)[0] if m.name != name)


def test_a_saved_gallery_is_the_same_after_loading(tmp_path):
    gallery, path = filled(), tmp_path / "folder" / "people.safetensors"
    gallery.metadata["backbone_sha256"] = "abc"
    gallery.calibrate(some(50, 6), far=0.1)
    gallery.remove("person 0")
    gallery.save(path)
    again = Gallery.load(path)
    assert again.names == gallery.names
    assert (again.threshold, again.metadata) == (gallery.threshold, gallery.metadata)
    assert again.rank(some(30, 2), 4) == gallery.rank(some(30, 2), 4)
    assert again.identify(some(30, 2)) == gallery.identify(some(30, 2))


def test_a_file_without_its_checksum_is_no_gallery(tmp_path):
    path = tmp_path / "g.safetensors"
    filled().save(path)
    tensors, text = content(path)
    save_file(tensors, path, metadata={"gallery": text})
    with pytest.raises(DataError, match="holds no gallery"):
        Gallery.load(path)


NAMES = [f"person {n}" for n in range(30)]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"names": [*range(30)]}, "names.0 = 0"),
        ({"names": "abc"}, "names = 'abc'"),
        ({"threshold": math.nan}, "not JSON"),
        ({"threshold": "high"}, "threshold = 'high'"),
        ({"threshold": True}, "threshold = True"),
        ({"facts": []}, "facts = []"),
        ({"format_version": 2}, "format_version = 2"),
    ],
)
def test_content_that_no_gallery_has_is_one_error(tmp_path, change, wrong):
    """With a checksum that fits."""
    gallery, path = filled(), tmp_path / "g.safetensors"
    about = {"format_version": 1, "names": NAMES, "threshold": 0.5, "facts": {}}
    tensors = {"embeddings": gallery._embeddings, "owner": gallery._owner}
    write(path, tensors, json.dumps(about | change))
    with pytest.raises(DataError, match=re.escape(wrong)):
        Gallery.load(path)


def test_mistakes_are_one_error_that_says_what_to_do(tmp_path):
    gallery, zero = filled(), torch.tensor([[1.0], [0.0]]).expand(2, DIM)
    for attempt, text in (
        (
            lambda: gallery.remove("persn 4"),
            "'persn 4' is not in the gallery; did you mean 'person",
        ),
        (lambda: gallery.add("x", torch.zeros(2, 3)), "have 3 features, the gallery 16"),
        (lambda: gallery.add("x", torch.full((1, DIM), math.nan)), "must be finite"),
        (lambda: gallery.enrol(["x"], some(2)), "1 names for 2 embeddings"),
        (lambda: gallery.enrol("x", some(1)), r"names = 'x' is not a list; give \['x'\]"),
        (lambda: gallery.add("x", ["a.jpg"]), r"a list, not floats .*encode\(images\)"),
        (lambda: gallery.add("x", torch.ones(2, DIM, dtype=torch.int64)), "int64 .*not floats"),
        (lambda: gallery.rank("a.jpg"), r"a str, not floats .*encode\(images\)"),
        (lambda: gallery.calibrate(some(2), "low"), "far = 'low' is not a number"),
        (
            lambda: gallery.calibrate(2 * gallery.embeddings("person 4"), 0.1),
            r"strangers\[0\] is an enrolled image of 'person 4'.*people who are not enrolled",
        ),
        (lambda: gallery.rank(zero), "embedding 1 is all zeros"),
        (lambda: gallery.enrol(["b", "d"], zero), r"embedding 1 \('d'\) is all zeros"),
        (lambda: similarity(*zero), "'second'"),
        (lambda: gallery.rank(some(1), 31), "top = 31 does not fit 30 names"),
        (lambda: Gallery(DIM).rank(some(1)), "the gallery is empty"),
        (lambda: threshold_at(torch.zeros(0), 0.1), "there must be a score"),
        (lambda: threshold_at(torch.zeros(3), 1.5), "far = 1.5 must be in"),
    ):
        with pytest.raises(UserError, match=text):
            attempt()
    assert gallery.names == filled().names
    (tmp_path / "x").write_bytes(b"junk")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, text in (
        *((name, "holds no gallery") for name in ("x", "missing")),
        *((name, "not a regular file") for name in ("fifo", "zero")),
    ):
        with pytest.raises(DataError, match=text):
            Gallery.load(tmp_path / name)


def test_arrays_of_numpy_and_of_half_precision_are_embeddings_and_it_shows_what_it_holds():
    ours, theirs = Gallery(DIM), Gallery(DIM)
    rows = some(6)
    ours.enrol(["a", "b", "c"], rows[:3])
    theirs.enrol(["a", "b", "c"], rows[:3].double().numpy())
    assert ours.rank(rows[3:]) == theirs.rank(rows[3:].numpy())
    assert ours.rank(rows[3:]) == theirs.rank(rows.numpy()[:2:-1])[::-1]  # of negative strides
    assert ours.rank(rows[3:].half())[0][0].name == ours.rank(rows[3:])[0][0].name
    assert repr(ours) == f"Gallery(3 names of 3 embeddings ({DIM},); no threshold)"
    ours.calibrate(rows[3:].numpy(), far=0)
    assert f"threshold {ours.threshold:.4f}" in repr(ours)
