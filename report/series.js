// How each kind of attention is named and drawn, the same in every figure and table.
// SPDX-License-Identifier: Apache-2.0
"use strict";

const LLN_MODES = {
  none: { dash: "1.5 3", symbol: "cross" },
  paper: { dash: "7 4", symbol: "square" },
  per_head: { dash: "2.5 3", symbol: "diamond" },
  exact: { dash: "9 3 2 3", symbol: "triangle-up" },
  entropy: { symbol: "circle", width: 2.25 },
  frozen: { symbol: "triangle-down" },
};

// The number that a pattern captures, of blocks or features, is part of the label.
const KINDS = [
  [/^softmax$/, "softmax", { color: "--softmax", symbol: "circle", width: 2.5 }],
  [/^lln$/, "LLN", { color: "--lln" }],
  [/^lln\+diag(\d+)$/, "LLN+Diag", { color: "--diag", symbol: "square" }],
  [/^diag(\d+)$/, "Diag", { color: "--diag", symbol: "cross", dash: "2 3" }],
  [/^elu$/, "ELU+1", { color: "--elu", symbol: "triangle-up" }],
  [/^relu$/, "ReLU", { color: "--relu", symbol: "triangle-down" }],
  [/^softplus$/, "softplus", { color: "--softplus", symbol: "diamond", dash: "6 3" }],
  [/^power(.+)$/, "power", { color: "--power", symbol: "cross", dash: "6 3" }],
  [/^quadratic$/, "quadratic", { color: "--quadratic", symbol: "diamond" }],
  [/^performer(\d*)$/, "Performer", { color: "--performer", symbol: "cross" }],
  [/^linear$/, "linear, signed", { color: "--linear", symbol: "square", dash: "3 3" }],
];

const OTHER = ["", { color: "--linear", symbol: "circle" }];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross"];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];

const THEORY = { color: "--theory", dash: "5 4", width: 1.5 };

// Kinds that differ in their number alone, in the order in which they are met: the first is drawn
// as above, the next ones in the same colour with other symbols and dashes.
const families = new Map();

function memberStyle(name, kind, style) {
  if (!families.has(name)) families.set(name, []);
  const family = families.get(name);
  if (!family.includes(kind)) family.push(kind);
  const member = family.indexOf(kind);
  if (member === 0) return style;
  const symbol = SYMBOLS[(SYMBOLS.indexOf(style.symbol) + member) % SYMBOLS.length];
  return { ...style, symbol, dash: DASHES[member % DASHES.length] };
}

// {key, label, style} of an entry of the data: its kind, and for LLN how alpha and beta were set.
function seriesOf(entry) {
  const mode = entry.matching || null;
  const key = mode ? `${entry.kind} ${mode}` : entry.kind;
  const [pattern, name, style] = KINDS.find(([p]) => p.test(entry.kind)) || [null, ...OTHER];
  const size = pattern && pattern.exec(entry.kind)[1];
  const label = pattern ? [name, size].filter(Boolean).join(" ") : entry.kind;
  const manner = name === "LLN" && mode ? LLN_MODES[mode] || {} : {};
  return { key, label: mode ? `${label}, ${mode}` : label,
    style: { ...memberStyle(name, entry.kind, style), ...manner } };
}

// Entries grouped by series, in the order of first appearance.
function bySeries(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const series = seriesOf(entry);
    if (!groups.has(series.key)) groups.set(series.key, { ...series, entries: [] });
    groups.get(series.key).entries.push(entry);
  }
  const made = [...groups.values()];
  // Dashes tell modes of LLN apart; one alone needs none.
  const lln = made.filter((group) => group.entries[0].kind === "lln");
  if (lln.length === 1) lln[0].style = { ...lln[0].style, dash: null };
  return made;
}

function headName(entry) {
  if (!Number.isFinite(entry.layer)) return "Gaussian input";
  const name = entry.layer_name ? ` (${entry.layer_name})` : "";
  return `layer ${entry.layer}${name}, head ${entry.head}`;
}

function legendOf(groups, extra = []) {
  return groups.map(({ key, label, style }) => ({ key, label, style })).concat(extra);
}
