"""Imports point downwards, and each outside library has one home."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports only from rows under its own, and from its own package.
ROWS = (
    ("tools", "__main__"),
    ("check", "finetune_check", "status"),
    ("train", "loop", "setup", "start", "finetune", "finetune_setup", "gallery"),
    ("export", "formats", "frozen", "model_card", "proof"),
    ("evaluation", "checkpoint", "log", "ops", "guard", "meter", "quarantine", "estimate"),
    ("augment", "gradient_cache", "metric_learning"),
    ("data", "losses", "models", "optim", "health", "batchnorm", "flops"),
    ("distributed", "stateless", "registry", "finetune_recipe"),
    ("recipe",),
    ("errors", "faults"),
)
HEIGHT = {name: -number for number, row in enumerate(ROWS) for name in row}
TOGETHER = (
    {"train", "loop", "setup", "start", "finetune", "finetune_setup"},
    {"export", "formats", "frozen", "model_card", "proof"},
    {"log", "quarantine"},
    {"check", "finetune_check"},
)  # one part in several files

HOMES = {
    "kornia": ("augment", "start"),  # start: its version, for the record
    "webdataset": ("data", "tools", "start"),
    "fsspec": ("data",),
    "simplejpeg": ("data",),
    "accelerate": ("start", "log"),
    "faiss": ("evaluation",),
    "typer": ("__main__", "tools"),
    "timm": ("models", "formats", "proof", "start"),
    "torchvision": ("models", "data", "augment", "formats", "proof", "tools", "start"),
    "onnx": ("formats",),
    "onnxruntime": ("proof",),
    "huggingface_hub": ("model_card",),
    "wandb": (),  # through accelerate
    "pytorch_metric_learning": ("metric_learning",),
}
EAGERLY = (
    "faiss",
    "pytorch_metric_learning",
    "wandb",
    "matplotlib",
    "tensorboard",
    "trackio",
    "onnx",
    "onnxruntime",
)  # only where used


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "tools":
        return "tools"
    return relative.parts[1].removesuffix(".py")


def imports(path: Path):
    """(module, whether at the top of the file) for each import."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in top


FILES = sorted(
    path
    for folder in ("sslpipe", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "sslpipe" / "__init__.py"  # the public names
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    part = part_of(path)
    assert part in HEIGHT, f"{part} is in no row of ROWS; give it one"
    for module, _ in imports(path):
        if module.split(".")[0] == "tools":
            assert part == "tools", f"{path} imports {module}"
        if module.startswith("sslpipe."):
            other = module.split(".")[1]
            if other == part or any({part, other} <= group for group in TOGETHER):
                continue
            assert HEIGHT[other] < HEIGHT[part], f"{part} imports {module}, which is not under it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_outside_library_has_its_home(path):
    part = part_of(path)
    for module, at_top in imports(path):
        library = module.split(".")[0]
        if library in HOMES:
            assert part in HOMES[library], f"{part} imports {library}"
        assert not (at_top and library in EAGERLY), f"{path} imports {library} when it is loaded"


def test_no_python_file_of_the_library_reads_slurm_variables():
    for path in FILES:
        assert "SLURM_" not in path.read_text(), path
