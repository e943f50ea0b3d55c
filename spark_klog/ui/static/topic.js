// A topic: partitions, settings, sizes, rate over time.

import { allowsChanges, get, listen, post } from "./api.js";
import { Rate, chart } from "./chart.js";
import { bytes, el, field, least, link, missing, number, say, sumKnown, table, trouble } from "./dom.js";

export async function topicView(until, query, name) {
  const found = await get("topic", { name });
  const rate = new Rate();
  const line = chart("Records a second", rate.series);
  const partitions = el("div");
  const groups = el("div", { id: "readers" }, el("p", { class: "soft" }, "Looking for groups…"));
  const now = el("p", { id: "rate" });

  function draw(topic) {
    if (!topic.missing.length) rate.add(topic.partitions.reduce((all, one) => all + (one.latest ?? 0), 0));
    const sum = (of) => sumKnown(topic.partitions.map(of));
    now.textContent = `${number(sum((one) => (one.latest ?? 0) - (one.earliest ?? 0)))} records, ${bytes(sum((one) => one.bytes))}, ` +
      `${number(Math.round(rate.current ?? 0))} records a second`;
    line.draw();
    partitions.replaceChildren(missing(topic.missing), table("Partitions", [
      { title: "Partition", number: true, by: (row) => row.partition, cell: (row) => row.partition },
      { title: "Leader", cell: (row) => row.leader ?? el("span", { class: "bad" }, "none") },
      { title: "Replicas", cell: (row) => row.replicas.join(", ") },
      { title: "In sync", cell: (row) => row.inSync.join(", ") },
      { title: "Earliest", number: true, by: (row) => row.earliest, cell: (row) => number(row.earliest) },
      { title: "Latest", number: true, by: (row) => row.latest, cell: (row) => number(row.latest) },
      { title: "Size", number: true, by: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
    ], topic.partitions, { name: `partitions of ${name}` }));
  }
  draw(found);
  until(listen("live/topic", { name }, { view: (topic) => { trouble.end(); draw(topic); }, trouble: trouble.say }));
  get("readers", { name }).then((rows) => groups.replaceChildren(readers(rows)),
    (error) => groups.replaceChildren(el("p", { class: "bad" }, error.message)));
  return [el("h1", {}, name), el("p", {}, link("Messages", "messages", name), el("span", { class: "soft" }, ` id ${found.id ?? "–"}`)),
    now, line.node, partitions, groups,
    found.settingsError !== null ? el("p", { class: "bad" }, `The broker does not tell the settings: ${found.settingsError}`) : table("Settings", [
      { title: "Setting", cell: (row) => (row.default ? row.name : el("strong", {}, row.name)) },
      { title: "Value", cell: (row) => row.value ?? "–" },
      { title: "From", cell: (row) => row.source },
    ], found.settings),
    ...(allowsChanges() ? [alterForm(name), produceForm(name), replayForm(name), deleteForm(name)] : [])];
}

function readers(rows) {
  if (!rows.length) return el("p", {}, "No group reads this topic.");
  return table("Groups that read it", [
    { title: "Group", by: (row) => row.group, cell: (row) => link(row.group, "group", row.group) },
    { title: "State", by: (row) => row.state, cell: (row) => row.state },
    { title: "Members", number: true, by: (row) => row.members, cell: (row) => number(row.members) },
    { title: "Lag", number: true, by: (row) => row.lag, cell: (row) => least(row.lag, row.unanswered) },
  ], rows, { name: "readers" });
}

// The name is typed, and then the button pressed.
function deleteForm(name) {
  const remove = el("button", { class: "danger", disabled: true }, "Delete the topic and all its records");
  const typed = el("input", { required: true, autocomplete: "off", on: { input: () => { remove.disabled = typed.value !== name; } } });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("topics/delete", { name, confirm: typed.value });
      addEventListener("hashchange", () => say(`topic ${name} is deleted`), { once: true });
      location.hash = "#/overview";
    } catch (error) {
      say(error.message);
    }
  };
  return el("form", { id: "delete-topic", on: { submit } }, field("To delete the topic, type its name", typed), remove);
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

function replayForm(name) {
  const reason = el("input", { placeholder: "ERROR: REASON, a regular expression" });
  const replay = async (event) => {
    event.preventDefault();
    try {
      const done = await post("dead-letters/replay", { topic: name, reason: reason.value });
      say(`sent ${number(done.records)} records to where they came from; ${number(done.others)} can't be sent`);
    } catch (error) {
      say(error.message);
    }
  };
  return el("form", { id: "replay", on: { submit: replay } }, field("Dead letters with this reason (empty: all)", reason), el("button", {}, "Replay"),
    el("p", { class: "soft" }, "Each is sent once, until brokers forget what was sent: offsets.retention.minutes (by default a week) after the last replay."));
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
