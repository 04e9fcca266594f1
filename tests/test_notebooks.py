"""The notebooks run from top to bottom, in a folder of their own, on less data and fewer steps.

Their stored outputs are written by `python -m tests.helpers.notebooks`.
"""

import os
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.runs import ROOT

pytestmark = pytest.mark.slow  # a kernel of its own, and twenty seconds
NOTEBOOKS = ROOT / "docs" / "notebooks"
# what the test makes smaller: as the notebook has it -> what runs
SMALL = r"data.batch_size=32\", \"optim.precision=fp32\", \"backbone.widths=[8, 16]"  # in JSON
SMALLER = {
    "search_engine": {
        "STEPS = 300": "STEPS = 10",
        "data.batch_size=128": SMALL,
        "3)[::5]": "3)[::20]",
    },
    "did_it_help": {
        "STEPS = 200": "STEPS = 10",
        "data.batch_size=128": SMALL,
        "PER_CLASS = 300": "PER_CLASS = 40",
        "data.holdout=300": "data.holdout=40",
        "(5, 10, 50)": "(5, 10, 20)",
    },
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """By notebook: its folder and its cells with their outputs; all by one kernel."""
    tmp_path, cells, found = tmp_path_factory.mktemp("notebooks"), [], {}
    program = tmp_path / "bin" / "sslpipe"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sslpipe "$@"\n')
    program.chmod(0o755)
    for name, smaller in SMALLER.items():
        text = (NOTEBOOKS / f"{name}.ipynb").read_text()
        for whole, less in smaller.items():
            assert text.count(whole) == 1, whole
            text = text.replace(whole, less)
        own = nbformat.reads(text, as_version=4).cells
        (tmp_path / name).mkdir()
        begin = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path / name}")
        cells += [begin, *own]
        for number, cell in enumerate(own):
            cell["id"] = f"{name}-{number}"  # both begin with cell-01
        found[name] = tmp_path / name, own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(tmp_path / name.lower()))
        NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=240).execute()
    return found


def outputs(cells):
    return [output for cell in cells for output in cell.get("outputs", ())]


@pytest.mark.timeout(600)
def test_a_folder_of_photographs_becomes_a_search_engine(executed):
    folder, cells = executed["search_engine"]
    pictures = ["image/png" in output.get("data", {}) for output in outputs(cells)]
    assert sum(pictures) == 6  # the folder, the views, three questions, one to the loaded export
    assert {"backbone", "features.npy"} == {p.name for p in (folder / "search").iterdir()}
    asked, loaded = (
        next(output.data["image/png"] for output in cell.outputs if "data" in output)
        for cell in cells
        if cell.cell_type == "code" and cell.source.endswith("side_by_side(search(paths[7]))")
    )
    assert asked == loaded  # the export answers as the run


@pytest.mark.timeout(600)
def test_whether_pretraining_helped_is_answered_with_intervals(executed):
    said = [each for each in outputs(executed["did_it_help"][1]) if each.get("name") == "stdout"]
    text = "".join(each.text for each in said)
    assert len(re.findall(r"^(?:ssl|random|pixels) .* % right  \[.*\]$", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^than (?:random|pixels)\s*: .* \[.*\]: ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^step +\d+  #* 0\.\d+$", text, re.MULTILINE)) >= 3
    assert "standard deviation" in text


def test_all_notebooks_are_run_and_stored_small_with_outputs_without_progress_bars():
    files = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert {file.stem for file in files} == set(SMALLER)
    for file in files:
        assert file.stat().st_size < 150_000
        notebook = nbformat.reads(file.read_text(), as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in code)
        assert sum(bool(cell.outputs) for cell in code) >= len(code) // 2
        text = "".join(output.get("text", "") for output in outputs(code))
        assert not re.search(r"[\x1b\r━]", text)
        assert max(len(cell.source.splitlines()) for cell in code) <= 16
