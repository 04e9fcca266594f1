"""Images to a gallery with nothing but the wheel: run by its environment, outside the clone.

python wheel_smoke.py PROGRAM: the `sslpipe` of that environment, in an empty folder.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import sslpipe

RECIPE = """
name = "smoke"
seed = 0
[augment]
kind = "fused"
preset = "simclr_small"
crop_px = 24
[backbone]
kind = "small_resnet"
widths = [8, 16]
[optim]
kind = "adamw"
peak_lr = 0.005
"""
PRETRAIN = """
steps = 20
[data]
batch_size = 32
num_streams = 4
canvas_px = 24
[projector]
hidden_dim = 32
out_dim = 16
[loss]
kind = "nt_xent"
"""
FINETUNE = """
steps = 20
[data]
canvas_px = 24
[sampler]
classes_per_batch = 4
images_per_class = 4
buffer = 64
[embedding]
dim = 16
[loss]
kind = "arcface"
"""


def write_images(folder: Path, classes: int = 6, each: int = 50) -> None:
    """Write PNGs: a pattern a class, with noise; and strangers, of no class."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        pattern = rng.integers(0, 200, (28, 30, 3))
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            pixels = (pattern + rng.integers(0, 50, pattern.shape)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")
    strangers = folder.with_name("strangers")
    strangers.mkdir()
    for number in range(20):
        pixels = rng.integers(0, 250, (28, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(strangers / f"{number}.png")


def run(program: str, text: str) -> str:
    """Run one command as a user types it, and show it."""
    print(f"$ sslpipe {text}", flush=True)
    done = subprocess.run([program, *text.split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nsslpipe {text}: status {done.returncode}")
    return done.stdout


def main(program: str) -> None:
    """Every command of the wheel, each on what the one before it left."""
    assert "site-packages" in sslpipe.__file__, sslpipe.__file__
    for name in ("tools", "tests", "pytest", "lightly"):  # of the clone, or not in the default
        assert importlib.util.find_spec(name) is None, name
    write_images(Path("images"))
    top, sections = RECIPE.split("[augment]")
    for name, own in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        Path(f"{name}.toml").write_text(top + own + "[augment]" + sections)

    data = "--data data/dataset.json --num-workers 0"
    assert "shards" in run(program, "--help")
    run(program, "shards build data --root images --test-fraction 0.2 --samples-per-shard 60")
    run(program, "shards verify data")
    run(program, "check pretrain.toml --data data/dataset.json")
    run(program, "preview pretrain.toml --data data/dataset.json --out run/views.png")
    run(program, "train pretrain.toml --data data/dataset.json --run-dir run")
    assert json.loads(run(program, "status run --json"))["state"] == "done"
    for split in ("train", "test"):
        run(program, f"embed run {data} --split {split} --out run/features/{split}.safetensors")
    run(program, f"evaluate suite run {data} --out run/eval.json")
    run(program, "evaluate knn run/features/train.safetensors run/features/test.safetensors --k 5")
    run(program, "report run --data data/dataset.json")
    page = Path("run/report.html").read_text()
    assert "<style>" in page
    assert "python -m" not in page

    recipes = Path(sslpipe.__file__).parent / "recipes"  # which the next command is named with
    run(program, f"check {recipes / 'my_images_diet.toml'} data.holdout=0 --data data/dataset.json")

    run(program, "export run --out backbone")
    images = np.random.default_rng(1).integers(0, 255, (2, 3, 24, 24)).astype(np.uint8)
    features = sslpipe.load_backbone("backbone").encode(__import__("torch").from_numpy(images))
    assert features.shape == (2, 16)
    run(program, f"embed backbone {data} --split train --out train.safetensors")
    run(program, "whiten backbone train.safetensors --dims 8")
    start = "finetune.toml --data data/dataset.json --init run --run-dir tuned"
    run(program, f"train {start}")
    script = run(program, f"slurm {start} --nodes 2")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    run(program, "gallery enrol book.safetensors images --model tuned")
    run(program, "gallery calibrate book.safetensors strangers --model tuned --far 0.05")
    said = run(program, "gallery identify book.safetensors images/class3/7.png --model tuned")
    assert len(said.split("\t")) == 3, said
    print(f"sslpipe from {sslpipe.__file__}: images to a gallery, without a clone")


if __name__ == "__main__":
    main(sys.argv[1])
