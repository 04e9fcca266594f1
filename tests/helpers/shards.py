"""`sslpipe shards` and `sensors` in this process, and tars and images for the tests of both."""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from sslpipe.cli import app
from sslpipe.data.index import load_index
from sslpipe.sharding.build_report import FILE, Report

BUILD = ("--samples-per-shard", "8", "--name-pattern", "(?P<kind>[^/]+)/.*")  # of `write_photos`


def run(*words: object, group: str = "shards") -> int:
    """The exit status of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sslpipe", group, *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            app.run()
    return int(stopped.value.code or 0)


def error_of(capsys: pytest.CaptureFixture[str], *words: object, group: str = "shards") -> str:
    """The one line of a refused command."""
    capsys.readouterr()
    assert run(*words, group=group) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert not any("Traceback" in line for line in lines)
    return error


def report_of(folder: Path) -> Report:
    """What build-report.json says."""
    return Report.model_validate_json((folder / FILE).read_bytes())


def tree(folder: Path) -> dict[str, str]:
    """sha256 of every file but the records of the build and its report."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and ".build" not in p.parts and p.name != FILE
    }


def read_all(folder: Path, split: str) -> list[tuple[str, bytes, int]]:
    """Key, image bytes, label of every sample with an image, by webdataset's own reader."""
    actual = []
    for entry in load_index(folder).manifest.splits[split]:
        with open(folder / entry.file, "rb") as stream:
            files = webdataset.tariterators.tar_file_expander(
                [{"url": entry.file, "stream": stream}]
            )
            for sample in webdataset.tariterators.group_by_keys(files):
                for suffix in {"png", "jpg", "webp"} & set(sample):
                    label = int(sample.get("cls", b"-1"))
                    actual.append((sample["__key__"], sample[suffix], label))
    return actual


def write_photos(root: Path) -> Path:
    """Three classes of 12 JPEGs, PNGs and WebPs, and one BMP; names that need care."""
    for k, name in enumerate(("ape", "bee", "cat")):
        (root / name).mkdir(parents=True)
        for i in range(12):
            pixels = np.random.default_rng([k, i]).integers(0, 256, (10 + k, 14, 3), dtype=np.uint8)
            suffix = ("jpg", "png", "webp")[i % 3]
            Image.fromarray(pixels).save(root / name / f"a b.{i}ü.{suffix}")
    Image.fromarray(np.full((5, 6, 3), 77, np.uint8)).save(root / "ape" / "old.bmp")
    (root / "ape" / "Thumbs.db").write_text("no image")
    (root / "ape" / "._a.jpg").write_text("no image either")
    return root


def grey_png(level: int) -> bytes:
    """2 x 3 px of one level, which tells images apart."""
    file = io.BytesIO()
    Image.fromarray(np.full((3, 2), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def grey(path: Path, level: int) -> Path:
    """Write such an image, whatever the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(grey_png(level))
    return path


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, raw: bytes, kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mtime = len(raw), kind, 12345
    member.linkname = "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    tar.addfile(member, io.BytesIO(raw))


def write_tar(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, raw in members:
            add(tar, name, raw)
    return path
