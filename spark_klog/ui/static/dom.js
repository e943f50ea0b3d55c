// Elements. All text goes in by textContent, and attributes are named here: nothing from a record becomes markup.

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

// The address of a view, always a fragment of this page; values of the query that are empty are left out.
export function address(parts, query = {}) {
  const chosen = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  return "#/" + parts.map(encodeURIComponent).join("/") + (chosen.length ? `?${new URLSearchParams(chosen)}` : "");
}

// The address follows what is typed into a filter, without a step in the browser's history.
export function keepFilter(view, filter) {
  history.replaceState(null, "", address([view], { filter }));
}

// A link to a view.
export function link(text, ...parts) {
  return el("a", { href: address(parts) }, text);
}

// The order of tables that readers have chosen, by name: it stays when a live view draws them anew.
const orders = new Map();

function ordered(rows, columns, order) {
  const by = columns.find((one) => one.title === order?.title)?.by;
  if (by === undefined) return rows;
  const missing = (value) => value === null || value === undefined;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  return [...rows].sort((one, other) => {
    const [a, b] = [by(one), by(other)];
    if (missing(a) || missing(b)) return missing(a) - missing(b); // unknown ones last
    return order.down ? compare(b, a) : compare(a, b);
  });
}

// columns: {title, number (aligned right), cell(row), by(row): what the rows are sorted by}; name: of a table that can be sorted
export function table(caption, columns, rows, { key, name, most, className } = {}) {
  const order = orders.get(name);
  const focused = document.activeElement?.dataset?.sort;
  const title = (one) => {
    if (name === undefined || one.by === undefined) return one.title;
    const isBy = order?.title === one.title;
    const sort = () => {
      orders.set(name, { title: one.title, down: isBy ? !order.down : Boolean(one.number) });
      made.replaceWith(table(caption, columns, rows, { key, name, most, className }));
    };
    const button = el("button", { type: "button", class: "sort", "data-sort": `${name} ${one.title}`, on: { click: sort } },
      one.title, el("span", { "aria-hidden": "true" }, isBy ? (order.down ? " ▼" : " ▲") : " ↕"));
    if (focused === button.dataset.sort) setTimeout(() => button.focus());
    return button;
  };
  const sorted = (one) => (order?.title === one.title ? (order.down ? "descending" : "ascending") : null);
  const head = el("tr", {}, ...columns.map((one) => el("th", { scope: "col", class: one.number ? "number" : null, "aria-sort": sorted(one) }, title(one))));
  const body = ordered(rows, columns, order).slice(0, most).map((row) => el("tr", key ? { "data-key": key(row) } : {},
    ...columns.map((one) => el("td", { class: one.number ? "number" : null }, ...[one.cell(row)].flat()))));
  const made = el("div", { class: "wide", role: "region", "aria-label": caption, tabindex: "0" },
    el("table", { class: className }, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body)));
  return made;
}

export function field(title, input) {
  return el("label", {}, title, input);
}

const status = document.getElementById("status");

export function say(text) {
  status.textContent = text;
  delete status.dataset.trouble;
}

// What a live view says while it can't be renewed; it ends with the next good look.
export const trouble = {
  say(found) {
    say(found.error);
    status.dataset.trouble = "";
  },
  end() {
    if (status.dataset.trouble !== undefined) say("");
  },
};

// For the axes of charts.
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const compact = (value) => short.format(value);

const whole = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));

// The sum of the values that are known; null if there are only unknown ones.
export function sumKnown(values) {
  const known = values.filter((one) => one !== null && one !== undefined);
  return values.length && !known.length ? null : known.reduce((all, one) => all + one, 0);
}

// A figure without that of what did not answer, and what that is.
export const least = (value, unanswered) => (unanswered ? `≥ ${number(value ?? 0)} (${number(unanswered)} without an answer)` : number(value));
export const missing = (lines) => el("div", {}, ...lines.map((line) => el("p", { class: "bad" }, line)));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at ? value.toFixed(1) : value} ${units[at]}`;
}

export const time = (ms) => (ms === null || ms === undefined ? "–" : validTime(ms));
function validTime(ms) {
  const date = new Date(ms);
  return Number.isNaN(date.getTime()) ? String(ms) : date.toISOString().replace("T", " ").replace("Z", "");
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3600000) return `${Math.floor(ms / 60000)} min ${Math.floor((ms % 60000) / 1000)} s`;
  return `${Math.floor(ms / 3600000)} h ${Math.floor((ms % 3600000) / 60000)} min`;
}
