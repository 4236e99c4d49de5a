// The page: heading, table, the figures that the data allow, each with its sentence, command and
// buttons; light and dark. All text from the data goes in as text, never as markup: names of
// tensors and files come from outside.
// SPDX-License-Identifier: Apache-2.0
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const drawn = [];  // {host, make}: figures on the page, to be drawn again when the width changes

function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...[].concat(children));
  return made;
}

function button(label, title, act) {
  const made = element("button", { type: "button", title }, label);
  made.addEventListener("click", act);
  return made;
}

// ---- Parts -------------------------------------------------------------------------------------

function mean(values) {
  const finite = values.filter(Number.isFinite);
  return finite.length ? d3.mean(finite) : null;
}

function verdictText(entries) {
  const counts = new Map();
  for (const e of entries) if (e.verdict) counts.set(e.verdict, (counts.get(e.verdict) || 0) + 1);
  if (counts.size === 0) return "–";
  if (entries.length === 1) return [...counts.keys()][0];
  return [...counts].sort((a, b) => b[1] - a[1]).map(([v, n]) => `${v} ${n}`).join(", ");
}

function summaryTable() {
  const columns = [
    ["temperature", "temperature"], ["entropy, nats", "entropy_nats"], ["gap", "spectral_gap"],
    ["Var(ln P)", "log_var"], ["α", "alpha"], ["β", "beta"],
  ].filter(([, name]) => data.results.some((e) => Number.isFinite(e[name])));
  const groups = bySeries(data.results);
  const head = ["attention", ...columns.map(([label]) => label), "verdict"];
  const rows = groups.map((group) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = `var(${group.style.color})`;
    const cells = columns.map(([, name]) => number(mean(group.entries.map((e) => e[name]))));
    return element("tr", {}, [element("td", {}, [swatch, group.label]),
      ...cells.map((c) => element("td", {}, c)), element("td", {}, verdictText(group.entries))]);
  });
  return wideTable(head, rows);
}

function wideTable(head, rows) {
  return element("div", { class: "wide" }, element("table", {}, [
    element("thead", {}, element("tr", {}, head.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, rows)]));
}

// rows: {color, cells}, the first cell with a swatch of the colour.
function tableElement(head, rows) {
  return wideTable(head, rows.map(({ color, cells }) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = `var(${color})`;
    return element("tr", {}, cells.map((text, i) =>
      element("td", {}, i === 0 ? [swatch, text] : text)));
  }));
}

function summarySection() {
  const several = data.results.some((e) => Number.isFinite(e.head));
  const sentence = (several
    ? "Means over all layers and heads; the verdicts are counted. "
    : "") +
    "Low entropy with a small gap is unbiased concentration: every query reads keys of its own. " +
    "Low entropy with a large gap is biased: all queries read the same few keys. Diffuse " +
    "attention reads more than half of all keys.";
  return element("section", { id: "summary" }, [
    element("div", { class: "head" }, element("h2", {}, "In numbers")),
    element("p", {}, sentence), summaryTable(),
    element("pre", { class: "command" }, data.command)]);
}

function choice(label, options, change) {
  if (options.length < 2) return [];
  const select = element("select", { "aria-label": label },
    options.map(({ value, text }) => element("option", { value }, text)));
  select.addEventListener("change", () => change(select.value));
  return [element("div", { class: "choice" }, [`${label} `, select])];
}

// make(chosen) gives the figure for a value of the choice; the first value is drawn at first.
function figureSection(make, options = [], label = "") {
  let chosen = options.length ? options[0].value : undefined;
  const first = make(chosen);
  if (!first) return null;
  const host = element("div", { class: "figure" });
  const caption = element("p", {}, richNodes(first.caption));
  const svg = () => host.querySelector("svg");
  const tools = element("div", { class: "tools" }, [
    button("SVG", "Save this figure as SVG", () => saveSvg(svg(), `lln-${first.id}`)),
    button("PNG", "Save this figure as PNG", () => savePng(svg(), `lln-${first.id}`))]);
  const entry = { host, make: () => make(chosen) };
  drawn.push(entry);
  const change = (value) => {
    chosen = value;
    const figure = make(chosen);
    caption.replaceChildren(...richNodes(figure.caption));
    drawFigure(host, figure);
  };
  return element("section", { id: first.id }, [
    element("div", { class: "head" }, [element("h2", {}, first.title), tools]),
    caption, ...choice(label, options, change), host,
    element("pre", { class: "command" }, data.command)]);
}

