// Figures of single attention matrices, one head at a time: the distribution of ln P, the spectrum,
// and of causal attention entropy against position.
// SPDX-License-Identifier: Apache-2.0
"use strict";

function normalDensity(x, mean, variance) {
  return Math.exp(-((x - mean) ** 2) / (2 * variance)) / Math.sqrt(2 * Math.PI * variance);
}

function histogramPanel(entry) {
  const { lower, upper, share } = entry.histogram;
  const width = (upper - lower) / share.length;
  const series = seriesOf(entry);
  const bars = share.map((s, i) => ({ x: lower + i * width, x1: lower + (i + 1) * width,
    y: s / width,
    text: `ln P ${number(lower + (i + 0.5) * width, 2)}\ndensity ${number(s / width)}` }));
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
  const facts = used.map((e) => `${seriesOf(e).label}: skewness ${number(e.skew, 2)}, ` +
    `distance to the normal (KS) ${number(e.ks, 3)}`).join("; ");
  return {
    id: "histogram",
    title: "Are the weights log-normal?",
    caption: "Logarithms of all weights of one attention matrix; the line is the normal " +
      "distribution " +
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
    caption: "Every matrix is standardised; on the grey line it would be log-normal exactly. " +
      "Ends that bend away are weights larger or smaller than log-normal theory expects. " +
      "Second: the same, less the line.",
    legend: legendOf(groups, [{ key: "normal", label: "log-normal", style: THEORY }]),
    panels: [
      quantilePanel(groups, "Quantile of (ln P − mean)/σ", (x, y) => y, (x) => x),
      quantilePanel(groups, "Measured − normal", (x, y) => y - x, () => 0),
    ],
  };
}

function spectrumText(entries) {
  const isSigned = (e) => e.spectrum && e.spectrum.signed;
  const parts = [];
  if (!entries.every(isSigned)) {
    parts.push("Where rows sum to one the first is 1, and one minus the second is the spectral " +
      "gap.");
  }
  if (entries.some(isSigned)) {
    parts.push("Rows of signed weights do not sum to one: their gap is one minus the second over " +
      "the first.");
  }
  return parts.join(" ");
}

function spectrumFigure(data, head) {
  const entries = data.results.filter((e) => e.eigenvalues && e.eigenvalues.length &&
    headName(e) === head);
  if (!entries.length) return null;
  const groups = bySeries(entries);
  return {
    id: "spectrum",
    title: "The leading spectrum",
    caption: "Moduli of the largest eigenvalues. " + spectrumText(entries) + " The smaller the " +
      "gap is, the more of the input survives repeated mixing.",
    legend: legendOf(groups),
    panels: [{
      x: { label: "eigenvalue, by falling modulus", domain: [0.8,
        d3.max(entries, (e) => e.eigenvalues.length) + 0.2],
        ticks: d3.range(1, d3.max(entries, (e) => e.eigenvalues.length) + 1) },
      y: { label: "|λ|", log: true },
      height: (width) => Math.max(240, Math.min(340, width * 0.42)),
      layers: groups.map((group) => ({ type: "line", key: group.key, style: group.style,
        points: group.entries[0].eigenvalues.filter((v) => v > 1e-12).map((v, i) => ({
          x: i + 1, y: v, text: `${group.label}\n|λ${i + 1}| ${number(v)}` })) })),
    }],
  };
}

function positionFigure(data, head) {
  const entries = data.results.filter((e) => e.by_position && e.by_position.length &&
    headName(e) === head);
  if (!entries.length) return null;
  const groups = bySeries(entries);
  const middle = (p) => (p.first + p.last) / 2 + 1;
  return {
    id: "position",
    title: "Entropy against position",
    caption: "A causal row sees the keys before it, so its entropy is at most the logarithm " +
      "of its position (grey). The spectral gap says nothing here: the eigenvalues of a " +
      "triangular matrix are its diagonal.",
    legend: legendOf(groups, [{ key: "limit", label: "ln of the visible keys", style: THEORY }]),
    panels: [{
      x: { label: "position", log: true }, y: { label: "Mean row entropy, nats", zero: true },
      height: (width) => Math.max(240, Math.min(360, width * 0.45)),
      layers: [{ type: "line", key: "limit", style: THEORY,
        points: entries[0].by_position.map((p) => ({ x: middle(p), y: p.limit })) }].concat(
        groups.map((group) => ({ type: "line", key: group.key, style: group.style,
          points: group.entries[0].by_position.map((p) => ({ x: middle(p), y: p.entropy_nats,
            text: `${group.label}\nrows ${p.first} to ${p.last}\n` +
              `entropy ${number(p.entropy_nats)}` })) }))),
    }],
  };
}
