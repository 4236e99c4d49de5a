// The figures: what of the data each one shows, in which words. Every function returns the figure,
// or null where the data have nothing for it.
// SPDX-License-Identifier: Apache-2.0
"use strict";

function sweepPanel(groups, value, error, y, extra = []) {
  return {
    x: { label: "temperature of the input, τ = 1/(σ_q σ_k)", log: true, domain: y.domainX },
    y,
    layers: extra.concat(groups.flatMap((group) => {
      const points = group.entries.filter((e) => Number.isFinite(e[value])).map((e) => ({
        x: e.input_temperature, y: e[value], error: e[error],
        text: `${group.label}\nσ ${number(e.sigma_q, 2)}, τ ${number(e.input_temperature, 2)}\n` +
          `${y.unit} ${number(e[value])}${e[error] > 0 ? ` ± ${number(e[error])}` : ""}`,
      }));
      return [{ type: "errors", key: group.key, style: group.style, points },
        { type: "line", key: group.key, style: group.style, points }];
    })),
  };
}

function centralFigure(data) {
  if (!data.sweep || !data.sweep.length) return null;
  const groups = bySeries(data.sweep);
  const softmax = groups.find((g) => g.key === "softmax");
  const n = data.sweep[0].n;
  const range = d3.extent(data.sweep, (e) => e.input_temperature);
  const domainX = [range[0] / 1.06, range[1] * 1.06];
  // ln N - s/2 where it still is an entropy.
  const line = d3.range(0, 61).map((i) => {
    const tau = range[0] * (range[1] / range[0]) ** (i / 60);
    return { x: tau, y: Math.log(n) - 0.5 / tau ** 2 };
  }).filter((p) => p.y > 0);
  const uniform = domainX.map((x) => ({ x, y: Math.log(n) }));
  const lowest = d3.min(data.sweep, (e) => e.entropy_nats);
  const theory = softmax ? [{ type: "line", key: "theory", style: THEORY, points: line }] : [];
  return {
    id: "temperature",
    title: "Entropy and spectral gap against temperature",
    caption: "Softmax reads fewer keys as its input gets colder (to the left): entropy and gap fall " +
      "together. LLN follows it, closest where its entropy is matched. ELU+1, ReLU and the quadratic " +
      "kernel stay where they are: they have no temperature. Bars are the deviation of the seeds.",
    legend: legendOf(groups, softmax
      ? [{ key: "theory", label: "theory for softmax, ln N − 1/2τ²", style: THEORY }] : []),
    panels: [
      sweepPanel(groups, "entropy_nats", "entropy_deviation", { label: "Mean row entropy, nats",
        unit: "entropy", domain: [Math.max(0, lowest - 0.5), Math.log(n) + 0.2], domainX },
        [{ type: "line", key: "uniform", style: { color: "--line", width: 1 }, points: uniform },
          ...theory]),
      sweepPanel(groups, "spectral_gap", "gap_deviation", { label: "Spectral gap, 1 − |λ_2|",
        unit: "gap", domainX }),
    ],
  };
}

// ---- Log-normality -------------------------------------------------------------------------------

function normalDensity(x, mean, variance) {
  return Math.exp(-((x - mean) ** 2) / (2 * variance)) / Math.sqrt(2 * Math.PI * variance);
}

function histogramPanel(entry) {
  const { lower, upper, share } = entry.histogram;
  const width = (upper - lower) / share.length;
  const series = seriesOf(entry);
  const bars = share.map((s, i) => ({ x: lower + i * width, x1: lower + (i + 1) * width,
    y: s / width, text: `ln P ${number(lower + (i + 0.5) * width, 2)}\ndensity ${number(s / width)}` }));
  const curve = d3.range(0, 121).map((i) => {
    const x = lower + ((upper - lower) * i) / 120;
    return { x, y: normalDensity(x, entry.log_mean, entry.log_var) };
  });
  return {
    x: { label: "ln P", domain: [lower, upper] },
    y: { label: `${series.label}: density of ln P`, zero: true },
    reach: 60,
    layers: [
      { type: "bars", key: series.key, style: { ...series.style, opacity: 0.35 }, points: bars },
      { type: "line", key: "normal", style: { color: "--ink", width: 1.5 }, points: curve },
    ],
  };
}

function logNormalChoice(data) {
  return data.results.filter((e) => e.histogram && e.log_var > 0);
}

