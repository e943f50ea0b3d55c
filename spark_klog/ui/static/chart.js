// A line over time with its axes: at most `limit` points are kept.

import { compact, el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

export class Series {
  constructor(limit = 150) {
    this.limit = limit;
    this.points = [];
  }
  add(value) {
    this.points.push({ at: Date.now(), value });
    if (this.points.length > this.limit) this.points.shift();
  }
}

// Adds the rate of a growing counter, once two values of it are known.
export class Rate {
  constructor() {
    this.series = new Series();
    this.last = null;
  }
  add(count) {
    const now = performance.now();
    if (this.last && count >= this.last.count && now > this.last.now) {
      this.series.add((1000 * (count - this.last.count)) / (now - this.last.now));
    }
    this.last = { count, now };
  }
  get current() {
    return this.series.points.at(-1)?.value ?? null;
  }
}

// The least of 1, 2, 5, 10, 20, 50... that is not below a value: the axis ends at a round number.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value);
}

const clock = (at) => new Date(at).toISOString().slice(11, 19);

function part(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function chart(label, series) {
  const svg = part("svg", { role: "img", viewBox: "0 0 100 100", preserveAspectRatio: "none" });
  const path = part("path", { class: "line" });
  svg.append(part("path", { class: "grid", d: "M0,50L100,50" }), path);
  const most = el("span"), half = el("span"), first = el("span"), last = el("span");
  const draw = () => {
    const points = series.points;
    const top = roundUp(Math.max(...points.map((point) => point.value), 1));
    const from = points[0]?.at ?? Date.now();
    const until = points.at(-1)?.at ?? from;
    path.setAttribute("d", points.map((point, index) =>
      `${index ? "L" : "M"}${(100 * (point.at - from)) / Math.max(1, until - from)},${100 - (100 * point.value) / top}`).join(""));
    const highest = Math.max(0, ...points.map((point) => point.value));
    svg.setAttribute("aria-label", `${label}: now ${Math.round(points.at(-1)?.value ?? 0)}, at most ${Math.round(highest)}`);
    most.textContent = compact(top);
    half.textContent = compact(top / 2);
    first.textContent = until > from ? clock(from) : "";
    last.textContent = `${clock(until)} UTC`;
  };
  draw();
  const node = el("figure", { class: "chart" }, el("figcaption", {}, label),
    el("div", { class: "values", "aria-hidden": "true" }, most, half, el("span", {}, "0")), svg,
    el("div", { class: "times", "aria-hidden": "true" }, first, last));
  return { node, draw };
}