function fillHeading() {
  document.title = `lln: ${data.title}`;
  document.getElementById("title").textContent = data.title;
  document.getElementById("lead").textContent = data.lead;
  const facts = document.getElementById("facts");
  for (const [name, value] of data.facts) {
    facts.append(element("div", {}, [element("dt", {}, name), element("dd", {}, value)]));
  }
  document.getElementById("made").textContent = `Made by lln ${data.version}: ${data.command}`;
}

// Runs that were trained, of lln compare.
function fillTraining() {
  const layers = trainingLayers(data).map((value) => ({ value,
    text: value === "all" ? "all" : `layer ${value}` }));
  const table = trainingTable(data);
  const sections = [
    element("section", { id: "summary" }, [
      element("div", { class: "head" }, element("h2", {}, "In numbers")),
      element("p", {}, table.caption), tableElement(table.head, table.rows),
      element("pre", { class: "command" }, data.command)]),
    figureSection(() => trainingFigure(data)),
    figureSection((layer) => concentrationFigure(data, layer), layers, "Layer"),
    figureSection((layer) => concentrationAgainstLoss(data, layer), layers, "Layer"),
  ];
  document.getElementById("main").append(...sections.filter(Boolean));
}

function fillFigures() {
  const heads = [...new Set(data.results.map(headName))]
    .map((name) => ({ value: name, text: name }));
  const kinds = bySeries(data.results).map(({ key, label }) => ({ value: key, text: label }));
  const sections = [
    data.results.length ? summarySection() : null,
    figureSection(() => centralFigure(data)),
    figureSection((kind) => headsFigure(data, kind), kinds, "Attention"),
    figureSection(() => verdictFigure(data)),
    figureSection((head) => positionFigure(data, head), heads, "Head"),
    figureSection(() => matchingFigure(data)),
    figureSection((head) => histogramFigure(data, head), heads, "Head"),
    figureSection((head) => quantileFigure(data, head), heads, "Head"),
    figureSection(() => theoryFigure(data)),
    figureSection(() => fentonFigure(data)),
    figureSection((head) => spectrumFigure(data, head), heads, "Head"),
    figureSection(() => costFigure(data)),
  ];
  document.getElementById("main").append(...sections.filter(Boolean));
}

// ---- Theme and size ----------------------------------------------------------------------------

const system = window.matchMedia("(prefers-color-scheme: dark)");
let picked = null;  // what the switch says; null: what the system says

function applyTheme() {
  const theme = picked || (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

function drawAll() {
  for (const { host, make } of drawn) drawFigure(host, make());
}

// Options behind the # of the address: theme=dark; only=ID shows one figure alone, for pictures.
function applyAddress() {
  const options = new URLSearchParams(window.location.hash.slice(1));
  if (["dark", "light"].includes(options.get("theme"))) picked = options.get("theme");
  const alone = options.get("only") && document.getElementById(options.get("only"));
  if (alone) {
    document.documentElement.classList.add("alone");
    alone.classList.add("chosen");
  }
}

fillHeading();
if (data.training) fillTraining(); else fillFigures();
applyAddress();
applyTheme();
drawAll();
system.addEventListener("change", applyTheme);
document.getElementById("theme").addEventListener("click", () => {
  picked = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) drawAll();
  width = window.innerWidth;
});
// For tests and for pictures of the page.
Object.assign(document.documentElement.dataset, {
  figures: drawn.length, width: window.innerWidth,
  contentWidth: document.documentElement.scrollWidth,
  contentHeight: document.documentElement.scrollHeight });