function histogramFigure(data, head) {
  const entries = logNormalChoice(data).filter((e) => headName(e) === head);
  const shown = entries.filter((e) => e.kind === "softmax" || /^lln/.test(e.kind));
  const used = (shown.length ? shown : entries).slice(0, 2);
  if (!used.length) return null;
  const facts = used.map((e) => `${seriesOf(e).label}: skewness ${number(e.skew, 2)}, distance to ` +
    `the normal (KS) ${number(e.ks, 3)}`).join("; ");
  return {
    id: "histogram",
    title: "Are the weights log-normal?",
    caption: "Logarithms of all weights of one attention matrix; the line is the normal distribution " +
      `of the same mean and variance. ${facts}.`,
    panels: used.map(histogramPanel),
  };
}

function quantilePanel(groups, label, of, level) {
  const reach = d3.max(groups[0].entries[0].qq, (p) => Math.abs(p[0])) * 1.08;
  return {
    x: { label: "quantile of the standard normal", domain: [-reach, reach] },
    y: { label },
    layers: [{ type: "line", key: "normal", style: THEORY,
      points: [-reach, reach].map((x) => ({ x, y: level(x) })) }].concat(
      groups.map((group) => ({ type: "line", key: group.key,
        style: { ...group.style, size: 14 },
        points: group.entries[0].qq.map(([x, y]) => ({ x, y: of(x, y),
          text: `${group.label}\nnormal ${number(x, 2)}, measured ${number(y, 2)}` })) }))),
  };
}

function quantileFigure(data, head) {
  const entries = logNormalChoice(data).filter((e) => headName(e) === head && e.qq.length);
  if (!entries.length) return null;
  const groups = bySeries(entries);
  return {
    id: "quantiles",
    title: "Quantiles of ln P against the normal",
    caption: "Every matrix is standardised; on the grey line it would be log-normal exactly. Ends that " +
      "bend away are weights larger or smaller than log-normal theory expects. Right: the same, less " +
      "the line.",
    legend: legendOf(groups, [{ key: "normal", label: "log-normal", style: THEORY }]),
    panels: [
      quantilePanel(groups, "Quantile of (ln P − mean)/σ", (x, y) => y, (x) => x),
      quantilePanel(groups, "Measured − normal", (x, y) => y - x, () => 0),
    ],
  };
}

// ---- Matching ------------------------------------------------------------------------------------

// Each LLN entry beside the softmax of the same input.
function matchedPairs(data) {
  const place = (e) => `${e.layer}/${e.head}/${e.sigma_q}/${e.input_temperature}`;
  const all = data.sweep && data.sweep.length ? data.sweep : data.results;
  const softmax = new Map(all.filter((e) => e.kind === "softmax").map((e) => [place(e), e]));
  return all.filter((e) => e.kind === "lln" && e.matching !== "none" && softmax.has(place(e)))
    .map((e) => ({ ...e, target: softmax.get(place(e)) }));
}

function matchingFigure(data) {
  const pairs = matchedPairs(data);
  if (!pairs.length) return null;
  const groups = bySeries(pairs);
  const panel = (value, x, y, of, line, domain) => ({
    x: { label: x }, y: { label: y, domain },
    layers: [{ type: "line", key: "target", style: THEORY, points: line }].concat(
      groups.map((group) => ({ type: data.sweep && data.sweep.length ? "line" : "points",
        key: group.key, style: group.style,
        points: group.entries.filter((e) => Number.isFinite(e[value])).map((e) => ({
          x: e.target[value], y: of(e),
          text: `${group.label}\n${e.layer === undefined || e.layer === null
            ? `σ ${number(e.sigma_q, 2)}` : headName(e)}\n` +
            `softmax ${number(e.target[value])}, LLN ${number(e[value])}` })) }))),
  });
  const variances = d3.extent(pairs, (e) => e.target.log_var);
  const entropies = d3.extent(pairs, (e) => e.target.entropy_nats);
  return {
    id: "matching",
    title: "What moment matching achieves",
    caption: "Left: the variance of ln P that LLN gets against softmax's, which is the target of every " +
      "mode but entropy. Right: how far its mean row entropy is from softmax's. Equal variance still " +
      "concentrates more than softmax; mode entropy takes that out.",
    legend: legendOf(groups, [{ key: "target", label: "equal to softmax", style: THEORY }]),
    panels: [
      panel("log_var", "Var(ln P) of softmax", "Var(ln P) of LLN", (e) => e.log_var,
        variances.map((v) => ({ x: v, y: v }))),
      panel("entropy_nats", "mean row entropy of softmax, nats", "LLN − softmax, nats",
        (e) => e.entropy_nats - e.target.entropy_nats, entropies.map((v) => ({ x: v, y: 0 }))),
    ],
  };
}

