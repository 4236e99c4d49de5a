"""Rules that the source tree keeps and no compiler checks: which folder may include which, what the
core must never do, file size, opening comments, names. `tree_rules.py ROOT` prints each violation
as path:line: text and fails when there is one; tree_rules_test.py plants one of every sort.

SPDX-License-Identifier: Apache-2.0
"""

import itertools
import pathlib
import re
import sys

CPP = {".h", ".c", ".cc", ".cu", ".cuh"}
SOURCE_FOLDERS = ("include", "src", "cli", "conformance", "tests", "examples", "tools", "bench",
                  "fuzz", "report", "lln_torch", "python", "experiments")
LINE_LIMIT = 500
COLUMN_LIMIT = 100
LINE_LIMIT_FOLDERS = ("include", "src", "cli", "conformance", "bench", "report", "tests",
                      "lln_torch", "experiments")

# What a folder may include besides the C++ standard library and itself. A name is the first part of
# the path in the directive; one with a slash is that file alone. The longest matching folder
# counts, and folders that are not listed (tests, examples) may include anything.
ALLOWED_INCLUDES = {
    "include": {"lln"},
    "include/lln/c.h": {"stddef.h", "stdint.h"},  # C, so not even the other headers
    "src/math": {"lln"},
    "src/reference": {"lln", "math", "api/kernel.h", "fmt"},
    "src/cpu": {"lln", "math", "api/kernel.h", "fmt", "hwy"},
    "src/cuda": {"lln", "math", "api/kernel.h", "fmt", "cuda", "cub", "cute", "cutlass"},
    "src/analysis": {"lln", "math", "api/kernel.h", "cpu/rows.h", "cpu/tiles_f64.h", "Eigen",
                     "Spectra"},
    "src/api": {"lln", "math", "cpu", "reference", "cuda", "analysis", "fmt"},
    "src/c": {"lln", "api/faults.h", "fmt"},
    "src/io": {"lln", "fmt", "nlohmann"},
    "conformance": {"lln", "math", "api/kernel.h", "fmt", "cuda_runtime.h"},
    "bench": {"lln", "math", "io", "conformance", "cpu/highway.h", "fmt", "hwy", "cuda_runtime.h",
              "cuda_bf16.h", "cuda_fp16.h"},
    "report": {"lln", "fmt", "nlohmann"},
    "cli": {"lln", "io", "conformance", "bench", "report", "fmt", "CLI", "nlohmann", "Eigen"},
    # The stable ABI of torch alone: the Python package runs with every torch from 2.10 on.
    "python/ops": {"lln", "lln_torch/binding", "torch/csrc/stable"},
    "lln_torch/binding": {"lln", "lln_torch/binding", "report", "nlohmann", "torch/csrc/stable"},
    "lln_torch/ops": {"lln", "lln_torch/binding", "lln_torch/ops", "fmt", "torch", "ATen", "c10"},
    "lln_torch/config": {"lln", "lln_torch/config", "fmt", "nlohmann", "toml++"},
    "lln_torch/data": {"lln", "io", "lln_torch/config", "lln_torch/data", "fmt", "nlohmann",
                       "unicode"},
    "lln_torch/parallel": {"lln", "math/fnv.h", "lln_torch/ops", "lln_torch/parallel", "fmt",
                           "torch", "ATen", "c10"},
    "lln_torch/models": {"lln", "io", "lln_torch/config", "lln_torch/data", "lln_torch/models",
                         "lln_torch/ops", "lln_torch/parallel", "lln_torch/zoo", "fmt", "nlohmann",
                         "torch", "ATen", "c10"},
}
SYSTEM_FOLDERS = ("cli", "src/io", "src/cpu", "src/cuda", "lln_torch", "lln_torch/data",
                  "lln_torch/parallel")
TORCH = {"torch", "ATen", "c10"}
NO_TORCH_FOLDERS = ("include", "src", "cli", "conformance", "bench", "lln_torch/config",
                    "lln_torch/data")

# The core reports by Error alone: it never prints, ends the program or reads the environment.
SILENT_FOLDERS = ("include", "src")
FORBIDDEN_CALLS = re.compile(
    r"\bstd::(?:cout|cerr|clog)\b|\b(?:v?f?printf|puts|fputs|perror|abort|_?exit|_Exit|quick_exit"
    r"|getenv|secure_getenv|setenv|terminate)\s*\(|\bfmt::print\b|\bHWY_(?:ABORT|ASSERT|WARN)\b")

DRAWERS = {"utils", "util", "common", "misc", "helper", "helpers"}
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
# Where one machine keeps its files is nobody else's business.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers)/|\.\./sh" r"ared\b")
TEXT_SUFFIXES = CPP | {".py", ".js", ".css", ".html", ".md", ".txt", ".cmake", ".in", ".json",
                       ".cff", ".sh", ""}

LICENCE = "SPDX-License-Identifier: Apache-2.0"
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL)


def under(path, folders):
    return any(path == f or path.startswith(f + "/") for f in folders)


