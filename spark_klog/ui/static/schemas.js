// Subjects of the schema registry, and the versions of one.

import { get } from "./api.js";
import { address, el, keepFilter, link, number, table } from "./dom.js";
import { visible } from "./record.js";

const MOST = 1000;
const LINE = 100;

export async function schemasView(until, query) {
  const found = await get("subjects");
  if (found === null) return [el("h1", {}, "Schemas"), el("p", { class: "soft" }, "None: start klog ui with --schema-registry URL")];
  const filter = el("input", { type: "search", id: "filter", "aria-label": "Filter by name", value: query.get("filter") ?? "", on: { input: () => { keepFilter("schemas", filter.value); draw(); } } });
  const subjects = el("div");
  function draw() {
    const words = filter.value.toLowerCase();
    const rows = found.filter((name) => name.toLowerCase().includes(words));
    subjects.replaceChildren(table(
      rows.length > MOST ? `The first ${number(MOST)} of ${number(rows.length)} subjects: filter by name` : `${number(rows.length)} subjects`,
      [{ title: "Subject", cell: (row) => link(visible(row), "schema", row) }], rows.slice(0, MOST)));
  }
  draw();
  return [el("h1", {}, "Schemas"), el("p", {}, filter), subjects];
}

// Parts that fit are in one line, so that a field is a line of a comparison.
function laidOut(value, indent = "") {
  const line = JSON.stringify(value, null, 1).replaceAll(/\n */g, " ");
  if (value === null || typeof value !== "object" || indent.length + line.length <= LINE) return line;
  const below = `${indent}  `;
  const items = Array.isArray(value) ? value.map((one) => laidOut(one, below))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${laidOut(one, below)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${items.map((one) => below + one).join(",\n")}\n${indent}${close}`;
}

function pretty(text) {
  try {
    return laidOut(JSON.parse(text));
  } catch { /* Protobuf */ }
  return text;
}

const MOST_PAIRS = 4_000_000;

// Lines of two texts: [sign, line], by the longest common subsequence.
export function difference(before, after) {
  let [a, b] = [before.split("\n"), after.split("\n")];
  const [head, tail] = [[], []];
  while (a.length && b.length && a[0] === b[0]) { head.push([" ", a[0]]); a = a.slice(1); b = b.slice(1); }
  while (a.length && b.length && a.at(-1) === b.at(-1)) { tail.unshift([" ", a.at(-1)]); a = a.slice(0, -1); b = b.slice(0, -1); }
  const middle = [];
  let [i, j] = [0, 0];
  if (a.length * b.length <= MOST_PAIRS) {
    const width = b.length + 1;
    const longest = new Uint32Array((a.length + 1) * width);
    for (let x = a.length - 1; x >= 0; x -= 1) {
      for (let y = b.length - 1; y >= 0; y -= 1) {
        longest[x * width + y] = a[x] === b[y] ? longest[(x + 1) * width + y + 1] + 1 : Math.max(longest[(x + 1) * width + y], longest[x * width + y + 1]);
      }
    }
    while (i < a.length && j < b.length) {
      if (a[i] === b[j]) { middle.push([" ", a[i]]); i += 1; j += 1; }
      else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) { middle.push(["-", a[i]]); i += 1; }
      else { middle.push(["+", b[j]]); j += 1; }
    }
  }
  return [...head, ...middle, ...a.slice(i).map((one) => ["-", one]), ...b.slice(j).map((one) => ["+", one]), ...tail];
}

function differences(found, other) {
  const lines = difference(pretty(other.text), pretty(found.text));
  const classes = { "+": "added", "-": "removed", " ": null };
  const caption = `From version ${other.version} to version ${found.version}`;
  const isSame = lines.every(([sign]) => sign === " ");
  return [el("h2", {}, caption), isSame ? el("p", {}, "The texts are the same.") : el("pre", { class: "diff", tabindex: "0", "aria-label": caption },
    ...lines.map(([sign, line]) => el("span", { class: classes[sign] }, `${sign} ${visible(line)}`)))];
}

export async function schemaView(until, query, name, version) {
  const found = await get("subject", { name, version });
  const than = query.get("than");
  const other = than === null ? null : await get("subject", { name, version: than });
  const compared = found.versions.filter((one) => one !== found.version)
    .map((one) => (String(one) === than ? el("strong", {}, one) : el("a", { href: address(["schema", name, found.version], { than: one }), "aria-label": `compare with version ${one}` }, one)));
  const versions = found.versions.map((one) => (one === found.version ? el("strong", {}, one) : link(one, "schema", name, one)));
  return [el("h1", {}, `Schema ${visible(name)}`),
    el("p", { class: "row" }, "Versions ", ...versions),
    ...(compared.length ? [el("p", { class: "row", id: "compare" }, "Compare with ", ...compared)] : []),
    el("p", {}, `${found.format}, schema id ${found.id}, compatibility ${visible(found.compatibility ?? "unknown")}`),
    ...found.references.map((one) => el("p", {}, "uses ", link(visible(`${one.name}: version ${one.version} of ${one.subject}`), "schema", one.subject, one.version))),
    ...(other === null ? [] : differences(found, other)),
    el("pre", { tabindex: "0", "aria-label": "Text of the schema" }, visible(pretty(found.text)))];
}