function fentonFigure(data) {
  const entries = (data.sweep || []).concat(data.results)
    .filter((e) => e.kind === "lln" && e.theory && e.theory.t > 0 && e.theory.fenton_wilkinson);
  if (!entries.length) return null;
  const points = (of, name) => entries.map((e) => ({ x: e.theory.t, y: of(e),
    text: `${name} ${number(of(e))}\nt ${number(e.theory.t, 2)}` }))
    .sort((a, b) => a.x - b.x);
  const series = [
    { key: "fw", label: "Fenton–Wilkinson, ln(1 + (eᵗ − 1)/D)", type: "line",
      style: { color: "--relu", dash: "7 4" }, of: (e) => e.theory.fenton_wilkinson.predicted },
    { key: "a", label: "measured Var(ln A), before rows are normalised", type: "points",
      style: { color: "--relu", symbol: "square", line: false },
      of: (e) => e.theory.fenton_wilkinson.measured },
    { key: "line", label: "fitted line, a t + b", type: "line", style: { color: "--lln", dash: "7 4" },
      of: (e) => (e.theory.log_variance ? e.theory.log_variance.predicted : NaN) },
    { key: "p", label: "measured Var(ln P)", type: "points",
      style: { color: "--lln", symbol: "circle", line: false }, of: (e) => e.log_var },
  ];
  const measured = entries.flatMap((e) => [e.theory.fenton_wilkinson.measured, e.log_var])
    .filter((v) => v > 0);
  return {
    id: "fenton",
    title: "Fenton–Wilkinson against measurement",
    caption: "The classical approximation for a sum of log-normals is good for small t = α²σ_q² + " +
      "β²σ_k² and several times too high where attention works. It also speaks of the weights before " +
      "rows are normalised; the variance of ln P, which matching needs, is smaller still.",
    legend: series.map(({ key, label, style }) => ({ key, label, style })),
    panels: [{
      x: { label: "t = α²σ_q² + β²σ_k²", log: true },
      y: { label: "Variance of the logarithm", log: true,
        domain: [d3.min(measured) / 1.5, d3.max(measured) * 3] },
      height: (width) => Math.max(260, Math.min(380, width * 0.5)),
      layers: series.map(({ key, type, style, of, label }) => ({ type, key, style,
        points: points(of, label.split(",")[0]).filter((p) => p.y > 0) })),
    }],
  };
}

// ---- Spectrum ------------------------------------------------------------------------------------

function spectrumFigure(data, head) {
  const entries = data.results.filter((e) => e.eigenvalues && e.eigenvalues.length &&
    headName(e) === head);
  if (!entries.length) return null;
  const groups = bySeries(entries);
  return {
    id: "spectrum",
    title: "The leading spectrum",
    caption: "Moduli of the largest eigenvalues; the first is 1, since rows sum to one. One minus the " +
      "second is the spectral gap: the smaller it is, the more of the input survives repeated mixing.",
    legend: legendOf(groups),
    panels: [{
      x: { label: "eigenvalue, by falling modulus", domain: [0.8,
        d3.max(entries, (e) => e.eigenvalues.length) + 0.2],
        ticks: d3.range(1, d3.max(entries, (e) => e.eigenvalues.length) + 1) },
      y: { label: "|λ|", log: true },
      height: (width) => Math.max(240, Math.min(340, width * 0.42)),
      layers: groups.map((group) => ({ type: "line", key: group.key, style: group.style,
        points: group.entries[0].eigenvalues.filter((v) => v > 1e-12).map((v, i) => ({ x: i + 1, y: v,
          text: `${group.label}\n|λ${i + 1}| ${number(v)}` })) })),
    }],
  };
}

// ---- Heads of a model ----------------------------------------------------------------------------

