"""Write the two files beside an export that are for people: README.md and SHA256SUMS."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sslpipe.evaluation.suite_file import own_name, with_own_name
from sslpipe.portable import sha256_of
from sslpipe.recipe import is_finetune

TASK = "image-feature-extraction"
TAGS: tuple[str, ...] = ("self-supervised-learning", "contrastive-learning")
TUNED_TAGS = ("metric-learning", "image-retrieval")
NAMED_CLASSES = 20  # of those that were trained on; the others are counted
HUB_USAGE = """import sslpipe
from huggingface_hub import snapshot_download

backbone = sslpipe.load_backbone(snapshot_download("USER/NAME"))  # or a folder on disk
features = backbone.encode(images)  # (B, 3, H, W) uint8 RGB -> (B, F), not normalised
"""
TIMM_HUB_USAGE = """import timm

model = timm.create_model("hf-hub:USER/NAME", pretrained=True)  # images -> features
model = timm.create_model("hf-hub:USER/NAME", pretrained=True, num_classes=10)  # a new head
"""


def model_card(config: Mapping[str, Any], usage: Mapping[str, str]) -> str:
    """Write the model card in Markdown.

    Args:
        config: `load.Config` as plain values.
        usage: Format -> lines of Python that load it.
    """
    metadata, view = config["facts"], config["view"]
    kind = config["backbone"]["kind"]
    arguments = {k: v for k, v in config["backbone"].items() if k != "kind"}
    data, recipe = metadata.get("data", {}), metadata.get("recipe", {})
    # what it is
    length = "of length 1" if arguments.get("normalize") else "not normalised"
    about = (
        f"A `{kind}` backbone trained by self-supervised contrastive learning with sslpipe: an "
        f"image in, {config['num_features']} features out (before any projector, {length})."
    )
    init = metadata.get("init")
    if init is not None and "digest" not in metadata:
        about = (
            f"A `{kind}` backbone whose weights another program trained; sslpipe wrote them anew: "
            f"an image in, {config['num_features']} features out ({length})."
        )
    if kind == "join":  # its parts stand in their own lines
        about = (
            f"{len(arguments['parts'])} parts side by side, the features of each with length 1: an "
            f"image in, {config['num_features']} features out."
        )
        arguments = {}
    if is_finetune(recipe):
        about = (
            f"An embedding of images for retrieval, recognition and verification: a `{kind}` "
            "backbone fine-tuned with labels by metric learning with sslpipe. An image in, "
            f"{config['num_features']} features out, {length}; images of one class lie close "
            "together. The loss's own weights are not in the export."
        )
    # input, data, training and weights as one table
    lines = [
        f"# {_plain(metadata.get('name', kind))}",
        "",
        about,
        "",
        "| | |",
        "|---|---|",
        f"| backbone | `{kind}` {_settings(arguments)} |",
    ]
    for each in view.get("views", [view]):
        lines += [
            f"| input | RGB in [0, 1], {_resize(each)}, central crop of {each['crop_px']} px |",
            f"| normalised with | mean {_numbers(each['mean'])}, std {_numbers(each['std'])} |",
        ]
    if data:
        lines += [
            f"| data | {_plain(data['name'])}, index sha256 `{data['index_sha256'][:16]}` |",
            f"| licence of the data | {_plain(data['license'] or 'not stated')} |",
        ]
    if is_finetune(recipe):
        lines += _training(recipe, metadata.get("classes_seen", []), data.get("classes") or [])
    if init is not None:
        lines.append(f"| weights from | {_source(init)} |")
    if config["projector"] is not None:
        lines.append(f"| projector | {_settings(config['projector'])}: `backbone.projector` |")
    if "digest" in metadata:
        digest = metadata["digest"][:16]
        named = "; not the run's last, but chosen" if "checkpoint" in metadata else ""
        named += "; the moving average of its weights" if metadata.get("weights") == "ema" else ""
        lines.append(f"| run | {metadata['step']} steps{named}, recipe digest `{digest}` |")
    lines.append(f"| weights | sha256 of all tensors `{config['weights_sha256'][:16]}` |")
    # how to load each format, and how good the features are
    lines += ["", "## Loading", ""]
    for name, code in usage.items():
        filled = code.replace("ARCHITECTURE", kind.rpartition("/")[2])
        filled = filled.replace("not normalised", length)
        lines += [f"{name}:", "", "```python", filled.rstrip(), "```", ""]
    lines += ["## Measured", ""]
    if metadata.get("evaluation"):
        lines += [*_evaluation(metadata), ""]
    else:
        lines += [f"Nothing: {metadata.get('evaluation_left_out', 'no evaluation was run')}.", ""]
    lines.append(
        "Before this folder was put in place, each format was loaded in a clean process and its "
        "features compared with the trained network's."
    )
    return "\n".join(lines) + "\n"


def sha256_sums(folder: Path) -> str:
    """Return lines of `sha256sum`, by name, for every file under the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in files)


