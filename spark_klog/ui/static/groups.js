// Groups: members, assignment, lag over time, offsets in all places side by side.

import { allowsChanges, get, listen, post } from "./api.js";
import { Series, chart } from "./chart.js";
import { duration, el, field, keepFilter, least, link, missing, number, say, sumKnown, table, trouble } from "./dom.js";

const MOST = 1000;

export async function groupsView(until, query) {
  const { groups: found, missing: lines } = await get("groups");
  const list = el("div");
  const filter = el("input", { type: "search", value: query.get("filter") ?? "", on: { input: () => { keepFilter("groups", filter.value); draw(); } } });
  function draw() {
    const words = filter.value.toLowerCase();
    const rows = found.filter((one) => one.group.toLowerCase().includes(words));
    list.replaceChildren(table(`${number(rows.length)} of ${number(found.length)} groups`, [
      { title: "Group", by: (row) => row.group, cell: (row) => link(row.group, "group", row.group) },
      { title: "State", by: (row) => row.state, cell: (row) => row.state },
      { title: "Type", cell: (row) => row.type || "–" },
      { title: "Protocol type", cell: (row) => row.protocolType || "–" },
      { title: "Members", number: true, by: (row) => row.members, cell: (row) => number(row.members) },
      { title: "Lag", number: true, by: (row) => row.lag, cell: (row) => least(row.lag, row.unanswered) },
      { title: "Coordinator", number: true, cell: (row) => row.coordinator },
    ], rows, { name: "groups", most: MOST }));
  }
  draw();
  return [el("h1", {}, "Groups"), missing(lines), el("div", { class: "row" }, field("Filter groups (/)", filter)), list];
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
    const isWhole = !group.missing.length;
    if (isWhole) lag.add(records);
    line.draw();
    const longest = Math.max(0, ...known.map((one) => one.lagMs ?? 0));
    const behind = `${isWhole ? "" : "at least "}${number(records)} records behind` + (lost ? `, ${number(lost)} of them deleted unread` : "");
    if (group.state === "Dead" && !known.length) total.textContent = "The coordinator has no such group, and no offsets of one.";
    else if (lost === records && lost) total.textContent = `${group.state}; ${behind}`;
    else total.textContent = `${group.state}; ${behind}, the oldest unread is ${duration(longest)} old`;
    parts.replaceChildren(
      missing(group.missing),
      table("Members", [
        { title: "Member", cell: (row) => row.member },
        { title: "Client", cell: (row) => row.client },
        { title: "Host", cell: (row) => row.host },
        { title: "Assignment", cell: (row) => Object.entries(row.assignment ?? {}).map(([topic, all]) => `${topic}: ${all.join(", ")}`).join("; ") || "–" },
      ], group.members),
      table("Lag by topic", [
        { title: "Topic", by: (row) => row.topic, cell: (row) => link(row.topic, "topic", row.topic) },
        { title: "Partitions", number: true, by: (row) => row.partitions.length, cell: (row) => number(row.partitions.length) },
        ...group.places.flatMap((place) => figures(group, place, (row, name) => {
          const values = row.partitions.map((one) => one.offsets[place]?.[name]);
          return name === "lagMs" ? longestKnown(values) : sumKnown(values);
        })),
      ], byTopic(group.partitions), { name: `topics of ${name}` }),
      table("Offsets", [
        { title: "Topic", by: (row) => row.topic, cell: (row) => link(row.topic, "topic", row.topic) },
        { title: "Partition", number: true, by: (row) => row.partition, cell: (row) => row.partition },
        { title: "Latest", number: true, by: (row) => row.latest, cell: (row) => number(row.latest) },
        ...group.places.flatMap((place) => [
          { title: place, number: true, by: (row) => row.offsets[place]?.offset, cell: (row) => placed(row, place) },
          ...figures(group, place, (row, name) => row.offsets[place]?.[name]),
        ]),
      ], group.partitions, { name: `offsets of ${name}` }),
      ...Object.entries(group.errors).map(([place, text]) => el("p", { class: "bad" }, `${place}: ${text}`)),
    );
  }
  draw(found);
  until(listen("live/group", { name }, { view: (group) => { trouble.end(); draw(group); }, trouble: trouble.say }));
  return [el("h1", {}, name), total, line.node, parts, ...(allowsChanges() ? [moveForm(name, found)] : [])];
}

// The columns of a place's lag; with several places each has its name.
function figures(group, place, of) {
  const named = (title) => (group.places.length === 1 ? title : `${title} (${place})`);
  const column = (title, name, shown) => ({ title: named(title), number: true, by: (row) => of(row, name), cell: (row) => shown(of(row, name)) });
  return [column("Lag", "lag", number), column("Lost", "lost", number), column("Time", "lagMs", duration)];
}

const longestKnown = (values) => values.reduce((most, one) => (one > (most ?? -1) ? one : most), null);

function byTopic(partitions) {
  const topics = new Map();
  for (const one of partitions) topics.set(one.topic, [...(topics.get(one.topic) ?? []), one]);
  return [...topics].map(([topic, all]) => ({ topic, partitions: all }));
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
