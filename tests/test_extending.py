"""docs/extending.md and metric-learning.md: examples run, and are in the tables afterwards."""

import ast
import builtins
import importlib.util
import re
import sys
import tomllib

import pytest
import torch
import torch.nn.functional as F

from sslpipe.augment.ops import OPS
from sslpipe.augment.two_views import KorniaViews, TwoViews
from sslpipe.cli.explain import explain
from sslpipe.errors import RecipeError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.evals import EVALS
from sslpipe.losses import LOSSES
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.losses import METRIC_LOSSES
from sslpipe.metric_learning.miners import MINERS
from sslpipe.models.backbones import BACKBONES
from sslpipe.parts import build_loss
from sslpipe.recipe.reading import load_recipe
from sslpipe.registry.schema import settings_class
from sslpipe.run.trackers import TRACKERS
from sslpipe.satellites import NEEDED
from sslpipe.sharding.readers import SOURCES
from sslpipe.sharding.sources import SourceOptions
from tests.helpers.dataset import picture, png
from tests.helpers.runs import RECIPE, ROOT, write_recipe

EXTENDING = (ROOT / "docs/extending.md").read_text()
TEXT = "\n".join([EXTENDING, (ROOT / "docs/metric-learning.md").read_text()])
TABLES = (LOSSES, METRIC_LOSSES, HEADS, MINERS, BACKBONES, SOURCES, EVALS, TRACKERS)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run_examples(tmp_path_factory):
    """Run every Python block, one after the other, as one module of `--plugin`."""
    before = [dict(table) for table in TABLES], list(OPS)
    path = tmp_path_factory.mktemp("parts") / "my_parts.py"
    path.write_text("\n".join(blocks("python")))
    spec = importlib.util.spec_from_file_location("my_parts", path)
    sys.modules["my_parts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["my_parts"])
    yield
    del sys.modules["my_parts"]
    for table, entries in zip(TABLES, before[0], strict=True):
        table.clear()
        table.update(entries)
    OPS[:] = before[1]


@pytest.mark.parametrize("block", re.findall(r"(?s)^```python\n(.*?)^```", EXTENDING, re.MULTILINE))
def test_a_block_of_the_page_works_as_a_file_of_its_own(block):
    tree = ast.walk(ast.parse(block))
    names = [node for node in tree if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {*dir(builtins)}
    for node in ast.walk(ast.parse(block)):
        bound |= {node.arg} if isinstance(node, ast.arg) else set()
        bound |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
        bound |= {each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {each.asname or each.name for each in node.names}
    assert not {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound


def make(table, kind: str, **arguments):
    given = {"num_classes": 3, "dim": 4} if table is HEADS else {"crop_px": 16}
    return settings_class(table, kind)(**arguments).build(**given)


@pytest.mark.usefixtures("run_examples")
def test_the_objectives_have_a_value_and_a_gradient():
    for kind in ("margin_nt_xent", "alignment"):
        z_a, z_b = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
        objective = make(LOSSES, kind)
        objective(z_a, z_b, ids=torch.arange(6), labels=torch.full((6,), -1)).backward()
        assert z_a.grad.abs().sum() > 0
        assert objective.stats()


@pytest.mark.usefixtures("run_examples")
def test_a_recipe_builds_the_objective_that_takes_no_arguments(tmp_path):
    recipe = write_recipe(tmp_path, RECIPE.replace('"nt_xent"\ntemperature = 0.2', '"alignment"'))
    assert build_loss(load_recipe(recipe)).stats() == {"view_distance": 0}
    with pytest.raises(RecipeError, match=r"unknown key loss\.temperature; known here: kind$"):
        load_recipe(recipe, ["loss.temperature=0.2"])


@pytest.mark.usefixtures("run_examples")
def test_the_margin_is_taken_off_the_positive_and_refused_below_0():
    z_a, z_b = torch.randn(6, 4), torch.randn(6, 4)
    value = make(LOSSES, "margin_nt_xent", margin=0.2, temperature=0.5)(z_a, z_b)
    views = F.normalize(torch.cat([z_a, z_b]))
    cosines = views @ views.T
    positive = torch.arange(12).roll(6)
    cosines[torch.arange(12), positive] -= 0.2
    logits = (cosines / 0.5).fill_diagonal_(-torch.inf)
    assert value == pytest.approx(F.cross_entropy(logits, positive).item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"margin = -1\.0: .* greater than or equal to 0$"):
        LOSSES["margin_nt_xent"](margin=-1.0)
    assert "margin_nt_xent (objective): What is taken off" in explain("loss.margin")


@pytest.mark.usefixtures("run_examples")
def test_the_augmentation_cuts_the_same_square_out_of_a_view_as_its_reference():
    images = torch.randint(1, 256, (8, 3, 20, 20), dtype=torch.uint8)
    settings = {"preset": "simclr_small", "crop_px": 16, "jitter_prob": 0.0}
    plain, _ = TwoViews(**settings)(images)
    settings |= {"cutout_prob": 1.0, "cutout_side": 0.5}
    cut, _ = TwoViews(**settings)(images)
    by_kornia = TwoViews(**settings)
    by_kornia.views = KorniaViews(**settings)
    reference, _ = by_kornia(images)
    hidden = (cut == 0).all(1)
    assert hidden.any()
    assert hidden.flatten(1).sum(1).max() <= 8 * 8
    assert torch.equal(hidden, (reference == 0).all(1))
    assert torch.equal(cut, plain.masked_fill(hidden[:, None], 0))


@pytest.mark.usefixtures("run_examples")
def test_the_parts_of_metric_learning_compute():
    embeddings, labels = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2])
    loss = make(METRIC_LOSSES, "cosine_pairs", margin=1.0)
    pairs = loss(embeddings, labels, miner=make(MINERS, "near"))
    (pairs + make(HEADS, "linear")(embeddings, labels)).backward()
    assert embeddings.grad.abs().sum() > 0


@pytest.mark.usefixtures("run_examples")
def test_backbone_source_evaluation_and_tracker_work(tmp_path, capsys):
    backbone = make(BACKBONES, "one_layer", width=5)
    assert backbone(torch.randn(2, 3, 16, 16)).shape == (2, backbone.num_features)
    (tmp_path / "a.png").write_bytes(png(picture(0)))
    (images,) = SOURCES["pngs"](SourceOptions(root=tmp_path)).values()
    assert images.read(0) == png(picture(0))
    rows = Embeddings(torch.randn(4, 3), torch.arange(4), torch.arange(4))
    (result,) = EVALS["nearest"](rows, rows, power=1.0)
    assert result.value == 1
    tracker = TRACKERS["printer"]("tiny", tmp_path)
    tracker.log({"loss": 1.0}, step=3)
    assert capsys.readouterr().out == "3 {'loss': 1.0}\n"


def test_the_entry_points_are_those_of_a_package_that_a_test_installs():
    trees = (tomllib.loads(text)["project"]["entry-points"] for text in blocks("toml"))
    shown, of_satellites = trees
    assert {*of_satellites} <= {f"sslpipe.{name}" for name in NEEDED}
    path = ROOT / "tests" / "helpers" / "plugin_package" / "pyproject.toml"
    installed = tomllib.loads(path.read_text())["project"]["entry-points"]
    assert {*shown} == {"sslpipe.augmentations", *(table.group for table in TABLES)}
    for group, entries in shown.items():
        assert entries.items() <= installed[group].items()
