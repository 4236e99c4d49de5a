// Plots: panels with axes, layers of marks, one legend, and what is shown under the pointer. Knows
// nothing of attention; figures_*.js say what is drawn. A figure is one SVG, drawn again when its
// width changes, so that text keeps its size on a phone and a saved picture is the whole figure.
// SPDX-License-Identifier: Apache-2.0
"use strict";

const GAP = 34;             // between panels
const TWO_COLUMNS = 620;    // px of width from which panels stand side by side
const REACH = 32;           // px within which the pointer finds a mark
const MARGIN = { top: 30, right: 12, bottom: 44, left: 52 };

// Text with subscripts: what follows a Greek letter and an underscore is lowered, as in "σ_q".
const SUBSCRIPT = /(?<=[α-ω])_([a-z0-9])/;

function richText(text, string) {
  string.split(SUBSCRIPT).forEach((part, i) => {
    if (i % 2 === 0) {
      if (part) text.append("tspan").attr("dy", i ? "-0.22em" : null).text(part);
    } else {
      text.append("tspan").attr({ dy: "0.28em", "font-size": "0.78em" }).text(part);
    }
  });
  return text;
}

// The same as nodes of the page.
function richNodes(string) {
  return string.split(SUBSCRIPT).map((part, i) => {
    if (i % 2 === 0) return document.createTextNode(part);
    const lowered = document.createElement("sub");
    lowered.textContent = part;
    return lowered;
  });
}

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [mantissa, exponent] = value.toExponential(Math.max(0, digits - 2)).split("e");
    return `${mantissa}e${Number(exponent)}`.replace(/-/g, "−");
  }
  const decimals = size >= 100 ? 1 : size >= 10 ? Math.max(0, digits - 2) : digits;
  return value.toFixed(decimals).replace("-", "−");
}

function logTicks([low, high], steps) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
    for (const step of steps) {
      const tick = step * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(Number(tick.toPrecision(3)));
    }
  }
  return ticks;
}

function extentOf(panel, axis) {
  const given = panel[axis].domain;
  if (given) return given;
  const values = [];
  for (const layer of panel.layers) {
    for (const point of layer.points) {
      for (const name of axis === "x" ? ["x", "x1"] : ["y", "y0"]) {
        if (Number.isFinite(point[name])) values.push(point[name]);
      }
    }
  }
  let [low, high] = d3.extent(values);
  if (panel[axis].log) return [low / 1.12, high * 1.12];
  const pad = (high - low || 1) * 0.06;
  if (panel[axis].zero && low >= 0) return [0, high + pad];
  return [low - pad, high + pad];
}

function makeScale(panel, axis, range) {
  const scale = panel[axis].log ? d3.scale.log() : d3.scale.linear();
  return scale.domain(extentOf(panel, axis)).range(range);
}

// `each` is the room that a tick wants, in px.
function ticksOf(axis, scale, room, each) {
  if (axis.ticks) return axis.ticks.filter((t) => t >= scale.domain()[0] && t <= scale.domain()[1]);
  if (!axis.log) return scale.ticks(Math.max(3, Math.min(8, room / each)));
  for (const steps of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = logTicks(scale.domain(), steps);
    if (ticks.length >= 2 && ticks.length <= room / each) return ticks;
  }
  const powers = logTicks(scale.domain(), [1]);
  const every = Math.ceil(powers.length / Math.max(2, room / each));
  const spread = powers.filter((_, i) => i % every === 0);
  if (spread.length >= 2) return spread;
  // A range too narrow for round numbers of the logarithmic kind.
  return d3.scale.linear().domain(scale.domain()).ticks(Math.max(3, Math.min(5, room / each)));
}

// Units for axes that span many decades.
function timeText(milliseconds) {
  if (milliseconds < 1) return `${Number((milliseconds * 1e3).toPrecision(3))} µs`;
  return milliseconds < 1e3 ? `${Number(milliseconds.toPrecision(3))} ms`
    : `${Number((milliseconds / 1e3).toPrecision(3))} s`;
}

function sizeText(megabytes) {
  if (megabytes < 1) return `${Number((megabytes * 1e3).toPrecision(3))} KB`;
  return megabytes < 1e3 ? `${Number(megabytes.toPrecision(3))} MB`
    : `${Number((megabytes / 1e3).toPrecision(3))} GB`;
}

