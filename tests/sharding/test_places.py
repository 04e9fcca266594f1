"""Tables of images elsewhere: URLs, folders of `save_to_disk`, several images a row."""

import contextlib
import functools
import http.server
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import ipc, parquet

from sslpipe.data.decode import MAX_BYTES
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.sharding.build_report import Report
from tests.helpers.shards import error_of, grey, grey_png, report_of, run


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An HTTP server of six images and a page."""
    for level in range(6):
        grey(tmp_path / "web" / f"{level}.png", level)
    (tmp_path / "web" / "page.png").write_text("<!DOCTYPE html>")
    with serving(functools.partial(_Quiet, directory=tmp_path / "web")) as url:
        yield url


@contextlib.contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def levels(out: Path, split: str = "train") -> list[int]:
    """The grey of each sample."""
    own = load_index(out).split(split)
    raws = [Reader(own).one(row).image for row in range(len(own))]
    return [Image.open(io.BytesIO(raw)).getpixel((0, 0)) for raw in raws]


def report(out: Path) -> Report:
    return report_of(out)


@pytest.mark.parametrize("kind", ["csv", "txt", "parquet"])
def test_urls_of_a_table_are_downloaded(tmp_path, server, kind):
    urls = [f"{server}/{level}.png" for level in range(6)]
    out = tmp_path / "out"
    if kind == "parquet":
        parquet.write_table(pa.table({"url": urls, "label": [0, 1] * 3}), tmp_path / "in.parquet")
        words = ["--source", kind, "--root", tmp_path / "in.parquet", "--image-column", "url"]
    else:
        lines = urls if kind == "txt" else ["path,label", *(f"{url},a" for url in urls)]
        (tmp_path / f"in.{kind}").write_text("\n".join(lines))
        words = ["--source", "csv", "--csv", tmp_path / f"in.{kind}"]
    assert run("build", out, *words) == 0
    assert sorted(levels(out)) == list(range(6))
    assert sorted(load_index(out).split("train").names_of(range(6))) == urls


def test_a_url_without_an_image_is_refused_or_skipped_and_counted(tmp_path, server, capsys):
    lines = [f"{server}/1.png", f"{server}/gone.png", f"{server}/page.png"]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    words = ["build", tmp_path / "out", "--source", "csv", "--csv", tmp_path / "in.txt"]
    message = error_of(capsys, *words, "--num-workers", 1)
    assert "--skip-bad" in message
    assert run(*words, "--skip-bad") == 0
    said = capsys.readouterr().err
    assert f"skipped: {server}/gone.png: cannot be downloaded: no such file" in said
    assert f"skipped: {server}/page.png" in said
    assert sum(group.count for group in report(tmp_path / "out").left_out) == 2
    (tmp_path / "in.txt").write_text("ftp://127.0.0.1/1.png")
    assert "'ftp' is not allowed; use http" in error_of(capsys, *words, "--overwrite")


class _Endless(http.server.BaseHTTPRequestHandler):
    """Serves /1.png, and of anything else 40 GB: /stated.png says so, /unstated.png does not."""

    sent = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/1.png":
            self.end_headers()
            self.wfile.write(grey_png(1))
            return
        if self.path == "/stated.png":
            self.send_header("Content-Length", str(40 * 10**9))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has hung up
            while type(self).sent < 4 * 10**8:  # what breaks this test fills no memory
                type(self).sent += self.wfile.write(bytes(2**20))


@pytest.mark.parametrize("name", ["stated", "unstated"])
def test_a_url_of_40_gb_is_one_bad_sample_of_which_no_more_than_an_image_is_read(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setattr(_Endless, "sent", 0)
    with serving(_Endless) as url:
        (tmp_path / "in.txt").write_text(f"{url}/1.png\n{url}/{name}.png")
        words = ["build", tmp_path / "out", "--source", "csv", "--csv", tmp_path / "in.txt"]
        message = error_of(capsys, *words, "--num-workers", 1)
        assert f"{url}/{name}.png: " in message
        assert f"more than {MAX_BYTES:,} bytes" in message
        assert "--skip-bad" in message
        assert run(*words, "--skip-bad", "--num-workers", 1) == 0
    assert levels(tmp_path / "out") == [1]
    (left_out,) = report(tmp_path / "out").left_out
    assert left_out.count == 1
    assert _Endless.sent < 2 * (MAX_BYTES + 3 * 10**7)  # of two builds, with what buffers hold


def test_a_file_of_many_bytes_is_a_bad_sample_before_it_is_read(tmp_path, capsys):
    grey(tmp_path / "in" / "1.png", 1)
    (tmp_path / "in" / "2.png").touch()
    os.truncate(tmp_path / "in" / "2.png", 2**42)  # no disk holds it, nor memory
    words = ["build", tmp_path / "out", "--root", tmp_path / "in"]
    message = error_of(capsys, *words)
    assert "2.png" in message
    assert f"{2**42:,} bytes are more than the limit of {MAX_BYTES:,}" in message
    assert "--skip-bad" in message
    assert run(*words, "--skip-bad") == 0
    assert levels(tmp_path / "out") == [1]


# --- save_to_disk


def saved(folder: Path, rows: range, files: int = 1) -> Path:
    """A split as `datasets` 4 and 5 save it."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    schema = pa.schema(
        {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()},
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    folder.mkdir(parents=True)
    names = [f"data-{k:05d}-of-{files:05d}.arrow" for k in range(files)]
    for name, part in zip(names, np.array_split(rows, files), strict=True):
        cells = [
            {"image": {"bytes": grey_png(int(k)), "path": None}, "label": int(k) % 2} for k in part
        ]
        with ipc.new_stream(folder / name, schema) as writer:
            writer.write_table(pa.Table.from_pylist(cells, schema), max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def test_folders_of_save_to_disk_are_read(tmp_path):
    saved(tmp_path / "in" / "train", range(10), files=3)
    saved(tmp_path / "in" / "validation", range(10, 14))
    (tmp_path / "in" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    (tmp_path / "in" / "train" / "cache-1a2b.arrow").write_bytes(b"of Dataset.map")
    assert run("build", tmp_path / "out", "--source", "parquet", "--root", tmp_path / "in") == 0
    index = load_index(tmp_path / "out")
    assert index.manifest.classes == ("cat", "dog")
    assert sorted(levels(tmp_path / "out")) == list(range(10))
    assert sorted(levels(tmp_path / "out", "val")) == [10, 11, 12, 13]
    assert [level % 2 for level in levels(tmp_path / "out")] == index.split("train").labels.tolist()


@pytest.mark.parametrize("form", ["folder", "file", "the file of Arrow"])
def test_one_split_of_arrow_can_be_cut(tmp_path, form):
    root = saved(tmp_path / "in", range(20))
    if form != "folder":
        root /= "data-00000-of-00001.arrow"
    if form == "the file of Arrow":
        with pa.memory_map(str(root)) as source:
            table = ipc.open_stream(source).read_all()
        root = tmp_path / "other.arrow"
        with ipc.new_file(root, table.schema) as writer:
            writer.write_table(table)
    words = ["--source", "parquet", "--root", root, "--test-fraction", "0.3"]
    assert run("build", tmp_path / "out", *words) == 0
    counts = {split: len(levels(tmp_path / "out", split)) for split in ("train", "test")}
    assert counts == {"train": 14, "test": 6}


def test_a_folder_of_save_to_disk_that_is_damaged_is_refused_with_the_remedy(tmp_path, capsys):
    root = saved(tmp_path / "in", range(9), files=2)
    words = ["build", tmp_path / "out", "--source", "parquet", "--root", root]
    assert f"--source parquet --root {root}" in error_of(
        capsys, "build", tmp_path / "out", "--root", root
    )
    state = json.loads((root / "state.json").read_text())
    (root / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i"}]}))
    assert "flatten_indices" in error_of(capsys, *words)
    (root / "state.json").write_text(json.dumps(state))
    file = root / "data-00001-of-00002.arrow"
    whole = file.read_bytes()
    for raw in (
        whole[: len(whole) // 2],
        b"",
        b"no arrow",
        whole[:8] + b"\xff" * 300,
        whole.replace(b"label", b"l\xffbel"),
    ):
        file.write_bytes(raw)
        assert file.name in error_of(capsys, *words)
    file.unlink()
    assert f"{file.name}, which is missing" in error_of(capsys, *words)


# --- several images a row


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_each_image_of_a_row_is_a_sample_and_the_row_a_column(tmp_path, kind):
    out = tmp_path / "out"
    rows = [(f"s{k}", 2 * k, None if k == 3 else 2 * k + 1) for k in range(4)]
    if kind == "csv":
        lines = ["sku,front,back,label"]
        for sku, front, back in rows:
            for level in {front, back} - {None}:
                grey(tmp_path / f"{level}.png", level)
            lines.append(f"{sku},{front}.png,{'' if back is None else f'{back}.png'},{sku}")
        (tmp_path / "in.csv").write_text("\n".join(lines))
        words = ["--source", "csv", "--csv", tmp_path / "in.csv"]
    else:
        cells = [
            {"sku": sku, "label": sku, "front": grey_png(front), "back": back and grey_png(back)}
            for sku, front, back in rows
        ]
        parquet.write_table(pa.Table.from_pylist(cells), tmp_path / "in.parquet")
        words = ["--source", "parquet", "--root", tmp_path / "in.parquet"]
    words += ["--image-column", "front,back"]
    # no front is in train, whose back is in test
    assert run("build", tmp_path / "cut", *words, "--test-fraction", "0.4") == 0
    sides = [{level // 2 for level in levels(tmp_path / "cut", s)} for s in ("train", "test")]
    assert sides[0] | sides[1] == {0, 1, 2, 3}
    assert not sides[0] & sides[1]
    words += ["--columns", "sku,row", "--group-by", "row"]
    assert run("build", out, *words) == 0
    split = load_index(out).split("train")
    found = levels(out)
    assert sorted(found) == [0, 1, 2, 3, 4, 5, 6]
    assert split.column("sku").cells.to_pylist() == [f"s{level // 2}" for level in found]
    assert split.column("row").cells.to_pylist() == [level // 2 for level in found]
    assert split.labels.tolist() == [level // 2 for level in found]


@pytest.mark.promise(17)
def test_rows_that_share_a_file_are_cut_as_one(tmp_path, capsys):
    """Pairs: 0 with 1 and 1 with 2, 3 with 4 and 4 with 5, and so on; then a chain of all."""
    for level in range(18):
        grey(tmp_path / f"{level}.png", level)
    words = ["--source", "csv", "--csv", tmp_path / "in.csv", "--image-column", "one,other"]
    words += ["--no-labels", "--test-fraction", "0.4"]
    pairs = [f"{k}.png,{k + 1}.png" for k in range(18) if k % 3 < 2]
    (tmp_path / "in.csv").write_text("\n".join(["one,other", *pairs]))
    assert run("build", tmp_path / "out", *words) == 0
    sides = [{level // 3 for level in levels(tmp_path / "out", s)} for s in ("train", "test")]
    assert sides[0] | sides[1] == set(range(6))
    assert not sides[0] & sides[1]
    chain = [f"{k}.png,{k + 1}.png" for k in range(17)]
    (tmp_path / "in.csv").write_text("\n".join(["one,other", *chain]))
    assert "--split-column" in error_of(capsys, "build", tmp_path / "chain", *words)


def test_a_column_of_images_that_is_not_there_is_named(tmp_path, capsys):
    grey(tmp_path / "1.png", 1)
    (tmp_path / "in.csv").write_text("front,back\n1.png,1.png\n")
    words = ["build", tmp_path / "out", "--source", "csv", "--csv", tmp_path / "in.csv"]
    error = error_of(capsys, *words, "--image-column", "front,bak", "--no-labels")
    assert "'bak'; did you mean 'back'" in error
