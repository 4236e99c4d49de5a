// Figures of all heads of a model together, and of what attention costs.
// SPDX-License-Identifier: Apache-2.0
"use strict";

function cellPanel(entries, layers, heads, value, label, unit) {
  const values = entries.map((e) => e[value]).filter(Number.isFinite);
  const [low, high] = d3.extent(values);
  return {
    x: { label: "head; layers from top to bottom", domain: [-0.5, heads.length - 0.5],
      ticks: d3.range(heads.length).filter((i) => i % Math.ceil(heads.length / 12) === 0),
      format: (i) => heads[i] },
    y: { label: `${label}, ${number(low, 2)} to ${number(high, 2)}`, down: true,
      domain: [-0.5, layers.length - 0.5], ticks: d3.range(layers.length)
        .filter((i) => i % Math.ceil(layers.length / 16) === 0),
      format: (i) => layers[i] },
    height: (width) => Math.max(60, Math.min(420, layers.length * Math.min(34, Math.max(14,
      width / heads.length)))),
    layers: [{ type: "cells", style: {}, points: entries.map((e) => ({
      x: heads.indexOf(e.head), y: layers.indexOf(e.layer),
      share: Number.isFinite(e[value]) ? (e[value] - low) / (high - low || 1) : null,
      text: `${headName(e)}\n${unit} ${number(e[value])}\n${e.verdict || ""}` })) }],
    reach: 60,
  };
}

function headsFigure(data, kind) {
  const entries = data.results.filter((e) => Number.isFinite(e.head) && seriesOf(e).key === kind);
  if (entries.length < 2) return null;
  const layers = [...new Set(entries.map((e) => e.layer))];
  const heads = [...new Set(entries.map((e) => e.head))].sort((a, b) => a - b);
  return {
    id: "heads",
    title: "Layer by layer, head by head",
    caption: "Darker is larger on white, brighter is larger on black. Heads of low entropy " +
      "pick few keys; where their gap is large as well, all queries pick the same ones.",
    columns: 3,
    panels: [
      cellPanel(entries, layers, heads, "entropy_nats", "Entropy", "entropy, nats"),
      cellPanel(entries, layers, heads, "spectral_gap", "Gap", "gap"),
      cellPanel(entries, layers, heads, "temperature", "Temperature", "temperature"),
    ],
  };
}

// Entropy and gap in one plane, cut as concentration_verdict() of the library does.
function verdictFigure(data) {
  const all = data.results.concat(data.sweep || []).filter((e) => Number.isFinite(e.spectral_gap));
  const n = all.length ? all[0].n : 0;
  if (all.length < 2 || all.some((e) => e.n !== n)) return null;
  const groups = bySeries(all.filter((e) => e.matching !== "none"));
  const most = Math.log(n), diffuse = most - Math.LN2;
  const low = Math.max(0, d3.min(all, (e) => e.entropy_nats) - 0.35);
  const floor = Math.max(0, d3.min(all, (e) => e.spectral_gap) - 0.08);
  const border = d3.range(0, 81).map((i) => {
    const x = low + ((diffuse - low) * i) / 80;
    const own = Math.min(1, Math.sqrt((Math.exp(2 * (most - x)) - 1) / n));
    return { x, y: 1 - own / 4 };
  });
  const wall = [{ x: diffuse, y: floor }, { x: diffuse, y: 1.02 }];
  const labels = [{ x: low, y: floor + 0.03, label: "unbiased" },
    { x: low, y: 1, label: "biased" },
    { x: diffuse, y: floor + 0.03, label: "diffuse" }];
  return {
    id: "verdict",
    title: "Biased or unbiased",
    caption: "Every mark is one attention matrix. To the left of the upright line rows read less " +
      "than half of the keys. Below the curve the second eigenvalue is as large as rows that " +
      "pick their own keys would make it: concentration is unbiased. Above it all rows pick " +
      "the same.",
    legend: legendOf(groups.map((g) => ({ ...g, style: { ...g.style, line: false } }))),
    panels: [{
      x: { label: "mean row entropy, nats", domain: [low, most + 0.05] },
      y: { label: "Spectral gap, 1 − |λ_2|", domain: [floor, 1.02] },
      height: (width) => Math.max(260, Math.min(400, width * 0.45)),
      layers: [{ type: "line", key: "", style: THEORY, points: border },
        { type: "line", key: "", style: THEORY, points: wall },
        { type: "labels", key: "", style: {}, points: labels }].concat(
        groups.map((group) => ({ type: "points", key: group.key,
          style: { ...group.style, opacity: 0.85 },
          points: group.entries.map((e) => ({ x: e.entropy_nats, y: e.spectral_gap,
            text: `${group.label}\n${Number.isFinite(e.layer) ? headName(e)
              : `σ ${number(e.sigma_q, 2)}`}\nentropy ${number(e.entropy_nats)}, ` +
              `gap ${number(e.spectral_gap)}\n${e.verdict || ""}` })) }))),
    }],
  };
}

