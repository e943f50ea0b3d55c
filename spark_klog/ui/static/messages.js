// Messages: the newest or the oldest first, a place to jump to, search, live, export; and one record.

import { address as request, get, listen } from "./api.js";
import { address, el, field, link, number, say, table, trouble, time } from "./dom.js";
import { content, detail, rowPreview } from "./record.js";

const LIVE = 50;
const RECORDS = { 100000: "newest 100,000", 1000000: "newest 1,000,000", 10000000: "newest 10,000,000" };
const FIELDS = ["key", "value", "headers"];
const FORMS = { jsonl: "JSON lines", csv: "CSV" };
const EXPORTED = { 1000: "1,000 records", 10000: "10,000 records", 100000: "100,000 records", 1000000: "1,000,000 records" };

const choice = (titles, chosen, attributes = {}) => el("select", attributes,
  ...Object.entries(titles).map(([value, title]) => el("option", { value, selected: value === chosen }, title)));

export async function messagesView(until, query, name) {
  const body = el("div", { id: "messages" });
  const note = el("p", { id: "note", role: "status" });
  const more = el("button", { type: "button", id: "older", on: { click: () => load(onward, true) } });
  const partition = el("input", { type: "number", min: "0", name: "partition", value: query.get("partition") });
  const offset = el("input", { type: "number", min: "0", name: "offset", value: query.get("offset") });
  const at = el("input", { type: "datetime-local", step: "1", name: "time", value: query.get("time") });
  const order = choice({ newest: "newest first", oldest: "oldest first" }, query.get("order"), { name: "order" });
  const live = el("button", { type: "button", "aria-pressed": "false", id: "live", on: { click: toggle } }, "Live");
  let messages = [];
  let onward = null;  // where the next page goes on: {before} or {after}
  let stopLive = null;
  let stopSearch = null;
  let again = null;  // the last request, if it failed

  const places = (value) => Object.entries(value).map((pair) => pair.join(":")).join(",");
  const shown = () => ({ name, partition: partition.value, order: order.value });
  const place = () => (offset.value !== "" ? { offset: offset.value } : at.value !== "" ? { time: Date.parse(`${at.value}Z`) } : {});

  // Each view has an address, and a step in the browser's history.
  function remember(chosen) {
    const next = address(["messages", name], { partition: partition.value, ...chosen });
    if (next !== location.hash) history.pushState(null, "", next);
  }

  function draw(caption) {
    body.replaceChildren(table(caption, [
      { title: "Time (UTC)", cell: (row) => time(row.timestamp) },
      { title: "Partition", number: true, cell: (row) => row.partition },
      { title: "Offset", number: true, cell: (row) => link(number(row.offset), "record", name, row.partition, row.offset) },
      { title: "Key", cell: (row) => rowPreview(row, "key") },
      { title: "Message", cell: (row) => detail(row) },
    ], messages, { className: "messages" }));
    more.textContent = order.value === "oldest" ? "Newer" : "Older";
    more.hidden = onward === null;
  }

  async function load(where, isMore = false) {
    end();
    try {
      const found = await get("messages", { ...shown(), count: 50, ...where });
      messages = isMore ? [...messages, ...found.messages].slice(-1000) : found.messages;
      onward = found.before ? { before: places(found.before) } : found.after ? { after: places(found.after) } : null;
      draw(`${number(messages.length)} messages, the ${order.value} first`);
      again = null;
      note.textContent = found.note ?? (messages.length ? "" : "no messages there");
    } catch (error) {
      again = () => load(where, isMore);
      if (!isMore) {
        messages = [];
        onward = null;
        draw("Messages");
      }
      note.textContent = error.message;
    }
  }

  function end() {
    stopLive?.();
    stopSearch?.();
    stopLive = stopSearch = null;
    live.setAttribute("aria-pressed", "false");
    progress.hidden = stop.hidden = true;
  }

  function toggle() {
    const starts = stopLive === null;
    end();
    remember({ live: starts });
    if (starts) follow();
  }

  function follow() {
    order.value = "newest";
    note.textContent = "";
    live.setAttribute("aria-pressed", "true");
    stopLive = listen("live/messages", { name, partition: partition.value, count: LIVE }, {
      view: (found) => {
        trouble.end();
        messages = found.messages.slice(0, LIVE);
        onward = null;
        const all = Object.values(found.end).reduce((sum, one) => sum + one, 0);
        draw(`The last ${number(messages.length)} messages, live; ${number(all)} written so far`);
      },
      trouble: trouble.say,
    });
  }

  function jump(event) {
    event.preventDefault();
    remember({ offset: offset.value, time: offset.value === "" ? at.value : "", order: order.value === "oldest" ? "oldest" : "" });
    load(place());
  }

  const chosenFields = (query.get("in") ?? FIELDS.join()).split(",");
  const text = el("input", { type: "search", id: "search", required: true, value: query.get("search") });
  const fields = FIELDS.map((one) => el("input", { type: "checkbox", value: one, checked: chosenFields.includes(one) }));
  const ignoreCase = el("input", { type: "checkbox", checked: query.has("ignoreCase") });
  const records = choice(RECORDS, query.get("records") ?? "1000000", { "aria-label": "Records to search" });
  const progress = el("progress", { max: "1", value: "0", "aria-label": "Search", hidden: true });
  const stop = el("button", { type: "button", hidden: true, on: { click: end } }, "Stop");
  const result = el("p", { id: "result", role: "status" });

  function submitSearch(event) {
    event.preventDefault();
    const chosen = fields.filter((one) => one.checked).map((one) => one.value).join(",");
    remember({ search: text.value, in: chosen === FIELDS.join() ? "" : chosen, ignoreCase: ignoreCase.checked, records: records.value });
    search();
  }

  function search() {
    end();
    const chosen = fields.filter((one) => one.checked).map((one) => one.value).join(",");
    messages = [];
    onward = null;
    progress.hidden = stop.hidden = false;
    progress.value = 0;
    note.textContent = "";
    result.textContent = "searching…";
    draw("Messages found");
    const parameters = { name, text: text.value, in: chosen, partition: partition.value, ignoreCase: ignoreCase.checked, records: records.value };
    stopSearch = listen("search", parameters, {
      progress: (one) => {
        progress.max = Math.max(1, one.total);
        progress.value = one.scanned;
        result.textContent = `${number(one.scanned)} of ${number(one.total)} records, ${number(one.found)} found`;
        draw("Messages found");
      },
      match: (row) => messages.push(row),
      done: (one) => {
        end();
        const why = { end: "", matches: "; stopped at the limit of messages found", time: "; stopped at the limit of time" }[one.reason];
        draw(`${number(one.found)} messages found`);
        result.textContent = `${number(one.found)} found in ${number(one.scanned)} records, ${(one.ms / 1000).toFixed(1)} s${why}`;
      },
      trouble: (one) => { end(); result.textContent = one.error; },
      // The stream ends with done or trouble; an error before means that the server does not answer, or refused.
      error: (one) => { if (one === undefined && stopSearch) { end(); result.textContent = "the search ended early"; } },
    });
  }

  const form = choice(FORMS, "jsonl");
  const exported = choice(EXPORTED, "10000");
  function save(event) {
    event.preventDefault();
    const parameters = { ...shown(), ...place(), format: form.value, records: exported.value };
    el("a", { href: request("export", parameters), download: `${name}.${form.value}` }).click();
  }

  const renew = () => again?.();
  document.addEventListener("recovered", renew);
  until(() => { end(); document.removeEventListener("recovered", renew); });
  if (query.get("search")) search();
  else {
    await load(place());
    if (query.has("live")) follow();
  }
  return [el("h1", {}, "Messages of ", link(name, "topic", name)),
    el("form", { id: "jump", on: { submit: jump } }, field("Partition", partition), field("Offset", offset), field("Time (UTC)", at),
      field("Order", order), el("button", {}, "Show"), live),
    el("form", { id: "searching", on: { submit: submitSearch } }, field("Search (/)", text),
      el("fieldset", {}, el("legend", {}, "In"), ...fields.map((one) => el("label", { class: "inline" }, one, one.value))),
      el("label", { class: "inline" }, ignoreCase, "Ignore case"), field("Records", records), el("button", {}, "Search"), stop, progress),
    result, note, body, more,
    el("form", { id: "export", on: { submit: save } }, field("Export", exported), field("As", form), el("button", {}, "Save"),
      el("span", { class: "soft" }, "from the place chosen above: the newest before it or the oldest after it, in the order of their offsets"))];
}

