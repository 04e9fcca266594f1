"""What the suite says first: one number against the best alternative, and the next step."""

import pytest

from sslpipe.evaluation.advice import advise
from sslpipe.evaluation.comparison import BASELINES
from sslpipe.evaluation.verdict import verdict
from tests.evaluation.test_verdict import beside_baselines, compared


def row(features, value, **changed):
    base = {
        "features": features, "whitened": False, "column": "kNN", "protocol": "p", "metric": "top1",
        "value": value, "interval95": [value - 0.02, value + 0.02], "queries": 400, "bank": 50,
        "details": {},
    }  # fmt: skip
    return base | changed


def evaluation(*rows, against=(), **facts):  # intervals of 2 points are of 2,400 images
    return {
        "facts": facts, "columns": ["kNN"], "rows": list(rows), "left_out": [],
        "against": list(against), "baselines": beside_baselines(rows, total=2400),
    }  # fmt: skip


def unclear(difference, low, high, **changed):
    numbers = {"difference": difference, "interval95": [low, high], "count": 400}
    return compared(answer="no clear difference", **numbers, **changed)


WORSE = {"answer": "worse", "difference": -0.08, "interval95": [-0.1, -0.06]}
FLAT = {"whitened": True, "against_whitened": True, "power": 0.25}  # theirs: 1
STEPS = {"step": 4, "steps": 10}


@pytest.mark.parametrize(
    ("against", "facts", "answer", "step"),
    [
        ([compared()], {}, "Better than lite0: +8.0 points of kNN accuracy (95 %", "use it;"),
        ([compared(start=True)], {}, "Better than lite0, which it started from: +8.0", "use it;"),
        ([compared(**WORSE)], {}, "Worse than lite0: -8.0 points", "use lite0:"),
        ([compared(start=True, **WORSE)], {}, "Worse than lite0, which", "use the start, lite0:"),
        # (0.03 / 0.02)^2 of 400 images, and no number where there is no gain, or hardly one
        ([unclear(0.02, -0.01, 0.05)], {}, "No clear difference from lite0: +2.0", "about 900 "),
        ([unclear(0.001, -0.03, 0.032)], {}, "No clear", "use lite0, or train longer: 400 test im"),
        ([unclear(-0.02, -0.05, 0.01, start=True)], {}, "No clear", "use the start, lite0, or"),
        # nothing is above 100 %
        ([unclear(0, -0.1, 0.1, against_value=1.0)], {}, "No clear", "harder test images"),
        ([compared()], STEPS, "Better than lite0", "finish the training"),
        ([compared()], {**STEPS, "checkpoint": "step-4"}, "Better than lite0", "use it;"),
        # of several the best one that there is, but baselines only where nothing else was measured
        ([compared(), unclear(0, -0.1, 0.1, against="w", against_value=0.7)], {}, "No clear", "w,"),
        ([compared(against_value=0.2), compared(against="random")], {}, "Better than lite0", "use"),
        ([compared(against="random")], {}, "Better than random weights", "compare with weights"),
        (
            [compared(**FLAT)],
            {},
            "Better than lite0: +8.0 points of kNN accuracy, flattened",
            "`sslpipe whiten export",
        ),
        ([compared(against="pixels", **WORSE)], {}, "Worse than raw pixels", "alarms say."),
        # too few test images to tell: half of the interval
        (
            [unclear(-0.02, -0.158, 0.118, against="pixels")],
            {},
            "Not clearly better than raw pixels",
            "say; 400 test images show no difference below 13.8 points.",
        ),
        (
            [unclear(0.0, -1.0, 1.0, against="pixels")],
            {},
            "Not clearly better than raw pixels",
            "show no difference below 100 points.",
        ),
        # both are right on the same images
        (
            [unclear(0.0, 0.0, 0.0, against="pixels")],
            {},
            "Not clearly better than raw pixels",
            "alarms say.",
        ),
    ],
)
def test_one_number_against_the_best_alternative_and_what_to_do(against, facts, answer, step):
    report = evaluation(row("ssl", 0.7), **facts)
    for each in against:
        report["baselines" if each["against"] in BASELINES else "against"].append(each)
    found = advise(report)
    assert found.answer.startswith(answer)
    assert found.answer.count("interval") == 1
    assert "Next" not in found.next_step  # the command that comes next is a line of its own
    assert found.next_step[0].isupper()
    assert step in found.next_step.lower()
    assert all(text.endswith(".") and "\n" not in text for text in found)


