"""Writes docs/results.md, docs/results.html and their figures from the records of the experiments.

    page.py                           writes them
    page.py --check                   fails when one is not what the records give
    page.py --records DIR --out DIR   of other records, into docs/ of another folder

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent
sys.path.insert(0, str(FOLDER))

from harness import (  # noqa: E402
    analysis,
    capacity,
    converted,
    document,
    ideas_page,
    overview,
    plan,
    trained_page,
    views,
)
from harness.document import Heading, Picture, Text  # noqa: E402
from harness.record import SPIKE_BEFORE, SPIKE_DEVIATIONS, SPIKE_SHARE  # noqa: E402
from harness.summary import Results  # noqa: E402

TITLE = "Results"
REGENERATE = "make results"
GROUPS = {
    1: "Language",
    2: "What each component is worth",
    3: "Vision",
    4: "Long Range Arena",
    5: "Causal language model, and long rows",
    6: "Cost",
    7: "Limits",
    8: "Beyond",
    9: "Small scale, on a CPU",
}
# What is of another kind than trainings, behind those of a group: of its own records.
FURTHER = {1: converted.blocks, 2: trained_page.blocks, 7: capacity.blocks, 8: ideas_page.blocks}
# What is said of several experiments, behind those of a group.
OVERALL = {
    2: (analysis.worth, analysis.sweeps, analysis.prediction),
    7: (analysis.losses,),
}
SPIKES = (
    f"the {SPIKE_BEFORE} before by more than {SPIKE_DEVIATIONS} of their deviations and "
    f"{100 * SPIKE_SHARE:.0f}%"
)
ABOUT = f"""
What LLN gives and costs, from runs of this code on real data. Every number here is computed from
the records (`records.jsonl` of each folder of `experiments`; a line a run: settings, seed,
revision, machine, wall time, curves, instruments) by `{REGENERATE}`, and a test compares.
[experiments/README.md](../experiments/README.md) says how to run them; each run fits into nine
minutes on one H200, and what was cut short is marked with a star."""
READING = f"""
**How to read the tables.** A result is that of the last evaluation, on data that was not trained
on; nothing is chosen by it. What starts from a training, or reads it (fine-tuning, calibration,
other data, generated texts), takes its last checkpoint, too. ± is the standard deviation over
seeds, behind it in brackets their number; a seed changes the initial weights, the order of the data
and all that is random. "Nothing learned" is what the most frequent answer, or the frequency of
tokens, gives. Times and speeds are those of runs that had the machine for themselves. Spikes count
means of 10 to 20 training losses that lie above the median of {SPIKES}.
Entropy, gap and log-variance are means over layers and heads at the end of the training
([instruments.md](instruments.md)); attentions whose own matrix the instruments do not measure have
none."""


def blocks(folder=FOLDER, records=None):
    names = plan.names(folder)
    results = [Results(plan.read(name, folder), folder, records) for name in names]
    more = ideas_page.so_far(records or folder)
    made = [Heading(1, TITLE), Text(ABOUT), *overview.blocks(results, GROUPS, more), Text(READING)]
    groups = sorted({r.experiment.table["group"] for r in results})
    for group in groups:
        made.append(Heading(2, f"{group}. {GROUPS[group]}"))
        for own in results:
            if own.experiment.table["group"] == group:
                made += views.section(own)
        if group in FURTHER:
            made += FURTHER[group](records or folder)
        for part in OVERALL.get(group, ()):
            made += part([r for r in results if r.experiment.table["group"] < 9])
    return made


def files(folder=FOLDER, records=None):
    """Path from the root -> what should be in it."""
    made = blocks(folder, records)
    found = {
        "docs/results.md": document.markdown(made),
        "docs/results.html": document.html("lln: results", made),
    }
    for block in made:
        if isinstance(block, Picture):
            found[f"docs/pictures/{block.name}.svg"] = block.svg
    return found


def parse(arguments):
    parser = argparse.ArgumentParser(prog="page.py", description="The page of results.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="of the experiments")
    parser.add_argument("--records", type=pathlib.Path, help="NAME/records.jsonl (the folder's)")
    parser.add_argument("--out", type=pathlib.Path, help="the page is in docs/ of it (the project)")
    given = parser.parse_args(arguments)
    if given.records and not given.out:
        parser.error("--records: with --out DIR; the project's page is of the project's records")
    return given


def main(arguments):
    given = parse(arguments)
    root = given.out or ROOT
    wanted = files(given.folder, given.records)
    there = {p.relative_to(root).as_posix() for p in root.glob("docs/pictures/results_*.svg")}
    for path in sorted(there - wanted.keys()):
        if given.check:
            sys.exit(f"{path} is of no record: {REGENERATE}")
        (root / path).unlink()
    for path, text in wanted.items():
        file = root / path
        if not given.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the records give: {REGENERATE}")


if __name__ == "__main__":
    main(sys.argv[1:])
