// Spark queries by their checkpoints, loads by their audits.

import { get, listen } from "./api.js";
import { bytes, el, link, number, table, trouble } from "./dom.js";

export async function queriesView(until) {
  const list = el("div");
  function draw(found) {
    list.replaceChildren(...(found.length ? found.flatMap(query) : [el("p", { class: "soft" }, "None: start klog ui with --checkpoint DIR")]));
  }
  draw(await get("queries"));
  until(listen("live/queries", {}, { view: (found) => { trouble.end(); draw(found); }, trouble: trouble.say }));
  return [el("h1", {}, "Spark queries"), list];
}

function query(found) {
  if (found.error) return [el("h2", {}, found.checkpoint), el("p", { class: "bad" }, found.error)];
  const state = found.done >= found.planned ? "done" : "under way, or to be repeated by the next run";
  return [el("h2", {}, found.checkpoint),
    el("p", {}, `query ${found.query ?? "–"}, ${found.stateful ? "stateful" : "stateless"}; micro-batch ${found.planned} is ${state}`),
    table("Offsets", [
      { title: "Source", number: true, cell: (row) => row.source },
      { title: "Topic", cell: (row) => link(row.topic, "topic", row.topic) },
      { title: "Partition", number: true, cell: (row) => row.partition },
      { title: "Offset", number: true, cell: (row) => number(row.offset) },
      { title: "Latest", number: true, cell: (row) => number(row.latest) },
      { title: "Behind", number: true, cell: (row) => (row.latest === null ? "–" : number(Math.max(0, row.latest - row.offset))) },
    ], found.partitions)];
}

export async function loadsView() {
  const found = await get("loads");
  return [el("h1", {}, "Loads"), ...(found.length ? found.flatMap(load) : [el("p", { class: "soft" }, "None: start klog ui with --load DIR")])];
}

function load(found) {
  if (found.error) return [el("h2", {}, found.output), el("p", { class: "bad" }, found.error)];
  const missing = found.missing.map((one) => el("li", { class: "bad" }, `${one.topic}-${one.partition} ${one.what}`));
  return [el("h2", {}, found.output),
    found.unfinished ? el("p", {}, `run ${found.unfinished} failed, was killed, or is under way`) : null,
    missing.length ? el("ul", {}, ...missing) : el("p", {}, "Nothing is missing."),
    table("Runs", [
      { title: "Run", cell: (row) => row.run },
      { title: "Finished", cell: (row) => row.finished },
      { title: "Records", number: true, cell: (row) => number(row.records) },
      { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
      { title: "Files", number: true, cell: (row) => number(row.files) },
      { title: "Bad", number: true, cell: (row) => number(row.bad) },
      { title: "Lag", number: true, cell: (row) => number(row.lag) },
    ], found.runs),
    table("Partitions", [
      { title: "Topic", cell: (row) => row.topic },
      { title: "Partition", number: true, cell: (row) => row.partition },
      { title: "From", number: true, cell: (row) => number(row.from) },
      { title: "Until", number: true, cell: (row) => number(row.until) },
      { title: "Records", number: true, cell: (row) => number(row.records) },
      { title: "Gaps", cell: (row) => Object.entries(row.gaps).map(([cause, count]) => `${number(count)} ${cause}`).join(", ") || "–" },
    ], found.partitions)].filter((one) => one !== null);
}
