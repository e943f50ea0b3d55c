// Brokers and topics, live.

import { allowsChanges, get, listen, post } from "./api.js";
import { Rate, chart } from "./chart.js";
import { bytes, el, field, keepFilter, least, link, missing, number, say, sumKnown, table, trouble } from "./dom.js";

const MOST = 1000;

export async function overviewView(until, query) {
  let found = await get("overview");
  const rate = new Rate();
  const filter = el("input", { type: "search", id: "filter", value: query.get("filter") ?? "", on: { input: () => { keepFilter("overview", filter.value); draw(); } } });
  const internal = el("input", { type: "checkbox", on: { change: () => draw() } });
  const brokers = el("div");
  const topics = el("div");
  const total = el("p", { id: "total" });
  const notes = el("div");
  const line = chart("Records a second", rate.series);
  const rates = new Map();

  function draw() {
    const words = filter.value.toLowerCase();
    const rows = found.topics.filter((topic) => (internal.checked || !topic.internal) && topic.name.toLowerCase().includes(words));
    brokers.replaceChildren(table("Brokers", [
      { title: "Broker", cell: (row) => `${row.id}${row.controller ? " (controller)" : ""}` },
      { title: "Address", cell: (row) => `${row.host}:${row.port}` },
      { title: "Rack", cell: (row) => row.rack ?? "–" },
      { title: "Leads", number: true, cell: (row) => number(row.leads) },
      { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
    ], found.brokers));
    const focused = document.activeElement?.closest?.("tr")?.dataset.key;
    topics.replaceChildren(table(
      rows.length > MOST ? `The first ${number(MOST)} of ${number(rows.length)} topics: filter by name` : `${number(rows.length)} topics`, [
        { title: "Topic", by: (row) => row.name, cell: (row) => link(row.name, "topic", row.name) },
        { title: "Partitions", number: true, by: (row) => row.partitions, cell: (row) => `${number(row.partitions)}${row.offline ? ` (${row.offline} offline)` : ""}` },
        { title: "Records", number: true, by: (row) => row.records, cell: (row) => least(row.records, row.unanswered) },
        { title: "Records/s", number: true, by: (row) => rates.get(row.name) ?? 0, cell: (row) => number(Math.round(rates.get(row.name) ?? 0)) },
        { title: "Size", number: true, by: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
        { title: "Messages", cell: (row) => messagesLink(row.name) },
      ], rows, { key: (row) => row.name, name: "topics", most: MOST }));
    if (focused !== undefined) [...topics.querySelectorAll("tr")].find((row) => row.dataset.key === focused)?.querySelector("a")?.focus();
    const sum = (name) => sumKnown(found.topics.map((topic) => topic[name]));
    total.textContent = `${number(found.topicCount)} topics, ${number(sum("partitions"))} partitions, ${bytes(sum("bytes"))}, ` +
      `${number(Math.round(rate.current ?? 0))} records a second`;
    notes.replaceChildren(missing(found.missing));
    line.draw();
  }

  let last = null;
  function take(next) {
    const now = performance.now();
    if (last) {
      const before = new Map(last.found.topics.map((topic) => [topic.name, topic.latest]));
      rates.clear();
      for (const topic of next.topics) {
        const grown = topic.latest === null ? 0 : topic.latest - (before.get(topic.name) ?? topic.latest);
        rates.set(topic.name, Math.max(0, (1000 * grown) / (now - last.now)));
      }
    }
    last = { now, found: next };
    found = next;
    if (found.topics.every((topic) => topic.latest !== null)) rate.add(found.topics.reduce((all, topic) => all + topic.latest, 0));
    draw();
  }
  take(found);
  until(listen("live/overview", {}, { view: (next) => { trouble.end(); take(next); }, trouble: trouble.say }));
  return [el("h1", {}, "Overview"), total, notes, line.node, brokers,
    el("div", { class: "row" }, field("Filter topics (/)", filter), el("label", { class: "inline" }, internal, "Internal topics")),
    topics, ...(allowsChanges() ? [createForm()] : [])];
}

function messagesLink(name) {
  const made = link("messages", "messages", name);
  made.setAttribute("aria-label", `messages of ${name}`);
  return made;
}

function createForm() {
  const name = el("input", { required: true, name: "name" });
  const partitions = el("input", { type: "number", min: "1", value: "1" });
  const copies = el("input", { type: "number", min: "1", value: "1" });
  const create = async (event) => {
    event.preventDefault();
    try {
      await post("topics/create", { name: name.value, partitions: Number(partitions.value), replicationFactor: Number(copies.value) });
      say(`topic ${name.value} is created`);
    } catch (error) {
      say(error.message);
    }
  };
  return el("form", { id: "create-topic", on: { submit: create } }, field("New topic", name), field("Partitions", partitions),
    field("Replication factor", copies), el("button", {}, "Create"));
}
