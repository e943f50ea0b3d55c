// A topic: partitions, settings, sizes, rate over time.

import { allowsChanges, get, listen, post } from "./api.js";
import { Rate, chart } from "./chart.js";
import { bytes, el, field, link, number, say, sumKnown, table, trouble } from "./dom.js";

export async function topicView(until, name) {
  const found = await get("topic", { name });
  const rate = new Rate();
  const line = chart("Records a second", rate.series);
  const partitions = el("div");
  const now = el("p", { id: "rate" });

  function draw(topic) {
    rate.add(topic.partitions.reduce((all, one) => all + (one.latest ?? 0), 0));
    const sum = (of) => sumKnown(topic.partitions.map(of));
    now.textContent = `${number(sum((one) => (one.latest ?? 0) - (one.earliest ?? 0)))} records, ${bytes(sum((one) => one.bytes))}, ` +
      `${number(Math.round(rate.current ?? 0))} records a second`;
    line.draw();
    partitions.replaceChildren(table("Partitions", [
      { title: "Partition", number: true, cell: (row) => row.partition },
      { title: "Leader", cell: (row) => row.leader ?? el("span", { class: "bad" }, "none") },
      { title: "Replicas", cell: (row) => row.replicas.join(", ") },
      { title: "In sync", cell: (row) => row.inSync.join(", ") },
      { title: "Earliest", number: true, cell: (row) => number(row.earliest) },
      { title: "Latest", number: true, cell: (row) => number(row.latest) },
      { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
    ], topic.partitions));
  }
  draw(found);
  until(listen("live/topic", { name }, { view: (topic) => { trouble.end(); draw(topic); }, trouble: trouble.say }));
  return [el("h1", {}, name), el("p", {}, link("Messages", "messages", name), el("span", { class: "soft" }, ` id ${found.id ?? "–"}`)),
    now, line.node, partitions,
    found.settingsError !== null ? el("p", { class: "bad" }, `The broker does not tell the settings: ${found.settingsError}`) : table("Settings", [
      { title: "Setting", cell: (row) => (row.default ? row.name : el("strong", {}, row.name)) },
      { title: "Value", cell: (row) => row.value ?? "–" },
      { title: "From", cell: (row) => row.source },
    ], found.settings),
    ...(allowsChanges() ? [alterForm(name), produceForm(name)] : [])];
}

function alterForm(name) {
  const setting = el("input", { placeholder: "retention.ms" });
  const value = el("input", { placeholder: "empty: the default" });
  const partitions = el("input", { type: "number", min: "1" });
  const alter = async (event) => {
    event.preventDefault();
    const body = { name };
    if (setting.value) body.settings = { [setting.value]: value.value === "" ? null : value.value };
    if (partitions.value) body.partitions = Number(partitions.value);
    try {
      await post("topics/alter", body);
      say(`topic ${name} is altered`);
    } catch (error) {
      say(error.message);
    }
  };
  return el("form", { id: "alter-topic", on: { submit: alter } }, field("Setting", setting), field("Value", value),
    field("Number of partitions", partitions), el("button", {}, "Alter"));
}

function produceForm(name) {
  const key = el("input", {});
  const value = el("textarea", {});
  const partition = el("input", { type: "number", min: "0" });
  const produce = async (event) => {
    event.preventDefault();
    try {
      const written = await post("produce", {
        topic: name, key: key.value ? { text: key.value } : null, value: { text: value.value },
        partition: partition.value ? Number(partition.value) : null,
      });
      say(`written to partition ${written.partition} at offset ${written.offset}`);
    } catch (error) {
      say(error.message);
    }
  };
  return el("form", { id: "produce", on: { submit: produce } }, field("Key (empty: null)", key), field("Value", value),
    field("Partition (empty: by key)", partition), el("button", {}, "Produce"));
}