// One record, or what is nearest to an offset that has none.
export async function recordView(until, query, name, partition, offset) {
  const of = (where) => get("messages", { name, partition, ...where });
  const [from, before] = await Promise.all([
    of({ offset, order: "oldest", count: 2 }),
    offset === "0" ? { messages: [] } : of({ before: `${partition}:${offset}`, count: 1 }),
  ]);
  const isThere = from.messages[0] !== undefined && String(from.messages[0].offset) === offset;
  const row = isThere ? from.messages[0] : null;
  const step = (title, to) => (to === undefined ? null : link(`${title}: ${number(to.offset)}`, "record", name, partition, to.offset));
  const steps = [step("Previous", before.messages[0]), step("Next", from.messages[isThere ? 1 : 0])].filter(Boolean);
  const why = from.note ?? `there is no message at offset ${offset}: compaction has removed it, or it is a marker of a transaction`;
  return [el("h1", {}, "Record ", `${partition}:${offset} of `, link(name, "topic", name)),
    el("p", { class: "row" }, ...steps, el("a", { href: address(["messages", name], { partition, offset }) }, "Messages up to here")),
    ...(row === null ? [el("p", { id: "note", class: "bad" }, why)] : [
      el("p", {}, `${time(row.timestamp)} UTC, ${row.timestampType === 1 ? "log append time" : "create time"}`), ...content(row)])];
}
