"""What `check --explain` says of the settings of a fine-tuning."""

import pytest

from sslpipe.cli.explain import explain
from sslpipe.errors import RecipeError


def test_what_stands_elsewhere_is_explained_as_it_is_there():
    assert "head: arcface" in explain("loss.kind")
    assert "head: arcface" in explain("also.loss.kind")
    assert explain("also.loss.margin").splitlines()[1:] == explain("loss.margin").splitlines()[1:]
    assert "default: 1.0" in explain("also.weight")
    assert "cutoff" in explain("miner")  # a section lists the arguments of its kinds


def test_a_setting_of_fine_tuning_is_among_the_nearest():
    with pytest.raises(RecipeError, match=r"tune\.loss_lr"):
        explain("tune.head_lr")