// Theory on real heads: what Gaussian theory predicts from the moments alone, and what is there.
function theoryPanel(entries, groups, name, label, log) {
  // Where ln N - s/2 is negative theory has left its range: such a mark is hollow, at zero.
  const shown = (value) => (log ? value : Math.max(0, value));
  const has = (e) => e.theory[name] && (!log || e.theory[name].predicted > 0);
  const both = d3.extent(entries.filter(has).flatMap((e) => [shown(e.theory[name].predicted),
    e.theory[name].measured]));
  return {
    x: { label: "predicted", log }, y: { label, log },
    layers: [{ type: "line", key: "equal", style: THEORY,
      points: both.map((v) => ({ x: v, y: v })) }].concat(groups.map((group) => ({
        type: "points", key: group.key, style: { ...group.style, opacity: 0.8 },
        points: group.entries.filter(has).map((e) => ({
          x: shown(e.theory[name].predicted), y: e.theory[name].measured,
          hollow: shown(e.theory[name].predicted) !== e.theory[name].predicted,
          text: `${group.label}, ${headName(e)}\n` +
            `predicted ${number(e.theory[name].predicted)}\n` +
            `measured ${number(e.theory[name].measured)}` })) }))),
  };
}

function theoryFigure(data) {
  const entries = data.results.filter((e) => Number.isFinite(e.head) && e.theory.entropy);
  if (entries.length < 2) return null;
  const groups = bySeries(entries);
  return {
    id: "theory",
    title: "Log-normal theory on these heads",
    caption: "One mark for each head. Predictions use nothing but the moments of q and k and " +
      "assume that they are Gaussian; on the grey line they are right. Hollow: so concentrated " +
      "that the predicted entropy is negative.",
    legend: legendOf(groups.map((g) => ({ ...g, style: { ...g.style, line: false } })),
      [{ key: "equal", label: "predicted = measured", style: THEORY }]),
    panels: [theoryPanel(entries, groups, "entropy", "Measured entropy, nats", false),
      theoryPanel(entries, groups, "log_variance", "Measured Var(ln P)", true)],
  };
}

const COST_SERIES = {
  softmax: { label: "softmax", style: { color: "--softmax", symbol: "circle", width: 3 } },
  lln_diag: { label: "LLN+Diag", style: { color: "--diag", symbol: "square" } },
  lln: { label: "LLN", style: { color: "--lln", symbol: "diamond", width: 1.25 } },
};

function costFigure(data) {
  if (!data.cost || !data.cost.rows.length) return null;
  const rows = data.cost.rows;
  const names = Object.keys(COST_SERIES).filter((name) => rows[0][name]);
  const tokens = rows.map((r) => r.tokens);
  const ticks = tokens.filter((_, i) => (tokens.length - 1 - i) % 2 === 0);
  const layersOf = (value, factor, textOf) => names.map((name) => ({
    type: "line", key: name, style: COST_SERIES[name].style,
    points: rows.map((r) => ({ x: r.tokens, y: r[name][value] * factor,
      hollow: value === "seconds" && r[name].predicted,
      text: `${COST_SERIES[name].label}, ${r.tokens} tokens\n${textOf(r[name][value] * factor)}` +
        (value === "seconds" && r[name].predicted ? " (predicted)" : "") })) }));
  const matrix = { color: "--theory", dash: "5 4", width: 1.5 };
  const some = rows.some((r) => names.some((name) => r[name].predicted));
  return {
    id: "cost",
    title: "Time and memory against the number of tokens",
    caption: `One forward call, f32, ${data.cost.heads} heads of ${data.cost.dim} channels, ` +
      `${data.cost.threads} thread${data.cost.threads === 1 ? "" : "s"} of this machine. Memory ` +
      "is inputs, output and scratch memory: the softmax here streams its rows, so only time " +
      "tells them apart; the N × N matrix that a plain implementation stores is drawn for " +
      "comparison." + (some
        ? " Hollow marks are predicted from the call before: the call would take too long." : ""),
    legend: names.map((name) => ({ key: name, ...COST_SERIES[name] }))
      .concat([{ key: "matrix", label: "N × N matrix", style: matrix }]),
    panels: [
      { x: { label: "tokens, N", log: true, ticks, format: String },
        y: { label: "Time of one call", log: true, format: timeText },
        layers: layersOf("seconds", 1e3, timeText) },
      { x: { label: "tokens, N", log: true, ticks, format: String },
        y: { label: "Memory of one call", log: true, format: sizeText },
        layers: layersOf("bytes", 1e-6, sizeText).concat([{
          type: "line", key: "matrix", style: matrix,
          points: rows.map((r) => ({ x: r.tokens, y: r.matrix_bytes * 1e-6,
            text: `N × N matrix, ${r.tokens} tokens\n${sizeText(r.matrix_bytes * 1e-6)}` })) }]) },
    ],
  };
}