def hub_card(config: Mapping[str, Any], text: str, *, library: str) -> str:
    """Put the metadata of the Hugging Face Hub, with this backbone's numbers, before a model card.

    No licence is stated for the weights: that is for those to say who upload them.

    Args:
        config: `load.Config` as plain values.
        text: The model card.
        library: What loads the repository, "timm" or "sslpipe".
    """
    from huggingface_hub import EvalResult, ModelCardData

    metadata = config["facts"]
    data = metadata.get("evaluation_data", {})
    tags = TUNED_TAGS if is_finetune(metadata.get("recipe", {})) else TAGS
    if "digest" not in metadata and "init" in metadata:  # trained elsewhere
        tags = ()
    results = [
        EvalResult(
            task_type="image-classification" if row["metric"] == "top1" else TASK,
            task_name="frozen features",
            dataset_type=re.sub(r"[^a-z0-9]+", "-", data["data"].lower()).strip("-") or "unnamed",
            dataset_name=data["data"],
            dataset_split=data["split"],
            dataset_args={"index_sha256": data["data_sha256"], "train_split": data["train_split"]},
            metric_type="accuracy" if row["metric"] == "top1" else row["metric"],
            metric_name=row["protocol"] + (", whitened" if row["whitened"] else ""),
            metric_value=row["value"],
            metric_args={key: row[key] for key in ("interval95", "queries", "bank")},
        )
        for row in metadata.get("evaluation", [])
        if row["features"] == "ssl"
    ]
    card = ModelCardData(
        library_name=library,
        pipeline_tag=TASK,
        tags=[*tags, "sslpipe"],
        model_name=metadata.get("name", config["backbone"]["kind"]),
        eval_results=results or None,
    )
    return f"---\n{card.to_yaml()}\n---\n\n{text}"


def _training(recipe: Mapping[str, Any], seen: Sequence[int], names: Sequence[str]) -> list[str]:
    """Describe a fine-tuning as rows of the table.

    Args:
        recipe: Of the fine-tuning.
        seen: Labels that were trained on.
        names: Names of all classes.
    """
    losses = [_component(recipe["loss"])]
    losses += [f"{term['weight']:g} x {_component(term['loss'])}" for term in recipe["also"]]
    lines = [f"| loss | {' + '.join(losses)} |"]
    if recipe["miner"]:
        lines.append(f"| miner | {_component(recipe['miner'])} |")
    if recipe["queue"]:
        lines.append(f"| queue | {recipe['queue']['size']} embeddings of past batches |")
    sampler = recipe["sampler"]
    batch = f"{sampler['classes_per_batch']} classes x {sampler['images_per_class']} images"
    if sampler["random_images"]:
        batch += f" and {sampler['random_images']} of other classes"
    if sampler["neighbours"]:
        batch += f"; each class with its {sampler['neighbours']} nearest"
    views = "" if recipe["views"] == 1 else f", {recipe['views']} views each"
    classes = str(len(seen) or "not recorded")
    if seen and names:
        named = [_plain(names[label]) for label in seen[:NAMED_CLASSES]]
        classes += f": {', '.join(named)}" + ", ..." * (len(seen) > len(named))
    start = f"weights with sha256 `{recipe['init'][:16]}`" if recipe["init"] else "random weights"
    return [
        *lines,
        f"| batches | {batch}{views} |",
        f"| classes seen | {classes} |",
        f"| started from | {start} |",
    ]


