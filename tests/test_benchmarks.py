"""The benchmarks that check what they show: they must not break unseen."""

from benchmarks.view_parity import COMPARISONS, SIDES, op_table
from benchmarks.views import CONTENDERS, markdown, table


def test_every_op_of_the_table_is_within_what_it_allows() -> None:
    assert len(op_table()) == 2 + len(COMPARISONS) * len(SIDES)  # it refuses one that is not


def test_the_table_of_speeds_shows_ratios_to_each_peer() -> None:
    speeds = dict.fromkeys(CONTENDERS, 10.0) | {"ours": 60.0, "kornia, slice": 20.0}
    speeds |= {"torchvision, PIL": 15.0, "lightly": 30.0}
    rows = [
        {"case": "tiny", "contender": name, "images_per_s": speed, "noise": 0.01}
        for name, speed in speeds.items()
    ]
    assert "| ours | 60 | 1% | 3.0 | 4.0 | 2.0 |" in table(rows)
    assert "torch 9.9, kornia 1.2.\n\n## tiny\n" in markdown(
        {"machine": {"torch": "9.9", "kornia": "1.2"}, "results": rows}
    )