function tickText(value) {
  if (Math.abs(value) < 1e-12) return "0";  // steps of 0.1 miss it by a rounding error
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    return value.toExponential(0).replace("e+", "e").replace(/-/g, "−");
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

function drawAxes(group, panel, scales, size) {
  for (const name of ["x", "y"]) {
    const axis = panel[name];
    const across = name === "x";
    const ticks = across ? ticksOf(axis, scales.x, size.width, 56)
      : ticksOf(axis, scales.y, size.height, 42);
    const drawn = d3.svg.axis().scale(scales[name]).orient(across ? "bottom" : "left")
      .tickValues(ticks).tickFormat(axis.format || tickText)
      .innerTickSize(across ? -size.height : -size.width).outerTickSize(0).tickPadding(8);
    group.append("g").attr("class", "axis")
      .attr("transform", across ? `translate(0,${size.height})` : null).call(drawn);
  }
  group.append("line")
    .attr({ class: "base", x1: 0, x2: size.width, y1: size.height, y2: size.height });
  richText(group.append("text").attr({ class: "axis-label", x: size.width / 2, y: size.height + 38,
    "text-anchor": "middle" }), panel.x.label);
  richText(group.append("text").attr({ class: "panel-title", x: -MARGIN.left + 2, y: -14 }),
    panel.y.label);
}

function styled(selection, style) {
  selection.style("stroke", `var(${style.color})`);
  if (style.dash) selection.style("stroke-dasharray", style.dash);
  return selection.style("stroke-width", style.width || 1.75);
}

const DRAW = {
  line(group, layer, scales) {
    const line = d3.svg.line().defined((p) => Number.isFinite(p.x) && Number.isFinite(p.y))
      .x((p) => scales.x(p.x)).y((p) => scales.y(p.y));
    styled(group.append("path").attr({ class: "mark", d: line(layer.points) }), layer.style)
      .style("fill", "none").style("stroke-linejoin", "round");
    if (layer.style.symbol) DRAW.points(group, layer, scales);
  },
  points(group, layer, scales) {
    const shape = d3.svg.symbol().type(layer.style.symbol || "circle").size(layer.style.size || 34);
    group.selectAll(null).data(layer.points.filter((p) => Number.isFinite(p.y))).enter()
      .append("path").attr("class", "mark").attr("d", shape)
      .attr("transform", (p) => `translate(${scales.x(p.x)},${scales.y(p.y)})`)
      .style("fill", (p) => (p.hollow ? "var(--paper)" : `var(${layer.style.color})`))
      .style("stroke", (p) => (p.hollow ? `var(${layer.style.color})` : "var(--paper)"))
      .style("stroke-width", (p) => (p.hollow ? 1.5 : 0.75))
      .style("fill-opacity", layer.style.opacity || 1);
  },
  bars(group, layer, scales) {
    const floor = scales.y.range()[0];
    group.selectAll(null).data(layer.points).enter().append("rect").attr("class", "mark")
      .attr("x", (p) => scales.x(p.x) + 0.5)
      .attr("width", (p) => Math.max(0.5, scales.x(p.x1) - scales.x(p.x) - 1))
      .attr("y", (p) => scales.y(p.y)).attr("height", (p) => Math.max(0, floor - scales.y(p.y)))
      .style("fill", `var(${layer.style.color})`).style("fill-opacity", layer.style.opacity || 0.4);
  },
  errors(group, layer, scales) {
    group.selectAll(null).data(layer.points.filter((p) => p.error > 0)).enter().append("line")
      .attr("x1", (p) => scales.x(p.x)).attr("x2", (p) => scales.x(p.x))
      .attr("y1", (p) => scales.y(p.y - p.error)).attr("y2", (p) => scales.y(p.y + p.error))
      .style("stroke", `var(${layer.style.color})`).style("stroke-width", 1.25);
  },
  labels(group, layer, scales) {
    group.selectAll(null).data(layer.points).enter().append("text").attr("class", "note")
      .attr("x", (p) => scales.x(p.x)).attr("y", (p) => scales.y(p.y)).attr("dx", 6)
      .attr("dy", "0.35em").text((p) => p.label);
  },
  // A share of the warm colour over the cold one: plain opacity, which every program that reads SVG
  // knows.
  cells(group, layer, scales) {
    const width = Math.abs(scales.x(1) - scales.x(0)), height = Math.abs(scales.y(1) - scales.y(0));
    for (const [color, opacity] of [["--cold", () => 1], ["--warm", (p) => p.share]]) {
      group.selectAll(null).data(layer.points.filter((p) => p.share !== null)).enter()
        .append("rect").attr("class", "mark").attr("rx", 1.5)
        .attr("x", (p) => scales.x(p.x) - width / 2 + 0.5)
        .attr("y", (p) => scales.y(p.y) - height / 2 + 0.5)
        .attr("width", Math.max(1, width - 1)).attr("height", Math.max(1, height - 1))
        .style("fill", `var(${color})`).style("fill-opacity", opacity);
    }
  },
};

function drawLayers(group, panel, scales, id, size) {
  group.append("clipPath").attr("id", id).append("rect")
    .attr({ x: -6, y: -6, width: size.width + 12, height: size.height + 8 });
  const inside = group.append("g").attr("clip-path", `url(#${id})`);
  for (const layer of panel.layers) {
    const part = inside.append("g").attr("class", "series").attr("data-series", layer.key || "");
    DRAW[layer.type](part, layer, scales);
  }
}

// The nearest mark that has a text, in px of the panel.
function nearest(panel, scales, [px, py]) {
  let best = null;
  for (const layer of panel.layers) {
    for (const point of layer.points) {
      if (!point.text || !Number.isFinite(point.y)) continue;
      const x = scales.x(point.x1 === undefined ? point.x : (point.x + point.x1) / 2);
      const dx = x - px, dy = layer.type === "bars" ? 0 : scales.y(point.y) - py;
      const distance = Math.hypot(dx, dy);
      if (!best || distance < best.distance) best = { point, distance };
    }
  }
  return best && best.distance < (panel.reach || REACH) ? best.point : null;
}

function showTip(text, event) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.pageX + 14, window.scrollX + room))}px`;
  tip.style.top = `${event.pageY + 16}px`;
}

function listen(group, panel, scales, size) {
  group.append("rect").attr({ x: -8, y: -8, width: size.width + 16, height: size.height + 16 })
    .style({ fill: "none", "pointer-events": "all" })
    .on("pointermove", function () {
      const point = nearest(panel, scales, d3.mouse(this));
      showTip(point && point.text, d3.event);
    })
    .on("pointerleave", () => showTip(null));
}

// The entries of the legend in rows; returns its height.
function drawLegend(svg, entries, width) {
  if (!entries.length) return 0;
  const legend = svg.append("g");
  let x = 0, y = 12;
  for (const { key, label, style } of entries) {
    const entry = legend.append("g").attr("class", "key").attr("data-key", key);
    const stroke = entry.append("line").attr({ x1: 0, x2: 22, y1: -4, y2: -4 });
    if (style.line !== false) styled(stroke, style); else stroke.remove();
    if (style.symbol) {
      entry.append("path").attr("d", d3.svg.symbol().type(style.symbol).size(34)())
        .attr("transform", "translate(11,-4)").style("fill", `var(${style.color})`);
    } else if (style.line === false) {
      entry.append("rect").attr({ x: 4, y: -10, width: 14, height: 11, rx: 2 })
        .style("fill", `var(${style.color})`).style("fill-opacity", style.opacity || 0.4);
    }
    const text = richText(entry.append("text").attr("x", 29), label);
    const room = 29 + text.node().getComputedTextLength();
    if (x > 0 && x + room > width) { x = 0; y += 21; }
    entry.attr("transform", `translate(${x},${y})`)
      .on("pointerenter", () => svg.selectAll(".series").classed("faded", function () {
        const own = this.dataset.series;
        return own !== "" && own !== key;
      }))
      .on("pointerleave", () => svg.selectAll(".series").classed("faded", false));
    x += room + 20;
  }
  return y + 14;
}

// Draws a figure {id, title, panels, legend} into the element, as wide as the element is.
function drawFigure(host, figure) {
  const width = host.clientWidth;
  host.textContent = "";
  if (width === 0) return;  // not shown
  const svg = d3.select(host).append("svg").attr("role", "img").attr("aria-label", figure.title);
  const columns = width >= TWO_COLUMNS ? Math.min(figure.panels.length, figure.columns || 2) : 1;
  const panelWidth = (width - GAP * (columns - 1)) / columns;
  const plot = { width: panelWidth - MARGIN.left - MARGIN.right };
  let y = drawLegend(svg, figure.legend || [], width), bottom = y;
  figure.panels.forEach((panel, i) => {
    const column = i % columns;
    if (column === 0) y = bottom;
    const height = panel.height ? panel.height(plot.width)
      : Math.max(210, Math.min(320, plot.width * 0.62));
    const size = { width: plot.width, height };
    const group = svg.append("g").attr("class", "panel").attr("transform",
      `translate(${column * (panelWidth + GAP) + MARGIN.left},${y + MARGIN.top})`);
    const scales = { x: makeScale(panel, "x", [0, size.width]),
      y: makeScale(panel, "y", panel.y.down ? [0, height] : [height, 0]) };
    drawAxes(group, panel, scales, size);
    drawLayers(group, panel, scales, `clip-${figure.id}-${i}`, size);
    listen(group, panel, scales, size);
    bottom = Math.max(bottom, y + MARGIN.top + height + MARGIN.bottom + 8);
  });
  svg.attr("viewBox", `0 0 ${width} ${bottom}`).attr("data-marks", svg.selectAll(".mark").size());
}
