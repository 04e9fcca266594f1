"""Weights by name, with a network: the files come from the hubs' own clients and their caches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sslpipe.errors import WeightsError, did_you_mean, one_line
from sslpipe.weights.source import Source, parse_source

SAFE = ["*.json", "*.safetensors"]
PICKLED = ["*.json", "*.bin", "*.pth"]  # read as tensors only, where there is nothing safer


def fetch(source: Source) -> Source:
    """Download what a source names, unless it is there: the source as files on this machine.

    Raises:
        WeightsError: There is no such name, or no network and no earlier download.
    """
    if source.scheme == "torchvision":
        return _of_torchvision(source)
    if source.scheme == "timm":
        return _of_timm(source)
    name, _, revision = source.name.partition("@")
    local = parse_source(_snapshot(source, name, revision or None))
    return Source(source.text, local.scheme, local.path)


def _of_timm(source: Source) -> Source:
    import timm

    architecture = source.name.partition(".")[0]
    if not timm.is_model(architecture):
        hint = did_you_mean(architecture, timm.list_models())
        raise WeightsError(f"{source.text}: timm has no {architecture!r}{hint}")
    names = timm.list_pretrained(f"{architecture}.*")
    if not names or source.name not in (architecture, *names):
        raise WeightsError(
            f"{source.text}: timm has no such weights; it has: {', '.join(names) or 'none'}"
        )
    config = timm.get_pretrained_cfg(source.name)
    assert config is not None
    name = f"{architecture}.{config.tag}" if config.tag else architecture
    if hub_id := config.hf_hub_id:
        # an id without its name is that of a collection
        path = _snapshot(source, hub_id + name if hub_id[-1] == "/" else hub_id)
    else:
        path = _download(source, config.url)
    return Source(source.text, "path", path, f"timm/{name}")


def _of_torchvision(source: Source) -> Source:
    import torchvision

    name, _, release = source.name.partition(".")
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise WeightsError(f"{source.text}: torchvision has no {name!r}{did_you_mean(name, known)}")
    releases = torchvision.models.get_model_weights(name)
    if release and release not in releases.__members__:
        raise WeightsError(
            f"{source.text}: torchvision has no such weights; it has: "
            f"{', '.join(releases.__members__)}"
        )
    weights = releases[release] if release else releases.DEFAULT
    return Source(source.text, "path", _download(source, weights.url), f"torchvision/{name}")


def _snapshot(source: Source, name: str, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path()
    with _reaching(source):
        for patterns in (SAFE, PICKLED):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
            if any(path.suffix != ".json" for path in folder.iterdir()):
                break
    return folder


def _download(source: Source, url: str) -> Path:
    """Download a file whose URL ends with the first digits of its sha256, once."""
    from torch import hub

    path = Path(hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    digits = path.stem.rpartition("-")[2]
    start = digits if len(digits) >= 8 else None
    with _reaching(source):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            hub.download_url_to_file(url, os.fspath(path), start, progress=False)
    return path


@contextmanager
def _reaching(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever requests, urllib and the disk raise, or another hash
        text = one_line(str(error), 200) or type(error).__name__
        raise WeightsError(
            f"{source.text} cannot be had: {text}; without a network, download it elsewhere and "
            "name the folder or the file"
        ) from error