function cellPanel(entries, layers, heads, value, label, unit) {
  const values = entries.map((e) => e[value]).filter(Number.isFinite);
  const [low, high] = d3.extent(values);
  return {
    x: { label: "head", domain: [-0.5, heads.length - 0.5], ticks: d3.range(heads.length)
      .filter((i) => i % Math.ceil(heads.length / 12) === 0), format: (i) => heads[i] },
    y: { label: `${label}, ${number(low, 2)} to ${number(high, 2)}`, down: true,
      domain: [-0.5, layers.length - 0.5], ticks: d3.range(layers.length)
        .filter((i) => i % Math.ceil(layers.length / 16) === 0),
      format: (i) => (String(layers[i]).length > 6 ? i : layers[i]) },
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
  const entries = data.results.filter((e) => e.head !== null && seriesOf(e).key === kind);
  if (entries.length < 2) return null;
  const layers = [...new Set(entries.map((e) => e.layer))];
  const heads = [...new Set(entries.map((e) => e.head))].sort((a, b) => a - b);
  return {
    id: "heads",
    title: "Layer by layer, head by head",
    caption: "Darker is larger on white, brighter is larger on black. Heads of low entropy pick few " +
      "keys; where their gap is large as well, all queries pick the same ones.",
    columns: 3,
    panels: [
      cellPanel(entries, layers, heads, "entropy_nats", "Entropy", "entropy, nats"),
      cellPanel(entries, layers, heads, "spectral_gap", "Gap", "gap"),
      cellPanel(entries, layers, heads, "temperature", "Temperature", "temperature"),
    ],
  };
}

// Theory on real heads: what Gaussian theory predicts from the moments alone, and what is there.
function theoryFigure(data) {
  const entries = data.results.filter((e) => e.head !== null && e.theory && e.theory.entropy);
  if (entries.length < 2) return null;
  const groups = bySeries(entries);
  const panel = (name, label) => {
    const has = entries.filter((e) => e.theory[name]);
    const both = d3.extent(has.flatMap((e) => [e.theory[name].predicted, e.theory[name].measured]));
    return {
      x: { label: "predicted" }, y: { label },
      layers: [{ type: "line", key: "equal", style: THEORY, points: both.map((v) => ({ x: v, y: v })) }]
        .concat(groups.map((group) => ({ type: "points", key: group.key,
          style: { ...group.style, opacity: 0.8 },
          points: group.entries.filter((e) => e.theory[name]).map((e) => ({
            x: e.theory[name].predicted, y: e.theory[name].measured,
            text: `${group.label}, ${headName(e)}\npredicted ${number(e.theory[name].predicted)}\n` +
              `measured ${number(e.theory[name].measured)}` })) }))),
    };
  };
  return {
    id: "theory",
    title: "Log-normal theory on these heads",
    caption: "One mark for each head. Predictions use nothing but the moments of q and k and assume " +
      "that they are Gaussian; on the grey line they are right.",
    legend: legendOf(groups.map((g) => ({ ...g, style: { ...g.style, line: false } })),
      [{ key: "equal", label: "predicted = measured", style: THEORY }]),
    panels: [panel("entropy", "Measured entropy, nats"), panel("log_variance", "Measured Var(ln P)")],
  };
}

// ---- Cost ----------------------------------------------------------------------------------------

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
      `${data.cost.threads} thread${data.cost.threads === 1 ? "" : "s"} of this machine. Memory is ` +
      "inputs, output and scratch memory: the softmax here streams its rows, so only time tells them " +
      "apart; the N × N matrix that a plain implementation stores is drawn for comparison." +
      (some ? " Hollow marks are predicted from the call before, because the call would take too long."
        : ""),
    legend: names.map((name) => ({ key: name, ...COST_SERIES[name] }))
      .concat([{ key: "matrix", label: "N × N matrix", style: matrix }]),
    panels: [
      { x: { label: "tokens, N", log: true, ticks, format: String },
        y: { label: "Time of one call", log: true, format: timeText },
        layers: layersOf("seconds", 1e3, timeText) },
      { x: { label: "tokens, N", log: true, ticks, format: String },
        y: { label: "Memory of one call", log: true, format: sizeText },
        layers: layersOf("bytes", 1e-6, sizeText).concat([{ type: "line", key: "matrix", style: matrix,
          points: rows.map((r) => ({ x: r.tokens, y: r.matrix_bytes * 1e-6,
            text: `N × N matrix, ${r.tokens} tokens\n${sizeText(r.matrix_bytes * 1e-6)}` })) }]) },
    ],
  };
}
