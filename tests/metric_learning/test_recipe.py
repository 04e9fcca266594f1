"""The settings of a fine-tuning."""

from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.recipe import FinetuneRecipe


def test_the_usual_kind_of_each_section_is_one_of_its_table():
    for section, table in (("loss", {**METRIC_LOSSES, **HEADS}), ("miner", MINERS)):
        (usual,) = FinetuneRecipe.model_fields[section].examples
        assert usual in table, section
