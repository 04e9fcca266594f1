"""Planted features: the ranking finds what is known to be better, with labels and without."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sslpipe
from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.difference import Difference
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.flatten import POWERS, choose_power, why_unlabelled
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.search import pages, ranking
from sslpipe.search.candidates import Candidate
from sslpipe.search.ranking import (
    SEEN,
    CornerViews,
    Ranked,
    best_first,
    best_single,
    check_features,
    few_labelled,
    rank_with_labels,
    rank_without_labels,
    ranking_from,
    to_json,
    to_use,
)

CLASSES, EACH, DIM = 30, 8, 24


def rows_of(features: torch.Tensor, labels: torch.Tensor) -> Embeddings:
    return Embeddings(features.float(), labels, torch.arange(len(labels)))


def planted(seed: int = 0) -> dict[str, Embeddings]:
    """Features of one set of classes: good, dead in one half, shuffled, and two that complete.

    "left" tells the even classes' groups apart, "right" the odd ones': together they tell all.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)

    def noisy(centres, noise):
        return centres[labels] + noise * torch.randn(len(labels), DIM, generator=draw)

    centres = torch.randn(CLASSES, DIM, generator=draw)
    good = noisy(centres, 0.8)
    dead = good.clone()
    dead[:, : DIM // 2] = 0
    shuffled = good[torch.randperm(len(labels), generator=draw)]
    coarse = [torch.randn(6, DIM, generator=draw)[index] for index in
              (torch.arange(CLASSES) % 6, torch.arange(CLASSES) // 5)]  # fmt: skip
    left, right = (noisy(each, 0.5) for each in coarse)
    made = {"good": good, "dead": dead, "shuffled": shuffled, "left": left, "right": right}
    return {name: rows_of(x, labels) for name, x in made.items()}


def best(ranked):
    return ranked[0].parts


@pytest.mark.promise(14)
@pytest.mark.parametrize("seed", range(3))
def test_with_labels_the_planted_best_is_first_and_its_gain_is_on_other_classes(seed):
    features = planted(seed)
    ranked = rank_with_labels(features, [("dead",), ("shuffled",), ("good",)], seed)
    assert len(ranked) == 3 * (1 + len(POWERS))
    assert best(ranked) == ("good",)
    assert {row.parts for row in ranked[-4:]} == {("shuffled",)}
    # compared with the best single network as it is, on the other classes
    base = best_single(ranked)
    assert (base.parts, base.power) == (("good",), None)
    assert base.more["MAP@R"].value == 0
    dead = next(row for row in ranked if row.parts == ("dead",) and row.power is None)
    more = dead.more["MAP@R"]
    assert more.interval95[1] < 0
    assert dead.p <= 0.05
    assert (more.unit, more.number) == ("classes", CLASSES // 2)
    assert more.value == pytest.approx(dead.values["MAP@R"] - base.values["MAP@R"])


@pytest.mark.promise(14)
@pytest.mark.parametrize("seed", range(3))
def test_a_join_wins_where_its_parts_complete_each_other_and_loses_where_one_is_noise(seed):
    features = planted(seed)
    sets = [("left",), ("right",), ("left", "right")]
    ranked = rank_with_labels(features, sets, seed)
    assert best(ranked) == ("left", "right")
    assert ranked[0].more["MAP@R"].interval95[0] > 0
    assert ranked[0].p <= 0.05
    sets = [("good",), ("shuffled",), ("good", "shuffled")]
    assert best(rank_with_labels(features, sets, seed)) == ("good",)


def test_values_are_those_of_loops_over_the_half_that_did_not_choose():
    features = planted()
    rows = features["good"]
    ranked = rank_with_labels(features, [("good",)], seed=5)
    plain = next(row for row in ranked if row.power is None)

    def scores(half):
        unit = F.normalize(rows.features[half].double(), dim=1)
        labels, hits, precision = rows.labels[half], [], []
        for n in range(len(unit)):
            order = [m for m in (unit @ unit[n]).argsort(descending=True).tolist() if m != n]
            right = [float(labels[m] == labels[n]) for m in order[: EACH - 1]]
            hits.append(right[0])
            at = [sum(right[: k + 1]) / (k + 1) * right[k] for k in range(EACH - 1)]
            precision.append(sum(at) / (EACH - 1))
        return np.mean(hits), np.mean(precision)

    # which half is which: the two are all classes, each once
    chooses, reports = ranking.halves_of(rows.labels.numpy(), 5)
    assert sorted([*chooses, *reports]) == list(range(CLASSES))
    halves = [torch.from_numpy(np.isin(rows.labels.numpy(), own)) for own in (chooses, reports)]
    assert plain.score == pytest.approx(scores(halves[0])[1])
    recall, map_at_r = scores(halves[1])
    assert plain.values == pytest.approx({"Recall@1": recall, "MAP@R": map_at_r})
    # a spectrum is learned on the other half alone
    flat = fit_whitening(rows.rows(halves[0]), power=0.5)
    rows = rows._replace(features=flat.apply(rows.features))
    half = next(row for row in ranked if row.power == 0.5)
    assert half.values["MAP@R"] == pytest.approx(scores(halves[1])[1], abs=1e-6)


@pytest.mark.promise(14)
def test_without_labels_the_candidate_that_knows_an_images_other_corner_is_first():
    draw = torch.Generator().manual_seed(0)
    content = torch.randn(60, DIM, generator=draw)
    corners, features = {}, {}
    for name, noise in (("blind", 5.0), ("seeing", 0.3), ("weak", 1.5)):
        noisy = [content + noise * torch.randn(60, DIM, generator=draw) for _ in range(3)]
        features[name] = rows_of(noisy[2], torch.full((60,), -1))
        corners[name] = features[name]._replace(features=torch.cat(noisy[:2], dim=1))
    ranked = rank_without_labels(features, corners, [("blind",), ("weak",), ("seeing",)])
    assert [row.parts for row in ranked] == [("seeing",), ("weak",), ("blind",)]
    assert ranked[0].score == 1.0
    both = rank_without_labels(features, corners, [("blind",), ("blind", "seeing")])
    assert best(both) == ("blind", "seeing")


def test_the_power_that_is_chosen_is_the_planted_one():
    """Wide axes that say nothing want whitening; narrow ones of noise want little of it."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    classes = torch.randn(CLASSES, 12, generator=draw)[labels]
    noise = torch.randn(len(labels), 12, generator=draw)
    near = classes + 0.4 * torch.randn(len(labels), 12, generator=draw)
    for features, expected in (
        (torch.cat([near, 12 * noise], 1), 1.0),
        (torch.cat([near, 0.2 * noise], 1), 0.25),
    ):
        power, why, helps = choose_power(rows_of(features, labels))
        assert (power, helps) == (expected, expected == 1)  # noise is best left narrow
        assert why.startswith(f"power {expected:g}: MAP@R ")
    power, why, _ = choose_power(rows_of(features, torch.full_like(labels, -1)))
    assert (power, "labels cannot choose: 0 classes" in why) == (0.25, True)


def test_corners_are_crops_of_the_image_with_half_of_what_the_view_sees():
    view = EvalView(32, 32)
    images = torch.arange(3 * 90 * 90, dtype=torch.float64).reshape(1, 3, 90, 90)
    images = (images / images.max() * 255).round().to(torch.uint8)
    corners = CornerViews(view)
    made = corners(images, torch.tensor([[90, 90]]))
    whole = EvalView(45, 45)(images, torch.tensor([[90, 90]]))
    assert corners.resize_px == 45  # 32 px are half of the area
    assert torch.equal(made[0], whole[0, :, :32, :32])
    assert torch.equal(made[1], whole[0, :, -32:, -32:].flip(2))
    assert corners.reduced(torch.arange(4.0)[:, None]).tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_a_ranking_is_read_again_only_where_it_is_of_the_same_things(tmp_path):
    ranked, identity = rank_with_labels(planted(), [("good",), ("dead",)]), {"sets": [("good",)]}
    tree, file = to_json(ranked, identity), tmp_path / "choice.json"
    assert ranking_from(file, identity) == []
    for rows in ([{"parts": 3}], 3, [{**tree["rows"][0], "score": "high"}]):
        file.write_text(json.dumps({**tree, "rows": rows}))
        assert ranking_from(file, identity) == []
    file.write_text(json.dumps(tree))
    assert ranking_from(file, identity) == ranked
    assert ranking_from(file, {"sets": [("dead",)]}) == []


def test_what_cannot_be_ranked_is_said_in_one_line():
    features = planted()
    few = features["good"].rows(torch.arange(10))
    with pytest.raises(DataError, match=r"^10 images are too few.*give 20 or more$"):
        check_features("good", few, few)
    same = torch.ones(240, DIM)
    for rounding in (0.0, 1e-5):  # of batches of other sizes
        one = features["good"]._replace(features=same + rounding * features["good"].features.sign())
        with pytest.raises(DataError, match="gives all 240 images the same features"):
            check_features("lite0@96", one, one)
    near = features["good"]._replace(features=same + 1e-3 * features["good"].features.sign())
    check_features("lite0@96", near, near)
    with pytest.raises(DataError, match="good reads other images than the first"):
        check_features("good", features["good"], few)
    check_features("good", features["good"], features["dead"])
    four = np.arange(8) // 2
    assert why_unlabelled(four) is None
    assert "3 classes have two images" in why_unlabelled(np.array([0, 0, 1, 1, 2, 2, 3, -1, -1]))
    assert few_labelled(np.array([*four, 4, -1, -1])) == 8
    assert few_labelled(np.arange(200) // 2) is None
    assert few_labelled(four[:6]) is None  # which choose nothing


def test_unlabelled_images_and_lone_ones_are_searched_by_nobody():
    rows = planted()["good"]
    labels = rows.labels.clone()
    labels[: 3 * EACH] = -1  # three classes
    labels[3 * EACH + 1 : 4 * EACH] = -1  # one image left of the fourth
    ranked = rank_with_labels({"good": rows._replace(labels=labels)}, [("good",)])
    assert ranked[0].more["MAP@R"].number == (CLASSES - 4) // 2


@pytest.mark.promise(14)
def test_images_of_seen_classes_are_searched_too_and_those_without_a_label_are_not():
    rows = planted()["left"]  # which takes the classes n and n + 6 for one
    unit = F.normalize(rows.features.double(), dim=1)
    held = rows.labels < 12
    for hidden, searched in ((SEEN, torch.ones_like(held)), (-1, held)):
        labels = rows.labels.where(held, torch.tensor(hidden))
        (plain, *_) = (
            row
            for row in rank_with_labels({"left": rows._replace(labels=labels)}, [("left",)])
            if row.power is None
        )
        _, reports = ranking.halves_of(labels.numpy(), 0)
        half = torch.from_numpy(np.isin(rows.labels.numpy(), reports))
        others = half | (searched & ~held)  # not the half that chooses
        hits = []
        for n in half.nonzero()[:, 0].tolist():
            near = (unit @ unit[n]).masked_fill(~others, -2)
            near[n] = -2
            hits.append(bool(rows.labels[near.argmax()] == rows.labels[n]))
        assert plain.values["Recall@1"] == pytest.approx(np.mean(hits))


def test_without_labels_only_two_sizes_of_one_network_are_called_that():
    def found_of(*names):
        """NAME@PX -> a candidate; the name is that of the weights."""
        found = {}
        for name in names:
            weights, _, px = name.partition("@")
            config = SimpleNamespace(weights_sha256=weights, backbone=SimpleNamespace(kind="timm"))
            view = SimpleNamespace(crop_px=int(px))
            model = SimpleNamespace(config=config, view=view, num_features=8)
            found[name] = Candidate(name, name, model, ms=1.0, megabytes=1.0)
        return found

    for parts, is_usual in (
        (("a@64", "a@96"), True),
        (("a@96", "b@96"), False),
        (("a@96",), False),
    ):
        row = Ranked(parts, 0.25, score=0.5, values={}, more={}, p=1.0)
        advice, *_ = pages.answer(
            [row], row, found_of("a@64", "a@96", "b@96"), lacking="none has any"
        )
        assert row.name in advice
        assert ("--px twice" in advice, "50.0%" in advice) == (not is_usual, not is_usual)


@pytest.mark.promise(14)
def test_images_that_fit_a_flattening_still_find_their_class_by_it():
    """Of no more images than features a full whitening makes all orthogonal: none is near."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(4)
    names = {"narrow": 24, "wide": 40, "wider": 64}
    features = {}
    for name, width in names.items():
        centres = torch.randn(12, width, generator=draw)
        noise = 0.6 * torch.randn(len(labels), width, generator=draw)
        features[name] = rows_of(centres[labels] + noise, labels)
    sets = [*((name,) for name in names), ("narrow", "wide")]
    all_forms = rank_with_labels(features, sets)
    kept = ranking.for_these_images(all_forms, features)
    forms = {parts: {row.power for row in kept if row.parts == parts} for parts in sets}
    assert forms == {
        ("narrow",): {None, *POWERS},
        ("wide",): {None, *POWERS},
        ("wider",): {None, 0.25},
        ("narrow", "wide"): {None, 0.25},
    }
    assert kept == [row for row in all_forms if row.power in forms[row.parts]]
    for row in kept:
        together = ranking.side_by_side(features, row.parts)
        if row.power is not None:
            together = fit_whitening(together, power=row.power)(together)
        unit = F.normalize(together.features.double(), dim=1)
        near = (unit @ unit.T).fill_diagonal_(-2).argmax(dim=1)
        assert (labels[near] == labels).double().mean() > 0.8, row.name


def ranked_row(parts, power, score, more, *, low, p=1.0):
    """A row whose MAP@R differs by `more` from the best single network's."""
    difference = Difference(more, (low, 2 * more - low), p, 9, "classes")
    return Ranked(parts, power, score, {"MAP@R": 0.5 + more}, {"MAP@R": difference}, p)


PLAIN = ranked_row(("a",), None, 0.5, 0.0, low=0.0)
SIZES = ranked_row(("a", "A"), 0.25, 0.4, 0.01, low=-0.1)
OTHER = ranked_row(("a", "A"), 1.0, 0.3, 0.02, low=-0.1)


@pytest.mark.promise(14)
@pytest.mark.parametrize(
    ("first", "of_many", "of_few"),
    [
        # what is clearly better is used, whoever chose
        (ranked_row(("a", "b"), 0.5, 0.6, 0.1, low=0.05, p=0.01), "first", "first"),
        # clear alone, but not among all rows
        (ranked_row(("a", "b"), 0.5, 0.6, 0.1, low=0.05, p=0.2), "first", SIZES),
        (ranked_row(("a", "b"), 0.5, 0.6, 0.1, low=-0.05), "first", SIZES),
        # first on the classes that chose, and no better or clearly worse on the others
        (ranked_row(("a", "b"), 0.5, 0.6, -0.1, low=-0.3), PLAIN, SIZES),
        (ranked_row(("a", "b"), 0.5, 0.6, 0.0004, low=-0.3), PLAIN, SIZES),  # printed as +0.0
        (ranked_row(("a", "b"), 0.5, 0.6, -0.1, low=-0.15, p=0.01), PLAIN, SIZES),
    ],
)
def test_what_is_not_better_on_other_classes_is_not_used(first, of_many, of_few):
    ranked = [first, PLAIN, SIZES, OTHER]
    assert to_use(ranked) is (first if of_many == "first" else of_many)
    assert to_use(ranked, [("a", "A")]) is (first if of_few == "first" else of_few)
    assert to_use([PLAIN, SIZES, OTHER]) is PLAIN
    assert to_use([PLAIN, OTHER], [("a", "A")]) is PLAIN  # no such form was ranked
    run = PLAIN._replace(parts=("run",), score=0.55)  # not that of a network that is behind
    assert to_use([run, PLAIN, SIZES], [("a", "A")]) is run
    unlabelled = [row._replace(values={}, more={}) for row in (PLAIN, OTHER, SIZES)]
    assert to_use(unlabelled) is unlabelled[0]
    assert to_use(unlabelled, [("a", "A")]) is unlabelled[2]


@pytest.mark.promise(14)
def test_vectors_made_elsewhere_are_ranked_as_networks_are():
    features = planted()
    names = ("left", "right", "good")
    labels = features["good"].labels
    sets = [("left",), ("right",), ("good",), ("left", "right"), ("left", "good")]
    expected = rank_with_labels(features, [*sets, ("right", "good")])
    arrays = {name: features[name].features.double().numpy() for name in names}
    texts = np.array([f"{label:02}" for label in labels.tolist()])  # in the order of the numbers
    for found in (
        sslpipe.rank_features(arrays, texts),
        sslpipe.rank_features({name: features[name].features for name in names}, labels),
        sslpipe.rank_features({name: features[name] for name in names}, labels),
    ):
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert [row.score for row in found] == [row.score for row in expected]
    assert str(found[0]).startswith(f"{found[0].name}: score ")
    for wrong, message in (
        (arrays["good"], "no dictionary"),
        ({}, "no dictionary"),
        ({"good": [[1.0], [1.0, 2.0]]}, "good_features must be floats"),
        ({"good": ["a.jpg"] * 240}, "good_features must be floats"),
        ({"good": arrays["good"], "few": arrays["left"][:9]}, "few_features has 9 rows"),
        ({"good": np.ones((240, 3))}, "good gives all 240 images the same features"),
        (
            {"good": np.full((240, 3), np.nan)},
            r"good: features\[0\] is not finite, as are 240 of 240",
        ),
    ):
        with pytest.raises(UserError, match=message):
            sslpipe.rank_features(wrong, texts)
    with pytest.raises(UserError, match="labels cannot rank: 2 classes have two images"):
        sslpipe.rank_features(arrays, np.arange(240) % 2)


def test_training_takes_the_part_of_a_join_that_is_best_alone():
    rows = [("a", "b"), ("b",), ("a", "c"), ("a",), ("b",), ("c",)]  # the best first
    ranked = [Ranked(parts, None, 1.0 - place, {}, {}, 1.0) for place, parts in enumerate(rows)]
    assert best_first(("a", "b"), ranked) == ("b", "a")
    assert best_first(("a", "c"), ranked) == ("a", "c")
    assert best_first(("c",), ranked) == ("c",)


@pytest.mark.parametrize(("low", "by_all_rows"), [(0.01, True), (-0.01, False)])
def test_an_interval_above_zero_that_is_not_clear_says_why(low, by_all_rows):
    def row(parts, interval, p):
        more = {"MAP@R": Difference(0.1, interval, 0.04, "classes", 9)}
        return ranking.Ranked(parts, None, 0.5, {"MAP@R": 0.5}, more, p)

    plain = row(("a",), (0.0, 0.0), 1.0)
    best = row(("a", "b"), (low, 0.2), 0.2)
    said = pages._advice(best, best, plain, "9 classes", None)
    assert "not clearly" in said
    assert ("compared at once" in said) == by_all_rows


@pytest.mark.parametrize("more", [0.0004, -0.1])
def test_few_labels_and_no_gain_are_not_called_better(more):
    sizes = ranked_row(("a", "A"), 0.25, 0.6, more, low=-0.3)  # first, and the usual guess
    ranked = [sizes, PLAIN]
    best = to_use(ranked, [("a", "A")])
    assert best is sizes
    said = pages._advice(sizes, best, PLAIN, "9 classes", 80)
    assert said.startswith(f"Use {sizes.name}: 80 labelled images are too few to choose by")
