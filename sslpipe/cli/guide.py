"""What to type next: the commands of a normal day, and the last line of every `--help`."""

from typing import Any

DAY = (
    ("sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1", "images -> shards"),
    ("sslpipe check RECIPE --data out/photos/dataset.json", "what a training will do and cost"),
    (
        "sslpipe train RECIPE --data out/photos/dataset.json --run-dir runs/photos",
        "train; the same command resumes",
    ),
    (
        "sslpipe evaluate suite runs/photos --data out/photos/dataset.json "
        "--out runs/photos/eval.json",
        "did it help? With intervals, beside baselines",
    ),
    ("sslpipe report runs/photos --data out/photos/dataset.json", "one HTML file of the run"),
)

EXAMPLES = {  # of sub-commands whose group shows another one
    "shards merge": "sslpipe shards merge out/big part1 part2",
    "shards repack": "sslpipe shards repack photos.tar.gz out/photos --split train --folder-labels",
    "shards index": "sslpipe shards index laion --json-fields url,width:integer",
    "shards verify": "sslpipe shards verify out/photos",
    "shards show": "sslpipe shards show out/photos --split test --out samples.png",
    "shards stats": "sslpipe shards stats out/photos",
    "shards cut-idx": "sslpipe shards cut-idx FOLDER out/small --per-class 100",
    "gallery add": 'sslpipe gallery add team.safetensors "Ada" ada/*.jpg --model out/backbone',
    "gallery remove": 'sslpipe gallery remove team.safetensors "Ada"',
    "gallery verify": "sslpipe gallery verify a.jpg b.jpg --model out/backbone",
}

_TRAIN = "sslpipe train RECIPE --data DIR/dataset.json --run-dir RUN"
_SUITE = "sslpipe evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
_REPORT = "sslpipe report RUN --data DIR/dataset.json"

NEXT = {  # command -> what is typed after it; a sub-command without a row has that of its group
    "shards": "sslpipe check RECIPE --data DIR/dataset.json",
    "shards build": "sslpipe shards show DIR --out samples.png, then "
    "sslpipe check RECIPE --data DIR/dataset.json",
    "shards verify": "sslpipe shards build DIR --root IMAGES --skip-bad --overwrite",
    "check": f"sslpipe preview RECIPE --data DIR/dataset.json, then {_TRAIN}",
    "preview": _TRAIN,
    "train": f"sslpipe status RUN while it runs, then {_SUITE}",
    "status": f"{_SUITE} when it is done",
    "slurm": "sslpipe status RUN",
    "slurm shards": "sslpipe check RECIPE --data DIR/dataset.json",
    "embed": "sslpipe evaluate knn TRAIN.safetensors TEST.safetensors",
    "whiten": "sslpipe embed EXPORT --data DIR/dataset.json --split test --out test.safetensors",
    "evaluate": _REPORT,
    "report": "sslpipe export RUN --out FOLDER",
    "export": "sslpipe gallery enrol GALLERY.safetensors PHOTOS --model FOLDER",
    "gallery": "sslpipe gallery identify GALLERY.safetensors IMAGE --model FOLDER",
    "gallery enrol": "sslpipe gallery calibrate GALLERY.safetensors STRANGERS --model FOLDER",
    "curate": _TRAIN,
    "curate select": "sslpipe shards build DIR --source csv --csv FOLDER/chosen.csv",
}


def day() -> str:
    """Return what `sslpipe` alone prints."""
    lines = "\n".join(f"  {command}\n      {what}" for command, what in DAY)
    return (
        "Self-supervised contrastive pretraining of image encoders. A normal day:\n\n"
        f"{lines}\n\n"
        "All commands: sslpipe --help. What one takes, with examples: sslpipe COMMAND --help.\n"
        "What a setting of a recipe means: sslpipe check --explain KEY."
    )


def add_next(name: str, command: Any) -> None:
    """End the help of a command, and of its sub-commands, with an example and the next command.

    Args:
        name: Of the command, as in `sslpipe NAME`.
        command: The click command; its epilog, and those of its sub-commands, are changed once.
    """
    group_example = _own_examples(command)
    for words, each in [
        (name, command),
        *((f"{name} {inner}", sub) for inner, sub in getattr(command, "commands", {}).items()),
    ]:
        if "Next: " in (each.epilog or ""):
            continue
        known = EXAMPLES.get(words)
        example = _own_examples(each) or (f"Example: {known}" if known else group_example)
        following = NEXT.get(words, NEXT.get(name))
        lines = _a_line_each(example)
        each.epilog = "\n\n".join([*lines, *([f"Next: {following}"] if following else [])])


def _a_line_each(examples: str) -> list[str]:
    """Split "Examples: a | b", whose bar a reader would take for a pipe; typer joins lines."""
    heading, _, rest = examples.partition("Examples: ")
    return [examples] if heading or not rest else ["Examples:", *rest.split(" | ")]


def _own_examples(command: Any) -> str:
    return str(command.epilog or "").partition("\n\nNext: ")[0]