def text_files(root):
    """All text files as (path from the root, text); builds and hidden folders are left out."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        parts = relative.parts
        if not path.is_file() or parts[0] == "build" or "__pycache__" in parts:
            continue
        if parts[0].startswith(".") and parts[0] not in (".ci", ".clang-tidy", ".clang-format"):
            continue
        if path.suffix in TEXT_SUFFIXES:
            yield relative.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def source_files(root):
    for path, text in text_files(root):
        if under(path, SOURCE_FOLDERS) and pathlib.PurePath(path).suffix in CPP:
            yield path, text


def code_only(text):
    """The text with comments and literals blanked out; lines keep their numbers."""
    return COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def layer_of(path):
    folders = [f for f in ALLOWED_INCLUDES if under(path, (f,))]
    return max(folders, key=len, default=None)


def include_allowed(layer, target, angled):
    first = target.split("/")[0]
    if layer.endswith(".h"):
        return target in ALLOWED_INCLUDES[layer]  # a file with a rule of its own
    if angled and ("/" not in target or first == "sys"):
        # The C++ library has no suffix; <x.h> is the system's, for programs, files and intrinsics.
        return ("." not in target or layer in SYSTEM_FOLDERS
                or target in ALLOWED_INCLUDES[layer])
    if "/" not in target:
        return True  # a neighbour in the same folder
    if layer == "include":
        return first == "lln" and not angled
    own = layer.split("/")[-1]
    return (first == own or first in ALLOWED_INCLUDES[layer] or target in ALLOWED_INCLUDES[layer]
            or under(target, ALLOWED_INCLUDES[layer]))


def check_includes(root):
    for path, text in source_files(root):
        layer = layer_of(path)
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match[1] or match[2]
            if target.split("/")[0] in TORCH and under(path, NO_TORCH_FOLDERS):
                yield f"{path}:{number}: includes {target}: torch belongs to lln_torch/ alone"
            elif ".." in target.split("/"):
                yield f"{path}:{number}: includes {target}: name the path from the source root"
            elif layer and not include_allowed(layer, target, match[2] is not None):
                allowed = ", ".join(sorted(ALLOWED_INCLUDES[layer]))
                yield f"{path}:{number}: {layer} includes {target}; it may include {allowed}"


def check_silence(root):
    for path, text in source_files(root):
        if under(path, SILENT_FOLDERS):
            for match in FORBIDDEN_CALLS.finditer(code_only(text)):
                yield (f"{path}:{line_of(text, match.start())}: {match.group().strip()}: the core "
                       "never prints, ends the program or reads the environment")


def check_kernels(root):
    """What the emulated device could not compile (tests/emulated_device)."""
    for path, text in source_files(root):
        if under(path, ("src/cuda",)) and not path.endswith("instructions.cuh"):
            for match in re.finditer(r"\basm\b|<<<", code_only(text)):
                yield (f"{path}:{line_of(text, match.start())}: {match.group()}: assembly is in "
                       "instructions.cuh, and launch() launches")


def check_size(root):
    """Recorded numbers are as long as they are."""
    for path, text in text_files(root):
        lines = len(text.splitlines())
        recorded = path.startswith("bench/results/")
        if under(path, LINE_LIMIT_FOLDERS) and not recorded and lines > LINE_LIMIT:
            yield f"{path}:{LINE_LIMIT + 1}: {lines} lines, the limit is {LINE_LIMIT}"


def check_width(root):
    """C++ has clang-format for that."""
    for path, text in text_files(root):
        for number, line in enumerate(text.splitlines(), 1):
            if path.endswith((".py", ".js")) and len(line) > COLUMN_LIMIT:
                yield f"{path}:{number}: {len(line)} columns, the limit is {COLUMN_LIMIT}"


def opening_of(path, text):
    """The lines of the opening comment, or of the docstring in Python, without their marks."""
    text = re.sub(r"\A#![^\n]*\n", "", text)
    suffix = pathlib.PurePath(path).suffix
    if suffix == ".py":
        docstring = re.match(r'"""(.*?)"""\n+(# SPDX[^\n]*)?', text, re.DOTALL)
        if not docstring:
            return []
        licence = (docstring[2] or "").removeprefix("# ")
        return [line.strip() for line in (docstring[1] + "\n" + licence).splitlines()]
    mark = "//" if suffix in CPP | {".js"} else "#"
    lines = itertools.takewhile(lambda line: line.startswith(mark), text.splitlines())
    return [line.removeprefix(mark).strip() for line in lines]


def check_opening(root):
    for path, text in text_files(root):
        suffix = pathlib.PurePath(path).suffix
        folders = SOURCE_FOLDERS + ("cmake",)
        if not under(path, folders) or suffix not in CPP | {".py", ".js", ".cmake", ".sh"}:
            continue
        opening = opening_of(path, text)
        if LICENCE not in opening:
            yield f"{path}:1: the opening comment lacks the line '{LICENCE}'"
        if not any(line and line != LICENCE for line in opening):
            yield f"{path}:1: no opening comment that says what is here"


def check_names(root):
    for path, _ in text_files(root):
        for part in pathlib.PurePath(path).parts:
            if pathlib.PurePath(part).stem.lower() in DRAWERS:
                yield f"{path}:1: '{part}' is a drawer: name the subject instead"


def check_words(root):
    for path, text in text_files(root):
        for number, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line):
                yield f"{path}:{number}: unfinished work: {line.strip()}"
            if match := MACHINE_PATHS.search(line):
                yield f"{path}:{number}: a path of one machine: {match.group()}"


RULES = (check_includes, check_silence, check_kernels, check_size, check_width, check_opening,
         check_names, check_words)


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    files = len(list(source_files(root)))
    if files == 0:
        sys.exit(f"no source files under {root}")
    violations = [v for rule in RULES for v in rule(root)]
    print("\n".join(violations))
    print(f"{len(RULES)} rules, {files} C++ files, {len(violations)} violations")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