def test_without_other_networks_the_better_baseline_is_what_counts():
    found = advise(evaluation(row("ssl", 0.9), row("random", 0.3), row("pixels", 0.5)))
    assert found.answer.startswith("Better than raw pixels: +40.0 points of kNN accuracy")
    assert "against=SOURCE" in found.next_step
    below = advise(evaluation(row("ssl", 0.4), row("random", 0.3), row("pixels", 0.5)))
    assert below.answer.startswith("Worse than raw pixels: -10.0 points")
    assert "train longer" in below.next_step.lower()


def test_of_a_baseline_that_has_all_images_right_no_longer_training_is_asked():
    found = advise(evaluation(row("ssl", 1.0), row("random", 1.0)))
    assert found.answer.startswith("Not clearly better than random weights")
    assert "harder test images" in found.next_step
    assert "Train longer" not in found.next_step


def test_a_network_below_raw_pixels_is_not_to_be_used_though_it_beats_another_one():
    rows = (row("ssl", 0.57), row("pixels", 0.62), row("random", 0.5))
    found = advise(evaluation(*rows, against=[compared()]))
    assert found.answer.startswith("Better than lite0")
    assert found.next_step == "Train longer: raw pixels are better still."
    assert advise(evaluation(*rows[::2], against=[compared()])).next_step.startswith("Use it")


def test_without_anything_beside_it_the_number_stands_alone_and_says_so():
    found = advise(evaluation(row("ssl", 0.9)))
    assert found.answer.startswith("kNN accuracy 90.0 % (95 % interval 88.0 to 92.0)")
    assert "not known" in found.answer
    assert "against=SOURCE" in found.next_step
    assert "not known" in advise(evaluation()).answer


def test_weights_that_are_their_own_start_are_not_to_be_compared_with_it_again():
    kept = {"step": 0, "steps": 10, "checkpoint": "step-0"}
    for rows in ([row("ssl", 0.9)], [row("ssl", 0.9), row("random", 0.5)]):
        assert advise(evaluation(*rows, **kept)).next_step.startswith("Train longer")


@pytest.mark.parametrize(("right", "clear"), [(0.62, False), (0.7, True)])
def test_the_first_sentence_and_the_verdict_agree_on_what_is_clear(right, clear):
    report = evaluation(row("ssl", right), row("random", 0.6))
    found = advise(report)
    assert found.answer.startswith("Better than random" if clear else "Not clearly")
    assert verdict(report).startswith("Better than random") is clear
    assert verdict(report).startswith("Not clearly better") is not clear
    assert found.next_step.startswith("Compare" if clear else "Train longer")


def test_why_a_gain_over_a_baseline_is_not_clear_is_said_first_too():
    flat = [row("ssl", 0.6, whitened=True), row("random", 0.69, whitened=True)]
    report = evaluation(row("ssl", 0.7), row("random", 0.6), *flat)
    answer = advise(report).answer
    assert answer.startswith("Not clearly better than random weights: +10.0 points of kNN acc")
    assert answer.endswith("; the other way round if both are taken flattened (power 1)).")


@pytest.mark.parametrize(
    ("against", "step"),
    [("pixels", "Train longer, or see what the report's alarms say."), ("lite0", "Use lite0, or")],
)
@pytest.mark.parametrize("difference", [0.08, -0.08])
def test_no_test_image_is_asked_for_where_the_other_form_decides(against, step, difference):
    """The interval is clear of 0: that the images show no difference would be wrong."""
    other = {"p": 0.001, "other_form_difference": -difference, "other_form_value": 0.7}
    report = evaluation(row("ssl", 0.7))
    held = unclear(difference, difference - 0.02, difference + 0.02, against=against, **other)
    report["baselines" if against in BASELINES else "against"].append(held)
    found = advise(report)
    assert "; the other way round if both are taken flattened" in found.answer
    assert found.next_step.startswith(step)
    assert "test images" not in found.next_step


@pytest.mark.parametrize(("difference", "half", "images"), [(0.1, 0.2, "about 1,600 "), (0, 1, "")])
def test_a_gain_over_a_baseline_on_few_images_asks_for_more_of_them(difference, half, images):
    """400 images, and (half / difference)^2 times as many would have half the gain's interval."""
    report = evaluation(row("ssl", 0.7))
    report["baselines"] = [
        unclear(difference, difference - half, difference + half, against="random")
    ]
    found = advise(report)
    assert found.answer.startswith("Not clearly better than random")
    assert found.next_step.startswith("Train longer")
    assert images in found.next_step
    assert ("more test images" in found.next_step) == bool(images)
