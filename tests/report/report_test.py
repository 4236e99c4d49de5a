"""The report in headless Chromium, made by the program from Gaussian input and from a dump whose
names are hostile: it loads in silence, every plot has marks, it fits a phone, figures can be saved,
nothing is fetched and nothing in the data becomes markup.

    report_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/cli")]
import headless_browser  # noqa: E402
import safetensors_file  # noqa: E402

PROGRAM = os.path.abspath(sys.argv.pop(1))
NO_BROWSER = "no headless browser: install chromium-headless-shell"
HOSTILE = ("</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
           "&lt;b&gt;<!--")
GAUSSIAN_FIGURES = ["temperature", "verdict", "matching", "histogram", "quantiles", "fenton",
                    "spectrum", "cost"]
DUMP_FIGURES = ["heads", "verdict", "matching", "histogram", "quantiles", "theory", "fenton",
                "spectrum", "cost"]
VARIANTS = "lln+diag16,lln+diag64,diag16,performer64,performer256,power2,power3"
PHONE = (390, 844)
DESKTOP = (1100, 900)


def write_dump(path):
    generator = random.Random(1)
    tensors = {}
    for layer in (HOSTILE, "layer.1"):
        for part in "qk":
            values = [generator.gauss(0, 1) for _ in range(3 * 32 * 16)]
            tensors[f"{layer}.{part}"] = ("F32", [1, 3, 32, 16], values)
    safetensors_file.write(path, tensors)


def setUpModule():
    global folder, browser, gaussian, dump, causal, single, variants, clamped
    path = headless_browser.find_browser()
    if path is None:
        if os.environ.get("CI"):
            raise RuntimeError("continuous integration tests the report: no browser found")
        raise unittest.SkipTest(NO_BROWSER)
    browser = headless_browser.Browser(path)
    folder = tempfile.TemporaryDirectory(prefix="lln_report_")
    unittest.addModuleCleanup(folder.cleanup)
    gaussian, dump, causal = (os.path.join(folder.name, name)
                              for name in ("gaussian.html", "dump.html", "causal.html"))
    single, variants, clamped = (os.path.join(folder.name, name + ".html")
                                 for name in ("single", "variants", "clamped"))
    one = os.path.join(folder.name, "one")
    values = random.Random(2)
    safetensors_file.write(one, {part: ("F32", [32, 16], [values.gauss(0, 1) for _ in range(512)])
                                 for part in "qk"})
    tensors = os.path.join(folder.name, "a<b>&'c'.safetensors")
    write_dump(tensors)
    for arguments in (["--gaussian", "n=64,d=16,seeds=2", "--report", gaussian],
                      [tensors, "--report", dump],
                      ["--gaussian", "n=64,d=16,seeds=1", "--causal", "--report", causal],
                      [one, "--kinds", "lln,linear", "--report", single],
                      ["--gaussian", "n=64,d=16,seeds=1", "--kinds", VARIANTS, "--report",
                       variants],
                      ["--gaussian", "sigma_q=0.1,sigma_k=0.5,n=16,d=4,seeds=1", "--kinds",
                       "softmax,lln", "--report", clamped]):
        subprocess.run([PROGRAM, "analyze", *arguments], check=True, timeout=300,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def first_pixel(path):
    """Of a PNG with eight bits a channel; the filter of the first row leaves its first pixel."""
    raw = pathlib.Path(path).read_bytes()
    data, at = b"", 8
    while at < len(raw):
        (length,), kind = struct.unpack(">I", raw[at : at + 4]), raw[at + 4 : at + 8]
        if kind == b"IDAT":
            data += raw[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(data)[1:4])


class Report(unittest.TestCase):
    def load(self, page, size=DESKTOP, **options):
        document, console = browser.load(page, size, **options)
        self.assertEqual(console, [])
        return document

    def with_script(self, page, script):
        """The page after a script ran at its end, as a user at the console would."""
        changed = os.path.join(folder.name, "changed.html")
        text = pathlib.Path(page).read_text(encoding="utf-8")
        pathlib.Path(changed).write_text(
            text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        return self.load(changed)

    def result(self, page, script):
        """What the expression `script` gives, awaited, as text."""
        made = self.with_script(page, "(async () => { const made = document.createElement('pre');"
                                f"made.id = 'result'; made.textContent = await ({script});"
                                "document.body.append(made); })();")
        return made.by_id("result").text


class Figures(Report):
    def assert_figures(self, page, expected, size):
        document = self.load(page, size)
        sections = [e.attributes["id"] for e in document.all("section")]
        self.assertEqual(sections, ["summary", *expected])
        marks = document.all(css="mark")
        for name in expected:
            panels = [e for e in document.all("g", "panel") if e.inside(id=name)]
            self.assertTrue(panels, name)
            for panel in panels:
                own = [m for m in marks if any(a is panel for a in m.ancestors)]
                self.assertGreaterEqual(len(own), 2, f"{name}: a panel without marks")
        for element in document.elements:
            for attribute, value in element.attributes.items():
                self.assertNotRegex(value or "", r"\b(NaN|undefined|Infinity)\b",
                                    f"{element.tag} {attribute}")
        for element in document.all("text") + document.all("tspan") + document.all("td"):
            self.assertNotRegex(element.text, r"\b(NaN|undefined|null|Infinity)\b")

    def test_gaussian(self):
        for size in (DESKTOP, PHONE):
            self.assert_figures(gaussian, GAUSSIAN_FIGURES, size)

    def test_dump(self):
        for size in (DESKTOP, PHONE):
            self.assert_figures(dump, DUMP_FIGURES, size)

    def test_causal(self):
        self.assert_figures(causal, ["position", "cost"], DESKTOP)

    def test_sentence_and_command_under_each(self):
        document = self.load(gaussian)
        for section in document.all("section"):
            inside = [e for e in document.elements if any(a is section for a in e.ancestors)]
            sentences = [e.text for e in inside if e.tag == "p"]
            self.assertTrue(any(len(s) > 60 for s in sentences), section.attributes)
            commands = [e.text for e in inside if e.tag == "pre"]
            self.assertEqual(commands,
                             ["lln analyze --gaussian n=64,d=16,seeds=2 --report " + gaussian])

    def test_the_central_figure_has_a_curve_for_each_attention(self):
        document = self.load(gaussian)
        keys = {e.attributes["data-key"] for e in document.all("g", "key")
                if e.inside(id="temperature")}
        self.assertLessEqual({"softmax", "elu", "relu", "quadratic", "performer", "lln paper",
                              "lln per_head", "lln exact", "lln entropy"}, keys)
        drawn = {a.attributes["data-series"] for m in document.all(css="mark")
                 if m.inside(id="temperature") for a in m.ancestors if "series" in a.classes}
        self.assertLessEqual(keys, drawn)


    def test_kinds_that_differ_in_a_number_look_different(self):
        document = self.load(variants)
        keys = [e for e in document.all("g", "key") if e.inside(id="spectrum")]
        self.assertEqual(len(keys), len(VARIANTS.split(",")))
        looks, labels = set(), set()
        for key in keys:
            own = [e for e in document.elements if any(a is key for a in e.ancestors)]
            looks.add(tuple((e.attributes.get("d"), e.attributes.get("style")) for e in own
                            if e.tag == "path"))
            labels.add("".join(e.text for e in own if e.tag in ("text", "tspan")))
        self.assertEqual(len(looks), len(keys))
        self.assertEqual(len(labels), len(keys), labels)

    def test_fenton_of_one_head(self):
        document = self.load(single)
        (panel,) = [e for e in document.all("g", "panel") if e.inside(id="fenton")]
        own = [e for e in document.elements if any(a is panel for a in e.ancestors)]
        frame = next(e for e in own if e.tag == "line" and "base" in e.classes).attributes
        width, height = float(frame["x2"]), float(frame["y2"])
        for name in ("fw", "line"):
            (path,) = [e for e in own if "mark" in e.classes
                       and any(a.attributes.get("data-series") == name for a in e.ancestors)]
            points = [tuple(map(float, p.split(",")))
                      for p in re.findall(r"[-\d.e]+,[-\d.e]+", path.attributes["d"])]
            inside = [p for p in points if 0 <= p[0] <= width and 0 <= p[1] <= height]
            self.assertGreater(len(inside), len(points) / 2, name)
            self.assertGreater(max(p[0] for p in inside) - min(p[0] for p in inside), width / 3)
        for axis in (a for a in own if a.tag == "g" and "axis" in a.classes):
            ticks = [e for e in own if e.tag == "text" and any(a is axis for a in e.ancestors)]
            self.assertGreaterEqual(len(ticks), 2)

    def test_a_narrow_logarithmic_axis_has_ticks(self):
        found = self.result(single, "(() => String(ticksOf({log: true}, "
                            "d3.scale.log().domain([3.1, 4.5]).range([0, 400]), 400, 56)))()")
        self.assertGreaterEqual(len(found.split(",")), 2, found)

    def test_captions_speak_of_the_data(self):
        def caption(page, name):
            document = self.load(page)
            return next(e.text for e in document.all("p") if e.inside(id=name))

        self.assertIn("LLN follows it", caption(gaussian, "temperature"))
        self.assertNotIn("LLN follows", caption(variants, "temperature"))
        self.assertNotIn("ReLU", caption(variants, "temperature"))
        self.assertIn("do not sum to one", caption(single, "spectrum"))
        self.assertNotIn("signed", caption(gaussian, "spectrum"))
        self.assertIn("Clamped (exact, entropy)", caption(clamped, "temperature"))
        self.assertNotIn("Clamped", caption(gaussian, "temperature"))


class Appearance(Report):
    def test_light_and_dark_as_the_system_says(self):
        for dark, name in ((False, "light"), (True, "dark")):
            document = self.load(gaussian, dark=dark)
            self.assertEqual(document.all("html")[0].attributes["data-theme"], name)

    def test_the_page_changes_its_colours(self):
        pixels = {}
        for theme in ("light", "dark"):
            output = os.path.join(folder.name, f"{theme}.png")
            browser.picture(gaussian, output, (600, 400), f"theme={theme}")
            pixels[theme] = first_pixel(output)
        self.assertGreater(min(pixels["light"]), 240)
        self.assertLess(max(pixels["dark"]), 40)

    def test_the_switch(self):
        document = self.with_script(gaussian, "document.getElementById('theme').click()")
        self.assertEqual(document.all("html")[0].attributes["data-theme"], "dark")

    def test_a_phone_does_not_scroll_sideways(self):
        for page in (gaussian, dump):
            for size in (PHONE, (320, 600), DESKTOP):
                root = self.load(page, size).all("html")[0].attributes
                self.assertEqual(int(root["data-width"]), size[0])
                self.assertLessEqual(int(root["data-content-width"]), size[0])

    def test_what_is_under_the_pointer(self):
        text = self.result(dump, """(() => {
          const mark = document.querySelector("#heads .mark").getBoundingClientRect();
          const target = document.querySelector("#heads .panel > rect");
          target.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
            clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2}));
          return document.getElementById("tip").textContent; })()""")
        self.assertIn(f"layer 0 ({HOSTILE}), head 0", text)
        self.assertRegex(text, r"entropy, nats \d\.\d+")


class Saving(Report):
    def test_svg_stands_alone(self):
        for page, names in ((gaussian, GAUSSIAN_FIGURES), (dump, ["heads"])):
            for name in names:
                text = self.result(page, f"standaloneSvg(document.querySelector('#{name} svg'))")
                root = xml.etree.ElementTree.fromstring(text)
                self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
                self.assertNotIn("var(", text)
                self.assertNotIn("class=", text)
                self.assertGreater(len(text), 2000)

    def test_png(self):
        for page, name in ((gaussian, "temperature"), (dump, "heads")):
            size = self.result(page, f"pictureOf(document.querySelector('#{name} svg'))"
                               ".then((blob) => `${blob.type} ${blob.size}`)")
            kind, count = size.split()
            self.assertEqual(kind, "image/png")
            self.assertGreater(int(count), 5000)

    def test_buttons(self):
        document = self.load(gaussian)
        for name in GAUSSIAN_FIGURES:
            buttons = [e.text for e in document.all("button") if e.inside(id=name)]
            self.assertEqual(buttons, ["SVG", "PNG"])
        saved = self.result(gaussian, """new Promise((resolve) => {
          HTMLAnchorElement.prototype.click = function () { resolve(this.download); };
          document.querySelector("#cost .tools button").click(); })""")
        self.assertEqual(saved, "lln-cost.svg")


class Safety(Report):
    def test_data_are_never_markup(self):
        document = self.load(dump)
        self.assertEqual(document.all("img"), [])
        self.assertEqual(len(document.all("script")), 3)
        self.assertNotEqual(document.all("title")[0].text, "owned")
        self.assertIn("a<b>&'c'.safetensors", document.by_id("title").text)
        options = [e.text for e in document.all("option")]
        self.assertIn(f"layer 0 ({HOSTILE}), head 0", options)
        raw = pathlib.Path(dump).read_text(encoding="utf-8")
        self.assertEqual(len(re.findall(r"</script", raw)), 3)

    def test_nothing_is_fetched(self):
        raw = pathlib.Path(gaussian).read_text(encoding="utf-8")
        self.assertIn("default-src 'none'", raw)
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", raw))
        self.assertTrue(all(a.startswith("http://www.w3.org/") for a in addresses), addresses)
        document = headless_browser.Document(raw)
        for element in document.elements:
            for name in ("src", "href"):
                self.assertIn(element.attributes.get(name, "data:,")[:5], ("data:",))


if __name__ == "__main__":
    unittest.main()
