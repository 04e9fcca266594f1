"""Imports point downwards, packages do not import in circles, each outside library has one home."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Folders that can be deleted: no row imports them, and none imports another.
SATELLITES = ("curate", "metric_learning", "search", "sensors")

# A module imports only from rows under its own, and from its own package.
ROWS = (
    ("tools", "__main__"),
    SATELLITES,
    ("cli",),
    ("api",),
    ("kinds",),
    ("check", "report"),
    ("plan",),
    ("parts", "planning"),
    ("export",),
    ("weights",),
    ("pretrain",),
    ("run",),
    ("evaluation",),
    ("augment", "sharding"),
    ("losses", "models", "optim"),
    ("data",),
    ("recipe",),
    ("registry", "distributed", "gradients", "random", "satellites"),
    ("arguments", "files"),
    ("errors", "faults", "portable", "precision"),
)
HEIGHT = {name: -number for number, row in enumerate(ROWS) for name in row}

HOMES = {
    "kornia": ("augment", "run"),  # run: its version, for the record
    "webdataset": ("data", "sharding", "run"),
    "fsspec": ("data",),
    "simplejpeg": ("data",),
    "accelerate": ("run",),
    "typer": ("__main__", "cli", *SATELLITES),
    "timm": ("models", "export", "weights"),
    "torchvision": ("models", "data", "augment", "export", "sharding", "run", "weights", "tools"),
    "onnx": ("export",),
    "onnxruntime": ("export",),
    "huggingface_hub": ("export", "weights"),
    "open_clip": ("models",),
    "transformers": ("models", "export", "weights"),
    "wandb": ("run",),
    "pytorch_metric_learning": ("metric_learning",),
    **dict.fromkeys(("tifffile", "imagecodecs", "pydicom", "nibabel"), ("sensors",)),
}
EAGERLY = (  # only where used
    *("pytorch_metric_learning", "wandb", "matplotlib", "tensorboard"),
    *(
        "onnx",
        "onnxruntime",
        "open_clip",
        "transformers",
        "tifffile",
        "imagecodecs",
        "pydicom",
        "nibabel",
    ),
)


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


def test_imports_point_downwards_and_each_outside_library_has_its_home():
    for path in FILES:
        part = part_of(path)
        for module, at_top in imports(path):
            library, _, rest = module.partition(".")
            assert library != "tools" or part == "tools", f"{path} imports {module}"
            other = rest.partition(".")[0]
            if library == "sslpipe" and rest and other != part:
                message = f"{path} imports {module}, which is not under {part}"
                assert HEIGHT[other] < HEIGHT[part], message
            if library in HOMES:
                assert part in HOMES[library], f"{path} imports {library}"
            lazy = not (at_top and library in EAGERLY)
            assert lazy, f"{path} imports {library} when it is loaded"


# Who executes a plan knows none of those that make one: what pretrain.py reaches has nothing of
# these, and of the packages below no more than these modules.
MAKERS = (
    *("api", "check", "cli", "report", *SATELLITES, "satellites", "kinds"),
    *("plan", "parts", "planning", "augment", "losses", "export", "weights", "sharding"),
)
EXECUTED = {
    "data": (
        *("columns", "decode", "image_type", "index", "loader", "order", "partners", "pipeline"),
        *("reader", "storage"),
    ),
    "evaluation": ("label_free",),
    "models": ("state", "sync_batchnorm"),
    "optim": ("lars", "step"),
    "recipe": ("identity", "sections"),
    "registry": ("plugins", "schema"),
}


def files_of(module: str) -> list[Path]:
    """The files that importing a module runs, if it is one of sslpipe."""
    names = module.split(".")
    paths = [ROOT.joinpath(*names[:end]) for end in range(1, len(names) + 1)]
    files = [path / "__init__.py" for path in paths] + [paths[-1].with_suffix(".py")]
    return [file for file in files if file in FILES]


def reached_from(start: Path) -> set[Path]:
    """All files that a file's imports need, those inside functions too."""
    reached: set[Path] = set()
    open_files = [start]
    while open_files:
        path = open_files.pop()
        if path in reached:
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    open_files += files_of(alias.name)
            elif isinstance(node, ast.ImportFrom):
                open_files += files_of(node.module)
                for alias in node.names:  # a module of a package, or a name
                    open_files += files_of(f"{node.module}.{alias.name}")
    return reached


def test_a_pretraining_reaches_no_maker_of_plans():
    reached = reached_from(ROOT / "sslpipe" / "pretrain.py")
    assert ROOT / "sslpipe" / "data" / "decode.py" in reached
    for path in reached:
        part = part_of(path)
        assert part not in MAKERS, f"{path} is reached from pretrain.py"
        if part in EXECUTED and path.name != "__init__.py":
            assert path.stem in EXECUTED[part], f"{path} is reached from pretrain.py"


def test_the_architecture_page_has_every_row_in_its_order():
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The layers")[2]
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("\n## ")[0], re.MULTILINE)
    shown = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert shown == [set(SATELLITES), {"cli", "tools"}, *map(set, ROWS[3:])]


def test_every_part_has_a_row():
    assert {part_of(path) for path in FILES} == set(HEIGHT)


def test_the_core_names_no_satellite_for_a_later_import():
    """A module in a string, which something imports afterwards, is an import, too."""
    modules = re.compile(rf"\bsslpipe\.({'|'.join(SATELLITES)})\b")
    for path in FILES:
        if part_of(path) in (*SATELLITES, "tools"):
            continue
        tree = ast.parse(path.read_text())
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in prose:
                assert not modules.search(str(node.value)), f"{path}:{node.lineno}"
