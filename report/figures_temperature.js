// Figures of a sweep over temperatures: how attentions follow it, what moment matching achieves,
// and how good Fenton-Wilkinson is. A function returns the figure, or null where the data have
// nothing for it, here as in the other files of figures.
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

// What a caption says where limits, not the moments, set alpha and beta.
function limitsText(entries) {
  const clamped = entries.filter((e) => e.clamped);
  if (!clamped.length) return "";
  const modes = [...new Set(clamped.map((e) => e.matching))].join(", ");
  if (clamped.some((e) => Number.isFinite(e.head))) {
    return ` Clamped (${modes}): limits set alpha and beta of ${clamped.length} of ` +
      `${entries.length} heads.`;
  }
  const sigmas = [...new Set(clamped.map((e) =>
    number(Math.sqrt(e.sigma_q * e.sigma_k), 2)))].join(", ");
  return ` Clamped (${modes}): limits set alpha and beta at σ ${sigmas}.`;
}

function centralCaption(groups, shown) {
  const kinds = new Set(groups.map((g) => g.entries[0].kind));
  const constant = ["elu", "relu", "quadratic"].filter((kind) => kinds.has(kind))
    .map((kind) => seriesOf({ kind }).label);
  const parts = [];
  if (kinds.has("softmax")) {
    parts.push("Softmax reads fewer keys as its input gets colder (to the left): entropy and " +
      "gap fall together.");
  }
  if (kinds.has("softmax") && kinds.has("lln")) {
    parts.push("LLN follows it, closest where its entropy is matched.");
  }
  if (constant.length) {
    parts.push(`Without a temperature, and so in one place: ${constant.join(", ")}.`);
  }
  parts.push("Entropy and gap on Gaussian input of falling temperature, from right to left; bars " +
    "are the deviation of the seeds.");
  return parts.join(" ") + limitsText(shown);
}

function centralFigure(data) {
  if (!data.sweep || !data.sweep.length) return null;
  const shown = data.sweep.filter((e) => e.matching !== "none");
  const groups = bySeries(shown);
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
  const lowest = d3.min(shown, (e) => e.entropy_nats);
  const theory = softmax ? [{ type: "line", key: "theory", style: THEORY, points: line }] : [];
  return {
    id: "temperature",
    title: "Entropy and spectral gap against temperature",
    caption: centralCaption(groups, shown),
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
  const panel = (value, x, y, of, line, log) => ({
    x: { label: x, log }, y: { label: y, log },
    layers: [{ type: "line", key: "target", style: THEORY, points: line }].concat(
      groups.map((group) => ({ type: data.sweep && data.sweep.length ? "line" : "points",
        key: group.key, style: group.style,
        points: group.entries.filter((e) => Number.isFinite(e[value])).map((e) => ({
          x: e.target[value], y: of(e),
          text: `${group.label}\n${Number.isFinite(e.layer) ? headName(e)
            : `σ ${number(e.sigma_q, 2)}`}\n` +
            `softmax ${number(e.target[value])}, LLN ${number(e[value])}` })) }))),
  });
  const variances = d3.extent(pairs, (e) => e.target.log_var);
  const entropies = d3.extent(pairs, (e) => e.target.entropy_nats);
  return {
    id: "matching",
    title: "What moment matching achieves",
    caption: "First: the variance of ln P that LLN gets against softmax's, which is the target " +
      "of every mode but entropy. Second: how far its mean row entropy is from softmax's. Equal " +
      "variance is not equal entropy, since ln P of LLN is not quite normal; mode entropy " +
      "matches the latter." + limitsText(pairs),
    legend: legendOf(groups, [{ key: "target", label: "equal to softmax", style: THEORY }]),
    panels: [
      panel("log_var", "Var(ln P) of softmax", "Var(ln P) of LLN", (e) => e.log_var,
        variances.map((v) => ({ x: v, y: v })), true),
      panel("entropy_nats", "mean row entropy of softmax, nats", "LLN − softmax, nats",
        (e) => e.entropy_nats - e.target.entropy_nats, entropies.map((v) => ({ x: v, y: 0 })),
        false),
    ],
  };
}

// The formulas of one dim over `range`, as lines.
function fentonCurves({ d, theory }, [low, high]) {
  const curve = (of) => d3.range(0, 81).map((i) => {
    const t = low * (high / low) ** (i / 80);
    return { x: t, y: of(t) };
  }).filter((p) => p.y > 0);
  const { a, b } = theory.line;
  return { fw: curve((t) => Math.log1p(Math.expm1(t) / d)), line: curve((t) => a * t + b) };
}

function fentonFigure(data) {
  const entries = (data.sweep || []).concat(data.results)
    .filter((e) => e.kind === "lln" && e.theory && e.theory.t > 0 && e.theory.fenton_wilkinson);
  if (!entries.length) return null;
  const points = (of, name) => entries.map((e) => ({ x: e.theory.t, y: of(e),
    text: `${name} ${number(of(e))}\nt ${number(e.theory.t, 2)}` })).filter((p) => p.y > 0);
  const reach = d3.extent(entries, (e) => e.theory.t);
  const range = [Math.min(1, reach[0]), Math.max(20, reach[1])];
  const dims = [...new Map(entries.map((e) => [e.d, e])).values()];
  const curves = dims.map((e) => fentonCurves(e, range));
  const lines = { fw: { color: "--relu", dash: "7 4" }, line: { color: "--lln", dash: "7 4" } };
  const marks = [
    { key: "a", label: "measured Var(ln A), before rows are normalised",
      style: { color: "--relu", symbol: "square", line: false },
      points: points((e) => e.theory.fenton_wilkinson.measured, "measured Var(ln A)") },
    { key: "p", label: "measured Var(ln P)",
      style: { color: "--lln", symbol: "circle", line: false },
      points: points((e) => e.log_var, "measured Var(ln P)") },
  ];
  // The line leaves the panel where it falls to zero, which a logarithm has no place for.
  const heights = curves.flatMap((c) => c.fw).concat(marks.flatMap((m) => m.points));
  const [low, high] = d3.extent(heights, (p) => p.y);
  return {
    id: "fenton",
    title: "Fenton–Wilkinson against measurement",
    caption: "The classical approximation for a sum of log-normals is good for small t = " +
      "α²σ_q² + β²σ_k² and several times too high where attention works. It also speaks of " +
      "the weights before rows are normalised; the variance of ln P, which matching needs, " +
      "is smaller still.",
    legend: [{ key: "fw", label: "Fenton–Wilkinson, ln(1 + (eᵗ − 1)/D)", style: lines.fw },
      { key: "line", label: "fitted line, a t + b", style: lines.line },
      ...marks.map(({ key, label, style }) => ({ key, label, style }))],
    panels: [{
      x: { label: "t = α²σ_q² + β²σ_k²", log: true },
      y: { label: "Variance of the logarithm", log: true, domain: [low / 1.5, high * 1.5] },
      height: (width) => Math.max(260, Math.min(380, width * 0.5)),
      layers: curves.flatMap((c) => ["fw", "line"].map((key) => ({ type: "line", key,
        style: lines[key], points: c[key] }))).concat(
        marks.map(({ key, style, points: own }) => ({ type: "points", key, style,
          points: own }))),
    }],
  };
}
