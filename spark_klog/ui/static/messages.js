// Messages: the newest first, a place to jump to, search, live.

import { get, listen } from "./api.js";
import { el, field, link, number, say, table, trouble, time } from "./dom.js";
import { detail, preview } from "./record.js";

const LIVE = 50;

export async function messagesView(until, name) {
  const body = el("div", { id: "messages" });
  const more = el("button", { type: "button", id: "older", on: { click: () => load({ before: places(before) }, true) } }, "Older");
  const partition = el("input", { type: "number", min: "0", name: "partition" });
  const offset = el("input", { type: "number", min: "0", name: "offset" });
  const at = el("input", { type: "datetime-local", step: "1", name: "time" });
  const live = el("button", { type: "button", "aria-pressed": "false", id: "live", on: { click: toggle } }, "Live");
  let messages = [];
  let before = null;
  let stopLive = null;
  let stopSearch = null;
  let again = null;  // the last request, if it failed

  const places = (value) => (value === null ? null : Object.entries(value).map((pair) => pair.join(":")).join(","));

  function draw(caption) {
    body.replaceChildren(table(caption, [
      { title: "Time (UTC)", cell: (row) => time(row.timestamp) },
      { title: "Partition", number: true, cell: (row) => row.partition },
      { title: "Offset", number: true, cell: (row) => number(row.offset) },
      { title: "Key", cell: (row) => preview(row.key) },
      { title: "Message", cell: (row) => detail(row) },
    ], messages));
    more.hidden = before === null;
  }

  async function load(where, isMore = false) {
    end();
    try {
      const found = await get("messages", { name, partition: partition.value, count: 50, ...where });
      messages = isMore ? [...messages, ...found.messages].slice(-1000) : found.messages;
      before = found.before;
      draw(`${number(messages.length)} messages, the newest first`);
      again = null;
      say(found.note ?? (messages.length ? "" : "no messages there"));
    } catch (error) {
      again = () => load(where, isMore);
      say(error.message);
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
    if (!starts) return;
    live.setAttribute("aria-pressed", "true");
    stopLive = listen("live/messages", { name, partition: partition.value, count: LIVE }, {
      view: (found) => {
        trouble.end();
        messages = found.messages.slice(0, LIVE);
        before = null;
        const all = Object.values(found.end).reduce((sum, one) => sum + one, 0);
        draw(`The last ${number(messages.length)} messages, live; ${number(all)} written so far`);
      },
      trouble: trouble.say,
    });
  }

  function jump(event) {
    event.preventDefault();
    if (offset.value !== "") load({ offset: offset.value });
    else if (at.value !== "") load({ time: Date.parse(`${at.value}Z`) });
    else load({});
  }

  const text = el("input", { type: "search", id: "search", required: true });
  const fields = ["key", "value", "headers"].map((one) => el("input", { type: "checkbox", value: one, checked: true }));
  const ignoreCase = el("input", { type: "checkbox" });
  const records = el("select", { "aria-label": "Records to search" },
    ...[["100000", "newest 100,000"], ["1000000", "newest 1,000,000"], ["10000000", "newest 10,000,000"]]
      .map(([value, title]) => el("option", { value, selected: value === "1000000" }, title)));
  const progress = el("progress", { max: "1", value: "0", "aria-label": "Search", hidden: true });
  const stop = el("button", { type: "button", hidden: true, on: { click: end } }, "Stop");
  const result = el("p", { id: "result", role: "status" });

  function search(event) {
    event.preventDefault();
    end();
    const chosen = fields.filter((one) => one.checked).map((one) => one.value).join(",");
    messages = [];
    before = null;
    progress.hidden = stop.hidden = false;
    progress.value = 0;
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

  const renew = () => again?.();
  document.addEventListener("recovered", renew);
  until(() => { end(); document.removeEventListener("recovered", renew); });
  await load({});
  return [el("h1", {}, "Messages of ", link(name, "topic", name)),
    el("form", { id: "jump", on: { submit: jump } }, field("Partition", partition), field("Offset", offset), field("Time (UTC)", at),
      el("button", {}, "Show"), live),
    el("form", { id: "searching", on: { submit: search } }, field("Search (/)", text),
      el("fieldset", {}, el("legend", {}, "In"), ...fields.map((one) => el("label", { class: "inline" }, one, one.value))),
      el("label", { class: "inline" }, ignoreCase, "Ignore case"), field("Records", records), el("button", {}, "Search"), stop, progress),
    result, body, more];
}
