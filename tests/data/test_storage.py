"""Bytes from paths and URLs: what is allowed, and one clear error for what is not there."""

import gc
import io
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from sslpipe.data import storage
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.data.storage import join, load_array, npy_header, read_bytes, read_range, size_of
from sslpipe.errors import DataError
from sslpipe.sharding.verify import verify_shard
from tests.helpers.batches import same, take
from tests.helpers.dataset import write_dataset


def test_ranges_and_sizes_are_the_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    for url in (str(path), f"file://{path}"):
        assert size_of(url) == 100
        assert read_bytes(url) == bytes(range(100))
        assert read_range(url, 10, 20) == bytes(range(10, 20))
        with pytest.raises(DataError, match=r"bytes 90-110 were requested and 10 came"):
            read_range(url, 90, 110)
    assert size_of(f"{path}.other") is None
    with pytest.raises(DataError, match=r"cannot read .*file\.other"):
        read_bytes(f"{path}.other")


def test_a_disk_that_gives_less_than_was_asked_for_is_asked_again(tmp_path, monkeypatch):
    """As FUSE with direct_io may; a file of which less is there is truncated."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    real = os.pread

    class Slow(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:7])

    monkeypatch.setattr(os, "pread", lambda file, count, at: real(file, min(count, 7), at))
    monkeypatch.setattr(storage, "open_regular", lambda name: io.BufferedReader(Slow(name)))
    assert read_range(str(path), 20, 150) == bytes(range(20, 150))
    with pytest.raises(DataError, match="bytes 20-300 were requested and 180 came"):
        read_range(str(path), 20, 300)


def test_a_store_whose_package_is_missing_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # any import of it now fails
    with pytest.raises(DataError, match=r"cannot read gs://bucket/dataset.json: .*gcsfs"):
        read_bytes("gs://bucket/dataset.json")


@pytest.mark.parametrize("url", ["ftp://host/a", "github://a/b", "zip://a"])
def test_other_schemes_are_refused(url):
    with pytest.raises(DataError, match=r"is not allowed; use http, https, s3, gs, file"):
        read_bytes(url)


def test_a_name_is_joined_to_its_folder_unless_it_says_where_it_is():
    assert join("s3://bucket/data", "a.tar") == "s3://bucket/data/a.tar"
    assert join("data/", "a.tar") == "data/a.tar"
    assert join("data", "/abs/a.tar") == "/abs/a.tar"
    assert join("data", "https://host/a.tar") == "https://host/a.tar"


def test_arrays_are_read_by_threads_that_collect_garbage_meanwhile():
    """Python before 3.11.8 fails where one thread's header is parsed inside of another's."""
    file = io.BytesIO()
    np.save(file, np.arange(60).reshape(20, 3))

    def read(_):
        for _ in range(300):
            assert load_array(io.BytesIO(file.getvalue())).sum() == 1770
            assert npy_header(io.BytesIO(file.getvalue()))[0] == (20, 3)

    def switch(*words):  # Python code, in which threads take turns
        sum(range(50))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(switch)
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(5)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
    finally:
        gc.callbacks.remove(switch)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)


class Server:
    """Serves a folder with ranges. `trouble(number)` says what goes wrong with a request."""

    def __init__(self, folder):
        self.served: list[tuple[str, int, int]] = []  # path, first byte, one past the last
        self.requests, self.trouble = 0, lambda number: ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, body):
                outer.requests += 1
                trouble = outer.trouble(outer.requests)
                path = folder / self.path.lstrip("/")
                if trouble in ("503", "403") or not path.is_file():
                    self.send_response(int(trouble or 404))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if trouble == "reset":  # before a word was said
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                raw = path.read_bytes()
                start, end = 0, len(raw)
                wanted = self.headers.get("Range")
                if wanted and trouble != "no ranges":
                    first, last = wanted.removeprefix("bytes=").split("-")
                    start, end = int(first), min(end, int(last) + 1 if last else end)
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(raw)}")
                else:
                    self.send_response(200)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(end - start))
                self.end_headers()
                if not body:
                    return
                if trouble == "stall":
                    time.sleep(3)
                if trouble == "cut":  # in the middle of what was promised
                    self.wfile.write(raw[start : (start + end) // 2])
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                outer.served.append((self.path.lstrip("/"), start, end))
                self.wfile.write(raw[start:end])

            def handle(self):
                with suppress(OSError):  # the client gave up first, as it may
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    write_dataset(folder, (40, 3, 60, 25))
    return folder


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    server = Server(folder)
    yield server
    server.close()


def some_batches(location, *, count=12, **run):
    bad = []
    actual = take(load_index(location), count, canvas_px=16, bad=bad, seed=3, run=run)
    assert not bad
    return actual


def assert_same(one, other):
    assert all(map(same, one, other))


def test_a_server_that_breaks_connections_gives_the_batches_of_the_disk(folder, server):
    """Every second request is refused, reset, or cut in the middle."""
    kinds = ("reset", "503", "cut")
    server.trouble = lambda number: kinds[number // 2 % 3] if number % 2 else ""
    assert_same(some_batches(server.url), some_batches(str(folder)))
    assert server.requests > 2 * len(server.served) - 20


def test_shards_on_a_server_are_verified_as_those_of_a_disk(tmp_path, folder, server):
    shutil.copytree(folder, tmp_path / "set")
    there = Server(tmp_path / "set")
    there.trouble = lambda number: "cut" if number % 5 == 2 else ""
    index = load_index(there.url)
    assert verify_shard(index, "train", 0) == verify_shard(index, "train", 1) == []
    path = tmp_path / "set" / "train-000001.tar"
    path.write_bytes(path.read_bytes().replace(b"IDAT", b"idat", 1))
    (tmp_path / "set" / "train-000002.tar").unlink()
    local = load_index(tmp_path / "set")
    for shard in (1, 2):
        faults = verify_shard(index, "train", shard)
        assert faults == verify_shard(local, "train", shard)
        assert len(faults) == 3 - shard  # its sha256 and the image; missing
    there.close()


def test_a_server_that_stalls_is_asked_again(folder, server, monkeypatch):
    monkeypatch.setattr(storage, "STALL_S", 0.3)
    server.trouble = lambda number: "stall" if number == 1 else ""
    begin_s = time.monotonic()
    raw = read_bytes(f"{server.url}/dataset.json")
    assert raw == (folder / "dataset.json").read_bytes()
    assert 0.3 < time.monotonic() - begin_s < 2.5


def test_a_server_that_is_down_is_one_error_after_the_tries(server):
    server.trouble = lambda number: "503"
    with pytest.raises(DataError, match=r"cannot read .*dataset\.json: .*503.*\(tried 6 times\)"):
        load_index(server.url)
    assert server.requests == storage.RETRIES + 1
    with pytest.raises(DataError, match=r"cannot read http://127\.0\.0\.1:9/x: .*tried 6 times"):
        size_of("http://127.0.0.1:9/x")


def test_what_is_not_there_is_not_asked_for_again(server):
    assert size_of(f"{server.url}/nothing.tar") is None
    asked = server.requests
    assert asked <= 3  # a HEAD, and a GET where a server knows none
    with pytest.raises(DataError, match=r"cannot read .*nothing\.json"):
        read_bytes(f"{server.url}/nothing.json")
    assert server.requests == asked + 1


def test_a_server_without_ranges_is_reported_not_taken_for_a_truncated_shard(server):
    server.trouble = lambda number: "no ranges"
    with pytest.raises(DataError, match="does not serve ranges; copy the shards"):
        read_range(f"{server.url}/train-000000.tar", 512, 1024)


def test_no_byte_of_a_window_is_fetched_twice_and_each_read_is_one_request(server):
    split = load_index(server.url).split("train")
    server.served.clear()
    reader = Reader(split, window_bytes=2**20)
    reader.rows(0, np.arange(40))
    (read,) = [entry for entry in server.served if entry[0].endswith(".tar")]
    offsets = split.offsets(0)
    assert read == ("train-000000.tar", int(offsets[0, 0]), int(offsets[39, 1]))


def test_fsspecs_cache_keeps_what_was_read_for_later_runs(folder, server, tmp_path, monkeypatch):
    """As the guide says: before the URL that the user types, with fsspec's own setting."""
    kept = {"filecache": {"cache_storage": str(tmp_path / "kept")}}
    monkeypatch.setattr("fsspec.config.conf", kept)
    cached = f"filecache::{server.url}"
    expected = some_batches(str(folder), count=16)  # two epochs
    assert_same(some_batches(cached, count=16), expected)
    assert {name for name, *_ in server.served if name.endswith(".tar")}
    server.served.clear()
    assert_same(some_batches(cached, count=16), expected)
    assert not [name for name, *_ in server.served if name.endswith(".tar")]
    assert size_of(f"{cached}/nothing.tar") is None