def _resize(view: Mapping[str, Any]) -> str:
    sides = "both sides" if view.get("squash") else "shorter side"
    return (
        f"{sides} to {view['resize_px']} px ({view.get('interpolation', 'bilinear')}, antialiased)"
    )


def _source(init: Mapping[str, Any]) -> str:
    """Say which weights a backbone has, or has started from; see `load_backbone`."""
    notes = [_plain(note) for note in init.get("notes", [])]
    if init.get("format") == "join":  # each part has a note
        return "; ".join(notes)
    text = f"{_plain(str(init.get('source', '')))} ({_plain(str(init.get('format', '')))}"
    sha256 = init.get("sha256") or init.get("weights_sha256")
    if sha256:
        text += f", sha256 `{sha256[:16]}`"
    if init.get("loaded"):
        text += f", {init['loaded']} tensors"
    changed = [f"{key} {_plain(', '.join(init[key]))}" for key in ("resized",) if init.get(key)]
    return "; ".join([f"{text})", *changed, *notes])


def _component(component: Mapping[str, Any]) -> str:
    settings = _settings({k: v for k, v in component.items() if k != "kind"})
    return f"`{component['kind']}`" + (f" ({settings})" if settings else "")


def _evaluation(metadata: Mapping[str, Any]) -> list[str]:
    rows, data = metadata["evaluation"], metadata["evaluation_data"]
    own = own_name(metadata, [row["features"] for row in rows])
    others = "".join(
        f" `{_plain(each['name'])}` are the weights with sha256 `{each['sha256'][:16]}` "
        f"({_plain(each['format'])}), through a view of their own."
        for each in metadata.get("evaluation_against", [])
    )
    lines = [
        *(f"{_plain(text)}\n" for text in metadata.get("evaluation_verdict", [])),
        f"Frozen features of {_plain(data['data'])}, split {data['split']!r}; labels from the "
        f"split {data['train_split']!r}. `{_plain(own)}` is this backbone; `pixels` and `random` "
        "(the same network with random weights) had the same protocols, samples and draws."
        + others,
        "",
        "| features | whitened | protocol | metric | value | 95 % interval | queries | bank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in with_own_name(rows, own):
        shown = "{:.4g}" if row.get("unit", "share") == "number" else "{:.1%}"
        value, low, high = map(shown.format, (row["value"], *row["interval95"]))
        features, whitened = _plain(row["features"]), "yes" if row["whitened"] else "no"
        lines.append(
            f"| {features} | {whitened} | {row['protocol']} | {row['metric']} "
            f"| {value} | {low} to {high} | {row['queries']} | {row['bank']} |"
        )
    return lines + _nuisance(with_own_name(metadata.get("evaluation_nuisance", []), own))


def _nuisance(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate how well a probe predicts columns of the data set; [] where none was probed."""
    if not rows:
        return []
    lines = [
        "",
        "### What else the features know",
        "",
        "A linear probe, fitted on the same split, predicts columns of the data set that are no "
        "label. Chance is the share of the most frequent value; features at chance do not know it.",
        "",
        "| column | features | right | 95 % interval | chance | values | queries |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        details = row["details"]
        shares = (row["value"], *row["interval95"], details["chance"])
        value, low, high, chance = (f"{share:.1%}" for share in shares)
        lines.append(
            f"| {_plain(row['column'])} | {_plain(row['features'])} | {value} | {low} to {high} "
            f"| {chance} | {details['values']} | {row['queries']} |"
        )
    return lines


def _plain(text: str) -> str:
    """Return a name from a file as plain text: it ends no table cell, heading, link or tag."""
    return re.sub(r"([\\`*_|<>\[\]#&])", r"\\\1", " ".join(text.split()))


def _settings(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in arguments.items())


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
