"""A page in headless Chromium: what it became after its scripts ran, what it said on the console,
and a picture of it. For the tests of the report and for the pictures in docs.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import html.parser
import os
import re
import shutil
import subprocess
import tempfile

# The shell alone takes a window as narrow as a phone; Debian's package chromium-headless-shell.
NAMES = ("chromium-headless-shell", "chrome-headless-shell")
CONSOLE = re.compile(r":CONSOLE[:(]\d*\)?\] (.*)$", re.MULTILINE)


def find_browser():
    """The path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclasses.dataclass
class Element:
    tag: str
    attributes: dict
    ancestors: tuple  # of Elements, the root first
    text: str = ""

    @property
    def classes(self):
        return (self.attributes.get("class") or "").split()

    def inside(self, **attributes):
        return any(all(a.attributes.get(n) == v for n, v in attributes.items())
                   for a in self.ancestors)


class Document(html.parser.HTMLParser):
    """The elements of a page, in order. Text belongs to the innermost element."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = Element(tag, dict(attributes), tuple(self.open))
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append(Element(tag, dict(attributes), tuple(self.open)))

    def handle_endtag(self, tag):
        while self.open and self.open[-1].tag != tag:
            self.open.pop()
        if self.open:
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1].text += data

    def all(self, tag=None, css=None):
        return [e for e in self.elements
                if (tag is None or e.tag == tag) and (css is None or css in e.classes)]

    def by_id(self, name):
        return next(e for e in self.elements if e.attributes.get("id") == name)


class Browser:
    def __init__(self, path):
        self.path = path

    def _run(self, page, size, options, what, hash_text):
        with tempfile.TemporaryDirectory(prefix="lln_browser_") as profile:
            command = [self.path, "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                       "--enable-logging=stderr", "--virtual-time-budget=5000",
                       f"--user-data-dir={profile}", "--window-size=%d,%d" % size, *options, what,
                       f"file://{os.path.abspath(page)}" + (f"#{hash_text}" if hash_text else "")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
        return done

    def load(self, page, size=(1100, 900), hash_text="", dark=False):
        """Returns (Document, lines of the console)."""
        preference = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        done = self._run(page, size, [preference], "--dump-dom", hash_text)
        return Document(done.stdout), CONSOLE.findall(done.stderr)

    def picture(self, page, output, size, hash_text="", scale=1.0):
        """Writes a PNG of the window."""
        self._run(page, size, [f"--force-device-scale-factor={scale}"],
                  f"--screenshot={os.path.abspath(output)}", hash_text)
