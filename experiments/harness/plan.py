"""What experiment.toml says: rows, parts and seeds become jobs, in the order of their importance.
Every key is checked, and an unknown one is an error that names the nearest.

SPDX-License-Identifier: Apache-2.0
"""

import difflib
import itertools
import pathlib
import re
from dataclasses import dataclass, field

import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent.parent
KINDS = ("train", "cost")
MARKS = ("settings", "start_from", "calibrated_by")  # what a record must share with its job
NAME = re.compile(r"[a-z0-9][a-z0-9+._=-]*")
SET = re.compile(r"[a-z][\w.]*=.*", re.DOTALL)

EXPERIMENT_KEYS = {
    "title": str,  # of its section in the page
    "group": int,  # of sections in the page
    "place": int,  # inside the group
    "kind": str,  # train, or cost
    "about": str,  # what is asked, for the page
    "note": str,  # what the tables do not say
    "data": list,  # files or folders that --data must have
    "config": str,  # of lln train, beside this file
    "seeds": int,  # how many, where a row does not say
    "seconds": int,  # a guess of one run on one H200
    "set": list,  # for all rows
    "evaluate_on": list,  # further folders of --data to evaluate on
    "generate": list,  # a text is generated, and timed at these positions: powers of two
    "tokens": list,  # of cost: lengths
    "tolerance": float,  # of a rerun that is compared with the records
    "make_data": str,  # a script beside this file: DIR LLN; the folder that it fills
    "published": list,  # rows of others' numbers, for the page
    "view": str,  # of the page, where it does not follow from the rest
    "part": list,
    "row": list,
}
PART_KEYS = {
    "name": str,
    "label": str,
    "config": str,
    "data": list,
    "set": list,
    "set_diag": list,  # for rows with Diag
    "rows": list,  # only these rows
    "seeds": int,
    "seconds": int,
    "grid": dict,  # key of a setting -> values: one part for each combination
    "tolerance": float,
    "kind": str,
    "tokens": list,
    "note": str,
}
ROW_KEYS = {
    "name": str,
    "label": str,
    "set": list,
    "seeds": int,
    "from": str,  # EXPERIMENT:ROW that the training starts from
    "calibrated": str,  # EXPERIMENT:ROW whose alpha and beta are frozen
    "seconds": int,
    "generate": list,
    "note": str,  # a remark in the page
}
PUBLISHED_KEYS = {"label": str, "source": str, "values": dict}


class PlanError(Exception):
    """What is wrong with an experiment.toml, with its path."""


@dataclass(frozen=True)
class Job:
    """One run: what identifies it, and what it is started with."""

    experiment: str
    part: str
    row: str
    seed: int
    kind: str
    config: pathlib.Path
    settings: dict  # flat: what the config and all --set say
    sets: tuple  # the --set of the command line, in order
    seconds: int = 0
    start: tuple | None = None  # (experiment, row): train.start_from
    calibration: tuple | None = None
    tokens: tuple = ()
    evaluate_on: tuple = ()
    generate: tuple = ()

    @property
    def name(self):
        part = f"{self.part}/" if self.part else ""
        return f"{part}{self.row}" + ("" if self.kind == "cost" else f"-s{self.seed}")

    @property
    def key(self):
        return (self.experiment, self.part, self.row, self.seed)


@dataclass(frozen=True)
class Experiment:
    name: str
    folder: pathlib.Path
    table: dict
    parts: list
    rows: list
    jobs: list = field(default_factory=list)

    def row(self, name):
        return next(row for row in self.rows if row["name"] == name)

    def part(self, name):
        return next(part for part in self.parts if part["name"] == name)


def check_keys(where, table, known):
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f", did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}"
            raise PlanError(f"{where}: unknown key '{key}'{meant}")
        expected = known[key]
        right = isinstance(value, (int, float) if expected is float else expected)
        if not right or (isinstance(value, bool) and expected is not bool):
            raise PlanError(f"{where}: '{key}' is {value!r}, expected a {expected.__name__}")
    for text in [*table.get("set", ()), *table.get("set_diag", ())]:
        if not isinstance(text, str) or not SET.fullmatch(text):
            raise PlanError(f"{where}: {text!r} in 'set' is not KEY=VALUE")
    if "kind" in table and table["kind"] not in KINDS:
        raise PlanError(f"{where}: kind '{table['kind']}', expected {' or '.join(KINDS)}")


def read_toml(path):
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error


def flat(table, prefix=""):
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found.update(flat(value, name + ".") if isinstance(value, dict) else {name: value})
    return found