@pytest.fixture(scope="module")
def bucket(folder):
    """The data set in a bucket of moto's S3 server, and the environment that points there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        put(f"{endpoint}/shards", b"", deadline=time.monotonic() + 120)
        for path in folder.iterdir():
            put(f"{endpoint}/shards/fashion/{path.name}", path.read_bytes())
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait(timeout=30)


def put(url, raw, deadline=0.0):
    """Anonymous, by hand: moto asks for no signature."""
    while True:
        try:
            kind = {"Content-Type": "application/octet-stream"}
            request = urllib.request.Request(url, data=raw, method="PUT", headers=kind)
            with urllib.request.urlopen(request, timeout=30):
                return
        except OSError:  # not up yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_an_s3_store_gives_the_batches_of_the_disk_and_names_what_it_lacks(
    folder, bucket, monkeypatch
):
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    assert_same(some_batches("s3://shards/fashion"), some_batches(str(folder)))
    assert (
        size_of("s3://shards/fashion/train-000000.tar")
        == (folder / "train-000000.tar").stat().st_size
    )
    assert size_of("s3://shards/fashion/nothing.tar") is None
    with pytest.raises(DataError, match=r"cannot read s3://shards/other/dataset\.json"):
        load_index("s3://shards/other")


def test_resuming_at_a_late_step_fetches_what_follows_and_not_what_was(folder, server):
    take(load_index(server.url), 1, first=6, canvas_px=16, seed=3, run={"num_workers": 0})
    fetched = sum(end - start for path, start, end in server.served if path.endswith(".tar"))
    assert fetched < sum(path.stat().st_size for path in folder.glob("*.tar")) / 2
