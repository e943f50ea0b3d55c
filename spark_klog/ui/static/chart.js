// A line over time: at most `limit` points are kept.

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

export function chart(label, series) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "chart");
  svg.setAttribute("role", "img");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(SVG, "path");
  svg.append(path);
  const draw = () => {
    const points = series.points;
    const most = Math.max(1, ...points.map((point) => point.value));
    const first = points[0]?.at ?? 0;
    const span = Math.max(1, (points.at(-1)?.at ?? 0) - first);
    path.setAttribute("d", points.map((point, index) =>
      `${index ? "L" : "M"}${(100 * (point.at - first)) / span},${98 - (95 * point.value) / most}`).join(""));
    svg.setAttribute("aria-label", `${label}: now ${Math.round(points.at(-1)?.value ?? 0)}, at most ${Math.round(most)}`);
  };
  draw();
  return { node: svg, draw };
}
