"""Whatever stands in a run's small files, who looks at the run gets an answer or one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from sslpipe.errors import UserError
from sslpipe.evaluation.suite_file import content_sha256
from sslpipe.export.load import load_backbone
from sslpipe.files import append_lines
from sslpipe.report.run_files import read_run
from sslpipe.report.run_page import build_page
from sslpipe.run.lock import RunLock
from sslpipe.run.reporter import RunLog
from sslpipe.run.status import render, status
from tests.evaluation.test_verdict import compared
from tests.helpers.runs import command_line, final_weights

ROW = {
    "features": "ssl", "whitened": False, "column": "kNN", "protocol": "knn k=20", "metric": "top1",
    "value": 0.5, "interval95": [0.4, 0.6], "queries": 16, "bank": 48, "details": {},
}  # fmt: skip
SUITE = {
    "schema_version": 1,
    "facts": {"against": [{"name": "b", "source": "/x/b", "sha256": "0" * 64, "format": "timm"}]},
    "columns": ["kNN"],
    "rows": [ROW],
    "left_out": [],
    "against": [compared(against="b")],
    "not_compared": ["Not compared with c: it is gone."],
}
SUITE["sha256"] = content_sha256(SUITE)
BEAT = {"rank": 0, "host": "h", "pid": 3, "step": 5, "phase": "training", "since_s": 1.0,
        "wall": 9.0}  # fmt: skip
ALARM = {"step": 3, "kind": "alarm", "raised": ["a"], "over": [], "value": {"a": 1}}
LINES = ("metrics.jsonl", "quarantine.jsonl", "bad_steps.0.jsonl")
OBJECTS = ("recipe.json", "data.json", "run.json", "eval.json", "heartbeat/rank-0.json")
FILES = (*LINES, *OBJECTS, "DONE", "MANIFEST.json", "views.png")
WHOLE = (b"", b"\0" * 40, b"\xff\xfe{", b"[1, 2]", b"null", b"NaN", b"{}", b"[" * 100_000)
VALUES = ("x", [{}], None, -1, 10**400)


@pytest.fixture
def run_dir(killed_run, tmp_path):
    run_dir = shutil.copytree(killed_run / "pretrain", tmp_path / "run")
    (run_dir / "heartbeat" / "rank-0.json").write_text(json.dumps(BEAT))
    bad = {"id": 3, "shard": "a.tar", "key": "k", "reason": "r"}
    append_lines(run_dir / "quarantine.jsonl", [bad])
    append_lines(run_dir / "bad_steps.0.jsonl", [{"step": 2}])
    append_lines(run_dir / "metrics.jsonl", [{**ALARM, "threshold": {"a": 2}}])
    (run_dir / "eval.json").write_text(json.dumps(SUITE))
    (run_dir / "DONE").write_text("step 4\n")
    return run_dir


def uses(run_dir: Path) -> dict[str, object]:
    """Everybody who looks at a run: what is said, or the one line."""

    def show():
        Console(quiet=True).print(render(status(run_dir)))

    def report():
        return build_page(read_run(run_dir), None, None, None)

    def log():
        RunLog(run_dir, name="x", config={}, steps=8, first_step=4).close()

    said: dict[str, object] = {}
    for use in (show, report, log, lambda: load_backbone(run_dir), lambda: RunLock(run_dir)):
        try:
            result = use()
        except UserError as error:
            said[use.__name__] = repr(str(error))
        else:
            if isinstance(result, RunLock):
                result.release()
    return said


def test_the_undamaged_run_pleases_everybody(run_dir):
    assert uses(run_dir) == {}
    assert status(run_dir)["damaged"] == {}


@pytest.mark.parametrize("name", FILES)
def test_whatever_a_small_file_holds_the_answer_is_right_or_one_line(run_dir, name):
    original = (run_dir / name).read_bytes() if (run_dir / name).exists() else None
    for raw in WHOLE:
        (run_dir / name).write_bytes(raw)
        for text in uses(run_dir).values():
            assert name in str(text), (raw[:9], text)
            assert "\\n" not in str(text), text
    if original is not None and name not in ("DONE", "views.png", "MANIFEST.json"):
        lines = [original] if name in OBJECTS else original.splitlines()
        trees = [json.loads(line) for line in lines]
        # of each key its absence, and another value in turn: not everything with everything
        cases = [(key, VALUES[k % len(VALUES)]) for k, key in enumerate(trees[-1])]
        for key, value in [*cases, *((key, "absent") for key in trees[-1])]:
            damaged = [{**tree, key: value} for tree in trees]
            if value == "absent":
                damaged = [{k: v for k, v in tree.items() if k != key} for tree in trees]
            raw = "\n".join(map(json.dumps, damaged)) if name in LINES else json.dumps(damaged[0])
            (run_dir / name).write_text(raw)
            for text in uses(run_dir).values():
                assert name in str(text), (key, value, text)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    for text in uses(run_dir).values():
        assert name in str(text), text


@pytest.mark.parametrize("name", ["recipe.json", "data.json", "run.json", "eval.json"])
def test_a_file_edited_by_hand_is_refused_by_its_checksum(run_dir, name):
    assert "report" not in uses(run_dir)
    tree = json.loads((run_dir / name).read_text())
    for key in tree:
        (run_dir / name).write_text(json.dumps({**tree, key: None}))
        assert name in str(uses(run_dir)["report"]), key


def test_damaged_lines_and_files_are_counted_and_named(run_dir):
    whole = status(run_dir)
    for name in LINES:
        with open(run_dir / name, "ab") as file:
            file.write(b"\xff\n" + json.dumps({"step": 9, "id": 9}).encode()[:-1] + b"\n{")
    (run_dir / "heartbeat" / "rank-1.json").write_bytes(b"\0")
    (run_dir / "DONE").write_text("step 5\n")
    actual = status(run_dir)
    named = {"heartbeat/rank-1.json", "DONE", *LINES}
    assert set(actual["damaged"]) == named
    assert all(actual["damaged"][name] == "skipped 3 damaged lines" for name in LINES)
    for key in set(whole) - {"damaged", "checkpoint"}:
        assert actual[key] == whole[key], key
    page = build_page(read_run(run_dir), None, None, None)
    for name in LINES:
        assert f"3 damaged lines of {name} were skipped." in page


def test_no_damaged_small_file_stops_a_resume_or_changes_it(killed_run, run_dir):
    for name in (*LINES, *OBJECTS, "MANIFEST.json", "heartbeat/rank-1.json", "FAILED", "PREEMPTED"):
        (run_dir / name).write_bytes(b'{"step": \xff\n[{"a"')
    command = (
        "train",
        str(killed_run / "pretrain.toml"),
        "--data",
        str(killed_run / "data/dataset.json"),
    )
    result = command_line(*command, "--run-dir", str(run_dir), status=0)
    said = result.stdout + result.stderr
    assert "Traceback" not in said
    for name in LINES:
        assert sum(f"{run_dir / name}" in line for line in said.splitlines()) == 1, name
    expected = load_file(killed_run / "pretrain.final.safetensors")
    for key, tensor in final_weights(run_dir).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)
    (run_dir / "eval.json").unlink()
    load_backbone(run_dir)  # what describes the run was written anew
