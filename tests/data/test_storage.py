"""Bytes from paths and URLs: what is allowed, and one clear error for what is not there."""

import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sslpipe.data.storage import join, load_array, read_bytes, read_range, size_of
from sslpipe.errors import DataError


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