def value_of(text):
    """A value as `lln train --set` reads it: TOML, or else a word."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parsed_sets(sets):
    pairs = (text.partition("=") for text in sets)
    return {key: value_of(value) for key, _, value in pairs}


def settings_of(config, sets):
    return {**flat(read_toml(config)), **parsed_sets(sets)}


def expand(part):
    """A part with a grid is one part for each combination of its values."""
    grid = part.get("grid")
    if not grid:
        return [part]
    keys, parts = list(flat(grid)), []
    for values in itertools.product(*flat(grid).values()):
        pairs = list(zip(keys, values, strict=True))
        own = [f"{key.rpartition('.')[2]}={value}" for key, value in pairs]
        name = "-".join(([part["name"]] if part.get("name") else []) + own)
        sets = part.get("set", []) + [f"{key}={value}" for key, value in pairs]
        parts.append(
            {**part, "name": name, "set": sets, "family": part.get("name", ""), "at": dict(pairs)}
        )
    return parts


def named(where, tables):
    seen = set()
    for table in tables:
        name = table.get("name", "")
        if not NAME.fullmatch(name):
            raise PlanError(f"{where}: name '{name}': expected small letters, digits, + . _ = -")
        if name in seen:
            raise PlanError(f"{where}: two of them are named '{name}'")
        seen.add(name)


def reference(where, text):
    experiment, colon, row = text.partition(":")
    if not colon or not experiment or not row:
        raise PlanError(f"{where}: '{text}', expected EXPERIMENT:ROW")
    return (experiment, row)


def read(name, folder=FOLDER):
    """The experiment of this name, with its jobs."""
    path = folder / name / "experiment.toml"
    if not path.exists():
        raise PlanError(f"no experiment '{name}'; there are {', '.join(names(folder))}")
    table = read_toml(path)
    check_keys(path, table, EXPERIMENT_KEYS)
    for key in ("title", "group", "row"):
        if key not in table:
            raise PlanError(f"{path}: '{key}' is missing")
    for i, row in enumerate(table["row"]):
        check_keys(f"{path}: row {i + 1}", row, ROW_KEYS)
    for i, part in enumerate(table.get("part", [])):
        check_keys(f"{path}: part {i + 1}", part, PART_KEYS)
    for i, line in enumerate(table.get("published", [])):
        check_keys(f"{path}: published {i + 1}", line, PUBLISHED_KEYS)
    named(f"{path}: rows", table["row"])
    parts = [own for part in table.get("part", []) for own in expand(part)]
    if parts:
        named(f"{path}: parts", parts)
    found = Experiment(name, path.parent, table, parts or [{"name": ""}], table["row"])
    found.jobs.extend(jobs_of(found, path))
    return found


def jobs_of(experiment, path):
    """All first seeds before the second ones; parts in their order, rows in theirs."""
    table, jobs = experiment.table, []
    known = [row["name"] for row in experiment.rows]
    for part in experiment.parts:
        for name in part.get("rows", []):
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f", did you mean '{near[0]}'?" if near else ""
                raise PlanError(f"{path}: part '{part['name']}': no row '{name}'{meant}")
        for row in experiment.rows:
            if row["name"] in part.get("rows", known):
                jobs += [
                    job_of(experiment, path, part, row, seed)
                    for seed in range(seeds_of(table, part, row))
                ]
    order = {job.key: i for i, job in enumerate(jobs)}
    return sorted(jobs, key=lambda job: (job.seed, order[job.key]))


def seeds_of(table, part, row):
    return part.get("seeds", row.get("seeds", table.get("seeds", 1)))


def has_diag(settings):
    name = settings.get("attention.name", "")
    return name == "diag" or name.endswith("+diag")


def job_of(experiment, path, part, row, seed):
    table = experiment.table
    kind = part.get("kind", table.get("kind", "train"))
    config = path.parent / part.get("config", table.get("config", "config.toml"))
    if not config.exists():
        raise PlanError(f"{path}: {config} does not exist")
    sets = [*table.get("set", []), *part.get("set", []), *row.get("set", [])]
    if has_diag(settings_of(config, sets)):
        sets += part.get("set_diag", [])
    if kind == "train":
        sets += [f"{key}.seed={seed}" for key in ("train", "data", "model")]
    where = f"{path}: row '{row['name']}'"
    return Job(
        experiment=experiment.name,
        part=part["name"],
        row=row["name"],
        seed=seed,
        kind=kind,
        config=config,
        settings=settings_of(config, sets),
        sets=tuple(sets),
        seconds=part.get("seconds", row.get("seconds", table.get("seconds", 0))),
        start=reference(where, row["from"]) if "from" in row else None,
        calibration=reference(where, row["calibrated"]) if "calibrated" in row else None,
        tokens=tuple(part.get("tokens", table.get("tokens", ()))) if kind == "cost" else (),
        evaluate_on=tuple(table.get("evaluate_on", ())),
        generate=tuple(row.get("generate", table.get("generate", ()))),
    )


def source_job(job, experiments, wanted):
    """The run that another one starts from: of the same seed where there is one."""
    experiment, row = wanted
    found = [j for j in experiments(experiment).jobs if j.row == row and not j.part]
    if not found:
        raise PlanError(
            f"{job.experiment}: '{job.row}' starts from {experiment}:{row}, which is no row"
        )
    return next((j for j in found if j.seed == job.seed), found[0])


def origins(job, experiments, extra=()):
    """What a job starts from, with its settings, as records and finished runs have it."""
    found = {}
    for key, wanted in (("start_from", job.start), ("calibrated_by", job.calibration)):
        if wanted:
            source = source_job(job, experiments, wanted)
            found[key] = {
                "experiment": source.experiment,
                "row": source.row,
                "seed": source.seed,
                "settings": {**source.settings, **parsed_sets(extra)},
                **origins(source, experiments, extra),
            }
    return found


def starting_points(folder=FOLDER):
    """(experiment, row) of all runs that others start from: their checkpoints stay."""
    found = set()
    for name in names(folder):
        for row in read_toml(folder / name / "experiment.toml").get("row", []):
            for key in ("from", "calibrated"):
                if key in row:
                    found.add(reference(name, row[key]))
    return found


def names(folder=FOLDER):
    """All experiments, by group and place."""
    found = {}
    for path in folder.glob("*/experiment.toml"):
        table = read_toml(path)
        found[path.parent.name] = (table.get("group", 0), table.get("place", 0), path.parent.name)
    return sorted(found, key=found.get)
