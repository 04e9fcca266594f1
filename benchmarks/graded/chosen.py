"""What labels bring beyond `sslpipe choose`: the three commands of docs/graded.md on graded sets.

    python -m benchmarks.graded.chosen out/graded --sets stamps \
        [--json docs/measured/graded_chosen.json] [--set steps=600] [--classes 425]

`choose` ranks EfficientNet-Lite0 (out/graded/lite0.pth) at the sizes of PX on the train classes,
recipes/metric/my_images_mobile.toml starts from its answer, and `choose` ranks the run beside the
start on the classes that the run held out. Each of the four backbones, read as a user reads it,
then embeds the test classes: Recall@1 and MAP@R among themselves, and Recall@1 among all classes,
those of train included. A row is compared with the weights as they come and with the choice before
training, query by query, with intervals over classes. `cpu_s` is the CPU time of the training with
its watch, imports included. --classes leaves out test classes: of fewer, each image has fewer to be
confused with. --json keeps the rows of earlier calls.
"""

import json
import resource
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.common import machine, parser, print_table, save, sslpipe
from benchmarks.graded.data import MANY
from benchmarks.graded.table import SETS
from benchmarks.trainings import RECIPES, Column, Tree, paired, percent
from sslpipe import embed
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.random import permutation

PX = (128, 192)
START, CHOSEN, TRAINED, JOINED = "start", "start, chosen", "trained", "trained, chosen"
ALL = "Recall@1 among all"
CLASSES = 0x7A  # names the draw of --classes
OTHERS = {"more than the start": START, "more than the choice": CHOSEN}
METRICS = ("Recall@1", "MAP@R")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote, and weights")
    parse.add_argument("--sets", nargs="+", default=SETS, choices=(*SETS, *MANY))
    parse.add_argument("--seeds", type=int, nargs="+", default=[0])
    parse.add_argument("--set", nargs="+", default=[], help="settings of the recipe, KEY=VALUE")
    parse.add_argument("--classes", type=int, help="of test, the first of a fixed shuffle; all")
    args = parse.parse_args()
    torch.set_num_threads(1)
    known = args.json is not None and args.json.exists()
    rows = json.loads(args.json.read_text())["rows"] if known else []
    for name in args.sets:
        with TemporaryDirectory() as folder:
            study = Study(args.folder, name, Path(folder), args.classes)
            for seed in args.seeds:
                rows += study.rows(seed, args.set)
                save(args.json, {"machine": machine(1), "sizes": PX, "rows": rows})
    shown = (*METRICS, ALL)
    for other in OTHERS:
        cells = (
            [row["set"], row["what"], *(percent(row.get(m, {}).get(other)) for m in shown)]
            for row in rows
        )
        print_table(["set", "backbone", *(f"{m}, {other}" for m in shown)], cells)


class Study:
    """A set, what `choose` says of it before training, and the trainings of several seeds.

    Args:
        folder: What `benchmarks.graded.data` wrote, and weights.
        name: Of the set.
        out: Where to write.
        classes: How many of test are searched; None: all.
    """

    def __init__(self, folder: Path, name: str, out: Path, classes: int | None) -> None:
        self.name, self.out, self.classes = name, out, classes
        self.data = folder / name / "dataset.json"
        self.choice = out / "choice"
        weights = f"timm/tf_efficientnet_lite0@{folder / 'lite0.pth'}"
        self.choose(weights, out=self.choice)
        self.before = {
            START: score(f"{weights}@{PX[-1]}", self.data, classes),
            CHOSEN: score(self.choice, self.data, classes),
        }

    def choose(self, *candidates: str | Path, out: Path) -> None:
        sizes = [word for px in PX for word in ("--px", px)]
        sslpipe("choose", *candidates, *sizes, *self.common, "--out", out)

    @property
    def common(self) -> tuple[str | Path, ...]:
        return ("--data", self.data, "--device", "cpu")

    def rows(self, seed: int, settings: list[str]) -> list[Tree]:
        """Train and choose again; return a row for each of the four backbones."""
        trained = self.out / f"run_{seed}"
        joined = self.out / f"joined_{seed}"
        recipe = RECIPES / "metric" / "my_images_mobile.toml"
        words = ("--init", self.choice, "--data", self.data, "--run-dir", trained)
        before_s = children_s()
        sslpipe("train", recipe, *words, f"seed={seed}", "run.device=cpu", *settings)
        cpu_s = round(children_s() - before_s, 1)
        try:
            self.choose(self.choice, trained, out=joined)
        except subprocess.CalledProcessError as error:
            if (
                error.returncode != 2
            ):  # else the run kept its start: skipped, being the same weights
                raise
        columns = {
            **self.before,
            TRAINED: score(trained, self.data, self.classes),
            JOINED: score(joined / "backbone", self.data, self.classes),
        }
        facts = {"set": self.name, "seed": seed, "settings": settings, "cpu_s": cpu_s}
        if self.classes is not None:
            facts["classes"] = self.classes
        return [{**facts, "what": what, **compared(own, columns)} for what, own in columns.items()]


def compared(own: dict[str, Column], columns: dict[str, dict[str, Column]]) -> Tree:
    """Compare a backbone with the OTHERS among `columns`: metric -> score and differences."""
    row: Tree = {}
    for metric, column in own.items():
        row[metric] = {"score": round(float(column.values.mean()), 5)}
        for more, other in OTHERS.items():
            theirs = columns[other][metric].values
            row[metric][more] = paired(column.values, theirs, column.classes)
    return row


def children_s() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def score(source: str | Path, data: Path, classes: int | None = None) -> dict[str, Column]:
    """Search each test image among the others of test, and among those of train, too."""
    seen, tested = (embed(source, data, split, device="cpu") for split in ("train", "test"))
    if classes is not None:
        present = torch.unique(tested.labels[tested.labels >= 0])
        order = torch.from_numpy(permutation(len(present), (CLASSES,)))
        tested = tested.rows(torch.isin(tested.labels, present[order[:classes]]))
    seen = seen._replace(ids=seen.ids + int(tested.ids.max()) + 1)
    alone = retrieval_per_query(tested, tested, k=(1,), exclude_same_id=True)
    everyone = Embeddings.joined([tested, seen])
    among = retrieval_per_query(everyone, tested, k=(1,), exclude_same_id=True)
    has_match = alone.matches > 0
    classes = tested.labels.numpy()[has_match]
    found = {
        metric: Column(alone.values[has_match, alone.names.index(metric)], classes)
        for metric in METRICS
    }
    recall = among.values[has_match, among.names.index("Recall@1")]
    return {**found, ALL: Column(recall, classes)}


if __name__ == "__main__":
    main()
