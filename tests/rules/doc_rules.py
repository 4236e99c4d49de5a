"""Rules for the documents: links, file names, make targets and presets that they mention exist,
every block of C++ or C is a program, and the one in README is examples/hello.cc.
`doc_rules.py ROOT` prints each violation as path:line: text; doc_rules_test.py plants one of every
sort. `doc_rules.py ROOT --program PATH` compares them with the program: problem texts go to
`lln explain`, and docs/cli.md and the help texts name the same options.

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
FILE_SUFFIXES = (".md", ".h", ".c", ".cc", ".py", ".cmake", ".json", ".txt", ".cff")
# A path from the root, as a word of code; names in capitals and patterns stand for something else.
PATH = re.compile(r"\.?[a-z][\w.+-]*(?:/[\w.+-]+)*/?")
MAKE = re.compile(r"\bmake ([a-z]+(?:-[a-z]+)*)\b")
PRESET = re.compile(r"--preset[ =]([\w-]+)")
PROBLEM = re.compile(r"\b(?:forward|backward|append|step|train):(?:f32|f16|bf16|f64):[\w:+=.]*\w")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PLACEHOLDER = re.compile(r"@@\w*@@")
# Folders that a build or an install makes: mentioned, but not in the tree.
MADE_FOLDERS = ("build", "lib")
EXIT_UNSUPPORTED = 4


def documents(root):
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "experiments/*.md"):
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def code_spans(text):
    """Fenced blocks that are no programs, and inline code outside of blocks, as (offset, code)."""
    for match in FENCE.finditer(text):
        if match[1] not in ("cpp", "c", "cmake", "python"):
            yield match.start(2), match[2]
    outside = FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    for match in INLINE_CODE.finditer(outside):
        yield match.start(1), match[1]


def program_blocks(text):
    """Blocks of C++ and C as (line, suffix of a source file, code)."""
    suffixes = {"cpp": "cc", "c++": "cc", "cc": "cc", "cxx": "cc", "c": "c"}
    for match in FENCE.finditer(text):
        if match[1] in suffixes:
            yield line_of(text, match.start()), suffixes[match[1]], match[2]


def anchors(text):
    """The anchors of a document's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-"))
    return found


def check_links(root):
    for path, text in documents(root):
        for match in LINK.finditer(text):
            target, _, anchor = match[1].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = root / path if not target else (root / path).parent / target
            where = f"{path}:{line_of(text, match.start())}"
            if not file.exists():
                yield f"{where}: link to {target}, which does not exist"
            elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
                yield f"{where}: no heading #{anchor} in {target or path}"


def check_names(root):
    top = {p.name for p in root.iterdir()}
    for path, text in documents(root):
        for offset, code in code_spans(text):
            for word in re.finditer(r"[^\s`'\"(),;:|=<>]+", code):
                name = word.group()
                if not PATH.fullmatch(name) or name.split("/")[0] in MADE_FOLDERS:
                    continue
                in_tree = "/" in name and name.split("/")[0] in top
                is_path = in_tree or name.endswith(FILE_SUFFIXES)
                # Inside the library, headers are named as they are included.
                places = (root / name, (root / path).parent / name, root / "include" / name)
                if is_path and not any(p.exists() for p in places):
                    where = f"{path}:{line_of(text, offset + word.start())}"
                    yield f"{where}: names {name}, which does not exist"


def check_commands(root):
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    configured = json.loads((root / "CMakePresets.json").read_text(encoding="utf-8"))
    presets = {p["name"] for p in configured["configurePresets"] if not p.get("hidden")}
    mentions = ((MAKE, targets, "make target"), (PRESET, presets, "preset"))
    for path, text in documents(root):
        for offset, code in code_spans(text):
            for pattern, known, what in mentions:
                for match in pattern.finditer(code):
                    if match[1] not in known:
                        where = f"{path}:{line_of(text, offset + match.start())}"
                        names = ", ".join(sorted(known))
                        yield f"{where}: no {what} '{match[1]}'; there are {names}"


def check_programs(root):
    """Blocks of C++ and C are built and run by ctest, so each must be a program."""
    for path, text in documents(root):
        for line, _, code in program_blocks(text):
            if not re.search(r"\bint main\(", code):
                yield f"{path}:{line}: a block of code without main(): make it a program"
    readme = (root / "README.md").read_text(encoding="utf-8")
    hello = (root / "examples/hello.cc").read_text(encoding="utf-8")
    body = re.sub(r"\A(?://[^\n]*\n)+\n*", "", hello)
    if body not in (code for _, _, code in program_blocks(readme)):
        yield "README.md:1: no C++ block equals examples/hello.cc below its opening comment"


def check_placeholders(root):
    for path, text in documents(root):
        for match in PLACEHOLDER.finditer(text):
            yield f"{path}:{line_of(text, match.start())}: {match.group()} is not filled in"


RULES = (check_links, check_names, check_commands, check_programs, check_placeholders)


def check_problems(root, program):
    """Every problem text in the documents parses: `lln explain` takes it or says unsupported."""
    problems = {}
    for path, text in documents(root):
        for match in PROBLEM.finditer(text):
            problems.setdefault(match.group(), f"{path}:{line_of(text, match.start())}")
    for problem, where in problems.items():
        result = subprocess.run([program, "explain", problem], capture_output=True, text=True)
        if result.returncode not in (0, EXIT_UNSUPPORTED):
            yield f"{where}: {problem}: exit {result.returncode}: {result.stderr.strip()}"
    if not problems:
        yield "docs: no problem text found"


def check_options(root, program):
    """A page of verbs names the options that their help texts name, no more and no fewer."""
    def help_text(*verb):
        return subprocess.run([program, *verb, "--help"], capture_output=True, text=True).stdout

    # CLI11 lists subcommands below a heading, two spaces in. The verbs of the second heading have a
    # page of their own, since they need not be built in.
    offered, _, listed = help_text().partition("Subcommands:")
    core, _, torch = listed.partition("Training (LibTorch layer):")
    info = subprocess.run([program, "info"], capture_output=True, text=True).stdout
    pages = [("docs/cli.md", core, offered)]
    if re.search(r"^torch +built in", info, re.MULTILINE):
        pages.append(("docs/cli_training.md", torch, "--help --json --threads"))
    for page, listed, offered in pages:
        verbs = re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)
        options = set(OPTION.findall(offered))
        for verb in verbs:
            options |= set(OPTION.findall(help_text(verb).partition("Examples:")[0]))
        yield from compare_options(page, (root / page).read_text(encoding="utf-8"), verbs, options)


def compare_options(page, text, verbs, options):
    described = set(OPTION.findall(text))
    for option in sorted(options - described):
        yield f"{page}:1: {option} is in a help text but not here"
    for option in sorted(described - options):
        yield f"{page}:{line_of(text, text.index(option))}: {option} is in no help text"
    for verb in verbs:
        if f"`{verb}" not in text:
            yield f"{page}:1: the verb {verb} is not described"
    if not verbs:
        yield f"{page}:1: the help text of the program lists no verbs"


PROGRAM_RULES = (check_problems, check_options)


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    if sys.argv[2:3] == ["--program"]:
        violations = [v for rule in PROGRAM_RULES for v in rule(root, sys.argv[3])]
    else:
        violations = [v for rule in RULES for v in rule(root)]
    print("\n".join(violations))
    print(f"{len(list(documents(root)))} documents, {len(violations)} violations")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
