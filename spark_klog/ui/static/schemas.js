// Subjects of the schema registry, and the versions of one.

import { get } from "./api.js";
import { el, keepFilter, link, number, table } from "./dom.js";
import { visible } from "./record.js";

const MOST = 1000;

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

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* Protobuf */ }
  return text;
}

export async function schemaView(until, query, name, version) {
  const found = await get("subject", { name, version });
  const versions = found.versions.map((one) => (one === found.version ? el("strong", {}, one) : link(one, "schema", name, one)));
  return [el("h1", {}, `Schema ${visible(name)}`),
    el("p", { class: "row" }, "Versions ", ...versions),
    el("p", {}, `${found.format}, schema id ${found.id}, compatibility ${visible(found.compatibility ?? "unknown")}`),
    ...found.references.map((one) => el("p", {}, "uses ", link(visible(`${one.name}: version ${one.version} of ${one.subject}`), "schema", one.subject, one.version))),
    el("pre", { tabindex: "0", "aria-label": "Text of the schema" }, visible(pretty(found.text)))];
}
