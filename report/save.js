// A figure as a file: an SVG that carries its own styles, or a picture of it at twice its size.
// SPDX-License-Identifier: Apache-2.0
"use strict";

const KEPT_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray",
  "stroke-linejoin", "font-family", "font-size", "font-weight", "opacity", "text-anchor",
  "shape-rendering"];

// The drawing with computed styles in place of classes and variables, on the page's background.
function standaloneSvg(svg) {
  const copy = svg.cloneNode(true);
  const originals = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, i) => {
    const computed = getComputedStyle(originals[i]);
    element.removeAttribute("class");
    for (const name of KEPT_STYLES) {
      element.style.setProperty(name, computed.getPropertyValue(name));
    }
  });
  const { width, height } = svg.viewBox.baseVal;
  const margin = 16;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width + 2 * margin);
  copy.setAttribute("height", height + 2 * margin);
  copy.setAttribute("viewBox",
    `${-margin} ${-margin} ${width + 2 * margin} ${height + 2 * margin}`);
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x: -margin, y: -margin, width: "100%",
    height: "100%", fill: getComputedStyle(document.documentElement).backgroundColor })) {
    ground.setAttribute(name, value);
  }
  copy.insertBefore(ground, copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveSvg(svg, name) {
  download(new Blob([standaloneSvg(svg)], { type: "image/svg+xml" }), `${name}.svg`);
}

// Resolves to the picture, so that a caller can look at it before it is saved.
function pictureOf(svg) {
  const scale = 2;
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onerror = () => reject(new Error("the figure could not be drawn"));
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = image.width * scale;
      canvas.height = image.height * scale;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(resolve, "image/png");
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standaloneSvg(svg))}`;
  });
}

async function savePng(svg, name) {
  download(await pictureOf(svg), `${name}.png`);
}
