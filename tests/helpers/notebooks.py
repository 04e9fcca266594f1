"""Run the notebooks of docs/ and store them with their outputs, small and without progress bars.

python -m tests.helpers.notebooks [NAME ...]
"""

import os
import re
import sys
import tempfile
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
WIDEST_PX = 480
LINES_AT_EACH_END = 4  # of a long text
CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
PROGRESS = re.compile(r"━|IProgress|tqdm|nohup|^Next: |^\s*warn", re.IGNORECASE)


def stored(outputs: list[Any]) -> list[Any]:
    """Return the text of a cell as one output, without progress; and its pictures as JPEG."""
    lines = []
    pictures = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(smaller(b64decode(data["image/png"])))
        else:
            text = data.get("text/plain") or output.get("text", "")
            lines += re.split(r"[\r\n]+", CONTROL.sub("", text))
    lines = [line.rstrip() for line in lines if line.strip() and not PROGRESS.search(line)]
    if len(lines) > 2 * LINES_AT_EACH_END + 1:
        lines[LINES_AT_EACH_END:-LINES_AT_EACH_END] = ["..."]
    text = [nbformat.v4.new_output("stream", name="stdout", text="\n".join(lines) + "\n")]
    return text * bool(lines) + [
        nbformat.v4.new_output("display_data", data={"image/jpeg": each}) for each in pictures
    ]


def smaller(png: bytes) -> str:
    """Return a picture as JPEG of at most WIDEST_PX, in base64."""
    image = Image.open(BytesIO(png)).convert("RGB")
    image.thumbnail((WIDEST_PX, 4 * WIDEST_PX))
    file = BytesIO()
    image.save(file, "JPEG", quality=60, optimize=True)
    return b64encode(file.getvalue()).decode()


def run(name: str) -> None:
    """Run a notebook in an empty folder, with this Python as `sslpipe`, and store it."""
    file = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bin" / "sslpipe"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sslpipe "$@"\n')
        program.chmod(0o755)
        os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = str(ROOT)
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1200, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = stored(cell.outputs)
    notebook.metadata["language_info"] = {"name": "python"}  # not this machine's version
    nbformat.write(notebook, file)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")):
        run(name)
