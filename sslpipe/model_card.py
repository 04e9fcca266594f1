"""The two files beside an export that are for people: README.md and SHA256SUMS."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(config: Mapping[str, Any], usage: Mapping[str, str]) -> str:
    """Markdown. config: frozen.Config as plain values. usage: format -> lines of Python."""
    facts, view = config["facts"], config["view"]
    kind = config["backbone"]["kind"]
    arguments = {k: v for k, v in config["backbone"].items() if k != "kind"}
    data = facts.get("data", {})
    lines = [
        f"# {facts.get('name', kind)}",
        "",
        f"A `{kind}` backbone trained by self-supervised contrastive learning with sslpipe: an "
        f"image in, {config['num_features']} features out (before any projector, not normalised).",
        "",
        "| | |",
        "|---|---|",
        f"| backbone | `{kind}` {_settings(arguments)} |",
        f"| input | RGB in [0, 1], shorter side to {view['resize_px']} px (bilinear, antialiased), "
        f"central crop of {view['crop_px']} px |",
        f"| normalised with | mean {_numbers(view['mean'])}, std {_numbers(view['std'])} |",
    ]
    if data:
        lines += [
            f"| data | {data['name']}, index sha256 `{data['index_sha256'][:16]}` |",
            f"| licence of the data | {data['license'] or 'not stated'} |",
        ]
    if "digest" in facts:
        lines.append(f"| run | {facts['step']} steps, recipe digest `{facts['digest'][:16]}` |")
    lines.append(f"| weights | sha256 of all tensors `{config['weights_sha256'][:16]}` |")
    lines += ["", "## Loading", ""]
    for name, code in usage.items():
        filled = code.replace("ARCHITECTURE", kind.rpartition("/")[2])
        lines += [f"{name}:", "", "```python", filled.rstrip(), "```", ""]
    if facts.get("evaluation"):
        lines += ["## Measured", "", *_evaluation(facts["evaluation"]), ""]
    lines.append(
        "Before this folder was put in place, each format was loaded in a clean process and its "
        "features compared with the trained network's."
    )
    return "\n".join(lines) + "\n"


def sha256_sums(folder: Path) -> str:
    """Lines of `sha256sum`, by name, for every file under the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
    )


def _evaluation(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| features | whitened | protocol | value | 95 % interval | queries | bank |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval95"]
        lines.append(
            f"| {row['features']} | {'yes' if row['whitened'] else 'no'} | {row['protocol']} "
            f"| {row['value']:.1%} | {low:.1%} to {high:.1%} | {row['queries']} | {row['bank']} |"
        )
    return lines


def _settings(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in arguments.items())


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
