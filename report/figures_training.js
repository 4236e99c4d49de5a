// Figures of runs that were trained: loss, metric and concentration against the step, and
// concentration against the loss.
// SPDX-License-Identifier: Apache-2.0
"use strict";

const RUN_COLORS = ["--lln", "--diag", "--softmax", "--elu", "--relu", "--quadratic",
  "--performer", "--softplus", "--power", "--linear"];

// {key, label, style} of every run: the colour that its attention has elsewhere where that is free,
// otherwise the next one that is.
function runSeries(data) {
  const used = new Set();
  return data.training.runs.map((run, i) => {
    const usual = { softmax: "--softmax", lln: "--lln", "lln+diag": "--diag", elu: "--elu",
      relu: "--relu", quadratic: "--quadratic", performer: "--performer" }[run.attention];
    const free = RUN_COLORS.filter((c) => !used.has(c));
    const color = usual && !used.has(usual) ? usual
      : free[0] || RUN_COLORS[i % RUN_COLORS.length];
    used.add(color);
    // Dashes and symbols besides: no two runs differ by colour alone.
    const dash = DASHES[i % DASHES.length];
    return { key: String(i), label: run.label, style: { color, dash, width: 1.75 },
      symbol: SYMBOLS[i % SYMBOLS.length] };
  });
}

function stepLayers(data, pointsOf, what) {
  return runSeries(data).map((series, i) => ({ type: "line", key: series.key, style: series.style,
    points: pointsOf(data.training.runs[i]).map(([x, y]) => ({ x, y,
      text: `${series.label}\nstep ${x}\n${what} ${number(y, 4)}` })) }));
}

// A line at the height that a model which learned nothing reaches.
function chanceLayer(data, layers) {
  const steps = layers.flatMap((layer) => layer.points.map((p) => p.x));
  if (!steps.length || !Number.isFinite(data.training.chance)) return [];
  return [{ type: "line", key: "chance", style: THEORY, points: d3.extent(steps).map((x) => ({ x,
    y: data.training.chance, text: `chance ${number(data.training.chance, 4)}` })) }];
}

function trainingTable(data) {
  const { metric, runs } = data.training;
  const series = runSeries(data);
  const head = ["run", `best ${metric}`, "at step", "chance", "final loss", "tokens/s",
    "parameters", "attention"];
  const rows = runs.map((run, i) => ({ color: series[i].style.color, cells: [run.label,
    number(run.best, 4), run.best_step >= 0 ? String(run.best_step) : "–",
    number(run.chance, 4), number(run.final_loss, 4),
    run.tokens_per_second ? d3.format(",.0f")(run.tokens_per_second) : "–",
    d3.format(",")(run.parameters), run.attention] }));
  return { head, rows, caption: `${metric} is that of the validation set, the final loss that of ` +
    "the last steps of the training. Chance is what a model that learned nothing reaches" +
    (data.training.chance_text ? `: ${data.training.chance_text}.` : ".") };
}

function trainingFigure(data) {
  const { metric, runs } = data.training;
  const loss = stepLayers(data, (run) => run.loss, "loss");
  const validation = stepLayers(data, (run) => run.evaluation, metric);
  runSeries(data).forEach(({ symbol }, i) => {
    validation[i].style = { ...validation[i].style, symbol, size: 26 };
  });
  const chance = chanceLayer(data, validation);
  if (!runs.some((run) => run.loss.length)) return null;
  const panels = [{ x: { label: "step" }, y: { label: "Training loss" }, layers: loss }];
  if (runs.some((run) => run.evaluation.length)) {
    panels.push({ x: { label: "step" }, y: { label: `Validation ${metric}` },
      layers: validation.concat(chance) });
  }
  return {
    id: "training", title: "Loss against step",
    caption: "On the left the loss of the training, on the right what the validation set says. " +
      "The grey line is chance: a model that learned nothing.",
    legend: runSeries(data).concat(chance.length
      ? [{ key: "chance", label: "chance", style: THEORY }] : []),
    panels,
  };
}

// "all", then the numbers of the layers that any run has.
function trainingLayers(data) {
  const numbers = new Set(data.training.runs.flatMap((run) =>
    run.concentration.map((entry) => entry.layer)));
  return ["all", ...[...numbers].sort((a, b) => a - b).map(String)];
}

// [step, mean] of a quantity over the chosen layers.
function concentrationPoints(run, layer, name) {
  const groups = new Map();
  for (const entry of run.concentration) {
    if (layer !== "all" && String(entry.layer) !== layer) continue;
    if (!Number.isFinite(entry[name])) continue;
    if (!groups.has(entry.step)) groups.set(entry.step, []);
    groups.get(entry.step).push(entry[name]);
  }
  return [...groups].map(([step, values]) => [step, d3.mean(values)]);
}

const CONCENTRATION = [["entropy", "Mean row entropy, nats"], ["gap", "Spectral gap, 1 − |λ_2|"],
  ["temperature", "Temperature"], ["alpha", "α, mean over heads"]];

function concentrationFigure(data, layer) {
  const panels = [];
  for (const [name, label] of CONCENTRATION) {
    const layers = stepLayers(data, (run) => concentrationPoints(run, layer, name), name);
    if (layers.some((l) => l.points.length > 1)) {
      panels.push({ x: { label: "step" }, y: { label }, layers });
    }
  }
  if (!panels.length) return null;
  return {
    id: "concentration", title: "Concentration against step",
    caption: "Means over heads, measured on the same validation rows every time: of the " +
      "long-range part of each attention, or, where that is not known to the instruments, of " +
      "softmax on the same queries and keys. Entropy that falls while the gap stays small is " +
      "unbiased concentration.",
    legend: runSeries(data), panels,
  };
}

// The loss of the training at a step: the row that is nearest.
function lossAt(run, step) {
  if (!run.loss.length) return NaN;
  return run.loss.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a))[1];
}

function concentrationAgainstLoss(data, layer) {
  const panels = [];
  for (const [name, label] of CONCENTRATION.slice(0, 2)) {
    const layers = runSeries(data).map((series, i) => {
      const run = data.training.runs[i];
      return { type: "line", key: series.key,
        style: { ...series.style, symbol: series.symbol, size: 26 },
        points: concentrationPoints(run, layer, name).filter(([step]) => step > 0)
          .map(([step, y]) => ({ x: lossAt(run, step), y, text:
            `${series.label}\nstep ${step}\nloss ${number(lossAt(run, step), 4)}\n` +
            `${name} ${number(y, 4)}` })) };
    });
    if (layers.some((l) => l.points.length > 1)) {
      panels.push({ x: { label: "training loss" }, y: { label }, layers });
    }
  }
  if (!panels.length) return null;
  return {
    id: "concentration-loss", title: "Concentration against loss",
    caption: "The same measurements over the loss of the training at that step: a run moves from " +
      "right to left as it learns.",
    legend: runSeries(data), panels,
  };
}
