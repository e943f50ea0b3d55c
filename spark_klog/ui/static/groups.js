// Groups: members, assignment, lag over time, offsets in all places side by side.

import { allowsChanges, get, listen, post } from "./api.js";
import { Series, chart } from "./chart.js";
import { duration, el, field, keepFilter, link, number, say, table, trouble } from "./dom.js";

export async function groupsView(until, query) {
  const found = await get("groups");
  const list = el("div");
  const filter = el("input", { type: "search", value: query.get("filter") ?? "", on: { input: () => { keepFilter("groups", filter.value); draw(); } } });
  function draw() {
    const words = filter.value.toLowerCase();
    const rows = found.filter((one) => one.group.toLowerCase().includes(words)).slice(0, 1000);
    list.replaceChildren(table(`${number(rows.length)} of ${number(found.length)} groups`, [
      { title: "Group", cell: (row) => link(row.group, "group", row.group) },
      { title: "State", cell: (row) => row.state },
      { title: "Type", cell: (row) => row.type || "–" },
      { title: "Protocol type", cell: (row) => row.protocolType || "–" },
      { title: "Members", number: true, cell: (row) => number(row.members) },
      { title: "Lag", number: true, cell: (row) => number(row.lag) },
      { title: "Coordinator", number: true, cell: (row) => row.coordinator },
    ], rows));
  }
  draw();
  return [el("h1", {}, "Groups"), el("div", { class: "row" }, field("Filter groups (/)", filter)), list];
}

export async function groupView(until, query, name) {
  const found = await get("group", { name });
  const lag = new Series();
  const line = chart("Lag in records", lag);
  const parts = el("div");
  const total = el("p", { id: "lag" });

  function draw(group) {
    const known = group.partitions.map((one) => one.offsets.kafka).filter(Boolean);
    const records = known.reduce((all, one) => all + (one.lag ?? 0), 0);
    const lost = known.reduce((all, one) => all + (one.lost ?? 0), 0);
    lag.add(records);
    line.draw();
    const longest = Math.max(0, ...known.map((one) => one.lagMs ?? 0));
    const behind = `${number(records)} records behind` + (lost ? `, ${number(lost)} of them deleted unread` : "");
    if (group.state === "Dead" && !known.length) total.textContent = "The coordinator has no such group, and no offsets of one.";
    else if (lost === records && lost) total.textContent = `${group.state}; ${behind}`;
    else total.textContent = `${group.state}; ${behind}, the oldest unread is ${duration(longest)} old`;
    parts.replaceChildren(
      table("Members", [
        { title: "Member", cell: (row) => row.member },
        { title: "Client", cell: (row) => row.client },
        { title: "Host", cell: (row) => row.host },
        { title: "Assignment", cell: (row) => Object.entries(row.assignment ?? {}).map(([topic, all]) => `${topic}: ${all.join(", ")}`).join("; ") || "–" },
      ], group.members),
      table("Offsets", [
        { title: "Topic", cell: (row) => link(row.topic, "topic", row.topic) },
        { title: "Partition", number: true, cell: (row) => row.partition },
        { title: "Latest", number: true, cell: (row) => number(row.latest) },
        ...group.places.flatMap((place) => [
          { title: place, number: true, cell: (row) => placed(row, place) },
          { title: "Lag", number: true, cell: (row) => number(row.offsets[place]?.lag) },
          { title: "Lost", number: true, cell: (row) => number(row.offsets[place]?.lost) },
          { title: "Time", number: true, cell: (row) => duration(row.offsets[place]?.lagMs) },
        ]),
      ], group.partitions),
      ...Object.entries(group.errors).map(([place, text]) => el("p", { class: "bad" }, `${place}: ${text}`)),
    );
  }
  draw(found);
  until(listen("live/group", { name }, { view: (group) => { trouble.end(); draw(group); }, trouble: trouble.say }));
  return [el("h1", {}, name), total, line.node, parts, ...(allowsChanges() ? [moveForm(name, found)] : [])];
}

// An offset beyond the end has no lag: the topic may have been made anew since.
function placed(row, place) {
  const offset = row.offsets[place]?.offset;
  if (offset === undefined || row.latest === null || offset <= row.latest) return number(offset);
  return [number(offset), " ", el("span", { class: "bad" }, "beyond the end")];
}

function moveForm(group, found) {
  const topic = el("input", { required: true, value: found.partitions[0]?.topic ?? "" });
  const to = el("select", {}, ...["earliest", "latest", "offset", "time", "shift"].map((one) => el("option", { value: one }, one)));
  const value = el("input", { placeholder: "offset, ms since 1970, or records" });
  const result = el("div", { id: "moves" });
  const apply = el("button", { type: "button", hidden: true, on: { click: () => move(false) } }, "Set these offsets");
  async function move(dryRun) {
    try {
      const needs = ["offset", "time", "shift"].includes(to.value);
      const body = { group, topic: topic.value, to: to.value, dryRun };
      if (needs) body.value = Number(value.value || "0");
      const done = await post("groups/move", body);
      result.replaceChildren(table(dryRun ? "Dry run: nothing is changed yet" : "Offsets are set", [
        { title: "Partition", number: true, cell: (row) => row.partition },
        { title: "Old", number: true, cell: (row) => number(row.old) },
        { title: "New", number: true, cell: (row) => number(row.new) },
        { title: "Note", cell: (row) => row.note },
      ], done.changes));
      apply.hidden = !dryRun;
      say(dryRun ? "" : "the offsets are set");
    } catch (error) {
      apply.hidden = true;
      say(error.message);
    }
  }
  // What is applied is what was shown: another target needs another dry run.
  const form = el("form", { id: "move-group", on: { submit: (event) => { event.preventDefault(); move(true); }, input: () => { apply.hidden = true; } } },
    field("Topic", topic), field("Set offsets to", to), field("Value", value), el("button", {}, "Dry run"), apply);
  return el("section", {}, el("h2", {}, "Move the group"), form, result);
}
