"""A tiny run and its export, for trying the wheel elsewhere: python -m
tests.helpers.tiny_export FOLDER."""

import shutil
import sys
from pathlib import Path

import torch

from sslpipe.data.index import load_index
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_backbone
from sslpipe.recipe import load_recipe
from sslpipe.train import train
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe


def main(folder: Path) -> None:
    data = write_dataset(folder / "data")
    recipe = load_recipe(write_recipe(folder), ["steps=2"])
    train(recipe, load_index(data), folder / "run")
    export_backbone(folder / "run", folder / "backbone", ("safetensors",))
    images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).remainder(256).to(torch.uint8)
    torch.save(load_backbone(folder / "backbone").encode(images), folder / "backbone.features.pt")
    shutil.copy(Path(__file__).parent / "wheel_smoke.py", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
